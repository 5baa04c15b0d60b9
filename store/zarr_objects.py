"""The objects of a Zarr store by name; the only module that imports zarr.

On a local disk the store is a ``LocalStore`` that also writes and reads past the page cache: as it is, it writes at
0.23 and reads at 0.34 of the disk's speed. Any other store of Zarr is used as it is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from zarr.abc.store import RangeByteRequest, Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore

from tiercache.store.direct_file import RangeReader, sync_file, sync_folder, write_file
from tiercache.store.errors import BlockReadError
from tiercache.store.full_disk import FULL
from tiercache.store.huge_pages import huge_pages

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from tiercache.store.spare_files import SpareFiles
    from tiercache.store.zarr_arrays import Span

LEFTOVER = ".partial"
"""How the names of objects end that Zarr had not written to the end."""


class DiskStore(LocalStore):
    """A ``LocalStore`` that takes and gives ranges without copies, and syncs."""

    def __init__(self, root: Path | str, *, read_only: bool = False) -> None:
        super().__init__(root, read_only=read_only)
        self._reader, self._place = RangeReader(), f"{self.root}/"

    def put(self, key: str, buffer: NDArray[np.uint8], size: int, spare: str | None = None) -> None:
        """Write the first bytes of ``huge_pages`` as an object that nobody knows yet, over ``spare`` where given."""
        path = self._place + key
        try:
            write_file(path, buffer, size, spare)
        except FileNotFoundError:
            (self.root / key).parent.mkdir(parents=True, exist_ok=True)
            there = spare is not None and Path(spare).exists()  # whoever tidies up may delete it
            write_file(path, buffer, size, spare if there else None)

    def publish(self, key: str, data: bytes) -> None:
        """Write an object under another name, sync it, and give it its name."""
        # No name that a crash may have left, and that is being deleted meanwhile.
        buffer, draft = huge_pages(len(data)), f"{key}.{secrets.token_hex(4)}{LEFTOVER}"
        buffer[: len(data)] = np.frombuffer(data, np.uint8)
        try:
            self.put(draft, buffer, len(data))
            sync_file(self._place + draft)
            (self.root / draft).replace(self.root / key)
        except BaseException:
            with contextlib.suppress(OSError):
                (self.root / draft).unlink(missing_ok=True)
            raise

    def path(self, key: str) -> str:
        """Return where an object is."""
        return self._place + key

    def reads_direct(self, num_bytes: Iterable[int]) -> bool:
        """Whether ranges of these bytes, read together, are read past the page cache."""
        return self._reader.reads_direct(num_bytes)

    def ranges(self, spans: Sequence[Span]) -> list[NDArray[np.uint8]]:
        """Return the bytes of spans, until this thread's next call. Raises BlockReadError."""
        return self._reader.read([(self._place + key, start, stop, size) for key, start, stop, size in spans])


class Objects:
    """Named bytes in a Zarr store, from any thread; every call returns when it is done."""

    def __init__(self, store: Store | Path) -> None:
        """A path becomes a store on the local disk, as a ``LocalStore`` does; other stores stay as they are."""
        if isinstance(store, LocalStore) and not isinstance(store, DiskStore):
            store = DiskStore(store.root, read_only=store.read_only)
        self.store: Store = DiskStore(store) if isinstance(store, Path) else store
        self.spares: SpareFiles | None = None
        """What new objects are written over, where the owner keeps some."""
        self._prototype = default_buffer_prototype()

    @property
    def disk(self) -> DiskStore | None:
        """The store where its objects are files; None elsewhere."""
        return self.store if isinstance(self.store, DiskStore) else None

    @property
    def root(self) -> Path | None:
        """Where the objects are files; None elsewhere."""
        return None if self.disk is None else self.disk.root

    def put(self, key: str, buffer: NDArray[np.uint8], size: int) -> None:
        """Write the first ``size`` bytes of ``huge_pages`` as an object that nobody knows yet. Raises OSError."""
        if isinstance(self.store, DiskStore):
            spare = None if self.spares is None else self.spares.take(size)
            try:
                self.store.put(key, buffer, size, spare)
            except OSError as error:
                self._make_room(error)
                self.store.put(key, buffer, size)
        else:
            self.set(key, buffer[:size].tobytes())

    def set(self, key: str, data: bytes) -> None:
        """Write an object; whoever reads it sees all of it or what was there before. Raises OSError."""
        value = self._prototype.buffer.from_bytes(data)
        if hasattr(self.store, "set_sync"):
            self.store.set_sync(key, value)
        else:
            sync(self.store.set(key, value))

    def publish(self, key: str, data: bytes) -> None:
        """Write an object that is whole or not there, whenever the power goes. Raises OSError.

        On a local disk its bytes are durable before its name is there, and the name is when its folder is synced.
        """
        if isinstance(self.store, DiskStore):
            try:
                self.store.publish(key, data)
            except OSError as error:
                self._make_room(error)
                self.store.publish(key, data)
        else:
            self.set(key, data)

    def _make_room(self, error: OSError) -> None:
        """Give all spares back, so that what ``error`` kept from being written may be; raise it where they cannot help.

        Other threads give them back too, so there may be room where none are left.
        """
        if error.errno not in FULL or self.spares is None:
            raise error
        self.spares.shrink()

    def get(self, key: str) -> bytes | None:
        """Return an object; None where there is none."""
        if hasattr(self.store, "get_sync"):
            found = self.store.get_sync(key, prototype=self._prototype)
        else:
            found = sync(self.store.get(key, self._prototype))
        return None if found is None else bytes(found.to_bytes())

    def ranges(self, spans: Sequence[Span]) -> list[NDArray[np.uint8]]:
        """Return the bytes of spans, until this thread's next call. Raises BlockReadError."""
        if isinstance(self.store, DiskStore):
            return self.store.ranges(spans)
        return sync(self._ranges(spans))

    async def _ranges(self, spans: Sequence[Span]) -> list[NDArray[np.uint8]]:
        asked = [(span.key, RangeByteRequest(span.start, span.stop)) for span in spans]
        found = await self.store.get_partial_values(self._prototype, asked)
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
        """Delete objects; those that are gone already are no error. Raises OSError."""
        if isinstance(self.store, DiskStore):
            root = self.store.root
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{root}/{key}")  # noqa: PTH108  hundreds in a commit
        else:
            sync(self._delete(list(keys)))

    async def _delete(self, keys: list[str]) -> None:
        for key in keys:
            await self.store.delete(key)

    def spare(self, key: str, freed: int) -> None:
        """Keep an object that commit ``freed`` gave up as a spare, where there are some. Raises OSError."""
        if self.spares is not None:
            self.spares.keep(f"{self.root}/{key}", freed)

    def delete_folder(self, folder: str) -> None:
        """Delete everything below a name."""
        if isinstance(self.store, DiskStore):
            shutil.rmtree(self.store.root / folder, ignore_errors=True)
        else:
            sync(self.store.delete_dir(folder))

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Return every object below a name, with its bytes where the store says them at once."""
        if isinstance(self.store, DiskStore):
            return _walk(str(self.store.root), folder)
        return dict.fromkeys(sync(_collect(self.store.list_prefix(folder + "/"))))

    def tidy(self, folder: str) -> None:
        """Delete folders below ``folder`` that hold nothing, and what Zarr had begun to write beside it."""
        if not isinstance(self.store, DiskStore):
            return
        for here, _, _ in os.walk(self.store.root / folder, topdown=False):
            with contextlib.suppress(OSError):  # most are not empty
                Path(here).rmdir()
        for path in self.store.root.glob("*" + LEFTOVER):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def sync_folder(self, folder: str) -> None:
        """Return when the names in a folder are durable. Raises OSError."""
        if isinstance(self.store, DiskStore):
            sync_folder(f"{self.store.root}/{folder}")

    def durable_paths(self, keys: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return the files, and then the folders, that are to be synced so that objects last.

        Elsewhere than on a local disk objects last when they are written.
        """
        if not isinstance(self.store, DiskStore):
            return [], []
        files, folders = list(keys), {""}
        for key in files:
            folder = key.rpartition("/")[0]
            while folder not in folders:
                folders.add(folder)
                folder = folder.rpartition("/")[0]
        root = f"{self.store.root}/"
        return [root + key for key in files], [root + folder for folder in sorted(folders)]

    @staticmethod
    def sync(files: Iterable[str], folders: Iterable[str]) -> None:
        """Return when the bytes of files, and the names in folders, are durable. Raises OSError."""
        for path in files:
            sync_file(path)
        for path in folders:
            sync_folder(path)


def _walk(root: str, folder: str) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        # A writer may delete what no reader needs meanwhile; a file in the place of a folder has no objects.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(f"{root}/{here}") as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{here}/{entry.name}")
                    continue
                with contextlib.suppress(FileNotFoundError):
                    found[f"{here}/{entry.name}"] = entry.stat(follow_symlinks=False).st_size
    return found


async def _collect(keys: Any) -> list[str]:
    return [key async for key in keys]
