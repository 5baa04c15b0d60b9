"""Numbers for keys in the order of their first appearance: an open-addressing table with a way back. Serial."""

import numpy as np

from tiercache.kernels.arrays import I4, I8, Written, same_length
from tiercache.kernels.cpu.hashing import mix_word
from tiercache.kernels.cpu.jit import inlined, serial
from tiercache.kernels.cpu.simd import prefetch

__all__ = ["KeyToIndex"]

_MOST = (1 << 31) - 1
_EMPTY = np.int32(-1)
_AHEAD = 8  # keys between asking for memory and using it


@inlined
def _home(key, mask):  # type: ignore[no-untyped-def]
    # the low bits: key sets come in the order of a hash whose high bits run on
    return np.int64(mix_word(np.uint64(key)) & np.uint64(mask))


@inlined
def _ask_ahead(keys, i, numbers, order, counts, mask):  # type: ignore[no-untyped-def]
    """Ask for what the keys to come will touch: first the place in the table, then what its number names."""
    if i + 2 * _AHEAD < keys.size:
        prefetch(numbers, _home(keys[i + 2 * _AHEAD], mask))
    if i + _AHEAD < keys.size:
        number = numbers[_home(keys[i + _AHEAD], mask)]
        if number != _EMPTY:
            prefetch(order, np.int64(number))
            prefetch(counts, np.int64(number))


@serial
def _insert(
    keys: I8, out: Written[I4], numbers: Written[I4], order: Written[I8], counts: Written[I8], count: int, mask: int
) -> tuple[int, int]:
    for i in range(keys.size):
        _ask_ahead(keys, i, numbers, order, counts, mask)
        key = keys[i]
        place = _home(key, mask)
        while numbers[place] != _EMPTY and order[numbers[place]] != key:
            place = (place + 1) & mask
        number = numbers[place]
        if number == _EMPTY:
            if count == order.size:
                return i, count
            number = np.int32(count)
            numbers[place] = number
            order[count] = key
            counts[count] = 0
            count += 1
        counts[number] += 1
        out[i] = number
    return keys.size, count


@serial
def _remove_newest(numbers: Written[I4], order: I8, count: int, wanted: int, mask: int) -> None:
    # newest first: a key that came later can only stand behind the ones before it, so no probe is ever broken
    for number in range(count - 1, wanted - 1, -1):
        place = _home(order[number], mask)
        while numbers[place] != number:
            place = (place + 1) & mask
        numbers[place] = _EMPTY


@serial
def _subtract(numbers: I4, counts: Written[I8]) -> None:
    for i in range(numbers.size):
        counts[numbers[i]] -= 1


@serial
def _rehash(numbers: Written[I4], order: I8, count: int, mask: int) -> None:
    for number in range(count):
        if number + 2 * _AHEAD < count:
            prefetch(numbers, _home(order[number + 2 * _AHEAD], mask))
        place = _home(order[number], mask)
        while numbers[place] != _EMPTY:
            place = (place + 1) & mask
        numbers[place] = number


class KeyToIndex:
    """Numbers int64 keys 0, 1, 2, ... as they first appear, and counts them.

    Begins with room for `room` keys and grows, to at most 2^31 - 1.
    Memory: 16 bytes a key of room and 8 to 16 of table. Not thread-safe.
    """

    def __init__(self, room: int = 1024) -> None:
        self.count = 0
        """How many keys have numbers."""
        room = max(16, room)
        self._order = np.empty(room, np.int64)
        self._counts = np.empty(room, np.int64)
        self._numbers = np.empty(0, np.int32)
        self._mask = 0
        self._resize_table(room)

    def insert(self, keys: I8, out: I4) -> int:
        """Write the number of each key (n,) to `out` (n,), numbering new ones; returns how many have numbers now."""
        same_length(keys=keys, out=out)
        done = 0
        while done < keys.size:
            step, self.count = _insert(
                keys[done:], out[done:], self._numbers, self._order, self._counts, self.count, self._mask
            )
            done += step
            if done < keys.size:
                self._grow()
        return self.count

    def truncate(self, count: int) -> None:
        """Undo the newest numbers, so that `count` keys are left. Occurrences of older keys stay counted: `uncount`.

        Raises ValueError when there are fewer keys than `count`.
        """
        if not 0 <= count <= self.count:
            raise ValueError(f"cannot go back to {count} keys: {self.count} have numbers.")
        _remove_newest(self._numbers, self._order, self.count, count, self._mask)
        self.count = count

    def uncount(self, numbers: I4) -> None:
        """Take back occurrences that `insert` counted."""
        _subtract(numbers, self._counts)

    def keys(self) -> I8:
        """Return the keys by number: a view, valid until the next insert."""
        return self._order[: self.count]

    def counts(self) -> I8:
        """Return how often each key occurred: a view, valid until the next insert."""
        return self._counts[: self.count]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._order.nbytes + self._counts.nbytes + self._numbers.nbytes

    def _grow(self) -> None:
        if self._order.size > _MOST:
            raise ValueError(f"more than {_MOST:,} distinct keys: numbers are int32; make passes smaller.")
        room = 2 * self._order.size
        for name in ("_order", "_counts"):
            grown = np.empty(room, np.int64)
            grown[: self.count] = getattr(self, name)[: self.count]
            setattr(self, name, grown)
        self._resize_table(room)

    def _resize_table(self, room: int) -> None:
        size = 1 << max(4, (2 * room - 1).bit_length())
        self._mask = size - 1
        self._numbers = np.full(size, _EMPTY, np.int32)
        _rehash(self._numbers, self._order, self.count, self._mask)
