"""Bring the entries of a step that touch one row together, in batch order, on a CUDA device: `sorting`."""

from typing import Any

import numpy as np

from tiercache.kernels.cuda.launch import Device, blocks_for, view

__all__ = ["SortBuffers", "sort_slots"]

_DIGIT_BITS = 8
_DIGITS = 1 << _DIGIT_BITS
_TILE = 4096
_TILE_WARPS = 8


class SortBuffers:
    """Scratch of `sort_slots`, kept between steps and grown when a step is larger than all before."""

    def __init__(self, device: Device) -> None:
        self._device, self._entries = device, -1
        self.first: Any = None
        self.second: Any = None
        self.counts: Any = None
        self.totals: Any = None

    def reserve(self, num_entries: int) -> None:
        """Make room for a step of `num_entries` entries."""
        if self._entries < num_entries:
            empty = self._device.empty
            self.first, self.second = empty(num_entries, np.uint64), empty(num_entries, np.uint64)
            self.counts = empty(max(1, -(-num_entries // _TILE)) * _DIGITS, np.uint32)
            self.totals = empty(_DIGITS, np.uint32)
            self._entries = num_entries

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        held = (self.first, self.second, self.counts, self.totals)
        return sum(int(array.nbytes) for array in held if array is not None)


def sort_slots(device: Device, slots: Any, num_slots: int, buffers: SortBuffers) -> Any:
    """Return (slot << 32 | entry) for every entry, ascending: a row's entries stand together in batch order.

    slots (E,), fewer than 2^31. The result lies in `buffers` and is valid until they are used again. Nothing waits for
    the device, so a slot that is not in [0, num_slots) is no error here: its entries come last, as of slot `num_slots`,
    and updates leave them out.
    """
    seen = view(device, "slots", slots, np.int32)
    if seen.size >= 1 << 31:
        raise ValueError(f"a step of {seen.size:,} entries is too large: at most {(1 << 31) - 1:,} fit.")
    buffers.reserve(seen.size)
    bits = max(1, num_slots.bit_length())  # of `num_slots` itself, which stands for no row
    passes = -(-bits // _DIGIT_BITS)
    digit_bits = -(-bits // passes)
    tiles = -(-seen.size // _TILE)
    names = {"first": buffers.first, "second": buffers.second}
    pairs = {name: view(device, name, array, np.uint64, written=True).address for name, array in names.items()}
    counts = view(device, "counts", buffers.counts, np.uint32, written=True).address
    totals = view(device, "totals", buffers.totals, np.uint32, written=True).address
    source, target = "first", "second"
    for turn in range(passes if seen.size else 0):
        begin = (seen.address if turn == 0 else 0, pairs[source], seen.size, num_slots)
        digit = (32 + turn * digit_bits, (1 << digit_bits) - 1)
        device.launch("sorting.count_digits", blocks_for(device, tiles * _TILE_WARPS), (*begin, *digit, counts))
        device.launch("sorting.sum_tiles", blocks_for(device, _DIGITS), (counts, tiles, totals))
        moved = (*begin, *digit, counts, totals, pairs[target])
        device.launch("sorting.move_pairs", blocks_for(device, tiles * _TILE_WARPS), moved)
        source, target = target, source
    return names[source][: seen.size]
