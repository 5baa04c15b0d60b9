"""Training equals torch's own embedding modules and optimizers, and row optimizers written by hand."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiercache as tc
from tests.train.cases import Case, Spec, result_of, table, tiered
from tests.train.devices import DEVICES, device_of_tests
from tests.train.oracle import Oracle
from tiercache.store import MemoryEngine

OPTIMIZERS = {
    "sgd": tc.optim.SGD(learning_rate=0.1),
    "sgd decay": tc.optim.SGD(learning_rate=0.1, decay=0.05),
    "adagrad": tc.optim.Adagrad(learning_rate=0.1, initial_accumulator=0.1),
    "adagrad decay": tc.optim.Adagrad(learning_rate=0.1, decay=0.05),
    "rowwise": tc.optim.RowWiseAdagrad(learning_rate=0.1),
    "rowwise decay": tc.optim.RowWiseAdagrad(learning_rate=0.1, decay=0.05),
    "adam": tc.optim.Adam(learning_rate=0.01),
    "adamw": tc.optim.Adam(learning_rate=0.01, decay=0.5, decoupled=True),
    "adam of torch": tc.optim.Adam(learning_rate=0.01, eps=1e-2, corrected_eps=True),
    "momentum": tc.optim.SGD(learning_rate=0.05, momentum=0.9, decay=0.02),
    "nesterov": tc.optim.SGD(learning_rate=0.05, momentum=0.75, nesterov=True),
    "rowwise adam": tc.optim.RowWiseAdam(learning_rate=0.01, decay=0.05),
    "rowwise rmsprop": tc.optim.RowWiseRMSprop(learning_rate=0.01, alpha=0.9, decay=0.02),
    "rowwise adamw": tc.optim.RowWiseAdam(learning_rate=0.01, decay=0.5, decoupled=True),
}
SPECS = (
    Spec(name="one", table="a"),
    Spec(name="shared", table="a", hotness="ragged"),
    Spec(name="mean", table="a", hotness="ragged", mode="mean"),
    Spec(name="weighted", table="a", hotness="ragged", weighted=True),
    Spec(name="mean weighted", table="b", hotness="ragged", weighted=True, mode="mean"),
    Spec(name="fixed", table="b", hotness="multi_hot"),
    Spec(name="largest", table="b", hotness="ragged", mode="max"),
    Spec(name="largest fixed", table="b", hotness="multi_hot", mode="max"),
)


def compare(
    case: Case, folder: Path, *, exact: bool = False, unpooled: bool = False, weigh: tuple[str, ...] = (),
    device: str | None = None, later_rate: float = 0.05,
) -> None:  # fmt: skip
    """Train ``case`` tiered and with the oracle, batch by batch, and compare outputs, gradients, rows and weights.

    The rows' learning rate changes to ``later_rate`` in the third pass. ``weigh``: features that get weights whose
    gradients count too.
    """
    passes = case.cut(folder / "passes")
    torch.manual_seed(0)
    with tc.Store.open(None, tables=case.tables, engine=MemoryEngine()) as store:
        with tiered(store, passes, device=DEVICES[device]() if device else device_of_tests()) as cache:
            bag = tc.EmbeddingBagCollection(cache.schema, mode={spec.name: spec.mode for spec in case.specs})
            vectors, oracle = tc.EmbeddingCollection(cache.schema), Oracle(case, passes, cache.device)
            top = nn.Linear(bag.out_features + 1, 1).to(cache.device)
            others = copy.deepcopy(top)
            ours, theirs = (torch.optim.SGD(part.parameters(), lr=case.dense_lr) for part in (top, others))
            cache.register(top=top, bag=bag, vectors=vectors, optimizer=ours)
            for current in cache.passes(epochs=case.epochs):
                if current.index == 2:
                    for table in cache.optimizer.rows.param_groups:
                        table["lr"] = later_rate
                    oracle.set_learning_rate(later_rate)
                for number, batch in enumerate(current.batches(case.batch, shuffle=True)):
                    if unpooled:
                        mine, other = vectors(batch), oracle.vectors(batch, current.sub_dataset)
                        pairs = [(mine[name].reshape(other[name].shape), other[name]) for name in other]
                        for left, right in pairs:
                            check(left, right, exact)
                        numbers = [torch.randint(-3, 4, left.shape).float().to(cache.device) for left, _ in pairs]
                        losses = [sum((p[i] * n).sum() for p, n in zip(pairs, numbers, strict=True)) for i in (0, 1)]
                    else:
                        given = {name: (torch.rand(batch.ids[name].num_ids) + 0.5).to(cache.device) for name in weigh}
                        left = {name: value.clone().requires_grad_() for name, value in given.items()}
                        right = {name: value.clone().requires_grad_() for name, value in given.items()}
                        pooled = bag(batch, weights=left), oracle.bags(batch, current.sub_dataset, right)
                        check(*pooled, exact)
                        losses = [loss(case, part, out, batch) for part, out in zip((top, others), pooled, strict=True)]
                    for each in losses:
                        each.backward()
                    if not unpooled:
                        for name in weigh:
                            check(left[name].grad, right[name].grad, exact)
                    if (number + 1) % case.accumulate == 0 or current.samples_done == current.num_samples:
                        for optimizer in (cache.optimizer, theirs):
                            optimizer.step()
                            optimizer.zero_grad()
                        oracle.step()
        for name, (keys, fields) in result_of(store, passes, None).rows.items():
            np.testing.assert_array_equal(keys, oracle.keys[name])
            check(torch.from_numpy(fields[0]), oracle.weights[name].cpu(), exact)
        check(top.weight, others.weight, exact)


def check(left: torch.Tensor | None, right: torch.Tensor | None, exact: bool) -> None:
    assert left is not None
    assert right is not None
    if exact:
        assert torch.equal(left, right)
    else:
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def loss(case: Case, top: nn.Linear, out: torch.Tensor, batch: tc.Batch) -> torch.Tensor:
    """Return a loss whose gradients are whole numbers if the case requires it."""
    if case.integers:
        signs = 2 * batch.label[:, None] - 1
        return (out * signs * batch.dense).sum()
    logits = top(torch.cat([out, batch.dense], dim=1)).squeeze(1)
    return nn.functional.binary_cross_entropy_with_logits(logits, batch.label)


def two_tables(optimizer: str) -> tuple[tc.Table, ...]:
    wide = tc.init.Uniform(low=-1, high=1)
    return table("a", 12, OPTIMIZERS[optimizer], wide), table("b", 7, OPTIMIZERS[optimizer], wide)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("optimizer", "accumulate"), [(name, 1 + 2 * (i % 2)) for i, name in enumerate(OPTIMIZERS)])
def test_training_equals_torch_within_rounding(tmp_path: Path, optimizer: str, accumulate: int) -> None:
    compare(Case(tables=two_tables(optimizer), specs=SPECS, num_keys=60, accumulate=accumulate), tmp_path)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("optimizer", "device"), [*((name, "cpu") for name in OPTIMIZERS), ("adagrad", "cuda")])
def test_unpooled_training_equals_torch_within_rounding(tmp_path: Path, optimizer: str, device: str) -> None:
    specs = tuple(Spec(name=s.name, table=s.table, hotness=s.hotness) for s in SPECS)
    case = Case(tables=two_tables(optimizer), specs=specs, num_keys=60, accumulate=2)
    compare(case, tmp_path, unpooled=True, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_weights_get_the_gradients_that_torch_gives_them(tmp_path: Path, device: str) -> None:
    specs = tuple(s for s in SPECS if s.mode != "max")
    case = Case(tables=two_tables("sgd"), specs=specs, num_keys=60)
    compare(case, tmp_path, weigh=("one", "shared", "mean", "fixed", "mean weighted"), device=device)


@pytest.mark.parametrize("unpooled", [False, True])
def test_whole_numbers_give_the_bits_of_torch(tmp_path: Path, unpooled: bool) -> None:
    """Without rounding the order of sums cannot matter, so all bits equal torch's."""
    specs = (Spec(name="one", table="a"), Spec(name="list", table="a", hotness="ragged"),
             Spec(name="fixed", table="b", hotness="multi_hot", length=4, mode="mean"))  # fmt: skip
    tables = tuple(table(name, 9, tc.optim.SGD(learning_rate=1.0), tc.init.Constant(value=3.0)) for name in "ab")
    case = Case(tables=tables, specs=specs, num_keys=40, integers=True, accumulate=2)
    compare(case, tmp_path, exact=True, unpooled=unpooled, later_rate=0.5)


def test_every_dim_from_1_to_130_equals_torch(tmp_path: Path) -> None:
    optimizers: list[Any] = [*OPTIMIZERS.values()]
    tables = tuple(
        table(f"t{d}", d, optimizers[d % len(optimizers)], tc.init.Uniform(low=-1, high=1)) for d in range(1, 131)
    )
    specs = tuple(
        Spec(name=f"f{d}", table=f"t{d}", hotness="ragged" if d % 2 else "one_hot", mode="mean" if d % 3 else "sum")
        for d in range(1, 131)
    )
    compare(Case(tables=tables, specs=specs, num_samples=48, pass_rows=16, num_keys=12, batch=8), tmp_path)
