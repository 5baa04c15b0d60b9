"""Whole pages on their way into a file: adjacent ones by one call, two requests in flight at a time.

A request is one run of pages or several short ones, since each request takes the GIL from a concurrent training. With
two in flight the disk is never idle. While the file is also read the disk is busy anyway, and a read would wait for
both: then only one is in flight. The measurements are in docs/design.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from tiercache.store.files import huge_pages, paged

if TYPE_CHECKING:
    from collections.abc import Callable

    Write = Callable[[list[memoryview], int], int]
    """Write whole pages at a page of the file; returns how many of the bytes were written, 0 to be called again."""
    Run = tuple[int, list[memoryview]]
    """An offset in the file, and consecutive pages."""

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
        """``write`` is called by two threads at once; its errors are raised by ``put``, ``copy`` or ``flush``.

        ``is_read`` tells whether the file is being read.
        """
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

    def put(self, view: memoryview, offset: int) -> None:
        """Queue whole pages for writing at a page, merged with those before them in the file; they must not change."""
        self._add(view, offset)

    def copy(self, data: memoryview, offset: int) -> None:
        """Queue copies of bytes for writing at a page, zeros up to the end of their last page after them."""
        while len(data):
            count = min(len(data), _GATHER_BYTES)
            self._add(data[:count], offset, copied=paged(count))
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

    # -- inside ------------------------------------------------------------------------------------------

    def _add(self, view: memoryview, offset: int, *, copied: int = 0) -> None:
        """Add bytes, or a copy of ``copied`` bytes and zeros, to the next request; sends a full one first."""
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
        """Write a request, unless it was canceled."""
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
