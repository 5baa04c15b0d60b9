"""When each key of each pass is used next, and was used last: exact, one hash range at a time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tiercache.kernels.cpu.key_to_index import KeyToIndex
from tiercache.kernels.cpu.next_use import hash_range_bound, sweep_uses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tiercache.planning.positions import Positions
    from tiercache.planning.schedule import Schedule

KEYS_PER_RANGE = 1 << 20


@dataclass(frozen=True, slots=True)
class Uses:
    """The gaps of one epoch, by sub-dataset: passes to the next use of each position, and back to the last one.

    ``next_gap[p]`` and ``prev_gap[p]`` are int32 (positions of sub-dataset p,). A gap is at least 1 and below twice the
    number of sub-datasets. A last use before pass 0 means that the key was never used.
    """

    next_gap: tuple[NDArray[np.int32], ...]
    prev_gap: tuple[NDArray[np.int32], ...]

    @property
    def longest(self) -> int:
        """The longest gap possible, as of `longest_gap`."""
        return longest_gap(len(self.next_gap))


def longest_gap(num_passes: int) -> int:
    """Return the longest gap possible: twice the number of passes, less one."""
    return max(1, 2 * num_passes - 1)


def find_uses(
    schedule: Schedule,
    epoch: int,
    positions: Positions,
    keys_of: Callable[[int, int], NDArray[np.int64]],
    out: NDArray[np.int32],
    *,
    keys_per_range: int = KEYS_PER_RANGE,
) -> Uses:
    """Find every gap of ``epoch`` and write them into ``out``.

    keys_of(pass, table): int64 keys in hash order, ``table`` an index into ``positions.tables``.
    out: int32 (2, all positions of all passes); the returned arrays are views of it.
    Memory: about ``keys_per_range`` keys of one table at a time, at most ``SWEPT_KEY_BYTES`` for each. Decides only;
    does no I/O but what ``keys_of`` and ``out`` do themselves.
    """
    orders = [schedule.order(epoch + step) for step in (-1, 0, 1)]
    uses = views_of(out, positions)
    for table, spec in enumerate(positions.tables):
        keys_P = [keys_of(p, table) for p in range(schedule.num_passes)]
        total = sum(keys.size for keys in keys_P)
        ranges = max(1, -(-total // keys_per_range))
        begins_P = [0] * len(keys_P)
        for r in range(1, ranges + 1):
            upper = (r << 64) // ranges
            ends_P = [keys.size if r == ranges else hash_range_bound(keys, spec.table_id, upper) for keys in keys_P]
            _one_range(
                keys_P,
                begins_P,
                ends_P,
                orders,
                uses,
                [positions.start(p, table) for p in range(len(keys_P))],
            )
            begins_P = ends_P
    return uses


def views_of(out: NDArray[np.int32], positions: Positions) -> Uses:
    """Cut ``out`` (2, all positions) into the arrays of each pass."""
    first_P = np.concatenate([[0], np.cumsum([positions.num_rows(p) for p in range(positions.num_passes)])])
    cuts = [slice(int(a), int(b)) for a, b in itertools.pairwise(first_P)]
    return Uses(tuple(out[0, c] for c in cuts), tuple(out[1, c] for c in cuts))


def _one_range(
    keys_P: Sequence[NDArray[np.int64]],
    begins_P: Sequence[int],
    ends_P: Sequence[int],
    orders: Sequence[NDArray[np.int64]],
    uses: Uses,
    starts_P: Sequence[int],
) -> None:
    sizes = np.array([e - b for b, e in zip(begins_P, ends_P, strict=True)], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    if starts[-1] == 0:
        return
    names = KeyToIndex(int(sizes.max()))
    numbers = np.empty(starts[-1], dtype=np.int32)
    for p, keys in enumerate(keys_P):
        names.insert(np.ascontiguousarray(keys[begins_P[p] : ends_P[p]]), numbers[starts[p] : starts[p + 1]])
    next_gap, prev_gap = np.empty_like(numbers), np.empty_like(numbers)
    before, order, after = orders
    sweep_uses(numbers, starts, names.count, before, order, after, next_gap, prev_gap)
    for p, first in enumerate(starts_P):
        to = slice(first + begins_P[p], first + ends_P[p])
        uses.next_gap[p][to] = next_gap[starts[p] : starts[p + 1]]
        uses.prev_gap[p][to] = prev_gap[starts[p] : starts[p + 1]]
