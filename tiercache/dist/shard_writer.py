"""The shards of a sharded store, one for each rank, and commits that all of them make or none.

Why a kill at any instant, of one rank or of all, loses nothing. Let c be the newest commit that the manifest names.

1. A shard makes a commit in one atomic, durable step, and keeps every commit that the manifest names beside it.
2. ``publish`` returns on no rank before every shard has its next commit, t, and the manifest that names t is on disk. A
   rank makes the commit after t when ``publish`` of t has returned. So at any instant every shard's newest commit is
   c, or the one after it; either way the shard still has all that the manifest names.
3. The manifest is replaced in one atomic, durable step, by rank 0 alone, when every rank has said that its shard has t.
   So it never names a commit that a shard lacks. It names t and as many of those before as the user wants; a shard
   learns from it which it may drop (``keep``), and does so when it makes its next commit, or is opened with too many.
4. On open a shard that is one ahead is rolled back, in one atomic, durable step: a new commit, which has the rows of c
   and a new id, and c is kept as well. A kill meanwhile leaves some shards with the new commit and some without: all
   still have c, and are rolled back again. When all stand there, the manifest is replaced by one in which c is the new
   commits; no shard makes another commit before.
5. To go back to an older commit (``ShardedStore.rollback``), all shards are rolled back to it, each in one atomic,
   durable step that keeps c as well: a kill leaves shards that are one ahead, as in 4. Then the manifest is replaced by
   one that names the new commits and not c, and shards drop c. Shards are compacted likewise.
6. Shards of another generation are made beside those that the manifest names, and become the store's when one manifest
   names them. Every manifest names the folders of the generation that is to be deleted: before the switch the new one,
   after it the old one. So what a kill leaves half-made or half-deleted is found on the next open, and no other folder
   is ever touched.
7. A plain store is one shard, in the folder of the store itself: where several ranks go on with it, or one with
   several shards, it is begun, switched to and deleted as in 6. Beside a plain store there is a manifest only until
   what that names as obsolete is deleted.

A lock in the folder of the sharded store, held by rank 0, lets one training at a time write; each shard's own lock
stops one whose rank 0 is gone while others of its ranks still write.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Self, Unpack

from tiercache.dist.shard_spec import ShardSpec
from tiercache.errors import StateError
from tiercache.store import Cursor, StoreError
from tiercache.store.directory import RANKS_LOCK, StoreDirectory
from tiercache.store.locks import WriterLock
from tiercache.store.openers import SHARD_MANIFEST
from tiercache.store.opening import label_of, store_path
from tiercache.store.shards.open_shards import open_shard, plain_manifest
from tiercache.store.shards.shard_manifest import ShardCommit, ShardManifest, in_words

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable
    from pathlib import Path

    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.dist.shard_spec import ShardOptions
    from tiercache.store import Commit, Store, Table
    from tiercache.store.shards.sharding import ShardingPlan


class ShardWriter:
    """This rank's shard of a sharded store, and the manifest of all. Made by ``open`` or ``begin_generation``.

    ``open``, ``begin_generation`` and ``publish`` are made by all ranks together; where one fails, all raise. A rank
    makes no commit of ``store`` before the one before was published; after a ``publish`` that failed, ``publish`` may
    be called again, and else all ranks start again.
    """

    def __init__(self, path: Path, ranks: AnyCommunicator) -> None:
        """Only ``open`` and ``begin_generation`` call this."""
        self.path = path
        self.manifest: ShardManifest
        """As it stands on disk: of a generation that was begun and not published, the one before it."""
        self._next: ShardManifest
        """What the next publication writes, but for commits; another one than ``manifest`` in a generation begun."""
        self._ranks = ranks
        self._store: Store | None = None
        self._locks: list[WriterLock] = []
        self._written: ShardManifest | None = None
        self._retention: int | None = None
        """What ``drop_older`` is to bring the manifest to."""

    # -- opening and closing -----------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        tables: Iterable[Table],
        sharding: ShardingPlan,
        ranks: AnyCommunicator,
        *,
        drop: bool = True,
        **options: Unpack[ShardOptions],
    ) -> ShardWriter:
        """Open the sharded store at ``path`` for writing, all shards at the commit of its manifest, or make it.

        tables: whole ones. Commits beyond the retention are dropped now, or where not ``drop`` by ``drop_older``.
        Where nothing was ever committed, what is there is made anew.

        Raises, beside what ``Store.open`` raises, StateError for another number of ranks or another sharding than
        the store's, and for a plain one (``begin_generation`` is for those), and ValueError.
        """
        self = cls(store_path(path), ranks)
        try:
            spec = self._check(tables, sharding, options)
            found = self._lock_store()
            if found is None or found.cursor is None:
                self._create(found, spec)
            else:
                self._resume(found, spec)
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
        sharding: ShardingPlan,
        ranks: AnyCommunicator,
        *,
        plain: bool = False,
        **options: Unpack[ShardOptions],
    ) -> ShardWriter:
        """Begin shards for this number of ranks and this sharding, beside those of a store that has commits.

        ``store`` is this rank's new shard, without a commit; ``manifest`` names the old ones, or the plain store that
        is there, to be read at its commits: nobody else writes to them meanwhile. The first ``publish`` makes the new
        ones the store's and deletes the old; without one nothing has changed. Close what reads the old ones before.
        ``plain``: for one rank, the new shard is a plain store, and what the old ones stood beside. Raises as ``open``
        does.
        """
        self = cls(store_path(path), ranks)
        try:
            spec = self._check(tables, sharding, options)
            found = self._lock_store()
            with self._ranks.raise_on_all(f"opening {self.label}"):
                if found is None or found.cursor is None:
                    raise StateError(f"{self.label} has no commit yet: there is nothing to make shards of")
                if plain and found.is_plain:  # another process made it meanwhile
                    raise StateError(f"{self.label} is a plain one already: open it again")
                spec.check_manifest(found, self.label)
            assert found is not None
            self._delete(found)
            with self._ranks.raise_on_all("taking the old shards"):
                self._lock_old(found)
            self._begin(found, spec, plain=plain)
        except BaseException:
            self.close()
            raise
        return self

    def drop_older(self) -> None:
        """Keep as many commits from now on as ``open`` was asked for, and drop what is more. Collective."""
        if self._retention is None:
            return
        manifest = replace(self.manifest, retention=self._retention).trimmed()
        self._retention = None
        if manifest != self._written:
            self._write(manifest)

    def abandon(self) -> None:
        """Delete the shards of a generation that was begun and not published, and close. Collective.

        The store has then the bytes that it had before.
        """
        if self._store is not None:
            self._store.close()
            self._store = None
        self._delete(self.manifest)
        self._write(self._next)
        self.close()

    def close(self) -> None:
        """Give up the shard; what was not published is lost. A second time does nothing."""
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
        """This rank's shard."""
        assert self._store is not None, "open() gives shards that have one"
        return self._store

    @property
    def cursor(self) -> Cursor | None:
        """Where the sharded store stands; None before the first publication, of a generation begun, too."""
        return self.manifest.cursor if self._next.generation == self.manifest.generation else None

    @property
    def label(self) -> str:
        """The store in the words of a message."""
        return label_of(self.path)

    # -- commits -----------------------------------------------------------------------------------------

    def publish(self, cursor: tuple[int, int]) -> None:
        """Make the newest commits of all shards, which stand at ``cursor``, the sharded store's; durable on return.

        Where the manifest names them already, nothing is written. Raises StateError where a shard stands elsewhere, and
        StoreFullError, on all ranks: the manifest before stands.
        """
        cursor, commit = Cursor(*cursor), self.store.commit
        with self._ranks.raise_on_all("publishing a commit"):
            self._check_commit(commit, cursor)
        assert commit is not None
        found = self._ranks.all_gather_object([ShardCommit.of(self.store), cursor])
        others = {rank: Cursor(*at) for rank, (_, at) in enumerate(found) if tuple(at) != cursor}
        if others:
            rank, other = next(iter(others.items()))
            raise StateError(
                f"rank {rank} commits at {in_words(other)} and rank {self._ranks.rank} at {in_words(cursor)}: all "
                "ranks must take the same steps; start them again: they go on from the last commit"
            )
        before, manifest = self.manifest, self._next.at(cursor, [ShardCommit(*made) for made, _ in found])
        if manifest == before:
            return
        self._write(manifest)
        if manifest.generation != before.generation:
            while len(self._locks) > (self._ranks.rank == 0):
                self._locks.pop().release()
            self._delete(manifest)
            if manifest.is_plain:
                self._write(self._next)

    @property
    def ahead(self) -> bool:
        """Whether this shard has a commit that the manifest does not name."""
        commit = self.store.commit
        if commit is None:
            return False
        return self.cursor is None or commit.id != self._named(self.manifest)

    def meet(self) -> None:
        """Bring all shards to one commit again, where something ended a training between theirs. Collective.

        One that all shards have made is published; one that only some have is rolled back. Nobody writes to the shards
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
                raise StateError(f"{self.label} has shards with a first commit and shards without: open it again")
            if self.ahead:
                self.store.rollback(self._named(self.manifest))
        self._write(self.manifest.renewed(self._newest()))

    # -- inside ------------------------------------------------------------------------------------------

    def _check(self, tables: Iterable[Table], sharding: ShardingPlan, options: ShardOptions) -> ShardSpec:
        with self._ranks.raise_on_all(f"opening {self.label}"):
            return ShardSpec(tables, sharding, self._ranks.size, **options)

    def _lock_store(self) -> ShardManifest | None:
        """Take the right to write, as rank 0, and give all ranks the manifest: of a plain store what it would be."""
        found: ShardManifest | None = None
        with self._ranks.raise_on_all(f"opening {self.label}"):
            if self._ranks.rank == 0:
                StoreDirectory(self.path).find()  # refuses what is no store's
                StoreDirectory(self.path).create()
                self._locks.append(WriterLock(self.path, RANKS_LOCK))
                found = ShardManifest.read(self.path)
                if found is None or found.is_plain:
                    self._locks.append(WriterLock(self.path))
                    found = plain_manifest(self.path)
        return self._broadcast(found)

    def _broadcast(self, manifest: ShardManifest | None) -> ShardManifest | None:
        """Return what rank 0 has, on every rank."""
        own = manifest.to_bytes().decode() if self._ranks.rank == 0 and manifest is not None else None
        received = self._ranks.all_gather_object(own)[0]
        return (
            None if received is None else ShardManifest.from_bytes(received.encode(), str(self.path / SHARD_MANIFEST))
        )

    def _create(self, found: ShardManifest | None, spec: ShardSpec) -> None:
        """Make the shards of a store without a commit."""
        manifest: ShardManifest | None = None
        with self._ranks.raise_on_all(f"making {self.label}"):
            if found is not None and found.is_plain:  # whoever made it chose its tables
                spec.check_manifest(found, self.label)
            if self._ranks.rank == 0:
                manifest = spec.manifest(self.path, found)
        manifest = self._broadcast(manifest)
        assert manifest is not None
        self._write(manifest)
        self._delete(manifest)
        self._open_shard(self._next, spec)

    def _begin(self, found: ShardManifest, spec: ShardSpec, *, plain: bool) -> None:
        """Make the shards of another generation, which the manifest on disk names as what is to be deleted."""
        fresh = replace(spec.manifest(self.path, found, plain=plain), obsolete=found.shards)
        self._write(replace(found, obsolete=fresh.shards))
        self._open_shard(fresh, spec)
        if plain:  # a plain store counts the commits alone
            self.store.commit_writer.first_id = fresh.first_commit
        self._next = fresh

    def _open_shard(self, manifest: ShardManifest, spec: ShardSpec) -> None:
        rank = self._ranks.rank
        with self._ranks.raise_on_all(f"opening the shards of {self.label}"):
            tables = spec.sharding.shard_tables(spec.tables, rank)
            self._store = open_shard(self.path, manifest, rank, tables)

    def _resume(self, found: ShardManifest, spec: ShardSpec) -> None:
        """Open the shard that is there, and step back to the commit of the manifest."""
        with self._ranks.raise_on_all(f"opening {self.label}"):
            spec.check_manifest(found, self.label)
            spec.check_sharding(found, self.label)
        self._delete(found)
        manifest = spec.moved(self.path, replace(found, obsolete=()))
        self._open_shard(manifest, spec)
        self._retention = manifest.retention
        manifest = manifest.renewed(self._newest())
        manifest = replace(manifest, retention=max(manifest.retention, found.retention))
        self.manifest, self._next, self._written = manifest, manifest, found
        if replace(manifest, retention=found.retention) != found:
            self._write(manifest)

    def _check_commit(self, commit: Commit | None, cursor: Cursor) -> None:
        """Raise StateError where this shard does not stand one commit after the manifest at most, at ``cursor``."""
        if commit is None or commit.cursor != cursor:
            at = "has no commit" if commit is None else f"stands at {in_words(commit.cursor)}"
            raise StateError(
                f"{self.store.label} {at} and {in_words(cursor)} is to be published: commit it on every rank first"
            )
        if self._next.generation == self.manifest.generation and self.manifest.commits:
            made = commit.id - self._named(self.manifest)
            if made > 1:
                raise StateError(
                    f"{self.store.label} made {made} commits since the manifest was written: publish each before the "
                    "next"
                )

    def _lock_old(self, found: ShardManifest) -> None:
        """Take the right to write to the old shards that fall to this rank: a training that goes on still has it."""
        for rank in range(self._ranks.rank, 0 if found.is_plain else found.num_ranks, self._ranks.size):
            folder = found.folder(self.path, rank)
            if folder.exists():  # else it is on another machine
                self._locks.append(WriterLock(folder))

    def _delete(self, manifest: ShardManifest) -> None:
        """Delete the folders that a manifest says are to be deleted; the next one does not name them any more.

        Every rank tries every folder: it may be on a disk that only some of them see.
        """
        if not manifest.obsolete:
            return
        with self._ranks.raise_on_all(f"deleting old shards of {self.label}"):
            self._check_place()
            manifest.delete_obsolete(self.path, here=self._ranks.rank == 0)
        self._next = replace(manifest, obsolete=())

    def _write(self, manifest: ShardManifest) -> None:
        """Have rank 0 write the manifest; all return when it is on disk."""
        with self._ranks.raise_on_all(f"writing the manifest of {self.label}"):
            self._check_place()
            if self._ranks.rank == 0:
                self._check_manifest(manifest)
                manifest.write(self.path)
        self.manifest = self._next = self._written = manifest
        if self._store is not None and manifest.commits and not manifest.is_plain:
            self._store.commit_writer.keep(manifest.commits_of(self._ranks.rank))

    def _newest(self) -> list[ShardCommit]:
        """Return the newest commit of every shard, by rank."""
        return [ShardCommit(*made) for made in self._ranks.all_gather_object(ShardCommit.of(self.store))]

    def _check_place(self) -> None:
        """Raise StoreError on rank 0 if the store at the path is not the one that it locked."""
        if self._ranks.rank == 0:
            self._locks[0].check()

    def _check_manifest(self, manifest: ShardManifest) -> None:
        """Raise StoreError if the one on disk is neither what this wrote or read last nor ``manifest``."""
        known = self._written
        if known is None or (known.is_plain and not known.obsolete):  # then there is none
            return
        if ShardManifest.read(self.path) not in (known, manifest):
            raise StoreError(
                f"{self.path / SHARD_MANIFEST} is not what this training wrote: something else changed or restored it "
                "meanwhile. Nothing more is written: put back the folder as one whole, and open it again"
            )

    def _named(self, manifest: ShardManifest) -> int:
        """Return the commit of this shard at which a manifest stands."""
        assert manifest.newest is not None
        return manifest.newest.shards[self._ranks.rank]
