"""Publishing heads: what an engine is at, also after a publish that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiercache.store.store_errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiercache.store.engines.engine import Engine, Head


class Publisher:
    """Publishes the heads of the one writer of an engine."""

    def __init__(self, engine: Engine, label: str) -> None:
        self._engine, self._label = engine, label
        self.head = engine.newest()
        """The newest head of the engine."""
        self.is_known = True
        """False if a head may or may not be durable: nothing is written or dropped after that."""

    def publish(self, head: Head, then: Callable[[Head | None], None]) -> None:
        """Publish a head; if it is durable, also after an error, call ``then`` with the head before it."""
        before, done = self.head, False
        try:
            self._engine.publish(head, before)
            done = True
        finally:
            # An error or an interrupt may come when all of it is durable, or when nothing is.
            if done or self._is_durable(head, before):
                self.head = head
                then(before)

    def look(self) -> None:
        """Take the head that the engine is at now. Raises StoreError."""
        self.head = self._engine.newest()

    def check_known(self) -> None:
        """Raise StoreError if nobody knows what the engine is at: opening the store again finds that out."""
        if not self.is_known:
            raise StoreError(f"a commit of {self._label} failed and may be there or not: close it and open it again")

    def _is_durable(self, head: Head, before: Head | None) -> bool:
        """Return True if the engine is at ``head`` although it raised, False if it is still at ``before``."""
        try:
            found = self._engine.newest()
        except StoreError:
            found = None
        self.is_known = found is not None and found in (head, before)
        return found == head and self.is_known
