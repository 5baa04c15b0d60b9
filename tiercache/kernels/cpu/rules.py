"""The arithmetic of the optimizers of `store.optimizer`, sixteen elements of a row at a time.

Branches on a constant `kind` are not in the machine code. A row-wise rule has one more number per row.
"""

import numpy as np

from tiercache.kernels.cpu.compile import inlined
from tiercache.kernels.cpu.simd import splat, sqrt

SUM, SGD, MOMENTUM, ADAGRAD, ADAM, ROWWISE_ADAGRAD, ROWWISE_ADAM, ROWWISE_RMSPROP = range(8)
_NAMES = ("sum", "sgd", "momentum", "adagrad", "adam", "rowwise_adagrad", "rowwise_adam", "rowwise_rmsprop")
KINDS = {name: kind for kind, name in enumerate(_NAMES)}
"""The number of each rule."""
FIRST_ROWWISE = ROWWISE_ADAGRAD


@inlined
def elements_of(kind):  # type: ignore[no-untyped-def]
    """Return the number of states of a rule that have a number for each element."""
    if kind == ADAM:
        return 2
    return 1 if kind in (MOMENTUM, ADAGRAD, ROWWISE_ADAM) else 0


@inlined
def step_number(rule, number, mean):  # type: ignore[no-untyped-def]
    """Return the new number of a row, whose gradient has this mean of squares; the rate is divided by its root."""
    if rule.kind == ROWWISE_ADAGRAD:
        return number + mean
    return number + (mean - number) * rule.b


@inlined
def step_elements(kind, rule, rate, g, first, second):  # type: ignore[no-untyped-def]
    """Return what is subtracted from elements of a row with the gradient `g`, and their new states."""
    change = rate * g
    if kind == MOMENTUM:
        first = first * splat(rule.a) + g
        change = rate * (g + first * splat(rule.b)) if rule.b != np.float32(0) else rate * first
    elif kind == ADAGRAD:
        first = first + g * g
        change = change / (sqrt(first) + splat(rule.eps))
    elif kind == ADAM:
        first = first + (g - first) * splat(rule.a)
        second = second + (g * g - second) * splat(rule.b)
        change = rate * first / (sqrt(second) + splat(rule.eps))
    elif kind == ROWWISE_ADAM:
        first = first + (g - first) * splat(rule.a)
        change = rate * first
    return change, first, second


@inlined
def with_constant(kind, function, arguments):  # type: ignore[no-untyped-def]
    """Call `function` with a constant kind: the first one that changes elements as `kind` does."""
    if kind == SUM:
        return function(SUM, *arguments)
    if kind == MOMENTUM:
        return function(MOMENTUM, *arguments)
    if kind == ADAGRAD:
        return function(ADAGRAD, *arguments)
    if kind == ADAM:
        return function(ADAM, *arguments)
    if kind == ROWWISE_ADAM:
        return function(ROWWISE_ADAM, *arguments)
    return function(SGD, *arguments)
