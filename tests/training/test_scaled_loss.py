"""Row gradients that a GradScaler scaled are refused before a step, whatever the loop does with the scaler."""

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
from tests.training.cases import tiered
from tests.training.test_bad_input import CASE, one_sentence, passes, store, tracked
from tiercache.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Trained = tc.TierCache | tc.ResidentCache

__all__ = ["passes", "store"]  # fixtures


@pytest.fixture(params=["tiered", "resident"])
def cache(request: pytest.FixtureRequest, store: tc.Store, passes: tc.PassSet) -> Iterator[Trained]:
    """A cache of either kind."""
    with tc.ResidentCache(passes) if request.param == "resident" else tiered(store, passes) as made:
        yield made


def vectors_of(cache: Trained, keys: np.ndarray) -> np.ndarray:
    """Return vectors of a table as of now."""
    out = (np.empty((keys.size, CASE.tables[0].dim), np.float32),)
    cache.rows_now().fill(CASE.tables[0].name, keys, out)
    return out[0]


class OwnScale(GradScaler):
    """A scaler with a ``scale`` of its own, as FSDP's has."""

    def scale(self, outputs: Any) -> Any:
        """Scale without the base class."""
        return outputs * 4.0


SCALED: dict[str, Callable[[torch.Tensor], None]] = {
    "one loss": lambda loss: GradScaler("cpu").scale(loss).backward(),
    "a list": lambda loss: GradScaler("cpu").scale([loss])[0].backward(),
    "an iterator": lambda loss: next(iter(GradScaler("cpu").scale(iter([loss])))).backward(),
    "a subclass with its own scale": lambda loss: OwnScale("cpu").scale(loss).backward(),
    "a part of the loss": lambda loss: (GradScaler("cpu").scale(loss * 2) + loss).backward(),
    "torch.autograd.backward": lambda loss: torch.autograd.backward([GradScaler("cpu").scale(loss)]),
}


@pytest.mark.parametrize("how", SCALED)
def test_a_scaled_loss_is_refused_before_the_step(cache: Trained, how: str) -> None:
    """In backward: no row gradient is pending after it, and no row has changed."""
    model, _ = tracked(cache)
    visits = cache.passes(epochs=2)
    visit = next(visits)
    keys = np.array(visit.source.keys(CASE.tables[0].name))
    before = vectors_of(cache, keys)
    batch = next(visit.batches(16))
    with one_sentence(StateError, "scaled by a GradScaler", "does not unscale yet", "bfloat16"):
        SCALED[how](model(batch).sum())
    assert not cache.optimizer.pending
    assert np.array_equal(vectors_of(cache, keys), before)
    visits.close()


def test_the_first_loss_of_a_process_is_noticed_in_one_expression() -> None:
    """Python looks `scale` up before it calls the model, so a module watches scalers from when it is made."""
    code = (
        "import torch; from tests.training.test_scaled_loss import CASE; from torch.amp.grad_scaler import GradScaler; "
        "import tiercache as tc; before = GradScaler.scale; tc.EmbeddingCollection(CASE.schema); "
        "assert GradScaler.scale is not before"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


def test_a_whole_loop_with_a_scaler_is_refused(cache: Trained) -> None:
    """As people write it; it is never silent, and disabling the scaler is all that it takes."""
    model, optimizer = tracked(cache)
    for enabled in (True, False):
        scaler = GradScaler("cpu", enabled=enabled)
        visits = cache.passes(epochs=2)
        visit = next(visits)
        for batch in visit.batches(16):
            optimizer.zero_grad()
            loss = model(batch).sum()
            if enabled:
                with one_sentence(StateError, "scaled by a GradScaler"):
                    scaler.scale(loss).backward()
                break
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        visits.close()


def test_a_scaler_of_another_model_disturbs_nobody(cache: Trained) -> None:
    """Its loss has no rows in it; that of the rows is not scaled, before it and after it."""
    model, optimizer = tracked(cache)
    other, scaler = torch.nn.Linear(3, 1), GradScaler("cpu")
    visits = cache.passes(epochs=2)
    for batch in next(visits).batches(16):
        optimizer.zero_grad()
        scaler.scale(other(torch.ones(2, 3)).sum()).backward()
        model(batch).sum().backward()
        scaler.scale(other(torch.ones(2, 3)).sum()).backward()
        optimizer.step()
    visits.close()


def test_lookups_that_are_not_pooled_are_refused_too(store: tc.Store, passes: tc.PassSet) -> None:
    """One vector for each id."""
    with tiered(store, passes) as cache:
        tracked(cache)
        module = tc.EmbeddingCollection(cache.schema, [CASE.specs[0].name])
        visits = cache.passes(epochs=2)
        batch = next(next(visits).batches(16))
        loss = module(batch)[CASE.specs[0].name].sum()
        with one_sentence(StateError, "scaled by a GradScaler"):
            GradScaler("cpu").scale(loss).backward()
        visits.close()
