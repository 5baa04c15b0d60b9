"""The key set of a pass: the unique keys of every table, in hash order, with counts."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from tiercache.errors import DatasetError
from tiercache.kernels.cpu.hashing import hash_keys
from tiercache.kernels.cpu.next_use import hash_range_bound

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.table import Table

__all__ = ["KeySet", "in_hash_order", "write_key_set"]

_FIELDS = [pa.field("key", pa.int64(), nullable=False), pa.field("count", pa.int64(), nullable=False)]


class KeySet:
    """A mapped key set; safe to read from any thread.

    On disk: Arrow IPC, one record batch per table in the order of table ids, columns key and count.
    """

    def __init__(self, path: Path, tables: tuple[Table, ...]) -> None:
        self.path = path
        self.tables = tables
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            reader = pa.ipc.open_file(pa.py_buffer(self._map))
            names = json.loads((reader.schema.metadata or {}).get(b"tables", b"[]"))
        except (OSError, ValueError, RecursionError, pa.ArrowException) as error:
            raise self._unreadable(error) from error
        if names != [table.name for table in tables]:
            raise DatasetError(f"the key set {path} is of other tables: extract the dataset again")
        try:
            if not reader.schema.equals(pa.schema(_FIELDS)):
                raise ValueError(f"its columns are {', '.join(map(str, reader.schema))}")
            self._columns = {
                name: tuple(np.frombuffer(c.buffers()[1] or b"", np.int64, count=len(c)) for c in batch.columns)
                for name, batch in zip(names, map(reader.get_batch, range(len(names))), strict=True)
            }
        except (OSError, ValueError, pa.ArrowException) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> DatasetError:
        seen = str(error).replace("\n", " ")
        return DatasetError(f"the key set {self.path} cannot be read: {seen}: extract the dataset again")

    def rows(self, table: str) -> int:
        """Return the number of unique keys of a table. Raises KeyError for a table that is not in the schema."""
        return int(self._columns[table][0].size)

    def keys(self, table: str) -> NDArray[np.int64]:
        """Return the keys of a table in hash order: mapped, read-only."""
        return self._columns[table][0]

    def counts(self, table: str) -> NDArray[np.int64]:
        """Return how often each of the keys occurs in the pass: mapped, read-only."""
        return self._columns[table][1]

    def place(self, table: Table, hash_bound: int) -> int:
        """Return how many keys of ``table`` have a hash below ``hash_bound`` (0 .. 2^64)."""
        return hash_range_bound(self.keys(table.name), table.table_id, hash_bound)

    def digest(self) -> str:
        """Return the hexadecimal SHA-256 of tables, keys and counts; reads the whole file."""
        digest = hashlib.sha256()
        for table in self.tables:
            digest.update(f"{table.name}\0{self.rows(table.name)}\0".encode())
            digest.update(self.keys(table.name).data)
            digest.update(self.counts(table.name).data)
        return digest.hexdigest()


def write_key_set(
    path: Path, tables: tuple[Table, ...], columns: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]]
) -> None:
    """Write a key set, on disk on return.

    columns: for each table, in the order of table ids, its keys in hash order and their counts. They are taken one
    table at a time, so that an iterator needs to hold only one.
    """
    schema = pa.schema(_FIELDS, metadata={"tables": json.dumps([table.name for table in tables])})
    with path.open("wb") as file:
        writer = pa.ipc.new_file(pa.PythonFile(file, "w"), schema)
        for _, arrays in zip(tables, columns, strict=True):
            items = [pa.Array.from_buffers(pa.int64(), a.size, [None, pa.py_buffer(a)]) for a in arrays]
            writer.write_batch(pa.record_batch(items, schema=schema))
        writer.close()
        file.flush()
        os.fsync(file.fileno())


def in_hash_order(keys: NDArray[np.int64], table: Table) -> NDArray[np.int64]:
    """Return the indices that put distinct ``keys`` of a table into hash order."""
    return np.argsort(hash_keys(keys, table.table_id))
