"""Batches made ahead: threads read, join and bring the next ones while the training thread has the one before.

The order of samples is decided before anything is made, and nothing here draws from a random generator, so batches are
the same whoever makes them. What is made and was not handed out counts for nobody.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tiercache.errors import StateError
from tiercache.training.batch import make_batch
from tiercache.training.joining import FeaturePart, Joins, Key, join_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.backends.base import Backend
    from tiercache.backends.upload import BatchUpload
    from tiercache.passes.passset import Pass
    from tiercache.tiers.rows import RowView
    from tiercache.training.batch import Batch

Cut = tuple[int, "NDArray[np.int64]"]
"""Samples up to and with a batch, and the places of its own."""


class Ahead:
    """Makes the batches of one cache. On the training thread; it has threads of its own while somebody iterates."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        """What looks them up."""
        self._seen: weakref.WeakValueDictionary[Key, FeaturePart] = weakref.WeakValueDictionary()  # as modules live
        self._lines: weakref.WeakSet[_Line] = weakref.WeakSet()

    def batches(
        self, source: Pass, rows: RowView, cuts: Iterator[Cut], *, most: int | None, before: Callable[[], None]
    ) -> Iterator[tuple[int, Batch]]:
        """Yield the samples behind each batch and the batch, in the order of ``cuts``.

        Up to ``most`` batches are made ahead, each on one of as many threads; 0: on the calling thread, when they are
        asked for; None: as the backend says. ``before`` is called before a batch is handed out, and its errors are
        raised; what goes wrong in making a batch is raised in its place. Threads end with the iterator, or when the
        rows do. Raises ValueError for less than 0, StateError in the fork of the process that began.
        """
        most = self.backend.ahead if most is None else most
        if most < 0:
            raise ValueError(f"{most} batches ahead were asked for: it must be at least 0")
        if most == 0:
            for done, places in cuts:
                before()
                yield done, make_batch(source.read(places), rows)
            return
        line = _Line(source, rows, most)
        self._lines.add(line)
        with rows.in_use(line.close):
            first = next(cuts, None)
            while first is not None or line.waiting or line.was_cut_short:
                before()
                if first is not None:
                    line.begin(first, self._seen)
                    first = None
                while len(line.waiting) <= most and (cut := next(cuts, None)) is not None:
                    line.begin(cut, self._seen)
                yield line.take()

    @property
    def device_bytes(self) -> int:
        """Bytes on the device of batches that are made and wait; on a CPU all bytes of them."""
        return sum(one.device_bytes for line in list(self._lines) for one in line.made())

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned memory of batches that are made and wait; 0 on a CPU."""
        return sum(one.host_bytes for line in list(self._lines) for one in line.made())


class _Line:
    """The batches of one iterator that are being made or wait, in order."""

    def __init__(self, source: Pass, rows: RowView, most: int) -> None:
        self._source, self._rows, self._pid = source, rows, os.getpid()
        enter = rows.backend.streams.enter_thread
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="tiercache-batches", initializer=enter)
        self.waiting: deque[tuple[int, Future[tuple[Batch, BatchUpload]]]] = deque()
        self.was_cut_short = False
        """Whether it was closed while some waited."""

    def begin(self, cut: Cut, seen: weakref.WeakValueDictionary[Key, FeaturePart]) -> None:
        """Have one more made."""
        done, places = cut
        self._check()
        self.waiting.append((done, self._threads.submit(self._make, places, seen, list(seen.values()))))

    def take(self) -> tuple[int, Batch]:
        """Return the next one when it is made, for torch's current stream."""
        self._check()
        done, future = self.waiting.popleft()
        try:
            batch, upload = future.result()
        finally:
            del future  # what went wrong refers to this call, and the future to what went wrong
        upload.receive()
        return done, batch

    def made(self) -> list[BatchUpload]:
        """Return what brought those that wait."""
        ended = [future for _, future in self.waiting if future.done() and not future.cancelled()]
        return [future.result()[1] for future in ended if future.exception() is None]

    def close(self) -> None:
        """Drop all, and wait until the threads have ended."""
        if os.getpid() == self._pid:
            self._threads.shutdown(wait=True, cancel_futures=True)
        self.was_cut_short = self.was_cut_short or bool(self.waiting)
        self.waiting.clear()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                f"these batches are made on threads of process {self._pid}, and this is its fork {os.getpid()}: ask "
                "for batches in the process that trains"
            )

    def _make(
        self, places: NDArray[np.int64], seen: weakref.WeakValueDictionary[Key, FeaturePart],
        parts: Sequence[FeaturePart],
    ) -> tuple[Batch, BatchUpload]:  # fmt: skip
        """Read samples and bring what is looked up of them. On one of the threads."""
        upload = self._rows.backend.upload()
        samples = self._source.read(places, upload.buffers)
        joined = {}
        for part in parts:
            found = [samples.ids[name] for name in part.features]
            joined[part.key] = join_part(part, found, self._rows, samples.num_samples, upload, weights=True)
        batch = make_batch(samples, self._rows, joins=Joins(seen, joined), bringer=upload)
        upload.send()
        return batch, upload
