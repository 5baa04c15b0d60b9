"""Whatever ends the process that rolls a sharded store back: it stands where it stood, or where it was to go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("engine", "kills"),
    [
        ("lmdb", 16),
        ("zarr", 6),
        pytest.param("lmdb", None, marks=pytest.mark.long),
        pytest.param("zarr", 600, marks=pytest.mark.long),
    ],
)
def test_a_rollback_killed_at_any_point_is_made_or_not(tmp_path: Path, engine: str, kills: int | None) -> None:
    """Before and after calls that touch the disk, and again as it is made again; all that is kept is whole."""
    figures = tmp_path / "figures.json"
    options = ["--folder", tmp_path, "--engine", engine, "--json", figures]
    if kills is not None:
        options += ["--kills", kills]
    command = [sys.executable, "-m", "tests.ranks.rollback_killer", *map(str, options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(figures.read_text())
    assert found["problems"] == []
    assert found["kills"] >= (kills or 0.9 * found["points"])
    assert min(found["stood before"], found["stood after"]) >= 1
    assert found["second kills"] >= 1
