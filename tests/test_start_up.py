"""Kernels are compiled only if they are called, and not before budgets are known to be enough."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiercache as tc
from tiercache.errors import BudgetError

SCHEMA = 'label = { column = "clicked" }\ndefaults = { dim = 16 }\n[features.user]\n[features.item]\nkey = "string"\n'
EXTRACTION = """
import sys
import tiercache as tc
from tiercache.kernels.cpu import compile
try:
    tc.extract("clicks.parquet", "clicks.toml", sys.argv[1], device_budget=sys.argv[1], progress=False)
except tc.TierCacheError as error:
    print(type(error).__name__)
print(*sorted(kernel.name for kernel in compile.KERNELS if kernel.compiled))
"""
TRAINING = {"_update", "_gather", "_pool_one", "_spread_one"}  # some of the kernels that training calls


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    chance = np.random.default_rng(0)
    items = [f"item {number}" for number in chance.integers(0, 300, 20_000)]
    columns = {"user": chance.integers(0, 500, 20_000), "item": items, "clicked": chance.integers(0, 2, 20_000)}
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    (tmp_path / "clicks.toml").write_text(SCHEMA)
    return tmp_path


def compiled_by_extraction(folder: Path, device_budget: str) -> str:
    command = [sys.executable, "-c", EXTRACTION, device_budget]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def test_an_extraction_compiles_the_kernels_that_it_calls(clicks: Path) -> None:
    called = compiled_by_extraction(clicks, "1MiB").split()
    assert {"_add", "_hash_spans"} <= {*called}
    assert not TRAINING & {*called}
    error, *names = compiled_by_extraction(clicks, "1KiB").split()
    assert error == "BudgetError"
    assert not TRAINING & {*names}


def test_too_small_a_device_budget_is_refused_before_kernels_compile(
    clicks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first training of a machine compiles for a minute; a wrong number costs none of it, and leaves no store."""
    data = tc.extract(
        clicks / "clicks.parquet", clicks / "clicks.toml", clicks / "passes", device_budget="1MiB", progress=False
    )
    monkeypatch.setattr("tiercache.train.cache_parts.prepare_kernels", lambda _: pytest.fail("kernels were compiled"))
    with pytest.raises(BudgetError, match="device_budget is 1 KiB"):
        tc.TierCache(clicks / "model.tc", data, device_budget="1KiB", host_budget="64MiB")
    assert not (clicks / "model.tc").exists()
    with pytest.raises(pytest.fail.Exception, match="kernels were compiled"):
        tc.TierCache(clicks / "model.tc", data, device_budget="1MiB", host_budget="64MiB")
