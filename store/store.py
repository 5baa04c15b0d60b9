"""The parameter store: segments, commits and freeing, above an engine that keeps bytes."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tiercache.store.blocks import segment_names
from tiercache.store.commit import STATE_CHUNK_BYTES, Commit, Cursor, state_chunks
from tiercache.store.counters import Counters
from tiercache.store.dump import Dump, check_streams, new_segment
from tiercache.store.errors import StoreClosedError, StoreError, StoreFullError
from tiercache.store.life import Life
from tiercache.store.lookup import locate, read_rows
from tiercache.store.opening import Opened, open_instance, open_path
from tiercache.store.reading import BlockReader
from tiercache.store.recovery import COMMIT, recover, segment_record
from tiercache.store.table import Table, group_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from tiercache.store.blocks import Checksums
    from tiercache.store.dump import Block
    from tiercache.store.engine import Engine
    from tiercache.store.reading import Check
    from tiercache.store.segment import Segment
    from tiercache.store.stream import Stream

TRANSACTION_BYTES = 64 << 20


class Store:
    """Rows of tables in segments, with atomic commits. Made by ``Store.open``.

    ``append``, ``publish`` and ``forget`` are for one thread at a time; all that reads may be called from other
    threads meanwhile. A store belongs to the process that opened it, not to its forks.
    """

    def __init__(self, opened: Opened, path: Path | None, mode: str) -> None:
        """Only ``Store.open`` calls this."""
        self.path = path
        """Where it is; None for an engine without a place."""
        self.tables = opened.tables
        """In the order of unsigned table ids."""
        self.groups = group_tables(opened.tables)
        self.commit: Commit | None = None
        """The newest commit."""
        self.segments: tuple[Segment, ...] = ()
        """Those of the commit and those appended since, by id."""
        self.counters = Counters()
        self.mode = mode
        self._opened, self._engine = opened, opened.engine
        self._reader = BlockReader(self._engine, self.groups, self.label, self.counters)
        self._pid = os.getpid()
        self._closed = False
        self._writing = threading.RLock()
        self._first_blocks: dict[int, list[int]] = {}
        self._orphans: set[bytes] = set()
        self._recover()

    # -- opening and closing -----------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None,
        *,
        tables: Iterable[Table] | None = None,
        engine: str | Engine = "lmdb",
        mode: str = "a",
        max_bytes: int | None = None,
    ) -> Store:
        """Open the store at ``path``; with ``tables`` and mode "a", create it where there is none.

        Mode "a" takes the one right to write and deletes blocks that no commit names; mode "r" sees the newest
        commit as of now, for as long as it is open. ``engine`` may be an instance: then ``path`` only names the
        store in messages. ``max_bytes`` bounds the file; None means the size of the file system.

        Raises StoreMissingError, NotAStoreError, FormatVersionError, TableMismatchError, StoreInUseError,
        StoreFullError and CorruptStoreError.
        """
        if mode not in {"a", "r"}:
            raise ValueError(f"mode {mode!r} is unknown: it must be 'a' (read and write) or 'r' (read)")
        wanted = None if tables is None else tuple(sorted(tables, key=lambda table: table.table_id))
        if wanted is not None:
            group_tables(wanted)
        place = None if path is None else Path(path)
        if not isinstance(engine, str):
            opened = open_instance(engine, wanted, mode, _label(place))
        elif place is None:
            raise ValueError(f"engine {engine!r} needs a path")
        else:
            opened = open_path(place, wanted, engine, mode, max_bytes)
        try:
            return cls(opened, place, mode)
        except BaseException:
            opened.close()
            raise

    def close(self) -> None:
        """Give up the store; what no commit names is lost. A second time does nothing."""
        if not self._closed and os.getpid() == self._pid:
            self._closed = True
            self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        at = "no commit" if self.commit is None else f"commit {self.commit.id}"
        return f"<{self.label}: {len(self.tables)} tables, {len(self.segments)} segments, {at}>"

    @property
    def checksums(self) -> Checksums:
        """What computes the CRC32C of pieces; a training sets what does so beside it without the GIL."""
        return self._reader.checksums

    @checksums.setter
    def checksums(self, checksums: Checksums) -> None:
        self._reader.checksums = checksums

    @property
    def label(self) -> str:
        """The store in the words of a message."""
        return _label(self.path)

    # -- writing -----------------------------------------------------------------------------------------

    def append(
        self,
        visit: int,
        streams: Sequence[Stream],
        blocks: Iterable[Block],
        *,
        within: bool = False,
        stable: bool = False,
        transaction_bytes: int = TRANSACTION_BYTES,
    ) -> Segment:
        """Write what ``visit`` dumped and return it; no commit names it yet, and a crash before the next one loses it.

        ``streams`` has one layout for each group. ``blocks`` yields (group, block, uint8 rows, int64 keys of the
        rows) for every block once, in any order; its arrays are copied before the next block is asked for. The
        engine is given at most ``transaction_bytes`` at once, but never less than one block.
        ``within``: a commit inside the visit follows, and this is its whole key set. ``stable``: no array changes
        before append returns, so that blocks may be written together, and checksums computed meanwhile.

        Raises StoreFullError, and ValueError; after any error nothing of the segment is left.
        """
        self._check_writable()
        check_streams(streams, self.groups)
        with self._writing:
            segment = new_segment(self._next_id, visit, streams, within=within)
            dump = Dump(segment, blocks, transaction_bytes, self.checksums, stable=stable)
            self._next_id += 1
            try:
                dump.write(self._engine)
            except BaseException as error:
                self._orphans |= dump.names()
                if isinstance(error, StoreFullError):
                    raise error.during(f"the dump of visit {visit} to {self.label}", dump.bytes_left) from error
                raise
            finally:
                self.counters.add(transactions=dump.transactions)
            self.counters.add(rows_written=dump.rows, row_bytes_written=dump.row_bytes, key_bytes_written=8 * dump.rows)
            self._first_blocks[segment.id] = [0] * len(streams)
            self.segments = (*self.segments, segment)
        return segment

    def publish(
        self,
        cursor: Cursor,
        *,
        state: bytes,
        schedule_digest: str,
        settings: Mapping[str, Any],
        environment: Mapping[str, Any],
        transaction_bytes: int = TRANSACTION_BYTES,
    ) -> Commit:
        """Make a commit: from now on the store opens here, with the rows live at ``cursor`` and ``state``.

        One atomic, durable step that also frees every block without live rows. Segments appended so far must be
        of visits before the cursor's, or written within its visit where it stands inside one.

        Raises StoreFullError, after which the commit before stands, and ValueError.
        """
        self._check_writable()
        with self._writing:
            cursor = self._check_cursor(Cursor(*cursor))
            life = Life.at(cursor, self.segments)
            kept = tuple(segment for segment in self.segments if life.keeps(segment))
            chunks, checksums = state_chunks(np.frombuffer(state, dtype=np.uint8))
            commit = Commit(
                id=0 if self.commit is None else self.commit.id + 1,
                cursor=cursor,
                schedule_digest=schedule_digest,
                settings=dict(settings),
                environment=dict(environment),
                segment_ids=tuple(segment.id for segment in kept),
                state_bytes=len(state),
                state_chunk_bytes=STATE_CHUNK_BYTES,
                state_checksums=checksums,
            )
            records, dead = self._changes(commit, kept, life)
            parts = list(zip(commit.state_blocks(), chunks, strict=True))
            step = max(1, transaction_bytes // STATE_CHUNK_BYTES)
            try:
                for i in range(0, len(parts), step):
                    self._engine.write(parts[i : i + step])
                    self.counters.add(transactions=1)
                self._engine.commit(records, dead)
            except BaseException as error:
                if self._stands(records[COMMIT]):
                    self._settle(commit, kept, life)  # interrupted when all was done
                    raise
                self._orphans.update(commit.state_blocks())
                if isinstance(error, StoreFullError):
                    needed = max(error.needed_bytes, len(state))
                    raise error.during(f"commit {commit.id} of {self.label}", needed) from error
                raise
            self.counters.add(transactions=1, commits=1, blocks_freed=len(dead), state_bytes_written=len(state))
            self._settle(commit, kept, life)
        return commit

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def forget(self) -> None:
        """Drop every segment appended since the newest commit, and free its blocks."""
        self._check_writable()
        with self._writing:
            named = set() if self.commit is None else set(self.commit.segment_ids)
            for segment in self.segments:
                if segment.id not in named:
                    del self._first_blocks[segment.id]
                    for group, stream in enumerate(segment.streams):
                        self._orphans.update(segment_names(segment, group, 0, stream.num_blocks))
            self.segments = tuple(segment for segment in self.segments if segment.id in named)
            if self._orphans:
                try:
                    self._engine.commit({}, self._orphans)
                except StoreError:
                    return  # nothing names them: the next commit or the next opening deletes them
                self.counters.add(transactions=1, blocks_freed=len(self._orphans))
                self._orphans = set()

    # -- reading -----------------------------------------------------------------------------------------

    def state(self) -> bytes:
        """Return the dense state of the newest commit. Raises CorruptStoreError; ValueError without a commit."""
        self._check_open()
        if self.commit is None:
            raise ValueError(f"{self.label} has no commit yet: publish one first")
        return self._reader.state(self.commit).tobytes()

    def read(
        self,
        segment: Segment,
        group: int,
        low: int,
        high: int,
        out: NDArray[np.uint8],
        *,
        checks: list[Check] | None = None,
    ) -> None:
        """Read pieces [low, high) of a segment stream into ``out``, as they stand in the stream, and check each.

        One read of the engine for each block. With ``checks``, what is to be checked is put there instead, for
        ``check``: many at once cost less. Raises CorruptBlockError; ValueError for pieces that are not there.
        """
        self._check_open()
        self._reader.pieces(segment, group, low, high, out, checks)

    def check(self, checks: Sequence[Check]) -> None:
        """Check what ``read`` left to be checked; nothing of it may be used before. Raises CorruptBlockError."""
        self._reader.check(checks)

    def read_keys(self, segment: Segment, group: int, block: int) -> NDArray[np.int64]:
        """Return the keys of the rows of one block, checked. Raises CorruptBlockError."""
        self._check_open()
        return self._reader.keys(segment, group, block)

    def first_range(self, segment: Segment, group: int) -> int:
        """Return the first range of a segment stream that is not dead at the newest commit."""
        if self.commit is None or segment.id not in self.commit.segment_ids:
            return 0
        return Life.at(self.commit.cursor, self.segments).first_range(segment, group)

    def locate(
        self, table_name: str, keys: NDArray[np.int64], *, after: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find the rows of distinct ``keys`` (n,): returns segment ids (n,), -1 where there is none, and rows (n,).

        A row is an index into the group's stream of the segment. Only rows with a next use after visit ``after``
        count; of several the newest. Sweeps the stored keys of all such ranges: ask for many keys at once.
        """
        return locate(self, {table_name: keys}, after=after)[table_name]

    def read_rows(
        self,
        segment: Segment,
        group: int,
        rows: NDArray[np.int64],
        *,
        cached: Callable[[int, int, int], NDArray[np.uint8] | None] | None = None,
    ) -> tuple[NDArray[np.float32], ...]:
        """Return the rows at ``rows`` (n,) of a segment stream: (n, width) for each field.

        Reads whole pieces, neighbours together, 4 MiB ahead of 4 MiB. ``cached(segment id, group, piece)`` may
        give the bytes of a piece that is in memory anyway. Raises CorruptBlockError.
        """
        return read_rows(self, segment, group, rows, cached)

    # -- inside ------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Take up the newest commit and, in mode "a", delete what it does not name."""
        found = recover(self._opened.contents, self.groups, self.label)
        self._next_id = 1 + max((segment.id for segment in found.segments), default=-1)
        if found.commit is not None:
            self._settle(found.commit, found.segments, Life.at(found.commit.cursor, found.segments))
        if self.mode == "a" and (found.stale_records or found.orphans):
            self._engine.commit(dict.fromkeys(found.stale_records), found.orphans)
            self.counters.add(transactions=1, blocks_freed=len(found.orphans))

    def _changes(
        self, commit: Commit, kept: Sequence[Segment], life: Life
    ) -> tuple[dict[str, bytes | None], list[bytes]]:
        """Return the records that ``commit`` sets or removes, and the blocks that it frees."""
        named = set() if self.commit is None else set(self.commit.segment_ids)
        records: dict[str, bytes | None] = {COMMIT: commit.to_bytes()}
        records |= {segment_record(s.id): s.to_bytes() for s in kept if s.id not in named}
        records |= dict.fromkeys(segment_record(id_) for id_ in named - set(commit.segment_ids))
        dead = [*(self._orphans - commit.state_blocks().keys())]  # a commit that failed had the same names
        dead += [] if self.commit is None else [*self.commit.state_blocks()]
        for segment in self.segments:
            for group in range(len(self.groups)):
                first = self._first_blocks[segment.id][group]
                dead += segment_names(segment, group, first, life.first_block(segment, group))
        return records, dead

    def _settle(self, commit: Commit, kept: tuple[Segment, ...], life: Life) -> None:
        """Stand at ``commit``."""
        groups = range(len(self.groups))
        self._first_blocks = {s.id: [life.first_block(s, group) for group in groups] for s in kept}
        self.commit, self.segments, self._orphans = commit, kept, set()

    def _stands(self, record: bytes | None) -> bool:
        """Whether the engine has the record of a commit, although it raised."""
        try:
            return self._engine.contents().records.get(COMMIT) == record
        except StoreError:
            return False  # what is there cannot be known: opening the store again finds it out

    def _check_cursor(self, cursor: Cursor) -> Cursor:
        before = None if self.commit is None else self.commit.cursor
        if min(cursor) < 0 or (before is not None and cursor < before):
            raise ValueError(f"{self.label} stands at {before} and cannot go back to {cursor}")
        newest = -1 if self.commit is None else max(self.commit.segment_ids, default=-1)
        for segment in self.segments:
            if segment.visit > cursor.visit - (not segment.within):
                raise ValueError(f"a commit at {cursor} cannot name a dump of visit {segment.visit}")
        if cursor.sample and cursor != before and not any(
            s.within and s.visit == cursor.visit and s.id > newest for s in self.segments
        ):  # fmt: skip
            raise ValueError(f"a commit at {cursor} needs the rows of its visit: append them with within=True first")
        return cursor

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"{self.label} is closed: open it again")
        if os.getpid() != self._pid:
            raise StoreClosedError(
                f"{self.label} was opened by process {self._pid} and is used in its fork {os.getpid()}: "
                "open it in the process that uses it"
            )

    def _check_writable(self) -> None:
        self._check_open()
        if self.mode != "a":
            raise ValueError(f"{self.label} is open for reading: open it with mode='a' to write")


def _label(path: Path | None) -> str:
    return "the store in memory" if path is None else f"the store at {path}"
