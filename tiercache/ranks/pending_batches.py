"""Batches on their way to this rank, and those that wait for their step."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from tiercache.training.row_gradients import RowGradients, is_alive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tiercache.backends.base import Backend
    from tiercache.ranks.exchange import Exchanged
    from tiercache.ranks.pooling import PooledBatch
    from tiercache.tiers.rows import RowView
    from tiercache.training.batch import Batch
    from tiercache.training.tracers import Mark, Tracer

__all__ = ["Coming", "PendingBatch", "PendingBatches", "tensors_of"]


@dataclass(frozen=True, slots=True)
class PendingBatch:
    """A batch that waits for its step."""

    exchanged: Exchanged
    pooled: PooledBatch | None
    gradients: RowGradients
    view: RowView

    @property
    def pending(self) -> bool:
        """Whether a backward left something."""
        return self.gradients.is_pending or any(map(is_alive, self._pooled_marks))

    @property
    def marks(self) -> Iterator[Mark]:
        """The gradients that wait for a step."""
        return chain(self.gradients.marks, self._pooled_marks)

    @property
    def _pooled_marks(self) -> Iterator[Mark]:
        found = self.pooled.features.values() if self.pooled else ()
        return (mark for one in found for _, mark in one.waiting)

    def settle(self, factors: Mapping[Tracer, float]) -> None:
        """Take what a step applies, as `RowGradients.settle` does."""
        self.gradients.settle(factors)
        for one in self.pooled.features.values() if self.pooled else ():
            one.settle(factors)

    def applied(self, factors: Mapping[Tracer, float]) -> RowGradients:
        """Return what ``settle`` would take, and let all wait on; pooled features have it as if it had been called."""
        for one in self.pooled.features.values() if self.pooled else ():
            waiting = [*one.waiting]
            one.settle(factors)
            one.waiting[:] = waiting
        found = RowGradients(len(self.gradients.pending))
        found.pending = self.gradients.applied(factors)
        return found


class PendingBatches:
    """The batches since the last step, in order, with the gradients that backward left in them."""

    def __init__(self) -> None:
        self.batches: list[PendingBatch] = []

    def add(self, batch: PendingBatch) -> None:
        """Add a batch; one of an evaluation waits for no step."""
        if batch.view.gradients is not None:
            self.batches.append(batch)

    @property
    def pending(self) -> bool:
        """Whether a backward was not stepped yet."""
        return any(one.pending for one in self.batches)

    def take(self) -> list[PendingBatch]:
        """Return them; their rows are of before the step and can be looked up no more."""
        taken, self.batches = self.batches, []
        for one in taken:
            one.view.ended = True
        return taken

    def put_back(self, taken: Sequence[PendingBatch]) -> None:
        """Keep those of which some tables wait for another optimizer's step."""
        self.batches[:0] = [one for one in taken if any(map(is_alive, one.marks))]

    def leave(self, where: str) -> None:
        """Give up gradients, as `RowGradients.leave` does."""
        for one in self.batches:
            one.gradients.leave(where)

    def discard(self) -> None:
        """Drop them and their gradients."""
        self.take()


class Coming:
    """A batch on its way: asked for, then brought, then received. Asked for where this is made."""

    def __init__(self, bring: Callable[[], tuple[Batch, PendingBatch]], backend: Backend) -> None:
        self._bring, self._backend = bring, backend
        self._brought: tuple[Batch, PendingBatch] | None = None
        self._exchanged: Any = None

    @property
    def is_brought(self) -> bool:
        """Whether ``bring`` was called."""
        return self._brought is not None

    def bring(self) -> PendingBatch:
        """Have its rows brought; beside the training that comes behind this, where the backend queues its work."""
        with self._backend.streams.exchanging():
            self._brought = self._bring()
        self._exchanged = self._backend.streams.exchanged()
        return self._brought[1]

    def receive(self) -> Batch:
        """Return it; what is done with it comes behind its being brought. On the training thread."""
        assert self._brought is not None, "a batch is received that was not brought"
        batch, pending = self._brought
        made = tensors_of((batch.label, batch.dense, batch.rows.groups, pending)) if self._backend.queues else []
        self._backend.streams.receive(self._exchanged, made)
        return batch


def tensors_of(found: object) -> list[torch.Tensor]:
    """Return the tensors that tuples, lists, dictionaries and dataclasses hold, however deep."""
    if isinstance(found, torch.Tensor):
        return [found]
    if isinstance(found, dict):
        return tensors_of(list(found.values()))
    if isinstance(found, tuple | list):
        return [tensor for one in found for tensor in tensors_of(one)]
    if is_dataclass(found):
        return tensors_of([getattr(found, one.name) for one in fields(found)])
    return []
