"""An external sort: hashes, each with a payload, in any order in and in hash order out, in bounded memory."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tiercache.store.bits import HASHES, hash_keys
from tiercache.store.files import ScratchFile, with_system_folder

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import DTypeLike, NDArray

    from tiercache.store.engines.engine import Counters
    from tiercache.store.table import Table

    Columns = tuple[NDArray[Any], ...]

HASH_BYTES = 8
ROW_COST = 32
"""Bytes per row that sorting takes in addition to its payload: its hash, its digit, its place, and a spare."""
HASH_COST = 20
"""Bytes that sorting takes for each hash without a payload: the hash, half of one for merges, and a spare."""
SLICES = 24
"""Parts of a sort that is done part by part, so that its files take a fraction of the sorted bytes."""
LEAST_SLICE_BYTES = 1 << 30
"""A smaller sort is never cut into parts."""
_DIGIT_BITS = 8
_HASH_BITS = 64
_BUFFER_BYTES = 1 << 20


class ExternalSorter:
    """Takes rows in any order and yields them in hash order, and holds about ``memory_bytes`` at most.

    A row is a hash and one value for each dtype of ``payload``. Rows wait in memory until it is full. More go to an
    unlinked file in ``folder``, which is created on first use, or in the system's temporary folder if ``folder`` cannot
    be written to or is full. Rows are written in batches, each in the order of the first eight bits of the hash. The
    rows of one value of these bits are a part. A part that is too large for the memory is cut again by the next eight
    bits. So each row is written and read once for every factor of 256 by which all rows exceed the memory; ``counters``
    count both. Rows of equal hashes keep their order of arrival; of more of them than the memory holds, only the last
    ``copies`` are yielded.

    ``what`` is the purpose of the sort, for errors. ``total_rows`` is the number of rows, if known: a file system
    without room for them is then found when the file is made.
    """

    def __init__(
        self,
        payload: Sequence[DTypeLike],
        folder: Path | None,
        what: str,
        memory_bytes: int,
        counters: Counters,
        *,
        copies: int = 2,
        total_rows: int | None = None,
    ) -> None:
        self.rows = 0
        """Rows taken."""
        self._folder, self._what, self._counters, self._copies = folder, what, counters, copies
        self._file: ScratchFile | None = None
        self._file_rows = 0
        self._names = ["hash", *(f"payload {i}" for i in range(len(payload)))]
        self._record = np.dtype(list(zip(self._names, ("<u8", *payload), strict=True)))
        self._file_bytes = None if total_rows is None else total_rows * self._record.itemsize
        self._most = part_rows(self._record.itemsize - HASH_BYTES, memory_bytes)
        self._buffer = np.empty(0, self._record)
        """Waiting rows, at the front. It grows as needed."""
        self._buffered_rows = 0
        self._batches: list[NDArray[np.int64]] = []
        """For each batch cut by the first digit: the first row of each digit in the file, and the end of the last."""

    def close(self) -> None:
        """Free the file, and forget all rows."""
        self._take()
        self._batches, self._file_rows = [], 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def usage(self) -> float:
        """The memory of waiting rows, as a share of the limit."""
        return self._buffer.size / self._most

    def add(self, hashes: NDArray[np.uint64], *payload: NDArray[Any] | int) -> None:
        """Copy rows: hashes (n,), and values (n, ...) or one for all rows. Raises StoreFullError."""
        columns = [np.broadcast_to(values, hashes.shape) if isinstance(values, int) else values for values in payload]
        taken = 0
        while taken < hashes.size:
            if self._buffered_rows == self._most:
                self._write()
            begin, self._buffered_rows = self._buffered_rows, min(self._most, self._buffered_rows + hashes.size - taken)
            if self._buffered_rows > self._buffer.size:
                least = _BUFFER_BYTES // self._record.itemsize
                larger = np.empty(min(self._most, max(least, 2 * self._buffered_rows)), self._record)
                larger[:begin] = self._buffer[:begin]
                self._buffer = larger
            count = self._buffered_rows - begin
            for name, values in zip(self._names, (hashes, *columns), strict=True):
                self._buffer[name][begin : self._buffered_rows] = values[taken : taken + count]
            taken += count
        self.rows += hashes.size

    def flush(self) -> None:
        """Move waiting rows to the file and free their memory. Raises StoreFullError."""
        self._write()
        self._take()

    def sorted(self, chunk_rows: int | None = None) -> Iterator[tuple[NDArray[Any], ...]]:
        """Yield all rows in hash order: hashes (n,), and values (n, ...) of each dtype of the payload.

        A chunk has at most ``chunk_rows`` rows; without a bound, all rows of each of its hashes. Yielded rows are
        dropped.
        """
        if not self._batches:
            yield from self._sort(self._take(), chunk_rows)
            return
        self.flush()
        batches, self._batches = self._batches, []
        for records in self._parts(batches, 1):
            yield from self._sort(records, chunk_rows)

    def _take(self) -> NDArray[np.void]:
        records = self._buffer[: self._buffered_rows]
        self._buffer, self._buffered_rows = self._buffer[:0].copy(), 0
        return records

    def _write(self) -> None:
        if self._buffered_rows:
            self._batches.append(self._cut(self._buffer[: self._buffered_rows], 0))
        self._buffered_rows = 0

    def _parts(self, batches: list[NDArray[np.int64]], digits: int) -> Iterator[NDArray[np.void]]:
        """Yield the records of batches that were cut by ``digits`` digits, digit by digit, cut until they fit."""
        last = digits * _DIGIT_BITS >= _HASH_BITS  # all records of a part have one hash
        for digit in range(1 << _DIGIT_BITS):
            runs = [(int(cuts[digit]), int(cuts[digit + 1])) for cuts in batches if cuts[digit] < cuts[digit + 1]]
            count = sum(high - low for low, high in runs)
            if count <= self._most or last:
                skipped = max(0, count - max(self._copies, self._most))
                yield from self._read(runs, count - skipped, skipped)
                continue
            finer = [self._cut(records, digits) for records in self._read(runs, self._most, 0)]
            yield from self._parts(finer, digits + 1)

    def _cut(self, records: NDArray[np.void], digits: int) -> NDArray[np.int64]:
        """Append records to the file in the order of the next digit of their hash; returns each digit's start."""
        if self._file is None:
            self._file = ScratchFile(with_system_folder(self._folder), self._what, num_bytes=self._file_bytes)
        shift = _HASH_BITS - _DIGIT_BITS * (digits + 1)
        if len(self._names) == 1:
            records["hash"].sort(kind="stable")
        else:  # by digits alone, which is a tenth of a sort
            records = records[np.argsort((records["hash"] >> np.uint64(shift)).astype(np.uint8), kind="stable")]
        self._file.write(records, self._file_rows * self._record.itemsize)
        first = int(records["hash"][0]) >> shift + _DIGIT_BITS << shift + _DIGIT_BITS
        firsts = np.array([first + (digit << shift) for digit in range(1 << _DIGIT_BITS)], np.uint64)
        cuts = np.append(np.searchsorted(records["hash"], firsts), records.size) + self._file_rows
        self._file_rows += records.size
        self._counters.add(spill_bytes_written=records.nbytes, spill_writes=1)
        return cuts

    def _read(self, runs: list[tuple[int, int]], most: int, skipped: int) -> Iterator[NDArray[np.void]]:
        """Yield the records of runs in the file, ``most`` at a time without the first ``skipped``, and free them."""
        assert self._file is not None
        size, remaining = self._record.itemsize, sum(high - low for low, high in runs) - skipped
        records, filled = np.empty(min(most, remaining), dtype=self._record), 0
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
                    remaining -= filled
                    records, filled = np.empty(min(most, remaining), dtype=self._record), 0
            self._file.free(low * size, (high - low) * size)

    def _sort(self, records: NDArray[np.void], chunk_rows: int | None) -> Iterator[tuple[NDArray[Any], ...]]:
        order: NDArray[np.int64] | None = None
        if len(self._names) == 1:
            records["hash"].sort(kind="stable")  # merges the sorted runs, in a third of the time of another sort
        else:
            order = np.argsort(records["hash"], kind="stable")
        step = chunk_rows or max(1, records.size)
        for low in range(0, records.size, step):
            chunk = records[low : low + step] if order is None else records[order[low : low + step]]
            yield tuple(np.ascontiguousarray(chunk[name]) for name in self._names)


def flush_largest(sorters: Collection[ExternalSorter]) -> None:
    """Flush the largest sorter if all together have more memory than one may have."""
    if sum(sorter.usage for sorter in sorters) > 1:
        max(sorters, key=lambda sorter: sorter.usage).flush()


def part_rows(payload_bytes: int, memory_bytes: int) -> int:
    """Return how many rows may wait at once, so that sorting them stays within ``memory_bytes``."""
    cost = 4 * (payload_bytes + ROW_COST) if payload_bytes else HASH_COST
    return max(1, memory_bytes // cost)


def file_bytes(rows: int, payload_bytes: int, memory_bytes: int) -> int:
    """Return the maximum bytes of the file of a sort: each row is written once for every factor of 256."""
    most, times = part_rows(payload_bytes, memory_bytes), 0
    remaining = rows
    while remaining > most:
        times, remaining = times + 1, remaining >> _DIGIT_BITS
    return times * rows * (payload_bytes + HASH_BYTES)


def slice_bytes(total_bytes: int) -> int:
    """Return the bytes of one part of a sort of ``total_bytes`` that is done part by part."""
    return max(LEAST_SLICE_BYTES, -(-total_bytes // SLICES))


def hash_slices(count: int, low: int = 0, high: int = HASHES) -> list[tuple[int, int]]:
    """Cut the hashes [low, high) into ``count`` neighboring ranges of about the same size."""
    bounds = [low + i * (high - low) // count for i in range(count + 1)]
    return list(pairwise(bounds))


class SortedCursor:
    """A position in a source, with the next rows in memory."""

    def __init__(self, parts: Iterable[Columns], *columns: DTypeLike, least: int = 0) -> None:
        """``columns`` are the dtypes of the columns after the hashes; ``fill`` reads if ``least`` rows are left."""
        self.ended = False
        """True if all remaining rows are in memory."""
        self._parts, self._least = iter(parts), least
        self._rows: Columns = tuple(np.empty(0, np.dtype(column)) for column in (np.uint64, *columns))

    @property
    def end(self) -> int:
        """The last hash in memory."""
        return int(self._rows[0][-1])

    def fill(self) -> bool:
        """Read more if few rows remain in memory; returns False at the end."""
        while not self.ended and self._rows[0].size <= self._least:
            part = next(self._parts, None)
            if part is None:
                self.ended = True
            elif self._rows[0].size:
                self._rows = tuple(np.concatenate(pair) for pair in zip(self._rows, part, strict=True))
            else:
                self._rows = part
        return bool(self._rows[0].size)

    def take(self, bound: int) -> Columns:
        """Remove and return the rows with hashes up to ``bound``."""
        at = int(np.searchsorted(self._rows[0], np.uint64(bound), side="right"))
        taken = tuple(column[:at] for column in self._rows)
        self._rows = tuple(column[at:] for column in self._rows)
        return taken


def merged(*cursors: SortedCursor) -> Iterator[tuple[Columns, ...]]:
    """Yield the rows of all cursors up to the same hash, bound after bound, until all rows are taken.

    All rows with the same hash are yielded together, unless one source cuts them into two parts.
    """
    while filled := [cursor for cursor in cursors if cursor.fill()]:
        ends = [cursor.end for cursor in filled if not cursor.ended]
        bound = min(ends) if ends else max(cursor.end for cursor in filled)
        yield tuple(cursor.take(bound) for cursor in cursors)


def below(cursor: SortedCursor, bound: int) -> Iterator[Columns]:
    """Yield the next rows of a cursor as long as their hashes are below ``bound``."""
    while cursor.fill() and (rows := cursor.take(min(cursor.end, bound - 1)))[0].size:
        yield rows


def hashed(table: Table, parts: Iterable[Columns]) -> Iterator[Columns]:
    """Yield parts of keys and other columns of a table, preceded by the keys' hashes."""
    return ((hash_keys(part[0], table.table_id), *part) for part in parts)


def rising(hashes: NDArray[np.uint64], after: int | None = None) -> bool:
    """Return whether each hash is greater than the one before it, and the first than ``after``."""
    return not np.any(hashes[1:] <= hashes[:-1]) and (after is None or not hashes.size or int(hashes[0]) > after)


def whole_keys(parts: Iterable[Columns]) -> Iterator[Columns]:
    """Yield the same rows, cut so that neighboring rows with equal values in the first column stay together."""
    pending: Columns | None = None
    for part in parts:
        rows = part if pending is None else tuple(np.concatenate(pair) for pair in zip(pending, part, strict=True))
        differs = rows[0] != rows[0][-1]
        last = rows[0].size - int(np.argmax(differs[::-1])) if np.any(differs) else 0
        pending = tuple(column[last:].copy() for column in rows)
        if last:
            yield tuple(column[:last] for column in rows)
    if pending is not None:
        yield pending
