"""One optimizer step of the rows of a batch: each row's gradients are summed in batch order, then the row changes once.

Legend: S slots, E entries, D dim, N samples, F features, T width of the gradient's rows.

The sum of a row with more than 8192 entries is the sum, in order, of the sums of its stretches of 4096: so several
threads can share a hot row, and the bits depend on the batch alone, never on slots or threads.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import prange
from numpy.typing import NDArray

from tiercache.kernels.arrays import NONE_F4, NONE_I4, NONE_I8, expect
from tiercache.kernels.jit import inlined, parallel, serial, threads, worker
from tiercache.kernels.lanes import ask, atomic_next, load, splat, sqrt, store, total

__all__ = [
    "Gradients",
    "UpdateBuffers",
    "bag_gradients",
    "one_id_gradients",
    "update_adagrad",
    "update_adam",
    "update_rowwise_adagrad",
    "update_sgd",
]

_SGD, _ADAGRAD, _ROWWISE, _ADAM = range(4)
_STRETCH = 4096  # part of the definition of the bits
_TASK = 1024  # entries a thread takes at a time
_AHEAD = 16  # entries between asking for memory and using it
_GROUP = 32  # entries summed in registers at a time
_ONE = np.ones(1, np.float32)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def _padded(dim: int) -> int:
    return (dim + 15) // 16 * 16


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
def _ask_entry(pairs, i, source, rows, dim):  # type: ignore[no-untyped-def]
    """Ask for the gradient of the entry at `i` and, where a row begins there, for the row."""
    if i < pairs.size:
        begin = _start(_entry(pairs, i), source)
        ask(source.flat, begin if begin >= 0 else ~begin, dim)
        if not _same_row(pairs, i, i - 1):
            slot = np.int64(pairs[i] >> _HALF)
            ask(rows.vectors, slot * dim, dim)
            if rows.first.shape[1]:
                ask(rows.first, slot * rows.first.shape[1], rows.first.shape[1])
            if rows.second.shape[1]:
                ask(rows.second, slot * dim, dim)


@inlined
def _clear(sums, at, dim):  # type: ignore[no-untyped-def]
    for d in range(0, dim, 16):
        store(sums, at + d, splat(np.float32(0)), 16)


@inlined
def _add_entries(pairs, first, last, source, dim, sums, at):  # type: ignore[no-untyped-def]
    """Add the gradients of entries [first, last) to sums[at:at + dim], in order."""
    each = min(source.scales.size, 1)  # without scales a single 1 stands for all: no branch in the loops
    scales = source.scales if each else source.one
    d = 0
    while d + 64 <= dim:
        a, b = load(sums, at + d, 16), load(sums, at + d + 16, 16)
        c, e = load(sums, at + d + 32, 16), load(sums, at + d + 48, 16)
        for i in range(first, last):
            entry = _entry(pairs, i)
            scale = splat(scales[entry * each])
            begin = _start(entry, source) + d
            a = a + load(source.flat, begin, 16) * scale
            b = b + load(source.flat, begin + 16, 16) * scale
            c = c + load(source.flat, begin + 32, 16) * scale
            e = e + load(source.flat, begin + 48, 16) * scale
        store(sums, at + d, a, 16)
        store(sums, at + d + 16, b, 16)
        store(sums, at + d + 32, c, 16)
        store(sums, at + d + 48, e, 16)
        d += 64
    while d < dim:
        a = load(sums, at + d, 16)
        for i in range(first, last):
            entry = _entry(pairs, i)
            a = a + load(source.flat, _start(entry, source) + d, dim - d) * splat(scales[entry * each])
        store(sums, at + d, a, 16)
        d += 16


@inlined
def _add_mixed(pairs, first, last, source, dim, sums, at):  # type: ignore[no-untyped-def]
    """The same where some entries come from max pooling: a gradient counts only where its entry was the largest."""
    for i in range(first, last):
        entry = _entry(pairs, i)
        begin = _start(entry, source)
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


@inlined
def _sum_entries(pairs, start, stop, source, rows, dim, sums, at):  # type: ignore[no-untyped-def]
    """Write the sum of the gradients of entries [start, stop) to sums[at:at + dim], in order."""
    for d in range(0, dim, 16):
        store(sums, at + d, splat(np.float32(0)), 16)
    for first in range(start, stop, _GROUP):
        last = min(first + _GROUP, stop)
        for i in range(first + _AHEAD, last + _AHEAD):
            _ask_entry(pairs, i, source, rows, dim)
        if source.argmax.size:
            _add_mixed(pairs, first, last, source, dim, sums, at)
        else:
            _add_entries(pairs, first, last, source, dim, sums, at)


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
    """Return where the first run that begins in [low, high) begins, or `high`."""
    while 0 < low < high and _same_row(pairs, low, low - 1):
        low += 1
    return low


@inlined
def _run_end(pairs, start):  # type: ignore[no-untyped-def]
    stop = start + 1
    while stop < pairs.size and _same_row(pairs, start, stop):
        stop += 1
    return stop


@worker
def _work(part, whole, pairs, source, rows, rule, long, num_long, num_stretches, sums, counter):  # type: ignore[no-untyped-def]
    """Take tasks until none is left: stretches of long runs, or (`whole`) all rows that begin among 1024 entries.

    One loop does both, so that its large body is compiled once.
    """
    dim = rows.vectors.shape[1]
    padded = (dim + 15) // 16 * 16
    size = pairs.size
    num_tasks = (size + _TASK - 1) // _TASK if whole else num_stretches
    task = atomic_next(counter)
    while task < num_tasks:
        if whole:
            at = (num_stretches + part) * padded
            high = min(task * _TASK + _TASK, size)
            start = _first_run(pairs, task * _TASK, high)
            stop = _run_end(pairs, start) if start < high else start
        else:
            at = task * padded
            start, stop = _stretch_bounds(task, long, num_long)
            high = stop
        while start < high:
            if whole and stop - start > 2 * _STRETCH:
                _add_stretches(start, stop, long, dim, padded, sums, at)
            else:
                _sum_entries(pairs, start, stop, source, rows, dim, sums, at)
            if whole:
                _apply(rule, rows, np.int64(pairs[start] >> _HALF), dim, sums, at)
            start = stop
            if start < high:
                stop = _run_end(pairs, start)
        task = atomic_next(counter)


@parallel
def _update(pairs, source, rows, rule, long, num_long, num_stretches, sums, counter, parts):  # type: ignore[no-untyped-def]
    for step in range(2):
        if step or num_stretches:
            counter[0] = 0
            for part in prange(parts):
                _work(part, step == 1, pairs, source, rows, rule, long, num_long, num_stretches, sums, counter)


@serial
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


class _Rows(NamedTuple):
    vectors: NDArray[np.float32]
    first: NDArray[np.float32]
    second: NDArray[np.float32]


class _Rule(NamedTuple):
    kind: int
    rate: np.float32
    eps: np.float32
    decay: np.float32
    new1: np.float32
    new2: np.float32


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


class UpdateBuffers:
    """Scratch of the updates, kept between steps and grown when a step is larger than all before."""

    def __init__(self) -> None:
        self.long = np.empty((0, 3), np.int64)
        self.sums = np.empty(0, np.float32)
        self.counter = np.zeros(1, np.int64)

    def reserve(self, num_entries: int, dim: int, parts: int) -> None:
        """Make room for a step of `num_entries` entries."""
        num_long = num_entries // (2 * _STRETCH) + 1
        rows = num_entries // _STRETCH + num_long + parts
        if self.long.shape[0] < num_long:
            self.long = np.empty((num_long, 3), np.int64)
        if self.sums.size < rows * _padded(dim):
            self.sums = np.empty(rows * _padded(dim), np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.long.nbytes + self.sums.nbytes + self.counter.nbytes


_NO_STATE = np.empty((0, 0), np.float32)


def _step(
    vectors: NDArray[np.float32],
    first: NDArray[np.float32],
    second: NDArray[np.float32],
    widths: tuple[int, int],
    pairs: NDArray[np.uint64],
    gradients: Gradients,
    buffers: UpdateBuffers,
    rule: _Rule,
) -> None:
    vectors = expect("vectors", vectors, np.float32, 2, written=True)
    num_slots, dim = vectors.shape
    for name, state, width in (("the first state", first, widths[0]), ("the second state", second, widths[1])):
        expect(name, state, np.float32, 2, written=True)
        if width and state.shape != (num_slots, width):
            raise ValueError(
                f"{name} has shape {state.shape}: vectors of shape {vectors.shape} need {(num_slots, width)}."
            )
    pairs = expect("pairs", pairs, np.uint64)
    if gradients.offsets.size:
        if gradients.offsets.size != pairs.size:
            raise ValueError(f"gradients describe {gradients.offsets.size} entries, but {pairs.size} were sorted.")
    elif gradients.num_samples * gradients.cols.size != pairs.size:
        raise ValueError(
            f"{pairs.size} entries were sorted, but the gradient has {gradients.num_samples} samples of "
            f"{gradients.cols.size} features: every sample has one id per feature here."
        )
    elif gradients.cols.size and not 0 <= gradients.cols.min() <= gradients.cols.max() <= gradients.width - dim:
        raise ValueError(f"cols must lie in [0, {gradients.width - dim}] for rows of {dim} in width {gradients.width}.")
    if pairs.size == 0:
        return
    if int(pairs[-1]) >> 32 >= num_slots:
        raise ValueError(f"slot {int(pairs[-1]) >> 32} was sorted, but there are {num_slots} rows.")
    parts = max(1, min(threads(), pairs.size // _TASK))
    buffers.reserve(pairs.size, dim, parts)
    rows = _Rows(vectors, first, second)
    num_long, num_stretches = _find_long(pairs, buffers.long)
    _update(pairs, gradients, rows, rule, buffers.long, num_long, num_stretches, buffers.sums, buffers.counter, parts)


def _rule(kind: int, rate: float, eps: float, decay: float, new1: float = 0.0, new2: float = 0.0) -> _Rule:
    f4 = np.float32
    return _Rule(kind, f4(rate), f4(eps), f4(decay), f4(new1), f4(new2))


def update_sgd(
    vectors: NDArray[np.float32],
    pairs: NDArray[np.uint64],
    gradients: Gradients,
    buffers: UpdateBuffers,
    *,
    learning_rate: float,
    decay: float = 0.0,
) -> None:
    """Change each row that `pairs` (from `sort_slots`) names: row -= rate * g, with g += decay * row before."""
    rule = _rule(_SGD, learning_rate, 0.0, decay)
    _step(vectors, _NO_STATE, _NO_STATE, (0, 0), pairs, gradients, buffers, rule)


def update_adagrad(
    vectors: NDArray[np.float32],
    sums: NDArray[np.float32],
    pairs: NDArray[np.uint64],
    gradients: Gradients,
    buffers: UpdateBuffers,
    *,
    learning_rate: float,
    eps: float = 1e-10,
    decay: float = 0.0,
) -> None:
    """Per element: sum += g * g; row -= rate * g / (sqrt(sum) + eps). `sums` is (S, D)."""
    rule = _rule(_ADAGRAD, learning_rate, eps, decay)
    _step(vectors, sums, _NO_STATE, (vectors.shape[1], 0), pairs, gradients, buffers, rule)


def update_rowwise_adagrad(
    vectors: NDArray[np.float32],
    sums: NDArray[np.float32],
    pairs: NDArray[np.uint64],
    gradients: Gradients,
    buffers: UpdateBuffers,
    *,
    learning_rate: float,
    eps: float = 1e-8,
    decay: float = 0.0,
) -> None:
    """Per row: sum += mean(g * g); row -= rate / (sqrt(sum) + eps) * g. `sums` is (S, 1)."""
    rule = _rule(_ROWWISE, learning_rate, eps, decay)
    _step(vectors, sums, _NO_STATE, (1, 0), pairs, gradients, buffers, rule)


def update_adam(
    vectors: NDArray[np.float32],
    exp_avg: NDArray[np.float32],
    exp_avg_sq: NDArray[np.float32],
    pairs: NDArray[np.uint64],
    gradients: Gradients,
    buffers: UpdateBuffers,
    *,
    step: int,
    learning_rate: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    decay: float = 0.0,
) -> None:
    """Adam on the rows of the batch only, as torch.optim.SparseAdam; `step` counts applied steps from 1."""
    if step < 1:
        raise ValueError(f"step is {step}: the first applied step is 1.")
    rate = learning_rate * math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)
    rule = _rule(_ADAM, rate, eps, decay, 1.0 - beta1, 1.0 - beta2)
    dim = vectors.shape[1]
    _step(vectors, exp_avg, exp_avg_sq, (dim, dim), pairs, gradients, buffers, rule)
