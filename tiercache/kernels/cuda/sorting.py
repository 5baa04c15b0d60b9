"""Sort the entries of a step by row, in batch order within a row, on a CUDA device, for all groups at once."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from tiercache.kernels.arrays import I8
from tiercache.kernels.cuda.launch import Device, Launches, Part, launch_packed, pack_parts, struct, view

STRETCH = 64
"""Length of a stretch of places: a row's gradients are summed by stretches, so its bits depend on it."""

_KEYS, _RUNS = struct("KeyPart", "sorting"), struct("RunPart", "sorting")
_ADDRESSES = {"slots", "entries", "runs", "counts", "run_at"}  # fields of the structs
_TASK = 256  # entries
_TILE, _MOST_TILES = 1024, 4096
_MOST = (1 << 31) - 1
_MOST_ENTRIES = _MOST - 4096  # kernels count in int32, by tasks, past the last one


class Runs(NamedTuple):
    """The entries of a group in slot order, and in batch order within a slot; a run has one slot.

    At ``address``: (E + 1,) uint64, slot << 32 | the first place of each run, after the last one E, then garbage; (E,)
    uint32, the entry at each place; (stretches + 1,) uint32, the run of each `STRETCH`-th place and, at the end, the
    number of runs.
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
    """The ids of some features: feature f has ids [starts[f], starts[f + 1]), below ``limits[f]``.

    Their positions begin at ``bases[f]``. The ids (E,) int32 begin at byte ``begin`` of a block on the device.
    """

    begin: int
    starts: I8
    bases: I8
    limits: I8


_Group = tuple[list[tuple[int, int, int, int]], int]
"""Contiguous numbers, by address and count, with a base and a limit: keys are base + number, and base + limit from the
limit on. And the key of slot 0."""


class SortPlan:
    """The launches of one sort, or of several if one has too few int32 keys. Any thread.

    Addresses are relative to a block of ids and to the memory of runs, so a plan serves all batches of one layout.
    """

    def __init__(self, groups: Iterable[tuple[int, list[tuple[int, int, int, int]]]]) -> None:
        """groups: the number of slots and of keys, as in `_Group`. Raises ValueError for too many entries."""
        self.num_bytes = 0
        """Bytes of the runs, a multiple of 8."""
        sorts, keys = [list[_Group]()], 0
        for count, parts in groups:
            if keys + count > _MOST:
                sorts.append([])
                keys = 0
            sorts[-1].append(([(at, size, keys + base, limit) for at, size, base, limit in parts], keys))
            keys += count + 1
        self._sorts: list[_Sort] = []
        for some in sorts:
            self._sorts.append(_Sort(some, self.num_bytes))
            self.num_bytes = self._sorts[-1].end

    @classmethod
    def of(cls, groups: Sequence[Sequence[LookupPositions]]) -> "SortPlan":
        """Return the plan of a sort by position; a step finds the rows by `Runs.slot_of`.

        A group has the entries of its lookups, one after another. An invalid id is not an error here.
        """
        made = []
        for lookups in groups:
            count, parts = 0, []
            for begin, starts, bases, limits in lookups:
                count, cuts = max(count, int((bases + limits).max(initial=0))), starts.tolist()
                parts += [
                    (begin + 4 * first, last - first, base, limit)
                    for first, last, base, limit in zip(cuts, cuts[1:], bases.tolist(), limits.tolist(), strict=False)
                    if first < last
                ]
            made.append((count, parts))
        return cls(made)

    def launch(self, device: Device, ids: int, memory: Any, runs: int) -> list[Runs]:
        """Sort the ids of a block at address ``ids``, and write the runs, which are in ``memory``, from ``runs`` on."""
        return [one for sort in self._sorts for one in sort.launch(device, ids, memory, runs)]


class _Sort:
    def __init__(self, groups: Sequence[_Group], room: int) -> None:
        parts, tasks, sizes, at = list[Part](), list[int](), list[int](), 0
        for keys, _ in groups:
            begin = at
            for address, size, base, limit in keys:
                parts.append((address, size, at, base, limit))
                tasks.append(-(-size // _TASK))
                at += size
            sizes.append(at - begin)
        if max(sizes, default=0) > _MOST_ENTRIES:
            raise ValueError(f"a step of {max(sizes):,} entries is too large: at most {_MOST_ENTRIES:,} fit.")
        *firsts, self._total = accumulate(sizes, initial=0)
        self._made = list[Runs]()
        for size in sizes:
            self._made.append(Runs(None, room, size))
            room += self._made[-1].num_bytes
        tiles = [_tile(size) for size in sizes]
        numbers = [-(-size // tile) for size, tile in zip(sizes, tiles, strict=True)]
        counts = [room + 4 * before for before in accumulate(numbers, initial=0)]
        self.end = -(-counts[-1] // 8) * 8
        self._keys = pack_parts(_KEYS, parts, tasks)
        each = zip(self._made, counts, firsts, groups, tiles, numbers, strict=False)
        parts = [
            (one.entries, one.address, count, one.run_at, one.size, first, base, tile, number)
            for one, count, first, (_, base), tile, number in each
        ]
        self._runs = pack_parts(_RUNS, parts, numbers)

    def launch(self, device: Device, ids: int, memory: Any, runs: int) -> list[Runs]:
        if self._total:
            keys = device.empty(self._total, np.int32)
            at = view(device, "keys", keys, np.int32).address
            launch_packed(device, "sorting.make_keys", _moved(self._keys, ids), at)
            ordered, order = device.sort(keys)
            moved, at = _moved(self._runs, runs), view(device, "keys", ordered, np.int32).address
            launch_packed(device, "sorting.count_runs", moved, at)
            launch_packed(device, "sorting.write_runs", moved, at, view(device, "order", order, np.int64).address)
        return [Runs(memory, runs + one.address, one.size) for one in self._made]


def _moved(launches: Launches, shift: int) -> Launches:
    """Return the launches with all addresses of their parts moved."""
    moved = [(num_tasks, argument.copy()) for num_tasks, argument in launches]
    for _, argument in moved:
        parts = argument["parts"]
        for field in _ADDRESSES.intersection(parts.dtype.names):
            parts[field] += np.uint64(shift)
    return moved


def sort_groups(device: Device, groups: Sequence[tuple[Sequence[Any], int]]) -> list[Runs]:
    """Return the runs of each group: of its slots (E,), which may be several arrays one after another.

    The arrays of each group come with the number of its slots; a group has fewer than 2^31 - 4096 entries. Does not
    wait for the device, so a slot that is not in [0, num_slots) is not an error: its entries come last, as of slot
    `num_slots`, and updates skip them. One sort serves all groups that have fewer than 2^31 slots together.
    """
    made = []
    for arrays, num_slots in groups:
        seen = [view(device, "slots", slots, np.int32) for slots in arrays]
        made.append((num_slots, [(one.address, one.size, 0, num_slots) for one in seen]))
    plan = SortPlan(made)
    memory = device.empty(plan.num_bytes // 8, np.int64)
    return plan.launch(device, 0, memory, view(device, "runs", memory, np.int64, written=True).address)


def _tile(size: int) -> int:
    """Return the places of a tile; each reads the counts of all previous ones, so there are not too many."""
    return _TILE * max(1, -(-size // (_TILE * _MOST_TILES)))
