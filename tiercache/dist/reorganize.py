"""Reorganizing a store for a new schedule: a new day of data, different passes, or imported rows."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from tiercache.data.dataset import PassDataset
from tiercache.data.repartition import split_cursor, split_source
from tiercache.dist.shard_view import ShardView
from tiercache.planning.budgets import HostBudget, distance_bytes
from tiercache.planning.matching import check_tables
from tiercache.planning.next_use import FirstUses, count_keys
from tiercache.planning.row_offsets import RowOffsets
from tiercache.planning.schedule import Schedule, order_rule
from tiercache.planning.store_plan import ReorganizePlan
from tiercache.reporting.progress import prepare_kernels, rewrite_bars
from tiercache.rows.prefetch import initial_vectors
from tiercache.sizes import format_bytes, parse_bytes, printable
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

    Training then begins at epoch 0 of the new schedule, or at ``start`` (next pass, samples of it already trained). If
    rows were imported in the middle of this schedule, or its sub-datasets were split from those trained so far, it
    resumes at its position. Rows, dense state and learning rates do not change. Keys that are not in the store get
    initial rows. Rows of keys that are not in ``passes`` stay in place, unless they are less than half of their
    segment: then they are rewritten, so no segment takes more than twice the bytes it needs. A store that already
    follows this schedule (and is at ``start``, if given) is not changed, so a loop over days may call this before each
    training, also after a crash. Returns None for a store without a commit, which any schedule may begin.

    Does one sweep over all keys, then one streaming read and write of the rows that move, with about 300 MiB of memory
    and temporary files of at most an eighth of those rows, or 2.5 GiB. It is one commit: if it is killed, the store is
    either unchanged or reorganized. ``order`` and ``order_seed`` as in ``TierCache``. ``store_budget``: the maximum
    bytes that the store and its temporary files may take during this; `reorganize_plan` checks it before anything is
    written. ``progress``: True shows bars; None: only on a terminal. Unless it is False, a line on stderr shows how
    much may move.

    Raises BudgetError if the budget may be too small, DatasetError for sub-datasets of other tables, ValueError if the
    store is inside a pass and ``start`` is not given, or if ``start`` is not in the schedule, and StoreFullError.
    """
    if isinstance(passes, PassDataset):  # not one rank's share
        store.check_whole()
    check_tables(store, passes)
    rule = order_rule(passes, order, order_seed)
    schedule = Schedule.of(passes, rule)
    commit = store.commit
    if start is None and commit is not None:
        if commit.schedule_digest == schedule.digest:
            return commit
        start = place_of(commit, passes, rule)
    begin = Cursor.of(start or (0, 0))
    _check_start(begin, schedule, passes)
    if commit is None:
        return None
    if commit.schedule_digest == schedule.digest and commit.cursor == begin:
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
            f"; training begins at epoch 0 of all {schedule.num_passes:,} sub-datasets, including any trained before: "
            "to train only new files, extract them into a separate dataset"
        )  # fmt: skip
        Console(stderr=True).print(
            printable(
                f"reorganizing {store.label} for {passes.path}: at most {format_bytes(most)} of rows are read, and as "
                f"many written{again}"
            ),
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
    """Import the first rows of an empty store, in the order in which ``passes`` will use them; returns the commit.

    ``rows(table)`` yields keys (n,) in hash order, each once, and all fields (n, width), float32. Keys of the passes
    that it lacks get initial rows. Memory and temporary files as for ``reorganize``, counting all rows. If it is
    killed, the store is empty or has all rows. Raises ValueError if the store is not empty, and StoreFullError.
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
    """Return the maximum disk space that ``store`` takes while it is reordered for ``passes``; writes nothing.

    Reads the keys of all passes once, and no rows. For a store that already has this order, returns the space it would
    take.
    """
    check_tables(store, passes)
    positions = RowOffsets.of(passes, store.groups)
    rule = order_rule(passes, order, order_seed)
    schedule = Schedule.of(passes, rule)
    files = 1 if schedule.repeats else 2  # in the middle of an epoch, also the next epoch's
    return ReorganizePlan.of(
        store.groups,
        store.history,
        count_keys(positions, positions.keys_of(passes)),
        _layout(positions),
        present=file_bytes_of(store.path) if store.path is not None and store.path.is_dir() else None,
        use_bytes=files * sum(distance_bytes(positions.total_rows)),
    )


def place_of(commit: Commit, passes: DatasetView, order: OrderRule) -> Cursor | None:
    """Return the position in the schedule of ``passes`` at which training at ``commit`` resumes.

    None if they are neither the passes it was trained with nor split from them. Raises DatasetError for a position that
    split passes do not have.
    """
    trained = commit.schedule_digest or commit.overlaid
    if trained == Schedule.of(passes, order).digest:
        return commit.cursor
    whole = passes.whole if isinstance(passes, ShardView) else passes
    if isinstance(order, tuple) or not isinstance(whole, PassDataset) or (source := split_source(whole)) is None:
        return None  # a permutation (order) belongs to one set of sub-datasets
    if trained != Schedule(num_passes=len(source.parts), dataset_digest=source.digest, order=order).digest:
        return None
    return Cursor(*split_cursor(whole, commit.cursor, order=commit.settings.get("order"), order_seed=order))


def first_uses(store: Store, passes: DatasetView, schedule: Schedule, start: Cursor) -> tuple[FirstUses, Layout]:
    """Return the first use of each key from ``start`` on, and the pages into which the rows waiting for it are cut."""
    positions = RowOffsets.of(passes, store.groups)
    return FirstUses(schedule, positions, positions.keys_of(passes), start=start.pass_index), _layout(positions)


def _layout(positions: RowOffsets) -> Layout:
    """Return how ranges are cut into pages, which depends only on the passes."""
    return HostBudget.of(positions, 0, 0).layout


def _check_start(start: Cursor, schedule: Schedule, passes: DatasetView) -> None:
    """Raise ValueError if ``start`` is not in the schedule."""
    if min(start) < 0:
        raise ValueError(f"invalid start {tuple(start)}: passes and samples count from 0")
    samples = passes.passes[schedule.sub_dataset_of(start.pass_index)].samples
    if samples and start.sample > samples:
        raise ValueError(
            f"start is sample {start.sample:,} of pass {start.pass_index}, but its sub-dataset has {samples:,}: pass a "
            "position in the new schedule"
        )


def make_first_rows(table: Table, keys: NDArray[np.int64]) -> list[NDArray[np.float32]]:
    """Return every field (n, width) of initial rows."""
    states = (np.full((keys.size, field.width), field.initial, dtype=np.float32) for field in table.fields[1:])
    return [initial_vectors(table, keys), *states]
