"""From raw keys to positions on a CUDA device: `key_index`, with the same answers and the same bytes per key."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tiercache.kernels.arrays import I8, U8, expect
from tiercache.kernels.cpu.key_index import KeySet, Missing, capacity_for, check_entries, check_key_sets
from tiercache.kernels.cuda.launch import Device, blocks_for, launch_parts, struct, view

_INSERT, _FIND = struct("InsertPart", "key_index"), struct("FindPart", "key_index")
_TASK = 256  # keys


def bytes_for(num_keys: int, num_tables: int) -> int:
    """Return the bytes of an index for `num_keys` keys of `num_tables` tables: one word more than on a CPU."""
    return 16 * capacity_for(num_keys) + 8 + 8 * max(1, num_tables)


class MissingKeys:
    """The keys that the searches of a batch did not find: on the device until they are read."""

    def __init__(self, device: Device) -> None:
        self._device, self._words = device, device.empty(2, np.uint64)
        self.address = view(device, "missing", self._words, np.uint64, written=True).address
        self.forget()

    def forget(self) -> None:
        """Start a new batch."""
        self._device.launch("key_index.forget_missing", 1, (self.address,))

    def read(self) -> Missing:
        """Wait for the searches and return the missing keys."""
        count, first = self._device.read(self._words).view(np.int64).tolist()
        return Missing(count, first)


class KeyIndex:
    """Positions (int32) of the keys of several tables; table t has id `table_ids[t]` (a NumPy array).

    num_keys: the maximum number of keys that fit. Nothing waits for the device. Do not search during an insert on
    another stream.
    """

    def __init__(self, device: Device, num_keys: int, table_ids: U8) -> None:
        self._device = device
        expect("table_ids", table_ids, np.uint64)
        self._table_ids = [int(table_id) for table_id in table_ids]
        self.capacity = capacity_for(num_keys)
        self.count = 0
        """Keys in the index."""
        # one more word, so that places can begin at a multiple of 16 bytes whatever the memory's alignment
        self._memory = device.empty(2 * self.capacity + 1, np.uint64)
        address = view(device, "places", self._memory, np.uint64, written=True).address
        self._places = (address + 15) // 16 * 16
        self._oov_memory = device.empty(max(1, len(self._table_ids)), np.uint64)
        self._oov = view(device, "apart", self._oov_memory, np.uint64, written=True).address
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the index."""
        return int(self._memory.nbytes) + int(self._oov_memory.nbytes)

    def clear(self) -> None:
        """Remove all keys."""
        threads = max(self.capacity, len(self._table_ids))
        arguments = (self._places, self.capacity, self._oov, len(self._table_ids))
        self._device.launch("key_index.clear", blocks_for(self._device, -(-threads // 32)), arguments)
        self.count = 0

    def extend(self, key_sets: Sequence[KeySet]) -> None:
        """Add key sets, or parts of them, with keys on the device, in one launch: no key is in the index yet.

        Raises ValueError before anything is changed.
        """
        seen = [view(self._device, "keys", key_set.keys, np.int64) for key_set in key_sets]
        more = check_key_sets(key_sets, len(self._table_ids), self.count, self.capacity)
        parts = [
            (keys.address, first, keys.size, table, self._table_ids[table])
            for keys, (table, _, first) in zip(seen, key_sets, strict=True)
        ]
        tasks = [-(-part[2] // _TASK) for part in parts]
        arguments = (self._places, self.capacity, self._oov)
        launch_parts(self._device, "key_index.insert", _INSERT, parts, tasks, *arguments)
        self.count += more

    def find(self, keys: Any, entry_starts: I8, tables: I8, positions: Any, missing: MissingKeys | None = None) -> None:
        """Write the position of each key (E,) to `positions` (E,), -1 if it is missing, and add those to `missing`.

        The entries of feature f, of table `tables[f]`, are `entry_starts[f]` to `entry_starts[f + 1]`, NumPy arrays.
        """
        seen = view(self._device, "keys", keys, np.int64)
        to = view(self._device, "positions", positions, np.int32, written=True)
        if to.size != seen.size:
            raise ValueError(f"{to.size} positions cannot hold those of {seen.size} keys.")
        check_entries(seen.size, entry_starts, tables, len(self._table_ids))
        cuts = entry_starts.tolist()
        parts = [
            (first, last, table, self._table_ids[table])
            for table, first, last in zip(tables.tolist(), cuts[:-1], cuts[1:], strict=True)
        ]
        tasks = [-(-(last - first) // _TASK) for first, last, _, _ in parts]
        words = missing.address if missing is not None else 0
        arguments = (seen.address, self._places, self.capacity, self._oov, to.address, words)
        launch_parts(self._device, "key_index.find", _FIND, parts, tasks, *arguments)
