"""Geometry and codecs of blobs in Zarr arrays and plain objects, without I/O: docs/format/zarr.md.

Rows are in the order of the layout, so pages are one run of bytes in each array. Compressed bytes have a checksum: a
decoder never sees damaged ones. The only module that imports numcodecs.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import google_crc32c
import numcodecs
import numpy as np

from tiercache.store.bits import ITEM_BYTES
from tiercache.store.files import paged
from tiercache.store.layout import SegmentLayout, compressed_rows
from tiercache.store.records import whole
from tiercache.store.store_errors import BlockReadError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.store.engines.engine import Blob, BlobRows

    Bytes = NDArray[np.uint8]

NODE = "zarr.json"
"""The name of an object that describes an array or a group of arrays."""
PART_BYTES = 64 << 20
"""Maximum bytes of an object, except for a chunk that has a single block."""
_DTYPES: dict[str, tuple[str, int | str, dict[str, Any]]] = {
    "float32": ("float32", "NaN", {}),
    "float16": ("float16", "NaN", {}),
    "bfloat16": ("uint16", 0x7FC0, {"dtype": "bfloat16"}),
}
"""By dtype of a field: Zarr's dtype, the fill value (NaN), and attributes. Zarr has no bfloat16, so its bits."""
_NUMBERS: dict[str, tuple[str, int, int]] = {"keys": ("int64", 8, -(1 << 63)), "changed": ("uint32", 4, (1 << 32) - 1)}
"""By last word of a blob's name: dtype, row bytes and fill value of the arrays that are not fields."""

COMPRESSIONS = (None, "zstd", "blosc")
CHECKSUM = struct.Struct("<I")
LITTLE: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC32C: dict[str, Any] = {"name": "crc32c"}
_ZSTD_LEVEL = 1
_BLOSC_LEVEL, _BLOSC_LIBRARY = 5, "lz4"
_BLOSC_HEADER = struct.Struct("<4xI4xI")
"""Unpacked and packed bytes, which Blosc's decoder trusts."""
_ZSTD_LEAST = 9
_ENTRY_BYTES = 16
_NOT_THERE = (1 << 64) - 1


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
        """Return the shape in an object of ``nodes_of``; None if it has none."""
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
    """Return the names of the objects of a blob without arrays."""
    return [blob.name, *(f"{blob.name}.{part}" for part in range(1, -(-blob.size // PART_BYTES)))]


def plain_places(blob: Blob, offset: int, data: Bytes) -> Iterator[tuple[Place, Bytes]]:
    """Yield the objects that have bytes from ``offset`` on of a blob without arrays, and the parts of ``data``."""
    while data.size:
        part, begin = divmod(offset, PART_BYTES)
        size, whole_bytes = min(data.size, PART_BYTES - begin), min(PART_BYTES, blob.size - offset + begin)
        key = f"{blob.name}.{part}" if part else blob.name
        yield Place(key, begin, size, whole_bytes, whole_bytes), data[:size]
        offset, data = offset + size, data[size:]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingCodec:
    """The chunk sizes and the compression of one array."""

    compression: str
    """"zstd" (level 1), or "blosc" (LZ4 of the numbers' bytes shuffled)."""
    item_bytes: int
    """Bytes of a number, the unit that Blosc shuffles."""
    row_bytes: int
    chunk_rows: int
    inner_rows: int
    """Rows that are compressed together; divides ``chunk_rows``."""

    @property
    def index_bytes(self) -> int:
        """Bytes at the end of a shard that locate its inner chunks."""
        return self.chunk_rows // self.inner_rows * _ENTRY_BYTES + CHECKSUM.size

    @property
    def most_bytes(self) -> int:
        """Upper bound of a shard's size: incompressible data grows a little."""
        step = self.inner_rows * self.row_bytes
        return self.chunk_rows // self.inner_rows * (step + step // 64 + 1024) + self.index_bytes

    def nodes(self, shape: Sequence[int]) -> list[dict[str, Any]]:
        """Return the codecs as in Zarr's metadata, for inner chunks of ``shape``."""
        if self.compression == "zstd":
            how: dict[str, Any] = {"level": _ZSTD_LEVEL, "checksum": False}
        else:
            how = {"cname": _BLOSC_LIBRARY, "clevel": _BLOSC_LEVEL, "shuffle": "shuffle", "blocksize": 0}
            how = {"typesize": self.item_bytes, **how}
        sharding = {
            "chunk_shape": list(shape),
            "codecs": [LITTLE, {"name": self.compression, "configuration": how}, _CRC32C],
            "index_codecs": [LITTLE, _CRC32C],
            "index_location": "end",
        }
        return [{"name": "sharding_indexed", "configuration": sharding}]

    def encode(self, rows: Bytes) -> bytes:
        """Return the shard of the rows of a block."""
        step = self.inner_rows * self.row_bytes
        index = np.full((self.chunk_rows // self.inner_rows, 2), _NOT_THERE, "<u8")
        parts, at = [], 0
        for i, low in enumerate(range(0, rows.size, step)):
            part = rows[low : low + step]
            if part.size < step:  # readers of Zarr expect full inner chunks
                part = np.concatenate([part, np.zeros(step - part.size, np.uint8)])
            parts.append(self.pack(part))
            index[i] = at, len(parts[-1])
            at += len(parts[-1])
        return b"".join([*parts, sealed(index.tobytes())])

    def decode(self, index: NDArray[np.int64], data: Bytes, first: int, last: int) -> Bytes:
        """Return rows [first, last) from inner chunks ``data`` with these index entries. Raises BlockReadError."""
        step, base = self.inner_rows * self.row_bytes, int(index[0, 0])
        out = np.empty(len(index) * step, np.uint8)
        for i, (start, size) in enumerate(index.tolist()):
            self.unpack(data[start - base : start - base + size], out[i * step : (i + 1) * step])
        begin = first % self.inner_rows * self.row_bytes
        return out[begin : begin + (last - first) * self.row_bytes]

    def index_of(self, data: Bytes) -> NDArray[np.int64]:
        """Return start and size of each inner chunk: (count, 2), -1 for a missing one. Raises BlockReadError."""
        index = np.frombuffer(_checked(data), "<i8").reshape(-1, 2)
        present = index[index[:, 0] != -1]
        if np.any(present < 0) or np.any(present > self.most_bytes) or np.any(present.sum(axis=1) > self.most_bytes):
            raise BlockReadError("has an index that points beyond its end")
        return index

    def pack(self, data: Bytes) -> bytes:
        """Return the stored form of an inner chunk, given as contiguous bytes of whole numbers."""
        return sealed(bytes(self._library().encode(data.view(f"<u{self.item_bytes}"))))

    def unpack(self, data: Bytes, out: Bytes) -> None:
        """Fill ``out`` with the input of ``pack``. Raises BlockReadError for anything else."""
        packed = _checked(data)
        if (_unpacked_zstd if self.compression == "zstd" else _unpacked_blosc)(packed) != out.size:
            raise BlockReadError(f"cannot be decompressed (it is not the compressed form of {out.size:,} bytes)")
        try:
            self._library().decode(packed, out)
        except (RuntimeError, ValueError) as error:
            raise BlockReadError(f"cannot be decompressed ({error})") from error

    def _library(self) -> Any:
        if self.compression == "zstd":
            return numcodecs.Zstd(level=_ZSTD_LEVEL)
        return numcodecs.Blosc(_BLOSC_LIBRARY, _BLOSC_LEVEL, numcodecs.Blosc.SHUFFLE)


class Array(NamedTuple):
    """One array of a blob."""

    folder: str
    suffix: str
    """Suffix of the names of chunks."""
    rows: int
    row_bytes: int
    block_rows: int
    chunk_rows: int
    shards: ShardingCodec | None = None
    """The compression of chunks; None if they are not compressed."""

    @property
    def chunk_blocks(self) -> int:
        """Number of blocks in a chunk."""
        return -(-self.chunk_rows // self.block_rows)

    @property
    def num_chunks(self) -> int:
        """Number of chunks in the array."""
        return -(-self.rows // (self.chunk_blocks * self.block_rows))

    def key(self, chunk: int) -> str:
        """Return the name of a chunk's object."""
        return f"{self.folder}/c.{chunk}{self.suffix}"

    def place(self, first: int, last: int) -> Place:
        """Return the place of rows [first, last), which are in one chunk."""
        chunk, begin = divmod(first, self.chunk_blocks * self.block_rows)
        rows = begin, last - first, self.chunk_rows, min(self.chunk_rows, self.rows - first + begin)
        return Place(self.key(chunk), *(count * self.row_bytes for count in rows))

    def is_whole(self, size: int) -> bool:
        """Return True if an object's size fits a chunk."""
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
        """Return rows [first, last) of bytes of a blob in one block; padding has none."""
        block, inside = divmod(offset, self.step)
        array, row_bytes = self.arrays[0], self.row_bytes
        low = block * array.block_rows
        high = min(low + array.block_rows, array.rows)
        return min(high, low + inside // row_bytes), min(high, low + (inside + size) // row_bytes)

    def keys(self) -> list[str]:
        """Return the names of all chunks."""
        return [array.key(chunk) for array in self.arrays for chunk in range(array.num_chunks)]

    def live(self, upto: int) -> int:
        """Return the first block that ends after a byte of the blob, or the number of blocks."""
        return -(-self.size // self.step) if upto >= self.size else upto // self.step

    def stored(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Return (size, dropped) of the blob from the sizes of existing objects."""
        size, dropped = self.size, 0
        for array in self.arrays:
            present = [array.is_whole(sizes.get(array.key(i), -1)) for i in range(array.num_chunks)]
            first = present.index(True) if True in present else len(present)
            end = present.index(False, first) if False in present[first:] else len(present)
            bounds = [min(self.size, i * array.chunk_blocks * self.step) for i in (first, end)]
            dropped, size = max(dropped, bounds[0]), min(size, bounds[1])
        return max(size, dropped), dropped


def arrays_of(blob: Blob, of: BlobRows) -> Arrays:
    """Return the arrays of a segment's blob. Raises ValueError if its size does not fit its layout."""
    found = arrays_in(blob.name, Shape.of(of))
    if found.size != blob.size:
        raise ValueError(f"blob {blob.name!r} has {blob.size:,} bytes, but its layout has {found.size:,}")
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
    """Return the array of a field, whose chunks have a ``suffix``, or of keys or last changes."""
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
    """Return the objects that describe the arrays of a blob, and their groups, for any reader of Zarr."""
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

    An inner chunk has ``compressed_rows`` if that divides the rows of a block. Otherwise it has less, down to a
    quarter, or more.
    """
    target = compressed_rows(layout.row_bytes, min(layout.page_rows, layout.block_rows, max(1, layout.rows)))
    if layout.num_blocks <= 1:  # a last chunk may exceed the block
        return -(-max(1, layout.rows) // target) * target, target
    rows = layout.block_rows
    less = next(n for n in range(target, 0, -1) if rows % n == 0)
    return rows, less if 4 * less >= target else next(n for n in range(target, rows + 1) if rows % n == 0)


def _unpacked_blosc(packed: bytes) -> int:
    """Return the unpacked size in a Blosc header; -1 if it is not one for these bytes."""
    if len(packed) < _BLOSC_HEADER.size:
        return -1
    unpacked, size = _BLOSC_HEADER.unpack_from(packed)
    return int(unpacked) if size == len(packed) else -1


def _unpacked_zstd(packed: bytes) -> int:
    """Return the unpacked size in a frame's header (RFC 8878, 3.1.1.1); -1 if it is missing."""
    if len(packed) < _ZSTD_LEAST:
        return -1
    single, flag = packed[4] >> 5 & 1, packed[4] >> 6
    at, size = 6 - single + (0, 1, 2, 4)[packed[4] & 3], (single, 2, 4, 8)[flag]
    if not size or at + size > len(packed):
        return -1
    return int.from_bytes(packed[at : at + size], "little") + (256 if size == 2 else 0)


def sealed(data: bytes) -> bytes:
    """Return bytes followed by their CRC32C, as Zarr's codec of that name does."""
    return data + CHECKSUM.pack(google_crc32c.value(data))


def _checked(data: Bytes) -> bytes:
    """Return bytes without the CRC32C at their end. Raises BlockReadError if it does not match."""
    kept = data.tobytes()
    packed = kept[: -CHECKSUM.size]
    seen = google_crc32c.value(packed)
    if len(kept) < CHECKSUM.size or CHECKSUM.unpack(kept[-CHECKSUM.size :])[0] != seen:
        raise BlockReadError(f"has checksum {seen:08x} over its compressed bytes, but a different one was written")
    return packed
