"""One lookup: the features of one group of tables in one batch, forward and backward."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from tiercache.data.block_layout import IdOrder
from tiercache.errors import StateError
from tiercache.kernels.arrays import NONE_F4, NONE_I4
from tiercache.kernels.cpu.gathering import check_ids
from tiercache.kernels.cpu.pooling import MAX, MEAN, SUM
from tiercache.train.row_gradients import NOBODY_STEPS
from tiercache.values.ids import FoundIds
from tiercache.values.lookups import FeatureRuns, LookedUp, LookupIds, SavedGradient, feature_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from tiercache.schema import Feature
    from tiercache.train.arrivals import Arrival
    from tiercache.train.row_view import Pooled, RowView
    from tiercache.values.batch import Batch
    from tiercache.values.ids import Array, FeatureIds
    from tiercache.values.lookups import GroupRows


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FeaturePart:
    """Features of one group that a module looks up in one kernel call."""

    group: int
    features: tuple[str, ...]
    tables: tuple[str, ...]  # the table of each feature
    modes: NDArray[np.int8]
    cols: NDArray[np.int64]  # the first output column of each feature
    bags: bool  # True if a feature may have any number of ids, or weights
    _bases: list[Any] = field(default_factory=lambda: [(lambda: None, None)])
    """A reference to the rows that were looked up last, and the bases in them; one tuple, because threads share it."""

    @classmethod
    def of(
        cls, group: int, specs: Sequence[Feature], modes: Mapping[str, int], cols: Mapping[str, int], *, bags: bool
    ) -> FeaturePart:
        """Return a part of features; modes, cols: by feature, omitting features that are not pooled."""
        return cls(
            group=group,
            features=tuple(spec.name for spec in specs),
            tables=tuple(spec.table for spec in specs),
            modes=np.array([modes.get(spec.name, 0) for spec in specs], dtype=np.int8),
            cols=np.array([cols.get(spec.name, 0) for spec in specs], dtype=np.int64),
            bags=bags,
        )

    @property
    def key(self) -> IdOrder:
        """Identifies the collation of its ids."""
        return IdOrder(self.features, self.bags)

    def bases(self, rows: GroupRows) -> NDArray[np.int64]:
        """Return the position of local id 0 of each feature's table: one array as long as the rows are the same."""
        known, found = self._bases[0]
        if known() is not rows:
            found = np.array([rows.first[table] for table in self.tables], dtype=np.int64)
            self._bases[0] = weakref.ref(rows), found
        bases: NDArray[np.int64] = found
        return bases


@dataclass(frozen=True, slots=True)
class Collated:
    """The ids of a part in one batch, feature-major."""

    ids: Array  # (E,) on the device
    starts: NDArray[np.int64]  # (F + 1,) the first entry of each feature
    offsets: Array | None  # (F * N + 1,) on the device, for bags
    bad: tuple[int, int] | None = None  # entry and id of the first invalid local id, which the pass lacks
    weights: Array | None = None  # (E,) on the device: the data's weights, if it has any and the batch was made ahead
    runs: FeatureRuns | None = None  # the order of the ids by position, if they were sorted


def collate_part(part: FeaturePart, found: Sequence[FeatureIds | FoundIds], rows: RowView, n: int) -> Collated:
    """Concatenate and check the ids of a part's features in n samples, with their bags."""
    backend, starts = rows.backend, np.zeros(len(found) + 1, dtype=np.int64)
    np.cumsum([one.num_ids for one in found], out=starts[1:])
    on_device = [one.device_ids for one in found if isinstance(one, FoundIds)]
    bad = None
    if len(on_device) == len(found):  # found in the pass's own key sets, so all are valid
        ids = backend.concat(on_device)
    else:
        host, ids = backend.join([one.ids for one in found])
        group = rows.groups[part.group]
        limits = np.array([group.num_local[table] for table in part.tables], dtype=np.int64)
        entry = check_ids(host, starts, limits)
        bad = None if entry < 0 else (entry, int(host[entry]))
    offsets = None
    if part.bags:
        ends = np.empty(len(found) * n + 1, dtype=np.int64)
        ends[0] = 0
        for f, one in enumerate(found):
            bag_ends = np.arange(1, n + 1, dtype=np.int64) if one.offsets is None else one.offsets[1:]
            np.add(bag_ends, starts[f], out=ends[1 + f * n : 1 + (f + 1) * n])
        offsets = backend.to_device(ends)
    return Collated(ids, starts, offsets, bad)


class Collations:
    """Parts of one batch that were collated before a module looked them up."""

    def __init__(
        self,
        seen: MutableMapping[IdOrder, FeaturePart],
        trained: MutableMapping[IdOrder, FeaturePart],
        ids: Mapping[str, FeatureIds],
        made: Mapping[IdOrder, Collated],
    ) -> None:
        """seen, trained: record the parts of lookups, so that later batches collate and sort them ahead."""
        self._seen, self._trained, self._ids, self._made = seen, trained, ids, made

    def of(self, part: FeaturePart, ids: Mapping[str, FeatureIds | FoundIds], *, trained: bool) -> Collated | None:
        """Return the collation of exactly these ids; None if there is none. trained: whether a step may follow."""
        collated = self._made.get(part.key)
        if collated is None and part.key not in self._seen:
            self._seen[part.key] = part
        if trained and part.key not in self._trained:
            self._trained[part.key] = part
        if collated is None or (
            ids is not self._ids and any(ids[name] is not self._ids[name] for name in part.features)
        ):
            return None
        return collated


MODES = {"sum": SUM, "mean": MEAN, "max": MAX}


def check_ids_of(batch: Batch, features: Sequence[str]) -> None:
    """Raise ValueError for a feature without ids in the batch."""
    for name in features:
        if name not in batch.ids:
            raise ValueError(
                f"the batch was made without the rows of feature {name!r}: pass its keys, and register every module "
                "that looks it up before you create the batch"
            )


def read_entries(part: FeaturePart, batch: Batch, weights: Mapping[str, Array]) -> LookupIds:
    """Return the ids of a part in one batch on the device, feature-major, checked against their tables."""
    rows = batch.rows.groups[part.group]
    trained = batch.rows.gradients is not None and torch.is_grad_enabled()
    collated = None if batch.collations is None else batch.collations.of(part, batch.ids, trained=trained)
    if collated is None:
        collated = collate_part(part, [batch.ids[name] for name in part.features], batch.rows, batch.num_samples)
    starts = collated.starts
    if collated.bad is not None:
        entry, number = collated.bad
        f = int(np.searchsorted(starts, entry, side="right")) - 1
        raise IndexError(
            f"feature {part.features[f]!r} has local id {number} at entry {entry - int(starts[f])} "
            f"of the batch, but table {part.tables[f]!r} has local ids 0 to {rows.num_local[part.tables[f]] - 1} in "
            f"{batch.rows.name}: use batches of the pass that is being trained"
        )
    return LookupIds(
        ids=collated.ids, starts=starts, modes=part.modes, cols=part.cols,
        bases=part.bases(rows), offsets=collated.offsets,
        weights=_weights_of(part, batch, collated, weights) if part.bags else NONE_F4,
        trained=trained, runs=collated.runs,
    )  # fmt: skip


def _weights_of(part: FeaturePart, batch: Batch, collated: Collated, weights: Mapping[str, Array]) -> Array:
    """Return the weight of each entry on the device; empty: all 1."""
    if not weights and collated.weights is None:
        return NONE_F4
    starts, found = collated.starts, [batch.ids[name] for name in part.features]
    if collated.weights is not None and all(
        weights.get(name) is one.weights for name, one in zip(part.features, found, strict=True)
    ):
        return collated.weights
    parts = []
    for f, name in enumerate(part.features):
        if name in weights:
            first, last = int(starts[f]), int(starts[f + 1])
            if tuple(weights[name].shape) != (last - first,):
                raise ValueError(
                    f"weights of feature {name!r} have shape {tuple(weights[name].shape)}: expected one for each "
                    f"of its {last - first} ids in the batch"
                )
            parts.append((first, last, weights[name]))
    return batch.rows.backend.weights(int(starts[-1]), parts) if parts else NONE_F4


def _looked_up(batch: Batch, features: Sequence[str]) -> list[FeatureIds | FoundIds] | None:
    """Return the ids if there are several ranks, whose batches have no collations; else None."""
    return None if batch.collations is not None else [batch.ids[name] for name in features]


class TableLookup:
    """The lookup of one part in one batch. Lives from forward to backward."""

    def __init__(self, part: FeaturePart, batch: Batch, weights: Mapping[str, Array] | None = None) -> None:
        """Raises StateError if gradients are pending that nothing would ever step."""
        self.part, self.batch = part, batch
        pending = batch.rows.gradients
        if pending is not None and torch.is_grad_enabled() and not pending.anchors.is_stepped and pending.is_pending:
            raise StateError(NOBODY_STEPS)
        self.entries = read_entries(part, batch, weights or {})
        self.found: LookedUp  # the backend's results, set by forward
        self._steps = self._num_steps() if weights else []

    @property
    def rows(self) -> GroupRows:
        """The rows looked up."""
        rows: GroupRows = self.batch.rows.groups[self.part.group]
        return rows

    def defer(self, width: int, arrival: Arrival) -> None:
        """Defer the gradient of a pooled output, (N, ``width``), to the step."""
        found = self.found
        if self._trains():
            self._defer(
                _saved_bags, arrival, width=width, cols=self.part.cols, places=found.places, scales=found.scales,
                argmax=found.argmax.reshape(-1),
            )  # fmt: skip

    def defer_rows(self, first: int, arrival: Arrival) -> None:
        """Defer the gradients of unpooled vectors, for the outputs from ``first`` on, to the step."""
        if self._trains():
            outputs = slice(first, first + len(self.part.features))
            self._defer(
                partial(_saved_rows, outputs), arrival, width=self.rows.vectors.dim, cols=_FIRST, places=None,
                scales=NONE_F4, argmax=NONE_I4, starts=self.entries.starts,
            )  # fmt: skip

    def _trains(self) -> bool:
        """Return True if gradients move rows. Raises RuntimeError if the pass has ended: its slots mean other rows."""
        if (pending := self.batch.rows.gradients) is None:
            return False
        pending.receive()
        if self.entries.starts[-1] == 0:
            return False
        self.batch.rows.check()
        return True

    def _defer(self, save: Callable[..., list[SavedGradient]], arrival: Arrival, **gradient: Any) -> None:
        """Defer gradients to the step, keeping only the data of a `SavedGradient`, not the batch."""
        made = partial(
            SavedGradient, slots=self.found.slots, sorted=self.found.sorted,
            looked_up=_looked_up(self.batch, self.part.features),
            spans=partial(feature_spans, self.part.tables, self.entries.starts), **gradient,
        )  # fmt: skip
        self.batch.rows.gradients.defer(self.part.group, partial(save, made), arrival)

    def _num_steps(self) -> list[int]:
        """Return the number of steps that each feature's table has taken."""
        gradients = self.batch.rows.gradients
        return [] if gradients is None else [gradients.num_steps[table] for table in self.part.tables]

    def weight_gradients(self, grad_NT: Array) -> dict[str, Array]:
        """Return d loss / d weight by feature. Raises StateError if the rows were stepped since the lookup."""
        self.batch.rows.check()
        if self._steps != self._num_steps():
            raise StateError(
                f"the gradient of the weights of {', '.join(map(repr, self.part.features))} needs the rows that were "
                "looked up, but a step has changed them since: call backward() before optimizer.step(), or look up "
                "again"
            )
        out = self.batch.rows.backend.weight_gradient(self.rows, self.entries, self.found, grad_NT)
        starts = self.entries.starts
        return {name: out[int(starts[f]) : int(starts[f + 1])] for f, name in enumerate(self.part.features)}


_FIRST = np.zeros(1, dtype=np.int64)


def _saved_bags(made: Callable[..., SavedGradient], gradients: Sequence[Array]) -> list[SavedGradient]:
    return [] if gradients[0] is None else [made(gradient=gradients[0])]


def _saved_rows(
    outputs: slice, made: Callable[..., SavedGradient], gradients: Sequence[Array | None]
) -> list[SavedGradient]:
    """Return one gradient for all features, or one for each that has a gradient."""
    some = tuple(gradients[outputs])
    whole = made(gradient=some)
    return [whole] if all(one is not None for one in some) else whole.by_feature()


class RemoteLookup:
    """The lookup of one feature that another rank pooled."""

    def __init__(self, batch: Batch, found: Pooled, col: int) -> None:
        """col: its first column in the output and its gradient."""
        self._rows, self._found = batch.rows, found
        self._columns = slice(col, col + found.vectors.shape[1])

    def write(self, out_NT: torch.Tensor) -> None:
        """Write its columns."""
        out_NT[:, self._columns] = self._found.vectors

    def defer(self, _width: int, arrival: Arrival) -> None:
        """Defer the gradient to the step."""
        self._rows.check()
        if self._rows.gradients is not None:
            self._rows.gradients.receive()
        self._found.pending.append((arrival, self._columns))
