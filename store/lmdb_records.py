"""Records in LMDB, read without LMDB: its tree by ``pread``, every value checked by the chain that HEAD ends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tiercache.store.errors import CorruptStoreError, StoreError
from tiercache.store.lmdb_file import LmdbFile
from tiercache.store.lmdb_head import HEAD, Head
from tiercache.store.record_chain import Manifest

if TYPE_CHECKING:
    from pathlib import Path

DATA, MANIFEST = "data.mdb", "manifest"
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

            def get(name: str, _link: object) -> bytes | None:
                value = places.get(name.encode())
                return None if value is None else file.read(value)

            return manifest, manifest.read(get, label)
        finally:
            file.close()
    except OSError as error:
        raise unreadable(path, error) from error
