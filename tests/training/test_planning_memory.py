"""What many passes take to be planned is part of the host budget, which a whole process stays within."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

import tiercache as tc
from tests.training.cases import smallest_host_budget, tiered
from tests.training.memory_child import DEVICE_BYTES, TABLES
from tiercache.errors import BudgetError

if TYPE_CHECKING:
    from pathlib import Path

PASSES, KEYS, UNIVERSE = 500, 70, 7000


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_process_stays_within_the_smallest_budget_for_many_passes(tmp_path: Path) -> None:
    """Beside what it had before: an epoch and more. With a tenth less it is refused, and nothing is written."""
    rng = np.random.default_rng(0)
    for name, count in (("few", 3), ("many", PASSES)):
        tc.write_key_sets(
            tmp_path / name, TABLES, ({"a": rng.choice(UNIVERSE, KEYS, replace=False)} for _ in range(count))
        )
    passes = tc.PassSet.open(tmp_path / "many")
    with tc.Store.open(tmp_path / "s.tc", tables=TABLES) as store:
        before = contents(tmp_path)
        smallest = smallest_host_budget(store, passes, device_budget=DEVICE_BYTES)
        with pytest.raises(BudgetError, match=f"for planning .* raise host_budget to {smallest} bytes"):
            tiered(store, passes, device_budget=DEVICE_BYTES, host_budget=9 * smallest // 10)
        assert store.commit is None
        assert contents(tmp_path) == before
    visits = str(PASSES + 20)
    child = subprocess.run(
        [sys.executable, "-m", "tests.training.memory_child", str(tmp_path), str(smallest), visits],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    assert child.stdout.split()[-1] == visits
