"""Blobs as Zarr arrays and plain objects, on a local disk or an object store; docs/format/zarr.md describes them."""

from __future__ import annotations

import contextlib
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.engines.engine import WRITE_BYTES, HeadRecord, Stored, check_names, checked_parts
from tiercache.store.engines.zarr_chunks import ChunkWriter, RemoteWriter, read_plain, read_rows, split
from tiercache.store.engines.zarr_inventory import FOLDERS, Garbage, Held, Inventory, blobs_of, epoch_of, is_tables
from tiercache.store.engines.zarr_layout import NODE, Arrays, arrays_of, group_node, nodes_of, plain_keys, plain_places
from tiercache.store.engines.zarr_objects import CONCURRENCY, PROBES, ObjectNotes, Objects
from tiercache.store.files import ROOM_FOR_RECORDS, FolderNotes, Notes, check_room, writing
from tiercache.store.locks import WriterLock
from tiercache.store.records import digest
from tiercache.store.store_errors import BlockReadError, StoreError, StoreFullError, StoreInUseError, damaged

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.engines.engine import Blob, Head, Part, ReadRequest

KEEP_SECONDS = 600.0
_SMALL_BYTES = 64 << 10
"""A smaller object is written at once, from a copy."""
HEADS = "heads"
"""The folder of the objects."""
_LOOKS = 100
"""Tries to read the newest head while a writer replaces it."""
_EMPTY_LOOKS = 3
"""A listing may miss both the new head and the deleted one."""


class ZarrEngine:
    """A Zarr store, on a local disk or an object store. One writer at a time; never used across a fork."""

    memory_bytes = WRITE_BYTES
    """On an object store chunks are gathered in another buffer of twice this size."""

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

        A local disk has one writer, holding ``lock``, or its own if none is given, until it is closed. On an object
        store it takes over: the previous writer can publish no more, and gets a StoreInUseError. Readers there are
        unknown: dropped objects stay for ``keep_for`` seconds, and are not counted; at most ``concurrency`` requests
        are in flight. ``store_budget`` bounds the bytes of blobs. Raises CorruptStoreError, StoreInUseError, and
        StoreError for writing to a store without a conditional put.
        """
        if concurrency < 1:
            raise ValueError(f"{concurrency} requests in flight are too few: allow at least 1")
        self._objects, self._store_budget = Objects(store, concurrency), store_budget
        self.label, root = self._objects.label, self._objects.root
        self.lease_folder: Path | None = None if root is None else root / "leases"
        self.notes: Notes | None = ObjectNotes(self._objects) if root is None else FolderNotes(root)
        if root is not None and create:
            root.mkdir(parents=True, exist_ok=True)
        self._lock = lock
        if root is not None and not readonly and lock is None and root.is_dir():
            self._lock = WriterLock(root)
        if self._lock is not None:
            self._objects.check = self._lock.check
        self._writer = RemoteWriter(self._objects) if root is None else ChunkWriter(self._objects)
        self._garbage = Garbage(self._objects, keep_for)
        self._held: Inventory | None = None
        """The blobs, once the writer has listed them."""
        self.epoch, self._closed = 0, False
        try:
            self._heads = Heads(self._objects)
            if not readonly:
                is_new = self._heads.take_over()
                self.epoch = self._heads.epoch
                if is_new:
                    for key in (NODE, f"segments/{NODE}"):
                        self._writer.put_object(key, group_node())
                        self._heads.dirty.add(key)
                    self._writer.finish()
                if self.epoch:
                    self._garbage.join(self.epoch)
        except BaseException:
            self.close()
            raise

    def put(self, blobs: Sequence[Blob], parts: Iterable[Part], *, stable: bool = False) -> None:
        """Write blobs from copies of their parts, several objects at a time."""
        self._heads.check_writer()
        inventory = self._inventory()
        check_names(blobs, inventory, self.label)
        added, small, made = dict[str, Held](), dict[str, bytes](), set[str]()
        for blob in blobs:
            if blob.of is None:
                names, arrays = plain_keys(blob), None
                made.update(names)
                if not blob.size:
                    small[blob.name] = b""
            else:
                arrays = arrays_of(blob, blob.of)
                names = [f"{array.folder}/" for array in arrays.arrays]
                made.update(arrays.keys())
                is_new = f"{blob.name.rpartition('/')[0]}/" not in inventory.folders
                nodes = nodes_of(blob, blob.of, arrays)
                small |= {key: node for key, node in nodes.items() if is_new or key.count("/") == 4}
            added[blob.name] = Held(blob.size, 0, tuple(names), arrays)
        self._check_room(blobs)
        with writing(self._objects.place):
            self._garbage.give_back(name for one in added.values() for name in one.names)
        inventory.add(added)
        self._writer.stable, self._writer.buffers.most_bytes = stable, self.memory_bytes
        try:
            for key, data in small.items():
                self._writer.put_object(key, data)
            for index, offset, part in checked_parts(blobs, parts, self.label):
                if part.size:
                    self._put_part(blobs[index], added[blobs[index].name].arrays, offset, part)
            self._writer.finish()
        except BaseException:
            self._writer.abandon()
            with contextlib.suppress(OSError):  # else the next opening finds them
                self._objects.delete(inventory.remove(added))
            raise
        self._heads.dirty |= made | small.keys()

    def read(self, *requests: ReadRequest) -> None:
        """Read from each object that has a part of the bytes, or, for rows, from each field's array."""
        for blob, offset, out in requests:
            if offset + out.size > blob.size:
                raise BlockReadError(f"ends at byte {blob.size:,} of {offset + out.size:,}")
            if blob.of is None:
                read_plain(self._objects, blob, offset, out)
                continue
            try:
                arrays = arrays_of(blob, blob.of)
            except ValueError as error:  # sizes and memory are derived from the layout
                raise BlockReadError(f"is not what its layout says ({error})") from error
            read_rows(self._objects, arrays, blob.of.layout, offset, out)

    def drop(self, blobs: Iterable[tuple[str, int | None]], *, shrink: bool = False) -> None:
        """Delete arrays and objects, chunks of fronts, and on a local disk pages of fronts; a plain blob only whole."""
        self._heads.check_writer()
        inventory, whole = self._inventory(), list[str]()
        names, holes = list[str](), list[tuple[str, int]]()
        for name, upto in blobs:
            if upto is None:
                whole.append(name)
            else:
                chunks, pages = inventory.drop_front(name, upto)
                names += chunks
                holes += pages
        names += inventory.remove(whole)
        dead, folders = {*names}, tuple(name for name in names if name[-1] == "/")
        self._heads.dirty = {key for key in self._heads.dirty if key not in dead and not key.startswith(folders)}
        self._garbage.delete(names, holes)
        self._garbage.list(again=False)
        if shrink:
            self._garbage.wait()

    def list(self) -> Mapping[str, Stored]:
        """List objects in the folders of blobs, and read the descriptions of unknown groups."""
        found = self._look()
        if self._held is None and self._heads.writes:
            self._held = Inventory(found)
        inventory: Mapping[str, Held] = self._held or {}
        return {
            name: Stored(one.size, max(one.dropped, inventory[name].dropped if name in inventory else 0))
            for name, one in found.items()
        }

    def newest(self) -> Head | None:
        """Read the newest head."""
        return self._heads.newest()

    def publish(self, head: Head, before: Head | None) -> None:
        """Sync all blobs, then write the head with the next number, and delete the previous one."""
        self._heads.check_writer()
        self._heads.publish(head, before)

    def close(self) -> None:
        """Stop the threads and release the lock."""
        if not self._closed:
            self._closed = True
            if self.epoch and not self._heads.fenced:
                self._garbage.delete([])
                self._garbage.wait()
                self._garbage.list()
            self._garbage.wait()
            self._writer.abandon()
            self._objects.close()
        if self._lock is not None:
            self._lock.release()

    def _look(self) -> dict[str, Held]:
        """Return existing blobs, without those of later writers and dropped ones."""
        self._garbage.wait()
        try:
            sizes = self._objects.sizes(FOLDERS, *filter(is_tables, self._objects.names("")))
            if self.epoch:
                sizes = {k: n for k, n in sizes.items() if k not in self._garbage and epoch_of(k) <= self.epoch}
            return blobs_of(sizes, dict(self._held or {}), self._objects.get_all)
        except OSError as error:
            raise self._objects.unreadable(self.label, error) from error

    def _inventory(self) -> Inventory:
        if self._held is None:
            self._held = Inventory(self._look())
        return self._held

    def _check_room(self, blobs: Sequence[Blob]) -> None:
        needed = sum(blob.size for blob in blobs)
        if self._store_budget is not None:
            used = sum(one.size - one.dropped for one in self._inventory().values())
            if used + needed > self._store_budget:
                limit = f"the blobs of {self.label} take {used:,} and may hold {self._store_budget:,}"
                raise StoreFullError(needed_bytes=needed, limit=limit, advice="raise store_budget")
        needed = sum(blob.size for blob in blobs if blob.of is None or blob.of.group.compression is None)
        kept = ROOM_FOR_RECORDS if needed > ROOM_FOR_RECORDS or any(blob.of for blob in blobs) else 0
        self._garbage.wait()  # the objects being deleted may free enough
        if self._objects.root is not None:
            with writing(self._objects.root, needed, kept_bytes=kept):
                check_room(self._objects.root, needed + kept)

    def _put_part(self, blob: Blob, arrays: Arrays | None, offset: int, data: NDArray[np.uint8]) -> None:
        if blob.of is None or arrays is None:
            for place, piece in plain_places(blob, offset, data):
                if piece.size == place.used_bytes <= _SMALL_BYTES:
                    self._writer.put_object(place.key, piece.tobytes())
                else:
                    self._writer.put(place, partial(np.copyto, src=piece))
            return
        first, last = arrays.rows_at(offset, arrays.step)
        if offset % arrays.step or data.size != (last - first) * arrays.row_bytes:
            raise ValueError(f"a part of {data.size:,} bytes at byte {offset:,} of {blob.name!r} is not a block of it")
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


class Heads:
    """Numbered objects that each name a store's newest commit; the largest number is the store.

    Tracks whether this process may still write. On a local disk a lock keeps writers apart. On an object store each
    head is put by a conditional put: a writer takes over by publishing a head, and the previous writer finds its next
    number taken.
    """

    def __init__(self, objects: Objects) -> None:
        """Read the newest head. Raises CorruptStoreError."""
        self._objects, self._label = objects, objects.label
        self.epoch = 0
        """On an object store, the number of the head with which this writer took over."""
        self.dirty: set[str] = set()
        """Objects that must be durable before the next head."""
        self._name = secrets.token_hex(8) if objects.root is None else ""
        self._next = 0
        self.fenced = self._unknown = self._unsynced = False
        """True if another writer took over; if a head was put and the store did not confirm it; if a sync failed, after
        which a later success does not prove that nothing was lost."""
        self._own = self._newest()
        if not self._own.number and objects.names("commits"):
            raise damaged(f"the head of {self._label} is missing")

    @property
    def writes(self) -> bool:
        """True if this process took over as the writer."""
        return self._next > 0

    def newest(self) -> Head | None:
        """Read the newest head. Raises CorruptStoreError, and StoreError if its durability is unknown."""
        if self._unknown and not self.epoch:
            raise self._lost()
        found = self._newest()
        if not self.writes:  # a writer may have withdrawn a head that it saw
            if found.number < self._own.number:
                raise damaged(f"{self._label} is at head {found.number}, but was at {self._own.number} before")
            self._own = found
        return found.head

    def take_over(self) -> bool:
        """Become the writer; return True if the store is new. Raises StoreError."""
        before, self._next = self._own, self._own.number + 1
        if self._objects.root is None:
            with writing(self._objects.place):
                problem = self._objects.overwrites()
            if problem:
                raise StoreError(
                    f"{self._label} cannot be written: {problem}, so one writer could destroy another's commits: "
                    "use zarr.storage.ObjectStore on a server with conditional puts, or write to a local "
                    "disk and copy that"
                )
            self._create(self._after(before.head))
            self.epoch = self._own.number
        elif before.number:
            self._sync([_key(before.number)])
        with contextlib.suppress(OSError):  # else the next writer deletes them
            names = self._objects.names(HEADS)
            old = [f"{HEADS}/{one}" for one in names if not one.isdecimal() or int(one) < self._own.number]
            self._objects.delete(old + [f"{PROBES}/{one}" for one in self._objects.names(PROBES)])
        return not before.number

    def publish(self, head: Head, before: Head | None) -> None:
        """Sync pending objects, then write the head with the next number, and delete the previous one."""
        if self._own.head != before:
            raise StoreError(f"{self._label} is at {self._own.head}, not at {before}: close it and open it again")
        old, fresh, begun = self._own, self._after(head), False
        try:
            self._sync(self.dirty)
            if self.epoch:
                self._create(fresh)
            else:
                self._check_newest()
                begun = True
                with writing(self._objects.place):
                    self._objects.publish(_key(fresh.number), fresh.to_bytes())
                self._sync([_key(fresh.number)])
                self._own = fresh
        finally:
            # An interrupt may leave the head durable, or not written at all.
            if self._own is fresh:
                self.dirty, self._unknown = set(), False
                with contextlib.suppress(OSError):
                    self._objects.delete([_key(old.number)])
            elif begun:
                self._withdraw(fresh)

    def check_writer(self) -> None:
        """Raise StoreError, or StoreInUseError, if this process may not write."""
        if self.fenced:
            raise StoreInUseError(f"another writer has opened {self._label}: close this one")
        if self._unknown:
            raise self._lost()
        if not self.writes:
            raise ValueError(f"{self._label} is open for reading: open it with mode='a' to write")
        self._objects.check()
        self._check_newest()

    def _after(self, head: Head | None) -> HeadRecord:
        number = self._next
        self._next += self._objects.root is not None  # on a local disk only success takes a number
        before = digest(self._own.to_bytes()) if self._own.number else ""
        return HeadRecord(number, head, before, writer=self._name)

    def _create(self, head: HeadRecord) -> None:
        """Publish a head whose number no other writer has taken; a fenced writer fails."""
        self._unknown = True
        with writing(self._objects.place):
            # The number that was taken may be free again if the other writer has deleted that head: then a greater one
            # exists.
            if self._objects.create(_key(head.number), head.to_bytes()):
                if self._number() == head.number:
                    self._own, self._next, self._unknown = head, head.number + 1, False
                    return
                with contextlib.suppress(OSError):
                    self._objects.delete([_key(head.number)])
        self.fenced = True
        raise StoreInUseError(
            f"another writer has opened {self._label}: earlier commits of both are kept; let one train at a time"
        )

    def _withdraw(self, head: HeadRecord) -> None:
        """Undo a head that is not durable; if that fails, only an opening can tell whether it exists."""
        self._unknown = True
        with contextlib.suppress(OSError):
            self._objects.withdraw(_key(head.number))
            self._unknown = False

    def _lost(self) -> StoreError:
        return StoreError(f"{self._label} did not confirm its newest commit: open it again")

    def _sync(self, keys: Iterable[str]) -> None:
        if self._unsynced:
            raise StoreError(f"{self._label} could not be synced: fix that and open the store again")
        self._unsynced = True
        with writing(self._objects.place):
            self._objects.sync(keys)
        self._unsynced = False

    def _check_newest(self) -> None:
        """Raise StoreError if the newest head on a local disk is not the last one written or read."""
        if self._objects.root is None:
            return
        found = self._newest()
        if found != self._own:
            raise StoreError(
                f"the newest head of {self._label} is {found.number}, but this process wrote {self._own.number}: "
                "another process has written to the store, or an older copy replaced it. Nothing more is written: "
                "close it, and open it again"
            )

    def _newest(self) -> HeadRecord:
        """Return the newest head; number 0 if there is none."""
        empty = 0
        try:
            for _ in range(_LOOKS):
                number = self._number()
                if number and (data := self._objects.get(_key(number))) is not None:
                    found = HeadRecord.from_bytes(data, f"head {number} of {self._label}")
                    if found.number != number:
                        raise damaged(f"head {number} of {self._label} cannot be read (its number is {found.number})")
                    return found
                empty += not number
                if empty == _EMPTY_LOOKS:
                    return HeadRecord(0, None)
        except OSError as error:
            raise self._objects.unreadable(f"the head of {self._label}", error) from error
        raise damaged(f"the head of {self._label} is missing")

    def _number(self) -> int:
        return max((int(name) for name in self._objects.names(HEADS) if name.isdecimal()), default=0)


def _key(number: int) -> str:
    return f"{HEADS}/{number}"
