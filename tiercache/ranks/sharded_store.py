"""A sharded store as one process reads it: whole tables over all parts, at a commit that the record names."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tiercache.ranks.reading import commits_of, open_parts
from tiercache.ranks.record import Record
from tiercache.ranks.sharded_folder import check_there
from tiercache.ranks.sharding_plan import ShardingPlan, hash_bounds
from tiercache.store import CorruptStoreError, KeyMissingError, Store, StoreError, StoreMissingError, hash_keys
from tiercache.store.changes import changed_rows, changes
from tiercache.store.errors import CommitMissingError
from tiercache.store.lookup import lookup
from tiercache.store.scan import SCAN_BYTES

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.ranks.common_commit import CommonCommit
    from tiercache.ranks.sharding_plan import TableSharding
    from tiercache.store import Cursor, Table
    from tiercache.store.lookup import Fields
    from tiercache.store.scan import Chunk

__all__ = ["ShardedStore"]

_TRIES = 32
"""How often opening begins anew, each time because a training had moved on."""


class ShardedStore:
    """All parts of a sharded store, for reading. Made by ``ShardedStore.open``.

    It stays at its commit while it is open, whatever a training commits meanwhile; parts for another number of ranks
    end it. For serving and looking; the ranks of a training read their own parts.
    """

    def __init__(
        self,
        path: Path,
        record: Record,
        sharding: ShardingPlan,
        parts: tuple[Store, ...],
        opened: tuple[Store, ...],
        commits: tuple[CommonCommit, ...],
    ) -> None:
        """Only ``open`` and ``at`` call this."""
        self.path, self.record, self.sharding = path, record, sharding
        self.parts = parts
        """The part of each rank, at its commit."""
        self.tables = record.tables
        """Whole ones, in the order of unsigned table ids."""
        self.commits = commits
        """Those that can be read, the oldest first; of a store opened at one, only that."""
        self.commit = commits[-1]
        """The newest commit, or the one that the store was opened at."""
        self._opened = opened

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, mode: str = "r", commit: int | None = None) -> ShardedStore:
        """Open the sharded store at ``path``, every part at the newest commit that the record names, or ``commit``.

        Of older commits it has those that all parts have, whole, when it is opened: a training drops the oldest
        meanwhile, and damage that one alone needs spoils no other. Raises StoreMissingError where nothing was
        committed, CommitMissingError, what ``Store.open`` raises for each part, and ValueError for another mode than
        "r": ranks write, each its own part.
        """
        if mode != "r":
            raise ValueError(
                f"mode {mode!r} is none of one process: open a sharded store with mode='r', or train on it"
            )
        place = Path(path)
        check_there(place)
        for _ in range(_TRIES):
            record = Record.read(place)
            if record is None or record.newest is None:
                raise StoreMissingError(f"the sharded store at {place} has no commit yet: train to its first one")
            label, sharding = f"the sharded store at {place}", sharding_of(record, place)
            only = None if commit is None else record.find(commit, label)
            try:
                opened = open_parts(place, record, only)
            except (StoreError, FileNotFoundError):
                if Record.read(place) == record:
                    raise
                continue
            kept = commits_of(record, opened) if only is None else (only,)
            return cls(place, record, sharding, _all_at(opened, kept[-1]), opened, kept)
        raise StoreError(f"the sharded store at {place} went on {_TRIES} times while it was opened: open it again")

    def at(self, commit: int) -> ShardedStore:
        """Return this store as it stood at a ``commit`` that it keeps, for reading, while it is open.

        Raises CommitMissingError.
        """
        found = replace(self.record, commits=self.commits).find(commit, self.label)
        return ShardedStore(self.path, self.record, self.sharding, _all_at(self.parts, found), (), (found,))

    def check_parts(self) -> None:
        """Raise where a part, opened with all its commits, lacks an older one that the record names and still does.

        Raises CommitMissingError and CorruptStoreError; not needed for reading those that are in ``commits``.
        """
        now = Record.read(self.path)
        named = [commit for commit in self.record.commits if now is not None and commit in now.commits]
        for rank, part in enumerate(self._opened):
            self.record.check_part(part, rank, self.label, named)

    def close(self) -> None:
        """Give up all parts. A second time does nothing."""
        for part in (*self.parts, *self._opened):
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.label}: {len(self.tables)} tables on {len(self.parts)} ranks, commit {self.commit.id}>"

    @property
    def label(self) -> str:
        """The store in the words of a message."""
        return f"the sharded store at {self.path}"

    @property
    def cursor(self) -> Cursor:
        """Where all parts stand."""
        return self.commit.cursor

    @property
    def settings(self) -> dict[str, Any]:
        """Those that the training left with the commit of part 0."""
        commit = self.parts[0].commit
        assert commit is not None
        return commit.settings

    def state(self) -> bytes:
        """Return the dense state of part 0. Raises CorruptStoreError."""
        with self._reading():
            return self.parts[0].state()

    def live_rows(self, table_name: str) -> int:
        """Return how many rows a table has; reads nothing. Raises ValueError where there is none of that name."""
        return sum(self.parts[rank].live_rows(table_name) for rank in self._counting(table_name))

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
        table_sharding = self._table_sharding(table_name)
        with self._reading():
            if not table_sharding.slices:
                for part in self.parts:  # ranks own rising ranges of hashes
                    yield from part.scan(table_name, chunk_rows=chunk_rows, memory_bytes=memory_bytes, scratch=scratch)
                return
            share = memory_bytes // len(table_sharding.slices)
            scans = [
                self.parts[one.rank].scan(table_name, chunk_rows=chunk_rows, memory_bytes=share, scratch=scratch)
                for one in table_sharding.slices
            ]
            yield from self._side_by_side(self._table(table_name), scans)

    def lookup(
        self,
        table_name: str,
        keys: NDArray[np.int64],
        *,
        missing: str = "error",
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Fields:
        """Return the rows of any ``keys`` (n,), repeated or not, in any order: field name to (n, width), whole.

        ``missing`` and what is raised are as for ``Store.lookup``; ``progress`` counts anew for each part.
        """
        table_sharding, table = self._table_sharding(table_name), self._table(table_name)
        keys = np.asarray(keys)
        with self._reading():
            if table_sharding.slices:
                try:
                    found = [self._ask(one.rank, table, keys, missing, progress) for one in table_sharding.slices]
                except KeyMissingError as error:
                    raise self._missing(table, error.keys, np.unique(keys).size) from error
                names = (field.name for field in table.fields)
                joined = _joined(table, [tuple(fields.values()) for fields in found])
                return dict(zip(names, joined, strict=True))
            if keys.dtype.kind not in "iu" or keys.ndim != 1 or not keys.size:
                return self._ask(0, table, keys, missing, progress)  # says what is wrong with them
            return self._by_hash(table, keys, missing, progress)

    def changes(self, table_name: str, *, since: int) -> Iterator[tuple[NDArray[np.int64], Fields]]:
        """Yield (keys, fields) of the whole rows of a table that changed after commit ``since``, as ``Store.changes``.

        ``since``: a commit that is kept, or -1 for every row. Those of slices come in hash order, with the memory and
        the temporary files of ``scan``. Raises CommitMissingError for another commit, and what ``Store.changes`` and,
        of slices, ``scan`` raise.
        """
        table_sharding, table = self._table_sharding(table_name), self._table(table_name)
        commits = self._since(since)
        with self._reading():
            if len(table_sharding.slices) < 2:
                for rank in self._counting(table_name):
                    yield from self.parts[rank].changes(table_name, since=commits[rank])
                return
            # Slices change in the same steps. To look the keys of each chunk up would read all keys for each of them.
            share = SCAN_BYTES // len(table_sharding.slices)
            scans = [
                _values(changes(self.parts[one.rank], table_name, commits[one.rank], in_order=True, memory_bytes=share))
                for one in table_sharding.slices
            ]
            names = [field.name for field in table.fields]
            for keys, values in self._side_by_side(table, scans):
                yield keys, dict(zip(names, values, strict=True))

    def changed_keys(self, table_name: str, *, since: int) -> Iterator[NDArray[np.int64]]:
        """Yield the keys of the rows that ``changes`` yields; of slices it reads the first. Raises as that does."""
        counting, commits = self._counting(table_name), self._since(since)
        with self._reading():
            for rank in counting:
                for keys, _ in self.parts[rank].changes(table_name, since=commits[rank]):
                    yield keys

    def changed_rows(self, table_name: str, since: int) -> int:
        """Return how many rows of a table ``changes`` yields; reads none of them. Raises what it raises."""
        counting, commits = self._counting(table_name), self._since(since)
        with self._reading():
            return sum(changed_rows(self.parts[rank], table_name, commits[rank]) for rank in counting)

    # -- inside ------------------------------------------------------------------------------------------

    def _counting(self, table_name: str) -> Sequence[int]:
        """Return the ranks in whose parts every row of a table is once."""
        table_sharding = self._table_sharding(table_name)
        return [table_sharding.slices[0].rank] if table_sharding.slices else range(len(self.parts))

    def _since(self, commit: int) -> tuple[int, ...]:
        """Return the commit of each part from which changes count."""
        if commit == -1:
            return (-1,) * len(self.parts)
        if commit > self.commit.id:
            raise CommitMissingError(
                f"{self.label} stands at commit {self.commit.id} and knows no changes since {commit}: give an older one"
            )
        try:
            return self.record.find(commit, self.label).parts
        except CommitMissingError as error:
            raise CommitMissingError(f"{error}, or take all rows with -1") from None

    def _by_hash(
        self, table: Table, keys: NDArray[np.int64], missing: str, progress: Callable[[str, int, int], None] | None
    ) -> Fields:
        """Ask each rank for the keys that its range of hashes has."""
        bounds = np.array(hash_bounds(len(self.parts))[1:-1], dtype=np.uint64)
        owners = np.searchsorted(bounds, hash_keys(keys.astype(np.int64), table.table_id), side="right")
        out = {field.name: np.zeros((keys.size, field.width), dtype=np.float32) for field in table.fields}
        gone: list[NDArray[np.int64]] = []
        for rank in np.unique(owners).tolist():
            mine = np.nonzero(owners == rank)[0]
            try:
                found = self._ask(rank, table, keys[mine], missing, progress)
            except KeyMissingError as error:
                gone.append(error.keys)
                continue
            for name, values in found.items():
                out[name][mine] = values
        if gone:
            raise self._missing(table, np.sort(np.concatenate(gone)), np.unique(keys).size)
        return out

    def _ask(
        self,
        rank: int,
        table: Table,
        keys: NDArray[np.int64],
        missing: str,
        progress: Callable[[str, int, int], None] | None,
    ) -> Fields:
        return lookup(self.parts[rank], table.name, keys, missing, progress)

    def _missing(self, table: Table, gone: NDArray[np.int64], asked: int) -> KeyMissingError:
        shown = ", ".join(map(str, gone[:3].tolist())) + (", ..." if gone.size > 3 else "")
        return KeyMissingError(
            f"{gone.size:,} of {asked:,} keys have no row in table {table.name!r} of {self.label} ({shown}): leave "
            "them out, or ask for missing='initial' or missing='zeros'",
            table=table.name,
            keys=gone,
        )

    def _side_by_side(self, table: Table, scans: list[Iterator[Chunk]]) -> Iterator[Chunk]:
        """Yield the rows of slices of one table, which have the same keys, as whole rows."""
        held = [next(scan, None) for scan in scans]
        while any(one is not None for one in held):
            whole = [one for one in held if one is not None]
            rows = min(keys.size for keys, _ in whole)
            first = whole[0][0][:rows]
            if len(whole) < len(held) or any(not np.array_equal(keys[:rows], first) for keys, _ in whole):
                raise CorruptStoreError(
                    f"the slices of table {table.name!r} of {self.label} have different keys: restore all parts from "
                    "copies of one moment"
                )
            yield first, _joined(table, [tuple(values[:rows] for values in fields) for _, fields in whole])
            held = [
                (keys[rows:], tuple(values[rows:] for values in fields)) if keys.size > rows else next(scan, None)
                for (keys, fields), scan in zip(whole, scans, strict=True)
            ]

    def _table_sharding(self, table_name: str) -> TableSharding:
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
        """Say what happened where parts went away because another number of ranks made its own."""
        try:
            yield
        except CorruptStoreError as error:
            now = Record.read(self.path)
            if now is not None and now.generation != self.record.generation:
                raise StoreError(f"{self.label} was divided anew while it was read: open it again") from error
            raise


def sharding_of(record: Record, path: Path) -> ShardingPlan:
    """Return the sharding of a record. Raises CorruptStoreError where it fits neither its tables nor its parts."""
    try:
        sharding = ShardingPlan.from_record(record.sharding)
        sharding.check(record.tables)
        if sharding.num_ranks != record.num_ranks:
            raise ValueError(f"it shards tables over {sharding.num_ranks} ranks and there are {record.num_ranks} parts")
    except ValueError as error:
        raise CorruptStoreError(
            f"the record of the sharded store at {path} makes no sense ({error}): restore it from a copy"
        ) from error
    return sharding


def _all_at(parts: tuple[Store, ...], commit: CommonCommit) -> tuple[Store, ...]:
    return tuple(part.at(id_) for part, id_ in zip(parts, commit.parts, strict=True))


def _values(chunks: Iterator[tuple[NDArray[np.int64], Fields]]) -> Iterator[Chunk]:
    """Yield fields without their names."""
    for keys, fields in chunks:
        yield keys, tuple(fields.values())


def _joined(table: Table, slices: list[tuple[NDArray[np.float32], ...]]) -> tuple[NDArray[np.float32], ...]:
    """Put the fields of slices side by side; what a row has once, as each slice has it, is that of the first."""
    if len(slices) == 1:
        return slices[0]
    return tuple(
        np.concatenate(values, axis=1) if field.width == table.dim else values[0]
        for field, values in zip(table.fields, zip(*slices, strict=True), strict=True)
    )
