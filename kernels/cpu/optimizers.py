"""The optimizers' rules: how one row changes by one gradient."""

from typing import Any, NamedTuple

import numpy as np

from tiercache.kernels.cpu.jit import inlined
from tiercache.kernels.cpu.rounding import draw
from tiercache.kernels.cpu.simd import load, splat, sqrt, store, total
from tiercache.kernels.cpu.vectors import is_narrow, read, write_rounded
from tiercache.kernels.step import ADAGRAD, ADAM, ROWWISE, SUM


class RowFields(NamedTuple):
    """The fields of a group's rows: those of `Vectors`, the states, (0, 0) where there is none, those of `Rounding`.

    All side by side, as parallel kernels take no tuples in tuples. A thread has room for random bits in `noise`.
    """

    values: Any
    dim: Any
    is_half: Any
    first: Any
    second: Any
    streams: Any
    key: Any
    noise: Any


@inlined
def apply(rule, rows, slot, dim, stride, sums, at, room):  # type: ignore[no-untyped-def]
    """Change the row in `slot` by the gradient in sums[at:at + dim]; `room` is the thread's place in the noise.

    Returns 0, or NaN if the row, its state included, is not finite afterwards.
    """
    row, vector = slot * dim, slot * stride
    if is_narrow(rows.values):
        draw(rows, slot, dim, rows.noise, room)
    squares = splat(np.float32(0))
    spread = splat(np.float32(0))  # the sum of x - x
    rate = splat(rule.rate)
    if rule.decay != 0 or rule.kind == ROWWISE:
        for d in range(0, dim, 16):
            g = load(sums, at + d, 16) + splat(rule.decay) * read(rows, vector + d, dim - d)
            squares = squares + g * g
            store(sums, at + d, g, 16)
    if rule.kind == ROWWISE:
        mean = rows.first[slot, 0] + total(squares) / np.float32(dim)
        rows.first[slot, 0] = mean
        rate = splat(rule.rate / (np.sqrt(mean) + rule.eps))
        spread = splat(mean - mean)
    for d in range(0, dim, 16):
        g = load(sums, at + d, 16)
        change = rate * g
        if rule.kind == ADAGRAD:
            state = load(rows.first, row + d, dim - d) + g * g
            store(rows.first, row + d, state, dim - d)
            change = change / (sqrt(state) + splat(rule.eps))
            state = load(rows.first, row + d, dim - d)
            spread = spread + (state - state)
        elif rule.kind == ADAM:
            first = load(rows.first, row + d, dim - d)
            first = first + (g - first) * splat(rule.new1)
            store(rows.first, row + d, first, dim - d)
            second = load(rows.second, row + d, dim - d)
            second = second + (g * g - second) * splat(rule.new2)
            store(rows.second, row + d, second, dim - d)
            change = rate * first / (sqrt(second) + splat(rule.eps))
            second = load(rows.second, row + d, dim - d)
            spread = spread + (second - second)
        changed = change if rule.kind == SUM else read(rows, vector + d, dim - d) - change
        write_rounded(rows, vector + d, changed, dim - d, rows.noise, 2 * room + d)
        changed = read(rows, vector + d, dim - d)
        spread = spread + (changed - changed)
    return total(spread)
