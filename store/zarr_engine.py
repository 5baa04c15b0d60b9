"""Blocks of rows as chunks of Zarr arrays, records as objects beside them, commits by one atomic manifest.

A commit is a manifest, a small object that names all records and blocks; the newest one counts. What it names, and
itself, was made durable before it got its name, and is never written again: a block of the same name gets objects of
other names. So a commit is there with all it names or not at all, and a manifest that is not whole is damage. An object
stays as long as a manifest names it that is the newest, or that a reader in another process has open; the rest is
deleted, at the next commit or opening, or its file is written over by a new object once no read in this process began
when a commit named it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np

from tiercache.store.blocks import CHANGED
from tiercache.store.directory import WriterLock
from tiercache.store.engine import Contents
from tiercache.store.errors import BlockReadError, CorruptStoreError, StoreError, StoreFullError
from tiercache.store.full_disk import ROOM_FOR_RECORDS
from tiercache.store.gate import Gate
from tiercache.store.reader_mark import ReaderMark
from tiercache.store.spare_files import FOLDER, SpareFiles
from tiercache.store.zarr_arrays import NODE, Arrays, Span, group_node, merge
from tiercache.store.zarr_manifest import BlockObjects, Manifest, RecordObject, manifest_numbers, record_numbers
from tiercache.store.zarr_objects import Objects
from tiercache.store.zarr_rows import locate_rows, read_rows
from tiercache.store.zarr_sweep import Sweep, is_chunk
from tiercache.store.zarr_writer import ChunkWriter, copy_of, field_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.store.engine import Block, FieldSource, Form, Wanted

FOLDERS = ("manifests", "segments", "blocks", "records", FOLDER)
"""Manifests first: what they name is there before they are, and is listed after them."""
_LOOKS = 100
"""How often the newest manifest is looked for, where a writer replaces it meanwhile."""


class ZarrEngine:
    """A Zarr store, on the local disk or elsewhere. One writer at a time; never used across a fork."""

    fields_apart = True

    def __init__(
        self,
        store: Any,
        *,
        create: bool,
        readonly: bool = False,
        max_bytes: int | None = None,
        lock: WriterLock | None = None,
    ) -> None:
        """Open it at its newest manifest; ``store`` is a path or a store object of Zarr.

        With ``readonly`` it stays there: on a local disk a writer keeps what that commit names, elsewhere a block that
        was deleted meanwhile is an error. The commit may be one whose name in its folder is not durable yet: where the
        power goes before the writer's ``commit`` returns, it may be gone. Else it holds, on a local disk, the one right
        to write until it is closed: ``lock``, or one that it takes itself. ``max_bytes`` bounds the bytes of blocks.
        Raises CorruptStoreError, and StoreInUseError.
        """
        self._objects, self._readonly, self._max_bytes = Objects(store), readonly, max_bytes
        root = self._objects.root
        self._label = f"the store at {root}" if root is not None else f"the store in {self._objects.store}"
        self._lock = lock
        if root is not None and create:
            root.mkdir(parents=True, exist_ok=True)
        if root is not None and not readonly and lock is None and root.is_dir():
            self._lock = WriterLock(root)
        self._unsynced, self._gate = False, Gate(self._label)
        readers = None if root is None else root / "readers"
        self._mark = ReaderMark(readers) if readonly and readers is not None else None
        self._writer = ChunkWriter(self._objects, self._label)
        if root is not None:
            self._objects.spares = SpareFiles(root, self._gate.oldest)
        self._sweep = Sweep(self._writer, readers, self._objects.spares)
        try:
            self._manifest, listed = self._newest(create=create)
            if self._mark is not None:
                self._mark.set(self._manifest.number)
            self._gate.advance(self._manifest.number)
            self._next = max([self._manifest.number, *manifest_numbers(listed), *record_numbers(listed)]) + 1
            # All blocks by name: those of the newest commit, and in ``_fresh`` those that no commit names yet.
            self._blocks = dict(self._manifest.blocks)
            self._fresh: dict[bytes, BlockObjects] = {}
            self._wrong = self._manifest.damaged(listed)
            self._last: Arrays | None = None
            self._dirty: set[str] = set()
            """Objects that are not durable yet."""
            if not readonly:
                self._take_up(listed)
        except BaseException:
            self._writer.close()
            for held in (self._mark, self._lock):
                if held is not None:
                    held.release()
            raise

    # -- the seam ----------------------------------------------------------------------------------------

    def write(self, blocks: Iterable[Block], *, stable: bool = False) -> None:
        """Write the chunks of all blocks, several at a time, from copies."""
        written: dict[bytes, BlockObjects] = {}
        made: dict[str, int | None] = {}
        replaced: dict[str, int | None] = {}
        with self._writing():
            held = None if self._max_bytes is None else self._sweep.chunk_bytes
            try:
                for name, data, form in blocks:
                    block = self._place(name, data.nbytes, form, made)
                    replaced.update(written[name].chunks(name) if name in written else ())
                    written[name] = block
                    if block.arrays is not None and form is not None:
                        self._describe(block.arrays, form, name[:1], made)
                    held = self._check_room(block.room(name), held)
                    self._put(name, data.reshape(-1).view(np.uint8), form, block, made)
                made |= self._writer.finish()
                written = {name: block.with_lengths(name, made) for name, block in written.items()}
            except BaseException:
                self._writer.abandon()
                self._take_back(made)
                raise
        for name in written.keys() & self._fresh.keys():
            replaced.update(self._fresh[name].chunks(name))
        self._sweep.add(made)
        self._sweep.give(replaced, self._next)
        self._dirty |= made.keys()
        self._fresh |= written
        self._blocks |= written

    def read(self, name: bytes, offset: int, out: NDArray[np.uint8], form: Form | None = None) -> None:
        """Read the rows' bytes from each chunk of the block."""
        with self._gate.reading():
            block = self._blocks.get(name)
            if block is None:
                raise BlockReadError("is missing")
            if offset + out.size > block.size:
                raise BlockReadError(f"ends at byte {block.size:,} of {offset + out.size:,}")
            if block.arrays is None:
                (key, _), *_ = block.chunks(name)
                out[:] = self._objects.ranges([Span(key, offset, offset + out.size, block.size)])[0]
                return
            if form is None or not block.arrays.fit(form):
                raise BlockReadError("stands in arrays of another form")  # sizes and memory go by what they say
            kind, index = name[:1], int.from_bytes(name[-4:], "big")
            row_bytes = sum(block.arrays.row_bytes(kind))
            first, last = offset // row_bytes, (offset + out.size) // row_bytes
            chunks = list(block.chunks(name))
            found = read_rows(self._objects.ranges, chunks, block.arrays, first, last, kind)
            if len(found) == 1:
                out[:] = found[0]
                return
            merge(form.stream, first + int(form.stream.block_first_row_B[index]), out, found)

    @contextmanager
    def locate(self, wanted: Sequence[Wanted]) -> Iterator[list[FieldSource | None]]:
        """Look up the chunks of rows as ``read`` does, all within one read; on a local disk, where not compressed."""
        disk = self._objects.disk
        with self._gate.reading():
            yield [None if disk is None else locate_rows(disk, self._blocks.get(one.name), one) for one in wanted]

    def overtaken(self) -> bool:
        """Tell whether a writer that sees no mark of this reader went on since: look at the newest manifest."""
        if self._mark is None or self._mark.held:
            return False
        return max(manifest_numbers(self._objects.sizes("manifests")), default=0) > self._manifest.number

    def commit(self, records: Mapping[str, bytes | None], dead: Iterable[bytes], *, shrink: bool = False) -> None:
        """Write and sync the records' objects, then the manifest; then delete what nobody needs, beside what follows.

        With ``shrink`` it is deleted when this returns.
        """
        gone = {name: self._blocks[name] for name in dead if name in self._blocks}
        with self._writing():
            published = False
            kept = {name: record for name, record in self._manifest.records.items() if name not in records}
            blocks = {name: block for name, block in self._blocks.items() if name not in gone}
            fresh = Manifest(number=self._next, records=kept, blocks=blocks)
            self._next += 1
            made: dict[str, int | None] = {}
            try:
                for i, (name, data) in enumerate(records.items()):
                    if data is not None:
                        key = f"records/{fresh.number}.{i}"
                        made[key] = len(data)
                        fresh.records[name] = RecordObject(key, len(data), google_crc32c.value(bytes(data)))
                        self._begin(key, len(data), copy_of(np.frombuffer(data, np.uint8)))
                self._writer.finish()
                unneeded = {key for name, block in gone.items() for key, _ in block.chunks(name)}
                self._sync((self._dirty | made.keys()) - unneeded - self._sweep.garbage())
                made[fresh.key] = None
                self._writer.publish(fresh.key, fresh.to_bytes())
                self._sync([fresh.key])
                published = True
            finally:
                # An interrupt may come when the manifest is durable, or when nothing of it is.
                self._writer.abandon()
                if published:
                    self._publish(fresh, made, gone)
                else:
                    self._withdraw(fresh.key, made)
            self._sweep.run(shrink=shrink)
            if shrink:
                self._sweep.wait()

    def contents(self) -> Contents:
        """Return all records, and the names and sizes of all blocks; damaged ones with what is there of them."""
        with self._gate.reading():
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
        if not self._gate.close():
            return
        self._writer.close()
        if self._objects.spares is not None:
            self._objects.spares.shrink()
        for held in (self._mark, self._lock):
            if held is not None:
                held.release()

    # -- opening -----------------------------------------------------------------------------------------

    def _newest(self, *, create: bool) -> tuple[Manifest, dict[str, int | None]]:
        """Return the newest manifest, that of an empty store where one is made, and what objects there are."""
        listed: dict[str, int | None] = {}
        for _ in range(_LOOKS):
            listed = {key: size for folder in FOLDERS for key, size in self._objects.sizes(folder).items()}
            number = max(manifest_numbers(listed), default=None)
            if number is None:
                break
            if manifest := self._read_manifest(number):
                return manifest, listed
        if create and not any(key.startswith(("segments/", "blocks/")) and is_chunk(key) for key in listed):
            return Manifest(number=0), listed
        raise CorruptStoreError(f"the manifest of {self._label} is missing: restore the store from a copy")

    def _read_manifest(self, number: int) -> Manifest | None:
        """Return a manifest; None where it is gone. Raises CorruptStoreError for one that is not whole."""
        data = self._objects.get(Manifest(number=number).key)
        if data is None:
            return None
        manifest = Manifest.from_bytes(data, f"manifest {number} of {self._label}")
        if manifest.number != number:
            raise CorruptStoreError(
                f"manifest {number} of {self._label} says that it is {manifest.number}: restore the store from a copy"
            )
        return manifest

    def _take_up(self, listed: dict[str, int | None]) -> None:
        """Delete what no manifest names that counts, once the newest one is durable."""
        if self._manifest.key in listed:
            self._sync([self._manifest.key])
        else:
            for key in (NODE, f"segments/{NODE}"):
                with self._writer.translated(ROOM_FOR_RECORDS):
                    self._objects.set(key, group_node())
                self._dirty.add(key)
        for number in set(manifest_numbers(listed)) - {self._manifest.number}:
            try:
                self._sweep.hold(number, self._read_manifest(number))
            except CorruptStoreError:
                self._sweep.hold(number, None)
        named = self._manifest.named() | {f"segments/{NODE}": None}
        self._sweep.add({key: named.get(key) if size is None else size for key, size in listed.items()})
        self._sweep.give({key: size for key, size in listed.items() if key not in named}, self._manifest.number)
        self._sweep.run()
        self._sweep.wait()
        self._objects.tidy("segments")

    # -- inside ------------------------------------------------------------------------------------------

    def _place(self, name: bytes, size: int, form: Form | None, made: Mapping[str, Any]) -> BlockObjects:
        """Return objects for a block that are not there yet, in a folder of which nothing is to be deleted."""
        version = 0
        while True:
            arrays = None
            if form is not None:
                segment, group = (int.from_bytes(name[a:b], "big") for a, b in ((1, 9), (9, 13)))
                arrays = self._arrays(f"segments/{segment}" + (f"~{version}" if version else "") + f"/{group}", form)
                self._sweep.leave(arrays.folder)
            block = BlockObjects(size, version if arrays is None else 0, arrays)
            left = arrays is not None and any(map(self._sweep.is_garbage, arrays.node_keys()))
            if not left and not any(key in self._sweep or key in made for key, _ in block.chunks(name)):
                return block
            version += 1

    def _arrays(self, folder: str, form: Form) -> Arrays:
        """Return the arrays of a stream, mostly those of the block before: one object for all its blocks."""
        if self._last is None or self._last.folder != folder or not self._last.fit(form):
            self._last = Arrays.of(folder, form)
        return self._last

    def _describe(self, arrays: Arrays, form: Form, kind: bytes, made: dict[str, int | None]) -> None:
        """Write what tells readers of Zarr about the arrays, where it is not there yet."""
        last = f"{arrays.folder}/{NODE}"
        nodes = {} if last in self._sweep or last in made else arrays.nodes(form)
        nodes |= arrays.numbers_node(kind) if kind == CHANGED else {}
        for key, data in nodes.items():
            if key not in self._sweep and key not in made:
                made[key] = len(data)
                self._begin(key, len(data), copy_of(np.frombuffer(data, np.uint8)))

    def _put(
        self, name: bytes, data: NDArray[np.uint8], form: Form | None, block: BlockObjects, made: dict[str, int | None]
    ) -> None:
        """Write the objects of a block: each field of its rows, or all of it."""
        at = 0
        fields = (0,) if block.arrays is None else block.arrays.row_bytes(name[:1])
        shards = [] if block.arrays is None else block.arrays.shards(name[:1])
        for i, ((key, size), row_bytes) in enumerate(zip(block.chunks(name), fields, strict=True)):
            made[key] = size
            encode = shards[i].encode if shards else None
            if form is None or len(fields) == 1:
                self._begin(key, data.size if encode else size, copy_of(data), encode)
            else:
                used = data.size // form.stream.row_bytes * row_bytes
                fill = field_of(form.stream, int.from_bytes(name[-4:], "big"), data, at, used)
                self._begin(key, used if encode else size, fill, encode)
            at += row_bytes

    def _begin(self, key: str, *what: Any) -> None:
        """Write an object on a thread of the writer, unless a sweep that a reader held back would delete it later."""
        if self._sweep.is_garbage(key):
            raise StoreError(f"object {key} of {self._label} is to be deleted and written: close and open the store")
        self._writer.put(key, *what)

    def _check_room(self, size: int, held: int | None) -> int | None:
        """Return the bytes held with ``size`` more, where they are bounded. Raises StoreFullError."""
        spares = self._objects.spares
        if held is not None and self._max_bytes is not None:
            if held + size > self._max_bytes:
                raise StoreFullError(
                    needed_bytes=size,
                    limit=f"the blocks of {self._label} take {held:,} and may hold {self._max_bytes:,}",
                    advice="raise max_bytes",
                )
            if spares is not None:
                spares.shrink(self._max_bytes - held - size)
        try:
            self._writer.check_room(size)
        except StoreFullError:
            self._sweep.wait()  # what is being deleted may make the room, and what was kept
            if spares is not None:
                spares.shrink()
            self._writer.check_room(size)
        return None if held is None else held + size

    def _sync(self, keys: Iterable[str]) -> None:
        """Make objects durable; where that failed once, later success says nothing of what was lost."""
        if self._unsynced:
            raise StoreError(f"{self._label} could not be synced: mend that and open the store again")
        self._unsynced = True
        self._writer.sync(keys)
        self._unsynced = False

    def _publish(self, fresh: Manifest, made: dict[str, int | None], gone: Mapping[bytes, BlockObjects]) -> None:
        """Stand at a manifest that is durable."""
        before, self._manifest = self._manifest, fresh
        self._sweep.add(made)
        self._sweep.hold(before.number, before)
        unneeded: dict[str, int | None] = {before.key: None}
        unneeded |= {r.key: r.size for name, r in before.records.items() if fresh.records.get(name) != r}
        for name, block in (*before.blocks.items(), *gone.items()):
            if fresh.blocks.get(name) != block:
                unneeded |= dict(block.chunks(name))
        self._sweep.give(unneeded, fresh.number)
        self._blocks, self._fresh, self._dirty = dict(fresh.blocks), {}, set()
        self._gate.advance(fresh.number)  # from now on no read finds what it freed
        self._wrong = {
            name: size for name, size in self._wrong.items() if fresh.blocks.get(name) == before.blocks[name]
        }

    def _withdraw(self, key: str, made: dict[str, int | None]) -> None:
        """Take back a manifest that is not durable; the records that it names go after it."""
        self._sweep.give(made, self._next)
        if key in made:
            try:
                self._objects.delete([key])
                self._objects.sync_folder("manifests")
            except OSError:
                self._unsynced = True  # it may stand or not: opening the store again finds it out

    def _take_back(self, made: Mapping[str, int | None]) -> None:
        """Delete objects that were written in vain; what cannot be deleted now is deleted later."""
        try:
            self._objects.delete(made)
        except OSError:
            self._sweep.give(made, self._next)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        if self._readonly:
            raise ValueError(f"{self._label} is open for reading: open it with mode='a' to write")
        with self._gate.writing():
            yield
