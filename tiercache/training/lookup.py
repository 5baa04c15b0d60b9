"""One lookup: the features of one group of tables in one batch, forward and the way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tiercache.kernels.arrays import NONE_F4, NONE_I4
from tiercache.kernels.pooling import MAX, MEAN, SUM, check_ids
from tiercache.processors.entries import Entries, FoundIds, Pending

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from tiercache.processors.entries import Array
    from tiercache.tiers.rows import GroupRows
    from tiercache.training.batch import Batch, Pooled

MODES = {"sum": SUM, "mean": MEAN, "max": MAX}


@dataclass(frozen=True, slots=True)
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


def check_brought(batch: Batch, features: Sequence[str]) -> None:
    """Raise ValueError for a feature without ids in the batch."""
    for name in features:
        if name not in batch.ids:
            raise ValueError(
                f"the batch was made without the rows of feature {name!r}: make every module that looks it up with "
                "this cache, and before the batch is made"
            )


def read_entries(part: FeaturePart, batch: Batch, weights: dict[str, Array]) -> Entries:
    """Bring the ids of a part in one batch to the device, feature-major, checked against their tables."""
    rows, processor = batch.rows.groups[part.group], batch.rows.processor
    found = [batch.ids[name] for name in part.features]
    starts = np.zeros(len(found) + 1, dtype=np.int64)
    np.cumsum([one.num_ids for one in found], out=starts[1:])
    there = [one.there for one in found if isinstance(one, FoundIds)]
    if len(there) == len(found):  # in the pass's own key sets: none is of another table
        ids = processor.together(there)
    else:
        ids = _checked(part, batch, starts, [one.ids for one in found])
    entries = Entries(
        ids=ids, starts=starts, modes=part.modes, cols=part.cols,
        bases=np.array([rows.first[table] for table in part.tables], dtype=np.int64),
    )  # fmt: skip
    if part.bags:
        n = batch.num_samples
        offsets = np.empty(len(found) * n + 1, dtype=np.int64)
        offsets[0] = 0
        for f, one in enumerate(found):
            ends = np.arange(1, n + 1, dtype=np.int64) if one.offsets is None else one.offsets[1:]
            offsets[1 + f * n : 1 + (f + 1) * n] = ends + starts[f]
        entries.offsets = processor.bring(offsets)
        parts = []
        for f, name in enumerate(part.features):
            if name in weights:
                first, last = int(starts[f]), int(starts[f + 1])
                if tuple(weights[name].shape) != (last - first,):
                    raise ValueError(
                        f"weights of feature {name!r} have shape {tuple(weights[name].shape)}: give one for each of "
                        f"its {last - first} ids in the batch"
                    )
                parts.append((first, last, weights[name]))
        entries.weights = processor.weights(int(starts[-1]), parts) if parts else NONE_F4
    return entries


def _checked(part: FeaturePart, batch: Batch, starts: NDArray[np.int64], found: list[NDArray[np.int32]]) -> Array:
    """Join ids that came from outside on the device; raise IndexError for one that is not in its table."""
    rows, processor = batch.rows.groups[part.group], batch.rows.processor
    host, ids = processor.join(found)
    limits = np.array([rows.num_local[table] for table in part.tables], dtype=np.int64)
    bad = check_ids(host, starts, limits)
    if bad >= 0:
        f = int(np.searchsorted(starts, bad, side="right")) - 1
        raise IndexError(
            f"feature {part.features[f]!r} has local id {int(host[bad])} at entry {bad - int(starts[f])} "
            f"of the batch, and table {part.tables[f]!r} has local ids 0 to {int(limits[f]) - 1} in "
            f"{batch.rows.name}: use batches of the pass that is being trained"
        )
    return ids


class PooledLookup:
    """Forward and backward of one part with pooling. Lives from forward to backward."""

    def __init__(self, part: FeaturePart, batch: Batch, weights: dict[str, Array]) -> None:
        self.part, self.batch = part, batch
        self.entries = read_entries(part, batch, weights)

    @property
    def rows(self) -> GroupRows:
        """The rows looked up."""
        return self.batch.rows.groups[self.part.group]

    def backward(self, grad_NT: Array) -> None:
        """Leave the gradient for the step."""
        gradients, e = self.batch.rows.gradients, self.entries
        if gradients is None or e.starts[-1] == 0:
            return
        self.batch.rows.check()  # slots mean other rows in the next visit
        gradients.add(
            self.part.group,
            Pending(
                slots=e.slots, gradient=grad_NT.reshape(-1), width=grad_NT.shape[1], cols=self.part.cols,
                places=e.places, scales=e.scales, argmax=e.argmax.reshape(-1),
            ),
        )  # fmt: skip

    def weight_gradients(self, grad_NT: Array) -> dict[str, Array]:
        """Return d loss / d weight by feature."""
        out = self.batch.rows.processor.weight_gradient(self.rows, self.entries, grad_NT)
        starts = self.entries.starts
        return {name: out[int(starts[f]) : int(starts[f + 1])] for f, name in enumerate(self.part.features)}


class ReadyLookup:
    """Forward and backward of one feature that another rank pooled."""

    def __init__(self, batch: Batch, found: Pooled, col: int) -> None:
        """col: its first column in the output and its gradient."""
        self._rows, self._found = batch.rows, found
        self._columns = slice(col, col + found.vectors.shape[1])

    def write(self, out_NT: torch.Tensor) -> None:
        """Write its columns."""
        out_NT[:, self._columns] = self._found.vectors

    def backward(self, grad_NT: torch.Tensor) -> None:
        """Leave the gradient for the step."""
        if self._rows.gradients is not None:
            self._rows.check()  # as above
            self._found.gradients.append(grad_NT[:, self._columns].detach())


class RowLookup:
    """Forward and backward of one part without pooling: one vector for each id."""

    def __init__(self, part: FeaturePart, batch: Batch) -> None:
        self.part, self.batch = part, batch
        self.entries = read_entries(part, batch, {})

    def forward(self) -> list[Array]:
        """Return the vectors of each feature: (ids, dim)."""
        return self.batch.rows.processor.gather(self.batch.rows.groups[self.part.group], self.entries)

    def backward(self, feature: int, grad_ED: Array) -> None:
        """Leave one feature's gradient for the step."""
        gradients = self.batch.rows.gradients
        first, last = (int(n) for n in self.entries.starts[feature : feature + 2])
        if gradients is None or first == last:
            return
        self.batch.rows.check()  # as above
        gradients.add(
            self.part.group,
            Pending(
                slots=self.entries.slots[first:last], gradient=grad_ED.reshape(-1), width=grad_ED.shape[1],
                cols=np.zeros(1, dtype=np.int64), places=None, scales=NONE_F4, argmax=NONE_I4,
            ),
        )  # fmt: skip
