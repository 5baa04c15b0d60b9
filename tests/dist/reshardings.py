"""A small training of a sharded store that is divided again: its case, sharding plans, and each rank's part."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tiercache as tc
from tests.dist.meeting import meet
from tests.dist.trainings import step_by
from tests.train.cases import Case, Kept, Net, Spec, table, tiered
from tiercache.dist.communicator import communicator_of
from tiercache.dist.resharding import reshard
from tiercache.dist.shard_view import ShardView
from tiercache.dist.shard_writer import ShardWriter
from tiercache.planning.budgets import Budgets
from tiercache.planning.sharding_planner import sliced
from tiercache.store import Store
from tiercache.store.sharding import ShardingPlan, Slice, TableSharding


def one_case(**options: Any) -> Case:
    """Three tables, five passes, three epochs."""
    rule = tc.optim.Adam(learning_rate=0.01)
    options = {"num_samples": 5 * 48, "pass_rows": 48, "num_keys": 90, "batch": 8, "epochs": 3, **options}
    return Case(
        tables=(
            table("item", 5, rule),
            table("user", 6, tc.optim.RowWiseAdagrad(learning_rate=0.05)),
            table("place", 3, rule),
        ),
        specs=(Spec(name="a", table="item"), Spec(name="b", table="user"), Spec(name="c", table="place")),
        **options,
    )


def ways(size: int, turn: int) -> ShardingPlan:
    whole = TableSharding("table_wise", (Slice(size - 1, 0, 5),))
    columns = sliced(6, list(range(size))) if size > 1 else TableSharding("row_wise")
    kinds = [whole, columns, TableSharding("data_parallel")]
    if turn:
        kinds = [TableSharding("row_wise"), TableSharding("row_wise"), sliced(3, list(range(min(3, size)))[::-1])]
    return ShardingPlan(size, dict(zip(("item", "user", "place"), kinds, strict=True)))


def train_to_cursor(
    store: Store, passes: Any, case: Case, cursor: tuple[int, int], *, shards: ShardWriter | None = None
) -> None:
    """Train from the store's position to a commit at ``cursor``, which the writer of the store publishes."""
    with tiered(store, passes) as cache:
        torch.manual_seed(1)
        model = Net(cache, case)
        cache.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=case.dense_lr, momentum=0.5))
        for p in cache.passes(epochs=10):
            publish(cache, shards)
            if cursor == (p.index, 0):
                break
            for batch in p.batches(case.batch, shuffle=case.shuffle):
                step_by(cache, nn.BCEWithLogitsLoss()(model(batch), batch.label))
                if (p.index, p.samples_done) == cursor:
                    cache.commit()
                    publish(cache, shards)
                    break
            if cursor == (p.index, p.samples_done):
                break
    assert store.commit.cursor == cursor


def let_through(store: Store, share: Any, last_pass: int, *, shards: ShardWriter | None = None) -> None:
    """Bring a rank's rows through the passes before ``last_pass``, untrained, with the dense state as it is."""
    with tiered(store, share) as cache:
        cache.register(model=Kept(), optimizer=Kept())
        for p in cache.passes(epochs=10):
            publish(cache, shards)
            if p.index == last_pass:
                break
            p.skip()


def publish(cache: tc.TierCache, shards: ShardWriter | None) -> None:
    """Publish the commit that the cache has prepared, if its store is one rank of several. Collective."""
    if shards is not None:
        cache.drain()
        if shards.ahead:
            shards.publish()


def on_ranks(size: int, body: Callable[[Any], Any]) -> list[Any]:
    found = meet(size, body) if size > 1 else [body(communicator_of())]
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


def made(
    path: Path, passes: tc.PassDataset, sharding: ShardingPlan, ranks: Any, store_budget: int | None = None,
    **options: Any,
) -> ShardWriter:  # fmt: skip
    share = ShardView(passes, sharding, ranks.rank)
    budgets = Budgets(device_budget=1 << 30, host_budget=1 << 30, store_budget=store_budget)
    return reshard(path, share, ranks, budgets=budgets, **options)


def sharded(path: Path, case: Case, passes: tc.PassDataset, cursor: tuple[int, int], engine: str = "zarr") -> None:
    """Train a store of one rank to a commit."""
    alone = ShardView(passes, ways(1, 0), 0)
    with ShardWriter.open(path, case.tables, alone.sharding, communicator_of(), engine=engine) as shards:
        train_to_cursor(shards.store, alone, case, cursor, shards=shards)
