"""Trainings under another default dtype, and devices as torch names them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import tiercache as tc
from tests.train.cases import SPECS, Case, open_store, table, tiered
from tests.train.loops import first_pass
from tests.train.test_bad_input import one_sentence

CASE = Case(
    tables=(table("a", 4), table("b", 6, tc.optim.Adam(learning_rate=0.1))), specs=SPECS, num_samples=64, pass_rows=32
)


@pytest.fixture
def default_dtype() -> Iterator[Callable[[torch.dtype], None]]:
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@contextmanager
def opened(passes: tc.PassDataset, device: Any = "cpu", *, resident: bool) -> Iterator[Any]:
    """Open a cache in memory, or one of tiers."""
    store = open_store(passes.path, CASE, "memory")
    with store, tc.InMemoryCache(passes, device=device) if resident else tiered(store, passes, device=device) as cache:
        yield cache


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
    cache.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer, found = cache.optimizer, []
    for p in cache.passes(epochs=1):
        scaler = torch.amp.GradScaler("cpu", enabled=p.index > 0)
        for i, batch in enumerate(p.batches(8)):
            loss = model(batch)
            scaler.scale(loss).backward()
            found.append(loss.item())
            if i % 2:
                scaler.unscale_(optimizer)
                cache.clip_grad_norm_(0.5)
                scaler.step(optimizer)
                scaler.update()
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
        with opened(passes, resident=resident) as cache:
            return losses(cache, padding, double=double)

    expected = run(double=False)
    default_dtype(dtype)
    assert run(double=False) == expected
    assert run(double=True) == expected


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("cpu", 0), "cpu"])
@pytest.mark.parametrize("resident", [False, True])
def test_a_device_of_torch_is_one_by_its_name(passes: tc.PassDataset, device: Any, resident: bool) -> None:
    with opened(passes, device, resident=resident) as cache, first_pass(cache) as p:
        assert cache.device.type == "cpu"
        assert next(p.batches(8)).label.isfinite().all()


@pytest.mark.parametrize(
    ("device", "kind", "words"),
    [
        (torch.device("meta"), ValueError, ["'meta'", "'cpu', 'cuda'"]), ("gpu", ValueError, ["'gpu'"]),
        (0, TypeError, ["device is 0", "torch.device"]), (None, TypeError, ["device is None", "torch.device"]),
        (torch.device("mps"), ValueError, ["'mps'"]), (torch.float32, TypeError, ["torch.float32"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("resident", [False, True])
def test_what_is_no_device_of_rows_is_refused(passes: Any, device: Any, kind: Any, words: Any, resident: bool) -> None:
    with one_sentence(kind, *words), opened(passes, device, resident=resident):
        pass
