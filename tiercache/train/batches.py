"""Batches: samples of one pass with local ids, and their rows."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from tiercache.errors import StateError
from tiercache.kernels.cpu.samples import shuffled
from tiercache.store.records import integer
from tiercache.train.random_numbers import mixed

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.rows.backends.base import Backend, BatchUpload
    from tiercache.train.local_exchange import Exchange
    from tiercache.train.row_view import RowView
    from tiercache.values.batch import Batch, BatchRequest


T = TypeVar("T")
Order = Callable[[int, int], "NDArray[np.int64]"]  # returns the samples at positions [first, last) alone

SCHEDULES = ("interleaved", "simple")
SHUFFLED_BY = "feistel"  # the version of the shuffle: a commit inside a pass of another version cannot be resumed


def in_order(first: int, last: int) -> NDArray[np.int64]:
    """Return the positions themselves: the order without shuffling."""
    return np.arange(first, last, dtype=np.int64)


def sample_order(num_samples: int, *, seed: int, epoch: int, sub_dataset: int, shuffle: bool) -> Order:
    """Return the order of a pass's samples: unshuffled, or a permutation by (seed, epoch, sub-dataset)."""
    if not shuffle:
        return in_order
    return partial(shuffled, mixed(seed, epoch, sub_dataset), num_samples)


def checked_seed(seed: int) -> int:
    """Return the seed of a cache as an int. Raises ValueError unless it is a whole number of 64 bits."""
    seed = integer(seed, "seed")
    if not -(1 << 63) <= seed < 1 << 63:
        raise ValueError(f"seed is {seed}: expected -2**63 to 2**63 - 1")
    return seed


def cut_batches(order: Order, size: int, *, first: int, last: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield (end position, samples) of each batch for the positions [first, last); the last may be short."""
    size = check_size(size)
    for begin in range(first, last, size):
        end = min(begin + size, last)
        yield end, order(begin, end)


def check_epochs(epochs: int) -> None:
    """Raise ValueError if ``epochs`` is not a number of epochs."""
    if not hasattr(epochs, "__index__") or epochs < 0:
        raise ValueError(
            f"epochs is {epochs!r}: pass the total number of epochs at the end of the loop, including earlier runs"
        )


def checked_order(
    name: str, samples_done: int, order: Mapping[str, object] | None, last: int | None, requested: dict[str, object]
) -> dict[str, object]:
    """Return the requested order. Raises StateError if samples were taken in another, or all of them (``last``)."""
    if requested["shuffle"]:
        requested = requested | {"by": SHUFFLED_BY}
    if last is not None and samples_done >= last:
        raise StateError(
            f"{name} was iterated again after all its {last:,} samples were taken: a pass trains its samples once, so "
            "run more epochs (cache.passes(epochs=...)) to train them again"
        )
    if order is not None and order != requested:
        raise StateError(
            f"{name} is after {samples_done:,} samples in the order {dict(order)}, but batches were requested in "
            f"{requested}: some samples would be trained twice and some never, so request the same order"
        )
    return requested


def check_size(size: int) -> int:
    """Return the samples of a batch as an int. Raises ValueError unless it is a whole number, at least 1."""
    size = integer(size, "the batch size")
    if size < 1:
        raise ValueError(f"invalid batch size {size}: expected at least 1")
    return size


def num_batches(num_samples: int, size: int) -> int:
    """Return the number of batches of ``size`` samples, the last of which may be smaller. Raises ValueError."""
    size = check_size(size)
    return -(-num_samples // size)


class SizedIterator(Iterator[T]):
    """A generator with a length: the number of items that it yields in all, unless its loop ends early.

    Before it begins, the length is what an iteration starting now would yield; then it no longer changes. ``iter``
    returns the generator itself, so that a ``for`` loop pays nothing for the length.
    """

    def __init__(self, items: Generator[T, None, None], count: Callable[[], int]) -> None:
        """count: returns the number of items that an iteration from now would yield."""
        self._items, self._count = items, count
        self._total: int | None = None

    def __iter__(self) -> Generator[T, None, None]:
        self._begin()
        return self._items

    def __next__(self) -> T:
        self._begin()
        return next(self._items)

    def __len__(self) -> int:
        return self._count() if self._total is None else self._total

    def close(self) -> None:
        """End the iteration, as ``break`` does."""
        self._items.close()

    def _begin(self) -> None:
        if self._total is None:
            self._total = self._count()


class BatchPipeline:
    """Makes the batches of one cache, on threads that live as long as the cache. For the training thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.queues: weakref.WeakSet[BatchQueue] = weakref.WeakSet()
        self._pools: dict[int, ThreadPoolExecutor] = {}
        """Thread pools by size. A pool is kept when a larger one is created, because queues still submit to it."""
        self._pid = os.getpid()

    def queue(
        self,
        exchange: Exchange,
        requests: Iterator[BatchRequest],
        rows: RowView,
        *,
        prefetch: int | None,
        overlap: bool = False,
        by_owner: bool = False,
        following: Callable[[], BatchQueue | None] | None = None,
    ) -> BatchQueue:
        """Return a queue of the batches of ``requests``, in order. Raises ValueError for a ``prefetch`` below 0.

        That many batches are read ahead, on as many threads; 0: when requested, None: the default. overlap: no step
        comes between, so rows may be exchanged ahead too. following: returns the queue of the next pass.
        """
        depth = max(self._backend.ahead, exchange.least_ahead) if prefetch is None else prefetch
        if depth < 0:
            raise ValueError(f"invalid prefetch {depth}: expected at least 0 batches")
        if self._pid != os.getpid():  # a fork does not have the threads
            self._pools, self._pid = {}, os.getpid()
        threads = max(depth, *self._pools, 0) if depth else 0
        if threads and threads not in self._pools:
            enter = rows.backend.streams.enter_thread
            self._pools[threads] = ThreadPoolExecutor(
                threads, thread_name_prefix="tiercache-batches", initializer=enter
            )
        made = BatchQueue(
            exchange, requests, rows, max(depth, exchange.least_ahead) if overlap else depth, by_owner=by_owner,
            threads=self._pools.get(threads), following=following,
        )  # fmt: skip
        self.queues.add(made)
        return made

    def close(self) -> None:
        """Stop the threads after their current work. Does nothing in a fork, which does not have them."""
        if self._pid == os.getpid():
            for threads in self._pools.values():
                threads.shutdown(wait=True)
        self._pools = {}

    @property
    def device_bytes(self) -> int:
        """Bytes on the device of prefetched batches; 0 on a CPU."""
        return sum(one.device_bytes for one in self._uploads())

    def _uploads(self) -> Iterator[BatchUpload]:
        """Yield the uploads of prefetched batches; with several ranks, batches are uploaded in their turn."""
        futures = [one for queue in list(self.queues) for one in queue.pending if isinstance(one, Future)]
        for one in futures:
            is_made = one.done() and not one.cancelled() and one.exception() is None
            if is_made and (upload := getattr(one.result(), "upload", None)) is not None:
                yield upload


class BatchQueue:
    """The pending batches of one iterator, in order."""

    def __init__(
        self,
        exchange: Exchange,
        requests: Iterator[BatchRequest],
        rows: RowView,
        depth: int,
        *,
        by_owner: bool,
        threads: ThreadPoolExecutor | None,
        following: Callable[[], BatchQueue | None] | None,
    ) -> None:
        self._exchange, self._requests, self._rows, self._by_owner = exchange, requests, rows, by_owner
        self._depth, self._pid = depth, os.getpid()
        self._threads, self._following = threads, following
        self._next: BatchQueue | None = None
        self.pending: deque[Callable[[], Any] | Future[Any]] = deque()
        self._reads = set[Future[Any]]()  # unfinished batches on threads
        self._last: Future[Any] | None = None  # the newest request, if ranks exchange requests

    def batches(self, before: Callable[[], None] | None = None, *, overlap: bool = False) -> Iterator[Batch]:
        """Yield the batches; the queue is closed when the iterator ends, or the rows do.

        ``before`` is called before a batch is handed out, or its rows are exchanged. Its errors, and errors in making a
        batch, are raised in its place, on all ranks.
        """
        exchange, rows = self._exchange, self._rows
        with rows.in_use(self.close):
            begun = (self.pop() for _ in iter(self.fill, False))
            if overlap:
                yield from exchange.overlapped(begun, rows, before)
                return
            for one in begun:  # do not bind the batch to a local: it would stay alive while the next is made
                yield exchange.finish(one, rows, before)

    def fill(self) -> bool:
        """Read ahead; return True if there is a batch to pop, or an error in its place."""
        self._rows.check_open()
        self._fill(self._depth + 1)
        return bool(self.pending)

    def _fill(self, count: int) -> None:
        """Begin batches until ``count`` are pending, including the first ones of the next pass."""
        while len(self.pending) < count:
            try:
                if (request := next(self._requests, None)) is None:
                    break
                self._check_process()
                read = self._exchange.read(request, self._rows, ahead=self._depth > 0, by_owner=self._by_owner)
            except Exception as error:  # sent to all ranks instead of the batch
                self._begin(partial(fail, error))
                break
            if self._threads is None:
                self._begin(read)
            else:
                future = self._threads.submit(read)
                self._reads.add(future)
                future.add_done_callback(self._reads.discard)
                self._begin(future)
        if self._following is not None and len(self.pending) < count:
            following, self._following = self._following, None
            self._next = following()
        if self._next is not None and not self._next._rows.is_closed:
            self._next._fill(count - len(self.pending))

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
        """Drop all batches, and wait until no thread makes one."""
        if os.getpid() == self._pid:
            self._exchange.wait(self.pending)
            wait([one for one in list(self._reads) if not one.cancel()])
        self.pending.clear()
        self._requests, self._next, self._following = iter(()), None, None

    def _check_process(self) -> None:
        if self._threads is not None and os.getpid() != self._pid:
            raise StateError(
                f"these batches are made on threads of process {self._pid}, but this is its fork {os.getpid()}: "
                "request batches in the process that trains"
            )


def _result(future: list[Future[Any]]) -> Any:
    """Return the result. Its error's traceback refers to this call, and must not keep the future alive."""
    return future.pop().result()


def fail(error: Exception) -> NoReturn:
    """Raise an error instead of a batch."""
    raise error


def check_word(name: str, word: str, allowed: Sequence[str]) -> None:
    """Raise ValueError unless an argument is one of ``allowed``."""
    if word not in allowed:
        raise ValueError(f"invalid {name} {word!r}: expected one of {', '.join(map(repr, allowed))}")


def is_read_by_owner(read_by: str) -> bool:
    """Return True if ``read_by`` is "owner". Raises ValueError for an unknown value."""
    check_word("read_by", read_by, ("rank", "owner"))
    return read_by == "owner"
