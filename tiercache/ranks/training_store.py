"""TrainingStore: what a cache trains, a plain store or this rank's shard of one."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.ranks.opening import choose_sharding, open_parts
from tiercache.ranks.record import RECORD
from tiercache.ranks.sharding_planner import sharding_of
from tiercache.ranks.sharding_rules import asked_words
from tiercache.ranks.shares import Share
from tiercache.store import Store
from tiercache.training.matching import check_tables
from tiercache.training.reorganize import reorganize

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.passes.dataset import PassDataset
    from tiercache.passes.view import DatasetView
    from tiercache.ranks.budgets import Budgets
    from tiercache.ranks.parts import Parts
    from tiercache.ranks.sharding_plan import ShardingPlan
    from tiercache.ranks.sharding_rules import ShardingRules

__all__ = ["StoreOptions", "TrainingStore"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreOptions:
    """How a cache opens its store: all of it the same on all ranks."""

    sharding: ShardingPlan | ShardingRules | str | Mapping[str, str]
    shard_dirs: Sequence[str | os.PathLike[str]] | None
    engine: str | None
    retention: int | None
    reorganize: bool
    order_seed: int | None

    @property
    def facts(self) -> dict[str, Any]:
        """Return them by the names that users give them. Raises ValueError for a sharding that makes no sense."""
        return {
            "sharding": asked_words(self.sharding),
            "shard_dirs": None if self.shard_dirs is None else [str(folder) for folder in self.shard_dirs],
            "engine": self.engine,
            "retention": self.retention,
            "reorganize": self.reorganize,
            "order_seed": None if self.order_seed is None else int(self.order_seed),
        }


class TrainingStore:
    """The store of one cache. ``choose`` says what is trained, and writes nothing; ``open`` opens the store for it."""

    def __init__(self, place: str | os.PathLike[str] | Store, passes: PassDataset, ranks: AnyCommunicator,
                 options: StoreOptions) -> None:  # fmt: skip
        self._place, self._ranks, self._options = place, ranks, options
        self._passes = passes
        self.sharding: ShardingPlan | None = None
        """Where tables stand in shards; None in a plain store."""
        self._store: Store | None = None
        self._is_new = False
        """Whether ``open`` made the folder of ``_store``."""
        self._shards: Parts | None = None

    def choose(self, *, number_bytes: int) -> DatasetView:
        """Return the passes as this rank trains them. Collective.

        number_bytes: of a number on the wire. Raises ValueError for a sharding or a store that make no sense.
        """
        with self._ranks.raise_on_all("looking for the store"):
            is_sharded = self._is_sharded()
        if is_sharded:
            assert not isinstance(self._place, Store)
            self.sharding = choose_sharding(
                self._place, self._passes, self._ranks, self._options.sharding, number_bytes=number_bytes
            )
        else:
            if isinstance(self._place, Store):
                check_tables(self._place, self._passes)
            if self._options.sharding != "auto":  # one rank has everything, but a mistake is one
                sharding_of(self._passes, 1, self._options.sharding, number_bytes=number_bytes)
        return self.view(self._passes)

    def _is_sharded(self) -> bool:
        """Whether the store has shards: with several ranks always, with one where it has some or is asked to."""
        if isinstance(self._place, Store):
            given = self._options
            if self._ranks.size > 1:
                raise ValueError(
                    f"a Store was given to {self._ranks.size} ranks: give the path of a sharded store, which they open"
                )
            if given.engine is not None or given.retention is not None or given.shard_dirs is not None:
                raise ValueError(
                    "engine, retention and shard_dirs are of a store that the cache opens: give its path, or open the "
                    "Store with them"
                )
            return False
        return self._ranks.size > 1 or self._options.shard_dirs is not None or (Path(self._place) / RECORD).exists()

    def view(self, passes: PassDataset) -> DatasetView:
        """Return what this rank trains of passes: all, or its share. Raises ValueError where the tables are others."""
        return passes if self.sharding is None else Share(passes, self.sharding, self._ranks.rank)

    def open(self, source: DatasetView, budgets: Budgets, *, progress: bool | None) -> Store:
        """Open the store, or make it; its rows stand in the order of ``source`` then, where that is asked for.

        Rows of other ranks, or of another sharding, are written anew. Collective.
        """
        options = self._options
        if self.sharding is not None:
            assert isinstance(source, Share)
            assert not isinstance(self._place, Store)
            self._shards = open_parts(
                self._place, source, self._ranks, engine=options.engine, parts=options.shard_dirs,
                retention=options.retention, reorganized=options.reorganize, order_seed=options.order_seed,
                budgets=budgets,
            )  # fmt: skip
            return self._shards.store
        if isinstance(self._place, Store):
            store = self._place
        else:
            self._is_new = not Path(self._place).exists()
            store = self._store = Store.open(
                self._place, tables=self._passes.tables, engine=options.engine, retention=options.retention
            )
        if options.reorganize and store.mode == "a":
            reorganize(
                store, self._passes, order_seed=options.order_seed, store_budget=budgets.store_budget, progress=progress
            )
        return store

    def discard_new(self) -> None:
        """Remove a plain store that ``open`` made and nobody committed to: its budgets were refused."""
        if self._store is not None and self._is_new and self._store.commit is None:
            assert not isinstance(self._place, Store)
            self._store.close()
            shutil.rmtree(self._place, ignore_errors=True)

    def named_commit(self) -> dict[str, object]:
        """Return which rows there are: the name of the folder, the same on all ranks, and its newest commit."""
        path = self._place.path if isinstance(self._place, Store) else self._place
        store = self._place if isinstance(self._place, Store) else self._shards.store if self._shards else self._store
        commit = None if store is None else store.commit
        return {"store": "" if path is None else Path(path).name, "commit": -1 if commit is None else commit.id}

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
        if self._store is not None:
            self._store.close()
