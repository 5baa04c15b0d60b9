"""After any kill of several ranks the store is at one commit of all, and training resumes to the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dist.resharding_killer import PHASES
from tests.dist.shards_killer import PHASES as PHASES_OF_SHARDS

ROOT = Path(__file__).parents[2]


def killed(killer: str, folder: Path, **options: object) -> dict[str, Any]:
    """Run a killer in a separate process, which forks and so must have no thread; return its figures."""
    given = [str(word) for name, value in options.items() if value is not None for word in (f"--{name}", value)]
    done = subprocess.run(
        [sys.executable, "-m", f"tests.dist.{killer}_killer", "--folder", str(folder), *given], cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=False, timeout=15_000,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["problems"] == []
    assert found["kills"] >= int(str(options.get("kills") or 0))
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("engine", "kills"), [("lmdb", 16), ("lmdb", 60), ("zarr", 12), ("lmdb", 1000), ("zarr", 500)])
def test_parts_killed_at_any_point_stand_at_one_commit(tmp_path: Path, engine: str, kills: int) -> None:
    """One rank or all, before and after calls that touch the disk and at random instants, and again while resuming."""
    found = killed("shards", tmp_path, engine=engine, kills=kills)
    if kills >= 60:
        assert found["phases"].keys() == set(PHASES_OF_SHARDS)
        assert min(found["phases"].values()) >= 5
        assert min(found["ahead"], found["instants"]) >= 3, "too few stores had a part that was ahead"
        assert found["second_kills"] >= 10
        assert len(found["stood"]) >= 5, "some commits were never the one that was found"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("engine", "kills"), [("lmdb", 12), ("lmdb", 32), ("zarr", 16), ("lmdb", None), ("zarr", 900)])
def test_a_change_of_all_ranks_killed_at_any_point_is_made_or_not(
    tmp_path: Path, engine: str, kills: int | None
) -> None:
    """Rollbacks, forgotten rows, altered tables and compactions; killed again, it resumes."""
    found = killed("changes", tmp_path, engine=engine, kills=kills)
    assert kills or found["kills"] >= 0.9 * found["points"]
    assert len(found["stood"]) >= min(6, (kills or 12) // 3)
    assert found["second_kills"] >= min(2, (kills or 16) // 8)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kills", [8, 32, 600])
def test_ranks_killed_while_they_write_new_parts_end_with_the_same_bits(tmp_path: Path, kills: int) -> None:
    """One rank or all, at calls that touch the disk and at random instants, and again as they start over."""
    found = killed("resharding", tmp_path, kills=kills)
    if kills >= 32:  # with fewer, their distribution is random
        assert found["phases"].keys() == set(PHASES)
        assert min(*found["phases"].values(), found["instants"]) >= 1
        assert min(found["kills_of_all"], found["second_kills"], found["old_ranks_between"]) >= 1
        assert min(found["stood_in_old_shards"], found["stood_in_new_shards"]) >= 4


@pytest.mark.long
@pytest.mark.parametrize("kills", [6, 100])
def test_ranks_killed_in_the_midst_of_a_training_go_on_to_the_same_bits(tmp_path: Path, kills: int) -> None:
    """On 2 and on 3 ranks; survivors report why they ended."""
    found = killed("training", tmp_path, kills=kills)
    assert min(found["told_why"], found["resumed_behind_a_commit"]) > 0
