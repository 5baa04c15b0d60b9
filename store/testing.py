"""Engines for tests of whatever uses a store: one that fails when told to, one that is slow."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from tiercache.store.errors import StoreError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.store.engine import Block, Contents, Engine, Form


def disk_full() -> StoreError:
    """Return the error of a full disk."""
    return StoreFullError(needed_bytes=1 << 20, limit="the disk of a test has 0 free", advice="free some")


class FailingEngine:
    """Passes calls to ``engine`` until a chosen one, which raises instead and changes nothing.

    Calls of ``write``, ``read`` and ``commit`` count from 1 since ``fail_at`` was last set, in whatever thread.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        fail_at: int | None = None,
        error: Callable[[], Exception] = disk_full,
        verbs: tuple[str, ...] = ("write", "read", "commit"),
        lasting: bool = False,
    ) -> None:
        """``verbs`` are the calls that count; with ``lasting``, every counted call after the chosen one fails too."""
        self.engine, self.error, self.verbs, self.lasting = engine, error, verbs, lasting
        self.calls = 0
        self.failed = 0
        self.fail_at = fail_at
        self._lock = threading.Lock()

    def fail_in(self, calls: int | None) -> None:
        """Let the ``calls``-th counted call from now fail; None lets none fail."""
        with self._lock:
            self.calls, self.fail_at = 0, calls

    def write(self, blocks: Iterable[Block], *, stable: bool = False) -> None:
        """Take the blocks and, where it is time, fail as a disk does: at the end."""
        if self._due("write"):
            for _ in blocks:
                pass
            raise self.error()
        self.engine.write(blocks, stable=stable)

    def read(self, name: bytes, offset: int, out: NDArray[np.uint8], form: Form | None = None) -> None:
        """Read, or fail."""
        if self._due("read"):
            raise self.error()
        self.engine.read(name, offset, out, form)

    def commit(self, records: Mapping[str, bytes | None], dead: Iterable[bytes]) -> None:
        """Commit, or fail."""
        if self._due("commit"):
            raise self.error()
        self.engine.commit(records, dead)

    def contents(self) -> Contents:
        """Pass on."""
        return self.engine.contents()

    def close(self) -> None:
        """Pass on."""
        self.engine.close()

    def _due(self, verb: str) -> bool:
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


class SlowEngine:
    """Passes calls to ``engine`` after a delay, so that what depends on timing shows."""

    def __init__(
        self, engine: Engine, *, read_seconds: float = 0.0, write_seconds: float = 0.0, commit_seconds: float = 0.0
    ) -> None:
        self.engine = engine
        self.read_seconds, self.write_seconds, self.commit_seconds = read_seconds, write_seconds, commit_seconds

    def write(self, blocks: Iterable[Block], *, stable: bool = False) -> None:
        """Wait, then write."""
        time.sleep(self.write_seconds)
        self.engine.write(blocks, stable=stable)

    def read(self, name: bytes, offset: int, out: NDArray[np.uint8], form: Form | None = None) -> None:
        """Wait, then read."""
        time.sleep(self.read_seconds)
        self.engine.read(name, offset, out, form)

    def commit(self, records: Mapping[str, bytes | None], dead: Iterable[bytes]) -> None:
        """Wait, then commit."""
        time.sleep(self.commit_seconds)
        self.engine.commit(records, dead)

    def contents(self) -> Contents:
        """Pass on."""
        return self.engine.contents()

    def close(self) -> None:
        """Pass on."""
        self.engine.close()
