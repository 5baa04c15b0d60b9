"""Rows of one table on their way into hash order: in memory, and past a bound in a temporary file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tiercache.store.hashing import hash_keys
from tiercache.store.scratch_file import ScratchFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray

    from tiercache.store.counters import Counters
    from tiercache.store.table import Table

    Rows = tuple[NDArray[np.int64], NDArray[np.float32]]
    """Keys (n,) and rows (n, W): every field of a row side by side."""

KEY_BYTES = 8
_DIGIT_BITS = 8
_HASH_BITS = 64
ROW_COST = 32
"""Bytes that sorting takes for each row beside the row: its key, its hash, its place, and a spare."""


class Spill:
    """Takes rows in any order and gives them back in hash order, holding about ``memory_bytes`` at most.

    A quarter of that many bytes of rows wait in memory. More go to a file without a name in ``scratch``, made when it
    is needed: in batches, each in the order of the hash's first eight bits. The rows of one value of these are a
    part; one that is still too large is cut again by the next eight. So each row is written and read once for every
    factor of 256 by which all rows exceed the memory; ``counters`` count both. Rows of equal keys come back side by
    side, in the order in which they came; of more of them than memory holds, the last ``copies``.

    ``row`` says what stands beside a key where it is not a row of ``table``; ``total_rows``, where it is known, how
    many come: a file system without room for them shows when the file is made.
    """

    def __init__(
        self,
        table: Table,
        scratch: Path,
        memory_bytes: int,
        counters: Counters,
        *,
        row: np.dtype[Any] | None = None,
        copies: int = 2,
        total_rows: int | None = None,
    ) -> None:
        self.table = table
        self.rows = 0
        """Rows taken."""
        self._scratch, self._counters = scratch, counters
        self._file: ScratchFile | None = None
        self._file_rows = 0
        self._copies = copies
        row = np.dtype(("<f4", (table.row_bytes // 4,))) if row is None else row
        self._record = np.dtype([("key", "<i8"), ("row", row)])
        self._file_bytes = None if total_rows is None else total_rows * self._record.itemsize
        self._most = max(1, memory_bytes // 4 // (self._record.itemsize - 8 + ROW_COST))
        self._held: list[NDArray[np.void]] = []
        self._held_rows = 0
        self._batches: list[NDArray[np.int64]] = []
        """Of each batch cut by the first digit, where the rows of a digit begin in the file, and where the last end."""

    def close(self) -> None:
        """Give up the file, and forget all rows."""
        self._held, self._held_rows = [], 0
        self._batches, self._file_rows = [], 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows that wait in memory."""
        return self._held_rows * self._record.itemsize

    def add(self, keys: NDArray[np.int64], rows: NDArray[Any]) -> None:
        """Take a copy of rows (n, W) and their keys (n,). Raises StoreFullError."""
        for low in range(0, keys.size, self._most):
            part = slice(low, low + self._most)
            records = np.empty(keys[part].size, dtype=self._record)
            records["key"], records["row"] = keys[part], rows[part]
            if self._held_rows + records.size > self._most:
                self.flush()
            self._held.append(records)
            self._held_rows += records.size
        self.rows += keys.size

    def flush(self) -> None:
        """Move the rows that wait in memory to the file."""
        if self._held_rows:
            self._batches.append(self._cut(np.concatenate(self._held), 0))
        self._held, self._held_rows = [], 0

    def sorted(self, chunk_rows: int) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
        """Yield all rows in hash order, at most ``chunk_rows`` at a time; asked for once, all are gone."""
        if not self._batches:
            records = np.concatenate(self._held) if self._held else np.empty(0, dtype=self._record)
            self._held, self._held_rows = [], 0
            yield from self._sort(records, chunk_rows)
            return
        self.flush()
        batches, self._batches = self._batches, []
        for records in self._parts(batches, 1):
            yield from self._sort(records, chunk_rows)

    def _parts(self, batches: list[NDArray[np.int64]], digits: int) -> Iterator[NDArray[np.void]]:
        """Yield the records of batches that were cut by so many digits, of each digit by itself, cut until they fit."""
        last = digits * _DIGIT_BITS >= _HASH_BITS  # all records of a part have one hash, so one key
        for digit in range(1 << _DIGIT_BITS):
            runs = [(int(cuts[digit]), int(cuts[digit + 1])) for cuts in batches if cuts[digit] < cuts[digit + 1]]
            count = sum(high - low for low, high in runs)
            if count <= self._most or last:
                skipped = max(0, count - max(self._copies, self._most))
                parts = list(self._read(runs, count - skipped, skipped))
                if parts:
                    yield parts[0]
                continue
            finer = [self._cut(records, digits) for records in self._read(runs, self._most, 0)]
            yield from self._parts(finer, digits + 1)

    def _cut(self, records: NDArray[np.void], digits: int) -> NDArray[np.int64]:
        """Append records to the file in the order of the next digit of their hash; returns where each begins."""
        shift = np.uint64(_HASH_BITS - _DIGIT_BITS * (digits + 1))
        digit = ((hash_keys(records["key"], self.table.table_id) >> shift) & np.uint64(255)).astype(np.uint8)
        if self._file is None:
            what = f"sorting the rows of table {self.table.name!r} in {self._scratch}"
            self._file = ScratchFile(self._scratch, what, num_bytes=self._file_bytes)
        self._file.write(records[np.argsort(digit, kind="stable")], self._file_rows * self._record.itemsize)
        cuts = np.append(0, np.cumsum(np.bincount(digit, minlength=1 << _DIGIT_BITS))) + self._file_rows
        self._file_rows += records.size
        self._counters.add(spill_bytes_written=records.nbytes)
        return cuts

    def _read(self, runs: list[tuple[int, int]], most: int, skipped: int) -> Iterator[NDArray[np.void]]:
        """Yield the records of runs in the file, ``most`` at a time without the first ``skipped``, and free them."""
        assert self._file is not None
        size, left = self._record.itemsize, sum(high - low for low, high in runs) - skipped
        records, filled = np.empty(min(most, left), dtype=self._record), 0
        for low, high in runs:
            passed = min(skipped, high - low)
            skipped, at = skipped - passed, low + passed
            while at < high:
                count = min(high - at, records.size - filled)
                self._file.read(records[filled : filled + count], at * size)
                at, filled = at + count, filled + count
                if filled == records.size:
                    self._counters.add(spill_bytes_read=records.nbytes)
                    yield records
                    left -= filled
                    records, filled = np.empty(min(most, left), dtype=self._record), 0
            self._file.free(low * size, (high - low) * size)

    def _sort(self, records: NDArray[np.void], chunk_rows: int) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
        order = np.argsort(hash_keys(records["key"], self.table.table_id), kind="stable")
        for low in range(0, order.size, chunk_rows):
            chunk = records[order[low : low + chunk_rows]]
            yield np.ascontiguousarray(chunk["key"]), np.ascontiguousarray(chunk["row"])


def part_rows(row_bytes: int, memory_bytes: int) -> int:
    """Return how many rows may wait at once, so that sorting them stays within ``memory_bytes``."""
    return max(1, memory_bytes // 4 // (row_bytes + ROW_COST))


def file_bytes(rows: int, row_bytes: int, memory_bytes: int) -> int:
    """Return the most bytes of the file of so many rows: each is written once for every factor of 256."""
    most, times = part_rows(row_bytes, memory_bytes), 0
    left = rows
    while left > most:
        times, left = times + 1, left >> _DIGIT_BITS
    return times * rows * (row_bytes + KEY_BYTES)
