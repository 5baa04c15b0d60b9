"""Blobs and heads of stores of both engines, from docs/format alone: without tiercache code or Zarr."""

import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import google_crc32c
import lmdb
import numpy as np

from tests.store.independent_format import PAGE_BYTES, Layout, field_bytes, paged, read_record

CHUNK_BYTES = 64 << 20
"""The maximum bytes of a Zarr chunk with more than one block, and of an object with a part of another blob."""
NUMBERS = {"keys": "<i8", "changed": "<u4"}


def read_entry(name: bytes, entry: bytes) -> tuple[int, int, list[tuple[int, int]]]:
    """Return the size of a blob in LMDB's map, its dropped bytes, and its extents (offset, bytes)."""
    assert google_crc32c.value(name + entry[:-4]) == struct.unpack("<I", entry[-4:])[0]
    size, dropped, *numbers = struct.unpack(f"<{len(entry) // 8}q", entry[:-4])
    extents = list(zip(numbers[::2], numbers[1::2], strict=True))
    assert not any(offset % PAGE_BYTES or count % PAGE_BYTES for offset, count in extents)
    return size, dropped, extents


class Files(Protocol):
    """Blobs and the head of a store."""

    head: tuple[str, int, str]
    """Name, bytes and digest of the newest commit's blob."""

    def blob(self, name: str, size: int) -> bytes:
        """Return a whole blob other than rows, keys or last changes."""

    def rows(self, segment: str, group: int, layout: Layout, block: int) -> bytes:
        """Return the field-major pages of a block."""

    def numbers(self, segment: str, group: int, layout: Layout, block: int, kind: str) -> bytes:
        """Return the keys or the last changes of a block."""


class LmdbFiles:
    """A store in LMDB."""

    def __init__(self, path: Path) -> None:
        with lmdb.open(str(path), readonly=True, lock=False) as env, env.begin() as txn:
            entries = {bytes(key): bytes(value) for key, value in txn.cursor()}
        values, _ = read_record("head", entries.pop(b"head"))
        self.head = values["name"], values["size"], values["digest"]
        self._map = {name.decode(): read_entry(name, entry) for name, entry in entries.items()}
        sums = [struct.unpack("<I", entry[-4:])[0] for entry in entries.values()]
        assert (values["blobs"], values["checksums"]) == (len(sums), sum(sums))
        slots = [(path / "HEAD").read_bytes()[at : at + 52] for at in (0, PAGE_BYTES)]
        whole = [slot for slot in slots if struct.unpack("<I", slot[48:])[0] == google_crc32c.value(slot[:48])]
        magic, number, digest = max((struct.unpack("<8sQ32s", slot[:48]) for slot in whole), key=lambda slot: slot[1])
        successor = values["number"] == number + 1 and values["before"] == digest.hex()
        assert magic == b"tc head\n"
        assert successor or (values["number"], values["digest"]) == (number, digest.hex())
        self._data = (path / "blocks.bin").read_bytes()

    def blob(self, name: str, size: int) -> bytes:
        assert self._map[name][0] == size
        return self._read(name, 0, size)

    def _read(self, name: str, offset: int, size: int) -> bytes:
        """Return bytes of a blob, from one extent or more."""
        blob_bytes, at, extents = self._map[name]
        assert at <= offset <= offset + size <= blob_bytes
        found = b""
        for low, count in extents:
            first, last = max(at, offset), min(at + count, offset + size)
            if first < last:
                found += self._data[low + first - at : low + last - at]
            at += count
        assert len(found) == size
        return found

    def rows(self, segment: str, group: int, layout: Layout, block: int) -> bytes:
        """Return the field-major pages of a block."""
        return self._block(f"{segment}/{group}/rows", layout, block, layout.row_bytes)

    def numbers(self, segment: str, group: int, layout: Layout, block: int, kind: str) -> bytes:
        """Return the keys or the last changes of a block."""
        return self._block(f"{segment}/{group}/{kind}", layout, block, np.dtype(NUMBERS[kind]).itemsize)

    def _block(self, name: str, layout: Layout, block: int, item_bytes: int) -> bytes:
        first, last = layout.block(block)
        return self._read(name, block * paged(layout.block_rows * item_bytes), (last - first) * item_bytes)


class ZarrFiles:
    """A store in uncompressed Zarr arrays."""

    def __init__(self, path: Path) -> None:
        self._path = path
        newest = max((f for f in (path / "heads").iterdir() if f.name.isdecimal()), key=lambda f: int(f.name))
        values, _ = read_record("head", newest.read_bytes())
        assert values["number"] == int(newest.name)
        self.head = values["name"], values["size"], values["digest"]

    def blob(self, name: str, size: int) -> bytes:
        """Return a whole blob, from one object or several."""
        parts = range(max(1, -(-size // CHUNK_BYTES)))
        data = b"".join((self._path / (f"{name}.{part}" if part else name)).read_bytes() for part in parts)
        assert len(data) == size
        return data

    def rows(self, segment: str, group: int, layout: Layout, block: int) -> bytes:
        """Return the field-major pages of a block, assembled from its fields."""
        fields = [
            (self._rows(f"{segment}/{group}/{name}", ".0", layout, block, field_bytes(width, dtype)), width, dtype)
            for name, width, dtype in layout.fields
        ]
        (low, high), pages = layout.block(block), layout.pages()
        inside = [row - low for row in pages if low <= row <= high]
        return b"".join(
            data[a * field_bytes(width, dtype) : b * field_bytes(width, dtype)]
            for a, b in pairwise(inside)
            for data, width, dtype in fields
        )

    def numbers(self, segment: str, group: int, layout: Layout, block: int, kind: str) -> bytes:
        """Return the keys or the last changes of a block."""
        return self._rows(f"{segment}/{group}/{kind}", "", layout, block, np.dtype(NUMBERS[kind]).itemsize)

    def _rows(self, array: str, suffix: str, layout: Layout, block: int, item_bytes: int) -> bytes:
        """Return the bytes of a block in one array, whose chunks have whole blocks."""
        blocks = max(1, CHUNK_BYTES // (layout.block_rows * item_bytes))
        chunk_rows = min(blocks * layout.block_rows, layout.rows)
        chunk, at = divmod(block * layout.block_rows, chunk_rows)
        data = (self._path / f"{array}/c.{chunk}{suffix}").read_bytes()
        assert len(data) == chunk_rows * item_bytes
        first, last = layout.block(block)
        return data[at * item_bytes : (at + last - first) * item_bytes]


def files_of(path: Path, kind: str = "tiercache store") -> Files:
    """Return the blobs of a store, of rank 0 if it has several."""
    marker = json.loads((path / "store.json").read_text())
    assert (marker["format"], marker["version"]) == (kind, 5)
    assert marker["engine"] in {"lmdb", "zarr"}
    return LmdbFiles(path) if marker["engine"] == "lmdb" else ZarrFiles(path)


def rank_files(path: Path, folder: str, rank: int) -> Files:
    """Return the blobs of a rank above 0 of a store, in the folder that a commit names."""
    ours, marker = (json.loads((place / "store.json").read_text()) for place in (path, path / folder))
    assert (marker["store"], marker["rank"], marker["engine"]) == (ours["id"], rank, ours["engine"])
    assert Path(folder).name == f"rank-{rank}"
    return files_of(path / folder, "tiercache rank")
