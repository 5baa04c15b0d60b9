"""Memory: files that are larger than the memory limit are extracted within it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiercache as tc
from tests.data.cases import table
from tests.memory import Peak, run_alone
from tiercache.data.extract import extract
from tiercache.schema import Schema

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.disk

HOST_BYTES = 64 << 20
NAMES = ("a", "b", "c", "d")
SCHEMA = Schema(label="y", features=tuple(tc.Feature(name=n) for n in NAMES), tables=tuple(table(n) for n in NAMES))


def measure(folder: Path) -> None:
    """Extract something small, then the large file, and leave behind what that took beside the small one."""

    def run(name: str) -> None:
        extract(
            folder / f"{name}.parquet",
            SCHEMA,
            folder / name,
            device_budget=1 << 22,
            memory_limit=HOST_BYTES,
            batch_multiple=4096,
            progress=False,
        )

    run("small")
    peak = Peak()
    peak.begin()
    run("large")
    (folder / "peak").write_text(str(peak.taken))


def write(path: Path, num_samples: int) -> None:
    """Write samples with 30,000 keys per feature, uncompressed."""
    random = np.random.default_rng(0)
    schema = pa.schema([("y", pa.float64()), *((n, pa.int64()) for n in NAMES)])
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for low in range(0, num_samples, 200_000):
            count = min(200_000, num_samples - low)
            keys = {n: random.integers(0, 30_000, count) * 0x9E3779B97F4A7C1 for n in NAMES}
            writer.write_table(pa.table({"y": random.random(count), **keys}, schema=schema))


def test_a_file_larger_than_the_host_budget_is_extracted_within_it(tmp_path: Path) -> None:
    """What the process holds beside its libraries and compiled kernels stays below the memory limit."""
    write(tmp_path / "small.parquet", 5000)
    write(tmp_path / "large.parquet", 1_800_000)
    assert (tmp_path / "large.parquet").stat().st_size > HOST_BYTES
    run_alone(measure, tmp_path)
    assert len(tc.PassDataset.open(tmp_path / "large")) > 10
    assert int((tmp_path / "peak").read_text()) < HOST_BYTES
