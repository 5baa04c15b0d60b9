"""The directory of a store: its owner, its format, and the right to write to it."""

from __future__ import annotations

import errno
import json
import shutil
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tiercache.store.files import check_room, read_whole, reason, replace_file, room_for, sync
from tiercache.store.locks import LOCK, MARKER
from tiercache.store.store_errors import FormatVersionError, NotAStoreError, StoreMissingError

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = "tiercache store"
FORMAT_VERSION = 5
RANK_FORMAT = "tiercache rank"
"""The format in the marker of a rank's folder, which has blobs of a store but is not a store."""
_EMPTY_BYTES = 1 << 20
"""More than a store without rows takes."""


class StoreDirectory:
    """A directory that is or will become a store."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def find(self) -> bool:
        """Return True if a store is here; False if the path is free or holds only an interrupted creation.

        Raises NotAStoreError and FormatVersionError.
        """
        try:
            if "\0" in str(self.path):
                raise ValueError("a NUL ends the name of a file")
            if not self.path.exists():
                return False
        except (OSError, ValueError) as error:
            raise NotAStoreError(
                f"{str(self.path)[:200]!r} cannot be the path of a store ({reason(error)}): choose another"
            ) from error
        if not self.path.is_dir():
            raise NotAStoreError(f"{self.path} is a file, not a store: pass the path of a store, or an unused one")
        names = {entry.name for entry in self.path.iterdir()}
        if MARKER in names:
            self._check_marker()
        elif names and LOCK not in names:
            raise NotAStoreError(
                f"{self.path} is a directory without {MARKER} that holds {min(names)!r}, not a store: "
                "pass the path of a store, or an unused one"
            )
        return MARKER in names

    def missing(self) -> StoreMissingError:
        """Return the error of a store that is missing and may not be created."""
        return StoreMissingError(f"no store at {self.path}: check the path, or pass tables to create a store there")

    def create(self) -> None:
        """Make the directory, durably, with those above it. Raises NotAStoreError, and StoreFullError."""
        place = self.path.absolute()
        made = [path for path in (place, *place.parents) if not path.exists()]
        above = next(path for path in (place, *place.parents) if path.exists())
        try:
            with room_for(_EMPTY_BYTES, above, f"the store at {self.path}"):
                self.path.mkdir(parents=True, exist_ok=True)
                check_room(self.path, _EMPTY_BYTES)  # LMDB's map of its readers would be SIGBUS
        except (FileExistsError, NotADirectoryError) as error:
            raise NotAStoreError(f"{error.filename} is a file: no store can be made below it") from error
        for path in made or [place]:  # a directory made by a killed process may not be durable yet
            with suppress(PermissionError):  # a parent directory that may be searched but not read
                sync(path.parent)

    def engine(self, engines: tuple[str, ...], requested: str | None) -> str:
        """Return the engine that this store was created with.

        Raises FormatVersionError if it is not among ``engines``, and ValueError if another one is ``requested``.
        """
        engine = self.marker().get("engine")
        if engine not in engines:
            raise FormatVersionError(
                f"the store at {self.path} was created with engine {engine!r}, but this tiercache has "
                f"{' and '.join(engines)}: use a newer tiercache"
            )
        if requested not in {None, engine}:
            raise ValueError(
                f"the store at {self.path} was created with engine {engine!r}, not {requested!r}: omit engine, "
                "or pass the path of a new store"
            )
        return str(engine)

    def finish(self, engine: str) -> None:
        """Write the marker, durably: from now on this is a store. All files of the engine must exist."""
        values = {"format": FORMAT, "version": FORMAT_VERSION, "engine": engine, "id": uuid.uuid4().hex}
        with room_for(_EMPTY_BYTES, self.path, f"the store at {self.path}"):
            sync(self.path)
        write_json(self.path / MARKER, values, _EMPTY_BYTES, f"the store at {self.path}")

    def marker(self) -> dict[str, Any]:
        """Return the marker's contents. Raises NotAStoreError."""
        path = self.path / MARKER
        try:
            marker: Any = json.loads(read_whole(str(path))[:65536])
        except OSError as error:
            raise NotAStoreError(f"{path} cannot be read ({reason(error)}): restore the store from a copy") from error
        except (ValueError, RecursionError) as error:
            raise NotAStoreError(f"{path} is not JSON ({error}): restore the store from a copy") from error
        if not isinstance(marker, dict):
            raise NotAStoreError(f"{path} is not the marker of a store: pass the path of a store, or an unused one")
        return marker

    def _check_marker(self) -> None:
        marker = self.marker()
        if marker.get("format") == RANK_FORMAT:
            raise NotAStoreError(
                f"{self.path} has the rows of one rank of a store: pass the path of the whole store, which all ranks "
                "commit together"
            )
        if marker.get("format") != FORMAT:
            raise NotAStoreError(
                f"{self.path / MARKER} is not the marker of a store: pass the path of a store, or an unused one"
            )
        check_version(marker.get("version"), f"the store at {self.path}")


def write_json(path: Path, values: object, needed_bytes: int, what: str) -> None:
    """Replace a small file by plain JSON values, durably. Raises StoreFullError: ``what`` needed ``needed_bytes``."""
    with room_for(needed_bytes, path.parent, what):
        replace_file(path, json.dumps(values).encode() + b"\n", suffix=".new")


def delete_folder(folder: Path) -> None:
    """Delete a folder and everything in it, even if others delete files or readers take leases there meanwhile."""
    while folder.exists():
        try:
            shutil.rmtree(folder)
            break
        except OSError as error:  # errno is missing if a folder was recreated while it was opened
            if error.errno not in {errno.ENOENT, errno.ENOTEMPTY, None} or folder.is_symlink():
                raise


def check_version(version: object, name: str) -> None:
    """Raise FormatVersionError if ``name`` has a different format version than this tiercache reads."""
    if version != FORMAT_VERSION or isinstance(version, bool):
        newer = isinstance(version, int) and version > FORMAT_VERSION
        raise FormatVersionError(
            f"{name} has format version {version!r:.40}, but this tiercache reads version {FORMAT_VERSION}: "
            f"{'use a newer tiercache' if newer else 'use the tiercache that wrote it'}"
        )
