"""Python files that Arrow's threads read; a process waits for them before it ends."""

from __future__ import annotations

import atexit
import io
import time
from typing import Any
from weakref import WeakSet

_EXIT_SECONDS = 5.0
"""The most that the end of a process waits."""
_POLL_SECONDS = 0.001


class LentFile(io.RawIOBase):
    """A readable file that only an Arrow reader refers to: it exists until Arrow frees the reader.

    That may happen on one of Arrow's threads, after the reader has ended or failed. A thread that needs Python while
    the interpreter shuts down is killed, which aborts the process.
    """

    def __init__(self, file: Any) -> None:
        """file: stays open."""
        self._file = file
        _LENT.add(self)

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes; none at the end."""
        return self._file.read(size)  # type: ignore[no-any-return]


_LENT: WeakSet[LentFile] = WeakSet()


@atexit.register
def _wait() -> None:
    """Wait until Arrow holds no file."""
    end = time.monotonic() + _EXIT_SECONDS
    while _LENT and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
