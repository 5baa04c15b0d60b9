"""Rows of one table on their way into hash order: in memory, and past a bound in temporary files."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tiercache.store.full_disk import room_for
from tiercache.store.hashing import hash_keys

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from numpy.typing import NDArray

    from tiercache.store.counters import Counters
    from tiercache.store.table import Table

    Rows = tuple[NDArray[np.int64], NDArray[np.float32]]
    """Keys (n,) and rows (n, W): every field of a row side by side."""

_DIGIT_BITS = 8
_HASH_BITS = 64
ROW_COST = 32
"""Bytes that sorting takes for each row beside the row: its key, its hash, its place, and a spare."""


class Spill:
    """Takes rows in any order and gives them back in hash order, holding about ``memory_bytes`` at most.

    A quarter of that many bytes of rows wait in memory. More go to files in a folder of its own in ``scratch``, made
    when it is needed and removed by ``close``: one for each value of the hash's first eight bits. A file that is
    still too large is cut again by the next eight. So each row is written and read once for every factor of 256 by
    which all rows exceed the memory; ``counters`` count both. Rows of equal keys come back side by side, in the order
    in which they came; of more of them than memory holds, the last ``copies``.

    ``row`` says what stands beside a key where it is not a row of ``table``.
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
    ) -> None:
        self.table = table
        self.rows = 0
        """Rows taken."""
        self._scratch, self._counters = scratch, counters
        self._folder: Path | None = None
        self._copies = copies
        row = np.dtype(("<f4", (table.row_bytes // 4,))) if row is None else row
        self._record = np.dtype([("key", "<i8"), ("row", row)])
        self._most = max(1, memory_bytes // 4 // (self._record.itemsize - 8 + ROW_COST))
        self._held: list[NDArray[np.void]] = []
        self._held_rows = 0
        self._prefixes: set[str] = set()
        """Names of the files: the hash's first digits in hexadecimal."""

    def close(self) -> None:
        """Remove the files, and forget all rows."""
        self._held, self._held_rows = [], 0
        self._prefixes = set()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

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
        """Move the rows that wait in memory to files."""
        if self._held_rows:
            self._cut(np.concatenate(self._held), "")
        self._held, self._held_rows = [], 0

    def sorted(self, chunk_rows: int) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
        """Yield all rows in hash order, at most ``chunk_rows`` at a time; what was yielded is gone."""
        if not self._prefixes:
            records = np.concatenate(self._held) if self._held else np.empty(0, dtype=self._record)
            self._held, self._held_rows = [], 0
            yield from self._sort(records, chunk_rows)
            return
        self.flush()
        while self._prefixes:
            yield from self._sort(self._next_part(), chunk_rows)

    def _next_part(self) -> NDArray[np.void]:
        """Return the records of the first file, which is cut until they fit."""
        while True:
            prefix = min(self._prefixes)
            path = self._path(prefix)
            count = path.stat().st_size // self._record.itemsize
            last = len(prefix) * 4 >= _HASH_BITS  # all records have one hash, so one key
            if count <= self._most or last:
                skipped = max(0, count - max(self._copies, self._most)) if last else 0
                part = np.fromfile(path, dtype=self._record, offset=skipped * self._record.itemsize)
                self._counters.add(spill_bytes_read=part.nbytes)
            else:
                self._cut_file(path, prefix)
            path.unlink()
            self._prefixes.remove(prefix)
            if count <= self._most or last:
                return part

    def _cut_file(self, path: Path, prefix: str) -> None:
        with path.open("rb") as file:
            while (records := np.fromfile(file, dtype=self._record, count=self._most)).size:
                self._counters.add(spill_bytes_read=records.nbytes)
                self._cut(records, prefix)

    def _cut(self, records: NDArray[np.void], prefix: str) -> None:
        """Append records to the files of the next digit of their hash."""
        shift = _HASH_BITS - 4 * len(prefix) - _DIGIT_BITS
        digits = ((hash_keys(records["key"], self.table.table_id) >> np.uint64(shift)) & np.uint64(255)).astype(
            np.uint8
        )
        ordered = records[np.argsort(digits, kind="stable")]
        ends = np.cumsum(np.bincount(digits, minlength=256)).tolist()
        begin = 0
        for digit, end in enumerate(ends):
            if end > begin:
                self._append(f"{prefix}{digit:02x}", ordered[begin:end])
            begin = end

    def _append(self, prefix: str, records: NDArray[np.void]) -> None:
        path = self._path(prefix)
        what = f"sorting the rows of table {self.table.name!r} in {self._scratch}"
        with room_for(records.nbytes, path, what), path.open("ab") as file:
            file.write(records.view(np.uint8).data)
        self._prefixes.add(prefix)
        self._counters.add(spill_bytes_written=records.nbytes)

    def _path(self, prefix: str) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix=".tiercache-sort-", dir=self._scratch))
        return self._folder / prefix

    def _sort(self, records: NDArray[np.void], chunk_rows: int) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
        order = np.argsort(hash_keys(records["key"], self.table.table_id), kind="stable")
        for low in range(0, order.size, chunk_rows):
            chunk = records[order[low : low + chunk_rows]]
            yield np.ascontiguousarray(chunk["key"]), np.ascontiguousarray(chunk["row"])


def part_rows(table: Table, memory_bytes: int) -> int:
    """Return how many rows of ``table`` may wait at once, so that sorting them stays within ``memory_bytes``."""
    return max(1, memory_bytes // 4 // (table.row_bytes + ROW_COST))
