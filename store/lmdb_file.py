"""Where LMDB keeps each value in its file: its trees read by ``pread``, without LMDB and without its map.

The binding touches every page of a value to hand it out, and a map of a truncated file ends in SIGBUS. This reads
only the pages of the trees, and checks before use that what they point at lies within the file. Layout of LMDB 0.9
(data version 1, 64-bit, little-endian), which its authors keep fixed:

    page    pgno 8 | pad 2 | flags 2 | lower 2 | upper 2 | places of nodes, 2 each ...
    meta    page, then magic 4 | version 4 | address 8 | map size 8 | free tree 48 | main tree 48 | last page 8 | txn 8
    tree    page size (free tree) 4 | flags 2 | depth 2 | branch, leaf, overflow pages, entries 8 each | root page 8
    node    size low 2 | size high 2 | flags 2 | key bytes 2 | key | value, or the page 8 where a large value begins
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, NamedTuple

from tiercache.store.errors import CorruptStoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_NO_PAGE = (1 << 64) - 1
_PAGE = struct.Struct("<QHHHH")
_META = struct.Struct("<IIQQ")
_TREE = struct.Struct("<IHHQQQQQ")
_NODE = struct.Struct("<HHHH")
_BRANCH, _LEAF, _META_PAGE = 0x01, 0x02, 0x08
_LARGE = 0x01
_DEEPEST = 32


class Meta(NamedTuple):
    """One of the two roots of the file."""

    page_bytes: int
    free_root: int
    main_root: int
    transaction: int


class Place(NamedTuple):
    """Where a value stands in the file."""

    offset: int
    size: int
    fixed: bool
    """Whether it stays there as long as it lives; small values stand in pages of the tree, which are rewritten."""


class LmdbFile:
    """A data file of LMDB, open for reading."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.handle, 0, 0, os.POSIX_FADV_RANDOM)  # ranges are read whole, and nothing beside them

    def close(self) -> None:
        """Close the file."""
        os.close(self.handle)

    @property
    def size(self) -> int:
        """Bytes of the file now."""
        return os.fstat(self.handle).st_size

    def metas(self) -> list[Meta]:
        """Return the roots that can be read, the newest first. Raises CorruptStoreError where there is none."""
        first = self._meta(0)
        page_bytes = 4096 if first is None else first.page_bytes
        found = [meta for meta in (first, self._meta(page_bytes)) if meta is not None]
        if not found or self.size < 2 * page_bytes:
            raise self._corrupt(f"has {self.size:,} bytes and not its two roots in them")
        return sorted(found, key=lambda meta: meta.transaction, reverse=True)

    def values(self, meta: Meta, low: bytes = b"", high: bytes | None = None) -> Iterator[tuple[bytes, Place]]:
        """Yield keys in [low, high) with the places of their values, in order. Raises CorruptStoreError."""
        return self._walk(meta, meta.main_root, low, high, _DEEPEST)

    def check_free_pages(self, meta: Meta) -> None:
        """Check that the list of free pages lies within the file. Raises CorruptStoreError."""
        for _ in self._walk(meta, meta.free_root, b"", None, _DEEPEST):
            pass

    def _meta(self, offset: int) -> Meta | None:
        data = os.pread(self.handle, _PAGE.size + _META.size + 2 * _TREE.size + 16, offset)
        if len(data) < _PAGE.size + _META.size + 2 * _TREE.size + 16:
            return None
        magic, version, _, _ = _META.unpack_from(data, _PAGE.size)
        if magic != _MAGIC or not _PAGE.unpack_from(data)[2] & _META_PAGE:
            return None
        if version != _VERSION:
            raise self._corrupt(f"has LMDB's data version {version}, not {_VERSION}")
        at = _PAGE.size + _META.size
        free, main = _TREE.unpack_from(data, at), _TREE.unpack_from(data, at + _TREE.size)
        (transaction,) = struct.unpack_from("<Q", data, at + 2 * _TREE.size + 8)
        if free[0] < 512 or free[0] & (free[0] - 1) or free[0] > 1 << 16:
            return None
        return Meta(page_bytes=free[0], free_root=free[-1], main_root=main[-1], transaction=transaction)

    def _walk(
        self, meta: Meta, number: int, low: bytes, high: bytes | None, levels: int
    ) -> Iterator[tuple[bytes, Place]]:
        if number == _NO_PAGE:
            return
        page = os.pread(self.handle, meta.page_bytes, number * meta.page_bytes)
        if len(page) < meta.page_bytes:
            raise self._corrupt(f"ends at byte {self.size:,}, before page {number} that its root needs")
        held, _, flags, lower, _ = _PAGE.unpack_from(page)
        if held != number or not _PAGE.size <= lower <= meta.page_bytes or levels == 0:
            raise self._corrupt(f"has something else where page {number} of its tree should be")
        nodes = struct.unpack_from(f"<{(lower - _PAGE.size) // 2}H", page, _PAGE.size)
        if flags & _BRANCH:
            yield from self._walk_branch(meta, page, number, nodes, low, high, levels)
        elif flags & _LEAF:
            for at in nodes:
                small, large, node_flags, key_bytes = self._node(page, number, at)
                key = page[at + _NODE.size : at + _NODE.size + key_bytes]
                if key < low or (high is not None and key >= high):
                    continue
                size, value = small | large << 16, at + _NODE.size + key_bytes
                offset = number * meta.page_bytes + value
                if node_flags & _LARGE:
                    if value + 8 > meta.page_bytes:
                        raise self._corrupt(f"has a node beyond the end of page {number}")
                    offset = struct.unpack_from("<Q", page, value)[0] * meta.page_bytes + _PAGE.size
                if offset + size > self.size:
                    raise self._corrupt(f"ends at byte {self.size:,} of {offset + size:,} that its root needs")
                yield key, Place(offset, size, bool(node_flags & _LARGE))
        else:
            raise self._corrupt(f"has something else where page {number} of its tree should be")

    def _walk_branch(
        self,
        meta: Meta,
        page: bytes,
        number: int,
        nodes: tuple[int, ...],
        low: bytes,
        high: bytes | None,
        levels: int,
    ) -> Iterator[tuple[bytes, Place]]:
        """Go down to the children that may hold keys in [low, high): a child's keys begin at its node's key."""
        parsed = [self._node(page, number, at) for at in nodes]
        keys = [page[at + _NODE.size : at + _NODE.size + n[3]] for at, n in zip(nodes, parsed, strict=True)]
        for i, (small, large, top, _) in enumerate(parsed):
            below = i + 1 < len(keys) and keys[i + 1] <= low
            above = i > 0 and high is not None and keys[i] >= high
            if not below and not above:
                yield from self._walk(meta, small | large << 16 | top << 32, low, high, levels - 1)

    def _node(self, page: bytes, number: int, at: int) -> tuple[int, int, int, int]:
        if at + _NODE.size > len(page):
            raise self._corrupt(f"has a node beyond the end of page {number}")
        node: tuple[int, int, int, int] = _NODE.unpack_from(page, at)
        if at + _NODE.size + node[3] > len(page):
            raise self._corrupt(f"has a node beyond the end of page {number}")
        return node

    def _corrupt(self, seen: str) -> CorruptStoreError:
        return CorruptStoreError(f"{self.path} {seen}: restore the store from a copy")
