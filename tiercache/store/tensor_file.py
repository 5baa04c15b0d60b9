"""Tensors in safetensors files, read by ranges of rows and checked chunk by chunk.

The format: header bytes (uint64, little-endian), a JSON header ``{name: {dtype, shape, data_offsets}}``, the tensors. A
checkpoint of several files has an index, ``{"weight_map": {name: file}}``.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tiercache.store.direct_io import RangeReader
from tiercache.store.files import open_file, read_whole, reason
from tiercache.store.records import digest, no_number, page_checksums
from tiercache.store.store_errors import BlockReadError, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.store.records import Part

    Checksums = Callable[[Sequence[Part]], NDArray[np.uint32]]

CHUNK_BYTES = 16 << 10
"""Bytes of a tensor per checksum: the minimum read."""
READ_BYTES = 4 << 20
"""Maximum bytes of one read, and of the rows that are gathered together."""
GAP_BYTES = 128 << 10
"""Maximum gap between two rows of one read: about what a disk transfers during another request."""
INDEX = "model.safetensors.index.json"
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
_MOST_RUNS = 4096
"""Reads that are planned at a time."""
_READER = RangeReader()
_MOST_HEADER_BYTES = 100 << 20
"""The limit of the format's own library."""


class FileIdentity(NamedTuple):
    """The properties of a file that must stay the same, wherever the file is."""

    size: int
    header: str
    """SHA-256 of its header."""


class Reads(NamedTuple):
    """Bytes and requests of reading."""

    num_bytes: int = 0
    requests: int = 0

    def plus(self, other: Reads) -> Reads:
        """Return the sum."""
        return Reads(self.num_bytes + other.num_bytes, self.requests + other.requests)


@dataclass(eq=False)
class Sums:
    """The checksums of the chunks of one tensor that were read so far."""

    crc_C: NDArray[np.uint32]
    known_C: NDArray[np.bool_]
    changed: bool = False
    """True if a chunk was added since the last save."""

    @classmethod
    def empty(cls, num_chunks: int) -> Sums:
        """Return the sums of a tensor of which nothing was read."""
        return cls(np.zeros(num_chunks, np.uint32), np.zeros(num_chunks, np.bool_))

    def check(self, chunk_C: NDArray[np.int64], seen_C: NDArray[np.uint32]) -> int | None:
        """Compare chunks with the known ones, and note the others; returns the first that differs, or None."""
        known_C = self.known_C[chunk_C]
        differs_C = known_C & (self.crc_C[chunk_C] != seen_C)
        if differs_C.any():
            return int(chunk_C[np.argmax(differs_C)])
        if not known_C.all():
            self.crc_C[chunk_C], self.known_C[chunk_C], self.changed = seen_C, True, True
        return None

    def take(self, other: Sums) -> bool:
        """Add the known chunks of other sums of the same tensor; False if some differ."""
        if (self.known_C & other.known_C & (self.crc_C != other.crc_C)).any():
            return False
        new = other.known_C & ~self.known_C
        if new.any():
            self.crc_C[new], self.known_C[new], self.changed = other.crc_C[new], True, True
        return True


class TensorFile:
    """One tensor of a safetensors file; a vector counts as rows of one number. All methods raise CheckpointError."""

    def __init__(self, path: Path, tensor: str, header: _Header | None = None) -> None:
        self.path, self.tensor = path, tensor
        header = header or _Header.of(path)
        self._status, self.identity = header.status, header.identity
        self.dtype, self.shape, self.begin = self._find(header)  # begin: the tensor's first byte in the file
        self.row_bytes = ITEM_BYTES[self.dtype] * prod(self.shape[1:])
        self.size = self.shape[0] * self.row_bytes
        """Bytes of the tensor."""
        self.num_chunks = -(-self.size // CHUNK_BYTES)

    @property
    def label(self) -> str:
        """The tensor in the words of a message."""
        return f"tensor {self.tensor!r} of the checkpoint {self.path}"

    def check_unchanged(self) -> None:
        """Raise CheckpointError unless the path still has the file of before, unchanged."""
        try:
            now = self.path.stat()
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {self.path} cannot be read ({reason(error)}): restore the file"
            ) from error
        names = ("st_dev", "st_ino", "st_size", "st_mtime_ns")
        if any(getattr(now, name) != getattr(self._status, name) for name in names):
            raise CheckpointError(
                f"the checkpoint {self.path} was changed or replaced while it was in use: restore the original file "
                "and open the store again"
            )

    def rows(
        self, rows: NDArray[np.int64], sums: Sequence[Sums], checksums: Checksums = page_checksums
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8], Reads]]:
        """Yield the rows (n,) in the order of the file: indices into ``rows``, their bytes (m, row bytes), and reads.

        Neighbors are read together, and every chunk that is read is compared with ``sums``. The bytes of one yield are
        valid until the next. Memory: 8 bytes per row and 16 MiB.
        """
        self.check_unchanged()
        order = np.argsort(rows, kind="stable")
        step = max(1, READ_BYTES // max(self.row_bytes, 4 * prod(self.shape[1:])))  # they may become float32
        found = np.empty((min(step, rows.size), self.row_bytes), np.uint8)
        for begin in range(0, rows.size, step):
            index = order[begin : begin + step]
            sorted_N = rows[index]
            first_C = sorted_N * self.row_bytes // CHUNK_BYTES
            last_C = ((sorted_N + 1) * self.row_bytes - 1) // CHUNK_BYTES
            runs, reads = _runs(first_C, last_C), Reads()
            while together := [*islice(runs, _MOST_RUNS)]:
                low_R, high_R = np.array(together).T
                begin_R = first_C[low_R] * CHUNK_BYTES
                end_R = np.minimum((last_C[high_R - 1] + 1) * CHUNK_BYTES, self.size)
                for a, b in _batches(end_R - begin_R):
                    low, high, begins, ends = low_R[a], high_R[b - 1], begin_R[a:b], end_R[a:b]
                    data, place_R = self._checked(begins, ends, sums, checksums)
                    offset_N = np.repeat(place_R - begins, high_R[a:b] - low_R[a:b])
                    offset_N += sorted_N[low:high] * self.row_bytes
                    found[low:high] = _rows_at(data, offset_N, self.row_bytes)
                    reads = reads.plus(Reads(int((ends - begins).sum()), b - a))
            yield index, found[: index.size], reads
        self.check_unchanged()

    def read_all(self, sums: Sums) -> None:
        """Compare every known chunk with the file, and note the others."""
        for at in range(0, self.size, READ_BYTES):
            self._checked(np.array([at]), np.array([min(at + READ_BYTES, self.size)]), [sums])
        self.check_unchanged()

    def sample(self, sums: Sums, count: int) -> None:
        """Compare up to ``count`` of the known chunks, evenly spread, with the file."""
        known = np.flatnonzero(sums.known_C)
        begin_R = known[:: max(1, -(-known.size // count))] * CHUNK_BYTES
        if begin_R.size:
            self._checked(begin_R, np.minimum(begin_R + CHUNK_BYTES, self.size), [sums])

    def _checked(
        self,
        begin_R: NDArray[np.int64],
        end_R: NDArray[np.int64],
        sums: Sequence[Sums],
        checksums: Checksums = page_checksums,
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Read ranges of chunks and compare these with ``sums``; returns reused memory, and the place of each range."""
        try:
            begin, stop = self.begin + begin_R, self.begin + end_R
            data, place_R = _READER.read_many(str(self.path), begin, stop, self._status.st_size)
        except BlockReadError as error:
            raise CheckpointError(f"{self.label} {error.seen}: restore the original file") from error
        if not sums:
            return data, place_R
        count_R = -(-(end_R - begin_R) // CHUNK_BYTES)
        number_C = _counted(count_R)
        # the bounds of chunks, and between two ranges bytes that are in neither
        bounds = np.minimum(
            np.repeat(place_R, count_R + 1) + _counted(count_R + 1) * CHUNK_BYTES,
            np.repeat(place_R + end_R - begin_R, count_R + 1),
        )
        seen_C = np.delete(checksums([(data, bounds)]), np.cumsum(count_R + 1)[:-1] - 1)
        chunk_C = np.repeat(begin_R // CHUNK_BYTES, count_R) + number_C
        for one in sums:
            if (bad := one.check(chunk_C, seen_C)) is not None:
                raise CheckpointError(
                    f"{self.label} has different bytes at {self.begin + bad * CHUNK_BYTES:,} than when the store "
                    "first read it: restore the original file"
                )
        return data, place_R

    def _find(self, header: _Header) -> tuple[str, tuple[int, ...], int]:
        entry = header.tensors.get(self.tensor)
        if entry is None:
            names = sorted(name for name in header.tensors if name != "__metadata__")
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise CheckpointError(f"the checkpoint {self.path} has no tensor {self.tensor!r}: it has {shown}")
        match entry:
            case {"dtype": str(dtype), "shape": [*sizes], "data_offsets": [low, high]} if all(
                isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (*sizes, low, high)
            ):
                shape = tuple(sizes) or (1,)
            case _:
                raise _invalid(self.path, f"its header describes tensor {self.tensor!r} as {str(entry)[:200]}")
        if dtype not in ITEM_BYTES:
            raise CheckpointError(f"{self.label} has dtype {dtype}: expected one of {', '.join(ITEM_BYTES)}")
        if min(shape) < 1:
            raise CheckpointError(f"{self.label} has shape {list(shape)}: expected rows")
        size = ITEM_BYTES[dtype] * prod(shape)
        if high - low != size or header.begin + high > header.identity.size:
            raise _invalid(self.path, f"tensor {self.tensor!r} of shape {list(shape)} has bytes {low} to {high}")
        return dtype, shape, header.begin + low


class _Header(NamedTuple):
    """The parsed header of a file."""

    status: os.stat_result
    identity: FileIdentity
    tensors: dict[str, Any]
    begin: int
    """Its end: offsets of tensors count from here."""

    @classmethod
    def of(cls, path: Path) -> _Header:
        """Read it. Raises CheckpointError."""
        try:
            handle = open_file(path)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {path} cannot be read ({reason(error)}): restore the file, or set its new path with "
                "`tiercache alter`"
            ) from error
        try:
            status, length = os.fstat(handle), int.from_bytes(os.pread(handle, 8, 0), "little")
            if not 2 <= length <= min(_MOST_HEADER_BYTES, status.st_size - 8):
                raise _invalid(path, f"its header has {length:,} bytes")
            data = os.pread(handle, length, 8)
        finally:
            os.close(handle)
        try:
            tensors = json.loads(data, parse_constant=no_number)
        except (ValueError, RecursionError) as error:
            raise _invalid(path, f"its header cannot be read ({error})") from error
        if not isinstance(tensors, dict):
            raise _invalid(path, "its header is not an object")
        return cls(status, FileIdentity(status.st_size, digest(data)), tensors, 8 + length)


def _invalid(path: Path, seen: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a safetensors file: {seen}")


def find_tensors(path: str, tensor: str) -> list[TensorFile]:
    """Find a tensor in a file, in files with an index, or in a folder with either. Raises CheckpointError.

    ``*`` in its name matches a number: a tensor that is cut into ``shard_0``, ``shard_1``, ... by rows.
    """
    place, file_of = _files_of(Path(path))
    if "*" not in tensor:
        if file_of is not None and tensor not in file_of:
            raise CheckpointError(f"the checkpoint {place} has no file for tensor {tensor!r}")
        return [TensorFile(place if file_of is None else file_of[tensor], tensor)]
    pattern = re.compile(re.escape(tensor).replace(r"\*", r"(\d+)", 1))
    header_of: dict[Path, _Header] = {}
    if file_of is None:
        header_of[place] = _Header.of(place)
        file_of = dict.fromkeys(header_of[place].tensors, place)
    found = sorted((int(match[1]), name) for name in file_of if (match := pattern.fullmatch(name)))
    numbers = [number for number, _ in found]
    if not found or numbers != [*range(numbers[0], numbers[0] + len(found))] or numbers[0] not in {0, 1}:
        raise CheckpointError(
            f"the checkpoint {place} has tensors {tensor!r} with the numbers {numbers}: expected 0, 1, and so on"
        )
    for _, name in found:
        if file_of[name] not in header_of:
            header_of[file_of[name]] = _Header.of(file_of[name])
    return [TensorFile(file_of[name], name, header_of[file_of[name]]) for _, name in found]


def _files_of(place: Path) -> tuple[Path, dict[str, Path] | None]:
    """Return a file with tensors and None, or an index with the file of each tensor. Raises CheckpointError."""
    if place.is_dir():
        files = sorted(place.glob("*.safetensors"))
        if not (place / INDEX).exists() and len(files) != 1:
            raise CheckpointError(
                f"the checkpoint {place} has {len(files)} safetensors files but no {INDEX}: pass the path of one file"
            )
        place = place / INDEX if (place / INDEX).exists() else files[0]
    if place.suffix != ".json":
        return place, None
    try:
        names: dict[str, str] = json.loads(read_whole(str(place)))["weight_map"]
        found = {str(tensor): place.parent / file for tensor, file in names.items()}
    except OSError as error:
        raise CheckpointError(f"the checkpoint {place} cannot be read ({reason(error)}): restore the file") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{place} is not an index of safetensors files ({error})") from error
    if outside := [file for file in found.values() if file.parent != place.parent]:
        raise CheckpointError(f"{place} names {outside[0]}: expected files in its own folder")
    return place, found


def _runs(first_C: NDArray[np.int64], last_C: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield bounds of rows that one read takes together: without large gaps, and READ_BYTES at most or one row."""
    most, low = max(1, READ_BYTES // CHUNK_BYTES), 0
    gaps = (np.flatnonzero(first_C[1:] - last_C[:-1] > GAP_BYTES // CHUNK_BYTES + 1) + 1).tolist()
    for end in (*gaps, first_C.size):
        while low < end:
            high = end
            if last_C[end - 1] - first_C[low] >= most:
                high = low + max(1, int(np.searchsorted(last_C[low:end], first_C[low] + most)))
            yield low, high
            low = high


def _batches(size_R: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield bounds of ranges with READ_BYTES together at most, or one range."""
    end_R, low = np.cumsum(size_R), 0
    while low < size_R.size:
        high = max(low + 1, int(np.searchsorted(end_R, end_R[low] - size_R[low] + READ_BYTES, "right")))
        yield low, high
        low = high


def _counted(count_R: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0 to count - 1, for each count."""
    end_R = np.cumsum(count_R)
    return np.arange(end_R[-1]) - np.repeat(end_R - count_R, count_R)


def _rows_at(data: NDArray[np.uint8], offset_N: NDArray[np.int64], row_bytes: int) -> NDArray[np.uint8]:
    """Return a copy of rows (n, row bytes) that begin at any bytes of memory."""
    windows = np.ndarray(data.size - row_bytes + 1, f"V{row_bytes}", data.data, strides=1)  # they overlap
    return windows[offset_N].view(np.uint8).reshape(-1, row_bytes)
