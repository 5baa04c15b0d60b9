"""The kernels of one GPU among several, launched from a thread that may be on another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike, NDArray

    from tiercache.kernels.cuda import CudaDevice
    from tiercache.kernels.launch import Argument


class CurrentKernels:
    """A `kernels.launch.Device`: each call is one of a `CudaDevice` with its GPU as torch's current one.

    CuPy makes its GPU current too, and then goes back to the one before by ``cudaSetDevice``, which since CUDA 12 makes
    a context there. Inside ``torch.cuda.device`` it finds its own, and torch goes back only to a GPU with a context.
    """

    def __init__(self, kernels: CudaDevice, device: torch.device) -> None:
        self._kernels, self._device = kernels, device
        self.interface: str = kernels.interface
        self.num_processors: int = kernels.num_processors

    def prepare(self) -> None:
        """Compile every kernel."""
        with torch.cuda.device(self._device):
            self._kernels.prepare()

    def empty(self, size: int, dtype: DTypeLike) -> Any:
        """Return an uninitialised array."""
        with torch.cuda.device(self._device):
            return self._kernels.empty(size, dtype)

    def put(self, array: NDArray[Any]) -> Any:
        """Return a copy on the device."""
        with torch.cuda.device(self._device):
            return self._kernels.put(array)

    def read(self, array: Any) -> NDArray[Any]:
        """Wait, and return a copy in host memory."""
        with torch.cuda.device(self._device):
            return self._kernels.read(array)

    def adopt(self, array: Any) -> Any:
        """Return an array over the memory of another."""
        with torch.cuda.device(self._device):
            return self._kernels.adopt(array)

    def lock(self, address: int, num_bytes: int) -> None:
        """Register pages of host memory. Any thread."""
        with torch.cuda.device(self._device):
            self._kernels.lock(address, num_bytes)

    def unlock(self, address: int) -> None:
        """Take them back. Any thread."""
        with torch.cuda.device(self._device):
            self._kernels.unlock(address)

    def launch(self, kernel: str, blocks: int, arguments: Sequence[Argument], shared_bytes: int = 0) -> None:
        """Start a kernel."""
        with torch.cuda.device(self._device):
            self._kernels.launch(kernel, blocks, arguments, shared_bytes)
