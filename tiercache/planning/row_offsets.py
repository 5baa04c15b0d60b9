"""The order of the rows of a sub-dataset: by group, in each by table, and in each by hash of the key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tiercache.data.dataset import DatasetView
    from tiercache.store.table import Group, Table


@dataclass(frozen=True, slots=True)
class RowOffsets:
    """The position of every key of every sub-dataset, as starts of tables: (sub-datasets, tables + 1) int64."""

    groups: tuple[Group, ...]
    starts_PT: NDArray[np.int64]

    @classmethod
    def of(cls, dataset: DatasetView, groups: tuple[Group, ...]) -> RowOffsets:
        """Lay out the sub-datasets of ``dataset`` for the groups of a store."""
        names = [table.name for group in groups for table in group.tables]
        rows = np.array([[p.rows(name) for name in names] for p in dataset.passes], dtype=np.int64)
        rows = rows.reshape(len(dataset.passes), len(names))
        starts = np.zeros((rows.shape[0], rows.shape[1] + 1), dtype=np.int64)
        np.cumsum(rows, axis=1, out=starts[:, 1:])
        return cls(groups, starts)

    @property
    def tables(self) -> tuple[Table, ...]:
        """All tables, in the order of their positions."""
        return tuple(table for group in self.groups for table in group.tables)

    def keys_of(self, dataset: DatasetView) -> Callable[[int, int], NDArray[np.int64]]:
        """Return what gives the keys of a sub-dataset and of a table, by its place among all tables."""
        names = [table.name for table in self.tables]
        return lambda sub_dataset, table: dataset.passes[sub_dataset].keys(names[table])

    @property
    def num_passes(self) -> int:
        """How many sub-datasets there are."""
        return int(self.starts_PT.shape[0])

    def first_table(self, group: int) -> int:
        """Return the index, among all tables, of the first table of ``group``."""
        return sum(len(g.tables) for g in self.groups[:group])

    def start(self, sub_dataset: int, table: int) -> int:
        """Return the first position of ``table`` in the sub-dataset."""
        return int(self.starts_PT[sub_dataset, table])

    def num_rows(self, sub_dataset: int, group: int | None = None) -> int:
        """Return the rows of the sub-dataset, of one group or of all."""
        if group is None:
            return int(self.starts_PT[sub_dataset, -1])
        span = self.span(sub_dataset, group)
        return span.stop - span.start  # type: ignore[no-any-return]

    def row_bytes(self, sub_dataset: int) -> int:
        """Return the bytes of all rows of the sub-dataset."""
        return sum(self.num_rows(sub_dataset, g) * group.row_bytes for g, group in enumerate(self.groups))

    def span(self, sub_dataset: int, group: int) -> slice:
        """Return the positions of ``group`` in the sub-dataset."""
        first = self.first_table(group)
        last = first + len(self.groups[group].tables)
        return slice(int(self.starts_PT[sub_dataset, first]), int(self.starts_PT[sub_dataset, last]))

    def table_starts(self, sub_dataset: int, group: int) -> NDArray[np.int64]:
        """Return where each table of ``group`` starts among the group's own positions; one more at the end."""
        first = self.first_table(group)
        last = first + len(self.groups[group].tables)
        starts = self.starts_PT[sub_dataset, first : last + 1]
        return starts - starts[0]  # type: ignore[no-any-return]
