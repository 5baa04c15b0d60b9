"""A rank of its own process, as torchrun starts it: ``python -m tests.ranks.launched [FOLDER] [--talk] [--kill N]``."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.ranks import trainings
from tiercache.dist.communicator import communicator_of
from tiercache.errors import RankError
from tiercache.training.row_optimizer import RowOptimizer

if TYPE_CHECKING:
    from tiercache.dist.communicator import AnyCommunicator

DENSE = "dense.json"
"""What rank 0 says of its dense weights at the end."""


def talk(ranks: AnyCommunicator) -> None:
    """Exchange and agree once; rank 0 fails and everybody hears of it, and says so in a line of JSON."""
    received = ranks.all_to_all(torch.full((ranks.size,), ranks.rank), [1] * ranks.size, [1] * ranks.size)
    sentence = ""
    try:
        with ranks.raise_on_all("opening the store"):
            if ranks.rank == 0:
                raise OSError("no such disk")
    except (OSError, RankError) as error:
        sentence = str(error)
    words = {"rank": ranks.rank, "local": os.environ["LOCAL_RANK"], "received": received.tolist(), "sentence": sentence}
    sys.stdout.write(json.dumps(words) + "\n")  # in one write: several processes share the output
    sys.stdout.flush()


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


def digest(weights: dict[str, object]) -> dict[str, str]:
    """Return a digest of each of them."""
    dense = {name: value for name, value in weights.items() if name.startswith("dense.")}
    return {name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in dense.items()}  # type: ignore[attr-defined]


def main() -> None:
    """Be one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--talk", action="store_true")
    parser.add_argument("--kill", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = communicator_of()
    if options.talk:
        talk(ranks)
    if options.kill and ranks.rank == 1:
        kill_at(options.kill)
    if options.folder:
        found = trainings.train(ranks, "one", str(options.folder))
        if ranks.rank == 0:
            (options.folder / DENSE).write_text(json.dumps(digest(found)))
    ranks.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
