"""Chunks on their way to their objects: copied, a few at a time, written by threads."""

from __future__ import annotations

import queue
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.direct_file import paged
from tiercache.store.errors import StoreError, StoreFullError
from tiercache.store.full_disk import FULL, ROOM_FOR_RECORDS, check_room, full_disk
from tiercache.store.huge_pages import huge_pages
from tiercache.store.zarr_arrays import split

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.stream import Stream
    from tiercache.store.zarr_objects import Objects

_THREADS = 8
_BUFFERS = 14
"""Chunks that are in memory at once."""


class ChunkWriter:
    """Threads that write, sync and delete objects. ``put`` and ``finish`` are for one thread at a time."""

    def __init__(self, objects: Objects, label: str) -> None:
        self._objects, self._label = objects, label
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tiercache-chunks")
        self._jobs: list[Future[None]] = []
        self._sizes: dict[str, int] = {}
        self._buffers: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()
        for _ in range(_BUFFERS):
            self._buffers.put(np.empty(0, np.uint8))

    def put(
        self,
        key: str,
        size: int,
        fill: Callable[[NDArray[np.uint8]], None],
        encode: Callable[[NDArray[np.uint8]], bytes] | None = None,
    ) -> None:
        """Write an object of ``size`` bytes, which ``fill`` puts into memory before this returns.

        With ``encode`` the object is what that makes of them, on a thread of the writer. Raises StoreFullError and
        StoreError of this object or of one before.
        """
        while self._jobs and self._jobs[0].done():
            self._jobs.pop(0).result()
        buffer = self._buffers.get()
        try:
            if buffer.size < paged(size):
                buffer = huge_pages(size)
            fill(buffer[:size])
            self._jobs.append(self._pool.submit(self._put, key, buffer, size, encode))
        except BaseException:
            self._buffers.put(buffer)
            raise

    def finish(self) -> dict[str, int]:
        """Return when all that was put is written: the bytes of the objects since the last call that were encoded.

        Raises StoreFullError and StoreError.
        """
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()
        sizes, self._sizes = self._sizes, {}
        return sizes

    def abandon(self) -> None:
        """Return when nothing is being written any more, whatever became of it."""
        jobs, self._jobs = self._jobs, []
        wait(jobs)
        self._sizes = {}

    def sync(self, keys: Iterable[str]) -> None:
        """Return when objects are durable, with their names and folders. Raises StoreFullError and StoreError."""
        files, folders = self._objects.durable_paths(keys)
        nothing: list[str] = []
        for parts in ([(files[i::_THREADS], nothing) for i in range(_THREADS)], [(nothing, folders)]):
            jobs = [self._pool.submit(self._sync, *part) for part in parts if any(part)]
            wait(jobs)
            for job in jobs:
                job.result()

    def delete(self, keys: list[str], folders: list[str], spares: Sequence[tuple[str, int]] = ()) -> Future[None]:
        """Delete objects and folders meanwhile; first ``spares``, each with the commit that freed it, become such."""
        return self._pool.submit(self._delete, keys, folders, spares)

    def close(self) -> None:
        """Finish what goes on."""
        self._pool.shutdown()

    def check_room(self, size: int) -> None:
        """Raise StoreFullError where the file system has no room for ``size`` bytes and for records."""
        if self._objects.root is not None:
            with self.translated(size, kept=ROOM_FOR_RECORDS):
                check_room(self._objects.root, size + ROOM_FOR_RECORDS)

    def publish(self, key: str, data: bytes) -> None:
        """Write an object as ``Objects.publish`` does. Raises StoreFullError and StoreError."""
        with self.translated(max(ROOM_FOR_RECORDS, len(data))):
            self._objects.publish(key, data)

    @contextmanager
    def translated(self, needed: int, *, kept: int = 0) -> Iterator[None]:
        """Turn errors of the system into the store's: what could not be written has ``needed`` bytes.

        ``kept`` bytes were to stay free beside them.
        """
        try:
            yield
        except OSError as error:
            if error.errno in FULL:
                raise _full(self._objects.root, needed, kept, error) from error
            raise StoreError(
                f"{self._label} cannot be written ({error}): mend that and open the store again"
            ) from error

    # -- inside ------------------------------------------------------------------------------------------

    def _put(
        self, key: str, buffer: NDArray[np.uint8], size: int, encode: Callable[[NDArray[np.uint8]], bytes] | None
    ) -> None:
        try:
            if encode is not None:
                data = encode(buffer[:size])
                self._sizes[key] = size = len(data)
                if buffer.size < paged(size):
                    buffer = huge_pages(size)
                buffer[:size] = np.frombuffer(data, np.uint8)
            with self.translated(size):
                self._objects.put(key, buffer, size)
        finally:
            self._buffers.put(buffer)

    def _sync(self, files: list[str], folders: list[str]) -> None:
        with self.translated(ROOM_FOR_RECORDS):
            self._objects.sync(files, folders)

    def _delete(self, keys: list[str], folders: list[str], spares: Sequence[tuple[str, int]]) -> None:
        for key, freed in spares:
            self._objects.spare(key, freed)
        self._objects.delete(keys)
        for folder in folders:
            self._objects.delete_folder(folder)


def copy_of(data: NDArray[np.uint8]) -> Callable[[NDArray[np.uint8]], None]:
    """Return what fills a buffer with ``data``, zeros after it."""

    def fill(buffer: NDArray[np.uint8]) -> None:
        buffer[: data.size] = data
        buffer[data.size :] = 0

    return fill


def field_of(
    stream: Stream, block: int, data: NDArray[np.uint8], field_at: int, size: int
) -> Callable[[NDArray[np.uint8]], None]:
    """Return what fills a buffer with the ``size`` bytes of one field of a block's rows, zeros after it."""

    def fill(buffer: NDArray[np.uint8]) -> None:
        split(stream, block, data, field_at, buffer[:size])
        buffer[size:] = 0

    return fill


def _full(root: Path | None, needed: int, kept: int, error: OSError) -> StoreFullError:
    if root is None:
        return StoreFullError(needed_bytes=needed, limit=f"its place is full ({error})", advice="free some")
    return full_disk(root, error, needed, kept_bytes=kept)
