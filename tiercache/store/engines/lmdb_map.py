"""The head and the map of blobs in LMDB's file, read without LMDB, and HEAD, which names the newest head.

The file (LMDB 0.9, data version 1) is read by ``pread``, never mapped. Its pages have no checksum, so every value has
one, and the head has the number and the sum of the others'.
"""

from __future__ import annotations

import os
import struct
import time
from bisect import bisect_right
from contextlib import closing, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import google_crc32c

from tiercache.store.engines.block_file import Extents
from tiercache.store.engines.engine import HeadRecord
from tiercache.store.files import PAGE_BYTES, open_file, paged, read_at, replace_file, unreadable
from tiercache.store.store_errors import BlockReadError, CorruptStoreError, damaged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

T = TypeVar("T")

HEAD, DATA, HEAD_KEY = "HEAD", "data.mdb", "head"
NOTHING = "0" * 64
"""The digest of the head before the first."""
_SLOT_MAGIC = b"tc head\n"
_SLOT = struct.Struct("<8sQ32s")
_CHECKSUM = struct.Struct("<I")
_MOST_BYTES = 1 << 61
_SLOT_BYTES = 4096


class Slot(NamedTuple):
    """The contents of HEAD: the newest publish that was reported durable."""

    number: int
    """Counts the publishes; 0 before the first."""
    digest: str
    """The digest of the head, in hexadecimal; NOTHING before the first publish."""

    @classmethod
    def of(cls, record: HeadRecord | None) -> Slot:
        """Return the slot of a head; None is before the first."""
        return cls(0, NOTHING) if record is None or record.head is None else cls(record.number, record.head.digest)

    @classmethod
    def read(cls, folder: Path) -> Slot:
        """Return the newest whole slot. Raises CorruptStoreError if none is whole, and StoreError."""
        path = folder / HEAD
        try:
            handle = open_file(path)
            try:
                slots = [read_at(handle, _SLOT.size + _CHECKSUM.size, at) for at in (0, _SLOT_BYTES)]
            finally:
                os.close(handle)
        except OSError as error:
            raise unreadable(path, error) from error
        found = [slot for slot in map(cls._unpack, slots) if slot is not None]
        if not found:
            raise damaged(f"{path} is damaged (no part of it is intact)")
        return max(found)

    def create(self, folder: Path) -> None:
        """Write a new file, whole or not at all; durable on return. Raises OSError."""
        slots, at = bytearray(2 * _SLOT_BYTES), self.number % 2 * _SLOT_BYTES
        slots[at : at + _SLOT.size + _CHECKSUM.size] = self.to_bytes()
        replace_file(folder / HEAD, bytes(slots), suffix=".new", mode=0o644)

    def write(self, folder: Path, *, other: bool = False) -> None:
        """Overwrite the older slot, durably; then ``other``: the other one, without waiting, in case the first rots."""
        handle = open_file(folder / HEAD, os.O_WRONLY)
        try:
            os.pwrite(handle, self.to_bytes(), (self.number + other) % 2 * _SLOT_BYTES)
            if not other:
                os.fdatasync(handle)
        finally:
            os.close(handle)

    def allows(self, record: HeadRecord) -> bool:
        """Return True if ``record`` is the head named here, or the one published after it."""
        if record.number == self.number:
            return Slot.of(record) == self
        return record.number == self.number + 1 and record.before == self.digest

    def to_bytes(self) -> bytes:
        """Return the slot's bytes."""
        slot = _SLOT.pack(_SLOT_MAGIC, self.number, bytes.fromhex(self.digest))
        return slot + _CHECKSUM.pack(google_crc32c.value(slot))

    @classmethod
    def _unpack(cls, slot: bytes) -> Slot | None:
        body = slot[: _SLOT.size]
        if body[: len(_SLOT_MAGIC)] != _SLOT_MAGIC or slot[_SLOT.size :] != _CHECKSUM.pack(google_crc32c.value(body)):
            return None
        _, number, digest = _SLOT.unpack(body)
        return cls(number, digest.hex())


def entry_of(name: str, extents: Extents) -> bytes:
    """Return the value of a blob in the map."""
    numbers = [extents.size, extents.dropped, *(number for run in extents.runs for number in run)]
    value = struct.pack(f"<{len(numbers)}q", *numbers)
    return value + _CHECKSUM.pack(google_crc32c.extend(google_crc32c.value(name.encode()), value))


def checksum_of(entry: bytes) -> int:
    """Return the checksum in an entry."""
    return int.from_bytes(entry[-_CHECKSUM.size :], "little")


@lru_cache(maxsize=1024)
def extents_of(entry: bytes) -> Extents:
    """Return the runs in a checked entry."""
    numbers = struct.unpack_from(f"<{len(entry) // 8}q", entry)
    return Extents(numbers[0], numbers[1], tuple(zip(numbers[2::2], numbers[3::2], strict=True)))


def _check_entry(name: str, entry: bytes) -> None:
    body = entry[: -_CHECKSUM.size]
    is_whole = len(body) >= 16 and len(body) % 16 == 0
    if is_whole and google_crc32c.extend(google_crc32c.value(name.encode()), body) == checksum_of(entry):
        size, dropped, runs = (extents := extents_of(entry)).size, extents.dropped, extents.runs
        is_whole = 0 <= dropped <= size and (dropped == size or dropped % PAGE_BYTES == 0)
        is_whole &= sum(count for _, count in runs) == (paged(size) - dropped if dropped < size else 0)
        if is_whole and all(
            0 <= low <= _MOST_BYTES and 0 < count <= _MOST_BYTES and (low | count) % PAGE_BYTES == 0
            for low, count in runs
        ):
            return
    raise damaged(f"the entry of blob {name[:99]!r} in {DATA} is not what was written")


_TRIES, _PAUSE_SECONDS = 50, 0.002
"""Retries if a writer commits while its tree is read, and the pause between tries."""


def read_head(folder: Path, label: str) -> tuple[Slot, HeadRecord | None]:
    """Return HEAD and the newest head, None before the first. Raises CorruptStoreError and StoreError."""
    return _look(folder, lambda slot, file: (slot, None if file is None else _head(slot, file, label)))


def read_map(folder: Path, label: str) -> tuple[Slot, HeadRecord | None, dict[str, bytes]]:
    """Return the same as ``read_head``, and all entries by name, checked. Raises CorruptStoreError and StoreError."""

    def look(slot: Slot, file: LmdbFile | None) -> tuple[Slot, HeadRecord | None, dict[str, bytes]]:
        if file is None:
            return slot, None, {}
        record = _head(slot, file, label)
        found = {value.key.decode(errors="replace"): file.read(value) for value in file.values()}
        found.pop(HEAD_KEY, None)
        if (len(found), sum(map(checksum_of, found.values()))) != (record.blobs, record.checksums):
            raise damaged(
                f"the map in {file.path} has {len(found):,} blobs and is not the one with {record.blobs:,} that was "
                "written"
            )
        for name, entry in found.items():
            _check_entry(name, entry)
        return slot, record, found

    return _look(folder, look)


def read_entries(folder: Path, name: str) -> dict[str, bytes]:
    """Return the entries of a blob and of others in its page. Raises BlockReadError, CorruptStoreError, StoreError."""

    def look(_slot: Slot, file: LmdbFile | None) -> dict[str, bytes]:
        values = [] if file is None else file.near(name.encode())
        found = {value.key.decode(errors="replace"): value for value in values}
        if file is None or name not in found:
            raise BlockReadError("is missing")
        entries = {name: file.read(found[name])}
        _check_entry(name, entries[name])
        for key, value in found.items():
            if value.data is not None and key != HEAD_KEY:
                with suppress(CorruptStoreError):  # a damaged entry fails only the reads of its blob
                    _check_entry(key, value.data)
                    entries[key] = value.data
        return entries

    return _look(folder, look)


def _look(folder: Path, look: Callable[[Slot, LmdbFile | None], T]) -> T:
    """Call ``look``, again if it found damage and a writer committed; without a file before the first publish."""
    path = folder / DATA
    for tries in range(_TRIES + 1):
        if tries:
            time.sleep(_PAUSE_SECONDS)
        slot = Slot.read(folder)
        try:
            with closing(LmdbFile(str(path))) as file:
                return look(slot, file)
        except FileNotFoundError as error:
            if not slot.number:
                return look(slot, None)
            raise unreadable(path, error) from error
        except OSError as error:
            raise unreadable(path, error) from error
        except CorruptStoreError:
            if tries and (Slot.read(folder) == slot or tries == _TRIES):
                raise
    raise AssertionError


def _head(slot: Slot, file: LmdbFile, label: str) -> HeadRecord:
    value = file.find(HEAD_KEY.encode())
    if value is None:
        raise damaged(f"{file.path} has no head")
    record = HeadRecord.from_bytes(file.read(value), f"the head of {label}")
    if record.head is None:
        raise damaged(f"the head of {label} names no commit")
    if not slot.allows(record):
        raise damaged(
            f"{file.path} is damaged: it shows publish {record.number}, {HEAD} names {slot.number}, and it is not what "
            "was written"
        )
    return record


# -- LMDB's tree -----------------------------------------------------------------------------------------

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


class Value(NamedTuple):
    """The place of a value in the file."""

    key: bytes
    offset: int
    size: int
    data: bytes | None = None
    """The value itself if it is stored in its leaf page."""


class _TreePage(NamedTuple):
    """A page of the tree."""

    number: int
    data: bytes
    nodes: tuple[int, ...]
    """Offset of each node in the page, in key order."""
    is_branch: bool

    def key(self, at: int) -> bytes:
        """Return the key of the node at an offset."""
        return self.data[at + _NODE.size : at + _NODE.size + _NODE.unpack_from(self.data, at)[3]]


class LmdbFile:
    """A data file of LMDB, open for reading at the newest of its two roots. All methods raise CorruptStoreError."""

    def __init__(self, path: str) -> None:
        """Raises OSError too."""
        self.path = path
        self.handle = open_file(path)
        try:
            first = self._root(0, 0)
            second = self._root(1, first[0])
            if second[0] != first[0]:
                raise self._corrupt(f"has roots with pages of {first[0]} and of {second[0]} bytes")
            self.page_bytes, self.transaction, self.root = max(first, second, key=lambda root: root[1])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self.handle)

    @property
    def size(self) -> int:
        """The current size of the file."""
        return os.fstat(self.handle).st_size

    def values(self) -> Iterator[Value]:
        """Yield the places of all values, in the order of their keys."""
        return self._walk(self.root, _DEEPEST, set())

    def find(self, key: bytes) -> Value | None:
        """Return the place of the value of a key, or None."""
        return next((value for value in self.near(key) if value.key == key), None)

    def near(self, key: bytes) -> list[Value]:
        """Return the places of the values in the page of a key, without damaged ones of other keys."""
        number, found = self.root, list[Value]()
        for levels in range(_DEEPEST, -1, -1):
            if number == _NO_PAGE:
                break
            page = self._page(number, levels)
            if not page.is_branch or not page.nodes:
                for at in page.nodes:
                    try:
                        found.append(self._value(page, at))
                    except CorruptStoreError:
                        if page.key(at) == key:
                            raise
                break
            number = self._below(page, page.nodes[bisect_right(page.nodes, key, lo=1, key=page.key) - 1])
        return found

    def read(self, value: Value) -> bytes:
        """Return the bytes of a value. Raises OSError."""
        return read_at(self.handle, value.size, value.offset) if value.data is None else value.data

    def _root(self, page: int, offset: int) -> tuple[int, int, int]:
        """Return the bytes of a page, the transaction, and the root page of the tree of values."""
        data = read_at(self.handle, _META_BYTES, offset)
        if len(data) < _META_BYTES:
            raise self._corrupt(f"has {self.size:,} bytes and not its two roots in them")
        magic, version, _, _ = _META.unpack_from(data, _PAGE.size)
        if magic != _MAGIC or not _PAGE.unpack_from(data)[2] & _META_PAGE:
            raise self._corrupt(f"has something else where root {page} should be")
        if version != _VERSION:
            raise self._corrupt(f"has LMDB's data version {version}, not {_VERSION}")
        at = _PAGE.size + _META.size
        page_bytes, main = _TREE.unpack_from(data, at)[0], _TREE.unpack_from(data, at + _TREE.size)
        (transaction,) = _WORD.unpack_from(data, at + 2 * _TREE.size + 8)
        if page_bytes < 512 or page_bytes & (page_bytes - 1) or page_bytes > 1 << 16:
            raise self._corrupt(f"has pages of {page_bytes} bytes")
        if transaction and transaction % 2 != page:
            raise self._corrupt(f"has transaction {transaction} at root {page}, where LMDB does not put it")
        return page_bytes, transaction, main[7]

    def _walk(self, number: int, levels: int, seen: set[int]) -> Iterator[Value]:
        """Yield the values below a page; ``seen`` are the pages of the tree so far, to detect loops."""
        if number == _NO_PAGE:
            return
        if number in seen:
            raise self._corrupt(f"has a tree that reaches page {number} twice")
        seen.add(number)
        page = self._page(number, levels)
        for at in page.nodes:
            if page.is_branch:
                yield from self._walk(self._below(page, at), levels - 1, seen)
            else:
                yield self._value(page, at)

    def _page(self, number: int, levels: int) -> _TreePage:
        is_whole = number < self.size // self.page_bytes
        data = read_at(self.handle, self.page_bytes, number * self.page_bytes) if is_whole else b""
        if len(data) < self.page_bytes:
            raise self._corrupt(f"ends at byte {self.size:,}, before page {number} that its root needs")
        page_number, _, flags, lower, _ = _PAGE.unpack_from(data)
        misplaced = page_number != number or not _PAGE.size <= lower <= self.page_bytes
        if misplaced or levels == 0 or not flags & (_BRANCH | _LEAF):
            raise self._corrupt(f"has something else where page {number} of its tree should be")
        nodes = struct.unpack_from(f"<{(lower - _PAGE.size) // 2}H", data, _PAGE.size)
        if max(nodes, default=0) + _NODE.size > len(data):
            raise self._corrupt(f"has a node beyond the end of page {number}")
        return _TreePage(number, data, nodes, is_branch=flags & _BRANCH > 0)

    def _below(self, page: _TreePage, at: int) -> int:
        low, high, flags, key_bytes = _NODE.unpack_from(page.data, at)
        if at + _NODE.size + key_bytes > self.page_bytes:
            raise self._corrupt(f"has a node beyond the end of page {page.number}")
        return int(low | high << 16 | flags << 32)

    def _value(self, page: _TreePage, at: int) -> Value:
        low, high, flags, key_bytes = _NODE.unpack_from(page.data, at)
        begin, size = at + _NODE.size + key_bytes, low | high << 16
        if begin + (8 if flags & _LARGE else size) > self.page_bytes:
            raise self._corrupt(f"has a node beyond the end of page {page.number}")
        if flags & ~_LARGE:
            raise self._corrupt(f"has a node with flags {flags:#06x} in page {page.number}")
        if not flags:
            data = page.data[begin : begin + size]
            return Value(page.key(at), page.number * self.page_bytes + begin, size, data)
        offset = _WORD.unpack_from(page.data, begin)[0] * self.page_bytes + _PAGE.size
        if offset + size > self.size:
            raise self._corrupt(f"ends at byte {self.size:,} of {offset + size:,} that its root needs")
        return Value(page.key(at), offset, size)

    def _corrupt(self, seen: str) -> CorruptStoreError:
        return damaged(f"{self.path} {seen}")
