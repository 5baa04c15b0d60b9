"""A rank that is killed, or all of them, at any moment of a training: it goes on to the bits of one never killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=pytest.mark.long)])
def test_ranks_killed_in_the_midst_of_a_training_go_on_to_the_same_bits(tmp_path: Path, kills: int) -> None:
    """On 2 and on 3 ranks; who was not killed says why it ended. The parts alone are killed in test_parts_crash."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.ranks.training_killer", str(tmp_path), str(kills)], cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False, capture_output=True, text=True, timeout=150 * kills,
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["problems"] == []
    assert found["kills"] == kills
    assert found["told_why"] > 0
    assert found["resumed_behind_a_commit"] > 0
