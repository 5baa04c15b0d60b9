"""The embedding step compared with its peers: python -m benchmarks.embedding_step [--quick] [--json FILE].

One step is forward, backward and update of all lookups of a batch, as a user runs them: module, ``backward``, step.
Every contender has its own process with two threads. One runs at a time, in turns of a few steps, so that all see the
same noise; if memory cannot hold all their tables, they run one after another. A step's time is the median over all
turns.

Keys: ms_CONTENDER_OPTIMIZER_SHAPE[_default] are milliseconds; speedup_vs_PEER_OPTIMIZER_SHAPE[_default] the peer's
time over ours; share_of_copy_bandwidth_OPTIMIZER_SHAPE[_default] the bytes that the step must move
(embedding_contenders.bytes_to_move) over its time, relative to the bytes per second of a copy by all threads, counting
both read and written bytes. The plain keys are the minimum over shapes (share_of_copy_bandwidth: and over optimizers)
with an allocator that keeps freed memory, for all contenders; keys that end in _default use the default allocator.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import psutil

from benchmarks import embedding_contenders as cases
from benchmarks.machine import Goal, benchmark, middle, say

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
ALLOCATORS = {
    "": {  # keep freed memory: no contender pays for fresh pages in every step
        "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(64 << 30),
        "MALLOC_TOP_PAD_": str(256 << 20),
    },
    "_default": {},
}


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
QUICK_PLAN = Plan(turns=3, steps=3, warm_up=2)
TINY_PLANS = {"": QUICK_PLAN, "_default": replace(QUICK_PLAN, turns=1, optimizers=cases.OPTIMIZERS[:2])}


class Bench:
    """Runs cases; keeps a process for each contender between cases if memory holds the tables of all."""

    def __init__(self, allocator: str) -> None:
        self._environment = ALLOCATORS[allocator] | {"OMP_NUM_THREADS": str(cases.THREADS)}
        self._processes: dict[str, ProcessPoolExecutor] = {}

    def case(self, names: Sequence[str], shape: cases.Shape, optimizer: str, plan: Plan) -> dict[str, list[float]]:
        """Measure one optimizer on one shape: return the seconds of single steps by contender."""
        names = [name for name in names if name in {"ours", "copy"} or optimizer in PEERS[name]]
        together = len(names) * shape.table_bytes(optimizer) < psutil.virtual_memory().available // 2
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for group in [names] if together else [[name] for name in names]:
            if not together:
                self.close()
            built = [self._process(name).submit(cases.build, name, shape, optimizer, plan.warm_up) for name in group]
            for one in built:
                one.result()
            for _ in range(plan.turns):
                for name in group:
                    seconds[name] += self._process(name).submit(cases.run, plan.steps).result()
            for name in group:
                self._process(name).submit(cases.drop).result()
        return seconds

    def _process(self, name: str) -> ProcessPoolExecutor:
        if name not in self._processes:
            pool = self._processes[name] = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            before = dict(os.environ)
            os.environ.update(self._environment)  # read before its code runs
            pool.submit(os.getpid).result()
            os.environ.clear()
            os.environ.update(before)
        return self._processes[name]

    def close(self) -> None:
        for process in self._processes.values():
            process.shutdown()
        self._processes.clear()


def figures_of(
    shape: cases.Shape, optimizer: str, allocator: str, seconds: dict[str, list[float]], distinct: float
) -> dict[str, Any]:
    """Return the keys of one case."""
    ms = {name: middle(taken) * 1e3 for name, taken in seconds.items()}
    tail = f"{optimizer}_{shape.name}{allocator}"
    record: dict[str, Any] = {f"ms_{name}_{tail}": value for name, value in ms.items()}
    record |= {f"speedup_vs_{peer}_{tail}": ms[peer] / ms["ours"] for peer in PEERS if peer in ms}
    copied = 2 * cases.COPY_BYTES / ms["copy"]  # read and written
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


def measure(record: dict[str, Any], shapes: Sequence[cases.Shape], plans: dict[str, Plan]) -> None:
    """Add the figures of all shapes, with each allocator as planned."""
    names = [n for n in ("copy", "ours", *PEERS) if n != "fbgemm" or importlib.util.find_spec("fbgemm_gpu") is not None]
    for allocator, plan in plans.items():
        with contextlib.closing(Bench(allocator)) as bench:
            for shape in shapes:
                distinct = middle(cases.distinct_rows(shape, ids) for ids in cases.batches_of(shape))
                record[f"distinct_rows_{shape.name}"] = distinct
                for optimizer in plan.optimizers:
                    say(f"{shape.name}, {optimizer}{allocator.replace('_', ', allocator: ')}")
                    seconds = bench.case(names, shape, optimizer, plan)
                    record |= figures_of(shape, optimizer, allocator, seconds, distinct)
            record |= plain_keys(record, shapes, allocator)


if __name__ == "__main__":
    with benchmark("embedding_step", __doc__, "26 tables of 100k rows, one allocator, fewer steps", GOALS) as run:
        plans = run.size({"": FULL_PLAN, "_default": FULL_PLAN}, {"": QUICK_PLAN}, TINY_PLANS)
        run.record |= {"threads": cases.THREADS, "steps_measured": plans[""].turns * plans[""].steps}
        measure(run.record, run.size(cases.FULL, cases.QUICK, cases.TINY), plans)
