"""A table of a commit: as it is now, and as the segments have its rows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.bits import ITEM_BYTES
from tiercache.store.initial_rows import initial_rows
from tiercache.store.row_codec import row_words
from tiercache.store.table import state_layout, table_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tiercache.store.table import Group, Table

    Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StoredTable:
    """A table whose rows keep the layout that they were written in until the next rewrite."""

    table: Table
    """The present table."""
    group: Group | None
    """The group of the segments' layouts that has its rows; None if they have none."""
    before: tuple[Table, ...] = ()
    """The table in the segments, then after each alteration but the last; empty if nothing changed since."""

    @classmethod
    def of(
        cls, name: str, tables: Sequence[Table], groups: Sequence[Group], stored: Sequence[Sequence[Table]], label: str
    ) -> StoredTable:
        """Find a table among ``tables``; a commit has ``groups`` and ``stored``.

        Raises ValueError that calls the store ``label``.
        """
        table, before = table_named(tables, name, label), []
        for older in stored:
            before += [one for one in older if one.name == name]
        if len(before) < len(stored):  # it was added, perhaps in place of one that was dropped
            return cls(table, None)
        return cls(table, next(one for one in groups if any(of.name == name for of in one.tables)), tuple(before))

    def rows(self, keys: NDArray[np.int64], words: Floats) -> Floats:
        """Return stored rows (n, W) as they are now; further words of each, such as its last change, stay."""
        for before, after in pairwise((*self.before, self.table)):
            words = _altered(before, after, keys, words)
        return words


def _altered(before: Table, after: Table, keys: NDArray[np.int64], words: Floats) -> Floats:
    """Return rows of a table after one alteration: new numbers are those of a key's first row."""
    same = state_layout(before) == state_layout(after)
    if same and before.dim == after.dim:
        return words
    if after.dim > before.dim:
        first = initial_rows(after, keys)
    else:
        first = tuple(np.full((keys.size, field.width), field.initial, np.float32) for field in after.fields)
    rows, begin, to = row_words(after.fields, first), 0, 0
    for old, new in zip(before.fields, after.fields if same else after.fields[:1], strict=False):
        count = old.width * ITEM_BYTES[old.dtype] // 2
        stored = words[:, begin : begin + old.words].view(np.uint16)
        rows[:, to : to + new.words].view(np.uint16)[:, :count] = stored[:, :count]
        begin, to = begin + old.words, to + new.words
    return np.concatenate([rows, words[:, before.row_bytes // 4 :]], axis=1)
