"""Trainings that run on every rank of a run, and their results."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tiercache as tc
from tests.cache_options import gathered
from tests.dist.pool import RanksPool
from tests.train.cases import Case, Net, Result, Spec, result_of_resident, table
from tests.train.devices import shim
from tiercache.dist.communicator import AnyCommunicator

ONE = Case(
    tables=(table("users", 8), table("items", 8)),
    specs=(Spec(name="user", table="users"), Spec(name="item", table="items")),
)
BAGS = Case(
    tables=(
        table("users", 5, tc.optim.SGD(learning_rate=0.1)),
        table("items", 16, tc.optim.Adagrad(learning_rate=0.05)),
        table("words", 12, tc.optim.RowWiseAdagrad(learning_rate=0.05, decay=0.01)),
        table("tags", 16, tc.optim.Adam(learning_rate=0.01)),
    ),
    specs=(
        Spec(name="user", table="users"),
        Spec(name="friend", table="users", hotness="ragged", mode="mean"),
        Spec(name="item", table="items", hotness="multi_hot", mode="max"),
        Spec(name="word", table="words", hotness="ragged", weighted=True),
        Spec(name="title", table="words", hotness="multi_hot", mode="mean"),
        Spec(name="tag", table="tags", hotness="ragged", mode="sum"),
    ),
)
SHORT = Case(tables=ONE.tables, specs=ONE.specs, num_samples=131, pass_rows=40, batch=13, shuffle=False)
"""Passes and batches that no number of ranks divides; the last batch of a pass has a sample, so ranks have none."""
OTHER_OPTIMIZERS = replace(
    BAGS,
    tables=(
        table("users", 5, tc.optim.Adagrad(learning_rate=0.05)),
        table("items", 16, tc.optim.Adam(learning_rate=0.02)),
        table("words", 12, tc.optim.RowWiseAdagrad(learning_rate=0.01, decay=0.01)),
        table("tags", 16, tc.optim.SGD(learning_rate=0.1)),
    ),
)
CASES = {"one": ONE, "bags": BAGS, "short": SHORT, "other optimizers": OTHER_OPTIMIZERS}
OPTIONS: dict[str, Any] = {"device_budget": "4MiB", "host_budget": "32MiB"}
KINDS = ("row_wise", "table_wise", "column_wise", "data_parallel")
Rows = dict[str, tuple[NDArray[np.int64], tuple[NDArray[np.float32], ...]]]
"""Keys and fields by table."""


def every_table(case: str, kind: str) -> dict[str, str]:
    """Return one kind of sharding for all tables of a case."""
    return dict.fromkeys([table.name for table in CASES[case].tables], kind)


def open_sharded(case: Case, folder: str, *, queued: bool = False, **options: Any) -> tc.TierCache:
    """Open the store of a test. queued: the rows are a GPU's, whose kernels run on the shim."""
    passes = tc.PassDataset.open(Path(folder) / "passes")
    if queued:
        options["device"] = shim()
    return tc.TierCache(Path(folder) / "model.tc", passes, **gathered(OPTIONS | options))


def model_of(cache: tc.TierCache, case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model: nn.Module = Net(cache, case)
    if cache.communicator.size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.dense_lr, momentum=0.5)
    cache.register(model=model, optimizer=optimizer)
    optimizer = cache.optimizer
    return model, optimizer


def step(batches: Iterable[tc.Batch], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Step after the loss of a batch, which may come as several micro-batches."""
    for batch in batches:
        (nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label) * batch.weight).backward()
    optimizer.step()
    optimizer.zero_grad()


def step_by(cache: tc.TierCache, loss: torch.Tensor) -> None:
    """Step all that the cache trains by the gradients of a loss."""
    loss.backward()
    cache.optimizer.step()
    cache.optimizer.zero_grad()


def trained(
    cache: tc.TierCache, case: Case, tracked: tuple[nn.Module, torch.optim.Optimizer] | None = None
) -> Iterator[tuple[tc.Pass, int]]:
    """Train a case to its end, and yield the pass and the number of each batch after its step."""
    model, optimizer = tracked or model_of(cache, case)
    for p in cache.passes(epochs=case.epochs):
        for number, batch in enumerate(p.batches(case.batch, shuffle=case.shuffle)):
            step([batch], model, optimizer)
            yield p, number


def train(
    ranks: AnyCommunicator,
    case: str,
    folder: str,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    micro_batches: int | None = None,
    prefetch: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train a case, for ``steps`` steps if given, and return this rank's part and the dense part at the end."""
    one, done = CASES[case], 0
    with open_sharded(one, folder, **options) as cache:
        model, optimizer = model_of(cache, one)
        for p in cache.passes(epochs=one.epochs if epochs is None else epochs):
            if micro_batches is None:
                each = ([batch] for batch in p.batches(one.batch, shuffle=one.shuffle, prefetch=prefetch))
            else:
                each = p.steps(one.batch, micro_batches=micro_batches, shuffle=one.shuffle)
            for batches in each:
                if done == steps:
                    continue
                step(batches, model, optimizer)
                assert cache.pinned_batch_bytes == 0 <= cache.scratch_bytes
                done += 1
            if steps is not None:
                p.skip()
        found = {"commit": list(cache.store.commit.cursor), "planned": len(cache.plan(passes=3))}
    return found | dense_of(model)


def on_ranks(
    pool: RanksPool, size: int, folder: Path, case: str = "one", body: Callable[..., Any] = train, **options: Any
) -> list[Any]:
    """Run a case on ranks in a folder, cutting its passes if needed."""
    if not (folder / "passes").exists():
        CASES[case].cut(folder / "passes")
    return pool.run(size, body, case=case, folder=str(folder), **options)


def dense_of(model: nn.Module) -> dict[str, Any]:
    """Return the dense weights by their names without DistributedDataParallel's."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {f"dense.{name}": value.numpy().copy() for name, value in inner.state_dict().items()}


def stored(folder: Path, name: str = "model.tc") -> Rows:
    """Return all rows of a store by table, keys ascending."""
    rows = {}
    with tc.Store.open(folder / name, mode="r") as store:
        for one in store.tables:
            none = np.empty(0, np.int64), tuple(np.empty((0, field.width), np.float32) for field in one.fields)
            chunks = [none, *((keys, tuple(fields)) for keys, fields in store.scan(one.name))]
            keys = np.concatenate([chunk[0] for chunk in chunks])
            order = np.argsort(keys)
            fields = [np.concatenate([chunk[1][f] for chunk in chunks]) for f in range(len(one.fields))]
            rows[one.name] = keys[order], tuple(field[order] for field in fields)
    return rows


def assert_same_rows(ours: Rows, theirs: Rows, tolerance: float = 0.0) -> None:
    """Compare all rows that ``stored`` returned, bit for bit or within a tolerance."""
    assert ours.keys() == theirs.keys()
    for name, (keys, fields) in ours.items():
        np.testing.assert_array_equal(keys, theirs[name][0], err_msg=name)
        for one, other in zip(fields, theirs[name][1], strict=True):
            if tolerance:
                np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance, err_msg=name)
            else:
                np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32), err_msg=name)


def assert_as_alone(ours: Rows, dense: dict[str, Any], theirs: Result, *, tolerance: float = 1e-5) -> None:
    """Compare all rows that ``stored`` returned, and dense weights, with one process."""
    assert_same_rows(ours, theirs.rows, tolerance)
    for name, weight in theirs.dense.items():
        np.testing.assert_allclose(dense[f"dense.{name}"], weight.numpy(), atol=tolerance, rtol=tolerance, err_msg=name)


def resident(case: Case, passes: tc.PassDataset, *, steps: int | None = None, order_seed: int | None = None) -> Result:
    """Train the same batches on one process, all in memory."""
    cache: Any = tc.InMemoryCache(passes, order_seed=order_seed)
    torch.manual_seed(1)
    model = Net(cache, case)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.dense_lr, momentum=0.5)
    cache.register(model=model, optimizer=optimizer)
    optimizer = cache.optimizer
    done = 0
    for p in cache.passes(epochs=case.epochs):
        for batch in p.batches(case.batch, shuffle=case.shuffle):
            if done != steps:
                step([batch], model, optimizer)
                done += 1
        if steps is not None:
            p.skip()
    return result_of_resident(cache, model)


def assert_close(folder: Path, case: str, dense: dict[str, Any], **options: Any) -> None:
    """Compare a sharded store and dense weights with one process."""
    theirs = resident(CASES[case], tc.PassDataset.open(folder / "passes"), **options)
    assert_as_alone(stored(folder), dense, theirs)


def train_and_stop(
    ranks: AnyCommunicator, case: str, folder: str, *, passes: int, batches: int, within: bool, **options: Any
) -> int:
    """Train ``passes`` passes and ``batches`` batches, commit inside the pass if ``within``, and leave silently."""
    with open_sharded(CASES[case], folder, **options) as cache:
        for p, number in trained(cache, CASES[case]):
            if p.index == passes and number == batches:
                if within:
                    cache.commit()
                return int(cache.store.commit.id)
    raise AssertionError("there was nothing left to leave out")
