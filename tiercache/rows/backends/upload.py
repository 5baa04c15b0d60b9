"""The upload of one batch to the device, on any thread."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from tiercache.data.sub_dataset import SampleBuffers
from tiercache.kernels.cuda.sorting import sort_positions
from tiercache.rows.backends.cuda_runtime import TORCH_DTYPES
from tiercache.rows.backends.row_steps import runs_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike, NDArray

    from tiercache.kernels.cuda.sorting import RowOffsets, Runs
    from tiercache.rows.backends.cpu import CpuBackend
    from tiercache.rows.backends.cuda_runtime import CudaRuntime
    from tiercache.rows.backends.row_steps import Run
    from tiercache.values.ids import Array


LINE_BYTES = 64
MAX_KEPT = 8  # buffers of one size class kept for later: more than one step has in flight


class BufferPool:
    """Hands out uninitialized arrays and takes their memory back when nobody refers to them any more.

    A fresh array of many megabytes costs as much in page faults as filling it. Sizes are rounded up to a power
    of two times 1, 1.25, 1.5 or 1.75, so that batches of nearly equal size share buffers. For any thread.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._lock = threading.RLock()  # a lease may end, on the same thread, while another is given
        self.num_bytes = 0
        """Bytes of all buffers, in use and kept: what batches cost beside the budgets."""

    def take(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an array with undefined content; torch tensors made from it keep it alive."""
        dtype = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        size = _size_class(max(1, count * dtype.itemsize))
        with self._lock:
            kept = self._free.setdefault(size, [])
            block = kept.pop() if kept else None
            self.num_bytes += 0 if block is not None else size
        if block is None:
            room = np.empty(size + LINE_BYTES, dtype=np.uint8)
            skip = -room.ctypes.data % LINE_BYTES  # kernels stream whole cache lines
            block = room[skip : skip + size]
        # frombuffer makes an array object of our own: the finalizer fires when it and all its views are gone
        lease = np.frombuffer(memoryview(block.data), dtype=dtype, count=count)
        weakref.finalize(lease, self._come_back, block)
        return lease.reshape(shape)

    def _come_back(self, block: NDArray[np.uint8]) -> None:
        with self._lock:
            kept = self._free.setdefault(block.size, [])
            if len(kept) < MAX_KEPT:
                kept.append(block)
            else:
                self.num_bytes -= block.size


def _size_class(num_bytes: int) -> int:
    step = max(64, 1 << max(0, num_bytes.bit_length() - 3))
    return -(-num_bytes // step) * step


POOL = BufferPool()
"""Outputs and slots of all modules, and the rows of exchanged batches, on the CPU."""


class BatchUpload(Protocol):
    """Brings what one batch needs. One thread makes it and uploads all, then the training thread receives it."""

    @property
    def buffers(self) -> SampleBuffers:
        """Fresh memory to read samples into: arrays in it are uploaded without another copy on the host."""
        ...

    @property
    def device_bytes(self) -> int:
        """Bytes on the device; on a CPU all bytes of the batch."""
        ...

    @property
    def host_bytes(self) -> int:
        """Pinned memory in use; 0 on a CPU."""
        ...

    def to_device(self, array: NDArray[Any]) -> Array:
        """Like `Backend.to_device`."""
        ...

    def join(self, arrays: Sequence[NDArray[np.int32]]) -> tuple[list[Run], Array]:
        """Like `Backend.join`."""
        ...

    def weights(self, size: int, parts: Sequence[tuple[int, int, Array]]) -> Array:
        """Like `Backend.weights`, with weights of the data."""
        ...

    def sort(self, lookups: Sequence[RowOffsets]) -> Sequence[Any]:
        """Return the order of the ids of each lookup by position, if it is better found here than in the step."""
        ...

    def send(self) -> None:
        """Declare the upload complete. On the thread that made it."""
        ...

    def receive(self) -> None:
        """Let later work on torch's current stream use what was uploaded. On the training thread; does not wait."""
        ...


class HostUpload:
    """The upload to a CPU: arrays are there when they are made."""

    host_bytes = 0

    def __init__(self, backend: CpuBackend) -> None:
        self._backend, self.buffers, self._beside = backend, SampleBuffers(), 0

    @property
    def device_bytes(self) -> int:
        """Bytes of the buffers and of what was joined beside them."""
        return self.buffers.num_bytes + self._beside

    def to_device(self, array: NDArray[Any]) -> Array:
        """Return it as it is."""
        return array

    def join(self, arrays: Sequence[NDArray[np.int32]]) -> tuple[list[Run], Array]:
        """Copy arrays that are not neighbors in memory."""
        runs, joined = self._backend.join(arrays)
        self._beside += joined.nbytes if joined.base is None else 0
        return runs, joined

    def sort(self, lookups: Sequence[RowOffsets]) -> Sequence[Any]:
        """Return none: lookups sort slots, which is as quick, on all threads."""
        return [None] * len(lookups)

    def weights(self, size: int, parts: Sequence[tuple[int, int, Array]]) -> Array:
        """Fill a fresh array."""
        found = self._backend.weights(size, parts)
        self._beside += found.nbytes
        return found

    def send(self) -> None:
        """Do nothing: all is there."""

    def receive(self) -> None:
        """Do nothing: all is there."""


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

    def sort(self, lookups: Sequence[RowOffsets]) -> Sequence[Runs]:
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
