"""Blobs as Zarr arrays and plain objects, and the newest commit as one small object that is published whole.

A head is a numbered object that names the newest commit's blob; the largest number counts. All blobs that it needs, and
itself, are durable before it gets its name, and it is never written again. So a commit is there with all its blobs or
not at all, and a head that is not whole is damage. docs/format/zarr.md describes the objects.
"""

from __future__ import annotations

import contextlib
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.engines.engine import Stored
from tiercache.store.engines.parts import PartCheck
from tiercache.store.engines.zarr_chunks import ChunkReader, ChunkWriter, DiskWriter, RemoteWriter
from tiercache.store.engines.zarr_garbage import FREE, Garbage, related
from tiercache.store.engines.zarr_heads import HEADS, NOTHING, Heads, NumberedHead
from tiercache.store.engines.zarr_inventory import FOLDERS, TABLES, Held, Inventory, blobs_of, epoch_of, held_of
from tiercache.store.engines.zarr_layout import NODE, Arrays, arrays_of, group_node, nodes_of, split
from tiercache.store.engines.zarr_objects import CONCURRENCY, PROBES, Objects
from tiercache.store.files import PAGE_BYTES, ROOM_FOR_RECORDS
from tiercache.store.locks import WriterLock
from tiercache.store.store_errors import BlockReadError, CorruptStoreError, StoreError, StoreFullError, StoreInUseError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.engines.engine import Blob, BlobRows, Head, Part, ReadRequest

    Hole = tuple[str, int]
    """A file, and how many bytes at its front nobody needs."""

KEEP_SECONDS = 600.0
_SMALL_BYTES = 64 << 10
"""An object of so many bytes is written at once, from memory of its own."""
_KNOWN = 4096
"""The most blobs whose arrays are remembered for reads."""


class ZarrEngine:
    """A Zarr store, on a local disk or an object store. One writer at a time; never used across a fork."""

    def __init__(
        self,
        store: Any,
        *,
        create: bool,
        readonly: bool = False,
        store_budget: int | None = None,
        lock: WriterLock | None = None,
        keep_for: float = KEEP_SECONDS,
        concurrency: int = CONCURRENCY,
    ) -> None:
        """Open it; ``store`` is a path or a Zarr store object.

        On a local disk a writer holds the one right to write until it is closed: ``lock``, or one that it takes itself.
        On an object store it takes over: the writer before it can publish no more, and finds that out with a
        StoreInUseError. There nobody knows who reads: dropped objects stay for ``keep_for`` seconds, and are not
        counted; at most ``concurrency`` requests are in flight. ``store_budget`` bounds the bytes of blobs. Raises
        CorruptStoreError, StoreInUseError, and StoreError for writing to a store that has no conditional put.
        """
        if concurrency < 1:
            raise ValueError(f"{concurrency} requests in flight are too few: allow at least 1")
        self._objects, self._readonly, self._store_budget = Objects(store, concurrency), readonly, store_budget
        root = self._objects.root
        self.label = f"the store at {root}" if root is not None else f"the store in {self._objects.store}"
        self.lease_folder: Path | None = None if root is None else root / "leases"
        if root is not None and create:
            root.mkdir(parents=True, exist_ok=True)
        self._lock = lock
        if root is not None and not readonly and lock is None and root.is_dir():
            self._lock = WriterLock(root)
        if self._lock is not None:
            self._objects.check = self._lock.check
        self._writer: ChunkWriter = (
            RemoteWriter(self._objects, self.label, concurrency)
            if root is None
            else DiskWriter(self._objects, self.label)
        )
        self._reader = ChunkReader(self._objects)
        self._heads, self._head = Heads(self._objects, self.label), NOTHING
        """The newest head that was read, or published here."""
        self._known: dict[str, tuple[BlobRows, Arrays]] = {}
        self._held: Inventory | None = None
        """The blobs, once the writer has looked for them."""
        self._dirty: dict[str, set[str]] = {}
        """Objects that are not durable yet, by blob."""
        self._unsynced = False
        self.epoch = 0
        self._name = secrets.token_hex(8) if root is None else ""
        self._fenced = self._unknown = self._closed = False
        """Whether another writer took over; whether a head was put and the store did not say that it is there."""
        self._garbage = Garbage(keep_for)
        """On an object store, the objects to delete later."""
        self._listed = False
        """Whether this writer has listed its garbage since it opened the store."""
        self._deleting: tuple[Future[None], Sequence[str]] | None = None
        """Objects and folders that are being deleted."""
        try:
            self._head = self._heads.newest()
            if not self._head.number and self._objects.names("commits"):
                raise CorruptStoreError(f"the head of {self.label} is missing: restore the store from a copy")
            if not readonly:
                self._take_over()
        except BaseException:
            self.close()
            raise

    @property
    def memory_bytes(self) -> int:
        """The writer's limit: see ``ChunkWriter.memory_bytes``."""
        return self._writer.memory_bytes

    @memory_bytes.setter
    def memory_bytes(self, memory_bytes: int) -> None:
        self._writer.memory_bytes = memory_bytes

    # -- blobs -------------------------------------------------------------------------------------------

    def put(self, blobs: Sequence[Blob], parts: Iterable[Part], *, stable: bool = False) -> None:
        """Write blobs from copies of their parts, several objects at a time."""
        self._check_writable()
        held = self._inventory()
        check = PartCheck(blobs, held, self.label)
        arrays = [arrays_of(blob) for blob in blobs]
        kept = [held_of(*one) for one in zip(blobs, arrays, strict=True)]
        self._check_room(blobs)
        self._finish_deleting([name for one in kept for name in one.names])
        small = {blob.name: b"" for blob in blobs if not blob.size and not blob.of} | self._nodes(blobs, arrays)
        dirty: list[set[str]] = [set() for _ in blobs]
        for blob, entry in zip(blobs, kept, strict=True):
            held.add(blob.name, entry)
        try:
            for key, content in small.items():
                self._writer.put_object(key, content)
            for part in parts:
                self._objects.check()
                index, offset, data = check.take(part)
                if data.size:
                    dirty[index] |= self._put_part(blobs[index], arrays[index], offset, data)
            check.finish()
            self._writer.finish()
        except BaseException:
            self._writer.abandon()
            self._delete_now(held.remove(blob.name for blob in blobs))
            raise
        for blob, keys, one in zip(blobs, dirty, arrays, strict=True):
            own = {blob.name, *(f"{array.folder}/{NODE}" for array in one.arrays)}
            self._dirty[blob.name] = keys | (own & small.keys())
        self._dirty.setdefault("", set()).update(key for key in small if key.count("/") < 4 and key.endswith(NODE))

    def read(self, request: ReadRequest) -> None:
        """Read from each object that has a part of the bytes, of rows from each field's array."""
        blob, offset, out = request
        if offset + out.size > blob.size:
            raise BlockReadError(f"ends at byte {blob.size:,} of {offset + out.size:,}")
        if blob.of is None:
            self._reader.read_objects(arrays_of(blob), offset, out)
            return
        known = self._known.get(blob.name)
        if known is None or (known[0] is not blob.of and known[0] != blob.of) or known[1].size != blob.size:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            try:
                known = self._known[blob.name] = blob.of, arrays_of(blob)
            except ValueError as error:  # sizes and memory go by what the layout says
                raise BlockReadError(f"is not what its layout says ({error})") from error
        self._reader.read_rows(known[1], blob.of, offset, out)

    def drop(self, blobs: Iterable[tuple[str, int | None]], *, shrink: bool = False) -> None:
        """Delete arrays and objects, chunks of fronts, and on a local disk the pages of fronts in other chunks.

        The front of a plain blob stays on the disk until the blob is dropped whole.
        """
        self._check_writable()
        held = self._inventory()
        self._wait_for_deletes()
        gone: list[str] = []
        names: list[str] = []
        holes: list[Hole] = []
        for name, upto in blobs:
            if upto is None:
                gone.append(name)
            elif (one := held.get(name)) is not None and upto > one.dropped:
                chunks, pages = _front(one, upto)
                names += chunks
                holes += pages
                self._dirty.get(name, set()).difference_update(chunks)
                held[name] = one._replace(dropped=min(upto, one.size))
        for name in gone:
            self._dirty.pop(name, None)
        dead = held.remove(gone)
        folders = tuple(name for name in dead if name[-1] == "/")
        self._dirty[""] = {key for key in self._dirty.get("", ()) if not key.startswith(folders)}
        self._later([*dead, *(name for name in names if not name.startswith(folders))], holes)
        if not self._listed:
            self._listed = True
            self._list_garbage()
        if shrink:
            self._wait_for_deletes()

    def list(self) -> Mapping[str, Stored]:
        """Look for objects below the folders of blobs, and read what describes arrays that are not known."""
        found = self._look()
        held = self._held or Inventory({})
        for name in found.keys() & held.keys():
            found[name] = found[name]._replace(dropped=max(found[name].dropped, held[name].dropped))
        return {name: Stored(one.size, one.dropped) for name, one in found.items()}

    # -- the head ----------------------------------------------------------------------------------------

    def newest(self) -> Head | None:
        """Read the newest head."""
        found = self._heads.newest()
        if self._readonly:
            if found.number < self._head.number:
                raise CorruptStoreError(
                    f"{self.label} is at head {found.number} and was at {self._head.number} before: "
                    "restore the store from a copy"
                )
            self._head = found
        return found.head

    def publish(self, head: Head, before: Head | None) -> None:
        """Sync what was put, then write the head with the next number, and delete the one before."""
        self._check_writable()
        own, published, begun = self._head, False, False
        if own.head != before:
            raise StoreError(f"{self.label} is at {own.head} and not at {before}: close it and open it again")
        self._check_head()
        fresh = NumberedHead(
            number=own.number + 1 if self.epoch else self._next, head=head,
            before=own.digest if own.number else "", writer=self._name,
        )  # fmt: skip
        self._next += 1
        try:
            self._sync({key for keys in self._dirty.values() for key in keys})
            if self.epoch:
                self._create(fresh)
            else:
                self._check_head()
                begun = True
                with self._writer.translated(ROOM_FOR_RECORDS):
                    self._objects.publish(fresh.key, fresh.to_bytes())
                self._sync([fresh.key])
            published = True
        finally:
            # An interrupt may come when the head is durable, or when nothing of it is.
            if published:
                self._head, self._dirty, self._unknown = fresh, {}, False
                self._delete_now([own.key])
            elif begun:
                self._withdraw(fresh)

    def close(self) -> None:
        """Give up threads and lock."""
        if self.epoch and not (self._fenced or self._closed):
            self._later([], [])
            self._wait_for_deletes()
            self._list_garbage()
        self._closed = True
        self._wait_for_deletes()
        self._writer.close()
        if self._lock is not None:
            self._lock.release()

    # -- inside ------------------------------------------------------------------------------------------

    def _take_over(self) -> None:
        """Make the newest head durable, or take over by a head of the next number; delete what others left."""
        if self._objects.root is None:
            with self._writer.translated(ROOM_FOR_RECORDS):
                problem = self._objects.overwrites()
            if problem:
                raise StoreError(
                    f"{self.label} cannot be written: {problem}, so one writer could destroy what another has "
                    "committed: use zarr.storage.ObjectStore on a server with conditional puts, or write to a local "
                    "disk and copy that"
                )
        before = self._head
        self._next = before.number + 1
        if self._objects.root is None:
            fresh = NumberedHead(
                number=self._next, head=before.head, before=before.digest if before.number else "", writer=self._name
            )
            self._create(fresh)
            self._head, self.epoch, self._unknown = fresh, fresh.number, False
            self._join_garbage()
        elif before.number:
            self._sync([before.key])
        with contextlib.suppress(OSError):
            left = [
                name for name in self._objects.names(HEADS) if not name.isdecimal() or int(name) < self._head.number
            ]
            left = [f"{HEADS}/{name}" for name in left]
            self._delete_now(left + [f"{PROBES}/{name}" for name in self._objects.names(PROBES) if self.epoch])
        if not before.number:
            for key in (NODE, f"segments/{NODE}"):
                self._writer.put_object(key, group_node())
                self._dirty.setdefault("", set()).add(key)
            self._writer.finish()

    def _create(self, head: NumberedHead) -> None:
        """Publish a head whose number no other writer has taken; a writer that was overtaken is at its end."""
        self._unknown = True
        with self._writer.translated(ROOM_FOR_RECORDS):
            # A number that was taken is free again when the writer after it has deleted that head: then there is a
            # greater one.
            if self._objects.create(head.key, head.to_bytes()):
                if self._heads.newest_number() == head.number:
                    return
                self._delete_now([head.key])
        self._fenced = True
        raise StoreInUseError(
            f"another writer has opened {self.label}: what it and this one wrote before stands; let one train at a time"
        )

    def _sync(self, keys: Iterable[str]) -> None:
        """Make objects durable; after a failure, later success says nothing of what was lost."""
        if self._unsynced:
            raise StoreError(f"{self.label} could not be synced: fix that and open the store again")
        self._unsynced = True
        self._writer.sync(keys)
        self._unsynced = False

    def _withdraw(self, head: NumberedHead) -> None:
        """Take back a head that is not durable."""
        try:
            self._objects.delete([head.key])
            self._objects.sync((), self._objects.durable_paths([head.key])[1])
        except OSError:
            self._unsynced = True  # it may stand or not: opening the store again finds it out

    def _look(self) -> dict[str, Held]:
        """Return the blobs whose objects are there; of later writers none, and nothing that was dropped."""
        self._wait_for_deletes()
        try:
            sizes = self._objects.sizes(FOLDERS, TABLES)
            if self.epoch:
                sizes = {k: n for k, n in sizes.items() if k not in self._garbage and epoch_of(k) <= self.epoch}
            known = {name: one.arrays for name, one in dict(self._held or {}).items() if one.arrays is not None}
            return blobs_of(sizes, known, self._objects.get_all)
        except OSError as error:
            raise CorruptStoreError(
                f"{self.label} cannot be listed ({error}): fix that, or restore the store from a copy"
            ) from error

    def _inventory(self) -> Inventory:
        if self._held is None:
            self._held = Inventory(self._look())
        return self._held

    def _check_room(self, blobs: Sequence[Blob]) -> None:
        """Raise StoreFullError if blobs exceed the budget or, as far as they are not compressed, the disk."""
        needed = sum(blob.size for blob in blobs)
        if self._store_budget is not None:
            used = sum(one.size - one.dropped for one in self._inventory().values())
            if used + needed > self._store_budget:
                raise StoreFullError(
                    needed_bytes=needed,
                    limit=f"the blobs of {self.label} take {used:,} and may hold {self._store_budget:,}",
                    advice="raise store_budget",
                )
        needed = sum(blob.size for blob in blobs if blob.of is None or blob.of.group.compression is None)
        kept = ROOM_FOR_RECORDS if needed > ROOM_FOR_RECORDS or any(blob.of for blob in blobs) else 0
        try:
            self._writer.check_room(needed, kept)
        except StoreFullError:
            if self._deleting is None:
                raise
            self._wait_for_deletes()  # what is being deleted may make the room
            self._writer.check_room(needed, kept)

    def _nodes(self, blobs: Sequence[Blob], arrays: Sequence[Arrays]) -> dict[str, bytes]:
        """Return the objects that describe arrays, and groups that have no blob yet."""
        found: dict[str, bytes] = {}
        for blob, one in zip(blobs, arrays, strict=True):
            if blob.of is not None:
                is_new = not self._inventory().has_folder(blob.name.rpartition("/")[0])
                found |= {key: node for key, node in nodes_of(blob, one).items() if is_new or key.count("/") == 4}
        return found

    def _put_part(self, blob: Blob, arrays: Arrays, offset: int, data: NDArray[np.uint8]) -> set[str]:
        """Write a part, and return the objects that it is in."""
        keys: set[str] = set()
        if blob.of is None:
            at, (array,) = 0, arrays.arrays
            while at < data.size:
                size = min(data.size - at, arrays.step - (offset + at) % arrays.step)
                piece, place = data[at : at + size], array.place(offset + at, offset + at + size)
                if size == place.used_bytes and size <= _SMALL_BYTES:
                    self._writer.put_object(place.key, piece.tobytes())
                else:
                    self._writer.put(place, partial(np.copyto, src=piece))
                keys.add(place.key)
                at += size
            return keys
        first, last = arrays.rows_at(offset, arrays.step)
        if offset % arrays.step or data.size != (last - first) * arrays.row_bytes:
            raise ValueError(f"a part of {data.size:,} bytes at byte {offset:,} of {blob.name!r} is no block of it")
        at = 0
        for array in arrays.arrays:
            place, fill = array.place(first, last), partial(np.copyto, src=data)
            if len(arrays.arrays) > 1:
                fill = partial(split, blob.of.layout, offset // arrays.step, data, at)
            at += array.row_bytes
            if array.shards is None:
                self._writer.put(place, fill)
            else:
                self._writer.put_encoded(place.key, place.size, fill, array.shards.encode)
            keys.add(place.key)
        return keys

    def _join_garbage(self) -> None:
        """Note what the writers before listed."""
        with contextlib.suppress(OSError):
            names = [name for name in self._objects.names(FREE) if name.isdecimal()]
            for name, data in zip(names, self._objects.get_all([f"{FREE}/{name}" for name in names]), strict=True):
                with contextlib.suppress(CorruptStoreError):  # its names are found again, and garbage since now
                    self._garbage.join(Garbage.from_bytes(data or b"", name))
            self._garbage.changed = bool(names)

    def _list_garbage(self) -> None:
        """Write the list for the writers after this one, and delete those of the writers before."""
        if not self.epoch or not self._garbage.changed:
            return
        with contextlib.suppress(OSError):
            last = self.epoch - 1 if self._garbage else self.epoch
            if self._garbage:
                self._objects.put(f"{FREE}/{self.epoch}", self._garbage.to_bytes())
            epochs = (int(name) for name in self._objects.names(FREE) if name.isdecimal())
            self._objects.delete([f"{FREE}/{epoch}" for epoch in epochs if epoch <= last])
            self._garbage.changed = False

    def _later(self, names: Sequence[str], holes: Sequence[Hole]) -> None:
        """Delete objects and folders and punch holes on another thread; failures are left to the next opening."""
        if self._objects.root is None:
            self._garbage.add(names)
            names, holes = self._garbage.take_expired(), []
        if not names and not holes:
            return

        def run() -> None:
            with contextlib.suppress(OSError):
                for hole in holes:
                    self._objects.punch(*hole)
                self._objects.delete(names)

        self._deleting = self._writer.later(run), names

    def _finish_deleting(self, names: Sequence[str]) -> None:
        """Return when nothing of what is to be put is being deleted, or will be."""
        if self._deleting is not None and related(self._deleting[1], names):
            self._wait_for_deletes()
        if self._garbage and (found := related(self._garbage.names, names)):
            self._garbage.remove(found)
            self._objects.delete(found)

    def _wait_for_deletes(self) -> None:
        """Return when nothing is being deleted."""
        if (deleting := self._deleting) is not None:
            deleting[0].exception()
            self._deleting = None

    def _delete_now(self, names: Iterable[str]) -> None:
        """Delete objects; those that cannot be deleted are left to the next opening."""
        with contextlib.suppress(OSError):
            self._objects.delete(names)

    def _check_writable(self) -> None:
        if self._fenced:
            raise StoreInUseError(f"another writer has opened {self.label}: close this one")
        if self._unknown:
            raise StoreError(f"{self.label} did not say whether its newest commit is there: open it again")
        if self._readonly:
            raise ValueError(f"{self.label} is open for reading: open it with mode='a' to write")
        self._objects.check()

    def _check_head(self) -> None:
        """Raise StoreError if the newest head on a local disk is not the one that this writer wrote or read."""
        if self._objects.root is None:
            return
        own, found = self._head, self._heads.newest()
        if found != own:
            raise StoreError(
                f"the newest head of {self.label} is {found.number}, and this process wrote {own.number}: "
                "another one has written to the store, or an older copy was put in its place. Nothing more is written: "
                "close it, and open it again"
            )


def _front(held: Held, upto: int) -> tuple[list[str], list[Hole]]:
    """Return the chunks that end before a byte, and in others how many bytes at their front no block needs."""
    names: list[str] = []
    holes: list[Hole] = []
    for array in held.arrays.arrays if held.arrays is not None else ():
        if held.arrays is None or array.suffix is None:
            continue
        first, live = held.arrays.live(held.dropped), held.arrays.live(upto)
        dead = array.num_chunks if upto >= held.size else live // array.chunk_blocks
        names += [array.key(chunk) for chunk in range(first // array.chunk_blocks, dead)]
        if dead < array.num_chunks and array.shards is None and live > first:
            size = live % array.chunk_blocks * array.block_rows * array.row_bytes // PAGE_BYTES * PAGE_BYTES
            holes += [(array.key(dead), size)] if size else []
    return names, holes
