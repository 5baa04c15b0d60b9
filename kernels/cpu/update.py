"""One optimizer step of the rows of a batch: each row's gradients are summed in batch order, then the row changes once.

Legend: S slots, E entries, D dim, N samples, F features, T width of the gradient's rows.

The sum of a row with more than 8192 entries is the sum, in order, of the sums of its stretches of 4096: so several
threads can share a hot row, and the bits depend on the batch alone, never on slots or threads.
"""

import numpy as np
from numba import prange
from numpy.typing import NDArray

from tiercache.kernels.arrays import expect
from tiercache.kernels.cpu.gradients import (
    Gradients,
    add_entries,
    add_mixed,
    bag_gradients,
    entry_of,
    gradient_start,
    one_id_gradients,
    same_row,
)
from tiercache.kernels.cpu.jit import inlined, parallel, serial, threads, worker
from tiercache.kernels.cpu.optimizers import (
    ADAGRAD,
    ROWWISE,
    SGD,
    SUM,
    Rows,
    Rule,
    adam_rule,
    apply,
    make_rule,
    vectors_of,
)
from tiercache.kernels.cpu.rounding import NO_ROUNDING, Rounding
from tiercache.kernels.cpu.simd import ask, atomic_next, load, splat, store
from tiercache.kernels.cpu.vectors import Vectors, ask_row, expect_vectors, shape_of

__all__ = [
    "Gradients",
    "UpdateBuffers",
    "bag_gradients",
    "one_id_gradients",
    "sum_rows",
    "update_adagrad",
    "update_adam",
    "update_rowwise_adagrad",
    "update_sgd",
]

_STRETCH = 4096  # part of the definition of the bits
_TASK = 1024  # entries a thread takes at a time
_AHEAD = 6  # entries between asking for memory and using it
_GROUP = 32  # entries summed in registers at a time
_HALF = np.uint64(32)


@inlined
def _padded(dim):  # type: ignore[no-untyped-def]
    """Return the room for a sum: whole registers four at a time, and a cache line apart from the next thread's."""
    return (dim + 63) // 64 * 64 + 16


@inlined
def _ask_entry(pairs, i, source, rows, dim, stride):  # type: ignore[no-untyped-def]
    """Ask for the gradient of the entry at `i` and, where a row begins there, for the row."""
    if i < pairs.size:
        begin = gradient_start(entry_of(pairs, i), source)
        ask(source.flat, begin if begin >= 0 else ~begin, dim)
        if not same_row(pairs, i, i - 1):
            slot = np.int64(pairs[i] >> _HALF)
            ask_row(vectors_of(rows), slot * stride, dim)
            if rows.first.shape[1]:
                ask(rows.first, slot * rows.first.shape[1], rows.first.shape[1])
            if rows.second.shape[1]:
                ask(rows.second, slot * dim, dim)


@inlined
def _sum_entries(pairs, start, stop, source, rows, dim, stride, sums, at):  # type: ignore[no-untyped-def]
    """Write the sum of the gradients of entries [start, stop) to sums[at:at + dim], in order."""
    if source.argmax.size:
        for d in range(0, dim, 16):
            store(sums, at + d, splat(np.float32(0)), 16)
    for first in range(start, stop, _GROUP):
        last = min(first + _GROUP, stop)
        for i in range(first + _AHEAD, last + _AHEAD):
            _ask_entry(pairs, i, source, rows, dim, stride)
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
    """Return where the first run that begins in [low, high) begins, or `high`."""
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
def _work(part, whole, pairs, source, rows, rule, long, num_long, num_stretches, sums, counter):  # type: ignore[no-untyped-def]
    """Take tasks until none is left: stretches of long runs, or (`whole`) all rows that begin among 1024 entries.

    One loop does both, so that its large body is compiled once.
    """
    dim, stride = shape_of(vectors_of(rows))
    padded = _padded(dim)
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
                _sum_entries(pairs, start, stop, source, rows, dim, stride, sums, at)
            if whole:
                apply(rule, rows, np.int64(pairs[start] >> _HALF), dim, stride, sums, at, part * padded)
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
    """Scratch of the updates, kept between steps and grown when a step is larger than all before."""

    def __init__(self) -> None:
        self.long = np.empty((0, 3), np.int64)
        self.sums = np.empty(0, np.float32)
        self.noise = np.empty(0, np.uint32)
        self.counter = np.zeros(1, np.int64)

    def reserve(self, num_entries: int, dim: int, parts: int, *, rounds: bool = False) -> None:
        """Make room for a step of `num_entries` entries, and for the random bits of rows that are rounded."""
        num_long = num_entries // (2 * _STRETCH) + 1
        rows = num_entries // _STRETCH + num_long + parts
        if self.long.shape[0] < num_long:
            self.long = np.empty((num_long, 3), np.int64)
        room = rows * _padded.py_func(dim)
        if self.sums.size < room:
            self.sums = np.empty(room, np.float32)
        room = parts * _padded.py_func(dim) if rounds else 0
        if self.noise.size < room:
            self.noise = np.empty(room, np.uint32)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.long.nbytes + self.sums.nbytes + self.noise.nbytes + self.counter.nbytes


_NO_STATE = np.empty((0, 0), np.float32)


def _step(
    vectors: Vectors,
    first: NDArray[np.float32],
    second: NDArray[np.float32],
    widths: tuple[int, int],
    pairs: NDArray[np.uint64],
    gradients: Gradients,
    buffers: UpdateBuffers,
    rule: Rule,
    rounding: Rounding,
) -> None:
    num_slots, dim = vectors.values.shape[0], vectors.dim
    rounds = vectors.values.dtype != np.float32
    if rounds and rounding.streams.size != num_slots:
        raise ValueError(
            f"{num_slots} rows of a 16-bit dtype are rounded by {rounding.streams.size} streams: give each."
        )
    for name, state, width in (("the first state", first, widths[0]), ("the second state", second, widths[1])):
        expect(name, state, np.float32, 2, written=True)
        if width and state.shape != (num_slots, width):
            raise ValueError(
                f"{name} has shape {state.shape}: {num_slots} vectors of dim {dim} need {(num_slots, width)}."
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
    buffers.reserve(pairs.size, dim, parts, rounds=rounds)
    rows = Rows(*vectors, first, second, *rounding, buffers.noise)
    num_long, num_stretches = _find_long(pairs, buffers.long)
    _update(pairs, gradients, rows, rule, buffers.long, num_long, num_stretches, buffers.sums, buffers.counter, parts)


def sum_rows(
    out: NDArray[np.float32],
    pairs: NDArray[np.uint64],
    gradients: Gradients,
    buffers: UpdateBuffers,
    *,
    scale: float,
) -> None:
    """Write to each row of `out` (S, D) that `pairs` (from `sort_slots`) names: scale * g. Other rows stay."""
    rule = make_rule(SUM, scale, 0.0, 0.0)
    _step(expect_vectors(out, written=True), _NO_STATE, _NO_STATE, (0, 0), pairs, gradients, buffers, rule, NO_ROUNDING)


def update_sgd(
    vectors: NDArray[np.float32] | Vectors,
    pairs: NDArray[np.uint64],
    gradients: Gradients,
    buffers: UpdateBuffers,
    *,
    learning_rate: float,
    decay: float = 0.0,
    rounding: Rounding = NO_ROUNDING,
) -> None:
    """Change each row that `pairs` (from `sort_slots`) names: row -= rate * g, with g += decay * row before.

    vectors (S, D) of float32, or Vectors; those of 16-bit dtypes are rounded by `rounding`, here and below.
    """
    rule = make_rule(SGD, learning_rate, 0.0, decay)
    _step(
        expect_vectors(vectors, written=True), _NO_STATE, _NO_STATE, (0, 0), pairs, gradients, buffers, rule, rounding
    )


def update_adagrad(
    vectors: NDArray[np.float32] | Vectors,
    sums: NDArray[np.float32],
    pairs: NDArray[np.uint64],
    gradients: Gradients,
    buffers: UpdateBuffers,
    *,
    learning_rate: float,
    eps: float = 1e-10,
    decay: float = 0.0,
    rounding: Rounding = NO_ROUNDING,
) -> None:
    """Per element: sum += g * g; row -= rate * g / (sqrt(sum) + eps). `sums` is (S, D)."""
    rule = make_rule(ADAGRAD, learning_rate, eps, decay)
    vectors = expect_vectors(vectors, written=True)
    _step(vectors, sums, _NO_STATE, (vectors.dim, 0), pairs, gradients, buffers, rule, rounding)


def update_rowwise_adagrad(
    vectors: NDArray[np.float32] | Vectors,
    sums: NDArray[np.float32],
    pairs: NDArray[np.uint64],
    gradients: Gradients,
    buffers: UpdateBuffers,
    *,
    learning_rate: float,
    eps: float = 1e-8,
    decay: float = 0.0,
    rounding: Rounding = NO_ROUNDING,
) -> None:
    """Per row: sum += mean(g * g); row -= rate / (sqrt(sum) + eps) * g. `sums` is (S, 1)."""
    rule = make_rule(ROWWISE, learning_rate, eps, decay)
    _step(expect_vectors(vectors, written=True), sums, _NO_STATE, (1, 0), pairs, gradients, buffers, rule, rounding)


def update_adam(
    vectors: NDArray[np.float32] | Vectors,
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
    rounding: Rounding = NO_ROUNDING,
) -> None:
    """Adam on the rows of the batch only, as torch.optim.SparseAdam; `step` counts applied steps from 1."""
    rule = adam_rule(step, learning_rate, beta1, beta2, eps, decay)
    vectors = expect_vectors(vectors, written=True)
    dim = vectors.dim
    _step(vectors, exp_avg, exp_avg_sq, (dim, dim), pairs, gradients, buffers, rule, rounding)
