"""Compressed chunks: each a shard of Zarr, in which some rows at a time are compressed and can be read alone.

A shard is the chunk of one block in one array. It has its inner chunks one behind the other, each compressed, then
the index: where each begins and how many bytes it has (uint64 both, all ones where it is not there), and a CRC32C.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.errors import BlockReadError
from tiercache.store.stream import compressed_rows
from tiercache.store.zarr_codec import CHECKSUM, CRC32C, LITTLE, Codec, checked, sealed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tiercache.store.stream import Stream

    Bytes = NDArray[np.uint8]

_ENTRY_BYTES = 16
_NOT_THERE = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """How the chunks of one array are cut and compressed."""

    codec: Codec
    row_bytes: int
    chunk_rows: int
    inner_rows: int
    """Rows that are compressed together: ``chunk_rows`` are so many times them."""

    @property
    def count(self) -> int:
        """Inner chunks of a chunk."""
        return self.chunk_rows // self.inner_rows

    @property
    def index_bytes(self) -> int:
        """Bytes at the end of a shard that say where its inner chunks are."""
        return self.count * _ENTRY_BYTES + CHECKSUM.size

    def nodes(self, shape: Sequence[int]) -> list[dict[str, Any]]:
        """Return the codecs in the words of Zarr; ``shape`` is that of an inner chunk."""
        how = {
            "chunk_shape": list(shape),
            "codecs": self.codec.nodes(),
            "index_codecs": [LITTLE, CRC32C],
            "index_location": "end",
        }
        return [{"name": "sharding_indexed", "configuration": how}]

    def encode(self, rows: Bytes) -> bytes:
        """Return the shard of the rows of a block."""
        step = self.inner_rows * self.row_bytes
        index = np.full((self.count, 2), _NOT_THERE, "<u8")
        parts, at = [], 0
        for i, low in enumerate(range(0, rows.size, step)):
            part = rows[low : low + step]
            if part.size < step:  # an inner chunk has all its rows to readers of Zarr
                part = np.concatenate([part, np.zeros(step - part.size, np.uint8)])
            parts.append(self.codec.encode(part))
            index[i] = at, len(parts[-1])
            at += len(parts[-1])
        return b"".join([*parts, sealed(index.tobytes())])

    def decode(self, index: NDArray[np.int64], data: Bytes, first: int, last: int) -> Bytes:
        """Return the bytes of rows [first, last) out of ``data``, the inner chunks that have them.

        ``index`` has the entries of these. Raises BlockReadError.
        """
        step = self.inner_rows * self.row_bytes
        out, room = np.empty((last - first) * self.row_bytes, np.uint8), np.empty(step, np.uint8)
        begin = -(first % self.inner_rows) * self.row_bytes
        base = int(index[0, 0])
        for start, size in index.tolist():
            end = begin + step
            whole = begin >= 0 and end <= out.size
            target = out[begin:end] if whole else room
            self.codec.decode(data[start - base : start - base + size], target)
            if not whole:
                taken = slice(max(0, begin), min(end, out.size))
                out[taken] = room[taken.start - begin : taken.stop - begin]
            begin = end
        return out

    def index_of(self, data: Bytes, shard_bytes: int) -> NDArray[np.int64]:
        """Return where each inner chunk begins, and its bytes: (count, 2), -1 where it is not there.

        ``data`` is the index, of a shard of so many bytes. Raises BlockReadError for one that points elsewhere.
        """
        index = np.frombuffer(checked(data), "<i8").reshape(-1, 2)
        there = index[index[:, 0] != -1]
        if np.any(there < 0) or np.any(there > shard_bytes) or np.any(there.sum(axis=1) > shard_bytes):
            raise BlockReadError("has an index that points beyond its end")
        return index


def cut(stream: Stream) -> tuple[int, int]:
    """Return the rows of a chunk and of an inner chunk for the blocks of a stream.

    An inner chunk has ``compressed_rows`` where those of a block are a multiple of them. Else it has less, down to a
    quarter, or more.
    """
    wanted = compressed_rows(stream.row_bytes, min(stream.piece_rows, stream.block_rows, max(1, stream.rows)))
    if stream.num_blocks <= 1:  # nothing follows, so the chunk may be larger than the block
        return -(-max(1, stream.rows) // wanted) * wanted, wanted
    rows = stream.block_rows
    less = next(n for n in range(wanted, 0, -1) if rows % n == 0)
    return rows, less if 4 * less >= wanted else next(n for n in range(wanted, rows + 1) if rows % n == 0)
