"""How the rows of a segment stream stand in Zarr arrays: which chunk holds what, decided without touching any.

A stream has an array for its keys, one for each field of its rows, and where a rewrite wrote it mostly one for their
last changes, with a chunk for each block. Shapes: the array of a field has (rows, width), for 16-bit dtypes with an
even width, those of keys and last changes (rows,); a chunk has the rows of one block, the last one padded with zeros.
In a chunk the rows of all pieces stand one after another, so that pieces are one run of bytes in each array, or a few
inner chunks where the arrays are compressed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from tiercache.store.blocks import CHANGED, KEYS, ROWS
from tiercache.store.vectors import ITEM_BYTES
from tiercache.store.zarr_codec import LITTLE, Codec
from tiercache.store.zarr_shards import Shards, cut

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.store.engine import Form
    from tiercache.store.stream import Stream

NODE = "zarr.json"
"""The name of an object that describes an array or a group of arrays."""
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


class Span(NamedTuple):
    """Bytes [start, stop) of a chunk, which has ``size`` bytes in all."""

    key: str
    start: int
    stop: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrays:
    """The arrays of one segment stream."""

    folder: str
    """Where they are."""
    rows: int
    chunk_rows: int
    """Rows of a chunk: those of a block, or of the whole stream where that is less."""
    fields: tuple[tuple[str, int], ...]
    """Name, and bytes in a row, of each field in the order of a row."""
    compression: str | None = None
    """How the chunks are compressed; then one of rows holds inner chunks, and one of keys a single one."""
    inner_rows: int = 0
    """Rows of an inner chunk of a field; 0 without compression."""

    @classmethod
    def of(cls, folder: str, form: Form) -> Arrays:
        """Return the arrays in ``folder`` for the rows of ``form``."""
        stream = form.stream
        fields = tuple((field.name, 4 * field.words) for field in form.group.fields)
        compression = form.group.compression
        if compression is None:
            return cls(folder=folder, rows=stream.rows, chunk_rows=min(stream.rows, stream.block_rows), fields=fields)
        chunk_rows, inner_rows = cut(stream)
        return cls(
            folder=folder, rows=stream.rows, chunk_rows=chunk_rows, fields=fields,
            compression=compression, inner_rows=inner_rows,
        )  # fmt: skip

    def fit(self, form: Form) -> bool:
        """Whether they are those of the rows of ``form``. Called for each read."""
        group, stream = form
        if self.compression is not None or group.compression is not None:
            return self == Arrays.of(self.folder, form)
        return (
            self.rows == stream.rows
            and self.chunk_rows == min(stream.rows, stream.block_rows)
            and len(self.fields) == len(group.fields)
            and all(
                mine == (field.name, 4 * field.words) for mine, field in zip(self.fields, group.fields, strict=True)
            )
        )

    def row_bytes(self, kind: bytes) -> tuple[int, ...]:
        """Return the bytes of a row in each array of the blocks of a kind."""
        return (NUMBERS[kind].row_bytes,) if kind in NUMBERS else tuple(size for _, size in self.fields)

    def chunks(self, block: int, kind: bytes) -> Iterator[tuple[str, int]]:
        """Yield name and bytes, before compression, of every chunk of a block of a kind."""
        if kind in NUMBERS:
            yield f"{self.folder}/{NUMBERS[kind].name}/c.{block}", NUMBERS[kind].row_bytes * self.chunk_rows
        else:
            for name, row_bytes in self.fields:
                yield f"{self.folder}/{name}/c.{block}.0", row_bytes * self.chunk_rows

    def shards(self, kind: bytes) -> list[Shards]:
        """Return how each chunk of a block of a kind is compressed; none where they are not."""
        if self.compression is None:
            return []
        if kind in NUMBERS:
            arrays = [(NUMBERS[kind].row_bytes, NUMBERS[kind].row_bytes, self.chunk_rows)]
        else:
            arrays = [(4, size, self.inner_rows) for _, size in self.fields]
        return [
            Shards(
                codec=Codec(self.compression, item_bytes), row_bytes=row_bytes, chunk_rows=self.chunk_rows,
                inner_rows=inner_rows,
            )
            for item_bytes, row_bytes, inner_rows in arrays
        ]  # fmt: skip

    def node_keys(self) -> list[str]:
        """Return the names of the objects that describe the arrays and their groups, where they are there."""
        numbers = (array.name for array in NUMBERS.values())
        arrays = (f"{self.folder}/{array}/{NODE}" for array in (*numbers, *dict(self.fields)))
        return [f"{self.folder.rpartition('/')[0]}/{NODE}", f"{self.folder}/{NODE}", *arrays]

    def nodes(self, form: Form) -> dict[str, bytes]:
        """Return the objects that describe the arrays of keys and rows and their groups to any reader of Zarr."""
        segment = self.folder.rpartition("/")[0]
        names = [table.name for table in form.group.tables]
        about = {
            "tables": names,
            "piece_rows": form.stream.piece_rows,
            "ranges": [
                {"next_use": rows.next_use, "rows": dict(zip(names, rows.table_rows, strict=True))}
                for rows in form.stream.ranges
            ],
        }
        found = {f"{segment}/{NODE}": group_node(), f"{self.folder}/{NODE}": group_node(about)}
        found |= self.numbers_node(KEYS)
        shards = self.shards(ROWS)
        for i, field in enumerate(form.group.fields):
            width = 4 * field.words // ITEM_BYTES[field.dtype]
            codecs = shards[i].nodes([self.inner_rows, width]) if shards else [LITTLE]
            shape, chunk = [self.rows, width], [self.chunk_rows, width]
            dtype, nothing, told = _DTYPES[field.dtype]
            found[f"{self.folder}/{field.name}/{NODE}"] = _array_node(dtype, shape, chunk, nothing, codecs, told)
        return found

    def numbers_node(self, kind: bytes) -> dict[str, bytes]:
        """Return the object that describes the array of a kind in ``NUMBERS``, by its name."""
        array, shards = NUMBERS[kind], self.shards(kind)
        codecs = shards[0].nodes([self.chunk_rows]) if shards else [LITTLE]
        node = _array_node(array.dtype, [self.rows], [self.chunk_rows], array.nothing, codecs)
        return {f"{self.folder}/{array.name}/{NODE}": node}


def split(stream: Stream, block: int, data: NDArray[np.uint8], field_at: int, out: NDArray[np.uint8]) -> None:
    """Gather one field of the rows of a block, which stand piece by piece in ``data``, in ``out``.

    ``field_at`` is the byte of a row at which the field begins; ``out`` has the field's bytes of all rows.
    """
    first = int(stream.block_first_row_B[block])
    for begin, count, length in _alike(stream, first, data):
        here, there = _places(begin, count, length, stream.row_bytes, data, field_at, out)
        there[:] = here


def merge(stream: Stream, first: int, data: NDArray[np.uint8], fields: Sequence[NDArray[np.uint8]]) -> None:
    """Put all fields of the rows from row ``first`` of a stream on, where a piece begins, where they stand in ``data``.

    The opposite of ``split``: ``data`` has the bytes of whole pieces.
    """
    for begin, count, length in _alike(stream, first, data):
        at = 0
        for field in fields:
            here, there = _places(begin, count, length, stream.row_bytes, data, at, field)
            here[:] = there
            at += field.size * stream.row_bytes // data.size


def _alike(stream: Stream, first: int, data: NDArray[np.uint8]) -> Iterator[tuple[int, int, int]]:
    """Yield (row in ``data``, pieces, rows of each) of all neighbors of equal length."""
    rows, begin = data.size // stream.row_bytes, 0
    low, high = stream.piece_first_row_P.searchsorted((first, first + rows)).tolist()
    for length, same in groupby(stream.piece_rows_P[low:high].tolist()):
        count = sum(1 for _ in same)
        yield begin, count, length
        begin += count * length


def _places(
    begin: int, count: int, length: int, row_bytes: int, data: NDArray[np.uint8], at: int, field: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return where a field of ``count`` pieces of ``length`` rows, from row ``begin`` on, is in ``data`` and alone."""
    field_bytes, end = field.size * row_bytes // data.size, begin + count * length
    pieces = data[begin * row_bytes : end * row_bytes].reshape(count, length * row_bytes)
    mine = field[begin * field_bytes : end * field_bytes].reshape(count, length * field_bytes)
    return pieces[:, length * at : length * (at + field_bytes)], mine


def group_node(attributes: dict[str, Any] | None = None) -> bytes:
    """Return the object that describes a group of arrays."""
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes or {}}).encode()


def _array_node(
    dtype: str,
    shape: list[int],
    chunk: list[int],
    fill: int | str,
    codecs: list[dict[str, Any]],
    attributes: dict[str, Any] | None = None,
) -> bytes:
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": fill,
            "codecs": codecs,
            "attributes": attributes or {},
            "storage_transformers": [],
        }
    ).encode()
