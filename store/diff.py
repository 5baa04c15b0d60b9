"""What is different between two stores, or two commits of one: a merge of two scans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tiercache.store.merge import SortedCursor, hashed, merged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiercache.store.scan import Chunk
    from tiercache.store.table import Table

_EXAMPLES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How the rows of one table differ, vectors and optimizer state, bit for bit."""

    table: str
    only_first: int
    """Rows whose keys the second does not have."""
    only_second: int
    different: int
    same: int
    examples: tuple[int, ...]
    """The first few keys, in hash order, whose rows are not the same."""


class Comparable(Protocol):
    """What is compared: a store, or what is made of several and reads as one."""

    @property
    def tables(self) -> tuple[Table, ...]:
        """In the order of unsigned table ids."""

    @property
    def label(self) -> str:
        """It in the words of a message."""

    def live_rows(self, table_name: str) -> int:
        """Return how many rows a table has."""

    def scan(self, table_name: str) -> Iterator[Chunk]:
        """Yield all rows of a table in hash order."""


def differences(
    first: Comparable, second: Comparable, *, progress: Callable[[int, int], None] | None = None
) -> list[Difference]:
    """Compare all rows of two stores of the same tables, table by table, in about 512 MiB of memory.

    ``progress(done, total)`` is called with rows of both.

    Raises ValueError for stores of different tables, or without a commit, and CorruptStoreError.
    """
    if first.tables != second.tables:
        names = sorted({table.name for table in {*first.tables} ^ {*second.tables}})
        raise ValueError(
            f"{first.label} and {second.label} have different tables (see {', '.join(names)}): "
            "compare stores of the same tables"
        )
    total = sum(store.live_rows(table.name) for store in (first, second) for table in first.tables)
    found, done = [], 0
    for table in first.tables:
        one, other = (_cursor(store, table) for store in (first, second))
        only_first = only_second = different = same = 0
        examples: list[int] = []
        for (hashes, keys, rows), (others, other_keys, other_rows) in merged(one, other):
            _, mine, theirs = np.intersect1d(hashes, others, assume_unique=True, return_indices=True)
            unequal = mine[np.any(rows[mine].view(np.uint32) != other_rows[theirs].view(np.uint32), axis=1)]
            left, right = np.delete(keys, mine), np.delete(other_keys, theirs)
            only_first, only_second = only_first + left.size, only_second + right.size
            different, same = different + unequal.size, same + mine.size - unequal.size
            done += 2 * mine.size + left.size + right.size
            if progress is not None:
                progress(done, total)
            examples += np.concatenate([keys[unequal], left, right]).tolist()[: _EXAMPLES - len(examples)]
        found.append(
            Difference(
                table=table.name,
                only_first=only_first,
                only_second=only_second,
                different=different,
                same=same,
                examples=tuple(examples),
            )
        )
    return found


def _cursor(store: Comparable, table: Table) -> SortedCursor:
    """Return a cursor over the hashes, keys and rows of a table."""
    rows = ((keys, np.concatenate(fields, axis=1)) for keys, fields in store.scan(table.name))
    width = sum(field.width for field in table.fields)
    return SortedCursor(hashed(table, rows), np.int64, (np.float32, (width,)))
