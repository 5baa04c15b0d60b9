"""Next uses by epoch, computed once and kept in mapped files next to the store."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import numpy as np

from tiercache.errors import TierCacheError
from tiercache.planning.budgets import CHECKED_BYTES, distance_bytes
from tiercache.planning.next_use import NextUses, find_next_uses, views_of
from tiercache.planning.row_offsets import KEYS_PER_RANGE
from tiercache.rows.store_kernels import COMPUTE
from tiercache.sizes import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.planning.row_offsets import KeysOf, RowOffsets
    from tiercache.planning.schedule import Schedule

FOLDER = "schedule"


class NextUseFiles:
    """Next uses by epoch: 8 bytes for each key of each pass, in files that can be deleted at any time.

    A file of an earlier run is checked before it is used, and computed again if it is damaged. If the order repeats,
    one file serves all epochs and later runs; else the files of three epochs are kept. Without a folder (the memory
    engine, a store opened read-only) they are plain arrays. Thread-safe.
    """

    def __init__(
        self,
        schedule: Schedule,
        positions: RowOffsets,
        keys_of: KeysOf,
        folder: Path | None,
        *,
        keys_per_range: int = KEYS_PER_RANGE,
        share: str = "",
    ) -> None:
        """``keys_per_range``: keys of all passes that are processed at once.

        ``share``: the digest of the rank's part of the keys; empty for all keys.
        """
        self._keys_per_range = keys_per_range
        self._name = f"{share[:12]}{schedule.digest}"[:24]
        self._written: list[Path] = []
        self._schedule, self._positions, self._keys_of = schedule, positions, keys_of
        self._folder = None if folder is None else folder / FOLDER
        self._lock = threading.Lock()
        self._found: dict[int, NextUses] = {}

    def of(self, epoch: int) -> NextUses:
        """Return the next uses of ``epoch``."""
        name = 0 if self._schedule.repeats else epoch
        with self._lock:
            if name not in self._found:
                self._found[name] = self._open(name)
                for old in [e for e in self._found if e < name - 2]:
                    del self._found[old]
                    if self._folder is not None:
                        self._path(old).unlink(missing_ok=True)
            return self._found[name]

    def discard(self) -> None:
        """Remove the files that this object wrote, and their folder if it is empty then: the plan was refused."""
        with self._lock:
            for path in self._written:
                path.unlink(missing_ok=True)
            if self._written and not any(self._written[0].parent.iterdir()):
                self._written[0].parent.rmdir()
            self._written.clear()
            self._found.clear()

    def _find(self, epoch: int, out: NDArray[np.int32]) -> NextUses:
        return find_next_uses(
            self._schedule, epoch, self._positions, self._keys_of, out, keys_per_range=self._keys_per_range
        )

    def _open(self, epoch: int) -> NextUses:
        total = self._positions.total_rows
        if self._folder is None or total == 0:
            return self._find(epoch, np.empty((2, total), dtype=np.int32))
        path = self._path(epoch)
        try:
            if not path.exists() or not _is_intact(path, total):
                self._write(path, epoch, total)
            mapped = np.memmap(path, dtype=np.int32, mode="r", shape=(2, total))
        except OSError as error:
            raise TierCacheError(
                f"the schedule cannot be kept at {path} ({error.strerror or error}): delete the file there, or grant "
                "this user write permission"
            ) from error
        return views_of(mapped, self._positions)

    def _path(self, epoch: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{self._name}-{epoch}.gaps"

    def _write(self, path: Path, epoch: int, total: int) -> None:
        path.parent.mkdir(exist_ok=True)
        for old in path.parent.glob("*.gaps"):
            if not old.name.startswith(self._name):
                old.unlink()
        temporary = path.with_suffix(".part")
        distances, sums = distance_bytes(total)
        try:
            with temporary.open("w+b") as file:
                os.posix_fallocate(file.fileno(), 0, distances + sums)  # fails now if the disk is full
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise TierCacheError(
                f"the schedule needs {format_bytes(distances + sums)} in {path.parent}, which could not be allocated "
                f"({error.strerror}): free space there and run again"
            ) from error
        out = np.memmap(temporary, dtype=np.uint8, mode="r+", shape=(distances + sums,))
        found = out[:distances].view(np.int32).reshape(2, total)
        self._find(epoch, found)
        out[distances:].view("<u4")[:] = _checksums(out[:distances])
        out.flush()
        temporary.rename(path)
        self._written.append(path)


def _is_intact(path: Path, total: int) -> bool:
    """Return True if a file has distances of ``total`` positions, with their checksums."""
    distances, sums = distance_bytes(total)
    if path.stat().st_size != distances + sums:
        return False
    mapped = np.memmap(path, dtype=np.uint8, mode="r", shape=(distances + sums,))
    return np.array_equal(_checksums(mapped[:distances]), mapped[distances:].view("<u4"))


def _checksums(distances: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return the CRC32C of each ``CHECKED_BYTES`` bytes."""
    bounds = np.minimum(
        np.arange(distance_bytes(distances.size // 8)[1] // 4 + 1, dtype=np.int64) * CHECKED_BYTES, distances.size
    )
    return COMPUTE.checksums([(np.asarray(distances), bounds)])
