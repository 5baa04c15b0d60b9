"""Calls at the wrong moment and lookups of what is not there get one sentence, and the store keeps its commit."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tiercache as tc
from tests.training.cases import Net, tiered
from tests.training.test_bad_input import CASE, one_sentence, passes, store, tracked
from tiercache.errors import BudgetError, StateError
from tiercache.store import MemoryEngine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tiercache.training.cache import TierCache

__all__ = ["passes", "store"]  # fixtures


@pytest.fixture
def cache(store: tc.Store, passes: tc.PassDataset) -> Iterator[TierCache]:
    """A cache on a store after one epoch of three passes."""
    with tiered(store, passes) as cache:
        yield cache


def first_batch(cache: TierCache, model: Net | None = None) -> tuple[Any, tc.Batch]:
    """Begin the next pass; returns the loop over passes and a batch."""
    if model is None:
        tracked(cache)
    passes = cache.passes(epochs=2)
    return passes, next(next(passes).batches(16))


def test_a_step_outside_a_pass_is_refused(cache: TierCache) -> None:
    """Neither step() nor a tracked optimizer steps rows that are on no device."""
    _, optimizer = tracked(cache)
    with one_sentence(StateError, "rows were stepped outside a pass", "inside the loop"):
        cache.optimizer.step()
    with one_sentence(StateError, "rows were stepped outside a pass"):
        optimizer.step()


def test_a_commit_outside_a_pass_is_refused(cache: TierCache) -> None:
    """A pass commits by itself when it ends."""
    with one_sentence(StateError, "commit() was called outside a pass"):
        cache.commit()


def test_a_commit_between_backward_and_step_is_refused(cache: TierCache) -> None:
    """Gradients belong to no commit; after a step or zero_grad() it is possible again."""
    model, _ = tracked(cache)
    passes, batch = first_batch(cache, model)
    model(batch).sum().backward()
    with one_sentence(StateError, "between backward and step", "zero_grad()"):
        cache.commit()
    passes.close()


@pytest.mark.parametrize("resident", [False, True])
def test_gradients_left_at_the_end_of_a_pass_are_refused(
    cache: TierCache, passes: tc.PassDataset, resident: bool
) -> None:
    """Dense gradients would go on into the next pass, and those of rows would not."""
    trained: Any = tc.InMemoryCache(passes) if resident else cache
    model, _ = tracked(trained)
    loop = trained.passes(epochs=2)
    batch = next(next(loop).batches(16))
    model(batch).sum().backward()
    with one_sentence(StateError, "between backward and step", "step the optimizer", "zero_grad()"):
        next(loop)


@pytest.mark.parametrize("resident", [False, True])
def test_a_forgotten_track_is_refused_at_the_second_lookup(passes: tc.PassDataset, resident: bool) -> None:
    """Not when the pass has ended: the optimizer steps, and rows would not."""
    new = tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine())
    trained: Any = tc.InMemoryCache(passes) if resident else tiered(new, passes)
    model = Net(trained, CASE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = trained.passes(epochs=2)
    batches = next(loop).batches(16)
    model(next(batches)).sum().backward()
    optimizer.step()
    batch = next(batches)
    with one_sentence(StateError, "the cache has no optimizer", "optimizer=..."):
        model(batch)
    with torch.no_grad():
        model(batch)  # leaves no gradients
    trained.optimizer.step()
    for batch in batches:  # rows are stepped by hand, also every other batch
        model(batch).sum().backward()
        model(batch).sum().backward()
        trained.optimizer.step()
    loop.close()
    trained.close()


def test_a_second_cache_on_a_store_in_training_is_refused(
    cache: TierCache, store: tc.Store, passes: tc.PassDataset
) -> None:
    """Both would commit to it; when the first has ended, or is closed, the store is free."""
    tracked(cache)
    with tiered(store, passes) as other:
        tracked(other)
        loop = cache.passes(epochs=2)
        next(loop)
        with one_sentence(StateError, "is being trained by another TierCache", "end its loop", "close it"):
            next(other.passes(epochs=2))
        with one_sentence(StateError, "is being trained by another TierCache"):
            tiered(store, passes)
        loop.close()
        loop = other.passes(epochs=2)
        next(loop)
        other.close()
    loop = cache.passes(epochs=2)
    next(loop)
    loop.close()


def test_a_commit_before_the_first_batch_is_refused(cache: TierCache) -> None:
    """The last commit stands there already."""
    tracked(cache)
    passes = cache.passes(epochs=2)
    next(passes)
    with one_sentence(StateError, "nothing to commit", "no batch of this pass"):
        cache.commit()
    passes.close()


def test_a_batch_is_refused_after_its_pass_ended(store: tc.Store, passes: tc.PassDataset) -> None:
    """Its local ids mean other rows in the next pass: neither lookup nor backward goes on."""
    with tiered(store, passes, commit_every=100) as cache:
        model, _ = tracked(cache)
        loop, batch = first_batch(cache, model)
        loss = model(batch).sum()
        model(next(next(loop).batches(16)))
        with one_sentence(RuntimeError, "pass 3", "has ended", "inside their own loop"):
            model(batch)
        with one_sentence(RuntimeError, "pass 3", "has ended"):
            loss.backward()
        assert not cache.optimizer.pending
        loop.close()


def test_a_batch_is_refused_after_the_loop_was_left(cache: TierCache) -> None:
    """Leaving the loop ends the pass, and drops what was trained in it."""
    model, _ = tracked(cache)
    passes, batch = first_batch(cache, model)
    passes.close()
    with one_sentence(RuntimeError, "has ended"):
        model(batch)


def test_a_loop_left_open_is_silent_when_the_store_is_closed(passes: tc.PassDataset) -> None:
    """An error in the loop's body keeps the loop alive until store and cache are closed: nothing is said about that."""
    with tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine()) as memory, tiered(memory, passes) as cache:
        loop, _ = first_batch(cache)
    loop.close()


def test_a_cache_closes_after_its_store(tmp_path: Path, passes: tc.PassDataset) -> None:
    """In whatever order two things are closed, threads end and nothing is raised."""
    before = set(threading.enumerate())
    store = tc.Store.open(tmp_path / "other.tc", tables=CASE.tables)
    cache = tiered(store, passes)
    next(cache.passes(epochs=1))
    assert set(threading.enumerate()) - before
    store.close()
    cache.close()
    assert not [t for t in threading.enumerate() if t not in before and t.is_alive()]


def test_a_second_loop_over_the_passes_ends_the_first(cache: TierCache) -> None:
    """One loop at a time: the older one is told so."""
    tracked(cache)
    older = cache.passes(epochs=2)
    next(older)
    newer = cache.passes(epochs=2)
    next(newer)
    with one_sentence(StateError, "replaced by a newer one", "one loop at a time"):
        next(older)
    newer.close()


def test_a_slice_of_evaluation_is_refused_after_it_ended(cache: TierCache, passes: tc.PassDataset) -> None:
    """Its rows are gone when the next slice is asked for."""
    model, _ = tracked(cache)
    slices = cache.evaluate(passes)
    batch = next(next(slices).batches(16))
    next(slices)
    with one_sentence(RuntimeError, "evaluation sub-dataset 0", "has ended"):
        model(batch)


def test_batches_of_no_samples_are_refused(cache: TierCache) -> None:
    """A batch has at least one sample."""
    tracked(cache)
    passes = cache.passes(epochs=2)
    p = next(passes)
    with one_sentence(ValueError, "batch of 0 samples", "at least 1"):
        next(p.batches(0))
    passes.close()


def test_an_unknown_feature_is_refused(cache: TierCache) -> None:
    """The error names the features there are."""
    for module in (tc.EmbeddingBagCollection, tc.EmbeddingCollection):
        with one_sentence(ValueError, "no feature 'typo'", "f, g, h"):
            module(cache.schema, ["f", "typo"])
        with one_sentence(ValueError, "'f' was given twice"):
            module(cache.schema, ["f", "f"])


def test_an_unknown_mode_is_refused(cache: TierCache) -> None:
    """The error names the modes there are; a mode for a feature that is not looked up is a typing error."""
    with one_sentence(ValueError, "'f'", "'median'", "sum, mean, max"):
        tc.EmbeddingBagCollection(cache.schema, mode={"f": "median"})
    with one_sentence(ValueError, "mode was given for 'typo'", "f, g, h"):
        tc.EmbeddingBagCollection(cache.schema, mode={"typo": "mean"})


def test_weights_of_another_shape_or_feature_are_refused(cache: TierCache) -> None:
    """One weight for each id of the batch, for a feature that is looked up."""
    bag = tc.EmbeddingBagCollection(cache.schema, ["f"])
    passes, batch = first_batch(cache)
    ids = batch.ids["f"].num_ids
    for shape in ((ids + 1,), (ids, 1)):
        with one_sentence(ValueError, "weights of feature 'f'", f"its {ids} ids"):
            bag(batch, weights={"f": torch.ones(shape)})
    with one_sentence(ValueError, "weights were given for 'g'", "looks up f"):
        bag(batch, weights={"g": torch.ones(16)})
    with one_sentence(ValueError, "weights of feature 'f'", "float64", "float32"):
        bag(batch, weights={"f": torch.ones(ids, dtype=torch.float64)})
    passes.close()


def test_max_takes_no_weights(cache: TierCache) -> None:
    """A weighted maximum is no definition of ours."""
    bag = tc.EmbeddingBagCollection(cache.schema, ["f"], mode="max")
    passes, batch = first_batch(cache)
    with one_sentence(ValueError, "'f' has weights and is pooled by max", "sum or mean"):
        bag(batch, weights={"f": torch.ones(batch.ids["f"].num_ids)})
    passes.close()


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf")])
def test_a_learning_rate_that_is_no_rate_is_refused(cache: TierCache, rate: float) -> None:
    """Rates are finite and not negative."""
    with one_sentence(ValueError, f"learning rate {rate}", "at least 0"):
        train_one(cache, {"a": rate, "b": rate, "c": rate})


def test_a_learning_rate_for_a_part_of_a_group_is_refused(cache: TierCache) -> None:
    """Tables of one row layout step together: the error names both."""
    with one_sentence(ValueError, "'a'", "'b'", "one row layout", "lr 0.05 and 0.1", "set both"):
        train_one(cache, {"a": 0.1})
    train_one(cache, {"a": 0.2, "b": 0.2})
    assert 0.2 in cache.optimizer.learning_rates


def train_one(cache: TierCache, rates: dict[str, float]) -> None:
    """Train a batch with these rates."""
    model, optimizer = tracked(cache)
    passes = cache.passes(epochs=2)
    p = next(passes)
    for table in cache.optimizer.param_groups:
        table["lr"] = rates.get(table["table"], table["lr"])
    model(next(p.batches(16))).sum().backward()
    try:
        optimizer.step()
    finally:
        passes.close()


def test_an_evaluation_budget_below_the_rows_of_one_sample_is_refused(store: tc.Store, passes: tc.PassDataset) -> None:
    """The error names the sample, what its rows take, and the budget."""
    with tiered(store, passes, eval_budget=30) as cache, one_sentence(BudgetError, "sample", "eval_budget", "raise"):
        list(cache.evaluate(passes))
