"""Adding the gradients of one row up.

Legend: E entries, D dim, N samples, F features, T width of the gradient's rows; `source` is a `step.Gradients`.
"""

import numpy as np

from tiercache.kernels.cpu.jit import inlined
from tiercache.kernels.cpu.simd import load, splat, store

_ONE = np.ones(1, np.float32)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@inlined
def entry_of(pairs, i):  # type: ignore[no-untyped-def]
    """Return the entry of the pair at `i`."""
    return np.int64(pairs[i] & _LOW)


@inlined
def same_row(pairs, i, j):  # type: ignore[no-untyped-def]
    """Tell whether two pairs name one row."""
    return (pairs[i] >> _HALF) == (pairs[j] >> _HALF)


@inlined
def gradient_start(entry, source):  # type: ignore[no-untyped-def]
    """Return where an entry's gradient begins in the flat gradient; for max pooling, its complement."""
    if source.offsets.size:
        return source.offsets[entry]
    feature = np.int64(np.uint32(entry) // np.uint32(source.num_samples))
    return (entry - feature * source.num_samples) * source.width + source.cols[feature]


@inlined
def _add_four(pairs, first, last, source, scales, each, d, left, sums, at, fresh):  # type: ignore[no-untyped-def]
    """Add 49 to 64 elements of each entry, in four registers, to zeros or to what is there; `left` are left."""
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
    """Add the gradients of entries [first, last), in order, to sums[at:at + dim], or to zeros where that is `fresh`.

    `sums` has room for whole 64s.
    """
    each = min(source.scales.size, 1)  # without scales a single 1 stands for all: no branch in the loops
    scales = source.scales if each else _ONE
    d = 0
    while d + 48 < dim:  # no register is loaded that has nothing in it: it would cost as much as a full one, or more
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
    """Add to sums[at:at + dim] where some entries come from max pooling: those count where theirs was the largest."""
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
