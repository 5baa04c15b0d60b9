"""Reuse: how often the keys of a dataset recur, how far apart, and how skewed they are; one sweep of all keys."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.kernels.cpu.slots import count_distances
from tiercache.planning.next_use import NextUses, distances_of
from tiercache.planning.row_offsets import KEYS_PER_RANGE, RowOffsets, key_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tiercache.planning.schedule import Schedule

    Int32s = NDArray[np.int32]
    Int64s = NDArray[np.int64]


class DistanceRows(NamedTuple):
    """Rows of one group by distance: N distances that occur, T tables."""

    distance_N: Int32s
    """Ascending."""
    rows_NT: Int32s
    """Rows of each table, or (N, 1) of all tables together."""


@dataclass(frozen=True, slots=True)
class PassCounts:
    """The rows of one pass by group, counted."""

    next_G: tuple[DistanceRows, ...]
    """By the passes to their next use, table by table."""
    prev_G: tuple[DistanceRows, ...]
    """By the passes since their last use, all tables together."""

    @classmethod
    def of(cls, positions: RowOffsets, next_TN: NDArray[np.int64], prev_TN: NDArray[np.int64]) -> PassCounts:
        """Take the rows of each of all tables by distance: (tables, longest distance + 1)."""
        bounds = np.cumsum([0, *(len(group.tables) for group in positions.groups)]).tolist()
        spans = [slice(*pair) for pair in itertools.pairwise(bounds)]
        return cls(
            tuple(_present(next_TN[span]) for span in spans),
            tuple(_present(prev_TN[span].sum(axis=0, keepdims=True)) for span in spans),
        )


class ReuseCounts:
    """Counts of any pass; keeps those of each sub-dataset, or of two epochs. Two threads may both count one pass."""

    def __init__(
        self, schedule: Schedule, positions: RowOffsets, next_uses_of: Callable[[int], NextUses] | None,
        counts: Sequence[PassCounts] = (),
    ) -> None:  # fmt: skip
        """``next_uses_of(epoch)`` returns the next uses of an epoch.

        None: ``counts`` are those of each sub-dataset, in an order that repeats.
        """
        assert schedule.repeats or next_uses_of, "a seeded order has counts of every epoch"
        self.schedule, self.positions, self._uses_of = schedule, positions, next_uses_of
        self._counts = dict(enumerate(counts))

    def of(self, pass_index: int) -> PassCounts:
        """Return the counts of a pass."""
        schedule, name, first = self.schedule, pass_index, 0
        if schedule.repeats:
            name = schedule.sub_dataset_of(pass_index)
        else:
            first = (schedule.epoch_of(pass_index) - 1) * schedule.num_passes
        counts = self._counts.get(name)
        if counts is None:
            for old in [v for v in list(self._counts) if v < first]:
                self._counts.pop(old, None)
            counts = self._counts[name] = self._count(pass_index)
        return counts

    def _count(self, pass_index: int) -> PassCounts:
        assert self._uses_of is not None, "all passes were counted"
        uses, p = self._uses_of(self.schedule.epoch_of(pass_index)), self.schedule.sub_dataset_of(pass_index)
        tables, longest = len(self.positions.tables), self.schedule.longest_distance
        next_TN, prev_TN = np.zeros((2, tables, longest + 1), dtype=np.int64)
        for table in range(tables):
            span = slice(*self.positions.starts_PT[p, table : table + 2])
            count_distances(uses.next_distance[p][span], longest, next_TN[table])
            count_distances(uses.prev_distance[p][span], longest, prev_TN[table])
        return PassCounts.of(self.positions, next_TN, prev_TN)


def _present(rows_TN: NDArray[np.int64]) -> DistanceRows:
    """Drop the distances that no row has."""
    distance_N = np.flatnonzero(rows_TN.any(axis=0))
    return DistanceRows(distance_N.astype(np.int32), np.ascontiguousarray(rows_TN[:, distance_N].T, dtype=np.int32))


TOP_SHARE = 0.01
"""The share of the most frequent keys whose occurrences measure the skew of a table."""


@dataclass(frozen=True, slots=True)
class TableReuse:
    """One table over all passes."""

    keys: int
    occurrences: int
    """Occurrences of all keys in all samples; 0 if counts were not read."""
    top_share: float
    """The share of the occurrences that the most frequent ``TOP_SHARE`` of the keys have."""
    keys_in_N: Int64s
    """(P + 1,): keys by the number of passes that have them."""
    distance_N: Int64s
    """(longest distance + 1,): uses by the number of passes since the last use of the same key, around the schedule."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """The results of one sweep of all keys."""

    schedule: Schedule
    positions: RowOffsets
    counts: ReuseCounts
    tables: tuple[TableReuse, ...]
    kept_PT: Int64s
    """Rows of each sub-dataset and table that the previous pass also has."""

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        positions: RowOffsets,
        keys_of: Callable[[int, int], Int64s],
        counts_of: Callable[[int, int], Int64s] | None = None,
        *,
        keys_per_range: int = KEYS_PER_RANGE,
    ) -> Reuse:
        """Sweep the keys of an order that repeats, one hash range of one table at a time.

        keys_of(pass, table): keys in hash order; counts_of(pass, table): how often each occurs. Memory: as of
        ``key_ranges``, and 16 bytes for each pass, table and distance.
        """
        num_passes, num_tables, longest = positions.num_passes, len(positions.tables), schedule.longest_distance
        next_PTN, prev_PTN = np.zeros((2, num_passes, num_tables, longest + 1), dtype=np.int64)
        keys_TN = np.zeros((num_tables, num_passes + 1), dtype=np.int64)
        frequencies_T: list[Int64s] = [np.zeros((2, 0), dtype=np.int64) for _ in range(num_tables)]
        for found in key_ranges(positions, keys_of, keys_per_range=keys_per_range):
            t, distances = found.table, distances_of(found, schedule, 0)
            for p, (begin, end) in enumerate(itertools.pairwise(found.starts.tolist())):
                count_distances(distances[0][begin:end], longest, next_PTN[p, t])
                count_distances(distances[1][begin:end], longest, prev_PTN[p, t])
            keys_TN[t] += np.bincount(np.bincount(found.numbers), minlength=num_passes + 1)
            if counts_of is not None:
                sizes_P = np.diff(found.starts).tolist()
                counts = [
                    counts_of(p, t)[first : first + n]
                    for p, (first, n) in enumerate(zip(found.first_P, sizes_P, strict=True))
                ]
                totals = np.bincount(found.numbers, weights=np.concatenate(counts)).astype(np.int64)
                frequencies_T[t] = _merged(frequencies_T[t], totals)
        counts_P = [PassCounts.of(positions, next_PTN[p], prev_PTN[p]) for p in range(num_passes)]
        return cls(
            schedule,
            positions,
            ReuseCounts(schedule, positions, None, counts_P),
            tuple(
                TableReuse(int(keys.sum()), int(f[0] @ f[1]), _top_share(f), keys, prev_PTN[:, t].sum(axis=0))
                for t, (keys, f) in enumerate(zip(keys_TN, frequencies_T, strict=True))
            ),
            prev_PTN[:, :, 1],
        )

    @property
    def kept_bytes(self) -> int:
        """Bytes of the rows that stay on the device at the switches of an epoch, the last to the first among them."""
        return int(self.kept_PT.sum(axis=0) @ [table.row_bytes for table in self.positions.tables])


def _merged(frequencies: Int64s, totals: Int64s) -> Int64s:
    """Return (2, distinct numbers of occurrences): each number, ascending, and how many keys have it."""
    values, keys = np.unique(totals, return_counts=True)
    every, place = np.unique(np.concatenate([frequencies[0], values]), return_inverse=True)
    return np.stack([every, np.bincount(place, weights=np.concatenate([frequencies[1], keys])).astype(np.int64)])


def _top_share(frequencies: Int64s) -> float:
    """Return the share of occurrences of the most frequent ``TOP_SHARE`` of the keys, of one key at least."""
    often, keys = frequencies[:, ::-1]
    total = int(often @ keys)
    if not total:
        return 0.0
    top = max(1, round(TOP_SHARE * int(keys.sum())))
    taken = np.diff(np.minimum(np.cumsum(keys), top), prepend=0)
    return int(often @ taken) / total
