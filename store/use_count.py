"""Who uses an engine at this moment, so that closing it waits for them."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tiercache.store.errors import StoreClosedError

if TYPE_CHECKING:
    from collections.abc import Iterator


class UseCount:
    """Lets uses through until it is closed; from any thread."""

    def __init__(self, label: str) -> None:
        """``label`` is the store in the words of a message."""
        self._label = label
        self._changed = threading.Condition()
        self._uses, self._closed = 0, False

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keep the engine open until this ends. Raises StoreClosedError."""
        with self._changed:
            if self._closed:
                raise StoreClosedError(f"{self._label} is closed: open it again")
            self._uses += 1
        try:
            yield
        finally:
            with self._changed:
                self._uses -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Let nothing more through, and wait for what goes on."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._uses)
