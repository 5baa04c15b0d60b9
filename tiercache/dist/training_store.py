"""TrainingStore: what a cache trains, a plain store or this rank's shard of one."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.dist.budget_checks import check_plan
from tiercache.dist.consistency import check_same
from tiercache.dist.reorganize import import_rows, reorganize
from tiercache.dist.shard_opening import choose_sharding, open_for_share
from tiercache.dist.shard_view import ShardView
from tiercache.planning.matching import check_tables
from tiercache.planning.schedule import Schedule
from tiercache.planning.sharding_planner import sharding_of
from tiercache.planning.sharding_rules import asked_words
from tiercache.store import Store, StoreMissingError
from tiercache.store.bulk_load import load_sorted
from tiercache.store.files import scratch_in
from tiercache.store.opening import store_path
from tiercache.store.shards.shard_manifest import Manifest
from tiercache.store.shards.sharded_store import Shards
from tiercache.store.shards.sharding import ShardingPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tiercache.data.dataset import DatasetView, PassDataset
    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.dist.shard_writer import ShardWriter
    from tiercache.planning.budgets import Budgets
    from tiercache.planning.schedule import OrderRule
    from tiercache.planning.sharding_rules import ShardingRules
    from tiercache.store import Table
    from tiercache.store.scan import Chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreOptions:
    """How a cache opens its store: all of it the same on all ranks."""

    sharding: ShardingPlan | ShardingRules | str | Mapping[str, str]
    shard_dirs: Sequence[str | os.PathLike[str]] | None
    engine: str | None
    retention: int | None
    reorganize: bool
    order: OrderRule

    @property
    def facts(self) -> dict[str, Any]:
        """Return them by the names that users give them. Raises ValueError for a sharding that makes no sense."""
        return {
            "sharding": asked_words(self.sharding),
            "engine": self.engine,
            "retention": self.retention,
            "reorganize": self.reorganize,
            "order": self.order,
        }


class TrainingStore:
    """The store of one cache. ``choose`` says what is trained, and writes nothing; ``open`` opens the store for it."""

    def __init__(self, place: str | os.PathLike[str] | Store | None, passes: PassDataset, ranks: AnyCommunicator,
                 options: StoreOptions) -> None:  # fmt: skip
        self._given = place if isinstance(place, Store) else None
        self._path = place.path if isinstance(place, Store) else None if place is None else store_path(place)
        self._passes, self._ranks, self._options = passes, ranks, options
        self.sharding: ShardingPlan | None = None
        """Where tables stand in shards; None in a plain store."""
        self._store: Store | None = None
        """What ``open`` returned."""
        self._made: os.stat_result | None = None
        """The folder of a plain store that was made here."""
        self._filled = False
        """Whether it has its first rows from the model."""
        self._shards: ShardWriter | None = None
        self._unites = False
        """Whether ``open`` makes a plain store of shards."""

    @property
    def facts(self) -> dict[str, Any]:
        """Return what must be the same on all ranks. Raises ValueError for a sharding that makes no sense."""
        return {"the kind of store": "a path" if self._given is None else "a Store", **self._options.facts}

    @property
    def places(self) -> dict[str, Path]:
        """Return the folders that must be the same on all ranks."""
        shards = {f"shard_dirs[{i}]": Path(folder) for i, folder in enumerate(self._options.shard_dirs or ())}
        return shards if self._path is None else {"the store": self._path, **shards}

    def choose(self, *, number_bytes: int) -> DatasetView:
        """Return the passes as this rank trains them. Collective.

        number_bytes: of a number on the wire. Raises ValueError for a sharding or a store that make no sense.
        """
        asked = self._options.sharding
        if self._given is None and self._path is None:  # there is no store
            return self._passes
        with self._ranks.raise_on_all("looking for the store"):
            self._check_given()
            is_sharded = self._ranks.size > 1 or self._options.shard_dirs is not None
            found = Manifest.read(self._place) if self._given is None else None
            if not is_sharded and found is not None:
                is_sharded = found.num_ranks == 1 and not found.is_plain
                self._unites = found.num_ranks > 1 and found.newest is not None
        if isinstance(self._given, Shards):
            check_same(self._ranks, {"the commit of the store": self._given.commit.id})
            self.sharding = self._given.sharding
        elif is_sharded:
            self.sharding = choose_sharding(
                self._place, self._passes, self._ranks, asked, number_bytes=number_bytes
            )  # fmt: skip
        else:
            if self._given is not None:
                check_tables(self._given, self._passes)
            if asked != "auto":  # one rank has everything, but a mistake is one
                sharding_of(self._passes, 1, asked, number_bytes=number_bytes)
        return self.view(self._passes)

    def _check_given(self) -> None:
        """Raise ValueError where a store was opened by the caller, and not for this."""
        given, options, ranks = self._given, self._options, self._ranks.size
        if given is None:
            return
        if options.engine is not None or options.retention is not None or options.shard_dirs is not None:
            raise ValueError(
                "engine, retention and shard_dirs are of a store that the cache opens: give its path, or open the "
                "Store with them"
            )
        if isinstance(given, Shards):
            if given.sharding.num_ranks != ranks or options.sharding != "auto":
                raise ValueError(
                    f"{given.label} was opened with shards for {given.sharding.num_ranks} ranks: give it to as many "
                    f"ranks without sharding=, or give its path to {ranks}"
                )
        elif ranks > 1:
            raise ValueError(
                f"{given.label} was opened by one process and is given to {ranks} ranks: give its path, which they open"
            )

    @property
    def _place(self) -> Path:
        """The folder of the store."""
        assert self._path is not None, "only stores that were given are in no folder"
        return self._path

    def view(self, passes: PassDataset) -> DatasetView:
        """Return what this rank trains of passes: all, or its share. Raises ValueError where the tables are others."""
        return passes if self.sharding is None else ShardView(passes, self.sharding, self._ranks.rank)

    def _fill(self, rows: Callable[[Table], Iterator[Chunk]], budgets: Budgets, *, progress: bool | None) -> None:
        """Give a store without a commit its first rows, in the order of the passes where it stays plain. Collective."""
        with self._ranks.raise_on_all("importing the rows of the model"):
            if self._ranks.rank == 0 and not self._has_commit():
                with ExitStack() as stack:
                    store = self._given or stack.enter_context(self._plain())
                    if self.sharding is not None:
                        load_sorted(store, rows)
                    else:
                        self._check_order(store, budgets)
                        import_rows(store, self._passes, rows, order=self._options.order, progress=progress)
                self._filled = True
        self._filled = any(self._ranks.all_gather_object(self._filled))

    def _plain(self) -> Store:
        """Open the plain store, or make it."""
        options, is_new = self._options, not self._place.exists()
        store = Store.open(self._place, tables=self._passes.tables, engine=options.engine, retention=options.retention)
        if is_new:
            self._made = self._place.stat()
        return store

    def _has_commit(self) -> bool:
        if self._given is not None:
            return self._given.commit is not None or self._given.mode == "r"
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
        """Open the store, or make it; its rows stand in the order of ``source`` then, where that is asked for.

        ``first``: yields by table the rows, in hash order, of a store that has no commit. Rows of other ranks, or of
        another sharding, are written anew. Collective.
        """
        if first is not None:
            self._fill(first, budgets, progress=progress)
        options = self._options
        if isinstance(self._given, Shards):
            self._store = self._given.shards[self._ranks.rank]
            return self._store
        if self.sharding is not None:
            assert isinstance(source, ShardView)
            self._shards = self._open_shards(source, budgets)
            self._store = self._shards.store
            return self._store
        if self._unites:
            self._open_shards(ShardView(self._passes, ShardingPlan.of_one(self._passes.tables), 0), budgets).close()
        if self._given is not None:
            store = self._store = self._given
        else:
            store = self._store = self._plain()
        if options.reorganize and store.mode == "a":
            if store.commit is not None:
                self._check_order(store, budgets)
            reorganize(store, self._passes, order=options.order, store_budget=budgets.store_budget, progress=progress)
        return store

    def _open_shards(self, share: ShardView, budgets: Budgets) -> ShardWriter:
        options = self._options
        return open_for_share(
            self._place, share, self._ranks, engine=options.engine, shard_dirs=options.shard_dirs,
            retention=options.retention, reorganized=options.reorganize or self._filled, order=options.order,
            budgets=budgets,
            plain=self._unites,
        )  # fmt: skip

    def _check_order(self, store: Store, budgets: Budgets) -> None:
        """Raise BudgetError where rows would move for a training that the budgets do not hold."""
        commit, order, passes = store.commit, self._options.order, self._passes
        schedule = Schedule.of(passes, order)
        if commit is None or commit.schedule_digest != schedule.digest:
            check_plan(
                budgets, passes, order=order, folder=scratch_in(store.path), commits=store.retention,
                state_bytes=0 if commit is None else commit.state_bytes, start=0,
            )  # fmt: skip

    def discard_new(self) -> None:
        """Remove a plain store that was made here and not trained: its budgets were refused."""
        if self._made is not None and (self._filled or self._store is None or self._store.commit is None):
            with suppress(OSError):
                if os.path.samestat(self._made, self._place.stat()):  # while nobody else may write to it
                    shutil.rmtree(self._place, ignore_errors=True)
            if self._store is not None:
                self._store.close()

    def named_commit(self) -> dict[str, object]:
        """Return which rows there are: the name of the folder, the same on all ranks, and its newest commit."""
        commit = None if self._store is None else self._store.commit
        id_ = -1 if commit is None else commit.made_of
        if self._shards is not None and self._shards.manifest.newest is not None:
            id_ = self._shards.manifest.newest.id  # shards count their own
        return {"store": "" if self._path is None else self._path.name, "commit": id_}

    @contextmanager
    def committed(self) -> Iterator[Store]:
        """Give the whole store at its newest commit of all ranks, for reading. Not collective."""
        if isinstance(self._given, Shards):
            yield self._given
            return
        with Store.open(self._place, mode="r") as store:
            yield store

    @property
    def is_sharded(self) -> bool:
        """Whether a commit is one of all shards: each has to be durable and published before the next is made."""
        return self._shards is not None

    def meet(self) -> None:
        """Bring all shards to one commit, where something ended a training between theirs. Collective."""
        if self._shards is not None:
            self._shards.meet()

    def publish(self) -> None:
        """Make the newest commit of the shards that of all; called where all have made the same ones. Collective."""
        if self._shards is not None and self._shards.store.commit is not None and self._shards.ahead:
            self._shards.publish(self._shards.store.commit.cursor)

    def drop_older(self) -> None:
        """Drop commits beyond those that are kept from now on. Collective."""
        if self._shards is not None:
            self._shards.drop_older()

    def close(self) -> None:
        """Close what was opened here. Not collective."""
        if self._shards is not None:
            self._shards.close()
        if self._store is not None and self._given is None:
            self._store.close()
