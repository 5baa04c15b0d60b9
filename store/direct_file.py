"""Ranges of files and whole files, past the page cache where the system allows it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from typing import TYPE_CHECKING

from tiercache.store.errors import BlockReadError
from tiercache.store.huge_pages import HUGE_BYTES, huge_pages

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray


PAGE_BYTES = 4096
_DIRECT_BYTES = 64 << 10
"""Shorter ranges are read through the page cache, which may have them already."""
_STEP_BYTES = 256 << 10
"""A file is written through the page cache in steps: long ones cost the kernel ten times the processor."""


def paged(num_bytes: int) -> int:
    """Return the bytes of the pages that hold so many."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def write_at(handle: int, direct: int | None, buffer: NDArray[np.uint8], at: int, size: int) -> bool:
    """Write bytes from byte ``at`` of a file on, whole pages past the page cache and what is beside them through it.

    They stand in ``buffer``, which is of ``huge_pages``, where they stand in the pages of the file: from byte
    ``at % PAGE_BYTES`` on. ``direct`` is the file, opened past the page cache. Returns False where that cannot be
    written to so. Raises OSError.
    """
    lead = at % PAGE_BYTES
    base, low, high = at - lead, paged(lead), (lead + size) // PAGE_BYTES * PAGE_BYTES
    could = True
    if direct is None or high - low < _DIRECT_BYTES:
        low = high = lead
    else:
        done = low
        try:
            while done < high:
                pages = os.pwrite(direct, buffer[done:high].data, base + done) // PAGE_BYTES
                if not pages:  # the file may grow by no page: what follows says why
                    high = done
                done += pages * PAGE_BYTES
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            high, could = done, False
    for done, stop in ((lead, low), (high, lead + size)):
        at = done
        while at < stop:
            at += os.pwrite(handle, buffer[at : min(stop, at + _STEP_BYTES)].data, base + at)
    return could


def write_whole(path: str, data: bytes | memoryview) -> None:
    """Make a file of bytes, through the page cache. It is not synced. Raises OSError."""
    view, done = memoryview(data), 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    try:
        while done < len(view):
            done += os.write(handle, view[done : done + _STEP_BYTES])
    finally:
        os.close(handle)


def read_whole(path: str, last: int | None = None) -> bytes:
    """Return the bytes of a file, or its ``last`` ones. Raises OSError, also where something else is in its place."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        size = _file_bytes(handle)
        return read_at(handle, size if last is None else last, 0 if last is None else max(0, size - last))
    finally:
        os.close(handle)


def read_at(handle: int, size: int, offset: int) -> bytes:
    """Return the bytes of an open file from ``offset`` on, fewer where it ends before. Raises OSError.

    One read of Linux returns at most 2,147,479,552 bytes.
    """
    parts = []
    while size and (part := os.pread(handle, size, offset)):
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return b"".join(parts)


def open_file(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a file, and nothing else that may be in its place. Raises OSError."""
    handle = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    try:
        _file_bytes(handle)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _file_bytes(handle: int) -> int:
    """Return the bytes of an open file. Raises OSError for what is none."""
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "no file is there, but something else")
    return status.st_size


class RangeReader:
    """Reads a few ranges at a time into memory of its own; from any thread."""

    def __init__(self) -> None:
        self._mine = threading.local()
        self._direct = getattr(os, "O_DIRECT", 0)

    def read(self, ranges: Sequence[tuple[str, int, int, int]]) -> list[NDArray[np.uint8]]:
        """Return the bytes [start, stop) of each (path, start, stop, size of the file).

        They stand in memory that this thread's next call uses again. A size below 0 is any. Raises BlockReadError for
        a file that is not there or has another size.
        """
        direct = self.reads_direct(stop - start for _, start, stop, _ in ranges)
        room = self._room(sum(paged(stop - start) + PAGE_BYTES for _, start, stop, _ in ranges))
        found = []
        for path, start, stop, size in ranges:
            low = start - start % PAGE_BYTES
            part, room = room[: paged(stop - low)], room[paged(stop - low) :]
            self._read(path, low, start, stop, size, part, direct=direct)
            found.append(part[start - low : stop - low])
        return found

    def reads_direct(self, num_bytes: Iterable[int]) -> bool:
        """Whether ranges of these bytes, read together, are read past the page cache, as far as is known.

        What goes with a long range is as cold as that; alone, the page cache may have it.
        """
        return self._direct != 0 and any(size >= _DIRECT_BYTES for size in num_bytes)

    def _read(
        self, path: str, low: int, start: int, stop: int, size: int, part: NDArray[np.uint8], *, direct: bool
    ) -> None:
        """Fill whole pages of memory with those of a file from ``low`` on, at least the bytes [start, stop)."""
        try:
            handle = self._open(path, direct=direct)
            try:
                if (seen := _file_bytes(handle)) != size and size >= 0:
                    raise BlockReadError(f"is not whole, as {path} has {seen:,} bytes of {size:,}")
                done = _fill(handle, part, low) if direct else start - low
                if done < stop - low:
                    _fill_cached(handle, path, part[: stop - low], low, done)
            finally:
                os.close(handle)
        except FileNotFoundError:
            raise BlockReadError(f"is missing, as there is no {path}") from None
        except OSError as error:
            raise BlockReadError(f"cannot be read, as {path} gives an error ({error})") from error

    def _open(self, path: str, *, direct: bool) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # what stands in the place of a file may have no end
        try:
            return os.open(path, flags | (self._direct if direct else 0))
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            self._direct = 0  # the file system has none
            return os.open(path, flags)

    def _room(self, num_bytes: int) -> NDArray[np.uint8]:
        held: NDArray[np.uint8] | None = getattr(self._mine, "held", None)
        if held is None or held.size < num_bytes:
            held = self._mine.held = huge_pages(max(num_bytes, HUGE_BYTES))
        return held


def _fill(handle: int, pages: NDArray[np.uint8], low: int) -> int:
    """Read whole pages past the page cache; returns how many bytes are there."""
    try:
        return os.preadv(handle, [pages.data], low)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0


def _fill_cached(handle: int, path: str, out: NDArray[np.uint8], low: int, done: int) -> None:
    """Read the rest of a range through the page cache, and nothing beside it."""
    fcntl.fcntl(handle, fcntl.F_SETFL, 0)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, low + done, out.size - done, os.POSIX_FADV_RANDOM)
    while done < out.size:
        count = os.preadv(handle, [out[done:].data], low + done)
        if count == 0:
            raise BlockReadError(f"is cut short, as {path} ends at byte {low + done:,}")
        done += count


def sync_file(path: str) -> None:
    """Return when the bytes of a file and its length are durable. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(handle)
    finally:
        os.close(handle)


def sync_folder(path: str) -> None:
    """Return when the names in a folder are durable. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
