"""A store follows a new schedule: another day of data, another cut into passes, rows from outside."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from tiercache.data.dataset import PassDataset
from tiercache.data.repartition import split_cursor, split_source
from tiercache.planning.budgets import HostBudget, distance_bytes
from tiercache.planning.matching import check_tables
from tiercache.planning.next_use import FirstUses, count_keys
from tiercache.planning.row_offsets import RowOffsets
from tiercache.planning.schedule import Schedule, order_rule
from tiercache.planning.store_plan import ReorganizePlan
from tiercache.reporting.progress import prepare_kernels, rewrite_bars
from tiercache.rows.prefetch import initial_vectors
from tiercache.sizes import format_bytes, parse_bytes
from tiercache.store import Cursor
from tiercache.store.bulk_load import load_sorted
from tiercache.store.inspect import file_bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.data.dataset import DatasetView
    from tiercache.planning.schedule import OrderRule
    from tiercache.store import Commit, Store, Table
    from tiercache.store.scan import Chunk
    from tiercache.store.segment import Layout


def reorganize(
    store: Store,
    passes: DatasetView,
    *,
    order: Sequence[int] | str | int | None = None,
    order_seed: int | None = None,
    start: Cursor | tuple[int, int] | None = None,
    store_budget: int | str | None = None,
    progress: bool | None = None,
) -> Commit | None:
    """Put the rows of ``store`` in the order in which ``passes`` will use them, and return the commit that does so.

    Training then begins at epoch 0 of the new schedule, or where ``start`` says (next pass, samples of it that are
    trained already); where rows were imported in the midst of this schedule, or with sub-datasets that were split from
    those trained so far, it goes on where it stands. Rows,
    dense state and learning rates are as they were. Keys that the store does not have get their first row; rows of keys
    that ``passes`` does not have stay where they are, but for segments of which they are less than half: those are
    written anew, so that no segment takes more than twice the bytes that are needed of it. A store that follows this
    schedule already is left as it is, so a loop over days may call this before each training, also after a crash; with
    ``start`` only where it stands there. Returns None for a store without a commit, which any schedule may begin.

    One sweep of all keys, then one streaming read and write of the rows that move, in about 300 MiB of memory and
    temporary files of at most an eighth of what moves, or 2.5 GiB; itself one commit: killed at any moment, the store
    stands before or after.
    ``order`` and ``order_seed`` as in ``TierCache``. ``store_budget``: bytes that the store may come to take meanwhile,
    with its temporary files; it is checked, by ``reorganize_plan``, before anything is written. ``progress``: whether
    bars are shown; None: on a terminal. Unless it is False, a line on stderr says what may move.

    Raises BudgetError for a budget that may not be enough, DatasetError for sub-datasets of other tables, ValueError
    for a store that stands inside a pass where ``start`` is not given and for a ``start`` that is no place of the
    schedule, StoreFullError.
    """
    check_tables(store, passes)
    rule = order_rule(passes, order, order_seed)
    schedule = Schedule.of(passes, rule)
    commit = store.commit
    if start is None and commit is not None:
        start = commit.cursor if commit.overlaid == schedule.digest else _continued(commit, passes, rule)
    begin = Cursor(*(start or (0, 0)))
    _check_start(begin, schedule, passes)
    if commit is None:
        return None
    if commit.schedule_digest == schedule.digest and (start is None or commit.cursor == begin):
        return commit
    _ = store.commit_writer  # or raises
    if store_budget is not None:
        reorganize_plan(store, passes, order=rule).check(parse_bytes(store_budget))
    first, layout = first_uses(store, passes, schedule, begin)
    shown = sys.stderr.isatty() if progress is None else progress
    prepare_kernels()
    rows = {table: store.live_rows(table.name) for table in store.tables}
    if progress is not False:
        most = sum(count * table.row_bytes for table, count in rows.items())
        again = "" if not commit.cursor.pass_index or begin != (0, 0) else (
            f"; training begins at epoch 0 of all {schedule.num_passes:,} sub-datasets, whatever was trained before: "
            "to train new files alone, extract them into a dataset of their own"
        )  # fmt: skip
        Console(stderr=True).print(
            f"reorganizing {store.label} for {passes.path}: at most {format_bytes(most)} of rows are read, and as many "
            f"written{again}",
            markup=False,
        )
    with rewrite_bars(sum(rows.values()), shown=shown) as advance:
        return store.rewrite(
            first, schedule_digest=schedule.digest, first_rows=make_first_rows, progress=advance, layout=layout,
            start=None if start is None else begin,
        )  # fmt: skip


def import_rows(
    store: Store,
    passes: PassDataset,
    rows: Callable[[Table], Iterator[Chunk]],
    *,
    order: OrderRule,
    progress: bool | None = None,
) -> Commit:
    """Give a store without a commit its first rows, in the order in which ``passes`` will use them; returns the commit.

    ``rows(table)`` yields keys (n,) in hash order, each once, and all fields (n, width), float32. Keys of the passes
    that it lacks get their first row. Memory and temporary files as for ``reorganize``, of all rows; killed at any
    moment, the store is empty or has them. Raises ValueError for a store that is not empty, and StoreFullError.
    """
    schedule = Schedule.of(passes, order)
    first, layout = first_uses(store, passes, schedule, Cursor(0, 0))
    prepare_kernels()
    rows_used = sum(sum(first.counts(table.name).values()) for table in store.tables)
    with rewrite_bars(rows_used, shown=sys.stderr.isatty() if progress is None else progress) as advance:
        return load_sorted(
            store, rows, uses=first, layout=layout, schedule_digest=schedule.digest, first_rows=make_first_rows,
            progress=advance,
        )  # fmt: skip


def reorganize_plan(
    store: Store,
    passes: DatasetView,
    *,
    order: Sequence[int] | str | int | None = None,
    order_seed: int | None = None,
) -> ReorganizePlan:
    """Return the most that ``store`` takes on disk while it is put in the order of ``passes``; writes nothing.

    Reads the keys of all passes once, and no row. Of a store that follows them already: what it would take.
    """
    check_tables(store, passes)
    positions = RowOffsets.of(passes, store.groups)
    rule = order_rule(passes, order, order_seed)
    schedule = Schedule.of(passes, rule)
    files = 1 if schedule.repeats else 2  # an epoch that is entered in its midst needs the next one's uses, too
    return ReorganizePlan.of(
        store.groups,
        store.history,
        count_keys(positions, positions.keys_of(passes)),
        _layout(positions),
        present=file_bytes_of(store.path) if store.path is not None and store.path.is_dir() else None,
        use_bytes=files * sum(distance_bytes(positions.total_rows)),
    )


def _continued(commit: Commit, passes: DatasetView, order: OrderRule) -> Cursor | None:
    """Return where training goes on with the parts of the passes that it had; None where these are others.

    A permutation is of other sub-datasets than those.
    """
    if isinstance(order, tuple) or not isinstance(passes, PassDataset) or (source := split_source(passes)) is None:
        return None
    before = Schedule(num_passes=len(source.parts), dataset_digest=source.digest, order=order)
    if (commit.schedule_digest or commit.overlaid) != before.digest:
        return None
    return Cursor(*split_cursor(passes, commit.cursor, order=commit.settings.get("order"), order_seed=order))


def first_uses(store: Store, passes: DatasetView, schedule: Schedule, start: Cursor) -> tuple[FirstUses, Layout]:
    """Return when each key is used first from ``start`` on, and how the rows that wait for it are cut into pages."""
    positions = RowOffsets.of(passes, store.groups)
    return FirstUses(schedule, positions, positions.keys_of(passes), start=start.pass_index), _layout(positions)


def _layout(positions: RowOffsets) -> Layout:
    """Return how ranges are cut into pages: that follows from the passes alone."""
    return HostBudget.of(positions, 0, 0).layout


def _check_start(start: Cursor, schedule: Schedule, passes: DatasetView) -> None:
    """Raise ValueError where a schedule has no such place."""
    if min(start) < 0:
        raise ValueError(f"start is {tuple(start)}: passes and samples count from 0")
    samples = passes.passes[schedule.sub_dataset_of(start.pass_index)].samples
    if samples and start.sample > samples:
        raise ValueError(
            f"start is sample {start.sample:,} of pass {start.pass_index}, whose sub-dataset has {samples:,}: give a "
            "place of the new schedule"
        )


def make_first_rows(table: Table, keys: NDArray[np.int64]) -> list[NDArray[np.float32]]:
    """Return every field (n, width) of rows that begin."""
    states = (np.full((keys.size, field.width), field.initial, dtype=np.float32) for field in table.fields[1:])
    return [initial_vectors(table, keys), *states]
