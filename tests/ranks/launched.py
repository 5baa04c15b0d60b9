"""A rank of its own process, as torchrun starts it; rank 1 dies: ``python -m tests.ranks.launched FOLDER STEP``."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.ranks import trainings
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
    trainings.train(ranks, "one", sys.argv[1])


if __name__ == "__main__":
    main()
