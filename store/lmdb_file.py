"""What LMDB's file holds, and whether it is whole: its trees read by ``pread``, without LMDB and without its map.

A map of a truncated file ends in SIGBUS. What the trees point at is checked to lie within the file. Layout of LMDB
0.9 (data version 1, 64-bit, little-endian), which its authors keep fixed:

    page    pgno 8 | pad 2 | flags 2 | lower 2 | upper 2 | places of nodes, 2 each ...
    meta    page, then magic 4 | version 4 | address 8 | map size 8 | free tree 48 | main tree 48 | last page 8 | txn 8
    tree    page size (free tree) 4 | flags 2 | depth 2 | branch, leaf, overflow pages, entries 8 each | root page 8
    node    size low 2 | size high 2 | flags 2 | key bytes 2 | key | value, or the page 8 where a large value begins
    large   page with the number of its pages 4 in place of lower and upper, then the value, over as many pages
    free    a value of the free tree: how many 8, then that many pages 8 each, falling; its key is a transaction 8
"""

from __future__ import annotations

import os
import struct
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from tiercache.store.direct_file import open_file
from tiercache.store.errors import CorruptStoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_NO_PAGE = (1 << 64) - 1
_PAGE, _LARGE_PAGE, _WORD = struct.Struct("<QHHHH"), struct.Struct("<QHHI"), struct.Struct("<Q")
_META = struct.Struct("<IIQQ")
_TREE = struct.Struct("<IHHQQQQQ")
_NODE = struct.Struct("<HHHH")
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 0x01, 0x02, 0x04, 0x08
_META_BYTES = _PAGE.size + _META.size + 2 * _TREE.size + 16
_PLAIN_KEYS, _INTEGER_KEYS = 0x00, 0x08
_LARGE = 0x01
_DEEPEST = 32


class Tree(NamedTuple):
    """One of the two trees of a root."""

    flags: int
    entries: int
    root: int


class Meta(NamedTuple):
    """One of the two roots of the file."""

    page_bytes: int
    free: Tree
    main: Tree
    last_page: int
    """What comes after it was never used: LMDB takes it where nothing is free."""
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
        return self._walk(meta, meta.main.root, _DEEPEST, set())

    def read(self, value: Value) -> bytes:
        """Return the bytes of a value. Raises OSError."""
        return os.pread(self.handle, value.size, value.offset)

    def check(self, meta: Meta) -> None:
        """Check that LMDB can write on: all values lie within the file, and no page that holds one is free.

        Raises CorruptStoreError.
        """
        held: set[int] = set()
        for tree, flags in ((meta.main, _PLAIN_KEYS), (meta.free, _INTEGER_KEYS)):
            if tree.flags != flags:
                raise self._corrupt(f"has a tree with flags {tree.flags:#06x}, not {flags:#06x}")
            count, before = 0, b""
            for value in self._walk(meta, tree.root, _DEEPEST, held):
                order = value.key[::-1] if flags == _INTEGER_KEYS else value.key
                if count and order <= before:
                    raise self._corrupt(f"has a tree whose entry {count} is out of order")
                count, before = count + 1, order
                if value.offset % meta.page_bytes == _PAGE.size:  # nodes begin further on
                    self._hold(held, self._large_pages(meta, value))
                if flags == _INTEGER_KEYS:
                    self._hold(held, self._free_pages(value))
            if count != tree.entries:
                raise self._corrupt(f"has a tree of {count:,} entries where its root counts {tree.entries:,}")
        if held and (min(held) < 2 or max(held) > meta.last_page):
            raise self._corrupt(f"uses pages {min(held)} to {max(held)}, not 2 to {meta.last_page} as its root says")

    def _hold(self, held: set[int], pages: Sequence[int]) -> None:
        """Add pages that are used, or free, to those that are."""
        size = len(held)
        held.update(pages)
        if len(held) != size + len(pages):
            raise self._corrupt("has a page that is used twice, or is used and free")

    def _large_pages(self, meta: Meta, value: Value) -> range:
        """Return the pages of a large value; LMDB frees as many as the first one says."""
        first, needed = value.offset // meta.page_bytes, -(-(_PAGE.size + value.size) // meta.page_bytes)
        number, _, flags, pages = _LARGE_PAGE.unpack(os.pread(self.handle, _PAGE.size, value.offset - _PAGE.size))
        if (number, flags, pages) != (first, _OVERFLOW, needed):
            raise self._corrupt(f"has something else where page {first} of a large value should be")
        return range(first, first + needed)

    def _free_pages(self, value: Value) -> list[int]:
        """Return the pages that an entry of the free tree lists."""
        data = self.read(value)
        words = [number for (number,) in _WORD.iter_unpack(data[: len(data) // _WORD.size * _WORD.size])]
        pages = words[1 : words[0] + 1] if words else []
        if len(value.key) != _WORD.size or not words or len(pages) != words[0]:
            raise self._corrupt("has a list of free pages that is not whole")
        if any(page <= after for page, after in pairwise(pages)):
            raise self._corrupt("has a list of free pages that is out of order")
        return pages

    def _meta(self, page: int, offset: int) -> Meta:
        data = os.pread(self.handle, _META_BYTES, offset)
        if len(data) < _META_BYTES:
            raise self._corrupt(f"has {self.size:,} bytes and not its two roots in them")
        magic, version, _, _ = _META.unpack_from(data, _PAGE.size)
        if magic != _MAGIC or not _PAGE.unpack_from(data)[2] & _META_PAGE:
            raise self._corrupt(f"has something else where root {page} should be")
        if version != _VERSION:
            raise self._corrupt(f"has LMDB's data version {version}, not {_VERSION}")
        at = _PAGE.size + _META.size
        free, main = _TREE.unpack_from(data, at), _TREE.unpack_from(data, at + _TREE.size)
        last_page, transaction = struct.unpack_from("<QQ", data, at + 2 * _TREE.size)
        if free[0] < 512 or free[0] & (free[0] - 1) or free[0] > 1 << 16:
            raise self._corrupt(f"has pages of {free[0]} bytes")
        if transaction and transaction % 2 != page:
            raise self._corrupt(f"has transaction {transaction} at root {page}, where LMDB does not put it")
        return Meta(
            page_bytes=free[0],
            free=Tree(free[1], free[6], free[7]),
            main=Tree(main[1], main[6], main[7]),
            last_page=last_page,
            transaction=transaction,
        )

    def _walk(self, meta: Meta, number: int, levels: int, seen: set[int]) -> Iterator[Value]:
        """Yield what stands below a page; ``seen`` are the pages of the tree so far, as one that loops has no end."""
        if number == _NO_PAGE:
            return
        if number in seen:
            raise self._corrupt(f"has a tree that comes to page {number} twice")
        seen.add(number)
        held_whole = number < self.size // meta.page_bytes
        page = os.pread(self.handle, meta.page_bytes, number * meta.page_bytes) if held_whole else b""
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
