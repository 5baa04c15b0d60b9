"""The directory of a store: whose it is, which format it has, and who may write to it."""

from __future__ import annotations

import errno
import json
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tiercache.store.files import check_room, read_whole, reason, replace_file, room_for, sync
from tiercache.store.locks import LOCK, MARKER
from tiercache.store.openers import SHARD_MANIFEST
from tiercache.store.store_errors import FormatVersionError, NotAStoreError, StoreMissingError

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = "tiercache store"
FORMAT_VERSION = 5
RANKS_LOCK = "ranks.lock"
"""The file that rank 0 of a training holds locked, of a sharded store."""
_FILES = (
    MARKER, MARKER + ".new", "leases",
    "HEAD", "HEAD.new", "data.mdb", "lock.mdb", "fresh", "blocks.bin",
    "schedule",
)  # fmt: skip
"""What a store's folder comes to have but its lock, and what engine zarr makes; the last one is a training's."""
_ZARR_FILES = ("heads", "commits", "ranks", "segments", "states", "tables", "zarr.json")
"""What engine zarr makes: the last one first. Without it the others, which have common names, are somebody else's."""
_EMPTY_BYTES = 1 << 20
"""More than a store without rows takes."""


class StoreDirectory:
    """A directory that is a store, or is to become one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def find(self) -> bool:
        """Return whether a plain store is here.

        False where nothing is, or only what an interrupted creation left, or shards with their manifest.

        Raises NotAStoreError and FormatVersionError.
        """
        if not self.path_exists():
            return False
        if not self.path.is_dir():
            raise NotAStoreError(f"{self.path} is a file, not a store: give the path of a store, or one that is free")
        names = {entry.name for entry in self.path.iterdir()} - {RANKS_LOCK, SHARD_MANIFEST + ".tmp"}
        if MARKER in names:
            self._check_marker()
            return True
        if SHARD_MANIFEST not in names and any(name.startswith("shard-") for name in names):
            raise NotAStoreError(f"{self.path} has shards and no {SHARD_MANIFEST}: restore it from a copy")
        if names and names.isdisjoint({LOCK, SHARD_MANIFEST}):
            raise NotAStoreError(
                f"{self.path} is a directory without {MARKER} that holds {min(names)!r}, not a store: "
                "give the path of a store, or one that is free"
            )
        return False

    def path_exists(self) -> bool:
        """Return whether there is anything at the path. Raises NotAStoreError for what can be no path."""
        try:
            if "\0" in str(self.path):
                raise ValueError("a NUL ends the name of a file")
            return self.path.exists()
        except (OSError, ValueError) as error:
            raise NotAStoreError(
                f"{str(self.path)[:200]!r} is no path of a store ({reason(error)}): give another"
            ) from error

    def missing(self) -> StoreMissingError:
        """Return the error of a store that is not here and may not be made."""
        return StoreMissingError(
            f"there is no store at {self.path}: check the path, or give tables to create a store there"
        )

    def create(self) -> None:
        """Make the directory, durably, with those above it. Raises NotAStoreError, and StoreFullError."""
        place = self.path.absolute()
        made = [path for path in (place, *place.parents) if not path.exists()]
        try:
            with room_for(_EMPTY_BYTES, self._above(), f"the store at {self.path}"):
                self.path.mkdir(parents=True, exist_ok=True)
                check_room(self.path, _EMPTY_BYTES)  # LMDB's map of its readers would be SIGBUS
        except (FileExistsError, NotADirectoryError) as error:
            raise NotAStoreError(f"{error.filename} is a file: no store can be made below it") from error
        for path in made or [place]:  # one that a killed process made may not be durable yet
            with suppress(PermissionError):  # one above the store that may be passed and not read
                sync(path.parent)

    def engine(self, engines: tuple[str, ...], requested: str | None) -> str:
        """Return the engine that the store here was made with.

        Raises FormatVersionError where it is none of ``engines``, and ValueError where another one is ``requested``.
        """
        engine = json.loads(self._marker()).get("engine")
        if engine not in engines:
            raise FormatVersionError(
                f"the store at {self.path} was made with engine {engine!r} and this tiercache has "
                f"{' and '.join(engines)}: use a newer tiercache"
            )
        if requested not in {None, engine}:
            raise ValueError(
                f"the store at {self.path} was made with engine {engine!r}, not {requested!r}: leave engine out, "
                "or give the path of a new store"
            )
        return str(engine)

    def finish(self, engine: str) -> None:
        """Write the marker, durably: from now on this is a store, and all files that the engine made are there."""
        text = json.dumps({"format": FORMAT, "version": FORMAT_VERSION, "engine": engine}) + "\n"
        with room_for(_EMPTY_BYTES, self.path, f"the store at {self.path}"):
            sync(self.path)
            replace_file(self.path / MARKER, text.encode(), suffix=".new")

    def delete(self) -> None:
        """Delete all that a store makes here, durably, but the lock: for whoever holds that."""
        for name in (*_FILES, *(_ZARR_FILES if (self.path / _ZARR_FILES[-1]).exists() else ())):
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                delete_folder(path)
            else:
                with suppress(IsADirectoryError):  # a reader made the folder of leases anew
                    path.unlink(missing_ok=True)
        sync(self.path)

    def _marker(self) -> bytes:
        """Return the bytes of the marker. Raises NotAStoreError."""
        path = self.path / MARKER
        try:
            return read_whole(str(path))[:65536]
        except OSError as error:
            raise NotAStoreError(f"{path} cannot be read ({reason(error)}): restore the store from a copy") from error

    def _above(self) -> Path:
        """Return the nearest directory that is there: this one, or one above it."""
        place = self.path.absolute()
        return next(path for path in (place, *place.parents) if path.exists())

    def _check_marker(self) -> None:
        path = self.path / MARKER
        try:
            marker: Any = json.loads(self._marker())
        except (ValueError, RecursionError) as error:
            raise NotAStoreError(f"{path} is not JSON ({error}): restore the store from a copy") from error
        if not isinstance(marker, dict) or marker.get("format") != FORMAT:
            raise NotAStoreError(f"{path} is not a store's: give the path of a store, or one that is free")
        check_version(marker.get("version"), f"the store at {self.path}")


def delete_folder(folder: Path) -> None:
    """Delete a folder and all in it, whatever others delete there, or readers that take leases make, meanwhile."""
    while folder.exists():
        try:
            shutil.rmtree(folder)
            break
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.ENOTEMPTY}:
                raise


def check_version(version: object, name: str) -> None:
    """Raise FormatVersionError where what is called ``name`` has another format version than is read."""
    if version != FORMAT_VERSION or isinstance(version, bool):
        newer = isinstance(version, int) and version > FORMAT_VERSION
        raise FormatVersionError(
            f"{name} has format version {version!r:.40} and this tiercache reads version {FORMAT_VERSION}: "
            f"{'use a newer tiercache' if newer else 'use the tiercache that wrote it'}"
        )
