"""Bytes compressed as Zarr's own codecs do it, and checked before they are unpacked; alone imports numcodecs."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import google_crc32c
import numcodecs

from tiercache.store.errors import BlockReadError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CHECKSUM = struct.Struct("<I")
LITTLE: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
CRC32C: dict[str, Any] = {"name": "crc32c"}
_ZSTD_LEVEL = 1
_BLOSC_LEVEL, _BLOSC_LIBRARY = 5, "lz4"
_BLOSC_HEADER = struct.Struct("<4xI4xI")
"""Bytes unpacked and packed: what Blosc's decoder believes."""
_ZSTD_LEAST = 9


class Codec(NamedTuple):
    """Compression, then a CRC32C of what it made: damaged bytes never come to a decoder."""

    compression: str
    """"zstd" (level 1), or "blosc" (LZ4 of the numbers' bytes shuffled)."""
    item_bytes: int
    """Of a number: what Blosc shuffles."""

    def nodes(self) -> list[dict[str, Any]]:
        """Return the codecs in the words of Zarr."""
        if self.compression == "zstd":
            packed = {"name": "zstd", "configuration": {"level": _ZSTD_LEVEL, "checksum": False}}
        else:
            how = {"cname": _BLOSC_LIBRARY, "clevel": _BLOSC_LEVEL, "shuffle": "shuffle", "blocksize": 0}
            packed = {"name": "blosc", "configuration": {"typesize": self.item_bytes, **how}}
        return [LITTLE, packed, CRC32C]

    def encode(self, data: NDArray[np.uint8]) -> bytes:
        """Return what is stored of contiguous bytes, which are whole numbers."""
        return sealed(bytes(self._library().encode(data.view(f"<u{self.item_bytes}"))))

    def decode(self, data: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Fill ``out`` with what ``encode`` was given. Raises BlockReadError for anything else."""
        packed = checked(data)
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


def checked(data: NDArray[np.uint8]) -> bytes:
    """Return bytes without the CRC32C at their end. Raises BlockReadError where it is not theirs."""
    kept = data.tobytes()
    packed = kept[: -CHECKSUM.size]
    seen = google_crc32c.value(packed)
    if len(kept) < CHECKSUM.size or CHECKSUM.unpack(kept[-CHECKSUM.size :])[0] != seen:
        raise BlockReadError(f"has checksum {seen:08x} over its compressed bytes, where another was written")
    return packed
