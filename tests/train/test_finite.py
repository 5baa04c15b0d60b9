"""A training whose rows or dense weights are no longer finite stops before they are committed."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiercache as tc
from tests.train.cases import Case, Net, Spec, open_store, table, tiered
from tests.train.devices import DEVICES
from tests.train.test_bad_input import one_sentence
from tiercache.errors import StateError

OPTIMIZERS = {
    "sgd": tc.optim.SGD(learning_rate=0.1),
    "adagrad": tc.optim.Adagrad(learning_rate=0.1),
    "rowwise": tc.optim.RowWiseAdagrad(learning_rate=0.1),
    "adam": tc.optim.Adam(learning_rate=0.1),
}


def case_of(optimizer: Any, dtype: str = "float32") -> Case:
    tables = (table("a", 4, optimizer, dtype=dtype), table("b", 10, optimizer, dtype=dtype), table("c", 4, optimizer))
    specs = (Spec(name="f", table="a", hotness="ragged"), Spec(name="g", table="b"), Spec(name="h", table="c"))
    return Case(tables=tables, specs=specs, num_samples=192, pass_rows=64, num_keys=60)


CASE = case_of(OPTIMIZERS["adagrad"])


class Training:
    def __init__(self, case: Case, passes: tc.PassDataset, device: str = "cpu", **options: Any) -> None:
        torch.manual_seed(1)
        self.store = open_store(passes.path, case, "memory")
        self.cache = tiered(self.store, passes, device=DEVICES[device](), **options)
        self.model = Net(self.cache, case)
        self.cache.register(model=self.model, optimizer=torch.optim.SGD(self.model.parameters(), lr=0.05))
        self.optimizer = self.cache.optimizer

    def run(self, wrong: Callable[["Training", tc.Batch], object], at: tuple[int, int] = (1, 2)) -> int:
        steps = 0
        for p in self.cache.passes(epochs=1):
            for i, batch in enumerate(p.batches(16)):
                if (p.index, i) == at:
                    wrong(self, batch)
                else:
                    self.model(batch).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                steps += 1
        return steps

    @property
    def committed(self) -> int:
        return self.store.commit.cursor.pass_index


def multiply_loss(by: float) -> Callable[[Training, tc.Batch], None]:
    return lambda t, batch: (t.model(batch).square().mean() * by).backward()


def one_table(name: str, value: float) -> Callable[[Training, tc.Batch], None]:
    """Return a step in which the gradient of one sample of one table is ``value``."""

    def run(t: Training, batch: tc.Batch) -> None:
        bag = t.model.bag
        out = bag(batch)
        weights = torch.zeros_like(out)
        first = sum(dim for feature, dim in zip(bag.features, bag.dims, strict=True) if feature < name)
        ids = batch.ids[name]
        sample = 3 if ids.offsets is None else int((ids.offsets[1:] > ids.offsets[:-1]).argmax())
        weights[sample, first] = value
        out.backward(weights)

    return run


WRONG: dict[str, tuple[Callable[[Training, tc.Batch], Any], str]] = {
    "NaN": (multiply_loss(math.nan), "'a', 'b', 'c'"),
    "infinity": (multiply_loss(math.inf), "'a', 'b', 'c'"),
    "a NaN of one sample": (one_table("g", math.nan), "'b'"),
    "an infinity of one sample": (one_table("f", math.inf), "'a'"),
    "minus infinity": (one_table("h", -math.inf), "'c'"),
}


@pytest.mark.sampled(15)
@pytest.mark.parametrize(
    ("optimizer", "at"), [*((name, (1, 2)) for name in OPTIMIZERS), ("adagrad", (0, 0)), ("adagrad", (2, 3))]
)
@pytest.mark.parametrize("what", WRONG)
def test_rows_that_are_not_finite_stop_training(tmp_path: Path, optimizer: str, what: str, at: tuple[int, int]) -> None:
    wrong, tables = WRONG[what]
    case = case_of(OPTIMIZERS[optimizer])
    training = Training(case, case.cut(tmp_path / "passes"))
    batch = f"batch {at[1]} of pass {at[0]} (up to sample {16 * (at[1] + 1)})"
    with one_sentence(StateError, f"rows of {tables} are not finite after the step of {batch}", "on_nonfinite"):
        training.run(wrong, at)
    training.cache.close()
    assert training.committed == at[0]


@pytest.mark.parametrize(
    ("dtype", "wrong", "tables"),
    [
        (dtype, *WRONG[what])
        for dtype in ("float16", "bfloat16")
        for what in ("NaN", "a NaN of one sample", "minus infinity")
    ]
    + [("float16", one_table("g", 1e7), "'b'")],  # finite in the gradient
)
def test_rows_of_16_bits_are_looked_at_as_they_are_stored(tmp_path: Any, dtype: str, wrong: Any, tables: str) -> None:
    """Including their padding, which is meaningless."""
    case = case_of(tc.optim.SGD(learning_rate=0.1), dtype)
    training = Training(case, case.cut(tmp_path / "passes"))
    with one_sentence(StateError, f"rows of {tables} are not finite after the step of batch 2 of pass 1"):
        training.run(wrong)


@pytest.mark.parametrize("what", WRONG)
def test_on_a_gpu_the_pass_and_its_tables_are_named_when_it_ends(passes: tc.PassDataset, what: str) -> None:
    """Steps do not wait for the GPU."""
    training = Training(CASE, passes, "cuda")
    wrong, tables = WRONG[what]
    with one_sentence(StateError, f"rows of {tables}", "pass 1"):
        training.run(wrong, (1, 3))
    training.cache.close()
    assert training.committed == 1


def test_dense_weights_that_are_not_finite_are_not_committed(passes: tc.PassDataset) -> None:
    def spoil(t: Training, batch: tc.Batch) -> None:  # no row depends on it in the last batch of a pass
        t.model(batch).square().mean().backward()
        nn.init.constant_(t.model.top.bias, math.nan)

    training = Training(CASE, passes)
    with one_sentence(StateError, "1 parameters (model.top.bias) are not finite", "batch 3 of pass 1"):
        training.run(spoil, (1, 3))
    training.cache.close()
    assert training.committed == 1


def test_parameters_that_were_not_finite_before_the_loop_are_nobodys_fault(passes: tc.PassDataset) -> None:
    training = Training(CASE, passes)
    training.model.mask = torch.nn.Parameter(torch.full((2,), -math.inf))
    assert training.run(multiply_loss(1.0)) == 12
    assert training.committed == 3


@pytest.mark.parametrize(("mode", "count"), [("warn", 2), ("ignore", 0)])
def test_a_training_goes_on_where_it_was_told_to(passes: tc.PassDataset, mode: str, count: int) -> None:
    training = Training(CASE, passes, on_nonfinite=mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert training.run(multiply_loss(math.nan)) == 12
    assert sum("not finite" in str(one.message) for one in caught) == count
    assert training.committed == 3


@pytest.mark.parametrize("drops_first", [True, False])
def test_a_pass_whose_only_step_a_scaler_skips_is_trained(tmp_path: Path, *, drops_first: bool) -> None:
    table = tc.Table(name="a", dim=4, optimizer=tc.optim.SGD(learning_rate=1.0))
    data = tc.write_key_sets(tmp_path / "keys", [table], [{"a": np.arange(4)}] * 3)
    model = nn.Sequential(tc.EmbeddingBagCollection(data.schema), nn.Linear(4, 1))
    scaler, seen = torch.amp.GradScaler("cpu", init_scale=4.0), list[int]()
    with tc.InMemoryCache(data, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0)) as cache:
        cache.register(scaler=scaler)
        for p in cache.passes(epochs=1):
            if drops_first:
                cache.optimizer.zero_grad()
            loss = model(p.batch({"a": np.arange(4)})).sum() * (math.inf if p.index == 1 else 0.01)
            scaler.scale(loss).backward()
            scaler.step(cache.optimizer)
            scaler.update()
            if not drops_first:
                cache.optimizer.zero_grad()
            seen.append(p.index)
        assert all(torch.isfinite(one).all() for one in model.parameters())
    assert seen == [0, 1, 2]
