"""The step of a group's rows, and the values that kernels take."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from tiercache.kernels.arrays import NONE_F4
from tiercache.kernels.step import NO_ROUNDING, Gradients, Rule, Step, Vectors, make_rounding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiercache.store.optimizer import Optimizer
    from tiercache.store.table import Group
    from tiercache.values.ids import Array
    from tiercache.values.lookups import GroupRows, SavedGradient


def kernel_gradients(saved: Sequence[SavedGradient]) -> list[Gradients]:
    """Return gradients in the form that kernels take."""
    found = list[Gradients]()
    for one in saved:
        if one.starts is None:
            more = () if one.places is None else (one.places, one.scales, one.argmax.reshape(-1))
            flat = one.gradient.reshape(-1) if one.argmax.shape[0] else one.gradient  # contiguous for maxima
            found.append(Gradients(flat, one.num_samples, one.width, one.cols, *more))
        else:
            sizes = np.diff(one.starts).tolist()
            found += [Gradients(g, n, one.width, one.cols) for g, n in zip(one.gradient, sizes, strict=True) if n]
    return found


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One step of the rows of a group."""

    group: Group
    optimizer: Optimizer
    """The group's optimizer, with its current settings except the learning rate."""
    rows: GroupRows
    saved: Sequence[SavedGradient]
    """At least one, in the order of the backward calls."""
    learning_rate: float
    number: int
    """The steps of the tables of ``saved``, including this one: for the rules of Adam and for rounding."""
    means: Array = field(default_factory=lambda: NONE_F4)
    """For column slices, as `Step.means`."""

    @property
    def rule(self) -> Rule:
        """The optimizer's numbers."""
        return rule_of(self.optimizer, self.group.dim, self.learning_rate, self.number)

    def kernel_step(self, gradients: Gradients | Sequence[Gradients], pairs: Array) -> Step:
        """Return the step in the form that kernels take: with the gradients of ``saved`` and their sorted slots."""
        rows, rule, rounding = self.rows, self.rule, NO_ROUNDING
        if rows.streams.shape[0]:
            rounding = make_rounding(rows.streams, self.number)
        states = rows.states if rule.widths else ()  # SGD whose momentum is 0 for now has a buffer
        return Step(rows.vectors, states, pairs, gradients, rule, rounding, self.means)


def rule_of(optimizer: Optimizer, dim: int, learning_rate: float, step: int) -> Rule:
    """Return an optimizer's rule for rows of ``dim`` numbers in a step of their table, counted from 1."""
    return Rule(**optimizer.rule(learning_rate, step), widths=_widths(optimizer, dim))


@functools.lru_cache(maxsize=256)
def _widths(optimizer: Optimizer, dim: int) -> tuple[int, ...]:
    return tuple(state.width for state in optimizer.state_fields(dim))


def vectors_of(words: Array, dim: int, dtype: str) -> Vectors:
    """View words of 4 bytes (slots, words), on any device, as vectors."""
    if isinstance(words, torch.Tensor) and dtype != "float32":
        return Vectors(words.view(torch.uint16), dim, int(dtype == "float16"))
    return Vectors.of(words, dim, dtype)
