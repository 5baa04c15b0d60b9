"""The optimizers' rules: how one row changes by one gradient."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiercache.kernels.jit import inlined
from tiercache.kernels.lanes import load, splat, sqrt, store, total

__all__ = ["ADAGRAD", "ADAM", "ROWWISE", "SGD", "Rows", "Rule", "apply", "make_rule"]

SGD, ADAGRAD, ROWWISE, ADAM = range(4)


class Rows(NamedTuple):
    """The fields of a group's rows: vectors (S, D), then the states, (0, 0) where the optimizer has none."""

    vectors: NDArray[np.float32]
    first: NDArray[np.float32]
    second: NDArray[np.float32]


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


@inlined
def apply(rule, rows, slot, dim, sums, at):  # type: ignore[no-untyped-def]
    """Change the row in `slot` by the gradient in sums[at:at + dim]."""
    row = slot * dim
    squares = splat(np.float32(0))
    rate = splat(rule.rate)
    if rule.decay != 0 or rule.kind == ROWWISE:
        for d in range(0, dim, 16):
            g = load(sums, at + d, 16) + splat(rule.decay) * load(rows.vectors, row + d, dim - d)
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
        store(rows.vectors, row + d, load(rows.vectors, row + d, dim - d) - change, dim - d)
