"""Resharding: the rows of a store are written anew for another number of ranks or another sharding."""

from __future__ import annotations

import shutil
import socket
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from tiercache.data.repartition import split_cursor, split_source
from tiercache.dist.reorganize import first_uses, make_first_rows
from tiercache.dist.shard_writer import ShardWriter
from tiercache.errors import BudgetError, DatasetError
from tiercache.planning.budgets import distance_bytes
from tiercache.planning.schedule import Schedule
from tiercache.reporting.progress import prepare_kernels
from tiercache.sizes import format_bytes
from tiercache.store import Cursor, Store, StoreError
from tiercache.store.bulk_load import load_sorted
from tiercache.store.external_sort import hash_slices, slice_bytes
from tiercache.store.files import scratch_in
from tiercache.store.rewrite import entry_bytes, row_scratch_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.dist.shard_spec import ShardOptions
    from tiercache.dist.shard_view import ShardView
    from tiercache.planning.schedule import OrderRule
    from tiercache.store import Commit, Table
    from tiercache.store.compaction_plan import FirstUses
    from tiercache.store.scan import Chunk
    from tiercache.store.segment import Layout
    from tiercache.store.sharding import ShardingPlan

_KEY_BYTES = 8


def reshard(
    path: str | os.PathLike[str],
    view: ShardView,
    ranks: AnyCommunicator,
    *,
    order: OrderRule = None,
    reorganized: bool = False,
    store_budget: int | None = None,
    check: Callable[[Store], None] | None = None,
    **options: Unpack[ShardOptions],
) -> ShardWriter:
    """Write the rows of a store anew for the ranks and the sharding of ``view``, and return it open.

    Collective. Each rank reads what it owns now out of what all ranks had, which must be where it can read it, and
    writes it in the order of first use from where training stands: it goes on there, with rows, optimizer state,
    learning rates and dense state as they are. Each rank has the dense state, random generators included, that the same
    rank had, a new one that of rank 0. Passes that were split from the ones trained so far continue those; with
    ``reorganized`` any others are begun. Older commits are given up.

    ``check`` is given what the rank has and raises BudgetError if a training would outgrow it. One commit makes the
    new ranks the store's; killed before, the old ones are, and what is half-made is dropped on the next open. If they
    are refused it is dropped at once, and the store has the bytes it had. What only old ranks had is deleted after.
    Each rank takes about 350 MiB of memory and, as long as the old rows are there, the bytes of its new ones and
    temporary files in its folder (as for ``Store.rewrite``): checked against the free bytes of its disk, and its rows
    against ``store_budget``, before any row is written.

    Raises BudgetError, DatasetError for other passes than were trained, and for a place that split passes do not
    have, ValueError, and what ``ShardWriter.divide`` and ``Store.open`` raise: on all ranks.
    """
    opened = ShardWriter.divide(path, view.whole.tables, view.sharding, ranks, **options)
    try:
        with ExitStack() as stack:
            refused: list[Exception] = []
            copies: list[_Copy] = []
            with ranks.raise_on_all("reading the old rows"):
                prepare_kernels()
                assert opened.before is not None, "it has a commit"
                before = Store.open(opened.path, mode="r", commit=opened.before.id)
                old = stack.enter_context(before)
                make = partial(_Copy, old, opened.store, view, order, reorganized=reorganized)
                _note(refused, lambda: copies.append(make()))
            _refuse(opened, ranks, "reading the old rows", refused)
            copy = copies[0]
            _check_free_bytes(copy.need, opened, ranks, store_budget)
            with ranks.raise_on_all("writing rows for other ranks"):
                copy.run()
            if check is not None:
                with ranks.raise_on_all("planning the budgets"), opened.preview() as preview:
                    _note(refused, partial(check, preview))
                _refuse(opened, ranks, "planning the budgets", refused)
        opened.publish(copy.start)
    except BaseException:
        opened.close()
        raise
    return opened


def copy_shard(
    old: Store,
    store: Store,
    sharding: ShardingPlan,
    rank: int,
    *,
    uses: FirstUses | None = None,
    layout: Layout | None = None,
    start: tuple[int, int] = (0, 0),
    schedule_digest: str = "",
) -> Commit:
    """Fill the empty ``store`` of a rank with what it owns of old ranks' rows, and return its first commit.

    The commit stands at ``start`` and has the state of the same old rank, of a new one that of rank 0, and the
    settings; rows stand in the order of ``uses``, which may have keys that no old rank has. Raises what ``load_sorted``
    raises, and ValueError if tables that share a group now had different learning rates.
    """
    source, commit = old.parts[rank if rank < len(old.parts) else 0], old.commit
    assert commit is not None, "it stands at a commit"
    check_rates(commit.settings.get("learning_rates", {}), store)
    scratch = scratch_in(store.path)
    owned = {table.name: sharding.owned_hashes(table.name, rank) for table in store.tables}
    most = {name: 0 if hashes is None else old.most_rows(name, hashes) for name, hashes in owned.items()}
    sizes = {t.name: entry_bytes(t) * most[t.name] for t in store.tables}
    part = slice_bytes(sum(sizes.values()))

    def rows(table: Table) -> Iterator[Chunk]:
        if (hashes := owned[table.name]) is not None:
            for low, high in hash_slices(max(1, -(-sizes[table.name] // part)), *hashes):
                yield from old.rows(table, (low, high), scratch=scratch)

    options: dict[str, Any] = {} if layout is None else {"layout": layout}
    return load_sorted(
        store,
        rows,
        most_rows=most,
        uses=uses,
        start=start,
        schedule_digest=schedule_digest,
        first_rows=make_first_rows,
        state=source.state(),
        settings=commit.settings,
        environment=commit.environment,
        **options,
    )


def check_rates(rates: Mapping[str, float], store: Store) -> None:
    """Raise ValueError if tables that share a group of ``store`` had several learning rates."""
    for group in store.groups:
        of_tables = {rates[table.name] for table in group.tables if table.name in rates}
        if len(of_tables) > 1:
            names = ", ".join(repr(table.name) for table in group.tables)
            raise ValueError(
                f"tables {names} of {store.label} share a group, and so a learning rate, and had "
                f"{' and '.join(map(str, sorted(of_tables)))}: set one rate for them before, or shard them apart"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """The bytes that a rank takes while it is made, besides the old rows."""

    rows: int
    """At most: of what old ranks have, and, where an epoch was not trained to its end, of keys that are new."""
    shard: int
    """Rows, keys, dense state and next uses."""
    scratch: int
    """Temporary files: see ``row_scratch_bytes``."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.shard + self.scratch

    @classmethod
    def of(cls, old: Store, store: Store, view: ShardView, uses: FirstUses, cursor: Cursor, state_bytes: int) -> Need:
        """Predict it from sizes. ``uses`` are those of the new share."""
        rows = row_bytes = 0
        of_tables = []
        for group in store.groups:
            for table in group.tables:
                hashes = view.sharding.owned_hashes(table.name, view.rank)
                mine = 0 if hashes is None else old.most_rows(table.name, hashes)
                if cursor.pass_index < len(view):
                    mine += sum(uses.counts(table.name).values())
                rows, row_bytes = rows + mine, row_bytes + mine * group.row_bytes
                of_tables.append((group.index, mine, entry_bytes(table)))
        positions = sum(one.rows(table.name) for one in view.passes for table in view.tables)
        return cls(
            rows=rows,
            shard=row_bytes + _KEY_BYTES * rows + state_bytes + sum(distance_bytes(positions)),
            scratch=row_scratch_bytes(of_tables),
        )


class _Copy:
    """The work of one rank: decided when it is made, done by ``run``."""

    def __init__(self, old: Store, store: Store, view: ShardView, order: OrderRule, *, reorganized: bool) -> None:
        self._old, self._store, self._view = old, store, view
        self.start = _start(old, view, order, reorganized=reorganized)
        schedule = Schedule.of(view, order)
        self._digest = schedule.digest
        self._uses, self._layout = first_uses(store, view, schedule, self.start)
        commit = old.commit
        assert commit is not None, "it stands at a commit"
        self.need = Need.of(old, store, view, self._uses, commit.cursor, commit.state_bytes)

    def run(self) -> None:
        """Write the rows."""
        copy_shard(
            self._old, self._store, self._view.sharding, self._view.rank,
            uses=self._uses, layout=self._layout, start=self.start, schedule_digest=self._digest,
        )  # fmt: skip


def place_of(commit: Commit, view: ShardView, order: OrderRule) -> Cursor | None:
    """Return where a training that stands at ``commit`` goes on in the schedule of ``view``.

    None if its passes are others: neither the ones that it was trained with, nor split from these. Raises DatasetError
    for a place that split passes do not have.
    """

    def trained(num_passes: int, passes: str) -> bool:
        schedule = Schedule(num_passes=num_passes, dataset_digest=passes, order=order)
        return schedule.digest == (commit.schedule_digest or commit.overlaid)

    if trained(len(view), view.whole.digest):
        return commit.cursor
    source = split_source(view.whole)
    if source is None or isinstance(order, tuple) or not trained(len(source.parts), source.digest):
        return None
    samples = commit.settings.get("order")
    return Cursor(*split_cursor(view.whole, commit.cursor, order=samples, order_seed=order))


def _start(old: Store, view: ShardView, order: OrderRule, *, reorganized: bool) -> Cursor:
    """Return where training goes on in the schedule of ``view``. Raises DatasetError where that is another one."""
    commit = old.commit
    assert commit is not None, "it stands at a commit"
    found = place_of(commit, view, order)
    if found is not None:
        return found
    if not reorganized:
        raise DatasetError(
            f"the dataset {view.path} in this order is not the one that {old.label} was trained with, nor split from "
            "it: open the dataset it was trained with, or have the store reorganized for this one"
        )
    if commit.cursor.sample:
        raise DatasetError(
            f"{old.label} stands inside pass {commit.cursor.pass_index}: train to the end of a pass before its rows "
            "are put in the order of other passes"
        )
    return Cursor(0, 0)


def _note(refused: list[Exception], work: Callable[[], None]) -> None:
    """Work, and note what is refused."""
    try:
        work()
    except (BudgetError, DatasetError) as error:
        refused.append(error)


def _refuse(opened: ShardWriter, ranks: AnyCommunicator, what: str, errors: Sequence[Exception]) -> None:
    """Raise on all ranks if any has an error, when what was divided is dropped again."""
    if any(ranks.all_gather_object(bool(errors))):
        with suppress(StoreError, OSError):  # what could not be dropped goes with the next opening
            opened.abandon()
        with ranks.raise_on_all(what):
            for error in errors:
                raise error


def _check_free_bytes(need: Need, opened: ShardWriter, ranks: AnyCommunicator, store_budget: int | None) -> None:
    """Raise BudgetError, with the numbers, if a rank exceeds its budget, or those of a disk its free bytes."""
    folder = opened.store.path
    assert folder is not None, "ranks have folders"
    disk = f"{socket.gethostname()}:{folder.stat().st_dev}"
    needs = ranks.all_gather_object([disk, need.total, shutil.disk_usage(folder).free])
    words = ""
    needed, free = sum(total for at, total, _ in needs if at == disk), min(free for at, _, free in needs if at == disk)
    if store_budget is not None and need.shard > store_budget:
        words = (
            f"store_budget is {format_bytes(store_budget)}, but rank {ranks.rank} would have "
            f"{format_bytes(need.shard)} of {need.rows:,} rows: raise store_budget or start more ranks"
        )
    elif needed > free:
        words = (
            f"the ranks on the disk of {folder} need {format_bytes(needed)} while they are made, with temporary "
            f"files, rank {ranks.rank} {format_bytes(need.shard)} and {format_bytes(need.scratch)}, and "
            f"{format_bytes(free)} are free: free space there, or give folders on other disks with shard_dirs="
        )
    _refuse(opened, ranks, "finding room for new ranks", [BudgetError(words)] if words else [])
