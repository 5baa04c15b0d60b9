"""Ways to die, which of them are tried, and by which process."""

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
    """A way to die; as text it is what stands before a sentence about what it left."""

    def armed(self, folder: Path, rank: int, teller: Teller) -> AbstractContextManager[Any]:
        """In the child: die within, when it is time."""

    def count(self, ended: Ended, counts: Counter[str]) -> None:
        """Count that it was tried."""


@dataclass(frozen=True, slots=True)
class Count:
    """No death: tells the points of a run, [rank, phase, call, after] each, those of a rank in their order."""

    @contextmanager
    def armed(self, folder: Path, rank: int, teller: Teller) -> Iterator[None]:
        """Tell all points at the end, few in a line: lines of several processes must not mix."""
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
    """A kill at a point of a run: of the process that is there, or of all of its group."""

    number: int
    point: Point | None = None
    """Which one it is, where that is known."""
    rank: int = 0
    everyone: bool = False

    def __str__(self) -> str:
        if self.point is None:
            return f"at point {self.number}"
        whose = f" of {'all at ' * self.everyone}rank {self.rank}" if self.everyone or self.rank else ""
        return f"a kill{whose} {'after' if self.point.after else 'before'} {self.point.call} (point {self.number})"

    @contextmanager
    def armed(self, folder: Path, rank: int, teller: Teller) -> Iterator[None]:
        """Watch, and die there."""
        if rank == self.rank:
            watch(lambda seen, _: die(everyone=self.everyone) if seen == self.number else None)
        yield

    def count(self, ended: Ended, counts: Counter[str]) -> None:
        """Count the points that are known."""
        counts["points_tried"] += self.point is not None


@dataclass(frozen=True, slots=True)
class After:
    """A kill after a share of the time that a run takes: of one process, or of all."""

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
        """Count it."""
        counts["instants"] += 1


@dataclass(frozen=True, slots=True)
class Moment:
    """A kill by the parent, which decides when; counts what was said meanwhile, by another name."""

    said: str
    counted: str
    where: str = ""

    def __str__(self) -> str:
        return f"a kill{self.where}"

    def armed(self, folder: Path, rank: int, teller: Teller) -> AbstractContextManager[Any]:
        """Do nothing: the parent kills."""
        raise NotImplementedError

    def count(self, ended: Ended, counts: Counter[str]) -> None:
        """Count what was said."""
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
        """Watch for the write, take some of it back when it has ended, and die."""
        camera, victims = Camera(folder), list[int]()

        def reached(seen: int, point: Point) -> None:
            mine = threading.get_ident()
            if victims and victims[0] == mine and point.after:
                before = camera.image
                tear(folder, before, camera.take(), random.Random(self.seed))
                die()
            elif not victims and seen >= self.number - 1 and not point.after and point._replace(after=True).tearable:
                # Only from the begin of a write to its end: what its thread did long before may be durable.
                victims.append(mine)  # other threads go on meanwhile, and count points too
                if victims[0] == mine:
                    camera.take()

        watch(reached)
        yield

    def count(self, ended: Ended, counts: Counter[str]) -> None:
        """Count it."""
        counts["torn"] += 1


def die(*, everyone: bool = False) -> None:
    """End this process, or all of its group, by SIGKILL."""
    if everyone:
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def spread(points: Sequence[Any], most: int, generator: random.Random) -> list[int]:
    """Return numbers of at most ``most`` points, of every kind of point as evenly as can be; in random order."""
    kinds: dict[Any, list[int]] = defaultdict(list)
    for number, point in enumerate(points):
        kinds[point].append(number)
    ranked = []
    for numbers in kinds.values():
        generator.shuffle(numbers)
        ranked += [(rank, generator.random(), number) for rank, number in enumerate(numbers)]
    return [number for _, _, number in sorted(ranked)[:most]]


def deal(cases: Sequence[Case], killer: Killer, jobs: int, notify: Callable[[int], None]) -> None:
    """Let ``jobs`` forks of this process go through ``cases``, and add what they find to the killer's outcome.

    Every one takes each ``jobs``-th case, in a folder and with random numbers of its own, and no further one when
    enough is wrong with those of any. ``notify`` is called with the folders examined since its last call. The caller
    must have one thread.
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
    """Go through cases until ``enough`` is there, leave the outcome beside the killer's folder, and end the process."""
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
    except BaseException:  # nobody above this process would show it
        traceback.print_exc()
    finally:
        os._exit(status)
