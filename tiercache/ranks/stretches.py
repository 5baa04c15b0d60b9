"""Stretches: which rows of a pass stand where on the wire, as one rank sees them. Pure.

Legend: W ranks, T tables in the order of table ids, K stretches, R runs, S sections, G groups of whole tables, H the
most groups that a rank's part has, U unique rows of a batch.

A *stretch* is what one rank owns of one table: neighboring local ids, of all columns or some. The *wire order* is that
of their ranks (the others ascending, this rank last), in each what travels first and then what is looked up in a
mirror, in each by the group of the owner's part, then by group of whole tables, table and column.

A *section* is what one owner has in one of its groups: traveling rows of group h are section h of its 2 H, mirrored
ones section H + h. A *run* is some stretches of one section whose rows stand together on the wire and in memory.

Rows of a group stand in memory in the order of the wire; behind them those that come in columns, then mirrored ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tiercache.ranks.owners import Owners
    from tiercache.store.table import Group

_MOST_POSITIONS = 1 << 31
_WHOLE, _SLICED, _MIRRORED = range(3)


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Rows that are copied at once between the wire and a group's rows."""

    rank_R: NDArray[np.int64]
    section_R: NDArray[np.int64]
    group_R: NDArray[np.int64]
    """The group of whole tables."""
    column_R: NDArray[np.int64]
    """The first column."""
    width_R: NDArray[np.int64]
    """Columns."""
    mirrored_R: NDArray[np.bool_]
    first_R: NDArray[np.int64]
    """The first stretch of each."""

    def columns(self, run: int) -> slice:
        """Return the columns of a run."""
        first = int(self.column_R[run])
        return slice(first, first + int(self.width_R[run]))


class Stretches:
    """The stretches of one pass in wire order, seen from one rank."""

    def __init__(
        self, owners: Owners, groups: Sequence[Group], rank: int, num_groups: int, *, mirrored: bool = True
    ) -> None:
        """Lay a pass out.

        groups: of whole tables. num_groups: H. mirrored: whether rows of replicated tables are looked up in mirrors.
        """
        self.owners, self.mirrored = owners, mirrored
        self.num_ranks, self.rank, self.num_groups = owners.num_ranks, rank, num_groups
        self.num_whole_groups = len(groups)
        """G."""
        group_of = {table.name: group.index for group in groups for table in group.tables}
        self.table_of = {table.name: t for t, table in enumerate(owners.tables)}
        self.rows_T = owners.rows_T
        """How many local ids each table has."""
        self.rows_H = [0] * num_groups
        """Rows of each group of the rank's own part."""
        for t in range(len(owners.tables)):
            self.rows_H[int(owners.group_TW[t, rank])] += int(owners.high_TW[t, rank] - owners.low_TW[t, rank])
        found = []
        for t, table in enumerate(owners.tables):
            is_mirrored = mirrored and owners.kinds[t] == "replicate"
            for d in owners.destinations[t]:
                kind = _MIRRORED if is_mirrored else _WHOLE if d.last_column - d.first_column == table.dim else _SLICED
                turn = d.rank if d.rank != rank else owners.num_ranks
                key = turn, is_mirrored, d.group, group_of[table.name], t, d.first_column
                found.append((key, (t, d.rank, d.group, d.low, d.high, d.first, d.first_column, d.last_column, kind)))
        found.sort()
        columns = np.array([numbers for _, numbers in found], dtype=np.int64).reshape(-1, 9).T.copy()
        self.table_K, self.rank_K, part_group, self.low_K, self.high_K, self.first_K, column, last, place = columns
        self.group_T = [group_of[table.name] for table in owners.tables]
        """The group of whole tables that each table is in."""
        self.group_K = np.array(self.group_T, dtype=np.int64)[self.table_K]
        self.section_K = part_group + np.where(place == _MIRRORED, num_groups, 0)
        self.width_K, self.place_K = last - column, place
        self.table_order_K = np.argsort(self.table_K, kind="stable")
        """Stretches by table."""
        self.by_table_K = self.table_K[self.table_order_K]
        self.mirrored_k = np.nonzero(place == _MIRRORED)[0]
        """Which stretches are mirrored."""
        self.width_WS = np.zeros((self.num_ranks, 2 * num_groups), dtype=np.int64)
        """Columns of the rows of each section of each rank."""
        self.width_WS[self.rank_K, self.section_K] = self.width_K
        self.sets = self._cut_sets()
        """Tables whose positions are sorted together, as (first, last) among the T."""
        self.base_T = np.empty_like(self.rows_T)
        """The position of local id 0 of each table in its set."""
        for first, end in self.sets:
            self.base_T[first:end] = exclusive(self.rows_T[first:end])
        is_first = (place != _SLICED) | (column == 0)
        by_slot = np.lexsort((np.arange(place.size), np.where(place == _SLICED, self.table_K, 0), place, self.group_K))
        self.slot_order = by_slot[is_first[by_slot]]
        """The stretches that rows are counted by, group by group in the order of slots."""
        self.is_first_K = is_first
        first_of = {(int(self.table_K[k])): k for k in np.nonzero(is_first & (place == _SLICED))[0]}
        self.counted_K = np.array([first_of.get(int(t), k) if place[k] == _SLICED else k
                                   for k, t in enumerate(self.table_K)], dtype=np.int64)  # fmt: skip
        """The stretch that has the first columns of the same rows."""
        self.runs = self._cut_runs(column)
        self.is_plain = len(groups) == 1 and not (place != _WHOLE).any()
        """Whether what travels is what is looked up: whole rows of one group."""

    def _cut_sets(self) -> list[tuple[int, int]]:
        """Cut the tables where their rows exceed what an int32 counts."""
        cuts, rows = [0], 0
        for t, more in enumerate(self.rows_T.tolist()):
            if rows + more > _MOST_POSITIONS:
                cuts.append(t)
                rows = 0
            rows += more
        return list(pairwise([*cuts, int(self.rows_T.size)]))

    def _cut_runs(self, column: NDArray[np.int64]) -> Runs:
        keys = np.stack([self.rank_K, self.section_K, self.group_K])
        new = np.ones(self.table_K.size, dtype=bool)
        new[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
        new |= self.place_K == _SLICED
        k = np.nonzero(new)[0]
        return Runs(
            self.rank_K[k], self.section_K[k], self.group_K[k], column[k], self.width_K[k],
            self.place_K[k] == _MIRRORED, k,
        )  # fmt: skip


def exclusive(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of all counts before each."""
    return np.asarray(np.cumsum(counts) - counts)
