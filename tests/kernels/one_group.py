"""Lookups and steps of one group on a CUDA device, with the arguments of the CPU's kernels."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tiercache.kernels.cpu.optimizers import ADAGRAD, ADAM, ROWWISE, SGD, adam_rule, make_rule
from tiercache.kernels.cuda import gathering
from tiercache.kernels.cuda.pooling import Features, Ids, PoolPlan
from tiercache.kernels.cuda.rounding import NO_ROUNDING
from tiercache.kernels.cuda.sorting import sort_groups
from tiercache.kernels.cuda.update import Step, update_many

if TYPE_CHECKING:
    from collections.abc import Sequence


class Bags(NamedTuple):
    """One group's part of `pool_many`: what its plan has, and its ids."""

    vectors: Any
    slot_of_local: Any
    ids: Any
    bases: Any
    cols: Any
    slots: Any
    offsets: Any = None
    weights: Any = None
    modes: Any = None
    argmax: Any = None
    entry_offset: Any = None
    entry_scale: Any = None
    limits: Any = None


def pool_many(device: Any, groups: Sequence[Bags], out: Any) -> None:
    """Pool groups by a plan of their own."""
    features = [Features(g.vectors, g.slot_of_local, g.bases, g.cols, g.modes, g.limits) for g in groups]
    ids = [Ids(g.ids, g.slots, g.offsets, g.weights, g.argmax, g.entry_offset, g.entry_scale) for g in groups]
    plan = PoolPlan(device, features, out.shape[1], aligned=device.describe(out).address % 16 == 0)
    plan.pool(ids, out)


def weight_gradient(
    device: Any, vectors: Any, slots: Any, offsets: Any, modes: Any, cols: Any, gradient: Any, out: Any
) -> None:
    """Write the gradient of each entry's weight."""
    bases, local = np.zeros(cols.size, np.int64), device.place(np.zeros(1, np.int32))
    aligned = device.describe(gradient).address % 16 == 0
    plan = PoolPlan(device, [Features(vectors, local, bases, cols, modes)], gradient.shape[1], aligned=aligned)
    plan.weight_gradient(slots, offsets, gradient, out)


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


def map_slots(
    device: Any, ids: Any, bases: Any, entry_starts: Any, slot_of_local: Any, slots: Any, *, limits: Any = None
) -> None:
    """Map the ids of one group."""
    gathering.map_slots(device, [gathering.Mapped(ids, bases, entry_starts, slot_of_local, slots, limits)])


def no_buffers(_device: Any) -> None:
    """Return what the CPU's sorts and steps keep, and a device takes anew."""


SortBuffers = UpdateBuffers = no_buffers


def sort_slots(device: Any, slots: Any, num_slots: int, _buffers: Any = None) -> Any:
    """Sort the entries of one group."""
    (pairs,) = sort_groups(device, [(slots, num_slots)])
    return pairs


def _update(
    kind: int, eps: float, device: Any, *fields: Any, learning_rate: float, decay: float = 0.0, step: int = 0,
    rounding: Any = NO_ROUNDING,
) -> None:  # fmt: skip
    """Step rows; ``fields``: vectors and states, then pairs, gradients and buffers, which a device takes anew."""
    vectors, *states = fields[:-3]
    states += [None] * (2 - len(states))
    if kind == ADAM:
        rule = adam_rule(step, learning_rate, 0.9, 0.999, 1e-8, decay)
    else:
        rule = make_rule(kind, learning_rate, eps, decay)
    update_many(device, [Step(vectors, *states, *fields[-3:-1], rule, rounding)])


update_sgd = partial(_update, SGD, 0.0)
update_adagrad = partial(_update, ADAGRAD, 1e-10)
update_rowwise_adagrad = partial(_update, ROWWISE, 1e-8)
update_adam = partial(_update, ADAM, 0.0)
