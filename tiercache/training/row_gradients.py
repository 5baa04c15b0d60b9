"""The gradients of rows since the last step: what backward left, and what of it the step applies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.training.tracers import Tracers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tiercache.backends.jagged import SavedGradient
    from tiercache.training.tracers import Mark, Tracer

NOBODY_STEPS = (
    "row gradients of an earlier batch are pending, but the cache has no optimizer and cache.optimizer.step() was "
    "never called, so no row would be trained: give the cache the optimizer (optimizer=...) before the loop"
)


class _Waiting(NamedTuple):
    """The gradient of one lookup."""

    group: int
    pending: SavedGradient
    mark: Mark
    is_passed_over: bool = False
    """Whether another optimizer has stepped since."""


class RowGradients:
    """What backward leaves for the step, by group, in the order of the backward calls."""

    def __init__(self, num_groups: int, tracers: Tracers | None = None) -> None:
        self.tracers = tracers or Tracers()
        self.pending: list[list[SavedGradient]] = [[] for _ in range(num_groups)]
        """What the step applies, by group."""
        self._waiting: list[_Waiting] = []
        self.is_awaited = False
        """Whether rows were looked up to be trained, and neither a backward nor a step came since."""
        self.unstepped: set[int] = set()
        """The ends of the batches whose rows were looked up to be trained since the last step."""

    def add(self, group: int, pending: SavedGradient) -> None:
        """Add a gradient that the next step applies, whatever became of a handle."""
        self.pending[group].append(pending)

    def wait(self, group: int, pending: SavedGradient, mark: Mark) -> None:
        """Add the gradient of one lookup, to be applied as the module's handle says then."""
        self.is_awaited = False
        self._waiting = [one for one in self._waiting if is_alive(one.mark)]
        self._waiting.append(_Waiting(group, pending, mark))

    @property
    def marks(self) -> Iterator[Mark]:
        """The gradients that wait for a step."""
        return (one.mark for one in self._waiting)

    @property
    def is_pending(self) -> bool:
        """Whether a backward was not stepped yet, and not dropped: by no optimizer at all."""
        for tracer in {mark.tracer for mark in self.marks}:
            tracer.drop_dropped(unscaled=True)
        self._waiting = [one for one in self._waiting if is_alive(one.mark)]
        return any(not one.is_passed_over for one in self._waiting) or any(self.pending)

    def leave(self, where: str) -> None:
        """Give up gradients that another optimizer's step left: ``where`` ends, and they have to be dropped later."""
        for mark in self.marks:
            mark.tracer.leave(where)
        self._waiting.clear()

    def settle(self, factors: Mapping[Tracer, float]) -> None:
        """Move to ``pending`` what a step applies, multiplied by what `Tracers.factors` said."""
        self.is_awaited = False
        self.unstepped.clear()
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            factor = factor_of(one.mark, factors)
            if factor is None:
                self._waiting.append(one._replace(is_passed_over=True))
            elif factor:
                self.pending[one.group].append(_scaled(one.pending, factor))

    def applied(self, factors: Mapping[Tracer, float]) -> list[list[SavedGradient]]:
        """Return what ``settle`` would move to ``pending``, by group, and leave it where it is."""
        found: list[list[SavedGradient]] = [[] for _ in self.pending]
        for one in self._waiting:
            if factor := factor_of(one.mark, factors):
                found[one.group].append(_scaled(one.pending, factor))
        return found

    def clear_settled(self) -> None:
        """Drop what a step has applied."""
        for pending in self.pending:
            pending.clear()

    def clear(self) -> None:
        """Drop everything."""
        self.is_awaited = False
        self.unstepped.clear()
        self._waiting.clear()
        self.clear_settled()


def ended_unstepped(num_batches: int) -> str:
    """Say of a pass that gradients of its last batches wait for a step."""
    batches = "batch" if num_batches == 1 else f"{num_batches} batches"
    return (
        f"ended between backward and step, and the row gradients of its last {batches} would be lost: step the "
        "optimizer after its last batch too (p.samples_done == p.num_samples), or drop them with zero_grad()"
    )


def is_alive(mark: Mark) -> bool:
    """Whether a gradient was neither stepped nor dropped."""
    return mark.drops == mark.tracer.drops


def factor_of(mark: Mark, factors: Mapping[Tracer, float]) -> float | None:
    """Return what a gradient is multiplied by; 0 where it is dropped, None where it waits for another step."""
    return factors.get(mark.tracer) if is_alive(mark) else 0.0


def _scaled(pending: SavedGradient, factor: float) -> SavedGradient:
    """Return a gradient multiplied by ``factor``; the tensor of the user's graph stays as it is."""
    if factor == 1.0:
        return pending
    return replace(pending, gradient=pending.gradient * np.float32(factor).item())
