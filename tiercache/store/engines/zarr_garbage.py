"""Objects that no commit needs any more: deleted on a thread, on an object store once nobody can be reading them."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from tiercache.store.records import decode, encode
from tiercache.store.store_errors import CorruptStoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

    from tiercache.store.engines.zarr_chunks import ChunkWriter
    from tiercache.store.engines.zarr_objects import Objects

FREE = "free"
"""The folder of the objects that list garbage, one per writer."""


class Hole(NamedTuple):
    """Bytes at the front of a file that nobody needs."""

    key: str
    size: int


class Garbage:
    """Names of objects, and of folders, which end in a slash: for one thread at a time, but ``in`` and ``wait``."""

    def __init__(self, objects: Objects, writer: ChunkWriter, keep_for: float) -> None:
        """On an object store, delete after ``keep_for`` seconds, by the clock of the machine that noted a name."""
        self._objects, self._writer, self._keep_for = objects, writer, keep_for
        self._since: dict[str, float] = {}
        """On an object store, the seconds since 1970 when a name was noted."""
        self._before: dict[str, float] = {}
        """Those of the writers before this one: they say since when, and never what is garbage."""
        self._epoch = 0
        self._listed: set[str] | None = None
        """The names in the list of this writer; None if it has none."""
        self._deleting: Future[None] | None = None

    def __contains__(self, key: str) -> bool:
        """Return whether an object is garbage, by itself or with a folder that it is in."""
        return bool(self._since) and any(name in self._since for name in (key, *_folders(key)))

    def join(self, epoch: int) -> None:
        """Read since when names are garbage by the lists of the writers before this one, which has an epoch.

        A list that cannot be read costs nothing but time: its names are garbage from when they are dropped again.
        """
        self._epoch, now = epoch, time.time()
        with contextlib.suppress(OSError):
            keys = [f"{FREE}/{name}" for name in self._objects.names(FREE)]
            for key, data in zip(keys, self._objects.get_all(keys), strict=True):
                with contextlib.suppress(CorruptStoreError):
                    for name, since in _listed(data or b"", key).items():  # by a clock that was ahead: since now
                        self._before[name] = min(since, now, self._before.get(name, now))

    def delete(self, names: Iterable[str], holes: Sequence[Hole] = ()) -> None:
        """Delete names and punch holes, on a thread; what cannot be deleted is left to the next opening."""
        self.wait()
        due = list(names)
        if self._epoch:
            now = time.time()
            for name in due:
                times = [self._before[one] for one in (name, *_folders(name)) if one in self._before]
                self._since.setdefault(name, min(times, default=now))
            due, holes = [name for name, since in self._since.items() if since + self._keep_for <= now], ()
            for name in due:
                del self._since[name]

        def run() -> None:
            with contextlib.suppress(OSError):
                for hole in holes:
                    self._objects.punch(*hole)
                self._objects.delete(due)

        if due or holes:
            self._deleting = self._writer.later(run)

    def give_back(self, names: Iterable[str]) -> None:
        """Delete at once what is in the way of names that are put again. Raises OSError."""
        self.wait()
        own = {*names}
        around = own | {folder for name in own for folder in _folders(name.rstrip("/"))}
        inside = tuple(name for name in own if name[-1] == "/")
        found = [one for one in self._since if one in around or one.startswith(inside)]
        self._objects.delete(found)
        for name in found:
            del self._since[name]

    def wait(self) -> None:
        """Return when nothing is being deleted."""
        if (deleting := self._deleting) is not None:
            deleting.exception()

    def list(self, *, again: bool = True) -> None:
        """On an object store, list what is not deleted for the writers after this one, and delete the lists before it.

        Not ``again``: unless this writer has a list.
        """
        if not self._epoch or (not again and self._listed is not None):
            return
        by_time = defaultdict[float, list[str]](list)
        for name, since in self._since.items():
            by_time[since].append(name)
        since_all = sorted([since, sorted(names)] for since, names in by_time.items())
        with contextlib.suppress(OSError):
            if since_all and self._since.keys() != self._listed:
                self._objects.put(f"{FREE}/{self._epoch}", encode(FREE, {"since": since_all}, {}))
            last = self._epoch - bool(since_all)
            lists = [name for name in self._objects.names(FREE) if name.isdecimal() and int(name) <= last]
            self._objects.delete([f"{FREE}/{name}" for name in lists])
            self._listed = {*self._since}


def _listed(data: bytes, name: str) -> dict[str, float]:
    """Read a list. Raises CorruptStoreError."""
    values: Any = decode(FREE, data, name)[0]
    try:
        return {str(one): float(since) for since, names in values["since"] for one in names}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CorruptStoreError(f"{name} cannot be read ({error})") from error


def _folders(key: str) -> list[str]:
    parts = key.split("/")
    return ["/".join(parts[:n]) + "/" for n in range(1, len(parts))]
