"""The gradients of rows that backward left since the last step, and those that the step applies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tiercache.train.anchors import Anchors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    import torch

    from tiercache.train.arrival import Arrival
    from tiercache.values.lookups import SavedGradient


NOBODY_STEPS = (
    "row gradients of an earlier batch are pending, but cache.optimizer was never stepped, so no row would be trained: "
    "give the cache the optimizer (optimizer=...) and step cache.optimizer in its place"
)


class _Waiting(NamedTuple):
    """The gradient of one output, for the rows of one group."""

    group: int
    save: Callable[..., SavedGradient]
    """Returns it, given the gradient of the arrival as it is at the step: ``save(gradient=...)``."""
    arrival: Arrival


class RowGradients:
    """Gradients that backward leaves for the step, by group, in the order of the backward calls."""

    def __init__(self, num_groups: int, anchors: Anchors | None = None) -> None:
        self.anchors = anchors or Anchors()
        self.pending: list[list[SavedGradient]] = [[] for _ in range(num_groups)]
        """Gradients that the step applies, by group."""
        self._waiting: list[_Waiting] = []
        self.is_awaited = False
        """True if rows were looked up to be trained, and neither a backward nor a step came since."""
        self.unstepped: set[int] = set()
        """The ends of the batches whose rows were looked up to be trained since the last step."""

    def add(self, group: int, pending: SavedGradient) -> None:
        """Add a gradient that the next step applies, whatever became of an anchor."""
        self.pending[group].append(pending)

    def wait(self, group: int, save: Callable[..., SavedGradient], arrival: Arrival) -> None:
        """Add the gradient of one lookup, to be applied as it is then; save: as of `_Waiting`."""
        self.is_awaited = False
        if self._waiting and not self._waiting[0].arrival.is_waiting:  # dropped
            self._waiting = [one for one in self._waiting if one.arrival.is_waiting]
        self._waiting.append(_Waiting(group, save, arrival))

    @property
    def arrivals(self) -> Iterator[Arrival]:
        """The gradients that wait for a step."""
        return (one.arrival for one in self._waiting)

    @property
    def is_pending(self) -> bool:
        """True if gradients of a backward were neither stepped by any optimizer nor dropped."""
        return any(self.pending) or any(map(is_unstepped, self.arrivals))

    def leave(self, where: str) -> None:
        """Give up gradients that another optimizer's step left: ``where`` ends, and they have to be dropped later."""
        for anchor in {one.anchor for one in self.arrivals}:
            anchor.leave(where)
        self._waiting.clear()

    def settle(self, array_of: Callable[[torch.Tensor], Any]) -> None:
        """Move to ``pending`` what the step applies: the arrivals that are due. Others go or wait on."""
        self.is_awaited = False
        self.unstepped.clear()
        due, others = list[_Waiting](), list[_Waiting]()
        for one in self._waiting:
            (due if one.arrival.is_due else others).append(one)
        self._fill(due, self.pending, array_of)
        self._waiting = [one for one in others if one.arrival.is_waiting]
        for left in self._waiting:
            left.arrival.is_passed_over = True

    def applied(self, due: Collection[Arrival], array_of: Callable[[torch.Tensor], Any]) -> list[list[SavedGradient]]:
        """Return what ``settle`` would move to ``pending`` were ``due`` due, by group, and leave it where it is."""
        found: list[list[SavedGradient]] = [[] for _ in self.pending]
        self._fill([one for one in self._waiting if one.arrival in due], found, array_of)
        return found

    @staticmethod
    def _fill(
        some: Sequence[_Waiting], into: list[list[SavedGradient]], array_of: Callable[[torch.Tensor], Any]
    ) -> None:
        """Add gradients as they are now, by group; tables that share one share its array."""
        flat: dict[Arrival, Any] = {}
        for group, save, arrival in some:
            if arrival not in flat:
                flat[arrival] = arrival.flat(array_of)
            into[group].append(save(gradient=flat[arrival]))

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


def is_unstepped(arrival: Arrival) -> bool:
    """Return True for a gradient whose step must come before its pass ends.

    Not one that a GradScaler has skipped, which is not finite: reads the gradient, and waits for a GPU.
    """
    arrival.anchor.drop_dropped()
    if not arrival.is_waiting or arrival.is_passed_over or arrival.anchor.is_skipped:
        return False
    assert arrival.gradient is not None
    return bool(arrival.gradient.isfinite().all())


def ended_unstepped(num_batches: int) -> str:
    """Say of a pass that gradients of its last batches wait for a step."""
    batches = "batch" if num_batches == 1 else f"{num_batches} batches"
    return (
        f"ended between backward and step, and the row gradients of its last {batches} would be lost: step the "
        "optimizer after its last batch too (p.samples_done == p.num_samples), or drop them with zero_grad()"
    )
