"""The merge of sources that are in hash order. A source yields parts: hashes (n,), and other columns (n, ...)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.hashing import hash_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import DTypeLike, NDArray

    from tiercache.store.table import Table

    Columns = tuple[NDArray[Any], ...]


class SortedCursor:
    """A place in a source, of which the next rows are in memory."""

    def __init__(self, parts: Iterable[Columns], *columns: DTypeLike, least: int = 0) -> None:
        """``columns`` are the dtypes of the columns beside the hashes. ``fill`` reads where ``least`` rows are left."""
        self.ended = False
        """Whether all rows that are left are in memory."""
        self._parts, self._least = iter(parts), least
        self._rows: Columns = tuple(np.empty(0, np.dtype(column)) for column in (np.uint64, *columns))

    @property
    def end(self) -> int:
        """The last hash in memory."""
        return int(self._rows[0][-1])

    def fill(self) -> bool:
        """Read on where few rows are left in memory; returns whether there are any."""
        while not self.ended and self._rows[0].size <= self._least:
            part = next(self._parts, None)
            if part is None:
                self.ended = True
            elif self._rows[0].size:
                self._rows = tuple(np.concatenate(pair) for pair in zip(self._rows, part, strict=True))
            else:
                self._rows = part
        return bool(self._rows[0].size)

    def take(self, bound: int) -> Columns:
        """Return the rows with hashes up to ``bound``, which are then gone."""
        at = int(np.searchsorted(self._rows[0], np.uint64(bound), side="right"))
        taken = tuple(column[:at] for column in self._rows)
        self._rows = tuple(column[at:] for column in self._rows)
        return taken


def merged(*cursors: SortedCursor) -> Iterator[tuple[Columns, ...]]:
    """Yield what all cursors have up to the same hash, bound after bound, until all rows are gone.

    All rows with the same hash come together, but for those of one source that it cuts into two parts.
    """
    while filled := [cursor for cursor in cursors if cursor.fill()]:
        ends = [cursor.end for cursor in filled if not cursor.ended]
        bound = min(ends) if ends else max(cursor.end for cursor in filled)
        yield tuple(cursor.take(bound) for cursor in cursors)


def hashed(table: Table, parts: Iterable[Columns]) -> Iterator[Columns]:
    """Yield parts of keys and other columns of a table, with the hashes of the keys before them."""
    return ((hash_keys(part[0], table.table_id), *part) for part in parts)


def rising(hashes: NDArray[np.uint64], after: int | None = None) -> bool:
    """Return whether each hash is greater than the one before it, and the first than ``after``."""
    return not np.any(hashes[1:] <= hashes[:-1]) and (after is None or not hashes.size or int(hashes[0]) > after)


def whole_keys(parts: Iterable[Columns]) -> Iterator[Columns]:
    """Yield the same rows, cut so that those with equal values in the first column, side by side, come together."""
    held: Columns | None = None
    for part in parts:
        rows = part if held is None else tuple(np.concatenate(pair) for pair in zip(held, part, strict=True))
        differs = rows[0] != rows[0][-1]
        last = rows[0].size - int(np.argmax(differs[::-1])) if np.any(differs) else 0
        held = tuple(column[last:].copy() for column in rows)
        if last:
            yield tuple(column[:last] for column in rows)
    if held is not None:
        yield held
