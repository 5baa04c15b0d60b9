"""Kills real trainings with SIGKILL at random moments and compares their results with uninterrupted trainings.

python -m tests.crash training [--kills 200] [--quick] [--json FILE] [--seed N] [--folder DIR]

After each kill the store is opened for reading and verified, must be at a commit no older than the last durable
one, and the next process resumes. The exit status is 1 if anything was lost or differs.
"""

import argparse
import json
import multiprocessing
import multiprocessing.forkserver
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.crash.child import Ended
from tests.crash.killer import Killer
from tests.crash.ledger import PHASES, Ledger
from tests.crash.outcome import FAILING, LOST, SILENT, EnoughError, Found
from tests.crash.report import add_options, report, working_folder
from tests.crash.schedule import Moment
from tests.crash.training import ERROR, PASSES, RESULT, STORE, TRAININGS, Training, prepare, run
from tiercache.data.manifest import MANIFEST
from tiercache.store.inspect import info, verify
from tiercache.store.store_errors import StoreError, StoreMissingError

PACKAGES = ("tiercache", "torch", "numpy", "numba", "lmdb", "pyarrow")
BEFORE_FIRST_COMMIT = "before the first commit"
_SPAN_SECONDS = {
    "opening": 0.2, "training": 0.1, "commit inside": 0.03, "switch": 0.02, "end": 0.05, "dump": 0.04, "publish": 0.01,
}  # fmt: skip
"""The time within which a kill follows the beginning of its phase: about as long as the phase lasts."""
_SELDOM = {"opening", "commit inside", "end"}
"""Phases that a process may enter only once; it enters the others repeatedly."""
_LATE_HORIZONS = 30
"""The multiple of the horizon after which a process is killed anywhere: it hangs, or the machine is very slow."""
_POLL_SECONDS = 0.0005
_KILLS_WITHOUT_PASSES = 2
"""Early kills of a training, after a random time; if extraction outlasts them, later kills aim at later phases."""


RANDOM = Moment("reader", "readers_beside_the_writer")  # a kill at a random moment
AIMED = replace(RANDOM, where=" in a phase")  # a kill soon after a phase begins


class TrainingWorkload:
    """Trainings in child processes of a fork server, one after another, each killed until ``kills`` are made.

    Half of the kills come after a random time. The others aim at a phase in the ledger (publishing takes
    milliseconds, and random times would rarely hit it). Each phase is a target until it was hit before any is repeated,
    so this works on slow machines too.
    """

    def __init__(self, folder: Path, kills: int, *, seed: int = 0, trainings: tuple[Training, ...] = TRAININGS) -> None:
        self._folder, self.kills_left, self._random, self._trainings = folder, kills, random.Random(seed), trainings
        self._context = multiprocessing.get_context("forkserver")
        _start_server()
        self._references: dict[str, tuple[Path, dict[str, Any], float]] = {}
        self._processes = self._begun = self._without_passes = 0
        self._phases_left: list[str] = []
        self.reference_seconds = 0.0  # seconds of the uninterrupted trainings
        process = self._context.Process(target=prepare)
        process.start()
        process.join()

    def begin(self, folder: Path) -> None:
        self._training = self._trainings[self._begun % len(self._trainings)]
        self._begun, self._without_passes = self._begun + 1, 0
        if self._training.name not in self._references:
            data = self._folder / f"reference-{len(self._references)}"
            self._training.write_data(data)
            process, ledger = self._start(data, data)
            _await_beginning(process, ledger)
            begun = time.perf_counter()
            process.join()
            seconds = time.perf_counter() - begun
            self.reference_seconds += seconds
            if process.exitcode != 0:
                raise RuntimeError(f"the training that was not killed failed: {_error(data)}")
            self._references[self._training.name] = data, json.loads((data / RESULT).read_text()), seconds

    def again(self, generator: random.Random, runs: list[Ended]) -> Moment | None:
        if self.kills_left <= 0:
            return None
        self._without_passes += 1
        return AIMED if generator.random() < 0.5 else RANDOM

    def run(self, folder: Path, death: Any) -> Ended:
        data, _, seconds = self._references[self._training.name]
        process, ledger = self._start(data, folder)
        said: list[list[Any]] = []
        if death is not None:
            extracted = (folder / PASSES / MANIFEST).exists()
            aimed = death is AIMED if extracted else self._without_passes > _KILLS_WITHOUT_PASSES
            self._wait(process, ledger, 0.35 * seconds, aimed=aimed)
            if self._random.random() < 0.25 and process.exitcode is None and self._commit(folder)[0] is not None:
                said.append(["reader", 1])
            process.kill()
        process.join()
        assert process.exitcode is not None
        self.kills_left -= process.exitcode < 0
        if process.exitcode > 0:
            said.append(["error", f"a process ended with status {process.exitcode}: {_error(folder)}"])
        said += [["phase", ledger.phase], ["begun", ledger.begun], ["done", ledger.done]]
        return Ended(signals=[max(0, -process.exitcode)], said=said)

    def look(self, folder: Path, runs: list[Ended], *, last: bool) -> Found:
        """Open the store for reading and verify it; at the end compare digests of the whole result."""
        begun, done = (max([-1, *(n for one in runs for n in one.of(what))]) for what in ("begun", "done"))
        found = Found()
        if last:
            _, expected, _ = self._references[self._training.name]
            result = json.loads((folder / RESULT).read_text())
            found.counts.update(trainings=1, commits_made=1 + done)
            for name in expected.keys() | result.keys():
                if expected.get(name) != result.get(name):
                    found.wrong.append((SILENT, f"{self._training.name}: {name} has other bits than without a kill"))
            return found
        stands, problem = self._commit(folder)
        number = found.stands = -1 if stands is None else stands
        (phase,) = runs[-1].of("phase") or [PHASES[0]]
        if number < 0 and phase not in {"beginning", "extraction"}:
            phase = BEFORE_FIRST_COMMIT
        found.counts[f"kills_in_{phase.replace(' ', '_')}"] = 1
        if problem:
            found.wrong.append((FAILING, problem))
        if number < done:
            found.wrong.append((LOST, f"commit {done} was durable, and the store is at {number}"))
        if number > begun:
            found.wrong.append((SILENT, f"commit {begun} was the last one begun, and the store is at {number}"))
        if stands is not None:
            found.wrong += [(FAILING, sentence) for sentence in verify(folder / STORE)["problems"]]
        return found

    def _start(self, data: Path, folder: Path) -> tuple[BaseProcess, Ledger]:
        path = folder / f"ledger-{self._processes}"
        ledger = Ledger(path, create=True)
        process = self._context.Process(target=run, args=(self._training, data, folder, path, self._processes))
        self._processes += 1
        process.start()
        return process, ledger

    def _wait(self, process: BaseProcess, ledger: Ledger, horizon: float, *, aimed: bool) -> None:
        """Return at the moment of the kill, or at the end. Times start after the imports, which may take longer."""
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
            self._phases_left.append(phase)  # missed: the next kill aims at it
        process.join(self._random.uniform(0.0, _SPAN_SECONDS[phase]))

    @staticmethod
    def _commit(folder: Path) -> tuple[int | None, str | None]:
        """Open the store for reading; return its commit (-1: none; None: no store) and the problems."""
        try:
            commit = info(folder / STORE)["commit"]
        except StoreMissingError:
            return None, None
        except StoreError as error:
            return None, f"the store does not open: {error}"
        return (-1 if commit is None else int(commit["id"])), None


def _await_beginning(process: BaseProcess, ledger: Ledger) -> None:
    while ledger.phase == PHASES[0] and process.exitcode is None:
        time.sleep(_POLL_SECONDS)


def _start_server() -> None:
    """Import everything once. A killed child leaves a semaphore of numba, which would be reported at the end."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker"
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.crash.warm"])
    multiprocessing.forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONWARNINGS"]
    else:
        os.environ["PYTHONWARNINGS"] = before


def _error(folder: Path) -> str:
    path = folder / ERROR
    return path.read_text().strip() if path.exists() else "no traceback"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash training", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="processes to kill (200)")
    add_options(parser, "20 kills, and trainings of half the samples and 2 epochs instead of 3")
    options = parser.parse_args(arguments)
    trainings = (
        tuple(replace(t, epochs=2, num_samples=12_288, pass_samples=2048) for t in TRAININGS)
        if options.quick
        else TRAININGS
    )
    folder, begun = working_folder(options, "training"), time.perf_counter()
    workload = TrainingWorkload(folder, 20 if options.quick else options.kills, seed=options.seed, trainings=trainings)
    killer = Killer(folder, workload, seed=options.seed, most_problems=1)
    with suppress(EnoughError):
        while workload.kills_left > 0:
            killer.kill()
    outcome, seconds = killer.outcome, time.perf_counter() - begun - workload.reference_seconds
    counts, wrong = outcome.counts, outcome.wrong
    phases = ["beginning", "extraction", BEFORE_FIRST_COMMIT, *PHASES[2:]]
    figures = {
        **{name: counts[name] for name in ("kills", "trainings", "commits_made")},
        "commits_lost": wrong[LOST],
        "stores_failing_verification": wrong[FAILING],
        "readers_beside_the_writer": counts["readers_beside_the_writer"],
        "bits_equal": not wrong[SILENT],
        "problems": len(outcome.problems),
        "seconds": round(seconds, 2),
        "seconds_per_kill": round(seconds / max(1, counts["kills"]), 3),
        "reference_seconds": round(workload.reference_seconds, 2),
        **{name: counts[name] for name in (f"kills_in_{phase.replace(' ', '_')}" for phase in phases)},
    }
    return report("training", options, arguments, figures, outcome, folder, PACKAGES)


if __name__ == "__main__":
    sys.exit(main())
