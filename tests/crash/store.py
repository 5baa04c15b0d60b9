"""Kills a store's process at every point, cuts its power and fills its disk, and checks the remains each time.

python -m tests.crash store [--engine lmdb] [--points N] [--torn N] [--instants N] [--replays N] [--full N]
[--problems N] [--quick] [--json FILE] [--seed N] [--folder DIR] [--jobs N]

Each time the store must open at a durable commit, or at the commit in progress; every row must have its
bits; and the workload must resume to its end, with the bits of an uninterrupted run. Otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.crash.child import Ended, Teller, run
from tests.crash.image import Camera
from tests.crash.killer import Killer
from tests.crash.loss import KINDS as LOSSES
from tests.crash.loss import Loss
from tests.crash.outcome import FAILING, KINDS, LOST, MOST_PROBLEMS, SILENT, EnoughError, Found
from tests.crash.points import Point, unwatch, watch
from tests.crash.recording import Recording, record
from tests.crash.report import add_options, progress, report, working_folder
from tests.crash.schedule import After, At, Torn, deal, spread
from tests.crash.store_steps import STEPS, go_on, prepare, problems, stands
from tiercache.store import Store, StoreError, StoreMissingError
from tiercache.store.verification import Verification

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.crash.schedule import Case, Death
    from tiercache.store import StoreFullError

PACKAGES = ("tiercache", "numpy", "lmdb", "zarr")
QUICK = {"points": 64, "torn": 12, "instants": 10, "replays": 30, "full": 15}
"""More points than there are kinds of calls, each before and after, which `spread` takes evenly."""
_EARLY_POINTS = 60  # a resumed process has opened the store by this point
_AGAIN = 0.25  # the share of resumed processes that are killed too


class StoreWorkload:
    """The steps of ``store_steps`` on one engine."""

    def __init__(self, engine: str) -> None:
        with contextlib.suppress(ModuleNotFoundError):  # an unknown engine is an error in every child
            for module in (f"tiercache.store.engines.{engine}_engine", "numpy.ma"):  # once, instead of in every child
                importlib.import_module(module)
        prepare()
        self.engine = engine

    def begin(self, folder: Path) -> None:
        """Leave the folder empty."""

    def run(self, folder: Path, death: Death | None) -> Ended:
        def work(rank: int, teller: Teller) -> None:
            with death.armed(folder, rank, teller) if death else contextlib.nullcontext() as relieve:
                go_on(folder / "store.tc", self.engine, teller.note, relieve)

        return run(work, kill_after=death.seconds if isinstance(death, After) else None)

    def again(self, generator: random.Random, runs: list[Ended]) -> At | None:
        """Kill some resumed processes, while they open the store or soon after."""
        return At(generator.randrange(_EARLY_POINTS)) if len(runs) == 1 and generator.random() < _AGAIN else None

    def look(self, folder: Path, runs: list[Ended], *, last: bool) -> Found:
        """Open it for reading and check every row, in a child, because damage may kill the process."""
        ended = run(lambda _, teller: self._look(folder / "store.tc", teller))
        found = Found(wrong=[(kind, sentence) for kind, sentence in ended.of("wrong")])
        for stood in ended.of("stands"):
            found.stands = stood
            begun, done = (max([-1, *(value for one in runs for value in one.of(what))]) for what in ("begun", "done"))
            if not done <= stood <= begun:
                found.wrong.append((LOST, f"commit {done} was done and {begun} begun, and the store is at {stood}"))
            if last and stood != len(STEPS) - 1:
                sentence = f"the workload ran to commit {len(STEPS) - 1} and the store is at {stood}"
                found.wrong.append((LOST, sentence))
        if ended.killed or ended.failure:
            found.wrong.append((FAILING, ended.failure or "the look at it was killed"))
        return found

    def _look(self, path: Path, teller: Teller) -> None:
        try:
            with Store.open(path, engine=self.engine, mode="r") as store:
                teller.say("stands", stands(store))
                if store.commit is not None:
                    for sentence in problems(store):
                        teller.say("wrong", (SILENT, sentence))
                    with contextlib.redirect_stdout(io.StringIO()):
                        for sentence in Verification(store).run()["problems"]:
                            teller.say("wrong", (FAILING, sentence))
        except StoreMissingError:
            teller.say("stands", -1)
        except StoreError as error:
            teller.say("wrong", (FAILING, f"the store does not open: {type(error).__name__}: {error}"))


@dataclass(frozen=True, slots=True)
class Full:
    """A disk that is full from a point on: no file grows beyond some length until the store has raised an error."""

    number: int
    point: Point
    seed: float

    def __str__(self) -> str:
        return f"a disk that was full from {self.point.call} on (point {self.number})"

    @contextmanager
    def armed(self, folder: Path, rank: int, teller: Teller) -> Iterator[Callable[[StoreFullError], bool]]:
        """Set the limit at the point; the function that frees space returns True if the store must be reopened."""
        generator, limits = random.Random(self.seed), resource.getrlimit(resource.RLIMIT_FSIZE)

        def reached(seen: int, _: Point) -> None:
            if seen == self.number:
                sizes = [file.size for file in Camera(folder).take().files.values()]
                head = folder / "store.tc" / "HEAD"  # overwritten in place, which needs no space
                least = head.stat().st_size if head.exists() else 0
                most = max(least, generator.choice([0, *sizes]) // 512 * 512)
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))

        def relieve(error: StoreFullError) -> bool:
            unwatch()
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            teller.say("full", [str(error), error.needed_bytes])
            sentence, needed = str(error), error.needed_bytes
            if needed < 1 or "\n" in sentence or f"{needed:,} more bytes" not in sentence:
                teller.say("error", f"it says {sentence!r}")
            return generator.random() < 0.5

        watch(reached)
        yield relieve

    def count(self, ended: Ended, counts: Counter[str]) -> None:
        counts["full_disks"] += bool(ended.of("full"))


# -- cases, distributed over processes ----------------------------------------------------------------------------


def torn(killer: Killer, number: int, point: Point) -> None:
    killer.kill(Torn(number, point, killer.random.random()))


def full(killer: Killer, number: int, point: Point) -> None:
    killer.kill(Full(number, point, killer.random.random()))


def instant(killer: Killer, share: float) -> None:
    killer.kill(After(share, share * killer.run_seconds))


def lose(killer: Killer, loss: Loss, recording: Recording) -> None:
    """Build the state after a loss of power in a recorded run, and check it."""
    folder, moment = killer.fresh(), recording.moments[loss.moment]
    folder.rmdir()
    loss.build(recording, folder)
    killer.outcome.counts["replays"] += 1
    lost = Ended(signals=[signal.SIGKILL], said=[["begun", moment.begun], ["done", moment.done]])
    killer.examine(folder, f"{loss} after {moment.call}", [lost])


def _cases(killer: Killer, options: argparse.Namespace, generator: random.Random) -> list[Case]:
    """Select the requested number of kills, torn writes, losses of power and full disks."""
    points = [Point(call, after) for _, _, call, after in killer.points()]
    killer.outcome.counts["points"] = len(points)

    def chosen(most: int, numbers: Sequence[int]) -> list[int]:
        return [numbers[i] for i in spread([points[number] for number in numbers], most, generator)]

    every = range(len(points))
    cases: list[Case] = [partial(Killer.kill, death=At(n, points[n])) for n in chosen(options.points, every)]
    tearable = [number for number in every if points[number].tearable]
    cases += [partial(torn, number=n, point=points[n]) for n in chosen(options.torn, tearable)]
    cases += [partial(instant, share=generator.random()) for _ in range(options.instants)]
    cases += [partial(full, number=n, point=points[n]) for n in chosen(options.full, every)]
    if options.replays:
        recording = _recording(killer.folder / "recorded", options.engine)
        moments = list(range(len(recording.moments)))
        for i in range(options.replays):
            if i % len(moments) == 0:
                generator.shuffle(moments)
            loss = Loss(kind=LOSSES[i % len(LOSSES)], moment=moments[i % len(moments)], seed=i)
            cases.append(partial(lose, loss=loss, recording=recording))
    return cases


def _recording(folder: Path, engine: str) -> Recording:
    """Record a run in a child, because this process must not open a store."""
    folder.mkdir()
    file = folder.with_suffix(".pickle")
    ended = run(lambda _, teller: file.write_bytes(pickle.dumps(record(folder, engine, teller))) and None)
    if ended.failure:
        raise RuntimeError(f"the run that was recorded failed: {ended.failure}")
    recording: Recording = pickle.loads(file.read_bytes())
    shutil.rmtree(folder)
    file.unlink()
    return recording


# -- the command --------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    folder, begun = working_folder(options, "store"), time.perf_counter()
    killer = Killer(folder, StoreWorkload(options.engine), seed=options.seed, most_problems=options.problems)
    with contextlib.suppress(EnoughError):
        deal(_cases(killer, options, random.Random(options.seed)), killer, options.jobs, progress())
    outcome = killer.outcome
    names = ("points", "points_tried", "kills", "instants", "torn", "second_kills", "replays", "full_disks")
    figures: dict[str, Any] = {
        "engine": options.engine,
        **{name: outcome.counts[name] for name in names},
        **{kind: outcome.wrong[kind] for kind in KINDS},
        "commits_found": sum(number >= 0 for number in outcome.stood),
        "seconds": round(time.perf_counter() - begun, 2),
    }
    return report("store", options, arguments, figures, outcome, folder, PACKAGES)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.crash store", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", default="lmdb", help="by the name that Store.open knows it by (lmdb)")
    parser.add_argument("--points", type=int, default=2000, help="points at which to kill (2000)")
    parser.add_argument("--torn", type=int, default=500, help="writes to tear (500)")
    parser.add_argument("--instants", type=int, default=500, help="kills at a random time (500)")
    parser.add_argument("--replays", type=int, default=3000, help="losses of power (3000)")
    parser.add_argument("--full", type=int, default=300, help="points from which on the disk is full (300)")
    parser.add_argument("--problems", type=int, default=MOST_PROBLEMS, help="after how many of one worker all stop (5)")
    parser.add_argument("--jobs", type=int, default=_cores(), help="processes that kill (as many as there are cores)")
    add_options(parser, "few of each: " + ", ".join(f"{n} {k}" for k, n in QUICK.items()))
    options = parser.parse_args(arguments)
    if options.engine == "memory":
        parser.error("nothing that the memory engine holds outlives its process, so there is nothing to look at")
    if options.quick:
        vars(options).update(QUICK)
    return options


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
