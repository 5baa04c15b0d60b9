"""A step on the GPU as a user of torch alone writes it: ``nn.EmbeddingBag(sparse=True)`` and torch's optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from benchmarks.kernel_batch import RATE

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.kernel_batch import Batch

__all__ = ["torch_step"]


def torch_step(batch: Batch, dim: int, optimizer: str) -> Callable[[], None]:
    """Return a step of one ``nn.EmbeddingBag`` for each table, Adagrad or SparseAdam: forward, backward, update."""
    size = batch.size
    bags = [
        nn.EmbeddingBag(
            size.rows, dim, mode="sum", sparse=True, _weight=torch.full((size.rows, dim), 0.01, device="cuda")
        )
        for _ in range(size.num_features)
    ]
    weights = [bag.weight for bag in bags]
    rule: torch.optim.Optimizer = (
        torch.optim.Adagrad(weights, lr=RATE) if optimizer == "adagrad" else torch.optim.SparseAdam(weights, lr=RATE)
    )
    ids = [torch.from_numpy(mine.astype(np.int64)).cuda() for mine in batch.skewed_FN]
    grads = [torch.full((size.num_samples, dim), 1e-3, device="cuda") for _ in bags]
    offsets = torch.arange(size.num_samples, device="cuda")

    def step() -> None:
        outs = [bag(mine, offsets) for bag, mine in zip(bags, ids, strict=True)]
        torch.autograd.backward(outs, grads)
        rule.step()
        rule.zero_grad()

    return step
