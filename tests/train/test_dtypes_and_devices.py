"""Trainings under another default dtype, and devices as torch names them."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiercache as tc
from tests.train.cases import SPECS, Case, table, tiered
from tests.train.test_bad_input import one_sentence
from tiercache.store import MemoryEngine

CASE = Case(
    tables=(table("a", 4), table("b", 6, tc.optim.Adam(learning_rate=0.1))), specs=SPECS, num_samples=64, pass_rows=32
)


@pytest.fixture
def default_dtype() -> Iterator[Callable[[torch.dtype], None]]:
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


class Model(nn.Module):
    def __init__(self, schema: tc.Schema, padding: int | None) -> None:
        super().__init__()
        self.bags = tc.EmbeddingBagCollection(schema, mode={spec.name: spec.mode for spec in SPECS})
        self.mean = tc.EmbeddingBag(schema, "g", mode="mean", padding_idx=padding)
        self.rows = tc.EmbeddingCollection(schema, ["f", "h"])

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        found = self.rows(batch)
        parts = [self.bags(batch), self.mean(batch), found["f"], found["h"].flatten(1)]
        return torch.cat(parts, dim=1).float().square().mean()


def losses(cache: Any, padding: int | None, *, double: bool) -> list[float]:
    model = Model(cache.schema, padding)
    model = model.double() if double else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cache.register(model=model, optimizer=optimizer)
    optimizer = cache.optimizer
    scaler, found = torch.amp.GradScaler("cpu"), []
    for p in cache.passes(epochs=1):
        for i, batch in enumerate(p.batches(8)):
            loss = model(batch)
            (scaler.scale(loss) if p.index else loss).backward()
            found.append(loss.item())
            if i % 2:
                if p.index:
                    scaler.unscale_(optimizer)
                cache.clip_grad_norm_(0.5)
                if p.index:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
                optimizer.zero_grad()
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("resident", [False, True])
def test_rows_are_trained_to_the_same_bits_under_any_default_dtype(
    passes: tc.PassDataset, default_dtype: Callable[[torch.dtype], None], dtype: torch.dtype, padding: int | None,
    resident: bool,
) -> None:  # fmt: skip
    def run(*, double: bool) -> list[float]:
        if resident:
            with tc.InMemoryCache(passes) as cache:
                return losses(cache, padding, double=double)
        store = tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine())
        with store, tiered(store, passes) as tiers:
            return losses(tiers, padding, double=double)

    expected = run(double=False)
    default_dtype(dtype)
    assert run(double=False) == expected
    assert run(double=True) == expected


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("cpu", 0), "cpu"])
@pytest.mark.parametrize("resident", [False, True])
def test_a_device_of_torch_is_one_by_its_name(passes: tc.PassDataset, device: Any, resident: bool) -> None:
    store = tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine())
    with store, tc.InMemoryCache(passes, device=device) if resident else tiered(store, passes, device=device) as cache:
        assert cache.device.type == "cpu"
        batch = next(next(loop := cache.passes(epochs=1)).batches(8))
        assert np.isfinite(batch.label.numpy()).all()
        loop.close()


@pytest.mark.parametrize(
    ("device", "kind", "words"),
    [
        (torch.device("meta"), ValueError, ["'meta'", "'cpu', 'cuda'"]),
        (torch.device("mps"), ValueError, ["'mps'"]),
        ("gpu", ValueError, ["'gpu'"]),
        (0, TypeError, ["device is 0", "torch.device"]),
        (None, TypeError, ["device is None", "torch.device"]),
        (torch.float32, TypeError, ["torch.float32"]),
    ],
)
@pytest.mark.parametrize("resident", [False, True])
def test_what_is_no_device_of_rows_is_refused(
    passes: tc.PassDataset, device: Any, kind: type[Exception], words: list[str], resident: bool
) -> None:
    store = tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine())
    with store, one_sentence(kind, *words):
        tc.InMemoryCache(passes, device=device) if resident else tiered(store, passes, device=device)
