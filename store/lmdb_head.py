r"""HEAD: the newest transaction of an LMDB environment, in a file beside it, because LMDB's pages have no checksum.

Two slots, each in a page of its own and written in turn, so that a torn write leaves the other. Little-endian:

    slot    "tc head\n" | transaction 8 | CRC32C of its meta page 4 | CRC32C of all before 4
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

import google_crc32c

from tiercache.store.errors import CorruptStoreError

if TYPE_CHECKING:
    from pathlib import Path

    from tiercache.store.lmdb_file import Meta

HEAD = "HEAD"
_MAGIC = b"tc head\n"
_SLOT = struct.Struct("<8sQI")
_CHECKSUM = struct.Struct("<I")
_SLOT_BYTES = 4096


def create_head(folder: Path, meta: Meta) -> None:
    """Write a new HEAD that names ``meta``, whole or not at all; durable on return. Raises OSError."""
    draft = folder / f"{HEAD}.new"
    with draft.open("wb") as file:
        file.write(bytes(2 * _SLOT_BYTES))
        os.pwrite(file.fileno(), _pack(meta), _place(meta))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / HEAD)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_head(folder: Path, meta: Meta) -> None:
    """Name ``meta``, the one after the newest that was named, in the older slot; durable on return. Raises OSError."""
    handle = os.open(folder / HEAD, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(handle, _pack(meta), _place(meta))
        os.fdatasync(handle)
    finally:
        os.close(handle)


def read_head(folder: Path) -> dict[int, int] | None:
    """Return the checksums of the meta pages of one or two transactions, by number; None where there is no HEAD.

    Raises CorruptStoreError where no slot is whole.
    """
    path = folder / HEAD
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    named: dict[int, int] = {}
    for at in (0, _SLOT_BYTES):
        slot = data[at : at + _SLOT.size + _CHECKSUM.size]
        if len(slot) == _SLOT.size + _CHECKSUM.size and slot[: len(_MAGIC)] == _MAGIC:
            _, transaction, checksum = _SLOT.unpack_from(slot)
            if _CHECKSUM.unpack_from(slot, _SLOT.size) == (google_crc32c.value(slot[: _SLOT.size]),):
                named[transaction] = checksum
    if not named:
        raise CorruptStoreError(f"{path} is damaged (no part of it is whole): restore the store from a copy")
    return named


def check_newest(
    data: Path, meta: Meta, written: int | None, before: dict[int, int] | None, after: dict[int, int] | None
) -> None:
    """Raise CorruptStoreError unless ``meta`` is what HEAD named before or after it was read, or the one after.

    Of a transaction that HEAD named, its root must have the checksum that HEAD has; of the one after, the number that
    it wrote among its records, ``written``, must be its own. Stores of older versions have neither.
    """
    named = (before or {}) | (after or {})
    number, oldest = meta.transaction, max(before or {0})
    right = written in {None, number}
    if number in named:
        right = right and number >= oldest and named[number] == meta.checksum
    elif named:
        right = written == number and oldest <= number == max(named) + 1
    if not right:
        seen = f", and {HEAD} names {max(named)}" if named else ""
        raise CorruptStoreError(
            f"{data} is damaged: it shows transaction {number}{seen}, and it is not what was written: "
            "restore the store from a copy"
        )


def _pack(meta: Meta) -> bytes:
    slot = _SLOT.pack(_MAGIC, meta.transaction, meta.checksum)
    return slot + _CHECKSUM.pack(google_crc32c.value(slot))


def _place(meta: Meta) -> int:
    return meta.transaction % 2 * _SLOT_BYTES
