"""The upload of one batch to a GPU: from pinned memory, on a stream of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiercache.backends.cuda_runtime import TORCH_DTYPES
from tiercache.backends.runs import runs_of
from tiercache.data.encoded_batch import SampleBuffers
from tiercache.kernels.cuda.sorting import sort_positions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike, NDArray

    from tiercache.backends.cuda_runtime import CudaRuntime
    from tiercache.backends.runs import Run
    from tiercache.kernels.cuda.sorting import Positions, Runs
    from tiercache.values.ids import Array


class PinnedUpload:
    """The upload to a GPU: samples are read into pinned memory and copied from there on the stream of uploads."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime, self._pinned = runtime, _PinnedArrays(runtime)
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

    def to_device(self, array: NDArray[Any]) -> Array:
        """Copy it from where it lies in the buffers, or from a pinned copy."""
        return self._upload(self._pinned.tensor_of(array), array.shape)

    def join(self, arrays: Sequence[NDArray[np.int32]]) -> tuple[list[Run], Array]:
        """Join them on the GPU: a copy for each run."""
        runs = runs_of(arrays)
        with self._runtime.uploading():
            there = self._runtime.tensor((sum(array.size for array in arrays),), torch.int32)
            at = 0
            for run in runs:
                self._runtime.copy(self._pinned.tensor_of(run.values), there[at : at + run.values.size], lasting=True)
                at += run.values.size
        self._there.append(there)
        return runs, there

    def weights(self, size: int, parts: Sequence[tuple[int, int, Array]]) -> Array:
        """Fill pinned memory, and copy it."""
        pinned = self._runtime.pinned((size,), torch.float32)
        values = pinned.numpy()
        values.fill(1.0)
        for first, last, some in parts:
            values[first:last] = some
        return self._upload(pinned, (size,))

    def sort(self, lookups: Sequence[Positions]) -> Sequence[Runs]:
        """Sort them all at once, on the stream of uploads, beside the training."""
        with self._runtime.uploading():
            found = sort_positions(self._runtime.kernels, lookups)
        self._there += {id(runs.memory): runs.memory for runs in found}.values()
        return found

    def send(self) -> None:
        """Note the present end of the stream of uploads."""
        self._sent = self._runtime.uploaded()

    def receive(self) -> None:
        """Have the current stream wait, and keep the memory of the tensors until it is done with them."""
        self._runtime.receive(self._sent, self._there)

    def _upload(self, pinned: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        with self._runtime.uploading():
            there = self._runtime.upload(pinned)
        self._there.append(there)
        return there.view(shape)


class _PinnedArrays:
    """Pinned memory of one batch. It refers to nobody: in a cycle it would outlive the batch."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._held: dict[int, tuple[NDArray[np.uint8], torch.Tensor]] = {}  # by the flat array that views have as base

    def allocate(self, size: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return a flat array of undefined content."""
        pinned = self._runtime.pinned((max(1, size) * np.dtype(dtype).itemsize,), torch.uint8)
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
