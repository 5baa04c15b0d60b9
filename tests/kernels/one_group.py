"""Lookups and steps of one group on a CUDA device, with the arguments of the CPU's kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

from tiercache.kernels.cpu.optimizers import ADAGRAD, ADAM, ROWWISE, SGD, adam_rule, make_rule
from tiercache.kernels.cuda.pooling import Bags, pool_many
from tiercache.kernels.cuda.rounding import NO_ROUNDING
from tiercache.kernels.cuda.update import Step, update_many


def pool_one(
    device: Any, vectors: Any, slot_of_local: Any, ids: Any, bases: Any, cols: Any, num_samples: int, out: Any,
    slots: Any, *, limits: Any = None,
) -> None:  # fmt: skip
    """Copy each feature's row for each sample to its columns of ``out``."""
    assert out.shape[0] == num_samples
    pool_many(device, [Bags(vectors, slot_of_local, ids, bases, cols, slots, limits=limits)], out)


def pool_bags(
    device: Any, vectors: Any, slot_of_local: Any, ids: Any, bases: Any, offsets: Any, weights: Any, modes: Any,
    cols: Any, out: Any, *written: Any,
) -> None:  # fmt: skip
    """Pool bags; ``written``: slots, argmax, entry_offset and entry_scale. No kernel needs the starts of entries."""
    slots, *others = written
    pool_many(device, [Bags(vectors, slot_of_local, ids, bases, cols, slots, offsets, weights, modes, *others)], out)


def _update(
    kind: int, eps: float, device: Any, *fields: Any, learning_rate: float, decay: float = 0.0, step: int = 0,
    rounding: Any = NO_ROUNDING,
) -> None:  # fmt: skip
    """Step rows; ``fields``: vectors and states, then pairs, gradients and buffers."""
    vectors, *states = fields[:-3]
    states += [None] * (2 - len(states))
    if kind == ADAM:
        rule = adam_rule(step, learning_rate, 0.9, 0.999, 1e-8, decay)
    else:
        rule = make_rule(kind, learning_rate, eps, decay)
    update_many(device, [Step(vectors, *states, *fields[-3:], rule, rounding)])


update_sgd = partial(_update, SGD, 0.0)
update_adagrad = partial(_update, ADAGRAD, 1e-10)
update_rowwise_adagrad = partial(_update, ROWWISE, 1e-8)
update_adam = partial(_update, ADAM, 0.0)
