"""Kills the workload with SIGKILL at its points, at random instants and in the middle of writes, and fills its disk."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.store_child import run_in_child
from benchmarks.store_examination import FAILING, KINDS, examine
from benchmarks.store_image import Camera, tear
from benchmarks.store_points import Point, unwatch, watch
from benchmarks.store_workload import go_on, prepare

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.store_child import Ended, Teller
    from benchmarks.store_loss import Loss
    from benchmarks.store_recording import Recording
    from tiercache.store import StoreFullError

_EARLY_POINTS = 60
"""A process that goes on after a kill has opened the store by then."""
MOST_PROBLEMS = 5
"""More say nothing new."""


class EnoughError(Exception):
    """So much is wrong that looking further is idle."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What so many deaths came to."""

    points: int = 0
    """Of one run of the workload."""
    points_tried: int = 0
    """Of them, those at which a process was killed."""
    kills: int = 0
    """Processes that ended by SIGKILL: at points, at instants, in the middle of writes, and when they went on."""
    instants: int = 0
    """Kills at a random time."""
    torn: int = 0
    """Kills in the middle of a write."""
    second_kills: int = 0
    """Kills of a process that went on after a kill, while it opened the store or soon after."""
    replays: int = 0
    """Losses of power that were replayed."""
    full_disks: int = 0
    """Points from which on the disk was full, with a sentence that names the bytes."""
    wrong: Counter[str] = field(default_factory=Counter)
    """Stores by what was wrong with them."""
    stood: Counter[int] = field(default_factory=Counter)
    """Stores by the commit at which they were found; -1: none yet."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    """A sentence for each thing that went wrong."""

    def add(self, other: Outcome) -> None:
        """Add what another came to; of the same run of the workload."""
        for name in ("points_tried", "kills", "instants", "torn", "second_kills", "replays", "full_disks"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.wrong.update(other.wrong)
        self.stood.update(other.stood)
        self.problems += other.problems

    def figures(self) -> dict[str, Any]:
        """Return one flat record."""
        return {
            "points": self.points,
            "points_tried": self.points_tried,
            "kills": self.kills,
            "instants": self.instants,
            "torn": self.torn,
            "second_kills": self.second_kills,
            "replays": self.replays,
            "full_disks": self.full_disks,
            **{kind: self.wrong[kind] for kind in KINDS},
            "commits_found": sum(number >= 0 for number in self.stood),
            "seconds": round(self.seconds, 2),
        }


class Killer:
    """One store after another in ``folder``; the process must have one thread and have opened no store."""

    def __init__(self, folder: Path, engine: str, *, seed: int = 0, most_problems: int = MOST_PROBLEMS) -> None:
        """``most_problems`` is how many are enough to stop."""
        with contextlib.suppress(ModuleNotFoundError):  # an engine that is none is a sentence of every child
            for module in (f"tiercache.store.{engine}_engine", "numpy.ma"):  # once, and not in every child
                importlib.import_module(module)
        prepare()
        self.outcome = Outcome()
        self.folder, self._engine, self._seed, self._most_problems = folder, engine, seed, most_problems
        self._random = random.Random(seed)
        self._notify: Callable[[], object] = bool
        self._stores = 0
        self._run_seconds = 0.0

    def worker(self, number: int, notify: Callable[[], object]) -> Killer:
        """Return a killer of the same runs in a folder of its own; ``notify`` is called after each store."""
        folder, seed = self.folder / f"worker-{number}", self._seed + 1 + number
        mine = Killer(folder, self._engine, seed=seed, most_problems=self._most_problems)
        mine.folder.mkdir()
        mine._notify, mine._run_seconds = notify, self._run_seconds
        return mine

    def points(self) -> list[Point]:
        """Run the workload once, without a kill, and return its points; what it leaves must be right."""
        begun = time.perf_counter()
        folder = self._fresh()

        def work(teller: Teller) -> None:
            seen: list[Point] = []
            watch(lambda _, point: seen.append(point))
            go_on(folder / "store.tc", self._engine, teller.note)
            unwatch()
            teller.say("points", seen)

        ended = run_in_child(work)
        self._run_seconds = time.perf_counter() - begun
        self._examine(folder, "a run without a kill", ended)
        points = [Point(*point) for point in ended.said.get("points", ())]
        self.outcome.points = len(points)
        return points

    def kill_at(self, number: int, point: Point) -> None:
        """Kill a run at its point ``number``."""

        def reached(seen: int, _: Point) -> None:
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

        self.outcome.points_tried += 1
        self._kill(f"a kill {'after' if point.after else 'before'} {point.call} (point {number})", reached)

    def tear_at(self, number: int, point: Point) -> None:
        """Kill a run in the middle of the write that ends at point ``number``, or of the next one."""
        folder, seed = self._fresh(), self._random.random()
        camera, victims = Camera(folder), list[int]()

        def reached(seen: int, point: Point) -> None:
            mine = threading.get_ident()
            if victims and victims[0] == mine and point.after:
                before = camera.image
                tear(folder, before, camera.take(), random.Random(seed))
                os.kill(os.getpid(), signal.SIGKILL)
            elif not victims and seen >= number - 1 and not point.after and point._replace(after=True).tearable:
                # Only from the begin of a write to its end: what its thread did long before may be durable.
                victims.append(mine)  # other threads go on meanwhile, and count points too
                if victims[0] == mine:
                    camera.take()

        self.outcome.torn += 1
        self._kill(f"a kill in the middle of {point.call} (point {number})", reached, folder=folder)

    def kill_after(self, share: float) -> None:
        """Kill a run after a share of the time that a run takes."""
        self.outcome.instants += 1
        self._kill(f"a kill after {share:.0%} of a run", None, seconds=share * self._run_seconds)

    def fill_at(self, number: int, point: Point) -> None:
        """Let no file grow beyond some length from point ``number`` on, until the store has said so."""
        folder, generator = self._fresh(), random.Random(self._random.random())
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)

        def reached(seen: int, _: Point) -> None:
            if seen == number:
                sizes = [file.size for file in Camera(folder).take().files.values()]
                most = generator.choice([0, *sizes]) // 512 * 512
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))

        def work(teller: Teller) -> None:
            def relieve(error: StoreFullError) -> bool:
                unwatch()
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
                teller.say("full", [str(error), error.needed_bytes])
                return generator.random() < 0.5

            watch(reached)
            go_on(folder / "store.tc", self._engine, teller.note, relieve)

        ended = run_in_child(work)
        where = f"a disk that was full from {point.call} on (point {number})"
        if "full" in ended.said:
            self.outcome.full_disks += 1
            sentence, needed = ended.said["full"]
            if needed < 1 or "\n" in sentence or f"{needed:,} more bytes" not in sentence:
                self._wrong(FAILING, f"{where}: it says {sentence!r}")
        self._examine(folder, where, ended)

    def lose(self, loss: Loss, recording: Recording) -> None:
        """Build what a loss of power leaves of a recorded run, and examine it."""
        folder, moment = self.folder / f"{self._stores}", recording.moments[loss.moment]
        self._stores += 1
        loss.build(recording, folder)
        self.outcome.replays += 1
        self.examine(folder, f"{loss} after {moment.call}", begun=moment.begun, done=moment.done)

    # -- inside ------------------------------------------------------------------------------------------

    def _kill(
        self,
        where: str,
        reached: Callable[[int, Point], None] | None,
        *,
        folder: Path | None = None,
        seconds: float | None = None,
    ) -> None:
        folder = folder or self._fresh()

        def work(teller: Teller) -> None:
            if reached is not None:
                watch(reached)
            go_on(folder / "store.tc", self._engine, teller.note)

        runs = [run_in_child(work, kill_after=seconds)]
        if runs[0].killed and self._random.random() < 0.25:
            due = self._random.randrange(_EARLY_POINTS)

            def again(seen: int, _: Point) -> None:
                if seen == due:
                    os.kill(os.getpid(), signal.SIGKILL)

            def resume(teller: Teller) -> None:
                watch(again)
                go_on(folder / "store.tc", self._engine, teller.note)

            where += f", and again at point {due}"
            runs.append(run_in_child(resume))
            self.outcome.second_kills += runs[1].killed
        self.outcome.kills += sum(run.killed for run in runs)
        self._examine(folder, where, *runs)

    def _examine(self, folder: Path, where: str, *runs: Ended) -> None:
        """Examine what runs left, count it, and take it away if it is right."""
        for run in runs:
            if run.failure:
                self._wrong(FAILING, f"{where}: {run.failure}")
        self.examine(folder, where, begun=max(run.begun for run in runs), done=max(run.done for run in runs))

    def examine(self, folder: Path, where: str, *, begun: int, done: int) -> None:
        """Examine the store in ``folder`` in a child, count what is wrong, and take it away if it is right."""
        known = len(self.outcome.problems)
        store = folder / "store.tc"
        ended = run_in_child(lambda teller: examine(store, self._engine, teller, begun=begun, done=done))
        if ended.failure:
            self._wrong(FAILING, f"{where}: {ended.failure}")
        for kind, sentence in ended.said.get("wrong", ()):
            self._wrong(kind, f"{where}: {sentence}")
        if ended.said.get("stands") is not None:
            self.outcome.stood[ended.said["stands"]] += 1
        if len(self.outcome.problems) == known:
            shutil.rmtree(folder)
        self._notify()

    def _wrong(self, kind: str, sentence: str) -> None:
        self.outcome.wrong[kind] += 1
        self.outcome.problems.append(sentence)
        if len(self.outcome.problems) >= self._most_problems:
            raise EnoughError

    def _fresh(self) -> Path:
        folder = self.folder / f"{self._stores}"
        folder.mkdir()
        self._stores += 1
        return folder


def spread(points: list[Point], most: int, generator: random.Random) -> list[int]:
    """Return numbers of at most ``most`` points, of every kind of point as evenly as can be; in random order."""
    kinds: dict[Point, list[int]] = defaultdict(list)
    for number, point in enumerate(points):
        kinds[point].append(number)
    ranked = []
    for numbers in kinds.values():
        generator.shuffle(numbers)
        ranked += [(rank, generator.random(), number) for rank, number in enumerate(numbers)]
    return [number for _, _, number in sorted(ranked)[:most]]
