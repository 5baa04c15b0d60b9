"""Accelerate: a model and an optimizer that it prepared train as they are, before the cache is made or after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.stacks.test_lightning import CASE, EPOCHS, assert_same, rows_of
from tests.train.cases import Net
from tiercache.data.dataset import PassDataset
from tiercache.train.cache import TierCache

accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed: make test-stacks")

if TYPE_CHECKING:
    from pathlib import Path


def trained(folder: Path, name: str, prepare: str, stop: int | None = None) -> dict[str, Any]:
    """Train with or without Accelerate, to the end or to a commit inside a pass."""
    accelerator: Any = accelerate.Accelerator(cpu=True) if prepare else None
    data = PassDataset.open(folder / "passes")
    with TierCache(folder / name, data, device_budget="1MiB", host_budget="64MiB", progress=False) as cache:
        torch.manual_seed(1)
        model: Any = Net(cache, CASE)
        dense = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        model = accelerator.prepare(model) if prepare == "before" else model
        cache.register(model=model, optimizer=dense)
        optimizer: Any = cache.optimizer
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.8)
        if prepare == "after":
            cache.register(scheduler=scheduler)
            model = accelerator.prepare(model)
        if prepare:
            optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
        if prepare != "after":
            cache.register(scheduler=scheduler)
        for p in cache.passes(epochs=EPOCHS):
            for number, batch in enumerate(p.batches(CASE.batch, shuffle=True)):
                optimizer.zero_grad()
                loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label)
                if prepare:
                    accelerator.backward(loss)
                else:
                    loss.backward()
                optimizer.step()
                scheduler.step()
                if p.index == stop and number == 1:
                    cache.commit()
                    return {}
        inner = accelerator.unwrap_model(model) if prepare else model
        weights = {key: value.clone() for key, value in inner.state_dict().items()}
    return weights | rows_of(folder / name)


@pytest.mark.parametrize("prepare", ["before", "after"])
def test_what_accelerate_prepared_ends_with_the_bits_of_a_plain_loop(tmp_path: Path, prepare: str) -> None:
    """The prepared objects may be registered, or those that they wrap; through a commit and a restart."""
    CASE.cut(tmp_path / "passes")
    expected = trained(tmp_path, "plain.tc", "")
    trained(tmp_path, "prepared.tc", prepare, stop=3)
    assert_same(trained(tmp_path, "prepared.tc", prepare), expected)
