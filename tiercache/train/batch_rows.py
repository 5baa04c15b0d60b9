"""The rows of one batch on one of several ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING

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
    from tiercache.values.lookups import GroupGradients, GroupRows


class BatchIds(dict[str, FeatureIds]):
    """Ids by feature, if some module looks it up and no other rank pools it; others raise KeyError with advice."""

    def __init__(self, ids: Mapping[str, FeatureIds], modes: Mapping[str, str], features: Iterable[str]) -> None:
        """modes: by feature, the pooling modes of features pooled elsewhere; features: all features of the schema."""
        super().__init__(ids)
        self._modes, self.features = dict(modes), tuple(features)  # all features of the schema, in order

    def __missing__(self, name: str) -> FeatureIds:
        if name in self._modes:
            raise KeyError(
                f"feature {name!r} is pooled by {self._modes[name]} on the rank that owns its table, so the batch has "
                f"no ids of it: create the module that looks it up with weighted=[{name!r}] to have them, or use "
                "its vectors in batch.pooled"
            )
        if name in self.features:
            raise KeyError(
                f"no module of this cache looks up feature {name!r}, so the batch was made without its ids: create a "
                "module that does, before the batch is made"
            )
        raise KeyError(f"unknown feature {name!r}: the data has {', '.join(self.features)}")


@dataclass(frozen=True, slots=True, eq=False)
class ExchangedBatch:
    """A batch whose input was exchanged. In host memory."""

    samples: EncodedBatch | None  # this rank's samples; None for a batch of raw keys, which keeps them elsewhere
    weight: float
    end: int
    input: ExchangedInput


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
        """Features that other ranks pool, by name; their vectors arrive with the rows."""
        self.bags: PooledBatch | None = None
        self.slots = torch.empty(0, dtype=torch.int32, device="cpu")  # the slots from `RowExchange.serve`
        self.raw: Mapping[str, FeatureKeys] = {}  # the keys of a batch of raw keys, by feature

    def is_key(self, feature: str, ids: FeatureIds | FoundIds, key: int) -> NDArray[np.bool_]:
        """Compare the ids that the batch had in its pass, or its raw keys, with ``key``."""
        if feature in self.raw:
            return np.asarray(self.raw[feature].keys == key)
        assert self.exchanged.samples is not None
        return self.of_pass.is_key(feature, self.exchanged.samples.ids[feature], key)

    def check(self) -> None:
        """Raise RuntimeError if the pass has ended, or if the rows were exchanged before a step."""
        self.of_pass.check()
        super().check()

    def look_up(self, end: int, *, trains: bool = True) -> None:
        """Exchange the rows if needed, after the rows of the previous pass."""
        self.of_pass.look_up(end, trains=trains)
        self.load()
        if self.gradients is not None and torch.is_grad_enabled():
            self.gradients.awaits_backward = True

    def load(self) -> None:
        """Exchange the rows if they were not exchanged."""
        if not self.groups:
            self._exchange_batch(self)

    def set_rows(self, groups: Sequence[GroupRows], slots: torch.Tensor, bags: PooledBatch | None) -> None:
        """Set the exchanged rows."""
        self.groups, self.slots, self.bags, self.ended = tuple(groups), slots, bags, False
        for name, vectors in ({} if bags is None else bags.vectors).items():
            self.pooled[name].vectors = vectors

    def release(self) -> None:
        """Drop the rows: a step changes them, and the next lookup exchanges them again."""
        self.groups, self.ended = (), True

    @property
    def pending(self) -> bool:
        """True if a backward was neither stepped nor dropped."""
        return any(map(is_unstepped, self._arrivals))

    @property
    def waits(self) -> bool:
        """True if gradients of this rank wait for a step."""
        return any(one.is_pending for one in self._arrivals)

    @property
    def _arrivals(self) -> list[Arrival]:
        of_rows = [] if self.gradients is None else [*self.gradients.arrivals]
        return of_rows + [arrival for one in self.pooled.values() for arrival, _ in one.pending]

    def collect(self) -> GroupGradients:
        """Collect the gradients that the step applies, as `RowGradients.collect` does, and return them."""
        assert self.gradients is not None
        self.gradients.collect(self.backend.gradient)
        for one in self.pooled.values():
            one.collect()
        return self.gradients.collected

    def preview(self, ready: Collection[Arrival]) -> GroupGradients:
        """Return the gradients that ``collect`` would take if ``ready`` were stepped, and leave all pending."""
        assert self.gradients is not None
        for one in self.pooled.values():
            one.take(ready)
        return self.gradients.preview(ready, self.backend.gradient)


def tensors_of(found: object) -> list[torch.Tensor]:
    """Return the tensors in tuples, lists, dictionaries and dataclasses, at any depth."""
    if isinstance(found, torch.Tensor):
        return [found]
    if isinstance(found, dict):
        return tensors_of(list(found.values()))
    if isinstance(found, tuple | list):
        return [tensor for one in found for tensor in tensors_of(one)]
    if is_dataclass(found):
        return tensors_of([getattr(found, one.name) for one in fields(found)])
    return []
