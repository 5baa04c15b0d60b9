"""Row marks: two bits for each row of a group, written in ascending passes and read by range."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np

from tiercache.store.files import ScratchFile

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

IDLE, STALE, USED = 0, 1, 2
"""What a row is to a schedule: the newest of a key that the schedule does not use, not the newest, or the newest of a
key that it does use."""
ROWS_PER_BYTE = 4
_WINDOW_ROWS = 4 << 20
_SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)


class RowMarks:
    """Marks of the rows 0 .. ``rows`` - 1, all IDLE at first, in a temporary file of a quarter of a byte a row.

    Reads and writes are of whole windows of 1 MiB, however the marked rows are spread. Memory: 4 MiB.
    """

    def __init__(self, rows: int, folder: Path, what: str) -> None:
        """Raises StoreFullError."""
        self._rows = rows
        self._file = ScratchFile(folder, what)
        self._file.extend(-(-rows // ROWS_PER_BYTE))
        self._window, self._marks = -1, np.empty(0, np.uint8)

    def close(self) -> None:
        """Free the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set(self, codes: NDArray[np.uint64]) -> None:
        """Mark rows, given as ``mark_codes`` makes them, (n,) in ascending order. Raises StoreFullError."""
        rows, marks = (codes >> np.uint64(1)).astype(np.int64), (codes & np.uint64(1)).astype(np.uint8) + STALE
        done = 0
        while done < rows.size:
            window = int(rows[done]) // _WINDOW_ROWS
            end = done + int(rows[done:].searchsorted((window + 1) * _WINDOW_ROWS))
            if window != self._window:
                self.flush()
                first = window * _WINDOW_ROWS
                self._window, self._marks = window, self.read(first, min(first + _WINDOW_ROWS, self._rows))
            self._marks[rows[done:end] - window * _WINDOW_ROWS] = marks[done:end]
            done = end

    def flush(self) -> None:
        """Write the last window; ``read`` sees it from now on. Raises StoreFullError."""
        if self._window >= 0:
            marks = np.zeros(-(-self._marks.size // ROWS_PER_BYTE) * ROWS_PER_BYTE, np.uint8)
            marks[: self._marks.size] = self._marks
            packed = np.bitwise_or.reduce(marks.reshape(-1, ROWS_PER_BYTE) << _SHIFTS, axis=1)
            self._file.write(packed, self._window * _WINDOW_ROWS // ROWS_PER_BYTE)
        self._window, self._marks = -1, np.empty(0, np.uint8)

    def read(self, low: int, high: int) -> NDArray[np.uint8]:
        """Return the marks of the rows [low, high), as of the last ``flush``: (high - low,)."""
        begin = low // ROWS_PER_BYTE
        packed = np.empty(-(-high // ROWS_PER_BYTE) - begin, np.uint8)
        self._file.read(packed, begin)
        marks = ((packed[:, None] >> _SHIFTS) & np.uint8(3)).reshape(-1)
        return marks[low - begin * ROWS_PER_BYTE : high - begin * ROWS_PER_BYTE]


def mark_codes(rows: NDArray[np.int64], mark: int) -> NDArray[np.uint64]:
    """Return the codes of rows (n,) that are all STALE or all USED, for ``RowMarks.set``; codes sort by row."""
    codes: NDArray[np.uint64] = (rows.astype(np.uint64) << np.uint64(1)) | np.uint64(mark - STALE)
    return codes
