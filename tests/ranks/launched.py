"""A rank of its own process, as torchrun starts it: ``python -m tests.ranks.launched HOW TIMEOUT [FOLDER]``.

It prints "in step" when all ranks have joined, and at the end what it knows as one line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

import torch

from tiercache.errors import RankError
from tiercache.ranks.group import Ranks

BYTES = 1 << 20


def say(**words: object) -> None:
    """Print a line of JSON in one write: several processes may share the output."""
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def exchange_for_ever(ranks: Ranks) -> None:
    """Exchange a megabyte with everybody until something ends it."""
    send = torch.ones(ranks.size * BYTES, dtype=torch.uint8)
    sizes = [BYTES] * ranks.size
    while True:
        ranks.exchange(send, sizes, sizes)


def work_for_ever(ranks: Ranks) -> None:
    """Be at work, on rank 1 until something ends it; the others wait."""
    with ranks.patiently("reading rows"):
        if ranks.rank == 1:
            threading.Event().wait()


def end_soon(by: signal.Signals, seconds: float) -> None:
    """Send this process a signal in the midst of what it does."""
    threading.Timer(seconds, lambda: os.kill(os.getpid(), by)).start()


def talk(ranks: Ranks) -> None:
    """Exchange and agree once; then rank 0 fails and everybody hears of it."""
    received = ranks.exchange(torch.full((ranks.size,), ranks.rank), [1] * ranks.size, [1] * ranks.size)
    sentence = ""
    try:
        with ranks.together("opening the store"):
            if ranks.rank == 0:
                raise OSError("no such disk")
    except (OSError, RankError) as error:
        sentence = str(error)
    say(rank=ranks.rank, local=os.environ["LOCAL_RANK"], received=received.tolist(), sentence=sentence)


def train(ranks: Ranks, folder: str) -> None:
    """Train a case, whose passes are in the folder."""
    from tests.ranks import trainings

    trainings.train(ranks, "one", folder)


def main(how: str, timeout: float, folder: str = "") -> None:
    """Join and do what ``how`` says."""
    torch.set_num_threads(1)
    try:
        ranks = Ranks.join(timeout=timeout)
    except RankError as error:
        say(error=str(error))
        return
    if how == "talk":
        talk(ranks)
        if folder:
            train(ranks, folder)
        ranks.close()
        return
    if ranks.rank == 1:
        by = signal.SIGKILL if how.startswith("kill") else signal.SIGSTOP
        end_soon(by, 1.5 * timeout if how.endswith("at work") else 0.5)
    say(rank=ranks.rank, process=os.getpid(), state="in step")
    begin = time.monotonic()
    try:
        (work_for_ever if how.endswith("at work") else exchange_for_ever)(ranks)
    except RankError as error:
        cause = type(error.__cause__).__name__
        say(rank=ranks.rank, error=str(error), cause=cause, seconds=time.monotonic() - begin)
    ranks.close()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), *sys.argv[3:])
