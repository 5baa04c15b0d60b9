"""Lookup without arithmetic: from local ids to slots to rows.

Legend: S slots, L local positions (the pass's keys of the group), F features, N samples, E entries (ids), D dim, T
width of the output row. Features are feature-major: entries of feature 0 for all samples, then feature 1. A feature's
table starts at `bases[f]` among the L positions; `cols[f]` is its first column in the output. Lookups do not check ids:
call `check_ids` first, because an id outside its table would read another row.
"""

import numpy as np
from numba import prange

from tiercache.kernels.arrays import F4, I4, I8, U8, Matrix, Rows, Written, address_of, same_length
from tiercache.kernels.cpu.compile import inlined, parallel, serial, worker
from tiercache.kernels.cpu.kernel_threads import threads
from tiercache.kernels.cpu.simd import atomic_next, fence, store, stream
from tiercache.kernels.cpu.vectors import prefetch_row, read, shape_of
from tiercache.kernels.step import Vectors

BLOCK = 64  # samples of a task: 26 features of 64 floats are 416 KiB, which stays in a second-level cache
GATHER_BLOCK = 1024
MAP_PART = 1 << 14  # below this a second thread costs more than it saves
AHEAD = 16  # entries between prefetching a row and using it
STREAM_BYTES = 1 << 22  # outputs this large would only evict rows from the caches
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


@inlined
def map_entries(ids, first, last, base, slot_of_local, slots):  # type: ignore[no-untyped-def]
    """Write the slots of entries [first, last)."""
    for e in range(first, last):
        slots[e] = slot_of_local[base + ids[e]]


@inlined
def first_lanes(at, phase):  # type: ignore[no-untyped-def]
    """Return the number of lanes before the next cache line; 16 if nothing is streamed (`phase` < 0)."""
    return 16 - (at + phase) % 16 if phase >= 0 else 16


@inlined
def write(out, at, value, count, phase):  # type: ignore[no-untyped-def]
    """Write lanes, bypassing the caches for whole lines."""
    if phase >= 0 and count == 16:
        stream(out, at, value)
    else:
        store(out, at, value, count)


@inlined
def _copy_row(vectors, start, out, at, dim, phase):  # type: ignore[no-untyped-def]
    d, count = 0, min(first_lanes(at, phase), dim)
    while d < dim:
        write(out, at + d, read(vectors, start + d, count), count, phase)
        d += count
        count = min(16, dim - d)


@worker
def _pool_one_blocks(vectors, slot_of_local, ids, bases, cols, out, slots, phase, counter):  # type: ignore[no-untyped-def]
    num_samples, width = out.shape
    dim, stride = shape_of(vectors)
    block = atomic_next(counter)
    while block * BLOCK < num_samples:
        first, last = block * BLOCK, min(block * BLOCK + BLOCK, num_samples)
        for f in range(bases.size):
            start = f * num_samples
            map_entries(ids, start + first, start + last, bases[f], slot_of_local, slots)
            for n in range(first, min(first + AHEAD, last)):
                prefetch_row(vectors, np.int64(slots[start + n]) * stride, dim)
            for n in range(first, last):
                if n + AHEAD < last:
                    prefetch_row(vectors, np.int64(slots[start + n + AHEAD]) * stride, dim)
                _copy_row(vectors, np.int64(slots[start + n]) * stride, out, n * width + cols[f], dim, phase)
        block = atomic_next(counter)
    fence()


@parallel
def _pool_one(
    values: Matrix[Rows],
    dim: int,
    is_half: int,
    slot_of_local: I4,
    ids: I4,
    bases: I8,
    cols: I8,
    out: Written[Matrix[F4]],
    slots: Written[I4],
    phase: int,
    counter: Written[I8],
    parts: int,
) -> None:
    vectors = Vectors(values, dim, is_half)
    for _ in prange(parts):
        _pool_one_blocks(vectors, slot_of_local, ids, bases, cols, out, slots, phase, counter)


@worker
def _gather_blocks(vectors, slots, out, phase, counter):  # type: ignore[no-untyped-def]
    dim, stride = shape_of(vectors)
    block = atomic_next(counter)
    while block * GATHER_BLOCK < slots.size:
        last = min(block * GATHER_BLOCK + GATHER_BLOCK, slots.size)
        for e in range(block * GATHER_BLOCK, last):
            if e + AHEAD < last:
                prefetch_row(vectors, np.int64(slots[e + AHEAD]) * stride, dim)
            _copy_row(vectors, np.int64(slots[e]) * stride, out, e * dim, dim, phase)
        block = atomic_next(counter)
    fence()


@parallel
def _gather(
    values: Matrix[Rows],
    dim: int,
    is_half: int,
    slots: I4,
    out: Written[Matrix[F4]],
    phase: int,
    counter: Written[I8],
    parts: int,
) -> None:
    vectors = Vectors(values, dim, is_half)
    for _ in prange(parts):
        _gather_blocks(vectors, slots, out, phase, counter)


@worker
def _spread_tasks(vectors, pairs, cols, out, phase, counter):  # type: ignore[no-untyped-def]
    num_samples, width = out.shape
    dim, stride = shape_of(vectors)
    task = atomic_next(counter)
    while task * GATHER_BLOCK < pairs.size:
        for i in range(task * GATHER_BLOCK, min(task * GATHER_BLOCK + GATHER_BLOCK, pairs.size)):
            coming = min(i + AHEAD, pairs.size - 1)
            if (pairs[coming] >> _HALF) != (pairs[coming - 1] >> _HALF):
                prefetch_row(vectors, np.int64(pairs[coming] >> _HALF) * stride, dim)
            entry = np.int64(pairs[i] & _LOW)
            f = np.int64(np.uint32(entry) // np.uint32(num_samples))
            at = (entry - f * num_samples) * width + cols[f]
            _copy_row(vectors, np.int64(pairs[i] >> _HALF) * stride, out, at, dim, phase)
        task = atomic_next(counter)
    fence()


@parallel
def _spread_one(
    values: Matrix[Rows],
    dim: int,
    is_half: int,
    pairs: U8,
    cols: I8,
    out: Written[Matrix[F4]],
    phase: int,
    counter: Written[I8],
    parts: int,
) -> None:
    vectors = Vectors(values, dim, is_half)
    for _ in prange(parts):
        _spread_tasks(vectors, pairs, cols, out, phase, counter)


@worker
def _map_part(part, parts, ids, bases, entry_starts, slot_of_local, slots):  # type: ignore[no-untyped-def]
    begin, end = entry_starts[0], entry_starts[bases.size]
    first, last = begin + (end - begin) * part // parts, begin + (end - begin) * (part + 1) // parts
    for f in range(bases.size):
        start, stop = max(first, entry_starts[f]), min(last, entry_starts[f + 1])
        map_entries(ids, start, stop, bases[f], slot_of_local, slots)


@parallel
def _map_slots(ids: I4, bases: I8, entry_starts: I8, slot_of_local: I4, slots: Written[I4], parts: int) -> None:
    for part in prange(parts):
        _map_part(part, parts, ids, bases, entry_starts, slot_of_local, slots)


@serial
def _check_ids(ids: I4, entry_starts: I8, limits: I8) -> int:
    for f in range(limits.size):
        limit = np.uint32(min(limits[f], np.int64(2147483648)))
        worst = np.uint32(0)
        part = ids[entry_starts[f] : entry_starts[f + 1]]  # a loop from 0 on is vectorized: no index is below 0
        for e in range(part.size):
            worst = max(worst, np.uint32(part[e]))  # a negative id is a very large one
        if worst >= limit:
            for e in range(part.size):
                if np.uint32(part[e]) >= limit:
                    return entry_starts[f] + e  # type: ignore[no-any-return]
    return -1


def line_phase(out: Matrix[F4]) -> int:
    """Return how many floats after a cache line `out` begins, or -1 if it is small enough to stay in the caches."""
    return address_of(out) // 4 % 16 if out.nbytes >= STREAM_BYTES else -1


def check_columns(cols: I8, dim: int, width: int) -> None:
    """Raise ValueError if rows of `dim` do not fit an output of `width` columns."""
    if cols.size and not 0 <= cols.min() <= cols.max() <= width - dim:
        raise ValueError(
            f"cols must be in [0, {width - dim}]: rows have {dim} elements and the output {width} columns."
        )


def num_parts(num_samples: int) -> int:
    """Return the number of threads for `num_samples` samples."""
    return max(1, min(threads(), num_samples // BLOCK))


def check_ids(ids: I4, entry_starts: I8, limits: I8) -> int:
    """Return the first entry, feature by feature, whose id is not in [0, limit of its feature); -1 if there is none.

    ids (E,), entry_starts (F + 1,), limits (F,): the number of keys of each feature's table in this pass.
    """
    if entry_starts.size != limits.size + 1 or (entry_starts.size and entry_starts[-1] > ids.size):
        raise ValueError(f"{limits.size} features and {ids.size} ids do not fit entry starts {entry_starts.tolist()}.")
    return _check_ids(ids, entry_starts, limits)


def map_slots(ids: I4, bases: I8, entry_starts: I8, slot_of_local: I4, slots: I4) -> None:
    """Write the slot of each id (E,) to `slots` (E,).

    Feature f has entries `entry_starts[f]` to `entry_starts[f + 1]`.
    """
    same_length(ids=ids, slots=slots)
    if entry_starts.size != bases.size + 1 or entry_starts[-1] > ids.size:
        raise ValueError(f"{bases.size} features and {ids.size} ids do not fit {entry_starts.size} entry starts.")
    parts = max(1, min(threads(), ids.size // MAP_PART))
    _map_slots(ids, bases, entry_starts, slot_of_local, slots, parts)


def pool_one(vectors: Vectors, slot_of_local: I4, ids: I4, bases: I8, cols: I8, out: Matrix[F4], slots: I4) -> None:
    """Write each feature's row for each sample to its columns of `out` (N, T), and each entry's slot to `slots`.

    vectors (S, D), slot_of_local (L,), ids and slots (F * N,), bases (F,), cols (F,). Other columns of `out` stay. A
    large output is written past the caches, a line at a time: best if dim, width and columns are multiples of 16.
    """
    vectors.check()
    check_columns(cols, vectors.dim, out.shape[1])
    num_samples = out.shape[0]
    if ids.size != bases.size * num_samples or slots.size != ids.size:
        raise ValueError(
            f"{ids.size} ids and {slots.size} slots do not make one id for each of {num_samples} samples and "
            f"{bases.size} features."
        )
    same_length(bases=bases, cols=cols)
    counter, parts = np.zeros(1, np.int64), num_parts(num_samples)
    _pool_one(*vectors, slot_of_local, ids, bases, cols, out, slots, line_phase(out), counter, parts)


def can_spread(out: Matrix[F4], cols: I8, dim: int) -> bool:
    """Return True if rows can be written to `out` (N, T) in any order: it is large, and rows share no cache lines.

    dim: of the rows; cols (F,) as in `pool_one`.
    """
    return line_phase(out) == 0 and dim % 16 == 0 and out.shape[1] % 16 == 0 and not (cols % 16).any()


def spread_one(vectors: Vectors, pairs: U8, cols: I8, out: Matrix[F4]) -> None:
    """Write the output of `pool_one` to `out` (N, T), row by row: each is read once, and in memory order.

    vectors (S, D); pairs (F * N,) from `sort_slots`; cols (F,). Faster than `pool_one` if `can_spread` holds and rows
    are not in the caches.
    """
    vectors.check()
    check_columns(cols, vectors.dim, out.shape[1])
    if pairs.size != cols.size * out.shape[0]:
        raise ValueError(
            f"{pairs.size} entries do not make one for each of {out.shape[0]} samples and {cols.size} features."
        )
    if pairs.size and int(pairs[-1] >> _HALF) >= vectors.values.shape[0]:
        raise ValueError(f"pairs name slot {int(pairs[-1] >> _HALF)}: there are {vectors.values.shape[0]}.")
    counter, parts = np.zeros(1, np.int64), max(1, min(threads(), pairs.size // GATHER_BLOCK))
    _spread_one(*vectors, pairs, cols, out, line_phase(out), counter, parts)


def gather(vectors: Vectors, slots: I4, out: Matrix[F4]) -> None:
    """Write the row in each slot (E,) to `out` (E, D)."""
    vectors.check()
    if out.shape != (slots.size, vectors.dim):
        raise ValueError(f"out has shape {out.shape}: expected {slots.size} rows of {vectors.dim} elements.")
    counter, parts = np.zeros(1, np.int64), max(1, min(threads(), slots.size // GATHER_BLOCK))
    _gather(*vectors, slots, out, line_phase(out), counter, parts)
