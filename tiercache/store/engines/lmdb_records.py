"""The head and the map of blobs in LMDB, read without LMDB, and the file HEAD that says which head is the newest.

LMDB's pages have no checksum, so every value has one, and the head has the number and the sum of the others'.
"""

from __future__ import annotations

import os
import struct
import time
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import google_crc32c
import numpy as np

from tiercache.store.engines.extents import Extents
from tiercache.store.engines.head_record import HeadRecord
from tiercache.store.engines.lmdb_tree import LmdbFile
from tiercache.store.files import PAGE_BYTES, open_file, read_at, replace_file, unreadable
from tiercache.store.store_errors import CorruptStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

T = TypeVar("T")

HEAD, DATA, HEAD_KEY = "HEAD", "data.mdb", "head"
NOTHING = "0" * 64
"""In place of the digest of a head before the first."""
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
    def read(cls, folder: Path) -> Slot:
        """Return the newest that is whole. Raises CorruptStoreError where none is, and StoreError."""
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
            raise CorruptStoreError(f"{path} is damaged (no part of it is whole): restore the store from a copy")
        return max(found)

    def create(self, folder: Path) -> None:
        """Write a new file, whole or not at all; durable on return. Raises OSError."""
        slots, at = bytearray(2 * _SLOT_BYTES), self.number % 2 * _SLOT_BYTES
        slots[at : at + _SLOT.size + _CHECKSUM.size] = self.to_bytes()
        replace_file(folder / HEAD, bytes(slots), suffix=".new", mode=0o644)

    def write(self, folder: Path, *, other: bool = False) -> None:
        """Overwrite the older slot; durable on return. Raises OSError.

        Afterward ``other`` overwrites the other slot too, and does not wait: it is needed where the first one rots.
        """
        handle = open_file(folder / HEAD, os.O_WRONLY)
        try:
            os.pwrite(handle, self.to_bytes(), (self.number + other) % 2 * _SLOT_BYTES)
            if not other:
                os.fdatasync(handle)
        finally:
            os.close(handle)

    @classmethod
    def of(cls, record: HeadRecord) -> Slot:
        """Return what names a head."""
        assert record.head is not None
        return cls(record.number, record.head.digest)

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
        """Return what a slot names; None where it is not whole."""
        if len(slot) < _SLOT.size + _CHECKSUM.size or slot[: len(_SLOT_MAGIC)] != _SLOT_MAGIC:
            return None
        if _CHECKSUM.unpack_from(slot, _SLOT.size) != (google_crc32c.value(slot[: _SLOT.size]),):
            return None
        _, number, digest = _SLOT.unpack_from(slot)
        return cls(number, digest.hex())


def entry_of(name: str, extents: Extents) -> bytes:
    """Return the value of a blob in the map."""
    numbers = [extents.size, extents.dropped, *(number for run in extents.runs for number in run)]
    value = struct.pack(f"<{len(numbers)}q", *numbers)
    return value + _CHECKSUM.pack(google_crc32c.extend(google_crc32c.value(name.encode()), value))


def checksum_of(entry: bytes) -> int:
    """Return what the entry says its checksum is."""
    return int.from_bytes(entry[-_CHECKSUM.size :], "little")


@lru_cache(maxsize=1024)
def extents_of(entry: bytes) -> Extents:
    """Return where a blob is, of an entry that was checked."""
    numbers = struct.unpack_from(f"<{len(entry) // 8}q", entry)
    return Extents(numbers[0], numbers[1], tuple(zip(numbers[2::2], numbers[3::2], strict=True)))


class EntryArrays(NamedTuple):
    """Entries of n blobs with r runs, in order."""

    size_N: NDArray[np.int64]
    dropped_N: NDArray[np.int64]
    low_R: NDArray[np.int64]
    """The first byte of each run."""
    bytes_R: NDArray[np.int64]

    @classmethod
    def of(cls, entries: Mapping[str, bytes]) -> EntryArrays:
        """Take entries apart. Raises CorruptStoreError for one that is not what was written."""
        for name, entry in entries.items():
            body = entry[: -_CHECKSUM.size]
            is_whole = len(body) >= 16 and len(body) % 16 == 0
            if not is_whole or google_crc32c.extend(google_crc32c.value(name.encode()), body) != checksum_of(entry):
                raise _no_entry(name)
        numbers = np.frombuffer(b"".join([entry[: -_CHECKSUM.size] for entry in entries.values()]), "<i8")
        count_N = np.fromiter(map(len, entries.values()), np.int64, len(entries)) // 16  # of pairs of numbers
        pairs, first_N = numbers.reshape(-1, 2), np.cumsum(count_N) - count_N
        size_N, dropped_N = pairs[first_N].T
        run_R2 = np.delete(pairs, first_N, axis=0)
        stored_N = np.where(dropped_N < size_N, -(-size_N // PAGE_BYTES) * PAGE_BYTES - dropped_N, 0)
        sum_R = np.append(0, np.cumsum(run_R2[:, 1]))
        end_N = np.cumsum(count_N - 1)
        wrong_N = (sum_R[end_N] - sum_R[end_N - count_N + 1] != stored_N) | (dropped_N < 0) | (dropped_N > size_N)
        wrong_N |= (dropped_N % PAGE_BYTES > 0) & (dropped_N < size_N)
        wrong_R = (run_R2 < (0, 1)).any(1) | (run_R2 % PAGE_BYTES > 0).any(1) | (run_R2 > _MOST_BYTES).any(1)
        np.logical_or.at(wrong_N, np.repeat(np.arange(len(entries)), count_N - 1)[wrong_R], True)
        if wrong_N.any():
            raise _no_entry([*entries][int(wrong_N.argmax())])
        return cls(size_N, dropped_N, *run_R2.T)


def _no_entry(name: str) -> CorruptStoreError:
    return CorruptStoreError(
        f"the entry of blob {name[:99]!r} in {DATA} is not what was written: restore the store from a copy"
    )


_TRIES, _PAUSE_SECONDS = 50, 0.002
"""How many times a writer may commit while its tree is read, and the pause between tries."""


def read_head(folder: Path, label: str) -> tuple[Slot, HeadRecord | None]:
    """Return what HEAD names and the newest head, None before the first; a writer may go on meanwhile.

    Raises CorruptStoreError and StoreError.
    """
    return _look(folder, lambda slot, file: (slot, None if file is None else _head(slot, file, label)))


def read_map(folder: Path, label: str) -> tuple[Slot, HeadRecord | None, dict[str, bytes], EntryArrays]:
    """Return what ``read_head`` does, and all entries by name, checked. Raises CorruptStoreError and StoreError."""

    def look(slot: Slot, file: LmdbFile | None) -> tuple[Slot, HeadRecord | None, dict[str, bytes], EntryArrays]:
        if file is None:
            return slot, None, {}, EntryArrays.of({})
        record = _head(slot, file, label)
        found = {value.key.decode(errors="replace"): file.read(value) for value in file.values(file.metas()[0])}
        found.pop(HEAD_KEY, None)
        if (len(found), sum(map(checksum_of, found.values()))) != (record.blobs, record.checksums):
            raise CorruptStoreError(
                f"the map in {file.path} has {len(found):,} blobs and is not the one of {record.blobs:,} that was "
                "written: restore the store from a copy"
            )
        return slot, record, found, EntryArrays.of(found)

    return _look(folder, look)


def read_entries(folder: Path, name: str) -> dict[str, bytes]:
    """Return the entry of a blob, and by name those in the same page of LMDB's tree.

    Raises CorruptStoreError, also where there is none, and StoreError.
    """

    def look(_slot: Slot, file: LmdbFile | None) -> dict[str, bytes]:
        values = [] if file is None else file.near(file.metas()[0], name.encode())
        found = {value.key.decode(errors="replace"): value for value in values}
        if file is None or name not in found:
            raise MissingEntryError(f"{folder / DATA} has no blob {name!r}: restore the store from a copy")
        entries = {key: value.data for key, value in found.items() if value.data is not None and key != HEAD_KEY}
        entries[name] = file.read(found[name])
        try:
            EntryArrays.of(entries)
        except CorruptStoreError:  # of one of them
            entries = {name: entries[name]}
            EntryArrays.of(entries)
        return entries

    return _look(folder, look)


class MissingEntryError(CorruptStoreError):
    """The map has no blob of a name."""


def _look(folder: Path, look: Callable[[Slot, LmdbFile | None], T]) -> T:
    """Call ``look``, again where it found damage and a writer went on; without a file where nothing was published."""
    path = folder / DATA
    for tries in range(_TRIES + 1):
        if tries:
            time.sleep(_PAUSE_SECONDS)
        slot = Slot.read(folder)
        try:
            try:
                file = LmdbFile(str(path))
            except FileNotFoundError:
                if slot.number:
                    raise
                return look(slot, None)
            try:
                return look(slot, file)
            finally:
                file.close()
        except OSError as error:
            raise unreadable(path, error) from error
        except CorruptStoreError:
            if tries and (Slot.read(folder) == slot or tries == _TRIES):
                raise
    raise AssertionError


def _head(slot: Slot, file: LmdbFile, label: str) -> HeadRecord:
    value = file.find(file.metas()[0], HEAD_KEY.encode())
    if value is None:
        raise CorruptStoreError(f"{file.path} has no head: restore the store from a copy")
    record = HeadRecord.from_bytes(file.read(value), f"the head of {label}")
    if record.head is None:
        raise CorruptStoreError(f"the head of {label} names no commit: restore the store from a copy")
    if not slot.allows(record):
        raise CorruptStoreError(
            f"{file.path} is damaged: it shows publish {record.number}, {HEAD} names {slot.number}, and it is not what "
            "was written: restore the store from a copy"
        )
    return record
