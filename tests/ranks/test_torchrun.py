"""A job of torchrun that loses a rank ends with torchrun's report, and goes on to the same bits.

``python -m tests.ranks.test_torchrun FOLDER STEP`` is one of its ranks; rank 1 dies.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

import tiercache as tc
from tests.ranks.pool import RanksPool
from tests.ranks.trainings import CASES, assert_same_rows, on_ranks, stored, train
from tiercache.dist.communicator import communicator_of
from tiercache.training.row_optimizer import RowOptimizer


def kill_at(step: int) -> None:
    """Have this process killed behind so many steps of its optimizer."""
    done: list[None] = []

    def count(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if isinstance(optimizer, RowOptimizer):  # it steps behind that of the dense parameters
            return
        done.append(None)
        if len(done) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)


def main() -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = communicator_of()
    if ranks.rank == 1:
        kill_at(int(sys.argv[2]))
    train(ranks, "one", sys.argv[1])


def test_a_job_whose_rank_is_killed_names_it_and_goes_on_to_the_same_bits(
    ranks_pool: RanksPool, tmp_path: Path
) -> None:
    """SIGKILL in the midst of the second epoch: rows, states and dense weights are those of an undisturbed training."""
    whole = on_ranks(ranks_pool, 2, tmp_path / "whole")
    CASES["one"].cut(tmp_path / "killed" / "passes")

    killed = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "--max-restarts", "0", "-m", "tests.ranks.test_torchrun", str(tmp_path / "killed"), "9",
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert killed.returncode != 0
    assert "exitcode  : -9" in killed.stderr
    assert "rank      : 1 (local_rank: 1)" in killed.stderr
    with tc.Store.open(tmp_path / "killed" / "model.tc", mode="r") as store:
        assert (0, 0) < tuple(store.commit.cursor) < (2 * 4, 0)
    resumed = on_ranks(ranks_pool, 2, tmp_path / "killed")

    for name, value in whole[0].items():
        np.testing.assert_array_equal(resumed[0][name], value, err_msg=name)
    assert_same_rows(stored(tmp_path / "killed"), stored(tmp_path / "whole"))


if __name__ == "__main__":
    main()
