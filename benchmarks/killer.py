"""Kills a training process with SIGKILL at random moments, looks at what it left, and lets the next one go on."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.forkserver
import os
import random
import shutil
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.killed_training import ERROR, PASSES, RESULT, STORE, TRAININGS, Training, prepare, run
from benchmarks.ledger import PHASES, Ledger
from tiercache.passes.manifest import MANIFEST
from tiercache.store.errors import StoreError, StoreMissingError
from tiercache.store.inspect import info, verify

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess
    from pathlib import Path

BEFORE_FIRST_COMMIT = "before the first commit"
_SPAN_SECONDS = {
    "opening": 0.2, "training": 0.1, "commit inside": 0.03, "switch": 0.02, "end": 0.05, "dump": 0.04, "publish": 0.01,
}  # fmt: skip
"""Within which a kill follows the beginning of the phase it is aimed at: about as long as the phase lasts."""
_SELDOM = {"opening", "commit inside", "end"}
"""Phases that a process may go through once; it enters the others again and again."""
_LATE_HORIZONS = 30
"""After which a process is killed wherever it is: it hangs, or the machine is slow indeed."""
_POLL_SECONDS = 0.0005
_KILLS_WITHOUT_PASSES = 2
"""Of a training, after a random time; where extraction outlasts them, kills are aimed at what comes after it."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What so many kills came to."""

    kills: int = 0
    trainings: int = 0
    """Trainings that were killed, resumed until they ended, and compared."""
    commits_made: int = 0
    """By all trainings together."""
    commits_lost: int = 0
    """Kills after which a commit that was durable before is gone."""
    stores_failing_verification: int = 0
    readers_beside_the_writer: int = 0
    """How often the store was opened for reading while the training ran, just before the kill."""
    bits_equal: bool = True
    """Whether every training ended with the bits of one that was never killed."""
    kills_by_phase: Counter[str] = field(default_factory=Counter)
    reference_seconds: float = 0.0
    """Of the trainings that were not killed."""
    seconds: float = 0.0
    """Of everything else."""
    problems: list[str] = field(default_factory=list)
    """A sentence for each thing that went wrong."""

    @property
    def seconds_per_kill(self) -> float:
        """Killing, verification, resuming and comparing, for each kill."""
        return self.seconds / max(1, self.kills)

    def figures(self) -> dict[str, Any]:
        """Return one flat record."""
        phases = ["beginning", "extraction", BEFORE_FIRST_COMMIT, *PHASES[2:]]
        return {
            "kills": self.kills,
            "trainings": self.trainings,
            "commits_made": self.commits_made,
            "commits_lost": self.commits_lost,
            "stores_failing_verification": self.stores_failing_verification,
            "readers_beside_the_writer": self.readers_beside_the_writer,
            "bits_equal": self.bits_equal,
            "problems": len(self.problems),
            "seconds": round(self.seconds, 2),
            "seconds_per_kill": round(self.seconds_per_kill, 3),
            "reference_seconds": round(self.reference_seconds, 2),
            **{f"kills_in_{name.replace(' ', '_')}": self.kills_by_phase[name] for name in phases},
        }


class Killer:
    """Trains in child processes of a fork server, and kills them.

    Half of the kills come after a random time, half are aimed at a phase that a ledger tells of (publishing lasts
    milliseconds, and time alone would rarely hit it); each phase is aimed at until it is met before any is again,
    however slow the machine. After each the store is opened for reading and verified, and it must stand at a commit
    no older than the last one that was durable.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seed: int = 0,
        trainings: tuple[Training, ...] = TRAININGS,
        notify: Callable[[Outcome], None] = lambda _: None,
    ) -> None:
        """``notify`` is called after each kill."""
        self._folder, self._random, self._trainings, self._notify = folder, random.Random(seed), trainings, notify
        self._context = multiprocessing.get_context("forkserver")
        _start_server()
        self._references: dict[str, tuple[dict[str, Any], float]] = {}
        self._processes = 0
        self._phases_left: list[str] = []
        self.outcome = Outcome()

    def run(self, kills: int) -> Outcome:
        """Go through trainings until ``kills`` processes were killed, and let the last training end."""
        outcome, number = self.outcome, 0
        process = self._context.Process(target=prepare)
        process.start()
        process.join()
        while outcome.kills < kills and not outcome.problems:
            training = self._trainings[number % len(self._trainings)]
            expected, reference_seconds = self._reference(training)
            begun = time.perf_counter()
            folder = self._folder / f"training-{number}"
            folder.mkdir()
            self._kill_until_it_ends(training, folder, kills, horizon=0.35 * reference_seconds)
            if not outcome.problems:
                self._compare(training, folder, expected)
                shutil.rmtree(folder)
            outcome.seconds += time.perf_counter() - begun
            number += 1
        return outcome

    def _reference(self, training: Training) -> tuple[dict[str, Any], float]:
        """Train without a kill, once for each training."""
        if training.name not in self._references:
            folder = self._folder / f"reference-{len(self._references)}"
            training.write_data(folder)
            process, ledger = self._start(training, folder, folder)
            _await_beginning(process, ledger)
            begun = time.perf_counter()
            process.join()
            seconds = time.perf_counter() - begun
            self.outcome.reference_seconds += seconds
            if process.exitcode != 0:
                raise RuntimeError(f"the training that was not killed failed: {_error(folder)}")
            self._references[training.name] = json.loads((folder / RESULT).read_text()), seconds
        return self._references[training.name]

    def _start(self, training: Training, data: Path, folder: Path) -> tuple[BaseProcess, Ledger]:
        path = folder / f"ledger-{self._processes}"
        ledger = Ledger(path, create=True)
        process = self._context.Process(target=run, args=(training, data, folder, path, self._processes))
        self._processes += 1
        process.start()
        return process, ledger

    def _kill_until_it_ends(self, training: Training, folder: Path, kills: int, *, horizon: float) -> None:
        outcome, floor, without_passes = self.outcome, -1, 0
        data = self._folder / f"reference-{list(self._references).index(training.name)}"
        while not outcome.problems:
            process, ledger = self._start(training, data, folder)
            if outcome.kills < kills:
                if (folder / PASSES / MANIFEST).exists():
                    aimed = self._random.random() < 0.5
                else:
                    without_passes += 1
                    aimed = without_passes > _KILLS_WITHOUT_PASSES
                self._wait(process, ledger, horizon, aimed=aimed)
                if self._random.random() < 0.25 and process.exitcode is None:
                    outcome.readers_beside_the_writer += self._commit(folder) is not None
                process.kill()
            process.join()
            if process.exitcode == 0:
                outcome.commits_made += 1 + max(floor, ledger.done)
                return
            if process.exitcode != -signal.SIGKILL:
                outcome.problems.append(f"a process ended with status {process.exitcode}: {_error(folder)}")
                return
            outcome.kills += 1
            floor = self._look(folder, ledger, floor)
            self._notify(outcome)

    def _wait(self, process: BaseProcess, ledger: Ledger, horizon: float, *, aimed: bool) -> None:
        """Return at the moment of the kill, or when the process has ended.

        Times count from where the process has imported all it needs, which may take longer than the training.
        """
        if self._random.random() < 0.05:
            process.join(self._random.uniform(0.0, horizon))
            return
        _await_beginning(process, ledger)
        if not aimed:
            process.join(self._random.uniform(0.0, horizon))
            return
        if not self._phases_left:
            self._phases_left = self._random.sample(list(_SPAN_SECONDS), len(_SPAN_SECONDS))
        phase, late = self._phases_left.pop(), time.perf_counter() + _LATE_HORIZONS * horizon
        times = 1 if phase in _SELDOM else self._random.randint(1, 4)
        while ledger.times(phase) < times and process.exitcode is None and time.perf_counter() < late:
            time.sleep(_POLL_SECONDS)
        if ledger.times(phase) < times:
            self._phases_left.append(phase)  # not met: the next kill is aimed at it
        process.join(self._random.uniform(0.0, _SPAN_SECONDS[phase]))

    def _look(self, folder: Path, ledger: Ledger, floor: int) -> int:
        """Look at what a killed process left; returns the commit that the store stands at, -1 for none."""
        outcome = self.outcome
        stands = self._commit(folder)
        number = -1 if stands is None else stands
        phase = ledger.phase
        if number < 0 and phase not in {"beginning", "extraction"}:
            phase = BEFORE_FIRST_COMMIT
        outcome.kills_by_phase[phase] += 1
        if number < max(floor, ledger.done):
            outcome.commits_lost += 1
            outcome.problems.append(f"commit {max(floor, ledger.done)} was durable, and the store stands at {number}")
        if number > max(floor, ledger.begun):
            outcome.problems.append(f"commit {ledger.begun} was the last one begun, and the store stands at {number}")
        if stands is not None:
            found = verify(folder / STORE)["problems"]
            outcome.stores_failing_verification += bool(found)
            outcome.problems += found
        return number

    def _commit(self, folder: Path) -> int | None:
        """Open the store for reading and return the commit it stands at: -1 for none, None where there is no store."""
        try:
            commit = info(folder / STORE)["commit"]
        except StoreMissingError:
            return None
        except StoreError as error:
            self.outcome.problems.append(f"the store does not open: {error}")
            return None
        return -1 if commit is None else int(commit["id"])

    def _compare(self, training: Training, folder: Path, expected: dict[str, Any]) -> None:
        """Compare digests of all that a training ended with."""
        found = json.loads((folder / RESULT).read_text())
        self.outcome.trainings += 1
        for name in expected.keys() | found.keys():
            if expected.get(name) != found.get(name):
                self.outcome.bits_equal = False
                self.outcome.problems.append(f"{training.name}: {name} has other bits than without a kill")


def _await_beginning(process: BaseProcess, ledger: Ledger) -> None:
    while ledger.phase == PHASES[0] and process.exitcode is None:
        time.sleep(_POLL_SECONDS)


def _start_server() -> None:
    """Start the fork server that imports everything once.

    A killed child leaves a semaphore of numba's behind; the process that deletes such things would say so at the end.
    """
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker"
    multiprocessing.get_context("forkserver").set_forkserver_preload(["benchmarks.warm"])
    multiprocessing.forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONWARNINGS"]
    else:
        os.environ["PYTHONWARNINGS"] = before


def _error(folder: Path) -> str:
    path = folder / ERROR
    return path.read_text().strip() if path.exists() else "no traceback"
