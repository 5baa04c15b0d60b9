"""Unique keys with their counts, in hash order: an open-addressing table that is sorted after all keys are added.

The table is cut into parts by the top bits of the hash, so that several threads fill it without locks and each part is
sorted by itself. A slot is two words: the hash, from which the key is computed back, and the count above the number of
the key, both in one cache line. Numbers are assigned in order of appearance; number n of part p of P is n P + p.
Legend: n input keys, C slots of a part (a power of two), K unique keys of a part.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import numpy as np

from tiercache.kernels.arrays import I4, I8, NONE_I8, U8, Word, Written, aligned_zeros, same_length
from tiercache.kernels.cpu.compile import inlined, serial, worker
from tiercache.kernels.cpu.hashing import mix_word
from tiercache.kernels.cpu.simd import prefetch

_AHEAD = 24  # keys between prefetching a slot and using it
_ONE = np.uint64(1 << 32)
_NUMBER = np.uint64((1 << 32) - 1)
_HALF = np.uint64(32)
_FULL = _NUMBER << _HALF
_BLOCK = 1024  # keys whose hashes are computed at once
_SMALL = 1 << 15  # words of a table that stays in the second-level cache
_MOST = (1 << 31) - 1
_FINE_BITS = 10
_FINE = 1 << _FINE_BITS
_INVERSES = np.array([0x319642B2D24D8EC3, 0x96DE1B173F119089], np.uint64)  # of the factors of mix_word, modulo 2^64


@inlined
def _slot(hashed, mask):  # type: ignore[no-untyped-def]
    # the low bits: keys in hash order would fill one end of the table
    return np.int64(hashed & np.uint64(mask)) << 1


@serial
def _add(
    keys: I8,  # (n,)
    table_id: Word,
    part: int,
    part_bits: int,
    slots: Written[U8],  # (2 * C,)
    count: int,  # K before
    times: I8,  # (n,) occurrences of each key, less than 2^32; (0,): one
    out: Written[I4],  # (n,) numbers of the keys of this part; others stay
) -> tuple[int, int]:
    """Return the number of keys processed, and the new K.

    Stops early if the table is five eighths full, or a count would overflow.
    """
    # unsigned indices: signed ones are checked again, because negative ones count from the end
    one, mask = np.uint64(1), np.uint64(slots.size // 2 - 1)
    room = (slots.size // 2) * 5 // 8
    shift, is_large = np.uint64(64 - part_bits), slots.size > _SMALL
    step, are_counted = _ONE, times.size > 0
    hashes, places = np.empty(_BLOCK + _AHEAD, np.uint64), np.arange(_BLOCK)
    for first in range(0, keys.size, _BLOCK):
        size = min(_BLOCK, keys.size - first)
        for i in range(size):  # separate: this loop is vectorized
            hashes[i] = mix_word(np.uint64(keys[first + i]) ^ table_id)
        if part_bits:
            mine = 0
            for i in range(size):  # without a branch, which would be mispredicted for every other key
                hashes[mine], places[mine] = hashes[i], i
                mine += int(np.int64(hashes[i] >> shift) == part)
            size = mine
        if size:
            hashes[size : size + _AHEAD] = hashes[size - 1]
        for i in range(size):
            if is_large:
                prefetch(slots, np.int64((hashes[np.uint64(i + _AHEAD)] & mask) << one))
            hashed, place = hashes[np.uint64(i)], first + (places[np.uint64(i)] if part_bits else i)
            if are_counted:
                step = np.uint64(times[np.uint64(place)]) << _HALF
            at = (hashed & mask) << one
            word = slots[at + one]
            while slots[at] != hashed and word != 0:
                at = (at + one + one) & ((mask << one) + one)
                word = slots[at + one]
            if word == 0:
                if count == room:
                    return place, count
                count += 1
                slots[at] = hashed
                word = np.uint64(count)
            elif word + step < word:
                return place, count
            slots[at + one] = word + step
            out[np.uint64(place)] = np.int32(((np.int64(word & _NUMBER) - 1) << part_bits) + part)
    return keys.size, count


@serial
def _remove(
    keys: I8, times: I8, table_id: Word, part: int, part_bits: int, slots: Written[U8], carried: Written[I8],
    before: int,
) -> None:  # fmt: skip
    """Remove occurrences of keys that are all in the table; keys numbered `before` or higher leave with their last.

    `times` as in `_add`.

    Keys after a removed one move up, so that every other key is found (Knuth, volume 3, algorithm 6.4R).
    """
    mask, ring = slots.size // 2 - 1, slots.size - 1
    for i in range(keys.size):
        hashed = mix_word(np.uint64(keys[i]) ^ table_id)
        if part_bits and np.int64(hashed >> np.uint64(64 - part_bits)) != part:
            continue
        at = _slot(hashed, mask)
        while slots[at] != hashed or slots[at + 1] == 0:
            at = (at + 2) & ring
        number = np.int64(slots[at + 1] & _NUMBER) - 1
        removed = np.uint64(times[i]) if times.size else np.uint64(1)
        here = min(removed, slots[at + 1] >> _HALF)
        slots[at + 1] -= here << _HALF
        if removed > here:
            carried[number] -= np.int64(removed - here)
        if number >= before and (slots[at + 1] >> _HALF) == 0 and (number >= carried.size or carried[number] == 0):
            following = (at + 2) & ring
            while slots[following + 1] != 0:
                if ((following - _slot(slots[following], mask)) & ring) >= ((following - at) & ring):
                    slots[at], slots[at + 1] = slots[following], slots[following + 1]
                    at = following
                following = (following + 2) & ring
            slots[at + 1] = 0


@serial
def _rehash(old: U8, slots: Written[U8]) -> None:
    mask = slots.size // 2 - 1
    for i in range(0, old.size, 2):
        if i + 4 * _AHEAD < old.size:
            prefetch(slots, _slot(old[i + 4 * _AHEAD], mask))
        if old[i + 1] != 0:
            at = _slot(old[i], mask)
            while slots[at + 1] != 0:
                at = (at + 2) & (2 * mask + 1)
            slots[at], slots[at + 1] = old[i], old[i + 1]


@serial
def _carry_counts(slots: Written[U8], carried: Written[I8]) -> None:
    """Move all counts to `carried`, by number."""
    for i in range(1, slots.size, 2):
        if slots[i] != 0:
            carried[np.int64(slots[i] & _NUMBER) - 1] += np.int64(slots[i] >> _HALF)
            slots[i] &= _NUMBER


@inlined
def _key(x, table_id, inverses):  # type: ignore[no-untyped-def]
    """Return the key that has a hash: the inverse of `mix_word`."""
    x = (x ^ (x >> np.uint64(31)) ^ (x >> np.uint64(62))) * inverses[0]
    x = (x ^ (x >> np.uint64(27)) ^ (x >> np.uint64(54))) * inverses[1]
    return np.int64(x ^ (x >> np.uint64(30)) ^ (x >> np.uint64(60)) ^ table_id)


@serial
def _by_number(slots: U8, table_id: Word, part: int, part_bits: int, inverses: U8, keys: Written[I8]) -> None:
    """Write the key of each number of a part."""
    for i in range(0, slots.size, 2):
        if slots[i + 1] != 0:
            number = ((np.int64(slots[i + 1] & _NUMBER) - 1) << part_bits) + part
            keys[number] = _key(slots[i], table_id, inverses)


@inlined
def _bucket(hashed, part_bits, bits, width):  # type: ignore[no-untyped-def]
    """Return `width` bits of a hash after its first `part_bits` and `bits`."""
    return np.uint64(hashed << np.uint64(part_bits + bits)) >> np.uint64(64 - width) if width else np.uint64(0)


@worker
def _place(slots, out, ends, part_bits, bits, width):  # type: ignore[no-untyped-def]
    # without a branch, since every other slot is empty: those are all written to one place after the others
    one, last = np.uint64(1), np.uint64(ends.size - 1)
    for i in range(0, slots.size, 2):
        ends[_bucket(slots[i], part_bits, bits, width)] += np.int64(slots[i + 1] != 0)
    begin = 0
    for b in range(ends.size):
        size = ends[b]
        ends[b] = begin
        begin += size
    for i in range(0, slots.size, 2):
        is_full = np.uint64(slots[i + 1] != 0)
        bucket = _bucket(slots[i], part_bits, bits, width) * is_full + last * (one - is_full)
        at = np.uint64(ends[bucket]) << one
        out[at], out[at + one] = slots[i], slots[i + 1]
        ends[bucket] += np.int64(is_full)


@serial
def _spread(
    slots: U8,  # (2 * n,) a slot whose second word is 0 is empty
    out: Written[U8],  # (2 * (K + 1),)
    ends: Written[I8],  # (2 ** width + 1,) zeros
    part_bits: int,
    width: int,
) -> None:
    """Sort slots by the first bits of their hashes; `ends`: the end of the slots with each value."""
    _place(slots, out, ends, part_bits, 0, width)


@serial
def _finish(
    coarse: Written[U8],  # (2 * (K + 1),) by the first bits of their hashes
    ends: I8,  # the end of each of these
    table_id: Word,
    part: int,
    part_bits: int,
    bits: int,
    inverses: U8,  # (2,)
    first: int,  # keys of the previous parts
    positions: Written[I4],  # (P * (numbers of the largest part),) or (0,): not needed
    keys: Written[I8],  # (K,)
    counts: Written[I8],  # (K,)
) -> None:
    """Sort each bucket, which stays in the cache: by more bits of the hash, then the few keys with equal bits."""
    fine, fine_ends = np.empty(0, np.uint64), np.zeros(_FINE + 1, np.int64)
    begin = np.int64(0)
    for b in range(ends.size - 1):
        end = ends[b]
        size = end - begin
        if fine.size < 2 * size + 2:
            fine = np.empty(4 * size + 2, np.uint64)
        fine_ends[:] = 0
        _place(coarse[2 * begin : 2 * end], fine, fine_ends, part_bits, bits, _FINE_BITS)
        for i in range(1, size):
            hashed, word = fine[2 * i], fine[2 * i + 1]
            j = i - 1
            while j >= 0 and fine[2 * j] > hashed:
                fine[2 * j + 2], fine[2 * j + 3] = fine[2 * j], fine[2 * j + 1]
                j -= 1
            fine[2 * j + 2], fine[2 * j + 3] = hashed, word
        for i in range(size):
            word = fine[2 * i + 1]
            keys[begin + i] = _key(fine[2 * i], table_id, inverses)
            counts[begin + i] = np.int64(word >> _HALF)
            if positions.size:
                positions[((np.int64(word & _NUMBER) - 1) << part_bits) + part] = first + begin + i
        begin = end


Run: TypeAlias = Callable[[Iterable[Callable[[], None]]], None]
"""Runs some work, on several threads or not."""


def in_turn(work: Iterable[Callable[[], None]]) -> None:
    """Run it on this thread."""
    for one in work:
        one()


class UniqueKeys:
    """Numbers the keys of one table as they first appear, counts them, and returns them in hash order.

    Each of ``parts`` (a power of two) may be filled by a separate thread. Memory: 26 to 51 bytes for each key and as
    much for the old slots of a part while it grows; sorting takes 36 to 44 bytes per key.
    """

    def __init__(self, table_id: int = 0, parts: int = 1, expected: int = 0) -> None:
        """``expected``: the estimated number of keys; the table grows beyond it."""
        self.table_id, self.parts = table_id, parts
        self._bits = parts.bit_length() - 1
        pairs = max(64, 1 << (expected // parts * 8 // 5).bit_length())
        self._slots = [_slots(pairs) for _ in range(parts)]
        self._carried = [NONE_I8] * parts
        self.counts = [0] * parts
        """The number of keys of each part."""

    @property
    def count(self) -> int:
        """The number of keys."""
        return sum(self.counts)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(slots.nbytes for slots in self._slots) + sum(c.nbytes for c in self._carried)

    def grown_bytes(self, new: int) -> int:
        """Return the peak bytes while adding `new` keys, if all are new and in one part."""
        total = largest = 0
        for slots, count in zip(self._slots, self.counts, strict=True):
            size = slots.nbytes
            while size // 16 * 5 // 8 < count + -(-new // self.parts) * (2 if self.parts > 1 else 1):
                size *= 2
            total, largest = total + size, max(largest, size // 2 if size > slots.nbytes else 0)
        return total + largest

    def add(self, keys: I8, out: I4, part: int = 0, times: I8 = NONE_I8) -> None:
        """Write the number of each key (n,) of a part to `out` (n,). Raises ValueError if it would not fit int32.

        times: (n,) occurrences of each key, less than 2^32; empty: one.
        """
        same_length(keys=keys, out=out)
        if times.size:
            same_length(keys=keys, times=times)
        done = 0
        while done < keys.size:
            step, self.counts[part] = _add(
                keys[done:], self.table_id, part, self._bits, self._slots[part], self.counts[part], times[done:],
                out[done:],
            )  # fmt: skip
            done += step
            if done < keys.size:
                self._grow(part)

    def keys(self) -> I8:
        """Return the key of each number; with several parts, unused numbers are 0."""
        keys = np.zeros(max(self.counts) << self._bits, np.int64)
        for part, slots in enumerate(self._slots):
            _by_number(slots, self.table_id, part, self._bits, _INVERSES, keys)
        return keys

    def remove(self, keys: I8, counts: list[int], times: I8 = NONE_I8) -> None:
        """Remove the keys (n,) that were added last; `counts`: the attribute before the first of them."""
        for part, before in enumerate(counts):
            _remove(keys, times, self.table_id, part, self._bits, self._slots[part], self._carried[part], before)
            self.counts[part] = before

    def sorted(self, *, with_positions: bool = True, run: Run = in_turn) -> tuple[I8, I8, I4]:
        """Return keys (K,) in hash order, their counts (K,), and the position of each number among them.

        The table is empty then. run: runs the sorting of each part.
        """
        firsts = np.cumsum([0, *self.counts]).tolist()
        keys, counts = np.empty(firsts[-1], np.int64), np.empty(firsts[-1], np.int64)
        carries = any(carried.size for carried in self._carried)
        positions = np.empty(max(self.counts) << self._bits if with_positions or carries else 0, np.int32)

        def sort(part: int) -> None:
            low, high = firsts[part], firsts[part + 1]
            slots, carried, self._slots[part] = self._slots[part], self._carried[part], _slots(64)
            bits = max(0, (high - low).bit_length() - 12)
            coarse, ends = np.empty(2 * (high - low) + 2, np.uint64), np.zeros((1 << bits) + 1, np.int64)
            _spread(slots, coarse, ends, self._bits, bits)
            _finish(
                coarse, ends, self.table_id, part, self._bits, bits, _INVERSES, low, positions, keys[low:high],
                counts[low:high],
            )  # fmt: skip
            size = min(carried.size, high - low)
            if size:
                counts[positions[np.arange(size) * self.parts + part]] += carried[:size]

        run(partial(sort, part) for part in range(self.parts))
        self.counts, self._carried = [0] * self.parts, [NONE_I8] * self.parts
        return keys, counts, positions

    def _grow(self, part: int) -> None:
        """Enlarge a full table, or move counts that are about to overflow."""
        slots, count = self._slots[part], self.counts[part]
        if count < slots.size // 2 * 5 // 8:
            carried = np.zeros(max(count, self._carried[part].size), np.int64)  # larger after a removal
            carried[: self._carried[part].size] = self._carried[part]
            self._carried[part] = carried
            _carry_counts(slots, carried)
            return
        if count >= _MOST // self.parts:
            raise ValueError(f"more than {_MOST:,} distinct keys: numbers are int32; make sub-datasets smaller.")
        self._slots[part] = _slots(slots.size)
        _rehash(slots, self._slots[part])


def _slots(pairs: int) -> U8:
    """Return zeros for `pairs` slots."""
    return aligned_zeros(4 * pairs, 1).reshape(-1).view(np.uint64)
