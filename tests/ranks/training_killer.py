"""Kills ranks of a real training with SIGKILL, one or all, at random moments, and starts all of them again.

A program, because a fork server belongs to a process of its own:

    python -m tests.ranks.training_killer --folder DIR --kills N [--ranks N]

With --ranks every training goes on, on others, from the midst of one of so many ranks, and kills come while its parts
are written anew for them or soon after.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

CASE = "bags"
PASSES = 2
"""In which the training of other ranks stands that is gone on with."""
MOST_OF_PARTS = 1.2
"""Kills come within so many times the time until new parts are the store's."""
RESULT, ERROR = "result.json", "error-{}.txt"
JOIN_SECONDS = 60.0
SURVIVORS_SECONDS = 5.0
"""Which the ranks that were not killed have to end by themselves; then they are killed, as by torchrun."""


def be_rank(rank: int, size: int, port: int, folder: Path, passes: int | None) -> None:
    """Train the case to its end, or into a pass; what comes out wrong stands in a file."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    import torch

    from tests.ranks.trainings import stored, train, train_and_stop
    from tiercache.dist.communicator import communicator_of

    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=JOIN_SECONDS))
        ranks = communicator_of()
        (folder / f"begun-{rank}").touch()
        if passes is not None:
            train_and_stop(ranks, CASE, str(folder), passes=passes, batches=1, within=True)
        found = {} if passes is not None else train(ranks, CASE, str(folder))
        ranks.barrier()
        if rank == 0 and passes is None:
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


class Killer:
    """Runs trainings of several ranks and kills them."""

    def __init__(self, folder: Path, seed: int, before: int | None) -> None:
        self._folder, self._random, self._before = folder, random.Random(seed), before
        self._sizes = [size for size in (3, 2, 1) if before is not None and size != before] or [2, 3]
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.crash.warm", "tests.ranks.warm"])
        self._stood: dict[Path, tuple[int, ...]] = {}
        self._begun: Path | None = None
        self.figures: dict[str, Any] = {
            "kills": 0, "kills_of_all": 0, "trainings": 0, "resumed_behind_a_commit": 0, "told_why": 0, "problems": [],
        }  # fmt: skip
        if before is not None:
            self.figures |= {"stood_in_old_parts": 0, "stood_in_new_parts": 0}

    def run(self, kills: int) -> dict[str, Any]:
        """Kill so many times; every training that is killed is resumed to its end and compared."""
        expected, seconds = {}, {}
        number = 0
        if self._before is not None:
            folder = self._prepare("begun")
            self._end(folder, self._start(folder, self._before, passes=PASSES))
            self._look(folder)
            self._begun = folder
        while self.figures["kills"] < kills and not self.figures["problems"]:
            size = self._sizes[number % len(self._sizes)]
            folder = self._prepare(f"killed-{number}")
            if size not in expected:
                whole = self._prepare(f"whole-{size}")
                processes, begun = self._start(whole, size), time.perf_counter()
                if self._begun is not None:
                    self._wait_for_parts(whole, processes)
                    seconds[size] = MOST_OF_PARTS * (time.perf_counter() - begun)
                self._end(whole, processes)
                seconds.setdefault(size, time.perf_counter() - begun)
                expected[size] = json.loads((whole / RESULT).read_text())
            for _ in range(1 + self._random.randrange(4)):
                if self.figures["kills"] < kills:
                    self._kill(folder, size, seconds[size])
            self._end(folder, self._start(folder, size))
            self.figures["trainings"] += 1
            if json.loads((folder / RESULT).read_text()) != expected[size]:
                self.figures["problems"].append(f"{folder.name} on {size} ranks ended with other bits")
            number += 1
        return self.figures

    def _prepare(self, name: str) -> Path:
        from tests.ranks.trainings import CASES

        folder = self._folder / name
        if self._begun is not None:
            shutil.copytree(self._begun, folder)
            self._stood[folder] = self._stood[self._begun]
            return folder
        folder.mkdir()
        CASES[CASE].cut(folder / "passes")
        return folder

    def _wait_for_parts(self, folder: Path, processes: list[BaseProcess]) -> None:
        """Return when the store stands in parts of another generation than the first."""
        from tiercache.ranks.record import Record

        while not Record.read(folder / "model.tc").generation and all(one.exitcode is None for one in processes):
            time.sleep(0.002)

    def _start(self, folder: Path, size: int, passes: int | None = None) -> list[BaseProcess]:
        for left in [*folder.glob("begun-*"), *folder.glob("error-*")]:
            left.unlink()
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        processes = [
            self._context.Process(target=be_rank, args=(rank, size, port, folder, passes)) for rank in range(size)
        ]
        for process in processes:
            process.start()
        # who is killed before all have joined is waited for as long as joining may take, and no store is open yet
        while any(not (folder / f"begun-{rank}").exists() for rank in range(size)):
            if any(process.exitcode is not None for process in processes):
                break  # _end says why
            time.sleep(0.005)
        return list(processes)

    def _end(self, folder: Path, processes: list[BaseProcess]) -> None:
        for rank, process in enumerate(processes):
            process.join()
            if process.exitcode != 0:
                raise RuntimeError(f"rank {rank} of {folder.name} failed: {(folder / ERROR.format(rank)).read_text()}")

    def _kill(self, folder: Path, size: int, seconds: float) -> None:
        processes = self._start(folder, size)
        time.sleep(self._random.uniform(0.0, seconds))
        victims = processes if self._random.random() < 0.3 else [self._random.choice(processes)]
        for victim in victims:
            victim.kill()
        until = time.monotonic() + SURVIVORS_SECONDS
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
            process.join()
        if all(process.exitcode == 0 for process in processes):
            return  # they were done before
        self.figures["kills"] += 1
        self.figures["kills_of_all"] += len(victims) == size
        for rank, process in enumerate(processes):
            if process.exitcode not in {0, -signal.SIGKILL}:
                said = (folder / ERROR.format(rank)).read_text()
                self.figures["told_why"] += "RankError" in said
                if "RankError" not in said and "gloo" not in said.lower():  # the dense part's errors are torch's own
                    self.figures["problems"].append(f"rank {rank} of {folder.name} ended otherwise: {said}")
        self._look(folder)

    def _look(self, folder: Path) -> None:
        """Open what was left: it stands at a commit of all ranks, whole, or nothing was ever committed."""
        import tiercache as tc
        from tiercache.ranks.inspection import verify_sharded
        from tiercache.store import StoreMissingError

        at = (-1, -1)
        with suppress(StoreMissingError):
            with tc.ShardedStore.open(folder / "model.tc") as store:
                at = tuple(store.commit.cursor)
                if self._begun is not None:
                    self.figures[f"stood_in_{'new' if store.record.generation else 'old'}_parts"] += 1
            self.figures["problems"] += verify_sharded(folder / "model.tc")["problems"]
        if at < self._stood.get(folder, at):
            self.figures["problems"].append(f"{folder.name} stood at {self._stood[folder]} and now stands at {at}")
        self._stood[folder] = at
        self.figures["resumed_behind_a_commit"] += at > (0, 0)


def main() -> None:
    """Kill, and print the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.ranks.training_killer")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--ranks", type=int)
    options = parser.parse_args()
    with suppress(KeyboardInterrupt):
        sys.stdout.write(json.dumps(Killer(options.folder, options.kills, options.ranks).run(options.kills)))


if __name__ == "__main__":
    main()
