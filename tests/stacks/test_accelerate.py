"""Accelerate: a model and an optimizer that it prepared train as they are, before the cache is made or after."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stacks.training import (
    CASE,
    MAX_NORM,
    assert_same,
    batches_of,
    ended,
    loss_of,
    model_of,
    opened,
    optimizer_of,
    plain,
    scheduler_of,
)
from tiercache.errors import StateError

accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed: make test-stacks")


def trained(
    folder: Path, name: str, *, prepare: str = "after", stop: int | None = None, clip: str = "none"
) -> dict[str, torch.Tensor]:
    """Train in a flat loop to the end, or to a commit before batch ``stop``. clip: by the cache or by Accelerate."""
    accelerator: Any = accelerate.Accelerator(cpu=True)
    with opened(folder, name) as cache:
        model: Any = model_of(cache)
        model = accelerator.prepare(model) if prepare == "before" else model
        optimizer, scheduler = optimizer_of(cache, model), scheduler_of(cache)
        model = accelerator.prepare(model) if prepare == "after" else model
        batches = batches_of(cache)
        assert accelerator.prepare(batches) is batches
        optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
        for count, batch in enumerate(batches):
            if count == stop:
                cache.commit()
                return {}
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                if clip == "cache":
                    cache.clip_grad_norm_(MAX_NORM)
                elif clip == "accelerator":
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return ended(folder / name, accelerator.unwrap_model(model), cache)


@pytest.mark.parametrize("prepare", ["before", "after"])
def test_what_accelerate_prepared_ends_with_the_bits_of_a_plain_loop(tmp_path: Path, prepare: str) -> None:
    """The prepared objects may be registered, or those that they wrap; through a commit and a restart."""
    CASE.cut(tmp_path / "passes")
    trained(tmp_path, "prepared.tc", prepare=prepare, stop=10)
    assert_same(trained(tmp_path, "prepared.tc", prepare=prepare), plain(tmp_path))


def test_gradients_are_clipped_by_the_cache(tmp_path: Path) -> None:
    CASE.cut(tmp_path / "passes")
    assert_same(trained(tmp_path, "clipped.tc", clip="cache"), plain(tmp_path, clips=True))
    with pytest.raises(StateError, match=r"clip with cache.clip_grad_norm_\(max_norm\)"):
        trained(tmp_path, "refused.tc", clip="accelerator")
