"""Lookups of the kernel benchmark: one id a feature, bags with every pooling, weights of ids and their gradient."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.kernel_batch import Case
from tiercache.kernels.arrays import NONE_F4
from tiercache.kernels.cpu.pooling import MAX, MEAN, SUM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.kernel_batch import Batch, Rows
    from benchmarks.kernel_machines import Machine

__all__ = ["lookups"]

BAG = 2
_NO_ARGMAX = np.empty((0, 0), np.int32)


def lookups(machine: Machine, batch: Batch, rows: Rows) -> Iterator[Case]:
    """Yield the lookups of rows, and the gradient of weights."""
    size, dim, vectors = batch.size, rows.dim, rows.vectors
    entries = size.num_entries
    flat = machine.empty((entries, dim), np.float32)
    yield Case(
        f"gather{rows.tail}", 4 * entries + entries * (rows.vector_bytes + 4 * dim),
        lambda: machine.kernels.gather(vectors, batch.uniform, flat),
    )  # fmt: skip
    slots = machine.empty((entries,), np.int32)
    cols, wide = np.arange(size.num_features) * dim, flat.reshape(size.num_samples, size.num_features * dim)
    one_bytes = 12 * entries + entries * (rows.vector_bytes + 4 * dim)
    yield Case(
        f"pool_one{rows.tail}", one_bytes,
        lambda: machine.kernels.pool_one(vectors, batch.slot_of_local, batch.ids, batch.bases, cols, wide, slots),
    )  # fmt: skip
    starts = np.arange(size.num_features + 1) * size.num_samples

    def pool_none() -> None:
        machine.kernels.map_slots(batch.ids, batch.bases, starts, batch.slot_of_local, slots)
        machine.kernels.gather(vectors, slots, flat)

    yield Case(f"pool_none{rows.tail}", one_bytes, pool_none)
    yield from _bags(machine, batch, rows, slots)


def _bags(machine: Machine, batch: Batch, rows: Rows, slots: Any) -> Iterator[Case]:
    size, dim, entries = batch.size, rows.dim, batch.size.num_entries
    features = size.num_features // BAG
    bags, cols = features * size.num_samples, np.arange(features) * dim
    offsets = machine.place(np.arange(bags + 1) * BAG)
    out = machine.empty((size.num_samples, features * dim), np.float32)
    argmax = machine.empty(out.shape, np.int32)
    place, scale = machine.empty((entries,), np.int64), machine.empty((entries,), np.float32)
    weights = machine.place(np.full(entries, 0.5, np.float32))

    def pool(mode: int, weights: Any, argmax: Any, scale: Any) -> None:
        machine.kernels.pool_bags(
            rows.vectors, batch.slot_of_local, batch.ids, batch.bases[:features], offsets, weights,
            np.full(features, mode, np.int8), cols, out, slots, argmax, place, scale,
        )  # fmt: skip

    read = 8 * bags + entries * rows.vector_bytes  # where bags begin, and rows
    pooled = 20 * entries + read + 4 * bags * dim
    for name, num_bytes, arguments in (
        ("pool_sum", pooled, (SUM, NONE_F4, _NO_ARGMAX, NONE_F4)),
        ("pool_mean", pooled + 4 * entries, (MEAN, NONE_F4, _NO_ARGMAX, scale)),
        ("pool_max", pooled + 4 * bags * dim, (MAX, NONE_F4, argmax, NONE_F4)),
        ("pool_weighted", pooled + 8 * entries, (SUM, weights, _NO_ARGMAX, scale)),
    ):
        yield Case(name + rows.tail, num_bytes, functools.partial(pool, *arguments))
    gradient = machine.place(np.full((size.num_samples, features * dim), 1e-3, np.float32))
    modes = np.full(features, SUM, np.int8)
    yield Case(
        f"weight_gradient{rows.tail}", 8 * entries + read + 4 * bags * dim,
        lambda: machine.kernels.weight_gradient(
            rows.vectors, batch.uniform, offsets, modes, cols, gradient, scale
        ),
    )  # fmt: skip
