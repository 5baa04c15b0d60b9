"""Samples before local ids exist: labels, dense features and keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray


def num_samples(
    counts: Iterable[int], lists: Mapping[str, tuple[int, int, int]], *, as_bags: bool = False
) -> int | None:
    """Return the number of samples of a batch whose offsets may lack the last one, as `nn.EmbeddingBag` allows.

    counts: the lengths of plain columns. lists: for each column of values and offsets, the number of offsets, the last
    of them (0 if there is none), and the number of values. None: no number fits all of them.

    If nothing else decides, two numbers fit: offsets that end at the number of values may include the last or lack it.
    as_bags: then they lack it, as in `nn.EmbeddingBag`; otherwise raises ValueError.
    """
    fits: set[int] | None = None
    for count in counts:
        fits = {count} if fits is None else fits & {count}
    for num_offsets, last, num_values in lists.values():
        lacks_last = not num_offsets or last < num_values
        either = {num_offsets} if lacks_last else {num_offsets - 1, num_offsets}
        fits = either if fits is None else fits & either
    if fits is not None and len(fits) > 1 and not as_bags:
        raise ValueError(
            f"offsets of {', '.join(map(repr, lists))} end at the number of values and nothing else gives the number "
            f"of samples: {min(fits)}, or {max(fits)} if offsets lack the last and the last list is empty"
        )
    return max(fits) if fits else None


def lacks_last(samples: int | None, num_offsets: int, last: int, num_values: int) -> bool:
    """Return True if offsets lack the last one; samples: as ``num_samples`` returned it."""
    return num_offsets == samples if samples is not None else last < num_values


OOV_KEY = -(1 << 63)
"""The key of the out-of-vocabulary row, which rare keys share."""
NULL_KEY = OOV_KEY + 1
"""The key of the null row."""
RESERVED = (OOV_KEY, NULL_KEY)
"""Keys that data must not have."""


@dataclass(frozen=True, slots=True, eq=False)
class FeatureKeys:
    """The keys of one feature: E in all, sample by sample."""

    keys: NDArray[np.int64]
    """(E,)"""
    offsets: NDArray[np.int64] | None = None
    """(n + 1,) the offset of each sample's keys; None: one key per sample, so E = n."""
    weights: NDArray[np.float32] | None = None
    """(E,) one per key; None: all 1."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        return sum(a.nbytes for a in (self.keys, self.offsets, self.weights) if a is not None)

    def slice(self, low: int, high: int) -> FeatureKeys:
        """Return samples [low, high); a view, but for offsets."""
        first, last = (low, high) if self.offsets is None else (self.offsets[low], self.offsets[high])
        return FeatureKeys(
            self.keys[first:last],
            None if self.offsets is None else self.offsets[low : high + 1] - first,
            None if self.weights is None else self.weights[first:last],
        )


@dataclass(frozen=True, slots=True, eq=False)
class RawBatch:
    """n samples with keys."""

    label: NDArray[np.float32] | None
    """(n,); None if the schema has no label."""
    dense: NDArray[np.float32]
    """(n, D), D may be 0."""
    features: dict[str, FeatureKeys]
    """Every feature of the schema, in its order."""
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    """(n,) each: several labels and kept columns in their own dtype, by name."""

    @property
    def num_samples(self) -> int:
        """Samples of the batch."""
        return int(self.dense.shape[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        own = self.dense.nbytes + (0 if self.label is None else self.label.nbytes)
        own += sum(column.nbytes for column in self.columns.values())
        return own + sum(feature.num_bytes for feature in self.features.values())

    def slice(self, low: int, high: int) -> RawBatch:
        """Return samples [low, high), as views where possible."""
        if low == 0 and high == self.num_samples:
            return self
        return RawBatch(
            None if self.label is None else self.label[low:high],
            self.dense[low:high],
            {name: feature.slice(low, high) for name, feature in self.features.items()},
            {name: column[low:high] for name, column in self.columns.items()},
        )

    def copy(self) -> RawBatch:
        """Return a copy that shares no arrays."""
        return join([self, self.slice(0, 0)])


def join(batches: Sequence[RawBatch]) -> RawBatch:
    """Join one or more batches; a single one is returned without a copy."""
    if len(batches) == 1:
        return batches[0]
    features = {}
    for name, first in batches[0].features.items():
        parts = [batch.features[name] for batch in batches]
        offsets = None
        if first.offsets is not None:
            lengths = [np.diff(part.offsets) for part in parts if part.offsets is not None]
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))])
        weights = [part.weights for part in parts if part.weights is not None]
        features[name] = FeatureKeys(
            np.concatenate([part.keys for part in parts]), offsets, np.concatenate(weights) if weights else None
        )
    labels = [batch.label for batch in batches if batch.label is not None]
    columns = {name: np.concatenate([batch.columns[name] for batch in batches]) for name in batches[0].columns}
    label = np.concatenate(labels) if labels else None
    return RawBatch(label, np.concatenate([b.dense for b in batches]), features, columns)
