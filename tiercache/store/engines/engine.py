"""The seam between the store and its engines: seven verbs over immutable, named blobs.

The memory engine, a dict, defines them, and tests run on it. Shared by all engines: the checks of a put, and the record
of a head. Used by the store: counters of bytes.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from tiercache.store.files import PAGE_BYTES, Notes, paged
from tiercache.store.records import checked_digest, decode, encode, whole
from tiercache.store.store_errors import BlockReadError, StoreError, StoreFullError, parsing

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.layout import SegmentLayout
    from tiercache.store.table import Group

    Part = tuple[int, int, NDArray[Any]]
    """The index of a blob being put, the byte of it at which the data begins, and contiguous data."""

WRITE_BYTES = 64 << 20
"""Default limit on the bytes of copied parts that are not written yet."""


class BlobRows(NamedTuple):
    """The meaning of the bytes of a segment's blob, for an engine that stores each field as an array."""

    group: Group
    """The group of the rows: fields and tables."""
    layout: SegmentLayout
    """Maps rows to blocks and pages."""


class Blob(NamedTuple):
    """Immutable bytes with a name. Their front may be dropped."""

    name: str
    """ASCII words and numbers between slashes, unique in a store. In a segment the last word is "rows", "keys" or
    "changed", and ``of`` is set."""
    size: int
    """Bytes."""
    of: BlobRows | None = None
    """Set for rows, keys, and last changes, which are put block by block; rows are read by whole pages."""


class Stored(NamedTuple):
    """The engine's entry for a blob."""

    size: int
    """Bytes, including dropped ones; fewer than were put if the blob is truncated."""
    dropped: int = 0
    """Bytes at the front that are gone, or may be."""


class Head(NamedTuple):
    """The state that an engine publishes."""

    name: str
    """Name of the blob with the newest commit, or with the tables before the first commit."""
    size: int
    """Its bytes."""
    digest: str
    """Its SHA-256, as hexadecimal digits."""


class ReadRequest(NamedTuple):
    """A request to read bytes of a blob."""

    blob: Blob
    offset: int
    """The first byte."""
    out: NDArray[np.uint8]
    """Contiguous memory to fill."""


class Engine(Protocol):
    """Stores blobs, and the head that names the newest commit; does not know their contents.

    ``MemoryEngine`` is the executable definition. Blobs are kept until ``drop``: the engine never decides which are
    needed. ``put``, ``drop`` and ``publish`` are called by one thread at a time and change nothing if they raise,
    unless stated otherwise; ``read``, ``list`` and ``newest`` may be called by other threads meanwhile, and by the
    iterable of parts of a ``put``.
    """

    memory_bytes: int
    """Maximum size of copies of parts being written, or of one part that is larger; set by the memory plan."""
    lease_folder: Path | None
    """The folder for leases of readers in other processes; None if there is none."""
    notes: Notes | None
    """The notes of the store; None if it does not outlive the process."""
    epoch: int
    """0 if a lock keeps writers apart; otherwise a number unique to this writer, which ends the names of all its blobs.
    """

    def put(self, blobs: Sequence[Blob], parts: Iterable[Part], *, stable: bool = False) -> None:
        """Write blobs, all of them or none; durable with the next ``publish``, and lost by a crash before it.

        Parts fill each blob exactly once, in any order; each begins at a multiple of ``PAGE_BYTES``, and is a block if
        the blob is ``of`` rows. Each part is copied before the next one is drawn or, for ``stable`` arrays, which do
        not change, before this returns. Names are new, or were dropped. Raises StoreFullError, before a part is drawn
        if known by then, StoreError, ValueError for parts that do not fit the blobs, and the iterable's errors.
        """

    def read(self, *requests: ReadRequest) -> None:
        """Fill ``out`` of each request. Raises BlockReadError for one, whose message follows the blob's name."""

    def drop(self, blobs: Iterable[tuple[str, int | None]], *, shrink: bool = False) -> None:
        """Free blobs up to a byte, or whole (None), after the commit that gave them up is durable.

        Their space is reused, and returned to the file system with ``shrink``. For a byte inside a page or chunk, only
        whole pages or chunks before it are freed. These bytes are not being read and will not be. Missing names are
        ignored. Blobs that cannot be deleted now are deleted when the engine is next opened for writing and ``drop`` is
        repeated. Raises StoreError.
        """

    def list(self) -> Mapping[str, Stored]:
        """Return all existing blobs by name, including those put since the last ``publish``; reads none.

        For writers and checks; a crash's leftovers may be included.
        """

    def newest(self) -> Head | None:
        """Return the head published last, by any process; None before the first. Raises CorruptStoreError."""

    def publish(self, head: Head, before: Head | None) -> None:
        """Make all blobs durable, then make ``head`` the newest: all or nothing, durably.

        Raises StoreFullError; StoreError if ``newest`` is not ``before``, since another writer came, and then changes
        nothing. If it raises although ``newest`` returns ``head``, the head is durable, and the next ``publish``
        completes this one first.
        """

    def close(self) -> None:
        """Free all resources; a second time does nothing. No read may be in progress."""


class HeadRecord(NamedTuple):
    """A head as it is stored: the value of LMDB's key "head", and the objects below ``heads`` of the Zarr engine."""

    number: int
    """Counts heads, from 1; 0 before the first."""
    head: Head | None
    """None after a writer took over an object store without a head."""
    before: str = ""
    """The digest of the previous head; for the first, defined by the engine."""
    blobs: int = 0
    """The number of blobs in LMDB's map."""
    checksums: int = 0
    """The sum of the checksums in LMDB's map."""
    writer: str = ""
    """A name unique to the writer, on object stores."""

    def to_bytes(self) -> bytes:
        """Return the record."""
        head = {} if self.head is None else self.head._asdict()
        others = {"blobs": self.blobs, "checksums": self.checksums, "writer": self.writer}
        values = {"number": self.number, "before": self.before} | head
        return encode("head", values | {name: value for name, value in others.items() if value}, {})

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> HeadRecord:
        """Read the bytes of ``to_bytes``. Raises CorruptStoreError; ``name`` is its name in messages."""
        values, head = decode("head", data, name)[0], None
        with parsing(name):
            number, blobs, checksums = (whole(values.get(key, 0), key) for key in ("number", "blobs", "checksums"))
            if "name" in values:
                head = Head(str(values["name"]), whole(values["size"], "size"), checked_digest(values["digest"]))
            before = checked_digest(values["before"]) if values["before"] else ""
            return cls(number, head, before, blobs, checksums, str(values.get("writer", "")))


def check_names(blobs: Sequence[Blob], names: Container[str], label: str) -> None:
    """Raise ValueError unless the names of ``blobs`` are not among the store's ``names``."""
    new = set[str]()
    for blob in blobs:
        if blob.name in names or blob.name in new:
            raise ValueError(f"{label} already has a blob {blob.name!r}: put it under another name")
        if blob.size < 0:
            raise ValueError(f"blob {blob.name!r} has a size of {blob.size} bytes: it must not be negative")
        new.add(blob.name)


def checked_parts(
    blobs: Sequence[Blob], parts: Iterable[Part], label: str
) -> Iterator[tuple[int, int, NDArray[np.uint8]]]:
    """Yield parts with their data as bytes, without a copy; raises ValueError unless they fill every page once."""
    filled: list[list[tuple[int, int]]] = [[] for _ in blobs]

    def wrong(index: int, found: str) -> ValueError:
        name, size, *_ = blobs[index]
        return ValueError(
            f"blob {name!r} of {label} has {size:,} bytes and {found}: let each part begin at a multiple of "
            f"{PAGE_BYTES} and the next one where its last page ends"
        )

    for index, offset, data in parts:
        if not 0 <= index < len(blobs):
            raise ValueError(f"a part is of blob {index}, but {len(blobs)} blobs are put: number them from 0")
        if offset % PAGE_BYTES or offset < 0 or offset + data.nbytes > blobs[index].size:
            raise wrong(index, f"a part of bytes {offset:,} to {offset + data.nbytes:,}")
        if data.nbytes:
            filled[index].append((offset, offset + paged(data.nbytes)))
        yield index, offset, data.reshape(-1).view(np.uint8)
    for index, runs in enumerate(filled):
        end = 0
        for low, high in sorted(runs):
            if low != end:
                raise wrong(index, "parts that leave a gap or overlap")
            end = high
        if end != paged(blobs[index].size):
            raise wrong(index, "parts that leave a gap or overlap")


class BlobBytes(NamedTuple):
    """A blob, and its bytes from the first one that was not dropped."""

    dropped: int
    data: NDArray[np.uint8]

    @property
    def size(self) -> int:
        """Bytes, including dropped ones."""
        return self.dropped + self.data.size


class MemoryEngine:
    """Blobs in memory. The same instance opened again is the same store: closing loses nothing.

    Do not use it for rows that must outlive the process.
    """

    epoch = 0
    lease_folder: Path | None = None
    notes: Notes | None = None
    memory_bytes = WRITE_BYTES

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        """``capacity_bytes`` bounds all blobs, as a disk would; None: unbounded."""
        self.label = "the store in memory"
        self.capacity_bytes = capacity_bytes
        self.blobs: dict[str, BlobBytes] = {}
        """By name."""
        self.head: Head | None = None
        self._lock = threading.Lock()

    def put(self, blobs: Sequence[Blob], parts: Iterable[Part], *, stable: bool = False) -> None:
        """Copy all blobs, or none."""
        check_names(blobs, self.blobs, self.label)
        with self._lock:
            stored = sum(blob.data.size for blob in self.blobs.values())
        added = sum(blob.size for blob in blobs)
        if self.capacity_bytes is not None and stored + added > self.capacity_bytes:
            limit = f"the memory engine may hold {self.capacity_bytes:,} but holds {stored:,}"
            raise StoreFullError(needed_bytes=added, limit=limit, advice="raise capacity_bytes")
        copies = [np.zeros(blob.size, np.uint8) for blob in blobs]
        for index, offset, data in checked_parts(blobs, parts, self.label):
            copies[index][offset : offset + data.size] = data
        with self._lock:
            self.blobs |= {blob.name: BlobBytes(0, data) for blob, data in zip(blobs, copies, strict=True)}

    def read(self, *requests: ReadRequest) -> None:
        """Copy bytes of blobs."""
        for (name, *_), offset, out in requests:
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
        """Drop whole pages; missing names are ignored."""
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
        """Return the last published head."""
        return self.head

    def publish(self, head: Head, before: Head | None) -> None:
        """Set the head."""
        if self.head != before:
            raise StoreError(f"{self.label} has the head {self.head}, not {before}: open it again")
        self.head = head

    def close(self) -> None:
        """Keep everything for the next opening."""


class Counters:
    """Plain counters that only grow; all bytes are of blobs, without an engine's overhead."""

    def __init__(self) -> None:
        self.row_bytes_written = 0
        self.key_bytes_written = 0
        self.changed_bytes_written = 0
        """Last changes of moved rows."""
        self.state_bytes_written = 0
        self.meta_bytes_written = 0
        """Commits, their lists, and descriptions of segments."""
        self.rows_written = 0
        self.row_bytes_read = 0
        """By ``read`` and ``read_rows``, whole pages."""
        self.key_bytes_read = 0
        self.changed_bytes_read = 0
        self.state_bytes_read = 0
        self.meta_bytes_read = 0
        self.rows_read = 0
        """By ``read``: rows of the pages; by ``read_rows``: rows returned."""
        self.reads = 0
        """Calls of the engine for rows, keys, last changes and state."""
        self.commits = 0
        self.spill_bytes_written = 0
        """To temporary files, by scans and fills that exceed their memory."""
        self.spill_bytes_read = 0
        self.spill_writes = 0
        """Writes of temporary files, each of one sorted batch."""
        self._lock = threading.Lock()

    @property
    def bytes_written(self) -> int:
        """Rows, keys, last changes and state."""
        return self.row_bytes_written + self.key_bytes_written + self.changed_bytes_written + self.state_bytes_written

    @property
    def bytes_read(self) -> int:
        """Rows, keys, last changes and state."""
        return self.row_bytes_read + self.key_bytes_read + self.changed_bytes_read + self.state_bytes_read

    def add(self, **amounts: int) -> None:
        """Add to counters by name; from any thread."""
        with self._lock:
            counters = self.__dict__
            for name, amount in amounts.items():
                counters[name] += amount
