"""The step of a group's rows, and values that kernels take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tiercache.kernels.step import (
    ADAGRAD,
    NO_ROUNDING,
    ROWWISE,
    SGD,
    Gradients,
    Rule,
    Step,
    Vectors,
    adam_rule,
    make_rounding,
)
from tiercache.store.table import Adagrad, Adam, RowWiseAdagrad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiercache.store.table import Group
    from tiercache.values.ids import Array
    from tiercache.values.lookups import GroupRows, SavedGradient


def kernel_gradients(saved: SavedGradient) -> Gradients:
    """Return a gradient as kernels take it."""
    if saved.places is None:
        return Gradients(saved.gradient, saved.num_samples, saved.width, saved.cols)
    return Gradients(
        saved.gradient, saved.num_samples, saved.width, saved.cols, saved.places, saved.scales,
        saved.argmax.reshape(-1),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One step of the rows of a group."""

    group: Group
    rows: GroupRows
    saved: Sequence[SavedGradient]
    """At least one, in the order of the backward calls."""
    learning_rate: float
    number: int
    """The steps of the tables of ``saved``, including this one: for Adam's rule and for rounding."""

    def kernel_step(self, gradients: Gradients | Sequence[Gradients], pairs: Array) -> Step:
        """Return the step as kernels take it: with the gradients of ``saved`` and their sorted slots."""
        rows, rule, rounding = self.rows, self._rule(), NO_ROUNDING
        if rows.streams.shape[0]:
            rounding = make_rounding(rows.streams, self.number)
        states = () if rule.kind == SGD else rows.states  # other kernels may have used them already
        return Step(rows.vectors, states, pairs, gradients, rule, rounding)

    def _rule(self) -> Rule:
        optimizer, rate = self.group.optimizer, self.learning_rate
        match optimizer:
            case Adagrad(eps=eps):
                return Rule(ADAGRAD, rate, eps, optimizer.decay)
            case RowWiseAdagrad(eps=eps):
                return Rule(ROWWISE, rate, eps, optimizer.decay)
            case Adam(beta1=beta1, beta2=beta2, eps=eps):
                return adam_rule(self.number, rate, beta1, beta2, eps, optimizer.decay)
            case _:
                return Rule(SGD, rate, decay=optimizer.decay)


def vectors_of(words: Array, dim: int, dtype: str) -> Vectors:
    """View words of 4 bytes (slots, words), on any device, as vectors."""
    if isinstance(words, torch.Tensor) and dtype != "float32":
        return Vectors(words.view(torch.uint16), dim, int(dtype == "float16"))
    return Vectors.of(words, dim, dtype)
