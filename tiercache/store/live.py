"""The live rows of each segment and group, which every commit lists."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.layout import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tiercache.store.segment import Segment
    from tiercache.store.table import Group

    Int64s = NDArray[np.int64]


GROUP_COUNTS = ("first_ranges_SG", "next_uses_SG", "rows_SG", "block_rows_SG", "row_bytes_SG", "changed_SG")
TABLE_COUNTS = ("live_ST", "stale_ST")
COUNTS = (*GROUP_COUNTS, *TABLE_COUNTS)
"""Names of the counts per group, per table, and of both."""
_MOST = 1 << 48
"""More than any number of rows or bytes of a segment: sums and products of a few are exact."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Live:
    """The live rows in S segments of one rank: G groups, and T tables in the order of groups.

    The live rows of a group are the last ones of its layout: from its first live range on.
    """

    first_ranges_SG: Int64s
    """(S, G): the first live range of each layout, or the number of ranges."""
    next_uses_SG: Int64s
    """(S, G): the next use of that range; ``NEVER`` if there is none."""
    rows_SG: Int64s
    """(S, G): rows of each layout, dead ones too."""
    block_rows_SG: Int64s
    """(S, G): rows of each block of it."""
    row_bytes_SG: Int64s
    """(S, G): bytes of a row."""
    changed_SG: Int64s
    """(S, G): 1 if last changes of rows are stored, else 0."""
    live_ST: Int64s
    """(S, T): rows of each table in live ranges, stale ones too."""
    stale_ST: Int64s
    """(S, T): those of them whose key has a row in a newer segment."""
    first_tables: tuple[int, ...]
    """(G + 1): the first table of each group, and the number of tables."""

    @classmethod
    def zeros(cls, segments: int, groups: Sequence[Group]) -> Live:
        """Return counts to fill in."""
        first_tables = (0, *accumulate(len(group.tables) for group in groups))
        shapes = {name: (segments, first_tables[-1] if name in TABLE_COUNTS else len(groups)) for name in COUNTS}
        arrays = {name: np.zeros(shape, np.int64) for name, shape in shapes.items()}
        return cls(**arrays, first_tables=first_tables)

    @classmethod
    def of(cls, segments: Sequence[Segment], groups: Sequence[Group]) -> Live:
        """Return the counts if all rows of ``segments`` are live and not stale."""
        live = cls.zeros(len(segments), groups)
        for row, segment in enumerate(segments):
            live.set_from(row, segment, -1)
        return live

    def taken(self, rows: Sequence[int]) -> Live:
        """Return a copy with the given segments."""
        return replace(self, **{name: getattr(self, name)[list(rows)] for name in COUNTS})

    def joined(self, other: Live) -> Live:
        """Return the counts of these segments followed by those in ``other``."""
        both: dict[str, Any] = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in COUNTS}
        return replace(self, **both)

    def set_from(self, row: int, segment: Segment, first_use: int) -> None:
        """Set a segment's rows with next uses from ``first_use`` on live."""
        for g, layout in enumerate(segment.layouts):
            self.set_group(row, g, segment, int(layout.next_use_R.searchsorted(first_use)))

    def set_group(self, row: int, g: int, segment: Segment, first_range: int) -> None:
        """Set one group's rows in a segment live from a range on."""
        layout, first_table = segment.layouts[g], self.first_tables[g]
        self.first_ranges_SG[row, g] = first_range
        self.next_uses_SG[row, g] = layout.next_use_R[first_range] if first_range < layout.num_ranges else NEVER
        self.rows_SG[row, g], self.block_rows_SG[row, g] = layout.rows, layout.block_rows
        self.row_bytes_SG[row, g] = layout.row_bytes
        self.changed_SG[row, g] = (changed := segment.meta[g].changed) is not None and changed.stored
        live_T = layout.table_rows_RT[first_range:].sum(axis=0, dtype=np.int64) if layout.num_ranges else 0
        self.live_ST[row, first_table : self.first_tables[g + 1]] = live_T

    def fits(self, row: int, segment: Segment) -> bool:
        """Return True unless a segment has other rows than these; stale rows are not checked."""
        actual = self.taken([row])
        for g, layout in enumerate(segment.layouts):
            if (first_range := int(self.first_ranges_SG[row, g])) > layout.num_ranges:
                return False
            actual.set_group(0, g, segment, first_range)
        return all(np.array_equal(getattr(actual, name)[0], getattr(self, name)[row]) for name in COUNTS)

    def check(self) -> None:
        """Raise ValueError for numbers that no store can have."""
        if any(int(getattr(self, name).min(initial=0)) < 0 for name in COUNTS):
            raise ValueError("it has a number below 0")
        counts = [getattr(self, name) for name in COUNTS if name != "next_uses_SG"]
        if any(int(count.max(initial=0)) > _MOST for count in counts):
            raise ValueError(f"it has a number above {_MOST:,}")
        if np.any(self.stale_ST > self.live_ST):
            raise ValueError("more rows of a segment are stale than are live")
        if np.any(self._live_rows() > self.rows_SG) or np.any((self.rows_SG > 0) & (self.block_rows_SG == 0)):
            raise ValueError("more rows of a segment are live than it has in its blocks")

    def _live_rows(self) -> Int64s:
        """Return (S, G): rows in live ranges."""
        return np.stack([self.live_ST[:, a:b].sum(axis=1) for a, b in pairwise(self.first_tables)], axis=1)

    def first_blocks(self) -> Int64s:
        """Return (S, G): the first block of each layout that has a live row; the number of blocks where none has."""
        live_SG = self._live_rows()
        block_rows_SG = np.maximum(self.block_rows_SG, 1)
        dead = (self.rows_SG - live_SG) // block_rows_SG
        return np.where(live_SG > 0, dead, -(-self.rows_SG // block_rows_SG))
