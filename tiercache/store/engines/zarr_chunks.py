"""Chunks of Zarr arrays: reading their ranges, compressed or not, and writing them on threads."""

from __future__ import annotations

import os
import threading
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.store.engines.engine import WRITE_BYTES, Blob
from tiercache.store.engines.zarr_layout import Arrays, Place, plain_places
from tiercache.store.files import PAGE_BYTES, ROOM_FOR_RECORDS, huge_pages, open_direct, paged, write_at, writing
from tiercache.store.store_errors import BlockReadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.store.engines.zarr_objects import Objects
    from tiercache.store.layout import SegmentLayout

    Bytes = NDArray[np.uint8]
    Fill = Callable[[Bytes], object]

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK


def read_plain(objects: Objects, blob: Blob, offset: int, out: Bytes) -> None:
    """Read bytes of a blob without arrays. Raises BlockReadError."""
    spans = [*plain_places(blob, offset, out)]
    # Files are read one after another, as each is read into the same memory.
    together = len(spans) if objects.root is None else 1
    for i in range(0, len(spans), max(1, together)):
        batch = spans[i : i + together]
        for data, (_, target) in zip(objects.ranges([place for place, _ in batch]), batch, strict=True):
            target[:] = data


def read_rows(objects: Objects, arrays: Arrays, layout: SegmentLayout, offset: int, out: Bytes) -> None:
    """Read whole pages of rows, or keys or last changes; padding between blocks is zeros. Raises BlockReadError."""
    while out.size:
        size = min(out.size, arrays.step - offset % arrays.step)
        first, last = arrays.rows_at(offset, size)
        rows = out[: (last - first) * arrays.row_bytes]
        out[rows.size : size] = 0
        if rows.size:
            found = _rows(objects, arrays, first, last)
            if len(found) == 1:
                rows[:] = found[0]
            else:
                merge(layout, first, rows, found)
        offset, out = offset + size, out[size:]


def _rows(objects: Objects, arrays: Arrays, first: int, last: int) -> list[Bytes]:
    """Return rows [first, last) of a block in each array, valid until this thread's next call."""
    places = [array.place(first, last) for array in arrays.arrays]
    codecs = [array.shards for array in arrays.arrays if array.shards is not None]
    if not codecs:
        return objects.ranges(places)
    ends = objects.ends([place.key for place in places], [codec.index_bytes for codec in codecs])
    spans, inners = [], []
    low, high = (row % arrays.arrays[0].block_rows for row in (first, last - 1))
    for (key, *_), codec, end in zip(places, codecs, ends, strict=True):
        if end.size < codec.index_bytes:
            raise BlockReadError(f"is incomplete: {key} has {end.size:,} bytes of at least {codec.index_bytes:,}")
        inner = codec.index_of(end)[low // codec.inner_rows : high // codec.inner_rows + 1]
        if np.any(inner[:, 0] < 0) or np.any(np.diff(inner[:, 0]) < 0):
            raise BlockReadError(f"lacks some of its rows {first} to {last}: {key} does not have them")
        begin = int(inner[0, 0])
        spans.append(Place(key, begin, int(inner[-1].sum()) - begin, -1, -1))
        inners.append(inner)
    found = objects.ranges(spans)
    return [one.decode(inner, data, low, high + 1) for one, inner, data in zip(codecs, inners, found, strict=True)]


def split(layout: SegmentLayout, block: int, data: Bytes, field_at: int, out: Bytes) -> None:
    """Gather one field, at byte ``field_at`` of a row, of the rows of a block, which are page by page in ``data``."""
    first = block * layout.block_rows
    for begin, count, length in _alike(layout, first, data):
        in_pages, in_field = _places(begin, count, length, layout.row_bytes, data, field_at, out)
        in_field[:] = in_pages


def merge(layout: SegmentLayout, first: int, data: Bytes, fields: Sequence[Bytes]) -> None:
    """Do the opposite of ``split`` for the whole pages from row ``first`` on, in ``data``."""
    for begin, count, length in _alike(layout, first, data):
        at = 0
        for field in fields:
            in_pages, in_field = _places(begin, count, length, layout.row_bytes, data, at, field)
            in_pages[:] = in_field
            at += field.size * layout.row_bytes // data.size


def _alike(layout: SegmentLayout, first: int, data: Bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (row in ``data``, pages, rows of each) of all neighbors of equal length."""
    rows, begin = data.size // layout.row_bytes, 0
    low, high = layout.page_of_row(first), layout.page_of_row(first + rows)
    for length, same in groupby(layout.page_sizes(low, high).tolist()):
        count = sum(1 for _ in same)
        yield begin, count, length
        begin += count * length


def _places(
    begin: int, count: int, length: int, row_bytes: int, data: Bytes, at: int, field: Bytes
) -> tuple[Bytes, Bytes]:
    """Return the places of a field in ``data`` and alone, for ``count`` pages of ``length`` rows from ``begin`` on."""
    field_bytes, end = field.size * row_bytes // data.size, begin + count * length
    pages = data[begin * row_bytes : end * row_bytes].reshape(count, length * row_bytes)
    in_field = field[begin * field_bytes : end * field_bytes].reshape(count, length * field_bytes)
    return pages[:, length * at : length * (at + field_bytes)], in_field


class Buffers:
    """Reusable memory in whole pages, ``most_bytes`` in all or one buffer that is larger."""

    def __init__(self) -> None:
        self.most_bytes = WRITE_BYTES
        self._free: list[Bytes] = []
        self._used = 0
        self._changed = threading.Condition()

    def take(self, num_bytes: int) -> Bytes:
        """Return at least ``num_bytes``; waits until they are free."""
        with self._changed:
            while True:
                # The last one that was returned: most have the same size.
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
        """Return a buffer."""
        with self._changed:
            self._used -= buffer.size
            self._free.append(buffer)
            self._changed.notify()


class ChunkWriter:
    """Writes objects on threads, for one thread at a time. Raises StoreFullError and StoreError, also later."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._jobs: list[Future[None]] = []
        self.buffers = Buffers()
        self.stable = False
        """True if the memory that ``fill`` copies from does not change until ``finish``."""

    def put(self, place: Place, fill: Fill) -> None:
        """Write bytes of an object, whose file is allocated whole; ``fill`` copies them, later if ``stable``."""
        lead = place.begin % PAGE_BYTES

        def write(buffer: Bytes) -> None:
            with writing(self._objects.place, place.used_bytes, kept_bytes=ROOM_FOR_RECORDS), ExitStack() as files:
                handle = self._objects.make(place.key, lambda path: os.open(path, _FLAGS, 0o644))
                files.callback(os.close, handle)
                status = os.fstat(handle)
                if status.st_size != place.whole_bytes or status.st_blocks * 512 < place.used_bytes:
                    os.posix_fallocate(handle, 0, place.used_bytes)
                    os.ftruncate(handle, place.whole_bytes)
                direct = open_direct(self._objects.path(place.key), os.O_WRONLY)
                if direct is not None:
                    files.callback(os.close, direct)
                write_at(handle, direct, buffer, place.begin, place.size)

        self._begin(paged(lead + place.size), slice(lead, lead + place.size), fill, write)

    def put_encoded(self, key: str, size: int, fill: Fill, encode: Callable[[Bytes], bytes]) -> None:
        """Write an object: the result of ``encode``, on a thread, for ``size`` bytes."""

        def write(buffer: Bytes) -> None:
            packed = encode(buffer[:size])
            with writing(self._objects.place, len(packed)):
                self._objects.put(key, packed)

        self._begin(size, slice(0, size), fill, write)

    def put_object(self, key: str, data: bytes) -> None:
        """Write a small object."""
        with writing(self._objects.place, len(data) + ROOM_FOR_RECORDS):
            self._objects.put(key, data)

    def finish(self) -> None:
        """Return when all queued data is written."""
        jobs, self._jobs = self._jobs, []
        wait(jobs)
        for job in jobs:
            job.result()

    def abandon(self) -> None:
        """Return when no write is in progress, whether or not all succeeded."""
        jobs, self._jobs = self._jobs, []
        wait(jobs)

    def _begin(self, size: int, filled: slice, fill: Fill, write: Callable[[Bytes], None]) -> None:
        """Take a buffer, fill a part of it, and start writing it."""
        self._raise_early()
        buffer, later = self.buffers.take(size), self.stable

        def run() -> None:
            try:
                if later:
                    fill(buffer[filled])
                write(buffer)
            finally:
                self.buffers.give(buffer)

        try:
            if not later:
                fill(buffer[filled])
            self._jobs.append(self._objects.threads.submit(run))
        except BaseException:
            self.buffers.give(buffer)
            raise

    def _raise_early(self) -> None:
        while self._jobs and self._jobs[0].done():
            self._jobs.pop(0).result()


class _Chunk(NamedTuple):
    """A chunk in memory: untouched pages take none."""

    data: Bytes
    filled: int
    """Bytes that were put."""


class RemoteWriter(ChunkWriter):
    """Gathers chunks in memory until they are complete, or too many wait, and puts them together."""

    def __init__(self, objects: Objects) -> None:
        super().__init__(objects)
        self._chunks: dict[str, _Chunk] = {}
        """By name, the oldest first."""
        self._early: dict[str, int] = {}
        """Bytes of chunks that were put before they were complete."""
        self._bytes = 0
        """Bytes of chunks that are being filled or written."""
        self._lock = threading.Lock()

    def put(self, place: Place, fill: Fill) -> None:
        """Put bytes into their chunk, and the chunk into the store once it is whole."""
        self._raise_early()
        chunk = self._chunks.pop(place.key, None) or self._chunk(place)
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
        self._jobs.append(self._objects.threads.submit(super().put_object, key, data))

    def finish(self) -> None:
        """Put the remaining chunks, which have padding between their parts, and return when all are written."""
        for key in [*self._chunks]:
            self._send(key)
        super().finish()

    def abandon(self) -> None:
        """Drop chunks, and return when no write is in progress."""
        super().abandon()
        self._chunks, self._early, self._bytes = {}, {}, 0

    def _chunk(self, place: Place) -> _Chunk:
        """Return a chunk of zeros, or one that was put early."""
        data = np.zeros(place.whole_bytes, np.uint8)
        filled = self._early.pop(place.key, 0)
        if filled:
            wait(self._jobs)
            with writing(self._objects.place, filled):
                data[:] = np.frombuffer(self._objects.get(place.key) or bytes(data.size), np.uint8)
            self._count(filled)
        return _Chunk(data, filled)

    def _send(self, key: str) -> None:
        chunk = self._chunks.pop(key)

        def run() -> None:
            try:
                with writing(self._objects.place, chunk.data.size):
                    self._objects.put(key, chunk.data.data)
            finally:
                self._count(-chunk.filled)

        self._jobs.append(self._objects.threads.submit(run))

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._bytes += num_bytes
