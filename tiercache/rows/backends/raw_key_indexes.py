"""Local ids of raw keys that were found in host memory: by the CPU's index, or by whoever searches key sets there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiercache.kernels.cpu import key_index
from tiercache.kernels.cpu.key_index import KeySet
from tiercache.kernels.cuda import key_index as cuda_key_index

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tiercache.kernels.cpu.key_index import Missing
    from tiercache.rows.backends.cuda_runtime import CudaRuntime
    from tiercache.values.ids import Array


class HostFound:
    """Local ids that stand in host memory; on a GPU they were copied there too."""

    def __init__(self, host: NDArray[np.int32], there: Array, missing: Missing | None = None) -> None:
        """there: the same on the device. missing: None: to be counted."""
        self._host, self.there, self._missing = host, there, missing

    def missing(self) -> Missing:
        """Return at once."""
        if self._missing is None:
            gone = self._host < 0
            count = int(np.count_nonzero(gone))
            self._missing = key_index.Missing(count, int(np.argmax(gone)) if count else -1)
        return self._missing

    def host(self) -> NDArray[np.int32]:
        """Return them, not to be written to."""
        seen = self._host.view()
        seen.flags.writeable = False
        return seen


class HostKeyIndex:
    """The CPU's index, which reads key sets where they are mapped."""

    def __init__(self, num_keys: int, table_ids: NDArray[np.uint64]) -> None:
        self._index = key_index.KeyIndex(num_keys, table_ids)
        self.capacity, self.num_bytes = self._index.capacity, self._index.nbytes

    def build(self, key_sets: Sequence[KeySet]) -> None:
        """Insert key by key."""
        self._index.clear()
        self._index.extend(key_sets)

    def find(
        self, keys: Sequence[NDArray[np.int64]], starts: NDArray[np.int64], tables: NDArray[np.int64]
    ) -> HostFound:
        """Search on all threads."""
        joined = keys[0] if len(keys) == 1 else np.concatenate(keys)
        found = np.empty(joined.size, np.int32)
        return HostFound(found, found, self._index.find(joined, starts, tables, found))


SLICE_KEYS = 1 << 20
"""Keys of a key set that are brought to the device at a time."""


def bytes_for(num_keys: int, num_tables: int) -> int:
    """Return what an index for so many keys takes, with the room through which these come."""
    return cuda_key_index.bytes_for(num_keys, num_tables) + 8 * _slice_of(num_keys)


class CudaFound:
    """Local ids in device memory, and how many keys were missing; both come back when they are asked for."""

    def __init__(self, runtime: CudaRuntime, there: torch.Tensor, missing: cuda_key_index.MissingKeys) -> None:
        self._runtime, self.there, self._missing = runtime, there, missing
        self._host: NDArray[np.int32] | None = None

    def missing(self) -> Missing:
        """Wait for the search alone, and read 16 bytes."""
        with self._runtime.searching():
            return self._missing.read()

    def host(self) -> NDArray[np.int32]:
        """Wait for the search alone, and copy them once."""
        if self._host is None:
            with self._runtime.searching():
                self._host = self._runtime.download(self.there)
            self._host.flags.writeable = False
        return self._host


class CudaKeyIndex:
    """The index in device memory; all that touches it is done on the stream of searches."""

    def __init__(self, runtime: CudaRuntime, num_keys: int, table_ids: NDArray[np.uint64]) -> None:
        """Raises torch.OutOfMemoryError."""
        self._runtime = runtime
        with runtime.searching():
            self._index = cuda_key_index.KeyIndex(runtime.kernels, num_keys, table_ids)
            self._coming = runtime.tensor((_slice_of(num_keys),), torch.int64)
        self.capacity = self._index.capacity
        self.num_bytes = self._index.nbytes + 8 * self._coming.shape[0]

    def build(self, key_sets: Sequence[KeySet]) -> None:
        """Bring keys a slice at a time, by way of one slice of pinned memory; waits for each to be copied."""
        step = self._coming.shape[0]
        pinned = self._runtime.pinned((step,), torch.int64)
        with self._runtime.searching():
            self._index.clear()
            for table, keys, first_position in key_sets:
                for first in range(0, keys.size, step):
                    count = min(step, keys.size - first)
                    pinned.numpy()[:count] = keys[first : first + count]
                    there = self._coming[:count]
                    self._runtime.copy(pinned[:count], there)
                    self._index.extend([KeySet(table, there, first_position + first)])

    def find(
        self, keys: Sequence[NDArray[np.int64]], starts: NDArray[np.int64], tables: NDArray[np.int64]
    ) -> CudaFound:
        """Copy keys from pinned memory and search, in two launches; nobody waits."""
        size = int(starts[-1])
        pinned = self._runtime.pinned((size,), torch.int64)
        np.concatenate(keys, out=pinned.numpy())
        with self._runtime.searching():
            asked, missing = self._runtime.upload(pinned), cuda_key_index.MissingKeys(self._runtime.kernels)
            there: Any = self._runtime.tensor((size,), torch.int32)
            self._index.find(asked, starts, tables, there, missing)
        self._runtime.hand_over(there)
        return CudaFound(self._runtime, there, missing)


def _slice_of(num_keys: int) -> int:
    return min(max(1, num_keys), SLICE_KEYS)
