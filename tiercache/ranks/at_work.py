"""A rank that is at work for long, on a disk say, tells the others meanwhile that it lives."""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

from tiercache.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["AT_WORK", "AtWork"]

AT_WORK = -1
"""What a rank at work tells in place of the size of what it has to say."""
_SECONDS = 5.0
"""How often it tells, where the timeout is not short."""


class AtWork:
    """Tells the other ranks from a thread of its own, so that work stays on the one on which a GPU has its streams.

    The thread begins with the first work, and looks a few times in ``timeout`` seconds whether there is any.
    """

    def __init__(self, tell: Callable[[str], object], timeout: float) -> None:
        """tell: collective; given what the rank is at."""
        self._tell, self._seconds = tell, min(_SECONDS, timeout / 4)
        self._what: str | None = None
        self._since = 0.0
        self._lock, self._stop = Lock(), Event()
        self._thread: Thread | None = None

    @contextmanager
    def at(self, what: str) -> Iterator[None]:
        """Tell while the body is at work, and never after it."""
        if self._thread is None:
            self._thread = Thread(target=self._look, daemon=True, name="tiercache-at-work")
            self._thread.start()
        self._since, self._what = time.monotonic(), what
        try:
            yield
        finally:
            with self._lock:  # what is being told is told to its end
                self._what = None

    def end(self) -> None:
        """End the thread."""
        self._stop.set()

    def _look(self) -> None:
        with suppress(RankError):  # the ranks' next call raises it again
            while not self._stop.wait(self._seconds):
                with self._lock:
                    if self._what is not None and time.monotonic() - self._since >= self._seconds:
                        self._tell(self._what)
