"""A step by our kernels: lookup of all tables, sort, update. What the kernel benchmark compares with torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.kernel_batch import RULES, gradients_of
from tiercache.kernels.step import Step, Vectors

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.kernel_batch import Batch
    from benchmarks.kernel_machines import Machine

__all__ = ["our_step"]


def our_step(machine: Machine, batch: Batch, dim: int, optimizer: str) -> Callable[[], None]:
    """Return a step of the skewed batch: one id for each sample and table, Adagrad or Adam."""
    size = batch.size
    cols = np.arange(size.num_features) * dim
    vectors = Vectors(machine.place(np.full((size.num_slots, dim), 0.01, np.float32)), dim)
    num_states = 1 if optimizer == "adagrad" else 2
    states: list[Any] = [machine.empty((size.num_slots, dim), np.float32) for _ in range(num_states)]
    out, slots = (
        machine.empty((size.num_samples, cols.size * dim), np.float32),
        machine.empty((size.num_entries,), np.int32),
    )
    described, kernels = gradients_of(machine, size, dim), machine.kernels

    def step() -> None:
        kernels.pool_one(vectors, batch.slot_of_local, batch.skewed_ids, batch.bases, cols, out, slots)
        kernels.step(Step(vectors, states, kernels.sort(slots, size.num_slots), described, RULES[optimizer]))

    return step
