"""Objects that the cache was not given are named before they are lost: models, parameters, state, rates of rows."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel

import tiercache as tc
from tests.train.cases import Case, Kept, Net, Spec, registered, run, table, tiered
from tests.train.loops import descend, first_pass
from tests.train.test_bad_input import one_sentence
from tiercache.errors import StateError
from tiercache.store import MemoryEngine

CASE = Case(
    tables=(table("a", 4, tc.optim.SGD(learning_rate=0.1)), table("b", 6)),
    specs=(Spec(name="f", table="a", hotness="ragged"), Spec(name="g", table="b")),
    num_samples=64, pass_rows=32, num_keys=60,
)  # fmt: skip


@pytest.fixture
def store() -> Iterator[tc.Store]:
    with tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine()) as made:
        yield made


@pytest.fixture
def cache(store: tc.Store, passes: tc.PassDataset) -> Iterator[tc.TierCache]:
    with tiered(store, passes) as made:
        yield made


def sgd(*modules: nn.Module, more: list[torch.Tensor] | None = None) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()] + (more or []), lr=0.1)


OTHERS: dict[str, Callable[[Any, Net], nn.Module]] = {
    "another model": lambda cache, model: Net(cache, CASE),
    "a model that was trained by another cache": lambda cache, model: given_elsewhere(Net(cache, CASE), cache),
    "a module of another kind": lambda cache, model: nn.Sequential(tc.Embedding(cache.schema, "g")),
    "a module without a model": lambda cache, model: tc.EmbeddingBagCollection(cache.schema),
    "a compiled model": lambda cache, model: torch.compile(Net(cache, CASE), backend="eager"),
}


def given_elsewhere(model: Net, cache: Any) -> Net:
    tc.InMemoryCache(cache.dataset, model=model).close()
    return model


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("given", [True, False])
def test_a_model_that_the_cache_was_not_given_trains_no_rows(cache: tc.TierCache, what: str, given: bool) -> None:
    model = Net(cache, CASE)
    cache.register(**({"model": model} if given else {}))
    other = OTHERS[what](cache, model)
    with first_pass(cache) as p:
        batch = next(p.batches(16))
        with one_sentence(StateError, "belongs to no model of this cache", "model=...", "requires_grad_(False)"):
            other(batch)
        with torch.no_grad():
            other(batch)
        other.requires_grad_(False)
        other(batch)
        cache.register(other=other.requires_grad_(True))
        descend(other(batch).sum(), cache.optimizer)
    assert cache.optimizer.rows.steps == 1


@pytest.mark.parametrize("how", ["copy", "average", "copy of a copy"])
def test_a_copy_of_a_model_reads_rows_and_trains_none(cache: tc.TierCache, how: str) -> None:
    model = Net(cache, CASE)
    cache.register(model=model)
    other: Any = AveragedModel(model) if how == "average" else copy.deepcopy(model)
    with first_pass(cache) as p:
        batch = next(p.batches(16))
        assert torch.equal(other(batch).detach(), model(batch).detach())
        with one_sentence(StateError, "belongs to no model of this cache", "register()"):
            (copy.deepcopy(other) if "of" in how else other)(batch).sum().backward()
    assert cache.optimizer.rows.steps == 0


HIDDEN: dict[str, Callable[[Net], tuple[dict[str, Any], int]]] = {
    "no model": lambda model: ({"optimizer": sgd(model)}, 3),
    "the embedding modules alone": lambda model: ({"model": model.bag, "optimizer": sgd(model)}, 2),
    "the dense part alone": lambda model: ({"model": model.top, "optimizer": sgd(model)}, 1),
    "a loss with weights": lambda model: ({"model": model, "optimizer": sgd(model, nn.Linear(2, 2))}, 2),
    "a parameter alone": lambda model: (
        {"model": model, "optimizer": sgd(model, more=[nn.Parameter(torch.ones(()))])}, 1),
    "in the second optimizer": lambda model: (
        {"model": model, "optimizer": sgd(model), "other": sgd(nn.Linear(1, 1))}, 2),
    "in the second group": lambda model: (
        {"model": model, "optimizer": torch.optim.SGD(
            [{"params": [*model.parameters()]}, {"params": [nn.Parameter(torch.ones(5))], "lr": 1.0}], lr=0.1)}, 1),
}  # fmt: skip


@pytest.mark.parametrize("what", HIDDEN)
def test_parameters_that_no_commit_would_keep_are_refused_before_training(cache: tc.TierCache, what: str) -> None:
    objects, count = HIDDEN[what](Net(cache, CASE))
    cache.register(**objects)
    name = "other" if "other" in objects else "optimizer"
    with one_sentence(StateError, f"{name} steps {count} parameters that no registered module has", "model=..."):
        next(cache.passes(epochs=1))
    assert cache.store.commit is None


def test_parameters_that_an_object_of_ones_own_keeps_are_committed(cache: tc.TierCache) -> None:
    temperature, kept, model = nn.Parameter(torch.ones(())), Kept(), Net(cache, CASE)
    kept.state = {"inside": [temperature.detach()]}
    cache.register(model=model, kept=kept, optimizer=sgd(model, more=[temperature]))
    assert next(cache.passes(epochs=1)).index == 0


EVALUATIONS: dict[str, Callable[[tc.TierCache], object]] = {
    "evaluate": lambda cache: next(cache.evaluate(cache.dataset)),
    "evaluate_batch": lambda cache: cache.evaluate_batch(
        {"f": (np.zeros(2, np.int64), np.arange(3)), "g": np.zeros(2, np.int64)}),
}  # fmt: skip


@pytest.mark.parametrize("how", EVALUATIONS)
def test_trained_rows_are_not_evaluated_under_an_old_model(store: tc.Store, passes: tc.PassDataset, how: str) -> None:
    evaluate, refused = EVALUATIONS[how], ("model was not restored from commit", "cache.restore()")
    with tiered(store, passes) as cache:
        model, optimizer = registered(cache, CASE)
        evaluate(cache)
        run(cache, CASE, model, optimizer, epochs=1)
        evaluate(cache)
    with tiered(store, passes) as cache:
        evaluate(cache)  # no model is the cache's
        other, _ = registered(cache, CASE, seed=2)
        with one_sentence(StateError, *refused):
            evaluate(cache)
        cache.restore()
        assert torch.equal(other.top.weight, model.top.weight)
        evaluate(cache)
        cache.register(model=Net(cache, CASE))
        with one_sentence(StateError, *refused):
            evaluate(cache)
    with tiered(store, passes) as cache:
        registered(cache, CASE)
        assert list(cache.passes(epochs=1)) == []
        evaluate(cache)


def by_hand(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def decay() -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    return decay


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Callable[[], None]]] = {
    "StepLR": lambda optimizer: StepLR(optimizer, 1).step,
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda _: 0.0).step,
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 9).step,
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 1.0, total_steps=99, cycle_momentum=False).step,
    "a sequence": lambda optimizer: (
        SequentialLR(optimizer, [StepLR(optimizer, 1), StepLR(optimizer, 2)], milestones=[2]).step
    ),
    "by hand": by_hand,
}


def rates_warnings(cache: Any, schedule: Any, *, late: bool) -> int:
    """Return how often a cache warned of rates."""
    model = Net(cache, CASE)
    optimizer = sgd(model)
    cache.register(model=model, optimizer=optimizer)
    change = None if late else schedule(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for p in cache.passes(epochs=2):
            for batch in p.batches(16):
                change = change or schedule(optimizer)
                descend(model(batch).square().mean(), cache.optimizer)
                change()
    return sum("create the scheduler for cache.optimizer" in str(one.message) for one in caught)


@pytest.mark.parametrize("what", SCHEDULES)
@pytest.mark.parametrize(("late", "resident"), [(False, True), (True, False)])
def test_a_schedule_that_rows_do_not_follow_is_named_once(
    store: tc.Store, passes: tc.PassDataset, what: str, late: bool, resident: bool
) -> None:
    with tc.InMemoryCache(passes) if resident else tiered(store, passes) as cache:
        assert rates_warnings(cache, SCHEDULES[what], late=late) == 1


@pytest.mark.parametrize("what", ["none", "of both", "rows by hand"])
def test_rates_that_rows_follow_are_not_named(cache: tc.TierCache, what: str) -> None:
    schedules = {
        "none": lambda _: lambda: None,
        "of both": lambda _: StepLR(cache.optimizer, 1).step,
        "rows by hand": lambda _: by_hand(cache.optimizer),
    }
    assert rates_warnings(cache, schedules[what], late=False) == 0


@pytest.mark.parametrize("resident", [False, True])
def test_an_initialization_of_anchors_is_refused(store: tc.Store, passes: tc.PassDataset, resident: bool) -> None:
    """When a cache first gets the model: later, any optimizer may have moved the parameter."""
    net = nn.ModuleDict({"rows": tc.EmbeddingBagCollection(CASE.schema), "top": nn.Linear(10, 1)})

    def opened() -> Any:
        return tc.InMemoryCache(passes, model=net) if resident else tiered(store, passes, model=net)

    for part in (net["top"], net):
        for parameter in part.parameters():
            nn.init.normal_(parameter)
        opened().close()
    net["rows"] = tc.EmbeddingBagCollection(CASE.schema).to(torch.bfloat16)
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.5)
    with one_sentence(ValueError, "the parameter of model.rows was overwritten (0.5", "exclude model.rows.anchor"):
        opened()


@pytest.mark.parametrize("copies", [False, True])
def test_an_initialization_of_matrices_is_refused_in_a_copy_too(passes: tc.PassDataset, copies: bool) -> None:
    """A loop that leaves out biases means embeddings too. A copy of a trained model has the parameter of that one."""
    net: nn.Module = nn.ModuleDict({"rows": tc.EmbeddingBagCollection(CASE.schema), "top": nn.Linear(10, 1)})
    net = copy.deepcopy(net) if copies else net
    kept = copy.deepcopy(net)
    tc.InMemoryCache(passes, model=kept).close()
    for model in (net, kept):
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
    with one_sentence(ValueError, "the parameter of model.rows was overwritten", "exclude model.rows.anchor"):
        tc.InMemoryCache(passes, model=net)
    tc.InMemoryCache(passes, model=copy.deepcopy(kept)).close()
