"""Kinds of death, their selection, and their distribution over processes."""

from __future__ import annotations

import os
import pickle
import random
import signal
import threading
import traceback
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tests.crash.image import Camera, tear
from tests.crash.outcome import EnoughError
from tests.crash.points import Point, unwatch, watch

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.crash.child import Ended, Teller
    from tests.crash.killer import Killer
    from tests.crash.outcome import Outcome

    Case = Callable[[Killer], None]

_POINTS_IN_LINE = 20


class Death(Protocol):
    """A kind of death; its text precedes messages about its result."""

    def armed(self, folder: Path, rank: int, teller: Teller) -> AbstractContextManager[Any]:
        """In the child: set up the death and run."""

    def count(self, ended: Ended, counts: Counter[str]) -> None:
        """Count the attempt."""


@dataclass(frozen=True, slots=True)
class Count:
    """No death: reports the points of a run, [rank, phase, call, after] each, in order within a rank."""

    @contextmanager
    def armed(self, folder: Path, rank: int, teller: Teller) -> Iterator[None]:
        """Report all points at the end, few per line: lines of several processes must not mix."""
        seen: list[tuple[Any, ...]] = []
        watch(lambda _, point: seen.append((rank, teller.phase, *point)))
        yield
        unwatch()
        for low in range(0, len(seen), _POINTS_IN_LINE):
            teller.say("points", seen[low : low + _POINTS_IN_LINE])

    def count(self, ended: Ended, counts: Counter[str]) -> None:
        """Count nothing."""


@dataclass(frozen=True, slots=True)
class At:
    """A kill at a point of a run: of the current process, or of its whole group."""

    number: int
    point: Point | None = None  # the point, if it is known
    rank: int = 0
    everyone: bool = False

    def __str__(self) -> str:
        if self.point is None:
            return f"at point {self.number}"
        whose = f" of {'all at ' * self.everyone}rank {self.rank}" if self.everyone or self.rank else ""
        return f"a kill{whose} {'after' if self.point.after else 'before'} {self.point.call} (point {self.number})"

    @contextmanager
    def armed(self, folder: Path, rank: int, teller: Teller) -> Iterator[None]:
        """Watch for the point and die there."""
        if rank == self.rank:
            watch(lambda seen, _: die(everyone=self.everyone) if seen == self.number else None)
        yield

    def count(self, ended: Ended, counts: Counter[str]) -> None:
        counts["points_tried"] += self.point is not None


@dataclass(frozen=True, slots=True)
class After:
    """A kill after a share of the duration of a run: of one process, or of all."""

    share: float
    seconds: float
    victim: int | None = None

    def __str__(self) -> str:
        return f"a kill after {self.share:.0%} of a run"

    @contextmanager
    def armed(self, folder: Path, rank: int, teller: Teller) -> Iterator[None]:
        """Do nothing: the parent kills."""
        yield

    def count(self, ended: Ended, counts: Counter[str]) -> None:
        counts["instants"] += 1


@dataclass(frozen=True, slots=True)
class Moment:
    """A kill by the parent at a moment of its choice; counts messages received meanwhile under another name."""

    said: str
    counted: str
    where: str = ""

    def __str__(self) -> str:
        return f"a kill{self.where}"

    def armed(self, folder: Path, rank: int, teller: Teller) -> AbstractContextManager[Any]:
        """Do nothing: the parent kills."""
        raise NotImplementedError

    def count(self, ended: Ended, counts: Counter[str]) -> None:
        counts[self.counted] += len(ended.of(self.said))


@dataclass(frozen=True, slots=True)
class Torn:
    """A kill in the middle of the write that ends at a point, or of the next one."""

    number: int
    point: Point
    seed: float

    def __str__(self) -> str:
        return f"a kill in the middle of {self.point.call} (point {self.number})"

    @contextmanager
    def armed(self, folder: Path, rank: int, teller: Teller) -> Iterator[None]:
        """Watch for the write, revert some of it when it has ended, and die."""
        camera, victims = Camera(folder), list[int]()

        def reached(seen: int, point: Point) -> None:
            mine = threading.get_ident()
            if victims and victims[0] == mine and point.after:
                before = camera.image
                tear(folder, before, camera.take(), random.Random(self.seed))
                die()
            elif not victims and seen >= self.number - 1 and not point.after and point._replace(after=True).tearable:
                # Only from the beginning of a write to its end: earlier writes of its thread may be durable.
                victims.append(mine)  # other threads continue meanwhile, and also count points
                if victims[0] == mine:
                    camera.take()

        watch(reached)
        yield

    def count(self, ended: Ended, counts: Counter[str]) -> None:
        counts["torn"] += 1


def die(*, everyone: bool = False) -> None:
    if everyone:
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def spread(points: Sequence[Any], most: int, generator: random.Random) -> list[int]:
    """Return numbers of at most ``most`` points, evenly over the kinds of points, in random order."""
    kinds: dict[Any, list[int]] = defaultdict(list)
    for number, point in enumerate(points):
        kinds[point].append(number)
    ranked = []
    for numbers in kinds.values():
        generator.shuffle(numbers)
        ranked += [(rank, generator.random(), number) for rank, number in enumerate(numbers)]
    return [number for _, _, number in sorted(ranked)[:most]]


def deal(cases: Sequence[Case], killer: Killer, jobs: int, notify: Callable[[int], None]) -> None:
    """Run ``cases`` in ``jobs`` forks of this process, and add their results to the killer's outcome.

    Each takes every ``jobs``-th case, with a separate folder and separate random numbers, and stops when any of them
    has too many problems. ``notify`` is called with the folders examined since its last call. The caller must have one
    thread.
    """
    enough = killer.folder / "enough"
    reading, writing = os.pipe()
    workers = {}
    for number in range(jobs):
        process = os.fork()
        if process == 0:
            os.close(reading)
            _work(cases[number::jobs], killer.worker(number, lambda: os.write(writing, b".")), enough)
        workers[process] = killer.folder / f"worker-{number}.outcome"
    os.close(writing)
    while told := os.read(reading, 1 << 16):
        notify(len(told))
    os.close(reading)
    for process, file in workers.items():
        _, status = os.waitpid(process, 0)
        if status:
            raise RuntimeError(f"worker {process} ended with status {status}: see its output")
        found: Outcome = pickle.loads(file.read_bytes())
        killer.outcome.add(found)
        file.unlink()
    enough.unlink(missing_ok=True)


def _work(cases: Sequence[Case], killer: Killer, enough: Path) -> None:
    status = 1
    try:
        try:
            for case in cases:
                if enough.exists():
                    break
                case(killer)
        except EnoughError:
            enough.touch()
        killer.folder.with_suffix(".outcome").write_bytes(pickle.dumps(killer.outcome))
        status = 0
    except BaseException:  # no caller would print it
        traceback.print_exc()
    finally:
        os._exit(status)
