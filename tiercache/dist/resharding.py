"""Resharding: rewriting the rows of a store for another number of ranks or another sharding."""

from __future__ import annotations

import shutil
import socket
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, Unpack

from tiercache.dist.budget_checks import check_store
from tiercache.dist.reorganize import first_uses, make_first_rows, place_of
from tiercache.dist.shard_writer import ShardWriter
from tiercache.errors import BudgetError, DatasetError, StateError
from tiercache.planning.budgets import distance_bytes
from tiercache.planning.schedule import Schedule
from tiercache.reporting.progress import prepare_kernels
from tiercache.sizes import format_bytes
from tiercache.store import Cursor, Store, StoreError
from tiercache.store.bulk_load import load_sorted
from tiercache.store.external_sort import hash_slices, slice_bytes
from tiercache.store.files import scratch_in
from tiercache.store.rewrite import entry_bytes, row_scratch_bytes
from tiercache.store.segment import base_layout

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.dist.shard_spec import ShardOptions
    from tiercache.dist.shard_view import ShardView
    from tiercache.planning.budgets import Budgets
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
    budgets: Budgets,
    order: OrderRule = None,
    reorganized: bool = False,
    **options: Unpack[ShardOptions],
) -> ShardWriter:
    """Rewrite the rows of a store for the ranks and the sharding of ``view``, and return it open.

    Collective. Each rank reads the rows that it owns now from the old ranks' files, which it must be able to read, and
    writes them in order of first use from the training's position. Training resumes there, with rows, optimizer state,
    learning rates and dense state unchanged. Each rank keeps its dense state, including random generators; a new rank
    gets a copy of rank 0's. Passes that were split from those trained so far continue them; with ``reorganized`` any
    other passes are begun. Older commits are dropped.

    One commit switches the store to the new ranks. If it is killed before that, the old ranks remain, and the next open
    drops partial files. If the new ranks are refused, also because training would outgrow ``budgets.store_budget``,
    partial files are dropped at once. Old files are deleted after the commit. Each rank takes about 350 MiB of memory
    and, while the old rows exist, the bytes of its new rows and of temporary files in its folder (as for
    ``Store.rewrite``). These are checked against the free bytes of its disk, and its rows against the budget of its
    store, before any row is written.

    Raises BudgetError; DatasetError for passes other than those trained, or for a position that split passes do not
    have; StateError for another number of ranks if the dense state is sharded; ValueError; and the errors of
    ``ShardWriter.open`` and ``Store.open``: on all ranks.
    """
    opened = ShardWriter.open(path, view.whole.tables, view.sharding, ranks, resharded=True, **options)
    try:
        with ExitStack() as stack:
            refused: list[Exception] = []
            plans: list[_CopyPlan] = []
            with ranks.raise_on_all("reading the old rows"):
                prepare_kernels()
                assert opened.before is not None, "it has a commit"
                old = stack.enter_context(Store.open(opened.path, mode="r", commit=opened.before.id))
                make = partial(_plan_copy, old, opened.store, view, order, reorganized=reorganized)
                _note(refused, lambda: plans.append(make()))
            _refuse(opened, ranks, "reading the old rows", refused)
            need, start, copy = plans[0]
            _check_free_bytes(need, opened, ranks, budgets.store_budget)
            with ranks.raise_on_all("writing rows for other ranks"):
                copy()
            with ranks.raise_on_all("planning the budgets"), opened.preview() as preview:
                _note(refused, partial(check_store, budgets, view, preview, order=order))
            _refuse(opened, ranks, "planning the budgets", refused)
        opened.publish(start)
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
    layout: Layout = base_layout,
    start: tuple[int, int] = (0, 0),
    schedule_digest: str = "",
) -> Commit:
    """Fill the empty ``store`` of a rank with the old rows that it owns, and return its first commit.

    The commit is at ``start`` and has the settings and the state of the same old rank (of rank 0 for a new rank). Rows
    are in the order of ``uses``, which may have keys that no old rank has. Raises the errors of ``load_sorted``, and
    ValueError if tables that now share a group had different learning rates.
    """
    source, commit = old.parts[rank if rank < len(old.parts) else 0], old.commit
    assert commit is not None, "the store has a commit"
    check_rates(commit.settings.get("learning_rates", {}), store)
    for name, record in store.checkpoints.items():
        for of_rank in old.parts:
            if name in of_rank.checkpoints:
                record.take(of_rank.checkpoints[name])
    scratch = scratch_in(store.path)
    owned = {table.name: sharding.owned_hashes(table.name, rank) for table in store.tables}
    most = {name: 0 if hashes is None else old.most_rows(name, hashes) for name, hashes in owned.items()}
    sizes = {t.name: entry_bytes(t) * most[t.name] for t in store.tables}
    part = slice_bytes(sum(sizes.values()))

    def rows(table: Table) -> Iterator[Chunk]:
        if (hashes := owned[table.name]) is not None:
            for low, high in hash_slices(max(1, -(-sizes[table.name] // part)), *hashes):
                yield from old.rows(table, (low, high), scratch=scratch)

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
        layout=layout,
    )


def check_rates(rates: Mapping[str, float], store: Store) -> None:
    """Raise ValueError if tables that share a group of ``store`` had different learning rates."""
    for group in store.groups:
        of_tables = {rates[table.name] for table in group.tables if table.name in rates}
        if len(of_tables) > 1:
            names = ", ".join(repr(table.name) for table in group.tables)
            raise ValueError(
                f"tables {names} of {store.label} share a group, and therefore a learning rate, but had "
                f"{' and '.join(map(str, sorted(of_tables)))}: set one rate for them first, or shard them separately"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """The bytes that a rank takes while it is written, besides the old rows."""

    rows: int
    """Maximum rows: the rows of the old ranks and, if an epoch was not finished, of new keys."""
    shard: int
    """Rows, keys, dense state and next uses."""
    scratch: int
    """Temporary files; see ``row_scratch_bytes``."""

    @property
    def total(self) -> int:
        """Total bytes."""
        return self.shard + self.scratch

    @classmethod
    def of(cls, old: Store, store: Store, view: ShardView, uses: FirstUses) -> Need:
        """Predict it from sizes. ``uses`` are the uses of the new shard."""
        rows, row_bytes, commit = 0, 0, old.commit
        assert commit is not None, "the store has a commit"
        of_tables = []
        for group in store.groups:
            for table in group.tables:
                hashes = view.sharding.owned_hashes(table.name, view.rank)
                mine = 0 if hashes is None else old.most_rows(table.name, hashes)
                if commit.cursor.pass_index < len(view):
                    mine += sum(uses.counts(table.name).values())
                rows, row_bytes = rows + mine, row_bytes + mine * group.row_bytes
                of_tables.append((group.index, mine, entry_bytes(table)))
        positions = sum(one.rows(table.name) for one in view.passes for table in view.tables)
        return cls(
            rows=rows,
            shard=row_bytes + _KEY_BYTES * rows + commit.state_bytes + sum(distance_bytes(positions)),
            scratch=row_scratch_bytes(of_tables),
        )


_CopyPlan: TypeAlias = "tuple[Need, Cursor, Callable[[], Commit]]"
"""The bytes that a rank takes, the position at which training resumes, and the call that writes the rank's rows."""


def _plan_copy(old: Store, store: Store, view: ShardView, order: OrderRule, *, reorganized: bool) -> _CopyPlan:
    _check_sharded(old, view.sharding.num_ranks)
    start, schedule = _start(old, view, order, reorganized=reorganized), Schedule.of(view, order)
    uses, layout = first_uses(store, view, schedule, start)
    return Need.of(old, store, view, uses), start, partial(
        copy_shard, old, store, view.sharding, view.rank,
        uses=uses, layout=layout, start=start, schedule_digest=schedule.digest,
    )  # fmt: skip


def _check_sharded(old: Store, num_ranks: int) -> None:
    """Raise StateError if each old rank has a part of the dense state, and there are other ranks now."""
    commit, before = old.commit, len(old.parts)
    assert commit is not None, "the store has a commit"
    if num_ranks != before and (names := commit.settings.get("sharded")):
        raise StateError(
            f"the state of {', '.join(names)} in {old.label} is sharded over {before} ranks, each of which stored its "
            f"part, but there are {num_ranks} now: start {before} ranks. To change their number, save the full state "
            "there (with torch.distributed.checkpoint), and begin with it and an export of the rows"
        )


def _start(old: Store, view: ShardView, order: OrderRule, *, reorganized: bool) -> Cursor:
    """Return the resume position in the schedule of ``view``. Raises DatasetError for a different schedule."""
    commit = old.commit
    assert commit is not None, "the store has a commit"
    found = place_of(commit, view, order)
    if found is not None:
        return found
    if not reorganized:
        raise DatasetError(
            f"the dataset {view.path} in this order is neither the one that {old.label} was trained with nor split "
            "from it: open the dataset it was trained with, or reorganize the store for this one"
        )
    if commit.cursor.sample:
        raise DatasetError(
            f"{old.label} is inside pass {commit.cursor.pass_index}: train to the end of a pass before its rows "
            "are put in the order of other passes"
        )
    return Cursor(0, 0)


def _note(refused: list[Exception], work: Callable[[], None]) -> None:
    """Run ``work``, and append its error to ``refused``."""
    try:
        work()
    except (BudgetError, DatasetError, StateError) as error:
        refused.append(error)


def _refuse(opened: ShardWriter, ranks: AnyCommunicator, what: str, errors: Sequence[Exception]) -> None:
    """If any rank has an error, drop the new ranks' files and raise on all ranks."""
    if any(ranks.all_gather_object(bool(errors))):
        with suppress(StoreError, OSError):  # the next open drops what remains
            opened.abandon()
        with ranks.raise_on_all(what):
            for error in errors:
                raise error


def _check_free_bytes(need: Need, opened: ShardWriter, ranks: AnyCommunicator, store_budget: int | None) -> None:
    """Raise BudgetError, with the numbers, if a rank exceeds its budget or the ranks on a disk its free bytes."""
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
            f"the ranks on the disk of {folder} need {format_bytes(needed)} while they are written, with temporary "
            f"files, rank {ranks.rank} {format_bytes(need.shard)} and {format_bytes(need.scratch)}, but "
            f"{format_bytes(free)} are free: free some space there, or pass folders on other disks as shard_dirs="
        )
    _refuse(opened, ranks, "checking free space for new ranks", [BudgetError(words)] if words else [])
