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
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tiercache as tc
from benchmarks import disk_case
from benchmarks import synthetic_case as synthetic
from benchmarks.budgets import Budgets, rows_held
from benchmarks.device import TrainingDevice
from benchmarks.drawn_passes import draw_ids, schema_of, write_drawn
from benchmarks.gpu_step import Keep
from benchmarks.machine import environment
from benchmarks.training import CacheRun, EmbeddingStep, TieredRun
from benchmarks.window import figures_of, open_store, warm_window
from tiercache.kernels.arrays import NONE_I4
from tiercache.kernels.cuda import rows as cuda_rows

ROOT = Path(__file__).parents[1]


def env(device: TrainingDevice, keep: Keep) -> None:
    """Record the machine and the versions, and measure a copy."""
    keep(environment("benchmarks.gpu", sys.argv[1:]))
    if device.is_gpu:
        seen = torch.cuda.get_device_properties(0)
        keep({"gpu": seen.name, "sms": seen.multi_processor_count, "l2_bytes": seen.L2_cache_size})
        keep({"gpu_bytes": seen.total_memory})
    keep({"copy_TB_per_second": device.copy_bytes_per_second() / 1e12})


def link(device: TrainingDevice, keep: Keep) -> None:
    """Measure copies between pinned host memory and the device, each way, and both ways at once."""
    to_host, to_device = device.link_bytes_per_second()
    keep({"to_device_GB_per_second": to_device / 1e9, "to_host_GB_per_second": to_host / 1e9})
    if device.is_gpu:
        size = 256 << 20
        hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        there = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
        sides = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]

        def both_ways() -> None:
            current = torch.cuda.current_stream()
            for side, target, source in zip(sides, (there[0], hosts[1]), (hosts[0], there[1]), strict=True):
                side.wait_stream(current)
                with torch.cuda.stream(side):
                    target.copy_(source, non_blocking=True)
            for side in sides:
                current.wait_stream(side)

        keep({"both_ways_GB_per_second_each": size / 1e6 / device.gpu_ms(both_ways)})


def register(device: TrainingDevice, keep: Keep) -> None:
    """Measure pinning and unpinning of pages, and the longest launch of another thread at the same time.

    idle: the GPU does nothing else. busy: it has 50 ms of work queued.
    """
    backend = device.backend()
    ones = torch.zeros(1 << 20, device=device.torch_name)
    for mib in (4, 16, 64, 256) if device.is_gpu else (1,):
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
            if state == "busy" and device.is_gpu:
                torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
            times = [time.perf_counter()]
            backend.pin(pages.ctypes.data, size)
            times.append(time.perf_counter())
            backend.unpin(pages.ctypes.data)
            times.append(time.perf_counter())
            stop.set()
            thread.join()
            device.rest()
            pin, unpin = (1e3 * (end - begin) for begin, end in pairwise(times))
            if state != "warm":
                keep({f"{mib}MiB_{state}_pin_ms": pin, f"{mib}MiB_{state}_unpin_ms": unpin})
                keep({f"{mib}MiB_{state}_longest_launch_ms": 1e3 * max(distances)})


def switch(device: TrainingDevice, keep: Keep) -> None:
    """Measure the rows of a switch over the link: 1 GiB each way, 64 KiB pages, 1, 2, 4 and 8 blocks per SM."""
    backend, words = device.backend(), 3 * 128
    page_rows = (64 << 10) // (4 * words)
    pages = (1 << 30 if device.is_gpu else 1 << 20) // (64 << 10)
    count = pages * page_rows
    fields = tuple(torch.rand((2 * count, 128), device=device.torch_name) for _ in range(3))
    order = torch.randperm(2 * count, device=device.torch_name).to(torch.int32)
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
            keep({f"{name}_GB_per_second_{blocks}_blocks": gigabytes / device.gpu_ms(call, 5, 1)})
    cuda_rows._LINK_BLOCKS = usual
    keep({f"{key}_both": value for key, value in device.loop_ms(both, 4).items()})


def _then_wait(backend: Any, pack: Callable[[], None]) -> None:
    """Pack, and make the current stream wait: it waits for loads, which wait for dumps."""
    pack()
    with backend.streams.loading():
        pass


def fresh(device: TrainingDevice, keep: Keep) -> None:
    """Train Merlin tiny without its dense part, 64 batches of 1,024 per pass: made ahead by threads, or kept."""
    batch, batches = (1024, 64) if device.is_gpu else (64, 4)
    size = synthetic.Size(name="fresh", batch=batch, batches=batches, passes=2, divisor=96, window_passes=1)
    with tempfile.TemporaryDirectory() as folder:
        data = synthetic.dataset(Path(folder), synthetic.Data("tiny", size))
        cache = tc.InMemoryCache(data, device=device.open())
        run = CacheRun(cache, EmbeddingStep(cache), batch, device)

        def of_pass(prefetch: int) -> dict[str, float]:
            run.current  # noqa: B018 - the switch is not measured
            device.rest()
            begun, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
            run.train_pass(prefetch=prefetch)
            thread, process = time.thread_time() - thread, time.process_time() - process
            device.rest()
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
        keep({f"kept_{key}": value for key, value in device.loop_ms(run.kept()).items()})
        run.close()


def stream(device: TrainingDevice, keep: Keep) -> None:
    """Train ten tables of 2.68 million rows; a tenth of the rows fits on the device, the rest is in host memory.

    This is DynamicEmb's protocol (10 x 26.8M rows, 10 % of them in HBM) with a tenth of its rows. resident_*: 100 steps
    whose rows stay on the device, as in its published figures, while the next pass is brought to host memory; quiet_*:
    the same a second later. fresh_ms: a stream of fresh ids over all rows, including the switches between passes.
    """
    for optimizer in ("adam", "sgd"):
        rows, batches, batch = (2_684_354, 10, 104_857) if device.is_gpu else (900, 2, 32)
        rule = {"sgd": tc.optim.SGD, "adam": tc.optim.Adam}[optimizer](learning_rate=0.1)
        schema = schema_of({f"t{i}": 128 for i in range(10)}, rule)
        with tempfile.TemporaryDirectory() as folder:
            passes = write_drawn(Path(folder) / "d", schema, 5, partial(draw_ids, schema, rows, batches * batch))
            budgets = Budgets.in_host(passes)
            row_bytes = 4 * 128 * (3 if optimizer == "adam" else 1)
            keep({f"{optimizer}_device_share": budgets.device / (10 * rows * row_bytes)})
            with open_store(passes, None) as store:
                run = TieredRun(passes, store, budgets, EmbeddingStep, batch, device)
                seconds, steps = run.seconds(warm_window(passes, 2))
                keep({f"{optimizer}_fresh_ms": 1e3 * seconds / steps})
                report = run.cache.reports[-2]
                times = report.wait_seconds | report.work_seconds
                keep({f"{optimizer}_switch_{name}_ms": 1e3 * taken for name, taken in times.items()})
                keep({f"{optimizer}_loaded_MB": report.bytes_loaded / 1e6, f"{optimizer}_rows": report.rows})
                train = run.kept(None)
                found = device.loop_ms(train, 100)
                keep({f"{optimizer}_resident_{key}": value for key, value in found.items()})
                time.sleep(1 if device.is_gpu else 0)  # the next pass is in host memory by then
                found = device.loop_ms(train, 100)
                keep({f"{optimizer}_quiet_{key}": value for key, value in found.items()})
                run.close()
            del run, train
            device.free_unused()


def merlin(device: TrainingDevice, keep: Keep) -> None:
    """Train Merlin's tiny and small models at batch 65,536 with all rows on the GPU, on fresh and on kept batches."""
    from benchmarks.synthetic_models import Benchmark

    size = synthetic.Size(name="gpu", batch=65_536, batches=2, passes=4, divisor=1, window_passes=1)
    for model in synthetic.MODELS:
        with tempfile.TemporaryDirectory() as folder:
            found = Benchmark(model, size if device.is_gpu else synthetic.DRY, Path(folder), device).memory()
        keep({f"{model}_{key}": value for key, value in found.items()})
        device.free_unused()


def out_of_core(device: TrainingDevice, keep: Keep) -> None:
    """Train a table from disk and in memory, without a dense part: a window of warm passes."""
    size = disk_case.GPU if device.is_gpu else disk_case.GPU_DRY
    step_of = partial(disk_case.trainer_of, width=0)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        passes = disk_case.dataset(folder, size, "adagrad")
        budgets, window, (rows, num_bytes) = Budgets.least(passes), warm_window(passes, 3), rows_held(passes)
        keep({"table_rows": rows, "table_bytes": num_bytes, "device_budget_bytes": budgets.device})
        keep({"host_budget_bytes": budgets.host, "passes_per_epoch": size.passes})
        cache = tc.InMemoryCache(passes, device=device.open())
        memory = CacheRun(cache, step_of(cache), size.batch, device)
        memory.upto(window.start - 1, train=False)
        in_memory, _ = memory.seconds(window)
        memory.close()
        del memory, cache
        device.free_unused()
        with open_store(passes, folder / "store.tc") as store:
            run = TieredRun(passes, store, budgets, step_of, size.batch, device)
            tiered, _ = run.seconds(window)
            found = figures_of(device, run, window, memory=in_memory, tiered=tiered, folder=folder)
            run.close()
        keep({f"{key}_high": value for key, value in found.items()})


def ngram(device: TrainingDevice, keep: Keep) -> None:
    """Train a table of n-grams in memory and from disk."""
    from benchmarks.ngram import GPU, TINY, measure_training

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        keep(measure_training(GPU if device.is_gpu else TINY, Path(folder), device))


# -- other commands ------------------------------------------------------------------------------------------


def tests(device: TrainingDevice, keep: Keep) -> None:
    """Run the tests that only a GPU can run."""
    variables = {"TIERCACHE_TEST_GPU": "1", "TIERCACHE_TEST_DEVICE": "cuda"} if device.is_gpu else {}
    _run(keep, [sys.executable, "-m", "pytest", "tests/train/test_real_gpu.py"], variables)


def racecheck(device: TrainingDevice, keep: Keep) -> None:
    """Run racecheck on the update and pooling kernels."""
    if not device.is_gpu:
        keep({"status": "not run: needs a GPU"})
        return
    only = "cuda and (test_update or test_pooling)"
    _run(keep, [sys.executable, "-m", "tests.gpu", "--part", "racecheck", "-x", "-k", only])


def ncu(device: TrainingDevice, keep: Keep) -> None:
    """Count bytes and occupancy of the kernels of a step, if Nsight Compute is installed."""
    metrics = (
        "gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,lts__t_sector_hit_rate.pct,"
        "sm__warps_active.avg.pct_of_peak_sustained_active,dram__throughput.avg.pct_of_peak_sustained_elapsed,"
        "launch__registers_per_thread"
    )
    program = (
        "from benchmarks.gpu_step import few_steps; from benchmarks.device import open_device; "
        "few_steps(open_device('cuda'), {!r})"
    )
    if not device.is_gpu:
        keep({"status": "not run: needs a GPU"})
        return
    for optimizer in ("sgd", "adam"):
        command = ["ncu", "--clock-control", "none", "-k", "regex:pool|update|stretch", "--launch-skip", "20"]
        command += ["--launch-count", "8", "--metrics", metrics, sys.executable, "-c", program.format(optimizer)]
        _run(keep, command, tail=f"{optimizer}_", lines=120)


def _run(
    keep: Keep, command: list[str], variables: Mapping[str, str] | None = None, *, tail: str = "", lines: int = 12
) -> None:
    """Run a command from the root; keep its exit status and its last lines."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | (variables or {}), check=False, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except OSError as error:
        keep({f"{tail}status": f"not run: {error}"})
        return
    said = [re.sub(r"\s+", " ", line).strip() for line in done.stdout.splitlines()]
    keep({f"{tail}status": done.returncode})
    keep({f"{tail}said_{number:03}": line for number, line in enumerate([line for line in said if line][-lines:])})
