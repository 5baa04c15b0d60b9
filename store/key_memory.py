"""What a process that looks keys up again and again remembers of the segments that it has read: where which key is.

Beside a training, rows stand in the order of their next uses: a segment has many short runs, a few keys meet nearly all
its key pages, and a lookup reads nearly all its keys. Segments never change, and the next lookup meets most of them
again. So of a segment whose keys were all read, 32 bits of the hash of each key stay in memory, and its row. They say
which rows may have a key that is looked for; only the key pages of these are read then.
"""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.store.hashing import hash_keys
from tiercache.store.segment_layout import KEY_PAGE_ROWS

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.segment import Segment
    from tiercache.store.table import Group

    Hashes = NDArray[np.uint64]
    Rows = NDArray[np.int64]

MOST_BYTES = 256 << 20
"""Of all that a process remembers, at 8 bytes a key; further segments are read as if nothing was."""
_ROW = np.uint64((1 << 32) - 1)


class _Keys(NamedTuple):
    """The keys of one table in one segment, from a range on."""

    first_range: int
    entries: NDArray[np.uint64]
    """Of each key, in order: the first half of its hash, and in place of the other one its row."""


class KeyMemory:
    """The keys of all stores that this process has open for reading, or had; from any thread."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.num_bytes = 0
        """Bytes of all keys that are known, and of those that lookups are learning."""
        self._known: dict[tuple[Path, int], dict[tuple[int, int, bytes], _Keys]] = {}
        """By store and segment; then by group, table and what the segment has."""
        self._lock = threading.Lock()

    def find(self, path: Path, segment: Segment, group: int, table: int) -> _Keys | None:
        """Return what is known of a table's keys in a segment."""
        mine = self._known.get((path, segment.id))
        return None if mine is None else mine.get((group, table, _content(segment, group)))

    def reserve(self, num_bytes: int) -> bool:
        """Count memory before it is allocated; return False, and count nothing, if it does not fit."""
        with self._lock:
            if self.num_bytes + num_bytes > self.most_bytes:
                return False
            self.num_bytes += num_bytes
            return True

    def release(self, num_bytes: int) -> None:
        """Stop counting memory that was reserved."""
        with self._lock:
            self.num_bytes -= num_bytes

    def add(self, path: Path, segment: Segment, group: int, table: int, made: _Keys) -> None:
        """Remember keys whose memory is reserved. The narrower of these and those that are known is forgotten."""
        with self._lock:
            mine, place = self._known.setdefault((path, segment.id), {}), (group, table, _content(segment, group))
            dropped = mine.get(place)
            if dropped is None or made.first_range < dropped.first_range:
                mine[place] = made
            else:
                dropped = made
            self.num_bytes -= 0 if dropped is None else dropped.entries.nbytes

    def keep(self, path: Path, segments: Collection[int]) -> None:
        """Forget a store's segments that are not among these."""
        with self._lock:
            for place in [place for place in self._known if place[0] == path and place[1] not in segments]:
                self.num_bytes -= sum(one.entries.nbytes for one in self._known.pop(place).values())


KEY_MEMORY = KeyMemory()


class Recall:
    """The keys of one store that one lookup knows, and those that it learns. Close it when the lookup ends."""

    def __init__(self, memory: KeyMemory, path: Path, segments: Collection[int]) -> None:
        self._memory, self._path = memory, path
        memory.keep(path, segments)
        self._learned: dict[tuple[int, int, int], tuple[_Keys, int]] = {}
        """By segment, group and table, where all keys are read: room for all, and how many have come."""

    def rows(self, segment: Segment, group: int, table: int, first_range: int, wanted: Hashes) -> Rows | None:
        """Return, in order, the rows from ``first_range`` on that may have one of the hashes; None where any may."""
        known = self._memory.find(self._path, segment, group, table)
        if known is None or known.first_range > first_range:
            return None
        low, high = known.entries.searchsorted(wanted & ~_ROW), known.entries.searchsorted(wanted | _ROW, side="right")
        places = [np.arange(a, b) for a, b in zip(low.tolist(), high.tolist(), strict=True) if a < b]
        found = (known.entries[np.concatenate([np.empty(0, np.int64), *places])] & _ROW).astype(np.int64)
        return np.unique(found[found >= segment.layouts[group].first_row_R[first_range]])

    def is_learning(
        self, segment: Segment, group: int, table: int, first_range: int, runs: int, wanted: Hashes
    ) -> bool:
        """Return whether all keys are to be read: where nearly all are read anyway, and there is room for them.

        runs: of the table's rows from ``first_range`` on.
        """
        layout = segment.layouts[group]
        rows = layout.rows_of_table(table, first_range)
        if not rows or layout.rows > int(_ROW) or wanted.size * runs * KEY_PAGE_ROWS < rows:
            return False
        if not self._memory.reserve(8 * rows):
            return False
        self._learned[segment.id, group, table] = _Keys(first_range, np.empty(rows, np.uint64)), 0
        return True

    def learn(self, segment: Segment, group: Group, table: int, keys: NDArray[np.int64], rows: Rows) -> None:
        """Take in keys that were read of a segment, and their rows."""
        place = segment.id, group.index, table
        if place in self._learned:
            made, begin = self._learned.pop(place)
            end = begin + keys.size
            made.entries[begin:end] = (hash_keys(keys, group.tables[table].table_id) & ~_ROW) | rows.astype(np.uint64)
            if end < made.entries.size:
                self._learned[place] = made, end
            else:
                made.entries.sort()
                self._memory.add(self._path, segment, group.index, table, made)

    def close(self) -> None:
        """Release the memory of segments that were not read to their end."""
        while self._learned:
            made, _ = self._learned.popitem()[1]
            self._memory.release(made.entries.nbytes)


def _content(segment: Segment, group: int) -> bytes:
    """Return what no other segment of the same number has: of its key pages the first keys and the checksums."""
    found = hashlib.blake2b(segment.first_keys[group].tobytes(), digest_size=16)
    found.update(segment.key_checksums[group].tobytes())
    return found.digest()
