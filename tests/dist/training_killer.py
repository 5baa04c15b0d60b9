"""Kills ranks of a real training with SIGKILL, one or all, at random moments, and starts all of them again.

A program, because a fork server needs a separate process:

    python -m tests.dist.training_killer --folder DIR --kills N [--engine lmdb]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import random
import signal
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.crash.child import Ended
from tests.crash.killer import Killer
from tests.crash.outcome import FAILING, LOST, SILENT, EnoughError, Found
from tests.crash.schedule import Moment

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

CASE = "bags"
RESULT, ERROR = "result.json", "error-{}.txt"
JOIN_SECONDS = 60.0
SURVIVORS_SECONDS = 5.0
"""Time for the surviving ranks to exit; then they are killed, as by torchrun."""


def be_rank(rank: int, size: int, meeting: Path, folder: Path, engine: str) -> None:
    """Train the case to its end; problems are written to a file."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    import torch

    from tests.dist.trainings import stored, train
    from tiercache.dist.communicator import communicator_of

    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group(
            "gloo", f"file://{meeting}", timeout=timedelta(seconds=JOIN_SECONDS), rank=rank, world_size=size
        )
        ranks = communicator_of()
        (folder / f"begun-{rank}").touch()
        found = train(ranks, CASE, str(folder), engine=engine)
        ranks.barrier()
        if rank == 0:
            record = {name: _digest(value) for name, value in found.items()}
            for name, (keys, fields) in stored(folder).items():
                record |= {f"{name}.{i}": _digest(part) for i, part in enumerate((keys, *fields))}
            (folder / RESULT).write_text(json.dumps(record))
        ranks.barrier()
        ranks.close()
    except Exception:
        (folder / ERROR.format(rank)).write_text(traceback.format_exc())
        sys.exit(1)


def _digest(value: Any) -> str:
    import numpy as np

    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()


KILL = Moment("told why", "told_why")
"""A kill of one rank, or of all, at a random moment; errors of the surviving ranks are counted."""


class Trainings:
    """Trainings of several ranks, on 2 and on 3 by turns, each killed up to four times until ``kills`` are made."""

    def __init__(self, folder: Path, kills: int, *, engine: str) -> None:
        self._folder, self.kills_left, self._random, self._engine = folder, kills, random.Random(kills), engine
        self._more = kills
        """More kills if no survivor of all said why it ended: torch's errors may come first, by chance."""
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.crash.warm", "tests.dist.warm"])
        self._expected: dict[int, tuple[dict[str, Any], float]] = {}
        self._trainings, self._starts = 0, 0

    def begin(self, folder: Path) -> None:
        """Prepare the next training; train it without a kill, once for each number of ranks."""
        self._size = size = 2 + self._trainings % 2
        self._trainings += 1
        if size not in self._expected:
            whole = self._prepare(f"whole-{size}")
            processes, begun = self._start(whole, size), time.perf_counter()
            self._end(whole, processes)
            self._expected[size] = json.loads((whole / RESULT).read_text()), time.perf_counter() - begun
        self._due = 1 + self._random.randrange(4)
        folder.rmdir()
        self._prepare(folder.name)

    def again(self, generator: random.Random, runs: list[Ended]) -> Moment | None:
        """Kill until this training, or all, had enough kills."""
        return KILL if self.kills_left > 0 and len(runs) < self._due else None

    def run(self, folder: Path, death: Moment | None) -> Ended:
        """Train from the current state, and kill some at a moment."""
        processes, said = self._start(folder, self._size), list[list[Any]]()
        if death is None:
            self._end(folder, processes)
            return Ended(signals=[0] * self._size)
        share = max(self._random.random(), self._random.random())  # late, after a commit: machines vary in speed
        time.sleep(share * self._expected[self._size][1])
        victims = processes if self._random.random() < 0.3 else [self._random.choice(processes)]
        for victim in victims:
            victim.kill()
        until = time.monotonic() + SURVIVORS_SECONDS
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
            process.join()
        for rank, process in enumerate(processes):
            if process.exitcode not in {0, -signal.SIGKILL}:
                words = (folder / ERROR.format(rank)).read_text()
                if "RankError" in words:
                    said.append(["told why", rank])
                elif "gloo" not in words.lower():  # the dense part's errors are torch's
                    said.append(["error", f"rank {rank} of {folder.name} ended otherwise: {words}"])
        # an exit code of 0 is not a kill: they were done before
        signals = [0 if process.exitcode == 0 else signal.SIGKILL for process in processes]
        self.kills_left -= any(signals)
        self._more *= not any(kind == "told why" for kind, _ in said)
        if not self.kills_left:
            self.kills_left, self._more = self._more, 0
        return Ended(signals=signals, said=said)

    def look(self, folder: Path, runs: list[Ended], *, last: bool) -> Found:
        """Open the result: it is at a commit of all ranks, whole, or nothing was ever committed."""
        import tiercache as tc
        from tiercache.store import StoreMissingError, verify

        found, at = Found(), (-1, -1)
        if last:
            if json.loads((folder / RESULT).read_text()) != self._expected[self._size][0]:
                found.wrong.append((SILENT, f"{folder.name} on {self._size} ranks ended with other bits"))
            names = {entry.name for entry in (folder / "model.tc").glob("rank-*")}
            if names != {f"rank-{rank}" for rank in range(1, self._size)}:
                found.wrong.append((FAILING, f"{folder.name} on {self._size} ranks ended with {sorted(names)}"))
            return found
        with suppress(StoreMissingError):
            with tc.Store.open(folder / "model.tc", mode="r") as store:
                at = (-1, -1) if store.commit is None else tuple(store.commit.cursor)
            found.wrong += [(FAILING, sentence) for sentence in verify(folder / "model.tc")["problems"]]
        stood = max((tuple(place) for one in runs for place in one.of("done")), default=(-1, -1))
        if at < stood:
            found.wrong.append((LOST, f"{folder.name} was at {stood} and now is at {at}"))
        found.counts["resumed_behind_a_commit"] = at > (0, 0)
        found.stands = at
        return found

    def _prepare(self, name: str) -> Path:
        from tests.dist.trainings import CASES

        folder = self._folder / name
        folder.mkdir()
        CASES[CASE].cut(folder / "passes")
        return folder

    def _start(self, folder: Path, size: int) -> list[BaseProcess]:
        for left in [*folder.glob("begun-*"), *folder.glob("error-*")]:
            left.unlink()
        self._starts += 1
        meeting = folder / f"meeting-{self._starts}"  # a port that is free now may be taken before rank 0 listens
        given = meeting, folder, self._engine
        processes = [self._context.Process(target=be_rank, args=(rank, size, *given)) for rank in range(size)]
        for process in processes:
            process.start()
        # a rank killed before all have joined is waited for as long as joining may take, with no store open yet
        while any(not (folder / f"begun-{rank}").exists() for rank in range(size)):
            if any(process.exitcode is not None for process in processes):
                break  # _end reports it
            time.sleep(0.005)
        return list(processes)

    def _end(self, folder: Path, processes: list[BaseProcess]) -> None:
        for rank, process in enumerate(processes):
            process.join()
            if process.exitcode != 0:
                raise RuntimeError(f"rank {rank} of {folder.name} failed: {(folder / ERROR.format(rank)).read_text()}")


def main() -> int:
    """Kill, and print the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.dist.training_killer")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--engine", default="lmdb")
    options = parser.parse_args()
    workload = Trainings(options.folder, options.kills, engine=options.engine)
    killer = Killer(options.folder, workload, seed=options.kills, most_problems=1)
    with suppress(EnoughError):
        while workload.kills_left > 0:
            killer.kill()
    sys.stdout.write(json.dumps({**killer.outcome.counts, "problems": killer.outcome.problems}))
    return bool(killer.outcome.problems)


if __name__ == "__main__":
    sys.exit(main())
