"""Objects on an object store that no commit needs, until nobody can be reading them."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Self

from tiercache.store.records import decode, encode
from tiercache.store.store_errors import CorruptStoreError

if TYPE_CHECKING:
    from collections.abc import Iterable

FREE = "free"
"""The folder of the objects that list garbage, one per writer."""


class Garbage:
    """Names of objects, and of folders, which end in a slash, each with the time since which it is garbage.

    Times are seconds since 1970 by the clock of the machine that noted them.
    """

    def __init__(self, keep_for: float = 0.0) -> None:
        """Names expire after ``keep_for`` seconds."""
        self._keep_for = keep_for
        self._since: dict[str, float] = {}
        self.changed = False
        """Whether it differs from the list that was written last."""

    def __bool__(self) -> bool:
        return bool(self._since)

    def __contains__(self, key: str) -> bool:
        """Return whether an object is garbage, by itself or with a folder that it is in."""
        return bool(self._since) and any(name in self._since for name in (key, *_folders(key)))

    def add(self, names: Iterable[str]) -> None:
        """Note what is garbage from now on."""
        now = time.time()
        for name in names:
            self._since.setdefault(name, now)
            self.changed = True

    def join(self, other: Garbage) -> None:
        """Note what an earlier writer listed; a clock that was ahead keeps nothing for longer than from now on."""
        now = time.time()
        for name, since in other._since.items():
            self._since[name] = min(since, self._since.get(name, since), now)

    def take_expired(self) -> list[str]:
        """Remove what is due, and return it."""
        now = time.time()
        names = [name for name, since in self._since.items() if since + self._keep_for <= now]
        self.remove(names)
        return names

    def remove(self, names: list[str]) -> None:
        """Remove names, which it has."""
        for name in names:
            del self._since[name]
        self.changed = self.changed or bool(names)

    @property
    def names(self) -> list[str]:
        """All names."""
        return [*self._since]

    def to_bytes(self) -> bytes:
        """Return its record."""
        by_time = defaultdict[float, list[str]](list)
        for name, since in self._since.items():
            by_time[since].append(name)
        return encode(FREE, {"since": sorted([since, sorted(names)] for since, names in by_time.items())}, {})

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Self:
        """Read the record of ``to_bytes``. Raises CorruptStoreError that calls it ``name``."""
        values: Any = decode(FREE, data, name)[0]
        found = cls()
        try:
            found._since = {str(one): float(since) for since, names in values["since"] for one in names}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CorruptStoreError(f"{name} cannot be read ({error})") from error
        return found


def related(names: Iterable[str], own: Iterable[str]) -> list[str]:
    """Return the names of objects and folders that are some others, are in them or have any of them in them."""
    own = {*own}
    around = own | {folder for name in own for folder in _folders(name.rstrip("/"))}
    inside = tuple(name for name in own if name[-1] == "/")
    return [name for name in names if name in around or name.startswith(inside)]


def _folders(key: str) -> list[str]:
    parts = key.split("/")
    return ["/".join(parts[:n]) + "/" for n in range(1, len(parts))]
