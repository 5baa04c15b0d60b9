"""Batches for the kernels' tests, and the lookups in slow obvious NumPy."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kernels.machines import Cpu, Cuda
from tests.kernels.shim.device import ORDERS, device_for
from tiercache.kernels.cpu.kernel_threads import set_threads, threads
from tiercache.kernels.cpu.pooling import MAX, MEAN, SUM

DTYPES = ("bfloat16", "float16")
DIMS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 48, 49, 63, 64, 65, 80, 100, 113, 127, 128, 130)


every_machine = pytest.mark.parametrize("kind", ["cpu", "cuda"])
"""A test that is written once: for the CPU, and for the shim or the GPU of `make test-gpu`."""


@contextmanager
def use_threads(num_threads: int) -> Iterator[None]:
    before = threads()
    set_threads(min(num_threads, before))
    try:
        yield
    finally:
        set_threads(before)


@contextmanager
def machine(kind: str, turn: int = 0) -> Iterator[Any]:
    """Yield a machine: the CPU with one thread or two, a device with its threads in one order or another."""
    if kind == "cpu":
        with use_threads(1 + turn % 2):
            yield Cpu()
        return
    device = device_for(ORDERS[turn % len(ORDERS)])
    try:
        yield Cuda(device)
    finally:
        device.close()


def machines(kind: str) -> Iterator[Any]:
    for turn in range(2 if kind == "cpu" else len(ORDERS)):
        with machine(kind, turn) as one:
            yield one


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return bool(np.array_equal(a.view(np.int32), b.view(np.int32)))


@dataclass
class Bags:
    """One group's features in one batch: feature-major bags of local ids."""

    num_samples: int
    dim: int
    table_rows: list[int]  # rows of the table of each feature; every feature has a separate table here
    modes: NDArray[np.int8]
    offsets: NDArray[np.int64]
    ids: NDArray[np.int32]
    weights: NDArray[np.float32]
    slot_of_local: NDArray[np.int32]
    vectors: NDArray[np.float32]
    distance: int  # columns of another group between two features

    @property
    def num_features(self) -> int:
        return len(self.table_rows)

    @property
    def bases(self) -> NDArray[np.int64]:
        return np.cumsum([0, *self.table_rows[:-1]]).astype(np.int64)

    @property
    def cols(self) -> NDArray[np.int64]:
        return self.distance + np.arange(self.num_features, dtype=np.int64) * (self.dim + self.distance)

    @property
    def width(self) -> int:
        return self.distance + self.num_features * (self.dim + self.distance)

    def entries(self) -> Iterator[tuple[int, int, int, int]]:
        for f in range(self.num_features):
            for n in range(self.num_samples):
                bag = f * self.num_samples + n
                yield f, n, int(self.offsets[bag]), int(self.offsets[bag + 1])

    def slots(self) -> NDArray[np.int32]:
        out = np.empty(self.ids.size, np.int32)
        for f, _, first, last in self.entries():
            out[first:last] = self.slot_of_local[self.bases[f] + self.ids[first:last]]
        return out

    def weight(self, entry: int) -> np.float32:
        return self.weights[entry] if self.weights.size else np.float32(1)

    def pooled(self) -> NDArray[np.float32]:
        """Pool in float32 in the order of the entries; columns without a feature are zero."""
        out, slots = np.zeros((self.num_samples, self.width), np.float32), self.slots()
        for f, n, first, last in self.entries():
            row = np.zeros(self.dim, np.float32)
            for e in range(first, last):
                vector = self.vectors[slots[e]]
                if self.modes[f] == MAX:
                    row = vector.copy() if e == first else np.maximum(row, vector)
                else:
                    row = row + vector * self.weight(e)
            if self.modes[f] == MEAN and last > first:
                row = row / np.float32(last - first)
            out[n, self.cols[f] : self.cols[f] + self.dim] = row
        return out

    def row_gradients(self, gradient: NDArray[np.float32]) -> NDArray[np.float64]:
        out, slots = np.zeros(self.vectors.shape), self.slots()
        for f, n, first, last in self.entries():
            grad = gradient[n, self.cols[f] : self.cols[f] + self.dim].astype(np.float64)
            if self.modes[f] == MAX:
                if last > first:
                    winner = np.argmax(self.vectors[slots[first:last]], axis=0)
                    for d in range(self.dim):
                        out[slots[first + winner[d]], d] += grad[d]
                continue
            share = 1.0 / (last - first) if self.modes[f] == MEAN and last > first else 1.0
            for e in range(first, last):
                out[slots[e]] += grad * share * float(self.weight(e))
        return out


@st.composite
def bags(draw: st.DrawFn, *, modes: tuple[int, ...] = (SUM, MEAN, MAX), one_id: bool = False) -> Bags:
    """Draw a batch: any dim up to 130, empty batches, empty bags, repeated ids, weights or none."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_samples, num_features = draw(st.integers(0, 70)), draw(st.integers(1, 4))
    dim = draw(st.sampled_from(DIMS))
    table_rows = [draw(st.integers(1, 30)) for _ in range(num_features)]
    longest = draw(st.sampled_from((1, 2, 7)))
    counts = rng.integers(0, longest + 1, num_features * num_samples)
    if one_id:
        counts[:] = 1
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    per_feature = counts.reshape(num_features, num_samples).sum(axis=1)
    ids = np.concatenate([rng.integers(0, r, c) for r, c in zip(table_rows, per_feature, strict=True)]).astype(np.int32)
    weights = rng.integers(-3, 4, ids.size).astype(np.float32) if draw(st.booleans()) and not one_id else np.empty(0)
    num_rows = sum(table_rows)
    num_slots = num_rows + draw(st.integers(0, 5))
    return Bags(
        num_samples=num_samples,
        dim=dim,
        table_rows=table_rows,
        modes=np.array([draw(st.sampled_from(modes)) for _ in range(num_features)], np.int8),
        offsets=offsets,
        ids=ids,
        weights=weights.astype(np.float32),
        slot_of_local=rng.permutation(num_slots)[:num_rows].astype(np.int32),
        vectors=rng.standard_normal((num_slots, dim)).astype(np.float32),
        distance=draw(st.sampled_from((0, 3))),
    )
