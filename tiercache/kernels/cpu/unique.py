"""Unique rows of a batch, in order, and the row of every entry: the requests between ranks.

Legend: E entries, U unique slots, K ranges. A slot may be any number that `sort_slots` sorts: here it is the position
of a key in a pass.
"""

import numpy as np
from numba import prange

from tiercache.kernels.arrays import B1, I4, I8, U8, Written, same_length
from tiercache.kernels.cpu.compile import inlined, parallel, serial, worker
from tiercache.kernels.cpu.kernel_threads import threads

BITS_PER_ENTRY = 64
"""`unique_positions` is faster than a sort up to about this many positions for each entry."""

_PART_ENTRIES = 16384  # below this a second thread costs more than it saves
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@worker
def _number(numbering, part, parts, pairs, counts, unique, inverse):  # type: ignore[no-untyped-def]
    """Count the slots that begin in a part; or, if `numbering`, write them and each entry's index among them."""
    number = np.int64(-1)
    if numbering:
        for before in range(part):
            number += counts[before]
    for i in range(pairs.size * part // parts, pairs.size * (part + 1) // parts):
        if i == 0 or (pairs[i] >> _HALF) != (pairs[i - 1] >> _HALF):
            number += 1
            if numbering:
                unique[number] = np.int32(pairs[i] >> _HALF)
        if numbering:
            inverse[pairs[i] & _LOW] = np.int32(number)
    if not numbering:
        counts[part] = number + 1


@parallel
def _unique(pairs: U8, counts: Written[I8], unique: Written[I4], inverse: Written[I4]) -> None:
    parts = counts.size
    for step in range(2):  # keep this one loop: numba fuses loops that look independent
        if step == 1 or parts > 1:
            for part in prange(parts):
                _number(step == 1, part, parts, pairs, counts, unique, inverse)


def unique_slots(pairs: U8, unique: I4, inverse: I4) -> int:
    """Write the unique slots of `pairs` (from `sort_slots`), and each entry's index among them; return U.

    unique (E,): its first U elements are written, ascending. inverse (E,): entry e has slot `unique[inverse[e]]`. The
    same for any number of threads.
    """
    if not same_length(pairs=pairs, unique=unique, inverse=inverse):
        return 0
    parts = max(1, min(threads(), pairs.size // _PART_ENTRIES))
    _unique(pairs, np.zeros(parts, np.int64), unique, inverse)
    return int(inverse[int(pairs[-1] & _LOW)]) + 1


@inlined
def _count_ones(word):  # type: ignore[no-untyped-def]
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@serial
def _unique_positions(
    positions: I4, bits: Written[U8], before: Written[I4], unique: Written[I4], inverse: Written[I4]
) -> int:
    one, low = np.uint64(1), np.uint64(63)
    for i in range(positions.size):
        p = np.uint64(positions[i])
        bits[np.int64(p >> np.uint64(6))] |= one << (p & low)
    count = 0
    for w in range(bits.size):
        before[w] = count
        word = bits[w]
        while word:
            lowest = word & (~word + one)
            unique[count] = np.int32(w * 64 + _count_ones(lowest - one))
            count += 1
            word = word ^ lowest
    for i in range(positions.size):
        p = np.uint64(positions[i])
        at = np.int64(p >> np.uint64(6))
        inverse[i] = np.int32(before[at] + _count_ones(bits[at] & ((one << (p & low)) - one)))
    bits[:] = 0
    return count


def unique_positions(positions: I4, num_positions: int, bits: U8, before: I4, unique: I4, inverse: I4) -> int:
    """Do the work of `sort_slots` and `unique_slots` with a bit for each position; returns U.

    positions (E,), each in [0, num_positions). bits: a word for each 64 positions, zero before and after. before: as
    many words of scratch. On one thread; worth it while `num_positions` is at most `BITS_PER_ENTRY` times E.
    """
    words = -(-num_positions // 64)
    if same_length(positions=positions, unique=unique, inverse=inverse) == 0:
        return 0
    if min(bits.size, before.size) < words or not 0 <= int(positions.min()) <= int(positions.max()) < num_positions:
        raise ValueError(
            f"positions range from {positions.min()} to {positions.max()}, but there are {num_positions} with room for "
            f"{64 * min(bits.size, before.size)}."
        )
    return _unique_positions(positions, bits[:words], before[:words], unique, inverse)


@serial
def _lay_out(
    unique: I4, first: I8, last: I8, shift: I8, wire: I8, slot: I8, addresses: Written[I4], slots: Written[I4]
) -> None:
    for k in range(first.size):
        to, place = wire[k] - first[k], slot[k] - first[k]
        for u in range(first[k], last[k]):
            addresses[to + u] = np.int32(np.int64(unique[u]) + shift[k])
        if slot[k] >= 0:
            for u in range(first[k], last[k]):
                slots[u] = np.int32(place + u)


def lay_out(unique: I4, first: I8, last: I8, shift: I8, wire: I8, slot: I8, addresses: I4, slots: I4) -> None:
    """Write the addresses of K ranges of `unique` (U,) in wire order, and the slots of their rows.

    Range k has the rows [first[k], last[k]) of `unique`. Their addresses, `unique + shift[k]`, are written to
    `addresses` from `wire[k]` on; their slots in `slots` (U,) count from `slot[k]` on, if it is not negative.
    """
    same_length(unique=unique, slots=slots)
    if same_length(first=first, last=last, shift=shift, wire=wire, slot=slot) == 0:
        return
    rows = last - first
    if rows.min() < 0 or first.min() < 0 or last.max() > unique.size or wire.min() < 0:
        raise ValueError(f"ranges must be in [0, {unique.size}), and none may end before it begins.")
    if (wire + rows).max() > addresses.size:
        raise ValueError(f"ranges reach to {(wire + rows).max()} of {addresses.size} addresses.")
    _lay_out(unique, first, last, shift, wire, slot, addresses, slots)


@serial
def _mark(slots: I4, seen: Written[B1]) -> int:
    count = 0
    for i in range(slots.size):  # without a branch, which would be unpredictable
        count += 1 - int(seen[slots[i]])
        seen[slots[i]] = True
    return count


def mark_slots(slots: I4, seen: B1) -> int:
    """Set `seen` (S,) at every slot (E,), each in [0, S); return how many were not set before."""
    if slots.size and not 0 <= int(slots.min()) <= int(slots.max()) < seen.size:
        raise ValueError(f"slots range from {slots.min()} to {slots.max()}, but there are {seen.size}.")
    return _mark(slots, seen)
