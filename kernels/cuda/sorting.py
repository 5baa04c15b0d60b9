"""Bring the entries of a step that touch one row together, in batch order, on a CUDA device, for all groups at once."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from tiercache.kernels.cuda.launch import Device, launch_parts, struct, view

_PART = struct("SortPart", "sorting")
_TASK = 256  # entries
_MOST = (1 << 31) - 1


def sort_groups(device: Device, groups: Sequence[tuple[Any, int]]) -> list[Any]:
    """Return, for the slots (E,) and the number of slots of each group, `kernels.cpu.sorting.sort_slots` of them.

    A group has fewer than 2^31 entries. Nothing waits for the device, so a slot that is not in [0, num_slots) is no
    error here: its entries come last, as of slot `num_slots`, and updates leave them out. One sort serves all groups
    that have fewer than 2^31 slots together.
    """
    pairs, some, slots = list[Any](), list[tuple[Any, int]](), 0
    for group in groups:
        if slots + group[1] > _MOST:
            pairs += _sort(device, some)
            some, slots = [], 0
        some.append(group)
        slots += group[1] + 1
    return pairs + _sort(device, some)


def _sort(device: Device, groups: Sequence[tuple[Any, int]]) -> list[Any]:
    seen = [view(device, "slots", slots, np.int32) for slots, _ in groups]
    sizes = [one.size for one in seen]
    if max(sizes, default=0) > _MOST:
        raise ValueError(f"a step of {max(sizes):,} entries is too large: at most {_MOST:,} fit.")
    *firsts, total = accumulate(sizes, initial=0)
    pairs = [device.empty(size, np.uint64) for size in sizes]
    if total == 0:
        return pairs
    bases = accumulate((num_slots + 1 for _, num_slots in groups), initial=0)
    parts = [
        (one.address, view(device, "pairs", to, np.uint64, written=True).address, one.size, first, base, num_slots)
        for one, to, first, base, (_, num_slots) in zip(seen, pairs, firsts, bases, groups, strict=False)
    ]
    tasks = [-(-size // _TASK) for size in sizes]
    keys = device.empty(total, np.int32)
    launch_parts(device, "sorting.make_keys", _PART, parts, tasks, view(device, "keys", keys, np.int32).address)
    ordered, order = device.sort(keys)
    sorted_at = view(device, "keys", ordered, np.int32).address, view(device, "order", order, np.int64).address
    launch_parts(device, "sorting.make_pairs", _PART, parts, tasks, *sorted_at)
    return pairs
