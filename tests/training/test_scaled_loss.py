"""Rows follow a GradScaler, whatever the loop does with it: unscaled, skipped, or refused with a sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.amp import GradScaler

import tiercache as tc
from tests.training.cases import registered, tiered
from tests.training.test_bad_input import CASE, one_sentence, store, trained
from tiercache.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Trained = tc.TierCache | tc.InMemoryCache

__all__ = ["store", "trained"]  # fixtures


@pytest.fixture(params=["tiered", "resident"])
def cache(request: pytest.FixtureRequest, store: tc.Store, passes: tc.PassDataset) -> Iterator[Trained]:
    """A cache of either kind."""
    with tc.InMemoryCache(passes) if request.param == "resident" else tiered(store, passes) as made:
        yield made


def vectors_of(cache: Trained, p: Any) -> np.ndarray:
    """Return vectors of a table as of now."""
    keys = np.array(p.source.keys(CASE.tables[0].name))
    out = (np.empty((keys.size, CASE.tables[0].dim), np.float32),)
    cache.live_rows().fill(CASE.tables[0].name, keys, out)
    return out[0]


def opened(cache: Trained) -> tuple[Any, Any, Any, Any]:
    """Return the loop, the first pass, its first batch and what is trained."""
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


class OwnScale(GradScaler):
    """Scales by 4, as a subclass of its own may, and unscales by what the base class keeps."""

    def scale(self, outputs: Any) -> Any:
        """Scale."""
        return outputs * 4.0


@pytest.mark.parametrize("kind", [GradScaler, OwnScale])
def test_a_step_beside_the_scaler_is_refused(cache: Trained, kind: type[GradScaler]) -> None:
    """The gradients are too large, also by a scale of a subclass's own, as FSDP's has; no row has changed."""
    loop, pass_index, batch, (model, optimizer) = opened(cache)
    before = vectors_of(cache, pass_index)
    kind("cpu").scale(model(batch).sum()).backward()
    words = "parameters of the embedding modules", "scaler.step(optimizer)"
    with one_sentence(StateError, "scaled by a GradScaler", "were not unscaled", *words):
        optimizer.step()
    assert np.array_equal(vectors_of(cache, pass_index), before)
    loop.close()


def test_a_scaler_whose_optimizer_has_no_tables_is_refused(cache: Trained) -> None:
    """It unscales dense parameters alone."""
    model, _ = registered(cache, CASE)
    dense = torch.optim.SGD([p for name, p in model.named_parameters() if "handle" not in name], lr=0.1)
    loop = cache.passes(epochs=2)
    scaler = GradScaler("cpu")
    scaler.scale(model(next(next(loop).batches(16))).sum()).backward()
    scaler.step(dense)
    with one_sentence(StateError, "scaled by a GradScaler", "were not unscaled"):
        cache.optimizer.step()
    loop.close()


def test_an_overflow_skips_rows_too(cache: Trained) -> None:
    """No row changes, and the pass may end behind it."""
    loop, pass_index, batch, (model, optimizer) = opened(cache)
    before = vectors_of(cache, pass_index)
    scaler = GradScaler("cpu")
    scaler.scale(model(batch).sum() * 1e38).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert np.array_equal(vectors_of(cache, pass_index), before)
    assert not cache.optimizer.pending
    loop.close()


def test_a_rows_optimizer_takes_a_scaler_of_its_own(passes: tc.PassDataset) -> None:
    """``scaler.step(cache.optimizer)``: as with torch's optimizers."""
    model = Net()
    with tc.InMemoryCache(passes, model=model) as cache:
        loop = cache.passes(epochs=2)
        p = next(loop)
        before, scaler = vectors_of(cache, p), GradScaler("cpu")
        scaler.scale(model(next(p.batches(16))).sum()).backward()
        scaler.step(cache.optimizer)
        changed = vectors_of(cache, p) - before
        assert changed.any()
        assert np.abs(changed).max() < 100
        loop.close()


def test_the_first_loss_of_a_process_is_noticed_in_one_expression() -> None:
    """Python looks `scale` up before it calls the model, so a module watches scalers from when it is made."""
    code = (
        "import torch; from tests.training.test_scaled_loss import CASE; from torch.amp.grad_scaler import GradScaler; "
        "import tiercache as tc; before = GradScaler.scale; tc.EmbeddingCollection(CASE.schema); "
        "assert GradScaler.scale is not before"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


def test_a_scaler_of_another_model_disturbs_nobody(cache: Trained) -> None:
    """Its loss has no rows in it; that of the rows is not scaled, before it and after it."""
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


class Net(torch.nn.Module):
    """One vector for each id."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = tc.EmbeddingCollection(CASE.schema, [CASE.specs[0].name])

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        """Return all vectors."""
        return self.vectors(batch)[CASE.specs[0].name]
