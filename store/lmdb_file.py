"""What LMDB's file holds: its tree of values read by ``pread``, without LMDB and without its map.

A map of a truncated file ends in SIGBUS. What the trees point at is checked to lie within the file. Layout of LMDB
0.9 (data version 1, 64-bit, little-endian), which its authors keep fixed:

    page    pgno 8 | pad 2 | flags 2 | lower 2 | upper 2 | places of nodes, 2 each ...
    meta    page, then magic 4 | version 4 | address 8 | map size 8 | free tree 48 | main tree 48 | last page 8 | txn 8
    tree    page size (free tree) 4 | flags 2 | depth 2 | branch, leaf, overflow pages, entries 8 each | root page 8
    node    size low 2 | size high 2 | flags 2 | key bytes 2 | key | value, or the page 8 where a large value begins
    large   page, then the value, over as many pages as it needs
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, NamedTuple

from tiercache.store.direct_file import open_file, read_at
from tiercache.store.errors import CorruptStoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        held_whole = number < self.size // meta.page_bytes
        page = read_at(self.handle, meta.page_bytes, number * meta.page_bytes) if held_whole else b""
        if len(page) < meta.page_bytes:
            raise self._corrupt(f"ends at byte {self.size:,}, before page {number} that its root needs")
        held, _, flags, lower, _ = _PAGE.unpack_from(page)
        if held != number or not _PAGE.size <= lower <= meta.page_bytes or levels == 0:
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
