"""The bytes of a record: JSON for what is said, arrays for what is many, a checksum over both.

    "TCR1" | header bytes: uint32 | header: JSON in UTF-8 | arrays, one after another | CRC32C of all before: uint32

Little-endian. The header is ``{"kind": ..., "values": {...}, "arrays": [[name, dtype, length], ...]}``. Nothing is
executed on reading, and every size is checked against the bytes at hand before it is used.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np

from tiercache.store.store_errors import CorruptStoreError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


_MAGIC = b"TCR1"
_DTYPES = ("<u4", "<i8")


def encode(kind: str, values: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return the record's bytes. Raises ValueError where ``values`` are not plain JSON."""
    described = [[name, array.dtype.newbyteorder("<").str, int(array.size)] for name, array in arrays.items()]
    assert all(dtype in _DTYPES for _, dtype, _ in described), described
    header = json.dumps(
        {"kind": kind, "values": values, "arrays": described}, allow_nan=False, separators=(",", ":")
    ).encode()
    parts = [_MAGIC, struct.pack("<I", len(header)), header]
    parts += [array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes() for array in arrays.values()]
    body = b"".join(parts)
    return body + struct.pack("<I", google_crc32c.value(body))


def decode(kind: str, data: bytes, name: str) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return (values, arrays) of a record of ``kind``. Raises CorruptStoreError that calls it ``name``."""
    if len(data) < 12 or data[:4] != _MAGIC:
        raise _corrupt(name, f"is {len(data)} bytes that no store wrote")
    body, (expected,) = data[:-4], struct.unpack("<I", data[-4:])
    seen = google_crc32c.value(body)
    if seen != expected:
        raise _corrupt(name, f"has checksum {seen:08x} where {expected:08x} was written")
    (header_bytes,) = struct.unpack("<I", body[4:8])
    if header_bytes > len(body) - 8:
        raise _corrupt(name, f"names a header of {header_bytes} bytes and has {len(body) - 8}")
    try:
        header = json.loads(body[8 : 8 + header_bytes], parse_constant=no_number)
        found, values, described = header["kind"], header["values"], header["arrays"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _corrupt(name, f"has a header that cannot be read ({error})") from error
    if found != kind or not isinstance(values, dict) or not isinstance(described, list):
        raise _corrupt(name, f"is a record of {found!r}")
    arrays: dict[str, NDArray[Any]] = {}
    at = 8 + header_bytes
    for entry in described:
        match entry:
            case [str() as array, "<u4" | "<i8" as dtype, int() as length] if 0 <= length <= len(body):
                end = at + length * np.dtype(dtype).itemsize
            case _:
                raise _corrupt(name, f"describes an array as {entry!r}")
        if end > len(body):
            raise _corrupt(name, f"names {length} numbers of {array!r} and ends before them")
        arrays[array] = np.frombuffer(body[at:end], dtype=dtype)
        at = end
    if at != len(body):
        raise _corrupt(name, f"has {len(body) - at} bytes that nothing describes")
    return values, arrays


def whole(value: Any, name: str) -> int:
    """Return a value of a header that must be a whole number, 0 .. 2**63 - 1. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{name} of a record is {repr(value)[:60]}")
    return value


def no_number(constant: str) -> Any:
    """Raise ValueError for NaN or an infinity, which JSON of Python would read."""
    raise ValueError(f"{constant} is no number")


def _corrupt(name: str, seen: str) -> CorruptStoreError:
    return CorruptStoreError(f"{name} {seen}: restore the store from a copy")


def digest(data: bytes) -> str:
    """Return the SHA-256 of bytes as hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def checked_digest(value: object) -> str:
    """Return a digest. Raises ValueError for what is none."""
    if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise ValueError(f"{str(value)[:70]!r} is no digest")
    return value
