"""Local ids of raw keys that were found in host memory: by the CPU's index, or by whoever searches key sets there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.kernels.cpu import key_index

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tiercache.kernels.cpu.key_index import KeySet, Missing
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
