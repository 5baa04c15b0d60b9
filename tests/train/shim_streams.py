"""Memory and streams of a GPU on the CPU: arrays are guarded, and work is done as late as a GPU might do it.

Work is done when a thread waits for it, or when other work must follow it. Of two independent streams, the one that was
started last runs first.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tests.kernels.shim.device import ShimDevice
from tests.kernels.shim.memory import _LIBC, GuardedMemory
from tiercache.kernels.cuda.launch import Argument


class LentMemory(GuardedMemory):
    """Arrays that are returned by their last reference."""

    def __init__(self, *, at_end: bool) -> None:
        super().__init__(at_end=at_end)
        self._lock = threading.RLock()  # batches are made on their own threads
        self._lost: list[tuple[int, int, int, int]] | None = None
        """Blocks that were returned during a check, which reads all."""

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an array full of garbage."""
        with self._lock:
            flat = super().empty((int(np.prod(shape, dtype=np.int64)),), dtype)
            block = self._blocks[-1]
        if flat.size:
            weakref.finalize(flat.base, self._reclaim, block)  # what all its views refer to
        return flat.reshape(shape)

    def _reclaim(self, block: tuple[int, int, int, int]) -> None:
        with self._lock:
            if self._lost is not None:
                self._lost.append(block)
            elif block in self._blocks:
                self._blocks.remove(block)
                _LIBC.munmap(block[0], block[1])

    def check(self) -> None:
        """Check all blocks while none is unmapped."""
        with self._lock:
            self._lost = lost = []
            try:
                super().check()
            finally:
                self._lost = None
            for block in lost:
                self._reclaim(block)


class Late(NamedTuple):
    """A deferred action, and the host memory that it reads or writes."""

    work: Callable[[], object]
    host: list[int]


class LateStream:
    """Work in order, done on demand."""

    def __init__(self) -> None:
        self.waiting: deque[Late] = deque()
        self.needed: list[NDArray[Any]] = []
        self._done = 0

    @property
    def end(self) -> int:
        return self._done + len(self.waiting)

    def run_to(self, end: int) -> None:
        while self._done < end:
            self._done += 1
            self.waiting.popleft().work()


class LateKernels(ShimDevice):
    """Runs the training's launches at once and others later."""

    def __init__(self, order: str, reaches: Callable[[int], bool]) -> None:
        super().__init__(order)
        self.memory = LentMemory(at_end=order != "reversed")
        self.dumps, self.loads, self.searches = LateStream(), LateStream(), LateStream()
        self.lock = threading.RLock()
        self._current: LateStream | None = None
        self._awaited: list[tuple[LateStream, int]] = []
        """The work that the training's next work must follow."""
        self._reaches = reaches
        self.upload: Callable[[Callable[[], object]], bool] = lambda work: False
        """Queues work of the uploading thread; arrays that it needs are kept until ``uploaded``."""
        self._to_upload: list[NDArray[Any]] = []

    def uploaded(self) -> None:
        self._to_upload.clear()

    @property
    def deferring(self) -> bool:
        return self._current is not None

    def put(self, table: NDArray[Any]) -> NDArray[Any]:
        there = super().put(table)
        self.need(there)
        return there

    def empty(self, size: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return an array of garbage; a stream frees memory in order, so it stays until all work is done."""
        array = super().empty(size, dtype)
        self.need(array)
        return array

    def need(self, array: NDArray[Any]) -> None:
        if self.upload(lambda: None):
            self._to_upload.append(array)
        elif self._current is not None:
            self._current.needed.append(array)

    def read(self, array: NDArray[Any]) -> NDArray[Any]:
        self.finish()
        return array.copy()

    @contextmanager
    def on(self, stream: LateStream, *, behind_training: bool) -> Iterator[None]:
        before, self._current = self._current, stream
        if behind_training:
            awaited = list(self._awaited)  # its own work is done
            stream.waiting.append(Late(lambda: self._run(awaited), []))
        try:
            yield
        finally:
            self._current = before

    def hold_training(self, *streams: LateStream) -> None:
        with self.lock:  # another thread may be running what a stream was given
            self._awaited += [(stream, stream.end) for stream in streams]

    def do(self, work: Callable[[], object], host: Sequence[int] = ()) -> None:
        """Do work on the current stream; threads other than the training's wait for all work."""
        if self.upload(work):
            return
        with self.lock:
            here = threading.current_thread() is threading.main_thread()
            if here and self._current is not None:
                self._current.waiting.append(Late(work, list(host)))
            elif here:
                self.finish()
                work()
            else:
                self.catch_up()
                work()

    def finish(self) -> None:
        """Do the queued work of the current stream, or the work that the training must follow."""
        with self.lock:
            if self._current is not None:
                self._current.run_to(self._current.end)
            else:
                awaited, self._awaited = self._awaited, []
                self._run(awaited)
                self._let_go()

    def catch_up(self) -> None:
        with self.lock:
            self._awaited = []
            self._run([(stream, stream.end) for stream in (self.loads, self.dumps, self.searches)])
            self._let_go()

    def _run(self, awaited: list[tuple[LateStream, int]]) -> None:
        for stream, end in awaited:
            stream.run_to(end)

    def _let_go(self) -> None:
        for stream in (self.loads, self.dumps, self.searches):
            if not stream.waiting and stream is not self._current:  # else of a launch that is yet to be given to it
                stream.needed.clear()

    def sort(self, keys: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Sort the slots that the current stream has written by then; for an upload, or a step (never deferred)."""
        ordered, order = self.empty(keys.size, np.int32), self.empty(keys.size, np.int64)

        def work() -> None:
            order[...] = np.argsort(keys, kind="stable")
            ordered[...] = keys[order]

        if not self.upload(work):
            assert not self.deferring
            work()
        return ordered, order

    def launch(self, kernel: str, blocks: int, arguments: Sequence[Argument]) -> None:
        """Run a kernel, now or later; the host memory of rows that it moves must exist then."""
        host: list[int] = []
        if kernel in {"rows.pack", "rows.unpack"}:
            pieces = arguments[0]
            assert isinstance(pieces, np.ndarray)
            host = pieces["data"].tolist()

        def work() -> None:
            assert all(self._reaches(address) for address in host), "a kernel moves rows in pages that are not pinned"
            ShimDevice.launch(self, kernel, blocks, arguments)

        self.do(work, host)

    def still_move(self, begin: int, last: int) -> bool:
        with self.lock:
            streams = self.loads, self.dumps, self.searches
            return any(begin <= at < last for stream in streams for late in stream.waiting for at in late.host)


class Event:
    def __init__(self, kernels: LateKernels, stream: LateStream) -> None:
        with kernels.lock:
            self._kernels, self.stream, self.end = kernels, stream, stream.end

    def wait(self) -> None:
        with self._kernels.lock:
            self.stream.run_to(self.end)
