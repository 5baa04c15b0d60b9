"""The device of a training, and its clocks: the CPU, a GPU, or the CUDA sources run on the CPU by the tests' shim.

Without a GPU every clock runs a call twice at most, and its times mean nothing.
"""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.machine import middle, seconds_of
from tiercache.errors import CudaError
from tiercache.rows.backends.cuda_runtime import open_runtime
from tiercache.rows.backends.open_backend import open_backend

_SLEEP_CYCLES = 16_000_000  # 8 ms, enough for the host to queue a whole step
_LINK_BYTES, _KERNELS = 256 << 20, 14


@dataclass(frozen=True, slots=True)
class TrainingDevice:
    """A device to train on."""

    name: str
    open: Callable[[], Any]
    """Returns the ``device`` argument of a cache."""
    is_gpu: bool = False

    @property
    def torch_name(self) -> str:
        """The device of torch's own tensors."""
        return "cuda" if self.is_gpu else "cpu"

    def backend(self) -> Any:
        """Return a backend on the device."""
        made = self.open()
        return open_backend(made, ()) if isinstance(made, str) else made

    def rest(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def free_unused(self) -> None:
        """Free the GPU memory that no tensor uses."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def gpu_ms(self, call: Callable[[], Any], repeats: int = 20, warm: int = 3, *, alone: bool = True) -> float:
        """Return the median milliseconds of a call between two events.

        alone: the GPU sleeps before each call while the host queues it, so only its own time counts. Otherwise the
        host waits after each call, as in published figures.
        """
        if not self.is_gpu:
            return 1e3 * min(seconds_of(lambda _: call(), 2))
        taken = []
        for _ in range(warm + repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            if alone:
                torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end))
        return middle(taken[warm:]) if alone else float(np.mean(taken[warm:]))

    def loop_ms(self, call: Callable[[], Any], repeats: int = 50) -> dict[str, float]:
        """Return wall and thread milliseconds per call of a loop that waits once, at its end."""
        repeats = repeats if self.is_gpu else 2
        for _ in range(min(5, repeats)):
            call()
        self.rest()
        begun, thread = time.perf_counter(), time.thread_time()
        for _ in range(repeats):
            call()
        thread = time.thread_time() - thread
        self.rest()
        return {"wall_ms": 1e3 * (time.perf_counter() - begun) / repeats, "host_ms": 1e3 * thread / repeats}

    def kernels_us(self, call: Callable[[], Any], repeats: int = 20) -> dict[str, float]:
        """Return the microseconds per call of each kernel, largest first; nothing without a GPU."""
        if not self.is_gpu:
            return {}
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(repeats):
                call()
            torch.cuda.synchronize()
        ordered = sorted(profiled.key_averages(), key=lambda event: -event.self_device_time_total)[:_KERNELS]
        return {
            f"us_{event.key[:70]} x{event.count / repeats:g}": event.self_device_time_total / repeats
            for event in ordered
        }

    def copy_bytes_per_second(self) -> float:
        """Return the bytes per second that a copy on the device reads and writes."""
        size = 2 << 30 if self.is_gpu else 1 << 20
        source = torch.zeros(size, dtype=torch.uint8, device=self.torch_name)
        target = torch.empty_like(source)
        return 2e3 * size / self.gpu_ms(lambda: target.copy_(source))

    def link_bytes_per_second(self) -> tuple[float, float]:
        """Return the rates of copies to pinned host memory and from it."""
        size = _LINK_BYTES if self.is_gpu else 1 << 16
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=self.is_gpu)
        there = torch.zeros(size, dtype=torch.uint8, device=self.torch_name)
        to_host, to_device = (
            self.gpu_ms(lambda: host.copy_(there, non_blocking=True)),
            self.gpu_ms(lambda: there.copy_(host, non_blocking=True)),
        )
        return 1e3 * size / to_host, 1e3 * size / to_device


CPU = TrainingDevice("cpu", lambda: "cpu")


def open_device(wanted: str | None, *, dry: bool = False) -> TrainingDevice:
    """Return the requested device; by default the GPU if there is one. dry: run the GPU code with the shim."""
    if dry:
        devices = importlib.import_module("tests.train.devices")
        return TrainingDevice("shim", partial(devices.shim, "random", free_bytes=8 << 30))
    if wanted != "cpu":
        try:
            open_runtime(None)
            return TrainingDevice(torch.cuda.get_device_name(), lambda: "cuda", is_gpu=True)
        except CudaError as error:
            if wanted == "cuda":
                raise SystemExit(f"{error} Or take --dry.") from error
    return CPU
