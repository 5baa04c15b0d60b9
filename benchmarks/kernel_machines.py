"""Where the kernel benchmark runs: the numba kernels, CUDA kernels on a GPU, or CUDA sources run on the CPU.

All three have the same operations under the same names; a machine adds the device to a call where one is needed.
"""

from __future__ import annotations

import importlib
import statistics
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from benchmarks.kernel_clock import COPY_BYTES, GpuClock, Times
from tiercache.backends.cuda_runtime import open_runtime
from tiercache.kernels.arrays import aligned_zeros

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import DTypeLike, NDArray

__all__ = ["CpuMachine", "CudaMachine", "Machine", "ShimMachine"]


class Machine(Protocol):
    """What the cases need."""

    name: str
    on_device: bool
    """Whether the CUDA kernels are called."""
    kernels: Any
    """The operations: as of `tests.kernels.machines`."""

    def place(self, array: NDArray[Any]) -> Any:
        """Return a copy of an array where the kernels want it."""

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Return an array where the kernels want it, of any content."""

    def times(self, call: Callable[[], Any], samples: int) -> Times:
        """Return the median times of a call."""

    def copy_bytes_per_second(self, samples: int) -> float:
        """Return read and written bytes a second of a copy."""


class CpuMachine:
    """The numba kernels; time by the wall clock."""

    name, on_device = "cpu", False

    def __init__(self) -> None:
        self.kernels: Any = importlib.import_module("tests.kernels.machines").Cpu()
        self._copied: tuple[Any, Any] | None = None

    def place(self, array: NDArray[Any]) -> Any:
        """Return the array itself, or an aligned copy of rows."""
        if array.ndim == 2 and array.dtype == np.float32:
            rows = aligned_zeros(*array.shape)
            rows[...] = array
            return rows
        return array

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Return an array whose pages were touched."""
        return self.place(np.zeros(shape, dtype))

    def times(self, call: Callable[[], Any], samples: int) -> Times:
        """Return the median of single calls, after one that counts for nothing."""
        call()
        taken = []
        for _ in range(samples):
            begun = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begun)
        return Times(statistics.median(taken), None)

    def copy_bytes_per_second(self, samples: int) -> float:
        """Copy 256 MiB by all threads of torch."""
        if self._copied is None:
            self._copied = torch.full((COPY_BYTES // 4,), 1.0), torch.full((COPY_BYTES // 4,), 2.0)
        source, target = self._copied
        return 2 * COPY_BYTES / self.times(lambda: target.copy_(source), samples).seconds


class _OnDevice:
    """Calls of CUDA kernels on some device."""

    on_device = True

    def __init__(self, device: Any) -> None:
        self.device = device
        self.kernels: Any = importlib.import_module("tests.kernels.machines").Cuda(device)


class CudaMachine(_OnDevice):
    """GPU 0, on the default stream but for what is done `beside`; time by CUDA events."""

    def __init__(self) -> None:
        super().__init__(open_runtime(0).kernels)
        self.device.prepare()
        self._cupy = importlib.import_module("cupy")
        self._beside = [self._cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        self.name = self._cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
        self._clock = GpuClock(self._cupy)

    def place(self, array: NDArray[Any]) -> Any:
        """Copy to the GPU."""
        return self._cupy.asarray(array)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Return zeros on the GPU."""
        return self._cupy.zeros(shape, dtype)

    def times(self, call: Callable[[], Any], samples: int) -> Times:
        """Return the median over samples of ten calls, on the GPU and to launch."""
        return self._clock.times(call, samples)

    def pinned(self, num_bytes: int) -> Any:
        """Return pinned host memory, which has the same address on the GPU."""
        return self._cupy.cuda.alloc_pinned_memory(num_bytes)

    def copy_over_link(self, pinned: Any, array: Any, way: str) -> None:
        """Copy an array "to_host" or "from_host" by the copy engine."""
        runtime = self._cupy.cuda.runtime
        if way == "to_host":
            runtime.memcpyAsync(pinned.ptr, array.data.ptr, array.nbytes, runtime.memcpyDeviceToHost, 0)
        else:
            runtime.memcpyAsync(array.data.ptr, pinned.ptr, array.nbytes, runtime.memcpyHostToDevice, 0)

    def beside(self, *calls: Callable[[], Any]) -> None:
        """Do two calls at once, each on a stream of its own, behind what was begun and before what comes next."""
        cupy = self._cupy.cuda
        begun = cupy.Event(disable_timing=True)
        begun.record(cupy.Stream.null)
        for stream, call in zip(self._beside, calls, strict=True):
            stream.wait_event(begun)
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):  # type: ignore[no-untyped-call]
                call()
            done = cupy.Event(disable_timing=True)
            done.record(stream)
            cupy.Stream.null.wait_event(done)

    def forget(self) -> None:
        """Give what no array needs back to the GPU: torch has a pool of its own."""
        torch.cuda.empty_cache()
        self._cupy.get_default_memory_pool().free_all_blocks()

    def copy_bytes_per_second(self, samples: int) -> float:
        """Copy 256 MiB on the GPU."""
        return 2 * COPY_BYTES / self._clock.times(self._clock.copy, samples).seconds


class ShimMachine(_OnDevice):
    """The CUDA sources run on the CPU by the tests' shim: every call once, and times mean nothing."""

    name = "shim"

    def __init__(self) -> None:
        super().__init__(importlib.import_module("tests.kernels.shim.device").ShimDevice("random"))

    def place(self, array: NDArray[Any]) -> Any:
        """Copy to guarded memory."""
        return self.device.place(array)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Return rubbish in guarded memory."""
        return self.device.array(shape, dtype)

    def times(self, call: Callable[[], Any], _samples: int) -> Times:
        """Call once."""
        begun = time.perf_counter()
        call()
        return Times(time.perf_counter() - begun, None)

    def copy_bytes_per_second(self, _samples: int) -> float:
        """Nothing is measured here."""
        return float("nan")
