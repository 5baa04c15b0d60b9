"""The objects of a Zarr store by name; the only module that imports zarr.

On a local disk objects are files, which are written and read past the page cache: as it is, ``LocalStore`` writes at
0.23 and reads at 0.34 of the disk's speed. Any other store of Zarr is used as it is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from zarr.abc.store import RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync as zarr_sync
from zarr.storage import LocalStore, WrapperStore

from tiercache.store.engines.zarr_layout import NODE
from tiercache.store.files import RangeReader, local_path, punch_hole, read_whole, sync, write_whole
from tiercache.store.records import Link, RecordManifest
from tiercache.store.store_errors import BlockReadError, CorruptStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from numpy.typing import NDArray


T = TypeVar("T")
PROBES = "probes"
"""The folder of objects that are there for a moment, while a store is opened for writing."""
_PROBES = 3
"""How often: a writer that opens the store at the same time may delete them, as ones that a killed one left."""
LEFTOVER = ".partial"
"""How the names of objects end that were not written to the end."""


class Span(NamedTuple):
    """Bytes [start, stop) of a chunk, which has ``size`` bytes in all; below 0: any."""

    key: str
    start: int
    stop: int
    size: int


class Objects:
    """Named bytes in a Zarr store, from any thread; every call returns when it is done. All raise OSError."""

    def __init__(self, store: Store | Path) -> None:
        """Use a path, a ``LocalStore`` as the path that it has, or any other store of Zarr."""
        self.root: Path | None = None
        """Where the objects are files; None elsewhere."""
        if isinstance(store, LocalStore):
            store = Path(store.root)
        if isinstance(store, Path | str):
            self.root = local_path(store, "a store of engine 'zarr'", "give a store object of Zarr for it")
        else:
            self.store: Store = store
        self.check: Callable[[], None] = lambda: None
        """Called before anything is written, changed or deleted on a local disk; raises StoreError to prevent it."""
        self._reader, self._prototype = RangeReader(), default_buffer_prototype()

    def path(self, key: str) -> str:
        """Return where the file of an object is, on a local disk."""
        return f"{self.root}/{key}"

    def folder_of(self, key: str) -> None:
        """Make the folder that an object is to stand in, where there are any."""
        if self.root is not None:
            self.check()
            (self.root / key).parent.mkdir(parents=True, exist_ok=True)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object that nobody knows yet."""
        if self.root is None:
            _remote(self.store.set(key, self._prototype.buffer.from_bytes(bytes(data))))
            return
        self.check()
        try:
            write_whole(self.path(key), data)
        except FileNotFoundError:
            self.folder_of(key)
            write_whole(self.path(key), data)

    def publish(self, key: str, data: bytes) -> None:
        """Write an object that is whole or not there, whenever the power goes.

        On a local disk its bytes are durable before its name is there, and the name is when its folder is synced.
        """
        if self.root is None:
            self.put(key, data)
            return
        # No name that a crash may have left, and that is being deleted meanwhile.
        draft = f"{key}.{secrets.token_hex(4)}{LEFTOVER}"
        try:
            self.put(draft, data)
            sync(self.path(draft), data_only=True)
            self.check()
            (self.root / draft).replace(self.root / key)
        except BaseException:
            with contextlib.suppress(OSError):
                self.check()
                (self.root / draft).unlink(missing_ok=True)
            raise

    def create(self, key: str, data: bytes) -> bool:
        """Write an object that must not be there, elsewhere than on a local disk; return whether this one is there.

        ``data`` must be what nobody else writes. The store decides between writers (a conditional put), as
        ``overwrites`` finds out.
        """
        _remote(self.store.set_if_not_exists(key, self._prototype.buffer.from_bytes(data)))
        return self.get(key) == data

    def overwrites(self) -> str:
        """Return why ``create`` may let a second writer win, in words that end a sentence; or "".

        A store of Zarr may have no conditional put of its own: Zarr's looks and then writes. A server may not know the
        condition: then the second put of a name replaces the first. Writes an object, and deletes it.
        """
        layer = self.store
        while isinstance(layer, WrapperStore) and type(layer).set_if_not_exists.__module__.startswith("zarr."):
            layer = layer._store
        if type(layer).set_if_not_exists is Store.set_if_not_exists:
            return f"{type(layer).__name__} has no put that fails where the object exists"
        for _ in range(_PROBES):
            key = f"{PROBES}/{secrets.token_hex(8)}"
            try:
                if self.create(key, b"first") and not self.create(key, b"second"):
                    return ""
            finally:
                self.delete([key])
        return f"{type(layer).__name__} replaces an object by a put that is to fail where it exists"

    def get(self, key: str) -> bytes | None:
        """Return an object; None where there is none."""
        if self.root is not None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                return read_whole(self.path(key))
            return None
        found = _remote(self.store.get(key, self._prototype))
        return None if found is None else bytes(found.to_bytes())

    def end(self, key: str, num_bytes: int) -> NDArray[np.uint8]:
        """Return the last bytes of an object: fewer where it has fewer. Raises BlockReadError."""
        if self.root is None:
            found = _remote(self.store.get(key, self._prototype, SuffixByteRequest(num_bytes)))
            if found is None:
                raise BlockReadError(f"is missing, as there is no {key}")
            return np.frombuffer(found.to_bytes(), np.uint8)
        try:
            return np.frombuffer(read_whole(self.path(key), num_bytes), np.uint8)
        except (FileNotFoundError, NotADirectoryError):
            raise BlockReadError(f"is missing, as there is no {self.path(key)}") from None
        except OSError as error:
            raise BlockReadError(f"cannot be read, as {self.path(key)} gives an error ({error})") from error

    def reads_direct(self, num_bytes: Iterable[int]) -> bool:
        """Whether ranges of these bytes, read together, are read past the page cache."""
        return self._reader.reads_direct(num_bytes)

    def ranges(self, spans: Sequence[Span]) -> list[NDArray[np.uint8]]:
        """Return the bytes of spans, until this thread's next call. Raises BlockReadError."""
        if self.root is None:
            return _remote(self._ranges(spans))
        return self._reader.read([(self.path(key), start, stop, size) for key, start, stop, size in spans])

    async def _ranges(self, spans: Sequence[Span]) -> list[NDArray[np.uint8]]:
        requests = [(span.key, RangeByteRequest(span.start, span.stop)) for span in spans]
        try:
            found = await self.store.get_partial_values(self._prototype, requests)
        except FileNotFoundError as error:  # from obstore, of the first that is not there
            key = next((span.key for span in spans if span.key in str(error)), spans[0].key)
            raise BlockReadError(f"is missing, as there is no {key}") from None
        out = []
        for span, value in zip(spans, found, strict=True):
            if value is None:
                raise BlockReadError(f"is missing, as there is no {span.key}")
            data = np.frombuffer(value.to_bytes(), np.uint8)
            if data.size != span.stop - span.start:
                raise BlockReadError(f"is cut short, as {span.key} ends at byte {span.start + data.size:,}")
            out.append(data)
        return out

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are gone already are no error."""
        if self.root is None:
            _remote(self._delete(list(keys)))
            return
        self.check()
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path(key))  # noqa: PTH108  hundreds in a commit

    async def _delete(self, keys: list[str]) -> None:
        for key in keys:
            await self.store.delete(key)

    def delete_folder(self, folder: str) -> None:
        """Delete everything below a name."""
        if self.root is None:
            _remote(self.store.delete_dir(folder))
        else:
            self.check()
            shutil.rmtree(self.path(folder), ignore_errors=True)

    def punch(self, key: str, runs: Iterable[tuple[int, int]]) -> None:
        """Give the room of runs of bytes of a file back, where the file system has holes."""
        self.check()
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(self.path(key), os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                for low, high in runs:
                    punch_hole(handle, low, high - low)
            finally:
                os.close(handle)

    def names(self, folder: str) -> list[str]:
        """Return the names of everything directly below a name, without that."""
        if self.root is None:
            found = _remote(_collect(self.store.list_prefix(folder + "/")))
            return [key[len(folder) + 1 :] for key in found]
        with contextlib.suppress(FileNotFoundError):
            return os.listdir(self.path(folder))  # noqa: PTH208
        return []

    def sizes(self, *folders: str) -> dict[str, int | None]:
        """Return every object below names, with its bytes where the store says them at once."""
        found: dict[str, int | None] = {}
        for folder in folders:
            if self.root is None:
                found |= dict.fromkeys(_remote(_collect(self.store.list_prefix(folder + "/"))))
            else:
                found |= _walk(str(self.root), folder)
        return found

    def tidy(self, folder: str) -> None:
        """Delete folders below ``folder`` that hold nothing."""
        if self.root is not None:
            self.check()
            for folder_path, _, _ in os.walk(self.root / folder, topdown=False):
                with contextlib.suppress(OSError):  # most are not empty
                    Path(folder_path).rmdir()

    def durable_paths(self, keys: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return the files, and then the folders, that are to be synced so that objects last.

        Elsewhere than on a local disk objects last when they are written.
        """
        if self.root is None:
            return [], []
        files, folders = list(keys), {""}
        for key in files:
            folder = key.rpartition("/")[0]
            while folder not in folders:
                folders.add(folder)
                folder = folder.rpartition("/")[0]
        return [self.path(key) for key in files], [self.path(folder) for folder in sorted(folders)]

    @staticmethod
    def sync(files: Iterable[str], folders: Iterable[str]) -> None:
        """Return when the bytes of files, and the names in folders, are durable."""
        for path in files:
            sync(path, data_only=True)
        for path in folders:
            sync(path)


def _walk(root: str, folder: str) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    pending = [folder]
    while pending:
        folder_path = pending.pop()
        # A writer may delete what no reader needs meanwhile; a file in the place of a folder has no objects.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(f"{root}/{folder_path}") as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(f"{folder_path}/{entry.name}")
                    continue
                with contextlib.suppress(FileNotFoundError):
                    found[f"{folder_path}/{entry.name}"] = entry.stat(follow_symlinks=False).st_size
    return found


async def _collect(keys: Any) -> list[str]:
    return [key async for key in keys]


def _remote(requests: Coroutine[Any, Any, T]) -> T:
    """Return what a store of Zarr answers; whatever it raises is an OSError."""
    try:
        return zarr_sync(requests)
    except (OSError, BlockReadError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


_LOOKS = 100
"""How often the newest manifest is looked for, where a writer replaces it meanwhile."""


class Records:
    """Finds manifests and reads records. All raise CorruptStoreError."""

    def __init__(self, objects: Objects, label: str) -> None:
        self._objects, self._label = objects, label

    def newest(self, *, create: bool) -> RecordManifest:
        """Return the newest manifest; that of an empty store where one is made."""
        for _ in range(_LOOKS):
            number = max(self._numbers("manifests"), default=None)
            if number is None:
                made = (key for key in self.sizes("segments", "state") if not key.endswith(LEFTOVER))
                if create and all(key.split("/")[-1] == NODE for key in made):
                    return RecordManifest(number=0)
                continue
            data = self._get(f"manifests/{number}")
            if data is not None:
                manifest = RecordManifest.from_bytes(data, f"manifest {number} of {self._label}")
                if manifest.number != number:
                    raise CorruptStoreError(
                        f"manifest {number} of {self._label} says that it is {manifest.number}: "
                        "restore the store from a copy"
                    )
                return manifest
        raise CorruptStoreError(f"the manifest of {self._label} is missing: restore the store from a copy")

    def of(self, manifest: RecordManifest) -> dict[str, bytes]:
        """Return the records that a manifest names."""
        return manifest.read(lambda name, link: self._get(record_key(name, link)), self._label)

    def follow(self, known: RecordManifest) -> tuple[RecordManifest, dict[str, bytes]]:
        """Return the newest manifest and its records, whatever a writer does meanwhile; never one before ``known``."""
        for _ in range(_LOOKS):
            newest = self.newest(create=False)
            if newest.number < known.number:
                raise CorruptStoreError(
                    f"{self._label} is at manifest {newest.number} and was at {known.number} before: "
                    "restore the store from a copy"
                )
            try:
                return newest, self.of(newest)
            except CorruptStoreError:
                if self.newest_number() == newest.number:
                    raise
        raise CorruptStoreError(f"{self._label} changes faster than it can be read: open it again")

    def sizes(self, *folders: str) -> dict[str, int | None]:
        """Return every object below names, with its bytes where the store says them at once."""
        try:
            return self._objects.sizes(*folders)
        except OSError as error:
            raise CorruptStoreError(
                f"{self._label} cannot be listed ({error}): mend that, or restore the store from a copy"
            ) from error

    def newest_number(self) -> int:
        """Return the greatest number of a manifest; 0 where there is none."""
        return max(self._numbers("manifests"), default=0)

    def next_number(self, newest: RecordManifest) -> int:
        """Return a number that no manifest and no record has or had."""
        return max([newest.number, *self._numbers("manifests"), *self._numbers("records")]) + 1

    def _numbers(self, folder: str) -> list[int]:
        """Return the numbers of manifests, or those of the manifests that wrote records."""
        try:
            names = self._objects.names(folder)
        except OSError as error:
            raise CorruptStoreError(
                f"{folder} of {self._label} cannot be listed ({error}): mend that, or restore the store from a copy"
            ) from error
        if folder == "records":
            names = [name.partition("-")[0] for name in names]
        return [int(name) for name in names if name.isdecimal()]

    def _get(self, key: str) -> bytes | None:
        try:
            return self._objects.get(key)
        except (OSError, ValueError) as error:  # a damaged manifest may name what is no name
            raise CorruptStoreError(
                f"object {key} of {self._label} cannot be read ({error}): mend that, or restore the store from a copy"
            ) from error


def record_key(name: str, link: Link) -> str:
    """Return the name of a record's object."""
    return f"records/{link.number}-{name.replace('/', '.')}"


def manifest_key(manifest: RecordManifest) -> str:
    """Return the name of a manifest's object."""
    return f"manifests/{manifest.number}"
