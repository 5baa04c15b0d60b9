"""The positions of rows in a sub-dataset (by group, table, and hash of the key), and a sweep of all keys by hash."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from tiercache.kernels.cpu.key_sweeps import hash_range_bound
from tiercache.kernels.cpu.unique_keys import UniqueKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.data.dataset import DatasetView
    from tiercache.store.table import Group, Table

KEYS_PER_RANGE = 1 << 20
KeysOf: TypeAlias = "Callable[[int, int], NDArray[np.int64]]"
"""Returns the keys of a sub-dataset and of a table, by its index among all tables, in hash order."""


@dataclass(frozen=True, slots=True)
class RowOffsets:
    """The position of every key of every sub-dataset, as starts of tables: (sub-datasets, tables + 1) int64."""

    groups: tuple[Group, ...]
    starts_PT: NDArray[np.int64]

    @classmethod
    def of(cls, dataset: DatasetView, groups: tuple[Group, ...]) -> RowOffsets:
        """Lay out the sub-datasets of ``dataset`` for the groups of a store."""
        names = [table.name for group in groups for table in group.tables]
        rows = np.array([[0, *(p.rows(name) for name in names)] for p in dataset.passes], dtype=np.int64)
        return cls(groups, np.cumsum(rows.reshape(len(dataset.passes), len(names) + 1), axis=1))

    @property
    def tables(self) -> tuple[Table, ...]:
        """All tables, in the order of their positions."""
        return tuple(table for group in self.groups for table in group.tables)

    def keys_of(self, dataset: DatasetView) -> KeysOf:
        """Return the function that returns keys of ``dataset``."""
        names = [table.name for table in self.tables]
        return lambda sub_dataset, table: dataset.passes[sub_dataset].keys(names[table])

    @property
    def num_passes(self) -> int:
        """Number of sub-datasets."""
        return int(self.starts_PT.shape[0])

    @property
    def total_rows(self) -> int:
        """Rows of all sub-datasets together."""
        return int(self.starts_PT[:, -1].sum())

    def first_table(self, group: int) -> int:
        """Return the index, among all tables, of the first table of ``group``."""
        return sum(len(g.tables) for g in self.groups[:group])

    def num_rows(self, sub_dataset: int, group: int | None = None) -> int:
        """Return the rows of the sub-dataset, of one group or of all."""
        if group is None:
            return int(self.starts_PT[sub_dataset, -1])
        span = self.span(sub_dataset, group)
        return span.stop - span.start  # type: ignore[no-any-return]

    @property
    def pass_rows(self) -> NDArray[np.int64]:
        """The rows of each sub-dataset and group: (sub-datasets, groups) int64."""
        bounds = np.cumsum([0, *(len(group.tables) for group in self.groups)])
        rows: NDArray[np.int64] = np.diff(self.starts_PT[:, bounds], axis=1)
        return rows

    def row_bytes(self, sub_dataset: int) -> int:
        """Return the bytes of all rows of the sub-dataset."""
        return sum(self.num_rows(sub_dataset, g) * group.row_bytes for g, group in enumerate(self.groups))

    def span(self, sub_dataset: int, group: int) -> slice:
        """Return the positions of ``group`` in the sub-dataset."""
        first = self.first_table(group)
        last = first + len(self.groups[group].tables)
        return slice(int(self.starts_PT[sub_dataset, first]), int(self.starts_PT[sub_dataset, last]))

    def table_starts(self, sub_dataset: int, group: int) -> NDArray[np.int64]:
        """Return the start of each table of ``group`` within the positions of the group, and their end."""
        first = self.first_table(group)
        starts = self.starts_PT[sub_dataset, first : first + len(self.groups[group].tables) + 1]
        return starts - starts[0]  # type: ignore[no-any-return]

    def table_spans(self, sub_dataset: int) -> dict[str, slice]:
        """Return the range of each table's positions within its group."""
        spans = dict[str, slice]()
        for g, group in enumerate(self.groups):
            bounds = pairwise(self.table_starts(sub_dataset, g).tolist())
            spans |= {table.name: slice(*pair) for table, pair in zip(group.tables, bounds, strict=True)}
        return spans


class KeyRange(NamedTuple):
    """The keys of one table whose hashes are in one range, of all sub-datasets one after another."""

    table: int
    """Its index among all tables."""
    first_P: list[int]
    """The index of the first of them among the keys of the table, by sub-dataset."""
    starts: NDArray[np.int64]
    """(P + 1,): the start of each sub-dataset in ``numbers``, and their size."""
    numbers: NDArray[np.int32]
    """The index in ``keys`` of each key."""
    keys: NDArray[np.int64]
    """The unique keys, in no order."""


def key_ranges(
    positions: RowOffsets,
    keys_of: Callable[[int, int], NDArray[np.int64]],
    *,
    keys_per_range: int = KEYS_PER_RANGE,
    below: int = 1 << 64,
    tables: Sequence[int] | None = None,
) -> Iterator[KeyRange]:
    """Yield all keys, one hash range of one table at a time: about ``keys_per_range`` keys of all sub-datasets.

    keys_of(pass, table): int64 keys in hash order. below: the end of the hashes; a smaller one takes a sample of keys,
    as hashes are uniform. tables: default: all. Memory: at most ``SWEPT_KEY_BYTES`` for each key of a range.
    """
    for table in range(len(positions.tables)) if tables is None else tables:
        table_id, keys_P = positions.tables[table].table_id, [keys_of(p, table) for p in range(positions.num_passes)]
        ranges = max(1, -(-(below * sum(keys.size for keys in keys_P) >> 64) // keys_per_range))
        first_P = [0] * len(keys_P)
        for r in range(1, ranges + 1):
            end_P = [hash_range_bound(keys, table_id, r * below // ranges) for keys in keys_P]
            starts = np.concatenate([[0], np.cumsum(np.subtract(end_P, first_P))]).astype(np.int64)
            if starts[-1]:
                unique = UniqueKeys(expected=int(np.diff(starts).max()))
                numbers = np.empty(starts[-1], dtype=np.int32)
                for p, keys in enumerate(keys_P):
                    unique.add(np.ascontiguousarray(keys[first_P[p] : end_P[p]]), numbers[starts[p] : starts[p + 1]])
                keys_R = unique.keys()
                del unique  # its table is larger than all that follows
                yield KeyRange(table, first_P, starts, numbers, keys_R)
            first_P = end_P
