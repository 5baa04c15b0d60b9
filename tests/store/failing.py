"""Engines that wrap another: they fail on request, delay calls, or run code between calls."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.store.blobs import Part
from tiercache.store.engines.engine import Blob, Engine, Head, ReadRequest
from tiercache.store.files import paged
from tiercache.store.store_errors import StoreError, StoreFullError


def disk_full() -> StoreError:
    """Return the error of a full disk."""
    return StoreFullError(needed_bytes=1 << 20, limit="the disk of a test has 0 free", advice="free some")


class KilledError(Exception):
    """Simulates the death of the process: later calls of the engine have no effect."""


class PassingEngine:
    """Forwards all calls to ``engine``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class FailingEngine(PassingEngine):
    """Forwards calls to ``engine`` until a chosen one, which raises instead and changes nothing.

    Calls of ``put``, ``read`` and ``publish`` count from 1 since the last ``fail_in``, in any thread.
    It can also tear a put, like a process that dies in the middle of it.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        error: Callable[[], Exception] = disk_full,
        verbs: tuple[str, ...] = ("put", "read", "publish"),
        lasting: bool = False,
    ) -> None:
        """``verbs`` are the calls that count; with ``lasting``, every counted call after the chosen one fails too."""
        super().__init__(engine)
        self.error, self.verbs, self.lasting = error, verbs, lasting
        self.calls = self.failed = 0
        self.fail_at: int | None = None
        self.killed = False
        self._tear: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def fail_in(self, calls: int | None) -> None:
        """Make the ``calls``-th counted call from now fail; None: none fails."""
        with self._lock:
            self.calls, self.fail_at = 0, calls

    def tear(self, parts: int, num_bytes: int = 0) -> None:
        """Make the next put end after some parts, and some bytes of the following one: blobs are truncated or missing.

        It and every later call raise KilledError. Close the engine, and open it again as after a crash.
        """
        self._tear = parts, num_bytes

    def put(self, blobs: Sequence[Blob], parts: Iterable[Part], *, stable: bool = False) -> None:
        """Put blobs and, if it is time, fail like a disk: at the end."""
        if self._due("put"):
            for _ in parts:
                pass
            raise self.error()
        if self._tear is not None:
            for blob, data in _torn(blobs, parts, *self._tear):
                self.engine.put([blob], [(0, 0, data)])
            self.killed = True
            raise KilledError("the process died in the middle of a put")
        self.engine.put(blobs, parts, stable=stable)

    def read(self, *requests: ReadRequest) -> None:
        if self._due("read"):
            raise self.error()
        self.engine.read(*requests)

    def publish(self, head: Head, before: Head | None) -> None:
        if self._due("publish"):
            raise self.error()
        self.engine.publish(head, before)

    def __getattr__(self, name: str) -> Any:
        if name in {"list", "newest", "drop"}:
            self._check_alive()
        return super().__getattr__(name)

    def _due(self, verb: str) -> bool:
        self._check_alive()
        if verb not in self.verbs:
            return False
        with self._lock:
            self.calls += 1
            if self.fail_at is None or self.calls < self.fail_at:
                return False
            if self.calls > self.fail_at and not self.lasting:
                return False
            self.failed += 1
            return True

    def _check_alive(self) -> None:
        if self.killed:
            raise KilledError("the process died before: open the engine again")


class HitchingEngine(PassingEngine):
    """Forwards calls; after its ``seconds`` were set, the next "read", "put" or "publish" is delayed once."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.seconds: dict[str, float] = {}

    def put(self, blobs: Sequence[Blob], parts: Iterable[Part], *, stable: bool = False) -> None:
        time.sleep(self.seconds.pop("put", 0.0))
        self.engine.put(blobs, parts, stable=stable)

    def read(self, *requests: ReadRequest) -> None:
        time.sleep(self.seconds.pop("read", 0.0))
        self.engine.read(*requests)

    def publish(self, head: Head, before: Head | None) -> None:
        time.sleep(self.seconds.pop("publish", 0.0))
        self.engine.publish(head, before)


class Between(PassingEngine):
    """Forwards calls to ``engine``: ``before_read`` is called once, before the read that ``in_reads`` selects."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.before_publish: Callable[[], None] | None = None
        """Called once, when all data of a commit is put."""
        self.after_publish: Callable[[], None] | None = None
        """Called once, after the engine has published and before the store knows it."""
        self.reading = 0
        """Number of reads in progress."""
        self._lock = threading.Lock()
        self._before_read: Callable[[], None] | None = None
        self._reads_left = 0

    def in_reads(self, count: int, before_read: Callable[[], None]) -> None:
        """Call ``before_read`` before the ``count``-th read from now."""
        self._reads_left, self._before_read = count, before_read

    @property
    def reached(self) -> bool:
        """True once the selected read has happened."""
        return self._before_read is None

    def read(self, *requests: ReadRequest) -> None:
        with self._lock:
            self.reading += 1
            self._reads_left -= 1
            call = self._before_read if self._reads_left == 0 else None
        try:
            if call is not None:
                self._before_read = None
                call()
            self.engine.read(*requests)
        finally:
            with self._lock:
                self.reading -= 1

    def publish(self, head: Head, before: Head | None) -> None:
        call, self.before_publish = self.before_publish, None
        if call is not None:
            call()
        self.engine.publish(head, before)
        call, self.after_publish = self.after_publish, None
        if call is not None:
            call()


def _torn(
    blobs: Sequence[Blob], parts: Iterable[Part], whole: int, num_bytes: int
) -> Iterator[tuple[Blob, NDArray[np.uint8]]]:
    """Yield blobs up to ``whole`` parts, and a part of the next, filled from their first byte on."""
    arrived: list[dict[int, NDArray[np.uint8]]] = [{} for _ in blobs]
    for i, (index, offset, data) in enumerate(parts):
        if i < whole or num_bytes:
            arrived[index][offset] = data.reshape(-1).view(np.uint8)[: num_bytes if i == whole else None].copy()
        if i >= whole:
            break
    for blob, pieces in zip(blobs, arrived, strict=True):
        data = np.zeros(blob.size, np.uint8)
        end = 0
        while end in pieces:
            size = pieces[end].size
            data[end : end + size] = pieces[end]
            end, size = end + paged(size), end + size
            if end not in pieces:
                yield Blob(blob.name, size), data[:size]
