"""One lookup: the features of one group of tables in one batch, forward and the way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tiercache.kernels.arrays import NONE_F4, NONE_I4
from tiercache.kernels.pooling import (
    MAX,
    MEAN,
    SUM,
    check_ids,
    gather,
    map_slots,
    pool_bags,
    pool_one,
    weight_gradient,
)
from tiercache.training.row_optimizer import Pending

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tiercache.tiers.rows import GroupRows
    from tiercache.training.batch import Batch
    from tiercache.training.buffers import BufferPool

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


class Entries:
    """The ids of a part in one batch, feature-major, checked against their tables."""

    def __init__(self, part: FeaturePart, batch: Batch, weights: dict[str, NDArray[np.float32]]) -> None:
        rows = batch.rows.groups[part.group]
        found = [batch.ids[name] for name in part.features]
        arrays = [ids.ids for ids in found]
        self.ids: NDArray[np.int32] = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        self.starts = np.zeros(len(arrays) + 1, dtype=np.int64)
        np.cumsum([ids.size for ids in arrays], out=self.starts[1:])
        self.bases = np.array([rows.first[table] for table in part.tables], dtype=np.int64)
        limits = np.array([rows.num_local[table] for table in part.tables], dtype=np.int64)
        bad = check_ids(self.ids, self.starts, limits)
        if bad >= 0:
            f = int(np.searchsorted(self.starts, bad, side="right")) - 1
            raise IndexError(
                f"feature {part.features[f]!r} has local id {int(self.ids[bad])} at entry {bad - int(self.starts[f])} "
                f"of the batch, and table {part.tables[f]!r} has local ids 0 to {int(limits[f]) - 1} in "
                f"{batch.rows.name}: use batches of the pass that is being trained"
            )
        self.offsets: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.weights: NDArray[np.float32] = NONE_F4
        if part.bags:
            n = batch.num_samples
            self.offsets = np.empty(len(found) * n + 1, dtype=np.int64)
            self.offsets[0] = 0
            for f, ids in enumerate(found):
                ends = np.arange(1, n + 1, dtype=np.int64) if ids.offsets is None else ids.offsets[1:]
                self.offsets[1 + f * n : 1 + (f + 1) * n] = ends + self.starts[f]
            if weights:
                self.weights = np.ones(self.ids.size, dtype=np.float32)
                for f, name in enumerate(part.features):
                    if name in weights:
                        mine = self.weights[self.starts[f] : self.starts[f + 1]]
                        if weights[name].shape != mine.shape:
                            raise ValueError(
                                f"weights of feature {name!r} have shape {weights[name].shape}: give one for each of "
                                f"its {mine.size} ids in the batch"
                            )
                        mine[:] = weights[name]


class PooledLookup:
    """Forward and backward of one part with pooling. Lives from forward to backward."""

    def __init__(self, part: FeaturePart, batch: Batch, weights: dict[str, NDArray[np.float32]]) -> None:
        self.part, self.batch = part, batch
        self.entries = Entries(part, batch, weights)
        self._slots: NDArray[np.int32] = NONE_I4
        self._argmax: NDArray[np.int32] = NONE_I4
        self._offset: NDArray[np.int64] | None = None
        self._scale: NDArray[np.float32] = NONE_F4

    @property
    def rows(self) -> GroupRows:
        """The rows looked up."""
        return self.batch.rows.groups[self.part.group]

    def forward(self, out_NT: NDArray[np.float32], pool: BufferPool) -> None:
        """Write the part's columns of ``out_NT``."""
        entries, part, rows = self.entries, self.part, self.rows
        self._slots = pool.take((entries.ids.size,), np.int32)
        if not part.bags:
            pool_one(
                rows.vectors, rows.slot_of_local, entries.ids, entries.bases, part.cols, out_NT.shape[0],
                out_NT, self._slots,
            )  # fmt: skip
            return
        if (part.modes == MAX).any():
            self._argmax = pool.take(out_NT.shape, np.int32)
        self._offset = pool.take((entries.ids.size,), np.int64)
        self._scale = pool.take((entries.ids.size,), np.float32)
        pool_bags(
            rows.vectors, rows.slot_of_local, entries.ids, entries.bases, entries.starts, entries.offsets,
            entries.weights, part.modes, part.cols, out_NT, self._slots, self._argmax, self._offset, self._scale,
        )  # fmt: skip

    def backward(self, grad_NT: NDArray[np.float32]) -> None:
        """Leave the gradient for the step."""
        gradients = self.batch.rows.gradients
        if gradients is None or self.entries.ids.size == 0:
            return
        self.batch.rows.check()  # slots mean other rows in the next visit
        gradients.add(
            self.part.group,
            Pending(
                slots=self._slots, gradient=grad_NT.reshape(-1), width=grad_NT.shape[1], cols=self.part.cols,
                offset=self._offset, scale=self._scale, argmax=self._argmax.reshape(-1),
            ),
        )  # fmt: skip

    def weight_gradients(self, grad_NT: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """Return d loss / d weight by feature."""
        entries, part = self.entries, self.part
        out = np.empty(entries.ids.size, dtype=np.float32)
        weight_gradient(
            self.rows.vectors,
            self._slots,
            entries.starts,
            entries.offsets,
            part.modes,
            part.cols,
            grad_NT,
            out,
        )
        return {name: out[entries.starts[f] : entries.starts[f + 1]] for f, name in enumerate(part.features)}


class RowLookup:
    """Forward and backward of one part without pooling: one vector for each id."""

    def __init__(self, part: FeaturePart, batch: Batch) -> None:
        self.part, self.batch = part, batch
        self.entries = Entries(part, batch, {})
        self._slots: NDArray[np.int32] = NONE_I4

    def forward(self, pool: BufferPool) -> list[NDArray[np.float32]]:
        """Return the vectors of each feature: (ids, dim)."""
        rows, entries = self.batch.rows.groups[self.part.group], self.entries
        self._slots = pool.take((entries.ids.size,), np.int32)
        map_slots(entries.ids, entries.bases, entries.starts, rows.slot_of_local, self._slots)
        outs = []
        for f in range(len(self.part.features)):
            mine = self._slots[entries.starts[f] : entries.starts[f + 1]]
            out = pool.take((mine.size, rows.vectors.dim), np.float32)
            gather(rows.vectors, mine, out)
            outs.append(out)
        return outs

    def backward(self, feature: int, grad_ED: NDArray[np.float32]) -> None:
        """Leave one feature's gradient for the step."""
        gradients = self.batch.rows.gradients
        entries = self.entries
        mine = self._slots[entries.starts[feature] : entries.starts[feature + 1]]
        if gradients is None or mine.size == 0:
            return
        self.batch.rows.check()  # as above
        gradients.add(
            self.part.group,
            Pending(
                slots=mine, gradient=grad_ED.reshape(-1), width=grad_ED.shape[1], cols=np.zeros(1, dtype=np.int64),
                offset=None, scale=NONE_F4, argmax=NONE_I4,
            ),
        )  # fmt: skip
