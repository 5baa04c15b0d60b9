"""One optimizer step of the rows of a batch: each row's gradients are summed in batch order, then the row changes once.

Legend: S slots, E entries, D dim, N samples, F features, T width of the gradient's rows.

The sum of a row with more than 8192 entries is the sum, in order, of the sums of its stretches of 4096: so several
threads can share a hot row, and the bits depend on the batch alone, never on slots or threads.
"""

from typing import NamedTuple

import numpy as np
from numba import prange
from numpy.typing import NDArray

from tiercache.kernels.arrays import NONE_F4, NONE_I4, NONE_I8, expect
from tiercache.kernels.jit import inlined, parallel, threads
from tiercache.kernels.lanes import atomic_next, load, prefetch, splat, sqrt, store, total

__all__ = ["Gradients", "UpdateBuffers", "update_adagrad", "update_adam", "update_rowwise_adagrad", "update_sgd"]

_SGD, _ADAGRAD, _ROWWISE, _ADAM = range(4)
_STRETCH = 4096  # part of the definition of the bits
_TASK = 1024  # entries a thread takes at a time
_AHEAD = 8  # entries between asking for memory and using it
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@inlined
def _entry(pairs, i):  # type: ignore[no-untyped-def]
    return np.int64(pairs[i] & _LOW)


@inlined
def _same_row(pairs, i, j):  # type: ignore[no-untyped-def]
    return (pairs[i] >> _HALF) == (pairs[j] >> _HALF)


@inlined
def _start(entry, source):  # type: ignore[no-untyped-def]
    """Return where an entry's gradient begins in the flat gradient; for max pooling, its complement."""
    if source.offsets.size:
        return source.offsets[entry]
    feature = np.int64(np.uint32(entry) // np.uint32(source.num_samples))
    return (entry - feature * source.num_samples) * source.width + source.cols[feature]


@inlined
def _ask(array, start, count):  # type: ignore[no-untyped-def]
    for d in range(0, count, 16):
        prefetch(array, start + d)
    prefetch(array, start + count - 1)


@inlined
def _ask_entry(pairs, i, source, rows, dim):  # type: ignore[no-untyped-def]
    """Ask for the gradient of the entry at `i` and, where a row begins there, for the row."""
    if i < pairs.size:
        begin = _start(_entry(pairs, i), source)
        _ask(source.flat, begin if begin >= 0 else ~begin, dim)
        if not _same_row(pairs, i, i - 1):
            slot = np.int64(pairs[i] >> _HALF)
            _ask(rows.vectors, slot * dim, dim)
            if rows.first.shape[1]:
                _ask(rows.first, slot * rows.first.shape[1], rows.first.shape[1])
            if rows.second.shape[1]:
                _ask(rows.second, slot * dim, dim)


@inlined
def _sum_entries(pairs, start, stop, source, rows, dim, sums, at):  # type: ignore[no-untyped-def]
    """Write the sum of the gradients of entries [start, stop) to sums[at:at + dim], in order."""
    scaled = source.scales.size > 0
    d = 0
    while d < dim:
        a = b = c = e = splat(np.float32(0))
        for i in range(start, stop):
            if d == 0:
                _ask_entry(pairs, i + _AHEAD, source, rows, dim)
            entry = _entry(pairs, i)
            scale = splat(source.scales[entry]) if scaled else splat(np.float32(1))
            begin = _start(entry, source) + d
            if d + 64 <= dim:
                a = a + load(source.flat, begin, 16) * scale
                b = b + load(source.flat, begin + 16, 16) * scale
                c = c + load(source.flat, begin + 32, 16) * scale
                e = e + load(source.flat, begin + 48, 16) * scale
            else:
                a = a + load(source.flat, begin, dim - d) * scale
        store(sums, at + d, a, 16)
        if d + 64 <= dim:
            store(sums, at + d + 16, b, 16)
            store(sums, at + d + 32, c, 16)
            store(sums, at + d + 48, e, 16)
            d += 64
        else:
            d += 16


@inlined
def _sum_mixed(pairs, start, stop, source, dim, sums, at):  # type: ignore[no-untyped-def]
    """The same where some entries come from max pooling: a gradient counts only where its entry was the largest."""
    for d in range(0, dim, 16):
        store(sums, at + d, splat(np.float32(0)), 16)
    for i in range(start, stop):
        entry = _entry(pairs, i)
        begin = _start(entry, source)
        scale = source.scales[entry] if source.scales.size else np.float32(1)
        if begin >= 0:
            for d in range(dim):
                sums[at + d] += source.flat[begin + d] * scale
        else:
            for d in range(dim):
                if source.argmax[~begin + d] == entry:
                    sums[at + d] += source.flat[~begin + d]


@inlined
def _sum_run(pairs, start, stop, source, rows, dim, sums, at):  # type: ignore[no-untyped-def]
    if source.argmax.size:
        _sum_mixed(pairs, start, stop, source, dim, sums, at)
    else:
        _sum_entries(pairs, start, stop, source, rows, dim, sums, at)


@inlined
def _apply(rule, rows, slot, dim, sums, at):  # type: ignore[no-untyped-def]
    """Change the row in `slot` by the gradient in sums[at:at + dim]."""
    row = slot * dim
    squares = splat(np.float32(0))
    rate = splat(rule.rate)
    if rule.decay != 0 or rule.kind == _ROWWISE:
        for d in range(0, dim, 16):
            g = load(sums, at + d, 16) + splat(rule.decay) * load(rows.vectors, row + d, dim - d)
            squares = squares + g * g
            store(sums, at + d, g, 16)
    if rule.kind == _ROWWISE:
        mean = rows.first[slot, 0] + total(squares) / np.float32(dim)
        rows.first[slot, 0] = mean
        rate = splat(rule.rate / (np.sqrt(mean) + rule.eps))
    for d in range(0, dim, 16):
        g = load(sums, at + d, 16)
        change = rate * g
        if rule.kind == _ADAGRAD:
            state = load(rows.first, row + d, dim - d) + g * g
            store(rows.first, row + d, state, dim - d)
            change = change / (sqrt(state) + splat(rule.eps))
        elif rule.kind == _ADAM:
            first = load(rows.first, row + d, dim - d)
            first = first + (g - first) * splat(rule.new1)
            store(rows.first, row + d, first, dim - d)
            second = load(rows.second, row + d, dim - d)
            second = second + (g * g - second) * splat(rule.new2)
            store(rows.second, row + d, second, dim - d)
            change = rate * first / (sqrt(second) + splat(rule.eps))
        store(rows.vectors, row + d, load(rows.vectors, row + d, dim - d) - change, dim - d)


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
def _find_long(pairs, long):  # type: ignore[no-untyped-def]
    """Write (start, stop, first stretch) of every long run to the rows of `long`; return runs and stretches."""
    num_long = num_stretches = 0
    place = 0
    while place + _STRETCH < pairs.size:
        if _same_row(pairs, place, place + _STRETCH):
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


@inlined
def _sum_stretch(stretch, pairs, long, num_long, source, rows, dim, padded, stretches):  # type: ignore[no-untyped-def]
    k = num_long - 1
    while long[k, 2] > stretch:
        k -= 1
    start = long[k, 0] + (stretch - long[k, 2]) * _STRETCH
    _sum_run(pairs, start, min(start + _STRETCH, long[k, 1]), source, rows, dim, stretches, stretch * padded)


@inlined
def _add_stretches(start, stop, long, dim, padded, stretches, sums, at):  # type: ignore[no-untyped-def]
    k = 0
    while long[k, 0] != start:
        k += 1
    for d in range(0, dim, 16):
        a = splat(np.float32(0))
        for stretch in range(long[k, 2], long[k, 2] + (stop - start + _STRETCH - 1) // _STRETCH):
            a = a + load(stretches, stretch * padded + d, 16)
        store(sums, at + d, a, 16)


@inlined
def _update_task(low, high, pairs, long, source, rows, rule, dim, padded, stretches, sums, at):  # type: ignore[no-untyped-def]
    """Update the rows whose first entry lies in [low, high)."""
    start = low
    while 0 < start < high and _same_row(pairs, start, start - 1):
        start += 1
    while start < high:
        stop = start + 1
        while stop < pairs.size and _same_row(pairs, start, stop):
            stop += 1
        if stop - start > 2 * _STRETCH:
            _add_stretches(start, stop, long, dim, padded, stretches, sums, at)
        else:
            _sum_run(pairs, start, stop, source, rows, dim, sums, at)
        _apply(rule, rows, np.int64(pairs[start] >> _HALF), dim, sums, at)
        start = stop


@parallel
def _update(pairs, source, rows, rule, long, stretches, sums, counter, parts):  # type: ignore[no-untyped-def]
    dim = rows.vectors.shape[1]
    padded = (dim + 15) // 16 * 16
    num_long, num_stretches = _find_long(pairs, long)
    if num_stretches:
        for part in prange(parts):
            stretch = atomic_next(counter)
            while stretch < num_stretches:
                _sum_stretch(stretch, pairs, long, num_long, source, rows, dim, padded, stretches)
                stretch = atomic_next(counter)
        counter[0] = 0
    for part in prange(parts):
        at = part * (padded + 16)
        task = atomic_next(counter)
        while task * _TASK < pairs.size:
            low, high = task * _TASK, min(task * _TASK + _TASK, pairs.size)
            if dim == 64:
                _update_task(low, high, pairs, long, source, rows, rule, 64, 64, stretches, sums, at)
            else:
                _update_task(low, high, pairs, long, source, rows, rule, dim, padded, stretches, sums, at)
            task = atomic_next(counter)


class Source(NamedTuple):
    flat: NDArray[np.float32]
    offsets: NDArray[np.int64]
    scales: NDArray[np.float32]
    argmax: NDArray[np.int32]
    num_samples: int
    width: int
    cols: NDArray[np.int64]
class Rows(NamedTuple):
    vectors: NDArray[np.float32]
    first: NDArray[np.float32]
    second: NDArray[np.float32]
class Rule(NamedTuple):
    kind: int
    rate: np.float32
    eps: np.float32
    decay: np.float32
    new1: np.float32
    new2: np.float32
