"""An engine between whose calls something else happens, at a place that a test chooses."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tiercache.store import Engine, LmdbEngine, MemoryEngine, ZarrEngine


def engine_of(kind: str, path: Path) -> Engine:
    """Return an empty engine."""
    if kind == "memory":
        return MemoryEngine()
    path.mkdir(parents=True, exist_ok=True)
    return (LmdbEngine if kind == "lmdb" else ZarrEngine)(path, create=True)


class Between:
    """Passes calls to ``engine``: ``before_read`` is called once, before the read that ``in_reads`` counts to."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.after_commit: Callable[[], None] | None = None
        """Called once, when the engine has committed and the store does not know it yet."""
        self.read_failed = threading.Event()
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

    def read(self, *arguments: Any) -> None:
        """Do what is to be done first."""
        with self._lock:
            self.reading += 1
            self._reads_left -= 1
            call = self._before_read if self._reads_left == 0 else None
        try:
            if call is not None:
                self._before_read = None
                call()
            self.engine.read(*arguments)
        except Exception:
            self.read_failed.set()
            raise
        finally:
            with self._lock:
                self.reading -= 1

    def commit(self, records: Mapping[str, bytes | None]) -> None:
        """Commit, and do what is to be done then."""
        self.engine.commit(records)
        call, self.after_commit = self.after_commit, None
        if call is not None:
            call()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the engine's, but what reads past this one."""
        if name in {"locate", "fields_apart"}:
            raise AttributeError(name)
        return getattr(self.engine, name)
