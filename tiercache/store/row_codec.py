"""Rows of a table in memory and in blocks: first rows, numbers as words, words as field-major pages, altered rows.

First rows (docs/format/bits.md, "Initial rows") are the rows before any training. Kernels make the same bits for a
training, an order of magnitude faster; test vectors check both.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.store.bits import ITEM_BYTES, from_bits, mix, nearest, to_bits
from tiercache.store.checkpoint import initial_checkpoint_vectors
from tiercache.store.initializer import Checkpoint, Constant, Normal, Uniform, Zeros
from tiercache.store.table import Group, Table, state_layout, table_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.store.layout import SegmentLayout
    from tiercache.store.optimizer import Field

    Floats = NDArray[np.float32]
    Int64s = NDArray[np.int64]
    RowBlock = tuple[int, int, NDArray[np.uint8], NDArray[np.int64]]
    """Group, block, rows, keys."""
    MovedBlock = tuple[int, int, NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint32]]
    """The same with the last change of each row."""
    Words = NDArray[np.uint64]


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
    """Return rows (n, words) from the numbers of each field; ``changed``: the last change, as one more word."""
    words, at = sum(field.words for field in fields), 0
    out = np.empty((values[0].shape[0], words + (changed is not None)), np.float32)
    out[:, words:].view(np.uint32)[:] = changed or 0
    for field, numbers in zip(fields, values, strict=True):
        to_words(field, numbers, out[:, at : at + field.words])
        at += field.words
    return out


def from_words(fields: Sequence[Field], words: Sequence[Floats]) -> tuple[Floats, ...]:
    """Return the numbers (n, width) of each field from its words (n, words): float32 fields are not copied."""
    return tuple(
        values
        if field.dtype == "float32"
        else from_bits(np.ascontiguousarray(values).view(np.uint16)[:, : field.width], field.dtype)
        for field, values in zip(fields, words, strict=True)
    )


def pack(group: Group, page_rows: Iterable[int], rows: Floats, out: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Write rows (n, at least W words) into pages of ``page_rows`` rows, at the front of ``out``; returns them."""
    end = 0
    for columns, stored in _fields(group, page_rows, rows, out):
        stored[:] = columns
        end += stored.nbytes
    return out[:end]


def unpack(group: Group, page_rows: Iterable[int], pages: NDArray[np.uint8], out: Floats) -> None:
    """Write the rows of pages of ``page_rows`` rows into the first words of the rows of ``out``."""
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
    groups: Iterable[Group],
    layouts: Iterable[SegmentLayout],
    chunks: Callable[[Group, SegmentLayout], Iterable[tuple[Int64s, Floats]]],
) -> Iterator[RowBlock]:
    """Yield the blocks of all groups, in the same two arrays, from the keys and rows (n, W words) of each."""
    for group, layout in zip(groups, layouts, strict=True):
        for block, packed, keys, _ in _blocks_of(group, layout, chunks(group, layout), layout.row_bytes // 4):
            yield group.index, block, packed, keys


def moved_blocks_of(
    group: Group, layout: SegmentLayout, chunks: Iterable[tuple[Int64s, Floats]]
) -> Iterator[MovedBlock]:
    """Do the same as ``blocks_of`` for one group with rows (n, W + 1), which end with their last change."""
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


class StoredTable(NamedTuple):
    """A table whose rows keep the layout that they were written in until the next rewrite."""

    table: Table
    """The current table."""
    group: Group | None
    """The group of the segments' layouts that has its rows; None if they have none."""
    before: tuple[Table, ...] = ()
    """The table in the segments, then after each alteration but the last; empty if nothing changed since."""

    @classmethod
    def of(
        cls, name: str, tables: Sequence[Table], groups: Sequence[Group], stored: Sequence[Sequence[Table]], label: str
    ) -> StoredTable:
        """Find a table of a commit with ``groups`` and ``stored``. Raises ValueError; ``label`` names the store."""
        table, before = table_named(tables, name, label), []
        for older in stored:
            before += [one for one in older if one.name == name]
        if len(before) < len(stored):  # it was added, perhaps replacing a dropped one
            return cls(table, None)
        return cls(table, next(one for one in groups if any(of.name == name for of in one.tables)), tuple(before))

    def rows(self, keys: NDArray[np.int64], words: Floats) -> Floats:
        """Return stored rows (n, W) as the current table has them; further words, such as last changes, are kept."""
        for before, after in pairwise((*self.before, self.table)):
            words = _altered(before, after, keys, words)
        return words


def _altered(before: Table, after: Table, keys: NDArray[np.int64], words: Floats) -> Floats:
    """Return rows of a table after one alteration: new columns are taken from the key's first row."""
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


_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_F = np.float32
_INITIAL_NUMBERS = 1 << 20


def initial_rows(table: Table, keys: NDArray[np.int64]) -> tuple[Floats, ...]:
    """Return the first row of each key (n,) of a table: (n, width) of float32 for each field.

    Vectors are rounded to the nearest of the table's dtype; state begins at its constant. A column slice has its
    columns of the whole vectors.
    """
    keys = np.ascontiguousarray(keys, dtype=np.int64)
    vectors = np.empty((keys.size, table.dim), dtype=np.float32)
    together = isinstance(table.initializer, Checkpoint)  # rows are read in the order of the file
    step = max(1, keys.size if together else _INITIAL_NUMBERS // (table.first_column + table.dim))
    for first in range(0, keys.size, step):
        vectors[first : first + step] = nearest(_vectors(table, keys[first : first + step]), table.dtype)
    states = (np.full((keys.size, field.width), field.initial, dtype=np.float32) for field in table.fields[1:])
    return vectors, *states


def _vectors(table: Table, keys: NDArray[np.int64]) -> Floats:
    dim, columns = table.dim, slice(table.first_column, table.first_column + table.dim)
    match table.initializer:
        case Checkpoint():
            return initial_checkpoint_vectors(table, keys)
        case Zeros():
            return np.zeros((keys.size, dim), dtype=np.float32)
        case Constant(value=value):
            return np.full((keys.size, dim), value, dtype=np.float32)
        case Uniform(low=low, high=high):
            return _F(low) + _unit(_words(table, keys)[:, columns]) * _F(_F(high) - _F(low))
        case Normal(mean=mean, std=std):
            return _normal(_words(table, keys), _F(mean), _F(std))[:, columns]


def _words(table: Table, keys: NDArray[np.int64]) -> Words:
    """Return the words of each element up to the table's last column: (n, these rounded up to whole blocks)."""
    blocks = -(-(table.first_column + table.dim) // 4)
    stream = int(mix(np.array([table.seed ^ table.table_id], np.uint64))[0])
    counters = keys.view(np.uint64)[:, None], np.arange(blocks, dtype=np.uint64)[None, :]
    key, block = np.broadcast_arrays(*counters)
    words = _philox(key & _LOW, key >> _HALF, block & _LOW, block >> _HALF, stream & 0xFFFFFFFF, stream >> 32)
    return np.stack(words, axis=-1).reshape(keys.size, 4 * blocks)


def _philox(c0: Words, c1: Words, c2: Words, c3: Words, k0: int, k1: int) -> tuple[Words, Words, Words, Words]:
    """Return the four words of Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011) of each counter."""
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (p1 >> _HALF) ^ c1 ^ np.uint64(k0), p1 & _LOW
        c2, c3 = (p0 >> _HALF) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _unit(words: Words) -> Floats:
    return (words >> np.uint64(8)).astype(np.float32) * _F(2.0**-24)


def _normal(words: Words, mean: np.float32, deviation: np.float32) -> Floats:
    """Return pairs of numbers by Box and Muller, from pairs of neighboring words."""
    first, second = words[:, 0::2], words[:, 1::2]
    # the first uniform is in (0, 1], so that its logarithm is finite
    unit = ((first >> np.uint64(8)).astype(np.int64) + 1).astype(np.float32) * _F(2.0**-24)
    radius = deviation * np.sqrt(_F(-2) * _log(unit))
    sine, cosine = _sine_cosine(_unit(second))
    out = np.empty(words.shape, dtype=np.float32)
    out[:, 0::2], out[:, 1::2] = mean + radius * cosine, mean + radius * sine
    return out


def _log(x: Floats) -> Floats:
    """Return the natural logarithm of numbers in (0, 1], by the series of the format."""
    pattern = x.view(np.int32) - np.int32(0x3F3504F3)  # mantissa from sqrt(1/2) to sqrt(2)
    exponent = (pattern >> np.int32(23)).astype(np.float32)
    mantissa = ((pattern & np.int32(0x7FFFFF)) + np.int32(0x3F3504F3)).view(np.float32)
    s = (mantissa - _F(1)) / (mantissa + _F(1))
    z = s * s
    series = z * (_F(1 / 3) + z * (_F(1 / 5) + z * (_F(1 / 7) + z * _F(1 / 9))))
    logarithm: Floats = exponent * _F(0.6931471805599453) + _F(2) * (s + s * series)
    return logarithm


def _sine_cosine(turn: Floats) -> tuple[Floats, Floats]:
    """Return sine and cosine of numbers in [0, 1) that count turns, by the series of the format."""
    quarters = turn * _F(4)
    quarter = (quarters + _F(0.5)).astype(np.int32)
    x = (quarters - quarter.astype(np.float32)) * _F(1.5707963267948966)
    z = x * x
    sine = _F(-1 / 6) + z * (_F(1 / 120) + z * (_F(-1 / 5040) + z * _F(1 / 362880)))
    sine = x + x * (z * sine)
    cosine = _F(1 / 24) + z * (_F(-1 / 720) + z * (_F(1 / 40320) - z * _F(1 / 3628800)))
    cosine = _F(1) - _F(0.5) * z + (z * z) * cosine
    swap = (quarter & 1) != 0
    first, second = np.where(swap, cosine, sine), np.where(swap, sine, cosine)
    first = np.where((quarter & 2) != 0, -first, first)
    return first, np.where(((quarter + 1) & 2) != 0, -second, second)
