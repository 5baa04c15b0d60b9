"""Key sets: the unique keys of every table, in hash order, with counts, and the blocks that fit the device budget."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tiercache.data.array_file import ArrayFile, ArrayFileWriter
from tiercache.data.manifest import SubDatasetRecord
from tiercache.data.sample_layout import key_set_layout
from tiercache.errors import BudgetError
from tiercache.kernels.cpu.key_sweeps import hash_range_bound
from tiercache.kernels.cpu.unique_keys import UniqueKeys, in_turn
from tiercache.schema import Feature, Schema
from tiercache.store.files import sync

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.data.extraction_resources import Workers
    from tiercache.data.pass_builder import RowBudget
    from tiercache.store.table import Table

_MOST_PARTS = 8
_NO_KEYS = np.empty(0, np.int64)


class KeySet:
    """The keys and counts in a file, checked at their first use. Any thread may use it."""

    def __init__(self, file: ArrayFile) -> None:
        self._file = file

    def rows(self, table: str) -> int:
        """Return the number of unique keys of a table. Raises KeyError for an unknown table."""
        return self._file.layout.specs[f"keys.{table}"].shape[0]

    def keys(self, table: str) -> NDArray[np.int64]:
        """Return the keys of a table in hash order: mapped, read-only. Raises DatasetError for damage."""
        return self._file.whole(f"keys.{table}")

    def counts(self, table: str) -> NDArray[np.int64]:
        """Return the number of occurrences of each key: mapped, read-only. Raises DatasetError for damage."""
        return self._file.whole(f"counts.{table}")

    def place(self, table: Table, hash_bound: int) -> int:
        """Return the number of keys of ``table`` with a hash below ``hash_bound`` (0 .. 2^64)."""
        return hash_range_bound(self.keys(table.name), table.table_id, hash_bound)


def open_key_set(path: Path, tables: Sequence[Table], record: SubDatasetRecord) -> KeySet:
    """Open a file of ``write_key_set``. Raises DatasetError for damage."""
    return KeySet(ArrayFile(path, key_set_layout(tables, record.rows), record.digest))


def write_key_set(
    path: Path,
    tables: Sequence[Table],
    rows: Mapping[str, int],
    columns: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]],
) -> SubDatasetRecord:
    """Write a key set and return its record; it is on disk on return.

    rows: unique keys by table. columns: for each table, in the order of table ids, its keys in hash order and their
    counts; an iterator is read one table at a time.
    """
    writer = ArrayFileWriter(path, key_set_layout(tables, rows))
    for table, (keys, counts) in zip(tables, columns, strict=True):
        writer.write(f"keys.{table.name}", 0, keys)
        writer.write(f"counts.{table.name}", 0, counts)
    record = SubDatasetRecord(samples=0, rows=dict(rows), values=None, digest=writer.finish())
    sync(path)
    return record


def key_schema(tables: Iterable[Table]) -> Schema:
    """Return a schema of key sets: each table has one feature of its name, with any number of keys per sample."""
    tables = tuple(tables)
    return Schema(features=tuple(Feature(name=t.name, table=t.name, hotness="ragged") for t in tables), tables=tables)


class KeyPacker:
    """The unique keys of the open sub-dataset. Memory: up to 100 bytes for each of them."""

    def __init__(self, tables: Sequence[Table], budget: RowBudget, workers: Workers | None = None) -> None:
        """tables: in the order of table ids. workers: share the work of large blocks; None: this thread does it."""
        self.tables, self._budget, self._workers = tuple(tables), budget, workers
        self._run = in_turn if workers is None else workers.run
        self.num_blocks = 0
        self._unique = self._empty_tables()

    def add(
        self, keys: Mapping[str, NDArray[np.int64]], block: str, smaller: str,
        times: Mapping[str, NDArray[np.int64]] | None = None,
    ) -> bool:  # fmt: skip
        """Add a block: its keys by table, and the occurrences of each (None: one).

        Returns False if the open sub-dataset is full: nothing is added then, and the block fits the next one. Raises
        BudgetError, with ``block``, its name, and ``smaller``, how to make it smaller, if it fits none.
        """
        before, times = {name: list(unique.counts) for name, unique in self._unique.items()}, times or {}
        for name, unique in self._unique.items():
            of_table = keys.get(name, _NO_KEYS)
            numbers = np.empty(of_table.size, np.int32)
            self._run(
                partial(unique.add, of_table, numbers, part, times.get(name, _NO_KEYS)) for part in range(unique.parts)
            )
        rows = [unique.count for unique in self._unique.values()]
        if self._budget.fits(rows):
            self.num_blocks += 1
            return True
        if not self.num_blocks:
            raise BudgetError(f"{block} {self._budget.excess(rows)}: raise device_budget, or {smaller}")
        for name, unique in self._unique.items():
            unique.remove(keys.get(name, _NO_KEYS), before[name], times.get(name, _NO_KEYS))
        return False

    @property
    def rows(self) -> dict[str, int]:
        """Unique keys of the open sub-dataset, by table."""
        return {name: unique.count for name, unique in self._unique.items()}

    def close(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Return keys, in hash order, and counts of each table; begin the next sub-dataset."""
        self._budget.close([unique.count for unique in self._unique.values()])
        columns = [unique.sorted(with_positions=False, run=self._run)[:2] for unique in self._unique.values()]
        self._unique, self.num_blocks = self._empty_tables(), 0
        return columns

    def write(self, path: Path) -> SubDatasetRecord:
        """Close the open sub-dataset and write its key set; it is on disk on return."""
        return write_key_set(path, self.tables, self.rows, self.close())

    def _empty_tables(self) -> dict[str, UniqueKeys]:
        parts = 1 if self._workers is None else 1 << (self._workers.count - 1).bit_length()
        return {table.name: UniqueKeys(table.table_id, min(parts, _MOST_PARTS)) for table in self.tables}
