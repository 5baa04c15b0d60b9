"""What the kernel benchmark is run on: a batch's ids and slots, and the rows of one dim and dtype.

Legend: F features, N samples, E = F * N lookups, D dim, S slots, U distinct rows of a batch, P rows of a switch.
Vectors are float32, or of 16 bits with their state in float32: then the names of operations end in `_bf16` or `_fp16`.
Lookups are uniform over the rows, so that caches help little; the batch of the updates is zipf 1.05, as clicks are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.zipf import Zipf
from tiercache.kernels.step import (
    ADAGRAD,
    NO_ROUNDING,
    ROWWISE,
    SGD,
    Gradients,
    Rounding,
    Rule,
    Vectors,
    adam_rule,
    make_rounding,
)
from tiercache.store.vectors import to_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.kernel_machines import Machine

__all__ = ["DTYPES", "FULL", "QUICK", "RATE", "RULES", "TINY", "Batch", "Case", "Rows", "Size", "gradients_of"]

DTYPES = {"float32": "", "bfloat16": "_bf16", "float16": "_fp16"}
"""Dtypes of vectors, and what names of operations on them end in."""

RATE = 1e-6
RULES = {
    "sgd": Rule(SGD, RATE),
    "adagrad": Rule(ADAGRAD, RATE, 1e-10),
    "rowwise": Rule(ROWWISE, RATE, 1e-8),
    "adam": adam_rule(3, RATE, 0.9, 0.999, 1e-8, 0.0),
}
"""The optimizers, in their third step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How large the batch and its tables are."""

    num_samples: int
    rows: int
    """Of each table."""
    dims: tuple[int, ...] = (16, 32, 64, 128)
    num_features: int = 26
    moved_rows: int = 1_000_000
    """P at most."""
    samples: int = 7
    """Times of each operation, of which the median counts."""

    @property
    def num_entries(self) -> int:
        """E."""
        return self.num_features * self.num_samples

    @property
    def num_slots(self) -> int:
        """S."""
        return self.num_features * self.rows


FULL = Size(num_samples=65_536, rows=100_000)
QUICK = Size(num_samples=8_192, rows=10_000, moved_rows=200_000, samples=3)
TINY = Size(num_samples=48, rows=20, dims=(16, 32), moved_rows=300, samples=1)


@dataclass(frozen=True, slots=True)
class Case:
    """One operation."""

    name: str
    num_bytes: float
    call: Callable[[], Any]


class Batch:
    """Ids and slots of a batch, the same for every dim."""

    def __init__(self, size: Size, machine: Machine) -> None:
        rng = np.random.default_rng(3)
        self.size = size
        slot_of_local = rng.permutation(size.num_slots).astype(np.int32)
        self.bases = np.arange(size.num_features, dtype=np.int64) * size.rows
        self.ids_FN = rng.integers(0, size.rows, (size.num_features, size.num_samples)).astype(np.int32)
        zipf = Zipf(size.rows, seed=7)
        self.skewed_FN = np.stack([zipf.permutation()[zipf.ranks(size.num_samples)] for _ in range(size.num_features)])
        uniform, skewed = (
            slot_of_local[(ids + self.bases[:, None]).reshape(-1)] for ids in (self.ids_FN, self.skewed_FN)
        )
        self.distinct = int(np.unique(skewed).size)
        self.moved = min(size.num_slots, size.moved_rows)
        self.slot_of_local, self.ids = machine.place(slot_of_local), machine.place(self.ids_FN.reshape(-1))
        self.skewed_ids = machine.place(self.skewed_FN.reshape(-1).astype(np.int32))
        self.uniform, self.skewed = machine.place(uniform), machine.place(skewed)
        self.order = machine.place(rng.permutation(size.num_slots)[: self.moved].astype(np.int32))


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one dim and dtype, one in each slot."""

    dim: int
    tail: str
    words: Any
    """(S, W): the 4-byte words of vectors, as switches move them."""
    vectors: Vectors
    """The same, as lookups and steps take them."""
    rounding: Rounding
    """What a step rounds them by."""

    @classmethod
    def of(cls, machine: Machine, num_slots: int, dim: int, dtype: str) -> Rows:
        """Make rows of 0.01."""
        if dtype == "float32":
            words = machine.place(np.full((num_slots, dim), 0.01, np.float32))
            return cls(dim, DTYPES[dtype], words, Vectors(words, dim), NO_ROUNDING)
        bits = to_bits(np.full(dim, 0.01, np.float32), dtype)
        words = machine.place(np.tile(bits, (num_slots, 1)).view(np.float32))
        vectors = Vectors.of(words, dim, dtype)
        streams = machine.place(np.arange(num_slots, dtype=np.uint64))
        return cls(dim, DTYPES[dtype], words, vectors, make_rounding(streams, 3))

    @property
    def vector_bytes(self) -> int:
        """Bytes of a vector."""
        return 4 * int(self.words.shape[1])


def gradients_of(machine: Machine, size: Size, dim: int) -> Gradients:
    """Return the gradient of a lookup of one id for each sample and feature."""
    flat = machine.place(np.full(size.num_entries * dim, 1e-3, np.float32))
    return Gradients(flat, size.num_samples, size.num_features * dim, np.arange(size.num_features) * dim)
