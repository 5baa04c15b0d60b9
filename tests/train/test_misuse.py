"""Calls at the wrong moment and lookups of missing keys raise one clear error, and the store keeps its commit."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import tiercache as tc
from tests.train.cases import Net, open_store, registered, tiered
from tests.train.test_bad_input import CASE, one_sentence, store, trained
from tiercache.errors import BudgetError, StateError
from tiercache.train.cache import TierCache

__all__ = ["store", "trained"]  # fixtures


@pytest.fixture
def cache(store: tc.Store, passes: tc.PassDataset) -> Iterator[TierCache]:
    with tiered(store, passes) as cache:
        yield cache


@pytest.fixture(params=["tiered", "resident"])
def either(request: pytest.FixtureRequest, passes: tc.PassDataset) -> Any:
    """A cache of either kind."""
    return tc.InMemoryCache(passes) if request.param == "resident" else request.getfixturevalue("cache")


class Loop:
    def __init__(self, cache: TierCache) -> None:
        self.cache, self.schema, self.passes = cache, cache.schema, cache.passes(epochs=2)
        self.model, self.optimizer = registered(cache, CASE)

    def begin(self) -> tc.Pass:
        return next(self.passes)

    def batch(self) -> tc.Batch:
        return next(self.begin().batches(16))

    def bag(self, weights: dict[str, torch.Tensor], **mode: str) -> None:
        bag = tc.EmbeddingBagCollection(self.schema, ["f"], **mode).requires_grad_(False)
        bag(self.batch(), weights=weights)

    def step(self, **rates: float) -> None:
        batch = self.batch()
        for table in self.cache.optimizer.rows.param_groups:
            table["lr"] = rates.get(table["table"], table["lr"])
        self.model(batch).sum().backward()
        self.optimizer.step()


MODULES = (tc.EmbeddingBagCollection, tc.EmbeddingCollection)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        (lambda w: w.cache.commit(), StateError, ["commit() was called outside a pass"]),
        (lambda w: (w.begin(), w.cache.commit()), StateError, ["nothing to commit", "no batch of this pass"]),
        (
            lambda w: (w.model(w.batch()).sum().backward(), w.cache.commit()),
            StateError, ["between backward and step", "zero_grad()"],
        ),
        (lambda w: (batch := w.batch(), w.passes.close(), w.model(batch)), RuntimeError, ["has ended"]),
        (
            lambda w: (w.begin(), next(w.cache.passes(epochs=2)), w.begin()),
            StateError, ["replaced by a newer one", "one loop at a time"],
        ),
        *((lambda w, m=m: m(w.schema, ["f", "typo"]), ValueError, ["no feature 'typo'", "f, g, h"]) for m in MODULES),
        *((lambda w, m=m: m(w.schema, ["f", "f"]), ValueError, ["'f' was given twice"]) for m in MODULES),
        (
            lambda w: tc.EmbeddingBagCollection(w.schema, mode={"f": "median"}),
            ValueError, ["'f'", "'median'", "sum, mean, max"],
        ),
        (
            lambda w: tc.EmbeddingBagCollection(w.schema, mode={"typo": "mean"}),
            ValueError, ["mode= has 'typo'", "f, g, h"],
        ),
        (lambda w: w.bag({"f": torch.ones(3)}), ValueError, ["weights of feature 'f'", " ids"]),
        (lambda w: w.bag({"f": torch.ones(3, 1)}), ValueError, ["weights of feature 'f'", " ids"]),
        (lambda w: w.bag({"f": torch.ones(3, dtype=torch.float64)}), ValueError, ["'f'", "float64", "float32"]),
        (lambda w: w.bag({"g": torch.ones(16)}), ValueError, ["weights were given for 'g'", "looks up f"]),
        (
            lambda w: w.bag({"f": torch.ones(16)}, mode="max"),
            ValueError, ["'f' has weights and is pooled by max", "sum or mean"],
        ),
        *(
            (lambda w, r=r: w.step(a=r, b=r, c=r), ValueError, [f"learning rate {r}", "at least 0"])
            for r in (-0.1, float("nan"), float("inf"))
        ),
        (lambda w: w.step(a=0.1), ValueError, ["'a'", "'b'", "the same row layout", "lr 0.05 and 0.1", "set both"]),
    ],
)  # fmt: skip
def test_a_call_at_the_wrong_moment_or_of_what_is_not_there_is_refused(
    cache: TierCache, how: Callable[[Loop], object], kind: type[Exception], words: list[str]
) -> None:
    with one_sentence(kind, *words):
        how(Loop(cache))


def test_a_step_outside_a_pass_does_nothing(either: Any) -> None:
    model, optimizer = registered(either, CASE)
    for _ in range(2):
        before, steps = model.top.weight.clone(), either.optimizer.rows.steps
        model.top(torch.ones(2, model.top.in_features)).sum().backward()
        optimizer.step()
        either.optimizer.step()
        assert not torch.equal(model.top.weight, before)
        assert either.optimizer.rows.steps == steps
        loop = either.passes(epochs=2)
        next(loop)
        loop.close()


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_of_the_optimizer_is_refused(either: Any, how: Callable[[object], object]) -> None:
    """It would step the rows of no cache; its state can be copied."""
    registered(either, CASE)
    with one_sentence(TypeError, "cannot be copied or pickled", "cache.optimizer.state_dict()"):
        how(either.optimizer)
    how(either.optimizer.state_dict())


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_of_a_cache_is_refused(either: Any, how: Callable[[object], object]) -> None:
    with one_sentence(TypeError, "a cache cannot be copied or pickled", "cache.keep(name)"):
        how(either)


def test_a_module_with_its_cache_as_an_attribute_is_averaged(either: Any) -> None:
    """As Lightning's callbacks do with a module that returns cache.optimizer."""
    model, _ = registered(either, CASE)
    model.cache = either
    loop = either.passes(epochs=2)
    batch = next(next(loop).batches(16))
    average = AveragedModel(model)
    assert average.module.cache is either
    with torch.no_grad():
        assert torch.equal(average(batch), model(batch))


def test_rates_of_a_whole_group_are_taken(cache: TierCache) -> None:
    Loop(cache).step(a=0.2, b=0.2)
    assert 0.2 in cache.optimizer.rows.learning_rates


def test_gradients_left_at_the_end_of_a_pass_are_refused(either: Any) -> None:
    """Dense gradients would carry over into the next pass, but gradients of rows would not."""
    model, _ = registered(either, CASE)
    loop = either.passes(epochs=2)
    batch = next(next(loop).batches(16))
    model(batch).sum().backward()
    with one_sentence(StateError, "between backward and step", "step the optimizer", "zero_grad()"):
        next(loop)


@pytest.mark.parametrize("resident", [False, True])
def test_a_forgotten_track_is_refused_at_the_second_lookup(passes: tc.PassDataset, resident: bool) -> None:
    """Not at the end of the pass: the optimizer steps, but rows would not."""
    cache = tc.InMemoryCache(passes) if resident else tiered(open_store(passes.path, CASE, "memory"), passes)
    model = Net(cache, CASE)
    cache.register(model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = cache.passes(epochs=2)
    batches = next(loop).batches(16)
    model(next(batches)).sum().backward()
    optimizer.step()
    batch = next(batches)
    with one_sentence(StateError, "cache.optimizer was not stepped", "optimizer=..."):
        model(batch)
    with torch.no_grad():
        model(batch)  # leaves no gradients
    cache.optimizer.step()
    for batch in batches:  # rows are stepped by hand, also every other batch
        model(batch).sum().backward()
        model(batch).sum().backward()
        cache.optimizer.step()
    loop.close()
    cache.close()


@pytest.mark.parametrize("resident", [False, True])
def test_a_model_of_rows_alone_accumulates_gradients_at_once(passes: tc.PassDataset, resident: bool) -> None:
    store = open_store(passes.path, CASE, "memory")
    model = tc.EmbeddingBagCollection(passes.schema)
    trained: Any = tc.InMemoryCache(passes, model=model) if resident else tiered(store, passes, model=model)
    loop = trained.passes(epochs=1)
    for micro_batches in next(loop).steps(16, micro_batches=4):
        for batch in micro_batches:
            model(batch).sum().backward()
        trained.optimizer.step()
    for batch in next(loop).batches(16):
        model(batch).sum().backward()
    with one_sentence(StateError, "between backward and step", "step the optimizer"):
        next(loop)
    trained.close()


def test_a_second_cache_on_a_store_is_refused(cache: TierCache, store: tc.Store, passes: tc.PassDataset) -> None:
    registered(cache, CASE)
    with tiered(store, passes) as other:
        registered(other, CASE)
        loop = cache.passes(epochs=2)
        next(loop)
        with one_sentence(StateError, "is being trained by another TierCache", "end its loop", "close it"):
            next(other.passes(epochs=2))
        with one_sentence(StateError, "is being trained by another TierCache"):
            tiered(store, passes)
        loop.close()
        next(other.passes(epochs=2))
        other.close()
    next(cache.passes(epochs=2))


def test_a_batch_is_refused_after_its_pass_ended(store: tc.Store, passes: tc.PassDataset) -> None:
    """Its local ids mean other rows in the next pass: neither lookup nor backward works."""
    with tiered(store, passes, commit_every=100) as cache:
        loop = Loop(cache)
        p = loop.begin()
        batch = next(p.batches(16))
        loss = loop.model(batch).sum()
        p.skip()
        loop.model(loop.batch())
        with one_sentence(RuntimeError, "pass 3", "has ended", "inside their own loop"):
            loop.model(batch)
        with one_sentence(RuntimeError, "pass 3", "has ended"):
            loss.backward()
        assert not cache.optimizer.rows.pending
        loop.passes.close()


def test_a_loop_left_open_is_silent_when_the_store_is_closed(passes: tc.PassDataset) -> None:
    """An error in the loop's body keeps the loop alive until store and cache are closed: no warning for that."""
    with open_store(passes.path, CASE, "memory") as memory, tiered(memory, passes) as cache:
        loop = Loop(cache)
        loop.batch()
    loop.passes.close()


def test_a_cache_closes_after_its_store(tmp_path: Path, passes: tc.PassDataset) -> None:
    before = set(threading.enumerate())
    store = tc.Store.open(tmp_path / "other.tc", tables=CASE.tables)
    cache = tiered(store, passes)
    next(cache.passes(epochs=1))
    assert set(threading.enumerate()) - before
    store.close()
    cache.close()
    assert not [t for t in threading.enumerate() if t not in before and t.is_alive()]


def test_a_dropped_loop_that_the_reader_collects_holds_nobody_up(cache: TierCache) -> None:
    """Garbage is collected on any running thread: the reader would wait for itself."""
    registered(cache, CASE)
    loop = cache.passes(epochs=2)
    first = next(loop)
    cache._rows.transfer._reader.submit(loop.close).result(timeout=20)
    assert next(cache.passes(epochs=2)).index == first.index


def test_a_slice_of_evaluation_is_refused_after_it_ended(cache: TierCache, passes: tc.PassDataset) -> None:
    model, _ = registered(cache, CASE)
    cache.restore()
    slices = cache.evaluate(passes)
    batch = next(next(slices).batches(16))
    next(slices)
    with one_sentence(RuntimeError, "evaluation sub-dataset 0", "has ended"):
        model(batch)


def test_an_evaluation_budget_below_the_rows_of_one_sample_is_refused(store: tc.Store, passes: tc.PassDataset) -> None:
    with tiered(store, passes, eval_budget=30) as cache, one_sentence(BudgetError, "sample", "eval_budget", "raise"):
        list(cache.evaluate(passes))


@pytest.mark.parametrize("epochs", [-1, 1.0, "1", None])
def test_what_is_no_number_of_epochs_is_refused(cache: TierCache, passes: tc.PassDataset, epochs: Any) -> None:
    for one in (cache, tc.InMemoryCache(passes)):
        with one_sentence(ValueError, f"epochs is {epochs!r}"):
            next(one.passes(epochs))
    assert list(tc.InMemoryCache(passes).passes(0)) == []


@pytest.mark.parametrize("name", [field.name for field in fields(tc.TierCacheOptions)])
def test_an_argument_that_moved_to_the_options_says_so(passes: tc.PassDataset, name: str) -> None:
    for make in (partial(tc.TierCache, "model.tc", passes), partial(tc.InMemoryCache, passes)):
        with one_sentence(TypeError, f"options=tc.TierCacheOptions({name}=...)"):
            make(**{name: None})
        with one_sentence(TypeError, "unexpected keyword argument 'devise'"):
            make(devise="cpu")


@pytest.mark.parametrize("name", ["comm_dtype", "on_nonfinite"])
def test_an_unknown_word_in_the_options_is_refused(name: str) -> None:
    with one_sentence(ValueError, f"unknown {name} 'int8': expected one of '"):
        tc.TierCacheOptions(**{name: "int8"})


def test_a_cache_is_shown_with_its_store_and_its_place(tmp_path: Path, passes: tc.PassDataset) -> None:
    with tiered(tmp_path / "s.tc", passes) as cache:
        assert repr(cache) == f"<TierCache: the store {tmp_path / 's.tc'}, next pass 0>"
        for p in cache.passes(epochs=1):
            p.skip()
        assert repr(cache) == f"<TierCache: the store {tmp_path / 's.tc'}, next pass {len(passes)}>"
    assert repr(cache) == f"<TierCache: the store {tmp_path / 's.tc'}, closed>"
    with tc.InMemoryCache(passes) as cache:
        assert repr(cache) == "<InMemoryCache: rows in memory, next pass 0>"
