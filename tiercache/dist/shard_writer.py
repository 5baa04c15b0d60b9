"""The store of several ranks, open for writing: one rank's part, and the commits that all ranks make together.

``tiercache/store/rank_writer.py`` explains why killing one rank or all of them loses no commit. Rank 0 holds a lock in
the store's folder, so only one run writes at a time. Each rank also locks its own folder: that stops a new run from
writing while ranks of an old one, whose rank 0 is gone, still write.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Unpack

import numpy as np

from tiercache.dist.shard_spec import ShardSpec
from tiercache.errors import StateError
from tiercache.store import Store, StoreError, Table
from tiercache.store.commit import CommitRecord, head_of
from tiercache.store.commit_reader import CommitReader, read_blob, record_at
from tiercache.store.engines.engine import Blob, Head, MemoryEngine, ReadRequest
from tiercache.store.locks import WriterLock, leased_commits
from tiercache.store.opening import RankPlace, StoreDirectory, label_of, open_engine, store_path
from tiercache.store.rank_folder import (
    RankFolder,
    check_homes,
    delete_others,
    is_among,
    note_folders,
    noted_folders,
    open_rank,
    store_id,
)
from tiercache.store.rank_writer import RankWriter
from tiercache.store.snapshot import Snapshot
from tiercache.store.store_errors import BlockReadError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.dist.shard_spec import ShardOptions
    from tiercache.store.engines.engine import Engine
    from tiercache.store.opening import Opened
    from tiercache.store.sharding import ShardingPlan


class _Found(NamedTuple):
    """The store as seen by rank 0, sent to all ranks."""

    engine: str
    id: str
    tables: tuple[Table, ...]
    leased: frozenset[int]
    left: tuple[str, ...]
    """Folders outside the store that earlier ranks may have left."""
    record: CommitRecord | None
    """The newest commit."""


class ShardWriter:
    """One rank's part of a store of several ranks. Created by ``open``.

    ``open``, ``publish`` and ``meet`` are collective; if one fails, all ranks raise. A commit of ``store`` only
    prepares it; prepare the next one after ``publish``. If ``publish`` fails, call it again or restart all ranks.
    """

    def __init__(self, path: Path, ranks: AnyCommunicator) -> None:
        """Only ``open`` calls this."""
        self.path, self._ranks = path, ranks
        self.before: CommitRecord | None = None
        """The newest commit when the store was opened."""
        self._opened: Opened | None = None
        self._store: Store | None = None
        self._copy: MemoryEngine | None = None
        """The blobs of commits, on ranks above 0."""
        self._made: RankFolder | None = None
        """The folder of this rank, if it was created here."""
        self._locks: list[WriterLock] = []
        self._left: list[RankFolder] = []
        """Folders of ranks that are not in the next commit."""
        self._changing: tuple[str, ...] = ()
        """Folders of the old and the new ranks, recorded until the next commit."""

    # -- opening and closing -----------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        tables: Iterable[Table],
        sharding: ShardingPlan,
        ranks: AnyCommunicator,
        *,
        resharded: bool = False,
        **options: Unpack[ShardOptions],
    ) -> ShardWriter:
        """Open the store at ``path`` for writing, with all ranks at its newest commit, or create it.

        tables: whole ones. If nothing was ever committed, the ranks' folders are created again. Raises the errors of
        ``Store.open``, StateError if the store has a different number of ranks or sharding, and ValueError.

        ``resharded``: start resharding a store that has commits, for these ranks and this sharding. ``store`` has no
        commit then: fill it from the old store, which stays readable, and make its first commit. The first ``publish``
        drops all older commits and old rows, and deletes the folders of removed ranks; without it nothing has changed.
        Close readers of the old rows first. Raises StateError for a store without a commit or with a pinned one.
        """
        self = cls(store_path(path), ranks)
        try:
            with ranks.raise_on_all(f"opening {self.label}"):
                spec = ShardSpec(self.path, tables, sharding, ranks.size, **options)
            found = self._find(spec)
            with ranks.raise_on_all(f"opening {self.label}"):
                if resharded:
                    self._check_divided(found)
                elif found.record is not None:
                    spec.check_sharding(found.record, self.label)
                old = () if found.record is None else found.record.folders
                folders = spec.new_folders if resharded else spec.folders(found.record)
                if ranks.rank == 0 and found.record is not None:
                    check_homes(self.path, old if resharded else folders)
                if resharded or found.record is None:
                    self._changing = (*old, *folders)
                self._note([*found.left, *self._changing])
            with ranks.raise_on_all(f"opening the ranks of {self.label}"):
                self._open_own(spec, found, folders, resharded=resharded)
            if found.left:  # all ranks have deleted them by now
                with ranks.raise_on_all(f"opening {self.label}"):
                    self._note(self._changing)
        except BaseException:
            self.close()
            raise
        return self

    def abandon(self) -> None:
        """Drop the new rows if they were not published, and close. Collective.

        The store then takes as many bytes as before.
        """
        made, changing, is_done = self._made, self._changing, False
        try:
            with suppress(StoreError):
                self.writer.abandon()
                self.writer.discard_uncommitted()
                if self._opened is not None:
                    self._opened.engine.drop((), shrink=True)
            self.close()
            if made is not None:
                made.delete()
            is_done = True
        finally:
            if changing and all(self._ranks.all_gather_object(is_done)):
                self._note(())

    def close(self) -> None:
        """Close this rank's part; unpublished changes are lost. A second call does nothing."""
        if self._store is not None:
            self._store.close()
        elif self._opened is not None:
            self._opened.close()
        while self._locks:
            self._locks.pop().release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def store(self) -> Store:
        """This rank's store."""
        assert self._store is not None, "open() sets it"
        return self._store

    @property
    def writer(self) -> RankWriter:
        """The writer of ``store``."""
        writer = self.store.commit_writer
        assert isinstance(writer, RankWriter), "a sharded store has a RankWriter"
        return writer

    def preview(self) -> Store:
        """Return this rank's store at its prepared commit, for reading while both are open."""
        prepared, opened, of = self.writer.prepared, self._opened, self.store
        assert prepared is not None, "a commit must be prepared"
        assert opened is not None, "it is open"
        loader = opened.loader(of.counters)
        snapshot = Snapshot(prepared.commit, loader.groups)
        held = CommitReader(loader, snapshot, alone=True)
        return Store(opened, of.path, of.mode, prepared.commit.id, None, of, held)

    @property
    def label(self) -> str:
        """The store's name in messages."""
        return label_of(self.path)

    # -- commits -----------------------------------------------------------------------------------------

    @property
    def ahead(self) -> bool:
        """True if this rank has a prepared commit that is not published."""
        return self.writer.prepared is not None

    def publish(self, cursor: tuple[int, int] | None = None) -> None:
        """Publish the commit that all ranks have prepared, at ``cursor`` if given; durable on return.

        Raises StateError if a rank has prepared none or is at another cursor, and StoreFullError, on all ranks. The
        previous commit is then still the newest.
        """
        prepared = self.writer.prepared
        with self._ranks.raise_on_all("publishing a commit"):
            if prepared is None or (cursor is not None and prepared.commit.cursor != tuple(cursor)):
                at = "has prepared no commit" if prepared is None else f"is at {in_words(prepared.commit.cursor)}"
                to = "the next commit" if cursor is None else in_words(cursor)
                raise StateError(f"{self.store.label} {at}, but {to} is to be published: commit it on every rank first")
        assert prepared is not None
        made = prepared.commit
        found = self._ranks.all_gather_object([made.id, made.cursor, prepared.head, made.forgot])
        own = [prepared.commit.id, list(prepared.commit.cursor)]
        for rank, (id_, at, *_) in enumerate(found):
            if [id_, at] != own:
                raise StateError(
                    f"rank {rank} commits at {in_words(at)} but rank {self._ranks.rank} at "
                    f"{in_words(prepared.commit.cursor)}: all ranks must take the same steps; restart them to resume "
                    "from the last commit"
                )
        with self._ranks.raise_on_all(f"publishing a commit of {self.label}"):
            if self._ranks.rank == 0:
                self.writer.publish_prepared([Head(*one[2]) for one in found], max(one[3] for one in found))
        self._hear()
        while self._locks:
            self._locks.pop().release()
        if self._changing:
            self._delete_left()
        self._made = None

    def meet(self) -> None:
        """Bring all ranks to one commit, after a run ended between their steps. Collective.

        A commit that all ranks have prepared is published; one that only some have is dropped.
        """
        with self._ranks.raise_on_all("looking at the commits of all ranks"):
            if not self.writer.is_known:
                raise StateError(f"a commit of {self.label} failed and may or may not exist: reopen the store")
        commit = self.store.commit
        found = self._ranks.all_gather_object(None if commit is None else commit.id)
        if any(one != found[0] for one in found):  # rank 0 published a commit that others have not seen
            self._hear()
        ahead = self._ranks.all_gather_object(self.ahead)
        if all(ahead):
            self.publish()
        elif any(ahead):
            with self._ranks.raise_on_all("dropping a commit that not all ranks have prepared"):
                self.writer.abandon()

    def _hear(self) -> None:
        """Update all ranks to the newest commit of rank 0."""
        sent: list[Any] | None = None
        with self._ranks.raise_on_all(f"reading the newest commit of {self.label}"):
            if self._ranks.rank == 0:
                head, data = self.writer.newest_blob()
                sent = [head, b64encode(data).decode(), sorted(self.writer.leased_now())]
        head, text, leased = self._ranks.all_gather_object(sent)[0]
        with self._ranks.raise_on_all(f"taking the newest commit of {self.label}"):
            if self._copy is not None and self.ahead:
                newest, data = Head(*head), b64decode(text)
                record = CommitRecord.from_bytes(data, f"{newest.name} of {self.label}")
                _add_commits(self._copy, [(newest, data)], [one.head for one in record.kept])
                self.writer.leased = {*leased}
                self.writer.take(newest, record)

    # -- private -----------------------------------------------------------------------------------------

    def _find(self, spec: ShardSpec) -> _Found:
        """Open the engine of rank 0, and send its state to all ranks. Collective."""
        sent: dict[str, Any] | None = None
        with self._ranks.raise_on_all(f"opening {self.label}"):
            if self._ranks.rank == 0:
                opened = self._opened = open_engine(self.path, spec.tables, spec.engine, "a", None)
                newest = opened.engine.newest()
                assert newest is not None, "it is a store"
                record = record_at(opened.engine, newest, self.label)
                folders, left = (() if record is None else record.folders), noted_folders(self.path)
                delete_others(self.path, (*folders, *spec.folders(record)), left)
                blobs, leased = _commit_blobs(opened.engine, newest, record)
                sent = {
                    "engine": StoreDirectory(self.path).marker()["engine"],
                    "id": store_id(self.path),
                    "tables": [table.to_record() for table in opened.tables],
                    "blobs": [[head, b64encode(data).decode()] for head, data in blobs],
                    "leased": sorted(leased),
                    "left": left,
                }
        sent = self._ranks.all_gather_object(sent)[0]
        assert sent is not None
        blobs = [(Head(*head), b64decode(text)) for head, text in sent["blobs"]]
        copy = MemoryEngine()
        _add_commits(copy, blobs)
        found = _Found(
            engine=sent["engine"],
            id=sent["id"],
            tables=tuple(Table.from_record(record) for record in sent["tables"]),
            leased=frozenset(sent["leased"]),
            left=tuple(sent["left"]),
            record=record_at(copy, blobs[-1][0], self.label),
        )
        if self._ranks.rank:
            self._copy = copy
        self.before = found.record
        return found

    def _delete_left(self) -> None:
        """Delete the folders of ranks that are not in the newest commit; the next open deletes any that remain."""
        is_done = False
        with suppress(OSError):  # the commit is done
            for folder in self._left:
                folder.delete()
            is_done = True
        self._left.clear()
        self._changing = ()
        if all(self._ranks.all_gather_object(is_done)):
            self._note(())

    def _note(self, folders: Sequence[str]) -> None:
        """On rank 0, record the folders outside the store."""
        if self._ranks.rank == 0:
            note_folders(self.path, folders)

    def _check_divided(self, found: _Found) -> None:
        record = found.record
        if record is None:
            raise StateError(f"{self.label} has no commit yet: there is nothing to divide")
        if pins := record.pins:
            raise StateError(
                f"{self.label} has the pinned commits {', '.join(map(repr, pins))}, which resharding would drop: "
                "unpin them first"
            )
        for rank, folder in enumerate(record.folders[1:], 1):  # all old rows must exist before anything is created
            RankFolder(self.path, folder, rank, found.id).check()

    def _open_own(self, spec: ShardSpec, found: _Found, folders: tuple[str, ...], *, resharded: bool) -> None:
        """Open this rank's folder, or create it; ``folders``: of all ranks."""
        rank, record = self._ranks.rank, found.record
        old = () if record is None else record.folders or (".",)
        commits = self._copy or (self._opened.engine if self._opened is not None else None)
        assert commits is not None, "rank 0 has opened its engine"
        place = RankPlace(
            rank=rank, sharding=spec.sharding, folders=folders, commits=commits, store=found.id, leased=found.leased,
            anew=resharded,
        )  # fmt: skip
        own = self.path / folders[rank]
        before, after = ([self.path / folder for folder in some] for some in (old, folders))
        for other in range(rank, len(old), self._ranks.size):  # an old training that still runs holds its lock
            if resharded and other and not is_among(before[other], [own]) and before[other].is_dir():
                self._locks.append(WriterLock(before[other]))
        if rank == 0:
            assert self._opened is not None
            opened = replace(self._opened, place=place)
        else:
            for name in found.left:
                with suppress(ValueError):
                    if name not in {*old, *folders} and not is_among(self.path / name, [*before, *after]):
                        RankFolder(self.path, name, int(name.rpartition("rank-")[2]), found.id).delete()
            is_there = record is not None and rank < len(old) and (not resharded or is_among(own, [before[rank]]))
            if not is_there:
                self._made = RankFolder(self.path, folders[rank], rank, found.id)
            opened = open_rank(found.tables, self.path, place, "a", None, engine="" if is_there else found.engine)
        self._opened = opened
        self._store = Store(opened, opened.path, "a", None, spec.retention)
        if resharded:
            self._left = [
                RankFolder(self.path, folder, other, found.id) for other, folder in enumerate(old)
                if folder not in folders and other and not is_among(before[other], after)
            ]  # fmt: skip


def in_words(cursor: Sequence[int]) -> str:
    """Return a cursor as text for messages."""
    pass_index, sample = cursor
    return f"pass {pass_index}" + (f", sample {sample}" if sample else "")


def _commit_blobs(
    engine: Engine, newest: Head, record: CommitRecord | None
) -> tuple[list[tuple[Head, bytes]], set[int]]:
    """Return the blobs that other ranks need to open their parts, ``newest`` last, and the leased commits.

    Those are the newest commit, the kept ones, and leased ones that were dropped.
    """
    leased = set() if engine.lease_folder is None else leased_commits(engine.lease_folder)
    kept = () if record is None else record.kept
    heads = [*(one.head for one in kept), newest]
    found = [(head, read_blob(engine, head, head.name)) for head in heads]
    names, stored = {head.name for head, _ in found}, engine.list() if leased else {}
    for name in sorted({f"commits/{id_}" for id_ in leased} & stored.keys() - names):
        data = np.empty(stored[name].size, np.uint8)
        with suppress(StoreError, BlockReadError):
            engine.read(ReadRequest(Blob(name, data.size), 0, data))
            found.insert(0, (head_of(name, data.tobytes()), data.tobytes()))
    return found, leased


def _add_commits(copy: MemoryEngine, blobs: Sequence[tuple[Head, bytes]], kept: Sequence[Head] = ()) -> None:
    """Add the blobs of commits to a copy and make the last one its head; drop all others but ``kept``.

    Repeating it after an interrupt is safe.
    """
    names = {head.name for head in kept} - {head.name for head, _ in blobs}
    copy.drop((name, None) for name in copy.list() if name not in names)
    copy.put(
        [Blob(head.name, head.size) for head, _ in blobs],
        ((i, 0, np.frombuffer(data, np.uint8)) for i, (_, data) in enumerate(blobs)),
    )
    copy.publish(blobs[-1][0], copy.newest())
