"""Records in LMDB, read without LMDB: its tree by ``pread``, every value checked by the chain that HEAD ends."""

from __future__ import annotations

import os
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

import google_crc32c

from tiercache.store.files import open_file, read_at, replace_file, unreadable
from tiercache.store.records import RecordManifest
from tiercache.store.store_errors import CorruptStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tiercache.store.records import Link


_MAGIC, _VERSION = 0xBEEFC0DE, 1
_NO_PAGE = (1 << 64) - 1
_PAGE, _WORD = struct.Struct("<QHHHH"), struct.Struct("<Q")
_META = struct.Struct("<IIQQ")
_TREE = struct.Struct("<IHHQQQQQ")
_NODE = struct.Struct("<HHHH")
_BRANCH, _LEAF, _META_PAGE = 0x01, 0x02, 0x08
_META_BYTES = _PAGE.size + _META.size + 2 * _TREE.size + 16
_LARGE = 0x01
_DEEPEST = 32


class Meta(NamedTuple):
    """One of the two roots of the file."""

    page_bytes: int
    root: int
    """The page where the tree of values begins."""
    transaction: int


class Value(NamedTuple):
    """Where a value stands in the file."""

    key: bytes
    offset: int
    size: int


class LmdbFile:
    """A data file of LMDB, open for reading."""

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self.path = path
        self.handle = open_file(path)

    def close(self) -> None:
        """Close the file."""
        os.close(self.handle)

    @property
    def size(self) -> int:
        """Bytes of the file now."""
        return os.fstat(self.handle).st_size

    def metas(self) -> list[Meta]:
        """Return both roots, the newest first. Raises CorruptStoreError where one is not what LMDB writes."""
        first = self._meta(0, 0)
        found = [first, self._meta(1, first.page_bytes)]
        if found[1].page_bytes != first.page_bytes:
            raise self._corrupt(f"has roots with pages of {first.page_bytes} and of {found[1].page_bytes} bytes")
        return sorted(found, key=lambda meta: meta.transaction, reverse=True)

    def values(self, meta: Meta) -> Iterator[Value]:
        """Yield the places of all values, in the order of their keys. Raises CorruptStoreError."""
        return self._walk(meta, meta.root, _DEEPEST, set())

    def read(self, value: Value) -> bytes:
        """Return the bytes of a value. Raises OSError."""
        return read_at(self.handle, value.size, value.offset)

    def _meta(self, page: int, offset: int) -> Meta:
        data = read_at(self.handle, _META_BYTES, offset)
        if len(data) < _META_BYTES:
            raise self._corrupt(f"has {self.size:,} bytes and not its two roots in them")
        magic, version, _, _ = _META.unpack_from(data, _PAGE.size)
        if magic != _MAGIC or not _PAGE.unpack_from(data)[2] & _META_PAGE:
            raise self._corrupt(f"has something else where root {page} should be")
        if version != _VERSION:
            raise self._corrupt(f"has LMDB's data version {version}, not {_VERSION}")
        at = _PAGE.size + _META.size
        free, main = _TREE.unpack_from(data, at), _TREE.unpack_from(data, at + _TREE.size)
        (transaction,) = _WORD.unpack_from(data, at + 2 * _TREE.size + 8)
        if free[0] < 512 or free[0] & (free[0] - 1) or free[0] > 1 << 16:
            raise self._corrupt(f"has pages of {free[0]} bytes")
        if transaction and transaction % 2 != page:
            raise self._corrupt(f"has transaction {transaction} at root {page}, where LMDB does not put it")
        return Meta(page_bytes=free[0], root=main[7], transaction=transaction)

    def _walk(self, meta: Meta, number: int, levels: int, seen: set[int]) -> Iterator[Value]:
        """Yield what stands below a page; ``seen`` are the pages of the tree so far, as one that loops has no end."""
        if number == _NO_PAGE:
            return
        if number in seen:
            raise self._corrupt(f"has a tree that comes to page {number} twice")
        seen.add(number)
        is_whole = number < self.size // meta.page_bytes
        page = read_at(self.handle, meta.page_bytes, number * meta.page_bytes) if is_whole else b""
        if len(page) < meta.page_bytes:
            raise self._corrupt(f"ends at byte {self.size:,}, before page {number} that its root needs")
        page_number, _, flags, lower, _ = _PAGE.unpack_from(page)
        if page_number != number or not _PAGE.size <= lower <= meta.page_bytes or levels == 0:
            raise self._corrupt(f"has something else where page {number} of its tree should be")
        for at in struct.unpack_from(f"<{(lower - _PAGE.size) // 2}H", page, _PAGE.size):
            low, high, node_flags, key_bytes = self._node(page, number, at)
            if flags & _BRANCH:
                yield from self._walk(meta, low | high << 16 | node_flags << 32, levels - 1, seen)
            elif flags & _LEAF:
                key, value = page[at + _NODE.size : at + _NODE.size + key_bytes], at + _NODE.size + key_bytes
                size, offset = low | high << 16, number * meta.page_bytes + value
                if node_flags & ~_LARGE:
                    raise self._corrupt(f"has a node with flags {node_flags:#06x} in page {number}")
                if node_flags & _LARGE:
                    if value + 8 > meta.page_bytes:
                        raise self._corrupt(f"has a node beyond the end of page {number}")
                    offset = _WORD.unpack_from(page, value)[0] * meta.page_bytes + _PAGE.size
                if offset + size > self.size:
                    raise self._corrupt(f"ends at byte {self.size:,} of {offset + size:,} that its root needs")
                yield Value(key, offset, size)
            else:
                raise self._corrupt(f"has something else where page {number} of its tree should be")

    def _node(self, page: bytes, number: int, at: int) -> tuple[int, int, int, int]:
        if at + _NODE.size > len(page):
            raise self._corrupt(f"has a node beyond the end of page {number}")
        node: tuple[int, int, int, int] = _NODE.unpack_from(page, at)
        if at + _NODE.size + node[3] > len(page):
            raise self._corrupt(f"has a node beyond the end of page {number}")
        return node

    def _corrupt(self, seen: str) -> CorruptStoreError:
        return CorruptStoreError(f"{self.path} {seen}: restore the store from a copy")


HEAD = "HEAD"
_HEAD_MAGIC = b"tc head\n"
_SLOT = struct.Struct("<8sQ32s")
_CHECKSUM = struct.Struct("<I")
_SLOT_BYTES = 4096


class Head(NamedTuple):
    """The newest manifest whose commit was reported durable."""

    number: int
    digest: str
    """SHA-256, as hexadecimal digits."""

    @classmethod
    def of(cls, manifest: RecordManifest) -> Head:
        """Return what names a manifest."""
        return cls(manifest.number, manifest.digest)

    @classmethod
    def read(cls, folder: Path) -> Head:
        """Return the newest that is whole. Raises CorruptStoreError where none is, and OSError."""
        path = folder / HEAD
        handle = open_file(path)
        try:
            slots = [read_at(handle, _SLOT.size + _CHECKSUM.size, at) for at in (0, _SLOT_BYTES)]
        finally:
            os.close(handle)
        found = [cls(number, digest.hex()) for number, digest in (_unpack(slot) for slot in slots) if number]
        if not found:
            raise CorruptStoreError(f"{path} is damaged (no part of it is whole): restore the store from a copy")
        return max(found)

    def create(self, folder: Path) -> None:
        """Write a new file, whole or not at all; durable on return. Raises OSError."""
        slots = bytearray(2 * _SLOT_BYTES)
        slots[self._place : self._place + _SLOT.size + _CHECKSUM.size] = self._pack()
        replace_file(folder / HEAD, bytes(slots), suffix=".new", mode=0o644)

    def write(self, folder: Path) -> None:
        """Overwrite the older slot; durable on return. Raises OSError."""
        handle = open_file(folder / HEAD, os.O_WRONLY)
        try:
            os.pwrite(handle, self._pack(), self._place)
            os.fdatasync(handle)
        finally:
            os.close(handle)

    def allows(self, manifest: RecordManifest) -> bool:
        """Whether LMDB may show a manifest: the one that is named here, or the one that was made after it."""
        if manifest.number == self.number:
            return manifest.digest == self.digest
        return manifest.number == self.number + 1 and manifest.before == self.digest

    @property
    def _place(self) -> int:
        return self.number % 2 * _SLOT_BYTES

    def _pack(self) -> bytes:
        slot = _SLOT.pack(_HEAD_MAGIC, self.number, bytes.fromhex(self.digest))
        return slot + _CHECKSUM.pack(google_crc32c.value(slot))


def _unpack(slot: bytes) -> tuple[int, bytes]:
    """Return number and digest; 0 for a slot that is not whole."""
    if len(slot) < _SLOT.size + _CHECKSUM.size or slot[: len(_HEAD_MAGIC)] != _HEAD_MAGIC:
        return 0, b""
    if _CHECKSUM.unpack_from(slot, _SLOT.size) != (google_crc32c.value(slot[: _SLOT.size]),):
        return 0, b""
    _, number, digest = _SLOT.unpack_from(slot)
    return number, digest


DATA, MANIFEST_KEY = "data.mdb", "manifest"
PART_BYTES = 1 << 30
"""A record with more bytes is several values, as LMDB's have at most 4 GiB; the format says where it is cut."""
_TRIES, _PAUSE_SECONDS = 50, 0.002
"""How often a writer may go on while its records are read."""


class LmdbRecords(NamedTuple):
    """What one reading found."""

    head: Head
    manifest: RecordManifest
    records: dict[str, bytes]

    @classmethod
    def read(cls, folder: Path, label: str) -> LmdbRecords:
        """Read the newest records; a writer may go on meanwhile. Raises CorruptStoreError and StoreError."""
        for tries in range(_TRIES + 1):
            if tries:
                time.sleep(_PAUSE_SECONDS)
            before = read_head(folder)
            try:
                return cls(before, *_read(folder, label, before))
            except CorruptStoreError:
                if tries and (read_head(folder) == before or tries == _TRIES):
                    raise
        raise AssertionError


def read_head(folder: Path) -> Head:
    """Return what HEAD names. Raises CorruptStoreError and StoreError."""
    try:
        return Head.read(folder)
    except OSError as error:
        raise unreadable(folder / HEAD, error) from error


def record_keys(name: str, size: int) -> Iterator[bytes]:
    """Yield the keys of the values that a record of ``size`` bytes is kept in."""
    yield name.encode()
    for part in range(1, -(-size // PART_BYTES)):
        yield f"{name}\0{part}".encode()


def split_record(name: str, data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the keys and the values that a record is kept in."""
    view = memoryview(data)
    for part, key in enumerate(record_keys(name, len(data))):
        yield key, view[part * PART_BYTES : (part + 1) * PART_BYTES]


def join_record(name: str, size: int, get: Callable[[bytes], bytes | None]) -> bytes | None:
    """Return a record from the values that ``get`` returns; None if one is missing."""
    parts = []
    for key in record_keys(name, size):
        if (part := get(key)) is None:
            return None
        parts.append(part)
    return b"".join(parts)


def _read(folder: Path, label: str, head: Head) -> tuple[RecordManifest, dict[str, bytes]]:
    path = folder / DATA
    try:
        file = LmdbFile(str(path))
        try:
            meta = file.metas()[0]
            places = {value.key: value for value in file.values(meta)}
            if MANIFEST_KEY.encode() not in places:
                raise CorruptStoreError(f"{path} has no manifest: restore the store from a copy")
            manifest = RecordManifest.from_bytes(file.read(places[MANIFEST_KEY.encode()]), f"the manifest of {label}")
            if not head.allows(manifest):
                raise CorruptStoreError(
                    f"{path} is damaged: it shows manifest {manifest.number}, {HEAD} names {head.number}, and it is "
                    "not what was written: restore the store from a copy"
                )

            def get(name: str, link: Link) -> bytes | None:
                return join_record(name, link.size, lambda key: file.read(places[key]) if key in places else None)

            return manifest, manifest.read(get, label)
        finally:
            file.close()
    except OSError as error:
        raise unreadable(path, error) from error
