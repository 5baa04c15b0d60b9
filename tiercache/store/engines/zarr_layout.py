"""Geometry of blobs in Zarr arrays and plain objects: which object has which bytes, decided without touching any.

A segment's keys, its last changes and each field of its rows are an array. Shapes: a field (rows, width), for 16-bit
dtypes with an even width; keys and last changes (rows,). Rows are in the order of the layout, so pages are one run of
bytes in each array. A chunk has the rows of a whole number of blocks, as many as ``PART_BYTES`` take; of compressed
tables, of one block. Any other blob is cut into objects of ``PART_BYTES``.
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from tiercache.store.bits import ITEM_BYTES
from tiercache.store.engines.zarr_codec import COMPRESSIONS, LITTLE, ShardingCodec
from tiercache.store.files import paged
from tiercache.store.layout import compressed_rows
from tiercache.store.records import whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.store.engines.engine import Blob, BlobRows
    from tiercache.store.layout import SegmentLayout

NODE = "zarr.json"
"""The name of an object that describes an array or a group of arrays."""
PART_BYTES = 64 << 20
"""The most bytes of an object, except of a chunk that has a single block."""
_DTYPES: dict[str, tuple[str, int | str, dict[str, Any]]] = {
    "float32": ("float32", "NaN", {}),
    "float16": ("float16", "NaN", {}),
    "bfloat16": ("uint16", 0x7FC0, {"dtype": "bfloat16"}),
}
"""By dtype of a field: Zarr's dtype, the fill value (NaN), and attributes. Zarr has no bfloat16, so its bits."""
_NUMBERS: dict[str, tuple[str, int, int]] = {
    "keys": ("int64", 8, -(1 << 63)),
    "changed": ("uint32", 4, (1 << 32) - 1),
}
"""By last word of a blob's name: dtype, bytes of a row and fill value of the arrays that are no field."""


class Shape(NamedTuple):
    """The parameters of a segment group's objects. Every array has them in its attributes and its shape."""

    rows: int
    page_rows: int
    block_rows: int
    fields: tuple[tuple[str, int, str], ...]
    """Name, words and dtype of each."""
    compression: str | None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all fields."""
        return sum(4 * words for _, words, _ in self.fields)

    @property
    def num_blocks(self) -> int:
        """Blocks, the last of which may be short."""
        return -(-self.rows // self.block_rows)

    @classmethod
    def of(cls, of: BlobRows) -> Shape:
        """Return the shape of a group's rows."""
        (group, layout), compression = of, of.group.compression
        fields = tuple((field.name, field.words, field.dtype) for field in group.fields)
        return cls(layout.rows, layout.page_rows, layout.block_rows, fields, compression)

    @classmethod
    def of_node(cls, data: bytes | None) -> Shape | None:
        """Return the shape that an object of ``nodes_of`` says; None if it says none."""
        try:
            node = json.loads(data or b"")
            attributes, rows = node["attributes"], whole(node["shape"][0], "rows")
            fields = tuple((str(name), whole(words, "words"), dtype) for name, words, dtype in attributes["fields"])
            page_rows, block_rows = (whole(attributes[name], name) for name in ("page_rows", "block_rows"))
            found = cls(rows, page_rows, block_rows, fields, attributes["compression"])
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            return None
        is_usual = min(page_rows, block_rows, *(words for _, words, _ in fields), len(fields)) > 0
        return found if is_usual and found.compression in COMPRESSIONS else None


class Place(NamedTuple):
    """Bytes of an object."""

    key: str
    """The object's name."""
    begin: int
    """The first byte in it."""
    size: int
    whole_bytes: int
    """Bytes of the whole object, before compression; below 0: any."""
    used_bytes: int
    """Bytes of the object that are put: the end of the last chunk of an array is padding."""


def plain_keys(blob: Blob) -> list[str]:
    """Return the names of the objects of a blob that is in no arrays."""
    return [blob.name, *(f"{blob.name}.{part}" for part in range(1, -(-blob.size // PART_BYTES)))]


def plain_places(blob: Blob, offset: int, data: NDArray[np.uint8]) -> Iterator[tuple[Place, NDArray[np.uint8]]]:
    """Yield the objects that have bytes from ``offset`` on of a blob in no arrays, and the parts of ``data``."""
    while data.size:
        part, begin = divmod(offset, PART_BYTES)
        size, whole_bytes = min(data.size, PART_BYTES - begin), min(PART_BYTES, blob.size - offset + begin)
        key = f"{blob.name}.{part}" if part else blob.name
        yield Place(key, begin, size, whole_bytes, whole_bytes), data[:size]
        offset, data = offset + size, data[size:]


class Array(NamedTuple):
    """One array of a blob."""

    folder: str
    suffix: str
    """Of the names of chunks."""
    rows: int
    row_bytes: int
    block_rows: int
    chunk_rows: int
    shards: ShardingCodec | None = None
    """The compression of chunks; None if they are not compressed."""

    @property
    def chunk_blocks(self) -> int:
        """Blocks of a chunk."""
        return -(-self.chunk_rows // self.block_rows)

    @property
    def num_chunks(self) -> int:
        """Chunks of the array."""
        return -(-self.rows // (self.chunk_blocks * self.block_rows))

    def key(self, chunk: int) -> str:
        """Return the name of a chunk's object."""
        return f"{self.folder}/c.{chunk}{self.suffix}"

    def place(self, first: int, last: int) -> Place:
        """Return the place of rows [first, last), which are in one chunk."""
        chunk, begin = divmod(first, self.chunk_blocks * self.block_rows)
        return Place(
            self.key(chunk),
            begin * self.row_bytes,
            (last - first) * self.row_bytes,
            self.chunk_rows * self.row_bytes,
            min(self.chunk_rows, self.rows - first + begin) * self.row_bytes,
        )

    def is_whole(self, size: int) -> bool:
        """Return whether an object can be a chunk by its size."""
        if self.shards is not None:
            return size >= self.shards.index_bytes
        return size == self.chunk_rows * self.row_bytes


class Arrays(NamedTuple):
    """The arrays of a blob, in the order of a row."""

    arrays: tuple[Array, ...]
    size: int
    """Bytes of the blob."""
    step: int
    """Bytes of the blob from one block to the next."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all arrays."""
        return sum(array.row_bytes for array in self.arrays)

    def rows_at(self, offset: int, size: int) -> tuple[int, int]:
        """Return rows [first, last), those of the bytes of a blob that are in one block; padding has none."""
        block, inside = divmod(offset, self.step)
        array, row_bytes = self.arrays[0], self.row_bytes
        low = block * array.block_rows
        high = min(low + array.block_rows, array.rows)
        return min(high, low + inside // row_bytes), min(high, low + (inside + size) // row_bytes)

    def live(self, upto: int) -> int:
        """Return the first block that does not end before a byte of the blob, or the number of blocks."""
        return -(-self.size // self.step) if upto >= self.size else upto // self.step

    def stored(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Return (size, dropped) of the blob by the objects that are there, with their sizes."""
        size, dropped = self.size, 0
        for array in self.arrays:
            there = [array.is_whole(sizes.get(array.key(i), -1)) for i in range(array.num_chunks)]
            first = there.index(True) if True in there else len(there)
            end = there.index(False, first) if False in there[first:] else len(there)
            bounds = [min(self.size, i * array.chunk_blocks * self.step) for i in (first, end)]
            dropped, size = max(dropped, bounds[0]), min(size, bounds[1])
        return max(size, dropped), dropped


def arrays_of(blob: Blob, of: BlobRows) -> Arrays:
    """Return the arrays of a segment's blob. Raises ValueError if its size is not that of its layout."""
    found = arrays_in(blob.name, Shape.of(of))
    if found.size != blob.size:
        raise ValueError(f"blob {blob.name!r} has {blob.size:,} bytes, but those of its layout are {found.size:,}")
    return found


def arrays_in(name: str, shape: Shape) -> Arrays:
    """Return the arrays of a segment's blob."""
    folder, _, kind = name.rpartition("/")
    if kind in _NUMBERS:
        arrays = [_array(shape, name, "", _NUMBERS[kind][1])]
    else:
        arrays = [_array(shape, f"{folder}/{field}", ".0", 4 * words) for field, words, _ in shape.fields]
    row_bytes, full_blocks = sum(array.row_bytes for array in arrays), max(0, shape.num_blocks - 1)
    step, last_rows = paged(shape.block_rows * row_bytes), shape.rows - full_blocks * shape.block_rows
    return Arrays(tuple(arrays), full_blocks * step + last_rows * row_bytes, step)


def _array(shape: Shape, folder: str, suffix: str, row_bytes: int) -> Array:
    """Return a field, whose chunks have a ``suffix``, or keys or last changes."""
    if shape.compression is not None:
        chunk_rows, inner_rows = cut(shape)
        shards = ShardingCodec(
            compression=shape.compression, item_bytes=4 if suffix else row_bytes, row_bytes=row_bytes,
            chunk_rows=chunk_rows, inner_rows=inner_rows if suffix else chunk_rows,
        )  # fmt: skip
        return Array(folder, suffix, shape.rows, row_bytes, shape.block_rows, chunk_rows, shards)
    blocks = max(1, PART_BYTES // (shape.block_rows * row_bytes))
    chunk_rows = max(1, min(blocks * shape.block_rows, shape.rows))
    return Array(folder, suffix, shape.rows, row_bytes, shape.block_rows, chunk_rows)


def nodes_of(blob: Blob, of: BlobRows, arrays: Arrays) -> dict[str, bytes]:
    """Return the objects that describe the arrays of a blob, and their groups, to any reader of Zarr."""
    group, layout = of
    folder, _, kind = blob.name.rpartition("/")
    names = [table.name for table in group.tables]
    about = {
        "tables": names,
        "page_rows": layout.page_rows,
        "ranges": [
            {"next_use": rows.next_use, "rows": dict(zip(names, rows.table_rows, strict=True))}
            for rows in layout.ranges
        ],
    }
    found = {f"{folder.rpartition('/')[0]}/{NODE}": group_node(), f"{folder}/{NODE}": group_node(about)}
    shape = Shape.of(of)
    for i, array in enumerate(arrays.arrays):
        if kind in _NUMBERS:
            dtype, _, nothing = _NUMBERS[kind]
            node = _array_node(shape, dtype, array, [], nothing, {})
        else:
            dtype, fill, attributes = _DTYPES[group.fields[i].dtype]
            width = array.row_bytes // ITEM_BYTES[group.fields[i].dtype]
            node = _array_node(shape, dtype, array, [width], fill, attributes)
        found[f"{array.folder}/{NODE}"] = node
    return found


def split(layout: SegmentLayout, block: int, data: NDArray[np.uint8], field_at: int, out: NDArray[np.uint8]) -> None:
    """Gather one field of the rows of a block, which stand page by page in ``data``, in ``out``.

    ``field_at`` is the byte of a row at which the field begins; ``out`` has the field's bytes of all rows.
    """
    first = block * layout.block_rows
    for begin, count, length in _alike(layout, first, data):
        in_pages, in_field = _places(begin, count, length, layout.row_bytes, data, field_at, out)
        in_field[:] = in_pages


def merge(layout: SegmentLayout, first: int, data: NDArray[np.uint8], fields: Sequence[NDArray[np.uint8]]) -> None:
    """Put all fields of the rows from row ``first`` of a layout on, where a page begins, where they stand in ``data``.

    The opposite of ``split``: ``data`` has the bytes of whole pages.
    """
    for begin, count, length in _alike(layout, first, data):
        at = 0
        for field in fields:
            in_pages, in_field = _places(begin, count, length, layout.row_bytes, data, at, field)
            in_pages[:] = in_field
            at += field.size * layout.row_bytes // data.size


def _alike(layout: SegmentLayout, first: int, data: NDArray[np.uint8]) -> Iterator[tuple[int, int, int]]:
    """Yield (row in ``data``, pages, rows of each) of all neighbors of equal length."""
    rows, begin = data.size // layout.row_bytes, 0
    low, high = layout.page_of_row(first), layout.page_of_row(first + rows)
    for length, same in groupby(layout.page_sizes(low, high).tolist()):
        count = sum(1 for _ in same)
        yield begin, count, length
        begin += count * length


def _places(
    begin: int, count: int, length: int, row_bytes: int, data: NDArray[np.uint8], at: int, field: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return where a field of ``count`` pages of ``length`` rows, from row ``begin`` on, is in ``data`` and alone."""
    field_bytes, end = field.size * row_bytes // data.size, begin + count * length
    pages = data[begin * row_bytes : end * row_bytes].reshape(count, length * row_bytes)
    in_field = field[begin * field_bytes : end * field_bytes].reshape(count, length * field_bytes)
    return pages[:, length * at : length * (at + field_bytes)], in_field


def group_node(attributes: dict[str, Any] | None = None) -> bytes:
    """Return the object that describes a group of arrays."""
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes or {}}).encode()


def _array_node(
    shape: Shape, dtype: str, array: Array, width: list[int], fill: int | str, attributes: dict[str, Any]
) -> bytes:
    shards, of_shape = array.shards, shape._asdict()
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [of_shape.pop("rows"), *width],
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [array.chunk_rows, *width]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": fill,
            "codecs": [LITTLE] if shards is None else shards.nodes([shards.inner_rows, *width]),
            "attributes": of_shape | attributes,
            "storage_transformers": [],
        }
    ).encode()


def cut(layout: SegmentLayout | Shape) -> tuple[int, int]:
    """Return the rows of a chunk and of an inner chunk for the blocks of a layout.

    An inner chunk has ``compressed_rows`` where those of a block are a multiple of them. Else it has less, down to a
    quarter, or more.
    """
    wanted = compressed_rows(layout.row_bytes, min(layout.page_rows, layout.block_rows, max(1, layout.rows)))
    if layout.num_blocks <= 1:  # nothing follows, so the chunk may be larger than the block
        return -(-max(1, layout.rows) // wanted) * wanted, wanted
    rows = layout.block_rows
    less = next(n for n in range(wanted, 0, -1) if rows % n == 0)
    return rows, less if 4 * less >= wanted else next(n for n in range(wanted, rows + 1) if rows % n == 0)
