"""Rows follow a GradScaler, in any use by the loop: unscaled, or skipped."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.amp import GradScaler

import tiercache as tc
from tests.train.cases import registered, tiered
from tests.train.test_bad_input import CASE, one_sentence, store, trained
from tiercache.errors import StateError

__all__ = ["store", "trained"]  # fixtures
Trained = tc.TierCache | tc.InMemoryCache


@pytest.fixture(params=["tiered", "resident"])
def cache(request: pytest.FixtureRequest, store: tc.Store, passes: tc.PassDataset) -> Iterator[Trained]:
    with tc.InMemoryCache(passes) if request.param == "resident" else tiered(store, passes) as made:
        yield made


def vectors_of(cache: Trained, p: Any) -> np.ndarray:
    keys = np.array(p.source.keys(CASE.tables[0].name))
    out = (np.empty((keys.size, CASE.tables[0].dim), np.float32),)
    cache.live_rows().fill(CASE.tables[0].name, keys, out)
    return out[0]


def opened(cache: Trained) -> tuple[Any, Any, Any, Any]:
    trained, loop = registered(cache, CASE), cache.passes(epochs=2)
    p = next(loop)
    return loop, p, next(p.batches(16)), trained


SCALED: dict[str, Callable[[GradScaler, torch.Tensor], None]] = {
    "one loss": lambda scaler, loss: scaler.scale(loss).backward(),
    "a list": lambda scaler, loss: scaler.scale([loss])[0].backward(),
    "an iterator": lambda scaler, loss: next(iter(scaler.scale(iter([loss])))).backward(),
    "torch.autograd.backward": lambda scaler, loss: torch.autograd.backward([scaler.scale(loss)]),
    "twice": lambda scaler, loss: [scaler.scale(loss / 2).backward(retain_graph=True) for _ in range(2)],
}


@pytest.mark.parametrize("how", SCALED)
def test_a_scaled_loss_trains_rows_as_one_that_is_not(tmp_path: Path, passes: tc.PassDataset, how: str) -> None:
    """To the same bits: a scale is a power of two."""
    found = []
    for enabled in (False, True):
        with tc.InMemoryCache(passes) as cache:
            torch.manual_seed(0)
            loop, pass_index, batch, (model, optimizer) = opened(cache)
            scaler = GradScaler("cpu", enabled=enabled)
            SCALED[how](scaler, model(batch).sum())
            scaler.step(optimizer)
            scaler.update()
            found.append(vectors_of(cache, pass_index))
            loop.close()
    assert np.array_equal(*found)


def test_a_scaled_step_of_dense_parameters_alone_is_refused(cache: Trained) -> None:
    """It would unscale only them, not rows; none has changed."""
    loop, p, batch, (model, _) = opened(cache)
    before, scaler = vectors_of(cache, p), GradScaler("cpu")
    scaler.scale(model(batch).sum()).backward()
    with one_sentence(StateError, "SGD was stepped by itself", "optimizer = cache.optimizer"):
        scaler.step(cache.optimizer.dense[0])
    assert np.array_equal(vectors_of(cache, p), before)
    loop.close()


@pytest.mark.parametrize(
    ("twice", "words"),
    [
        (True, ("changed twice", "pass cache.optimizer to both")),
        (False, ("by scaler.unscale_", "pass cache.optimizer to the scaler")),
    ],
)
def test_gradients_unscaled_for_an_own_optimizer_first_are_refused(
    passes: tc.PassDataset, twice: bool, words: tuple[str, ...]
) -> None:
    """Dense gradients are divided by the scale once more than those of rows. No row moves."""
    with tc.InMemoryCache(passes) as cache:
        loop, p, batch, (model, optimizer) = opened(cache)
        before, scaler = vectors_of(cache, p), GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(batch).sum()).backward()
        scaler.unscale_(cache.optimizer.dense[0])
        with one_sentence(StateError, *words):
            scaler.step(optimizer) if twice else optimizer.step()
        assert np.array_equal(vectors_of(cache, p), before)
        cache.optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        assert not np.array_equal(vectors_of(cache, p), before)
        loop.close()


class Pair(torch.nn.Module):
    """Two lookups of one table, whose outputs are combined in many ways."""

    def __init__(self, how: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        name = CASE.specs[0].name
        self.one, self.two, self.how = tc.Embedding(CASE.schema, name), tc.EmbeddingCollection(CASE.schema, [name]), how

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        return self.how(self.one(batch), self.two(batch)[CASE.specs[0].name])


MEETINGS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a sum": lambda a, b: (a + b).square().sum(),
    "a sum whose gradient is one number": lambda a, b: a.sum() + b.sum(),
    "a difference": lambda a, b: (a - b).square().sum(),
    "side by side": lambda a, b: torch.cat([a, b], dim=1).square().sum(),
    "stacked": lambda a, b: torch.stack([a, b]).square().sum(),
    "an output twice": lambda a, b: (a + a * 2 + b).square().sum(),
    "a view and its whole": lambda a, b: (a.flatten() + b.reshape(-1)).square().sum(),
}


@pytest.mark.parametrize("how", MEETINGS)
@pytest.mark.parametrize("clips", [False, True])
def test_gradients_that_share_memory_are_unscaled_once(passes: tc.PassDataset, how: str, clips: bool) -> None:
    """Autograd passes one tensor to both sides of a sum; rows end with the bits of a loop without a scale."""
    found = []
    for scale in (1.0, 2.0**12):
        torch.manual_seed(0)
        model = Pair(MEETINGS[how])
        with tc.InMemoryCache(passes, model=model) as cache:
            loop, scaler = cache.passes(epochs=2), GradScaler("cpu", init_scale=scale)
            p = next(loop)
            scaler.scale(model(next(p.batches(16)))).backward()
            scaler.unscale_(cache.optimizer)
            if clips:
                torch.nn.utils.clip_grad_norm_([x for g in cache.optimizer.param_groups for x in g["params"]], 0.01)
            scaler.step(cache.optimizer)
            scaler.update()
            found.append(vectors_of(cache, p))
            loop.close()
    assert np.array_equal(*found)


def test_an_overflow_skips_rows_too(cache: Trained) -> None:
    loop, pass_index, batch, (model, optimizer) = opened(cache)
    before = vectors_of(cache, pass_index)
    scaler = GradScaler("cpu")
    scaler.scale(model(batch).sum() * 1e38).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert np.array_equal(vectors_of(cache, pass_index), before)
    assert not cache.optimizer.rows.pending, "what was skipped waits for no step"
    loop.close()


def test_a_scaler_of_another_model_disturbs_nobody(cache: Trained) -> None:
    """Its loss has no rows; the loss of the rows is not scaled, before it and after it."""
    model, optimizer = registered(cache, CASE)
    other, scaler = torch.nn.Linear(3, 1), GradScaler("cpu")
    passes = cache.passes(epochs=2)
    for batch in next(passes).batches(16):
        optimizer.zero_grad()
        scaler.scale(other(torch.ones(2, 3)).sum()).backward()
        model(batch).sum().backward()
        scaler.scale(other(torch.ones(2, 3)).sum()).backward()
        optimizer.step()
    passes.close()
