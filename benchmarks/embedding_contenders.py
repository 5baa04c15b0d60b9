"""What the embedding benchmark compares, each in a process of its own that is told what to measure and when.

Ours is the public step of a user over an InMemoryCache that holds whole tables. The peers are what a user would write
with torch alone, and FBGEMM's CPU table-batched embedding: each gets its ids in the form it likes best, ahead of time,
and need not put the outputs of its tables side by side.

Commands come over standard input, one a line: ``build SHAPE OPTIMIZER WARM_UP``, ``run REPEATS``, ``drop``. Each is
answered by a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

import tiercache as tc
from benchmarks.embedding_cases import LEARNING_RATE, NUM_BATCHES, SHAPES, THREADS, Shape, batches_of, gradients_of
from tiercache.data.encoded_batch import EncodedBatch, FeatureIds
from tiercache.data.sample_layout import SampleLayout
from tiercache.kernels.cpu.hashing import hash_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

RULES = {"adagrad": tc.optim.Adagrad, "rowwise": tc.optim.RowWiseAdagrad, "adam": tc.optim.Adam}


class _WholeTables:
    """A dataset of one sub-dataset whose key sets are whole tables: what a PassDataset would be for them, without
    files.
    """

    def __init__(self, shape: Shape, optimizer: str, ids_BFN: NDArray[np.int32]) -> None:
        self.index, self.samples, self.digest = 0, ids_BFN.shape[0] * shape.num_samples, "whole tables"
        names = [f"table{t}" for t in range(shape.num_tables)]
        rule, begin = RULES[optimizer](learning_rate=LEARNING_RATE), tc.init.Uniform(low=-0.01, high=0.01)
        self._tables = {name: tc.Table(name=name, dim=shape.dim, optimizer=rule, initializer=begin) for name in names}
        features = tuple(
            tc.Feature(name=f"feature{f}", table=names[shape.table_of(f)]) for f in range(shape.num_features)
        )
        self.whole = self
        self.schema = tc.Schema(label=None, dense=(), features=features, tables=tuple(self._tables.values()))
        self.tables, self.passes = self.schema.ordered_tables, (self,)
        self._rows, self._ids_BFN = shape.rows, ids_BFN
        self._plain_keys = np.arange(shape.rows, dtype=np.int64)
        self._order = [f.name for f in SampleLayout(self.schema).singles]
        self._place = {feature.name: f for f, feature in enumerate(features)}

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


class TorchBags:
    """``nn.EmbeddingBag(sparse=True)`` for each table, with ``optim.Adagrad`` or ``optim.SparseAdam``."""

    def __init__(self, shape: Shape, optimizer: str, ids_BFN: NDArray[np.int32], grads: list[Any]) -> None:
        self._shared = shape.num_tables == 1
        self._bags = [
            nn.EmbeddingBag(
                shape.rows, shape.dim, mode="sum", sparse=True, _weight=torch.full((shape.rows, shape.dim), 0.01)
            )
            for _ in range(shape.num_tables)
        ]
        weights = [bag.weight for bag in self._bags]
        kinds = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}
        self._optimizer = kinds[optimizer](weights, lr=LEARNING_RATE)
        if self._shared:  # one call: samples side by side, in each its features
            flat = [np.ascontiguousarray(ids.T).reshape(-1) for ids in ids_BFN]
            self._ids = [[torch.from_numpy(ids.astype(np.int64))] for ids in flat]
            self._grads = [[torch.from_numpy(grad.reshape(-1, shape.dim))] for grad in grads]
        else:
            self._ids = [[torch.from_numpy(ids.astype(np.int64)) for ids in batch] for batch in ids_BFN]
            cuts = [np.split(grad, shape.num_tables, axis=1) for grad in grads]
            self._grads = [[torch.from_numpy(np.ascontiguousarray(part)) for part in cut] for cut in cuts]
        self._offsets = torch.arange(self._ids[0][0].numel())

    def step(self, number: int) -> None:
        """Forward, backward and update of one batch."""
        ids = self._ids[number % NUM_BATCHES]
        outs = [bag(mine, self._offsets) for bag, mine in zip(self._bags, ids, strict=True)]
        torch.autograd.backward(outs, self._grads[number % len(self._grads)])
        self._optimizer.step()
        self._optimizer.zero_grad()


class RowWise:
    """Row-wise Adagrad by hand over all tables in one tensor: ``unique``, ``index_add``, no autograd."""

    def __init__(self, shape: Shape, _optimizer: str, ids_BFN: NDArray[np.int32], grads: list[Any]) -> None:
        rows = shape.num_tables * shape.rows
        self._weights, self._sums = torch.full((rows, shape.dim), 0.01), torch.zeros(rows)
        first = np.array([shape.table_of(f) * shape.rows for f in range(shape.num_features)], dtype=np.int64)
        self._ids = [torch.from_numpy(np.ascontiguousarray((ids + first[:, None]).T).reshape(-1)) for ids in ids_BFN]
        self._grads = [torch.from_numpy(grad.reshape(-1, shape.dim)) for grad in grads]

    def step(self, number: int) -> None:
        """Forward, backward and update of one batch."""
        ids, grad = self._ids[number % NUM_BATCHES], self._grads[number % len(self._grads)]
        self._weights.index_select(0, ids)
        rows, inverse = torch.unique(ids, return_inverse=True)
        summed = torch.zeros(rows.numel(), grad.shape[1]).index_add_(0, inverse, grad)
        sums = self._sums[rows].add_(summed.square().mean(dim=1))
        self._sums[rows] = sums
        scale = sums.sqrt_().add_(1e-8).reciprocal_().mul_(-LEARNING_RATE)
        self._weights.index_add_(0, rows, summed.mul_(scale[:, None]))


class Fbgemm:
    """``SplitTableBatchedEmbeddingBagsCodegen`` on the CPU; its backward updates. It has no Adam there."""

    def __init__(self, shape: Shape, optimizer: str, ids_BFN: NDArray[np.int32], grads: list[Any]) -> None:
        import fbgemm_gpu  # noqa: F401 - registers the operators
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            OptimType,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        kinds = {"adagrad": OptimType.EXACT_ADAGRAD, "rowwise": OptimType.EXACT_ROWWISE_ADAGRAD}
        place = EmbeddingLocation.HOST, ComputeDevice.CPU
        self._bags = SplitTableBatchedEmbeddingBagsCodegen(
            [(shape.rows, shape.dim, *place)] * shape.num_tables,
            feature_table_map=[shape.table_of(f) for f in range(shape.num_features)],
            optimizer=kinds[optimizer],
            learning_rate=LEARNING_RATE,
            pooling_mode=PoolingMode.SUM,
        )
        self._bags.init_embedding_weights_uniform(0.01, 0.01)
        self._ids = [torch.from_numpy(ids.reshape(-1).astype(np.int64)) for ids in ids_BFN]
        self._offsets = torch.arange(shape.num_entries + 1)
        self._grads = [torch.from_numpy(grad) for grad in grads]

    def step(self, number: int) -> None:
        """Forward, backward and update of one batch."""
        out = self._bags(self._ids[number % NUM_BATCHES], self._offsets)
        out.backward(self._grads[number % len(self._grads)])


class Copy:
    """A copy of ``NUM_BYTES`` by all threads: what the machine's memory gives."""

    NUM_BYTES = 256 << 20

    def __init__(self) -> None:
        self._from, self._to = (torch.full((self.NUM_BYTES // 4,), float(i)) for i in range(2))

    def step(self, _number: int) -> None:
        """Copy once; ``2 * NUM_BYTES`` move."""
        self._to.copy_(self._from)


CONTENDERS: dict[str, Callable[..., Any]] = {
    "ours": Ours, "copy": Copy, "torch": TorchBags, "by_hand": RowWise, "fbgemm": Fbgemm,
}  # fmt: skip


def main(name: str) -> None:
    """Serve until the input ends, with the threads that OMP_NUM_THREADS says."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", THREADS)))
    contender: Any = None
    number = 0
    for line in sys.stdin:
        command, *words = line.split()
        seconds: list[float] = []
        if command == "build":
            shape = SHAPES[words[0]]
            given = () if name == "copy" else (shape, words[1], batches_of(shape), gradients_of(shape))
            contender = CONTENDERS[name](*given)
            for number in range(int(words[2])):
                contender.step(number)
        elif command == "run":
            contender.step(number)  # caches and clocks have rested
            for _ in range(int(words[0])):
                number += 1
                begun = time.perf_counter()
                contender.step(number)
                seconds.append(time.perf_counter() - begun)
        else:
            contender = None
        answers.write(json.dumps(seconds) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
