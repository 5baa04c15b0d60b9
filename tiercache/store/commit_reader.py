"""Reading commits, checked by digest, and the lease that keeps a commit's blobs from being dropped."""

from __future__ import annotations

import hashlib
import time
import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.commit import Commit, CommitRecord, Kept, RankList, before_commits, head_of, tables_of
from tiercache.store.engines.engine import Blob, Counters, Engine, Head, ReadRequest, Stored
from tiercache.store.locks import Lease, UseCount
from tiercache.store.records import ArrayPlace, ChunkCache, PagedArrays, decode, end_of
from tiercache.store.segment import GroupMeta, Segment, meta_from_bytes
from tiercache.store.segment_writer import check_layouts
from tiercache.store.snapshot import History, Needed, Snapshot
from tiercache.store.store_errors import (
    BlockReadError,
    CommitMissingError,
    CorruptStoreError,
    StoreError,
    damaged,
    parsing,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.store.table import Group, Table


_TRIES, _PAUSE_SECONDS = 100, 0.01
"""Retries if a commit disappears before it is read, and the pause between tries."""


class CommitReader:
    """A commit, leased from a writer in another process or held in this one, until it is closed."""

    def __init__(
        self, loader: CommitLoader, snapshot: Snapshot, *, alone: bool, holds: ExitStack | None = None
    ) -> None:
        """``alone``: a specific commit was requested; ``holds`` keeps it until it is closed, None: the caller does."""
        self._loader, self._alone, self.snapshot, self._holds = loader, alone, snapshot, holds or ExitStack()

    @classmethod
    def leased(cls, loader: CommitLoader, at: int | None = None) -> CommitReader:
        """Lease commit ``at``, by default the newest, if leases can be taken. Raises CommitMissingError."""
        for _ in range(_TRIES):
            head = loader.commits.newest()
            try:
                with ExitStack() as holds:
                    snapshot = loader.find(loader.newest(), at)
                    if _lease(loader, snapshot, holds):
                        return cls(loader, snapshot, alone=at is not None, holds=holds.pop_all())
            except CorruptStoreError:
                if loader.commits.newest() == head:
                    raise
            time.sleep(_PAUSE_SECONDS)  # the writer has dropped it
        what = f"commits of {loader.label} are dropped faster than they can be read"
        raise CommitMissingError(f"{what}: keep more (retention)")

    @cached_property
    def history(self) -> History:
        """The commits that are kept; only the requested one, if any. Raises CorruptStoreError."""
        commit = self.snapshot.commit
        if commit is None:
            return History()
        found: list[Snapshot] = []
        for kept in () if self._alone else commit.kept:
            try:
                found.append(self._loader.kept(kept))
            except CorruptStoreError:
                if _keeps(self._loader.newest_record(), kept.id):
                    raise
        return History((*found, self.snapshot))

    @contextmanager
    def pinned(self, _commit: int | None = None) -> Iterator[Snapshot]:
        """Yield the snapshot, which is held until this is closed."""
        yield self.snapshot

    def explain(self, error: CorruptStoreError) -> StoreError:
        """Return the error to raise for damage: if the writer gave the commit up, the store is not damaged."""
        commit, label = self.snapshot.commit, self._loader.label
        try:
            newest = self._loader.newest_record()
        except StoreError:
            return error
        if commit is None or _keeps(newest, commit.id):
            return error
        if (() if newest is None else newest.folders) != commit.folders:
            return StoreError(f"{label} was divided among other ranks while it was read: open it again")
        longer = (
            "have its writer keep freed data for longer (keep_for)"
            if self._loader.commits.lease_folder is None
            else "let readers write to its folder"
        )
        return CommitMissingError(
            f"{label} was opened at commit {commit.id}, which its writer has dropped since, because no lease could "
            f"be taken: open the store again, or {longer}"
        )

    def close(self) -> None:
        """Give the commit up; a second time does nothing."""
        self._holds.close()


def _lease(loader: CommitLoader, snapshot: Snapshot, holds: ExitStack) -> bool:
    """Take a lease if the engine has a folder for it; return False if it came too late.

    A commit that is no longer kept may lack blobs, but its own blob exists while others read it.
    """
    commit, folder = snapshot.commit, loader.commits.lease_folder
    lease = None if commit is None or folder is None else Lease.take(folder, commit.id)
    if commit is None or lease is None:
        return True
    holds.callback(lease.release)
    return _keeps(loader.newest_record(), commit.id)


def _keeps(newest: CommitRecord | None, id_: int) -> bool:
    return newest is not None and (newest.id == id_ or any(one.id == id_ for one in newest.kept))


READ_BYTES = 64 << 20
"""Bytes of a blob to read at once."""


class CommitLoader:
    """Loads commits, the list of one rank, and the metadata of its segments; from any thread."""

    def __init__(
        self, engine: Engine, groups: Sequence[Group], label: str, counters: Counters, uses: UseCount,
        *, rank: int = 0, commits: Engine | None = None,
    ) -> None:  # fmt: skip
        """``commits`` has the blobs of commits (None: ``engine``). ``groups``: for a snapshot without a commit."""
        self._engine, self.groups, self.label, self._counters, self._uses = engine, groups, label, counters, uses
        self.rank, self.commits = rank, engine if commits is None else commits
        self._segments: weakref.WeakValueDictionary[tuple[str, str], Segment] = weakref.WeakValueDictionary()
        """By name and digest: commits with the same segment share its data."""
        self._chunks = ChunkCache()

    def newest(self) -> Snapshot:
        """Return the newest commit that there is now; before the first one a snapshot of nothing."""
        head = self.commits.newest()
        if head is None:
            raise damaged(f"{self.label} has no description of its contents")
        return Snapshot(None, self.groups) if before_commits(head) else self.read(head)

    def newest_record(self) -> CommitRecord | None:
        """Return the newest commit without the rank's list; None before the first one. Raises CorruptStoreError."""
        head = self.commits.newest()
        return None if head is None else record_at(self.commits, head, self.label)

    def find(self, newest: Snapshot, id_: int | None) -> Snapshot:
        """Return a commit that is kept by the newest, or that itself, also for None. Raises CommitMissingError."""
        if id_ is None or (newest.commit is not None and newest.commit.id == id_):
            return newest
        older = () if newest.commit is None else newest.commit.kept
        for kept in older:
            if kept.id == id_:
                return self.kept(kept)
        ids = [] if newest.commit is None else [*(kept.id for kept in older), newest.commit.id]
        raise CommitMissingError(f"{self.label} has no commit {id_}: {kept_commits(ids)}")

    def kept(self, kept: Kept) -> Snapshot:
        """Return an older commit that is kept."""
        snapshot = self.read(kept.head)
        if snapshot.id != kept.id:
            raise damaged(f"commit {kept.id} of {self.label} is commit {snapshot.id}")
        return snapshot

    def read(self, head: Head) -> Snapshot:
        """Read a commit, and its list of the rank. Raises CorruptStoreError."""
        name = f"{head.name} of {self.label}"
        record = CommitRecord.from_bytes(self._blob(head, name, self.commits), name)
        if self.rank >= len(record.ranks):
            raise damaged(f"{name} has no rank {self.rank}")
        rank, groups = record.ranks[self.rank], record.groups_of(self.rank)
        name = f"{rank.name} of {self.label}"
        own = RankList.from_bytes(self._blob(rank, name, self._engine), groups, self._segment, name)
        if own.rank != self.rank:
            raise damaged(f"{name} lists segments of rank {own.rank}")
        return Snapshot(Commit(**vars(record), own=own, groups=groups, head=head), self.groups)

    def given_up(self, blob: Blob) -> Snapshot:
        """Return a commit that nothing names: its own checksum shows whether it is intact."""
        data = np.empty(blob.size, np.uint8)
        with self._uses.using():
            self.commits.read(ReadRequest(blob, 0, data))
        return self.read(head_of(blob.name, data.tobytes()))

    def _segment(self, **of_segment: object) -> Segment:
        """Return a segment whose description is read when it is used, or the one that was made before."""
        made = Segment(**of_segment, read=self._meta)  # type: ignore[arg-type]
        return self._segments.setdefault((made.name, made.head_digest), made)

    def read_in_place(self, segment: Segment, head: bytes) -> None:
        """Drop the key maps and last changes of a written segment from memory; they are read again on use.

        The checksums of its pages stay, because each load in training needs some: budgets count them.
        """
        described = zip(segment.meta, self._described(segment, head), strict=True)
        segment.describe(tuple(replace(one, key_map=two.key_map, changed=two.changed) for one, two in described))

    def _meta(self, segment: Segment) -> tuple[GroupMeta, ...]:
        name, blob = self._named(segment), segment.meta_blob
        with self._uses.using():
            data = read_front(self._engine, blob, segment.head_bytes, segment.head_digest, name)
        self._counters.add(meta_bytes_read=data.size)
        meta = self._described(segment, data.tobytes())
        try:
            check_layouts([one.layout for one in meta], segment.groups)
        except ValueError as error:
            raise damaged(f"{name} does not match the store ({error})") from error
        return meta

    def _named(self, segment: Segment) -> str:
        return f"the description of segment {segment.id} of {self.label}"

    def _described(self, segment: Segment, head: bytes) -> tuple[GroupMeta, ...]:
        name, blob = self._named(segment), segment.meta_blob

        def read(begin: int, out: NDArray[np.uint8]) -> None:
            try:
                with self._uses.using():
                    self._engine.read(ReadRequest(blob, segment.head_bytes + begin, out))
            except BlockReadError as error:
                raise damaged(f"{name} {error.seen}") from error
            self._counters.add(meta_bytes_read=out.size)

        def arrays_of(places: dict[str, ArrayPlace], checksums: NDArray[np.uint32]) -> PagedArrays:
            if segment.head_bytes + end_of(places)[0] != blob.size:
                raise ValueError(f"it has {blob.size:,} bytes")
            return PagedArrays(blob.name, places, checksums, read, self._chunks, name)

        return meta_from_bytes(head, segment.id, name, arrays_of)

    def _blob(self, head: Head, name: str, engine: Engine) -> bytes:
        with self._uses.using():
            data = read_blob(engine, head, name)
        self._counters.add(meta_bytes_read=len(data))
        return data


def read_blob(engine: Engine, head: Head, name: str) -> bytes:
    """Return a blob that must have a digest. Raises CorruptStoreError; ``name`` is its name in the message."""
    return read_front(engine, Blob(head.name, head.size), head.size, head.digest, name).tobytes()


def read_front(engine: Engine, blob: Blob, num_bytes: int, sha256: str, name: str) -> NDArray[np.uint8]:
    """Return the front of a blob, which must have a digest. Raises CorruptStoreError, naming the blob ``name``."""
    hashed = hashlib.sha256()
    try:
        data = memory_for(engine, blob, num_bytes)
        for start in range(0, num_bytes, READ_BYTES):
            part = data[start : start + READ_BYTES]
            engine.read(ReadRequest(blob, start, part))
            hashed.update(part.data)
    except BlockReadError as error:
        raise damaged(f"{name} {error.seen}") from error
    if hashed.hexdigest() != sha256:
        raise damaged(f"{name} is not what was written")
    return data


def memory_for(engine: Engine, blob: Blob, num_bytes: int) -> NDArray[np.uint8]:
    """Allocate memory for the front of a blob; checks a large one first. Raises BlockReadError if it is too short."""
    if num_bytes > blob.size:
        raise BlockReadError(f"is said to begin with {num_bytes:,} of {blob.size:,} bytes")
    if num_bytes > READ_BYTES:
        engine.read(ReadRequest(blob, num_bytes - 1, np.empty(1, np.uint8)))
    return np.empty(num_bytes, np.uint8)


def record_at(engine: Engine, head: Head, label: str) -> CommitRecord | None:
    """Return the commit at a head, without the ranks' lists; None before the first. Raises CorruptStoreError."""
    if before_commits(head):
        return None
    name = f"{head.name} of {label}"
    return CommitRecord.from_bytes(read_blob(engine, head, name), name)


def tables_at(engine: Engine, head: Head, label: str) -> tuple[Table, ...]:
    """Return the tables at an engine's head. Raises CorruptStoreError."""
    if (record := record_at(engine, head, label)) is not None:
        return record.tables
    name = f"{head.name} of {label}"
    values, _ = decode("tables", read_blob(engine, head, name), name)
    with parsing(name):
        return tables_of(values)


def check_blobs(stored: Mapping[str, Stored], snapshots: Sequence[Snapshot], label: str) -> None:
    """Check that all blobs that commits need are ``stored`` in full; reads nothing. Raises CorruptStoreError."""
    for need in Needed.of(snapshots).blobs():
        seen = stored.get(need.name)
        if seen is None:
            wrong = "is missing"
        elif seen.size < need.size:
            wrong = f"is truncated: {seen.size:,} of its {need.size:,} bytes are there"
        elif seen.size > need.size:
            wrong = f"is described as having {seen.size:,} bytes, but {need.size:,} were written"
        elif seen.dropped > need.first_byte:
            wrong = f"lacks its first {seen.dropped:,} bytes, but those from {need.first_byte:,} on are needed"
        else:
            continue
        raise damaged(f"{need.name} of {label} {wrong}")


def kept_commits(ids: Sequence[int]) -> str:
    """Return a message fragment with the commits that exist."""
    return f"pass one of {', '.join(map(str, ids))}" if ids else "it has none yet"
