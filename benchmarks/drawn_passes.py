"""Datasets of random ids, drawn sub-dataset by sub-dataset by several processes if there are cores."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from psutil import virtual_memory

import tiercache as tc
from tests.datasets import raw_batch, write_sub_dataset
from tiercache.data.manifest import Manifest, SubDatasetRecord
from tiercache.data.raw_batch import RawBatch
from tiercache.store.bits import hash_keys
from tiercache.store.optimizer import Optimizer

ALPHA = 1.05
_BYTES_OF_PROCESS = 6 << 30  # host memory that a process may need


def schema_of(dims: Mapping[str, int], optimizer: Optimizer, features: Mapping[str, str] | None = None) -> tc.Schema:
    """Return a schema of tables with these dims, and of features by table; by default one for each table."""
    begin = tc.init.Uniform(low=-0.05, high=0.05)
    tables = (tc.Table(name=name, dim=dim, optimizer=optimizer, initializer=begin) for name, dim in dims.items())
    names = {name: name for name in dims} if features is None else features
    return tc.Schema(
        label="label", dense=(), tables=tuple(tables),
        features=tuple(tc.Feature(name=name, table=table) for name, table in names.items()),
    )  # fmt: skip


def hash_ordered(rows: int, table_id: int) -> NDArray[np.int64]:
    """Return the keys below ``rows`` in the order of their hashes."""
    keys = np.arange(rows, dtype=np.int64)
    ordered: NDArray[np.int64] = keys[np.argsort(hash_keys(keys, table_id))]
    return ordered


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


def draw_ids(schema: tc.Schema, rows: int, samples: int, index: int) -> RawBatch:
    """Draw the samples of a pass: for each feature one id below ``rows``."""
    rng = np.random.default_rng((5, index))
    keys = {feature.name: permuted_power_law(rng, rows, samples) for feature in schema.features}
    return raw_batch(schema, keys, label=rng.integers(0, 2, samples))


def write_drawn(folder: Path, schema: tc.Schema, passes: int, draw: Callable[[int], RawBatch]) -> tc.PassDataset:
    """Open the dataset in ``folder``, or write it. draw: returns the samples of a pass, and is sent to processes."""
    if not folder.exists():
        unfinished = folder.with_suffix(".part")
        unfinished.mkdir(parents=True, exist_ok=True)
        write = partial(_write, unfinished, schema, draw)
        workers = min(passes, (os.cpu_count() or 1) // 2, int(virtual_memory().available // _BYTES_OF_PROCESS))
        if workers < 2:
            records = list(map(write, range(passes)))
        else:
            with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
                records = list(pool.map(write, range(passes)))
        Manifest(schema=schema, passes=tuple(records), options={}, inputs=()).write(unfinished)
        unfinished.rename(folder)
    return tc.PassDataset.open(folder)


def _write(folder: Path, schema: tc.Schema, draw: Callable[[int], RawBatch], index: int) -> SubDatasetRecord:
    return write_sub_dataset(folder, index, schema, draw(index))
