"""Kills ranks of a real training with SIGKILL, one or all, at random moments, and starts all of them again.

A program, because a fork server needs a separate process:

    python -m tests.dist.training_killer --folder DIR --kills N [--ranks N] [--engine lmdb]

With --ranks every training resumes, on other ranks, from the middle of one of ``--ranks`` ranks, and kills come while
its parts are being rewritten for them or soon after.
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
PASSES = 2
"""The first training's position, in passes, before other ranks continue."""
MOST_OF_PARTS = 1.2
"""Kills come within this multiple of the time until new ranks have the rows."""
RESULT, ERROR = "result.json", "error-{}.txt"
JOIN_SECONDS = 60.0
SURVIVORS_SECONDS = 5.0
"""Time for the surviving ranks to exit; then they are killed, as by torchrun."""


def be_rank(rank: int, size: int, meeting: Path, folder: Path, engine: str, passes: int | None) -> None:
    """Train the case to its end, or into a pass; problems are written to a file."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    import torch

    from tests.dist.trainings import stored, train, train_and_stop
    from tiercache.dist.communicator import communicator_of

    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group(
            "gloo", f"file://{meeting}", timeout=timedelta(seconds=JOIN_SECONDS), rank=rank, world_size=size
        )
        ranks = communicator_of()
        (folder / f"begun-{rank}").touch()
        if passes is not None:
            train_and_stop(ranks, CASE, str(folder), passes=passes, batches=1, within=True, engine=engine)
        found = {} if passes is not None else train(ranks, CASE, str(folder), engine=engine)
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


KILL = Moment("told why", "told_why")
"""A kill of one rank, or of all, at a random moment; errors of the surviving ranks are counted."""


class Trainings:
    """Trainings of several ranks, on 2 and on 3 by turns, each killed up to four times until ``kills`` are made."""

    def __init__(self, folder: Path, kills: int, *, seed: int, before: int | None, engine: str) -> None:
        """before: the number of ranks of the first training."""
        self._engine = engine
        self._folder, self.kills_left, self._random, self._before = folder, kills, random.Random(seed), before
        self._more = kills if before is None else 0
        """More kills if no survivor of all said why it ended: torch's errors may come first, by chance."""
        self._sizes = [size for size in (3, 2, 1) if before is not None and size != before] or [2, 3]
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.crash.warm", "tests.dist.warm"])
        self._expected: dict[int, tuple[dict[str, Any], float]] = {}
        self._begun: Path | None = None
        self._least, self._trainings, self._starts = (-1, -1), 0, 0
        if before is not None:
            begun = self._prepare("begun")
            self._end(begun, self._start(begun, before, passes=PASSES))
            self._least = self.look(begun, [], last=False).stands
            self._begun = begun

    def begin(self, folder: Path) -> None:
        """Prepare the next training; train it without a kill, once for each number of ranks."""
        self._size = size = self._sizes[self._trainings % len(self._sizes)]
        self._trainings += 1
        if size not in self._expected:
            whole = self._prepare(f"whole-{size}")
            processes, begun = self._start(whole, size), time.perf_counter()
            seconds = 0.0
            if self._begun is not None:
                self._wait_for_shards(whole, processes)
                seconds = MOST_OF_PARTS * (time.perf_counter() - begun)
            self._end(whole, processes)
            seconds = seconds or time.perf_counter() - begun
            self._expected[size] = json.loads((whole / RESULT).read_text()), seconds
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
        share = self._random.random()
        if self._before is None:  # more kills late, after a commit: machines vary in speed
            share = max(share, self._random.random())
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
            found.counts["trainings"] = 1
            return found
        with suppress(StoreMissingError):
            with tc.Store.open(folder / "model.tc", mode="r") as store:
                at = (-1, -1) if store.commit is None else tuple(store.commit.cursor)
                if self._begun is not None:
                    found.counts[f"stood_in_{self._stands_in(folder)}_shards"] = 1
            found.wrong += [(FAILING, sentence) for sentence in verify(folder / "model.tc")["problems"]]
        stood = max((tuple(place) for one in runs for place in one.of("done")), default=self._least)
        if at < stood:
            found.wrong.append((LOST, f"{folder.name} was at {stood} and now is at {at}"))
        found.counts["resumed_behind_a_commit"] = at > (0, 0)
        found.stands = at
        return found

    def _prepare(self, name: str) -> Path:
        from tests.dist.trainings import CASES

        folder = self._folder / name
        if self._begun is not None:
            shutil.copytree(self._begun, folder)
            return folder
        folder.mkdir()
        CASES[CASE].cut(folder / "passes")
        return folder

    def _wait_for_shards(self, folder: Path, processes: list[BaseProcess]) -> None:
        """Return when other ranks than the first have the rows."""
        while self._stands_in(folder) == "old" and all(one.exitcode is None for one in processes):
            time.sleep(0.002)

    def _stands_in(self, folder: Path) -> str:
        """Return "old" while the first ranks have the rows, and "new" when other ones have them."""
        from tiercache.store.opening import newest_record

        record = newest_record(folder / "model.tc")
        assert record is not None, "the first ranks have made commits"
        return "old" if len(record.ranks) == self._before else "new"

    def _start(self, folder: Path, size: int, passes: int | None = None) -> list[BaseProcess]:
        for left in [*folder.glob("begun-*"), *folder.glob("error-*")]:
            left.unlink()
        self._starts += 1
        meeting = folder / f"meeting-{self._starts}"  # a port that is free now may be taken before rank 0 listens
        given = meeting, folder, self._engine, passes
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
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--engine", default="lmdb")
    options = parser.parse_args()
    workload = Trainings(
        options.folder, options.kills, seed=options.kills, before=options.ranks, engine=options.engine
    )  # fmt: skip
    killer = Killer(options.folder, workload, seed=options.kills, most_problems=1)
    with suppress(EnoughError):
        while workload.kills_left > 0:
            killer.kill()
    sys.stdout.write(json.dumps({**killer.outcome.counts, "problems": killer.outcome.problems}))
    return bool(killer.outcome.problems)


if __name__ == "__main__":
    sys.exit(main())
