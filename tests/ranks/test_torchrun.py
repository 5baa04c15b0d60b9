"""A job of torchrun that loses a rank ends with torchrun's report, and goes on to the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np

from tests.ranks.trainings import CASES, assert_same_rows, on_ranks
from tiercache.ranks.sharded_store import ShardedStore

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks.pool import RanksPool


def test_a_job_whose_rank_is_killed_names_it_and_goes_on_to_the_same_bits(
    ranks_pool: RanksPool, tmp_path: Path
) -> None:
    """SIGKILL in the midst of the second epoch: rows, states and dense weights are those of an undisturbed training."""
    whole = on_ranks(ranks_pool, 2, tmp_path / "whole")
    CASES["one"].cut(tmp_path / "killed" / "passes")

    killed = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "--max-restarts", "0", "-m", "tests.ranks.launched", str(tmp_path / "killed"), "9",
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert killed.returncode != 0
    assert "exitcode  : -9" in killed.stderr
    assert "rank      : 1 (local_rank: 1)" in killed.stderr
    with ShardedStore.open(tmp_path / "killed" / "model.tc") as store:
        assert (0, 0) < tuple(store.commit.cursor) < (2 * 4, 0)
    resumed = on_ranks(ranks_pool, 2, tmp_path / "killed")

    for name, value in whole[0].items():
        np.testing.assert_array_equal(resumed[0][name], value, err_msg=name)
    assert_same_rows(tmp_path / "killed", tmp_path / "whole")
