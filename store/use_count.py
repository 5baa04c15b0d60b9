"""Who uses an engine at this moment, so that closing it waits for them."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tiercache.store.errors import StoreClosedError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator


class UseCount:
    """Lets uses through until it is closed; from any thread."""

    def __init__(self, label: str) -> None:
        """``label`` is the store in the words of a message."""
        self._label = label
        self._changed = threading.Condition()
        self._uses: Counter[int] = Counter()
        """By thread."""
        self._closed = False

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keep the engine open until this ends. Raises StoreClosedError."""
        with self._changed:
            if self._closed:
                raise StoreClosedError(f"{self._label} is closed: open it again")
            self._uses[threading.get_ident()] += 1
        try:
            yield
        finally:
            with self._changed:
                self._uses[threading.get_ident()] -= 1
                self._uses = +self._uses
                self._changed.notify_all()

    def check_outside(self) -> None:
        """Raise StoreError if this thread is inside a use: closing would wait for itself."""
        with self._changed:
            if threading.get_ident() in self._uses:
                raise StoreError(
                    f"{self._label} cannot be closed inside a function that it calls, such as progress=: raise an "
                    "error there to stop the method, and close the store afterward"
                )

    def close(self) -> None:
        """Let nothing more through, and wait for what goes on."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._uses)


def warn_unclosed(what: object, label: str) -> None:
    """Warn of ``what`` nobody can close any more, and which closes itself: with its lock, leases and files."""
    message = f"{label} was never closed: close it, or open it in a with statement"
    warnings.warn(message, ResourceWarning, stacklevel=3, source=what)
