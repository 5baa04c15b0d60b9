"""An engine that fails when it is told to, for tests of whatever uses a store."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.errors import StoreError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from tiercache.store.engine import Block, Contents, Engine, Form


def disk_full() -> StoreError:
    """Return the error of a full disk."""
    return StoreFullError(needed_bytes=1 << 20, limit="the disk of a test has 0 free", advice="free some")


class KilledError(Exception):
    """Stands for the death of the process: nothing that the engine is asked for afterward happens."""


class FailingEngine:
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

        ``capacity_bytes`` bounds the blocks that ``engine`` holds, over all calls.
        """
        self.engine, self.error, self.verbs, self.lasting = engine, error, verbs, lasting
        self.capacity_bytes = capacity_bytes
        self.calls = 0
        self.failed = 0
        self.fail_at = fail_at
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

    def write(self, blocks: Iterable[Block], *, stable: bool = False) -> None:
        """Take the blocks and, where it is time, fail as a disk does: at the end."""
        if self._due("write"):
            for _ in blocks:
                pass
            raise self.error()
        if self._tear is not None:
            self.engine.write(_torn(blocks, *self._tear))
            self.killed = True
            raise KilledError("the process died in the middle of a write")
        self.engine.write(blocks if self.capacity_bytes is None else self._measured(blocks), stable=stable)

    def read(self, name: bytes, offset: int, out: NDArray[np.uint8], form: Form | None = None) -> None:
        """Read, or fail."""
        if self._due("read"):
            raise self.error()
        self.engine.read(name, offset, out, form)

    def commit(self, records: Mapping[str, bytes | None], dead: Iterable[bytes], *, shrink: bool = False) -> None:
        """Commit, or fail."""
        if self._due("commit"):
            raise self.error()
        self.engine.commit(records, dead, shrink=shrink)

    def contents(self) -> Contents:
        """Pass on."""
        self._check_alive()
        return self.engine.contents()

    def close(self) -> None:
        """Pass on."""
        self.engine.close()

    def _measured(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Yield blocks until the disk is full: then the engine's source fails, and it keeps none of them."""
        assert self.capacity_bytes is not None
        sizes = dict(self.engine.contents().blocks)
        for name, data, form in blocks:
            sizes.pop(name, None)
            held = sum(sizes.values())
            if held + data.nbytes > self.capacity_bytes:
                raise StoreFullError(
                    needed_bytes=data.nbytes,
                    limit=f"the disk of a test may hold {self.capacity_bytes:,} and holds {held:,}",
                    advice="raise capacity_bytes",
                )
            sizes[name] = data.nbytes
            yield name, data, form

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


def _torn(blocks: Iterable[Block], whole: int, num_bytes: int) -> Iterator[Block]:
    """Yield ``whole`` blocks and a part of the next."""
    for i, (name, data, form) in enumerate(blocks):
        if i < whole:
            yield name, data, form
        elif i == whole and num_bytes:
            yield name, data.reshape(-1).view(np.uint8)[:num_bytes], None
