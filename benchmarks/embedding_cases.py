"""What the embedding benchmark runs: shapes, batches, and the bytes that a step must move.

Legend: F features, N samples, E = F * N entries, D dim, U distinct rows of a batch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.zipf import Zipf

if TYPE_CHECKING:
    from numpy.typing import NDArray

OPTIMIZERS = ("adagrad", "rowwise", "adam")
NUM_BATCHES, THREADS = 8, 2
LEARNING_RATE = 0.01


def state_floats(optimizer: str, dim: int) -> int:
    """Return the floats of optimizer state beside a vector."""
    return {"adagrad": dim, "rowwise": 1, "adam": 2 * dim}[optimizer]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Tables, and how they are looked up."""

    name: str
    num_tables: int
    """1: all features share one table; else one table for each feature."""
    rows: int
    """Of each table."""
    num_features: int = 26
    num_samples: int = 8192
    dim: int = 64

    @property
    def num_entries(self) -> int:
        """Lookups of a step."""
        return self.num_features * self.num_samples

    def table_of(self, feature: int) -> int:
        """Return the table of a feature."""
        return feature if self.num_tables > 1 else 0

    def table_bytes(self, optimizer: str) -> int:
        """Return the bytes of all rows and their state."""
        return 4 * self.num_tables * self.rows * (self.dim + state_floats(optimizer, self.dim))


FULL = (Shape(name="shared_1m", num_tables=1, rows=1_000_000), Shape(name="26x1m", num_tables=26, rows=1_000_000))
QUICK = (Shape(name="26x100k", num_tables=26, rows=100_000),)
TINY = (Shape(name="4xtiny", num_tables=4, rows=2_000, num_features=4, num_samples=512, dim=16),)
BUSY = Shape(name="shared_100k", num_tables=1, rows=100_000)
SHAPES = {shape.name: shape for shape in (*FULL, *QUICK, *TINY, BUSY)}


@functools.lru_cache(maxsize=1)
def batches_of(shape: Shape) -> NDArray[np.int32]:
    """Return the row ids of every batch: (batches, F, N), the same in every process; not to be changed."""
    zipf = Zipf(shape.rows, seed=7)
    orders = [zipf.permutation().astype(np.int32) for _ in range(shape.num_tables)]
    ids = np.empty((NUM_BATCHES, shape.num_features, shape.num_samples), dtype=np.int32)
    for batch in ids:
        for feature in range(shape.num_features):
            batch[feature] = orders[shape.table_of(feature)][zipf.ranks(shape.num_samples)]
    return ids


def distinct_rows(shape: Shape, ids_FN: NDArray[np.int32]) -> int:
    """Return U of one batch."""
    if shape.num_tables == 1:
        return int(np.unique(ids_FN).size)
    return sum(int(np.unique(ids).size) for ids in ids_FN)


@functools.lru_cache(maxsize=1)
def gradients_of(shape: Shape) -> list[NDArray[np.float32]]:
    """Return two gradients of the pooled output, (N, F * D), used in turn; not to be changed."""
    rng = np.random.default_rng(11)
    size = shape.num_samples, shape.num_features * shape.dim
    return [rng.standard_normal(size, dtype=np.float32) * np.float32(1e-3) for _ in range(2)]


def bytes_to_move(shape: Shape, optimizer: str, distinct: float, *, rows_once: bool = False) -> float:
    """Return the bytes that a step must move between memory and the CPU.

    4 E of ids read, 4 E of the slot map read, 4 E of slots written and read; 4 E D of rows read, of pooled output
    written and of gradients read; and for each of U distinct rows, its vector and its state read and written once.
    Sorting and all scratch count as nothing. ``rows_once``: the forward too reads each distinct row only once, as
    ours does where the output is large, and a cache that holds all rows would.
    """
    entries, dim = shape.num_entries, shape.dim
    looked_up = distinct if rows_once else entries
    state = state_floats(optimizer, dim)
    return 4 * (4 * entries + looked_up * dim + 2 * entries * dim + 2 * distinct * (dim + state))
