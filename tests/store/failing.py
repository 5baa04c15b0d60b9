"""Engines that pass calls on to another: they fail when told to, are late, or have things happen between calls."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.engines.engine import Blob
from tiercache.store.files import paged
from tiercache.store.store_errors import StoreError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.store.engines.engine import Engine, Head, Part, ReadRequest


def disk_full() -> StoreError:
    """Return the error of a full disk."""
    return StoreFullError(needed_bytes=1 << 20, limit="the disk of a test has 0 free", advice="free some")


class KilledError(Exception):
    """Stands for the death of the process: nothing that the engine is asked for afterward happens."""


class PassingEngine:
    """Passes all calls to ``engine``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class FailingEngine(PassingEngine):
    """Passes calls to ``engine`` until a chosen one, which raises instead and changes nothing.

    Calls of ``put``, ``read`` and ``publish`` count from 1 since ``fail_in`` was last called, in whatever thread.
    It can also tear a put, as a process that dies in the middle of it does.
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
        """Let the ``calls``-th counted call from now fail; None lets none fail."""
        with self._lock:
            self.calls, self.fail_at = 0, calls

    def tear(self, parts: int, num_bytes: int = 0) -> None:
        """Let the next put end after some parts, and so many bytes of the one after them, and raise KilledError.

        Blobs are left cut short, or not at all. Every later call raises KilledError too. Close the engine, open it
        again as after a crash, and wrap that.
        """
        self._tear = parts, num_bytes

    def put(self, blobs: Sequence[Blob], parts: Iterable[Part], *, stable: bool = False) -> None:
        """Put blobs and, where it is time, fail as a disk does: at the end."""
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

    def read(self, request: ReadRequest) -> None:
        """Read, or fail."""
        if self._due("read"):
            raise self.error()
        self.engine.read(request)

    def publish(self, head: Head, before: Head | None) -> None:
        """Publish, or fail."""
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
    """Passes calls to ``engine``; the next "read", "put" or "publish" after its ``seconds`` were set is late once."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.seconds: dict[str, float] = {}

    def put(self, blobs: Sequence[Blob], parts: Iterable[Part], *, stable: bool = False) -> None:
        """Wait, then put."""
        time.sleep(self.seconds.pop("put", 0.0))
        self.engine.put(blobs, parts, stable=stable)

    def read(self, request: ReadRequest) -> None:
        """Wait, then read."""
        time.sleep(self.seconds.pop("read", 0.0))
        self.engine.read(request)

    def publish(self, head: Head, before: Head | None) -> None:
        """Wait, then publish."""
        time.sleep(self.seconds.pop("publish", 0.0))
        self.engine.publish(head, before)


class Between(PassingEngine):
    """Passes calls to ``engine``: ``before_read`` is called once, before the read that ``in_reads`` counts to."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.before_publish: Callable[[], None] | None = None
        """Called once, when all that a commit needs is put."""
        self.after_publish: Callable[[], None] | None = None
        """Called once, when the engine has published and the store does not know it yet."""
        self.reading = 0
        """Reads that have begun and not ended."""
        self._lock = threading.Lock()
        self._before_read: Callable[[], None] | None = None
        self._reads_left = 0

    def in_reads(self, count: int, before_read: Callable[[], None]) -> None:
        """Call ``before_read`` before the ``count``-th read from now."""
        self._reads_left, self._before_read = count, before_read

    @property
    def reached(self) -> bool:
        """Whether the read that was counted to has come."""
        return self._before_read is None

    def read(self, request: ReadRequest) -> None:
        """Do what is to be done first."""
        with self._lock:
            self.reading += 1
            self._reads_left -= 1
            call = self._before_read if self._reads_left == 0 else None
        try:
            if call is not None:
                self._before_read = None
                call()
            self.engine.read(request)
        finally:
            with self._lock:
                self.reading -= 1

    def publish(self, head: Head, before: Head | None) -> None:
        """Do what is to be done first, publish, and do what is to be done then."""
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
    """Yield blobs as far as ``whole`` parts, and a part of the next, fill them from their first byte on."""
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
