"""One lookup: the ids of one group's features in a batch, the result, and the gradient that backward saves.

Legend: E entries (ids), F features, N samples, T columns of the output. Arrays on the device are NumPy arrays on a CPU
and torch tensors on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.values.ids import Array, FeatureIds, FoundIds


class Span(NamedTuple):
    """Neighboring entries of one table."""

    table: str
    first: int
    last: int
    """The entry after the last one."""


def feature_spans(tables: Sequence[str], starts: NDArray[np.int64]) -> list[Span]:
    """Return the spans of consecutive features: ``tables`` (F,) and ``starts`` (F + 1,)."""
    return list(map(Span, tables, starts[:-1].tolist(), starts[1:].tolist()))


def position_spans(first: Mapping[str, int], positions: NDArray[np.int32]) -> list[Span]:
    """Return the spans of rows by position (E,); ``first``: the position of each table's first row."""
    tables = sorted(first, key=lambda table: first[table])
    number = np.searchsorted([first[table] for table in tables], positions, side="right") - 1
    starts = np.flatnonzero(np.diff(number, prepend=-1))
    return feature_spans([tables[n] for n in number[starts].tolist()], np.append(starts, positions.size))


class FeatureRuns(NamedTuple):
    """The order of the ids of several gradients, for one of them."""

    runs: Any
    number: int
    """The number of the part."""
    num_parts: int


class SortedSlots(NamedTuple):
    """Slots of entries, and the result of `sort_slots` for them; on a GPU their `FeatureRuns`."""

    slots: Array
    """(E,)"""
    pairs: Array
    """(E,)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupIds:
    """The ids of a batch's features of one group, feature-major."""

    ids: Array
    """(E,) int32, on the device; each is in its feature's table."""
    starts: NDArray[np.int64]
    """(F + 1,) the start of each feature's entries."""
    bases: NDArray[np.int64]
    """(F,) the position of local id 0 of each feature's table."""
    modes: NDArray[np.int8]
    """(F,)"""
    cols: NDArray[np.int64]
    """(F,) the first output column of each feature."""
    offsets: Array | None = None
    """(F * N + 1,) the start of each bag, on the device; None: one id for each feature and sample."""
    weights: Array
    """(E,) on the device; empty: all 1."""
    trained: bool = False
    """True if a step is expected to follow, which the lookup may prepare."""
    runs: FeatureRuns | None = None
    """The order of the ids by position, if they came with it."""


@dataclass(frozen=True, slots=True)
class LookedUp:
    """The result of looking up `LookupIds`, which backward needs."""

    slots: Array
    """(E,) the slot of each entry."""
    sorted: SortedSlots | None
    """``slots``, if the lookup sorted them."""
    argmax: Array
    """(N, T) the entry that gave each maximum; empty if nothing is pooled by max."""
    places: Array | None
    """(E,) the start of each entry's gradient; its complement if ``argmax`` decides element by element."""
    scales: Array
    """(E,) the factor of each entry's gradient; empty: 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGradient:
    """The gradient of one lookup: entries in batch order, each with its slot and its place in ``gradient``."""

    slots: Array
    """(E,)"""
    gradient: Array
    """Flat; of (N, ``width``). If nothing was pooled, a tuple: of each feature (ids, ``width``), or None if it has no
    gradient."""
    width: int
    cols: NDArray[np.int64]
    """The first column of each feature; if ``places`` is None, every feature has one entry per sample."""
    places: Array | None
    """(E,) see `LookedUp`."""
    scales: Array
    """(E,) see `LookedUp`; empty: 1."""
    argmax: Array
    """Flat like ``gradient``; see `LookedUp`."""
    sorted: SortedSlots | None = None
    """See `LookedUp`."""
    looked_up: Sequence[FeatureIds | FoundIds] | None = None
    """The ids that were looked up; None if unknown."""
    spans: Callable[[], list[Span]] | None = None
    """Returns the spans of entries by table, in order; None: the group has one table."""
    starts: NDArray[np.int64] | None = None
    """(F + 1,) the start of each feature's entries, if ``gradient`` is a tuple."""

    @property
    def num_samples(self) -> int:
        """Rows of the gradient."""
        return int(math.prod(self.gradient.shape)) // self.width

    def by_feature(self) -> list[SavedGradient]:
        """Return the gradients as one for each feature that has some, if nothing was pooled; else this one."""
        if self.starts is None:
            return [self]
        cuts, spans = self.starts.tolist(), None if self.spans is None else self.spans()
        found = []
        for f, (gradient, first, last) in enumerate(zip(self.gradient, cuts, cuts[1:], strict=False)):
            if gradient is None or first == last:
                continue
            found.append(replace(
                self, slots=self.slots[first:last], gradient=gradient, sorted=None, starts=None,
                looked_up=self.looked_up and self.looked_up[f : f + 1],
                spans=None if spans is None else partial(feature_spans, [spans[f].table], np.array([0, last - first])),
            ))  # fmt: skip
        return found

    @property
    def pairs(self) -> Array | None:
        """(E,) ``slots`` sorted; None if they were not sorted, or if the slots changed since."""
        return self.sorted.pairs if self.sorted is not None and self.sorted.slots is self.slots else None


GroupGradients: TypeAlias = "Sequence[list[SavedGradient]]"
"""The gradients of each group that a step applies, in the order of the backward calls."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class GroupRows:
    """Rows of one group: row ``slot_of_local[first[table] + local id]`` of the vectors and of each state.

    Arrays belong to the backend that looks them up.
    """

    vectors: Any
    """(slots, dim): the `Vectors` that kernels take, in their dtype; those of 16 bits as the bits of uint16."""
    states: tuple[Array, ...]
    """One (slots, width) array for each optimizer state."""
    slot_of_local: Array
    """The slot of each position."""
    first: dict[str, int]
    """By table: the position of its local id 0."""
    num_local: dict[str, int]
    """By table: the number of local ids."""
    streams: Array
    """The random stream of the row in each slot if rows have 16 bits; else empty."""
    _place: list[tuple[Any, ...]] = field(default_factory=list, init=False, repr=False)

    def place(self, describe: Callable[[Array], Any]) -> tuple[Any, ...]:
        """Return the addresses of the arrays, from ``describe``, and their layout; arrays are described once."""
        if not self._place:
            arrays = self.vectors.values, self.slot_of_local, self.streams, *self.states
            self._place.append((*self.vectors[1:], *map(describe, arrays)))
        return self._place[0]


LookupParts: TypeAlias = "Sequence[tuple[GroupRows, LookupIds]]"
"""The ids of several groups that are looked up together, and the rows of each group."""


class RowRequest(NamedTuple):
    """A request for rows of a group by their positions."""

    rows: GroupRows
    positions: Array
    """(n,) int32, each below the number of positions of ``rows``."""
    slots: Array
    """(n,) int32; written."""
    out: Array | None
    """(n, dim) float32 for the vectors; None: only slots are needed."""


Unseen = Literal["initial", "zeros", "error"]
"""The result for a key that was never trained, if its table has no out-of-vocabulary row: its initial row, zeros, or
KeyMissingError."""
UNSEEN: tuple[Unseen, ...] = ("initial", "zeros", "error")


class RowReader(Protocol):
    """Reads current rows, of any keys."""

    unseen: Unseen

    def fill(self, table_name: str, keys: NDArray[np.int64], out: tuple[NDArray[np.float32], ...]) -> None:
        """Write the vectors of ``keys``, each given once, to the first array of ``out``."""
