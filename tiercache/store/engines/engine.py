"""The seam between the store and its engines: seven verbs over immutable, named blobs.

The engine that is a dict defines them, and tests run on it. What engines share is here too: the checks of a put, and
the record of a head; and what the store keeps of an engine: the head that it is at, and counters of bytes.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from tiercache.store.files import PAGE_BYTES, paged
from tiercache.store.records import checked_digest, decode, encode, whole
from tiercache.store.store_errors import BlockReadError, CorruptStoreError, StoreError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Any

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
    """Whose rows: fields and tables."""
    layout: SegmentLayout
    """Maps rows to blocks and pages."""


class Blob(NamedTuple):
    """Immutable bytes with a name, of which the front may be dropped."""

    name: str
    """Words and numbers of ASCII between slashes, no two blobs of a store ever the same. The last word of a segment's
    is "rows", "keys" or "changed" where ``of`` says whose."""
    size: int
    """Bytes."""
    of: BlobRows | None = None
    """Set for rows, keys, and last changes, which are put block by block; rows are read by whole pages."""


class Stored(NamedTuple):
    """The engine's entry for a blob."""

    size: int
    """Bytes, those that were dropped included; fewer than were put where the blob was cut short."""
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
    """Bytes of a blob that are to be read."""

    blob: Blob
    offset: int
    """The first byte."""
    out: NDArray[np.uint8]
    """Contiguous memory to fill."""


class Engine(Protocol):
    """Keeps blobs, and the head that says which of them is the newest commit; knows nothing of what they say.

    ``MemoryEngine`` is the executable definition. Blobs belong to whoever put them until ``drop`` gives them back: the
    engine never decides what is needed. ``put``, ``drop`` and ``publish`` come from one thread at a time and, where
    they raise, have changed nothing, unless they say otherwise; ``read``, ``list`` and ``newest`` may be called by
    other threads meanwhile, and by what yields the parts of a ``put``.
    """

    label: str
    """The store in the words of a message."""
    memory_bytes: int
    """The most that copies of parts being written may take, or one part that is larger; who plans memory sets it."""
    lease_folder: Path | None
    """The folder for leases of readers in other processes; None if there is none."""
    epoch: int
    """A number that no other writer of this store ever had, where no lock keeps them apart: names of what the store
    puts end with it. 0 where a lock does."""

    def put(self, blobs: Sequence[Blob], parts: Iterable[Part], *, stable: bool = False) -> None:
        """Write blobs, all of them or none; durable with the next ``publish``, and lost by a crash before it.

        Parts fill each blob exactly once, in any order; each begins at a multiple of ``PAGE_BYTES``, and is a block
        where a blob is ``of`` rows. Asks for one after another and takes what it needs of each before it asks for the
        next or, of ``stable`` arrays, which do not change, before it returns. Names are new, or were dropped. Raises
        StoreFullError, before a part is asked for where it is known by then, StoreError, ValueError for parts that are
        not what the blobs say, and what the iterable raises.
        """

    def read(self, request: ReadRequest) -> None:
        """Fill ``request.out``. Raises BlockReadError, in words that follow the name of what is read."""

    def drop(self, blobs: Iterable[tuple[str, int | None]], *, shrink: bool = False) -> None:
        """Take back blobs up to a byte, or whole (None), after the commit that gave them up is durable.

        Their room is for blobs to come, and goes back to the file system with ``shrink``. A byte that is not at the end
        of a page or chunk frees what ends before it. No read of these bytes is under way or comes. A name that is not
        there is no error. What cannot be deleted now is deleted when the engine is next opened for writing and told
        again. Raises StoreError.
        """

    def list(self) -> Mapping[str, Stored]:
        """Return all blobs that are there, put since the last ``publish`` or before, by name; reads none.

        For writing, and for what looks whether a store is whole; what a crash left is among them, or gone already.
        """

    def newest(self) -> Head | None:
        """Return what was published last, by whatever process, checked; None where nothing ever was.

        Raises CorruptStoreError.
        """

    def publish(self, head: Head, before: Head | None) -> None:
        """Make durable all that was put, then have ``newest`` return ``head``: all or nothing, durably.

        Raises StoreFullError; StoreError where ``newest`` is not ``before``, as another writer came, and it changes
        nothing then. Where it raises although ``newest`` returns ``head``, the head is durable, and the next
        ``publish`` ends this one first.
        """

    def close(self) -> None:
        """Give up every resource; a second time does nothing. No read is under way."""


class HeadRecord(NamedTuple):
    """A head as it is stored: the value of LMDB's key "head", and the objects below ``heads`` of the Zarr engine."""

    number: int
    """Counts heads, from 1; 0 where there is none."""
    head: Head | None
    """None after a writer took over an object store in which nothing was published."""
    before: str = ""
    """The digest of the one before; of the first one what the engine says."""
    blobs: int = 0
    """In LMDB's map."""
    checksums: int = 0
    """The sum of those of the entries of LMDB's map."""
    writer: str = ""
    """A name that no other writer has, on object stores."""

    def to_bytes(self) -> bytes:
        """Return the record."""
        head = {} if self.head is None else self.head._asdict()
        others = {"blobs": self.blobs, "checksums": self.checksums, "writer": self.writer}
        values = {"number": self.number, "before": self.before} | head
        return encode("head", values | {name: value for name, value in others.items() if value}, {})

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> HeadRecord:
        """Read what ``to_bytes`` wrote. Raises CorruptStoreError that calls it ``name``."""
        values, head = decode("head", data, name)[0], None
        try:
            number, blobs, checksums = (whole(values.get(key, 0), key) for key in ("number", "blobs", "checksums"))
            if "name" in values:
                head = Head(str(values["name"]), whole(values["size"], "size"), checked_digest(values["digest"]))
            before = checked_digest(values["before"]) if values["before"] else ""
            return cls(number, head, before, blobs, checksums, str(values.get("writer", "")))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptStoreError(f"{name} cannot be read ({error}): restore the store from a copy") from error


def check_names(blobs: Sequence[Blob], names: Container[str], label: str) -> None:
    """Raise ValueError unless the names of ``blobs`` are new; ``names`` are those of the store."""
    new = set[str]()
    for blob in blobs:
        if blob.name in names or blob.name in new:
            raise ValueError(f"{label} has a blob {blob.name!r} already: put it under another name")
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


class Publisher:
    """Publishes the heads of the one writer of an engine."""

    def __init__(self, engine: Engine, label: str) -> None:
        self._engine, self._label = engine, label
        self.head = engine.newest()
        """The newest head of the engine."""
        self.is_known = True
        """False if a head may or may not be durable: nothing is written or dropped after that."""

    def publish(self, head: Head, then: Callable[[Head | None], None]) -> None:
        """Publish a head; if it is durable, also after an error, call ``then`` with the head before it."""
        before, done = self.head, False
        try:
            self._engine.publish(head, before)
            done = True
        finally:
            # An error or an interrupt may come when all of it is durable, or when nothing is.
            if done or self._is_durable(head, before):
                self.head = head
                then(before)

    def look(self) -> None:
        """Take the head that the engine is at now. Raises StoreError."""
        self.head = self._engine.newest()

    def check_known(self) -> None:
        """Raise StoreError if nobody knows what the engine is at: opening the store again finds that out."""
        if not self.is_known:
            raise StoreError(f"a commit of {self._label} failed and may be there or not: close it and open it again")

    def _is_durable(self, head: Head, before: Head | None) -> bool:
        """Return True if the engine is at ``head`` although it raised, False if it is still at ``before``."""
        try:
            found = self._engine.newest()
        except StoreError:
            found = None
        self.is_known = found is not None and found in (head, before)
        return found == head and self.is_known


class Counters:
    """Plain numbers, each only ever growing; all bytes are of blobs, without what an engine adds."""

    def __init__(self) -> None:
        self.row_bytes_written = 0
        self.key_bytes_written = 0
        self.changed_bytes_written = 0
        """Last changes of rows that were moved."""
        self.state_bytes_written = 0
        self.meta_bytes_written = 0
        """Commits, what they list, and what describes segments."""
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
        self.transactions = 0
        self.commits = 0
        self.blobs_dropped = 0
        """In whole or in part."""
        self.spill_bytes_written = 0
        """To temporary files, by scans and fills that exceed their memory."""
        self.spill_bytes_read = 0
        self.spill_writes = 0
        """Writes of temporary files, each of what was sorted in memory at once."""
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
