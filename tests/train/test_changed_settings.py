"""Settings of torch's optimizers that change after tc.convert reach the rows, or a warning or an error says so."""

import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiercache as tc
from tests.train.cases import tiered
from tests.train.test_bad_input import one_sentence
from tiercache.errors import DatasetError, StateError, TableMismatchError
from tiercache.store import alter

ROWS = 12
KEYS = torch.arange(ROWS).view(4, 3)


def net() -> Any:
    return nn.Sequential(OrderedDict(emb=nn.Embedding(ROWS, 4), top=nn.Linear(4, 1)))


def opened(folder: Path, model: Any, optimizer: torch.optim.Optimizer | None) -> tc.TierCache:
    if not (folder / "keys").exists():
        tc.write_key_sets(folder / "keys", model.emb.schema, [{"emb": np.arange(ROWS)}] * 2)
    return tiered(folder / "m.tc", tc.PassDataset.open(folder / "keys"), model=model, optimizer=optimizer)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    (scale * model(KEYS).square().mean()).backward()
    optimizer.step()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def converted(make: Callable[[Any], torch.optim.Optimizer] = momentum) -> tuple[Any, torch.optim.Optimizer]:
    model = net()
    optimizer = make(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tc.convert(model, optimizer=optimizer)
    return model, optimizer


@pytest.mark.parametrize("is_recorded_again", [False, True])
def test_rows_that_an_older_version_stepped_otherwise_are_refused(tmp_path: Path, *, is_recorded_again: bool) -> None:
    """A conversion from Adam had no corrected_eps. The store trains on once it is altered."""
    model, optimizer = converted(torch.optim.Adam)
    schema, table = model.emb.schema, model.emb.schema.tables[0]
    older = replace(table, optimizer=replace(table.optimizer, corrected_eps=False))
    with opened(tmp_path, tc.convert(net(), replace(schema, tables=(older,))), None) as cache:
        assert cache._rows.state.optimizer.optimizer(0) == older.optimizer
        for p in cache.passes(epochs=1):
            p.skip()
    kind: type[Exception] = DatasetError
    words = ["corrected_eps=True", "but the dataset", "corrected_eps=False", "create the module with"]
    if is_recorded_again:
        shutil.rmtree(tmp_path / "keys")
        kind = TableMismatchError
        words = ["has optimizer {'corrected_eps': False}, but {'corrected_eps': True} was given", "alter the store"]
    with one_sentence(kind, *words):
        opened(tmp_path, model, optimizer)
    if is_recorded_again:
        with tc.Store.open(tmp_path / "m.tc") as store:
            alter(store, [table])
        with opened(tmp_path, model, optimizer) as cache:
            assert cache._rows.state.optimizer.optimizer(0) == table.optimizer


@pytest.mark.parametrize(
    ("name", "value", "when"),
    [("lr", 0.5, "before the cache"), ("lr", 0.5, "before the loop"), ("momentum", 0.25, "before the loop"),
     ("momentum", 0.25, "in the loop"), ("weight_decay", 0.125, "before the cache"),
     ("weight_decay", 0.125, "in the loop")],
)  # fmt: skip
def test_a_setting_of_dense_parameters_alone_is_named_once(tmp_path: Path, name: str, value: float, when: str) -> None:
    model, optimizer = converted()

    def change() -> None:
        state = optimizer.state_dict()
        optimizer.load_state_dict(state | {"param_groups": [group | {name: value} for group in state["param_groups"]]})

    if when == "before the cache":
        change()
    words = f"{name} of SGD was changed to {value} after tc.convert, but rows of 'emb' keep"
    with opened(tmp_path, model, optimizer) as cache, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if when == "before the loop":
            change()
        for p in cache.passes(epochs=2):
            if when == "in the loop" and p.index == 0:
                optimizer.param_groups[0][name] = value
            step(model, cache.optimizer)
    (found,) = caught
    assert words in str(found.message)


def both_sides(
    make: Callable[[Any], torch.optim.Optimizer] = momentum,
) -> tuple[Any, torch.optim.Optimizer, Any, torch.optim.Optimizer]:
    """Return a converted model and its optimizer, and the same of torch."""
    torch.manual_seed(0)
    model, optimizer = converted(make)
    theirs = net()
    theirs.load_state_dict({"emb.weight": model.emb.weights["emb"], **model.top.state_dict(prefix="top.")})
    return model, optimizer, theirs, make(theirs.parameters())


@pytest.mark.parametrize(("name", "value"), [("lr", 0.01), ("momentum", 0.25), ("weight_decay", 0.125)])
@pytest.mark.parametrize("when", ["before the loop", "in the loop"])
def test_a_setting_of_all_groups_reaches_the_rows(tmp_path: Path, name: str, value: float, when: str) -> None:
    """Before the loop as of a warm-up, which sets the rate when it is made. The first commit has no settings."""
    model, optimizer, theirs, reference = both_sides()
    for epochs in (1, 2):
        with opened(tmp_path, model, optimizer) as cache, warnings.catch_warnings():
            warnings.simplefilter("error")

            def change(cache: Any = cache) -> None:
                for group in (*cache.optimizer.param_groups, *reference.param_groups):
                    group[name] = value

            if when == "before the loop":
                change()
            for _ in cache.passes(epochs=epochs):
                if when == "in the loop":
                    change()
                step(model, cache.optimizer)
                step(theirs, reference)
            with torch.no_grad():
                torch.testing.assert_close(model.emb(KEYS), theirs.emb(KEYS))
        model, optimizer = converted()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-6])
def test_rows_of_adam_move_as_its_parameters_for_gradients_of_any_size(tmp_path: Path, kind: Any, scale: float) -> None:
    """Small ones are compared with eps, which torch adds after the correction of the root."""
    model, optimizer, theirs, reference = both_sides(lambda p: kind(p, lr=0.1, weight_decay=0.0))
    with opened(tmp_path, model, optimizer) as cache:
        for _ in cache.passes(epochs=2):
            step(model, cache.optimizer, scale)
            step(theirs, reference, scale)
        with torch.no_grad():
            torch.testing.assert_close(model.emb(KEYS), theirs.emb(KEYS), rtol=1e-5, atol=1e-5)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("make", "name", "value", "groups"),
    [(*setting, groups) for groups in ("all", "dense", "rows") for setting in (
        (momentum, "dampening", 0.5), (momentum, "maximize", True), (adagrad, "lr_decay", 0.5),
        (lambda p: torch.optim.Adam(p, lr=0.1), "amsgrad", True))]
    + [(adagrad, name, value, "rows") for name, value in (
        ("momentum", 0.9), ("nesterov", True), ("betas", (0.5, 0.9)))],
)  # fmt: skip
def test_a_setting_that_rows_lack_is_refused(tmp_path: Path, make: Any, name: str, value: Any, groups: str) -> None:
    model, optimizer = converted(make)
    with opened(tmp_path, model, optimizer) as cache:
        for p in cache.passes(epochs=1):
            with torch.no_grad():
                before = [model.emb(KEYS), model.top.weight.clone()]  # type: ignore[operator,union-attr]
            for group in cache.optimizer.param_groups:
                if groups in ("all", "rows" if "table" in group else "dense"):
                    group[name] = value
            with one_sentence(StateError, name, "no such setting"):
                step(model, cache.optimizer)
            with torch.no_grad():
                assert torch.equal(model.emb(KEYS), before[0])  # type: ignore[operator]
            assert torch.equal(model.top.weight, before[1])  # type: ignore[union-attr,arg-type]
            cache.optimizer.zero_grad()
            p.stop()


def test_rows_of_no_optimizer_do_not_step_by_the_default_in_another(tmp_path: Path) -> None:
    """A weight that was frozen in tc.convert has the default."""
    model = net()
    model.emb.requires_grad_(False)
    optimizer = torch.optim.SGD(model.top.parameters(), lr=0.5)
    tc.convert(model, optimizer=optimizer)
    words = "the default of tc.convert, but their model with SGD(lr=0.5)", "choose the optimizer of rows"
    with opened(tmp_path, model, optimizer) as cache:
        for p in cache.passes(epochs=1):
            step(model, cache.optimizer)
            model.emb.requires_grad_(True)
            cache.optimizer.add_param_group({"params": [*model.emb.parameters()]})
            with one_sentence(StateError, *words):
                step(model, cache.optimizer)
            cache.optimizer.zero_grad()
            p.stop()


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Adam, momentum])
def test_the_state_of_a_whole_table_is_refused(tmp_path: Path, kind: Any) -> None:
    """As of a checkpoint of a training in memory: rows have their state in the store."""
    before = net()
    trained = kind(before.parameters())
    step(before, trained)
    model, optimizer = converted(kind)
    optimizer.load_state_dict(trained.state_dict())
    told = f"{type(optimizer).__name__} has loaded state of shape (12, 4) for rows of emb"
    with one_sentence(StateError, told, "import"):
        opened(tmp_path, model, optimizer)
    optimizer = kind(model.parameters())
    with opened(tmp_path, model, optimizer) as cache:
        optimizer.load_state_dict(trained.state_dict())
        with one_sentence(StateError, "has loaded state of shape (12, 4)", "leave it out of the state dict"):
            next(iter(cache.passes(epochs=1)))


def test_a_store_that_was_altered_under_an_open_cache_is_not_trained(tmp_path: Path) -> None:
    """The cache has the earlier rate. Altered back, it goes on."""
    model, optimizer = converted(lambda parameters: torch.optim.SGD(parameters, lr=0.1))

    def epoch(cache: tc.TierCache, epochs: int) -> None:
        for _ in cache.passes(epochs=epochs):
            step(model, cache.optimizer)

    with opened(tmp_path, model, optimizer) as cache:
        epoch(cache, 1)
        (table,) = cache.store.tables
        alter(cache.store, [replace(table, optimizer=tc.optim.SGD(learning_rate=0.5))])
        with one_sentence(StateError, "changed while this cache was open", "close it and open a new one"):
            epoch(cache, 2)
        alter(cache.store, [table])
        epoch(cache, 2)
