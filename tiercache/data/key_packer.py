"""KeyPacker: blocks of keys to key sets that fit the device budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.data.keyset import write_key_set
from tiercache.errors import BudgetError
from tiercache.kernels.cpu.unique_keys import UniqueKeys

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.data.pass_builder import RowBudget
    from tiercache.store.table import Table

_NO_KEYS = np.empty(0, np.int64)


class KeyPacker:
    """The unique keys of the open sub-dataset. Memory: up to 100 bytes for each of them."""

    def __init__(self, tables: Sequence[Table], budget: RowBudget) -> None:
        """tables: in the order of table ids."""
        self.tables, self._budget = tuple(tables), budget
        self.num_blocks = 0
        """Blocks of the open sub-dataset."""
        self._unique = self._empty_tables()

    def add(self, keys: Mapping[str, NDArray[np.int64]], block: str, smaller: str) -> bool:
        """Add a block: its keys by table, all of its occurrences. Returns False if the open sub-dataset has no room.

        Nothing is added then, and the block fits the next sub-dataset. Raises BudgetError, in which ``block`` names the
        block and ``smaller`` says how to make it smaller, if it fits none.
        """
        before = {name: list(unique.counts) for name, unique in self._unique.items()}
        for name, unique in self._unique.items():
            of_table = keys.get(name, _NO_KEYS)
            unique.add(of_table, np.empty(of_table.size, np.int32))
        rows = [unique.count for unique in self._unique.values()]
        if self._budget.fits(rows):
            self.num_blocks += 1
            return True
        if not self.num_blocks:
            raise BudgetError(f"{block} {self._budget.excess(rows)}: raise device_budget, or {smaller}")
        for name, unique in self._unique.items():
            unique.remove(keys.get(name, _NO_KEYS), before[name])
        return False

    @property
    def rows(self) -> dict[str, int]:
        """Unique keys of the open sub-dataset, by table."""
        return {name: unique.count for name, unique in self._unique.items()}

    def close(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Return keys, in hash order, and counts of each table; begin the next sub-dataset."""
        self._budget.close([unique.count for unique in self._unique.values()])
        columns = [unique.sorted(with_positions=False)[:2] for unique in self._unique.values()]
        self._unique, self.num_blocks = self._empty_tables(), 0
        return columns

    def write(self, path: Path) -> tuple[dict[str, int], str]:
        """Close the open sub-dataset and write its key set; returns rows by table and the digest. Not synced."""
        rows = self.rows
        return rows, write_key_set(path, self.tables, rows, self.close())

    def _empty_tables(self) -> dict[str, UniqueKeys]:
        return {table.name: UniqueKeys(table.table_id) for table in self.tables}
