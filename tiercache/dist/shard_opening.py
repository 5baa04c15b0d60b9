"""What the ranks ask of a store when they open its shards: all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiercache.dist.budget_checks import check_plan, check_store
from tiercache.dist.reorganize import reorganize
from tiercache.dist.resharding import place_of, reshard
from tiercache.dist.shard_writer import ShardWriter
from tiercache.planning.schedule import Schedule
from tiercache.planning.sharding_planner import sharding_of
from tiercache.store.files import scratch_in
from tiercache.store.opening import store_path
from tiercache.store.shards.open_shards import plain_manifest
from tiercache.store.shards.shard_manifest import Manifest
from tiercache.store.shards.sharding import ShardingPlan

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tiercache.data.dataset import PassDataset
    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.dist.shard_view import ShardView
    from tiercache.planning.budgets import Budgets
    from tiercache.planning.schedule import OrderRule
    from tiercache.planning.sharding_rules import ShardingRules
    from tiercache.store import Cursor, Store


_PLANNING = "planning the budgets"


def choose_sharding(
    path: str | os.PathLike[str],
    passes: PassDataset,
    ranks: AnyCommunicator,
    asked: ShardingPlan | ShardingRules | str | Mapping[str, str],
    *,
    number_bytes: int,
) -> ShardingPlan:
    """Return the sharding that all ranks ask for; "auto" that of the store where it is for as many. Collective.

    number_bytes: of a number on the wire. Raises ValueError for one that makes no sense.
    """
    chosen: dict[str, Any] | None = None
    with ranks.raise_on_all("sharding the tables"):
        if ranks.rank == 0:  # it reads counts of keys, and computes with them what need not be the same on all CPUs
            found = Manifest.read(store_path(path)) if asked == "auto" else None
            if found is not None and found.num_ranks == ranks.size and not found.is_plain:
                chosen = found.sharding.to_record()
            else:
                chosen = sharding_of(passes, ranks.size, asked, number_bytes=number_bytes).to_record()
    return ShardingPlan.from_record(ranks.all_gather_object(chosen)[0])


def open_for_share(
    path: str | os.PathLike[str],
    share: ShardView,
    ranks: AnyCommunicator,
    *,
    engine: str | None,
    shard_dirs: Sequence[str | os.PathLike[str]] | None,
    retention: int | None = None,
    reorganized: bool,
    order: OrderRule,
    budgets: Budgets | None = None,
    plain: bool = False,
) -> ShardWriter:
    """Open the shards of a store, or make them; rows of a plain store, other ranks or another sharding are moved.

    Passes that were split from the ones trained so far go on where these stand. No row is written anew for a training
    that ``budgets`` would not hold, but for what `check_store` says alone. Commits beyond ``retention`` stay
    until `ShardWriter.drop_older`. ``plain``: one rank makes a plain store of shards.

    Raises what `ShardWriter.open` and `reshard` raise, and BudgetError.
    """

    def check_share(folder: Path, **options: int) -> None:
        if budgets is not None:
            check_plan(budgets, share, order=order, folder=folder, **options)

    def check_shard(store: Store) -> None:
        if budgets is not None:
            check_store(budgets, share, store, order=order)

    store_budget = None if budgets is None else budgets.store_budget
    stands: list[Any] | None = None
    with ranks.raise_on_all("reading the manifest of the store"):
        if ranks.rank == 0:
            stands = _stands(store_path(path), share.sharding, plain=plain)
    stands = ranks.all_gather_object(stands)[0]
    if stands is not None and not stands[0]:
        commits = (retention or stands[1]) + 1  # of a shard
        with ranks.raise_on_all(_PLANNING):
            check_share(store_path(path), commits=commits)
        return reshard(
            path, share, ranks,
            engine=engine, shard_dirs=shard_dirs, retention=retention, order=order, reorganized=reorganized,
            store_budget=store_budget, check=check_shard, plain=plain,
        )  # fmt: skip
    opened = ShardWriter.open(
        path, share.whole.tables, share.sharding, ranks, engine=engine, shard_dirs=shard_dirs, retention=retention,
        drop=False,
    )  # fmt: skip
    if opened.store.commit is not None:
        try:
            follow = _Following(opened.store, share, order, reorganized=reorganized)
            with ranks.raise_on_all(_PLANNING):
                follow.check(check_share)
            with ranks.raise_on_all("putting rows into another order"):
                follow.run(store_budget)
            assert opened.store.commit is not None
            opened.publish(opened.store.commit.cursor)
        except BaseException:
            opened.close()
            raise
    return opened


def _stands(path: Path, sharding: ShardingPlan, *, plain: bool) -> list[Any] | None:
    """Return whether the store at ``path`` is sharded so, and its retention; None where it has no commit."""
    found = Manifest.read(path)
    if found is None or found.is_plain:
        found = plain_manifest(path)
    if found is None or found.cursor is None:
        return None
    return [not found.is_plain and not plain and found.sharding == sharding, found.retention]


class _Following:
    """A shard's rows into the order of parts of its passes, or, where that is wanted, of other passes."""

    def __init__(self, store: Store, share: ShardView, order: OrderRule, *, reorganized: bool) -> None:
        self._store, self._share, self._order, self._reorganized = store, share, order, reorganized

    def _start(self) -> Cursor | None:
        assert self._store.commit is not None
        return place_of(self._store.commit, self._share.sharding, self._share.rank, self._share, self._order)

    def moves(self) -> bool:
        """Say whether rows have to move. Raises DatasetError for a place that split passes do not have."""
        assert self._store.commit is not None
        if self._start() is None and not self._reorganized:
            return False
        return self._store.commit.schedule_digest != Schedule.of(self._share, self._order).digest

    def check(self, check_plan: Callable[..., None]) -> None:
        """Have the plan checked where rows have to move. Raises what it raises."""
        store = self._store
        assert store.commit is not None
        if self.moves():
            start, _ = self._start() or (0, 0)
            check_plan(
                scratch_in(store.path), commits=store.retention, state_bytes=store.commit.state_bytes, start=start
            )

    def run(self, store_budget: int | None) -> None:
        """Move them. Raises what `reorganize` raises."""
        if self.moves():
            reorganize(
                self._store, self._share, order=self._order, start=self._start(), store_budget=store_budget,
                progress=False,
            )  # fmt: skip
