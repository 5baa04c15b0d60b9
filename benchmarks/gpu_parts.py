"""The parts of `benchmarks.gpu` besides the resident step: copies, pages, switches, batches, models, other commands.

A part is a function of a machine and of ``keep``, which adds figures to the file of the part.
"""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

import tiercache as tc
from benchmarks import synthetic_case as synthetic
from benchmarks.drawn_passes import permuted_power_law, write_drawn
from benchmarks.gpu_step import copy_bytes_per_second, forget, gpu_ms, loop_ms, torch_device
from benchmarks.machine import environment
from benchmarks.window import Budgets, TieredRun, Window, open_store
from tiercache.data.raw_batch import RawBatch
from tiercache.kernels.arrays import NONE_I4
from tiercache.kernels.cuda import rows as cuda_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from benchmarks.gpu_step import Keep
    from benchmarks.window import TrainingMachine

ROOT = Path(__file__).parents[1]


def env(machine: TrainingMachine, keep: Keep) -> None:
    """Record the machine and the versions, and measure a copy."""
    keep(environment("benchmarks.gpu", sys.argv[1:]))
    if machine.is_gpu:
        seen = torch.cuda.get_device_properties(0)
        keep({"gpu": seen.name, "sms": seen.multi_processor_count, "l2_bytes": seen.L2_cache_size})
        keep({"gpu_bytes": seen.total_memory})
    keep({"copy_TB_per_second": copy_bytes_per_second(machine) / 1e12})


def link(machine: TrainingMachine, keep: Keep) -> None:
    """Measure copies between pinned host memory and the device, each way, and both ways at once."""
    size, device = 256 << 20 if machine.is_gpu else 1 << 16, torch_device(machine)
    hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=machine.is_gpu) for _ in range(2)]
    there = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
    keep({"to_device_GB_per_second": size / 1e6 / gpu_ms(machine, lambda: there[0].copy_(hosts[0], non_blocking=True))})
    keep({"to_host_GB_per_second": size / 1e6 / gpu_ms(machine, lambda: hosts[1].copy_(there[1], non_blocking=True))})
    if machine.is_gpu:
        keep({"both_ways_GB_per_second_each": size / 1e6 / gpu_ms(machine, lambda: _both_ways(hosts, there))})


def _both_ways(hosts: list[torch.Tensor], there: list[torch.Tensor]) -> None:
    current = torch.cuda.current_stream()
    sides = [_SIDES.setdefault(number, torch.cuda.Stream()) for number in range(2)]  # type: ignore[no-untyped-call]
    for number, side in enumerate(sides):
        side.wait_stream(current)
        with torch.cuda.stream(side):
            if number:
                hosts[1].copy_(there[1], non_blocking=True)
            else:
                there[0].copy_(hosts[0], non_blocking=True)
    for side in sides:
        current.wait_stream(side)


_SIDES: dict[int, torch.cuda.Stream] = {}


def register(machine: TrainingMachine, keep: Keep) -> None:
    """Measure pinning and unpinning of pages, and the longest launch of another thread at the same time.

    idle: the GPU does nothing else. busy: it has 50 ms of work queued.
    """
    backend = _backend(machine)
    ones = torch.zeros(1 << 20, device=torch_device(machine))
    for mib in (4, 16, 64, 256) if machine.is_gpu else (1,):
        size = mib << 20
        pages = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        pages[::4096] = 1
        for state in ("warm", "idle", "busy"):
            distances, stop = [0.0], threading.Event()

            def launches(distances: list[float] = distances, stop: threading.Event = stop) -> None:
                backend.streams.enter_thread()
                while not stop.is_set():
                    begun = time.perf_counter()
                    ones.add_(1)
                    distances.append(time.perf_counter() - begun)
                    time.sleep(0)

            thread = threading.Thread(target=launches)
            thread.start()
            time.sleep(0.01)
            if state == "busy" and machine.is_gpu:
                torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
            times = [time.perf_counter()]
            backend.pin(pages.ctypes.data, size)
            times.append(time.perf_counter())
            backend.unpin(pages.ctypes.data)
            times.append(time.perf_counter())
            stop.set()
            thread.join()
            machine.rest()
            pin, unpin = (1e3 * (end - begin) for begin, end in pairwise(times))
            if state != "warm":
                keep({f"{mib}MiB_{state}_pin_ms": pin, f"{mib}MiB_{state}_unpin_ms": unpin})
                keep({f"{mib}MiB_{state}_longest_launch_ms": 1e3 * max(distances)})


def _backend(machine: TrainingMachine) -> Any:
    made = machine.device()
    if isinstance(made, str):
        from tiercache.rows.backends.open_backend import open_backend

        return open_backend(made, ())
    return made


def switch(machine: TrainingMachine, keep: Keep) -> None:
    """Measure the rows of a switch over the link: 1 GiB each way, 64 KiB pages, 1, 2, 4 and 8 blocks per SM."""
    backend, words = _backend(machine), 3 * 128
    page_rows = (64 << 10) // (4 * words)
    pages = (1 << 30 if machine.is_gpu else 1 << 20) // (64 << 10)
    count = pages * page_rows
    fields = tuple(torch.rand((2 * count, 128), device=torch_device(machine)) for _ in range(3))
    order = torch.randperm(2 * count, device=torch_device(machine)).to(torch.int32)
    out, into = order[:count].contiguous(), order[count:].contiguous()
    pieces = []
    for _ in range(2):
        pieces.append(backend.pieces(words))
        host = backend.scratch(4 * count * words).view(np.float32)
        pieces[-1].add(0, np.full(pages, page_rows), np.arange(pages) * (page_rows * words), host)

    def pack() -> None:
        with backend.streams.dumping():
            backend.pack(fields, out, NONE_I4, pieces[0])

    def unpack() -> None:
        with backend.streams.loading():
            backend.unpack(fields, into, pieces[1])

    def both() -> None:
        pack()
        unpack()

    usual, gigabytes = cuda_rows._LINK_BLOCKS, 4 * count * words / 1e6
    for blocks in (1, 2, 4, 8):
        cuda_rows._LINK_BLOCKS = blocks
        for name, call in (("both", both), ("unpack", unpack), ("pack", lambda: _then_wait(backend, pack))):
            keep({f"{name}_GB_per_second_{blocks}_blocks": gigabytes / gpu_ms(machine, call, 5, 1)})
    cuda_rows._LINK_BLOCKS = usual
    keep({f"{key}_both": value for key, value in loop_ms(machine, both, 4).items()})


def _then_wait(backend: Any, pack: Callable[[], None]) -> None:
    """Pack, and make the current stream wait: it waits for loads, which wait for dumps."""
    pack()
    with backend.streams.loading():
        pass


def fresh(machine: TrainingMachine, keep: Keep) -> None:
    """Train Merlin tiny without its dense part, 64 batches of 1,024 per pass: made ahead by threads, or kept."""
    batch, batches = (1024, 64) if machine.is_gpu else (64, 4)
    size = synthetic.Size(name="fresh", batch=batch, batches=batches, passes=2, divisor=96, window_passes=1)
    with tempfile.TemporaryDirectory() as folder:
        data = synthetic.dataset(Path(folder), synthetic.Data("tiny", size))
        cache = tc.InMemoryCache(data, device=machine.device())
        module = tc.EmbeddingBagCollection(cache.schema)
        cache.register(model=module)
        gradient = torch.full((batch, module.out_features), 1e-3, device=torch_device(machine))
        passes = cast("Generator[Any, None, None]", cache.passes(epochs=1 << 20))

        def train(one: Any) -> None:
            module(one).backward(gradient)
            cache.optimizer.step()

        def of_pass(prefetch: int) -> dict[str, float]:
            p = next(passes)
            machine.rest()
            begun, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
            for one in p.batches(batch, prefetch=prefetch):
                train(one)
            thread, process = time.thread_time() - thread, time.process_time() - process
            machine.rest()
            times = {"ms": time.perf_counter() - begun, "host_ms": thread, "process_ms": process}
            return {key: 1e3 * seconds / batches for key, seconds in times.items()}

        of_pass(4)
        of_pass(4)
        for prefetch in (0, 1, 2, 4):
            best = min((of_pass(prefetch) for _ in range(3)), key=lambda found: found["ms"])
            keep({f"prefetch_{prefetch}_{key}": value for key, value in best.items()})
        usual = sys.getswitchinterval()
        sys.setswitchinterval(2e-4)
        keep({"prefetch_4_switching_at_0.2_ms": min(of_pass(4)["ms"] for _ in range(3))})
        sys.setswitchinterval(usual)
        two = cycle(list(islice(next(passes).batches(batch, prefetch=2), 2)))
        keep({f"kept_{key}": value for key, value in loop_ms(machine, lambda: train(next(two))).items()})
        passes.close()
        cache.close()


@dataclass(frozen=True, slots=True)
class _Stream:
    """Passes over ten tables with one id per sample each."""

    passes: int
    batches: int
    batch: int
    rows: int
    optimizer: str

    @property
    def size(self) -> Any:
        """Return this object, which has the number of passes."""
        return self

    def schema(self) -> tc.Schema:
        """Return the schema."""
        rule = {"sgd": tc.optim.SGD, "adam": tc.optim.Adam}[self.optimizer](learning_rate=0.1)
        tables = tuple(tc.Table(name=f"t{i}", dim=128, optimizer=rule, initializer=tc.init.Zeros()) for i in range(10))
        features = tuple(tc.Feature(name=f"f{i}", table=f"t{i}") for i in range(10))
        return tc.Schema(label="label", dense=(), features=features, tables=tables)

    def draw(self, index: int) -> RawBatch:
        """Return a pass."""
        rng, count = np.random.default_rng((3, index)), self.batch * self.batches
        keys = {f"f{i}": permuted_power_law(rng, self.rows, count) for i in range(10)}
        return RawBatch.of(self.schema(), keys, label=np.zeros(count, np.float32))


class _Embeddings:
    """A step without a dense part: forward, backward with a constant gradient, optimizer step."""

    def __init__(self, cache: Any) -> None:
        self._cache, self._module = cache, tc.EmbeddingBagCollection(cache.schema)
        cache.register(model=self._module)
        self._gradient: torch.Tensor | None = None

    def __call__(self, batch: Any) -> None:
        """Train a batch."""
        out = self._module(batch)
        if self._gradient is None or self._gradient.shape != out.shape:
            self._gradient = torch.full_like(out, 1e-3)
        out.backward(self._gradient)
        self._cache.optimizer.step()


def stream(machine: TrainingMachine, keep: Keep) -> None:
    """Train ten tables of 2.68 million rows; a tenth of the rows fits on the device, the rest is in host memory.

    This is DynamicEmb's protocol (10 x 26.8M rows, 10 % of them in HBM) with a tenth of its rows. resident_*: 100 steps
    whose rows stay on the device, as in its published figures, while the next pass is brought to host memory; quiet_*:
    the same a second later. fresh_ms: a stream of fresh ids over all rows, including the switches between passes.
    """
    for optimizer in ("adam", "sgd"):
        data = _Stream(5, 10, 104_857, 2_684_354, optimizer)
        if not machine.is_gpu:
            data = replace(data, batch=32, rows=900, batches=2)
        with tempfile.TemporaryDirectory() as folder:
            passes = write_drawn(Path(folder) / "d", data)
            budgets = Budgets.in_host(passes)
            row_bytes = 4 * 128 * (3 if optimizer == "adam" else 1)
            keep({f"{optimizer}_device_share": budgets.device / (10 * data.rows * row_bytes)})
            with open_store(passes, None) as store:
                run = TieredRun(passes, store, budgets, _Embeddings, data.batch, machine)
                seconds, steps = run.seconds(Window.warm(passes, 2))
                keep({f"{optimizer}_fresh_ms": 1e3 * seconds / steps})
                report = run.cache.reports[-2]
                times = report.wait_seconds | report.work_seconds
                keep({f"{optimizer}_switch_{name}_ms": 1e3 * taken for name, taken in times.items()})
                keep({f"{optimizer}_loaded_MB": report.bytes_loaded / 1e6, f"{optimizer}_rows": report.rows})
                train = _kept(run, data.batch)
                found = loop_ms(machine, train, 100)
                keep({f"{optimizer}_resident_{key}": value for key, value in found.items()})
                time.sleep(1 if machine.is_gpu else 0)  # the next pass is in host memory by then
                found = loop_ms(machine, train, 100)
                keep({f"{optimizer}_quiet_{key}": value for key, value in found.items()})
                run.close()
            del run
            forget(machine)


def _kept(run: TieredRun, batch: int) -> Callable[[], None]:
    """Return a function that trains the kept batches of a pass in turn."""
    batches = cycle(list(run.current.batches(batch)))
    return lambda: run.train(next(batches))


def merlin(machine: TrainingMachine, keep: Keep) -> None:
    """Train Merlin's tiny and small models at batch 65,536 with all rows on the GPU, on fresh and on kept batches."""
    from benchmarks.synthetic_models import Benchmark

    size = synthetic.Size(name="gpu", batch=65_536, batches=2, passes=4, divisor=1, window_passes=1)
    for model in synthetic.MODELS:
        with tempfile.TemporaryDirectory() as folder:
            found = Benchmark(model, size if machine.is_gpu else synthetic.DRY, Path(folder), machine).memory()
        keep({f"{model}_{key}": value for key, value in found.items()})
        forget(machine)


def out_of_core(machine: TrainingMachine, keep: Keep) -> None:
    """Run a small form of `out_of_core --device cuda`, without a dense part: from disk, and in memory."""
    from benchmarks.disk_case import GPU_DRY, GPU_QUICK
    from benchmarks.out_of_core import DEMANDS
    from benchmarks.out_of_core_gpu import DiskBenchmark

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        benchmark = DiskBenchmark(GPU_QUICK if machine.is_gpu else GPU_DRY, Path(folder), machine)
        benchmark.prepare()
        keep(benchmark.found)
        keep(benchmark.measure(DEMANDS["high"]))


# -- other commands ------------------------------------------------------------------------------------------


def tests(machine: TrainingMachine, keep: Keep) -> None:
    """Run the tests that only a GPU can run."""
    variables = {"TIERCACHE_TEST_GPU": "1", "TIERCACHE_TEST_DEVICE": "cuda"} if machine.is_gpu else {}
    _run(keep, [sys.executable, "-m", "pytest", "tests/train/test_real_gpu.py"], variables)


def racecheck(machine: TrainingMachine, keep: Keep) -> None:
    """Run racecheck on the update and pooling kernels."""
    if not machine.is_gpu:
        keep({"status": "not run: needs a GPU"})
        return
    only = "cuda and (test_update or test_pooling)"
    _run(keep, [sys.executable, "-m", "tests.gpu", "--part", "racecheck", "-x", "-k", only])


def ncu(machine: TrainingMachine, keep: Keep) -> None:
    """Count bytes and occupancy of the kernels of a step, if Nsight Compute is installed."""
    metrics = (
        "gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,lts__t_sector_hit_rate.pct,"
        "sm__warps_active.avg.pct_of_peak_sustained_active,dram__throughput.avg.pct_of_peak_sustained_elapsed,"
        "launch__registers_per_thread"
    )
    program = (
        "from benchmarks.gpu_step import few_steps; from benchmarks.window import open_training; "
        "few_steps(open_training('cuda', dry=False), {!r})"
    )
    if not machine.is_gpu:
        keep({"status": "not run: needs a GPU"})
        return
    for optimizer in ("sgd", "adam"):
        command = ["ncu", "--clock-control", "none", "-k", "regex:pool|update|stretch", "--launch-skip", "20"]
        command += ["--launch-count", "8", "--metrics", metrics, sys.executable, "-c", program.format(optimizer)]
        _run(keep, command, tail=f"{optimizer}_", lines=120)


def _run(
    keep: Keep, command: list[str], variables: Mapping[str, str] = MappingProxyType({}), *, tail: str = "",
    lines: int = 12,
) -> None:  # fmt: skip
    """Run a command from the root; keep its exit status and its last lines."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **variables}, check=False, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except OSError as error:
        keep({f"{tail}status": f"not run: {error}"})
        return
    said = [re.sub(r"\s+", " ", line).strip() for line in done.stdout.splitlines()]
    keep({f"{tail}status": done.returncode})
    keep({f"{tail}said_{number:03}": line for number, line in enumerate([line for line in said if line][-lines:])})
