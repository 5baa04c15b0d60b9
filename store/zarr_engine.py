"""Blocks of rows as chunks of Zarr arrays, records as objects beside them, commits by one atomic manifest.

A commit is a manifest, a small object that names all records and blocks; the newest whole one counts. What it names
was made durable before it was written, and is never written again: a block of the same name gets objects of other
names. So a commit is there with all it names or not at all. An object stays as long as a manifest names it that is the
newest, or that a reader in another process has open; the rest is deleted, at the next commit or opening.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np

from tiercache.store.blocks import KEYS
from tiercache.store.direct_file import page_buffer, paged
from tiercache.store.engine import Contents
from tiercache.store.errors import BlockReadError, CorruptStoreError, StoreClosedError, StoreError, StoreFullError
from tiercache.store.reader_mark import ReaderMark, commits_read
from tiercache.store.zarr_arrays import NODE, Arrays, Span, group_node, merge, split
from tiercache.store.zarr_manifest import BlockObjects, Manifest, RecordObject
from tiercache.store.zarr_objects import Objects

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.engine import Block, Form

FOLDERS = ("manifests", "segments", "blocks", "records")
"""Manifests first: what they name is there before they are, and is listed after them."""
_WRITERS, _BUFFERS = 3, 6
"""Threads that write chunks, and chunks that wait for them in memory."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_ROOM = 1 << 20
"""Bytes that are more than the records of a commit need."""


class ZarrEngine:
    """A Zarr store, on the local disk or elsewhere. One writer at a time; never used across a fork."""

    def __init__(self, store: Any, *, create: bool, readonly: bool = False, max_bytes: int | None = None) -> None:
        """Open it at its newest whole manifest; ``store`` is a path or a store object of Zarr.

        With ``readonly`` it stays there: on a local disk a writer keeps what that commit names, elsewhere a block that
        was deleted meanwhile is an error. ``max_bytes`` bounds the bytes of blocks. Raises CorruptStoreError.
        """
        self._objects, self._readonly, self._max_bytes = Objects(store), readonly, max_bytes
        root = self._objects.root
        self._label = f"the store at {root}" if root is not None else f"the store in {self._objects.store}"
        self._closed = self._unsynced = False
        self._state = threading.Condition()
        self._reads = self._writes = 0
        self._mark = ReaderMark(root / "readers") if readonly and root is not None else None
        try:
            listed = {key: size for folder in FOLDERS for key, size in self._objects.sizes(folder).items()}
            self._manifest = self._newest(listed, create=create)
            if self._mark is not None:
                self._mark.set(self._manifest.number)
            self._blocks = dict(self._manifest.blocks)
            """All blocks, those that no commit names yet too."""
            self._fresh: dict[bytes, BlockObjects] = {}
            self._wrong = self._damaged(listed)
            self._next = max([self._manifest.number, *_numbers(listed)]) + 1
            self._held: dict[int, Manifest] = {}
            """Manifests that are not the newest and are still there."""
            self._garbage: dict[str, int | None] = {}
            """Objects that the newest manifest does not name, and their bytes."""
            self._present: dict[str, int | None] = {}
            """All objects and their bytes."""
            self._dirty: set[str] = set()
            """Objects that are not durable yet."""
            if not readonly:
                self._take_up(listed)
        except BaseException:
            if self._mark is not None:
                self._mark.release()
            raise
        self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="tiercache-chunks")
        self._buffers: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()
        for _ in range(_BUFFERS):
            self._buffers.put(np.empty(0, np.uint8))

    # -- the seam ----------------------------------------------------------------------------------------

    def write(self, blocks: Iterable[Block], *, stable: bool = False) -> None:
        """Write the chunks of all blocks, several at a time, from copies."""
        written: dict[bytes, BlockObjects] = {}
        jobs: list[Future[None]] = []
        sizes: dict[str, int | None] = {}
        replaced: list[Iterable[tuple[str, int]]] = []
        with self._writing():
            held = None if self._max_bytes is None else _chunk_bytes(self._present)
            try:
                for name, data, form in blocks:
                    flat = data.reshape(-1).view(np.uint8)
                    block = self._place(name, flat.size, form, sizes)
                    replaced += [written[name].chunks(name)] if name in written else []
                    written[name] = block
                    self._describe(block, form, sizes)
                    for place, (key, size) in enumerate(block.chunks(name)):
                        held = self._check_room(size, held)
                        sizes[key] = size
                        buffer = self._fill(name, flat, form, block, place, size)
                        jobs.append(self._pool.submit(self._put, key, buffer, size))
                    _raise_first(job for job in jobs if job.done())
                _raise_first(jobs)
            except BaseException:
                wait(jobs)
                self._drop(sizes)
                raise
        self._present |= sizes
        self._dirty |= sizes.keys()
        for chunks in (*replaced, *(self._fresh[name].chunks(name) for name in written.keys() & self._fresh.keys())):
            self._garbage |= chunks
        self._fresh |= written
        self._blocks |= written

    def read(self, name: bytes, offset: int, out: NDArray[np.uint8], form: Form | None = None) -> None:
        """Read the rows' bytes from each chunk of the block."""
        with self._reading():
            block = self._blocks.get(name)
            if block is None:
                raise BlockReadError("is missing")
            if offset + out.size > block.size:
                raise BlockReadError(f"ends at byte {block.size:,} of {offset + out.size:,}")
            if block.arrays is None:
                (key, _), *_ = block.chunks(name)
                out[:] = self._objects.ranges([Span(key, offset, offset + out.size, block.size)])[0]
                return
            keys, index = name[:1] == KEYS, int.from_bytes(name[-4:], "big")
            row_bytes = 8 if keys else sum(size for _, size in block.arrays.fields)
            first, last = offset // row_bytes, (offset + out.size) // row_bytes
            found = self._objects.ranges(block.arrays.spans(index, first, last, keys=keys))
            if len(found) == 1:
                out[:] = found[0]
                return
            assert form is not None, "the block was written with a form"
            first += int(form.stream.block_first_row_B[index])
            at = 0
            for (_, size), field in zip(block.arrays.fields, found, strict=True):
                merge(form.stream, first, out, at, field)
                at += size

    def commit(self, records: Mapping[str, bytes | None], dead: Iterable[bytes]) -> None:
        """Write and sync the records' objects, then the manifest; then delete what nobody names."""
        gone = {name: self._blocks[name] for name in dead if name in self._blocks}
        with self._writing():
            number, published = self._next, False
            self._next += 1
            named = {name: block for name, block in self._blocks.items() if name not in gone}
            made: dict[str, int | None] = {}
            kept = {name: record for name, record in self._manifest.records.items() if name not in records}
            fresh = Manifest(number=number, records=kept, blocks=named)
            try:
                for i, (name, data) in enumerate(records.items()):
                    if data is not None:
                        key = f"records/{number}.{i}"
                        fresh.records[name] = RecordObject(key, len(data), google_crc32c.value(bytes(data)))
                        made[key] = len(data)
                        self._objects.set(key, bytes(data))
                skip = {key for name, block in gone.items() for key, _ in block.chunks(name)} | self._garbage.keys()
                self._sync([*(self._dirty - skip), *made])
                made[fresh.key] = None
                self._objects.set(fresh.key, fresh.to_bytes())
                self._sync([fresh.key])
                published = True
            finally:
                # An interrupt may come when the manifest is durable, or when nothing of it is.
                if published:
                    self._publish(fresh, made, gone)
                else:
                    self._withdraw(fresh.key, made)
            self._sweep()

    def contents(self) -> Contents:
        """Return all records, and the names and sizes of all blocks; damaged ones with what is there of them."""
        with self._reading():
            records = {}
            for name, record in self._manifest.records.items():
                data = self._objects.get(record.key)
                if data is None or len(data) != record.size or google_crc32c.value(data) != record.checksum:
                    seen = "is missing" if data is None else "is not what was written"
                    raise CorruptStoreError(
                        f"object {record.key} of {self._label}, its record {name!r}, {seen}: "
                        "restore the store from a copy"
                    )
                records[name] = data
            blocks = {name: block.size for name, block in self._blocks.items() if name not in self._wrong}
            return Contents(records, blocks | {name: size for name, size in self._wrong.items() if size is not None})

    def close(self) -> None:
        """Let the commit go, once reads and writes in other threads have ended."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            self._state.wait_for(lambda: not self._reads and not self._writes)
        self._pool.shutdown()
        if self._mark is not None:
            self._mark.release()

    # -- opening -----------------------------------------------------------------------------------------

    def _newest(self, listed: Mapping[str, int | None], *, create: bool) -> Manifest:
        """Return the newest whole manifest; that of an empty store where one is made."""
        numbers = sorted(_numbers(listed), reverse=True)
        problem: CorruptStoreError | None = None
        for number in numbers:
            if manifest := self._read_manifest(number):
                return manifest
            problem = problem or CorruptStoreError(
                f"manifest {number} of {self._label} is not whole and there is no other: restore the store from a copy"
            )
        if create and not any(key.startswith(("segments/", "blocks/")) and _is_chunk(key) for key in listed):
            return Manifest(number=0)
        raise problem or CorruptStoreError(f"the manifest of {self._label} is missing: restore the store from a copy")

    def _read_manifest(self, number: int) -> Manifest | None:
        data = self._objects.get(Manifest(number=number).key)
        try:
            found = None if data is None else Manifest.from_bytes(data, f"manifest {number} of {self._label}")
        except CorruptStoreError:
            return None
        return found if found is not None and found.number == number else None

    def _damaged(self, listed: Mapping[str, int | None]) -> dict[bytes, int | None]:
        """Return the blocks with objects missing (None) or of another length (bytes that are there)."""
        wrong: dict[bytes, int | None] = {}
        for name, block in self._manifest.blocks.items():
            lacking = 0
            for key, size in block.chunks(name):
                if key not in listed:
                    wrong[name] = None
                    break
                seen = listed[key]
                lacking += 0 if seen is None else size - seen
            else:
                if lacking:
                    wrong[name] = max(0, block.size - lacking)
        return wrong

    def _take_up(self, listed: dict[str, int | None]) -> None:
        """Delete what no manifest names that counts, once the newest one is durable."""
        if self._manifest.key in listed:
            self._sync([self._manifest.key])
        else:
            for key in (NODE, f"segments/{NODE}"):
                self._objects.set(key, group_node())
                self._dirty.add(key)
        for number in set(_numbers(listed)) - {self._manifest.number}:
            if manifest := self._read_manifest(number):
                self._held[number] = manifest
        named = self._manifest.named() | {f"segments/{NODE}": None}
        self._present = dict(listed)
        self._garbage = {key: size for key, size in listed.items() if key not in named}
        self._sweep()
        for folder in self._objects.empty_folders("segments"):
            self._objects.delete_folder(folder)

    # -- inside ------------------------------------------------------------------------------------------

    def _place(self, name: bytes, size: int, form: Form | None, sizes: Mapping[str, Any]) -> BlockObjects:
        """Return objects for a block that are not there yet."""
        version = 0
        while True:
            arrays = None
            if form is not None:
                segment, group = (int.from_bytes(name[a:b], "big") for a, b in ((1, 9), (9, 13)))
                arrays = Arrays.of(f"segments/{segment}" + (f"~{version}" if version else "") + f"/{group}", form)
            block = BlockObjects(size, version if arrays is None else 0, arrays)
            if not any(key in self._present or key in sizes for key, _ in block.chunks(name)):
                return block
            version += 1

    def _describe(self, block: BlockObjects, form: Form | None, sizes: dict[str, int | None]) -> None:
        """Write what tells readers of Zarr about the arrays of a block, where it is not there yet."""
        if block.arrays is None or form is None:
            return
        last = f"{block.arrays.folder}/{NODE}"
        if last in self._present or last in sizes:
            return
        for key, data in block.arrays.nodes(form).items():
            if key not in self._present and key not in sizes:
                with self._translated(len(data)):
                    sizes[key] = len(data)
                    self._objects.set(key, data)

    def _fill(
        self, name: bytes, data: NDArray[np.uint8], form: Form | None, block: BlockObjects, place: int, size: int
    ) -> NDArray[np.uint8]:
        """Return a page buffer with the bytes of one chunk of a block, once one is free."""
        buffer = self._buffers.get()
        try:
            if buffer.size < paged(size):
                buffer = page_buffer(size)
            used = data.size
            if form is None or block.arrays is None or name[:1] == KEYS or len(block.arrays.fields) == 1:
                buffer[:used] = data
            else:
                fields = [row_bytes for _, row_bytes in block.arrays.fields]
                used = data.size // sum(fields) * fields[place]
                index = int.from_bytes(name[-4:], "big")
                split(form.stream, index, data, sum(fields[:place]), buffer[:used])
            buffer[used:size] = 0
        except BaseException:
            self._buffers.put(buffer)
            raise
        return buffer

    def _put(self, key: str, buffer: NDArray[np.uint8], size: int) -> None:
        try:
            with self._translated(size):
                self._objects.put(key, buffer, size)
        finally:
            self._buffers.put(buffer)

    def _check_room(self, size: int, held: int | None) -> int | None:
        """Return the bytes held with ``size`` more, where they are bounded. Raises StoreFullError."""
        if held is not None and self._max_bytes is not None and held + size > self._max_bytes:
            raise StoreFullError(
                needed_bytes=size,
                limit=f"blocks of {self._label} may take {self._max_bytes:,} and take {held:,}",
                advice="raise max_bytes",
            )
        root = self._objects.root
        if root is not None:
            system = os.statvfs(root)
            if system.f_frsize * system.f_bavail < size + _ROOM:
                raise _full(root, size)
        return None if held is None else held + size

    def _sync(self, keys: Iterable[str]) -> None:
        """Make objects durable; where that failed once, later success says nothing of what was lost."""
        if self._unsynced:
            raise StoreError(f"{self._label} could not be synced: mend that and open the store again")
        self._unsynced = True
        with self._translated(_ROOM):
            self._objects.sync(keys)
        self._unsynced = False

    def _publish(self, fresh: Manifest, made: dict[str, int | None], gone: Mapping[bytes, BlockObjects]) -> None:
        """Stand at a manifest that is durable."""
        before, self._manifest = self._manifest, fresh
        self._held[before.number] = before
        self._present |= made
        self._dirty = set()
        self._garbage[before.key] = None
        replaced = {r.key: r.size for n, r in before.records.items() if fresh.records.get(n) != r}
        self._garbage |= replaced
        for name, block in before.blocks.items():
            if fresh.blocks.get(name) != block:
                self._garbage |= block.chunks(name)
        for name, block in gone.items():
            self._garbage |= block.chunks(name)
        self._blocks, self._fresh = dict(fresh.blocks), {}
        self._wrong = {
            name: size for name, size in self._wrong.items() if fresh.blocks.get(name) == before.blocks[name]
        }

    def _sweep(self) -> None:
        """Delete objects that no manifest names that counts; where that fails, the next sweep tries again."""
        root = self._objects.root
        read = commits_read(root / "readers") if root is not None else set()
        if read is None:
            return
        self._held = {number: held for number, held in self._held.items() if number in read}
        held = {key for manifest in self._held.values() for key in manifest.named()}
        dead = [key for key in self._garbage if key not in held]
        try:
            self._objects.delete(dead)
        except OSError:
            return
        for key in dead:
            del self._garbage[key]
            self._present.pop(key, None)
        self._delete_arrays({key.rpartition("/")[0].rpartition("/")[0] for key in dead if key.startswith("segments/")})

    def _delete_arrays(self, folders: set[str]) -> None:
        """Delete the folders of streams that have no chunk any more, and of segments that have no stream."""
        folders |= {folder.rpartition("/")[0] for folder in folders}
        for key in self._present:
            if _is_chunk(key):
                stream = key.rpartition("/")[0].rpartition("/")[0]
                folders -= {stream, stream.rpartition("/")[0]}
        for folder in folders - {"segments", ""}:
            self._objects.delete_folder(folder)
            for key in [key for key in self._present if key.startswith(folder + "/")]:
                del self._present[key]
                self._garbage.pop(key, None)

    def _withdraw(self, key: str, made: dict[str, int | None]) -> None:
        """Take back a manifest that is not durable; the records that it names go after it."""
        self._present |= made
        self._garbage |= made
        if key in made:
            try:
                self._objects.delete([key])
                self._objects.sync_folder("manifests")
            except OSError:
                self._unsynced = True  # it may stand or not: opening the store again finds it out

    def _drop(self, keys: Mapping[str, int | None]) -> None:
        """Delete objects that were written in vain; what cannot be deleted now is deleted when the store is opened."""
        try:
            self._objects.delete(keys)
        except OSError:
            self._present |= keys
            self._garbage |= keys

    @contextmanager
    def _translated(self, needed: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise _full(self._objects.root, needed, error) from error
            raise StoreError(
                f"{self._label} cannot be written ({error}): mend that and open the store again"
            ) from error

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._state:
            if self._closed:
                raise StoreClosedError(f"{self._label} is closed: open it again")
            self._reads += 1
        try:
            yield
        finally:
            with self._state:
                self._reads -= 1
                if self._closed:
                    self._state.notify_all()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        if self._readonly:
            raise ValueError(f"{self._label} is open for reading: open it with mode='a' to write")
        with self._state:
            if self._closed:
                raise StoreClosedError(f"{self._label} is closed: open it again")
            self._writes += 1
        try:
            yield
        finally:
            with self._state:
                self._writes -= 1
                self._state.notify_all()


def _numbers(listed: Iterable[str]) -> list[int]:
    """Return the numbers of the manifests among the names of objects."""
    return [int(key[10:]) for key in listed if key.startswith("manifests/") and key[10:].isdecimal()]


def _is_chunk(key: str) -> bool:
    """Whether an object holds bytes of blocks."""
    return key.startswith("blocks/") or (key.startswith("segments/") and not key.endswith(NODE))


def _chunk_bytes(present: Mapping[str, int | None]) -> int:
    return sum(size or 0 for key, size in present.items() if _is_chunk(key))


def _raise_first(jobs: Iterable[Future[None]]) -> None:
    for job in jobs:
        job.result()


def _full(root: Path | None, needed: int, error: OSError | None = None) -> StoreFullError:
    if error is not None and error.errno == errno.EFBIG:
        return StoreFullError(
            needed_bytes=needed, limit=f"this process may not write so large a file ({error})", advice="raise ulimit -f"
        )
    if root is None:
        return StoreFullError(needed_bytes=needed, limit=f"its place is full ({error})", advice="free some")
    system = os.statvfs(root)
    return StoreFullError(
        needed_bytes=needed,
        limit=f"the file system of {root} has {system.f_frsize * system.f_bavail:,} free",
        advice="free some, or move the store to a larger one",
    )
