"""What a pass switch moves, as orders of positions and slots: serial kernels for the reader thread."""

import numpy as np
from numpy.typing import NDArray

from tiercache.kernels.arrays import expect
from tiercache.kernels.cpu.jit import serial

__all__ = ["assign_slots", "count_gaps", "stable_order_by_gap", "take"]


@serial
def _stable_order_by_gap(gap_K, limit, counts, order_K):  # type: ignore[no-untyped-def]
    counts[:] = 0
    for i in range(gap_K.size):
        g = gap_K[i]
        g = min(g, limit)
        counts[g + 1] += 1
    for g in range(1, counts.size):
        counts[g] += counts[g - 1]
    for i in range(gap_K.size):
        g = gap_K[i]
        g = min(g, limit)
        order_K[counts[g]] = i
        counts[g] += 1
    for g in range(counts.size - 1, 0, -1):
        counts[g] = counts[g - 1]
    counts[0] = 0


@serial
def _assign_slots(old_slots, old_next_gap, dump_order, new_prev_gap, load_order, spare_slots, new_slots):  # type: ignore[no-untyped-def]
    kept = 0
    while kept < load_order.size and new_prev_gap[load_order[kept]] == 1:
        if kept == dump_order.size or old_next_gap[dump_order[kept]] != 1:
            return -1
        new_slots[load_order[kept]] = old_slots[dump_order[kept]]
        kept += 1
    if kept < dump_order.size and old_next_gap[dump_order[kept]] == 1:
        return -1
    num_spare, departed = spare_slots[-1], kept
    for i in range(kept, load_order.size):
        if num_spare > 0:
            num_spare -= 1
            new_slots[load_order[i]] = spare_slots[num_spare]
        else:
            new_slots[load_order[i]] = old_slots[dump_order[departed]]
            departed += 1
    for i in range(departed, dump_order.size):
        spare_slots[num_spare] = old_slots[dump_order[i]]
        num_spare += 1
    spare_slots[-1] = num_spare
    return kept


@serial
def _take(values, places, out):  # type: ignore[no-untyped-def]
    for i in range(places.size):
        out[i] = values[places[i]]


@serial
def _count_gaps(gap_K, limit, counts):  # type: ignore[no-untyped-def]
    for i in range(gap_K.size):
        g = gap_K[i]
        counts[g if g < limit else limit] += 1


def stable_order_by_gap(gap_K: NDArray[np.int32], limit: int, order_K: NDArray[np.int32]) -> NDArray[np.int64]:
    """Write to `order_K` the positions sorted by `min(gap, limit)`, equal gaps in position order: a counting sort.

    Returns int64 (limit + 2,): at [g] the first place of gap g, at [limit + 1] the number of positions.
    """
    starts = np.empty(limit + 2, np.int64)
    _stable_order_by_gap(
        expect("gap_K", gap_K, np.int32), limit, starts, expect("order_K", order_K, np.int32, written=True)
    )
    return starts


def assign_slots(
    old_slots: NDArray[np.int32],
    old_next_gap: NDArray[np.int32],
    dump_order: NDArray[np.int32],
    new_prev_gap: NDArray[np.int32],
    load_order: NDArray[np.int32],
    spare_slots: NDArray[np.int32],
    new_slots: NDArray[np.int32],
) -> int:
    """Give the rows of the next pass their slots: kept rows stay, the others take spares, then what departs.

    old_slots (K,): slots of the pass now on the device; old_next_gap (K,): 1 means kept; dump_order (K,): its rows
    by next gap, so that kept ones come first. new_prev_gap (K',): 1 means kept; load_order (K',): the next pass's
    rows, kept ones first, in the order in which they meet those of dump_order; new_slots (K',) is written. The others
    take spare slots as long as there are any, then those of departing rows in dump order: what is loaded first goes
    where nothing was, or where what stood is dumped first. spare_slots is a stack of slots in no use, filled from
    index 0; its used length comes in as `spare_slots[-1]` and goes out there; with those that depart there must be one
    for each row. Returns the number of kept rows, or -1 where the two sides differ.
    """
    return int(
        _assign_slots(
            expect("old_slots", old_slots, np.int32),
            expect("old_next_gap", old_next_gap, np.int32),
            expect("dump_order", dump_order, np.int32),
            expect("new_prev_gap", new_prev_gap, np.int32),
            expect("load_order", load_order, np.int32),
            expect("spare_slots", spare_slots, np.int32, written=True),
            expect("new_slots", new_slots, np.int32, written=True),
        )
    )


def take(values: NDArray[np.int32], places: NDArray[np.int32], out: NDArray[np.int32]) -> None:
    """Write `values[places[i]]` to `out[i]`."""
    _take(
        expect("values", values, np.int32),
        expect("places", places, np.int32),
        expect("out", out, np.int32, written=True),
    )


def count_gaps(gap_K: NDArray[np.int32], limit: int, counts: NDArray[np.int64]) -> None:
    """Add to `counts` (limit + 1) how often each `min(gap, limit)` occurs."""
    _count_gaps(expect("gap_K", gap_K, np.int32), limit, expect("counts", counts, np.int64, written=True))
