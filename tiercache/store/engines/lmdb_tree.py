"""The tree of an LMDB file (0.9, data version 1), read by ``pread``: without LMDB, and without mapping it."""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from tiercache.store.files import open_file, read_at
from tiercache.store.store_errors import CorruptStoreError

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
        """Return the key of the node that begins there."""
        return self.data[at + _NODE.size : at + _NODE.size + _NODE.unpack_from(self.data, at)[3]]


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

    def find(self, meta: Meta, key: bytes) -> Value | None:
        """Return the place of the value of a key, or None. Raises CorruptStoreError."""
        return next((value for value in self.near(meta, key) if value.key == key), None)

    def near(self, meta: Meta, key: bytes) -> list[Value]:
        """Return the places of the values in the page of a key, without damaged ones. Raises CorruptStoreError."""
        number, found = meta.root, list[Value]()
        for levels in range(_DEEPEST, -1, -1):
            if number == _NO_PAGE:
                break
            page = self._page(meta, number, levels)
            if not page.is_branch or not page.nodes:
                for at in page.nodes:
                    try:
                        node = self._node(meta, page, at)
                    except CorruptStoreError:
                        if page.key(at) == key:
                            raise
                        continue
                    assert isinstance(node, Value), "a leaf has values"
                    found.append(node)
                break
            at = bisect_right(page.nodes, key, lo=1, key=page.key) - 1  # the first key of a branch is none
            below = self._node(meta, page, page.nodes[at])
            assert isinstance(below, int), "a branch has pages"
            number = below
        return found

    def read(self, value: Value) -> bytes:
        """Return the bytes of a value. Raises OSError."""
        return read_at(self.handle, value.size, value.offset) if value.data is None else value.data

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
        page = self._page(meta, number, levels)
        for at in page.nodes:
            node = self._node(meta, page, at)
            if isinstance(node, Value):
                yield node
            else:
                yield from self._walk(meta, node, levels - 1, seen)

    def _page(self, meta: Meta, number: int, levels: int) -> _TreePage:
        is_whole = number < self.size // meta.page_bytes
        data = read_at(self.handle, meta.page_bytes, number * meta.page_bytes) if is_whole else b""
        if len(data) < meta.page_bytes:
            raise self._corrupt(f"ends at byte {self.size:,}, before page {number} that its root needs")
        page_number, _, flags, lower, _ = _PAGE.unpack_from(data)
        misplaced = page_number != number or not _PAGE.size <= lower <= meta.page_bytes
        if misplaced or levels == 0 or not flags & (_BRANCH | _LEAF):
            raise self._corrupt(f"has something else where page {number} of its tree should be")
        nodes = struct.unpack_from(f"<{(lower - _PAGE.size) // 2}H", data, _PAGE.size)
        if max(nodes, default=0) + _NODE.size > len(data):
            raise self._corrupt(f"has a node beyond the end of page {number}")
        return _TreePage(number, data, nodes, is_branch=flags & _BRANCH > 0)

    def _node(self, meta: Meta, page: _TreePage, at: int) -> Value | int:
        """Return the value at a node of a leaf, or the page below one of a branch."""
        node: tuple[int, int, int, int] = _NODE.unpack_from(page.data, at)
        low, high, flags, key_bytes = node
        value, size = at + _NODE.size + key_bytes, low | high << 16
        if value + (0 if page.is_branch else 8 if flags & _LARGE else size) > meta.page_bytes:
            raise self._corrupt(f"has a node beyond the end of page {page.number}")
        if page.is_branch:
            return size | flags << 32
        if flags & ~_LARGE:
            raise self._corrupt(f"has a node with flags {flags:#06x} in page {page.number}")
        if not flags:
            data = page.data[value : value + size]
            return Value(page.key(at), page.number * meta.page_bytes + value, size, data)
        offset = _WORD.unpack_from(page.data, value)[0] * meta.page_bytes + _PAGE.size
        if offset + size > self.size:
            raise self._corrupt(f"ends at byte {self.size:,} of {offset + size:,} that its root needs")
        return Value(page.key(at), offset, size)

    def _corrupt(self, seen: str) -> CorruptStoreError:
        return CorruptStoreError(f"{self.path} {seen}: restore the store from a copy")
