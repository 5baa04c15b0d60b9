"""Host arrays of batches: memory from a pool."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


LINE_BYTES = 64
MAX_KEPT = 8  # buffers of one size class kept for reuse: more than one step is in flight


class BufferPool:
    """Allocates uninitialized arrays, and reuses their memory once they are garbage. For any thread.

    A fresh array of many megabytes costs as much in page faults as filling it. Sizes are rounded up to a power
    of two times 1, 1.25, 1.5 or 1.75, so that batches of nearly equal size share buffers.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._lock = threading.RLock()  # garbage collection may end a lease on a thread that is beginning another
        self.num_bytes = 0
        """Bytes of all buffers, in use and kept: the memory of batches, which no budget counts."""

    def take(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialized array; torch tensors made from it keep it alive."""
        dtype = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        size = _size_class(max(1, count * dtype.itemsize))
        with self._lock:
            kept = self._free.setdefault(size, [])
            block = kept.pop() if kept else None
            self.num_bytes += 0 if block is not None else size
        if block is None:
            memory = np.empty(size + LINE_BYTES, dtype=np.uint8)
            skip = -memory.ctypes.data % LINE_BYTES  # kernels stream whole cache lines
            block = memory[skip : skip + size]
        # frombuffer makes a separate array object: the finalizer runs when it and all its views are gone
        lease = np.frombuffer(memoryview(block.data), dtype=dtype, count=count)
        weakref.finalize(lease, self._reclaim, block)
        return lease.reshape(shape)

    def _reclaim(self, block: NDArray[np.uint8]) -> None:
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
