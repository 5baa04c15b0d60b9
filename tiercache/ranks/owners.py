"""Owners: on which rank, and where there, each row of a pass is found. Pure; every rank finds the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tiercache.kernels.cpu.next_use import hash_range_bound
from tiercache.store.shards.sharding import hash_bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tiercache.store.shards.sharding import Kind, ShardingPlan
    from tiercache.store.table import Group, Table


@dataclass(frozen=True, slots=True)
class Destination:
    """What one rank owns of one table in one pass: some local ids, some columns."""

    rank: int
    low: int
    """The first local id."""
    high: int
    """The local id behind the last."""
    group: int
    """The group among those of the rank's part."""
    first: int
    """Where the row of ``low`` stands among the rows of that group in that pass."""
    first_column: int
    last_column: int
    """The column behind the last."""


@dataclass(frozen=True, slots=True, eq=False)
class Owners:
    """The owners of every row of one pass. T tables in the order of table ids, W ranks.

    Rank w owns local ids ``[low_TW[t, w], high_TW[t, w])`` of table t, none where these are equal; the row of local id
    i is then at position ``first_TW[t, w] + i - low_TW[t, w]`` of group ``group_TW[t, w]`` of that rank's part.
    """

    sub_dataset: int
    tables: tuple[Table, ...]
    """Whole, not the parts of a rank."""
    kinds: tuple[Kind, ...]
    """How each table is placed."""
    rows_T: NDArray[np.int64]
    """How many local ids each table has in the pass."""
    low_TW: NDArray[np.int64]
    high_TW: NDArray[np.int64]
    group_TW: NDArray[np.int32]
    first_TW: NDArray[np.int64]
    columns_TW2: NDArray[np.int32]
    """The first column that the rank owns, and the column behind the last; all columns where it owns no row."""
    destinations: tuple[tuple[Destination, ...], ...]
    """By table: who owns local ids, in the order of local ids or, of column slices, of columns. A rank that owns
    columns stands there though the pass has no row of the table; one that owns a range of hashes does not."""

    @property
    def num_ranks(self) -> int:
        """W."""
        return int(self.low_TW.shape[1])

    def span(self, table: str, rank: int) -> tuple[int, int]:
        """Return the first local id of a table that a rank owns and the one behind the last."""
        t = self.index(table)
        return int(self.low_TW[t, rank]), int(self.high_TW[t, rank])

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
    """Find the owners of a pass: a search of each rank's hash bound in each key set, nothing else is read.

    tables: whole, in the order of table ids. groups_W: the groups of each rank's part. keys_of(table name): int64 keys
    of the pass in hash order. Raises ValueError where a rank owns 2^31 rows of one group.
    """
    T, W = len(tables), sharding.num_ranks
    rows = np.array([keys_of(table.name).size for table in tables], dtype=np.int64)
    low, high, first = np.zeros((T, W), np.int64), np.zeros((T, W), np.int64), np.zeros((T, W), np.int64)
    group, columns = np.zeros((T, W), np.int32), np.zeros((T, W, 2), np.int32)
    for t, table in enumerate(tables):
        table_sharding = sharding.tables[table.name]
        columns[t, :, 1] = table.dim
        if table_sharding.by_hash:
            bounds = rank_bounds(keys_of(table.name), table, W)
            low[t], high[t] = bounds[:-1], bounds[1:]
        for part in table_sharding.slices:
            high[t, part.rank] = rows[t]
            columns[t, part.rank] = part.first, part.last
    for rank, groups in enumerate(groups_W):
        place = {table.name: t for t, table in enumerate(tables)}
        for one in groups:
            members = [place[table.name] for table in one.tables]
            ends = np.cumsum(high[members, rank] - low[members, rank])
            group[members, rank], first[members[1:], rank] = one.index, ends[:-1]
            if ends[-1] >= 1 << 31:
                raise ValueError(
                    f"rank {rank} owns {int(ends[-1]):,} rows of one group in sub-dataset {sub_dataset}, and a "
                    "position is an int32: shard tables by row, add ranks or extract smaller passes"
                )
    found = []
    for t, table in enumerate(tables):
        ranks = [part.rank for part in sharding.tables[table.name].slices] or np.nonzero(high[t] > low[t])[0].tolist()
        found.append(
            tuple(
                Destination(
                    w, int(low[t, w]), int(high[t, w]), int(group[t, w]), int(first[t, w]), *columns[t, w].tolist()
                )
                for w in ranks
            )
        )
    kinds = tuple(sharding.tables[table.name].kind for table in tables)
    return Owners(sub_dataset, tuple(tables), kinds, rows, low, high, group, first, columns, tuple(found))


def rank_bounds(keys: NDArray[np.int64], table: Table, num_ranks: int) -> NDArray[np.int64]:
    """Return where the keys of each rank's range of hashes begin: (W + 1,), for keys (n,) in hash order."""
    return np.array([hash_range_bound(keys, table.table_id, bound) for bound in hash_bounds(num_ranks)], np.int64)
