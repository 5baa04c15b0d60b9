"""Requests: the rows of one batch, each once, in the order in which their owners are asked for them. On the host.

Legend as in `stretches`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tiercache.kernels.cpu.gathering import check_ids
from tiercache.kernels.cpu.sorting import SortBuffers, sort_slots
from tiercache.kernels.cpu.unique import BITS_PER_ENTRY, lay_out, unique_positions, unique_slots
from tiercache.ranks.stretches import exclusive

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.ranks.stretches import Stretches
    from tiercache.values.ids import FeatureIds


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What a batch asks of every owner."""

    addresses: NDArray[np.int32]
    """In wire order: the position of each row among those of its owner's group."""
    counts_WS: NDArray[np.int64]
    """Addresses for each section of each owner."""
    slots_U: NDArray[np.int32]
    """Where each unique row stands among the rows of its group."""
    num_rows_G: NDArray[np.int64]
    """Unique rows of each group."""
    mirrored: tuple[tuple[int, int, NDArray[np.int32]], ...]
    """(table, first slot, local ids): rows that are looked up in a mirror."""
    rows_R: NDArray[np.int64]
    """Rows of each run."""
    slot_R: NDArray[np.int64]
    """The first slot of each run."""

    @property
    def num_unique(self) -> int:
        """U."""
        return int(self.slots_U.size)

    def span(self, run: int) -> slice:
        """Return the slots of a run."""
        first = int(self.slot_R[run])
        return slice(first, first + int(self.rows_R[run]))


class Requester:
    """Makes the requests of batches; keeps its scratch from batch to batch. On one thread at a time."""

    def __init__(self) -> None:
        self._sorting = SortBuffers()
        self._bits = np.zeros(0, dtype=np.uint64)
        self._scratch: dict[str, NDArray[np.int32]] = {}

    def request(
        self, stretches: Stretches, ids: Mapping[str, FeatureIds], tables: Mapping[str, str], where: str
    ) -> tuple[Request, dict[str, FeatureIds]]:
        """Return the request of a batch, and its ids as indices of unique rows.

        tables: by feature. Raises IndexError for a local id that its table does not have in the pass, which ``where``
        names: as a lookup does.
        """
        names = sorted(ids, key=lambda name: stretches.table_of[tables[name]])
        table_F = np.array([stretches.table_of[tables[name]] for name in names], dtype=np.int64)
        starts = np.zeros(len(names) + 1, dtype=np.int64)
        np.cumsum([ids[name].num_ids for name in names], out=starts[1:])
        joined = self._take("joined", int(starts[-1]))
        np.concatenate([ids[name].ids for name in names] or [joined], out=joined)
        _check(joined, starts, stretches.rows_T[table_F], names, tables, where)
        unique = self._take("unique", joined.size)
        inverse = np.empty(joined.size, dtype=np.int32)  # becomes the batch's ids
        begin_K, end_K = np.zeros_like(stretches.low_K), np.zeros_like(stretches.low_K)
        num_unique = 0
        for first, end in stretches.sets:
            low, high = np.searchsorted(table_F, [first, end]).tolist()
            entries = slice(int(starts[low]), int(starts[high]))
            for f in range(low, high):
                joined[starts[f] : starts[f + 1]] += np.int32(stretches.base_T[table_F[f]])
            room, numbers = unique[num_unique : num_unique + entries.stop - entries.start], inverse[entries]
            rows = int(stretches.rows_T[first:end].sum())
            room = room[: self._unique(joined[entries], rows, room, numbers)]
            if num_unique:
                numbers += num_unique
            mine = slice(*np.searchsorted(stretches.by_table_K, [first, end]).tolist())
            k = stretches.table_order_K[mine]
            base = stretches.base_T[stretches.table_K[k]]
            begin_K[k] = num_unique + np.searchsorted(room, base + stretches.low_K[k])
            end_K[k] = num_unique + np.searchsorted(room, base + stretches.high_K[k])
            num_unique += room.size
        made = _lay_out(stretches, unique[:num_unique], begin_K, end_K)
        return made, {name: replace(ids[name], ids=inverse[starts[f] : starts[f + 1]]) for f, name in enumerate(names)}

    def _unique(
        self, positions: NDArray[np.int32], rows: int, unique: NDArray[np.int32], inverse: NDArray[np.int32]
    ) -> int:
        """Write the positions once each, ascending, and which of them each entry has; return how many they are."""
        if rows > BITS_PER_ENTRY * positions.size:
            return unique_slots(sort_slots(positions, rows, self._sorting), unique, inverse)
        words = -(-rows // 64)
        if self._bits.size < words:
            self._bits = np.zeros(words, dtype=np.uint64)
        return unique_positions(positions, rows, self._bits, self._take("before", words), unique, inverse)

    def _take(self, name: str, size: int) -> NDArray[np.int32]:
        """Return scratch of undefined content."""
        if name not in self._scratch or self._scratch[name].size < size:
            self._scratch[name] = np.empty(size + size // 8, dtype=np.int32)
        return self._scratch[name][:size]


def _lay_out(
    stretches: Stretches, unique: NDArray[np.int32], begin_K: NDArray[np.int64], end_K: NDArray[np.int64]
) -> Request:
    """Find out where each row goes and stands."""
    s, rows_K = stretches, end_K - begin_K
    shift_K = s.first_K - s.low_K - s.base_T[s.table_K]
    wire_K = exclusive(rows_K)
    num_groups = s.num_whole_groups
    by_slot = s.slot_order
    num_rows_G = np.bincount(s.group_K[by_slot], rows_K[by_slot], num_groups).astype(np.int64)
    slot_K = np.empty_like(rows_K)
    slot_K[by_slot] = exclusive(rows_K[by_slot]) - exclusive(num_rows_G)[s.group_K[by_slot]]
    slot_K = slot_K[s.counted_K]
    addresses = np.empty(int(rows_K.sum()), dtype=np.int32)
    slots = np.empty(unique.size, dtype=np.int32)
    lay_out(unique, begin_K, end_K, shift_K, wire_K, np.where(s.is_first_K, slot_K, -1), addresses, slots)
    num_sections = 2 * s.num_groups
    counts = np.bincount(s.rank_K * num_sections + s.section_K, rows_K, s.num_ranks * num_sections)
    mirrored = s.mirrored_k[rows_K[s.mirrored_k] > 0].tolist()
    local = [unique[begin_K[k] : end_K[k]] - np.int32(s.base_T[s.table_K[k]]) for k in mirrored]
    runs = s.runs
    return Request(
        addresses=addresses,
        counts_WS=counts.astype(np.int64).reshape(s.num_ranks, num_sections),
        slots_U=slots,
        num_rows_G=num_rows_G,
        mirrored=tuple((int(s.table_K[k]), int(slot_K[k]), one) for k, one in zip(mirrored, local, strict=True)),
        rows_R=np.add.reduceat(rows_K, runs.first_R) if runs.first_R.size else rows_K,
        slot_R=slot_K[runs.first_R],
    )


def _check(
    ids: NDArray[np.int32],
    starts: NDArray[np.int64],
    limits: NDArray[np.int64],
    names: Sequence[str],
    tables: Mapping[str, str],
    where: str,
) -> None:
    bad = check_ids(ids, starts, limits)
    if bad >= 0:
        f = int(np.searchsorted(starts, bad, side="right")) - 1
        raise IndexError(
            f"feature {names[f]!r} has local id {int(ids[bad])} at entry {bad - int(starts[f])} of the batch, and "
            f"table {tables[names[f]]!r} has local ids 0 to {int(limits[f]) - 1} in {where}: use batches of the pass "
            "that is being trained"
        )
