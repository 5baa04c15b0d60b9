"""Whatever ends the processes that write a sharded store: it stands at one cursor on all parts, with its rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
PHASES = {"open", "append and commit", "record", "divide anew", "switch and delete"}


@pytest.mark.parametrize(
    ("engine", "kills"),
    [
        ("lmdb", 60),
        ("zarr", 12),
        pytest.param("lmdb", 1000, marks=pytest.mark.long),
        pytest.param("zarr", 500, marks=pytest.mark.long),
    ],
)
def test_parts_killed_at_any_point_stand_at_one_commit(tmp_path: Path, engine: str, kills: int) -> None:
    """One rank or all, before and after calls that touch the disk and at random instants, and again as they go on."""
    figures = tmp_path / "figures.json"
    done = crash("--folder", tmp_path, "--engine", engine, "--kills", kills, "--json", figures)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(figures.read_text())
    assert found["problems"] == []
    assert found["kills"] >= kills
    if kills >= 60:
        assert found["phases"].keys() == PHASES
        assert min(found["phases"].values()) >= 5
        assert min(found["behind"], found["instants"]) >= 3, "too few stores had a part that was ahead"
        assert found["second_kills"] >= 10
        assert len(found["stood"]) >= 5, "some commits were never the one that was found"


def crash(*options: object) -> subprocess.CompletedProcess[str]:
    """Run the killer in a process of its own, which forks and so must have no thread."""
    command: Sequence[str] = [sys.executable, "-m", "tests.ranks.parts_killer", *map(str, options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=3000)
