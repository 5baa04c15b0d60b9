"""Engines that pass calls on to another: they fail when told to, are late, or have things happen between calls."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.store_errors import StoreError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tiercache.store.engines.engine import Data, Engine, ReadRequest


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
        if name in {"locate", "fields_apart"}:
            raise AttributeError(name)  # so that each read is passed on
        return getattr(self.engine, name)


class FailingEngine(PassingEngine):
    """Passes calls to ``engine`` until a chosen one, which raises instead and changes nothing.

    Calls of ``write``, ``read`` and ``commit`` count from 1 since ``fail_in`` was last called, in whatever thread.
    It can also tear a write, as a process that dies in the middle of it does.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        error: Callable[[], Exception] = disk_full,
        verbs: tuple[str, ...] = ("write", "read", "commit"),
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

    def tear(self, blocks: int, num_bytes: int = 0) -> None:
        """Let the next write end after some blocks, and so many bytes of the one after them, and raise KilledError.

        Every later call raises it too. Close the engine, open it again as after a crash, and wrap that.
        """
        self._tear = blocks, num_bytes

    def write(self, blocks: Iterable[Data], *, stable: bool = False) -> list[int]:
        """Take the blocks and, where it is time, fail as a disk does: at the end."""
        if self._due("write"):
            for _ in blocks:
                pass
            raise self.error()
        if self._tear is not None:
            self.engine.write(_torn(blocks, *self._tear))
            self.killed = True
            raise KilledError("the process died in the middle of a write")
        return self.engine.write(blocks, stable=stable)

    def read(self, request: ReadRequest) -> None:
        """Read, or fail."""
        if self._due("read"):
            raise self.error()
        self.engine.read(request)

    def commit(self, records: Mapping[str, bytes | None]) -> None:
        """Commit, or fail."""
        if self._due("commit"):
            raise self.error()
        self.engine.commit(records)

    def __getattr__(self, name: str) -> Any:
        if name in {"records", "free"}:
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
    """Passes calls to ``engine``; the next "read", "write" or "commit" after its ``seconds`` were set is late once."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.seconds: dict[str, float] = {}

    def write(self, blocks: Iterable[Data], *, stable: bool = False) -> list[int]:
        """Wait, then write."""
        time.sleep(self.seconds.pop("write", 0.0))
        return self.engine.write(blocks, stable=stable)

    def read(self, request: ReadRequest) -> None:
        """Wait, then read."""
        time.sleep(self.seconds.pop("read", 0.0))
        self.engine.read(request)

    def commit(self, records: Mapping[str, bytes | None]) -> None:
        """Wait, then commit."""
        time.sleep(self.seconds.pop("commit", 0.0))
        self.engine.commit(records)


class Between(PassingEngine):
    """Passes calls to ``engine``: ``before_read`` is called once, before the read that ``in_reads`` counts to."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.after_commit: Callable[[], None] | None = None
        """Called once, when the engine has committed and the store does not know it yet."""
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

    def commit(self, records: Mapping[str, bytes | None]) -> None:
        """Commit, and do what is to be done then."""
        self.engine.commit(records)
        call, self.after_commit = self.after_commit, None
        if call is not None:
            call()


def _torn(blocks: Iterable[Data], whole: int, num_bytes: int) -> Iterator[Data]:
    """Yield ``whole`` blocks and a part of the next."""
    for i, (block, data) in enumerate(blocks):
        if i < whole:
            yield block, data
        elif i == whole and num_bytes and block.layout is None:
            yield block._replace(size=num_bytes), data.reshape(-1).view(np.uint8)[:num_bytes]
