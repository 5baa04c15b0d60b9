"""The next use and the last use of each key of each pass: exact, one hash range at a time."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tiercache.kernels.cpu.hashing import hash_keys
from tiercache.kernels.cpu.key_sweeps import sweep_uses
from tiercache.planning.row_offsets import KEYS_PER_RANGE, KeyRange, RowOffsets, key_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from tiercache.planning.schedule import Schedule

    Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NextUses:
    """The distances of one epoch, by sub-dataset: passes to the next use of each row, and since its last use.

    ``next_distance[p]`` and ``prev_distance[p]`` are int32 (positions of sub-dataset p,). A distance is at
    least 1 and below twice the number of sub-datasets. A last use before pass 0 means that the key was never used.
    """

    next_distance: tuple[NDArray[np.int32], ...]
    prev_distance: tuple[NDArray[np.int32], ...]

    @property
    def longest(self) -> int:
        """The longest possible distance, see `longest_distance`."""
        return longest_distance(len(self.next_distance))


def longest_distance(num_passes: int) -> int:
    """Return the longest possible distance: twice the number of passes, less one."""
    return max(1, 2 * num_passes - 1)


def distances_of(found: KeyRange, schedule: Schedule, epoch: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the passes to the next use of each key in ``epoch``, and since its last one."""
    before, order, after = (schedule.order_of(epoch + step) for step in (-1, 0, 1))
    next_distance, prev_distance = np.empty_like(found.numbers), np.empty_like(found.numbers)
    sweep_uses(found.numbers, found.starts, found.keys.size, before, order, after, next_distance, prev_distance)
    return next_distance, prev_distance


def find_next_uses(
    schedule: Schedule,
    epoch: int,
    positions: RowOffsets,
    keys_of: Callable[[int, int], NDArray[np.int64]],
    out: NDArray[np.int32],
    *,
    keys_per_range: int = KEYS_PER_RANGE,
) -> NextUses:
    """Find every distance of ``epoch`` and write them into ``out``.

    keys_of(pass, table): int64 keys in hash order, ``table`` an index into ``positions.tables``.
    out: int32 (2, all positions of all passes); the returned arrays are views of it.
    Memory: about ``keys_per_range`` keys of one table at a time, at most ``SWEPT_KEY_BYTES`` for each. Decides only;
    the only I/O is in ``keys_of`` and ``out``.
    """
    uses = views_of(out, positions)
    for found in key_ranges(positions, keys_of, keys_per_range=keys_per_range):
        next_distance, prev_distance = distances_of(found, schedule, epoch)
        for p, (begin, end) in enumerate(itertools.pairwise(found.starts.tolist())):
            first = int(positions.starts_PT[p, found.table]) + found.first_P[p]
            uses.next_distance[p][first : first + end - begin] = next_distance[begin:end]
            uses.prev_distance[p][first : first + end - begin] = prev_distance[begin:end]
    return uses


def views_of(out: NDArray[np.int32], positions: RowOffsets) -> NextUses:
    """Cut ``out`` (2, all positions) into the arrays of each pass."""
    first_P = np.cumsum([0, *positions.starts_PT[:, -1]]).tolist()
    cuts = [slice(a, b) for a, b in itertools.pairwise(first_P)]
    return NextUses(tuple(out[0, c] for c in cuts), tuple(out[1, c] for c in cuts))


class FirstUses:
    """The first pass from ``start`` on that uses each key, as ``Store.rewrite`` needs it.

    Each epoch trains every sub-dataset, so every key of the dataset has one by the end of the next epoch.
    """

    def __init__(
        self,
        schedule: Schedule,
        positions: RowOffsets,
        keys_of: Callable[[int, int], Int64s],
        *,
        start: int = 0,
    ) -> None:
        """``keys_of(pass, table)``: keys in hash order."""
        whole = 0 if schedule.repeats else -start % schedule.num_passes
        passes = range(start, start + whole + schedule.num_passes)
        self._passes = [(pass_index, schedule.sub_dataset_of(pass_index)) for pass_index in reversed(passes)]
        self._positions, self._keys_of = positions, keys_of
        self._tables = {table.name: i for i, table in enumerate(positions.tables)}

    def counts(self, table_name: str) -> Mapping[int, int]:
        """Return the number of keys of a table that each pass uses first."""
        counts = Counter[int]()
        for _, first_K in self._unordered(table_name):
            passes, keys = np.unique(first_K, return_counts=True)
            counts.update(dict(zip(passes.tolist(), keys.tolist(), strict=True)))
        return counts

    def slices(self, table_name: str) -> Iterator[tuple[Int64s, Int64s]]:
        """Yield keys (n,) in hash order and their first passes (n,), one hash range at a time."""
        table_id = self._positions.tables[self._tables[table_name]].table_id
        for keys_K, first_K in self._unordered(table_name):
            order = np.argsort(hash_keys(keys_K, table_id))
            yield keys_K[order], first_K[order]

    def _unordered(self, table_name: str) -> Iterator[tuple[Int64s, Int64s]]:
        tables = [self._tables[table_name]]
        for found in key_ranges(self._positions, self._keys_of, tables=tables):
            first_K = np.empty(found.keys.size, dtype=np.int64)
            for pass_index, p in self._passes:  # the last one first
                first_K[found.numbers[found.starts[p] : found.starts[p + 1]]] = pass_index
            yield found.keys, first_K


def count_keys(
    positions: RowOffsets, keys_of: Callable[[int, int], Int64s], *, keys_per_range: int = KEYS_PER_RANGE
) -> dict[str, int]:
    """Return the number of distinct keys by table's name. ``keys_of(pass, table)``: keys in hash order, read once."""
    counts = {table.name: 0 for table in positions.tables}
    for found in key_ranges(positions, keys_of, keys_per_range=keys_per_range):
        counts[positions.tables[found.table].name] += found.keys.size
    return counts
