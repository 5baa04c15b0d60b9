"""Hashes cut into parts by their first bits, each small enough for memory: several parts wait in a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import numpy as np

from tiercache.store.errors import StoreError
from tiercache.store.full_disk import FULL, check_room, full_disk, room_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from numpy.typing import DTypeLike, NDArray

    UInt64s = NDArray[np.uint64]
    Notes = NDArray[Any]

BATCH_ROWS = 1 << 22
"""Hashes that wait in memory, and are cut and written together."""
_WHAT = "the check of the keys of a store"


class HashParts:
    """Takes hashes with a note for each, and gives them back part by part.

    Each is written once and read once, whatever their number. The file has no name: it goes with the process.
    """

    def __init__(self, folder: Path | None, rows: int, part_rows: int, note: DTypeLike = np.uint32) -> None:
        """Take up to ``rows`` hashes, so that a part has about ``part_rows`` at most; ``note`` is the dtype of notes.

        The file is in ``folder``; in the temporary directory where this process may not write there, or where there is
        no room. Raises StoreFullError.
        """
        self._num_parts = max(1, -(-rows // part_rows))
        self._note = np.dtype(note)
        self._entry_bytes = 8 + self._note.itemsize
        self._held: list[tuple[Notes, UInt64s]] = []
        self._held_rows = 0
        self._batches: list[tuple[int, list[int]]] = []
        """Where each begins in the file, and which of its hashes is the first of each part, and how many there are."""
        self._end = 0
        self._file: BinaryIO | None = None
        if self._num_parts > 1:
            self._file, self._folder = _unnamed(folder, rows * self._entry_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, note: Any, hashes: UInt64s) -> None:
        """Take hashes (n,) and their notes, (n,) or one for all; keeps the arrays. Raises StoreFullError."""
        self._held.append((np.broadcast_to(np.asarray(note, self._note), hashes.shape), hashes))
        self._held_rows += hashes.size
        if self._file is not None and self._held_rows >= BATCH_ROWS:
            self._write(self._file)

    def parts(self) -> Iterator[tuple[UInt64s, Notes]]:
        """Yield hashes and notes of each part, in the order in which they came; what was yielded is gone."""
        if self._file is None:
            yield self._take()
            return
        self._write(self._file)
        self._file.flush()
        for part in range(self._num_parts):
            found = [
                self._read(self._file.fileno(), at, bounds[part], bounds[part + 1], bounds[-1])
                for at, bounds in self._batches
            ]
            yield np.concatenate([hashes for hashes, _ in found]), np.concatenate([notes for _, notes in found])

    def _take(self) -> tuple[UInt64s, Notes]:
        """Return all that waits in memory."""
        held, self._held, self._held_rows = self._held, [], 0
        notes = np.concatenate([np.empty(0, self._note), *(notes for notes, _ in held)])
        return np.concatenate([np.empty(0, np.uint64), *(hashes for _, hashes in held)]), notes

    def _write(self, file: BinaryIO) -> None:
        """Append what waits to the file: its hashes, part by part, then their notes in the same order."""
        hashes, notes = self._take()
        parts = ((hashes >> np.uint64(32)) * np.uint64(self._num_parts)) >> np.uint64(32)
        parts = parts.astype(np.min_scalar_type(self._num_parts))
        order = np.argsort(parts, kind="stable")
        bounds = np.searchsorted(parts[order], np.arange(self._num_parts), side="left")
        with room_for(hashes.size * self._entry_bytes, self._folder, _WHAT):
            file.write(hashes[order].data)
            file.write(notes[order].view(np.uint8).data)
        self._batches.append((self._end, [*bounds.tolist(), hashes.size]))
        self._end += hashes.size * self._entry_bytes

    def _read(self, handle: int, at: int, low: int, high: int, rows: int) -> tuple[UInt64s, Notes]:
        hashes, notes = np.empty(high - low, np.uint64), np.empty(high - low, self._note)
        _fill(handle, at + low * 8, hashes.view(np.uint8))
        _fill(handle, at + rows * 8 + low * notes.itemsize, notes.view(np.uint8))
        return hashes, notes


def _unnamed(folder: Path | None, num_bytes: int) -> tuple[BinaryIO, Path]:
    """Make a file without a name where there is room for so many bytes."""
    temporary = Path(tempfile.gettempdir())
    for place in (temporary,) if folder is None else (folder, temporary):
        try:
            check_room(place, num_bytes)
            return tempfile.TemporaryFile(dir=place), place
        except OSError as error:
            problem: StoreError = StoreError(
                f"{_WHAT} needs a file of {num_bytes:,} bytes and {place} takes none ({error}): set TMPDIR"
            )
            if error.errno in FULL:
                problem = full_disk(place, error, num_bytes).during(_WHAT, num_bytes)
    raise problem


def _fill(handle: int, offset: int, out: NDArray[np.uint8]) -> None:
    done = 0
    while done < out.size:
        count = os.preadv(handle, [out[done:].data], offset + done)
        if count == 0:
            raise StoreError(f"the file of {_WHAT} was cut short by another process: run it again")
        done += count
