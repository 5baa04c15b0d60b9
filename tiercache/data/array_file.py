"""Arrays in one file, with a checksum for each block of it that is checked when the block is first read.

The file is a safetensors file: the length of its header (8 bytes), the header as JSON, the arrays one after another.
The last array, ``checksums``, has the XXH64 of each MiB of the arrays before it. The header follows from names, types
and shapes alone, so it is compared and never parsed.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tiercache.errors import DatasetError
from tiercache.kernels.cpu.hashing import xxh64_strings
from tiercache.store.files import write_cached

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

BLOCK_BYTES = 1 << 20
"""Bytes under one checksum: part of the format."""


class ArraySpec(NamedTuple):
    """An array of a file: its name, its type and its shape."""

    name: str
    dtype: Any
    shape: tuple[int, ...]


class ArrayLayout:
    """The offsets of arrays in their file. Arrays of wider numbers come first, so that all are aligned."""

    def __init__(self, arrays: Iterable[ArraySpec], metadata: Mapping[str, str]) -> None:
        """``metadata``: more strings for the header."""
        self.specs: dict[str, ArraySpec] = {}
        self._begins: dict[str, int] = {}
        end, record = 0, dict[str, Any](__metadata__=dict(metadata))
        for spec in arrays:
            begin, end = end, end + prod(spec.shape) * np.dtype(spec.dtype).itemsize
            self.specs[spec.name], self._begins[spec.name] = spec, begin
            record[spec.name] = _header_entry(spec, begin, end)
        self.data_bytes = end
        """Bytes of the arrays, without checksums."""
        self.num_blocks = -(-end // BLOCK_BYTES)
        """The number of checksums."""
        whole = end + 8 * self.num_blocks
        record["checksums"] = _header_entry(ArraySpec("checksums", "<u8", (self.num_blocks,)), end, whole)
        text = json.dumps(record, ensure_ascii=True).encode()
        text += b" " * (-(8 + len(text)) % 64)
        self.header = len(text).to_bytes(8, "little") + text
        self.num_bytes = len(self.header) + whole

    def offset(self, name: str, row: int = 0) -> int:
        """Return where a row of an array begins, in bytes from the first array on."""
        return self._begins[name] + row * self.row_bytes(name)

    def row_bytes(self, name: str) -> int:
        """Return the bytes of a row, which is one element of the first axis."""
        spec = self.specs[name]
        return prod(spec.shape[1:]) * int(np.dtype(spec.dtype).itemsize)


class ArrayFile:
    """A mapped file of arrays; safe to read from any thread.

    ``digest`` covers the header and the checksums, and the checksums cover the arrays, which ``check`` checks when they
    are first used. Raises DatasetError for a file that differs from what was written.
    """

    def __init__(self, path: Path, layout: ArrayLayout, digest: str, label: str = "") -> None:
        """``label``: the prefix of error messages."""
        self.path, self.layout, self.label = path, layout, label
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            what = f"({error.strerror}): check its permissions and disk"
            raise DatasetError(f"{label}{path} cannot be read {what}") from error
        except ValueError as error:
            what = f"{error}: delete the dataset and extract it again"
            raise DatasetError(f"{label}{path} cannot be read: {what}") from error
        if len(self._map) != layout.num_bytes:
            raise self._damaged(f"it has {len(self._map):,} bytes, not {layout.num_bytes:,}")
        self._first = len(layout.header)
        self._bytes = np.frombuffer(self._map, np.uint8, layout.data_bytes, self._first)
        sums = self._map[self._first + layout.data_bytes :]
        if self._map[: self._first] != layout.header:
            raise self._damaged("its header does not match")
        if _digest(layout, sums) != digest:
            raise self._damaged("its checksums do not match their digest")
        self.words = self._bytes[: self._bytes.size // 4 * 4].view(np.int32)
        """The arrays, mapped and read-only: ``check`` rows before you use them."""
        self._sums = np.frombuffer(sums, "<u8")
        self._is_checked = np.zeros(layout.num_blocks, bool)
        self._checked: set[str] = set()  # arrays of which every block is good

    def array(self, name: str) -> NDArray[Any]:
        """Return a mapped array, read-only; ``check`` its rows before you use them."""
        spec = self.layout.specs[name]
        begin = self._first + self.layout.offset(name)
        return np.frombuffer(self._map, spec.dtype, prod(spec.shape), begin).reshape(spec.shape)

    def whole(self, name: str) -> NDArray[Any]:
        """Return a mapped array, checked and read-only. Raises DatasetError for damage."""
        self.check(name, 0, self.layout.specs[name].shape[0])
        return self.array(name)

    def check(self, name: str, begins: NDArray[np.int64] | int, ends: NDArray[np.int64] | int) -> None:
        """Check blocks with rows [begin, end) of an array, for each pair, once. Raises DatasetError for damage."""
        if name in self._checked:
            return
        low, high, size = np.atleast_1d(begins), np.atleast_1d(ends), self.layout.row_bytes(name)
        is_nonempty = low < high
        if not size or not is_nonempty.any():
            return
        start = self.layout.offset(name)
        edges = np.bincount((start + low[is_nonempty] * size) // BLOCK_BYTES, minlength=self._is_checked.size + 1)
        edges -= np.bincount((start + high[is_nonempty] * size - 1) // BLOCK_BYTES + 1, minlength=edges.size)
        self._check_blocks(np.flatnonzero((np.cumsum(edges[:-1]) > 0) & ~self._is_checked))
        end = self.layout.offset(name, self.layout.specs[name].shape[0])
        if self._is_checked[start // BLOCK_BYTES : -(-end // BLOCK_BYTES)].all():
            self._checked.add(name)

    def check_rows(self, names: frozenset[str], rows: NDArray[np.int64]) -> None:
        """Check some rows of several arrays, as ``check`` does."""
        for name in names - self._checked:
            self.check(name, rows, rows + 1)

    def check_all(self, progress: Callable[[int], None] | None = None) -> None:
        """Check every block, also those checked before; ``progress`` is called with the bytes of each."""
        for block in range(self._is_checked.size):
            self._check_blocks(np.array([block]))
            if progress is not None:
                progress(BLOCK_BYTES)

    def prefetch(self) -> None:
        """Ask the kernel to read the file ahead; returns at once."""
        self._map.madvise(mmap.MADV_WILLNEED)

    def _check_blocks(self, blocks: NDArray[np.int64]) -> None:
        for block in blocks.tolist():
            if _checksum(self._bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]) != self._sums[block]:
                raise self._damaged(f"the checksum of MiB {block} does not match")
            self._is_checked[block] = True

    def _damaged(self, why: str) -> DatasetError:
        return DatasetError(
            f"{self.label}{self.path} is not what was extracted ({why}): delete the dataset and extract it again"
        )


class ArrayFileWriter:
    """Writes the arrays of one file, piece by piece in any order and from any thread."""

    def __init__(self, path: Path, layout: ArrayLayout) -> None:
        self._layout = layout
        self._file = path.open("w+b", buffering=0)

    def write(self, name: str, row: int, values: NDArray[Any]) -> None:
        """Write rows of an array from ``row`` on. Raises OSError if the disk is full."""
        spec = self._layout.specs[name]
        data = bytes_of(np.ascontiguousarray(values, spec.dtype))
        write_cached(self._file.fileno(), data, len(self._layout.header) + self._layout.offset(name, row))

    def finish(self) -> str:
        """Write header and checksums, and return the digest of both. The file is complete, but not synced."""
        sums = np.empty(self._layout.num_blocks, np.uint64)
        block = np.empty(min(BLOCK_BYTES, self._layout.data_bytes), np.uint8)
        for index in range(sums.size):
            part = block[: min(BLOCK_BYTES, self._layout.data_bytes - index * BLOCK_BYTES)]
            os.preadv(self._file.fileno(), [part.data], len(self._layout.header) + index * BLOCK_BYTES)
            sums[index] = _checksum(part)
        write_cached(self._file.fileno(), memoryview(self._layout.header), 0)
        write_cached(self._file.fileno(), bytes_of(sums), len(self._layout.header) + self._layout.data_bytes)
        self._file.close()
        return _digest(self._layout, sums.tobytes())


def bytes_of(array: Any) -> memoryview:
    """Return the bytes of a C-contiguous array."""
    return memoryview(array.reshape(-1)).cast("B") if array.size else memoryview(b"")


def _header_entry(spec: ArraySpec, begin: int, end: int) -> dict[str, Any]:
    dtype = np.dtype(spec.dtype)
    code = "BOOL" if dtype.kind == "b" else f"{dtype.kind.upper()}{8 * dtype.itemsize}"
    return {"dtype": code, "shape": list(spec.shape), "data_offsets": [begin, end]}


def _checksum(data: NDArray[np.uint8]) -> int:
    return int(xxh64_strings(data, np.array([0, data.size]))[0])


def _digest(layout: ArrayLayout, sums: bytes) -> str:
    return hashlib.sha256(layout.header + sums).hexdigest()
