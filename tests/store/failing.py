"""Engines that pass calls on to another: one that fails when it is told to, and one that is slow."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.errors import StoreError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tiercache.store.engine import Block, Data, Engine, ReadRequest


def disk_full() -> StoreError:
    """Return the error of a full disk."""
    return StoreFullError(needed_bytes=1 << 20, limit="the disk of a test has 0 free", advice="free some")


class KilledError(Exception):
    """Stands for the death of the process: nothing that the engine is asked for afterward happens."""


class PassingEngine:
    """Passes all calls to ``engine``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def write(self, blocks: Iterable[Data], *, stable: bool = False) -> list[int]:
        """Pass on."""
        return self.engine.write(blocks, stable=stable)

    def read(self, request: ReadRequest) -> None:
        """Pass on."""
        self.engine.read(request)

    def commit(self, records: Mapping[str, bytes | None]) -> None:
        """Pass on."""
        self.engine.commit(records)

    def __getattr__(self, name: str) -> Any:
        if name in {"locate", "fields_apart"}:
            raise AttributeError(name)  # so that each read is passed on
        return getattr(self.engine, name)


class FailingEngine(PassingEngine):
    """Passes calls to ``engine`` until a chosen one, which raises instead and changes nothing.

    Calls of ``write``, ``read`` and ``commit`` count from 1 since ``fail_at`` was last set, in whatever thread.
    It can also tear a write, as a process that dies in the middle of it does, and be a disk that fills up.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        fail_at: int | None = None,
        error: Callable[[], Exception] = disk_full,
        verbs: tuple[str, ...] = ("write", "read", "commit"),
        lasting: bool = False,
        capacity_bytes: int | None = None,
    ) -> None:
        """``verbs`` are the calls that count; with ``lasting``, every counted call after the chosen one fails too.

        ``capacity_bytes`` bounds the blocks that are written by this one and not freed.
        """
        super().__init__(engine)
        self.error, self.verbs, self.lasting = error, verbs, lasting
        self.capacity_bytes = capacity_bytes
        self.calls = 0
        self.failed = 0
        self.fail_at = fail_at
        self.killed = False
        self._sizes: dict[tuple[Any, ...], int] = {}
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
        sizes = dict(self._sizes)
        places = self.engine.write(self._measured(blocks, sizes), stable=stable)
        self._sizes = sizes
        return places

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

    def records(self) -> Mapping[str, bytes]:
        """Pass on."""
        self._check_alive()
        return self.engine.records()

    def free(self, blocks: Iterable[Block]) -> None:
        """Pass on."""
        self._check_alive()
        gone = list(blocks)
        for block in gone:
            self._sizes.pop(block[:4], None)
        self.engine.free(gone)

    def _measured(self, blocks: Iterable[Data], sizes: dict[tuple[Any, ...], int]) -> Iterator[Data]:
        """Yield blocks until the disk is full: then the engine's source fails, and it keeps none of them."""
        for block, data in blocks:
            held = sum(sizes.values())
            if self.capacity_bytes is not None and held + data.nbytes > self.capacity_bytes:
                raise StoreFullError(
                    needed_bytes=data.nbytes,
                    limit=f"the disk of a test may hold {self.capacity_bytes:,} and holds {held:,}",
                    advice="raise capacity_bytes",
                )
            sizes[block[:4]] = data.nbytes
            yield block, data

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


class SlowEngine(PassingEngine):
    """Passes calls to ``engine`` after a delay, so that what depends on timing shows."""

    def __init__(
        self, engine: Engine, *, read_seconds: float = 0.0, write_seconds: float = 0.0, commit_seconds: float = 0.0
    ) -> None:
        super().__init__(engine)
        self.read_seconds, self.write_seconds, self.commit_seconds = read_seconds, write_seconds, commit_seconds

    def write(self, blocks: Iterable[Data], *, stable: bool = False) -> list[int]:
        """Wait, then write."""
        time.sleep(self.write_seconds)
        return self.engine.write(blocks, stable=stable)

    def read(self, request: ReadRequest) -> None:
        """Wait, then read."""
        time.sleep(self.read_seconds)
        self.engine.read(request)

    def commit(self, records: Mapping[str, bytes | None]) -> None:
        """Wait, then commit."""
        time.sleep(self.commit_seconds)
        self.engine.commit(records)


def _torn(blocks: Iterable[Data], whole: int, num_bytes: int) -> Iterator[Data]:
    """Yield ``whole`` blocks and a part of the next."""
    for i, (block, data) in enumerate(blocks):
        if i < whole:
            yield block, data
        elif i == whole and num_bytes and block.layout is None:
            yield block._replace(size=num_bytes), data.reshape(-1).view(np.uint8)[:num_bytes]
