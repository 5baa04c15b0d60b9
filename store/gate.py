"""Who reads and writes through an engine in this process, and since when."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tiercache.store.errors import StoreClosedError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Gate:
    """Lets reads and writes through until it is closed; knows what the oldest read may still see. From any thread."""

    def __init__(self, label: str, newest: int = 0) -> None:
        """``label`` is the store in the words of a message, ``newest`` the number of the commit it stands at."""
        self._label, self._newest = label, newest
        self._changed = threading.Condition()
        self._closed = False
        self._writes = 0
        self._reads: list[int] = []
        """The newest commit at the begin of each read that goes on."""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the gate open, and the bytes of what the newest commit names, until this ends.

        Their files may get another name meanwhile, or none, but nothing is written over them. What is to be read must
        be looked for within. Raises StoreClosedError.
        """
        with self._changed:
            self._check_open()
            seen = self._newest
            self._reads.append(seen)
        try:
            yield
        finally:
            with self._changed:
                self._reads.remove(seen)
                if self._closed:
                    self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep the gate open until this ends. Raises StoreClosedError."""
        with self._changed:
            self._check_open()
            self._writes += 1
        try:
            yield
        finally:
            with self._changed:
                self._writes -= 1
                self._changed.notify_all()

    def advance(self, newest: int) -> None:
        """Say that a commit stands: reads that begin from now on find nothing that it freed."""
        with self._changed:
            self._newest = newest

    def oldest(self) -> int:
        """Return the newest commit at the begin of the oldest read that goes on; without one, the newest.

        What a commit up to this one freed, no read in this process looks at any more.
        """
        with self._changed:
            return min([self._newest, *self._reads])

    def is_read(self) -> bool:
        """Tell whether a read goes on."""
        return bool(self._reads)

    def close(self) -> bool:
        """Let nothing more through, and wait for what goes on; False where it was closed before."""
        with self._changed:
            if self._closed:
                return False
            self._closed = True
            self._changed.wait_for(lambda: not self._reads and not self._writes)
            return True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"{self._label} is closed: open it again")
