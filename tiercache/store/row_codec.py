"""Rows in memory and in blocks: numbers of fields as words, words as field-major pages, pages as blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.bits import from_bits, to_bits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.store.layout import SegmentLayout
    from tiercache.store.optimizer import Field
    from tiercache.store.table import Group

    Floats = NDArray[np.float32]
    Int64s = NDArray[np.int64]
    RowBlock = tuple[int, int, NDArray[np.uint8], NDArray[np.int64]]
    """Group, block, rows, keys."""
    MovedBlock = tuple[int, int, NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint32]]
    """The same with the last change of each row."""
_BATCH_NUMBERS = 1 << 16


def to_words(field: Field, values: Floats, out: Floats) -> None:
    """Write one field's numbers (n, width) of float32 to its words (n, words), rounded to the nearest of its dtype."""
    if field.dtype == "float32":
        out[:] = values
        return
    step = max(1, _BATCH_NUMBERS // field.width)
    for low in range(0, values.shape[0], step):
        bits = np.zeros((values[low : low + step].shape[0], 2 * field.words), np.uint16)
        bits[:, : field.width] = to_bits(values[low : low + step], field.dtype)
        out[low : low + step].view(np.uint32)[:] = bits.view(np.uint32)


def row_words(fields: Sequence[Field], values: Sequence[Floats], changed: int | None = None) -> Floats:
    """Return whole rows (n, words of all fields) from the numbers (n, width) of each field.

    changed: the commit that changed them last, for a word more at the end of each.
    """
    words, at = sum(field.words for field in fields), 0
    out = np.empty((values[0].shape[0], words + (changed is not None)), np.float32)
    out[:, words:].view(np.uint32)[:] = changed or 0
    for field, numbers in zip(fields, values, strict=True):
        to_words(field, numbers, out[:, at : at + field.words])
        at += field.words
    return out


def from_words(fields: Sequence[Field], words: Sequence[Floats]) -> tuple[Floats, ...]:
    """Return the numbers (n, width) of each field from its words (n, words): float32 fields are passed on."""
    return tuple(
        values
        if field.dtype == "float32"
        else from_bits(np.ascontiguousarray(values).view(np.uint16)[:, : field.width], field.dtype)
        for field, values in zip(fields, words, strict=True)
    )


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


def blocks_of(
    group: Group, layout: SegmentLayout, chunks: Iterable[tuple[NDArray[np.int64], NDArray[np.float32]]]
) -> Iterator[RowBlock]:
    """Yield the blocks of a layout from its rows (n, W), every field of a row side by side, and their keys, in order.

    Rows are words. All blocks stand in the same two arrays.
    """
    for block, packed, keys, _ in _blocks_of(group, layout, chunks, layout.row_bytes // 4):
        yield group.index, block, packed, keys


def moved_blocks_of(
    group: Group, layout: SegmentLayout, chunks: Iterable[tuple[NDArray[np.int64], NDArray[np.float32]]]
) -> Iterator[MovedBlock]:
    """Do what ``blocks_of`` does with rows (n, W + 1): the last word of each is its last change."""
    for block, packed, keys, rows in _blocks_of(group, layout, chunks, layout.row_bytes // 4 + 1):
        yield group.index, block, packed, keys, rows[:, -1].view(np.uint32)


def _blocks_of(
    group: Group, layout: SegmentLayout, chunks: Iterable[tuple[Int64s, Floats]], words: int
) -> Iterator[tuple[int, NDArray[np.uint8], Int64s, Floats]]:
    """Yield block, rows as they are stored, keys, and rows (n, ``words``)."""
    rows = np.empty((min(layout.block_rows, layout.rows), words), dtype=np.float32)
    keys, packed = np.empty(rows.shape[0], np.int64), np.empty(rows.shape[0] * layout.row_bytes, np.uint8)
    block = filled = 0
    for chunk_keys, chunk_rows in chunks:
        done = 0
        while done < chunk_keys.size:
            count = min(chunk_keys.size - done, keys.size - filled)
            keys[filled : filled + count] = chunk_keys[done : done + count]
            rows[filled : filled + count] = chunk_rows[done : done + count]
            filled, done = filled + count, done + count
            first, last = layout.rows_of_block(block)
            if filled == last - first:
                page, last_page = layout.pages_of_block(block)
                pages = pack(group, layout.page_sizes(page, last_page).tolist(), rows[:filled], packed)
                yield block, pages, keys[:filled], rows[:filled]
                block, filled = block + 1, 0
