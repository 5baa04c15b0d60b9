"""The parts of a sharded store, one for each rank, and commits that all of them make or none.

Why a kill at any instant, of one rank or of all, loses nothing. Let c be the newest commit that the record names.

1. A part makes a commit in one atomic, durable step, and keeps every commit that the record names beside it.
2. ``publish`` returns on no rank before every part has its next commit, t, and the record that names t is on disk. A
   rank makes the commit after t when ``publish`` of t has returned. So at any instant every part's newest commit is
   c, or the one after it; either way the part still has all that the record names.
3. The record is replaced in one atomic, durable step, by rank 0 alone, when every rank has said that its part has t.
   So it never names a commit that a part lacks. It names t and as many of those before as the user wants; a part learns
   from it which it may drop (``keep``), and does so when it makes its next commit, or is opened with too many.
4. On open a part that is one ahead is rolled back, in one atomic, durable step: a new commit, which has the rows of c
   and a new id, and c is kept as well. A kill meanwhile leaves some parts with the new commit and some without: all
   still have c, and are rolled back again. When all stand there, the record is replaced by one in which c is the new
   commits; no part makes another commit before.
5. To go back to an older commit (rollback.py), all parts are rolled back to it, each in one atomic, durable step that
   keeps c as well: a kill leaves parts that are one ahead, as in 4. Then the record is replaced by one that names the
   new commits and not c, and parts drop c.
6. Parts of another generation are made beside those that the record names, and become the store's when one record
   names them. Every record names the folders of the generation that is to be deleted: before the switch the new one,
   after it the old one. So what a kill leaves half-made or half-deleted is found on the next open, and no other folder
   is ever touched.

A lock in the folder of the sharded store, held by rank 0, lets one training at a time write; each part's own lock
stops one whose rank 0 is gone while others of its ranks still write.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tiercache.errors import StateError
from tiercache.ranks.common_commit import in_words
from tiercache.ranks.record import RECORD, Record
from tiercache.ranks.shard_folder import Mark, delete_part, open_part
from tiercache.ranks.sharded_folder import LOCK, check_place
from tiercache.ranks.wanted import Wanted
from tiercache.store import Cursor, StoreError
from tiercache.store.commit_writer import keep, release
from tiercache.store.directory import StoreDirectory, WriterLock

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.store import Commit, Store, Table

__all__ = ["Parts"]


class Parts:
    """This rank's part of a sharded store, and the record of all. Made by ``open`` or ``begin_generation``.

    ``open``, ``begin_generation`` and ``publish`` are made by all ranks together; where one fails, all raise. A rank
    makes no commit of ``store`` before the one before was published; after a ``publish`` that failed, ``publish`` may
    be called again, and else all ranks start again.
    """

    def __init__(self, path: Path, ranks: AnyCommunicator) -> None:
        """Only ``open`` and ``begin_generation`` call this."""
        self.path = path
        self.record: Record
        """As it stands on disk: of a generation that was begun and not published, the one before it."""
        self._next: Record
        """What the next publication writes, but for commits; another one than ``record`` in a generation begun."""
        self._ranks = ranks
        self._store: Store | None = None
        self._locks: list[WriterLock] = []
        self._written: Record | None = None
        self._retention: int | None = None
        """What ``drop_older`` is to bring the record to."""

    # -- opening and closing -----------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        tables: Iterable[Table],
        part_tables: Iterable[Table],
        sharding: Mapping[str, Any],
        ranks: AnyCommunicator,
        *,
        engine: str | None = None,
        parts: Sequence[str | os.PathLike[str]] | None = None,
        retention: int | None = None,
        store_budget: int | None = None,
        drop: bool = True,
    ) -> Parts:
        """Open the sharded store at ``path`` for writing, all parts at the commit of its record, or make it.

        tables: whole ones; part_tables: of this rank's part; sharding: which rank has which rows, as plain JSON
        values. parts: for each rank the folder that its part is in, as ``part-G-R``; None: where the record has it,
        of a new store its own. engine, store_budget: of each part, as in ``Store.open``. retention: commits to be kept;
        None: as many as before, or 1; more than that are dropped now, or where not ``drop`` by ``drop_older``. Where
        nothing was ever committed, what is there is made anew.

        Raises, beside what ``Store.open`` raises, StateError for another number of ranks or another sharding than
        the store's (``begin_generation`` is for those), and ValueError.
        """
        self = cls(Path(path), ranks)
        try:
            with self._ranks.raise_on_all(f"opening {self.label}"):
                wanted = Wanted(tables, part_tables, sharding, ranks.size, engine, parts, retention, store_budget)
            found = self._hold()
            if found is None or found.cursor is None:
                self._create(found, wanted)
            else:
                self._take_up(found, wanted)
            if drop:
                self.drop_older()
        except BaseException:
            self.close()
            raise
        return self

    @classmethod
    def begin_generation(
        cls,
        path: str | os.PathLike[str],
        tables: Iterable[Table],
        part_tables: Iterable[Table],
        sharding: Mapping[str, Any],
        ranks: AnyCommunicator,
        *,
        engine: str | None = None,
        parts: Sequence[str | os.PathLike[str]] | None = None,
        retention: int | None = None,
        store_budget: int | None = None,
    ) -> Parts:
        """Begin parts for this number of ranks and this sharding, beside those of a store that has commits.

        ``store`` is this rank's new part, without a commit; ``record`` names the old ones, to be read at its commits:
        nobody else writes to them meanwhile. The first ``publish`` makes the new ones the store's and deletes the old;
        without one nothing has changed. Close what reads the old ones before. parts: None puts the new ones into the
        folder of the sharded store; engine: None takes the old ones'. Raises as ``open`` does.
        """
        self = cls(Path(path), ranks)
        try:
            with self._ranks.raise_on_all(f"opening {self.label}"):
                wanted = Wanted(tables, part_tables, sharding, ranks.size, engine, parts, retention, store_budget)
            found = self._hold()
            if found is None or found.cursor is None:
                raise StateError(f"{self.label} has no commit yet: there is nothing to make parts of")
            self._check_record(found, wanted)
            self._delete(found)
            with self._ranks.raise_on_all("taking the old parts"):
                self._take_old(found)
            self._begin(found, wanted)
        except BaseException:
            self.close()
            raise
        return self

    def drop_older(self) -> None:
        """Keep as many commits from now on as ``open`` was asked for, and drop what is more. Collective."""
        if self._retention is None:
            return
        record = replace(self.record, retention=self._retention).trimmed()
        self._retention = None
        if record != self._written:
            self._write(record)
        with self._ranks.raise_on_all("dropping older commits"), suppress(StoreError):  # what stays goes with the next
            if len(self.store.commits) > record.retention + 1:  # something may have failed to drop them before
                release(self.store)

    def abandon(self) -> None:
        """Delete the parts of a generation that was begun and not published, and close. Collective.

        The store has then the bytes that it had before.
        """
        if self._store is not None:
            self._store.close()
            self._store = None
        self._delete(self.record)
        self._write(self._next)
        self.close()

    def close(self) -> None:
        """Give up the part; what was not published is lost. A second time does nothing."""
        if self._store is not None:
            self._store.close()
        while self._locks:
            self._locks.pop().release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def store(self) -> Store:
        """This rank's part."""
        assert self._store is not None, "open() gives parts that have one"
        return self._store

    @property
    def cursor(self) -> Cursor | None:
        """Where the sharded store stands; None before the first publication, of a generation begun, too."""
        return self.record.cursor if self._next.generation == self.record.generation else None

    @property
    def label(self) -> str:
        """The sharded store in the words of a message."""
        return f"the sharded store at {self.path}"

    # -- commits -----------------------------------------------------------------------------------------

    def publish(self, cursor: tuple[int, int]) -> None:
        """Make the newest commits of all parts, which stand at ``cursor``, the sharded store's; durable on return.

        Where the record names them already, nothing is written. Raises StateError where a part stands elsewhere, and
        StoreFullError, on all ranks: the record before stands.
        """
        cursor, commit = Cursor(*cursor), self.store.commit
        with self._ranks.raise_on_all("publishing a commit"):
            self._check_commit(commit, cursor)
        assert commit is not None
        found = self._ranks.all_gather_object([commit.id, *cursor])
        others = {rank: Cursor(*at) for rank, (_, *at) in enumerate(found) if tuple(at) != cursor}
        if others:
            rank, other = next(iter(others.items()))
            raise StateError(
                f"rank {rank} commits at {in_words(other)} and rank {self._ranks.rank} at {in_words(cursor)}: all "
                "ranks must take the same steps; start them again: they go on from the last commit"
            )
        before, record = self.record, self._next.at(cursor, [id_ for id_, *_ in found])
        if record == before:
            return
        self._write(record)
        if record.generation != before.generation:
            while len(self._locks) > (self._ranks.rank == 0):
                self._locks.pop().release()
            self._delete(record)

    @property
    def ahead(self) -> bool:
        """Whether this part has a commit that the record does not name."""
        commit = self.store.commit
        if commit is None:
            return False
        return self.cursor is None or commit.id != self._recorded(self.record)

    def meet(self) -> None:
        """Bring all parts to one commit again, where something ended a training between theirs. Collective.

        One that all parts have made is published; one that only some have is rolled back. Nobody writes to the parts
        meanwhile. Raises StateError where only some have the very first: the store has to be opened again.
        """
        found = self._ranks.all_gather_object(self.ahead)
        if not any(found):
            return
        if all(found):
            commit = self.store.commit
            assert commit is not None
            self.publish(commit.cursor)
            return
        with self._ranks.raise_on_all("stepping back to the last commit of all ranks"):
            if self.cursor is None:
                raise StateError(f"{self.label} has parts with a first commit and parts without: open it again")
            if self.ahead:
                self.store.rollback(self._recorded(self.record))
        assert self.store.commit is not None
        self._write(self.record.renewed(self._ranks.all_gather_object(self.store.commit.id)))

    # -- inside ------------------------------------------------------------------------------------------

    def _hold(self) -> Record | None:
        """Take the right to write, as rank 0, and give all ranks the record."""
        found: Record | None = None
        with self._ranks.raise_on_all(f"opening {self.label}"):
            if self._ranks.rank == 0:
                check_place(self.path)
                StoreDirectory(self.path).create()
                self._locks.append(WriterLock(self.path, LOCK))
                found = Record.read(self.path)
        return self._told(found)

    def _told(self, record: Record | None) -> Record | None:
        """Return what rank 0 has, on every rank."""
        mine = record.to_bytes().decode() if self._ranks.rank == 0 and record is not None else None
        told = self._ranks.all_gather_object(mine)[0]
        return None if told is None else Record.from_bytes(told.encode(), str(self.path / RECORD))

    def _create(self, found: Record | None, wanted: Wanted) -> None:
        """Make the parts of a store without a commit."""
        record: Record | None = None
        with self._ranks.raise_on_all(f"making {self.label}"):
            if self._ranks.rank == 0:
                record = wanted.record(self.path, found)
        record = self._told(record)
        assert record is not None
        self._write(record)
        self._delete(record)
        self._make_part(self._next, wanted)

    def _begin(self, found: Record, wanted: Wanted) -> None:
        """Make the parts of another generation, which the record on disk names as what is to be deleted."""
        fresh = replace(wanted.record(self.path, found), obsolete=found.parts)
        self._write(replace(found, obsolete=fresh.parts))
        self._make_part(fresh, wanted)
        self._next = fresh

    def _make_part(self, record: Record, wanted: Wanted) -> None:
        rank = self._ranks.rank
        folder = record.folder(self.path, rank)
        with self._ranks.raise_on_all(f"making the parts of {self.label}"):
            Mark(store=record.id, generation=record.generation, rank=rank).make(folder)
            self._store = open_part(
                folder, wanted.part_tables,
                engine=record.engine, store_budget=wanted.store_budget, retention=record.retention + 1,
            )  # fmt: skip

    def _take_up(self, found: Record, wanted: Wanted) -> None:
        """Open the part that is there, and step back to the commit of the record."""
        rank = self._ranks.rank
        self._check_record(found, wanted)
        with self._ranks.raise_on_all(f"opening {self.label}"):
            wanted.check_ways(found, self.label)
        self._delete(found)
        record = wanted.moved(self.path, replace(found, obsolete=()))
        folder = record.folder(self.path, rank)
        with self._ranks.raise_on_all(f"opening the parts of {self.label}"):
            Mark(store=record.id, generation=record.generation, rank=rank).check(folder, self.label)
            self._store = open_part(
                folder, wanted.part_tables,
                engine=record.engine, store_budget=wanted.store_budget, retention=record.retention + 1,
            )  # fmt: skip
            record.check_part(self._store, rank, self.label)
            keep(self._store, record.of_part(rank))
            assert self._store.commit is not None
            if self._store.commit.id != self._recorded(record):
                self._store.rollback(self._recorded(record))
        assert self._store is not None
        assert self._store.commit is not None
        self._retention = record.retention
        record = record.renewed(self._ranks.all_gather_object(self._store.commit.id))
        record = replace(record, retention=max(record.retention, found.retention))
        self.record, self._next, self._written = record, record, found
        if replace(record, retention=found.retention) != found:
            self._write(record)

    def _check_commit(self, commit: Commit | None, cursor: Cursor) -> None:
        """Raise StateError where this part does not stand one commit after the record at most, at ``cursor``."""
        if commit is None or commit.cursor != cursor:
            at = "has no commit" if commit is None else f"stands at {in_words(commit.cursor)}"
            raise StateError(
                f"{self.store.label} {at} and {in_words(cursor)} is to be published: commit it on every rank first"
            )
        if self._next.generation == self.record.generation and self.record.commits:
            made = commit.id - self._recorded(self.record)
            if made > 1:
                raise StateError(
                    f"{self.store.label} made {made} commits since the record was written: publish each before the next"
                )

    def _check_record(self, found: Record, wanted: Wanted) -> None:
        with self._ranks.raise_on_all(f"opening {self.label}"):
            wanted.check_record(found, self.label)

    def _take_old(self, found: Record) -> None:
        """Take the right to write to the old parts that fall to this rank: a training that goes on still has it."""
        for rank in range(self._ranks.rank, found.num_ranks, self._ranks.size):
            folder = found.folder(self.path, rank)
            if folder.exists():  # else it is on another machine
                self._locks.append(WriterLock(folder))

    def _delete(self, record: Record) -> None:
        """Delete the folders that a record says are to be deleted; the next record does not name them any more.

        Every rank tries every folder: it may be on a disk that only some of them see.
        """
        if not record.obsolete:
            return
        with self._ranks.raise_on_all(f"deleting old parts of {self.label}"):
            for part in record.obsolete:
                delete_part(self.path / part, record.id)
        self._next = replace(record, obsolete=())

    def _write(self, record: Record) -> None:
        """Have rank 0 write the record; all return when it is on disk."""
        with self._ranks.raise_on_all(f"writing the record of {self.label}"):
            if self._ranks.rank == 0:
                record.write(self.path)
        self.record = self._next = self._written = record
        if self._store is not None and record.commits:
            keep(self._store, record.of_part(self._ranks.rank))

    def _recorded(self, record: Record) -> int:
        """Return the commit of this part at which a record stands."""
        assert record.newest is not None
        return record.newest.parts[self._ranks.rank]
