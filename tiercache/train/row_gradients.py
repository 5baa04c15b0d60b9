"""The pending gradients of rows since the last step, and those that the current step applies."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from tiercache.train.anchors import Anchors
from tiercache.train.arrivals import State

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    import torch

    from tiercache.train.arrivals import Arrival
    from tiercache.values.lookups import SavedGradient


Save: TypeAlias = "Callable[[Sequence[Any]], list[SavedGradient]]"
"""Returns the gradients of a lookup, given its arrival's gradients at the step (None for dropped ones)."""

NOBODY_STEPS = (
    "row gradients of an earlier batch are pending, but cache.optimizer was never stepped, so no row would be trained: "
    "pass the optimizer to the cache (optimizer=...) and step cache.optimizer instead"
)


class _Deferred(NamedTuple):
    """The gradients of one lookup, for the rows of one group."""

    group: int
    save: Save
    arrival: Arrival


class RowGradients:
    """Gradients that backward leaves for the step, by group, in the order of the backward calls."""

    def __init__(self, num_groups: int, anchors: Anchors | None = None) -> None:
        self.anchors = anchors or Anchors()
        self.collected: list[list[SavedGradient]] = [[] for _ in range(num_groups)]  # of the current step, by group
        self._deferred: list[_Deferred] = []
        self.awaits_backward = False  # True if rows were looked up for training, without a backward or step since
        self.unstepped: set[int] = set()  # the ends of the batches that were looked up for training since the last step
        self.num_steps = Counter[str]()  # the steps so far that moved rows of a table

    def receive(self) -> None:
        """Record that a backward came, also if it leaves no gradient."""
        self.awaits_backward = False

    def defer(self, group: int, save: Save, arrival: Arrival) -> None:
        """Add the gradients of one lookup, to be read at the step."""
        if self._deferred and not self._deferred[0].arrival.is_pending:  # dropped
            self._deferred = [one for one in self._deferred if one.arrival.is_pending]
        self._deferred.append(_Deferred(group, save, arrival))

    @property
    def arrivals(self) -> Iterator[Arrival]:
        """The pending gradients."""
        return (one.arrival for one in self._deferred)

    @property
    def is_pending(self) -> bool:
        """True if gradients of a backward were neither stepped by any optimizer nor dropped."""
        return any(self.collected) or any(map(is_unstepped, self.arrivals))

    def expire(self, where: str) -> None:
        """Expire gradients left by another optimizer's step; those that a GradScaler skipped count as dropped."""
        if self.anchors.ledger is not None and any(one.is_pending and not one.is_passed_over for one in self.arrivals):
            self.anchors.ledger.drop()
        for anchor in {one.anchor for one in self.arrivals}:
            anchor.expire(where)
        self._deferred.clear()

    def collect(self, array_of: Callable[[torch.Tensor], Any]) -> None:
        """Move the gradients that the current step applies to ``collected``. Others stay pending."""
        self.awaits_backward = False
        self.unstepped.clear()
        stepping, others = list[_Deferred](), list[_Deferred]()
        for one in self._deferred:
            (stepping if one.arrival.state is State.STEPPING else others).append(one)
        self._fill(stepping, self.collected, array_of)
        self._deferred = [one for one in others if one.arrival.is_pending]
        for one in self._deferred:
            one.arrival.is_passed_over = True

    def preview(
        self, arrivals: Collection[Arrival], array_of: Callable[[torch.Tensor], Any]
    ) -> list[list[SavedGradient]]:
        """Return the gradients that ``collect`` would move if ``arrivals`` were stepped, by group; change nothing."""
        found: list[list[SavedGradient]] = [[] for _ in self.collected]
        self._fill([one for one in self._deferred if one.arrival in arrivals], found, array_of)
        return found

    @staticmethod
    def _fill(
        deferred: Sequence[_Deferred], into: list[list[SavedGradient]], array_of: Callable[[torch.Tensor], Any]
    ) -> None:
        """Add current gradients by group; tables that share a gradient share its array."""
        flats: dict[Arrival, list[Any]] = {}
        for group, save, arrival in deferred:
            if arrival not in flats:
                flats[arrival] = arrival.flats(array_of)
            into[group] += save(flats[arrival])

    def clear_collected(self) -> None:
        """Drop the gradients that a step has applied."""
        for gradients in self.collected:
            gradients.clear()

    def clear(self) -> None:
        """Drop everything."""
        self.awaits_backward = False
        self.unstepped.clear()
        self._deferred.clear()
        self.clear_collected()


def is_unstepped(arrival: Arrival) -> bool:
    """Return True for gradients that must be stepped before their pass ends: finite ones; waits for a GPU."""
    arrival.anchor.drop_dropped()
    if not arrival.is_pending or arrival.is_passed_over or arrival.anchor.is_skipped:
        return False
    return all(bool(one.isfinite().all()) for one in arrival.present)


def ended_unstepped(num_batches: int) -> str:
    """Return the error message for a pass that ends while gradients of its last batches are pending."""
    batches = "batch" if num_batches == 1 else f"{num_batches} batches"
    return (
        f"ended between backward and step, and the row gradients of its last {batches} would be lost: step the "
        "optimizer after its last batch too (p.samples_done == p.num_samples), or drop them with zero_grad()"
    )
