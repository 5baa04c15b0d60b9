"""Entries: the ids of one lookup, and what it leaves for the step.

Legend: E entries, F features, N samples, T columns of the output. "On the device" are NumPy arrays on a CPU, torch
tensors on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tiercache.kernels.arrays import NONE_F4, NONE_I4

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tiercache.kernels.key_index import Missing
    from tiercache.store.table import Group
    from tiercache.tiers.rows import GroupRows

Array = Any
"""Of the device."""


class Found(Protocol):
    """The local ids of a batch's raw keys, all features' one behind the other; -1 where the pass lacks a key."""

    @property
    def there(self) -> Array:
        """(E,) int32, on the device."""
        ...

    def missing(self) -> Missing:
        """Return how many keys the pass lacks, and the first of them; waits for the search."""
        ...

    def host(self) -> NDArray[np.int32]:
        """Return the ids (E,) in host memory, read-only; waits for the search."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FoundIds:
    """The local ids of one feature, as of `FeatureIds`, found on the device: each one is a row, or -1."""

    found: Found
    first: int
    """Of its entries among those of all features."""
    last: int
    offsets: NDArray[np.int64] | None
    """(n + 1,) where each sample's ids begin; None: one id per sample."""
    weights: NDArray[np.float32] | None
    """(E,) one per id; None: all 1."""

    @property
    def ids(self) -> NDArray[np.int32]:
        """(E,) in host memory, read-only; a GPU is waited for when those of a batch are first read."""
        return self.found.host()[self.first : self.last]

    @property
    def there(self) -> Array:
        """(E,) on the device."""
        return self.found.there[self.first : self.last]

    @property
    def num_ids(self) -> int:
        """E."""
        return self.last - self.first


class SortedSlots(NamedTuple):
    """Slots of entries, and what `sort_slots` makes of them."""

    slots: Array
    """(E,)"""
    pairs: Array
    """(E,)"""


@dataclass(slots=True, kw_only=True)
class Entries:
    """The ids of a batch's features of one group, feature-major; the lookup writes what the way back needs."""

    ids: Array
    """(E,) int32, on the device; every one is in its feature's table."""
    starts: NDArray[np.int64]
    """(F + 1,) where each feature's entries begin."""
    bases: NDArray[np.int64]
    """(F,) the position of local id 0 of each feature's table."""
    modes: NDArray[np.int8]
    """(F,)"""
    cols: NDArray[np.int64]
    """(F,) the first output column of each feature."""
    offsets: Array | None = None
    """(F * N + 1,) where each bag begins, on the device; None: one id for each feature and sample."""
    weights: Array = field(default_factory=lambda: NONE_F4)
    """(E,) on the device; empty: all 1."""
    trained: bool = False
    """Whether a step is expected to follow; what it needs may then be made by the lookup."""
    slots: Array = field(default_factory=lambda: NONE_I4)
    """(E,) the slot of each entry."""
    sorted: SortedSlots | None = None
    """``slots``, where the lookup sorted them."""
    argmax: Array = field(default_factory=lambda: NONE_I4)
    """(N, T) the entry that gave each maximum; empty where nothing is pooled by max."""
    places: Array | None = None
    """(E,) where each entry's gradient begins; its complement where ``argmax`` decides element by element."""
    scales: Array = field(default_factory=lambda: NONE_F4)
    """(E,) what each entry's gradient is multiplied by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """The gradient of one lookup: entries in batch order, each with its slot and its place in ``gradient``."""

    slots: Array
    """(E,)"""
    gradient: Array
    """Flat; of (N, ``width``)."""
    width: int
    cols: NDArray[np.int64]
    """The first column of each feature, where every feature has one entry a sample and ``places`` is None."""
    places: Array | None
    """(E,) as of `Entries`."""
    scales: Array
    """(E,) as of `Entries`; empty: 1."""
    argmax: Array
    """Flat like ``gradient``, as of `Entries`."""
    sorted: SortedSlots | None = None
    """As of `Entries`."""

    @property
    def num_samples(self) -> int:
        """Rows of the gradient."""
        return int(self.gradient.shape[0]) // self.width

    @property
    def pairs(self) -> Array | None:
        """(E,) ``slots`` sorted; None where these slots were not: the gradient may have come to other rows since."""
        return self.sorted.pairs if self.sorted is not None and self.sorted.slots is self.slots else None


@dataclass(frozen=True, slots=True)
class GroupStep:
    """What one step does to the rows of a group."""

    group: Group
    rows: GroupRows
    pending: list[Pending]
    """At least one, in the order of the backward calls."""
    learning_rate: float


class Wanted(NamedTuple):
    """Rows of a group that are wanted by their positions."""

    rows: GroupRows
    positions: Array
    """(n,) int32, each below the number of positions of ``rows``."""
    slots: Array
    """(n,) int32; written."""
    out: Array | None
    """(n, dim) float32 for the vectors; None: only slots are wanted."""
