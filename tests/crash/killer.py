"""The killer: kills a workload in one fresh folder after another, and counts the outcomes."""

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tests.crash.child import Ended
from tests.crash.outcome import FAILING, MOST_PROBLEMS, EnoughError, Found, Outcome
from tests.crash.schedule import Count, Death


class Workload(Protocol):
    """The killed workload. It opens nothing in the killer's own process."""

    def begin(self, folder: Path) -> None:
        """Prepare a fresh folder for the first run."""

    def run(self, folder: Path, death: Death | None) -> Ended:
        """Run from the current state to the end, in processes that die in the given way; None: they survive."""

    def again(self, generator: random.Random, runs: list[Ended]) -> Death | None:
        """Return the death of the process that resumes after these runs; None: it survives."""

    def look(self, folder: Path, runs: list[Ended], *, last: bool) -> Found:
        """Check the result of runs without changing it; ``last``: the last run reached the end."""


class Killer:
    """Kills in one folder after another in ``folder``. For forks it must have one thread and no open store."""

    def __init__(
        self,
        folder: Path,
        workload: Workload,
        *,
        seed: int = 0,
        most_problems: int = MOST_PROBLEMS,
        notify: Callable[[], object] = bool,
    ) -> None:
        """``most_problems`` is the number at which to stop; ``notify`` is called after each folder."""
        self.outcome = Outcome()
        self.folder, self.workload, self.random = folder, workload, random.Random(seed)
        self.run_seconds = 0.0  # seconds of a run without a kill
        self._seed, self._most_problems, self._notify, self._folders = seed, most_problems, notify, 0

    def worker(self, number: int, notify: Callable[[], object]) -> "Killer":
        folder, most = self.folder / f"worker-{number}", self._most_problems
        mine = Killer(folder, self.workload, seed=self._seed + 1 + number, most_problems=most, notify=notify)
        folder.mkdir()
        mine.run_seconds = self.run_seconds
        return mine

    def points(self) -> list[Any]:
        """Run the workload without a kill, and return its points: [rank, phase, call, after]; its end must be right."""
        folder, begun = self.fresh(), time.perf_counter()
        self.workload.begin(folder)
        ended = self.workload.run(folder, Count())
        self.run_seconds = time.perf_counter() - begun
        self.examine(folder, "a run without a kill", [ended])
        return [point for some in ended.of("points") for point in some]

    def kill(self, death: Death | None = None, folder: Path | None = None) -> None:
        """Kill a workload, and again as it decides; check each time. Without a death it chooses the first one too."""
        if folder is None:
            folder = self.fresh()
        self.workload.begin(folder)
        runs: list[Ended] = []
        where, again = "", death if death is not None else self.workload.again(self.random, runs)
        while again is not None:
            where += f"{', and again ' * bool(where)}{again}"
            runs.append(self.workload.run(folder, again))
            killed = runs[-1].killed > 0
            again.count(runs[-1], self.outcome.counts)
            self.outcome.counts["kills"] += killed
            self.outcome.counts["second_kills"] += killed and len(runs) > 1
            if not killed:
                break
            again = self.workload.again(self.random, runs)
            if again is not None:
                known = len(self.outcome.problems)
                self._look(folder, where, runs)
                if len(self.outcome.problems) > known:
                    return
        self.examine(folder, where, runs)

    def examine(self, folder: Path, where: str, runs: list[Ended]) -> None:
        """Check the remains of runs, resume to the end, check again, and delete the folder if all is right."""
        known = len(self.outcome.problems)
        if not runs or runs[-1].killed:
            self._look(folder, where, runs)
            if len(self.outcome.problems) == known:
                runs.append(self.workload.run(folder, None))
        if len(self.outcome.problems) == known:
            self._look(folder, where, runs, last=True)
        if len(self.outcome.problems) == known:
            shutil.rmtree(folder)
        self._notify()

    def fresh(self) -> Path:
        folder = self.folder / f"{self._folders}"
        folder.mkdir()
        self._folders += 1
        return folder

    def _look(self, folder: Path, where: str, runs: list[Ended], *, last: bool = False) -> None:
        if runs and (failure := runs[-1].failure):
            self.wrong(FAILING, f"{where}: {failure}")
        found = self.workload.look(folder, runs, last=last)
        self.outcome.counts.update(found.counts)
        for kind, sentence in found.wrong:
            self.wrong(kind, f"{where}: {sentence}")
        if found.stands is not None:
            if not last or len(runs) == 1:
                self.outcome.stood[found.stands] += 1
            runs[-1].said += [
                ["begun", found.stands],
                ["done", found.stands],
            ]  # the state found now must also be found later

    def wrong(self, kind: str, sentence: str) -> None:
        """Note a problem; raises EnoughError at the limit."""
        self.outcome.wrong[kind] += 1
        self.outcome.problems.append(sentence)
        if len(self.outcome.problems) >= self._most_problems:
            raise EnoughError
