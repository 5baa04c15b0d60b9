"""A GPU for the tests of parity, with the calls that the shim has beside those of a device."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tiercache.kernels.cuda import device as cuda

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike, NDArray


_SPARE_BYTES = 1 << 30


@functools.cache
def _opened() -> cuda.CudaDevice:
    import cupy

    cupy.cuda.set_allocator(None)  # an array each, not parts of a pool: the sanitizer sees where one ends
    return cuda.open_device()


class GpuDevice:
    """GPU 0 on the default stream. Without guards: compute-sanitizer finds what leaves an array here."""

    def __init__(self) -> None:
        self._device = _opened()
        self.num_processors = self._device.num_processors
        self.launches: list[str] = []
        self.describe, self.empty = self._device.describe, self._device.empty
        self.put, self.read = self._device.put, self._device.read

    def place(self, array: Any) -> Any:
        """Return a copy of an array on the GPU that may be written to."""
        import cupy

        return cupy.array(np.ascontiguousarray(array))

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Return an array of rubbish on the GPU."""
        rubbish: NDArray[Any] = np.empty(shape, dtype)
        rubbish.reshape(-1).view(np.uint8)[...] = 0xA5
        return self.place(rubbish)

    def large(self, rows: int, width: int) -> Any:
        """Return zeros of float32 that take memory; skips the test where the GPU has too little."""
        import cupy

        free, needed = cupy.cuda.runtime.memGetInfo()[0], 4 * rows * width
        if needed + _SPARE_BYTES > free:
            pytest.skip(f"the array takes {needed:,} bytes, and {free:,} are free on the GPU")
        return cupy.zeros((rows, width), np.float32)

    def launch(self, kernel: str, blocks: int, arguments: Sequence[float], shared_bytes: int = 0) -> None:
        """Start a kernel and note its name."""
        self.launches.append(kernel)
        self._device.launch(kernel, blocks, arguments, shared_bytes)

    def close(self) -> None:
        """Nothing to give back: CuPy's pool has the arrays."""
