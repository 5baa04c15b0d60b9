"""Bring the entries of a step that touch one row together, in batch order.

A stable radix sort, least significant digit first. Every part counts and scatters its own stretch of the input, so the
result does not depend on the number of threads.
"""

import numpy as np
from numba import prange
from numpy.typing import NDArray

from tiercache.kernels.arrays import expect
from tiercache.kernels.jit import inlined, parallel, threads

__all__ = ["SortBuffers", "sort_slots"]

_DIGIT_BITS = 11
_PART_ENTRIES = 8192  # below this a second thread costs more than it saves


@inlined
def _count(source, start, stop, shift, mask, counts):  # type: ignore[no-untyped-def]
    counts[:] = 0
    for i in range(start, stop):
        counts[(source[i] >> shift) & mask] += np.uint64(1)


@inlined
def _scatter(source, start, stop, shift, mask, places, target):  # type: ignore[no-untyped-def]
    for i in range(start, stop):
        pair = source[i]
        digit = (pair >> shift) & mask
        place = places[digit]
        target[place] = pair
        places[digit] = place + np.uint64(1)


@inlined
def _to_places(counts, parts, buckets):  # type: ignore[no-untyped-def]
    place = np.uint64(0)
    for digit in range(buckets):
        for part in range(parts):
            count = counts[part, digit]
            counts[part, digit] = place
            place += count


@parallel
def _sort(slots, bits, passes, first, second, counts, parts):  # type: ignore[no-untyped-def]
    size = slots.size
    digit_bits = (bits + passes - 1) // passes
    buckets = 1 << digit_bits
    mask = np.uint64(buckets - 1)
    for part in prange(parts):
        start, stop = size * part // parts, size * (part + 1) // parts
        for i in range(start, stop):
            first[i] = (np.uint64(np.uint32(slots[i])) << np.uint64(32)) | np.uint64(i)
        _count(first, start, stop, np.uint64(32), mask, counts[part, :buckets])
    for turn in range(passes):
        shift = np.uint64(32 + turn * digit_bits)
        if turn:
            for part in prange(parts):
                start, stop = size * part // parts, size * (part + 1) // parts
                _count(first, start, stop, shift, mask, counts[part, :buckets])
        _to_places(counts, parts, buckets)
        for part in prange(parts):
            start, stop = size * part // parts, size * (part + 1) // parts
            _scatter(first, start, stop, shift, mask, counts[part], second)
        first, second = second, first


class SortBuffers:
    """Scratch of `sort_slots`, kept between steps and grown when a step is larger than all before."""

    def __init__(self) -> None:
        self.first = np.empty(0, np.uint64)
        self.second = np.empty(0, np.uint64)
        self.counts = np.empty((0, 1 << _DIGIT_BITS), np.uint64)

    def reserve(self, num_entries: int, parts: int) -> None:
        """Make room for a step of `num_entries` entries."""
        if self.first.size < num_entries:
            self.first, self.second = np.empty(num_entries, np.uint64), np.empty(num_entries, np.uint64)
        if self.counts.shape[0] < parts:
            self.counts = np.empty((parts, 1 << _DIGIT_BITS), np.uint64)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.first.nbytes + self.second.nbytes + self.counts.nbytes


def sort_slots(slots: NDArray[np.int32], num_slots: int, buffers: SortBuffers) -> NDArray[np.uint64]:
    """Return (slot << 32 | entry) for every entry, ascending: a row's entries stand together in batch order.

    All slots are in [0, num_slots). The result lies in `buffers` and is valid until they are used again.
    """
    slots = expect("slots", slots, np.int32)
    if slots.size >= 1 << 31:
        raise ValueError(f"a step of {slots.size:,} entries is too large: at most {(1 << 31) - 1:,} fit.")
    parts = max(1, min(threads(), slots.size // _PART_ENTRIES))
    buffers.reserve(slots.size, parts)
    bits = max(1, (max(num_slots, 1) - 1).bit_length())
    passes = -(-bits // _DIGIT_BITS)
    first, second = buffers.first[: slots.size], buffers.second[: slots.size]
    _sort(slots, bits, passes, first, second, buffers.counts, parts)
    return second if passes % 2 else first
