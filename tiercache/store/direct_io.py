"""Files read and written past the page cache, several requests in flight: RangeReader, ReadQueue and WriteQueue.

RangeReader reads a few ranges of any file, each on a thread.

ReadQueue: a thread that waits for the disk gives up its core, and while training keeps all cores busy it gets one back
only after milliseconds. Linux's asynchronous I/O (io_submit, io_getevents) takes many reads in one call and waits once
for all of them. Where it is missing or not allowed, ranges are read one by one.

WriteQueue: adjacent pages are written by one call, two requests in flight at a time. A request is one run of pages or
several short ones, since each request takes the GIL from a concurrent training. With two in flight the disk is never
idle. While the file is also read the disk is busy anyway, and a read would wait for both: then only one is in flight.
The measurements are in docs/design.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

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
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    Range = tuple[int, NDArray[np.uint8]]
    """An offset in the file, and memory at the same offset in its page."""
    Write = Callable[[list[memoryview], int], int]
    """Write whole pages at a page of the file; returns how many of the bytes were written, 0 to be called again."""
    Run = tuple[int, list[memoryview]]
    """An offset in the file, and consecutive pages."""

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
            with _opened(path, size, direct=direct) as read:
                read(low, stop, part)
            found.append(part[start - low : stop - low])
        return found

    def read_many(
        self, path: str, start_R: NDArray[np.int64], stop_R: NDArray[np.int64], size: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return memory with the bytes [start, stop) of each ascending range of a file, and the place (R,) of each."""
        direct = bool((stop_R - start_R >= DIRECT_BYTES).any())
        low_R = start_R - start_R % PAGE_BYTES if direct else start_R
        room_R = -(-(stop_R - low_R) // PAGE_BYTES) * PAGE_BYTES if direct else stop_R - low_R
        end_R = np.cumsum(room_R)
        memory = self._buffer(int(end_R[-1]))
        reads = [*zip(low_R.tolist(), stop_R.tolist(), (end_R - room_R).tolist(), end_R.tolist(), strict=True)]
        with _opened(path, size, direct=direct) as read:

            def read_all(of_thread: list[tuple[int, int, int, int]]) -> None:
                for low, stop, begin, end in of_thread:
                    read(low, stop, memory[begin:end])

            if len(reads) == 1:
                read_all(reads)
            else:
                pool = _threads(os.getpid())
                running = [pool.submit(read_all, reads[i::REQUESTS]) for i in range(min(len(reads), REQUESTS))]
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


@contextmanager
def _opened(path: str, size: int, *, direct: bool) -> Iterator[Callable[[int, int, NDArray[np.uint8]], None]]:
    """Open a file and check its size; yields a function that reads [low, stop) into memory. Raises BlockReadError.

    With ``direct`` it reads whole pages past the page cache.
    """
    with ExitStack() as files:
        try:
            past_cache = open_direct(path, os.O_RDONLY) if direct else None
            handle = os.open(path, READ_FLAGS) if past_cache is None else past_cache
            files.callback(os.close, handle)
            seen = file_bytes(handle)
        except OSError as error:
            raise unread(path, error) from error
        if seen != size and size >= 0:
            raise BlockReadError(f"is incomplete: {path} has {seen:,} of {size:,} bytes")
        if past_cache is None:
            read_nothing_ahead(handle)

        def read(low: int, stop: int, memory: NDArray[np.uint8]) -> None:
            try:
                done = 0 if past_cache is None else read_direct(handle, [memory.data], low)
                if done < stop - low:
                    if past_cache is not None:
                        fcntl.fcntl(handle, fcntl.F_SETFL, 0)
                        read_nothing_ahead(handle)
                    if (done := read_cached(handle, memory[: stop - low].data, low, done)) < stop - low:
                        raise BlockReadError(f"is truncated: {path} ends at byte {low + done:,}")
            except OSError as error:
                raise unread(path, error) from error

        yield read


def read_nothing_ahead(handle: int) -> None:
    """Let the page cache read no bytes around a range."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)


def unread(path: str, error: OSError) -> BlockReadError:
    """Return the error of a file that could not be read."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return BlockReadError(f"is missing: {path} does not exist")
    return BlockReadError(f"cannot be read: {path} raises an error ({error})")


DEPTH = 64
"""Maximum reads in flight."""


class _Numbers(NamedTuple):
    """The numbers of io_setup, io_destroy, io_submit and io_getevents, which libc has no functions for."""

    setup: int
    destroy: int
    submit: int
    events: int


_NUMBERS = {"x86_64": _Numbers(206, 207, 209, 208), "aarch64": _Numbers(0, 1, 2, 4)}
_REQUEST = np.dtype(
    [("data", "u8"), ("key", "u8"), ("opcode", "u2"), ("priority", "i2"), ("file", "u4"), ("views", "u8"),
     ("num_views", "u8"), ("offset", "i8"), ("reserved", "u8"), ("flags", "u8")]
)  # fmt: skip
"""struct iocb of <linux/aio_abi.h>."""
_READ_VIEWS = 7  # IOCB_CMD_PREADV
_VIEW = np.dtype([("address", "u8"), ("size", "u8")])
_EVENT = np.dtype([("data", "u8"), ("request", "u8"), ("result", "i8"), ("more", "i8")])
_TRY_AGAIN = -errno.EAGAIN


class ReadQueue:
    """Reads of one thread. Memory is the caller's again when a call returns or raises."""

    def __init__(self) -> None:
        self._ends = np.frombuffer(mmap.mmap(-1, 2 * DEPTH * PAGE_BYTES), np.uint8).reshape(DEPTH, 2, PAGE_BYTES)
        """The pages at both ends of each range."""
        self._kernel = _Kernel.open()

    def read(self, handle: int, ranges: Sequence[Range]) -> list[int]:
        """Read up to DEPTH ranges of a file that is open past the page cache, each of a page at least.

        Returns the bytes read of each: all, less at the file's end, or 0 if the file system cannot. Raises OSError.
        """
        reads = [_PagedRange(*one, *ends) for one, ends in zip(ranges, self._ends, strict=False)]
        results = [_TRY_AGAIN] * len(reads)
        if self._kernel is not None and len(reads) > 1:
            try:
                results = self._kernel.read(handle, reads)
            except BaseException:
                self._kernel.close()  # waits for the reads in flight
                self._kernel = _Kernel.open()
                raise
        return [one.finish(handle, result) for one, result in zip(reads, results, strict=True)]


class _PagedRange:
    """A range read by whole pages: those at its ends into memory of their own."""

    def __init__(self, offset: int, out: NDArray[np.uint8], first: NDArray[np.uint8], last: NDArray[np.uint8]) -> None:
        self._out, self._first, self._last = out, first, last
        self._head = -offset % PAGE_BYTES
        self._inner = (out.size - self._head) // PAGE_BYTES * PAGE_BYTES
        self._tail = out.size - self._head - self._inner
        self.offset = offset - (PAGE_BYTES - self._head if self._head else 0)
        """The first byte to read."""
        inner = out[self._head : self._head + self._inner]
        self.views = [*([first] if self._head else []), inner, *([last] if self._tail else [])]
        """Whole pages to fill in turn."""

    def finish(self, handle: int, result: int) -> int:
        """Return the bytes read of the range, given those of its pages or a negative errno. Raises OSError."""
        if result == _TRY_AGAIN:
            result = read_direct(handle, [view.data for view in self.views], self.offset)
        if result < 0 and result != -errno.EINVAL:
            raise OSError(-result, "a read failed")
        before = PAGE_BYTES - self._head if self._head else 0
        count = result - before
        if self._head and count > 0:
            self._out[: self._head] = self._first[before:]
        if self._tail and count > self._head + self._inner:
            self._out[self._head + self._inner :] = self._last[: self._tail]
        return max(0, min(count, self._out.size))


class _Kernel:
    """A queue of the kernel, for one thread."""

    def __init__(self, call: Any, queue: ctypes.c_ulong, numbers: _Numbers) -> None:
        """``call``: libc's ``syscall``."""
        self._call, self._queue, self._numbers = call, queue, numbers
        self._requests, self._events = np.zeros(DEPTH, _REQUEST), np.zeros(DEPTH, _EVENT)
        self._views = np.zeros((DEPTH, 3), _VIEW)
        self._requests["data"], self._requests["opcode"] = np.arange(DEPTH), _READ_VIEWS
        self._requests["views"] = address_of(self._views) + np.arange(DEPTH) * 3 * _VIEW.itemsize
        self._pointers = address_of(self._requests) + np.arange(DEPTH) * _REQUEST.itemsize

    @classmethod
    def open(cls) -> _Kernel | None:
        """Return a new queue; None if the system has none for us."""
        if (numbers := _NUMBERS.get(platform.machine())) is None or platform.system() != "Linux":
            return None
        call = ctypes.CDLL(None, use_errno=True).syscall
        call.restype = ctypes.c_long
        queue = ctypes.c_ulong(0)
        failed = call(ctypes.c_long(numbers.setup), ctypes.c_uint(DEPTH), ctypes.byref(queue))
        return None if failed else cls(call, queue, numbers)

    def close(self) -> None:
        """Return when no read is in flight; none can be made after it."""
        if self._queue.value:
            self._call(ctypes.c_long(self._numbers.destroy), self._queue)
            self._queue.value = 0

    __del__ = close

    def read(self, handle: int, reads: Sequence[_PagedRange]) -> list[int]:
        """Return the bytes of each read, or an error's negative number."""
        requests = self._requests[: len(reads)]
        requests["file"] = handle
        requests["offset"] = [one.offset for one in reads]
        requests["num_views"] = [len(one.views) for one in reads]
        for number, one in enumerate(reads):
            self._views[number, : len(one.views)] = [(address_of(view), view.size) for view in one.views]
        results, begun, ended = [_TRY_AGAIN] * len(reads), 0, 0
        while begun < len(reads):
            count = self._made(self._numbers.submit, len(reads) - begun, address_of(self._pointers) + 8 * begun)
            if count <= 0:
                break  # the others are read one by one
            begun += count
        while ended < begun:
            count = self._made(self._numbers.events, begun - ended, begun - ended, address_of(self._events), 0)
            if count < 0 and count != -errno.EINTR:
                raise OSError(-count, "waiting for reads failed")
            for event in self._events[: max(0, count)]:
                results[event["data"]] = int(event["result"])
            ended += max(0, count)
        return results

    def _made(self, number: int, *arguments: int) -> int:
        """Return what a system call on the queue returns, or its error's negative number."""
        found: int = self._call(ctypes.c_long(number), self._queue, *map(ctypes.c_long, arguments))
        return -ctypes.get_errno() if found < 0 else found


def address_of(array: NDArray[np.generic]) -> int:
    """Return the address of an array's first byte."""
    return int(array.__array_interface__["data"][0])  # takes a third of the time of array.ctypes


_UNDER_WAY = 2
REQUEST_BYTES, _RUN_VIEWS = 32 << 20, 512
_RUNS_BYTES = 16 << 20
"""A request of this size gets no further runs."""
_GATHER_BYTES = 1 << 20
SHORT_BYTES = 256 << 10
"""Requests up to this size are made by the caller: handing them to a thread takes longer."""


class WriteQueue:
    """Writes pages from one thread at a time; all are in the file after ``flush``, in any order."""

    def __init__(self, write: Write, is_read: Callable[[], bool]) -> None:
        """``write`` is called by two threads at once; its errors are raised by ``put``, ``copy`` or ``flush``."""
        self._write, self._is_read = write, is_read
        self._runs: list[Run] = []
        """The runs to write next."""
        self._end = self._bytes = 0
        """The end of the last run in the file, and the bytes of all runs."""
        self._buffers: list[memoryview] = []
        """Buffers of the next request first, then those that requests in flight may write from."""
        self._copied = 0
        self._under_way: deque[Future[None]] = deque()
        self._threads: ThreadPoolExecutor | None = None

    def copy(self, data: memoryview, offset: int) -> None:
        """Queue copies of bytes for writing at a page, zeros up to the end of their last page after them."""
        while len(data):
            count = min(len(data), _GATHER_BYTES)
            self.put(data[:count], offset, copied=paged(count))
            data, offset = data[count:], offset + count

    def flush(self) -> None:
        """Return when all is written."""
        self._send(alone=not self._under_way or self._bytes < SHORT_BYTES)
        self._await(0)

    def discard(self) -> None:
        """Drop queued runs, and return when none are in flight, even if interrupted."""
        self._runs, self._bytes, self._copied = [], 0, 0
        interruption: KeyboardInterrupt | None = None
        while self._under_way:
            try:
                wait([request for request in self._under_way if not request.cancel()])  # canceled: it writes nothing
                self._under_way.clear()
            except KeyboardInterrupt as error:
                interruption = error
        if interruption is not None:
            raise interruption

    def close(self) -> None:
        """End the threads after the requests in flight, and free the memory."""
        if self._threads is not None:
            self._threads.shutdown()
        self._buffers = []

    def put(self, view: memoryview, offset: int, *, copied: int = 0) -> None:
        """Queue whole pages for writing at a page, merged with those before them in the file; they must not change.

        ``copied``: queue a copy of the bytes and zeros, of this size in all. A full request is written first.
        """
        size = copied or len(view)
        full = self._bytes + size > REQUEST_BYTES or (offset != self._end and self._bytes >= _RUNS_BYTES)
        if full or self._copied + copied > _GATHER_BYTES:
            self._send(alone=self._bytes < SHORT_BYTES)
        if copied:
            if not self._buffers:
                memory = huge_pages((_UNDER_WAY + 1) * _GATHER_BYTES).data
                self._buffers = [memory[i * _GATHER_BYTES :][:_GATHER_BYTES] for i in range(_UNDER_WAY + 1)]
            data, view = view, self._buffers[0][self._copied : self._copied + copied]
            view[: len(data)], view[len(data) :] = data, bytes(copied - len(data))
            self._copied += copied
        if not size:
            return
        if not self._runs or offset != self._end or len(self._runs[-1][1]) == _RUN_VIEWS:
            self._runs.append((offset, []))
        self._runs[-1][1].append(view)
        self._end, self._bytes = offset + size, self._bytes + size

    def _send(self, *, alone: bool) -> None:
        """Write queued runs: on this thread if ``alone``, else on another one."""
        runs, self._runs, self._bytes, self._copied = self._runs, [], 0, 0
        if alone:
            self._write_all(runs)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_UNDER_WAY, thread_name_prefix="tiercache-writes")
        self._await(0 if self._is_read() else _UNDER_WAY - 1)
        request = Future[None]()
        self._under_way.append(request)  # before a thread has it: an interrupt loses none
        self._buffers = [*self._buffers[1:], *self._buffers[:1]]
        try:
            self._threads.submit(self._make, request, runs)
        except RuntimeError:  # the interpreter is exiting, or no thread can be started
            if request.cancel():  # else a thread took it after all
                self._under_way.pop()
                self._write_all(runs)

    def _await(self, most: int) -> None:
        """Return when at most ``most`` requests are in flight; raises the oldest one's error, which stays queued."""
        while len(self._under_way) > most:
            self._under_way[0].result()
            self._under_way.popleft()

    def _make(self, request: Future[None], runs: list[Run]) -> None:
        if not request.set_running_or_notify_cancel():
            return
        try:
            self._write_all(runs)
        except BaseException as error:
            request.set_exception(error)
        else:
            request.set_result(None)

    def _write_all(self, runs: list[Run]) -> None:
        for offset, views in runs:
            at = offset
            while views:
                count = self._write(views, at)
                at += count
                while views and count >= len(views[0]):
                    count -= len(views.pop(0))
                if count:
                    views[0] = views[0][count:]
