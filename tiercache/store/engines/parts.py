"""Parts as they arrive at ``Engine.put``: what they must be for the blobs that are put."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.engines.engine import PAGE_BYTES
from tiercache.store.files import paged

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from numpy.typing import NDArray

    from tiercache.store.engines.engine import Blob, Part


class PartCheck:
    """Checks that the names of blobs are new, and that parts fill each blob exactly once."""

    def __init__(self, blobs: Sequence[Blob], names: Container[str], label: str) -> None:
        """``names`` are those of the store, and ``label`` is the store in an error message. Raises ValueError."""
        self._blobs, self._label = blobs, label
        self._filled: list[list[tuple[int, int]]] = [[] for _ in blobs]
        new = set[str]()
        for blob in blobs:
            if blob.name in names or blob.name in new:
                raise ValueError(f"{label} has a blob {blob.name!r} already: put it under another name")
            if blob.size < 0:
                raise ValueError(f"blob {blob.name!r} has a size of {blob.size} bytes: it must not be negative")
            new.add(blob.name)

    def take(self, part: Part) -> tuple[int, int, NDArray[np.uint8]]:
        """Return a part with its data as bytes, without a copy where it is contiguous. Raises ValueError."""
        index, offset, data = part
        if not 0 <= index < len(self._blobs):
            raise ValueError(f"a part is of blob {index}, but {len(self._blobs)} blobs are put: number them from 0")
        if offset % PAGE_BYTES or offset < 0 or offset + data.nbytes > self._blobs[index].size:
            raise self._wrong(index, f"a part of bytes {offset:,} to {offset + data.nbytes:,}")
        if data.nbytes:
            self._filled[index].append((offset, offset + paged(data.nbytes)))
        return index, offset, data.reshape(-1).view(np.uint8)

    def finish(self) -> None:
        """Raise ValueError unless every page was filled once."""
        for index, blob in enumerate(self._blobs):
            end = 0
            for low, high in sorted(self._filled[index]):
                if low != end:
                    break
                end = high
            if end != paged(blob.size) or sum(high - low for low, high in self._filled[index]) != end:
                raise self._wrong(index, "parts that leave a gap or overlap")

    def _wrong(self, index: int, found: str) -> ValueError:
        blob = self._blobs[index]
        return ValueError(
            f"blob {blob.name!r} of {self._label} has {blob.size:,} bytes and {found}: let each part begin at a "
            f"multiple of {PAGE_BYTES} and the next one where its last page ends"
        )
