"""How the rows of a layout stand in Zarr arrays: which chunk holds what, decided without touching any.

A layout has an array for its keys, one for each field of its rows, and where a rewrite wrote it one for their last
changes. Shapes: the array of a field has (rows, width), for 16-bit dtypes with an even width, those of keys and last
changes (rows,). The rows stand in the order of the layout, so that pages are one run of bytes in each array. A chunk
has the rows of a whole number of blocks, as many as ``CHUNK_BYTES`` take; of compressed tables, of one block.
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from tiercache.store.bits import ITEM_BYTES
from tiercache.store.engines.zarr_codec import LITTLE, Codec, ShardingCodec, cut
from tiercache.store.layout import CHANGED, KEYS, ROWS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.store.engines.engine import Block, BlockLayout
    from tiercache.store.layout import SegmentLayout

NODE = "zarr.json"
"""The name of an object that describes an array or a group of arrays."""
CHUNK_BYTES = 64 << 20
"""The most bytes of a chunk that has more than one block."""
_DTYPES: dict[str, tuple[str, int | str, dict[str, Any]]] = {
    "float32": ("float32", "NaN", {}),
    "float16": ("float16", "NaN", {}),
    "bfloat16": ("uint16", 0x7FC0, {"dtype": "bfloat16"}),
}
"""By dtype of a field: Zarr's, what is read where nothing is (NaN), and attributes. Zarr has no bfloat16: its bits."""


class Numbers(NamedTuple):
    """An array with one number for each row."""

    name: str
    dtype: str
    row_bytes: int
    nothing: int
    """What is read where nothing is."""


NUMBERS = {KEYS: Numbers("keys", "int64", 8, -(1 << 63)), CHANGED: Numbers("changed", "uint32", 4, (1 << 32) - 1)}
"""By kind of block: the arrays that have no field of the rows."""


class Place(NamedTuple):
    """Where an array has a block."""

    key: str
    """The object of the chunk."""
    begin: int
    """The byte of the chunk at which the block begins."""
    size: int
    """Bytes of the block here."""
    chunk_bytes: int
    """Of the whole chunk, before compression."""
    used_bytes: int
    """Of the rows in the chunk: the rest of a last chunk is padding."""
    blocks: int
    """In the chunk."""


class Array(NamedTuple):
    """One array of a layout."""

    folder: str
    suffix: str
    """Of the names of chunks."""
    rows: int
    row_bytes: int
    block_rows: int
    chunk_rows: int
    chunk_blocks: int
    shards: ShardingCodec | None
    """How chunks are compressed; None where they are not."""

    def key(self, chunk: int) -> str:
        """Return the name of a chunk's object."""
        return f"{self.folder}/c.{chunk}{self.suffix}"

    def place(self, index: int) -> Place:
        """Say where a block is."""
        chunk, at = divmod(index, self.chunk_blocks)
        rows = min(self.block_rows, self.rows - index * self.block_rows)
        used = min(self.chunk_rows, self.rows - chunk * self.chunk_blocks * self.block_rows)
        return Place(
            self.key(chunk),
            at * self.block_rows * self.row_bytes,
            rows * self.row_bytes,
            self.chunk_rows * self.row_bytes,
            used * self.row_bytes,
            -(-used // self.block_rows),
        )


class Arrays:
    """The arrays of one layout."""

    def __init__(self, segment: int, layout: BlockLayout, epoch: int = 0) -> None:
        self.layout, self.epoch = layout, epoch
        self.segment_folder = f"segments/{segment}{_of_epoch(epoch)}"
        self.folder = f"{self.segment_folder}/{layout.group.index}"
        fields = tuple(
            self._array(field.name, 4 * field.words, ROWS, ITEM_BYTES[field.dtype]) for field in layout.group.fields
        )
        self.by_kind: dict[bytes, tuple[Array, ...]] = {ROWS: fields}
        """The arrays that have the blocks of a kind, in the order of a row."""
        for kind, numbers in NUMBERS.items():
            self.by_kind[kind] = (self._array(numbers.name, numbers.row_bytes, kind, numbers.row_bytes),)

    def row_bytes(self, kind: bytes) -> int:
        """Return the bytes of a row in all arrays of the blocks of a kind."""
        return sum(array.row_bytes for array in self.by_kind[kind])

    def block_bytes(self, kind: bytes, index: int) -> int:
        """Return the bytes of a block; -1 where the layout has none of this kind and index."""
        layout = self.layout.segment_layout
        if kind not in self.by_kind or not 0 <= index < layout.num_blocks:
            return -1
        return min(layout.block_rows, layout.rows - index * layout.block_rows) * self.row_bytes(kind)

    def nodes(self, kind: bytes) -> dict[str, bytes]:
        """Return the objects that describe the arrays of a kind, and their groups, to any reader of Zarr."""
        layout, arrays = self.layout, self.by_kind[kind]
        names = [table.name for table in layout.group.tables]
        about = {
            "tables": names,
            "page_rows": layout.segment_layout.page_rows,
            "ranges": [
                {"next_use": rows.next_use, "rows": dict(zip(names, rows.table_rows, strict=True))}
                for rows in layout.segment_layout.ranges
            ],
        }
        found = {f"{self.segment_folder}/{NODE}": group_node(), f"{self.folder}/{NODE}": group_node(about)}
        if kind in NUMBERS:
            found[f"{arrays[0].folder}/{NODE}"] = _array_node(
                NUMBERS[kind].dtype, arrays[0], [], NUMBERS[kind].nothing, {}
            )
            return found
        for field, array in zip(layout.group.fields, arrays, strict=True):
            dtype, nothing, extra = _DTYPES[field.dtype]
            width = array.row_bytes // ITEM_BYTES[field.dtype]
            found[f"{array.folder}/{NODE}"] = _array_node(dtype, array, [width], nothing, extra)
        return found

    def _array(self, name: str, row_bytes: int, kind: bytes, item_bytes: int) -> Array:
        group, layout = self.layout
        folder, suffix = f"{self.folder}/{name}", "" if kind in NUMBERS else ".0"
        if group.compression is not None:
            chunk_rows, inner_rows = cut(layout)
            shards = ShardingCodec(
                codec=Codec(group.compression, item_bytes if kind in NUMBERS else 4), row_bytes=row_bytes,
                chunk_rows=chunk_rows, inner_rows=chunk_rows if kind in NUMBERS else inner_rows,
            )  # fmt: skip
            return Array(folder, suffix, layout.rows, row_bytes, layout.block_rows, chunk_rows, 1, shards)
        blocks = max(1, CHUNK_BYTES // (layout.block_rows * row_bytes))
        chunk_rows = min(blocks * layout.block_rows, layout.rows)
        return Array(folder, suffix, layout.rows, row_bytes, layout.block_rows, chunk_rows, blocks, None)


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


def state_key(block: Block) -> str:
    """Return the name of the object of a block of dense state."""
    return f"state/{block.owner}.{block.index}{_of_epoch(block.place)}"


def _of_epoch(epoch: int) -> str:
    """Return how names of a writer's blocks end: of one that no other writer can follow unseen, with nothing."""
    return f"-{epoch}" if epoch > 0 else ""


def epoch_of(key: str) -> int:
    """Return the epoch of the writer of an object, as far as its name says so; 0 where it does not."""
    folder, _, rest = key.partition("/")
    name = rest.partition("/")[0]
    said = name.partition("-")[0] if folder in {"records", "manifests"} else name.partition("-")[2]
    return int(said) if said.isdecimal() else 0


def group_node(attributes: dict[str, Any] | None = None) -> bytes:
    """Return the object that describes a group of arrays."""
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes or {}}).encode()


def _array_node(dtype: str, array: Array, width: list[int], nothing: int | str, attributes: dict[str, Any]) -> bytes:
    shards = array.shards
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [array.rows, *width],
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [array.chunk_rows, *width]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": nothing,
            "codecs": [LITTLE] if shards is None else shards.nodes([shards.inner_rows, *width]),
            "attributes": attributes,
            "storage_transformers": [],
        }
    ).encode()
