"""A GPU for the parity tests, with the shim's calls in addition to a device's."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import DTypeLike, NDArray

from tiercache.kernels.cuda.cupy_device import CudaDevice
from tiercache.kernels.cuda.launch import Argument
from tiercache.rows.backends.cuda_runtime import open_runtime

_SPARE_BYTES = 1 << 30


@functools.cache
def _opened() -> CudaDevice:
    return open_runtime(0).kernels


class GpuDevice:
    """GPU 0. Without guards: compute-sanitizer finds out-of-bounds accesses here, as torch pools no memory then."""

    def __init__(self) -> None:
        self._device = _opened()
        self.num_sms = self._device.num_sms
        self.launches: list[str] = []
        self.describe, self.empty, self.sort = self._device.describe, self._device.empty, self._device.sort
        self.put, self.table, self.read = self._device.put, self._device.table, self._device.read

    def place(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).cuda()

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> torch.Tensor:
        rubbish: NDArray[Any] = np.empty(shape, dtype)
        rubbish.reshape(-1).view(np.uint8)[...] = 0xA5
        return self.place(rubbish)

    def large(self, rows: int, width: int) -> torch.Tensor:
        free, needed = torch.cuda.mem_get_info()[0], 4 * rows * width
        if needed + _SPARE_BYTES > free:
            pytest.skip(f"the array takes {needed:,} bytes, and {free:,} are free on the GPU")
        return torch.zeros((rows, width), device="cuda")

    def launch(self, kernel: str, blocks: int, arguments: Sequence[Argument]) -> None:
        self.launches.append(kernel)
        self._device.launch(kernel, blocks, arguments)

    def close(self) -> None:
        """Do nothing: torch owns the memory."""
