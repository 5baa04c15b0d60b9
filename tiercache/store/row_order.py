"""Row order (first use, table, hash): the sort from the order (table, hash) into it, a slice of the rows at a time.

A slice is a run of rows in the order (table, hash) that become one segment. Within it a row's place is known by number
as the row arrives: rows of one first use arrive in their final order, so a count for each first use is enough. The
rows are sorted by that number, in files that are written front to back whatever the number of passes.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from tiercache.store.external_sort import ExternalSorter, flush_largest
from tiercache.store.layout import CHANGED_BYTES, KEY_BYTES, NEVER, Range
from tiercache.store.row_codec import moved_blocks_of
from tiercache.store.store_errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.compaction_plan import FirstUses
    from tiercache.store.engines.engine import Counters
    from tiercache.store.layout import SegmentLayout
    from tiercache.store.row_codec import MovedBlock
    from tiercache.store.segment import Layout
    from tiercache.store.table import Group, Table

    Int64s = NDArray[np.int64]
    Floats = NDArray[np.float32]

NUMBER_BYTES = 8
"""Bytes of the place number that a temporary file has for a row, in addition to its entry."""


def entry_bytes(one: Group | Table) -> int:
    """Return the bytes of a row of a group or a table, its key and its last change."""
    return KEY_BYTES + one.row_bytes + CHANGED_BYTES


class NewSegment(NamedTuple):
    """A segment to append. Its blocks can be drawn once, before the next segment is asked for."""

    layouts: tuple[SegmentLayout, ...]
    """By group."""
    moved: list[bool]
    """By group: whether last changes are stored, because rows may have several."""
    blocks: Iterator[MovedBlock]
    """Blocks of all groups, in order; all use the same two arrays."""


class RowOrder:
    """The first uses of one group's keys. Shapes: R passes that use some key first, T tables of the group."""

    def __init__(self, group: Group, uses: FirstUses) -> None:
        self.group = group
        counts = [Counter(uses.counts(table.name)) for table in group.tables]
        self.uses_R = np.array(sorted({use for of_table in counts for use in of_table}), dtype=np.int64)
        """(R,): the passes, ascending."""
        found = [[of_table[use] for of_table in counts] for use in self.uses_R.tolist()]
        self.counts_RT = np.array(found, dtype=np.int64).reshape(self.uses_R.size, len(counts))
        """(R, T): how many keys of a table each pass uses first."""
        self._arrived_RT = np.zeros_like(self.counts_RT)
        self.entry_bytes = entry_bytes(group)

    @property
    def used(self) -> int:
        """The number of keys, of all tables, that the passes use."""
        return int(self.counts_RT.sum())

    def index_of(self, place: int, uses: Int64s) -> Int64s:
        """Return the index of the first use of each row (n,) of a table, R for NEVER, and count the rows.

        Raises StoreError for a pass that uses none of its keys.
        """
        index = self.uses_R.searchsorted(uses)
        known = np.append(self.uses_R, NEVER)[index] == uses
        if not np.all(known):
            raise self._other(place, int(uses[int(np.argmin(known))]), 0)
        self._arrived_RT[:, place] += np.bincount(index, minlength=self.uses_R.size + 1)[:-1]
        return index

    def check(self, place: int) -> None:
        """Raise StoreError if other rows of a table arrived than were counted; when all have arrived."""
        wrong = np.nonzero(self._arrived_RT[:, place] != self.counts_RT[:, place])[0]
        if wrong.size:
            raise self._other(place, int(self.uses_R[wrong[0]]), int(self.counts_RT[wrong[0], place]))

    def _other(self, place: int, use: int, count: int) -> StoreError:
        return StoreError(
            f"pass {use} was said to use {count:,} keys of table {self.group.tables[place].name!r} first, and others "
            "came: the key sets changed meanwhile"
        )


class Slice:
    """Rows of all groups that become one segment."""

    def __init__(
        self,
        orders: Sequence[RowOrder],
        rows: Sequence[int],
        num_bytes: int,
        folder: Path,
        what: str,
        memory_bytes: int,
        counters: Counters,
    ) -> None:
        """Take at most ``rows`` rows of each group, and ``num_bytes`` bytes of entries in all.

        ``folder``, ``what``, ``memory_bytes`` and ``counters`` are those of ``ExternalSorter``.
        """
        self._remaining = num_bytes
        self._files = ExitStack()
        self._groups = [
            _GroupSlice(
                order,
                max(1, most),
                self._files.enter_context(
                    ExternalSorter(
                        ["<i8", ("<f4", (order.entry_bytes - KEY_BYTES) // 4)], folder, what, memory_bytes, counters
                    )
                ),
            )
            for order, most in zip(orders, rows, strict=True)
        ]

    def close(self) -> None:
        """Forget all rows."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def room(self, group: int) -> int:
        """Return how many rows of a group it takes yet."""
        one = self._groups[group]
        return min(max(0, self._remaining) // one.order.entry_bytes, one.most - one.rows)

    def put(self, group: int, place: int, keys: Int64s, rows: Floats, uses: Int64s) -> None:
        """Take rows (n, W + 1) of one table, at most ``room``; their last word is their last change.

        Rows must come in the order (table, hash). Raises StoreFullError, and StoreError for other first uses than were
        counted.
        """
        one = self._groups[group]
        one.put(place, keys, rows, uses)
        flush_largest([group.sorter for group in self._groups])
        self._remaining -= keys.size * one.order.entry_bytes

    def segment(self, layout: Layout, progress: Callable[[str, int], None]) -> NewSegment:
        """Return the segment of all rows that it has."""
        layouts = tuple(layout(one.order.group, one.ranges()) for one in self._groups)

        def blocks() -> Iterator[MovedBlock]:
            for one, of_group in zip(self._groups, layouts, strict=True):
                chunks = ((keys, rows) for _, keys, rows in one.sorter.sorted(of_group.block_rows))
                for block in moved_blocks_of(one.order.group, of_group, chunks):
                    progress("write", block[3].size)
                    yield block
                one.sorter.close()

        return NewSegment(layouts, [one.oldest < one.newest for one in self._groups], blocks())


class _GroupSlice:
    """The rows of one group in a slice. Shapes: R first uses and NEVER after them."""

    def __init__(self, order: RowOrder, most: int, sorter: ExternalSorter) -> None:
        self.order, self.most, self.sorter = order, most, sorter
        self.rows = 0
        self.oldest, self.newest = (1 << 32) - 1, 0
        """The least and the greatest last change."""
        width_R = np.append(np.minimum(order.counts_RT.sum(axis=1), most), most)
        self._start_R = np.cumsum(width_R) - width_R
        """The least number of a place for each first use: places need not be dense, only far enough apart."""
        self._width_R = width_R
        self._shift = np.uint64(64 - int(width_R.sum()).bit_length())
        """The left shift that moves place numbers to the highest bits, which a sorter splits by."""
        self._counts_RT = np.zeros((width_R.size, len(order.group.tables)), np.int64)

    def put(self, place: int, keys: Int64s, rows: Floats, uses: Int64s) -> None:
        """Take rows of one table."""
        changed = rows[:, -1].view(np.uint32)
        self.oldest, self.newest = min(self.oldest, int(changed.min())), max(self.newest, int(changed.max()))
        index = self.order.index_of(place, uses)
        by_use = np.argsort(index, kind="stable")
        counts_R = np.bincount(index, minlength=self._start_R.size)
        begin_R = self._start_R + self._counts_RT.sum(axis=1)
        self._counts_RT[:, place] += counts_R
        if np.any(self._counts_RT.sum(axis=1) > self._width_R):
            self.order.check(place)
        first_R = np.cumsum(counts_R) - counts_R
        numbers = np.empty(index.size, np.uint64)
        numbers[by_use] = (begin_R - first_R)[index[by_use]] + np.arange(index.size)
        self.sorter.add(numbers << self._shift, keys, rows)
        self.rows += keys.size

    def ranges(self) -> list[Range]:
        """Return the ranges of all rows."""
        uses = np.append(self.order.uses_R, NEVER).tolist()
        counts = zip(uses, self._counts_RT.tolist(), strict=True)
        return [Range(next_use=use, table_rows=tuple(rows)) for use, rows in counts if any(rows)]
