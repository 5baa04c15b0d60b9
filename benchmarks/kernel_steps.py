"""A step by our kernels: lookup of all tables, sort, update. What the kernel benchmark compares with torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.kernel_batch import RATE

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.kernel_batch import Batch
    from benchmarks.kernel_machines import Machine

__all__ = ["our_step"]


def our_step(machine: Machine, batch: Batch, dim: int, optimizer: str) -> Callable[[], None]:
    """Return a step of the skewed batch: one id for each sample and table, Adagrad or Adam."""
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
