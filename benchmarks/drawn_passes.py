"""Datasets of random data, written sub-dataset by sub-dataset by several processes if there are cores, and their
ids.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from psutil import virtual_memory

import tiercache as tc
from tests.datasets import raw_batch, write_sub_dataset
from tiercache.data.manifest import Manifest, SubDatasetRecord
from tiercache.data.raw_batch import RawBatch
from tiercache.store.optimizer import Optimizer

ALPHA = 1.05
_BYTES_OF_PROCESS = 6 << 30  # host memory that a process may need


class Drawn(Protocol):
    """Data that can be drawn pass by pass; it is sent to the processes."""

    @property
    def size(self) -> Any:
        """Return the size, at least the `passes` of an epoch."""

    def schema(self) -> tc.Schema:
        """Return its schema."""

    def draw(self, index: int) -> RawBatch:
        """Return the samples of a pass; every call returns the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnTables:
    """Passes over tables that have one feature each, with one id per sample."""

    dims: tuple[int, ...]
    optimizer: Optimizer
    rows: int
    """Rows of each table."""
    samples: int
    """Samples of a pass."""
    passes: int

    @property
    def size(self) -> Any:
        """This object, which has the number of passes."""
        return self

    def schema(self) -> tc.Schema:
        begin = tc.init.Uniform(low=-0.1, high=0.1)
        tables = tuple(
            tc.Table(name=f"t{i}", dim=dim, optimizer=self.optimizer, initializer=begin)
            for i, dim in enumerate(self.dims)
        )
        features = tuple(tc.Feature(name=f"f{i}", table=f"t{i}") for i in range(len(self.dims)))
        return tc.Schema(label="label", dense=(), features=features, tables=tables)

    def draw(self, index: int) -> RawBatch:
        rng = np.random.default_rng(index)
        keys = {f"f{i}": permuted_power_law(rng, self.rows, self.samples) for i in range(len(self.dims))}
        return raw_batch(self.schema(), keys, label=rng.integers(0, 2, self.samples).astype(np.float32))


def permuted_power_law(rng: np.random.Generator, rows: int, count: int) -> NDArray[np.int64]:
    """Draw ids below ``rows`` whose popularity follows a power law of ``ALPHA``, and permute them.

    The law is the one of the Merlin synthetic models: floor((r ((rows + 1)^g - 1) + 1)^(1/g)) - 1 with g = 1 - alpha.
    """
    power = 1.0 - ALPHA
    drawn = (rng.random(count) * ((rows + 1.0) ** power - 1.0) + 1.0) ** (1.0 / power)
    ranks: NDArray[np.int64] = np.clip(drawn.astype(np.int64) - 1, 0, rows - 1)
    factor = max(1, int(0.618 * rows))
    while math.gcd(factor, rows) > 1:
        factor += 1
    ranks *= factor
    ranks %= rows
    return ranks


def write_drawn(folder: Path, data: Drawn) -> tc.PassDataset:
    """Open the dataset in ``folder``, or write it."""
    if not folder.exists():
        unfinished = folder.with_suffix(".part")
        unfinished.mkdir(parents=True, exist_ok=True)
        records = _records(unfinished, data)
        Manifest(schema=data.schema(), passes=tuple(records), options={}, inputs=()).write(unfinished)
        unfinished.rename(folder)
    return tc.PassDataset.open(folder)


def _records(folder: Path, data: Drawn) -> list[SubDatasetRecord]:
    memory = virtual_memory().available // _BYTES_OF_PROCESS
    workers = min(data.size.passes, (os.cpu_count() or 1) // 2, int(memory))
    write = partial(_write, folder)
    if workers < 2:
        return [write(data, index) for index in range(data.size.passes)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        return list(pool.map(write, repeat(data), range(data.size.passes)))


def _write(folder: Path, data: Drawn, index: int) -> SubDatasetRecord:
    return write_sub_dataset(folder, index, data.schema(), data.draw(index))
