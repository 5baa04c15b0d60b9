"""Key sets: the unique keys of every table, in hash order, with counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiercache.data.array_file import ArrayFile, ArrayFileWriter
from tiercache.data.sample_layout import key_set_layout
from tiercache.kernels.cpu.key_sweeps import hash_range_bound

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.store.table import Table


class KeySet:
    """The keys and counts in a file, checked at their first use. Any thread may use it."""

    def __init__(self, file: ArrayFile) -> None:
        self._file = file

    def rows(self, table: str) -> int:
        """Return the number of unique keys of a table. Raises KeyError for an unknown table."""
        return self._file.layout.specs[f"keys.{table}"].shape[0]

    def keys(self, table: str) -> NDArray[np.int64]:
        """Return the keys of a table in hash order: mapped, read-only. Raises DatasetError for damage."""
        return self._array(f"keys.{table}")

    def counts(self, table: str) -> NDArray[np.int64]:
        """Return the number of occurrences of each key: mapped, read-only. Raises DatasetError for damage."""
        return self._array(f"counts.{table}")

    def place(self, table: Table, hash_bound: int) -> int:
        """Return the number of keys of ``table`` with a hash below ``hash_bound`` (0 .. 2^64)."""
        return hash_range_bound(self.keys(table.name), table.table_id, hash_bound)

    def _array(self, name: str) -> NDArray[np.int64]:
        values = self._file.array(name)
        self._file.check(name, 0, values.size)
        return values


def open_key_set(path: Path, tables: Sequence[Table], rows: Mapping[str, int], digest: str) -> KeySet:
    """Open a file of ``write_key_set``. Raises DatasetError for damage."""
    return KeySet(ArrayFile(path, key_set_layout(tables, rows), digest))


def write_key_set(
    path: Path,
    tables: Sequence[Table],
    rows: Mapping[str, int],
    columns: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]],
) -> str:
    """Write a key set and return its digest. The file is complete, but not synced.

    rows: unique keys by table. columns: for each table, in the order of table ids, its keys in hash order and their
    counts; an iterator is read one table at a time.
    """
    writer = ArrayFileWriter(path, key_set_layout(tables, rows))
    for table, (keys, counts) in zip(tables, columns, strict=True):
        writer.write(f"keys.{table.name}", 0, keys)
        writer.write(f"counts.{table.name}", 0, counts)
    return writer.finish()
