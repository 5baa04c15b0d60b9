"""Lookup with pooling: bags of any number of ids, with weights, and the gradient of the weights.

Legend and promises as in `gathering`, which has the lookups of exactly one id.
"""

import numpy as np
from numba import prange

from tiercache.kernels.arrays import F4, I1, I4, I8, Matrix, Rows, Written, same_length
from tiercache.kernels.cpu.compile import inlined, parallel, serial, worker
from tiercache.kernels.cpu.gathering import (
    AHEAD,
    BLOCK,
    check_columns,
    first_lanes,
    line_phase,
    map_entries,
    num_parts,
    write,
)
from tiercache.kernels.cpu.simd import atomic_next, fence, load, splat, total
from tiercache.kernels.cpu.vectors import element, prefetch_row, read, shape_of
from tiercache.kernels.step import Vectors

__all__ = ["MAX", "MEAN", "SUM", "pool_bags", "weight_gradient"]

SUM, MEAN, MAX = range(3)

_ONE = np.ones(1, np.float32)
_NO_ARGMAX = np.empty((0, 0), np.int32)


@inlined
def _sum_bag(vectors, slots, first, last, weights, each, mean, out, at, dim, stride, phase):  # type: ignore[no-untyped-def]
    d, count = 0, min(first_lanes(at, phase), dim)
    while d < dim:
        a = splat(np.float32(0))
        for e in range(first, last):
            a = a + read(vectors, np.int64(slots[e]) * stride + d, count) * splat(weights[e * each])
        if mean and last > first + 1:
            a = a / splat(np.float32(last - first))
        write(out, at + d, a, count, phase)
        d += count
        count = min(16, dim - d)


@inlined
def _max_bag(vectors, slots, first, last, out, argmax, n, col, dim, stride):  # type: ignore[no-untyped-def]
    largest, which = out[n, col : col + dim], argmax[n, col : col + dim]
    start = np.int64(slots[first]) * stride if first < last else np.int64(0)
    for d in range(dim):
        largest[d] = element(vectors, start + d) if first < last else np.float32(0)
        which[d] = first if first < last else -1
    for e in range(first + 1, last):
        row = np.int64(slots[e]) * stride
        for d in range(dim):
            number = element(vectors, row + d)
            larger = number > largest[d]
            largest[d] = number if larger else largest[d]
            which[d] = np.int32(e) if larger else which[d]


@inlined
def _describe(first, last, place, weights, each, mode, entry_offset, entry_scale):  # type: ignore[no-untyped-def]
    share = np.float32(last - first) if mode == MEAN else np.float32(1)
    for e in range(first, last):
        entry_offset[e] = ~place if mode == MAX else place
        if entry_scale.size:
            entry_scale[e] = (np.float32(1) if mode == MAX else weights[e * each]) / share


@worker
def _pool_bags_blocks(  # type: ignore[no-untyped-def]
    vectors, slot_of_local, ids, bases, offsets, weights, modes, cols, out, slots, argmax, entry_offset, entry_scale,
    phase, counter,
):  # fmt: skip
    num_samples, width = out.shape
    dim, stride = shape_of(vectors)
    each = np.int64(weights.size > 1 or ids.size == 1)  # a single 1 applies to all
    block = atomic_next(counter)
    while block * BLOCK < num_samples:
        first, last = block * BLOCK, min(block * BLOCK + BLOCK, num_samples)
        for f in range(bases.size):
            mode, bag = modes[f], f * num_samples
            end = offsets[bag + last]
            map_entries(ids, offsets[bag + first], end, bases[f], slot_of_local, slots)
            asked = offsets[bag + first]
            for n in range(first, last):
                begin, stop, at = offsets[bag + n], offsets[bag + n + 1], n * width + cols[f]
                while asked < min(stop + AHEAD, end):
                    prefetch_row(vectors, np.int64(slots[asked]) * stride, dim)
                    asked += 1
                _describe(begin, stop, at, weights, each, mode, entry_offset, entry_scale)
                if mode == MAX:
                    _max_bag(vectors, slots, begin, stop, out, argmax, n, cols[f], dim, stride)
                else:
                    _sum_bag(vectors, slots, begin, stop, weights, each, mode == MEAN, out, at, dim, stride, phase)
        block = atomic_next(counter)
    fence()


@parallel
def _pool_bags(
    values: Matrix[Rows],
    dim: int,
    is_half: int,
    slot_of_local: I4,
    ids: I4,
    bases: I8,
    offsets: I8,
    weights: F4,
    modes: I1,
    cols: I8,
    out: Written[Matrix[F4]],
    slots: Written[I4],
    argmax: Written[Matrix[I4]],
    entry_offset: Written[I8],
    entry_scale: Written[F4],
    phase: int,
    counter: Written[I8],
    parts: int,
) -> None:
    vectors = Vectors(values, dim, is_half)
    for _ in prange(parts):
        _pool_bags_blocks(
            vectors, slot_of_local, ids, bases, offsets, weights, modes, cols, out, slots, argmax, entry_offset,
            entry_scale, phase, counter,
        )  # fmt: skip


@worker
def _weight_gradient_blocks(vectors, slots, offsets, modes, cols, gradient, out, counter):  # type: ignore[no-untyped-def]
    num_samples, width = gradient.shape
    dim, stride = shape_of(vectors)
    block = atomic_next(counter)
    while block * BLOCK < num_samples:
        for f in range(cols.size):
            for n in range(block * BLOCK, min(block * BLOCK + BLOCK, num_samples)):
                begin, stop, at = offsets[f * num_samples + n], offsets[f * num_samples + n + 1], n * width + cols[f]
                for e in range(begin, stop):
                    row, a = np.int64(slots[e]) * stride, splat(np.float32(0))
                    for d in range(0, dim, 16):
                        a = a + read(vectors, row + d, dim - d) * load(gradient, at + d, dim - d)
                    products = total(a)
                    out[e] = products / np.float32(stop - begin) if modes[f] == MEAN else products
        block = atomic_next(counter)


@parallel
def _weight_gradient(
    values: Matrix[Rows],
    dim: int,
    is_half: int,
    slots: I4,
    offsets: I8,
    modes: I1,
    cols: I8,
    gradient: Matrix[F4],
    out: Written[F4],
    counter: Written[I8],
    parts: int,
) -> None:
    vectors = Vectors(values, dim, is_half)
    for _ in prange(parts):
        _weight_gradient_blocks(vectors, slots, offsets, modes, cols, gradient, out, counter)


@serial
def _decreases(offsets: I8) -> bool:
    found = False
    for i in range(offsets.size - 1):
        found |= offsets[i] > offsets[i + 1]
    return found


def pool_bags(
    vectors: Vectors,
    slot_of_local: I4,
    ids: I4,
    bases: I8,
    offsets: I8,
    weights: F4,
    modes: I1,
    cols: I8,
    out: Matrix[F4],
    slots: I4,
    argmax: Matrix[I4],
    entry_offset: I8,
    entry_scale: F4,
) -> None:
    """Write each bag's pooled row to its feature's columns of `out` (N, T): zeros for an empty bag.

    Bag f * N + n has entries `offsets[f * N + n]` to `offsets[f * N + n + 1]`; offsets (F * N + 1,), modes (F,): SUM,
    MEAN (of the ids, after weights) or MAX (the first of equals; takes no weights). weights (E,), or empty: 1. Written
    for the step: slots (E,); argmax (N, T), the entry of each max-pooled element, -1 in an empty bag (may be empty if
    no feature is MAX); entry_offset (E,) and entry_scale (E,) (may be empty: then all are 1) as in `step.Gradients`.
    Sums are in the order of the entries.
    """
    vectors.check()
    check_columns(cols, vectors.dim, out.shape[1])
    num_features, num_samples = same_length(bases=bases, cols=cols, modes=modes), out.shape[0]
    if offsets.size != num_features * num_samples + 1 or offsets[0] != 0 or offsets[-1] != ids.size:
        raise ValueError(
            f"offsets of {num_features} features and {num_samples} samples must have {num_features * num_samples + 1} "
            f"elements from 0 to {ids.size}, but have {offsets.size}."
        )
    if _decreases(offsets):
        raise ValueError("offsets must not decrease.")
    for name, array, sizes in (
        ("slots", slots, (ids.size,)),
        ("entry_offset", entry_offset, (ids.size,)),
        ("weights", weights, (0, ids.size)),
        ("entry_scale", entry_scale, (0, ids.size)),
    ):
        if array.size not in sizes:
            raise ValueError(f"{name} has {array.size} elements for {ids.size} ids.")
    has_max = bool(np.any(modes == MAX))
    if (has_max and argmax.shape != out.shape) or (
        ids.size and not entry_scale.size and (weights.size or np.any(modes == MEAN))
    ):
        raise ValueError("max pooling needs argmax like out; weights and means need an entry_scale for each id.")
    weights, argmax = weights if weights.size else _ONE, argmax if has_max else _NO_ARGMAX
    _pool_bags(
        *vectors, slot_of_local, ids, bases, offsets, weights, modes, cols, out, slots, argmax, entry_offset,
        entry_scale, -1 if has_max else line_phase(out), np.zeros(1, np.int64), num_parts(num_samples),
    )  # fmt: skip


def weight_gradient(
    vectors: Vectors, slots: I4, offsets: I8, modes: I1, cols: I8, gradient: Matrix[F4], out: F4
) -> None:
    """Write the gradient of each entry's weight to `out` (E,): row times gradient, over the ids of the bag for MEAN.

    Call it before the step: `vectors` (S, D) must be as they were in the lookup. gradient (N, T); the rest as in
    `pool_bags`. Not for MAX features, which take no weights: their output is meaningless.
    """
    vectors.check()
    check_columns(cols, vectors.dim, gradient.shape[1])
    same_length(modes=modes, cols=cols)
    same_length(slots=slots, out=out)
    if offsets.size != cols.size * gradient.shape[0] + 1 or offsets[-1] != slots.size:
        raise ValueError(
            f"offsets do not fit {cols.size} features, {gradient.shape[0]} samples and {slots.size} entries."
        )
    counter, parts = np.zeros(1, np.int64), num_parts(gradient.shape[0])
    _weight_gradient(*vectors, slots, offsets, modes, cols, gradient, out, counter, parts)
