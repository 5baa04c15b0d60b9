"""Rows of a block out of the chunks that hold them, compressed or not: which ranges are read, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.engine import FieldFile, FieldSource
from tiercache.store.errors import BlockReadError
from tiercache.store.zarr_arrays import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tiercache.store.engine import Wanted
    from tiercache.store.zarr_arrays import Arrays
    from tiercache.store.zarr_manifest import BlockObjects
    from tiercache.store.zarr_objects import DiskStore
    from tiercache.store.zarr_shards import Shards

    Bytes = NDArray[np.uint8]
    Ranges = Callable[[Sequence[Span]], list[Bytes]]
    """What returns the bytes of spans, until its next call."""
    Chunks = Sequence[tuple[str, int]]
    """Name and bytes of the chunk of each array."""


def read_rows(ranges: Ranges, chunks: Chunks, arrays: Arrays, first: int, last: int, kind: bytes) -> list[Bytes]:
    """Return rows [first, last) of a block of a kind in each of its arrays, until the next call of ``ranges``.

    Raises BlockReadError.
    """
    shards = arrays.shards(kind)
    if shards:
        return _read_compressed(ranges, chunks, shards, first, last)
    rows = arrays.chunk_rows
    return ranges([Span(key, size // rows * first, size // rows * last, size) for key, size in chunks])


def locate_rows(disk: DiskStore, block: BlockObjects | None, wanted: Wanted) -> FieldSource | None:
    """Say where the wanted rows of a block lie; None where they are compressed, or not as their form says."""
    if block is None or block.arrays is None or block.arrays.compression is not None:
        return None
    if not block.arrays.fit(wanted.form):
        return None
    row_bytes = sum(block.arrays.row_bytes(wanted.name[:1]))
    first, rows = wanted.offset // row_bytes, wanted.out.size // row_bytes
    in_chunk = block.arrays.chunk_rows
    files = [
        FieldFile(disk.path(key), size, size // in_chunk * first, size // in_chunk)
        for key, size in block.chunks(wanted.name)
    ]
    return FieldSource(disk.reads_direct(rows * file.row_bytes for file in files), files)


def _read_compressed(ranges: Ranges, chunks: Chunks, shards: Sequence[Shards], first: int, last: int) -> list[Bytes]:
    """Read the index of each chunk, then the inner chunks that have the rows; or all at once where they are most."""
    if first == last:
        return [np.empty(0, np.uint8) for _ in shards]
    for (key, size), one in zip(chunks, shards, strict=True):
        if size < one.index_bytes:
            raise BlockReadError(f"is not whole, as {key} has {size:,} bytes and an index of {one.index_bytes:,}")
    rows, count = shards[0].inner_rows, shards[0].count
    low, high = first // rows, -(-last // rows)
    at_once = 8 * (high - low) >= 7 * count  # a request costs as much as some bytes more
    heads = [
        Span(key, 0 if at_once else size - one.index_bytes, size, size)
        for (key, size), one in zip(chunks, shards, strict=True)
    ]
    found = ranges(heads)
    spans, indexes = [], []
    for (key, size), one, data in zip(chunks, shards, found, strict=True):
        index = one.index_of(data[data.size - one.index_bytes :], size)[low:high]
        begins = index[:, 0]
        if np.any(begins < 0) or np.any(np.diff(begins) < 0):
            raise BlockReadError(f"lacks some of its rows {first} to {last}, as {key} does not have them")
        spans.append(Span(key, int(begins[0]), int(index[-1].sum()), size))
        indexes.append(index)
    if not at_once:
        found = ranges(spans)
        spans = [span._replace(start=0, stop=data.size) for data, span in zip(found, spans, strict=True)]
    inner = [data[span.start : span.stop] for data, span in zip(found, spans, strict=True)]
    return [one.decode(index, data, first, last) for one, index, data in zip(shards, indexes, inner, strict=True)]
