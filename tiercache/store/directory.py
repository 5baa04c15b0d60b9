"""The directory of a store: whose it is, which format it has, and who may write to it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tiercache.store.files import FULL, check_room, open_file, read_whole, room_for
from tiercache.store.store_errors import (
    FormatVersionError,
    NotAStoreError,
    StoreError,
    StoreInUseError,
    StoreMissingError,
)

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = "tiercache store"
FORMAT_VERSION = 5
MARKER = "store.json"
MANIFEST = "shards.json"
"""Of a sharded store, what says which shards it has."""
LOCK = "writer.lock"
RANKS_LOCK = "ranks.lock"
"""The file that rank 0 of a training holds locked, of a sharded store."""
_FILES = (
    MARKER, MARKER + ".new", "leases",
    "HEAD", "HEAD.new", "data.mdb", "lock.mdb", "fresh", "blocks.bin",
    "schedule",
)  # fmt: skip
"""What a store's folder comes to have but its lock, and what engine zarr makes; the last one is a training's."""
_ZARR_FILES = ("manifests", "records", "segments", "state", "zarr.json")
"""What engine zarr makes: the last one first. Without it the others, which have common names, are somebody else's."""
_EMPTY_BYTES = 1 << 20
"""More than a store without rows takes."""
IN_USE = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES})
"""What ``flock`` says of a file that somebody else has locked; SMB says the last one."""


class StoreDirectory:
    """A directory that is a store, or is to become one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def find(self) -> bool:
        """Return whether a plain store is here.

        False where nothing is, or only what an interrupted creation left, or shards with their manifest.

        Raises NotAStoreError and FormatVersionError.
        """
        if not self.is_there():
            return False
        if not self.path.is_dir():
            raise NotAStoreError(f"{self.path} is a file, not a store: give the path of a store, or one that is free")
        names = {entry.name for entry in self.path.iterdir()} - {RANKS_LOCK, MANIFEST + ".tmp"}
        if MARKER in names:
            self._check_marker()
            return True
        if MANIFEST not in names and any(name.startswith("shard-") for name in names):
            raise NotAStoreError(f"{self.path} has shards and no {MANIFEST}: restore it from a copy")
        if names and names.isdisjoint({LOCK, MANIFEST}):
            raise NotAStoreError(
                f"{self.path} is a directory without {MARKER} that holds {min(names)!r}, not a store: "
                "give the path of a store, or one that is free"
            )
        return False

    def is_there(self) -> bool:
        """Return whether there is anything at the path. Raises NotAStoreError for what can be no path."""
        try:
            if "\0" in str(self.path):
                raise ValueError("a NUL ends the name of a file")
            return self.path.exists()
        except (OSError, ValueError) as error:
            raise NotAStoreError(
                f"{str(self.path)[:200]!r} is no path of a store ({_reason(error)}): give another"
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
            _sync(path.parent)

    def engine(self, known: tuple[str, ...], wanted: str | None) -> str:
        """Return the engine that the store here was made with.

        Raises FormatVersionError where it is none of ``known``, and ValueError where another one is ``wanted``.
        """
        engine = json.loads(self._marker()).get("engine")
        if engine not in known:
            raise FormatVersionError(
                f"the store at {self.path} was made with engine {engine!r} and this tiercache has "
                f"{' and '.join(known)}: use a newer tiercache"
            )
        if wanted not in {None, engine}:
            raise ValueError(
                f"the store at {self.path} was made with engine {engine!r}, not {wanted!r}: leave engine out, "
                "or give the path of a new store"
            )
        return str(engine)

    def finish(self, engine: str) -> None:
        """Write the marker, durably: from now on this is a store, and all files that the engine made are there."""
        with room_for(_EMPTY_BYTES, self.path, f"the store at {self.path}"):
            self._finish(engine)

    def _finish(self, engine: str) -> None:
        text = json.dumps({"format": FORMAT, "version": FORMAT_VERSION, "engine": engine}) + "\n"
        draft = self.path / (MARKER + ".new")
        draft.unlink(missing_ok=True)  # opening a FIFO there would wait forever
        with draft.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _sync(self.path)
        draft.replace(self.path / MARKER)
        _sync(self.path)

    def delete(self) -> None:
        """Delete all that a store makes here, durably, but the lock: for whoever holds that."""
        for name in (*_FILES, *(_ZARR_FILES if (self.path / _ZARR_FILES[-1]).exists() else ())):
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                delete_folder(path)
            else:
                with suppress(IsADirectoryError):  # a reader made the folder of leases anew
                    path.unlink(missing_ok=True)
        _sync(self.path)

    def _marker(self) -> bytes:
        """Return the bytes of the marker. Raises NotAStoreError."""
        path = self.path / MARKER
        try:
            return read_whole(str(path))[:65536]
        except OSError as error:
            raise NotAStoreError(f"{path} cannot be read ({_reason(error)}): restore the store from a copy") from error

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


class WriterLock:
    """The right to write to a store, held by one process until ``release`` or its end, however it ends."""

    def __init__(self, directory: Path, name: str = LOCK) -> None:
        """``name`` is the file's: another one is for what is no store itself, and is made of stores.

        A store's marker is locked with it, as soon as it is there: nobody takes that for stale and deletes it.
        Raises StoreInUseError, StoreFullError and StoreError.
        """
        self._directory = directory
        self._handles: dict[str, int] = {}
        """Open files by name; the last one says whose the directory is, and "" is the directory itself."""
        _held.add(self)
        try:
            try:
                self._handles[""] = os.open(directory, os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY))
            except OSError as error:
                raise self._unusable(directory, error) from error
            self._take(name, os.O_RDWR | os.O_CREAT)
            if not os.fstat(self._handles[name]).st_size:
                _sync(directory)  # what is without a marker is taken for a store's creation only where this file is
            if name == LOCK:
                self.take_marker()
            self._name_holder(self._handles[name])
        except BaseException:
            self.release()
            raise

    def take_marker(self) -> None:
        """Lock the marker too, if it is there. Raises StoreInUseError and StoreError."""
        path = self._directory / MARKER
        if path.is_file():
            self._take(MARKER, os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY)

    def check(self) -> None:
        """Raise StoreError if what is at the path is not what this holds: nothing may be written there then."""
        for part in ("", next(reversed(self._handles), "")):
            path = self._directory / part
            try:
                if part in self._handles and os.path.samestat(path.stat(), os.fstat(self._handles[part])):
                    continue
                seen = f"{path} is not the one that this process opened and locked"
            except OSError as error:
                seen = f"{path} cannot be looked at ({_reason(error)})"
            raise StoreError(
                f"the store at {self._directory} was moved, replaced or deleted while it was written: {seen}. Nothing "
                "more is written: close it, put the store back in its place, and open it again"
            )

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Let others write; a second time does nothing."""
        while self._handles:
            os.close(self._handles.popitem()[1])

    def _take(self, name: str, flags: int) -> None:
        """Open and lock a file of the directory."""
        path = self._directory / name
        with room_for(_EMPTY_BYTES, path, f"the lock of the store at {self._directory}"):
            try:
                handle = open_file(path, flags)
            except OSError as error:
                if error.errno in FULL:
                    raise
                raise self._unusable(path, error) from error
        self._handles[name] = handle
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise self._refused(error) from error

    def _unusable(self, path: Path, error: OSError) -> StoreError:
        """Return the error of a file or folder that cannot be opened."""
        return StoreError(
            f"the lock of the store at {self._directory} cannot be opened ({_reason(error)}): mend {path}, or open the "
            "store with mode='r'"
        )

    def _refused(self, error: OSError) -> StoreError:
        """Return the error of a file that was not locked."""
        if error.errno not in IN_USE:
            return StoreError(
                f"the file system of {self._directory} does not lock files ({_reason(error)}), so nothing would stop a "
                "second writer: put the store on one that has flock, or open it with mode='r'"
            )
        holder = os.pread(next(self._handles[name] for name in self._handles if name), 32, 0)
        pid = int(holder) if holder.strip().isdigit() else None
        who = f"process {pid}" if pid else "another process"
        mine = " (this process)" if pid == os.getpid() else ""
        return StoreInUseError(
            f"the store at {self._directory} is being written by {who}{mine} and may have one writer: close it there, "
            "or open it here with mode='r'",
            pid=pid,
        )

    def _name_holder(self, handle: int) -> None:
        """Write this process's id into the file: it only serves a message."""
        os.ftruncate(handle, 0)
        try:
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:  # a store opens where the disk is full, too
            if error.errno not in FULL:
                raise


def _reason(error: Exception) -> str:
    """Return what is wrong, without the path again."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _sync(directory: Path) -> None:
    """Make the names in a directory durable."""
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return  # one above the store that may be passed and not read
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _release_in_child() -> None:
    """Close a forked child's copies, which would hold the lock for as long as the child lives."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
