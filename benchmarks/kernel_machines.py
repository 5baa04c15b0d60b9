"""Machines and clocks of the kernel benchmark: numba kernels, CUDA kernels on a GPU, or CUDA sources on the CPU.

All three have the same operations under the same names; a machine adds the device argument if a call needs one.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from benchmarks.machine import middle, say, seconds_of
from tiercache.errors import CudaError
from tiercache.kernels.arrays import aligned_zeros
from tiercache.rows.backends.cuda_runtime import open_runtime

COPY_BYTES = 256 << 20
_CALLS_OF_SAMPLE = 10
_MOST_COPIES = 256  # limit of queued copies, below the depth at which a launch blocks


class Times(NamedTuple):
    """Medians over samples."""

    seconds: float
    """Seconds of a call."""
    host_seconds: float | None
    """Python time to launch it; None if the call is synchronous."""


class GpuClock:
    """Times calls on the default stream by events.

    A sample is ten calls queued after copies that keep the GPU busy until the last is launched, so gaps between
    launches do not count, however slow Python is. Only a call that waits for the GPU itself leaves gaps, in both its
    times; its host time is then taken from samples without copies, because it would wait for them too.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        ones = np.ones(COPY_BYTES // 4, np.float32)  # CuPy's own function would be a kernel that needs CUDA's headers
        self._from, self._to = cupy.asarray(ones), cupy.asarray(ones)
        self._copy_seconds: float | None = None

    def copy(self) -> None:
        """Copy 256 MiB on the GPU."""
        self._cupy.copyto(self._to, self._from)

    def copy_bytes_per_second(self, samples: int) -> float:
        """Return the bytes per second that a copy reads and writes."""
        return 2 * COPY_BYTES / self.times(self.copy, samples).seconds

    def times(self, call: Callable[[], Any], samples: int) -> Times:
        call()
        self._cupy.cuda.Device().synchronize()
        begun = time.perf_counter()
        call()
        copies = self._copies_for(2 * _CALLS_OF_SAMPLE * (time.perf_counter() - begun))
        taken: list[float] = []
        launched: list[float] = []
        while len(taken) < samples:
            seconds, host_seconds, hidden = self._sample(call, copies)
            if not hidden and copies < _MOST_COPIES:
                copies = min(2 * copies, _MOST_COPIES)
                continue
            if not hidden:
                host_seconds = self._sample(call, 0)[1]
            taken.append(seconds)
            launched.append(host_seconds)
        return Times(middle(taken), middle(launched))

    def _copies_for(self, seconds: float) -> int:
        """Return the number of copies that keep the GPU busy for this time."""
        if self._copy_seconds is None:
            self._copy_seconds = min(self._sample(self.copy, 1)[0] for _ in range(3))
        return min(4 + math.ceil(seconds / self._copy_seconds), _MOST_COPIES)

    def _sample(self, call: Callable[[], Any], copies: int) -> tuple[float, float, bool]:
        """Return the seconds of a call on the GPU and to launch it, and True if the copies outlasted all launches."""
        begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        for _ in range(copies):
            self.copy()
        begin.record()
        begun = time.perf_counter()
        for _ in range(_CALLS_OF_SAMPLE):
            call()
        host_seconds = time.perf_counter() - begun
        end.record()
        hidden = not begin.done
        end.synchronize()
        seconds = float(self._cupy.cuda.get_elapsed_time(begin, end)) / 1e3
        return seconds / _CALLS_OF_SAMPLE, host_seconds / _CALLS_OF_SAMPLE, hidden


class CpuMachine:
    """The numba kernels; time by the wall clock."""

    name, on_device = "cpu", False

    def __init__(self) -> None:
        self.kernels = _operations("Cpu")
        self._from, self._to = (torch.full((COPY_BYTES // 4,), value) for value in (1.0, 2.0))

    def place(self, array: NDArray[Any]) -> Any:
        if array.ndim == 2 and array.dtype == np.float32:
            rows = aligned_zeros(*array.shape)
            rows[...] = array
            return rows
        return array

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        return self.place(np.zeros(shape, dtype))

    def times(self, call: Callable[[], Any], samples: int) -> Times:
        call()
        return Times(middle(seconds_of(lambda _: call(), samples)), None)

    def copy_bytes_per_second(self, samples: int) -> float:
        """Copy 256 MiB by all threads of torch."""
        return 2 * COPY_BYTES / self.times(lambda: self._to.copy_(self._from), samples).seconds


class CudaMachine(GpuClock):
    """GPU 0, on the default stream; time by CUDA events."""

    on_device = True

    def __init__(self) -> None:
        device: Any = open_runtime(0).kernels
        self.kernels = _operations("Cuda", device)
        device.prepare()
        super().__init__(importlib.import_module("cupy"))
        self.name = self._cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()

    def place(self, array: NDArray[Any]) -> Any:
        return self._cupy.asarray(array)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        return self._cupy.zeros(shape, dtype)


class ShimMachine:
    """The CUDA sources run on the CPU by the tests' shim; times are meaningless."""

    name, on_device = "shim", True

    def __init__(self) -> None:
        self.device = importlib.import_module("tests.kernels.shim.device").ShimDevice("random")
        self.kernels = _operations("Cuda", self.device)

    def place(self, array: NDArray[Any]) -> Any:
        return self.device.place(array)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        return self.device.array(shape, dtype)


Measured = CpuMachine | CudaMachine
Machine = Measured | ShimMachine


def _operations(kind: str, *device: Any) -> Any:
    return getattr(importlib.import_module("tests.kernels.machines"), kind)(*device)


def open_machine(wanted: str | None) -> Measured:
    """Return the requested machine; by default the GPU if there is one."""
    if wanted != "cpu":
        try:
            return CudaMachine()
        except CudaError as error:
            if wanted == "cuda":
                raise SystemExit(f"{error} Or take --dry.") from error
            say(f"on the CPU: {error}")
    return CpuMachine()
