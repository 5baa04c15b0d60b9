"""Batches: samples of one pass with local ids, and the rows these mean."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from tiercache.errors import StateError
from tiercache.kernels.cpu.samples import shuffled
from tiercache.store.bits import mix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tiercache.rows.backends.base import Backend, BatchUpload
    from tiercache.train.local_exchange import Exchange
    from tiercache.train.row_view import RowView
    from tiercache.values.batch import Batch, BatchRequest


Order = Callable[[int, int], "NDArray[np.int64]"]
"""Gives the samples at the places from the first up to the last, the latter left out; makes no others."""

SCHEDULES = ("interleaved", "simple")
SHUFFLED_BY = "feistel"
"""The permutation of shuffled samples: a commit inside a pass that was shuffled by another cannot be gone on from."""


def in_order(first: int, last: int) -> NDArray[np.int64]:
    """Return the places themselves: the order of samples that are not shuffled."""
    return np.arange(first, last, dtype=np.int64)


def sample_order(num_samples: int, *, seed: int, epoch: int, sub_dataset: int, shuffle: bool) -> Order:
    """Return the order of a pass's samples: as they are, or permuted as (seed, epoch, sub-dataset) alone decide."""
    if not shuffle:
        return in_order
    words = np.array([seed, epoch, sub_dataset], dtype=np.int64).view(np.uint64)
    salt = mix(words[:1])
    for word in words[1:]:
        salt = mix(salt ^ word)
    return partial(shuffled, int(salt[0]), num_samples)


def cut_batches(order: Order, size: int, *, first: int, last: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield (place behind a batch, its samples) for the places from ``first`` to ``last``; the last may be short.

    Raises ValueError for a size below 1.
    """
    check_size(size)
    for begin in range(first, last, size):
        end = min(begin + size, last)
        yield end, order(begin, end)


def check_size(size: int) -> None:
    """Raise ValueError for a batch without samples."""
    if size < 1:
        raise ValueError(f"a batch of {size} samples was asked for: the size must be at least 1")


def num_batches(num_samples: int, size: int) -> int:
    """Return the number of batches of ``size`` samples, the last of which may be smaller. Raises ValueError."""
    check_size(size)
    return -(-num_samples // size)


class BatchPipeline:
    """Makes the batches of one cache. On the training thread; an iterator over batches has threads of its own."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.queues: weakref.WeakSet[_BatchQueue] = weakref.WeakSet()

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
    ) -> Iterator[Batch]:
        """Yield the batches of ``requests``, in order.

        Samples of up to ``prefetch`` batches are read before their turn, each on one of as many threads. 0 reads them
        when they are requested; None is the backend's default, with several ranks at least 1. ``before`` is called
        before a batch is handed out, or its rows are exchanged. Its errors, and errors in making a batch, are raised in
        its place, on all ranks. ``overlap``: no step comes between these batches, so rows may be exchanged ahead too.
        Threads end with the iterator, or when the rows do. Raises ValueError for less than 0, StateError in a fork of
        the process.
        """
        depth = max(self._backend.ahead, exchange.least_ahead) if prefetch is None else prefetch
        if depth < 0:
            raise ValueError(f"prefetch is {depth}: it must be at least 0 batches")
        queue = _BatchQueue(exchange, rows, max(depth, exchange.least_ahead) if overlap else depth, by_owner=by_owner)
        self.queues.add(queue)
        with rows.in_use(queue.close):
            begun = (queue.pop() for _ in iter(partial(queue.fill, requests), False))
            if overlap:
                yield from exchange.overlapped(begun, rows, before)
                return
            for one in begun:  # no name here is a batch's: while one is made, the last is another's
                yield exchange.finish(one, rows, before)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device of prefetched batches; on a CPU all their bytes."""
        return sum(one.device_bytes for one in self._uploads())

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned memory of prefetched batches; 0 on a CPU."""
        return sum(one.host_bytes for one in self._uploads())

    def _uploads(self) -> Iterator[BatchUpload]:
        """Yield the uploads of prefetched batches; with several ranks, batches are uploaded when it is their turn."""
        futures = [one for queue in list(self.queues) for one in queue.pending if isinstance(one, Future)]
        for one in futures:
            is_made = one.done() and not one.cancelled() and one.exception() is None
            if is_made and (upload := one.result().upload) is not None:
                yield upload


class _BatchQueue:
    """The pending batches of one iterator, in order."""

    def __init__(self, exchange: Exchange, rows: RowView, depth: int, *, by_owner: bool) -> None:
        self._exchange, self._rows, self._by_owner = exchange, rows, by_owner
        self._depth, self._pid = depth, os.getpid()
        self._threads: ThreadPoolExecutor | None = None
        if depth:
            enter = rows.backend.streams.enter_thread
            self._threads = ThreadPoolExecutor(depth, thread_name_prefix="tiercache-batches", initializer=enter)
        self.pending: deque[Callable[[], Any] | Future[Any]] = deque()
        self._last: Future[Any] | None = None
        """The newest request, if ranks exchange requests."""

    def fill(self, requests: Iterator[BatchRequest]) -> bool:
        """Read ahead; return True if there is a batch to pop, or an error in its place."""
        self._rows.check_open()
        while len(self.pending) <= self._depth:
            try:
                if (request := next(requests, None)) is None:
                    break
                self._check_process()
                read = self._exchange.read(request, self._rows, ahead=self._depth > 0, by_owner=self._by_owner)
            except Exception as error:  # told to all ranks, in place of the batch
                self._begin(partial(fail, error))
                break
            self._begin(read if self._threads is None else self._threads.submit(read))
        return bool(self.pending)

    def _begin(self, read: Callable[[], Any] | Future[Any]) -> None:
        begun = self._exchange.begin(read, self._rows, previous=self._last)
        self._last = begun if isinstance(begun, Future) else None
        self.pending.append(begun)

    def pop(self) -> Callable[[], Any]:
        """Return a function that makes the next batch, or waits for it."""
        self._check_process()
        read = self.pending.popleft()
        return partial(_result, [read]) if isinstance(read, Future) else read

    def close(self) -> None:
        """Drop all batches, and wait until the threads have ended."""
        if os.getpid() == self._pid:
            self._exchange.wait(self.pending)
            if self._threads is not None:
                self._threads.shutdown(wait=True, cancel_futures=True)
        self.pending.clear()

    def _check_process(self) -> None:
        if self._threads is not None and os.getpid() != self._pid:
            raise StateError(
                f"these batches are made on threads of process {self._pid}, and this is its fork {os.getpid()}: ask "
                "for batches in the process that trains"
            )


def _result(future: list[Future[Any]]) -> Any:
    """Return the result; what went wrong refers to this call, and the future to what went wrong."""
    return future.pop().result()


def fail(error: Exception) -> NoReturn:
    """Raise an error in place of a batch."""
    raise error


def check_exchange_schedule(schedule: str) -> None:
    """Raise ValueError for an unknown schedule of exchanges."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule!r} is unknown: it must be one of {', '.join(SCHEDULES)}")
