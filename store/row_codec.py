"""Rows as callers have them, every field of a row side by side, and as pages keep them, field by field."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from tiercache.store.table import Group

    Floats = NDArray[np.float32]


def pack(group: Group, page_rows: Iterable[int], rows: Floats, out: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Write rows (n, at least W words) into pages of so many rows each, which fill the front of ``out``; returns it."""
    end = 0
    for columns, stored in _fields(group, page_rows, rows, out):
        stored[:] = columns
        end += stored.nbytes
    return out[:end]


def unpack(group: Group, page_rows: Iterable[int], pages: NDArray[np.uint8], out: Floats) -> None:
    """Write the rows of pages of so many rows each into the first words of the rows of ``out``."""
    for columns, stored in _fields(group, page_rows, out, pages):
        columns[:] = stored


def _fields(
    group: Group, page_rows: Iterable[int], rows: Floats, pages: NDArray[np.uint8]
) -> Iterator[tuple[Floats, Floats]]:
    """Yield a view of each field of each page, in rows and in pages: (rows of the page, words of the field)."""
    words, at, row = pages.view(np.float32), 0, 0
    for count in page_rows:
        column = 0
        for field in group.fields:
            size = count * field.words
            yield rows[row : row + count, column : column + field.words], words[at : at + size].reshape(count, -1)
            at, column = at + size, column + field.words
        row += count
