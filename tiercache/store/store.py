"""The parameter store: segments, commits and freeing, above an engine that stores bytes."""

from __future__ import annotations

import os
import weakref
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Never, Self

from tiercache.store.checkpoint import CheckpointRecord, checkpoint_records, checkpoint_tensor
from tiercache.store.commit import Commit, Cursor, between_passes
from tiercache.store.commit_reader import CommitReader
from tiercache.store.commit_writer import CommitWriter
from tiercache.store.compaction_plan import CompactionPlan, FirstUses, NoUses
from tiercache.store.engines.engine import Counters, Engine
from tiercache.store.live_keys import KEY_MEMORY, KeyMemory
from tiercache.store.locks import warn_unclosed
from tiercache.store.opening import Opened, check_pin, checked_options, label_of, located, open_engine
from tiercache.store.rank_folder import open_ranks, open_ranks_to_write
from tiercache.store.rank_writer import RankWriter, commit_together
from tiercache.store.reading import BlockReader
from tiercache.store.reads import StoreReads
from tiercache.store.records import integer, positive
from tiercache.store.rewrite import Rewrite
from tiercache.store.segment import Layout, Segment, base_layout
from tiercache.store.store_errors import CommitMissingError, CorruptStoreError, StoreError
from tiercache.store.table import Table, group_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.store.layout import SegmentLayout
    from tiercache.store.row_codec import RowBlock
    from tiercache.store.sharding import ShardingPlan
    from tiercache.store.snapshot import History, Snapshot


class Store(StoreReads):
    """Rows of tables in segments, with atomic commits. Made by ``Store.open``.

    ``append``, ``publish`` and ``discard_uncommitted`` are for one thread at a time; reading methods may be called from
    other threads at the same time. A store belongs to the process that opened it, not to its forks.
    """

    def __init__(self, opened: Opened, path: Path | None, mode: str, at: int | None, retention: int | None,
                 of: Store | None = None, held: CommitReader | None = None) -> None:  # fmt: skip
        """Only ``Store.open`` and ``at`` call this; ``of`` is the store that owns the engine and closes it.

        ``held`` holds the commit beyond this store's lifetime.
        """
        self.path = path
        """Its path; None for an engine without one."""
        self.label = label_of(path)
        """The store's name in messages."""
        self.counters, self.mode = Counters(), mode
        self.key_memory: KeyMemory | None = of.key_memory if of is not None else KEY_MEMORY if mode == "r" else None
        self._opened, self._of = opened, of
        self._pid, self._closed = os.getpid(), True
        self.checkpoints: dict[str, CheckpointRecord] = {} if of is None else of.checkpoints
        """By table, the checkpoint that its rows start from."""
        self.ranks: tuple[Store, ...] = ()
        """The store of each rank, with several ranks: ``reader`` and ``snapshot`` are rank 0's then."""
        engine, label, loader = opened.engine, self.label, opened.loader(self.counters)
        self._commits: CommitWriter | CommitReader
        if held is not None:
            self._commits = CommitReader(loader, held.snapshot, alone=True)
        elif of is not None and at is not None and not isinstance(of._commits, CommitReader):
            holds = ExitStack()
            self._commits = CommitReader(loader, holds.enter_context(of._held(at)), alone=True, holds=holds)
        elif mode == "r":
            self._commits = CommitReader.leased(loader, at)
        elif opened.ranks:
            self.ranks = tuple(Store(one, one.path, mode, None, retention, of=self) for one in opened.ranks)
            self._commits = self.ranks[0]._commits
        elif opened.place is not None:
            self._commits = RankWriter(engine, loader, opened.tables, self.counters, retention, opened.place)
        else:
            self._commits = CommitWriter(engine, loader, opened.tables, self.counters, retention)
        explain = self._commits.explain if isinstance(self._commits, CommitReader) else opened.explain
        self._explain = explain
        self.reader = BlockReader(engine, label, self.counters, opened.uses, explain, path)
        self.take_tables()
        if isinstance(self._commits, CommitWriter):
            self._commits.before_commit = partial(_save_checkpoints, weakref.ref(self))  # no cycle
        self._closed = False

    def take_tables(self) -> None:
        """Take the tables of the commit, which a rollback and an alteration change."""
        for rank in self.ranks:
            rank.take_tables()
        commit, is_rank = self.commit, self._opened.place is not None
        self.sharding = None if is_rank or commit is None or self.path is None else commit.sharding
        self.tables = self.snapshot.tables
        self.groups = self.snapshot.next_groups
        """The groups of newly written rows."""
        if self.sharding is not None and commit is not None and self.path is not None:
            self.tables, self.groups = commit.tables, group_tables(commit.tables)
            self._open_ranks(commit, self.path, self.sharding)
        if not self.ranks:
            self.checkpoints = checkpoint_records(self.tables, self._opened.engine.notes, self.checkpoints)

    def _open_ranks(self, commit: Commit, path: Path, sharding: ShardingPlan) -> None:
        opened = self._opened
        if not opened.ranks:
            open_ranks(opened, path, commit, sharding, "r", None)
        if not self.ranks:
            assert commit.head is not None, "it is written"
            loaders = [one.loader(self.counters) for one in opened.ranks]
            readers = [CommitReader(loader, loader.read(commit.head), alone=True) for loader in loaders]
            ranks = zip(opened.ranks, readers, strict=True)
            of = self._of or self  # avoids a cycle with a view, whose commit is given up once it is unused
            self.ranks = tuple(Store(one, one.path, "r", None, None, of, of_rank) for one, of_rank in ranks)

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
        """Open the store of one rank or several at ``path``; with ``tables`` and mode "a", create a missing one.

        Mode "a" takes the writer's lock and deletes blobs that no commit needs; mode "r" sees the newest commit as of
        now, or ``commit``, for as long as it is open. ``engine`` is "lmdb" or "zarr"; None takes the store's engine,
        and for a new store "lmdb", or "zarr" if a table is compressed. It may be an instance, which then stores the
        bytes: ``path`` only names the store in messages. A URL such as "s3://bucket/model.tc" is a store of engine
        "zarr" there (extra ``obstore``). ``store_budget`` bounds the bytes of blobs, of each rank if there are several;
        None means the size of the file system. Commits from now on keep the newest ``retention`` commits, including
        themselves; None means as many as before, or 1.

        Raises StoreMissingError, NotAStoreError, FormatVersionError, TableMismatchError, StoreInUseError,
        StoreFullError, CommitMissingError, CorruptStoreError; ValueError for another URL.
        """
        commit, retention = checked_options(mode, commit, retention)
        store_budget = None if store_budget is None else positive(store_budget, "store_budget", "a number of bytes")
        tables = None if tables is None else tuple(tables)
        place, engine = located(path, engine, mode, store_budget)
        while True:
            opened = open_engine(place, tables, engine, mode, store_budget)
            before = opened.engine.newest()
            try:
                if mode == "a" and place is not None and (engine is None or isinstance(engine, str)):
                    open_ranks_to_write(opened, place, store_budget)
                return cls(opened, place, mode, commit, retention)
            except BaseException as error:
                again = mode == "r" and isinstance(error, StoreError) and opened.moved_since(before)
                opened.close()
                if not again:
                    raise

    def at(self, commit: int | str) -> Store:
        """Return this store at a commit that it keeps, by id or pin name, for reading while both are open.

        The commit's blobs are kept until then. Raises CommitMissingError.
        """
        self.reader.check_open()
        commit = self.commit_id(commit)
        mine = self._commits if self.commit is not None and self.commit.id == commit else None
        held = mine if isinstance(mine, CommitReader) else None
        of = self._of if isinstance(self._commits, CommitReader) else None
        return Store(self._opened, self.path, "r", commit, None, of or self, held)

    def close(self) -> None:
        """Close the store; segments that no commit names are lost. A second time does nothing.

        Raises StoreError inside a function that one of its methods calls, such as ``progress``; it stays open then.
        """
        if not self._closed and os.getpid() == self._pid:
            for one in (self._opened, *self._opened.ranks) if self._of is None else ():
                one.uses.check_outside()
            self._closed = True
            for part in (self, *self.ranks) if self._of is None else ():
                for record in part.checkpoints.values():
                    record.close()
            self.reader.close()
            for rank in self.ranks:
                rank.close()
            if self._of is None:
                self._opened.close()
            if isinstance(self._commits, CommitReader):
                self._commits.close()  # once nothing reads it

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and os.getpid() == self._pid:
            if self._of is None:  # else the owner closes it
                warn_unclosed(self, self.label)
            self.close()

    def __reduce__(self) -> Never:
        raise TypeError(
            f"{self.label} is open in this process and cannot be copied or pickled: pass its path, and open it where "
            "it is read with Store.open(path, mode='r')"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        at = "no commit" if self.commit is None else f"commit {self.commit.id}"
        return f"<{self.label}: {len(self.tables)} tables, {len(self.segments)} segments, {at}>"

    def check_checkpoints(self) -> None:
        """Raise CheckpointError if files that rows start from are missing, or differ from what the store read."""
        for part in self.parts:
            for table in part.tables:
                if table.name in part.checkpoints:
                    part.checkpoints[table.name].check(checkpoint_tensor(table))

    def write_within(self, memory_bytes: int) -> None:
        """Limit the copies of parts being written to ``memory_bytes``, or one part if that is larger."""
        self._opened.engine.memory_bytes = memory_bytes

    @property
    def commit(self) -> Commit | None:
        """The newest commit, or the one that the store was opened at."""
        return self._commits.snapshot.commit

    @property
    def commits(self) -> tuple[Commit, ...]:
        """All commits that are kept, the oldest first; only one if the store was opened at it."""
        return self._commits.history.commits

    @property
    def retention(self) -> int:
        """The number of newest commits that are kept."""
        if not isinstance(self._commits, CommitReader):
            return self._commits.retention
        return 1 if self.commit is None else self.commit.retention

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of the newest commit and those appended since, by id; with several ranks, rank by rank."""
        return tuple(chain.from_iterable(one.segments for one in self.ranks)) or self.snapshot.segments

    @property
    def snapshot(self) -> Snapshot:
        """The newest commit and the segments appended since."""
        return self._commits.snapshot

    @property
    def history(self) -> History:
        """The commits that are kept, each as a snapshot."""
        return self._commits.history

    @contextmanager
    def _held(self, commit: int | None = None) -> Iterator[Snapshot]:
        """Hold a commit's blobs on all ranks, and yield the snapshot of rank 0. Raises CommitMissingError."""
        with ExitStack() as stack:
            snapshots = [stack.enter_context(part._commits.pinned(commit)) for part in reversed(self.parts)]
            yield snapshots[-1]

    @contextmanager
    def _pinned(self) -> Iterator[Snapshot]:
        self.reader.check_open()
        with self._held() as snapshot:
            try:
                yield snapshot
            except CorruptStoreError as error:  # damage in descriptions: the reader explains damage in blocks
                if (explained := self._explain(error)) is error:
                    raise
                raise explained from error

    def check_whole(self) -> None:
        """Raise ValueError for one rank's shard of a store, which lacks the rows of the other ranks."""
        place = self._opened.place
        if place is not None and len(place.folders) > 1 and not self.ranks:
            raise ValueError(
                f"{self.label} is the shard of rank {place.rank} of {len(place.folders)} and has only that rank's "
                "rows: open the whole store with tc.Store.open(path) and the path of the cache, with mode='r' during "
                "training; to pin a commit during training, call cache.keep(name)"
            )

    @property
    def commit_writer(self) -> CommitWriter:
        """The writer of commits. Raises ValueError if the store is open for reading, and StoreClosedError."""
        writer = self.any_writer
        if not self.ranks:
            return writer
        raise ValueError(
            f"{self.label} has {len(self.ranks)} ranks, which write its rows together: train on it, or train with one "
            "rank, which has all rows from then on"
        )

    @property
    def any_writer(self) -> CommitWriter:
        """The commit writer, with several ranks rank 0's. Raises as ``commit_writer``."""
        self.reader.check_open()
        if isinstance(self._commits, CommitWriter):
            return self._commits
        raise ValueError(f"{self.label} is open for reading: open it with mode='a' to write")

    def append(
        self, pass_index: int, layouts: Sequence[SegmentLayout], blocks: Iterable[RowBlock], *,
        within: bool = False, stable: bool = False,
    ) -> Segment:  # fmt: skip
        """Write the rows that ``pass_index`` dumped as a segment and return it; a crash before the next commit loses
        it.

        ``layouts`` has one layout for each group. ``blocks`` yields (group, block, uint8 rows, int64 keys of the
        rows) for every block once, in any order; its arrays are copied before the next block is requested. ``within``:
        a commit inside the pass follows, and this is its whole key set. ``stable``: arrays do not change before append
        returns, so checksums are computed meanwhile.

        Raises StoreFullError, and ValueError; after any error nothing of the segment is left.
        """
        writer, pass_index = self.commit_writer, integer(pass_index, "the pass")
        if (commit := writer.snapshot.commit) is not None and commit.stored:
            raise ValueError(f"{self.label} was altered: reorganize or compact it before you add rows")
        with self._opened.uses.using():
            return writer.append(pass_index, layouts, blocks, self.reader.compute, within=within, stable=stable)

    def publish(
        self, cursor: Cursor, *, state: bytes, schedule_digest: str, settings: Mapping[str, Any],
        environment: Mapping[str, Any],
    ) -> Commit:  # fmt: skip
        """Make a commit: from now on the store opens here, with the rows live at ``cursor`` and ``state``.

        One atomic, durable step that also frees every block without live rows. Segments appended so far must be
        of passes before the cursor's, or, if the cursor is inside a pass, written within it. Raises ValueError, and
        StoreFullError, after which the previous commit is current.
        """
        writer = self.commit_writer
        with self._opened.uses.using():
            return writer.publish(
                Cursor.of(cursor), state=state, schedule_digest=schedule_digest, settings=settings,
                environment=environment,
            )  # fmt: skip

    def commit_id(self, at: int | str) -> int:
        """Return the id of a commit given by id or pin name. Raises CommitMissingError."""
        if not isinstance(at, str):
            return integer(at, "the commit")
        pins = {} if self.commit is None else self.commit.pins
        if at not in pins:
            names = ", ".join(map(repr, pins)) or "none"
            raise CommitMissingError(f"{self.label} has no pinned commit {at!r}: it has {names}")
        return pins[at]

    def rollback(self, to: int | str) -> Commit:
        """Make a commit with the rows, the state and the cursor of a commit, and drop later ones.

        ``to``: its id, or a pin name. Pinned commits stay. Segments appended since the newest commit are also dropped.
        One atomic, durable step; training continues from there. Ids are not used again: the new commit has the next
        one. Raises CommitMissingError, StoreFullError and CorruptStoreError, after which the store is unchanged.
        """
        commit = self.commit_id(to)
        return self.commit_on_all(lambda part: part.commit_writer.rollback(commit))

    def pin(self, name: str, commit: int | None = None) -> Commit:
        """Keep ``commit``, by default the newest, under ``name`` in addition to ``retention``, until ``unpin``.

        Returns the new commit: like the newest, durable, with the next id. A name that keeps another
        commit keeps this one from now on. Raises CommitMissingError, StoreFullError, and ValueError for a store
        without a commit.
        """
        check_pin(name)
        newest = self.commit
        kept = integer(commit, "the commit") if commit is not None else 0 if newest is None else newest.id
        return self.commit_on_all(lambda part: part.commit_writer.pin(name, kept))

    def unpin(self, name: str) -> Commit:
        """Remove the pin ``name``; returns the new commit. Raises as ``pin`` does."""
        return self.commit_on_all(lambda part: part.commit_writer.pin(name, None))

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

        ``start``: its cursor, by default (0, 0); first uses are at or after that pass. An empty ``schedule_digest``
        begins no schedule: a commit at the position keeps the schedule in ``overlaid``. Keys that ``uses`` has and the
        store does not start with their first row, which ``first_rows(table, keys)`` makes faster; ``layout`` cuts
        segments into pages. Rows of other keys stay in place in segments of which they are at least half, along with
        stale copies of the used ones; the rest, or all without ``retain_segments``, go last, with next use ``NEVER``.
        Dense state and settings stay. One atomic, durable step; freed blocks are reused, unless readers see them. Takes
        256 MiB and a slice of ``uses``. More than 1 GiB of rows become several segments. Temporary files take an eighth
        of the rows' bytes at most, or 2.5 GiB. ``progress(what, rows)``: "sort" (keys), "read", "write" and rows done
        since then. Raises ValueError without a commit and for one inside a pass without ``start``, StoreFullError and
        CorruptStoreError; the store is then unchanged, without appended rows.
        """
        writer, commit = self.commit_writer, self.commit
        if commit is None or start is None:
            commit = between_passes(commit, self.label, "its rows are put in another order")
        self.discard_uncommitted()
        begin = Cursor.of(start or (0, 0))
        with ExitStack() as files, self._opened.uses.using():
            rewrite = Rewrite(
                self.reader, self.snapshot, uses, first_rows, progress or (lambda *_: None), files, layout=layout,
                retain_segments=retain_segments and not commit.stored,
            )  # fmt: skip
            return writer.rewrite(rewrite, self.reader.compute, schedule_digest, begin)

    def overlay(self, *, settings: Mapping[str, Any] | None = None) -> Commit:
        """Commit the appended rows over the stored ones: each replaces its key's row.

        The cursor, the dense state and all other rows stay; ``settings`` are added to the commit's. The commit has no
        schedule. To train on, reorganize the store for its dataset: that folds the rows in and keeps the cursor. Reads
        all keys once, in 128 MiB and temporary files of 16 bytes per key. Raises ValueError without a commit and for
        one inside a pass, StoreFullError and CorruptStoreError.
        """
        writer = self.commit_writer
        between_passes(self.commit, self.label, "rows are laid over it")
        with self._opened.uses.using(), ExitStack() as files:
            compaction = CompactionPlan(self.reader, self.snapshot, NoUses(), lambda *_: None, files)
            compaction.sort(overlay=True)
            return writer.overlay(compaction.retained, settings or {})

    def compact(self, *, progress: Callable[[str, int], None] | None = None) -> Commit:
        """Make a commit with one range for each table, in hash order: the fewest bytes, and lookups in one sweep.

        It keeps the position: training reorganizes the store first, then resumes. No row is stale. Readers keep their
        commits during this. Otherwise as ``rewrite``.
        """
        if self.ranks:
            return self.commit_on_all(lambda rank: rank.compact(progress=progress))
        if self._of is None:  # else a rank of a whole store
            self.check_whole()
        commit = self.commit
        start = None if commit is None or commit.cursor.sample else commit.cursor
        return self.rewrite(NoUses(), schedule_digest="", progress=progress, retain_segments=False, start=start)

    def commit_on_all(self, step: Callable[[Store], object], *, of_shard: bool = False) -> Commit:
        """Return the commit that ``step`` makes of this store or, with several ranks, prepares on each.

        After an error the store is unchanged. ``of_shard``: a rank's shard is allowed, whose part of the commit the
        caller publishes. Raises ValueError for a shard otherwise.
        """
        if not of_shard:
            self.check_whole()
        _ = self.any_writer  # or raises
        with ExitStack() as stack:
            for one in (self._opened, *self._opened.ranks[1:]):
                stack.enter_context(one.uses.using())
            if self.ranks:
                writers = [one._commits for one in self.ranks if isinstance(one._commits, RankWriter)]
                commit_together(writers, [partial(step, rank) for rank in self.ranks])
            else:
                step(self)
        self.take_tables()
        assert self.commit is not None, "it was made"
        return self.commit

    @property
    def parts(self) -> tuple[Store, ...]:
        """The store of each rank; with one rank, this store."""
        return self.ranks or (self,)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of stale rows and rows of dropped tables. The next rewrite frees them."""
        return sum(part.snapshot.waiting_bytes for part in self.parts)

    @property
    def closed(self) -> bool:
        """True after ``close``."""
        return self._closed

    def discard_uncommitted(self) -> None:
        """Drop every segment appended since the newest commit, and free its blocks."""
        writer = self.commit_writer
        with self._opened.uses.using():
            writer.discard_uncommitted()


def _save_checkpoints(store: weakref.ref[Store]) -> None:
    if (found := store()) is not None:
        for record in found.checkpoints.values():
            record.save()
