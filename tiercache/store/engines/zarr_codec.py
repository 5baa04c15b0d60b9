"""Compressed chunks: bytes as Zarr's own codecs pack them, checked before they are unpacked; alone imports numcodecs.

A chunk is a shard of Zarr, in which some rows at a time are compressed and can be read alone: its inner chunks one
behind the other, then the index: where each begins and how many bytes it has (uint64 both, all ones where it is not
there), and a CRC32C. An inner chunk has a CRC32C after its compressed bytes: damaged ones never come to a decoder.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import google_crc32c
import numcodecs
import numpy as np

from tiercache.store.store_errors import BlockReadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

COMPRESSIONS = (None, "zstd", "blosc")
CHECKSUM = struct.Struct("<I")
LITTLE: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC32C: dict[str, Any] = {"name": "crc32c"}
_ZSTD_LEVEL = 1
_BLOSC_LEVEL, _BLOSC_LIBRARY = 5, "lz4"
_BLOSC_HEADER = struct.Struct("<4xI4xI")
"""Bytes unpacked and packed: what Blosc's decoder believes."""
_ZSTD_LEAST = 9
_ENTRY_BYTES = 16
_NOT_THERE = (1 << 64) - 1


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
    """Rows that are compressed together: ``chunk_rows`` are so many times them."""

    @property
    def index_bytes(self) -> int:
        """Bytes at the end of a shard that say where its inner chunks are."""
        return self.chunk_rows // self.inner_rows * _ENTRY_BYTES + CHECKSUM.size

    @property
    def most_bytes(self) -> int:
        """More than a shard has: what does not become shorter becomes a little longer."""
        step = self.inner_rows * self.row_bytes
        return self.chunk_rows // self.inner_rows * (step + step // 64 + 1024) + self.index_bytes

    def nodes(self, shape: Sequence[int]) -> list[dict[str, Any]]:
        """Return the codecs in the words of Zarr; ``shape`` is that of an inner chunk."""
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
            if part.size < step:  # an inner chunk has all its rows to readers of Zarr
                part = np.concatenate([part, np.zeros(step - part.size, np.uint8)])
            parts.append(self.pack(part))
            index[i] = at, len(parts[-1])
            at += len(parts[-1])
        return b"".join([*parts, sealed(index.tobytes())])

    def decode(self, index: NDArray[np.int64], data: Bytes, first: int, last: int) -> Bytes:
        """Return the bytes of rows [first, last) out of ``data``, the inner chunks that have them.

        ``index`` has the entries of these. Raises BlockReadError.
        """
        step, base = self.inner_rows * self.row_bytes, int(index[0, 0])
        out = np.empty(len(index) * step, np.uint8)
        for i, (start, size) in enumerate(index.tolist()):
            self.unpack(data[start - base : start - base + size], out[i * step : (i + 1) * step])
        begin = first % self.inner_rows * self.row_bytes
        return out[begin : begin + (last - first) * self.row_bytes]

    def index_of(self, data: Bytes) -> NDArray[np.int64]:
        """Return where each inner chunk begins, and its bytes: (count, 2), -1 where it is not there.

        ``data`` is the index. Raises BlockReadError for one that points elsewhere than into a shard.
        """
        index = np.frombuffer(_checked(data), "<i8").reshape(-1, 2)
        there = index[index[:, 0] != -1]
        if np.any(there < 0) or np.any(there > self.most_bytes) or np.any(there.sum(axis=1) > self.most_bytes):
            raise BlockReadError("has an index that points beyond its end")
        return index

    def pack(self, data: Bytes) -> bytes:
        """Return what is stored of an inner chunk, contiguous bytes of whole numbers."""
        return sealed(bytes(self._library().encode(data.view(f"<u{self.item_bytes}"))))

    def unpack(self, data: Bytes, out: Bytes) -> None:
        """Fill ``out`` with what ``pack`` was given. Raises BlockReadError for anything else."""
        packed = _checked(data)
        if (_unpacked_zstd if self.compression == "zstd" else _unpacked_blosc)(packed) != out.size:
            raise BlockReadError(f"cannot be decompressed (it is not what {out.size:,} bytes were compressed to)")
        try:
            self._library().decode(packed, out)
        except (RuntimeError, ValueError) as error:
            raise BlockReadError(f"cannot be decompressed ({error})") from error

    def _library(self) -> Any:
        if self.compression == "zstd":
            return numcodecs.Zstd(level=_ZSTD_LEVEL)
        return numcodecs.Blosc(_BLOSC_LIBRARY, _BLOSC_LEVEL, numcodecs.Blosc.SHUFFLE)


def _unpacked_blosc(packed: bytes) -> int:
    """Return how many bytes a header says it was; -1 where it is none for these bytes."""
    if len(packed) < _BLOSC_HEADER.size:
        return -1
    unpacked, size = _BLOSC_HEADER.unpack_from(packed)
    return int(unpacked) if size == len(packed) else -1


def _unpacked_zstd(packed: bytes) -> int:
    """Return how many bytes a frame's header says it was (RFC 8878, 3.1.1.1); -1 where it does not say."""
    if len(packed) < _ZSTD_LEAST:
        return -1
    single, flag = packed[4] >> 5 & 1, packed[4] >> 6
    at, size = 6 - single + (0, 1, 2, 4)[packed[4] & 3], (single, 2, 4, 8)[flag]
    if not size or at + size > len(packed):
        return -1
    return int.from_bytes(packed[at : at + size], "little") + (256 if size == 2 else 0)


def sealed(data: bytes) -> bytes:
    """Return bytes with their CRC32C at the end, as Zarr's codec of that name does."""
    return data + CHECKSUM.pack(google_crc32c.value(data))


def _checked(data: Bytes) -> bytes:
    """Return bytes without the CRC32C at their end. Raises BlockReadError where it is not theirs."""
    kept = data.tobytes()
    packed = kept[: -CHECKSUM.size]
    seen = google_crc32c.value(packed)
    if len(kept) < CHECKSUM.size or CHECKSUM.unpack(kept[-CHECKSUM.size :])[0] != seen:
        raise BlockReadError(f"has checksum {seen:08x} over its compressed bytes, where another was written")
    return packed
