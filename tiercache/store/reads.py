"""What is read of a store at its commit: rows by key, in order or that changed, and dense state."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from tiercache.store.changes import changed_rows, changes
from tiercache.store.files import local_path
from tiercache.store.lookup import locate, lookup, read_rows
from tiercache.store.reading import Pages
from tiercache.store.scan import SCAN_BYTES, check_scan, scan_segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.store.live_keys import KeyMemory
    from tiercache.store.lookup import Fields, Found
    from tiercache.store.reading import BlockReader
    from tiercache.store.scan import Chunk
    from tiercache.store.segment import Segment
    from tiercache.store.shards.joined_ranks import JoinedRanks
    from tiercache.store.snapshot import Snapshot
    from tiercache.store.table import Group

Item = TypeVar("Item")


class StoreReads:
    """The part of ``Store`` that reads. From any thread, also while commits are made."""

    label: str
    groups: tuple[Group, ...]
    reader: BlockReader
    """Reads its blocks: what functions that read take, with a snapshot."""
    key_memory: KeyMemory | None
    """What lookups remember of segments, beyond this store; None, of one that is open for writing: nothing."""
    _joined: JoinedRanks | None
    """Reads whole tables of a store of several ranks."""

    @property
    def snapshot(self) -> Snapshot:
        """The newest commit and the segments appended since, as of now."""
        raise NotImplementedError

    def pinned(self) -> AbstractContextManager[Snapshot]:
        """Return a context in which all that the snapshot of now needs is kept."""
        raise NotImplementedError

    def _pinned(self) -> AbstractContextManager[Snapshot]:
        """Return the same, also of a store of several ranks: that of rank 0 then."""
        raise NotImplementedError

    def live_rows(self, table_name: str) -> int:
        """Return how many rows a table has at the newest commit; reads nothing. Raises ValueError for no table."""
        if self._joined is not None:
            return self._joined.live_rows(table_name)
        return self.snapshot.live_rows(table_name, self.label)

    def scan(
        self,
        table_name: str,
        *,
        chunk_rows: int | None = None,
        memory_bytes: int = SCAN_BYTES,
        scratch: Path | None = None,
    ) -> Iterator[Chunk]:
        """Yield all rows of a table at the newest commit in hash order: keys (n,), and each field (n, width).

        At most ``chunk_rows`` rows at a time, about 4 MiB where not said. Takes about ``memory_bytes``; what exceeds
        it is sorted in a temporary file in ``scratch`` (None: the store's folder). Commits that are made meanwhile
        change nothing. Raises ValueError, StoreFullError and CorruptStoreError.
        """
        scratch = None if scratch is None else local_path(scratch, "a folder for temporary files")
        if self._joined is not None:
            return self._joined.scan(table_name, chunk_rows=chunk_rows, memory_bytes=memory_bytes, scratch=scratch)
        check_scan(self.reader, self.snapshot, table_name, chunk_rows)
        return self._stream(
            lambda snapshot: scan_segments(
                self.reader, snapshot, snapshot.committed, table_name,
                chunk_rows=chunk_rows, memory_bytes=memory_bytes, scratch=scratch,
            )
        )  # fmt: skip

    def state(self) -> bytes:
        """Return the dense state of the newest commit, that of rank 0 of several.

        Raises CorruptStoreError; ValueError without a commit.
        """
        with self._pinned() as snapshot:
            if snapshot.commit is None:
                raise ValueError(f"{self.label} has no commit yet: publish one first")
            return self.reader.state(snapshot.commit).tobytes()

    def read(self, segment: Segment, group: int, low: int, high: int, out: NDArray[np.uint8]) -> None:
        """Read pages [low, high) of a layout into ``out``, as they stand in the layout, and check each.

        One read of the engine for each block. Raises CorruptBlockError; ValueError for pages that are not there.
        """
        self.load([Pages(segment, group, low, high, out)])

    def load(self, wanted: Sequence[Pages], *, at_once: int | None = None) -> None:
        """``read`` for many: ``at_once`` of them at a time (None: 4, the most), on threads as nice as the first caller.

        When this returns or raises, nothing is being read into any ``out`` any more. Raises as ``read`` does.
        """
        self.reader.load(wanted, at_once)

    def locate(self, table_name: str, keys: NDArray[np.int64], *, after: int) -> Found:
        """Find the rows of distinct ``keys`` (n,): returns segment ids (n,), -1 where there is none, and rows (n,).

        A row is an index into the group's layout of the segment. Only rows with a next use after pass ``after``, or
        in a retained segment, count; of several the newest. Sweeps their stored keys: ask for many keys at once.
        """
        with self.pinned() as snapshot:
            return locate(self.reader, snapshot, {table_name: keys}, after=after)[table_name]

    def read_rows(
        self,
        segment: Segment,
        group: int,
        rows: NDArray[np.int64],
        *,
        cached: Callable[[int, int, int], NDArray[np.uint8] | None] | None = None,
    ) -> tuple[NDArray[np.float32], ...]:
        """Return the rows at ``rows`` (n,) of a layout: (n, width) for each field.

        Reads whole pages, neighbors together, 4 MiB ahead of 4 MiB. ``cached(segment id, group, page)`` may
        give the bytes of a page that is in memory anyway. Raises CorruptBlockError.
        """
        return read_rows(self.reader, segment, group, rows, cached)

    def lookup(
        self,
        table_name: str,
        keys: NDArray[np.int64],
        *,
        missing: str = "error",
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Fields:
        """Return the rows of any ``keys`` (n,), repeated or not, in any order: field name to (n, width).

        Rows are those of the newest commit, or newer where ``append`` was called since. A key without a row gets
        its first row with ``missing`` "initial", zeros with "zeros"; with "error" KeyMissingError is raised.

        Sweeps the table's stored keys, then reads whole pages, neighbors together: ask for many keys at once. Of
        stores that it opened with mode "r" a process remembers where keys are, 8 bytes each, at most 256 MiB.
        ``progress(what, done, total)`` is called with "keys" and "rows". Raises ValueError and CorruptBlockError.
        """
        if self._joined is not None:
            return self._joined.lookup(table_name, keys, missing=missing, progress=progress)
        with self._pinned() as snapshot:
            return lookup(
                self.reader, snapshot, table_name, keys,
                missing=missing, memory=self.key_memory, progress=progress,
            )  # fmt: skip

    def changes(self, table_name: str, *, since: int) -> Iterator[tuple[NDArray[np.int64], Fields]]:
        """Yield (keys, fields) of the rows of a table that changed after commit ``since``, which may be gone.

        Each key once, in no order, at most 16 MiB at a time; where stale rows may be among them, as ``scan`` does. -1
        gives every row. A row changed where it was made or written again, even to the same bits, not where it moved.
        Raises CommitMissingError for a commit that never was or that a rollback gave up, CorruptBlockError, ValueError
        where rows were appended and not committed. Commits that are made meanwhile change nothing.
        """
        self.reader.check_open()
        if self._joined is not None:
            return self._joined.changes(table_name, since=since)
        return self._stream(lambda snapshot: changes(self.reader, snapshot, table_name, since))

    def changed_rows(self, table_name: str, *, since: int) -> int:
        """Return how many rows of a table ``changes`` yields; reads none of them. Raises what it raises."""
        if self._joined is not None:
            return self._joined.changed_rows(table_name, since=since)
        with self.pinned() as snapshot:
            return changed_rows(self.reader, snapshot, table_name, since)

    def _stream(self, items: Callable[[Snapshot], Iterator[Item]]) -> Iterator[Item]:
        """Yield what ``items`` yields of the snapshot of the moment when the first one is asked for."""
        with self.pinned() as snapshot:
            yield from items(snapshot)
