"""The tree of an LMDB file (0.9, data version 1), read by ``pread``: without LMDB, and without mapping it."""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from operator import itemgetter
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
_BEYOND = (0, 0, 0, 1 << 16)


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
    data: bytes | None = None
    """Of one that stands in its page."""


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
        number = meta.root
        for levels in range(_DEEPEST, -1, -1):
            if number == _NO_PAGE:
                break
            nodes = self._nodes(meta, number, levels)
            at = bisect_right(nodes, key, lo=1, key=itemgetter(0)) - 1  # the first key of a branch is none
            node = nodes[at] if nodes else (b"", _NO_PAGE)
            if isinstance(node, Value):
                return node if node.key == key else None
            number = node[1]
        return None

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
        for node in self._nodes(meta, number, levels):
            if isinstance(node, Value):
                yield node
            else:
                yield from self._walk(meta, node[1], levels - 1, seen)

    def _nodes(self, meta: Meta, number: int, levels: int) -> list[Value] | list[tuple[bytes, int]]:
        """Return the values of a leaf, or the first keys and the pages below a branch."""
        is_whole = number < self.size // meta.page_bytes
        page = read_at(self.handle, meta.page_bytes, number * meta.page_bytes) if is_whole else b""
        if len(page) < meta.page_bytes:
            raise self._corrupt(f"ends at byte {self.size:,}, before page {number} that its root needs")
        page_number, _, flags, lower, _ = _PAGE.unpack_from(page)
        misplaced = page_number != number or not _PAGE.size <= lower <= meta.page_bytes
        if misplaced or levels == 0 or not flags & (_BRANCH | _LEAF):
            raise self._corrupt(f"has something else where page {number} of its tree should be")
        values, branches = list[Value](), list[tuple[bytes, int]]()
        for at in struct.unpack_from(f"<{(lower - _PAGE.size) // 2}H", page, _PAGE.size):
            low, high, node_flags, key_bytes = _NODE.unpack_from(page, at) if at + _NODE.size <= len(page) else _BEYOND
            value, size = at + _NODE.size + key_bytes, low | high << 16
            if value + (0 if flags & _BRANCH else 8 if node_flags & _LARGE else size) > meta.page_bytes:
                raise self._corrupt(f"has a node beyond the end of page {number}")
            key = page[at + _NODE.size : value]
            if flags & _BRANCH:
                branches.append((key, size | node_flags << 32))
                continue
            if node_flags & ~_LARGE:
                raise self._corrupt(f"has a node with flags {node_flags:#06x} in page {number}")
            if not node_flags:
                values.append(Value(key, number * meta.page_bytes + value, size, page[value : value + size]))
                continue
            offset = _WORD.unpack_from(page, value)[0] * meta.page_bytes + _PAGE.size
            if offset + size > self.size:
                raise self._corrupt(f"ends at byte {self.size:,} of {offset + size:,} that its root needs")
            values.append(Value(key, offset, size))
        return branches or values

    def _corrupt(self, seen: str) -> CorruptStoreError:
        return CorruptStoreError(f"{self.path} {seen}: restore the store from a copy")
