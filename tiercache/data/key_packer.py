"""KeyPacker: packs blocks of keys into key sets that fit the device budget."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tiercache.data.keyset import write_key_set
from tiercache.errors import BudgetError
from tiercache.kernels.cpu.unique_keys import UniqueKeys, in_turn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.data.extraction_resources import Workers
    from tiercache.data.pass_builder import RowBudget
    from tiercache.store.table import Table

_MOST_PARTS = 8
_NO_KEYS = np.empty(0, np.int64)


class KeyPacker:
    """The unique keys of the open sub-dataset. Memory: up to 100 bytes for each of them."""

    def __init__(self, tables: Sequence[Table], budget: RowBudget, workers: Workers | None = None) -> None:
        """tables: in the order of table ids. workers: share the work of large blocks; None: this thread does it."""
        self.tables, self._budget, self._workers = tuple(tables), budget, workers
        self._run = in_turn if workers is None else workers.run
        self.num_blocks = 0
        """Blocks of the open sub-dataset."""
        self._unique = self._empty_tables()

    def add(
        self, keys: Mapping[str, NDArray[np.int64]], block: str, smaller: str,
        times: Mapping[str, NDArray[np.int64]] | None = None,
    ) -> bool:  # fmt: skip
        """Add a block: its keys by table, with all their occurrences. Returns False if the open sub-dataset is full.

        times: occurrences of each key; None: one each.

        Nothing is added then, and the block fits the next sub-dataset. Raises BudgetError, whose message has ``block``,
        the block's name, and ``smaller``, how to make it smaller, if the block fits no sub-dataset.
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

    def write(self, path: Path) -> tuple[dict[str, int], str]:
        """Close the open sub-dataset and write its key set; returns rows by table and the digest. Not synced."""
        rows = self.rows
        return rows, write_key_set(path, self.tables, rows, self.close())

    def _empty_tables(self) -> dict[str, UniqueKeys]:
        parts = 1 if self._workers is None else 1 << (self._workers.count - 1).bit_length()
        return {table.name: UniqueKeys(table.table_id, min(parts, _MOST_PARTS)) for table in self.tables}
