"""RangeReader: ranges of files, several read at a time."""

from __future__ import annotations

import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.store.files import (
    DIRECT_BYTES,
    HUGE_BYTES,
    PAGE_BYTES,
    READ_FLAGS,
    file_bytes,
    huge_pages,
    open_direct,
    paged,
    read_cached,
    read_direct,
)
from tiercache.store.store_errors import BlockReadError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

REQUESTS = 8
"""Ranges of one read that are requested at a time: one at a time leaves an SSD idle between short ones."""


class RangeReader:
    """Reads ranges of files into memory that the thread's next call overwrites; from any thread.

    Raises BlockReadError for a file that is missing or has another size. A size below 0 is not checked.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def read(self, ranges: Sequence[tuple[str, int, int, int]]) -> list[NDArray[np.uint8]]:
        """Return the bytes [start, stop) of each of a few (path, start, stop, size of the file)."""
        # Short ranges next to a long one are as cold; only short ones alone may be in the page cache.
        direct = any(stop - start >= DIRECT_BYTES for _, start, stop, _ in ranges)
        pages = self._buffer(sum(paged(stop - start) + PAGE_BYTES for _, start, stop, _ in ranges))
        found = []
        for path, start, stop, size in ranges:
            low = start - start % PAGE_BYTES
            part, pages = pages[: paged(stop - low)], pages[paged(stop - low) :]
            with _opened(path, size, direct=direct) as file:
                file.read(low, stop, part)
            found.append(part[start - low : stop - low])
        return found

    def read_many(
        self, path: str, start_R: NDArray[np.int64], stop_R: NDArray[np.int64], size: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return memory with the bytes [start, stop) of each range of a file, and the place (R,) of each in it.

        The ranges are in ascending order; so are the places. Reads REQUESTS of them at a time.
        """
        direct = bool((stop_R - start_R >= DIRECT_BYTES).any())
        low_R = start_R - start_R % PAGE_BYTES if direct else start_R
        room_R = -(-(stop_R - low_R) // PAGE_BYTES) * PAGE_BYTES if direct else stop_R - low_R
        end_R = np.cumsum(room_R)
        memory = self._buffer(int(end_R[-1]))
        reads = [*zip(low_R.tolist(), stop_R.tolist(), (end_R - room_R).tolist(), end_R.tolist(), strict=True)]
        with _opened(path, size, direct=direct) as file:

            def read(of_thread: list[tuple[int, int, int, int]]) -> None:
                for low, stop, begin, end in of_thread:
                    file.read(low, stop, memory[begin:end])

            if len(reads) == 1:
                read(reads)
            else:
                running = [
                    _threads(os.getpid()).submit(read, reads[i::REQUESTS]) for i in range(min(len(reads), REQUESTS))
                ]
                errors = [one.exception() for one in running]  # waits for all: the file is theirs
                for error in filter(None, errors):
                    raise error
        return memory[: int(end_R[-1])], end_R - room_R + start_R - low_R

    def _buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        reused: NDArray[np.uint8] | None = getattr(self._local, "buffer", None)
        if reused is None or reused.size < num_bytes:
            reused = self._local.buffer = huge_pages(max(num_bytes, HUGE_BYTES))
        return reused


@cache
def _threads(_process: int) -> ThreadPoolExecutor:
    """Return the threads of this process, started at their first use; a fork does not have its parent's."""
    return ThreadPoolExecutor(REQUESTS, thread_name_prefix="tiercache-ranges")


class _File(NamedTuple):
    """An open file."""

    path: str
    handle: int
    is_direct: bool
    """True if it is read past the page cache."""

    def read(self, low: int, stop: int, memory: NDArray[np.uint8]) -> None:
        """Fill memory with bytes from ``low`` on, [low, stop) at least; past the page cache with whole pages.

        Raises BlockReadError.
        """
        try:
            done = read_direct(self.handle, [memory.data], low) if self.is_direct else 0
            if done < stop - low:
                if self.is_direct:
                    fcntl.fcntl(self.handle, fcntl.F_SETFL, 0)
                    _read_nothing_ahead(self.handle)
                if (done := read_cached(self.handle, memory[: stop - low].data, low, done)) < stop - low:
                    raise BlockReadError(f"is truncated: {self.path} ends at byte {low + done:,}")
        except OSError as error:
            raise _unreadable(self.path, error) from error


@contextmanager
def _opened(path: str, size: int, *, direct: bool) -> Iterator[_File]:
    """Open a file and check its size. Raises BlockReadError."""
    try:
        past_cache = open_direct(path, os.O_RDONLY) if direct else None
        handle = os.open(path, READ_FLAGS) if past_cache is None else past_cache
    except FileNotFoundError:
        raise BlockReadError(f"is missing: {path} does not exist") from None
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        try:
            seen = file_bytes(handle)
        except OSError as error:
            raise _unreadable(path, error) from error
        if seen != size and size >= 0:
            raise BlockReadError(f"is incomplete: {path} has {seen:,} of {size:,} bytes")
        if past_cache is None:
            _read_nothing_ahead(handle)
        yield _File(path, handle, past_cache is not None)
    finally:
        os.close(handle)


def _read_nothing_ahead(handle: int) -> None:
    """Let the page cache read no bytes around a range."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)


def _unreadable(path: str, error: OSError) -> BlockReadError:
    return BlockReadError(f"cannot be read: {path} raises an error ({error})")
