"""Whatever ends the processes that write parts for other ranks: the old ones stand or the new ones, with their bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.resharding_killer import PHASES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kills", [24, pytest.param(600, marks=pytest.mark.long)])
def test_ranks_killed_while_they_write_new_parts_end_with_the_same_bits(tmp_path: Path, kills: int) -> None:
    """One rank or all, at calls that touch the disk and at random instants, and again as they begin anew."""
    figures = tmp_path / "figures.json"
    done = ended("tests.ranks.resharding_killer", "--folder", tmp_path, "--kills", kills, "--json", figures)

    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(figures.read_text())
    assert found["problems"] == []
    assert found["kills"] >= kills
    assert found["phases"].keys() == set(PHASES)
    assert min(*found["phases"].values(), found["instants"]) >= 1
    assert min(found["kills_of_all"], found["second_kills"], found["old_ranks_between"]) >= 1
    assert min(found["stood_in_old_parts"], found["stood_in_new_parts"]) >= 4


@pytest.mark.parametrize("kills", [3, pytest.param(60, marks=pytest.mark.long)])
def test_a_training_killed_while_other_ranks_take_it_up_goes_on_to_the_same_bits(tmp_path: Path, kills: int) -> None:
    """As a whole: from the midst of a visit on 2 ranks to 3 and to 1, through the opening of ShardedCache."""
    done = ended("tests.ranks.training_killer", tmp_path, kills, 2)

    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["problems"] == []
    assert found["kills"] == kills
    assert found["trainings"] >= 1
    assert found["stood_in_old_parts"] + found["stood_in_new_parts"] == kills
    if kills >= 20:  # of a few, chance decides where they come
        assert min(found["stood_in_old_parts"], found["stood_in_new_parts"]) > 0


def ended(module: str, *options: object) -> subprocess.CompletedProcess[str]:
    """Run a killer in a process of its own, which forks and so must have no thread."""
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, options)], cwd=ROOT, capture_output=True, text=True, timeout=3000,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
