"""Where the rows of a pass stand: groups in order, in each its tables in order, in each its keys in hash order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tiercache.passes.view import DatasetView
    from tiercache.store.table import Group, Table


@dataclass(frozen=True, slots=True)
class Positions:
    """The position of every key of every pass, as starts of tables: (passes, tables + 1) int64."""

    groups: tuple[Group, ...]
    starts_PT: NDArray[np.int64]

    @classmethod
    def of(cls, pass_set: DatasetView, groups: tuple[Group, ...]) -> Positions:
        """Lay out the passes of ``pass_set`` for the groups of a store."""
        names = [table.name for group in groups for table in group.tables]
        rows = np.array([[p.rows(name) for name in names] for p in pass_set.passes], dtype=np.int64)
        rows = rows.reshape(len(pass_set.passes), len(names))
        starts = np.zeros((rows.shape[0], rows.shape[1] + 1), dtype=np.int64)
        np.cumsum(rows, axis=1, out=starts[:, 1:])
        return cls(groups, starts)

    @property
    def tables(self) -> tuple[Table, ...]:
        """All tables, in the order of their positions."""
        return tuple(table for group in self.groups for table in group.tables)

    def keys_of(self, pass_set: DatasetView) -> Callable[[int, int], NDArray[np.int64]]:
        """Return what gives the keys of a pass and of a table, by its place among all tables."""
        names = [table.name for table in self.tables]
        return lambda pass_index, table: pass_set.passes[pass_index].keys(names[table])

    @property
    def num_passes(self) -> int:
        """How many passes there are."""
        return int(self.starts_PT.shape[0])

    def first_table(self, group: int) -> int:
        """Return the index, among all tables, of the first table of ``group``."""
        return sum(len(g.tables) for g in self.groups[:group])

    def start(self, pass_index: int, table: int) -> int:
        """Return the first position of ``table`` in the pass."""
        return int(self.starts_PT[pass_index, table])

    def num_rows(self, pass_index: int, group: int | None = None) -> int:
        """Return the rows of the pass, of one group or of all."""
        if group is None:
            return int(self.starts_PT[pass_index, -1])
        span = self.span(pass_index, group)
        return span.stop - span.start  # type: ignore[no-any-return]

    def row_bytes(self, pass_index: int) -> int:
        """Return the bytes of all rows of the pass."""
        return sum(self.num_rows(pass_index, g) * group.row_bytes for g, group in enumerate(self.groups))

    def span(self, pass_index: int, group: int) -> slice:
        """Return the positions of ``group`` in the pass."""
        first = self.first_table(group)
        last = first + len(self.groups[group].tables)
        return slice(int(self.starts_PT[pass_index, first]), int(self.starts_PT[pass_index, last]))

    def table_starts(self, pass_index: int, group: int) -> NDArray[np.int64]:
        """Return where each table of ``group`` starts among the group's own positions; one more at the end."""
        first = self.first_table(group)
        last = first + len(self.groups[group].tables)
        starts = self.starts_PT[pass_index, first : last + 1]
        return starts - starts[0]  # type: ignore[no-any-return]
