"""Joining: the ids that a module looks up in one call, one behind the other on the device, and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tiercache.kernels.cpu.gathering import check_ids
from tiercache.kernels.cuda.sorting import Positions
from tiercache.values.ids import FoundIds

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from tiercache.backends.runs import Run
    from tiercache.training.row_view import RowView
    from tiercache.values.ids import Array, FeatureIds

Key = tuple[tuple[str, ...], bool]
"""What decides what is joined: features, and whether they are bags."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FeaturePart:
    """Features of one group that a module looks up in one kernel call."""

    group: int
    features: tuple[str, ...]
    tables: tuple[str, ...]
    """The table of each feature."""
    modes: NDArray[np.int8]
    cols: NDArray[np.int64]
    """The first output column of each feature."""
    bags: bool
    """Whether a feature may have any number of ids, or weights."""

    @property
    def key(self) -> Key:
        """What its ids are joined by."""
        return self.features, self.bags


class Bringer(Protocol):
    """Brings arrays to the device: a backend does on the training thread, an upload ahead of it."""

    def to_device(self, array: NDArray[Any]) -> Array:
        """Return a host array on the device."""
        ...

    def join(self, arrays: Sequence[NDArray[np.int32]]) -> tuple[list[Run], Array]:
        """Return arrays one behind the other."""
        ...

    def weights(self, size: int, parts: Sequence[tuple[int, int, Array]]) -> Array:
        """Return (size,) float32: 1, but in [first, last) the values of each part."""
        ...


@dataclass(frozen=True, slots=True)
class Joined:
    """The ids of a part in one batch, feature-major."""

    found: Sequence[FeatureIds | FoundIds]
    """What was joined."""
    ids: Array
    """(E,) on the device."""
    starts: NDArray[np.int64]
    """(F + 1,) where each feature's begin."""
    bad: tuple[int, int] | None
    """Entry and id of the first that is no local id of its table in the pass."""
    offsets: Array | None
    """(F * N + 1,) on the device, where they are bags."""
    weights: Array | None
    """(E,) on the device: those of the data, where it has some and they were asked for."""
    positions: Positions | None = None
    """Where the ids may be sorted ahead of the step, what their positions are."""
    runs: Any = None
    """The order of the ids by position, where they were."""


def join_part(
    part: FeaturePart,
    found: Sequence[FeatureIds | FoundIds],
    rows: RowView,
    num_samples: int,
    bringer: Bringer,
    *,
    weights: bool = False,
) -> Joined:
    """Join and check the ids ``found`` of a part's features; with their bags, and the data's weights if asked."""
    starts = np.zeros(len(found) + 1, dtype=np.int64)
    np.cumsum([one.num_ids for one in found], out=starts[1:])
    there = [one.there for one in found if isinstance(one, FoundIds)]
    bad = order = None
    if len(there) == len(found):  # in the pass's own key sets: none is of another table
        ids = rows.backend.concat(there)
    else:
        runs, ids = bringer.join([one.ids for one in found])
        group = rows.groups[part.group]
        limits = np.array([group.num_local[table] for table in part.tables], dtype=np.int64)
        bad = _first_bad(runs, starts, limits)
        if bad is None and starts[-1]:
            bases = np.array([group.first[table] for table in part.tables], dtype=np.int64)
            order = Positions(ids, starts, bases, limits)
    offsets = brought = None
    if part.bags:
        n = num_samples
        ends = np.empty(len(found) * n + 1, dtype=np.int64)
        ends[0] = 0
        for f, one in enumerate(found):
            mine = np.arange(1, n + 1, dtype=np.int64) if one.offsets is None else one.offsets[1:]
            np.add(mine, starts[f], out=ends[1 + f * n : 1 + (f + 1) * n])
        offsets = bringer.to_device(ends)
        given = [(int(starts[f]), int(starts[f + 1]), one.weights) for f, one in enumerate(found)]
        given = [one for one in given if one[2] is not None]
        if weights and given:
            brought = bringer.weights(int(starts[-1]), given)
    return Joined(found, ids, starts, bad, offsets, brought, order)


def _first_bad(runs: Sequence[Run], starts: NDArray[np.int64], limits: NDArray[np.int64]) -> tuple[int, int] | None:
    for run in runs:
        begins = starts[run.first : run.last + 1] - starts[run.first]
        bad = check_ids(run.values, begins, limits[run.first : run.last])
        if bad >= 0:
            return int(starts[run.first]) + bad, int(run.values[bad])
    return None


class Joins:
    """Parts of one batch that were joined before a module looked them up."""

    def __init__(self, seen: MutableMapping[Key, FeaturePart], made: Mapping[Key, Joined]) -> None:
        """seen: takes note of the parts that are looked up, so that they are joined ahead in batches to come."""
        self._seen, self._made = seen, made

    def of(self, part: FeaturePart, found: Sequence[FeatureIds | FoundIds]) -> Joined | None:
        """Return what was joined of exactly these ids; None where nothing was."""
        key = part.key
        if key not in self._seen:
            self._seen[key] = part
        joined = self._made.get(key)
        if joined is None or any(one is not other for one, other in zip(joined.found, found, strict=True)):
            return None
        return joined
