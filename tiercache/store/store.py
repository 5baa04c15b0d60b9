"""The parameter store: segments, commits and freeing, above an engine that keeps bytes."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tiercache.store.changes import changed_rows, changes
from tiercache.store.commit import Cursor
from tiercache.store.commit_reader import CommitReader
from tiercache.store.commit_writer import CommitWriter
from tiercache.store.compaction_plan import CompactionPlan, NoUses
from tiercache.store.engines.engine import Counters
from tiercache.store.files import local_path
from tiercache.store.live_keys import KEY_MEMORY, KeyMemory
from tiercache.store.locks import warn_unclosed
from tiercache.store.lookup import locate, lookup, read_rows
from tiercache.store.opening import Opened, check_options, check_pin, label_of, located, open_engine, open_special
from tiercache.store.reading import BlockReader, Pages
from tiercache.store.recovery import CommitLoader
from tiercache.store.rewrite import Rewrite
from tiercache.store.scan import SCAN_BYTES, check_scan, scan_segments
from tiercache.store.segment import base_layout
from tiercache.store.store_errors import StoreError
from tiercache.store.table import Table, group_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.store.commit import Commit
    from tiercache.store.compaction_plan import FirstUses
    from tiercache.store.engines.engine import Engine
    from tiercache.store.layout import SegmentLayout
    from tiercache.store.lookup import Fields, Found
    from tiercache.store.row_codec import RowBlock
    from tiercache.store.scan import Chunk
    from tiercache.store.segment import Layout, Segment
    from tiercache.store.snapshot import History, Snapshot

Item = TypeVar("Item")


class Store:
    """Rows of tables in segments, with atomic commits. Made by ``Store.open``.

    ``append``, ``publish`` and ``discard_uncommitted`` are for one thread at a time; all that reads may be called from
    other threads meanwhile. A store belongs to the process that opened it, not to its forks.
    """

    def __init__(self, opened: Opened, path: Path | None, mode: str, at: int | None, retention: int | None,
                 of: Store | None = None, held: CommitReader | None = None) -> None:  # fmt: skip
        """Only ``Store.open`` and ``at`` call this; ``of`` is the store whose engine it is and which closes it.

        ``held`` holds the commit for longer than this is open.
        """
        self.path = path
        """Where it is; None for an engine without a place."""
        self.label = label_of(path)
        """The store in the words of a message."""
        self.counters, self.mode = Counters(), mode
        self.key_memory: KeyMemory | None = of.key_memory if of is not None else KEY_MEMORY if mode == "r" else None
        """What lookups remember of segments, beyond this store; None, of one that is open for writing: nothing."""
        self._opened, self._of = opened, of
        self._pid, self._closed = os.getpid(), True
        engine, label = opened.engine, self.label
        groups = group_tables(opened.tables)
        loader = CommitLoader(engine, groups, label, self.counters, opened.uses) if of is None else of._loader
        self._loader: CommitLoader = loader
        self._commits: CommitWriter | CommitReader
        if held is not None:
            self._commits = CommitReader(engine, loader, held.snapshot, alone=True)
        elif of is not None and at is not None and isinstance(of._commits, CommitWriter):
            self._commits = CommitReader.pinned_in(engine, loader, of._commits.pinned(at))
        elif mode == "r":
            self._commits = CommitReader.leased(engine, loader, at)
        else:
            self._commits = CommitWriter(engine, loader, opened.tables, self.counters, retention)
        explain = self._commits.explain if isinstance(self._commits, CommitReader) else opened.explain
        self.reader = BlockReader(engine, label, self.counters, opened.uses, explain, path)
        """Reads its blocks: what functions that read take, with a snapshot."""
        self.take_tables()
        self._closed = False

    def take_tables(self) -> None:
        """Have the tables of the commit, which a rollback and an alteration change."""
        self.tables = self.snapshot.tables
        """In the order of unsigned table ids."""
        self.groups = self.snapshot.next_groups
        """Those of rows that are written."""

    # -- opening and closing -----------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None,
        *,
        tables: Iterable[Table] | None = None,
        engine: str | Engine | None = None,
        mode: str = "a",
        store_budget: int | None = None,
        commit: int | None = None,
        retention: int | None = None,
    ) -> Store:
        """Open the store at ``path``, sharded or not; with ``tables`` and mode "a", create it where there is none.

        Mode "a" takes the one right to write and deletes blobs that no commit needs; mode "r" sees the newest commit as
        of now, or ``commit``, for as long as it is open. ``engine`` is "lmdb" or "zarr"; None takes the store's own, of
        a new store "lmdb", or "zarr" where a table is compressed. It may be an instance, which keeps bytes as it does:
        then ``path`` only names the store in messages. A URL such as "s3://bucket/model.tc" is a store of engine "zarr"
        there (extra ``obstore``). ``store_budget`` bounds the bytes of blobs, of each shard where there are several;
        None means the size of the file system. Commits from now on keep the newest ``retention`` commits, themselves
        included; None means as many as before, or 1.

        Raises StoreMissingError, NotAStoreError, FormatVersionError, TableMismatchError, StoreInUseError,
        StoreFullError, CommitMissingError, CorruptStoreError; ValueError for another URL, and mode "a" of one shard.
        """
        check_options(mode, commit, retention)
        tables, special = None if tables is None else tuple(tables), None
        place, engine = located(path, engine, mode, store_budget)
        if place is not None and (engine is None or isinstance(engine, str)):
            special = partial(open_special, place, tables, engine, mode, store_budget, commit, retention)
            if (found := special()) is not None:
                return found  # type: ignore[no-any-return]
        try:
            opened = open_engine(place, tables, engine, mode, store_budget)
            try:
                return cls(opened, place, mode, commit, retention)
            except BaseException:
                opened.close()
                raise
        except (StoreError, FileNotFoundError):
            if mode == "r" and special is not None and (found := special()) is not None:  # it was sharded meanwhile
                return found  # type: ignore[no-any-return]
            raise

    def at(self, commit: int) -> Store:
        """Return this store as it stood at a ``commit`` that it keeps, for reading, while both are open.

        What the commit needs stays until then. Raises CommitMissingError.
        """
        self.reader.check_open()
        mine = self._commits if self.commit is not None and self.commit.id == commit else None
        held = mine if isinstance(mine, CommitReader) else None
        return Store(self._opened, self.path, "r", commit, None, self._of or self, held)

    def close(self) -> None:
        """Give up the store; what no commit names is lost. A second time does nothing.

        Raises StoreError inside a function that one of its methods calls, such as ``progress``; it stays open then.
        """
        if not self._closed and os.getpid() == self._pid:
            if self._of is None:
                self._opened.uses.check_outside()
            self._closed = True
            self.reader.close()
            if self._of is None:
                self._opened.close()
            if isinstance(self._commits, CommitReader):
                self._commits.close()  # when nothing reads it any more

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and os.getpid() == self._pid:
            if self._of is None:  # else closing that is enough
                warn_unclosed(self, self.label)
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        at = "no commit" if self.commit is None else f"commit {self.commit.id}"
        return f"<{self.label}: {len(self.tables)} tables, {len(self.segments)} segments, {at}>"

    def write_within(self, memory_bytes: int) -> None:
        """Have copies of parts that are being written take so many bytes at most, or one part that is larger."""
        self._opened.engine.memory_bytes = memory_bytes

    @property
    def commit(self) -> Commit | None:
        """The newest commit, or the one that the store was opened at."""
        return self._commits.snapshot.commit

    @property
    def commits(self) -> tuple[Commit, ...]:
        """All commits that are kept, the oldest first; of a store opened at one, only that."""
        return self._commits.history.commits

    @property
    def retention(self) -> int:
        """How many of the newest commits are kept."""
        if isinstance(self._commits, CommitWriter):
            return self._commits.retention
        return 1 if self.commit is None else self.commit.retention

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Those of the newest commit and those appended since, by id."""
        return self.snapshot.segments

    @property
    def snapshot(self) -> Snapshot:
        """The newest commit and the segments appended since, as of now."""
        return self._commits.snapshot

    @property
    def history(self) -> History:
        """The commits that are kept, each as a snapshot."""
        return self._commits.history

    @contextmanager
    def pinned(self) -> Iterator[Snapshot]:
        """Yield the snapshot of now, and keep all that it needs until this ends, whatever is committed meanwhile."""
        self.reader.check_open()
        with self._commits.pinned() as snapshot:
            yield snapshot

    @property
    def commit_writer(self) -> CommitWriter:
        """What writes commits. Raises ValueError for a store that is open for reading, and StoreClosedError."""
        self.reader.check_open()
        if isinstance(self._commits, CommitWriter):
            return self._commits
        raise ValueError(f"{self.label} is open for reading: open it with mode='a' to write")

    # -- writing -----------------------------------------------------------------------------------------

    def append(
        self, pass_index: int, layouts: Sequence[SegmentLayout], blocks: Iterable[RowBlock], *,
        within: bool = False, stable: bool = False,
    ) -> Segment:  # fmt: skip
        """Write what ``pass_index`` dumped and return it; no commit names it yet, and a crash before the next one loses
        it.

        ``layouts`` has one layout for each group. ``blocks`` yields (group, block, uint8 rows, int64 keys of the
        rows) for every block once, in any order; its arrays are copied before the next block is asked for.
        ``within``: a commit inside the pass follows, and this is its whole key set. ``stable``: no array changes
        before append returns: checksums are computed meanwhile then.

        Raises StoreFullError, and ValueError; after any error nothing of the segment is left.
        """
        writer = self.commit_writer
        if (commit := writer.snapshot.commit) is not None and commit.stored:
            raise ValueError(f"{self.label} was altered: reorganize or compact it before rows are added")
        with self._opened.uses.using():
            return writer.append(pass_index, layouts, blocks, self.reader.compute, within=within, stable=stable)

    def publish(
        self, cursor: Cursor, *, state: bytes, schedule_digest: str, settings: Mapping[str, Any],
        environment: Mapping[str, Any],
    ) -> Commit:  # fmt: skip
        """Make a commit: from now on the store opens here, with the rows live at ``cursor`` and ``state``.

        One atomic, durable step that also frees every block without live rows. Segments appended so far must be
        of passes before the cursor's, or written within its pass where it stands inside one. Raises ValueError, and
        StoreFullError, after which the commit before stands.
        """
        writer = self.commit_writer
        with self._opened.uses.using():
            return writer.publish(
                Cursor(*cursor), state=state, schedule_digest=schedule_digest, settings=settings,
                environment=environment,
            )  # fmt: skip

    def rollback(self, to: int) -> Commit:
        """Make a commit with the rows, the state and the cursor of commit ``to``, and drop those in between.

        What was appended since the newest commit is dropped, too. One atomic, durable step; training goes on from
        there. Ids are not used again: the new commit has the next one. Raises CommitMissingError, StoreFullError
        and CorruptStoreError, after which the store stands where it stood.
        """
        writer = self.commit_writer
        with self._opened.uses.using():
            commit = writer.rollback(to)
        self.take_tables()
        return commit

    def pin(self, name: str, commit: int | None = None) -> Commit:
        """Keep ``commit``, the newest where not said, by ``name`` beside ``retention``, until ``unpin``.

        Returns the commit that says so: one like the newest, durable, with the next id. A name that keeps another
        commit keeps this one from now on. Raises CommitMissingError, StoreFullError, and ValueError for a store
        without a commit.
        """
        check_pin(name)
        writer, newest = self.commit_writer, self.commit
        with self._opened.uses.using():
            return writer.pin(name, newest.id if commit is None and newest is not None else commit or 0)

    def unpin(self, name: str) -> Commit:
        """Let go of the commit that ``name`` keeps; returns the commit that says so. Raises as ``pin`` does."""
        writer = self.commit_writer
        with self._opened.uses.using():
            return writer.pin(name, None)

    def rewrite(
        self,
        uses: FirstUses,
        *,
        schedule_digest: str,
        first_rows: Callable[[Table, NDArray[np.int64]], Sequence[NDArray[np.float32]]] | None = None,
        progress: Callable[[str, int], None] | None = None,
        retain_segments: bool = True,
        layout: Layout = base_layout,
        start: Cursor | None = None,
    ) -> Commit:
        """Make a commit that begins a schedule: its rows in the order (first use, table, hash).

        ``start``: where it is entered, (0, 0) where not said; first uses are those at or after that pass. An empty
        ``schedule_digest`` begins none: a commit at the position keeps the schedule in ``overlaid``. Keys that
        ``uses`` has and the store does not start with their first row, which ``first_rows(table, keys)`` makes faster;
        ``layout`` cuts segments into pages. Rows of other keys stay where they are, in segments of which they are
        at least half, the used ones' stale copies beside them; the rest, all without ``retain_segments``, stand last,
        with next use ``NEVER``. Dense state and settings stay. One atomic, durable step; what it frees goes back, but
        for what readers see. Takes 256 MiB and a slice of ``uses``. More than 1 GiB of rows become several segments.
        Temporary files take an eighth of the rows' bytes at most, or 2.5 GiB. ``progress(what, rows)``: "sort" (keys),
        "read", "write" and rows done since then. Raises ValueError without a commit and for one inside a pass without
        ``start``, StoreFullError and CorruptStoreError; the store then stands where it did, without appended rows.
        """
        writer = self.commit_writer
        if self.commit is None or (self.commit.cursor.sample and start is None):
            at = "has no commit" if self.commit is None else f"stands inside pass {self.commit.cursor.pass_index}"
            raise ValueError(f"{self.label} {at}: train to the end of a pass before its rows are put in another order")
        self.discard_uncommitted()
        begin = Cursor(*(start or (0, 0)))
        whole = Rewrite(
            self.reader, self.snapshot, uses, first_rows, progress or (lambda *_: None), layout=layout,
            retain_segments=retain_segments and not self.commit.stored,
        )  # fmt: skip
        with whole as rewrite, self._opened.uses.using():
            return writer.rewrite(rewrite, self.reader.compute, schedule_digest, begin)

    def overlay(self, *, settings: Mapping[str, Any] | None = None) -> Commit:
        """Commit the appended rows over the stored ones: each hides the row that its key had.

        The cursor, the dense state and all other rows stay; ``settings`` are added to the commit's own. The commit has
        no schedule. To train on, reorganize the store for its dataset: that folds the rows in and keeps the cursor.
        Reads all keys once, in 128 MiB and temporary files of 16 bytes a key. Raises ValueError without a commit and
        for one inside a pass, StoreFullError and CorruptStoreError.
        """
        writer, commit = self.commit_writer, self.commit
        if commit is None or commit.cursor.sample:
            at = "has no commit" if commit is None else f"stands inside pass {commit.cursor.pass_index}"
            raise ValueError(f"{self.label} {at}: train to the end of a pass before rows are laid over it")
        with (
            self._opened.uses.using(),
            CompactionPlan(self.reader, self.snapshot, NoUses(), lambda *_: None) as compaction,
        ):
            compaction.sort(overlay=True)
            return writer.overlay(compaction.retained, settings or {})

    def compact(self, *, progress: Callable[[str, int], None] | None = None) -> Commit:
        """Make a commit with one range for each table, in hash order: the fewest bytes, and lookups in one sweep.

        It keeps the position: a training reorganizes the store first, then goes on where it stood. No row is stale.
        Readers keep their commits meanwhile. Otherwise as ``rewrite``.
        """
        commit = self.commit
        start = None if commit is None or commit.cursor.sample else commit.cursor
        return self.rewrite(NoUses(), schedule_digest="", progress=progress, retain_segments=False, start=start)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def discard_uncommitted(self) -> None:
        """Drop every segment appended since the newest commit, and free its blocks."""
        writer = self.commit_writer
        with self._opened.uses.using():
            writer.discard_uncommitted()

    # -- reading -----------------------------------------------------------------------------------------

    def live_rows(self, table_name: str) -> int:
        """Return how many rows a table has at the newest commit; reads nothing. Raises ValueError for no table."""
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
        check_scan(self.reader, self.snapshot, table_name, chunk_rows)
        return self._stream(
            lambda snapshot: scan_segments(
                self.reader, snapshot, snapshot.committed, table_name,
                chunk_rows=chunk_rows, memory_bytes=memory_bytes, scratch=scratch,
            )
        )  # fmt: skip

    def state(self) -> bytes:
        """Return the dense state of the newest commit. Raises CorruptStoreError; ValueError without a commit."""
        with self.pinned() as snapshot:
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
        with self.pinned() as snapshot:
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
        return self._stream(lambda snapshot: changes(self.reader, snapshot, table_name, since))

    def changed_rows(self, table_name: str, *, since: int) -> int:
        """Return how many rows of a table ``changes`` yields; reads none of them. Raises what it raises."""
        with self.pinned() as snapshot:
            return changed_rows(self.reader, snapshot, table_name, since)

    # -- inside ------------------------------------------------------------------------------------------

    def _stream(self, items: Callable[[Snapshot], Iterator[Item]]) -> Iterator[Item]:
        """Yield what ``items`` yields of the snapshot of the moment when the first one is asked for."""
        with self.pinned() as snapshot:
            yield from items(snapshot)
