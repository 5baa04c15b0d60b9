"""The contenders of the embedding benchmark, each in its own process that receives commands.

Ours is a user's public step over an InMemoryCache that holds whole tables. The peers are code that a user would write
with torch only, and FBGEMM's CPU table-batched embedding. Each gets its ids ahead of time in its preferred form, and
need not concatenate the outputs of its tables.

Legend: F features, N samples, E = F * N entries, D dim, U distinct rows of a batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import tiercache as tc
from benchmarks.drawn_passes import hash_ordered, permuted_power_law
from benchmarks.machine import seconds_of
from benchmarks.training import run_backward
from tiercache.data.block_layout import BlockLayout, IdOrder
from tiercache.data.sample_layout import SampleLayout
from tiercache.data.sub_dataset import BlockIds, EncodedBatch, SampleBlock, SampleMemory
from tiercache.kernels.cpu.samples import gather_samples

OPTIMIZERS = ("adagrad", "rowwise", "adam")
NUM_BATCHES, THREADS, COPY_BYTES = 8, 2, 256 << 20
LEARNING_RATE = 0.01


def state_floats(optimizer: str, dim: int) -> int:
    """Return the floats of optimizer state per vector."""
    return {"sgd": 0, "adagrad": dim, "rowwise": 1, "adam": 2 * dim}[optimizer]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Tables and their lookups."""

    name: str
    num_tables: int
    """1: all features share one table; else one table for each feature."""
    rows: int
    """Rows of each table."""
    num_features: int = 26
    num_samples: int = 8192
    dim: int = 64

    @property
    def num_entries(self) -> int:
        """Lookups of a step."""
        return self.num_features * self.num_samples

    def table_of(self, feature: int) -> int:
        return feature if self.num_tables > 1 else 0

    def table_bytes(self, optimizer: str) -> int:
        """Return the bytes of all rows and their state."""
        return 4 * self.num_tables * self.rows * (self.dim + state_floats(optimizer, self.dim))


FULL = (Shape(name="shared_1m", num_tables=1, rows=1_000_000), Shape(name="26x1m", num_tables=26, rows=1_000_000))
QUICK = (Shape(name="26x100k", num_tables=26, rows=100_000),)
TINY = (Shape(name="4xtiny", num_tables=4, rows=2_000, num_features=4, num_samples=512, dim=16),)


@functools.lru_cache(maxsize=1)
def batches_of(shape: Shape) -> NDArray[np.int32]:
    """Return the row ids of every batch: (batches, F, N), equal in every process; do not modify."""
    rng, size = np.random.default_rng(7), (NUM_BATCHES, shape.num_features, shape.num_samples)
    return permuted_power_law(rng, shape.rows, math.prod(size)).astype(np.int32).reshape(size)


def distinct_rows(shape: Shape, ids_FN: NDArray[np.int32]) -> int:
    """Return U of one batch."""
    if shape.num_tables == 1:
        return int(np.unique(ids_FN).size)
    return sum(int(np.unique(ids).size) for ids in ids_FN)


@functools.lru_cache(maxsize=1)
def gradients_of(shape: Shape) -> list[NDArray[np.float32]]:
    """Return two gradients of the pooled output, (N, F * D), used alternately; do not modify."""
    rng = np.random.default_rng(11)
    size = shape.num_samples, shape.num_features * shape.dim
    return [rng.standard_normal(size, dtype=np.float32) * np.float32(1e-3) for _ in range(2)]


def bytes_to_move(shape: Shape, optimizer: str, distinct: float, *, rows_once: bool = False) -> float:
    """Return the bytes that a step must move between memory and the CPU.

    4 E of ids read, 4 E of the slot map read, 4 E of slots written and read; 4 E D of rows read, of pooled output
    written and of gradients read; and for each of U distinct rows, its vector and its state read and written once.
    Sorting and scratch memory are not counted. ``rows_once``: the forward also reads each distinct row only once, as
    ours does if the output is large, and as a cache that holds all rows would.
    """
    entries, dim = shape.num_entries, shape.dim
    looked_up = distinct if rows_once else entries
    state = state_floats(optimizer, dim)
    return 4 * (4 * entries + looked_up * dim + 2 * entries * dim + 2 * distinct * (dim + state))


RULES = {
    "sgd": tc.optim.SGD, "adagrad": tc.optim.Adagrad, "rowwise": tc.optim.RowWiseAdagrad, "adam": tc.optim.Adam,
}  # fmt: skip


_keys_of = functools.lru_cache(maxsize=64)(hash_ordered)


class WholeTables:
    """A dataset of one sub-dataset whose key sets are whole tables: a stand-in for a PassDataset, without files."""

    def __init__(self, shape: Shape, optimizer: str, ids_BFN: NDArray[np.int32]) -> None:
        self.path = "whole tables"
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
        self._rows, self._layout = shape.rows, SampleLayout(self.schema)
        self._words = np.ascontiguousarray(ids_BFN.transpose(0, 2, 1)).reshape(-1)

    def rows(self, _table: str) -> int:
        return self._rows

    def keys(self, table: str) -> NDArray[np.int64]:
        return _keys_of(self._rows, self._tables[table].table_id)

    def rare_keys(self) -> None:
        """Return None: no keys share a row."""

    def check_samples(self) -> None:
        """Do nothing: the samples are valid."""

    def read(self, indices: NDArray[np.int64], into: SampleMemory, *, orders: Sequence[IdOrder] = ()) -> EncodedBatch:
        """Return the samples at ``indices``, like a sub-dataset."""
        layout = BlockLayout.of(self._layout, lambda _: 0, self.rows, indices.size, orders)
        places = layout.place({})
        block = SampleBlock(into.take(places.begins[-1]), layout, places)
        gather_samples(self._words, indices, places.copies, block.memory.view(np.int32))
        return EncodedBatch(None, np.empty((indices.size, 0), np.float32), BlockIds(block, {}), {}, block)


class Ours:
    """A lookup by one module, backward, and ``cache.optimizer.step()``."""

    def __init__(self, shape: Shape, optimizer: str, ids_BFN: NDArray[np.int32], grads: list[Any]) -> None:
        whole = WholeTables(shape, optimizer, ids_BFN)
        self._cache = tc.InMemoryCache(cast("tc.PassDataset", whole))
        self._bag = tc.EmbeddingBagCollection(self._cache.schema)
        self._passes = self._cache.passes(epochs=1)
        p = next(self._passes)
        self._batches = list(p.batches(shape.num_samples))
        assert len(self._batches) == NUM_BATCHES
        self._grads = [torch.from_numpy(grad) for grad in grads]

    def step(self, number: int) -> None:
        out = self._bag(self._batches[number % NUM_BATCHES])
        run_backward([out], self._grads[number % len(self._grads)])
        self._cache.optimizer.step()


class TorchBags:
    """``nn.EmbeddingBag(sparse=True)`` for each table, with ``optim.Adagrad`` or ``optim.SparseAdam``."""

    def __init__(
        self, shape: Shape, optimizer: str, ids_BFN: NDArray[np.int32], grads: list[Any], device: str = "cpu"
    ) -> None:
        weights = [torch.full((shape.rows, shape.dim), 0.01, device=device) for _ in range(shape.num_tables)]
        self._bags = [
            nn.EmbeddingBag(shape.rows, shape.dim, mode="sum", sparse=True, _weight=weight) for weight in weights
        ]
        kinds = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}
        self._optimizer = kinds[optimizer]([bag.weight for bag in self._bags], lr=LEARNING_RATE)
        if shape.num_tables == 1:  # one call: samples are concatenated, each with its features
            ids = [[batch.T.reshape(-1)] for batch in ids_BFN]
            cuts = [[grad.reshape(-1, shape.dim)] for grad in grads]
        else:
            ids, cuts = [list(batch) for batch in ids_BFN], [np.split(grad, shape.num_tables, axis=1) for grad in grads]
        self._ids = [[torch.from_numpy(part.astype(np.int64)).to(device) for part in batch] for batch in ids]
        self._grads = [torch.from_numpy(np.concatenate(cut)).to(device) for cut in cuts]
        self._offsets = torch.arange(self._ids[0][0].numel(), device=device)

    def step(self, number: int) -> None:
        ids = self._ids[number % len(self._ids)]
        outs = [bag(mine, self._offsets) for bag, mine in zip(self._bags, ids, strict=True)]
        run_backward(outs, self._grads[number % len(self._grads)])
        self._optimizer.step()
        self._optimizer.zero_grad()


class RowWise:
    """Hand-written row-wise Adagrad over all tables in one tensor: ``unique``, ``index_add``, no autograd."""

    def __init__(self, shape: Shape, _optimizer: str, ids_BFN: NDArray[np.int32], grads: list[Any]) -> None:
        rows = shape.num_tables * shape.rows
        self._weights, self._sums = torch.full((rows, shape.dim), 0.01), torch.zeros(rows)
        first = np.array([shape.table_of(f) * shape.rows for f in range(shape.num_features)], dtype=np.int64)
        self._ids = [torch.from_numpy(np.ascontiguousarray((ids + first[:, None]).T).reshape(-1)) for ids in ids_BFN]
        self._grads = [torch.from_numpy(grad.reshape(-1, shape.dim)) for grad in grads]

    def step(self, number: int) -> None:
        ids, grad = self._ids[number % NUM_BATCHES], self._grads[number % len(self._grads)]
        self._weights.index_select(0, ids)
        rows, inverse = torch.unique(ids, return_inverse=True)
        summed = torch.zeros(rows.numel(), grad.shape[1]).index_add_(0, inverse, grad)
        sums = self._sums[rows].add_(summed.square().mean(dim=1))
        self._sums[rows] = sums
        scale = sums.sqrt_().add_(1e-8).reciprocal_().mul_(-LEARNING_RATE)
        self._weights.index_add_(0, rows, summed.mul_(scale[:, None]))


class Fbgemm:
    """``SplitTableBatchedEmbeddingBagsCodegen``; its backward updates. It has no Adam on a CPU."""

    def __init__(
        self, shape: Shape, optimizer: str, ids_BFN: NDArray[np.int32], grads: list[Any], device: str = "cpu"
    ) -> None:
        import fbgemm_gpu  # noqa: F401 - registers the operators
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            OptimType,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        kinds = {
            "sgd": OptimType.EXACT_SGD, "adagrad": OptimType.EXACT_ADAGRAD, "adam": OptimType.ADAM,
            "rowwise": OptimType.EXACT_ROWWISE_ADAGRAD,
        }  # fmt: skip
        place = (
            (EmbeddingLocation.HOST, ComputeDevice.CPU)
            if device == "cpu"
            else (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        )
        self._bags = SplitTableBatchedEmbeddingBagsCodegen(
            [(shape.rows, shape.dim, *place)] * shape.num_tables,
            feature_table_map=[shape.table_of(f) for f in range(shape.num_features)],
            optimizer=kinds[optimizer],
            learning_rate=LEARNING_RATE,
            pooling_mode=PoolingMode.SUM,
        )
        self._bags.init_embedding_weights_uniform(0.01, 0.01)
        self._ids = [torch.from_numpy(ids.reshape(-1).astype(np.int64)).to(device) for ids in ids_BFN]
        self._offsets = torch.arange(shape.num_entries + 1, device=device)
        self._grads = [torch.from_numpy(grad).to(device) for grad in grads]

    def step(self, number: int) -> None:
        out = self._bags(self._ids[number % NUM_BATCHES], self._offsets)
        run_backward([out], self._grads[number % len(self._grads)])


class Copy:
    """A copy of ``COPY_BYTES`` by all threads: the memory bandwidth of the machine."""

    def __init__(self) -> None:
        self._from, self._to = (torch.full((COPY_BYTES // 4,), float(i)) for i in range(2))

    def step(self, _number: int) -> None:
        self._to.copy_(self._from)


CONTENDERS: dict[str, Callable[..., Any]] = {
    "ours": Ours, "copy": Copy, "torch": TorchBags, "by_hand": RowWise, "fbgemm": Fbgemm,
}  # fmt: skip


_current: dict[str, Any] = {}
"""The contender of this process, and the number of its next step."""


def build(name: str, shape: Shape, optimizer: str, warm_up: int) -> None:
    """Build the contender of this process and train some steps."""
    torch.set_num_threads(THREADS)
    given = () if name == "copy" else (shape, optimizer, batches_of(shape), gradients_of(shape))
    _current.update(contender=CONTENDERS[name](*given), number=0)
    run(warm_up)


def run(steps: int) -> list[float]:
    """Return the seconds of some steps, after an uncounted one: caches and clocks were idle."""
    contender, first = _current["contender"], _current["number"]
    _current["number"] += steps + 1
    return seconds_of(lambda number: contender.step(first + number), steps + 1)[1:]


def drop() -> None:
    """Free the contender of this process."""
    _current.clear()
