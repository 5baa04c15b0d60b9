"""Every mistake in training raises one clear error, and the store stays at its last commit."""

import contextlib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiercache as tc
from tests.train.cases import (
    Case,
    Net,
    Spec,
    assert_same_bits,
    registered,
    resident_result,
    result_of,
    run,
    smallest_host_budget,
    table,
    tiered,
    train,
)
from tests.train.loops import train_store
from tiercache.errors import BudgetError, DatasetError, StateError

CASE = Case(
    tables=(table("a", 4), table("b", 4), table("c", 6, tc.optim.SGD(learning_rate=0.1))),
    specs=(Spec(name="f", table="a", hotness="ragged"), Spec(name="g", table="b"), Spec(name="h", table="c")),
    num_samples=240, pass_rows=80, num_keys=100, epochs=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(passes: tc.PassDataset) -> Path:
    path = passes.path.with_name("model.tc")
    train_store(path, passes, CASE)
    return path


@pytest.fixture
def store(tmp_path: Path, trained: Path) -> Iterator[tc.Store]:
    """A store after one epoch; after any mistake of a test it is still at that commit."""
    shutil.copytree(trained, tmp_path / "model.tc")
    with tc.Store.open(tmp_path / "model.tc") as store:
        before = store.commit.id, store.commit.cursor
        yield store
        assert (store.commit.id, store.commit.cursor) == before
    with tc.Store.open(tmp_path / "model.tc", mode="r") as again:
        assert (again.commit.id, again.commit.cursor) == before


@contextlib.contextmanager
def one_sentence(kind: type[Exception] | tuple[type[Exception], ...], *words: str) -> Iterator[Any]:
    """Expect a one-line error that contains all of ``words``."""
    with pytest.raises(kind) as caught:
        yield caught
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


def test_a_device_budget_below_the_passes_names_the_bytes_they_need(store: tc.Store, passes: tc.PassDataset) -> None:
    with tiered(store, passes) as cache:
        needed = cache.device_bytes
    told = f"need {needed:,} bytes on", f"is {needed - 1:,} bytes:", f"--device-budget {needed - 1},"
    with one_sentence(BudgetError, "device_budget", "raise it", "rows of dim 4", *told):
        tiered(store, passes, device_budget=needed - 1)
    tiered(store, passes, device_budget=needed).close()


@pytest.mark.parametrize("options", [{}, {"order_seed": 7, "eval_budget": 1000}])
def test_the_host_budget_that_the_error_names_is_enough(tmp_path: Path, passes: tc.PassDataset, options: Any) -> None:
    case = replace(CASE, epochs=3, order_seed=options.get("order_seed"))
    expected = resident_result(case, passes)
    with tc.Store.open(tmp_path / "tight.tc", tables=case.tables) as store:
        needed = smallest_host_budget(store, passes, **options)
        with one_sentence(BudgetError, "host_budget", f"{needed} bytes", "smaller passes"):
            tiered(store, passes, host_budget=needed - 1, **options)
        for epochs in (1, 2, 3):
            with tiered(store, passes, host_budget=needed, **options) as cache:
                model = train(cache, case, epochs=epochs)
                assert cache.host_bytes_peak <= needed
        assert all(torch.equal(value, expected.dense[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        *(({"device_budget": size}, BudgetError, [repr(size)]) for size in ("64 MiBs", "-1", 0, 1.5, True, None)),
        ({"commit_every": 0}, ValueError, ["commit_every is 0", "at least 1"]),
        ({"order_seed": 1}, DatasetError, ["in this order", "commit 3"]),  # it decides next uses
    ],
)
def test_options_that_do_not_fit_are_refused(store: tc.Store, passes: Any, options: Any, kind: Any, words: Any) -> None:
    with one_sentence(kind, *words):
        tiered(store, passes, **options)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tables": (table("a", 8), *CASE.tables[1:])}, ["table 'a'", "dim 8", "extract again"]),
        ({"specs": (replace(CASE.specs[0], name="renamed"), *CASE.specs[1:])}, ["is not the one", "commit 3"]),
        ({"data_seed": 1}, ["others", "commit 3", "start a new store"]),
    ],
)
def test_a_dataset_of_another_training_is_refused(store: tc.Store, tmp_path: Path, change: Any, words: Any) -> None:
    with one_sentence(DatasetError, *words):
        tiered(store, replace(CASE, **change).cut(tmp_path / "others"))


def test_evaluation_data_of_other_features_is_refused(store: tc.Store, passes: tc.PassDataset, tmp_path: Path) -> None:
    specs = (CASE.specs[0], replace(CASE.specs[1], hotness="ragged"), CASE.specs[2])
    other = replace(CASE, specs=specs).cut(tmp_path / "others")
    with tiered(store, passes) as cache, one_sentence(DatasetError, "'g'", "hotness 'ragged'", "has hotness"):
        next(iter(cache.evaluate(other)))


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"inside": [{"value": self.value}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["inside"][0]["value"]


def test_numbers_of_numpy_train_as_those_of_python(tmp_path: Path, passes: tc.PassDataset) -> None:
    rows = {}
    for name, of_int, of_float, of_bool in (("numpy", np.int64, np.float64, np.bool_), ("python", int, float, bool)):
        path, case = tmp_path / name, replace(CASE, batch=of_int(16), epochs=of_int(1), shuffle=of_bool(1))
        options = {"seed": of_int(3), "order_seed": of_int(5), "retention": of_int(2), "commit_every": of_int(1)}
        for stops in (True, False):
            with contextlib.suppress(InterruptedError), tiered(path, passes, **options) as cache:
                model, optimizer = registered(cache, case, extra=Holder(of_float(0.25)))
                for group in optimizer.param_groups:
                    group["lr"] = of_float(0.125)

                def each_batch(*_: int, cache: Any = cache, stops: bool = stops) -> None:
                    if stops:
                        cache.commit()
                        raise InterruptedError

                run(cache, case, model, optimizer, each_batch=each_batch)
        with tc.Store.open(path, mode="r") as store:
            rows[name] = result_of(store, passes, None)
    assert_same_bits(rows["numpy"], rows["python"])
    for order in (np.arange(len(passes.passes)), list(np.arange(len(passes.passes))[::-1])):
        tiered(tmp_path / "ordered", passes, order=order, reorganize=True).close()


WRONG_NUMBERS: list[dict[str, Any]] = [
    {"seed": 1.5}, {"seed": True}, {"seed": 1 << 63}, {"order_seed": 1.5}, {"order_seed": np.float64(2)},
    {"order": [0.0, 1.0, 2.0, 3.0]}, {"order": np.array([0.5, 1.5])}, {"retention": True}, {"retention": 10**30},
    {"commit_every": 1.5}, {"at": 1.0},
]  # fmt: skip


@pytest.mark.parametrize("options", WRONG_NUMBERS, ids=repr)
def test_other_numbers_are_refused_before_a_store_exists(tmp_path: Path, passes: tc.PassDataset, options: Any) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(options))}.* is .*: expected "):
        tiered(tmp_path / "new.tc", passes, **options)
    assert not (tmp_path / "new.tc").exists()


UNSTORABLE = [lambda: 0, sys.stdout, np.zeros(2), np.longdouble(1.0), object(), {np.int64(1): 1}, Spec]


@pytest.mark.parametrize("value", UNSTORABLE, ids=lambda value: type(value).__name__)
def test_state_that_cannot_be_stored_is_refused(store: tc.Store, passes: tc.PassDataset, value: Any) -> None:
    with tiered(store, passes) as cache:
        with one_sentence(StateError, "extra['inside'][0]['value']", "keep only tensors, numbers"):
            cache.register(extra=Holder(value))
        with one_sentence(StateError, "register(extra=...)", "state_dict"):
            cache.register(extra=value)


def test_state_that_became_unstorable_stops_the_commit(tmp_path: Path, passes: tc.PassDataset) -> None:
    """Each commit checks again, so that what a store holds can always be read back."""
    with tc.Store.open(tmp_path / "new.tc", tables=CASE.tables) as store, tiered(store, passes) as cache:
        holder = Holder(1)

        def spoil(pass_index: int, _batch: int) -> None:
            if pass_index == 1:
                holder.value = np.zeros(1)

        with one_sentence(StateError, "extra['inside'][0]['value']", "ndarray"):
            train(cache, CASE, each_batch=spoil, extra=holder)
        assert store.commit.cursor.pass_index <= 1


@pytest.mark.parametrize(
    ("name", "outputs", "words"),
    [
        ("network", 1, ["model, optimizer", "network", "same names"]),
        ("model", 2, ["'model'", "top.weight", "size mismatch"]),
    ],
)
def test_other_objects_than_committed_are_refused(store: Any, passes: Any, name: str, outputs: int, words: Any) -> None:
    with tiered(store, passes) as cache:
        model = Net(cache, CASE)
        model.top = nn.Linear(model.bag.out_features + 1, outputs)
        others = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)} if name == "model" else {}
        cache.register(**{name: model}, **others)
        with one_sentence(StateError, *words):
            next(cache.passes(epochs=2))


def test_a_dataset_may_be_given_by_its_path_and_nothing_else_is_one(store: tc.Store, passes: tc.PassDataset) -> None:
    with tiered(store, passes.path) as cache:  # type: ignore[arg-type]
        assert cache.dataset.digest == passes.digest
    for data, message in ((None, "not NoneType"), ("nowhere", "no dataset found in")):
        with pytest.raises(DatasetError, match=message):
            tiered(store, data)  # type: ignore[arg-type]
