"""Kills a store's process at every point, cuts its power and fills its disk, and looks at what is left each time.

    python -m benchmarks.store_crash [--engine lmdb] [--points N] [--torn N] [--instants N] [--replays N] [--full N]
                                     [--problems N] [--quick] [--json FILE] [--seed N] [--folder DIR] [--jobs N]

After each the store must open at a commit that was durable, or at the one that was being made; every row must have its
bits; and the workload must go on to its end, to the bits of a run without a kill. Ends with status 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import Progress
from rich.table import Table

from benchmarks.machine import console, environment
from benchmarks.store_child import run_in_child
from benchmarks.store_killer import MOST_PROBLEMS, EnoughError, Killer, spread
from benchmarks.store_loss import KINDS, Loss
from benchmarks.store_recording import Recording, record
from benchmarks.store_workers import deal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.store_child import Teller
    from benchmarks.store_workers import Case

PACKAGES = ("tiercache", "numpy", "lmdb", "zarr")
QUICK = {"points": 300, "torn": 25, "instants": 12, "replays": 40, "full": 20}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and return the exit status."""
    options = _options(arguments)
    folder = Path(tempfile.mkdtemp(prefix="tiercache-store-", dir=options.folder))
    begun = time.perf_counter()
    killer = Killer(folder, options.engine, seed=options.seed, most_problems=options.problems)
    with Progress(console=console, auto_refresh=False) as progress:  # a thread must not cross a fork
        bar = progress.add_task("killing", total=None)
        with contextlib.suppress(EnoughError):
            cases = _cases(killer, options, random.Random(options.seed))
            progress.update(bar, total=len(cases), refresh=True)
            deal(cases, killer, options.jobs, lambda count: progress.update(bar, advance=count, refresh=True))
    killer.outcome.seconds = time.perf_counter() - begun
    outcome = killer.outcome
    figures = {
        "engine": options.engine,
        **outcome.figures(),
        "seed": options.seed,
        **environment("benchmarks.store_crash", arguments or sys.argv[1:], PACKAGES),
    }
    table = Table(title="a store through kill -9, losses of power and full disks", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), str(value))
    console.print(table)
    for problem in outcome.problems:
        console.print(problem, markup=False, style="red")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
        console.print(f"figures in {options.json}")
    if outcome.problems:
        console.print(f"what is left stands in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store_crash", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--engine", default="lmdb", help="by the name that Store.open knows it by (lmdb)")
    parser.add_argument("--points", type=int, default=2000, help="points at which to kill (2000)")
    parser.add_argument("--torn", type=int, default=500, help="writes to tear (500)")
    parser.add_argument("--instants", type=int, default=500, help="kills at a random time (500)")
    parser.add_argument("--replays", type=int, default=3000, help="losses of power (3000)")
    parser.add_argument("--full", type=int, default=300, help="points from which on the disk is full (300)")
    parser.add_argument("--problems", type=int, default=MOST_PROBLEMS, help="after how many of one worker all stop (5)")
    parser.add_argument(
        "--quick", action="store_true", help="few of each: " + ", ".join(f"{n} {k}" for k, n in QUICK.items())
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one flat JSON object")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (0)")
    parser.add_argument("--jobs", type=int, default=_cores(), help="processes that kill (as many as there are cores)")
    parser.add_argument("--folder", type=Path, help="where to work (TMPDIR); kept where something went wrong")
    options = parser.parse_args(arguments)
    if options.engine == "memory":
        parser.error("nothing that the memory engine holds outlives its process, so there is nothing to look at")
    if options.quick:
        vars(options).update(QUICK)
    return options


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cases(killer: Killer, options: argparse.Namespace, generator: random.Random) -> list[Case]:
    """Decide on as many kills, torn writes, losses of power and full disks as are asked for."""
    points = killer.points()

    def chosen(most: int, numbers: Sequence[int]) -> list[int]:
        return [numbers[i] for i in spread([points[number] for number in numbers], most, generator)]

    every = range(len(points))
    cases: list[Case] = [partial(Killer.kill_at, number=n, point=points[n]) for n in chosen(options.points, every)]
    tearable = [number for number in every if points[number].tearable]
    cases += [partial(Killer.tear_at, number=n, point=points[n]) for n in chosen(options.torn, tearable)]
    cases += [partial(Killer.kill_after, share=generator.random()) for _ in range(options.instants)]
    cases += [partial(Killer.fill_at, number=n, point=points[n]) for n in chosen(options.full, every)]
    if options.replays:
        recording = _recording(killer.folder / "recorded", options.engine)
        moments = list(range(len(recording.moments)))
        for i in range(options.replays):
            if i % len(moments) == 0:
                generator.shuffle(moments)
            loss = Loss(kind=KINDS[i % len(KINDS)], moment=moments[i % len(moments)], seed=i)
            cases.append(partial(Killer.lose, loss=loss, recording=recording))
    return cases


def _recording(folder: Path, engine: str) -> Recording:
    """Record a run in a child, since this process must open no store."""
    folder.mkdir()
    file = folder.with_suffix(".pickle")

    def work(teller: Teller) -> None:
        file.write_bytes(pickle.dumps(record(folder, engine, teller)))

    ended = run_in_child(work)
    if ended.failure:
        raise RuntimeError(f"the run that was recorded failed: {ended.failure}")
    recording: Recording = pickle.loads(file.read_bytes())
    shutil.rmtree(folder)
    file.unlink()
    return recording


if __name__ == "__main__":
    sys.exit(main())
