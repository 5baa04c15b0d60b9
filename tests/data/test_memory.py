"""Memory: files that are larger than the memory limit are extracted within it."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiercache as tc
from tests.data.cases import table
from tests.memory import run_alone
from tests.planning.memory_child import data_bytes
from tiercache.data.extract import extract
from tiercache.schema import Schema

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.disk

LIMIT = 32 << 20
NAMES = ("a", "b", "c", "d")
SCHEMA = Schema(label="y", features=tuple(tc.Feature(name=n) for n in NAMES), tables=tuple(table(n) for n in NAMES))


def limited(folder: Path) -> None:
    """Extract something small, then the large file, within the memory limit plus a tenth."""

    def run(name: str) -> None:
        path, out = folder / f"{name}.parquet", folder / name
        how: dict[str, Any] = {"device_budget": 1 << 22, "memory_limit": LIMIT, "batch_multiple": 4096}
        extract(path, SCHEMA, out, progress=False, **how)

    run("small")
    most = data_bytes() + LIMIT * 11 // 10
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    run("large")


def write(path: Path, num_samples: int) -> None:
    """Write samples with 30,000 keys per feature, uncompressed."""
    random = np.random.default_rng(0)
    schema = pa.schema([("y", pa.float64()), *((n, pa.int64()) for n in NAMES)])
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for low in range(0, num_samples, 100_000):
            count = min(100_000, num_samples - low)
            keys = {n: random.integers(0, 30_000, count) * 0x9E3779B97F4A7C1 for n in NAMES}
            writer.write_table(pa.table({"y": random.random(count), **keys}, schema=schema))


def test_a_file_of_ten_times_the_memory_limit_is_extracted_within_it(tmp_path: Path) -> None:
    """The kernel refuses every further byte; Python, its libraries and compiled kernels were loaded before."""
    write(tmp_path / "small.parquet", 5000)
    write(tmp_path / "large.parquet", 8_500_000)
    assert (tmp_path / "large.parquet").stat().st_size > 10 * LIMIT
    run_alone(limited, tmp_path)
    assert len(tc.PassDataset.open(tmp_path / "large")) > 10
