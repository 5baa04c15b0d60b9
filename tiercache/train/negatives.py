"""Negatives: keys drawn from the key set of a pass, with their probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from tiercache.data.raw_batch import RESERVED
from tiercache.kernels.cpu.key_sweeps import search_keys
from tiercache.train.random_numbers import mixed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tiercache.data.sub_dataset import SubDataset

_NEGATIVES = 7


class Negatives(NamedTuple):
    """Keys drawn with replacement from a table's keys in a pass."""

    keys: torch.Tensor
    """(n,) int64."""
    counts: torch.Tensor
    """(n,) int64: the occurrences of each key in the sub-dataset."""
    log_probabilities: torch.Tensor
    """(n,) float32: the natural logarithm of the probability with which each key is drawn."""


class NegativeSampler:
    """Draws negatives of one pass. Rows shared by several keys (rare or null) are never drawn."""

    def __init__(self, source: SubDataset, seed: int, index: int) -> None:
        self._source, self._seed, self._index = source, seed, index
        self._table_ids = {table.name: table.table_id for table in source.schema.tables}
        self._shared: dict[str, NDArray[np.int64]] = {}  # by table, the positions of keys that are not drawn
        self._sums: dict[str, NDArray[np.int64]] = {}  # by table, the cumulative counts of its keys, if used
        self._calls: dict[str, tuple[int, int]] = {}  # by table, the samples done at the last draw, and later draws

    def draw(
        self, table: str, num_keys: int, by: Literal["uniform", "count"], samples_done: int, device: torch.device
    ) -> Negatives:
        """Draw keys, determined by the seed, the pass, ``samples_done`` and the draws since then."""
        if table not in self._table_ids:
            raise ValueError(f"unknown table {table!r}: expected one of {', '.join(self._table_ids)}")
        if by not in ("uniform", "count"):
            raise ValueError(f"invalid by {by!r}: expected 'uniform' or 'count'")
        if num_keys < 0:
            raise ValueError(f"invalid number of negatives {num_keys}: expected at least 0")
        keys, counts = self._source.keys(table), self._source.counts(table)
        shared = self._shared_places(table)
        if keys.size == shared.size:
            raise ValueError(f"pass {self._index} has no keys of table {table!r}, so none can be drawn")
        before, calls = self._calls.get(table, (-1, 0))
        calls = calls + 1 if before == samples_done else 0
        self._calls[table] = samples_done, calls
        words = _NEGATIVES, self._seed, self._index, self._table_ids[table], samples_done, calls
        chance = np.random.Generator(np.random.Philox(key=mixed(*words)))
        if by == "uniform":
            places = chance.integers(0, keys.size - shared.size, num_keys)
            for place in shared.tolist():  # ascending
                places += places >= place
            logs = np.full(num_keys, -np.log(keys.size - shared.size), np.float32)
        else:
            sums = self._sums_of(table, counts, shared)
            places = np.searchsorted(sums, chance.integers(0, sums[-1], num_keys), side="right")
            logs = np.log(counts[places] / sums[-1]).astype(np.float32)
        drawn = (keys[places], counts[places], logs)
        return Negatives(*(torch.from_numpy(one).to(device) for one in drawn))

    def _shared_places(self, table: str) -> NDArray[np.int64]:
        if table not in self._shared:
            places = np.empty(len(RESERVED), np.int64)
            search_keys(self._source.keys(table), self._table_ids[table], np.array(RESERVED), places)
            self._shared[table] = np.sort(places[places >= 0])
        return self._shared[table]

    def _sums_of(self, table: str, counts: NDArray[np.int64], shared: NDArray[np.int64]) -> NDArray[np.int64]:
        if table not in self._sums:
            kept = counts.copy()
            kept[shared] = 0
            self._sums[table] = np.cumsum(kept, out=kept)
        return self._sums[table]
