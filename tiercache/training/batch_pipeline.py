"""BatchPipeline: the batches of an iterator in order, made when they are asked for or before, on threads.

Several ranks ask the owners of rows for those of later batches meanwhile; the rows themselves wait for their lookup.

The order of samples is decided before anything is made, and nothing here draws from a random generator, so batches are
the same whoever makes them. What is made and was not handed out counts for nobody.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from tiercache.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiercache.backends.base import Backend
    from tiercache.backends.upload import BatchUpload
    from tiercache.training.exchange import Exchange
    from tiercache.training.row_view import RowView
    from tiercache.values.batch import Batch, BatchRequest


class BatchPipeline:
    """Makes the batches of one cache. On the training thread; it has threads of its own while somebody iterates."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lines: weakref.WeakSet[_Line] = weakref.WeakSet()

    def batches(
        self,
        exchange: Exchange,
        requests: Iterator[BatchRequest],
        rows: RowView,
        *,
        prefetch: int | None,
        before: Callable[[], None] | None = None,
        overlap: bool = False,
        by_owner: bool = False,
    ) -> Iterator[tuple[int, Batch]]:
        """Yield the samples behind each batch and the batch, in the order of ``requests``.

        Samples of up to ``prefetch`` batches are read before their turn, each on one of as many threads; 0: when they
        are asked for; None: as the backend says, and of several ranks at least 1. ``before`` is called before a batch
        is handed out, or its rows are brought; its errors, and what goes wrong in making a batch, are raised in its
        place, on all ranks. ``overlap``: no step comes in between, so that rows may be exchanged ahead too. Threads end
        with the iterator, or when the rows do. Raises ValueError for less than 0, StateError in the fork of the process
        that began.
        """
        most = max(self._backend.ahead, exchange.least_ahead) if prefetch is None else prefetch
        if most < 0:
            raise ValueError(f"prefetch is {most}: it must be at least 0 batches")
        line = _Line(exchange, rows, max(most, exchange.least_ahead) if overlap else most, by_owner=by_owner)
        self._lines.add(line)
        with rows.in_use(line.close):
            begun = (line.pop() for _ in iter(partial(line.advance, requests), False))
            if overlap:
                yield from map(line.behind, exchange.overlapped(begun, rows, before))
                return
            for one in begun:  # no name here is a batch's: while one is made, the last is another's
                yield line.behind(exchange.finish(one, rows, before))

    @property
    def device_bytes(self) -> int:
        """Bytes on the device of batches that are made and wait; on a CPU all bytes of them."""
        return sum(one.device_bytes for line in list(self._lines) for one in line.uploads())

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned memory of batches that are made and wait; 0 on a CPU."""
        return sum(one.host_bytes for line in list(self._lines) for one in line.uploads())


class _Line:
    """The batches of one iterator that are being made or wait, in order."""

    def __init__(self, exchange: Exchange, rows: RowView, most: int, *, by_owner: bool) -> None:
        self._exchange, self._rows, self._by_owner = exchange, rows, by_owner
        self._most, self._pid = most, os.getpid()
        self._threads: ThreadPoolExecutor | None = None
        if most:
            enter = rows.backend.streams.enter_thread
            self._threads = ThreadPoolExecutor(most, thread_name_prefix="tiercache-batches", initializer=enter)
        self.waiting: deque[tuple[int, Callable[[], Any] | Future[Any]]] = deque()
        self._last: Any = None
        """What was begun last, where something else does it."""
        self.done = 0
        """Samples of the pass up to the end of the batch that was popped last."""

    def advance(self, requests: Iterator[BatchRequest]) -> bool:
        """Have more read; returns whether one is to be popped: also one that raises what went wrong here."""
        self._rows.check_made()
        while len(self.waiting) <= self._most:
            try:
                if (request := next(requests, None)) is None:
                    break
                self._check()
                read = self._exchange.read(request, self._rows, ahead=self._most > 0, by_owner=self._by_owner)
            except Exception as error:  # told to all ranks, in place of the batch
                self._begin(self.done, partial(_fail, error))
                break
            self._begin(request.done, read if self._threads is None else self._threads.submit(read))
        return bool(self.waiting)

    def _begin(self, done: int, read: Callable[[], Any] | Future[Any]) -> None:
        begun = self._exchange.begin(read, self._rows, by_owner=self._by_owner, behind=self._last)
        self._last = begun if isinstance(begun, Future) else None
        self.waiting.append((done, begun))

    def behind(self, batch: Batch) -> tuple[int, Batch]:
        """Return the samples up to the end of the batch that was popped last, and the batch that came of it."""
        return self.done, batch

    def pop(self) -> Callable[[], Any]:
        """Return what reads the next one, or waits for it."""
        self._check()
        self.done, read = self.waiting.popleft()
        return partial(_result, [read]) if isinstance(read, Future) else read

    def uploads(self) -> list[BatchUpload]:
        """Return what brought those that wait; several ranks bring them when it is their turn."""
        ended = [one for _, one in self.waiting if isinstance(one, Future) and one.done() and not one.cancelled()]
        found = [future.result().upload for future in ended if future.exception() is None]
        return [upload for upload in found if upload is not None]

    def close(self) -> None:
        """Drop all, and wait until the threads have ended."""
        if os.getpid() == self._pid:
            self._exchange.wait([begun for _, begun in self.waiting])
            if self._threads is not None:
                self._threads.shutdown(wait=True, cancel_futures=True)
        self.waiting.clear()

    def _check(self) -> None:
        if self._threads is not None and os.getpid() != self._pid:
            raise StateError(
                f"these batches are made on threads of process {self._pid}, and this is its fork {os.getpid()}: ask "
                "for batches in the process that trains"
            )


def _result(future: list[Future[Any]]) -> Any:
    """Return the result; what went wrong refers to this call, and the future to what went wrong."""
    return future.pop().result()


def _fail(error: Exception) -> NoReturn:
    raise error
