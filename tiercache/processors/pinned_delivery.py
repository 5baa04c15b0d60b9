"""What one batch brings to a GPU: from pinned memory, on a stream of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiercache.passes.samples import SampleBuffers
from tiercache.processors.gpu import TORCH_DTYPES
from tiercache.processors.runs import runs_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike, NDArray

    from tiercache.processors.entries import Array
    from tiercache.processors.gpu import Gpu
    from tiercache.processors.runs import Run


class PinnedDelivery:
    """To a GPU: samples are read into pinned memory and copied from there on a stream of deliveries."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._pinned = gpu, _PinnedArrays(gpu)
        self._there: list[torch.Tensor] = []
        self._sent: Any = None
        self.buffers = SampleBuffers(self._pinned.allocate)

    @property
    def device_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._there)

    @property
    def host_bytes(self) -> int:
        """Bytes of all pinned memory that samples were read into."""
        return self.buffers.num_bytes

    def bring(self, array: NDArray[Any]) -> Array:
        """Copy it from where it lies in the buffers, or from a pinned copy."""
        return self._bring(self._pinned.tensor_of(array), array.shape)

    def join(self, arrays: Sequence[NDArray[np.int32]]) -> tuple[list[Run], Array]:
        """Join them on the GPU: a copy for each run."""
        runs = runs_of(arrays)
        with self._gpu.delivering():
            there = self._gpu.tensor((sum(array.size for array in arrays),), torch.int32)
            at = 0
            for run in runs:
                self._gpu.copy(self._pinned.tensor_of(run.values), there[at : at + run.values.size], lasting=True)
                at += run.values.size
        self._there.append(there)
        return runs, there

    def weights(self, size: int, parts: Sequence[tuple[int, int, Array]]) -> Array:
        """Fill pinned memory, and copy it."""
        pinned = self._gpu.pinned((size,), torch.float32)
        values = pinned.numpy()
        values.fill(1.0)
        for first, last, some in parts:
            values[first:last] = some
        return self._bring(pinned, (size,))

    def send(self) -> None:
        """Note how far the stream of deliveries has to come."""
        self._sent = self._gpu.sent()

    def receive(self) -> None:
        """Have the current stream wait, and memory of the tensors be used again only behind it."""
        self._gpu.receive(self._sent, self._there)

    def _bring(self, pinned: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        with self._gpu.delivering():
            there = self._gpu.upload(pinned)
        self._there.append(there)
        return there.view(shape)


class _PinnedArrays:
    """Pinned memory of one batch. It knows nothing of who has it: in a cycle it would outlive the batch."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._held: dict[int, tuple[NDArray[np.uint8], torch.Tensor]] = {}  # by the flat array that views have as base

    def allocate(self, size: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return a flat array of undefined content."""
        pinned = self._gpu.pinned((max(1, size) * np.dtype(dtype).itemsize,), torch.uint8)
        flat: NDArray[np.uint8] = pinned.numpy()
        self._held[id(flat)] = flat, pinned
        return flat.view(dtype)[:size]

    def tensor_of(self, array: NDArray[Any]) -> torch.Tensor:
        """Return a flat tensor over the memory of ``array``, or over a copy: as torch gave it, for it counts uses."""
        flat, pinned = self._held.get(id(array.base), (None, None))
        if flat is None or pinned is None or not array.flags.c_contiguous:
            flat = self.allocate(array.size, array.dtype)
            flat[...] = array.reshape(-1)
            return self.tensor_of(flat)
        first = array.ctypes.data - flat.ctypes.data
        return pinned[first : first + array.nbytes].view(TORCH_DTYPES[array.dtype])
