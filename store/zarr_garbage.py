"""What nobody needs any more in an object store, and since when: for as long as somebody may still read it.

What a writer had not deleted when it ended stands in the object ``free/EPOCH``; the next writer goes on with it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Self

from tiercache.store.errors import CorruptStoreError
from tiercache.store.record import decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterable

FREE = "free"
"""The folder of the objects that say since when others are free."""


class Garbage:
    """Names of objects, and of folders, which end in a slash, each with the time since which it is free.

    Times are seconds since 1970 by the clock of the machine that freed them.
    """

    def __init__(self, keep_for: float = 0.0) -> None:
        """What is free is due after ``keep_for`` seconds."""
        self._keep_for = keep_for
        self._since: dict[str, float] = {}
        self.changed = False
        """Whether it is not what was written last."""

    def add(self, names: Iterable[str], before: Garbage | None = None) -> None:
        """Note what is free since now, or for as long as an earlier writer knew of it."""
        now = time.time()
        for name in names:
            self._since[name] = now if before is None else min(now, before.since(name, now))
            self.changed = True

    def since(self, name: str, default: float) -> float:
        """Return since when an object is free, alone or with a folder that it is in."""
        parts = name.split("/")
        folders = ("/".join(parts[:n]) + "/" for n in range(1, len(parts)))
        return min((self._since[one] for one in (name, *folders) if one in self._since), default=default)

    def take_due(self) -> list[str]:
        """Remove what is due, and return it."""
        now = time.time()
        due = [name for name, since in self._since.items() if since + self._keep_for <= now]
        for name in due:
            del self._since[name]
        self.changed = self.changed or bool(due)
        return due

    def join(self, other: Garbage) -> None:
        """Note what another writer knew, too."""
        self._since |= {name: min(since, self._since.get(name, since)) for name, since in other._since.items()}

    def __bool__(self) -> bool:
        return bool(self._since)

    def to_bytes(self) -> bytes:
        """Return its record."""
        by_time = defaultdict[float, list[str]](list)
        for name, since in self._since.items():
            by_time[since].append(name)
        return encode(FREE, {"since": sorted([since, sorted(names)] for since, names in by_time.items())}, {})

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Self:
        """Read what ``to_bytes`` wrote. Raises CorruptStoreError that calls it ``name``."""
        values: Any = decode(FREE, data, name)[0]
        found = cls()
        try:
            found._since = {str(one): float(since) for since, names in values["since"] for one in names}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CorruptStoreError(f"{name} cannot be read ({error})") from error
        return found


def free_key(epoch: int) -> str:
    """Return the name of the object in which the writer of an epoch says what is free."""
    return f"{FREE}/{epoch}"
