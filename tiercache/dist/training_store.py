"""TrainingStore: the store that a cache trains, or this rank's part of it."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack

from tiercache.data.dataset import PassDataset
from tiercache.dist.budget_checks import check_plan
from tiercache.dist.consistency import check_same
from tiercache.dist.reorganize import import_rows, place_of, reorganize
from tiercache.dist.resharding import reshard
from tiercache.dist.rolling_back import roll_back
from tiercache.dist.shard_spec import folders_of
from tiercache.dist.shard_view import ShardView
from tiercache.dist.shard_writer import ShardWriter
from tiercache.errors import StateError
from tiercache.planning.matching import check_tables
from tiercache.planning.schedule import Schedule
from tiercache.planning.sharding_planner import sharding_of
from tiercache.planning.sharding_rules import sharding_facts
from tiercache.store import Store, StoreMissingError
from tiercache.store.bulk_load import load_sorted
from tiercache.store.checkpoint import moved_with
from tiercache.store.files import local_path, scratch_in
from tiercache.store.opening import newest_record, store_path
from tiercache.store.sharding import ShardingPlan
from tiercache.values.named_rows import both_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tiercache.data.dataset import DatasetView
    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.dist.shard_spec import ShardOptions
    from tiercache.planning.budgets import Budgets
    from tiercache.planning.schedule import OrderRule
    from tiercache.planning.sharding_rules import ShardingRules
    from tiercache.store import Table
    from tiercache.store.scan import Chunk

_PLANNING = "planning the budgets"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreOptions:
    """Options for opening the store of a cache; the same on all ranks."""

    sharding: ShardingPlan | ShardingRules | str | Mapping[str, str]
    shard_dirs: Sequence[str | os.PathLike[str]] | None
    engine: str | None
    retention: int | None
    reorganize: bool
    order: OrderRule
    at: int | str | None = None


def at_stored_paths(passes: PassDataset, stored: Iterable[Table]) -> PassDataset:
    """Return passes with tables that find their checkpoints where ``stored`` finds the same ones."""
    schema, moved = passes.schema, moved_with(passes.schema.tables, stored)
    if [one.to_record() for one in moved] == [one.to_record() for one in schema.tables]:
        return passes
    return PassDataset(passes.path, replace(passes.manifest, schema=replace(schema, tables=moved)))


class TrainingStore:
    """The store of one cache. ``choose`` decides what is trained and writes nothing; ``open`` opens the store."""

    def __init__(self, place: str | os.PathLike[str] | Store | None, passes: PassDataset, ranks: AnyCommunicator,
                 options: StoreOptions) -> None:  # fmt: skip
        self._store_given = place if isinstance(place, Store) else None
        self._path = place.path if isinstance(place, Store) else None if place is None else store_path(place)
        self.passes = at_stored_paths(passes, self._stored_tables())
        """The passes, with tables that find their checkpoints where the store does."""
        self._ranks, self._options = ranks, options
        self.sharding: ShardingPlan | None = None
        """The sharding of several ranks; None for one rank."""
        self._store: Store | None = None
        """The result of ``open``."""
        self._made: os.stat_result | None = None
        """The folder of a plain store that was created here."""
        self._filled = False
        """True if its first rows come from the model."""
        self._shards: ShardWriter | None = None
        self._becomes_one = False
        """True if ``open`` merges the rows of several ranks for one rank."""

    @property
    def facts(self) -> dict[str, Any]:
        """Return the values and folders that must be the same on all ranks, by the names users give them.

        Raises ValueError for an invalid sharding or folder.
        """
        options = self._options
        facts = {
            "the kind of store": "a path" if self._store_given is None else "a Store",
            "sharding": sharding_facts(options.sharding),
            "engine": options.engine,
            "retention": options.retention,
            "reorganize": options.reorganize,
            "order": options.order,
            "at": options.at,
        }
        if self._path is None:
            return facts
        folders = [local_path(folder, "the folder of a rank") for folder in options.shard_dirs or ()]
        return facts | {"the store": self._path} | {f"shard_dirs[{i}]": folder for i, folder in enumerate(folders)}

    def _stored_tables(self) -> tuple[Table, ...]:
        """Return the tables of the store; none without a commit."""
        if self._store_given is not None:
            return self._store_given.tables
        record = None if self._path is None else newest_record(self._path)
        return () if record is None else record.tables

    def choose(self, *, number_bytes: int) -> DatasetView:
        """Return the passes as this rank trains them. Collective.

        number_bytes: bytes of a number on the wire. Raises ValueError if the sharding or the store is invalid.
        """
        requested = self._options.sharding
        if self._store_given is None and self._path is None:  # training without a store
            return self.passes
        with self._ranks.raise_on_all("looking for the store"):
            self._check_given_store()
            is_sharded = self._ranks.size > 1
            if not is_sharded and self._store_given is None:
                folders_of(1, self._place, self._options.shard_dirs)  # for its errors
                found = newest_record(self._place)
                self._becomes_one = found is not None and len(found.ranks) > 1
        given = self._store_given
        if given is not None and given.ranks:
            assert given.commit is not None, "a store of several ranks has a commit"
            check_same(self._ranks, {"the commit of the store": given.commit.id})
            self.sharding = given.commit.sharding
        elif is_sharded:
            self.sharding = self._choose_sharding(number_bytes)
        else:
            if self._store_given is not None:
                check_tables(self._store_given, self.passes)
            if requested != "auto":  # one rank has everything, but an invalid sharding is an error
                sharding_of(self.passes, 1, requested, number_bytes=number_bytes)
        return self.view(self.passes)

    def _choose_sharding(self, number_bytes: int) -> ShardingPlan:
        """Return the requested sharding; "auto" uses the store's if the number of ranks matches. Collective."""
        requested, ranks = self._options.sharding, self._ranks
        chosen: dict[str, Any] | None = None
        with ranks.raise_on_all("sharding the tables"):
            if ranks.rank == 0:  # it reads key counts, and its float results may differ between CPUs
                found = newest_record(self._place) if requested == "auto" else None
                if found is not None and found.sharding is not None and len(found.ranks) == ranks.size:
                    chosen = found.sharding.to_record()
                else:
                    chosen = sharding_of(self.passes, ranks.size, requested, number_bytes=number_bytes).to_record()
        return ShardingPlan.from_record(ranks.all_gather_object(chosen)[0])

    def _check_given_store(self) -> None:
        """Raise ValueError if a store opened by the caller does not match this run."""
        given, options, ranks = self._store_given, self._options, self._ranks.size
        if given is None:
            return
        if options.engine is not None or options.retention is not None or options.shard_dirs is not None:
            raise ValueError(
                "engine, retention and shard_dirs apply to a store that the cache opens: pass its path, or open the "
                "Store with them"
            )
        if given.ranks:
            if len(given.ranks) != ranks or options.sharding != "auto":
                raise ValueError(
                    f"{given.label} was opened with the rows of {len(given.ranks)} ranks: use the same number "
                    f"of ranks without sharding=, or pass its path to {ranks}"
                )
        elif ranks > 1:
            raise ValueError(
                f"{given.label} was opened by one process, but there are {ranks} ranks: pass its path, which they open"
            )

    @property
    def _place(self) -> Path:
        """The folder of the store."""
        assert self._path is not None, "only a Store given by the caller has no folder"
        return self._path

    def view(self, passes: PassDataset) -> DatasetView:
        """Return this rank's view of passes: all, or its share. Raises ValueError if they have other tables."""
        return passes if self.sharding is None else ShardView(passes, self.sharding, self._ranks.rank)

    def _fill(self, rows: Callable[[Table], Iterator[Chunk]], budgets: Budgets, *, progress: bool | None) -> None:
        """Import the first rows of a store without a commit, in pass order if it stays plain. Collective."""
        with self._ranks.raise_on_all("importing the rows of the model"):
            if self._ranks.rank == 0 and not self._has_commit():
                with ExitStack() as stack:
                    store = self._store_given or stack.enter_context(self._plain())
                    if self.sharding is not None:
                        load_sorted(store, rows)
                    else:
                        self._check_order(store, budgets)
                        import_rows(store, self.passes, rows, order=self._options.order, progress=progress)
                self._filled = True
        self._filled = any(self._ranks.all_gather_object(self._filled))

    def _plain(self) -> Store:
        """Open or create the plain store."""
        options, is_new = self._options, not self._place.exists()
        store = Store.open(self._place, tables=self.passes.tables, engine=options.engine, retention=options.retention)
        if is_new:
            self._made = self._place.stat()
        return store

    def _has_commit(self) -> bool:
        if self._store_given is not None:
            return self._store_given.commit is not None or self._store_given.mode == "r"
        with suppress(StoreMissingError), Store.open(self._place, mode="r") as store:
            return store.commit is not None
        return False

    def open(
        self,
        source: DatasetView,
        budgets: Budgets,
        *,
        first: Callable[[Table], Iterator[Chunk]] | None = None,
        progress: bool | None,
    ) -> Store:
        """Open or create the store; if requested, its rows are put in the order of ``source``.

        ``first``: yields by table the rows, in hash order, for a store without a commit. Rows of other ranks or of
        another sharding are rewritten. Collective.
        """
        if self._options.at is not None:
            self._go_back(self._options.at)
        if first is not None:
            self._fill(first, budgets, progress=progress)
        options = self._options
        if self._store_given is not None and self._store_given.ranks:
            self._store = self._store_given.ranks[self._ranks.rank]
            return self._store
        if self.sharding is not None:
            assert isinstance(source, ShardView)
            self._shards = self._open_shards(source, budgets)
            self._store = self._shards.store
            return self._store
        if self._becomes_one:
            self._open_shards(ShardView(self.passes, ShardingPlan.of_one(self.passes.tables), 0), budgets).close()
        if self._store_given is not None:
            store = self._store = self._store_given
        else:
            store = self._store = self._plain()
        if options.reorganize and store.mode == "a":
            if store.commit is not None:
                self._check_order(store, budgets)
            reorganize(store, self.passes, order=options.order, store_budget=budgets.store_budget, progress=progress)
        return store

    def _go_back(self, at: int | str) -> None:
        """Roll the store back to a commit. Collective."""
        with self._ranks.raise_on_all(f"rolling back to commit {at!r}"):
            if self._ranks.rank == 0:
                with ExitStack() as stack:
                    try:
                        store = self._store_given or stack.enter_context(Store.open(self._place))
                    except StoreMissingError:
                        raise StoreMissingError(
                            f"no store at {self._place}, and at={at!r} is a commit of one: check the path, or leave "
                            "out at= to train a new store"
                        ) from None
                    roll_back(store, at, self.passes, self.sharding)

    def _open_shards(self, shard_view: ShardView, budgets: Budgets) -> ShardWriter:
        options = self._options
        return open_own_shard(
            self._place, shard_view, self._ranks, engine=options.engine, shard_dirs=options.shard_dirs,
            retention=options.retention, reorganized=options.reorganize or self._filled, order=options.order,
            budgets=budgets,
        )  # fmt: skip

    def _check_order(self, store: Store, budgets: Budgets) -> None:
        """Raise BudgetError if rows would move for a run that exceeds the budgets."""
        commit, order, passes = store.commit, self._options.order, self.passes
        schedule = Schedule.of(passes, order)
        if commit is None or commit.schedule_digest != schedule.digest:
            check_plan(
                budgets, passes, order=order, folder=scratch_in(store.path), commits=store.retention,
                state_bytes=0 if commit is None else commit.state_bytes, start=0,
            )  # fmt: skip

    def discard_new(self) -> None:
        """Remove a plain store that was created here and not trained: its budgets were refused."""
        if self._made is not None and (self._filled or self._store is None or self._store.commit is None):
            with suppress(OSError):
                if os.path.samestat(self._made, self._place.stat()):  # still locked: no other process writes to it
                    shutil.rmtree(self._place, ignore_errors=True)
            if self._store is not None:
                self._store.close()

    def named_commit(self) -> dict[str, object]:
        """Return an identity of the current rows, ``rows``; for messages also the folder's name and the commit.

        It is the same on all ranks, and stays the same through commits that change neither rows nor dense state.
        """
        commit = None if self._store is None else self._store.commit
        id_, rows = (-1, "") if commit is None else (commit.made_of, commit.rows_digest)
        return {"store": "" if self._path is None else self._path.name, "commit": id_, "rows": rows}

    def check_named(self, state: Mapping[str, object]) -> None:
        """Raise StateError unless ``state`` names the current rows, as ``named_commit`` does."""
        now = self.named_commit()
        if state.get("rows") != now["rows"]:
            at, own = both_named(state, now)
            raise StateError(
                f"the checkpoint was made at {at}, but the cache is at {own}: roll the store back to it, or load the "
                "checkpoint of these rows"
            )

    @contextmanager
    def committed(self) -> Iterator[Store]:
        """Yield the whole store at the newest commit of all ranks, for reading. Not collective."""
        if self._store_given is not None and self._store_given.ranks:
            yield self._store_given
            return
        with Store.open(self._place, mode="r") as store:
            yield store

    @property
    def is_sharded(self) -> bool:
        """True if commits are made by all ranks: each must be published before the next is prepared."""
        return self._shards is not None

    def meet(self) -> None:
        """Bring all ranks to one commit, after a run ended between their steps. Collective."""
        if self._shards is not None:
            self._shards.meet()

    def publish(self) -> None:
        """Publish the commit that this rank has prepared; call it when all have prepared the same one. Collective."""
        if self._shards is not None and self._shards.ahead:
            self._shards.publish()

    def close(self) -> None:
        """Close the store if it was opened here. Not collective."""
        if self._shards is not None:
            self._shards.close()
        if self._store is not None and self._store_given is None:
            self._store.close()


def open_own_shard(
    path: str | os.PathLike[str],
    shard_view: ShardView,
    ranks: AnyCommunicator,
    *,
    reorganized: bool,
    order: OrderRule,
    budgets: Budgets,
    **options: Unpack[ShardOptions],
) -> ShardWriter:
    """Open or create the store on all ranks; rows of other ranks or another sharding are moved.

    Passes that were split from those trained so far resume at their position. Rows are not rewritten for a run that
    exceeds ``budgets``, except for what only `check_store` finds.

    Raises the errors of `ShardWriter.open` and `reshard`, and BudgetError.
    """
    found: list[Any] | None = None
    with ranks.raise_on_all("reading the newest commit of the store"):
        if ranks.rank == 0 and (record := newest_record(store_path(path))) is not None:
            is_one = len(record.ranks) == shard_view.sharding.num_ranks == 1
            found = [is_one or record.sharding == shard_view.sharding, record.retention]
    found = ranks.all_gather_object(found)[0]
    if found is not None and not found[0]:
        with ranks.raise_on_all(_PLANNING):
            commits = options.get("retention") or found[1]
            check_plan(budgets, shard_view, order=order, folder=store_path(path), commits=commits)
        return reshard(path, shard_view, ranks, budgets=budgets, order=order, reorganized=reorganized, **options)
    opened = ShardWriter.open(path, shard_view.whole.tables, shard_view.sharding, ranks, **options)
    store = opened.store
    if (commit := store.commit) is not None:
        try:
            moves = False
            with ranks.raise_on_all(_PLANNING):
                start = place_of(commit, shard_view, order)
                if start is not None or reorganized:
                    moves = commit.schedule_digest != Schedule.of(shard_view, order).digest
                if moves:
                    check_plan(
                        budgets, shard_view, order=order, folder=scratch_in(store.path), commits=store.retention,
                        state_bytes=commit.state_bytes, start=0 if start is None else start.pass_index,
                    )  # fmt: skip
            with ranks.raise_on_all("putting rows into another order"):
                if moves:
                    reorganize(
                        store, shard_view, order=order, start=start, store_budget=budgets.store_budget, progress=False
                    )  # fmt: skip
            if moves:
                opened.publish()
        except BaseException:
            opened.close()
            raise
    return opened
