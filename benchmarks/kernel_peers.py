"""A step on the GPU by ``nn.EmbeddingBag(sparse=True)`` and torch's optimizers, and by our kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.kernel_cases import Batch
    from benchmarks.kernel_machines import Machine

__all__ = ["our_step", "torch_step"]

RATE = 1e-6


def torch_step(batch: Batch, dim: int, optimizer: str) -> Callable[[], None]:
    """Return a step of one ``nn.EmbeddingBag`` for each table, Adagrad or SparseAdam: forward, backward, update."""
    import torch
    from torch import nn

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


def our_step(machine: Machine, batch: Batch, dim: int, optimizer: str) -> Callable[[], None]:
    """Return the same step by kernels: lookup of all tables, sort, update."""
    size = batch.size
    cols = np.arange(size.num_features) * dim
    vectors = machine.place(np.full((size.num_slots, dim), 0.01, np.float32))
    states: list[Any] = [machine.empty(vectors.shape, np.float32) for _ in range(1 if optimizer == "adagrad" else 2)]
    out, slots = (
        machine.empty((size.num_samples, cols.size * dim), np.float32),
        machine.empty((size.num_entries,), np.int32),
    )
    gradient = machine.place(np.full((size.num_samples, cols.size * dim), 1e-3, np.float32))
    described = machine.call("update", "one_id_gradients", gradient, cols)
    sorting, scratch = machine.call("sorting", "SortBuffers"), machine.call("update", "UpdateBuffers")
    function, options = ("update_adagrad", {}) if optimizer == "adagrad" else ("update_adam", {"step": 3})

    def step() -> None:
        machine.call(
            "pooling", "pool_one", vectors, batch.slot_of_local, batch.skewed_ids, batch.bases, cols, size.num_samples,
            out, slots,
        )  # fmt: skip
        pairs = machine.call("sorting", "sort_slots", slots, size.num_slots, sorting)
        machine.call("update", function, vectors, *states, pairs, described, scratch, learning_rate=RATE, **options)

    return step
