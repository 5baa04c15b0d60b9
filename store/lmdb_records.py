"""Records in LMDB, read without LMDB: its tree by ``pread``, every value checked by the chain that HEAD ends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tiercache.store.errors import CorruptStoreError, StoreError
from tiercache.store.lmdb_file import LmdbFile
from tiercache.store.lmdb_head import HEAD, Head
from tiercache.store.record_chain import Manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tiercache.store.record_chain import Link

DATA, MANIFEST = "data.mdb", "manifest"
PART_BYTES = 1 << 30
"""A record with more bytes is several values, as LMDB's have at most 4 GiB; the format says where it is cut."""
_TRIES, _PAUSE_SECONDS = 50, 0.002
"""How often a writer may go on while its records are read."""


class LmdbRecords:
    """What one reading found."""

    def __init__(self, head: Head, manifest: Manifest, records: dict[str, bytes]) -> None:
        self.head, self.manifest, self.records = head, manifest, records

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


def unreadable(path: Path, error: OSError) -> StoreError:
    """Return the error of a file of the store that the system does not open or read."""
    if isinstance(error, FileNotFoundError):
        return CorruptStoreError(f"{path} is missing: restore the store from a copy")
    if isinstance(error, PermissionError):
        return StoreError(f"{path} cannot be opened ({error}): give this user the right to read and write it")
    return CorruptStoreError(f"{path} cannot be read ({error}): restore the store from a copy")


def _read(folder: Path, label: str, head: Head) -> tuple[Manifest, dict[str, bytes]]:
    path = folder / DATA
    try:
        file = LmdbFile(str(path))
        try:
            meta = file.metas()[0]
            places = {value.key: value for value in file.values(meta)}
            if MANIFEST.encode() not in places:
                raise CorruptStoreError(f"{path} has no manifest: restore the store from a copy")
            manifest = Manifest.from_bytes(file.read(places[MANIFEST.encode()]), f"the manifest of {label}")
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
