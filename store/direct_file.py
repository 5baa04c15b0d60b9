"""Whole files and ranges of files, past the page cache where the system allows it."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

from tiercache.store.errors import BlockReadError
from tiercache.store.huge_pages import huge_pages

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

PAGE_BYTES = 4096
_DIRECT_BYTES = 64 << 10
"""Shorter ranges are read through the page cache, which may have them already."""
_STEP_BYTES = 256 << 10
"""A fresh file is written through the page cache in steps: long ones cost the kernel ten times the processor."""


def paged(num_bytes: int) -> int:
    """Return the bytes of the pages that hold so many."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def write_file(path: Path, buffer: NDArray[np.uint8], size: int) -> None:
    """Make a file of the first ``size`` bytes of ``huge_pages``, its whole pages past the page cache.

    The rest goes through it: cutting a file that was written in whole pages costs the kernel a read. It is not synced.
    Raises OSError, after which a part of the file may be there.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        done = _write_direct(path, buffer[: size // PAGE_BYTES * PAGE_BYTES])
        while done < size:
            done += os.pwrite(handle, buffer[done : min(size, done + _STEP_BYTES)].data, done)
    finally:
        os.close(handle)


def _write_direct(path: Path, pages: NDArray[np.uint8]) -> int:
    """Write whole pages; returns how many bytes of them were written, 0 where the file system cannot."""
    if not pages.size:
        return 0
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
    except (OSError, AttributeError):
        return 0
    try:
        return os.pwrite(handle, pages.data, 0) // PAGE_BYTES * PAGE_BYTES
    except OSError as error:
        if error.errno == errno.EINVAL:
            return 0
        raise
    finally:
        os.close(handle)


class RangeReader:
    """Reads a few ranges at a time into memory of its own; from any thread."""

    def __init__(self) -> None:
        self._mine = threading.local()

    def read(self, ranges: Sequence[tuple[Path, int, int, int]]) -> list[NDArray[np.uint8]]:
        """Return the bytes [start, stop) of each (path, start, stop, size of the file).

        They stand in memory that this thread's next call uses again. Raises BlockReadError for a file that is not
        there or has another size.
        """
        handles: list[int] = []
        try:
            for path, start, stop, size in ranges:
                handles.append(_open(path, size))
                if stop - start < _DIRECT_BYTES:
                    # Nothing beside the range, but at once: the disk fetches it while longer ranges are read.
                    _advise(handles[-1], start, stop, early=len(ranges) > 1)
            found: dict[int, NDArray[np.uint8]] = {}
            for i in sorted(range(len(ranges)), key=lambda i: ranges[i][1] - ranges[i][2]):
                path, start, stop, _ = ranges[i]
                found[i] = self._read(handles[i], path, start, stop, i)
            return [found[i] for i in range(len(ranges))]
        finally:
            for handle in handles:
                os.close(handle)

    def _read(self, handle: int, path: Path, start: int, stop: int, place: int) -> NDArray[np.uint8]:
        low = start - start % PAGE_BYTES
        buffer = self._buffer(place, stop - low)
        done = self._read_direct(handle, path, low, stop, buffer) if stop - start >= _DIRECT_BYTES else 0
        done = max(done, start - low)
        while done < stop - low:
            try:
                count = os.preadv(handle, [buffer[done : stop - low].data], low + done)
            except OSError as error:
                raise BlockReadError(f"cannot be read ({error})") from error
            if count == 0:
                raise BlockReadError(f"is cut short, as {path} ends at byte {low + done:,}")
            done += count
        return buffer[start - low : stop - low]

    @staticmethod
    def _read_direct(handle: int, path: Path, low: int, stop: int, buffer: NDArray[np.uint8]) -> int:
        """Read whole pages from a page on; returns how many bytes are there."""
        try:
            direct = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except (OSError, AttributeError):
            return 0
        try:
            return min(stop - low, os.preadv(direct, [buffer[: paged(stop - low)].data], low))
        except OSError as error:
            if error.errno == errno.EINVAL:
                return 0
            raise BlockReadError(f"cannot be read, as {path} gives an error ({error})") from error
        finally:
            os.close(direct)

    def _buffer(self, place: int, num_bytes: int) -> NDArray[np.uint8]:
        held: dict[int, NDArray[np.uint8]] = self._mine.__dict__.setdefault("held", {})
        if place not in held or held[place].size < num_bytes:
            held[place] = huge_pages(num_bytes)
        return held[place]


def _advise(handle: int, start: int, stop: int, *, early: bool) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, start, stop - start, os.POSIX_FADV_RANDOM)
        if early:
            os.posix_fadvise(handle, start, stop - start, os.POSIX_FADV_WILLNEED)


def _open(path: Path, size: int) -> int:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise BlockReadError(f"is missing, as there is no {path}") from None
    except OSError as error:
        raise BlockReadError(f"cannot be read ({error})") from error
    seen = os.fstat(handle).st_size
    if seen != size:
        os.close(handle)
        raise BlockReadError(f"is not whole, as {path} has {seen:,} bytes of {size:,}")
    return handle


def sync_path(path: Path) -> None:
    """Return when a file, or the names in a folder, are durable. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
