"""Rows of a block out of the chunks that hold them, compressed or not: which ranges are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.engine import FieldFile, FieldSource
from tiercache.store.errors import BlockReadError
from tiercache.store.zarr_layout import merge
from tiercache.store.zarr_objects import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.store.engine import Block, ReadRequest
    from tiercache.store.zarr_layout import Array, Arrays
    from tiercache.store.zarr_objects import Objects

    Bytes = NDArray[np.uint8]


class BlockReader:
    """Reads blocks, from any thread. Raises BlockReadError."""

    def __init__(self, objects: Objects, held: Callable[[str], Bytes | None]) -> None:
        """``held`` returns a chunk that is not an object yet."""
        self._objects, self._held = objects, held

    def read_bytes(self, span: Span, out: Bytes) -> None:
        """Read bytes of one object."""
        out[:] = self._ranges([span])[0]

    def read_rows(self, arrays: Arrays, block: Block, offset: int, out: Bytes) -> None:
        """Read bytes of a block from ``offset`` on: of rows, whole pages."""
        if arrays.block_bytes(block.kind, block.index) != block.size:
            raise BlockReadError("is none of its layout")  # sizes and memory go by what that says
        row_bytes = arrays.row_bytes(block.kind)
        first, last = offset // row_bytes, (offset + out.size) // row_bytes
        found = self._rows(arrays.by_kind[block.kind], block.index, first, last)
        if len(found) == 1:
            out[:] = found[0]
        else:
            layout = arrays.layout.segment_layout
            merge(layout, first + block.index * layout.block_rows, out, found)

    def locate(self, arrays: Arrays, request: ReadRequest) -> FieldSource | None:
        """Say where rows lie on a local disk; None where they are compressed, or not as their layout says."""
        block, offset, out = request
        if arrays.layout.group.compression or offset + out.size > block.size:
            return None
        if arrays.block_bytes(block.kind, block.index) != block.size:
            return None
        row_bytes = arrays.row_bytes(block.kind)
        first, rows = offset // row_bytes, out.size // row_bytes
        files = []
        for array in arrays.by_kind[block.kind]:
            place = array.place(block.index)
            begin = place.begin + array.row_bytes * first
            files.append(FieldFile(self._objects.path(place.key), place.chunk_bytes, begin, array.row_bytes))
        return FieldSource(self._objects.reads_direct(rows * file.row_bytes for file in files), files)

    def missing(self, listed: Mapping[str, int | None], key: str, size: int, least: int | None = None) -> str:
        """Say what is wrong with an object of ``size`` bytes, or, compressed, of ``least``; "" where nothing is."""
        if key not in listed:
            return "" if self._held(key) is not None else f"is missing, as there is no {key}"
        seen = listed[key]
        if seen is None or (seen == size if least is None else seen >= least):
            return ""
        wanted = f"{size:,}" if least is None else f"{least:,} at least"
        return f"is not whole, as {key} has {seen:,} bytes of {wanted}"

    # -- inside ------------------------------------------------------------------------------------------

    def _rows(self, parts: Sequence[Array], index: int, first: int, last: int) -> list[Bytes]:
        """Return rows [first, last) of a block in each of its arrays, until this thread's next call."""
        if first == last:
            return [np.empty(0, np.uint8) for _ in parts]
        if parts[0].shards is not None:
            return self._compressed_rows(parts, index, first, last)
        spans = []
        for array in parts:
            place, width = array.place(index), array.row_bytes
            spans.append(Span(place.key, place.begin + width * first, place.begin + width * last, place.chunk_bytes))
        return self._ranges(spans)

    def _compressed_rows(self, parts: Sequence[Array], index: int, first: int, last: int) -> list[Bytes]:
        """Read the index of each chunk, then the inner chunks that have the rows."""
        spans, places = [], []
        for array in parts:
            key, shards = array.key(index), array.shards
            assert shards is not None
            end = self._objects.end(key, shards.index_bytes)
            if end.size < shards.index_bytes:
                raise BlockReadError(
                    f"is not whole, as {key} has {end.size:,} bytes of {shards.index_bytes:,} at least"
                )
            inner = shards.index_of(end)[first // shards.inner_rows : -(-last // shards.inner_rows)]
            if np.any(inner[:, 0] < 0) or np.any(np.diff(inner[:, 0]) < 0):
                raise BlockReadError(f"lacks some of its rows {first} to {last}, as {key} does not have them")
            spans.append(Span(key, int(inner[0, 0]), int(inner[-1].sum()), -1))
            places.append((shards, inner))
        found = self._ranges(spans)
        return [shards.decode(inner, data, first, last) for (shards, inner), data in zip(places, found, strict=True)]

    def _ranges(self, spans: Sequence[Span]) -> list[Bytes]:
        held = [self._held(span.key) for span in spans]
        if all(chunk is None for chunk in held):
            return self._objects.ranges(spans)
        return [
            self._objects.ranges([span])[0] if chunk is None else chunk[span.start : span.stop]
            for span, chunk in zip(spans, held, strict=True)
        ]
