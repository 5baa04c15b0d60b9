"""From raw keys to positions: an open-addressing index over the key sets of several tables.

A place has 16 bytes: the key, and table and position in one word, so one access reads both. The search for a key begins
at the low bits of `mix(key ^ table id)` (key sets are ordered by the high bits, and a rank has one range of them) and
continues place by place; a match is one of key and table. INT64_MIN marks an empty place, so the out-of-vocabulary row,
whose key it is, has its position outside of the places, one per table. Nothing is ever removed.

Capacity is a power of two with at most 0.8 of the places taken: 20 to 40 bytes per key.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from tiercache.kernels.arrays import I4, I8, U8, Matrix, Word, Written, expect, same_length
from tiercache.kernels.cpu.compile import inlined, parallel, serial, worker
from tiercache.kernels.cpu.hashing import mix_word
from tiercache.kernels.cpu.kernel_threads import threads
from tiercache.kernels.cpu.simd import prefetch

EMPTY = -(1 << 63)
MOST_POSITIONS = (1 << 31) - 1
_NOWHERE = (1 << 32) - 1
_EMPTY, _LOW, _HALF = np.int64(EMPTY), np.int64(_NOWHERE), np.int64(32)
_AHEAD = 8  # keys between prefetching memory and using it
_PART_KEYS = 4096


class KeySet(NamedTuple):
    """Distinct keys of one table, with consecutive positions from `first_position`."""

    table: int
    keys: Any
    first_position: int


@dataclass(frozen=True, slots=True)
class Missing:
    """Entries of a batch whose keys are not in the index."""

    count: int
    first: int
    """The least such entry; -1 if there is none."""


def capacity_for(num_keys: int) -> int:
    """Return the number of places of an index for `num_keys` keys. Raises ValueError if positions do not fit int32."""
    if not 0 <= num_keys <= MOST_POSITIONS:
        raise ValueError(f"an index for {num_keys:,} keys: positions are int32, so at most {MOST_POSITIONS:,} fit.")
    return 1 << max(4, (-(-num_keys * 5 // 4) - 1).bit_length())


def bytes_for(num_keys: int, num_tables: int) -> int:
    """Return the bytes of an index for `num_keys` keys of `num_tables` tables."""
    return 16 * capacity_for(num_keys) + 8 * num_tables


def check_key_sets(key_sets: Sequence[KeySet], num_tables: int, count: int, capacity: int) -> int:
    """Return the number of these keys. Raises ValueError if they do not fit an index that has `count` keys."""
    for table, keys, first in key_sets:
        last = first + keys.shape[0] - 1
        _check_table(table, num_tables)
        if first < 0 or last > MOST_POSITIONS:
            raise ValueError(f"positions {first:,} to {last:,} must be in [0, {MOST_POSITIONS:,}].")
    more = sum(int(key_set.keys.shape[0]) for key_set in key_sets)
    if count + more > capacity * 4 // 5:
        raise ValueError(
            f"the index has {count:,} keys and room for {capacity * 4 // 5:,}, but {more:,} more were given: "
            "create one with more room. Nothing was changed."
        )
    return more


def _check_table(table: int, num_tables: int) -> None:
    if not 0 <= table < num_tables:
        raise ValueError(f"unknown table {table}: the index has {num_tables} tables, counted from 0.")


def check_entries(num_keys: int, starts: I8, tables: I8, num_tables: int) -> None:
    """Raise ValueError if entry starts and tables of a batch's features do not fit."""
    if starts.size != tables.size + 1 or (np.diff(starts) < 0).any() or starts[0] != 0 or starts[-1] != num_keys:
        raise ValueError(f"{tables.size} features and {num_keys} keys do not fit entry starts {starts.tolist()}.")
    for table in (int(tables.min()), int(tables.max())) if tables.size else ():
        _check_table(table, num_tables)


@inlined
def _home(key, table_id, mask):  # type: ignore[no-untyped-def]
    return np.int64(mix_word(np.uint64(key) ^ table_id) & np.uint64(mask))


@serial
def _insert(
    keys: I8, table: int, table_id: Word, first_position: int, places: Written[Matrix[I8]], oov: Written[I8], mask: int
) -> None:
    for i in range(keys.size):
        if i + _AHEAD < keys.size:
            prefetch(places, 2 * _home(keys[i + _AHEAD], table_id, mask))
        key = keys[i]
        if key == _EMPTY:
            oov[table] = first_position + i
            continue
        place = _home(key, table_id, mask)
        while places[place, 0] != _EMPTY:
            place = (place + 1) & mask
        places[place, 0] = key
        places[place, 1] = (table << _HALF) | (first_position + i)


@worker
def _find_stretch(keys, table, table_id, start, stop, places, oov, mask, positions, missing):  # type: ignore[no-untyped-def]
    for i in range(start, stop):
        if i + _AHEAD < stop:
            prefetch(places, 2 * _home(keys[i + _AHEAD], table_id, mask))
        key = keys[i]
        found = np.int64(-1)
        if key == _EMPTY:
            found = oov[table] if oov[table] != _LOW else found
        else:
            place = _home(key, table_id, mask)
            while places[place, 0] != _EMPTY:
                if places[place, 0] == key and places[place, 1] >> _HALF == table:
                    found = places[place, 1] & _LOW
                    break
                place = (place + 1) & mask
        positions[i] = found
        if found < 0:
            if missing[0] == 0:
                missing[1] = i
            missing[0] += 1


@parallel
def _find(
    keys: I8,
    starts: I8,
    tables: I8,
    table_ids: U8,
    places: Matrix[I8],
    oov: I8,
    mask: int,
    positions: Written[I4],
    missing: Written[Matrix[I8]],
    parts: int,
) -> None:
    for part in prange(parts):
        low, high = keys.size * part // parts, keys.size * (part + 1) // parts
        for f in range(tables.size):
            start, stop = max(low, starts[f]), min(high, starts[f + 1])
            if start < stop:
                table = tables[f]
                _find_stretch(
                    keys, table, table_ids[table], start, stop, places, oov, mask, positions, missing[part]
                )  # fmt: skip


class KeyIndex:
    """Positions (int32) of the keys of several tables; table t has id `table_ids[t]`.

    num_keys: the maximum number of keys that fit. Not thread-safe.
    """

    def __init__(self, num_keys: int, table_ids: U8) -> None:
        expect("table_ids", table_ids, np.uint64)
        self._table_ids = table_ids.copy()
        self.capacity = capacity_for(num_keys)
        self.count = 0
        """Keys in the index."""
        self._places = np.empty((self.capacity, 2), np.int64)
        self._oov = np.empty(self._table_ids.size, np.int64)
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the index."""
        return self._places.nbytes + self._oov.nbytes

    def clear(self) -> None:
        """Remove all keys."""
        self._places[:, 0] = EMPTY
        self._oov[:] = _NOWHERE
        self.count = 0

    def extend(self, key_sets: Sequence[KeySet]) -> None:
        """Add key sets, or parts of them: no key is in the index yet.

        Raises ValueError before anything is changed.
        """
        for key_set in key_sets:
            expect("keys", key_set.keys, np.int64)
        more = check_key_sets(key_sets, self._table_ids.size, self.count, self.capacity)
        for table, keys, first in key_sets:
            _insert(keys, table, self._table_ids[table], first, self._places, self._oov, self.capacity - 1)
        self.count += more

    def find(self, keys: I8, entry_starts: I8, tables: I8, positions: I4) -> Missing:
        """Write the position of each key (E,) to `positions` (E,), -1 if it is missing; return the missing keys.

        The entries of feature f, of table `tables[f]`, are `entry_starts[f]` to `entry_starts[f + 1]`. On all threads:
        only the training thread may call it.
        """
        same_length(keys=keys, positions=positions)
        check_entries(keys.size, entry_starts, tables, self._table_ids.size)
        parts = max(1, min(threads(), keys.size // _PART_KEYS))
        missing = np.zeros((parts, 8), np.int64)  # a cache line each
        _find(
            keys, entry_starts, tables, self._table_ids, self._places, self._oov, self.capacity - 1, positions,
            missing, parts,
        )  # fmt: skip
        count = int(missing[:, 0].sum())
        return Missing(count, int(missing[missing[:, 0] > 0, 1].min()) if count else -1)
