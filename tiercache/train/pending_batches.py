"""The rows of one batch of one of several ranks, and the batches that wait for their step."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiercache.train.row_gradients import RowGradients, is_unstepped
from tiercache.train.row_view import Pooled, RowView
from tiercache.values.ids import FeatureIds

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.data.raw_batch import FeatureKeys
    from tiercache.data.sub_dataset import EncodedBatch
    from tiercache.dist.pooled_output import PooledBatch
    from tiercache.dist.requests import ExchangedInput
    from tiercache.train.anchors import Anchors
    from tiercache.train.arrivals import Arrival
    from tiercache.values.ids import FoundIds
    from tiercache.values.lookups import GroupRows


class BatchIds(dict[str, FeatureIds]):
    """Ids by feature, of those that some module looks up and no other rank pools.

    ``in``, ``get`` and iteration are a dict's; ``ids[name]`` of any other name raises KeyError with a sentence.
    """

    def __init__(self, ids: Mapping[str, FeatureIds], modes: Mapping[str, str], features: Iterable[str]) -> None:
        """modes: by feature, how those are pooled whose ids are not here; features: all of the schema."""
        super().__init__(ids)
        self._modes, self.features = dict(modes), tuple(features)
        """All of the schema, in its order."""

    def __missing__(self, name: str) -> FeatureIds:
        """Raise KeyError."""
        if name in self._modes:
            raise KeyError(
                f"feature {name!r} is pooled by {self._modes[name]} where the rows of its table are, so the batch has "
                f"no ids of it: make the module that looks it up with weighted=[{name!r}] to have them, or look for "
                "its vectors in batch.pooled"
            )
        if name in self.features:
            raise KeyError(
                f"no module of this cache looks up feature {name!r}, so the batch was made without its ids: make one "
                "that does, before the batch is made"
            )
        raise KeyError(f"there is no feature {name!r}: the data have {', '.join(self.features)}")


@dataclass(frozen=True, slots=True, eq=False)
class ExchangedBatch:
    """A batch whose input was exchanged. In host memory."""

    samples: EncodedBatch | None
    """This rank's; None of a batch of raw keys, whose samples are elsewhere."""
    weight: float
    end: int
    input: ExchangedInput
    upload: Any = None
    """Nothing was brought to the device."""


class BatchRows(RowView):
    """The rows of one batch: exchanged at its first lookup, and again after a step. Collective."""

    def __init__(
        self,
        of_pass: RowView,
        exchanged: ExchangedBatch,
        anchors: Anchors,
        num_groups: int,
        load: Callable[[BatchRows], None],
    ) -> None:
        gradients = None if of_pass.gradients is None else RowGradients(num_groups, anchors)
        super().__init__((), gradients, exchanged.input.where, of_pass.backend)
        self.of_pass, self.exchanged, self._exchange_batch = of_pass, exchanged, load
        self.schema = of_pass.schema
        self.pooled = {
            name: Pooled(mode) for name, mode in (exchanged.input.bags.modes if exchanged.input.bags else {}).items()
        }
        """The features that other ranks pool, by name; they get their vectors with the rows."""
        self.bags: PooledBatch | None = None
        self.slots = torch.empty(0, dtype=torch.int32, device="cpu")
        """As `RowExchange.serve` returns them."""
        self.raw: Mapping[str, FeatureKeys] = {}
        """The keys of a batch of raw keys, by feature."""

    def is_key(self, feature: str, ids: FeatureIds | FoundIds, key: int) -> NDArray[np.bool_]:
        """Look among the ids that the batch had in its pass, or among its raw keys."""
        if feature in self.raw:
            return np.asarray(self.raw[feature].keys == key)
        assert self.exchanged.samples is not None
        return self.of_pass.is_key(feature, self.exchanged.samples.ids[feature], key)

    def check(self) -> None:
        """Raise RuntimeError where the pass has ended, or the rows are of before a step."""
        self.of_pass.check()
        super().check()

    def look_up(self, end: int, *, trains: bool = True) -> None:
        """Exchange the rows if they are not there, after those of the pass before."""
        self.of_pass.look_up(end, trains=trains)
        self.load()
        if self.gradients is not None and torch.is_grad_enabled():
            self.gradients.awaits_backward = True

    def load(self) -> None:
        """Exchange the rows if they are not there."""
        if not self.groups:
            self._exchange_batch(self)

    def set_rows(self, groups: Sequence[GroupRows], slots: torch.Tensor, bags: PooledBatch | None) -> None:
        """Set the rows that were exchanged."""
        self.groups, self.slots, self.bags, self.ended = tuple(groups), slots, bags, False
        for name, vectors in ({} if bags is None else bags.vectors).items():
            self.pooled[name].vectors = vectors

    def release(self) -> None:
        """Drop the rows: a step changes them, and the next lookup exchanges them again."""
        self.groups, self.ended = (), True

    @property
    def pending(self) -> bool:
        """Whether a backward was not stepped yet, and not dropped."""
        return any(map(is_unstepped, self._arrivals))

    @property
    def waits(self) -> bool:
        """Whether gradients of this rank wait for a step."""
        return any(one.is_pending for one in self._arrivals)

    @property
    def _arrivals(self) -> list[Arrival]:
        of_rows = [] if self.gradients is None else [*self.gradients.arrivals]
        return of_rows + [arrival for one in self.pooled.values() for arrival, _ in one.pending]

    def collect(self) -> RowGradients:
        """Take what the step applies, as `RowGradients.collect` does, and return it."""
        assert self.gradients is not None
        self.gradients.collect(self.backend.array)
        for one in self.pooled.values():
            one.collect()
        return self.gradients

    def preview(self, ready: Collection[Arrival]) -> RowGradients:
        """Return what ``collect`` would take if ``ready`` were stepped, and leave all pending."""
        assert self.gradients is not None
        for one in self.pooled.values():
            one.take(ready)
        found = RowGradients(len(self.gradients.collected))
        found.collected = self.gradients.preview(ready, self.backend.array)
        return found


class PendingBatches:
    """The batches since the last step, in order, with the gradients that backward left in them."""

    def __init__(self) -> None:
        self.batches: list[BatchRows] = []

    def add(self, batch: BatchRows) -> None:
        """Add a batch; one of an evaluation waits for no step, and one that waits already keeps its turn."""
        if batch.gradients is not None and not any(batch is one for one in self.batches):
            self.batches.append(batch)

    @property
    def pending(self) -> bool:
        """Whether a backward was not stepped yet."""
        return any(one.pending for one in self.batches)

    @property
    def awaits_backward(self) -> bool:
        """Whether one was looked up to be trained, and neither a backward nor a step came since."""
        return any(one.gradients is not None and one.gradients.awaits_backward for one in self.batches)

    def take(self) -> list[BatchRows]:
        """Return them; their rows are of before the step."""
        taken, self.batches = self.batches, []
        for one in taken:
            one.release()
        return taken

    def put_back(self, waiting: Sequence[BatchRows]) -> None:
        """Keep those of which some tables wait for another optimizer's step, on any rank."""
        self.batches[:0] = waiting

    def expire(self, where: str) -> None:
        """Give up gradients, as `RowGradients.expire` does."""
        for one in self.batches:
            if one.gradients is not None:
                one.gradients.expire(where)

    def discard(self) -> None:
        """Drop them and their gradients."""
        for one in self.take():
            if one.gradients is not None:
                one.gradients.clear()


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
