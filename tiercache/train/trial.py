"""A trial: measures how fast a small model trains one pass of a dataset, with a temporary store."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from tiercache.train.cache import TierCache
from tiercache.train.embedding import EmbeddingBagCollection

if TYPE_CHECKING:
    from tiercache.data.dataset import PassDataset
    from tiercache.values.batch import Batch

_BATCH = 4096
_WIDTH = 128
_WARM_BATCHES = 2  # warm-up batches, which are not measured


class _Net(nn.Module):
    """Pooled embeddings and dense features, and two layers above."""

    def __init__(self, data: PassDataset) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(data.schema)
        width = self.bags.out_features + len(data.schema.dense)
        self.top = nn.Sequential(nn.Linear(width, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1), nn.Flatten(0))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return one logit a sample."""
        parts = [self.bags(batch)] if batch.dense is None else [self.bags(batch), batch.dense]
        logits: torch.Tensor = self.top(torch.cat(parts, dim=1))
        return logits


def samples_per_second(data: PassDataset, folder: Path, *, device_budget: int, host_budget: int, device: str) -> float:
    """Train one pass with Adam in a temporary store in ``folder``, and return the samples trained per second.

    Your own model may be slower or faster: if you know its speed, pass it to `tiercache plan --samples-per-second`.
    Raises the errors of TierCache.
    """
    source = max(data, key=lambda one: one.samples)
    size = max(1, min(_BATCH, source.samples // (2 * _WARM_BATCHES + 4)))
    with tempfile.TemporaryDirectory(prefix=".trial-", dir=folder) as temporary:
        model = _Net(data).to(device)
        dense = torch.optim.Adam(model.parameters())
        with TierCache(
            Path(temporary, "store"), data, model=model, optimizer=dense, device=device, device_budget=device_budget,
            host_budget=host_budget, order=[source.index, *(p for p in range(len(data)) if p != source.index)],
            progress=False,
        ) as cache:  # fmt: skip
            passes = cache.passes(epochs=1)  # keep the iterator: a pass ends with its loop
            current, begun, warm = next(passes), 0.0, 0
            for number, samples in enumerate(current.batches(size, shuffle=True)):
                model(samples).square().mean().backward()
                cache.optimizer.step()
                cache.optimizer.zero_grad()
                if number + 1 == _WARM_BATCHES:
                    begun, warm = time.perf_counter(), current.samples_done
            if cache.device.type == "cuda":
                torch.cuda.synchronize(cache.device)
            return (current.num_samples - warm) / (time.perf_counter() - begun)
