"""The seam between the store and its engines: records by name, blocks by place, and counters of bytes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.store.layout import Part, SegmentLayout
    from tiercache.store.table import Group

    Data = tuple["Block", NDArray[Any]]
    """A block, and its contiguous bytes."""
    Read = tuple[NDArray[np.int64], NDArray[np.uint32]]
    """Bytes read of each part, or -errno, and the checksums of all runs."""
    Reads = Callable[[Sequence["ReadSource"], Sequence[Part]], Read]
    """What fills each part from its source at once."""
    FieldReads = Callable[[Sequence["FieldSource"], Sequence[Part]], Read]
    """The same for rows whose fields stand apart; the runs of a part are its pages."""


class Counters:
    """Plain numbers, each only ever growing; all bytes are of blocks, without what an engine adds."""

    def __init__(self) -> None:
        self.row_bytes_written = 0
        self.key_bytes_written = 0
        self.changed_bytes_written = 0
        """Last changes of rows that were moved."""
        self.state_bytes_written = 0
        self.rows_written = 0
        self.row_bytes_read = 0
        """By ``read`` and ``read_rows``, whole pages."""
        self.key_bytes_read = 0
        self.changed_bytes_read = 0
        self.state_bytes_read = 0
        self.rows_read = 0
        """By ``read``: rows of the pages; by ``read_rows``: rows returned."""
        self.reads = 0
        """Calls of the engine."""
        self.transactions = 0
        self.commits = 0
        self.blocks_freed = 0
        self.spill_bytes_written = 0
        """To temporary files, by scans and fills that exceed their memory."""
        self.spill_bytes_read = 0
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


WRITE_BYTES = 64 << 20
"""Of copies of blocks on their way, where nobody says less."""


class BlockLayout(NamedTuple):
    """What the bytes of a segment's block are, for an engine that keeps the fields of rows apart: others ignore it."""

    group: Group
    """Whose rows: fields and tables."""
    segment_layout: SegmentLayout
    """Which rows are in which block and page."""


class Block(NamedTuple):
    """A block of a segment's rows, their keys or last changes, or of a commit's dense state."""

    kind: bytes
    """``ROWS``, ``KEYS``, ``CHANGED`` or ``STATE``."""
    owner: int
    """The id of the segment, or of the commit."""
    group: int
    index: int  # type: ignore[assignment]  # no method of a tuple
    """Among the blocks of its kind, owner and group."""
    size: int
    """Bytes."""
    place: int = -1
    """What ``Engine.write`` returned for it; -1 where it was not written yet."""
    layout: BlockLayout | None = None
    """Of all but dense state. Of rows, whole pages are read."""


class ReadRequest(NamedTuple):
    """Bytes of a block that are to be read."""

    block: Block
    offset: int
    """The first byte within the block."""
    out: NDArray[np.uint8]


class Engine(Protocol):
    """Keeps records and blocks; knows nothing of commits. ``MemoryEngine`` is the executable definition.

    Blocks belong to whoever wrote them until ``free`` gives them back: the engine never decides what is needed.
    Everything that writes comes from one thread at a time and, where it raises, has changed nothing, unless it says
    otherwise; ``read`` and ``locate`` may be called by other threads meanwhile.
    """

    label: str
    """The store in the words of a message."""
    memory_bytes: int
    """The most that copies of blocks being written may take, or one block that is larger; who plans memory sets it."""

    lease_folder: Path | None
    """Where readers in other processes leave leases; None where they cannot."""

    def records(self) -> Mapping[str, bytes]:
        """Return the newest records by name, checked against the chain of manifests.

        For writing those of the last ``commit`` of this engine; for reading the newest that there are now.
        Raises CorruptStoreError.
        """

    def digests(self) -> Mapping[str, str]:
        """Return the SHA-256 of each record that ``records`` returned last, or that stands since the last ``commit``.

        As hexadecimal digits.
        """

    def drop_records(self) -> None:
        """Let go of records that are kept in memory: whoever asked for them has what it needs."""

    def commit(self, records: Mapping[str, bytes | None]) -> None:
        """Make everything durable that was written, then set records (None removes one): all or nothing, durably.

        Raises StoreFullError and StoreError. Where the records are durable and the end of the commit failed,
        ``records`` returns them, the error is raised, and the next commit ends this one first.
        """

    def write(self, blocks: Iterable[Data], *, stable: bool = False) -> list[int]:
        """Write blocks, all of them or none, and return the place of each. A crash before the next commit loses them.

        Asks for one after another and takes what it needs of each before it asks for the next or, of ``stable`` arrays,
        which do not change, before it returns. Blocks of a segment may come in any order; no block is written twice but
        after it was freed. Raises StoreFullError and StoreError, and what the iterable raises.
        """

    def read(self, request: ReadRequest) -> None:
        """Fill ``request.out``. Raises BlockReadError."""

    def problem(self, block: Block) -> str:
        """Return what is wrong with a block in words that end a sentence, as far as it shows without reading; or "".

        A block that is missing, or shorter than it was written.
        """

    def retain(self, blocks: Iterable[Block]) -> None:
        """When the store is opened for writing: these blocks are needed, and nothing else that there is.

        Deletes or reuses the rest. Raises CorruptStoreError for blocks that overlap.
        """

    def free(self, blocks: Iterable[Block]) -> None:
        """Take back blocks that nothing needs, after the commit that gave them up is durable.

        Their room is for blocks to come. What cannot be deleted now is deleted by the next opening for writing.
        """

    def shrink(self) -> None:
        """Give all room that is free back to where it came from. Raises StoreError."""

    def close(self) -> None:
        """Give up every resource; a second time does nothing. No read is under way."""


class ReadSource(NamedTuple):
    """Where bytes of a block lie."""

    handle: int
    """Of an open file."""
    in_pages: bool
    """Whether whole pages must be read; then bytes are wanted where they lie in their page as in that of the file."""
    offset: int
    """Of the file."""


class FieldFile(NamedTuple):
    """Where one field of rows lies."""

    path: str
    file_bytes: int
    """Of the whole file: one of another size is not what was written."""
    begin: int
    """Byte of the file where the field of the first row wanted begins; the other rows' follow."""
    row_bytes: int
    """Of the field in a row."""


class FieldSource(NamedTuple):
    """Where rows of a block lie whose fields stand apart."""

    in_pages: bool
    """Whether whole pages are read, past the page cache."""
    files: Sequence[FieldFile]
    """In the order of a row."""


@runtime_checkable
class LocatingEngine(Protocol):
    """An engine that keeps blocks in files as they are, or as their fields are, so that many can be read at once."""

    fields_apart: bool
    """Whether sources are those of fields."""

    def locate(
        self, requests: Sequence[ReadRequest]
    ) -> AbstractContextManager[Sequence[ReadSource | FieldSource | None]]:
        """Say where wanted bytes lie; no file is closed within the context.

        None: ``read`` says why not, or reads what is not kept so.
        """
