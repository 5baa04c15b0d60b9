"""Where the gradients of a step's entries lie, and adding those of one row up.

Legend: E entries, D dim, N samples, F features, T width of the gradient's rows.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiercache.kernels.arrays import NONE_F4, NONE_I4, NONE_I8, expect
from tiercache.kernels.cpu.jit import inlined
from tiercache.kernels.cpu.simd import load, splat, store

__all__ = ["Gradients", "bag_gradients", "one_id_gradients"]

_ONE = np.ones(1, np.float32)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


class Gradients(NamedTuple):
    """Where each entry's gradient lies. Make one with `one_id_gradients` or `bag_gradients`."""

    flat: NDArray[np.float32]
    """The gradient of the pooled output, (N, T) seen as one axis."""
    offsets: NDArray[np.int64]
    """Per entry, the place of its first element (the complement for max pooling); empty for one id per sample."""
    scales: NDArray[np.float32]
    """Per entry, the factor of its gradient (weight, 1 / ids of a mean); empty: 1."""
    argmax: NDArray[np.int32]
    """Per element of the output, the entry that was largest; empty where nothing is max-pooled."""
    num_samples: int
    width: int
    cols: NDArray[np.int64]
    one: NDArray[np.float32] = _ONE


def one_id_gradients(gradient: NDArray[np.float32], cols: NDArray[np.int64]) -> Gradients:
    """Describe the gradient (N, T) of `pool_one`'s output, or with N = E and cols = [0] that of `gather`'s."""
    gradient, cols = expect("gradient", gradient, np.float32, 2), expect("cols", cols, np.int64)
    return Gradients(gradient.reshape(-1), NONE_I8, NONE_F4, NONE_I4, gradient.shape[0], gradient.shape[1], cols)


def bag_gradients(
    gradient: NDArray[np.float32],
    entry_offset: NDArray[np.int64],
    entry_scale: NDArray[np.float32] = NONE_F4,
    argmax: NDArray[np.int32] | None = None,
) -> Gradients:
    """Describe the gradient (N, T) of `pool_bags`' output by what that call wrote."""
    gradient, offsets = expect("gradient", gradient, np.float32, 2), expect("entry_offset", entry_offset, np.int64)
    scales = expect("entry_scale", entry_scale, np.float32)
    if scales.size not in (0, offsets.size):
        raise ValueError(f"entry_scale has {scales.size} elements for {offsets.size} entries: give one each, or none.")
    if argmax is not None and argmax.size not in (0, gradient.size):
        raise ValueError(f"argmax has shape {argmax.shape}, the gradient {gradient.shape}: they must be equal.")
    largest = NONE_I4 if argmax is None else expect("argmax", argmax.reshape(-1), np.int32)
    return Gradients(gradient.reshape(-1), offsets, scales, largest, gradient.shape[0], gradient.shape[1], NONE_I8)


@inlined
def entry_of(pairs, i):  # type: ignore[no-untyped-def]
    return np.int64(pairs[i] & _LOW)


@inlined
def same_row(pairs, i, j):  # type: ignore[no-untyped-def]
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
    scales = source.scales if each else source.one
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
