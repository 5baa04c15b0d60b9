"""The gradients of rows since the last step: what backward left, and what of it the step applies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.training.tracers import Tracers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.backends.jagged import Array, SavedGradient
    from tiercache.training.tracers import Mark, Tracer

NOBODY_STEPS = (
    "row gradients of an earlier batch are pending, but the cache has no optimizer and cache.optimizer.step() was "
    "never called, so no row would be trained: give the cache the optimizer (optimizer=...) before the loop"
)


class _Waiting(NamedTuple):
    """The gradient of one lookup: its entries are feature-major."""

    group: int
    pending: SavedGradient
    starts: NDArray[np.int64]
    """(F + 1,) where each feature's entries begin."""
    marks: tuple[Mark | None, ...]
    """Of each feature's table; None where that is frozen."""
    is_passed_over: bool = False
    """Whether another optimizer has stepped since."""


class RowGradients:
    """What backward leaves for the step, by group, in the order of the backward calls."""

    def __init__(self, num_groups: int, tracers: Tracers | None = None) -> None:
        self.tracers = tracers or Tracers()
        self.pending: list[list[SavedGradient]] = [[] for _ in range(num_groups)]
        """What the step applies, by group."""
        self._waiting: list[_Waiting] = []

    def add(self, group: int, pending: SavedGradient) -> None:
        """Add a gradient that the next step applies, whatever became of a handle."""
        self.pending[group].append(pending)

    def wait(self, group: int, pending: SavedGradient, starts: NDArray[np.int64], marks: Sequence[Mark | None]) -> None:
        """Add the gradient of one lookup, to be applied as the tables' handles say then."""
        self._waiting = [one for one in self._waiting if _is_alive(one)]
        self._waiting.append(_Waiting(group, pending, starts, tuple(marks)))

    @property
    def marks(self) -> Iterator[Mark]:
        """The gradients that wait for a step."""
        return (mark for one in self._waiting for mark in one.marks if mark is not None)

    @property
    def is_pending(self) -> bool:
        """Whether a backward was not stepped yet, and not dropped: by no optimizer at all."""
        for tracer in {mark.tracer for mark in self.marks}:
            tracer.drop_dropped(unscaled=True)
        self._waiting = [one for one in self._waiting if _is_alive(one)]
        return any(not one.is_passed_over for one in self._waiting) or any(self.pending)

    def leave(self, where: str) -> None:
        """Give up gradients that another optimizer's step left: ``where`` ends, and they have to be dropped later."""
        for mark in self.marks:
            mark.tracer.leave(where)
        self._waiting.clear()

    def settle(self, factors: Mapping[Tracer, float]) -> None:
        """Move to ``pending`` what a step applies, multiplied by what `Tracers.factors` said."""
        waiting, self._waiting = self._waiting, []
        for one, factor in _pieces(waiting, factors):
            if factor is None:
                self._waiting.append(one._replace(is_passed_over=True))
            elif factor:
                self.pending[one.group].append(_scaled(one.pending, factor))

    def applied(self, factors: Mapping[Tracer, float]) -> list[list[SavedGradient]]:
        """Return what ``settle`` would move to ``pending``, by group, and leave it where it is."""
        found: list[list[SavedGradient]] = [[] for _ in self.pending]
        for one, factor in _pieces(self._waiting, factors):
            if factor:
                found[one.group].append(_scaled(one.pending, factor))
        return found

    def clear_settled(self) -> None:
        """Drop what a step has applied."""
        for pending in self.pending:
            pending.clear()

    def clear(self) -> None:
        """Drop everything."""
        self._waiting.clear()
        self.clear_settled()


def _pieces(waiting: Iterable[_Waiting], factors: Mapping[Tracer, float]) -> Iterator[tuple[_Waiting, float | None]]:
    """Yield gradients and what each is multiplied by, those of features with other factors one by one."""
    for one in waiting:
        found = [factor_of(mark, factors) for mark in one.marks]
        if len(set(found)) == 1:
            yield one, found[0]
        else:
            yield from ((_feature_of(one, feature), factor) for feature, factor in enumerate(found))


def _is_alive(one: _Waiting) -> bool:
    return any(mark is not None and mark.drops == mark.tracer.drops for mark in one.marks)


def factor_of(mark: Mark | None, factors: Mapping[Tracer, float]) -> float | None:
    """Return what a gradient is multiplied by; 0 where it is dropped, None where it waits for another step."""
    if mark is None or mark.drops != mark.tracer.drops:
        return 0.0
    return factors.get(mark.tracer)


def _feature_of(one: _Waiting, feature: int) -> _Waiting:
    """Return the entries of one feature."""
    starts, pending = one.starts, one.pending
    first, last = int(starts[feature]), int(starts[feature + 1])

    def cut(entries: Array) -> Array:
        return entries[first:last] if entries.shape[0] else entries

    alone = replace(
        pending, slots=pending.slots[first:last], cols=pending.cols[feature : feature + 1],
        places=None if pending.places is None else pending.places[first:last], scales=cut(pending.scales),
        argmax=pending.argmax - first if pending.argmax.shape[0] else pending.argmax, sorted=None,
    )  # fmt: skip
    return _Waiting(one.group, alone, np.array([0, last - first]), (one.marks[feature],))


def _scaled(pending: SavedGradient, factor: float) -> SavedGradient:
    """Return a gradient multiplied by ``factor``; the tensor of the user's graph stays as it is."""
    if factor == 1.0:
        return pending
    return replace(pending, gradient=pending.gradient * np.float32(factor).item())
