"""The bytes of a record, and arrays after one that are read in place.

    "TCR1" | header bytes: uint32 | header: JSON in UTF-8 | arrays, one after another | CRC32C of all before: uint32

Little-endian. The header is ``{"kind": ..., "values": {...}, "arrays": [[name, dtype, length], ...]}``. Nothing is
executed on reading, and every size is checked against the given bytes before it is used. Larger arrays may follow a
record, in chunks: each is read and checked on first use.
"""

from __future__ import annotations

import hashlib
import json
import operator
import struct
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import google_crc32c
import numpy as np

from tiercache.store.store_errors import damaged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    Part = tuple[NDArray[np.uint8], NDArray[np.int64]]
    """Bytes, and bounds (R + 1, rising) of runs of them."""


_MAGIC = b"TCR1"
_DTYPES = ("<u4", "<i8")


def encode(kind: str, values: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return the record's bytes. Raises ValueError if ``values`` are not plain JSON."""
    described = [[name, array.dtype.newbyteorder("<").str, int(array.size)] for name, array in arrays.items()]
    assert all(dtype in _DTYPES for _, dtype, _ in described), described
    header = json.dumps(
        {"kind": kind, "values": values, "arrays": described}, allow_nan=False, separators=(",", ":"), default=_plain
    ).encode()
    parts = [_MAGIC, struct.pack("<I", len(header)), header]
    parts += [array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes() for array in arrays.values()]
    body = b"".join(parts)
    return body + struct.pack("<I", google_crc32c.value(body))


def decode(kind: str, data: bytes, name: str) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return (values, arrays) of a record of ``kind``. Raises CorruptStoreError; ``name`` is its name in messages."""
    if len(data) < 12 or data[:4] != _MAGIC:
        raise damaged(f"{name} is {len(data)} bytes that no store wrote")
    body, (expected,) = data[:-4], struct.unpack("<I", data[-4:])
    seen = google_crc32c.value(body)
    if seen != expected:
        raise damaged(f"{name} has checksum {seen:08x}, but {expected:08x} was written")
    (header_bytes,) = struct.unpack("<I", body[4:8])
    if header_bytes > len(body) - 8:
        raise damaged(f"{name} has a header of {header_bytes} bytes, but only {len(body) - 8} bytes follow")
    try:
        header = json.loads(body[8 : 8 + header_bytes], parse_constant=no_number)
        found, values, described = header["kind"], header["values"], header["arrays"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(f"{name} has a header that cannot be read ({error})") from error
    if found != kind or not isinstance(values, dict) or not isinstance(described, list):
        raise damaged(f"{name} is a record of {found!r}")
    arrays: dict[str, NDArray[Any]] = {}
    at = 8 + header_bytes
    for entry in described:
        match entry:
            case [str() as array, "<u4" | "<i8" as dtype, int() as length] if 0 <= length <= len(body):
                end = at + length * np.dtype(dtype).itemsize
            case _:
                raise damaged(f"{name} describes an array as {entry!r}")
        if end > len(body):
            raise damaged(f"{name} lists {length} numbers of {array!r} but ends before them")
        arrays[array] = np.frombuffer(body[at:end], dtype=dtype)
        at = end
    if at != len(body):
        raise damaged(f"{name} has {len(body) - at} extra bytes at its end")
    return values, arrays


def _plain(value: object) -> Any:
    """Return a number of NumPy as Python's. Raises TypeError for other values, which JSON does not have."""
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return value.item()
    raise TypeError(f"{type(value).__name__} {repr(value)[:60]} is not a JSON value")


def whole(value: Any, name: str) -> int:
    """Return a header value that must be a whole number, 0 .. 2**63 - 1. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{name} of a record is {repr(value)[:60]}")
    return value


def integer(value: Any, name: str) -> int:
    """Return an argument that a record will contain as an int. Raises ValueError for a bool and for other types."""
    if not isinstance(value, bool | np.bool_):
        with suppress(TypeError):
            return operator.index(value)
    raise ValueError(f"{name} is {repr(value)[:60]} of type {type(value).__name__}: expected an int")


def as_integer(value: Any) -> int | None:
    """Return an argument as an int; None for a bool, and for other types without ``__index__``."""
    with suppress(ValueError):
        return integer(value, "it")
    return None


def positive(value: Any, name: str, what: str = "a whole number") -> int:
    """Return an argument of at least 1 as an int. Raises ValueError for others; ``what`` is expected."""
    found = as_integer(value)
    if found is None or found < 1:
        raise ValueError(f"{name} is {value!r}: expected {what}, at least 1")
    return found


def checked_retention(value: Any) -> int:
    """Return the number of newest commits to keep. Raises ValueError unless it is 1 to 2**63 - 1."""
    found = integer(value, "retention")
    if found < 1:
        raise ValueError(f"retention is {found}: at least the newest commit must be kept")
    if found >= 1 << 63:
        raise ValueError(f"retention is {found}: expected at most 2**63 - 1")
    return found


def no_number(constant: str) -> Any:
    """Raise ValueError for NaN or an infinity, which Python's JSON accepts."""
    raise ValueError(f"{constant} is not a number")


def digest(data: bytes) -> str:
    """Return the SHA-256 of bytes as hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def checked_digest(value: object) -> str:
    """Return a digest. Raises ValueError for anything else."""
    if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise ValueError(f"{str(value)[:70]!r} is not a digest")
    return value


def checksum(data: NDArray[Any]) -> int:
    """Return the CRC32C of contiguous bytes."""
    view = data.view()
    view.flags.writeable = False  # google_crc32c takes read-only buffers, and only those without a copy
    return int(google_crc32c.value(view))


def page_checksums(parts: Sequence[Part]) -> NDArray[np.uint32]:
    """Return the CRC32C of each run of bytes between neighboring bounds, part after part."""
    sums = []
    for data, bounds in parts:
        view = data.view()
        view.flags.writeable = False
        sums += [google_crc32c.value(view[a:b]) for a, b in pairwise(bounds.tolist())]
    return np.array(sums, np.uint32)


CHUNK_BYTES = 16 << 10
"""Chunk size: bytes read and checked together."""
_WHOLE_BYTES = 64 << 10
"""A smaller array is read at once, which takes hardly longer than one chunk of it."""
CACHE_BYTES = 64 << 20
"""Memory for the chunks that a store caches."""
_ALIGNED = 8
_ARRAY_DTYPES = ("|u1", "<u4", "<u8", "<i8")


class ArrayPlace(NamedTuple):
    """The place of an array in its blob."""

    dtype: str
    size: int
    """Numbers."""
    begin: int
    """Its first byte after the head."""
    first_chunk: int
    """The number of its first chunk in the numbering of all arrays' chunks."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all numbers."""
        return self.size * np.dtype(self.dtype).itemsize


def places_of(described: Sequence[Any]) -> dict[str, ArrayPlace]:
    """Return the places of consecutive arrays (name, dtype, size). Raises ValueError and TypeError for others."""
    places: dict[str, ArrayPlace] = {}
    begin = chunk = 0
    for name, dtype, size in described:
        if dtype not in _ARRAY_DTYPES:
            raise ValueError(f"array {name!r} is of {dtype!r}")
        places[str(name)] = place = ArrayPlace(dtype, whole(size, "the size of an array"), begin, chunk)
        begin += -(-place.num_bytes // _ALIGNED) * _ALIGNED
        chunk += -(-place.num_bytes // CHUNK_BYTES)
    return places


def end_of(places: Mapping[str, ArrayPlace]) -> tuple[int, int]:
    """Return the bytes of all arrays, and the number of their chunks."""
    sizes = [place.num_bytes for place in places.values()]
    return sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes), sum(-(-size // CHUNK_BYTES) for size in sizes)


def describe(arrays: Mapping[str, NDArray[Any]]) -> tuple[list[list[Any]], list[NDArray[np.uint8]], NDArray[np.uint32]]:
    """Return the descriptions of arrays, their bytes in order, and the CRC32C of each chunk."""
    described: list[list[Any]] = []
    parts: list[NDArray[np.uint8]] = []
    sums: list[int] = []
    for name, array in arrays.items():
        dtype = array.dtype.newbyteorder("<") if array.dtype.itemsize > 1 else array.dtype
        data = np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8)
        described.append([name, dtype.str, int(array.size)])
        parts += [data, np.zeros(-data.size % _ALIGNED, np.uint8)]
        sums += [checksum(data[at : at + CHUNK_BYTES]) for at in range(0, data.size, CHUNK_BYTES)]
    return described, parts, np.array(sums, np.uint32)


class ChunkCache:
    """The most recently used chunks of all arrays of a store; from any thread."""

    def __init__(self, most_bytes: int = CACHE_BYTES) -> None:
        self.most_bytes, self.num_bytes = most_bytes, 0
        self._chunks: OrderedDict[tuple[str, int], NDArray[np.uint8]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, blob: str, chunk: int) -> NDArray[np.uint8] | None:
        """Return a chunk of a blob, or None if it is not cached."""
        with self._lock:
            found = self._chunks.get((blob, chunk))
            if found is not None:
                self._chunks.move_to_end((blob, chunk))
            return found

    def put(self, blob: str, chunk: int, data: NDArray[np.uint8]) -> None:
        """Add a chunk, evicting the least recently used."""
        with self._lock:
            if (blob, chunk) not in self._chunks:
                self._chunks[blob, chunk] = data
                self.num_bytes += data.size
            while self.num_bytes > self.most_bytes and len(self._chunks) > 1:
                self.num_bytes -= self._chunks.popitem(last=False)[1].size


@dataclass(frozen=True, slots=True)
class PagedArrays:
    """The arrays of one blob."""

    blob: str
    places: Mapping[str, ArrayPlace]
    checksums: NDArray[np.uint32]
    """CRC32C of each chunk of all arrays."""
    read: Callable[[int, NDArray[np.uint8]], None]
    """Fills memory from a byte after the head."""
    cache: ChunkCache
    label: str
    """The name of the blob in messages."""

    def array(self, name: str) -> PagedArray:
        """Return an array. Raises KeyError for an unknown name."""
        return PagedArray(self, self.places[name])

    def chunks(self, place: ArrayPlace, first: int, last: int) -> NDArray[np.uint8]:
        """Return the bytes of chunks [first, last) of an array, neighbors read together. Raises CorruptStoreError."""
        if last - first == 1:
            kept = self.cache.get(self.blob, place.first_chunk + first)
            if kept is not None:
                return kept
            if CHUNK_BYTES < place.num_bytes <= _WHOLE_BYTES:
                every = self.chunks(place, 0, -(-place.num_bytes // CHUNK_BYTES))
                return every[first * CHUNK_BYTES : last * CHUNK_BYTES]
        found = [self.cache.get(self.blob, place.first_chunk + i) for i in range(first, last)]
        for is_missing, run in groupby(range(len(found)), lambda i: found[i] is None):
            if is_missing:
                missing = [*run]
                self._fill(place, first, found, missing[0], missing[-1] + 1)
        return np.concatenate([chunk for chunk in found if chunk is not None])

    def _fill(self, place: ArrayPlace, first: int, found: list[NDArray[np.uint8] | None], low: int, high: int) -> None:
        """Read the chunks [first + low, first + high) of an array into ``found``."""
        begin, end = (first + low) * CHUNK_BYTES, min((first + high) * CHUNK_BYTES, place.num_bytes)
        data = np.empty(end - begin, np.uint8)
        self.read(place.begin + begin, data)
        for i in range(low, high):
            chunk = data[(i - low) * CHUNK_BYTES : (i - low + 1) * CHUNK_BYTES]
            number = place.first_chunk + first + i
            seen, expected = checksum(chunk), int(self.checksums[number])
            if seen != expected:
                wrong = f"has checksum {seen:08x}, but {expected:08x} was written"
                raise damaged(f"chunk {number} of {self.label} {wrong}")
            found[i] = chunk if high - low == 1 else chunk.copy()
            self.cache.put(self.blob, number, found[i])  # type: ignore[arg-type]


class PagedArray:
    """One array: ``array[low:high]`` and ``array[i]`` read only the needed chunks."""

    def __init__(self, arrays: PagedArrays, place: ArrayPlace) -> None:
        self._arrays, self._place = arrays, place
        self.dtype, self.size = np.dtype(place.dtype), place.size

    def __getitem__(self, part: Any) -> Any:
        """Return the numbers [low, high) of a slice without a step, or one number."""
        if not isinstance(part, slice):
            index = int(part) + (self.size if int(part) < 0 else 0)
            if not 0 <= index < self.size:
                raise IndexError(f"number {part} of an array of {self.size}")
            return self[index : index + 1][0]
        low, high, step = part.indices(self.size)
        assert step == 1, "arrays are read in order"
        if low >= high:
            return np.empty(0, self.dtype)
        begin, end = low * self.dtype.itemsize, high * self.dtype.itemsize
        first = begin // CHUNK_BYTES
        data = self._arrays.chunks(self._place, first, -(-end // CHUNK_BYTES))
        return data[begin - first * CHUNK_BYTES : end - first * CHUNK_BYTES].view(self.dtype)
