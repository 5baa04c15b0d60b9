"""Dead files that new ones are written over: their room on the disk is there, which a new file has to be given."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from threading import Lock
from typing import TYPE_CHECKING

from tiercache.store.direct_file import PAGE_BYTES, paged

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FOLDER = "spare"
"""Where they wait; nothing in it is needed."""
_COMMITS = 3
"""Spares are for a dump as large as the largest of so many commits: those inside a pass have small ones."""
_LONGER = 1.25
"""The most bytes that a file may have to each that is written over it."""


class SpareFiles:
    """Files that no manifest names which counts and no reader's mark holds, in a folder of their own; by any thread.

    At most as many bytes as one of the last commits wrote; those that were freed first go first.
    """

    def __init__(self, root: Path, oldest: Callable[[], int]) -> None:
        """``oldest()`` is the newest commit at the begin of the oldest read in this process."""
        self._root, self._oldest = str(root), oldest
        self._lock = Lock()
        self._by_pages: dict[int, deque[tuple[int, str]]] = {}
        """By bytes of their pages: the commit that freed each, rising, and where it is."""
        self._bytes = self._number = self._written = 0
        self._lately: deque[int] = deque(maxlen=_COMMITS)

    @property
    def num_bytes(self) -> int:
        """Bytes of all spares."""
        return self._bytes

    @property
    def most(self) -> int:
        """The most bytes that they may have."""
        return max(self._lately, default=0)

    def turn(self) -> None:
        """Note that a commit was made."""
        with self._lock:
            self._lately.append(self._written)
            self._written = 0

    def keep(self, path: str, freed: int) -> None:
        """Take a file that commit ``freed`` gave up.

        One that has other names too, which are others', or cannot be moved is only deleted. Raises OSError, but not for
        a file that is gone.
        """
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(path)
            place = None if status.st_nlink > 1 or status.st_size < PAGE_BYTES else self._move(path)
            if place is None:
                os.unlink(path)  # noqa: PTH108  hundreds in a commit
                return
            pages = paged(status.st_size)
            with self._lock:
                self._by_pages.setdefault(pages, deque()).append((freed, place))
                self._bytes += pages
        self.shrink(self.most)

    def take(self, size: int) -> str | None:
        """Return a spare that ``size`` bytes are to be written over, which then is none any more; None without one.

        No read that goes on in this process began when a commit named it.
        """
        oldest, least = self._oldest(), paged(size)
        with self._lock:
            self._written += least
            for pages in sorted(p for p in self._by_pages if least <= p <= least * _LONGER):
                if self._by_pages[pages][0][0] <= oldest:
                    return self._pop(pages)
        return None

    def shrink(self, most: int = 0) -> None:
        """Delete spares until they have at most so many bytes; one that cannot be deleted is, by the next opening."""
        while True:
            with self._lock:
                if self._bytes <= most:
                    return
                path = self._pop(min(self._by_pages, key=lambda pages: self._by_pages[pages][0]))
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108

    def _move(self, path: str) -> str | None:
        """Bring a file into the folder of spares and return where it is; None where it cannot be brought there."""
        with self._lock:
            self._number += 1
            place = f"{self._root}/{FOLDER}/{self._number}"
        for _ in range(2):
            try:
                os.rename(path, place)  # noqa: PTH104
            except FileNotFoundError:
                with contextlib.suppress(OSError):
                    os.makedirs(f"{self._root}/{FOLDER}", exist_ok=True)  # noqa: PTH103
            except OSError:
                break
            else:
                return place
        return None

    def _pop(self, pages: int) -> str:
        _, path = self._by_pages[pages].popleft()
        if not self._by_pages[pages]:
            del self._by_pages[pages]
        self._bytes -= pages
        return path
