"""Which rows of segments are live: listed by every commit, for each segment and group."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.layout import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tiercache.store.segment import Segment
    from tiercache.store.table import Group

    Int64s = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Live:
    """What is live in S segments of one rank: G groups, and T tables in the order of groups.

    The live rows of a group are the last ones of its layout: from its first live range on.
    """

    first_ranges_SG: Int64s
    """(S, G): the first live range of each layout, or the number of ranges."""
    next_uses_SG: Int64s
    """(S, G): the next use of that range; ``NEVER`` where there is none."""
    rows_SG: Int64s
    """(S, G): rows of each layout, dead ones too."""
    block_rows_SG: Int64s
    """(S, G): rows of each block of it."""
    row_bytes_SG: Int64s
    """(S, G): bytes of a row."""
    changed_SG: Int64s
    """(S, G): 1 where last changes of rows are stored, else 0."""
    live_ST: Int64s
    """(S, T): rows of each table in live ranges, stale ones too."""
    stale_ST: Int64s
    """(S, T): those of them whose key has a row in a newer segment."""

    @classmethod
    def zeros(cls, segments: int, groups: Sequence[Group]) -> Live:
        """Return what is to be filled in."""
        tables = sum(len(group.tables) for group in groups)
        shapes = {name: (segments, tables if name.endswith("ST") else len(groups)) for name in cls.__slots__}
        return cls(**{name: np.zeros(shape, np.int64) for name, shape in shapes.items()})

    @classmethod
    def of(cls, segments: Sequence[Segment], groups: Sequence[Group]) -> Live:
        """Return that all rows of ``segments`` are live, and none is stale."""
        live = cls.zeros(len(segments), groups)
        for row, segment in enumerate(segments):
            live.set_from(row, segment, groups, -1)
        return live

    def taken(self, rows: Sequence[int]) -> Live:
        """Return a copy of what is said of some of the segments."""
        return Live(**{name: getattr(self, name)[list(rows)] for name in self.__slots__})

    def joined(self, other: Live) -> Live:
        """Return what is said of these segments, then of others."""
        return Live(**{name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in self.__slots__})

    def set_from(self, row: int, segment: Segment, groups: Sequence[Group], first_use: int) -> None:
        """Say of a segment that its rows with next uses from ``first_use`` on are live."""
        first_table = 0
        for g, (group, layout) in enumerate(zip(groups, segment.layouts, strict=True)):
            first = int(layout.next_use_R.searchsorted(first_use))
            self.first_ranges_SG[row, g] = first
            self.next_uses_SG[row, g] = layout.next_use_R[first] if first < layout.num_ranges else NEVER
            self.rows_SG[row, g], self.block_rows_SG[row, g] = layout.rows, layout.block_rows
            self.row_bytes_SG[row, g] = layout.row_bytes
            self.changed_SG[row, g] = bool(segment.changed) and segment.changed[g].stored
            last_table = first_table + len(group.tables)
            if layout.num_ranges:
                self.live_ST[row, first_table:last_table] = layout.table_rows_RT[first:].sum(axis=0, dtype=np.int64)
            first_table = last_table

    def first_blocks(self, groups: Sequence[Group]) -> Int64s:
        """Return (S, G): the first block of each layout that has a live row; the number of blocks where none has."""
        starts = [0, *accumulate(len(group.tables) for group in groups)]
        live_SG = np.stack([self.live_ST[:, a:b].sum(axis=1) for a, b in pairwise(starts)], axis=1)
        block_rows_SG = np.maximum(self.block_rows_SG, 1)
        dead = (self.rows_SG - live_SG) // block_rows_SG
        return np.where(live_SG > 0, dead, -(-self.rows_SG // block_rows_SG))
