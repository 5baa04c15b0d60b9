r"""HEAD: the newest manifest of a store on LMDB, in a file beside it, because LMDB's pages have no checksum.

Two slots, each in a page of its own and written in turn, so that a torn write leaves the other. Little-endian:

    slot    "tc head\n" | number of the manifest 8 | its SHA-256 32 | CRC32C of all before 4
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, NamedTuple

import google_crc32c

from tiercache.store.direct_file import open_file, read_at, sync_folder
from tiercache.store.errors import CorruptStoreError

if TYPE_CHECKING:
    from pathlib import Path

    from tiercache.store.record_chain import Manifest

HEAD = "HEAD"
_MAGIC = b"tc head\n"
_SLOT = struct.Struct("<8sQ32s")
_CHECKSUM = struct.Struct("<I")
_SLOT_BYTES = 4096


class Head(NamedTuple):
    """The newest manifest whose commit was reported durable."""

    number: int
    digest: str
    """SHA-256, as hexadecimal digits."""

    @classmethod
    def of(cls, manifest: Manifest) -> Head:
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
        draft = folder / f"{HEAD}.new"
        handle = open_file(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.pwrite(handle, bytes(2 * _SLOT_BYTES), 0)
            os.pwrite(handle, self._pack(), self._place)
            os.fsync(handle)
        finally:
            os.close(handle)
        draft.replace(folder / HEAD)
        sync_folder(str(folder))

    def write(self, folder: Path) -> None:
        """Overwrite the older slot; durable on return. Raises OSError."""
        handle = open_file(folder / HEAD, os.O_WRONLY)
        try:
            os.pwrite(handle, self._pack(), self._place)
            os.fdatasync(handle)
        finally:
            os.close(handle)

    def allows(self, manifest: Manifest) -> bool:
        """Whether LMDB may show a manifest: the one that is named here, or the one that was made after it."""
        if manifest.number == self.number:
            return manifest.digest == self.digest
        return manifest.number == self.number + 1 and manifest.before == self.digest

    @property
    def _place(self) -> int:
        return self.number % 2 * _SLOT_BYTES

    def _pack(self) -> bytes:
        slot = _SLOT.pack(_MAGIC, self.number, bytes.fromhex(self.digest))
        return slot + _CHECKSUM.pack(google_crc32c.value(slot))


def _unpack(slot: bytes) -> tuple[int, bytes]:
    """Return number and digest; 0 for a slot that is not whole."""
    if len(slot) < _SLOT.size + _CHECKSUM.size or slot[: len(_MAGIC)] != _MAGIC:
        return 0, b""
    if _CHECKSUM.unpack_from(slot, _SLOT.size) != (google_crc32c.value(slot[: _SLOT.size]),):
        return 0, b""
    _, number, digest = _SLOT.unpack_from(slot)
    return number, digest
