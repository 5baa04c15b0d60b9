"""Lookup: gather rows by slot and pool them, for all features of one group in one call.

Legend: S slots, L local positions (the pass's keys of the group), F features, N samples, E entries (ids), D dim, T width of
the output row. Features are feature-major: entries of feature 0 for all samples, then feature 1. A feature's table starts
at `bases[f]` among the L positions; `cols[f]` is its first column in the output.
Ids are not checked here: call `check_ids` first, for an id outside its table would read another row.
"""

from typing import Any

import numpy as np
from numba import prange
from numpy.typing import NDArray

from tiercache.kernels.arrays import expect, same_length
from tiercache.kernels.jit import inlined, parallel, serial, threads
from tiercache.kernels.lanes import atomic_next, fence, load, prefetch, splat, store, stream, total

__all__ = ["MAX", "MEAN", "SUM", "check_ids", "gather", "map_slots", "pool_bags", "pool_one", "weight_gradient"]

SUM, MEAN, MAX = range(3)

_BLOCK = 64  # samples of a task: 26 features of 64 floats are 416 KiB, which stays in a second-level cache
_AHEAD = 8  # entries between asking for a row and using it
_STREAM_BYTES = 1 << 22  # outputs this large would only push rows out of the caches


@inlined
def _ask_row(vectors, slot, dim):  # type: ignore[no-untyped-def]
    start = np.int64(slot) * dim
    for d in range(0, dim, 16):
        prefetch(vectors, start + d)
    prefetch(vectors, start + dim - 1)


@inlined
def _copy_row(vectors, slot, out, at, dim, streaming):  # type: ignore[no-untyped-def]
    start = np.int64(slot) * dim
    if streaming:
        for d in range(0, dim, 16):
            stream(out, at + d, load(vectors, start + d, 16))
    else:
        whole = dim - dim % 16
        for d in range(0, whole, 16):
            store(out, at + d, load(vectors, start + d, 16), 16)
        if whole < dim:
            store(out, at + whole, load(vectors, start + whole, dim - whole), dim - whole)


@inlined
def _pool_one_block(vectors, slot_of_local, ids, bases, cols, out, slots, first, last, num_samples, dim, streaming):  # type: ignore[no-untyped-def]
    for f in range(bases.size):
        base, col, start = bases[f], cols[f], f * num_samples
        for e in range(start + first, start + last):
            slots[e] = slot_of_local[base + ids[e]]
        for e in range(start + first, min(start + first + _AHEAD, start + last)):
            _ask_row(vectors, slots[e], dim)
        for n in range(first, last):
            if n + _AHEAD < last:
                _ask_row(vectors, slots[start + n + _AHEAD], dim)
            _copy_row(vectors, slots[start + n], out, n * out.shape[1] + col, dim, streaming)


@parallel
def _pool_one(vectors, slot_of_local, ids, bases, cols, num_samples, out, slots, streaming, counter, parts):  # type: ignore[no-untyped-def]
    dim = vectors.shape[1]
    for _ in prange(parts):
        block = atomic_next(counter)
        while block * _BLOCK < num_samples:
            first, last = block * _BLOCK, min(block * _BLOCK + _BLOCK, num_samples)
            if dim == 64:
                _pool_one_block(vectors, slot_of_local, ids, bases, cols, out, slots, first, last, num_samples, 64, streaming)
            else:
                _pool_one_block(vectors, slot_of_local, ids, bases, cols, out, slots, first, last, num_samples, dim, streaming)
            block = atomic_next(counter)
        fence()


def _streams(out: NDArray[np.float32], dim: int, cols: NDArray[np.int64]) -> bool:
    return (
        out.nbytes >= _STREAM_BYTES
        and dim % 16 == 0
        and out.shape[1] % 16 == 0
        and out.ctypes.data % 64 == 0
        and not np.any(cols % 16)
    )


def pool_one(vectors,slot_of_local,ids,bases,cols,num_samples,out,slots):
    dim=vectors.shape[1]
    _pool_one(vectors, slot_of_local, ids, bases, cols, num_samples, out, slots, _streams(out, dim, cols), np.zeros(1, np.int64), threads())
