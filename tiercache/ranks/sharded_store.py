"""A sharded store as one process reads it: whole tables over all parts, at the commit that the record names."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from tiercache.ranks.part_folder import Mark
from tiercache.ranks.placement import Placement, hash_bounds
from tiercache.ranks.record import Record
from tiercache.ranks.sharded_folder import check_there
from tiercache.store import CorruptStoreError, KeyMissingError, Store, StoreError, StoreMissingError, hash_keys
from tiercache.store.errors import CommitMissingError
from tiercache.store.scan import SCAN_BYTES
from tiercache.store.serving import lookup

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from tiercache.ranks.placement import TablePlacement
    from tiercache.store import Commit, Cursor, Table
    from tiercache.store.scan import Chunk
    from tiercache.store.serving import Fields

__all__ = ["ShardedStore"]

_TRIES = 32
"""How often opening begins anew, each time because a training had moved on."""


class ShardedStore:
    """All parts of a sharded store, for reading. Made by ``ShardedStore.open``.

    It stays at its commit while it is open, whatever a training commits meanwhile; parts for another number of ranks
    end it. For serving and looking; the ranks of a training read their own parts.
    """

    def __init__(self, path: Path, record: Record, placement: Placement, parts: tuple[Store, ...]) -> None:
        """Only ``open`` calls this."""
        self.path, self.record, self.placement = path, record, placement
        self.parts = parts
        """The part of each rank, at its commit."""
        self.tables = record.tables
        """Whole ones, in the order of unsigned table ids."""

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, mode: str = "r") -> ShardedStore:
        """Open the sharded store at ``path``, every part at the commit that the record names.

        Raises StoreMissingError where nothing was committed, what ``Store.open`` raises for each part, and ValueError
        for another mode than "r": ranks write, each its own part.
        """
        if mode != "r":
            raise ValueError(
                f"mode {mode!r} is none of one process: open a sharded store with mode='r', or train on it"
            )
        place = Path(path)
        check_there(place)
        for _ in range(_TRIES):
            record = Record.read(place)
            if record is None or record.cursor is None:
                raise StoreMissingError(f"the sharded store at {place} has no commit yet: train to its first one")
            try:
                return cls(place, record, placement_of(record, place), _open_parts(place, record))
            except (StoreError, FileNotFoundError):
                if Record.read(place) == record:
                    raise
        raise StoreError(f"the sharded store at {place} went on {_TRIES} times while it was opened: open it again")

    def close(self) -> None:
        """Give up all parts. A second time does nothing."""
        for part in self.parts:
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.label}: {len(self.tables)} tables on {len(self.parts)} ranks, visit {self.cursor.visit}>"

    @property
    def label(self) -> str:
        """The store in the words of a message."""
        return f"the sharded store at {self.path}"

    @property
    def cursor(self) -> Cursor:
        """Where all parts stand."""
        assert self.record.cursor is not None
        return self.record.cursor

    @property
    def commit(self) -> Commit:
        """The commit of part 0, whose dense state, settings and environment are the training's."""
        commit = self.parts[0].commit
        assert commit is not None
        return commit

    def state(self) -> bytes:
        """Return the dense state of part 0. Raises CorruptStoreError."""
        with self._reading():
            return self.parts[0].state()

    def scan(
        self, table_name: str, *, chunk_rows: int | None = None, memory_bytes: int = SCAN_BYTES
    ) -> Iterator[Chunk]:
        """Yield all rows of a table in hash order: keys (n,), and each field (n, width), whole, as ``Store.scan`` does.

        What of a row is kept once for each slice of columns is that of the first slice. Raises as ``Store.scan``.
        """
        placed = self._placed(table_name)
        with self._reading():
            if not placed.slices:
                for part in self.parts:  # ranks own rising ranges of hashes
                    yield from part.scan(table_name, chunk_rows=chunk_rows, memory_bytes=memory_bytes)
                return
            share = memory_bytes // len(placed.slices)
            scans = [
                self.parts[one.rank].scan(table_name, chunk_rows=chunk_rows, memory_bytes=share)
                for one in placed.slices
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
        placed, table = self._placed(table_name), self._table(table_name)
        keys = np.asarray(keys)
        with self._reading():
            if placed.slices:
                try:
                    found = [self._ask(one.rank, table, keys, missing, progress) for one in placed.slices]
                except KeyMissingError as error:
                    raise self._missing(table, error.keys, np.unique(keys).size) from error
                names = (field.name for field in table.fields)
                joined = _joined(table, [tuple(fields.values()) for fields in found])
                return dict(zip(names, joined, strict=True))
            if keys.dtype.kind not in "iu" or keys.ndim != 1 or not keys.size:
                return self._ask(0, table, keys, missing, progress)  # says what is wrong with them
            return self._by_hash(table, keys, missing, progress)

    # -- inside ------------------------------------------------------------------------------------------

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

    def _placed(self, table_name: str) -> TablePlacement:
        return self.placement.tables[self._table(table_name).name]

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


def placement_of(record: Record, path: Path) -> Placement:
    """Return the placement of a record. Raises CorruptStoreError where it fits neither its tables nor its parts."""
    try:
        placement = Placement.from_record(record.placement)
        placement.check(record.tables)
        if placement.num_ranks != record.num_ranks:
            raise ValueError(f"it places tables on {placement.num_ranks} ranks and there are {record.num_ranks} parts")
    except ValueError as error:
        raise CorruptStoreError(
            f"the record of the sharded store at {path} makes no sense ({error}): restore it from a copy"
        ) from error
    return placement


def _open_parts(path: Path, record: Record) -> tuple[Store, ...]:
    """Open every part for reading at the commit of the record. Raises what is wrong with the first that has not."""
    label = f"the sharded store at {path}"
    with ExitStack() as stack:
        parts = []
        for rank, commit in enumerate(record.commits):
            folder = record.folder(path, rank)
            Mark(store=record.id, generation=record.generation, rank=rank).check(folder, label)
            try:
                part = stack.enter_context(Store.open(folder, mode="r", commit=commit))
            except CommitMissingError:
                with Store.open(folder, mode="r") as newest:
                    record.check_part(newest, rank, label)
                raise
            record.check_part(part, rank, label)
            parts.append(part)
        stack.pop_all()
    return tuple(parts)


def _joined(table: Table, slices: list[tuple[NDArray[np.float32], ...]]) -> tuple[NDArray[np.float32], ...]:
    """Put the fields of slices side by side; what a row has once, as each slice has it, is that of the first."""
    if len(slices) == 1:
        return slices[0]
    return tuple(
        np.concatenate(values, axis=1) if field.width == table.dim else values[0]
        for field, values in zip(table.fields, zip(*slices, strict=True), strict=True)
    )
