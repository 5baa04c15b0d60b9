"""How many rows of each pass wait how long: counted once a training, and all that planning needs of the keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from tiercache.kernels.cpu.slots import count_gaps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tiercache.planning.next_use import Uses
    from tiercache.planning.positions import Positions
    from tiercache.planning.schedule import Schedule

    Int32s = NDArray[np.int32]


class GapRows(NamedTuple):
    """Rows of one group by gap: N gaps that occur, T tables."""

    gap_N: Int32s
    """Ascending."""
    rows_NT: Int32s
    """Of each table, or (N, 1) of all tables together."""


@dataclass(frozen=True, slots=True)
class PassCounts:
    """The rows of one pass by group, counted."""

    next_G: tuple[GapRows, ...]
    """By the passes to their next use, table by table."""
    prev_G: tuple[GapRows, ...]
    """By the passes since their last use, all tables together."""

    @classmethod
    def of(cls, positions: Positions, next_TN: NDArray[np.int64], prev_TN: NDArray[np.int64]) -> PassCounts:
        """Take the rows of each of all tables by gap: (tables, longest gap + 1)."""
        spans = [
            slice(positions.first_table(g), positions.first_table(g) + len(group.tables))
            for g, group in enumerate(positions.groups)
        ]
        return cls(
            tuple(_present(next_TN[span]) for span in spans),
            tuple(_present(prev_TN[span].sum(axis=0, keepdims=True)) for span in spans),
        )


class ReuseCounts:
    """Counts of any pass: where the order repeats, those of a sub-dataset are kept; else those of two epochs.

    Thread-safe: at worst, two threads that ask for a pass at the same time both count it.
    """

    def __init__(self, schedule: Schedule, positions: Positions, uses_of: Callable[[int], Uses]) -> None:
        """``uses_of(epoch)`` gives the uses of an epoch; the keys of a pass are gone through when it is asked for."""
        self._schedule, self._positions, self._uses_of = schedule, positions, uses_of
        self._counts: dict[int, PassCounts] = {}

    @classmethod
    def counted(cls, schedule: Schedule, positions: Positions, counts: Sequence[PassCounts]) -> ReuseCounts:
        """Return what others counted, of each sub-dataset; for an order that repeats."""
        assert schedule.repeats, "a seeded order has counts of every epoch"
        made = cls(schedule, positions, _missing)
        made._counts.update(enumerate(counts))
        return made

    def of(self, pass_index: int) -> PassCounts:
        """Return the counts of a pass."""
        name = self._schedule.sub_dataset_of(pass_index) if self._schedule.repeats else pass_index
        counts = self._counts.get(name)
        if counts is None:
            first = (
                0 if self._schedule.repeats else (self._schedule.epoch_of(pass_index) - 1) * self._schedule.num_passes
            )
            for old in [v for v in list(self._counts) if v < first]:
                self._counts.pop(old, None)
            counts = self._counts[name] = self._count(pass_index)
        return counts

    def _count(self, pass_index: int) -> PassCounts:
        uses, positions = self._uses_of(self._schedule.epoch_of(pass_index)), self._positions
        p, tables = self._schedule.sub_dataset_of(pass_index), range(len(positions.tables))
        next_TN, prev_TN = np.zeros((2, len(tables), self._schedule.longest_gap + 1), dtype=np.int64)
        for table in tables:
            span = slice(positions.start(p, table), positions.start(p, table + 1))
            count_gaps(uses.next_gap[p][span], self._schedule.longest_gap, next_TN[table])
            count_gaps(uses.prev_gap[p][span], self._schedule.longest_gap, prev_TN[table])
        return PassCounts.of(positions, next_TN, prev_TN)


def _present(rows_TN: NDArray[np.int64]) -> GapRows:
    """Leave out the gaps that no row has."""
    gap_N = np.flatnonzero(rows_TN.any(axis=0))
    return GapRows(gap_N.astype(np.int32), np.ascontiguousarray(rows_TN[:, gap_N].T, dtype=np.int32))


def _missing(_epoch: int) -> NoReturn:
    raise AssertionError("all passes were counted")
