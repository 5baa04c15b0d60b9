"""Whole pages on their way into a file: those beside each other by one call, two requests under way at a time.

A request is one run of pages or several short ones, as each request takes the interpreter from a training that goes on
beside it. While one ends the disk has the next. Where the file is read meanwhile the disk has enough to do, and a read
would wait behind both: then one is under way. What was measured stands in docs/design.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from tiercache.store.files import huge_pages, paged

if TYPE_CHECKING:
    from collections.abc import Callable

    Write = Callable[[list[memoryview], int], int]
    """Write whole pages at a page of the file; returns how many bytes of them were written, 0 to be called again."""
    Run = tuple[int, list[memoryview]]
    """Pages one after another from a place in the file on."""

_UNDER_WAY = 2
REQUEST_BYTES, _RUN_VIEWS = 32 << 20, 512
_RUNS_BYTES = 16 << 20
"""Of a request to which no further run is added."""
_GATHER_BYTES = 1 << 20
SHORT_BYTES = 256 << 10
"""Of a request that its caller makes itself: handing it to a thread takes longer."""


class WriteQueue:
    """What one thread at a time puts is in the file after ``flush``, in any order."""

    def __init__(self, write: Write, is_read: Callable[[], bool]) -> None:
        """``write`` is called by two threads at once; what it raises, ``put``, ``copy`` or ``flush`` raises.

        ``is_read`` tells whether the file is being read.
        """
        self._write, self._is_read = write, is_read
        self._runs: list[Run] = []
        """What is to be written next."""
        self._end = self._bytes = 0
        """In the file, of the last run; of all."""
        self._buffers: list[memoryview] = []
        """Of the next request first, then those that requests under way may write from."""
        self._copied = 0
        self._under_way: deque[Future[None]] = deque()
        self._threads: ThreadPoolExecutor | None = None

    def put(self, view: memoryview, offset: int) -> None:
        """Let whole pages be written at a page, together with those before them in the file; they stay as they are."""
        self._add(view, offset)

    def copy(self, data: memoryview, offset: int) -> None:
        """Let copies of bytes be written at a page, zeros up to the end of their last page after them."""
        while len(data):
            count = min(len(data), _GATHER_BYTES)
            self._add(data[:count], offset, copied=paged(count))
            data, offset = data[count:], offset + count

    def flush(self) -> None:
        """Return when all is written."""
        self._send(alone=not self._under_way or self._bytes < SHORT_BYTES)
        self._await(0)

    def discard(self) -> None:
        """Forget what is queued, and return when nothing is under way any more, interrupted or not."""
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
        """End the threads, once what is under way has ended, and give memory back."""
        if self._threads is not None:
            self._threads.shutdown()
        self._buffers = []

    # -- inside ------------------------------------------------------------------------------------------

    def _add(self, view: memoryview, offset: int, *, copied: int = 0) -> None:
        """Add bytes to the next request, or a copy of so many with zeros at the end; send before what is full."""
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
        """Write what is queued: here and now where ``alone``, else by a thread."""
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
        except RuntimeError:  # the interpreter ends, or the system has no thread left
            if request.cancel():  # else one has it after all
                self._under_way.pop()
                self._write_all(runs)

    def _await(self, most: int) -> None:
        """Return when at most so many requests are under way; raises what the oldest raised, which stays among them."""
        while len(self._under_way) > most:
            self._under_way[0].result()
            self._under_way.popleft()

    def _make(self, request: Future[None], runs: list[Run]) -> None:
        """Write a request, unless it was given up."""
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
