"""Batches: samples of one pass with local ids, and the rows these mean."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from tiercache.errors import StateError
from tiercache.kernels.cpu.samples import shuffled
from tiercache.store.bits import mix
from tiercache.values.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from numpy.typing import NDArray

    from tiercache.data.sub_dataset import EncodedBatch
    from tiercache.rows.backends.base import Backend, BatchUpload
    from tiercache.train.arrival import Arrival
    from tiercache.train.local_exchange import Exchange
    from tiercache.train.row_view import RowView
    from tiercache.train.table_lookup import Collations, Uploader
    from tiercache.values.batch import BatchRequest
    from tiercache.values.ids import FeatureIds


Order = Callable[[int, int], "NDArray[np.int64]"]
"""Gives the samples at the places from the first up to the last, the latter left out; makes no others."""

SHUFFLED_BY = "feistel"
"""The permutation of shuffled samples: a commit inside a pass that was shuffled by another cannot be gone on from."""


@dataclass(slots=True)
class Pooled:
    """A feature of one batch that is pooled where its table's rows are: its module finds vectors, and no ids."""

    mode: str
    """"sum" or "mean"."""
    vectors: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.float32, device="cpu"))
    """(N, dim) float32, once the batch is looked up; zeros for an empty bag."""
    waiting: list[tuple[Arrival, slice]] = field(default_factory=list)
    """What backward left: the gradient of each lookup, and which of its columns are this feature's."""
    gradients: list[torch.Tensor] = field(default_factory=list)
    """What the step applies, to be added up."""

    def settle(self) -> None:
        """Move to ``gradients`` what the step applies, as `RowGradients.settle` does."""
        self.take([arrival for arrival, _ in self.waiting if arrival.is_due])
        self.waiting[:] = [(arrival, columns) for arrival, columns in self.waiting if arrival.is_waiting]

    def take(self, due: Collection[Arrival]) -> None:
        """Put those of ``due`` into ``gradients``, and let them wait on."""
        found = [(one.gradient, columns) for one, columns in self.waiting if one in due]
        self.gradients[:] = [gradient[:, columns] for gradient, columns in found if gradient is not None]


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
    if size < 1:
        raise ValueError(f"a batch of {size} samples was asked for: the size must be at least 1")
    for begin in range(first, last, size):
        end = min(begin + size, last)
        yield end, order(begin, end)


def make_batch(
    samples: EncodedBatch,
    rows: RowView,
    *,
    ids: Mapping[str, FeatureIds] | None = None,
    weight: float = 1.0,
    end: int = 0,
    pooled: Mapping[str, Pooled] | None = None,
    joins: Collations | None = None,
    bringer: Uploader | None = None,
) -> Batch:
    """Put samples on the device of ``rows``. ``ids``: what means rows there in place of the samples' local ids.

    bringer: what brings label and dense, in place of the backend.
    """
    label = np.empty(0, dtype=np.float32) if samples.label is None else samples.label
    bring = rows.backend.to_device if bringer is None else bringer.to_device
    return Batch(
        label=rows.backend.tensor(bring(label)),
        dense=rows.backend.tensor(bring(samples.dense)),
        ids=samples.ids if ids is None else ids,
        rows=rows,
        num_samples=samples.num_samples,
        weight=weight,
        end=end,
        pooled=pooled or {},
        joins=joins,
    )


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
