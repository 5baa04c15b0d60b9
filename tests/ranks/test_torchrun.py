"""A job of torchrun that loses a rank ends with torchrun's report, and goes on to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.ranks.launched import DENSE, digest
from tests.ranks.trainings import CASES, assert_same_rows
from tiercache.ranks.sharded_store import ShardedStore

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks.pool import RanksPool


def torchrun(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Train on two ranks to the end of the job."""
    return subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "--max-restarts", "0", "-m", "tests.ranks.launched", str(folder), *options,
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_a_job_whose_rank_is_killed_names_it_and_goes_on_to_the_same_bits(
    ranks_pool: RanksPool, tmp_path: Path
) -> None:
    """SIGKILL in the midst of the second epoch: rows, states and dense weights are those of an undisturbed training."""
    for name in ("killed", "whole"):
        CASES["one"].cut(tmp_path / name / "passes")
    whole = ranks_pool.run(2, "tests.ranks.trainings:train", case="one", folder=str(tmp_path / "whole"))

    killed = torchrun(tmp_path / "killed", "--kill", "9")
    assert killed.returncode != 0
    assert "exitcode  : -9" in killed.stderr
    assert "rank      : 1 (local_rank: 1)" in killed.stderr
    with ShardedStore.open(tmp_path / "killed" / "model.tc") as store:
        assert (0, 0) < tuple(store.commit.cursor) < (2 * 4, 0)
    resumed = torchrun(tmp_path / "killed")
    assert resumed.returncode == 0, resumed.stderr

    assert json.loads((tmp_path / "killed" / DENSE).read_text()) == digest(whole[0])
    assert_same_rows(tmp_path / "killed", tmp_path / "whole")
