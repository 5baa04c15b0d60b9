"""Bring the entries of a step that touch one row together, in batch order, on a CUDA device, for all groups at once."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from tiercache.kernels.arrays import I8
from tiercache.kernels.cuda.launch import Device, Part, launch_parts, struct, view

STRETCH = 64
"""Places of the order; what adds up a row's gradients counts in them, and its bits depend on them."""

_KEYS, _RUNS = struct("KeyPart", "sorting"), struct("RunPart", "sorting")
_TASK = 256  # entries
_TILE, _MOST_TILES = 1024, 4096
_MOST = (1 << 31) - 1
_MOST_ENTRIES = _MOST - 4096  # kernels count in int32, by tasks, beyond the last one


class Runs(NamedTuple):
    """The entries of a group in the order of their slots, those of one slot in batch order; a run has one slot.

    At ``address``: (E + 1,) uint64, slot << 32 | the first place of each run, after the last one E, then garbage;
    (E,) uint32, the entry at each place; (stretches + 1,) uint32, the run of each `STRETCH`-th place and, at the end,
    the number of runs.
    """

    memory: Any
    """The memory of these runs, and of others sorted with them."""
    address: int
    size: int
    """E."""
    slot_of: Any = None
    """For runs of positions: the slot of each, (positions,) int32."""

    @property
    def entries(self) -> int:
        """The address of the entries."""
        return self.address + 8 * (self.size + 1)

    @property
    def run_at(self) -> int:
        """The address of the runs of places."""
        return self.entries + 4 * self.size

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory, a multiple of 8."""
        return -(-(self.run_at - self.address + 4 * (-(-self.size // STRETCH) + 1)) // 8) * 8


class LookupPositions(NamedTuple):
    """The ids of some features: those of feature f are ``ids[starts[f]:starts[f + 1]]``, below ``limits[f]``.

    Their positions begin at ``bases[f]``. ids (E,) int32 are on the device.
    """

    ids: Any
    starts: I8
    bases: I8
    limits: I8


class _Group(NamedTuple):
    keys: list[tuple[int, int, int, int]]
    """Contiguous numbers of the group: their address and count; their keys are base + number, and base +
    limit from that on."""
    base: int
    """The key of slot 0."""


def sort_groups(device: Device, groups: Sequence[tuple[Sequence[Any], int]]) -> list[Runs]:
    """Return the runs of each group: of its slots (E,), which may be several arrays one after another.

    With the arrays of each group goes the number of its slots; a group has fewer than 2^31 - 4096 entries. Nothing
    waits for the device, so a slot that is not in [0, num_slots) is not an error: its entries come last, as of slot
    `num_slots`, and updates skip them. One sort serves all groups that have fewer than 2^31 slots together.
    """
    made = []
    for arrays, num_slots in groups:
        seen = [view(device, "slots", slots, np.int32) for slots in arrays]
        made.append((num_slots, [(one.address, one.size, 0, num_slots) for one in seen]))
    return _sort_together(device, made)


def sort_positions(device: Device, lookups: Sequence[LookupPositions]) -> list[Runs]:
    """Return the runs of the positions of ids, whose rows a step finds by a map of slots (`Runs.slot_of`).

    Of ids that lie on a device in the order of calls nothing is read, so one that is no id is no error here.
    """
    made = []
    for ids, starts, bases, limits in lookups:
        begin, cuts = view(device, "ids", ids, np.int32).address, starts.tolist()
        parts = [
            (begin + 4 * first, last - first, base, limit)
            for first, last, base, limit in zip(cuts, cuts[1:], bases.tolist(), limits.tolist(), strict=False)
            if first < last
        ]
        made.append((int((bases + limits).max(initial=0)), parts))
    return _sort_together(device, made)


def _sort_together(device: Device, groups: Sequence[tuple[int, list[tuple[int, int, int, int]]]]) -> list[Runs]:
    """Sort groups, each of so many numbers: as many in one sort as have int32 keys."""
    runs, some, keys = list[Runs](), list[_Group](), 0
    for count, parts in groups:
        if keys + count > _MOST:
            runs += _sort(device, some)
            some, keys = [], 0
        some.append(_Group([(address, size, keys + base, limit) for address, size, base, limit in parts], keys))
        keys += count + 1
    return runs + _sort(device, some)


def _sort(device: Device, groups: Sequence[_Group]) -> list[Runs]:
    parts, tasks, sizes, at = list[Part](), list[int](), list[int](), 0
    for group in groups:
        begin = at
        for address, size, base, limit in group.keys:
            parts.append((address, size, at, base, limit))
            tasks.append(-(-size // _TASK))
            at += size
        sizes.append(at - begin)
    if max(sizes, default=0) > _MOST_ENTRIES:
        raise ValueError(f"a step of {max(sizes):,} entries is too large: at most {_MOST_ENTRIES:,} fit.")
    *firsts, total = accumulate(sizes, initial=0)
    tiles, made, room = [_tile(size) for size in sizes], list[Runs](), 0
    for size in sizes:
        made.append(Runs(None, room, size))
        room += made[-1].num_bytes
    numbers = [-(-size // tile) for size, tile in zip(sizes, tiles, strict=True)]
    counts = [room + 4 * before for before in accumulate(numbers, initial=0)]
    memory = device.empty(-(-counts[-1] // 8), np.int64)
    begin = view(device, "runs", memory, np.int64, written=True).address
    made = [Runs(memory, begin + one.address, one.size) for one in made]
    if total == 0:
        return made
    keys = device.empty(total, np.int32)
    launch_parts(device, "sorting.make_keys", _KEYS, parts, tasks, view(device, "keys", keys, np.int32).address)
    ordered, order = device.sort(keys)
    sorted_at = view(device, "keys", ordered, np.int32).address, view(device, "order", order, np.int64).address
    parts = [
        (one.entries, one.address, begin + count, one.run_at, one.size, first, group.base, tile, number)
        for one, count, first, group, tile, number in zip(made, counts, firsts, groups, tiles, numbers, strict=False)
    ]
    launch_parts(device, "sorting.count_runs", _RUNS, parts, numbers, sorted_at[0])
    launch_parts(device, "sorting.write_runs", _RUNS, parts, numbers, *sorted_at)
    return made


def _tile(size: int) -> int:
    """Return the places of a tile; each looks at the counts of all before, so there are not too many."""
    return _TILE * max(1, -(-size // (_TILE * _MOST_TILES)))
