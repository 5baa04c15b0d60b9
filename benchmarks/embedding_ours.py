"""Our contender: the public step of a user, over a InMemoryCache that holds whole tables."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

import tiercache as tc
from benchmarks.embedding_cases import LEARNING_RATE, NUM_BATCHES, Shape
from tiercache.data.encoded_batch import EncodedBatch, FeatureIds
from tiercache.data.sample_layout import SampleLayout
from tiercache.kernels.cpu.hashing import hash_keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Ours"]

_RULES: dict[str, tc.optim.Adagrad | tc.optim.RowWiseAdagrad | tc.optim.Adam] = {
    "adagrad": tc.optim.Adagrad(learning_rate=LEARNING_RATE),
    "rowwise": tc.optim.RowWiseAdagrad(learning_rate=LEARNING_RATE),
    "adam": tc.optim.Adam(learning_rate=LEARNING_RATE),
}


class _WholeTables:
    """A dataset of one sub-dataset whose key sets are whole tables: what a PassDataset would be for them, without
    files.
    """

    def __init__(self, shape: Shape, optimizer: str, ids_BFN: NDArray[np.int32]) -> None:
        self.index, self.samples, self.digest = 0, ids_BFN.shape[0] * shape.num_samples, "whole tables"
        names = [f"table{t}" for t in range(shape.num_tables)]
        self._tables = {
            name: tc.Table(
                name=name, dim=shape.dim, optimizer=_RULES[optimizer], initializer=tc.init.Uniform(low=-0.01, high=0.01)
            )
            for name in names
        }
        features = tuple(
            tc.Feature(name=f"feature{f}", table=names[shape.table_of(f)]) for f in range(shape.num_features)
        )
        self.whole = self
        self.schema = tc.Schema(label=None, dense=(), features=features, tables=tuple(self._tables.values()))
        self.tables, self.passes = self.schema.ordered_tables, (self,)
        self._rows, self._ids_BFN = shape.rows, ids_BFN
        self._order = [f.name for f in SampleLayout(self.schema).singles]
        self._place = {feature.name: f for f, feature in enumerate(features)}

    @cached_property
    def _plain_keys(self) -> NDArray[np.int64]:
        return np.arange(self._rows, dtype=np.int64)

    def rows(self, _table: str) -> int:
        return self._rows

    def keys(self, table: str) -> NDArray[np.int64]:
        return self._plain_keys[np.argsort(hash_keys(self._plain_keys, self._tables[table].table_id))]

    def check_samples(self) -> None:
        """Return: there are some."""

    def read(self, indices: NDArray[np.int64]) -> EncodedBatch:
        """Return the batch that begins at the first index, laid out as a sub-dataset's read does."""
        batch = self._ids_BFN[int(indices[0]) // indices.size]
        singles = np.stack([batch[self._place[name]] for name in self._order])
        ids = {name: FeatureIds(row, None, None) for name, row in zip(self._order, singles, strict=True)}
        return EncodedBatch(label=None, dense=np.empty((indices.size, 0), np.float32), singles=singles, ids=ids)


class Ours:
    """``out = bag(batch); out.backward(gradient); cache.optimizer.step()``."""

    def __init__(self, shape: Shape, optimizer: str, ids_BFN: NDArray[np.int32], grads: list[Any]) -> None:
        whole = _WholeTables(shape, optimizer, ids_BFN)
        self._cache = tc.InMemoryCache(cast("tc.PassDataset", whole))
        self._bag = tc.EmbeddingBagCollection(self._cache.schema)
        self._passes = self._cache.passes(epochs=1)
        p = next(self._passes)
        self._batches = list(p.batches(shape.num_samples))
        assert len(self._batches) == NUM_BATCHES
        self._grads = [torch.from_numpy(grad) for grad in grads]

    def step(self, number: int) -> None:
        """Forward, backward and update of one batch."""
        out = self._bag(self._batches[number % NUM_BATCHES])
        out.backward(self._grads[number % len(self._grads)])
        self._cache.optimizer.step()
