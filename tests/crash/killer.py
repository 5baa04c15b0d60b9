"""The killer: has a workload die, one fresh folder after another, and counts what its deaths left."""

from __future__ import annotations

import random
import shutil
import time
from typing import TYPE_CHECKING, Any, Protocol

from tests.crash.outcome import FAILING, MOST_PROBLEMS, EnoughError, Outcome
from tests.crash.schedule import Count

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.crash.child import Ended
    from tests.crash.outcome import Found
    from tests.crash.schedule import Death


class Workload(Protocol):
    """What is killed. It opens nothing in the killer's own process."""

    def begin(self, folder: Path) -> None:
        """Put what is there before the first run into a fresh folder."""

    def run(self, folder: Path, death: Death | None) -> Ended:
        """Go on from what is there to the end, in processes that die so; None: to the end."""

    def again(self, generator: random.Random, runs: list[Ended]) -> Death | None:
        """Decide how the process that goes on after these runs dies; None: it does not."""

    def look(self, folder: Path, runs: list[Ended], *, last: bool) -> Found:
        """Look at what runs left and change nothing; ``last``: the last of them came to the end."""


class Killer:
    """One folder after another in ``folder``. A killer of forks must have one thread and have opened no store."""

    def __init__(
        self,
        folder: Path,
        workload: Workload,
        *,
        seed: int = 0,
        most_problems: int = MOST_PROBLEMS,
        notify: Callable[[], object] = bool,
    ) -> None:
        """``most_problems`` is how many are enough to stop; ``notify`` is called after each folder."""
        self.outcome = Outcome()
        self.folder, self.workload, self.random = folder, workload, random.Random(seed)
        self.run_seconds = 0.0
        """Of a run without a kill."""
        self._seed, self._most_problems, self._notify, self._folders = seed, most_problems, notify, 0

    def worker(self, number: int, notify: Callable[[], object]) -> Killer:
        """Return a killer of the same workload in a folder of its own."""
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
        """Let a workload die so, and again as it says; examine what is left each time, and its end.

        Without a death the workload says the first one too.
        """
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
        """Look at what runs left, go on to the end, look again, and take the folder away if all is right."""
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
        """Return a new folder."""
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
            runs[-1].said += [["begun", found.stands], ["done", found.stands]]  # what was found must be found later

    def wrong(self, kind: str, sentence: str) -> None:
        """Note what is wrong; raises EnoughError where it is enough."""
        self.outcome.wrong[kind] += 1
        self.outcome.problems.append(sentence)
        if len(self.outcome.problems) >= self._most_problems:
            raise EnoughError
