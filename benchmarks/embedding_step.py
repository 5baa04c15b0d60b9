"""The embedding step compared with its peers: python -m benchmarks.embedding_step [--quick | --busy] [--json FILE].

One step is forward, backward and update of all lookups of a batch, as a user runs them: module, ``backward``, step.
Every contender has its own process with two threads. One runs at a time, in turns of a few steps, so that all see the
same noise; if memory cannot hold all their tables, they run one after another. A step's time is the median over all
turns.

Keys: ms_CONTENDER_OPTIMIZER_SHAPE[_default] are milliseconds; speedup_vs_PEER_OPTIMIZER_SHAPE[_default] the peer's
time over ours; share_of_copy_bandwidth_OPTIMIZER_SHAPE[_default] the bytes that the step must move
(embedding_contenders.bytes_to_move) over its time, relative to the bytes per second of a copy by all threads, counting
both read and written bytes. The plain keys are the minimum over shapes (share_of_copy_bandwidth: and over optimizers)
with an allocator that keeps freed memory, for all contenders; keys that end in _default use the default allocator.
With --busy only: busy_ratio, the steps per second of our two threads over one thread, next to two busy processes.
"""

from __future__ import annotations

import importlib.util
import itertools
import multiprocessing
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks import embedding_contenders as cases
from benchmarks.machine import Goal, called, console, middle, options_of, say, table_of

if TYPE_CHECKING:
    from collections.abc import Sequence

COPY_BYTES = 2 * (256 << 20)
"""Bytes read and written by a step of the contender "copy"."""
PEERS = {"torch": ("adagrad", "adam"), "by_hand": ("rowwise",), "fbgemm": ("adagrad", "rowwise")}
"""The optimizers that each peer has."""
SPEEDUPS = {
    "speedup_vs_torch": ("torch", ("adagrad",)),
    "speedup_vs_torch_adam": ("torch", ("adam",)),
    "speedup_vs_torch_rowwise": ("by_hand", ("rowwise",)),
    "speedup_vs_fbgemm": ("fbgemm", ("adagrad", "rowwise")),
}
"""Plain keys: the peer, and the optimizers over which the minimum is taken."""
GOALS = (
    Goal(key="speedup_vs_torch", goal=3, least=2.5),
    Goal(key="speedup_vs_torch_rowwise", goal=1.5, least=1.2),
    Goal(key="speedup_vs_fbgemm", goal=1.6, least=1.2),
    Goal(key="share_of_copy_bandwidth", goal=0.5, least=0.35),
)
BUSY_GOAL = Goal(key="busy_ratio", goal=0.75)
ALLOCATORS = {
    "": {  # keep freed memory: no contender pays for fresh pages in every step
        "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(64 << 30),
        "MALLOC_TOP_PAD_": str(256 << 20),
    },
    "_default": {},
}


class Process:
    """A contender in its own process, with its allocator and threads; see embedding_contenders."""

    def __init__(self, name: str, allocator: str, threads: int = cases.THREADS) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=cases.serve, args=(theirs, name, threads), daemon=True)
        known = dict(os.environ)
        os.environ.update(ALLOCATORS[allocator] | {"OMP_NUM_THREADS": str(threads)})  # read before its code runs
        self._process.start()
        os.environ.clear()
        os.environ.update(known)
        theirs.close()

    def tell(self, *command: Any) -> None:
        """Send a command without waiting for its answer."""
        self._pipe.send(command)

    def hear(self) -> list[float]:
        """Return the answer to the oldest command. Raises EOFError if the process has ended."""
        seconds: list[float] = self._pipe.recv()
        return seconds

    def do(self, *command: Any) -> list[float]:
        """Send a command and return its answer."""
        self.tell(*command)
        return self.hear()

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The number of measurements."""

    turns: int
    steps: int
    """Steps of each turn."""
    warm_up: int
    """Steps before the first turn."""
    optimizers: tuple[str, ...] = cases.OPTIMIZERS


FULL_PLAN = Plan(turns=5, steps=5, warm_up=8)
BUSY_PLAN = Plan(turns=10, steps=5, warm_up=2)
QUICK_PLAN = Plan(turns=3, steps=3, warm_up=2)
TINY_PLANS = {"": QUICK_PLAN, "_default": replace(QUICK_PLAN, turns=1, optimizers=cases.OPTIMIZERS[:2])}


class Bench:
    """Runs cases; keeps processes between cases if memory holds the tables of all."""

    def __init__(self, contenders: Sequence[str]) -> None:
        self._contenders = contenders
        self._open: dict[tuple[str, str], Process] = {}

    def case(self, shape: cases.Shape, optimizer: str, allocator: str, plan: Plan) -> dict[str, list[float]]:
        """Measure one optimizer on one shape: return the seconds of single steps by contender."""
        names = [n for n in self._contenders if n in {"ours", "copy"} or optimizer in PEERS[n]]
        together = len(names) * shape.table_bytes(optimizer) < psutil.virtual_memory().available // 2
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for group in [names] if together else [[name] for name in names]:
            if not together:
                self.close()
            processes = [self._process(name, allocator) for name in group]
            for process in processes:
                process.tell("build", shape, optimizer, plan.warm_up)
            for process in processes:
                process.hear()
            for _ in range(plan.turns):
                for process in processes:
                    seconds[process.name] += process.do("run", plan.steps)
            for process in processes:
                process.do("drop")
        return seconds

    def _process(self, name: str, allocator: str) -> Process:
        if (name, allocator) not in self._open:
            self._open[name, allocator] = Process(name, allocator)
        return self._open[name, allocator]

    def close(self) -> None:
        """End all processes."""
        for process in self._open.values():
            process.close()
        self._open.clear()


def busy_ratio(shape: cases.Shape, plan: Plan) -> dict[str, float]:
    """Return our steps per second with one thread and with two, alternating, next to two busy processes."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cases.THREADS)]
    processes = {threads: Process("ours", "", threads) for threads in (1, cases.THREADS)}
    seconds: dict[int, list[float]] = {threads: [] for threads in processes}
    try:
        for process in processes.values():
            process.do("build", shape, "adagrad", plan.warm_up)
        for _ in range(plan.turns):
            for threads, process in processes.items():
                seconds[threads] += process.do("run", plan.steps)
    finally:
        for process in processes.values():
            process.close()
        for loop in loops:
            loop.kill()
            loop.wait()
    rates = {threads: len(taken) / sum(taken) for threads, taken in seconds.items()}
    return {
        "busy_steps_per_second_one_thread": rates[1],
        "busy_steps_per_second": rates[cases.THREADS],
        "busy_ratio": rates[cases.THREADS] / rates[1],
    }


def figures_of(
    shape: cases.Shape, optimizer: str, allocator: str, seconds: dict[str, list[float]], distinct: float
) -> dict[str, Any]:
    """Return the keys of one case."""
    ms = {name: middle(taken) * 1e3 for name, taken in seconds.items()}
    tail = f"{optimizer}_{shape.name}{allocator}"
    record: dict[str, Any] = {f"ms_{name}_{tail}": value for name, value in ms.items()}
    record |= {f"speedup_vs_{peer}_{tail}": ms[peer] / ms["ours"] for peer in PEERS if peer in ms}
    copied = COPY_BYTES / ms["copy"]
    record[f"copy_bytes_per_second_{tail}"] = copied * 1e3
    for name, rows_once in (("share_of_copy_bandwidth", False), ("share_of_copy_bandwidth_rows_once", True)):
        moved = cases.bytes_to_move(shape, optimizer, distinct, rows_once=rows_once)
        record[f"{name}_{tail}"] = moved / ms["ours"] / copied
    return record


def plain_keys(record: dict[str, Any], shapes: Sequence[cases.Shape], allocator: str) -> dict[str, Any]:
    """Return the minimum of every figure over shapes; None if a peer is missing."""
    plain: dict[str, Any] = {}
    for key, (peer, optimizers) in SPEEDUPS.items():
        names = [f"speedup_vs_{peer}_{o}_{s.name}{allocator}" for o in optimizers for s in shapes]
        values = [record[name] for name in names if name in record]
        plain[key + allocator] = min(values) if values else None
    for key in ("share_of_copy_bandwidth", "share_of_copy_bandwidth_rows_once"):
        names = [f"{key}_{o}_{s.name}{allocator}" for o in cases.OPTIMIZERS for s in shapes]
        plain[key + allocator] = min(record[name] for name in names if name in record)
    return plain


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    quick = "26 tables of 100k rows, the reusing allocator and fewer steps only"
    parser = options_of("embedding_step", __doc__, quick, tiny="both allocators, so small that times mean nothing")
    parser.add_argument(
        "--busy", action="store_true", help="only compare one and two threads next to two busy processes"
    )
    with called(parser, arguments) as run:
        shapes = run.size(cases.FULL, cases.QUICK, cases.TINY)
        if run.options.busy:
            run.record |= busy_ratio(
                *run.size((cases.BUSY, BUSY_PLAN), (cases.BUSY, BUSY_PLAN), (cases.TINY[0], QUICK_PLAN))
            )
        else:
            plans = run.size({"": FULL_PLAN, "_default": FULL_PLAN}, {"": QUICK_PLAN}, TINY_PLANS)
            run.record |= {"threads": cases.THREADS, "steps_measured": plans[""].turns * plans[""].steps}
            measure(run.record, shapes, plans)
    if run.options.busy:
        run.report((BUSY_GOAL,), title="threads on cores that others use too")
        return
    _print(run.record, shapes)
    run.report(GOALS)


def measure(record: dict[str, Any], shapes: Sequence[cases.Shape], plans: dict[str, Plan]) -> None:
    """Add the figures of all shapes, with each allocator as planned."""
    has_fbgemm = importlib.util.find_spec("fbgemm_gpu") is not None
    bench = Bench([name for name in ("copy", "ours", *PEERS) if name != "fbgemm" or has_fbgemm])
    try:
        for allocator, plan in plans.items():
            for shape in shapes:
                distinct = middle(cases.distinct_rows(shape, ids) for ids in cases.batches_of(shape))
                record[f"distinct_rows_{shape.name}"] = distinct
                for optimizer in plan.optimizers:
                    say(f"{shape.name}, {optimizer}{allocator.replace('_', ', allocator: ')}")
                    seconds = bench.case(shape, optimizer, allocator, plan)
                    record |= figures_of(shape, optimizer, allocator, seconds, distinct)
            record |= plain_keys(record, shapes, allocator)
            bench.close()
    finally:
        bench.close()


def _print(record: dict[str, Any], shapes: Sequence[cases.Shape]) -> None:
    names = {"ours": "ours", "torch": "nn.EmbeddingBag", "by_hand": "torch by hand", "fbgemm": "FBGEMM"}
    columns = ("shape", "optimizer", "allocator", *names.values(), "copy GB/s", "share of copy")
    table = table_of("milliseconds a step (times ours)", *columns, left=3)
    for shape, optimizer, allocator in itertools.product(shapes, cases.OPTIMIZERS, ALLOCATORS):
        tail = f"{optimizer}_{shape.name}{allocator}"
        if f"ms_ours_{tail}" not in record:
            continue
        cells = []
        for name in names:
            value, ratio = record.get(f"ms_{name}_{tail}"), record.get(f"speedup_vs_{name}_{tail}")
            ratio_text = "" if ratio is None else f" ({ratio:.2f})"
            cells.append("-" if value is None else f"{value:.1f}{ratio_text}")
        cells.append(f"{record[f'copy_bytes_per_second_{tail}'] / 1e9:.1f}")
        cells.append(f"{record[f'share_of_copy_bandwidth_{tail}']:.2f}")
        table.add_row(shape.name, optimizer, "default" if allocator else "reuses", *cells)
    console.print(table)


if __name__ == "__main__":
    main()
