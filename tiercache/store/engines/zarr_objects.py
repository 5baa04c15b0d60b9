"""The objects of a Zarr store by name; the only module that imports zarr.

On a local disk objects are files, which are written and read past the page cache: ``LocalStore`` itself writes at 0.23
and reads at 0.34 of the disk's speed. Any other Zarr store is used as it is, with many requests in flight at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync as zarr_sync
from zarr.storage import LocalStore, ObjectStore, WrapperStore

from tiercache.distribution import install_command
from tiercache.store.bits import xxh64
from tiercache.store.direct_io import RangeReader, unread
from tiercache.store.files import Note, local_path, punch_hole, read_whole, sync, write_whole, writing
from tiercache.store.store_errors import BlockReadError, CorruptStoreError, StoreError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence

    from numpy.typing import NDArray

    from tiercache.store.engines.zarr_layout import Place

T = TypeVar("T")
CONCURRENCY = 32
"""Requests in flight at a time, unless the caller says otherwise."""
PROBES = "probes"
"""The folder of temporary objects, used while a store is opened for writing."""
_PROBES = 3
"""Attempts: a writer that opens the store at the same time may delete a probe as a leftover."""
LEFTOVER = ".partial"
"""Suffix of files that are not complete."""
_THREADS = 4
"""Threads on a local disk."""
_UNSIZED = -1
_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss")


class UrlStore(ObjectStore[Any] if TYPE_CHECKING else ObjectStore):  # type: ignore[misc] # a plain class in zarr 3.0
    """An object store named by its URL in messages."""

    url = ""

    def __str__(self) -> str:
        return self.url


def object_store(url: str) -> Store:
    """Return the Zarr store of a URL such as "s3://bucket/model.tc", with credentials from the environment.

    Makes no request. Raises ValueError for another kind of URL or one that obstore refuses, and StoreError if obstore
    is not installed.
    """
    instead = "or open a Zarr store object with engine=ZarrEngine(store, create=...)"
    if url.partition("://")[0] not in _SCHEMES:
        expected = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        raise ValueError(f"{url!r} is not the URL of an object store: pass one that begins with {expected}, {instead}")
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as error:
        raise StoreError(f"{url!r} needs obstore ({error}): run `{install_command('obstore')}`, {instead}") from error
    try:
        store = UrlStore(from_url(url))
        store.url = url
    except (BaseError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{url!r} cannot be opened as an object store ({reason}): correct it, {instead}") from error
    return store


class Objects:
    """Named bytes in a Zarr store, from any thread; every call blocks until it is done. All raise OSError."""

    def __init__(self, store: Store | Path | str, concurrency: int = CONCURRENCY) -> None:
        """Use a path, a ``LocalStore`` as its path, or any other Zarr store with ``concurrency`` requests in flight."""
        self.root: Path | None = None
        """The folder of the files; None on an object store."""
        if isinstance(store, LocalStore):
            store = Path(store.root)
        if isinstance(store, Path | str):
            self.root = local_path(store, "a store of engine 'zarr'", "pass a Zarr store object for it")
        else:
            self.store: Store = store
        self.label = f"the store in {store}" if self.root is None else f"the store at {self.root}"
        """The store's name in messages."""
        self.place: Path | str = self.root or self.label
        """The name of the disk or store in errors of a full one."""
        threads = concurrency if self.root is None else _THREADS
        self.threads = ThreadPoolExecutor(threads, thread_name_prefix="tiercache-chunks")
        """Threads for background writes, syncs and deletes."""
        self.check: Callable[[], None] = lambda: None
        """Called before anything is written, changed or deleted on a local disk; raises StoreError to prevent it."""
        self._reader, self._prototype = RangeReader(), default_buffer_prototype()
        self._slots = asyncio.Semaphore(concurrency)

    def close(self) -> None:
        """End the threads after their current work."""
        self.threads.shutdown()

    def unreadable(self, what: str, error: OSError) -> StoreError:
        """Return the error of unreadable objects: damage on a local disk, but not elsewhere."""
        if self.root is None or isinstance(error, PermissionError):
            return StoreError(f"{what} cannot be read ({error}): fix that and open the store again")
        return CorruptStoreError(f"{what} cannot be read ({error}): fix that, or restore the store from a copy")

    def path(self, key: str) -> str:
        """Return the path of an object's file, on a local disk."""
        return f"{self.root}/{key}"

    def make(self, key: str, make: Callable[[str], T]) -> T:
        """Call ``make`` with the path of a file, and again with a folder for it if it has none."""
        self.check()
        path = self.path(key)
        try:
            return make(path)
        except FileNotFoundError:
            self.check()
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            return make(path)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object that is not read yet; ``data`` must never change."""
        if self.root is None:
            array = np.frombuffer(data, np.uint8)
            self._together([self.store.set(key, self._prototype.buffer.from_array_like(array))])
        else:
            self.make(key, lambda path: write_whole(path, data))

    def publish(self, key: str, data: bytes) -> None:
        """Write a file that is whole or missing after a power loss; durable when its folder is synced."""
        # A fresh name: a crash may have left one that is being deleted.
        draft = f"{key}.{secrets.token_hex(4)}{LEFTOVER}"
        try:
            self.put(draft, data)
            sync(self.path(draft), data_only=True)
            self.check()
            Path(self.path(draft)).replace(self.path(key))
        except BaseException:
            with contextlib.suppress(OSError):
                self.check()
                Path(self.path(draft)).unlink(missing_ok=True)
            raise

    def withdraw(self, key: str) -> None:
        """Delete, durably, a file that ``publish`` may have written."""
        self.delete([key])
        with contextlib.suppress(FileNotFoundError):  # the file never existed
            sync(self.path(key.rpartition("/")[0]))

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless it exists, on an object store; return True if it was written.

        ``data`` must be unique to the writer. The store decides between writers (a conditional put); ``overwrites``
        checks that.
        """
        self._together([self.store.set_if_not_exists(key, self._prototype.buffer.from_bytes(data))])
        return self.get(key) == data

    def overwrites(self) -> str:
        """Return a message fragment if ``create`` may let a second writer win, else "".

        A Zarr store may lack a conditional put: Zarr's fallback checks and then writes. A server may ignore the
        condition: then the second put of a name replaces the first. Writes an object, and deletes it.
        """
        layer = self.store
        while isinstance(layer, WrapperStore) and type(layer).set_if_not_exists.__module__.startswith("zarr."):
            layer = layer._store
        if type(layer).set_if_not_exists is Store.set_if_not_exists:
            return f"{type(layer).__name__} has no put that fails if the object exists"
        for _ in range(_PROBES):
            key = f"{PROBES}/{secrets.token_hex(8)}"
            try:
                if self.create(key, b"first") and not self.create(key, b"second"):
                    return ""
            finally:
                self.delete([key])
        return f"{type(layer).__name__} replaces an object in a put that should fail if it exists"

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, and folders, whose names end in a slash; missing names are ignored."""
        if self.root is None:
            names = list(names)
            keys = [name for name in names if name[-1] != "/"]
            for found in self._together([_all(self.store.list_prefix, name) for name in names if name[-1] == "/"]):
                keys += found
            self._together([self.store.delete(key) for key in keys])
            return
        self.check()
        for name in names:
            if name[-1] == "/":
                shutil.rmtree(self.path(name), ignore_errors=True)
            else:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(self.path(name))  # noqa: PTH108  hundreds in a commit

    def punch(self, key: str, size: int) -> None:
        """Free the disk space of a file's first bytes, if the file system has holes."""
        self.check()
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(self.path(key), os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                punch_hole(handle, 0, size)
            finally:
                os.close(handle)

    def get(self, key: str) -> bytes | None:
        """Return an object; None if there is none."""
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return objects; None for those that are missing."""
        if self.root is None:
            found = self._together([self.store.get(key, self._prototype) for key in keys])
            return [None if one is None else bytes(one.to_bytes()) for one in found]
        files: list[bytes | None] = [None] * len(keys)
        for i, key in enumerate(keys):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
                files[i] = read_whole(self.path(key))
        return files

    def ends(self, keys: Sequence[str], sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Return the last ``sizes`` bytes of objects: fewer if one has fewer. Raises BlockReadError."""
        if self.root is None:
            return self._parts(keys, [SuffixByteRequest(size) for size in sizes])
        found = []
        for key, size in zip(keys, sizes, strict=True):
            path = self.path(key)
            try:
                found.append(np.frombuffer(read_whole(path, size), np.uint8))
            except OSError as error:
                raise unread(path, error) from error
        return found

    def ranges(self, places: Sequence[Place]) -> list[NDArray[np.uint8]]:
        """Return the bytes of objects, valid until this thread's next call. Raises BlockReadError."""
        if self.root is not None:
            whole = [(self.path(key), begin, begin + size, bytes_) for key, begin, size, bytes_, _ in places]
            return self._reader.read(whole)
        ranges = [RangeByteRequest(place.begin, place.begin + place.size) for place in places]
        out = self._parts([place.key for place in places], ranges)
        for place, data in zip(places, out, strict=True):
            if data.size != place.size:
                raise BlockReadError(f"is truncated: {place.key} ends at byte {place.begin + data.size:,}")
        return out

    def _parts(self, keys: Sequence[str], parts: Sequence[ByteRequest]) -> list[NDArray[np.uint8]]:
        try:
            found = self._together([self.store.get(*one) for one in zip(keys, repeat(self._prototype), parts)])
        except OSError as error:
            raise BlockReadError(f"cannot be read: one of {', '.join(keys)} raises an error ({error})") from error
        for key, one in zip(keys, found, strict=True):
            if one is None:
                raise BlockReadError(f"is missing: {key} does not exist")
        return [np.frombuffer(one.to_bytes(), np.uint8) for one in found if one is not None]

    def names(self, folder: str) -> list[str]:
        """Return the names directly below a folder, without the folder; for "", also objects outside of folders."""
        if self.root is None:
            listed = _all(self.store.list_prefix, folder + "/") if folder else _all(self.store.list_dir, "")
            return [name.removeprefix(folder + "/") for name in self._together([listed])[0]]
        with contextlib.suppress(FileNotFoundError):
            return os.listdir(self.path(folder))  # noqa: PTH208
        return []

    def sizes(self, folders: Sequence[str], *objects: str) -> dict[str, int]:
        """Return the sizes of all objects below folders, of others that exist, and on a disk of empty folders (0)."""
        if self.root is not None:
            found = {key: size for folder in folders for key, size in _walk(str(self.root), folder).items()}
            files = {key: Path(self.path(key)) for key in objects}
            return found | {key: file.stat().st_size for key, file in files.items() if file.is_file()}
        found = dict.fromkeys(objects, _UNSIZED)
        for one in self._together([self._sizes(folder + "/") for folder in folders]):
            found |= one
        unsized = [key for key, size in found.items() if size == _UNSIZED]
        found |= dict(zip(unsized, self._together([self._size(key) for key in unsized]), strict=True))
        return {key: size for key, size in found.items() if size != _UNSIZED}

    async def _sizes(self, prefix: str) -> dict[str, int]:
        if isinstance(self.store, ObjectStore):  # returns sizes at once
            return {one["path"]: one["size"] async for one in self.store._list(prefix)}
        return dict.fromkeys(await _all(self.store.list_prefix, prefix), _UNSIZED)

    async def _size(self, key: str) -> int:
        with contextlib.suppress(FileNotFoundError):
            return await self.store.getsize(key)
        return _UNSIZED

    def durable_paths(self, keys: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return the files, then the folders, to sync; none on an object store, where written objects are durable."""
        if self.root is None:
            return [], []
        files, folders = list(keys), {""}
        for key in files:
            folder = key.rpartition("/")[0]
            while folder not in folders:
                folders.add(folder)
                folder = folder.rpartition("/")[0]
        return [self.path(key) for key in files], [self.path(folder) for folder in sorted(folders)]

    def sync(self, keys: Iterable[str]) -> None:
        """Return when objects are durable, with their names and folders."""
        files, folders = self.durable_paths(keys)
        for paths, data_only in ((files, True), (folders, False)):
            jobs = [self.threads.submit(sync, path, data_only=data_only) for path in paths]
            wait(jobs)
            for job in jobs:
                job.result()

    def _together(self, requests: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Return the answers to concurrent requests, once all have arrived; errors are OSErrors."""

        async def one(request: Coroutine[Any, Any, T]) -> T:
            async with self._slots:
                return await request

        async def everything() -> list[T | BaseException]:
            return await asyncio.gather(*map(one, requests), return_exceptions=True)

        answers = zarr_sync(everything()) if requests else []
        for answer in answers:
            if isinstance(answer, OSError):
                raise answer
            if isinstance(answer, BaseException):
                raise OSError(f"{type(answer).__name__}: {answer}") from answer
        return answers  # type: ignore[return-value]


async def _all(names: Callable[[str], AsyncIterator[str]], of: str) -> list[str]:
    return [name async for name in names(of)]


def _walk(root: str, folder: str) -> dict[str, int]:
    """Return the files below a folder with their bytes, and empty folders, with a slash at the end, as 0."""

    def fail(error: OSError) -> None:
        # A writer may delete unneeded objects meanwhile; a file in place of a folder has no objects.
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    found: dict[str, int] = {}
    for path, folders, files in os.walk(f"{root}/{folder}", onerror=fail):
        name = path[len(root) + 1 :]
        if not folders and not files and name != folder:
            found[f"{name}/"] = 0
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                found[f"{name}/{file}"] = os.lstat(f"{path}/{file}").st_size
    return found


class ObjectNotes:
    """Notes as objects of an object store."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def label(self, name: str) -> str:
        """Return the name and the store of a note."""
        return f"object {name!r} of {self._objects.label}"

    def read(self, name: str) -> Note | None:
        """Return a note; None if there is none."""
        try:
            data = self._objects.get(name)
        except OSError as error:
            raise self._objects.unreadable(self.label(name), error) from error
        return None if data is None else Note(data, xxh64(data))

    def version(self, name: str) -> object:
        """Return the hash of the object, which is read."""
        note = self.read(name)
        return None if note is None else note.version

    def write(self, name: str, data: bytes) -> object:
        """Replace a note; returns its version."""
        with writing(self._objects.place, len(data)):
            self._objects.put(name, data)
        return xxh64(data)
