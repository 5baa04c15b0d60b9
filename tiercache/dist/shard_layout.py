"""The owners of the rows of a pass, and the order in which rows travel and are stored, as one rank sees it.

Legend: W ranks, T tables in the order of table ids, K shards, R runs, S splits, G groups of whole tables, H the most
groups in any rank's part, U unique rows of a batch.

A *shard* of a table is the part that one rank owns in the pass: neighboring local ids, with all columns or some. Shards
in *wire order* are sorted by rank (the others ascending, this rank last), then rows that travel before rows looked up
in a replica, then by group of the owner's part, group of whole tables, table and column.

A *split* is the rows of one owner in one of its groups: traveling rows of group h are split h of its 2 H, replicated
ones split H + h. A *run* is a set of shards of one split whose rows are neighbors on the wire and in memory.

Rows of a group are in memory in wire order, then those that arrive in columns, then replicated ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from tiercache.errors import RankError
from tiercache.kernels.cpu.key_sweeps import hash_range_bound
from tiercache.store.sharding import hash_bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tiercache.store.sharding import Kind, ShardingPlan
    from tiercache.store.table import Group, Table


def out_of_bounds(rank: int, numbers: NDArray[np.int32], count: int, what: str) -> RankError | None:
    """Return the error for numbers received by ``rank`` if any is outside [0, count), else None."""
    if not numbers.size or (int(numbers.min()) >= 0 and int(numbers.max()) < count):
        return None
    return RankError(
        f"rank {rank} was asked for rows {int(numbers.min()):,} to {int(numbers.max()):,} {what}: start all ranks "
        "again with one dataset and one sharding"
    )


@dataclass(frozen=True, slots=True)
class Destination:
    """The part of a table that one rank owns in one pass: some local ids, some columns."""

    rank: int
    low: int
    """The first local id."""
    high: int
    """One past the last local id."""
    group: int
    """The group's index in the rank's part."""
    first: int
    """The position of the row of ``low`` within that group in that pass."""
    first_column: int
    last_column: int
    """One past the last column."""


@dataclass(frozen=True, slots=True, eq=False)
class Owners:
    """The owners of every row of one pass. T tables in the order of table ids, W ranks.

    Rank w owns local ids ``[low_TW[t, w], high_TW[t, w])`` of table t, none if these are equal; the row of local id i
    is then at position ``first_TW[t, w] + i - low_TW[t, w]`` of group ``group_TW[t, w]`` of that rank's part.
    """

    sub_dataset: int
    tables: tuple[Table, ...]
    """Whole tables, not the parts of a rank."""
    kinds: tuple[Kind, ...]
    """The sharding of each table."""
    rows_T: NDArray[np.int64]
    """Number of local ids of each table in the pass."""
    low_TW: NDArray[np.int64]
    high_TW: NDArray[np.int64]
    group_TW: NDArray[np.int32]
    first_TW: NDArray[np.int64]
    destinations: tuple[tuple[Destination, ...], ...]
    """By table: its owners, in order of local ids, or of columns for column slices. A rank that owns columns is listed
    even if the pass has no row of the table; one that owns a range of hashes is not."""

    @property
    def num_ranks(self) -> int:
        """W."""
        return int(self.low_TW.shape[1])

    def index(self, table: str) -> int:
        """Return t of a table. Raises KeyError for an unknown name."""
        for t, known in enumerate(self.tables):
            if known.name == table:
                return t
        raise KeyError(table)


def find_owners(
    sharding: ShardingPlan,
    sub_dataset: int,
    tables: Sequence[Table],
    groups_W: Sequence[tuple[Group, ...]],
    keys_of: Callable[[str], NDArray[np.int64]],
) -> Owners:
    """Find the owners of a pass: searches each rank's hash bound in each key set, and reads nothing else.

    tables: whole, in the order of table ids. groups_W: the groups of each rank's part. keys_of(table name): int64 keys
    of the pass in hash order. Raises ValueError if a rank owns 2^31 rows of one group.
    """
    T, W = len(tables), sharding.num_ranks
    rows = np.array([keys_of(table.name).size for table in tables], dtype=np.int64)
    low, high, first = np.zeros((T, W), np.int64), np.zeros((T, W), np.int64), np.zeros((T, W), np.int64)
    group = np.zeros((T, W), np.int32)
    for t, table in enumerate(tables):
        table_sharding = sharding.tables[table.name]
        if table_sharding.by_hash:
            keys = keys_of(table.name)
            bounds = [hash_range_bound(keys, table.table_id, bound) for bound in hash_bounds(W)]
            low[t], high[t] = bounds[:-1], bounds[1:]
        for part in table_sharding.slices:
            high[t, part.rank] = rows[t]
    for rank, groups in enumerate(groups_W):
        place = {table.name: t for t, table in enumerate(tables)}
        for one in groups:
            members = [place[table.name] for table in one.tables]
            ends = np.cumsum(high[members, rank] - low[members, rank])
            group[members, rank], first[members[1:], rank] = one.index, ends[:-1]
            if ends[-1] >= 1 << 31:
                raise ValueError(
                    f"rank {rank} owns {int(ends[-1]):,} rows of one group in sub-dataset {sub_dataset}, but positions "
                    "are int32: shard tables row_wise, add ranks or extract smaller passes"
                )
    found = []
    for t, table in enumerate(tables):
        parts = [(part.rank, part.first, part.last) for part in sharding.tables[table.name].slices]
        parts = parts or [(w, 0, table.dim) for w in np.nonzero(high[t] > low[t])[0].tolist()]
        found.append(
            tuple(
                Destination(w, int(low[t, w]), int(high[t, w]), int(group[t, w]), int(first[t, w]), *columns)
                for w, *columns in parts
            )
        )
    kinds = tuple(sharding.tables[table.name].kind for table in tables)
    return Owners(sub_dataset, tuple(tables), kinds, rows, low, high, group, first, tuple(found))


_MOST_POSITIONS = 1 << 31
_WHOLE, _SLICED, _REPLICATED = range(3)


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Rows that are copied at once between the wire and a group's memory."""

    rank_R: NDArray[np.int64]
    split_R: NDArray[np.int64]
    group_R: NDArray[np.int64]
    """The group of whole tables."""
    column_R: NDArray[np.int64]
    """The first column."""
    width_R: NDArray[np.int64]
    """Number of columns."""
    replicated_R: NDArray[np.bool_]
    first_R: NDArray[np.int64]
    """The first shard of each run."""

    def columns(self, run: int) -> slice:
        """Return the columns of a run."""
        first = int(self.column_R[run])
        return slice(first, first + int(self.width_R[run]))


class ShardLayout:
    """The shards of one pass in wire order, seen from one rank."""

    def __init__(
        self, owners: Owners, groups: Sequence[Group], rank: int, num_groups: int, *, replicated: bool = True
    ) -> None:
        """Lay out a pass.

        groups: of whole tables. num_groups: H. replicated: True if rows of replicated tables are looked up in replicas.
        """
        self.owners, self.replicated = owners, replicated
        self.num_ranks, self.rank, self.num_groups = owners.num_ranks, rank, num_groups
        self.num_whole_groups = len(groups)
        """G."""
        group_of = {table.name: group.index for group in groups for table in group.tables}
        self.table_of = {table.name: t for t, table in enumerate(owners.tables)}
        self.rows_T = owners.rows_T
        """Number of local ids of each table."""
        self.rows_H = [0] * num_groups
        """Number of rows in each group of the rank's own part."""
        for t in range(len(owners.tables)):
            self.rows_H[int(owners.group_TW[t, rank])] += int(owners.high_TW[t, rank] - owners.low_TW[t, rank])
        found = []
        for t, table in enumerate(owners.tables):
            is_replicated = replicated and owners.kinds[t] == "data_parallel"
            for d in owners.destinations[t]:
                kind = (
                    _REPLICATED if is_replicated else _WHOLE if d.last_column - d.first_column == table.dim else _SLICED
                )
                turn = d.rank if d.rank != rank else owners.num_ranks
                key = turn, is_replicated, d.group, group_of[table.name], t, d.first_column
                found.append((key, (t, d.rank, d.group, d.low, d.high, d.first, d.first_column, d.last_column, kind)))
        found.sort()
        columns = np.array([numbers for _, numbers in found], dtype=np.int64).reshape(-1, 9).T.copy()
        self.table_K, self.rank_K, part_group, self.low_K, self.high_K, self.first_K, column, last, place = columns
        self.group_T = [group_of[table.name] for table in owners.tables]
        """The group of whole tables of each table."""
        self.group_K = np.array(self.group_T, dtype=np.int64)[self.table_K]
        self.split_K = part_group + np.where(place == _REPLICATED, num_groups, 0)
        self.width_K, self.place_K = last - column, place
        self.table_order_K = np.argsort(self.table_K, kind="stable")
        """Shards by table."""
        self.by_table_K = self.table_K[self.table_order_K]
        self.replicated_k = np.nonzero(place == _REPLICATED)[0]
        """Indices of replicated shards."""
        self.width_WS = np.zeros((self.num_ranks, 2 * num_groups), dtype=np.int64)
        """Number of columns of the rows of each section of each rank."""
        self.width_WS[self.rank_K, self.split_K] = self.width_K
        self.sets = self._cut_sets()
        """Tables whose positions are sorted together, as (first, last) among the T."""
        self.base_T = np.empty_like(self.rows_T)
        """The position of local id 0 of each table in its set."""
        for first, end in self.sets:
            self.base_T[first:end] = exclusive(self.rows_T[first:end])
        is_first = (place != _SLICED) | (column == 0)
        by_slot = np.lexsort((np.arange(place.size), np.where(place == _SLICED, self.table_K, 0), place, self.group_K))
        self.slot_order = by_slot[is_first[by_slot]]
        """The shards used to count rows, group by group in slot order."""
        self.is_first_K = is_first
        first_of = {(int(self.table_K[k])): k for k in np.nonzero(is_first & (place == _SLICED))[0]}
        self.counted_K = np.array([first_of.get(int(t), k) if place[k] == _SLICED else k
                                   for k, t in enumerate(self.table_K)], dtype=np.int64)  # fmt: skip
        """The shard with the first columns of the same rows."""
        self.runs = self._cut_runs(column)
        self.is_plain = len(groups) == 1 and not (place != _WHOLE).any()
        """True if received rows are looked up as they are: whole rows of one group."""

    def _cut_sets(self) -> list[tuple[int, int]]:
        """Split the tables into sets whose rows an int32 can count."""
        cuts, rows = [0], 0
        for t, more in enumerate(self.rows_T.tolist()):
            if rows + more > _MOST_POSITIONS:
                cuts.append(t)
                rows = 0
            rows += more
        return list(pairwise([*cuts, int(self.rows_T.size)]))

    def _cut_runs(self, column: NDArray[np.int64]) -> Runs:
        keys = np.stack([self.rank_K, self.split_K, self.group_K])
        new = np.ones(self.table_K.size, dtype=bool)
        new[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
        new |= self.place_K == _SLICED
        k = np.nonzero(new)[0]
        return Runs(
            self.rank_K[k], self.split_K[k], self.group_K[k], column[k], self.width_K[k],
            self.place_K[k] == _REPLICATED, k,
        )  # fmt: skip


def exclusive(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the exclusive prefix sum."""
    return np.asarray(np.cumsum(counts) - counts)
