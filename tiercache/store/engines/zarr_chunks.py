"""Chunks of Zarr arrays: readers of their ranges, compressed or not, and writers on threads."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.store.engines.engine import WRITE_BYTES
from tiercache.store.engines.zarr_layout import Place, merge
from tiercache.store.files import PAGE_BYTES, ROOM_FOR_RECORDS, check_room, huge_pages, paged, write_at, writing
from tiercache.store.store_errors import BlockReadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.engines.engine import BlobRows
    from tiercache.store.engines.zarr_layout import Arrays
    from tiercache.store.engines.zarr_objects import Objects

    Bytes = NDArray[np.uint8]
    Fill = Callable[[Bytes], None]

_THREADS = 4
"""That write files, sync and delete."""


class ChunkReader:
    """Reads blobs, from any thread. Raises BlockReadError."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def read_objects(self, arrays: Arrays, offset: int, out: Bytes) -> None:
        """Read bytes of a plain blob."""
        (array,), spans, at = arrays.arrays, [], 0
        while at < out.size:
            low = offset + at
            size = min(out.size - at, arrays.step - low % arrays.step)
            place = array.place(low, low + size)
            spans.append((place, out[at : at + size]))
            at += size
        # Files are read in turn, as each is read into the same memory.
        together = len(spans) if self._objects.root is None else 1
        for i in range(0, len(spans), max(1, together)):
            some = spans[i : i + together]
            for data, (_, target) in zip(self._objects.ranges([place for place, _ in some]), some, strict=True):
                target[:] = data

    def read_rows(self, arrays: Arrays, of: BlobRows, offset: int, out: Bytes) -> None:
        """Read whole pages of rows, or keys or last changes; padding between blocks is zeros."""
        while out.size:
            size = min(out.size, arrays.step - offset % arrays.step)
            first, last = arrays.rows_at(offset, size)
            rows = out[: (last - first) * arrays.row_bytes]
            out[rows.size : size] = 0
            if rows.size:
                found = self._rows(arrays, first, last)
                if len(found) == 1:
                    rows[:] = found[0]
                else:
                    merge(of.layout, first, rows, found)
            offset, out = offset + size, out[size:]

    def _rows(self, arrays: Arrays, first: int, last: int) -> list[Bytes]:
        """Return rows [first, last) of a block in each array, until this thread's next call."""
        places = [array.place(first, last) for array in arrays.arrays]
        if arrays.arrays[0].shards is None:
            return self._objects.ranges(places)
        shards = [array.shards for array in arrays.arrays if array.shards is not None]
        ends = self._objects.ends([place.key for place in places], [one.index_bytes for one in shards])
        spans, inners = [], []
        low, high = (row % arrays.arrays[0].block_rows for row in (first, last - 1))
        for (key, *_), codec, end in zip(places, shards, ends, strict=True):
            if end.size < codec.index_bytes:
                raise BlockReadError(f"is not whole, as {key} has {end.size:,} bytes of {codec.index_bytes:,} at least")
            inner = codec.index_of(end)[low // codec.inner_rows : high // codec.inner_rows + 1]
            if np.any(inner[:, 0] < 0) or np.any(np.diff(inner[:, 0]) < 0):
                raise BlockReadError(f"lacks some of its rows {first} to {last}, as {key} does not have them")
            begin = int(inner[0, 0])
            spans.append(Place(key, begin, int(inner[-1].sum()) - begin, -1, -1))
            inners.append(inner)
        found = self._objects.ranges(spans)
        return [one.decode(inner, data, low, high + 1) for one, inner, data in zip(shards, inners, found, strict=True)]


class Buffers:
    """Memory in whole pages that is used again, ``most_bytes`` in all or one buffer that is larger."""

    def __init__(self) -> None:
        self.most_bytes = WRITE_BYTES
        self._free: list[Bytes] = []
        self._used = 0
        self._changed = threading.Condition()

    def take(self, num_bytes: int) -> Bytes:
        """Return at least so many bytes, when there are any."""
        with self._changed:
            while True:
                # The last one that was given back: mostly all have the same size.
                for i in range(len(self._free) - 1, -1, -1):
                    if num_bytes <= self._free[i].size <= 2 * num_bytes + (1 << 20):
                        buffer = self._free.pop(i)
                        self._used += buffer.size
                        return buffer
                if not self._used or self._used + num_bytes <= self.most_bytes:
                    while self._free and self._used + num_bytes + sum(b.size for b in self._free) > self.most_bytes:
                        self._free.pop(0)
                    buffer = huge_pages(num_bytes)
                    self._used += buffer.size
                    return buffer
                self._changed.wait()

    def give(self, buffer: Bytes) -> None:
        """Take a buffer back."""
        with self._changed:
            self._used -= buffer.size
            self._free.append(buffer)
            self._changed.notify()


class ChunkWriter:
    """Threads that write, sync and delete objects; each method is for one thread at a time, unless it says otherwise.

    Raises StoreFullError and StoreError, also those of what was begun before.
    """

    def __init__(self, objects: Objects, place: Path | str, threads: int = _THREADS) -> None:
        """``place`` is where objects are, for messages: a path, or an object store in words."""
        self._objects, self.place = objects, place
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tiercache-chunks")
        self._jobs: list[Future[None]] = []
        self.buffers = Buffers()
        self.stable = False
        """True while the memory that ``fill`` takes bytes from stays as it is until ``finish``."""

    def put(self, place: Place, fill: Fill) -> None:
        """Write bytes of an object; ``fill`` copies them before this returns, or later if ``stable``."""
        raise NotImplementedError

    def put_encoded(self, key: str, size: int, fill: Fill, encode: Callable[[Bytes], bytes]) -> None:
        """Write an object: the result of ``encode``, on a thread, for ``size`` bytes."""
        self._raise_early()
        buffer = self.buffers.take(size)

        def write() -> None:
            packed = encode(buffer[:size])
            with writing(self.place, len(packed)):
                self._objects.put(key, packed)

        self._submit(buffer, write, lambda: fill(buffer[:size]))

    def put_object(self, key: str, data: bytes) -> None:
        """Write a small object."""
        with writing(self.place, len(data) + ROOM_FOR_RECORDS):
            self._objects.put(key, data)

    def finish(self) -> None:
        """Return when all that was put is written."""
        jobs, self._jobs = self._jobs, []
        wait(jobs)
        for job in jobs:
            job.result()

    def abandon(self) -> None:
        """Return when nothing is being written any more, whether it was written or not."""
        jobs, self._jobs = self._jobs, []
        wait(jobs)

    def sync(self, keys: Iterable[str]) -> None:
        """Return when objects are durable, with their names and folders."""
        files, folders = self._objects.durable_paths(keys)
        with writing(self.place):
            for paths, data_only in ((files, True), (folders, False)):
                jobs = [self._pool.submit(self._objects.sync, path, data_only=data_only) for path in paths]
                wait(jobs)
                for job in jobs:
                    job.result()

    def later(self, do: Callable[[], None]) -> Future[None]:
        """Do something on another thread."""
        return self._pool.submit(do)

    def close(self) -> None:
        """Finish what is under way, and end the threads."""
        self.abandon()
        self._pool.shutdown()

    def check_room(self, size: int, kept: int) -> None:
        """Raise StoreFullError if the file system has no room for ``size`` bytes and for ``kept`` ones."""
        if self._objects.root is not None:
            with writing(self._objects.root, size, kept_bytes=kept):
                check_room(self._objects.root, size + kept)

    # -- inside ------------------------------------------------------------------------------------------

    def _raise_early(self) -> None:
        while self._jobs and self._jobs[0].done():
            self._jobs.pop(0).result()

    def _submit(self, buffer: Bytes, job: Callable[[], None], fill: Callable[[], None]) -> None:
        later = self.stable

        def run() -> None:
            try:
                if later:
                    fill()
                job()
            finally:
                self.buffers.give(buffer)

        try:
            if not later:
                fill()
            self._jobs.append(self._pool.submit(run))
        except BaseException:
            self.buffers.give(buffer)
            raise


class DiskWriter(ChunkWriter):
    """Writes bytes into files, whole pages past the page cache."""

    def __init__(self, objects: Objects, place: Path) -> None:
        super().__init__(objects, place)
        self._direct = hasattr(os, "O_DIRECT")

    def put(self, place: Place, fill: Fill) -> None:
        """Write bytes into their file, which gets its room on the disk and its length with the first of them."""
        self._raise_early()
        lead = place.begin % PAGE_BYTES
        buffer = self.buffers.take(paged(lead + place.size))

        def write() -> None:
            with writing(self.place, place.used_bytes, kept_bytes=ROOM_FOR_RECORDS), ExitStack() as files:
                handle = self._open(place, files)
                direct = self._open_direct(place, files)
                self._direct &= write_at(handle, direct, buffer, place.begin, place.size)

        self._submit(buffer, write, lambda: fill(buffer[lead : lead + place.size]))

    def _open(self, place: Place, files: ExitStack) -> int:
        self._objects.check()
        path, flags = self._objects.path(place.key), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            handle = os.open(path, flags, 0o644)
        except FileNotFoundError:
            self._objects.folder_of(place.key)
            handle = os.open(path, flags, 0o644)
        files.callback(os.close, handle)
        status = os.fstat(handle)
        if status.st_size != place.whole_bytes or status.st_blocks * 512 < place.used_bytes:
            os.posix_fallocate(handle, 0, place.used_bytes)
            os.ftruncate(handle, place.whole_bytes)
        return handle

    def _open_direct(self, place: Place, files: ExitStack) -> int | None:
        """Open a file a second time, past the page cache; None where system or file system cannot."""
        if not self._direct:
            return None
        try:
            handle = os.open(self._objects.path(place.key), os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = False
            return None
        files.callback(os.close, handle)
        return handle


class _Chunk(NamedTuple):
    """A chunk in memory: pages that were not touched take none."""

    data: Bytes
    filled: int
    """Bytes that were put."""


class RemoteWriter(ChunkWriter):
    """Gathers chunks in memory until all their bytes have come, or until too many wait, and puts them together."""

    def __init__(self, objects: Objects, place: str, concurrency: int) -> None:
        super().__init__(objects, place, concurrency)
        self._chunks: dict[str, _Chunk] = {}
        """By name; the one that waits longest first."""
        self._early: dict[str, int] = {}
        """Bytes that chunks had when they were put before they were full."""
        self._bytes = 0
        """Bytes of chunks that are being filled or written."""
        self._lock = threading.Lock()

    def put(self, place: Place, fill: Fill) -> None:
        """Put bytes into their chunk, and the chunk into the store once it is whole."""
        self._raise_early()
        chunk = self._chunks.pop(place.key, None) or self._begin(place)
        fill(chunk.data[place.begin : place.begin + place.size])
        self._chunks[place.key] = chunk = chunk._replace(filled=chunk.filled + place.size)
        self._count(place.size)
        if chunk.filled == place.used_bytes:
            self._send(place.key)
        while self._bytes > 2 * self.buffers.most_bytes:
            if not all(job.done() for job in self._jobs):
                wait([job for job in self._jobs if not job.done()], return_when=FIRST_COMPLETED)
            elif len(self._chunks) > 1:
                key = next(iter(self._chunks))
                self._early[key] = self._chunks[key].filled
                self._send(key)
            else:
                break

    def put_object(self, key: str, data: bytes) -> None:
        """Write a small object, with others in flight."""
        self._raise_early()
        self._jobs.append(self._pool.submit(super().put_object, key, data))

    def finish(self) -> None:
        """Put the chunks that are left too, which have padding between their parts, and return when all is written."""
        for key in [*self._chunks]:
            self._send(key)
        super().finish()

    def abandon(self) -> None:
        """Forget chunks, and return when nothing is being written any more."""
        super().abandon()
        self._chunks, self._early, self._bytes = {}, {}, 0

    def _begin(self, place: Place) -> _Chunk:
        """Return a chunk of zeros, or the one that was put too early."""
        data = np.zeros(place.whole_bytes, np.uint8)
        filled = self._early.pop(place.key, 0)
        if filled:
            wait(self._jobs)
            with writing(self.place, filled):
                data[:] = np.frombuffer(self._objects.get(place.key) or bytes(data.size), np.uint8)
            self._count(filled)
        return _Chunk(data, filled)

    def _send(self, key: str) -> None:
        chunk = self._chunks.pop(key)

        def run() -> None:
            try:
                with writing(self.place, chunk.data.size):
                    self._objects.put(key, chunk.data.data)
            finally:
                self._count(-chunk.filled)

        self._jobs.append(self._pool.submit(run))

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._bytes += num_bytes
