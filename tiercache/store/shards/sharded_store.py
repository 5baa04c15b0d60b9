"""A sharded store as one process has it: whole tables over all shards, at a commit that the manifest names."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from tiercache.store.bits import hash_keys
from tiercache.store.changes import changes
from tiercache.store.engines.engine import Counters
from tiercache.store.files import local_path
from tiercache.store.lookup import check_keys, missing_keys
from tiercache.store.opening import label_of
from tiercache.store.scan import SCAN_BYTES, scan_segments
from tiercache.store.shards.shard_manifest import GlobalCommit, ShardCommit, ShardManifest
from tiercache.store.shards.sharding import HASHES, Slice, TableSharding, hash_bounds
from tiercache.store.store import Store
from tiercache.store.store_errors import CommitMissingError, CorruptStoreError, KeyMissingError, StoreError
from tiercache.store.table import group_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.commit import Commit
    from tiercache.store.locks import WriterLock
    from tiercache.store.lookup import Fields
    from tiercache.store.scan import Chunk
    from tiercache.store.table import Table


class ShardedStore(Store):
    """All shards of a store. ``Store.open`` makes it where a store is sharded.

    Opened for reading it stays at its commit while it is open, whatever a training commits meanwhile; shards for
    another number of ranks end it. Opened with mode "a" it can be rolled back and compacted; rows are written by the
    ranks of a training, each to its own shard.
    """

    path: Path

    def __init__(
        self,
        path: Path,
        manifest: ShardManifest,
        opened: tuple[Store, ...],
        commits: tuple[GlobalCommit, ...],
        *,
        mode: str = "r",
        lock: WriterLock | None = None,
        of: ShardedStore | None = None,
    ) -> None:
        """Only the functions of ``opening`` and ``at`` call this.

        opened: the shard of each rank, with all its commits or only the last of ``commits``. ``of`` is the store whose
        shards these are and which closes them.
        """
        self.path, self.mode, self.label = path, mode, label_of(path)
        self.tables = manifest.tables
        """Whole ones, in the order of unsigned table ids."""
        self.groups, self.counters = group_tables(manifest.tables), Counters()
        self.sharding = manifest.sharding
        self._all, self._lock, self._of, self._pid = opened, lock, of, os.getpid()
        self._closed = True
        self._stand_at(manifest, commits)
        self._closed = False

    def _stand_at(self, manifest: ShardManifest, commits: tuple[GlobalCommit, ...]) -> None:
        self.manifest = manifest
        self.named = commits
        """The commits that can be read, as the manifest has them, the oldest first."""
        self._own = {commit.id: commit for commit in self._all[0].commits}
        with ExitStack() as stack:
            named = zip(self._all, commits[-1].shards, strict=True)
            self.shards = tuple(stack.enter_context(shard.at(id_)) for shard, id_ in named)
            """The shard of each rank, at its commit."""
            stack.pop_all()

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse what a shard alone has: segments, and what writes them."""
        if name in {"_commits", "reader", "_opened"}:
            raise ValueError(
                f"{self.label} has {len(self._all)} shards, which the ranks of a training write together: train on it, "
                "or train with one rank to make one plain store of it"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def at(self, commit: int) -> ShardedStore:
        """Return this store as it stood at a ``commit`` that it keeps, for reading, while it is open.

        Raises CommitMissingError.
        """
        found = replace(self.manifest, commits=self.named).find(commit, self.label)
        shards = self.shards if commit == self.commit.id else self._all  # what is held may be gone for others
        whole = self._of or self
        assert isinstance(whole, ShardedStore)
        return ShardedStore(self.path, self.manifest, shards, (found,), of=whole)

    def check_shards(self) -> None:
        """Raise where a shard, opened with all its commits, lacks an older one that the manifest names and still does.

        Raises CommitMissingError and CorruptStoreError; not needed for reading those that are in ``commits``.
        """
        now = ShardManifest.read(self.path)
        named = [commit for commit in self.manifest.commits if now is not None and commit in now.commits]
        for rank, shard in enumerate(self._all):
            self.manifest.check_shard(shard, rank, self.label, named)

    def close(self) -> None:
        """Give up all shards. A second time does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        for shard in self._all:
            shard._opened.uses.check_outside()
        for shard in (*self.shards, *(self._all if self._of is None else ())):
            shard.close()
        if self._lock is not None:
            self._lock.release()
        self._closed = True

    def __repr__(self) -> str:
        return f"<{self.label}: {len(self.tables)} tables in {len(self.shards)} shards, commit {self.commit.id}>"

    @property
    def commit(self) -> Commit:
        """The newest commit, or the one that the store was opened at: with the settings that shard 0 has of it."""
        return self._commit(self.named[-1])

    @property
    def commits(self) -> tuple[Commit, ...]:
        """Those that can be read, the oldest first; of a store opened at one, only that."""
        return tuple(map(self._commit, self.named))

    @property
    def retention(self) -> int:
        """How many of the newest commits are kept."""
        return self.manifest.retention

    # -- writing -----------------------------------------------------------------------------------------

    def rollback(self, to: int) -> Commit:
        """Make a commit with the rows, states and cursor of commit ``to``, and drop those in between.

        One manifest makes it the store's: killed at any moment the store stands where it stood, or there. Raises as
        ``Store.rollback`` does.
        """
        self._check_writable()
        target = self.manifest.find(to, self.label)
        for shard, id_ in zip(self._all, target.shards, strict=True):
            shard.rollback(id_)
        return self._write(self.manifest.back_at(target, [ShardCommit.of(shard) for shard in self._all]))

    def compact(self, *, progress: Callable[[str, int], None] | None = None) -> Commit:
        """Make a commit with one range for each table in each shard, in hash order, as ``Store.compact`` does."""
        self._check_writable()
        commits = [shard.compact(progress=progress) for shard in self._all]
        return self._write(self.manifest.at(commits[0].cursor, [ShardCommit.of(shard) for shard in self._all]))

    # -- reading -----------------------------------------------------------------------------------------

    def state(self) -> bytes:
        """Return the dense state of shard 0. Raises CorruptStoreError."""
        with self._reading():
            return self.shards[0].state()

    def live_rows(self, table_name: str) -> int:
        """Return how many rows a table has; reads nothing. Raises ValueError where there is none of that name."""
        return sum(self.shards[rank].live_rows(table_name) for rank in self._counting(table_name))

    def most_rows(self, table_name: str, hashes: tuple[int, int]) -> int:
        """Return how many rows of a table have hashes in a range, from the sizes of shards: reads nothing.

        As hashes are uniform, four standard deviations more than expected where a shard has others too.
        """
        bounds = hash_bounds(len(self.shards))
        by_hash = not self._sharding_of(table_name).slices
        total = variance = 0.0
        for rank in self._counting(table_name):
            first, last = (bounds[rank], bounds[rank + 1]) if by_hash else (0, HASHES)
            rows, share = self.shards[rank].live_rows(table_name), max(0, min(hashes[1], last) - max(hashes[0], first))
            share_of_all = share / (last - first)
            total, variance = total + rows * share_of_all, variance + rows * share_of_all * (1 - share_of_all)
        return min(self.live_rows(table_name), int(np.ceil(total + 4 * variance**0.5)))

    def scan(
        self,
        table_name: str,
        *,
        chunk_rows: int | None = None,
        memory_bytes: int = SCAN_BYTES,
        scratch: Path | None = None,
    ) -> Iterator[Chunk]:
        """Yield all rows of a table in hash order: keys (n,), and each field (n, width), whole, as ``Store.scan`` does.

        What of a row is kept once for each slice of columns is that of the first slice. Raises as ``Store.scan``.
        """
        table = self._table(table_name)
        scratch = None if scratch is None else local_path(scratch, "a folder for temporary files")
        return self.rows(table, chunk_rows=chunk_rows, memory_bytes=memory_bytes, scratch=scratch)

    def rows(
        self,
        table: Table,
        hashes: tuple[int, int] = (0, HASHES),
        *,
        chunk_rows: int | None = None,
        memory_bytes: int = SCAN_BYTES,
        scratch: Path | None = None,
    ) -> Iterator[Chunk]:
        """Yield the rows of a table in hash order, with all columns or, as a shard of another sharding has it, some.

        hashes: from and below which hash of a key. Only shards, ranges and columns with such rows are read, and keys;
        what a row has once goes to each slice. Else, and what is raised, as ``scan``.
        """
        sharding, whole = self._sharding_of(table.name), self._table(table.name)
        requested = Slice(0, table.first_column, table.first_column + table.dim)
        scan = partial(_scan, table=table, chunk_rows=chunk_rows, scratch=scratch)
        with self._reading():
            if sharding.by_hash:
                bounds = hash_bounds(len(self.shards))
                for rank, shard in enumerate(self.shards):  # ranks own rising ranges of hashes
                    low, high = max(hashes[0], bounds[rank]), min(hashes[1], bounds[rank + 1])
                    if low < high:
                        inside = None if (low, high) == bounds[rank : rank + 2] else (low, high)
                        for keys, fields in scan(shard, hashes=inside, memory_bytes=memory_bytes):
                            yield keys, _columns(whole, [(Slice(rank, 0, whole.dim), fields)], requested)
                return
            slices = [one for one in sharding.slices if one.first < requested.last and requested.first < one.last]
            inside = None if hashes == (0, HASHES) else hashes
            share = memory_bytes // len(slices)
            scans = [scan(self.shards[one.rank], hashes=inside, memory_bytes=share) for one in slices]
            for keys, found in self._side_by_side(table.name, scans):
                yield keys, _columns(whole, list(zip(slices, found, strict=True)), requested)

    def lookup(
        self,
        table_name: str,
        keys: NDArray[np.int64],
        *,
        missing: str = "error",
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Fields:
        """Return the rows of any ``keys`` (n,), repeated or not, in any order: field name to (n, width), whole.

        As ``Store.lookup``; ``progress`` counts anew for each shard.
        """
        sharding, table = self._sharding_of(table_name), self._table(table_name)
        keys = check_keys(keys)
        bounds = np.array(hash_bounds(len(self.shards))[1:-1], dtype=np.uint64)
        owners = np.searchsorted(bounds, hash_keys(keys, table.table_id), side="right")
        slices = sharding.slices or [Slice(rank, 0, table.dim) for rank in np.unique(owners).tolist() or [0]]
        out = {field.name: np.zeros((keys.size, field.width), dtype=np.float32) for field in table.fields}
        gone: list[NDArray[np.int64]] = []
        for one in reversed(slices):  # what a row has once is that of the first
            selected = slice(None) if sharding.slices else np.nonzero(owners == one.rank)[0]
            try:
                with self._reading():
                    found = self.shards[one.rank].lookup(table_name, keys[selected], missing=missing, progress=progress)
            except KeyMissingError as error:
                gone.append(error.keys)
                continue
            for field in table.fields:
                columns = slice(one.first, one.last) if field.width == table.dim else slice(None)
                out[field.name][selected, columns] = found[field.name]
        if gone:
            raise missing_keys(table, np.unique(np.concatenate(gone)), np.unique(keys).size, self.label)
        return out

    def changes(self, table_name: str, *, since: int) -> Iterator[tuple[NDArray[np.int64], Fields]]:
        """Yield (keys, fields) of the whole rows of a table that changed after commit ``since``, as ``Store.changes``.

        ``since``: a commit that is kept, or -1 for every row. Those of slices come in hash order, with the memory and
        the temporary files of ``scan``. Raises CommitMissingError for another commit, and what ``Store.changes`` and,
        of slices, ``scan`` raise.
        """
        sharding, table = self._sharding_of(table_name), self._table(table_name)
        commits = self._since(since)
        with self._reading():
            if len(sharding.slices) < 2:
                for rank in self._counting(table_name):
                    yield from self.shards[rank].changes(table_name, since=commits[rank])
                return
            # Slices change in the same steps. To look the keys of each chunk up would read all keys for each of them.
            share = SCAN_BYTES // len(sharding.slices)
            found = (
                self.shards[rank]._stream(
                    partial(
                        changes, self.shards[rank].reader, table_name=table_name, since=commits[rank],
                        in_order=True, memory_bytes=share,
                    )
                )
                for rank in (one.rank for one in sharding.slices)
            )  # fmt: skip
            scans = [((keys, tuple(fields.values())) for keys, fields in one) for one in found]
            names = [field.name for field in table.fields]
            for keys, pieces in self._side_by_side(table_name, scans):
                values = _columns(table, list(zip(sharding.slices, pieces, strict=True)), Slice(0, 0, table.dim))
                yield keys, dict(zip(names, values, strict=True))

    def changed_rows(self, table_name: str, *, since: int) -> int:
        """Return how many rows of a table ``changes`` yields; reads none of them. Raises what it raises."""
        counting, commits = self._counting(table_name), self._since(since)
        with self._reading():
            return sum(self.shards[rank].changed_rows(table_name, since=commits[rank]) for rank in counting)

    # -- inside ------------------------------------------------------------------------------------------

    def _commit(self, named: GlobalCommit) -> Commit:
        own = self._own[named.shards[0]]
        listed = replace(own.own, segments=(), first_commits=())  # each shard has its own
        return replace(own, id=named.id, cursor=named.cursor, retention=self.retention, own=listed, abandoned=())

    def _check_writable(self) -> None:
        if self.mode == "r":
            raise ValueError(f"{self.label} is open for reading: open it with mode='a' to write")

    def _write(self, manifest: ShardManifest) -> Commit:
        """Make the newest commits of all shards those of the store, and drop the ones that it does not name."""
        if self._lock is not None:
            self._lock.check()
        manifest.write(self.path)
        for shard in self.shards:
            shard.close()
        for rank, shard in enumerate(self._all):
            shard.commit_writer.keep(manifest.commits_of(rank))  # what it names no more goes with the next commit
        self._stand_at(manifest, manifest.commits)
        return self.commit

    def _counting(self, table_name: str) -> Sequence[int]:
        """Return the ranks in whose shards every row of a table is once."""
        slices = self._sharding_of(table_name).slices
        return [slices[0].rank] if slices else range(len(self.shards))

    def _since(self, commit: int) -> tuple[int, ...]:
        """Return the commit of each shard from which changes count."""
        if commit == -1:
            return (-1,) * len(self.shards)
        if commit > self.commit.id:
            raise CommitMissingError(
                f"{self.label} stands at commit {self.commit.id} and knows no changes since {commit}: give an older one"
            )
        try:
            return self.manifest.find(commit, self.label).shards
        except CommitMissingError as error:
            raise CommitMissingError(f"{error}, or take all rows with -1") from None

    def _side_by_side(
        self, table_name: str, scans: Sequence[Iterator[Chunk]]
    ) -> Iterator[tuple[NDArray[np.int64], list[tuple[NDArray[np.float32], ...]]]]:
        """Yield keys, and the fields that each of the scans, of slices with the same keys, has of them."""
        held = [next(scan, None) for scan in scans]
        while any(one is not None for one in held):
            chunks = [one for one in held if one is not None]
            rows = min(keys.size for keys, _ in chunks)
            first = chunks[0][0][:rows]
            if len(chunks) < len(held) or any(not np.array_equal(keys[:rows], first) for keys, _ in chunks):
                raise CorruptStoreError(
                    f"the slices of table {table_name!r} of {self.label} have different keys: restore all shards from "
                    "copies of one moment"
                )
            yield first, [tuple(values[:rows] for values in fields) for _, fields in chunks]
            held = [
                (keys[rows:], tuple(values[rows:] for values in fields)) if keys.size > rows else next(scan, None)
                for (keys, fields), scan in zip(chunks, scans, strict=True)
            ]

    def _sharding_of(self, table_name: str) -> TableSharding:
        return self.sharding.tables[self._table(table_name).name]

    def _table(self, table_name: str) -> Table:
        """Return a whole table. Raises ValueError where there is none of that name."""
        for table in self.tables:
            if table.name == table_name:
                return table
        names = ", ".join(repr(table.name) for table in self.tables)
        raise ValueError(f"{self.label} has no table {table_name!r}: it has {names}")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Say what happened where shards went away because another number of ranks made its own."""
        try:
            yield
        except CorruptStoreError as error:
            now = ShardManifest.read(self.path)
            if now is None or now.generation != self.manifest.generation:
                raise StoreError(f"{self.label} was sharded anew while it was read: open it again") from error
            raise


def _scan(
    store: Store, table: Table, hashes: tuple[int, int] | None, *, chunk_rows: int | None, memory_bytes: int,
    scratch: Path | None,
) -> Iterator[Chunk]:  # fmt: skip
    with store.pinned() as snapshot:
        yield from scan_segments(
            store.reader, snapshot, snapshot.committed, table.name,
            hashes=hashes, chunk_rows=chunk_rows, memory_bytes=memory_bytes, scratch=scratch,
        )  # fmt: skip


def _columns(
    table: Table, slices: Sequence[tuple[Slice, tuple[NDArray[np.float32], ...]]], requested: Slice
) -> tuple[NDArray[np.float32], ...]:
    """Return the wanted columns of every field of a whole table, from slices that have them all."""
    out = []
    for i, field in enumerate(table.fields):
        found = [
            fields[i][:, max(0, requested.first - one.first) : requested.last - one.first] for one, fields in slices
        ]
        once = field.width != table.dim
        out.append(slices[0][1][i] if once else found[0] if len(found) == 1 else np.concatenate(found, axis=1))
    return tuple(np.ascontiguousarray(values) for values in out)
