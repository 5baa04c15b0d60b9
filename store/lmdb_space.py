"""Keeping LMDB's file from growing on and on: room for single pages, and slack where a steady file has to grow.

LMDB gives every value the lowest free run of pages that fits. Single pages (trees, lists of free pages) are rewritten
by every transaction and, in time, nibble at holes that blocks left, so that a file in which as much is freed as is
written keeps growing by a block now and then. Two things stop that (docs/design has the measurements): from the
start, single free pages between pages in use, where no block fits; and, where a steady file does grow, a few blocks
more at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import lmdb

FILLER = b"~"
"""Keys from here on hold nothing."""
_PAGE_BYTES = 4096
_ONE_PAGE = bytes(_PAGE_BYTES - 16)
_MOST_HOLES = 512
_SLACK_VALUES, _SLACK_SHARE = 4, 32


class Space:
    """Watches how much an environment writes and frees; called by the writer."""

    def __init__(self, environment: lmdb.Environment) -> None:
        self._environment = environment
        self._written = self._largest_value = self._largest_transaction = 0
        self._pages = self._last_page()

    def begin_file(self) -> None:
        """Make single free pages between pages in use: at most 4 MiB, and a 16th of the map."""
        pages = min(2 * _MOST_HOLES, int(self._environment.info()["map_size"]) // _PAGE_BYTES // 16)
        names = [FILLER + i.to_bytes(4, "big") for i in range(pages)]
        with self._environment.begin(write=True) as txn:
            for name in names:
                txn.put(name, _ONE_PAGE)
        with self._environment.begin(write=True) as txn:
            for name in names[::2]:
                txn.delete(name)
        self._pages = self._last_page()

    def wrote(self, sizes: list[int]) -> None:
        """Note the values of one transaction."""
        self._written += sum(sizes)
        self._largest_value = max(self._largest_value, *sizes, 0)
        self._largest_transaction = max(self._largest_transaction, sum(sizes))

    def committed(self, freed_bytes: int) -> None:
        """Note that a commit freed so many bytes; where the file grew although it is steady, give it slack."""
        steady, self._written = 2 * freed_bytes >= self._written > 0, 0
        if steady and self._last_page() > self._pages:
            wanted = max(_SLACK_VALUES * self._largest_value, self._last_page() * _PAGE_BYTES // _SLACK_SHARE)
            slack: Any = np.zeros(min(wanted, self._largest_transaction), dtype=np.uint8).data
            with self._environment.begin(write=True) as txn:
                txn.put(FILLER, slack)
            with self._environment.begin(write=True) as txn:
                txn.delete(FILLER)
        self._pages = self._last_page()

    def _last_page(self) -> int:
        return int(self._environment.info()["last_pgno"])
