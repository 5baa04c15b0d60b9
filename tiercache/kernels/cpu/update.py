"""One optimizer step of the rows of a batch: each row's gradients are summed in batch order, then the row changes once.

Legend: S slots, E entries, D dim, N samples, F features, T width of the gradient's rows.

The sum of a row with more than 8192 entries is the sum, in order, of the sums of its stretches of 4096: so several
threads can share a hot row, and the bits depend on the batch alone, never on slots or threads.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from tiercache.kernels.arrays import F4, I4, I8, U4, U8, Matrix, Rows, Single, Word, Written
from tiercache.kernels.cpu.compile import inlined, parallel, serial, worker
from tiercache.kernels.cpu.kernel_threads import threads
from tiercache.kernels.cpu.rounding import draw
from tiercache.kernels.cpu.rules import (
    FIRST_ROWWISE,
    KINDS,
    SUM,
    elements_of,
    step_elements,
    step_number,
    with_constant,
)
from tiercache.kernels.cpu.simd import atomic_next, load, prefetch_span, splat, store, total
from tiercache.kernels.cpu.vectors import is_narrow, prefetch_row, read, shape_of, write_rounded
from tiercache.kernels.step import Gradients, Step, check_entries, check_rows

_ONE = np.ones(1, np.float32)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@inlined
def entry_of(pairs, i):  # type: ignore[no-untyped-def]
    """Return the entry of the pair at `i`."""
    return np.int64(pairs[i] & _LOW)


@inlined
def same_row(pairs, i, j):  # type: ignore[no-untyped-def]
    """Return True if two pairs have the same row."""
    return (pairs[i] >> _HALF) == (pairs[j] >> _HALF)


@inlined
def gradient_start(entry, source):  # type: ignore[no-untyped-def]
    """Return the start of an entry's gradient in the flat gradient; for max pooling, its complement."""
    if source.offsets.size:
        return source.offsets[entry]
    feature = np.int64(np.uint32(entry) // np.uint32(source.num_samples))
    return (entry - feature * source.num_samples) * source.width + source.cols[feature]


@inlined
def _add_four(pairs, first, last, source, scales, each, d, left, sums, at, fresh):  # type: ignore[no-untyped-def]
    """Add 49 to 64 elements of each entry, in four registers, to zeros or to the sums; `left` elements remain."""
    a = b = c = e = splat(np.float32(0))
    if not fresh:
        a, b = load(sums, at, 16), load(sums, at + 16, 16)
        c, e = load(sums, at + 32, 16), load(sums, at + 48, 16)
    for i in range(first, last):
        entry = entry_of(pairs, i)
        scale = splat(scales[entry * each])
        begin = gradient_start(entry, source) + d
        a = a + load(source.flat, begin, 16) * scale
        b = b + load(source.flat, begin + 16, 16) * scale
        c = c + load(source.flat, begin + 32, 16) * scale
        e = e + load(source.flat, begin + 48, left - 48) * scale
    store(sums, at, a, 16)
    store(sums, at + 16, b, 16)
    store(sums, at + 32, c, 16)
    store(sums, at + 48, e, 16)


@inlined
def _add_two(pairs, first, last, source, scales, each, d, left, sums, at, fresh):  # type: ignore[no-untyped-def]
    """Add 17 to 32 elements of each entry, in two registers, as `_add_four`."""
    a = b = splat(np.float32(0))
    if not fresh:
        a, b = load(sums, at, 16), load(sums, at + 16, 16)
    for i in range(first, last):
        entry = entry_of(pairs, i)
        scale = splat(scales[entry * each])
        begin = gradient_start(entry, source) + d
        a = a + load(source.flat, begin, 16) * scale
        b = b + load(source.flat, begin + 16, left - 16) * scale
    store(sums, at, a, 16)
    store(sums, at + 16, b, 16)


@inlined
def add_entries(pairs, first, last, source, dim, sums, at, fresh):  # type: ignore[no-untyped-def]
    """Add the gradients of entries [first, last), in order, to sums[at:at + dim], or to zeros if it is `fresh`.

    `sums` has room for whole 64s.
    """
    each = min(source.scales.size, 1)  # without scales a single 1 applies to all: no branch in the loops
    scales = source.scales if each else _ONE
    d = 0
    while d + 48 < dim:  # an empty register costs as much as a full one, or more
        _add_four(pairs, first, last, source, scales, each, d, dim - d, sums, at + d, fresh)
        d += 64
    if d + 16 < dim:
        _add_two(pairs, first, last, source, scales, each, d, dim - d, sums, at + d, fresh)
        d += 32
    if d < dim:
        a = splat(np.float32(0))
        if not fresh:
            a = load(sums, at + d, 16)
        for i in range(first, last):
            entry = entry_of(pairs, i)
            a = a + load(source.flat, gradient_start(entry, source) + d, dim - d) * splat(scales[entry * each])
        store(sums, at + d, a, 16)


@inlined
def add_mixed(pairs, first, last, source, dim, sums, at):  # type: ignore[no-untyped-def]
    """Add to sums[at:at + dim] if some entries are max-pooled: an element counts only for its largest entry."""
    for i in range(first, last):
        entry = entry_of(pairs, i)
        begin = gradient_start(entry, source)
        place = max(begin, ~begin)
        added, gradient = sums[at : at + dim], source.flat[place : place + dim]
        if begin >= 0:
            scale = source.scales[entry] if source.scales.size else np.float32(1)
            for d in range(dim):
                added[d] += gradient[d] * scale
        else:
            won = source.argmax[place : place + dim]
            for d in range(dim):
                added[d] = added[d] + gradient[d] if won[d] == entry else added[d]


class RowFields(NamedTuple):
    """The fields of a group's rows: those of `Vectors`, the states ((0, 0) if there is none), those of `Rounding`.

    Flat, because parallel kernels take no nested tuples. A thread has room for random bits in `noise`, and `means` are
    those of `Step`.
    """

    values: Any
    dim: Any
    is_half: Any
    first: Any
    second: Any
    streams: Any
    key: Any
    noise: Any
    means: Any


class Numbers(NamedTuple):
    """A `Rule` with the number of its kind."""

    kind: Any
    rate: Any
    eps: Any
    decay: Any
    keep: Any
    a: Any
    b: Any


@inlined
def _step_elements(kind, rule, rows, slot, dim, stride, rate, sums, at, noise_at):  # type: ignore[no-untyped-def]
    """Change the elements of a row, and return the sum of x - x over it and its last state of elements."""
    row, vector, states = slot * dim, slot * stride, elements_of(kind)
    spread = splat(np.float32(0))
    for d in range(0, dim, 16):
        g = load(sums, at + d, 16)
        first = second = g
        if states > 0:
            first = load(rows.first, row + d, dim - d)
        if states > 1:
            second = load(rows.second, row + d, dim - d)
        change, first, second = step_elements(kind, rule, rate, g, first, second)
        if states > 0:
            store(rows.first, row + d, first, dim - d)
        if states > 1:
            store(rows.second, row + d, second, dim - d)
        if states > 0:
            state = load(rows.second if states > 1 else rows.first, row + d, dim - d)
            spread = spread + (state - state)
        changed = change if kind == SUM else read(rows, vector + d, dim - d) * splat(rule.keep) - change
        write_rounded(rows, vector + d, changed, dim - d, rows.noise, 2 * noise_at + d)
        changed = read(rows, vector + d, dim - d)
        spread = spread + (changed - changed)
    return total(spread)


@inlined
def apply(rule, rows, entry, slot, dim, stride, sums, at, noise_at):  # type: ignore[no-untyped-def]
    """Change the row in `slot` by the gradient in sums[at:at + dim]; `noise_at` is the thread's offset in the noise.

    entry: its first. Returns 0, or NaN if the row, its state included, is not finite afterwards.
    """
    if is_narrow(rows.values):
        draw(rows, slot, dim, rows.noise, noise_at)
    squares = splat(np.float32(0))
    spread = np.float32(0)  # the sum of x - x
    rate = rule.rate
    if rule.decay != 0 or rule.kind >= FIRST_ROWWISE:
        for d in range(0, dim, 16):
            g = load(sums, at + d, 16) + splat(rule.decay) * read(rows, slot * stride + d, dim - d)
            squares = squares + g * g
            store(sums, at + d, g, 16)
    if rule.kind >= FIRST_ROWWISE:
        mean = rows.means[entry] if rows.means.size else total(squares) / np.float32(dim)
        if elements_of(rule.kind):
            number = rows.second[slot, 0] = step_number(rule, rows.second[slot, 0], mean)
        else:
            number = rows.first[slot, 0] = step_number(rule, rows.first[slot, 0], mean)
        rate = rule.rate / (np.sqrt(number) + rule.eps)
        spread = number - number
    arguments = rule, rows, slot, dim, stride, splat(rate), sums, at, noise_at
    return spread + with_constant(rule.kind, _step_elements, arguments)


_STRETCH = 4096  # part of the definition of the bits
_TASK = 1024  # entries a thread takes at a time
_AHEAD = 6  # entries between prefetching memory and using it
_GROUP = 32  # entries summed in registers at a time


@inlined
def _padded(dim):  # type: ignore[no-untyped-def]
    """Return the room for a sum: whole registers four at a time, and a cache line of distance to the next thread's."""
    return (dim + 63) // 64 * 64 + 16


@inlined
def _prefetch_entry(pairs, i, source, rows, dim, stride):  # type: ignore[no-untyped-def]
    """Prefetch the gradient of the entry at `i` and, if a row begins there, the row."""
    if i < pairs.size:
        begin = gradient_start(entry_of(pairs, i), source)
        prefetch_span(source.flat, begin if begin >= 0 else ~begin, dim)
        if not same_row(pairs, i, i - 1):
            slot = np.int64(pairs[i] >> _HALF)
            prefetch_row(rows, slot * stride, dim)
            if rows.first.shape[1]:
                prefetch_span(rows.first, slot * rows.first.shape[1], rows.first.shape[1])
            if rows.second.shape[1]:
                prefetch_span(rows.second, slot * rows.second.shape[1], rows.second.shape[1])


@inlined
def _sum_entries(pairs, start, stop, source, rows, dim, stride, sums, at):  # type: ignore[no-untyped-def]
    """Write the sum of the gradients of entries [start, stop) to sums[at:at + dim], in order."""
    if source.argmax.size:
        for d in range(0, dim, 16):
            store(sums, at + d, splat(np.float32(0)), 16)
    for first in range(start, stop, _GROUP):
        last = min(first + _GROUP, stop)
        for i in range(first + _AHEAD, last + _AHEAD):
            _prefetch_entry(pairs, i, source, rows, dim, stride)
        if source.argmax.size:
            add_mixed(pairs, first, last, source, dim, sums, at)
        else:
            add_entries(pairs, first, last, source, dim, sums, at, first == start)


@inlined
def _bound(pairs, slot, low, high):  # type: ignore[no-untyped-def]
    """Return the first place in [low, high) whose slot is not below `slot`."""
    while low < high:
        middle = (low + high) // 2
        if (pairs[middle] >> _HALF) < slot:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def _stretch_bounds(stretch, long, num_long):  # type: ignore[no-untyped-def]
    k = num_long - 1
    while long[k, 2] > stretch:
        k -= 1
    start = long[k, 0] + (stretch - long[k, 2]) * _STRETCH
    return start, min(start + _STRETCH, long[k, 1])


@inlined
def _add_stretches(start, stop, long, dim, padded, sums, at):  # type: ignore[no-untyped-def]
    k = 0
    while long[k, 0] != start:
        k += 1
    for d in range(0, dim, 16):
        a = splat(np.float32(0))
        for stretch in range(long[k, 2], long[k, 2] + (stop - start + _STRETCH - 1) // _STRETCH):
            a = a + load(sums, stretch * padded + d, 16)
        store(sums, at + d, a, 16)


@inlined
def _first_run(pairs, low, high):  # type: ignore[no-untyped-def]
    """Return the start of the first run that begins in [low, high), or `high`."""
    while 0 < low < high and same_row(pairs, low, low - 1):
        low += 1
    return low


@inlined
def _run_end(pairs, start):  # type: ignore[no-untyped-def]
    stop = start + 1
    while stop < pairs.size and same_row(pairs, start, stop):
        stop += 1
    return stop


@worker
def _work(part, by_rows, pairs, source, rows, rule, long, num_long, num_stretches, sums, counter):  # type: ignore[no-untyped-def]
    """Take tasks until none is left: stretches of long runs, or (`by_rows`) all rows that begin among 1024 entries.

    One loop does both, so that its large body is compiled once.
    """
    dim, stride = shape_of(rows)
    padded = _padded(dim)
    size = pairs.size
    num_tasks = (size + _TASK - 1) // _TASK if by_rows else num_stretches
    spread = np.float32(0)
    task = atomic_next(counter)
    while task < num_tasks:
        if by_rows:
            at = (num_stretches + part) * padded
            high = min(task * _TASK + _TASK, size)
            start = _first_run(pairs, task * _TASK, high)
            stop = _run_end(pairs, start) if start < high else start
        else:
            at = task * padded
            start, stop = _stretch_bounds(task, long, num_long)
            high = stop
        while start < high:
            if by_rows and stop - start > 2 * _STRETCH:
                _add_stretches(start, stop, long, dim, padded, sums, at)
            else:
                _sum_entries(pairs, start, stop, source, rows, dim, stride, sums, at)
            if by_rows:
                entry, slot = entry_of(pairs, start), np.int64(pairs[start] >> _HALF)
                spread += apply(rule, rows, entry, slot, dim, stride, sums, at, part * padded)
            start = stop
            if start < high:
                stop = _run_end(pairs, start)
        task = atomic_next(counter)
    if spread != np.float32(0):
        counter[1] = 1


@parallel
def _update(
    pairs: U8,
    flat: F4,
    num_samples: int,
    width: int,
    cols: I8,
    offsets: I8,
    scales: F4,
    argmax: I4,
    values: Written[Matrix[Rows]],
    dim: int,
    is_half: int,
    first: Written[Matrix[F4]],
    second: Written[Matrix[F4]],
    streams: U8,
    key: Word,
    noise: Written[U4],
    means: F4,
    kind: int,
    rate: Single,
    eps: Single,
    decay: Single,
    keep: Single,
    a: Single,
    b: Single,
    long: Matrix[I8],
    num_long: int,
    num_stretches: int,
    sums: Written[F4],
    counter: Written[I8],
    parts: int,
) -> None:
    source = Gradients(flat, num_samples, width, cols, offsets, scales, argmax)
    rows = RowFields(values, dim, is_half, first, second, streams, key, noise, means)
    rule = Numbers(kind, rate, eps, decay, keep, a, b)
    for step in range(2):
        if step or num_stretches:
            counter[0] = 0
            for part in prange(parts):
                _work(part, step == 1, pairs, source, rows, rule, long, num_long, num_stretches, sums, counter)


@serial
def _find_long(pairs: U8, long: Written[Matrix[I8]]) -> tuple[int, int]:
    """Write (start, stop, first stretch) of every long run to the rows of `long`; return runs and stretches."""
    num_long = num_stretches = 0
    place = 0
    while place + _STRETCH < pairs.size:
        if same_row(pairs, place, place + _STRETCH):
            slot = pairs[place] >> _HALF
            start = _bound(pairs, slot, 0, place)
            stop = _bound(pairs, slot + np.uint64(1), place, pairs.size)
            if stop - start > 2 * _STRETCH:
                long[num_long, 0], long[num_long, 1], long[num_long, 2] = start, stop, num_stretches
                num_long += 1
                num_stretches += (stop - start + _STRETCH - 1) // _STRETCH
                place = (stop - 1) // _STRETCH * _STRETCH
        place += _STRETCH
    return num_long, num_stretches


class UpdateBuffers:
    """Scratch memory of updates, reused between steps and grown for larger ones."""

    def __init__(self) -> None:
        self.long = np.empty((0, 3), np.int64)
        self.sums = np.empty(0, np.float32)
        self.noise = np.empty(0, np.uint32)
        self.counter = np.zeros(2, np.int64)
        """The next task; and 1 if a row was not finite after its step, until it is reset to 0."""

    def reserve(self, num_entries: int, dim: int, parts: int, *, rounds: bool = False) -> None:
        """Allocate for a step of `num_entries` entries, and for the random bits of rows that are rounded."""
        num_long = num_entries // (2 * _STRETCH) + 1
        rows = num_entries // _STRETCH + num_long + parts
        if self.long.shape[0] < num_long:
            self.long = np.empty((num_long, 3), np.int64)
        padded = _padded.py_func(dim)
        if self.sums.size < rows * padded:
            self.sums = np.empty(rows * padded, np.float32)
        if rounds and self.noise.size < parts * padded:
            self.noise = np.empty(parts * padded, np.uint32)


_NO_STATE = np.empty((0, 0), np.float32)


def step_rows(step: Step, buffers: UpdateBuffers) -> None:
    """Update each row of the entries once. Raises ValueError before any update if something does not fit."""
    check_rows(step)
    check_entries(step, step.lookups)
    vectors, pairs, rule = step.vectors, step.pairs, step.rule
    (source,) = step.lookups
    source = source._replace(flat=source.flat.reshape(-1))
    if pairs.size == 0:
        return
    if int(pairs[-1]) >> 32 >= vectors.values.shape[0]:
        raise ValueError(f"slot {int(pairs[-1]) >> 32} was sorted, but there are {vectors.values.shape[0]} rows.")
    parts = max(1, min(threads(), pairs.size // _TASK))
    buffers.reserve(pairs.size, vectors.dim, parts, rounds=vectors.is_narrow)
    first, second = (*step.states, _NO_STATE, _NO_STATE)[:2]
    num_long, num_stretches = _find_long(pairs, buffers.long)
    _update(
        pairs, *source, *vectors, first, second, *step.rounding, buffers.noise, step.means, KINDS[rule.kind],
        *rule[1:-1], buffers.long, num_long, num_stretches, buffers.sums, buffers.counter, parts,
    )  # fmt: skip
