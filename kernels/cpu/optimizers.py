"""The optimizers' rules: how one row changes by one gradient."""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiercache.kernels.cpu.jit import inlined
from tiercache.kernels.cpu.rounding import Rounding, draw
from tiercache.kernels.cpu.simd import load, splat, sqrt, store, total
from tiercache.kernels.cpu.vectors import Vectors, is_narrow, read, write_rounded

__all__ = [
    "ADAGRAD", "ADAM", "ROWWISE", "SGD", "SUM", "Rows", "Rule", "adam_rule", "apply", "make_rule", "vectors_of",
]  # fmt: skip

SGD, ADAGRAD, ROWWISE, ADAM = range(4)
SUM = 4
"""No optimizer: the row becomes rate times the gradient, whatever it was."""


class Rows(NamedTuple):
    """The fields of a group's rows: `Vectors`, then the states, (0, 0) where the optimizer has none, then `Rounding`.

    All side by side, as parallel kernels take no tuples in tuples. A thread has room for random bits in `noise`.
    """

    values: NDArray[Any]
    dim: int
    is_half: int
    first: NDArray[np.float32]
    second: NDArray[np.float32]
    streams: NDArray[np.uint64]
    low: np.uint64
    high: np.uint64
    noise: NDArray[np.uint32]


class Rule(NamedTuple):
    """An optimizer's numbers in one step. `new1` and `new2` are the shares of the new value in Adam's averages."""

    kind: int
    rate: np.float32
    eps: np.float32
    decay: np.float32
    new1: np.float32
    new2: np.float32


def make_rule(kind: int, rate: float, eps: float, decay: float, new1: float = 0.0, new2: float = 0.0) -> Rule:
    """Return a rule of float32 numbers, as kernels take it."""
    f4 = np.float32
    return Rule(kind, f4(rate), f4(eps), f4(decay), f4(new1), f4(new2))


def adam_rule(step: int, learning_rate: float, beta1: float, beta2: float, eps: float, decay: float) -> Rule:
    """Return Adam's rule in applied step `step`, counted from 1. Raises ValueError for a step before."""
    if step < 1:
        raise ValueError(f"step is {step}: the first applied step is 1.")
    rate = learning_rate * math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)
    return make_rule(ADAM, rate, eps, decay, 1.0 - beta1, 1.0 - beta2)


@inlined
def vectors_of(rows):  # type: ignore[no-untyped-def]
    """Return the vectors of rows."""
    return Vectors(rows.values, rows.dim, rows.is_half)


@inlined
def apply(rule, rows, slot, dim, stride, sums, at, room):  # type: ignore[no-untyped-def]
    """Change the row in `slot` by the gradient in sums[at:at + dim]; `room` is the thread's place in the noise."""
    row, vector, vectors = slot * dim, slot * stride, vectors_of(rows)
    if is_narrow(rows.values):
        draw(Rounding(rows.streams, rows.low, rows.high), slot, dim, rows.noise, room)
    squares = splat(np.float32(0))
    rate = splat(rule.rate)
    if rule.decay != 0 or rule.kind == ROWWISE:
        for d in range(0, dim, 16):
            g = load(sums, at + d, 16) + splat(rule.decay) * read(vectors, vector + d, dim - d)
            squares = squares + g * g
            store(sums, at + d, g, 16)
    if rule.kind == ROWWISE:
        mean = rows.first[slot, 0] + total(squares) / np.float32(dim)
        rows.first[slot, 0] = mean
        rate = splat(rule.rate / (np.sqrt(mean) + rule.eps))
    for d in range(0, dim, 16):
        g = load(sums, at + d, 16)
        change = rate * g
        if rule.kind == ADAGRAD:
            state = load(rows.first, row + d, dim - d) + g * g
            store(rows.first, row + d, state, dim - d)
            change = change / (sqrt(state) + splat(rule.eps))
        elif rule.kind == ADAM:
            first = load(rows.first, row + d, dim - d)
            first = first + (g - first) * splat(rule.new1)
            store(rows.first, row + d, first, dim - d)
            second = load(rows.second, row + d, dim - d)
            second = second + (g * g - second) * splat(rule.new2)
            store(rows.second, row + d, second, dim - d)
            change = rate * first / (sqrt(second) + splat(rule.eps))
        changed = change if rule.kind == SUM else read(vectors, vector + d, dim - d) - change
        write_rounded(vectors, vector + d, changed, dim - d, rows.noise, 2 * room + d)
