"""The engine that is a dict: the executable definition of the others, and what tests run on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.store.engines.engine import WRITE_BYTES, Stored, check_names, checked_parts
from tiercache.store.files import PAGE_BYTES
from tiercache.store.store_errors import BlockReadError, StoreError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.engines.engine import Blob, Head, Part, ReadRequest


class BlobBytes(NamedTuple):
    """A blob, and the bytes of it that were not dropped."""

    dropped: int
    data: NDArray[np.uint8]

    @property
    def size(self) -> int:
        """Bytes, those that were dropped included."""
        return self.dropped + self.data.size


class MemoryEngine:
    """Blobs in memory. The same instance opened again is the same store: closing loses nothing.

    Do not use it for rows that must outlive the process.
    """

    epoch = 0
    lease_folder: Path | None = None
    memory_bytes = WRITE_BYTES

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        """``capacity_bytes`` bounds all blobs, as a disk would; None bounds nothing."""
        self.label = "the store in memory"
        self.capacity_bytes = capacity_bytes
        self.blobs: dict[str, BlobBytes] = {}
        """By name."""
        self.head: Head | None = None
        self._lock = threading.Lock()

    def put(self, blobs: Sequence[Blob], parts: Iterable[Part], *, stable: bool = False) -> None:
        """Keep copies of all blobs, or of none."""
        check_names(blobs, self.blobs, self.label)
        with self._lock:
            stored = sum(blob.data.size for blob in self.blobs.values())
        added = sum(blob.size for blob in blobs)
        if self.capacity_bytes is not None and stored + added > self.capacity_bytes:
            raise StoreFullError(
                needed_bytes=added,
                limit=f"the memory engine may hold {self.capacity_bytes:,} and holds {stored:,}",
                advice="raise capacity_bytes",
            )
        copies = [np.zeros(blob.size, np.uint8) for blob in blobs]
        for index, offset, data in checked_parts(blobs, parts, self.label):
            copies[index][offset : offset + data.size] = data
        with self._lock:
            self.blobs |= {blob.name: BlobBytes(0, data) for blob, data in zip(blobs, copies, strict=True)}

    def read(self, request: ReadRequest) -> None:
        """Copy bytes of a blob."""
        (name, *_), offset, out = request
        with self._lock:
            blob = self.blobs.get(name)
        if blob is None:
            raise BlockReadError("is missing")
        if offset + out.size > blob.size:
            raise BlockReadError(f"ends at byte {blob.size:,} of {offset + out.size:,}")
        if offset < blob.dropped:
            raise BlockReadError(f"lacks its first {blob.dropped:,} bytes")
        out[:] = blob.data[offset - blob.dropped :][: out.size]

    def drop(self, blobs: Iterable[tuple[str, int | None]], *, shrink: bool = False) -> None:
        """Drop whole pages; of names that are gone already, nothing."""
        with self._lock:
            for name, upto in blobs:
                blob = self.blobs.pop(name, None)
                if blob is not None and upto is not None:
                    low = max(blob.dropped, blob.size if upto >= blob.size else upto // PAGE_BYTES * PAGE_BYTES)
                    self.blobs[name] = BlobBytes(low, blob.data[low - blob.dropped :].copy())

    def list(self) -> Mapping[str, Stored]:
        """Return a copy."""
        with self._lock:
            return {name: Stored(blob.size, blob.dropped) for name, blob in self.blobs.items()}

    def newest(self) -> Head | None:
        """Return what ``publish`` was told last."""
        return self.head

    def publish(self, head: Head, before: Head | None) -> None:
        """Set the head."""
        if self.head != before:
            raise StoreError(f"{self.label} has the head {self.head}, not {before}: open it again")
        self.head = head

    def close(self) -> None:
        """Keep everything, for the next opening."""
