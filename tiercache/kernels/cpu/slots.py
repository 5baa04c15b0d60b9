"""Orders of positions and slots for pass switches: serial kernels for the reader thread."""

import numpy as np

from tiercache.kernels.arrays import I4, I8, Written
from tiercache.kernels.cpu.compile import serial


@serial
def stable_order_by_distance(distance_K: I4, limit: int, order_K: Written[I4]) -> I8:
    """Write to `order_K` the positions sorted by `min(distance, limit)`, equal ones in order: a counting sort.

    Returns int64 (limit + 2,): at [d] the first index of distance d, at [limit + 1] the number of positions.
    """
    starts = np.zeros(limit + 2, np.int64)
    for i in range(distance_K.size):
        g = distance_K[i]
        g = min(g, limit)
        starts[g + 1] += 1
    for g in range(1, starts.size):
        starts[g] += starts[g - 1]
    for i in range(distance_K.size):
        g = distance_K[i]
        g = min(g, limit)
        order_K[starts[g]] = i
        starts[g] += 1
    for g in range(starts.size - 1, 0, -1):
        starts[g] = starts[g - 1]
    starts[0] = 0
    return starts


@serial
def assign_slots(
    old_slots: I4,
    old_next_distance: I4,
    dump_order: I4,
    new_prev_distance: I4,
    load_order: I4,
    spare_slots: Written[I4],
    new_slots: Written[I4],
) -> int:
    """Assign slots to the rows of the next pass: kept rows stay, others take spare slots, then those of departing rows.

    old_slots (K,): slots of the pass now on the device; old_next_distance (K,): 1 means kept; dump_order (K,): its rows
    by next distance, so that kept ones come first. new_prev_distance (K',): 1 means kept; load_order (K',): the next
    pass's rows, kept ones first, in the same order as in dump_order; new_slots (K',) is written. The other rows take
    spare slots while there are any, then slots of departing rows in dump order: the first loaded rows go to free slots,
    or to slots whose rows are dumped first. spare_slots is a stack of unused slots, filled from index 0; its used
    length is passed in and returned as `spare_slots[-1]`; with the slots of departing rows there must be one for each
    row. Returns the number of kept rows, or -1 if the two sides differ.
    """
    kept = 0
    while kept < load_order.size and new_prev_distance[load_order[kept]] == 1:
        if kept == dump_order.size or old_next_distance[dump_order[kept]] != 1:
            return -1
        new_slots[load_order[kept]] = old_slots[dump_order[kept]]
        kept += 1
    if kept < dump_order.size and old_next_distance[dump_order[kept]] == 1:
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
def take(values: I4, places: I4, out: Written[I4]) -> None:
    """Write `values[places[i]]` to `out[i]`; `out` may be `places`."""
    for i in range(places.size):
        out[i] = values[places[i]]


@serial
def count_distances(distance_K: I4, limit: int, counts: Written[I8]) -> None:
    """Add to `counts` (limit + 1) the number of each `min(distance, limit)`."""
    for i in range(distance_K.size):
        g = distance_K[i]
        counts[g if g < limit else limit] += 1
