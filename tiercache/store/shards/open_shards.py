"""Opening a sharded store: the shards that its manifest names, for reading or writing, or one of them for its rank."""

from __future__ import annotations

import uuid
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from tiercache.store.directory import RANKS_LOCK, StoreDirectory
from tiercache.store.locks import WriterLock
from tiercache.store.opening import ENGINES, compare_tables, label_of, open_engine
from tiercache.store.shards.shard_manifest import HERE, GlobalCommit, ShardCommit, ShardManifest
from tiercache.store.shards.sharded_store import ShardedStore
from tiercache.store.shards.sharding import ShardingPlan
from tiercache.store.store import Store
from tiercache.store.store_errors import (
    CommitMissingError,
    CorruptStoreError,
    StoreError,
    StoreMissingError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tiercache.store.table import Table


_TRIES = 32
"""How often opening begins anew, each time because a training had moved on."""


def open_sharded(
    path: Path,
    tables: Iterable[Table] | None = None,
    engine: str | None = None,
    mode: str = "r",
    store_budget: int | None = None,
    commit: int | None = None,
    retention: int | None = None,
) -> ShardedStore | None:
    """Open the sharded store at ``path``; None where a plain store is there, ready to be opened, or none at all.

    Of older commits it has those that all shards have, whole, when it is opened: a training drops the oldest meanwhile,
    and damage that one alone needs spoils no other. Mode "a" holds the right to write to all shards, so all must be
    where this process can reach them; with ``tables`` it deletes shards of which nothing was ever committed. Raises
    StoreMissingError where nothing was committed, CommitMissingError, StoreInUseError while ranks train, and what
    ``Store.open`` raises for each shard.
    """
    manifest = ShardManifest.read(path)
    if manifest is None or (manifest.is_plain and mode == "r"):
        return None
    if tables is not None:
        compare_tables(manifest.tables, sorted(tables, key=lambda table: table.table_id), label_of(path))
    if engine not in {None, manifest.engine}:
        raise ValueError(f"{label_of(path)} was made with engine {manifest.engine!r}, not {engine!r}: leave engine out")
    if mode == "a":
        return _open_to_write(path, retention, store_budget, anew=tables is not None)
    return open_shards(path, manifest, commit)


def open_shards(path: Path, manifest: ShardManifest, commit: int | None = None) -> ShardedStore:
    """Open the shards that a manifest names, or those that the one after it does, for reading."""
    label = label_of(path)
    for _ in range(_TRIES):
        if manifest.newest is None:
            raise StoreMissingError(f"{label} has no commit yet: train to its first one")
        only = None if commit is None else manifest.find(commit, label)
        try:
            opened = _open_all(path, manifest, only)
        except (StoreError, FileNotFoundError):
            now = ShardManifest.read(path) or plain_manifest(path)  # it may have become a plain store meanwhile
            if now is None or now == manifest or manifest.is_plain:
                raise
            manifest = now
            continue
        return ShardedStore(path, manifest, opened, _kept(manifest, opened) if only is None else (only,))
    raise StoreError(f"{label} went on {_TRIES} times while it was opened: open it again")


def open_shard(
    path: Path,
    manifest: ShardManifest,
    rank: int,
    tables: Iterable[Table] | None = None,
    *,
    store_budget: int | None = None,
) -> Store:
    """Open a shard for writing at the newest commit of the manifest, or make it, of ``tables``, where that has none.

    It keeps all commits that the manifest names, and steps back where it is ahead. Raises what ``Store.open`` raises,
    and where the shard is not the one that the manifest names.
    """
    folder, label = manifest.folder(path, rank), label_of(path)
    if manifest.newest is not None:
        manifest.mark(rank).check(folder, label)
    elif not manifest.is_plain:
        manifest.mark(rank).make(folder)
    retention = manifest.retention if manifest.is_plain else manifest.retention + 1
    fresh = tables if manifest.newest is None else None  # those of a shard are bound by the digest of its commit
    opened = open_engine(folder, fresh, manifest.engine, "a", store_budget, of_shards=True)
    try:
        shard = Store(opened, folder, "a", None, retention)
    except BaseException:
        opened.close()
        raise
    try:
        if manifest.newest is not None:
            manifest.check_shard(shard, rank, label)
            shard.commit_writer.keep(manifest.commits_of(rank))
            assert shard.commit is not None
            if shard.commit.id != manifest.newest.shards[rank]:
                shard.rollback(manifest.newest.shards[rank])
    except BaseException:
        shard.close()
        raise
    return shard


def plain_manifest(path: Path) -> ShardManifest | None:
    """Return what the manifest of the plain store at ``path`` would be; None where there is none. Raises StoreError."""
    directory, leftover = StoreDirectory(path), ShardManifest.read(path)
    if not directory.find():
        return None
    with Store.open(path, mode="r") as store:
        return ShardManifest(
            id=uuid.uuid4().hex if leftover is None else leftover.id,
            generation=0 if leftover is None else leftover.generation,
            engine=directory.engine(tuple(ENGINES), None),
            retention=store.retention,
            tables=store.tables,
            sharding=ShardingPlan.of_one(store.tables),
            shards=(HERE,),
            commits=tuple(
                GlobalCommit.of(one.id, one.cursor, [ShardCommit(one.id, one.digest)]) for one in store.commits
            ),
            obsolete=() if leftover is None else leftover.obsolete,
        )


def delete_leftovers(path: Path) -> None:
    """Delete what an interrupted change to or from shards left beside a plain store, for whoever may write to that."""
    manifest = ShardManifest.read(path)
    if manifest is not None and manifest.is_plain:
        manifest.delete_obsolete(path)
        replace(manifest, obsolete=()).write(path)


def _open_to_write(path: Path, retention: int | None, store_budget: int | None, *, anew: bool) -> ShardedStore | None:
    """Open all shards; None where a plain store is there, or, ``anew``, may be made where nothing was committed."""
    with ExitStack() as stack:
        lock = WriterLock(path, RANKS_LOCK)
        stack.callback(lock.release)
        found = ShardManifest.read(path)
        if found is None:
            return None
        if found.newest is None and not found.is_plain and not anew:
            raise StoreMissingError(f"{label_of(path)} has no commit yet: train to its first one")
        if found.newest is None or found.is_plain:
            plain = WriterLock(path)
            stack.callback(plain.release)
            if not found.is_plain:  # the manifest goes last: a kill leaves shards without a commit
                replace(found, obsolete=(*found.obsolete, *found.shards)).delete_obsolete(path)
                replace(found, shards=(HERE,), obsolete=()).write(path)
            delete_leftovers(path)
            return None
        found.delete_obsolete(path)
        manifest = replace(found, obsolete=(), retention=retention or found.retention)
        opened = tuple(
            stack.enter_context(open_shard(path, manifest, rank, store_budget=store_budget))
            for rank in range(manifest.num_ranks)
        )
        manifest = manifest.renewed([ShardCommit.of(shard) for shard in opened])
        if manifest != found:
            manifest.write(path)
            for rank, shard in enumerate(opened):
                shard.commit_writer.keep(manifest.commits_of(rank))
        store = ShardedStore(path, manifest, opened, manifest.commits, mode="a", lock=lock)
        stack.pop_all()
    return store


def _open_all(path: Path, manifest: ShardManifest, only: GlobalCommit | None) -> tuple[Store, ...]:
    """Open every shard at its commit of ``only``, or, None, with all its commits, at least the manifest's newest.

    Damage that other commits alone need is none of these: a shard that does not open with all opens at the newest.
    Raises what is wrong with the first shard of which that cannot be read.
    """
    label, shards = label_of(path), list[Store]()
    with ExitStack() as stack:
        for rank in range(manifest.num_ranks):
            folder = manifest.folder(path, rank)
            if not manifest.is_plain:
                manifest.mark(rank).check(folder, label)
            shard = _open_one(folder, manifest, rank) if only is None else _open_at(folder, only.shards[rank])
            shards.append(stack.enter_context(shard))
            manifest.check_shard(shard, rank, label, [only or manifest.commits[-1]])
        stack.pop_all()
    return tuple(shards)


def _kept(manifest: ShardManifest, shards: tuple[Store, ...]) -> tuple[GlobalCommit, ...]:
    """Return the commits of a manifest that all shards have."""
    kept = []
    for commit in manifest.commits:
        with suppress(CommitMissingError, CorruptStoreError):
            for rank, shard in enumerate(shards):
                manifest.check_shard(shard, rank, "", [commit])
            kept.append(commit)
    return tuple(kept)


def _open_one(folder: Path, manifest: ShardManifest, rank: int) -> Store:
    try:
        return Store.open(folder, mode="r")
    except CorruptStoreError as error:
        try:
            return _open_at(folder, manifest.commits[-1].shards[rank])
        except StoreError:
            raise error from None


def _open_at(folder: Path, commit: int) -> Store:
    try:
        return Store.open(folder, mode="r", commit=commit)
    except CommitMissingError as error:
        try:
            return Store.open(folder, mode="r")  # the manifest says which commits it lacks, and why that may be
        except StoreError:
            raise error from None
