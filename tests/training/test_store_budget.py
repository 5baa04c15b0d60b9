"""The bytes of a store are predicted before training: too small a budget is refused, the predicted one is enough."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import tiercache as tc
from tests.training.cases import Case, Spec, table, tiered, train
from tiercache.backends.cpu import CpuBackend
from tiercache.errors import BudgetError
from tiercache.store import MemoryEngine, info, load_rows
from tiercache.store.inspect import file_bytes_of
from tiercache.training.dense_state import DenseState

if TYPE_CHECKING:
    from pathlib import Path

CASE = Case(
    tables=(table("user", 24), table("item", 24), table("word", 40, tc.optim.Adam())),
    specs=(
        Spec(name="u", table="user"),
        Spec(name="i", table="item", hotness="multi_hot"),
        Spec(name="w", table="word"),
    ),
    num_samples=4096,
    pass_rows=512,
    num_keys=6000,
    batch=128,
    epochs=3,
)
STATE_BYTES = 32 << 10
"""More than the dense state of this case."""


def needed(store: tc.Store, passes: tc.PassDataset, **options: Any) -> int:
    """Return the store budget that the error of too small a one asks for."""
    with pytest.raises(BudgetError, match="store_budget is 1 bytes, but the store needs") as caught:
        tiered(store, passes, store_budget=1, **options)
    found = re.search(r"raise store_budget to (\d+) bytes, keep fewer commits", str(caught.value))
    assert found is not None
    return int(found[1])


def held(path: Path, store: tc.Store) -> int:
    """Return what the disk keeps for a store, whose writer may be at work on a thread of its own."""
    if not store.closed:
        with store.commit_writer._lock:
            store._opened.engine.shrink()
    return file_bytes_of(path)


@pytest.mark.parametrize(
    ("engine", "retention", "commit_every", "order_seed", "compression"),
    [
        ("lmdb", 1, 1, None, None),
        ("lmdb", 3, 1, 5, None),
        ("lmdb", 1, 3, None, None),
        ("zarr", 1, 1, None, None),
        ("zarr", 2, 2, 5, None),
        ("zarr", 1, 1, None, "zstd"),
    ],
)
def test_a_training_stays_within_the_predicted_bytes(
    tmp_path: Path,
    passes: tc.PassDataset,
    engine: str,
    retention: int,
    commit_every: int,
    order_seed: int | None,
    compression: str | None,
) -> None:
    """With the bytes that the plan says, as budget and as bound of the engine: nothing is refused, ever."""
    tables = [dataclasses.replace(t, compression=compression) for t in CASE.tables]
    options: dict[str, Any] = {"commit_every": commit_every, "order_seed": order_seed}
    with (
        tc.Store.open(tmp_path / "first", tables=tables, engine=engine, retention=retention) as store,
        tiered(store, passes, **options) as cache,
    ):
        budget = cache.store_plan(STATE_BYTES).needed
    sizes: list[int] = []
    path = tmp_path / "s"
    with tc.Store.open(path, tables=tables, engine=engine, retention=retention, store_budget=budget) as store:
        with tiered(store, passes, store_budget=budget, **options) as cache:
            train(cache, CASE, each_batch=lambda *_: sizes.append(held(path, store)))
        sizes.append(held(path, store))
    assert max(sizes) <= budget
    assert budget < 6 * info(path)["row_bytes"]


def test_too_small_a_budget_is_refused_with_the_numbers(passes: tc.PassDataset) -> None:
    """Before any thread or file: one byte less than is asked for is too little, and that much is enough."""
    with tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine()) as store:
        budget = needed(store, passes)
        with pytest.raises(
            BudgetError, match=r"of live rows, 2 times the largest pass of .* 15 % .* raise store_budget"
        ):
            tiered(store, passes, store_budget=budget - 1)
        tiered(store, passes, store_budget=budget).close()
        assert needed(store, passes, commit_every=2) > budget
    with tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine(), retention=4) as store:
        assert needed(store, passes) > budget


def test_dense_state_counts_before_the_first_batch(passes: tc.PassDataset) -> None:
    """What is tracked is known when training starts, and what an optimizer will keep is counted before it does."""
    with tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine()) as store:
        budget = needed(store, passes)
        with tiered(store, passes, store_budget=budget) as cache:
            dense = torch.nn.Linear(512, 512)
            cache.register(model=dense, optimizer=torch.optim.Adam(dense.parameters()))
            with pytest.raises(BudgetError, match=r"MiB of dense state"):
                next(cache.passes(epochs=1))
        assert store.commit is None or store.commit.id == 0


def test_the_state_of_an_optimizer_is_prior_counts_it_is_there() -> None:
    """No optimizer of torch keeps more than two tensors for each parameter."""
    model = torch.nn.Sequential(torch.nn.Linear(100, 90), torch.nn.Linear(90, 3))
    for make in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
        optimizer = make(model.parameters(), lr=0.1)
        state = DenseState(CpuBackend())
        state.register({"model": model, "optimizer": optimizer})
        most = state.most_bytes()
        model(torch.ones(1, 100)).sum().backward()
        optimizer.step()
        assert len(state.capture()()) <= most
        if optimizer.state:  # plain SGD has none, ever
            assert state.most_bytes() == len(state.capture()())


def test_rows_that_no_pass_uses_are_counted(passes: tc.PassDataset) -> None:
    """A store that was filled from outside keeps them for ever."""
    with tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine()) as store:
        before = needed(store, passes)
    with tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine()) as store:
        keys = np.arange(1_000_000, 1_030_000)
        fields = tuple(np.zeros((keys.size, f.width), np.float32) for f in CASE.tables[0].fields)
        load_rows(store, [("user", (keys, fields))])
        tc.reorganize(store, passes, progress=False)
        row_bytes = CASE.tables[0].row_bytes + 8
        assert 1.15 * keys.size * row_bytes < needed(store, passes) - before < 2 * keys.size * row_bytes


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
@pytest.mark.parametrize("retention", [1, 3])
def test_what_a_reorganization_leaves_is_counted(
    tmp_path: Path, passes: tc.PassDataset, engine: str, retention: int
) -> None:
    """RetainedSegment segments stay, and so do the commits of the day before: the budget of a small day holds them.

    With that budget as bound of the engine the day is trained to its end.
    """
    day = dataclasses.replace(CASE, num_samples=256, pass_rows=64, num_keys=60, data_seed=1, epochs=2)
    small, path = day.cut(tmp_path / "day"), tmp_path / "s"
    with tc.Store.open(path, tables=CASE.tables, engine=engine, retention=retention) as store:
        with tiered(store, passes) as cache:
            train(cache, CASE, epochs=1)
        tc.reorganize(store, small, progress=False)
        assert store.commit.retained
        with tiered(store, small) as cache:
            budget = cache.store_plan(STATE_BYTES).needed
        assert needed(store, small) <= budget
        sizes = [held(path, store)]
    with tc.Store.open(path, retention=retention, store_budget=budget) as store:
        with tiered(store, small, store_budget=budget) as cache:
            train(cache, day, each_batch=lambda *_: sizes.append(held(path, store)))
            left = cache.store_plan(STATE_BYTES).needed
        sizes.append(held(path, store))
    assert max(sizes) <= budget
    if retention > 1:
        assert left < budget  # the commits of the day before are gone
        assert held(path, store) <= left


def test_the_live_rows_of_a_plan_are_those_of_the_store(tmp_path: Path, passes: tc.PassDataset) -> None:
    """Block by block, at the fullest commit of an epoch, against what the store names after each pass."""
    live = []
    with tc.Store.open(tmp_path / "s", tables=CASE.tables) as store, tiered(store, passes) as cache:
        plan = cache.store_plan()
        for p in cache.passes(epochs=3):
            for batch in p.batches(512):
                del batch
            cache.drain()
            needed = store.history.needed
            total = 0
            for segment in needed.segments.values():
                for group, layout in zip(store.groups, segment.layouts, strict=True):
                    rows = min(layout.block_rows, layout.rows)
                    size = (
                        sum(-(-4 * f.width * rows // 4096) * 4096 for f in group.fields) + -(-8 * rows // 4096) * 4096
                    )
                    total += (layout.num_blocks - needed.first_blocks[segment.id][group.index]) * size
            live.append(total)
    assert max(live) == plan.live
