"""Measure the host's part of a GPU step on any CPU: python -m benchmarks.gpu_idle [--quick] [--json FILE].

Training runs over a GPU that does nothing (`idle_gpu`) in batches of 64 samples, which leaves Python, torch's
dispatcher and calls that can be counted. Times are CPU microseconds of one thread, the 20th percentile over steps.
They depend on the speed of the machine at that moment, so compare them with python_us_nothing of the same run: an
autograd function that does nothing, forward and backward. Real CUDA calls come on top.

python_us_X: one step on two kept batches, without a dense part. X is `bags` (10 tables of dim 128, Adam,
EmbeddingBagCollection), `rows` (the same tables, EmbeddingCollection), `adagrad` (8 tables of dim 64), `groups` (25
tables of five dims) or `tiny` (Merlin's synthetic model with 58 inputs). Calls of that step: python_calls_X (functions,
as a profiler counts them), aten_ops_X (torch operators), launches_X (our kernels and torch's sorts), allocations_X
(device and pinned memory), copies_X (host to device, launch tables included), waits_X (copies that block), contexts_X
(context managers that switch the device or the stream).

maker_us: thread time to make one batch of `tiny` ahead; launches_maker and so on are its calls. fresh_over_kept:
process CPU time of a step of `tiny` with its dense part, on batches made by threads, divided by that on kept batches.
switch_us_per_part: thread time to pack one 32 MiB part of a switch in 64 KiB pages; _16k: in 16 KiB pages.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tiercache as tc
from benchmarks.device import CPU
from benchmarks.drawn_passes import draw_ids, schema_of, write_drawn
from benchmarks.idle_gpu import idle_backend
from benchmarks.machine import Goal, benchmark, say, seconds_of
from benchmarks.synthetic_case import Data, Size, trainer_of
from benchmarks.synthetic_case import dataset as synthetic_dataset
from benchmarks.training import CacheRun, EmbeddingStep
from tiercache.kernels.arrays import NONE_I4

BATCH, BATCHES, PASSES = 64, 64, 2
CASES = ("bags", "rows", "adagrad", "groups", "tiny")
GOALS = (
    Goal(key="python_us_bags", goal=100, below=True),
    Goal(key="python_us_rows", goal=130, below=True),
    Goal(key="python_us_tiny", goal=150, below=True),
    Goal(key="aten_ops_rows", goal=20, below=True),
    Goal(key="maker_us", goal=200, below=True),
    Goal(key="fresh_over_kept", goal=1.1, below=True),
)
_KINDS = {
    "launches": ("launch", "sort"), "allocations": ("allocate",), "copies": ("copy", "copy table"),
    "waits": ("copy waiting",), "contexts": ("context",),
}  # fmt: skip
"""Prefixes of the idle GPU's counters that make up each figure."""
_ROWS, _PART_BYTES, _ROW_WORDS = 1000, 32 << 20, 3 * 128
_WARM = 20


def _passes_of(case: str, folder: Path) -> tc.PassDataset:
    """Open the dataset of a case in ``folder``, or write it."""
    if case == "tiny":
        size = Size(name="idle", batch=BATCH, batches=BATCHES, passes=PASSES, divisor=1024, window_passes=1)
        return synthetic_dataset(folder, Data("tiny", size))
    dims = {"adagrad": (64,) * 8, "groups": (8, 16, 32, 64, 128) * 5}.get(case, (128,) * 10)
    rule = tc.optim.Adam if len(dims) == 10 else tc.optim.Adagrad
    schema = schema_of({f"t{i}": dim for i, dim in enumerate(dims)}, rule(learning_rate=0.01))
    draw = partial(draw_ids, schema, _ROWS, BATCH * BATCHES)
    return write_drawn(folder / f"passes-{'x'.join(map(str, dims))}", schema, PASSES, draw)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of torch operators that reach a kernel."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class _Nothing(torch.autograd.Function):
    """An operator with an empty output and no gradient."""

    @staticmethod
    def forward(_ctx: Any, _anchor: torch.Tensor) -> torch.Tensor:
        return torch.empty(BATCH, 1280)

    @staticmethod
    def backward(_ctx: Any, *_gradients: Any) -> None:
        """Return none."""


def measure_nothing(steps: int) -> dict[str, float]:
    """Return the microseconds of an operator that does nothing, as a measure of the machine's current speed."""
    anchor, gradient = torch.zeros((), requires_grad=True), torch.zeros(BATCH, 1280)
    us = _thread_us(lambda: _Nothing.apply(anchor).backward(gradient), steps)  # type: ignore[no-untyped-call]
    return {"python_us_nothing": us}


class _IdleRun(CacheRun):
    """A training over an idle GPU, after its first pass: batches are prepared for the module's lookups."""

    def __init__(self, passes: tc.PassDataset, train_of: Callable[[tc.InMemoryCache], Callable[[Any], None]]) -> None:
        backend, self.gpu = idle_backend(ahead=2)
        cache = tc.InMemoryCache(passes, device=backend)
        super().__init__(cache, train_of(cache), BATCH, CPU)
        self.train_pass()

    def made(self) -> tuple[float, Counter[str], int]:
        """Make the batches of a pass. Return thread microseconds per batch, the calls of all, and their number."""
        taken, exchange = list[float](), self.cache._exchange
        read = exchange.read

        def timed(*request: Any, **how: Any) -> Callable[[], Any]:
            make = read(*request, **how)

            def run() -> Any:
                begun = time.thread_time()
                made = make()
                taken.append(time.thread_time() - begun)
                return made

            return run

        self.skip()
        self.current  # noqa: B018 - the switch is not counted
        exchange.read = timed
        self.gpu.counts.clear()
        for _ in self.batches():
            pass
        return _low_us(taken), self.gpu.counts.copy(), len(taken)


def _low_us(seconds: Sequence[float]) -> float:
    """Return the 20th percentile in microseconds, which other processes on the machine affect least."""
    return 1e6 * float(np.percentile(seconds, 20))


def _thread_us(call: Callable[[], object], times: int) -> float:
    return _low_us(seconds_of(lambda _: call(), times, time.thread_time))


def _calls(counts: Counter[str], steps: int, tail: str) -> dict[str, float]:
    return {
        f"{name}_{tail}": sum(n for kind, n in counts.items() if kind.startswith(kinds)) / steps
        for name, kinds in _KINDS.items()
    }


def measure_step(case: str, folder: Path, steps: int) -> dict[str, float]:
    """Return the keys of a case."""
    kind = tc.EmbeddingCollection if case == "rows" else tc.EmbeddingBagCollection
    training = _IdleRun(_passes_of(case, folder), partial(EmbeddingStep, kind=kind))
    step = training.kept()
    for _ in range(_WARM):
        step()
    with _Operators() as operators:  # type: ignore[no-untyped-call]
        training.gpu.counts.clear()
        for _ in range(2):
            step()
    found = {f"aten_ops_{case}": operators.count / 2, **_calls(training.gpu.counts, 2, case)}
    profiler = cProfile.Profile()
    profiler.runcall(lambda: (step(), step()))
    found[f"python_calls_{case}"] = sum(calls for _, calls, *_ in pstats.Stats(profiler).stats.values()) / 2  # type: ignore[attr-defined]
    found[f"python_us_{case}"] = _thread_us(step, steps)
    if case == "tiny":
        found["maker_us"], counts, made = training.made()
        found |= _calls(counts, made, "maker")
    training.close()
    return found


def measure_fresh(folder: Path, turns: int) -> dict[str, float]:
    """Return the process's milliseconds of a step on fresh and on kept batches, and their ratio."""
    training = _IdleRun(_passes_of("tiny", folder), partial(trainer_of, model="tiny"))
    taken: dict[str, list[float]] = {"fresh": [], "kept": []}
    for _ in range(turns):
        begun = time.process_time()
        steps = training.train_pass()
        taken["fresh"].append((time.process_time() - begun) / steps)
        step = training.kept()
        begun = time.process_time()
        for _ in range(steps):
            step()
        taken["kept"].append((time.process_time() - begun) / steps)
        training.skip()
    training.close()
    fresh, kept = (min(seconds) for seconds in taken.values())
    return {"ms_fresh": 1e3 * fresh, "ms_kept": 1e3 * kept, "fresh_over_kept": fresh / kept}


def measure_switch(repeats: int) -> dict[str, float]:
    """Return thread microseconds to lay out the pages of 32 MiB of rows and to launch the kernel that packs them."""
    found, backend = {}, idle_backend()[0]
    host = np.zeros(_PART_BYTES // 4, np.float32)
    for page, tail in ((64 << 10, ""), (16 << 10, "_16k")):
        rows = page // (4 * _ROW_WORDS)
        count = _PART_BYTES // page
        fields = tuple(torch.zeros((rows * count, _ROW_WORDS // 3)) for _ in range(3))
        slots = torch.arange(rows * count, dtype=torch.int32)

        def pack(rows: int = rows, count: int = count, fields: Any = fields, slots: Any = slots) -> None:
            pieces = backend.pieces(_ROW_WORDS)
            pieces.add(0, np.full(count, rows), np.arange(count) * (rows * _ROW_WORDS), host)
            with backend.streams.dumping():
                backend.pack(fields, slots, NONE_I4, pieces)
                backend.streams.dumped()

        found[f"switch_us_per_part{tail}"] = _thread_us(pack, repeats)
    return found


if __name__ == "__main__":
    with benchmark("gpu_idle", __doc__, "fewer steps", GOALS) as run:
        steps, turns = run.size((2000, 9), (400, 3), (5, 1))
        torch.set_num_threads(1)
        run.record |= measure_nothing(steps)
        for case in CASES:
            say(case)
            run.record |= measure_step(case, run.folder, steps)
        say("fresh and kept batches")
        run.record |= measure_fresh(run.folder, turns)
        run.record |= measure_switch(steps)
