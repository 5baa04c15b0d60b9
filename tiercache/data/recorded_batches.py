"""The batches of a loader whose keys a recorded sub-dataset has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.bits import hash_keys, mix

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tiercache.data.array_file import ArrayFile
    from tiercache.data.manifest import Recording


def lookup_digest(keys: NDArray[np.int64], table_id: int) -> int:
    """Return the digest of the keys of a lookup, in any order: ``mix`` of the sum of their hashes and their number."""
    total = np.add.reduce(hash_keys(keys, table_id), dtype=np.uint64, keepdims=True)
    return int(mix(total + np.uint64(keys.size))[0])  # arrays wrap around without a warning


class RecordedBatches:
    """The arrays of recorded batches, mapped and checked at their first use. Legend: B batches, N samples."""

    def __init__(self, file: Callable[[], ArrayFile], recording: Recording) -> None:
        self._file, self.recording = file, recording

    @property
    def ends(self) -> NDArray[np.int64]:
        """(B,): the end of each batch, in samples."""
        return self._whole("ends")

    def indices(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices, in the loader's dataset, of the samples at ``places``."""
        file = self._file()
        file.check("indices", places, places + 1)
        return file.array("indices")[places]

    def digests(self, batch: int) -> NDArray[np.uint64]:
        """Return the digests of the distinct lookups of a batch, ascending."""
        first, last = self._whole("lookups")[batch : batch + 2].tolist()
        return self._whole("digests")[first:last]

    def _whole(self, name: str) -> NDArray[Any]:
        file = self._file()
        values = file.array(name)
        file.check(name, 0, values.size)
        return values
