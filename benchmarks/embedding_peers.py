"""The peers: what a user would write with torch alone, and FBGEMM's CPU table-batched embedding.

Each gets its ids in the form it likes best, ahead of time, and need not put the outputs of its tables side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from benchmarks.embedding_cases import LEARNING_RATE, NUM_BATCHES, Shape

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Copy", "Fbgemm", "RowWise", "TorchBags"]


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
        self._optimizer: torch.optim.Optimizer
        if optimizer == "adagrad":
            self._optimizer = torch.optim.Adagrad(weights, lr=LEARNING_RATE)
        else:
            self._optimizer = torch.optim.SparseAdam(weights, lr=LEARNING_RATE)
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
        self._sink: torch.Tensor | None = None

    def step(self, number: int) -> None:
        """Forward, backward and update of one batch."""
        ids, grad = self._ids[number % NUM_BATCHES], self._grads[number % len(self._grads)]
        self._sink = self._weights.index_select(0, ids)
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

    def __init__(self, *_: Any) -> None:
        self._from, self._to = (torch.full((self.NUM_BYTES // 4,), float(i)) for i in range(2))

    def step(self, _number: int) -> None:
        """Copy once; ``2 * NUM_BYTES`` move."""
        self._to.copy_(self._from)
