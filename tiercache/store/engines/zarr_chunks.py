"""Rows of blocks in Zarr chunks, compressed or not: readers of their ranges, and writers on threads."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.store.engines.engine import WRITE_BYTES, FieldFile, FieldSource
from tiercache.store.engines.zarr_layout import merge
from tiercache.store.engines.zarr_objects import Span
from tiercache.store.files import FULL, PAGE_BYTES, ROOM_FOR_RECORDS, check_room, full_disk, huge_pages, paged, write_at
from tiercache.store.store_errors import BlockReadError, StoreError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.store.engines.engine import Block, ReadRequest
    from tiercache.store.engines.zarr_layout import Array, Arrays
    from tiercache.store.engines.zarr_objects import Objects

    Bytes = NDArray[np.uint8]
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from tiercache.store.engines.zarr_layout import Place

    Fill = Callable[[Bytes], None]


class ChunkReader:
    """Reads blocks, from any thread. Raises BlockReadError."""

    def __init__(self, objects: Objects, unwritten: Callable[[str], Bytes | None]) -> None:
        """``unwritten`` returns a chunk that is not an object yet."""
        self._objects, self._unwritten = objects, unwritten

    def read_bytes(self, span: Span, out: Bytes) -> None:
        """Read bytes of one object."""
        out[:] = self._ranges([span])[0]

    def read_rows(self, arrays: Arrays, block: Block, offset: int, out: Bytes) -> None:
        """Read bytes of a block from ``offset`` on: of rows, whole pages."""
        if arrays.block_bytes(block.kind, block.index) != block.size:
            raise BlockReadError("is none of its layout")  # sizes and memory go by what that says
        row_bytes = arrays.row_bytes(block.kind)
        first, last = offset // row_bytes, (offset + out.size) // row_bytes
        found = self._rows(arrays.by_kind[block.kind], block.index, first, last)
        if len(found) == 1:
            out[:] = found[0]
        else:
            layout = arrays.layout.segment_layout
            merge(layout, first + block.index * layout.block_rows, out, found)

    def locate(self, arrays: Arrays, request: ReadRequest) -> FieldSource | None:
        """Say where rows lie on a local disk; None where they are compressed, or not as their layout says."""
        block, offset, out = request
        if arrays.layout.group.compression or offset + out.size > block.size:
            return None
        if arrays.block_bytes(block.kind, block.index) != block.size:
            return None
        row_bytes = arrays.row_bytes(block.kind)
        first, rows = offset // row_bytes, out.size // row_bytes
        files = []
        for array in arrays.by_kind[block.kind]:
            place = array.place(block.index)
            begin = place.begin + array.row_bytes * first
            files.append(FieldFile(self._objects.path(place.key), place.chunk_bytes, begin, array.row_bytes))
        return FieldSource(self._objects.reads_direct(rows * file.row_bytes for file in files), files)

    def missing(self, listed: Mapping[str, int | None], key: str, size: int, least: int | None = None) -> str:
        """Say what is wrong with an object of ``size`` bytes, or, compressed, of ``least``; "" where nothing is."""
        if key not in listed:
            return "" if self._unwritten(key) is not None else f"is missing, as there is no {key}"
        seen = listed[key]
        if seen is None or (seen == size if least is None else seen >= least):
            return ""
        expected = f"{size:,}" if least is None else f"{least:,} at least"
        return f"is not whole, as {key} has {seen:,} bytes of {expected}"

    # -- inside ------------------------------------------------------------------------------------------

    def _rows(self, parts: Sequence[Array], index: int, first: int, last: int) -> list[Bytes]:
        """Return rows [first, last) of a block in each of its arrays, until this thread's next call."""
        if first == last:
            return [np.empty(0, np.uint8) for _ in parts]
        if parts[0].shards is not None:
            return self._compressed_rows(parts, index, first, last)
        spans = []
        for array in parts:
            place, width = array.place(index), array.row_bytes
            spans.append(Span(place.key, place.begin + width * first, place.begin + width * last, place.chunk_bytes))
        return self._ranges(spans)

    def _compressed_rows(self, parts: Sequence[Array], index: int, first: int, last: int) -> list[Bytes]:
        """Read the index of each chunk, then the inner chunks that have the rows."""
        spans, places = [], []
        for array in parts:
            key, shards = array.key(index), array.shards
            assert shards is not None
            end = self._objects.end(key, shards.index_bytes)
            if end.size < shards.index_bytes:
                raise BlockReadError(
                    f"is not whole, as {key} has {end.size:,} bytes of {shards.index_bytes:,} at least"
                )
            inner = shards.index_of(end)[first // shards.inner_rows : -(-last // shards.inner_rows)]
            if np.any(inner[:, 0] < 0) or np.any(np.diff(inner[:, 0]) < 0):
                raise BlockReadError(f"lacks some of its rows {first} to {last}, as {key} does not have them")
            spans.append(Span(key, int(inner[0, 0]), int(inner[-1].sum()), -1))
            places.append((shards, inner))
        found = self._ranges(spans)
        return [shards.decode(inner, data, first, last) for (shards, inner), data in zip(places, found, strict=True)]

    def _ranges(self, spans: Sequence[Span]) -> list[Bytes]:
        unwritten = [self._unwritten(span.key) for span in spans]
        if all(chunk is None for chunk in unwritten):
            return self._objects.ranges(spans)
        return [
            self._objects.ranges([span])[0] if chunk is None else chunk[span.start : span.stop]
            for span, chunk in zip(spans, unwritten, strict=True)
        ]


_THREADS = 4
_OPEN_FILES = 64


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
    """Threads that write, sync and delete objects; what is not said otherwise is for one thread at a time.

    Raises StoreFullError and StoreError, also those of what was begun before.
    """

    def __init__(self, objects: Objects, label: str) -> None:
        self._objects, self._label = objects, label
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tiercache-chunks")
        self._jobs: list[Future[None]] = []
        self._buffers = Buffers()

    @property
    def memory_bytes(self) -> int:
        """What is held of blocks in memory: one field of one block may have more, alone.

        Elsewhere than on a local disk chunks are gathered in twice as much beside.
        """
        return self._buffers.most_bytes

    @memory_bytes.setter
    def memory_bytes(self, memory_bytes: int) -> None:
        self._buffers.most_bytes = memory_bytes

    def put(self, place: Place, fill: Fill) -> bool:
        """Write a block where it belongs; ``fill`` puts it into memory before this returns.

        Returns whether the chunk was not there before.
        """
        raise NotImplementedError

    def flush(self) -> None:
        """Return when everything that was put is an object."""
        self.finish()

    def drop(self, keys: Iterable[str]) -> None:
        """Forget what is to be deleted. By any thread."""

    def unwritten(self, key: str) -> Bytes | None:
        """Return a chunk that is not written yet. By any thread."""

    def put_encoded(self, key: str, size: int, fill: Fill, encode: Callable[[Bytes], bytes]) -> None:
        """Write an object: what ``encode`` makes, on a thread, of ``size`` bytes."""
        self._raise_early()
        self.check_room(size)
        buffer = self._buffers.take(size)
        self._submit(buffer, lambda: self._encode(key, buffer[:size], encode), lambda: fill(buffer[:size]))

    def put_object(self, key: str, data: bytes) -> None:
        """Write a small object before this returns."""
        with self.translated(len(data) + ROOM_FOR_RECORDS):
            self._objects.put(key, data)

    def finish(self) -> None:
        """Return when all that was put is written."""
        jobs, self._jobs = self._jobs, []
        wait(jobs)
        for job in jobs:
            job.result()

    def abandon(self) -> None:
        """Return when nothing is being written any more, whatever became of it."""
        jobs, self._jobs = self._jobs, []
        wait(jobs)

    def sync(self, keys: Iterable[str]) -> None:
        """Return when objects are durable, with their names and folders."""
        files, folders = self._objects.durable_paths(keys)
        nothing: list[str] = []
        for parts in ([(files[i::_THREADS], nothing) for i in range(_THREADS)], [(nothing, folders)]):
            jobs = [self._pool.submit(self._sync, *part) for part in parts if any(part)]
            wait(jobs)
            for job in jobs:
                job.result()

    def later(self, do: Callable[[], None]) -> Future[None]:
        """Do something meanwhile."""
        return self._pool.submit(do)

    def publish(self, key: str, data: bytes) -> None:
        """Write an object as ``Objects.publish`` does."""
        with self.translated(max(ROOM_FOR_RECORDS, len(data))):
            self._objects.publish(key, data)

    def close(self) -> None:
        """Finish what goes on."""
        self.abandon()
        self._pool.shutdown()

    def check_room(self, size: int) -> None:
        """Raise StoreFullError where the file system has no room for ``size`` bytes and for records."""
        if self._objects.root is not None:
            with self.translated(size, kept=ROOM_FOR_RECORDS):
                check_room(self._objects.root, size + ROOM_FOR_RECORDS)

    @contextmanager
    def translated(self, needed: int, *, kept: int = 0) -> Iterator[None]:
        """Turn errors of the system into the store's: what could not be written has ``needed`` bytes.

        ``kept`` bytes were to stay free beside them. By any thread.
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

    def _raise_early(self) -> None:
        while self._jobs and self._jobs[0].done():
            self._jobs.pop(0).result()

    def _submit(self, buffer: Bytes, job: Callable[[], None], fill: Callable[[], None]) -> None:
        def run() -> None:
            try:
                job()
            finally:
                self._buffers.give(buffer)

        try:
            fill()
            self._jobs.append(self._pool.submit(run))
        except BaseException:
            self._buffers.give(buffer)
            raise

    def _encode(self, key: str, data: Bytes, encode: Callable[[Bytes], bytes]) -> None:
        packed = encode(data)
        with self.translated(len(packed)):
            self._objects.put(key, packed)

    def _sync(self, files: list[str], folders: list[str]) -> None:
        with self.translated(ROOM_FOR_RECORDS):
            self._objects.sync(files, folders)


class _File(NamedTuple):
    """The open file of a chunk."""

    handle: int
    direct: int | None
    """The same past the page cache; None where that cannot be."""


class DiskWriter(ChunkWriter):
    """Writes blocks into files, whole pages past the page cache."""

    def __init__(self, objects: Objects, label: str) -> None:
        super().__init__(objects, label)
        self._files: dict[str, _File] = {}
        self._direct = hasattr(os, "O_DIRECT")

    def put(self, place: Place, fill: Fill) -> bool:
        """Write a block into its file, which gets its room on the disk and its length when its first block comes."""
        self._raise_early()
        file, made = self._files.get(place.key), False
        if file is None:
            if len(self._files) >= _OPEN_FILES:
                self.finish()
            file, made = self._open(place)
            self._files[place.key] = file
        lead = place.begin % PAGE_BYTES
        buffer = self._buffers.take(paged(lead + place.size))
        begin, size = place.begin, place.size

        def write() -> None:
            with self.translated(size):
                self._direct &= write_at(file.handle, file.direct, buffer, begin, size)

        self._submit(buffer, write, lambda: fill(buffer[lead : lead + size]))
        return made

    def finish(self) -> None:
        """Return when all that was put is written."""
        try:
            super().finish()
        finally:
            self._close()

    def abandon(self) -> None:
        """Return when nothing is being written any more, whatever became of it."""
        super().abandon()
        self._close()

    def _close(self) -> None:
        while self._files:
            for handle in self._files.popitem()[1]:
                if handle is not None:
                    os.close(handle)

    def _open(self, place: Place) -> tuple[_File, bool]:
        self._objects.check()
        path = self._objects.path(place.key)
        flags, made = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK, False
        with self.translated(place.used_bytes, kept=ROOM_FOR_RECORDS):
            try:
                handle = os.open(path, flags)
            except FileNotFoundError:
                self.check_room(place.used_bytes)
                self._objects.folder_of(place.key)
                handle, made = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644), True
            try:
                status = os.fstat(handle)
                if status.st_size != place.chunk_bytes or status.st_blocks * 512 < place.used_bytes:
                    self.check_room(max(0, place.used_bytes - status.st_blocks * 512))
                    if place.used_bytes:
                        os.posix_fallocate(handle, 0, place.used_bytes)
                    os.ftruncate(handle, place.chunk_bytes)
                direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT) if self._direct else None
            except BaseException as error:
                os.close(handle)
                if made:
                    self._objects.delete([place.key])
                if isinstance(error, OSError) and error.errno == 22 and self._direct:
                    self._direct = False  # the file system has none
                    return self._open(place)
                raise
        return _File(handle, direct), made


class RemoteWriter(ChunkWriter):
    """Gathers chunks in memory until all their blocks have come, or until too many wait."""

    def __init__(self, objects: Objects, label: str) -> None:
        super().__init__(objects, label)
        self._chunks: dict[str, tuple[Bytes, int]] = {}
        """By name: the chunk, and how many of its blocks have not come; the one that waits longest first."""
        self._lock = threading.Lock()

    def put(self, place: Place, fill: Fill) -> bool:
        """Put a block into its chunk, and write the chunk where it is whole."""
        made = False
        chunk, left = self._chunks.get(place.key, (None, place.blocks))
        if chunk is None:
            with self.translated(place.used_bytes):
                stored = self._objects.get(place.key) if place.blocks > 1 else None
            made, chunk = stored is None, np.zeros(place.chunk_bytes, np.uint8)
            if stored is not None:
                chunk[: len(stored)] = np.frombuffer(stored, np.uint8)[: chunk.size]
        fill(chunk[place.begin : place.begin + place.size])
        with self._lock:
            self._chunks.pop(place.key, None)
            self._chunks[place.key] = chunk, left - 1
        if left <= 1:
            self._write(place.key)
        while len(self._chunks) > 1 and sum(one.size for one, _ in self._chunks.values()) > 2 * self.memory_bytes:
            self._write(next(iter(self._chunks)))
        return made

    def flush(self) -> None:
        """Write the chunks that are not whole too."""
        super().flush()
        for key in [*self._chunks]:
            self._write(key)

    def drop(self, keys: Iterable[str]) -> None:
        """Forget chunks."""
        with self._lock:
            for key in keys:
                self._chunks.pop(key, None)

    def unwritten(self, key: str) -> Bytes | None:
        """Return a chunk that is not written yet."""
        with self._lock:
            return self._chunks[key][0] if key in self._chunks else None

    def _write(self, key: str) -> None:
        chunk, _ = self._chunks[key]
        with self.translated(chunk.size):
            self._objects.put(key, chunk.data)
        self.drop([key])


def _full(root: Path | None, needed: int, kept: int, error: OSError) -> StoreFullError:
    if root is None:
        return StoreFullError(needed_bytes=needed, limit=f"its place is full ({error})", advice="free some")
    return full_disk(root, error, needed, kept_bytes=kept)
