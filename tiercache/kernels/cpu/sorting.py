"""Sort the entries of a step so that entries of one row are adjacent, in batch order.

A stable radix sort, least significant digit first. Every part counts and scatters its own range of the input, so the
result does not depend on the number of threads.
"""

import numpy as np
from numba import prange

from tiercache.kernels.arrays import I4, I8, U8, Matrix, Written
from tiercache.kernels.cpu.compile import inlined, parallel, worker
from tiercache.kernels.cpu.kernel_threads import threads

_DIGIT_BITS = 13
_HALF = np.uint64(32)
_PART_ENTRIES = 8192  # below this a second thread costs more than it saves


@inlined
def _digit(pair, shift, mask):  # type: ignore[no-untyped-def]
    return (pair >> shift) & mask


@worker
def _count(part, parts, slots, shift, mask, pairs, counts, highest):  # type: ignore[no-untyped-def]
    """Count the digits of a range; the first time, with `slots`, make its pairs and find its highest slot too."""
    start, stop = pairs.size * part // parts, pairs.size * (part + 1) // parts
    for digit in range(mask + np.uint64(1)):
        counts[part, digit] = 0
    top = np.uint32(0)
    for i in range(start, stop):
        if slots.size:
            slot = np.uint32(slots[i])
            top = max(top, slot)
            pairs[i] = (np.uint64(slot) << _HALF) | np.uint64(i)
        counts[part, _digit(pairs[i], shift, mask)] += 1
    if slots.size:
        highest[part] = top


@worker
def _scatter(part, parts, source, shift, mask, places, target):  # type: ignore[no-untyped-def]
    start, stop = source.size * part // parts, source.size * (part + 1) // parts
    for i in range(start, stop):
        pair = source[i]
        digit = _digit(pair, shift, mask)
        place = places[part, digit]
        target[place] = pair
        places[part, digit] = place + 1


@inlined
def _to_offsets(counts, parts, buckets):  # type: ignore[no-untyped-def]
    place = np.int64(0)
    for digit in range(buckets):
        for part in range(parts):
            count = counts[part, digit]
            counts[part, digit] = place
            place += count


@parallel
def _sort(
    slots: I4,
    num_slots: int,
    bits: int,
    passes: int,
    first: Written[U8],
    second: Written[U8],
    counts: Written[Matrix[I8]],
    highest: Written[I8],
    parts: int,
) -> bool:
    digit_bits = (bits + passes - 1) // passes
    mask = np.uint64((1 << digit_bits) - 1)
    for turn in range(passes):
        shift = np.uint64(32 + turn * digit_bits)
        made = slots if turn == 0 else slots[:0]
        for part in prange(parts):
            _count(part, parts, made, shift, mask, first, counts, highest)
        if turn == 0 and highest[:parts].max() >= num_slots:
            return False
        _to_offsets(counts, parts, 1 << digit_bits)
        for part in prange(parts):
            _scatter(part, parts, first, shift, mask, counts, second)
        first, second = second, first
    return True


class SortBuffers:
    """Scratch memory of `sort_slots`, reused between steps and grown for larger ones."""

    def __init__(self) -> None:
        self.first = np.empty(0, np.uint64)
        self.second = np.empty(0, np.uint64)
        self.counts = np.empty((0, 1 << _DIGIT_BITS), np.int64)
        self.highest = np.empty(0, np.int64)

    def reserve(self, num_entries: int, parts: int) -> None:
        """Allocate for a step of `num_entries` entries."""
        if self.first.size < num_entries:
            self.first, self.second = np.empty(num_entries, np.uint64), np.empty(num_entries, np.uint64)
        if self.counts.shape[0] < parts:
            self.counts, self.highest = np.empty((parts, 1 << _DIGIT_BITS), np.int64), np.empty(parts, np.int64)


def sort_slots(slots: I4, num_slots: int, buffers: SortBuffers) -> U8:
    """Return (slot << 32 | entry) for every entry, ascending: the entries of a row are adjacent, in batch order.

    slots (E,), fewer than 2^31. The result is in `buffers` and valid until their next use.
    Raises ValueError if a slot is not in [0, num_slots).
    """
    if slots.size >= 1 << 31:
        raise ValueError(f"a step of {slots.size:,} entries is too large: at most {(1 << 31) - 1:,} fit.")
    parts = max(1, min(threads(), slots.size // _PART_ENTRIES))
    buffers.reserve(slots.size, parts)
    bits = max(1, (max(num_slots, 1) - 1).bit_length())
    passes = -(-bits // _DIGIT_BITS)
    first, second = buffers.first[: slots.size], buffers.second[: slots.size]
    if slots.size and not _sort(slots, num_slots, bits, passes, first, second, buffers.counts, buffers.highest, parts):
        bad = int(np.argmax(slots.view(np.uint32) >= num_slots))
        raise ValueError(f"entry {bad} has slot {int(slots[bad])}: slots go from 0 to {num_slots - 1}.")
    return second if passes % 2 else first
