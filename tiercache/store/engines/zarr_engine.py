"""Blocks of rows in chunks of Zarr arrays, records as objects beside them, commits by one atomic manifest.

A commit is a manifest, a small object that names all records; the newest one counts. What it names, and itself, was
made durable before it got its name, and is never written again. So a commit is there with all it names or not at all,
and a manifest that is not whole is damage. What stands where is in docs/format/zarr.md.
"""

from __future__ import annotations

import contextlib
import secrets
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.engines.zarr_chunks import ChunkReader, ChunkWriter, DiskWriter, RemoteWriter
from tiercache.store.engines.zarr_holdings import FREE, Garbage, Holdings, free_key
from tiercache.store.engines.zarr_layout import NODE, Arrays, Place, epoch_of, group_node, split, state_key
from tiercache.store.engines.zarr_objects import PROBES, Objects, Records, Span, manifest_key, record_key
from tiercache.store.files import ROOM_FOR_RECORDS
from tiercache.store.layout import STATE
from tiercache.store.locks import WriterLock
from tiercache.store.store_errors import BlockReadError, CorruptStoreError, StoreError, StoreFullError, StoreInUseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.engines.engine import Block, BlockLayout, Data, FieldSource, ReadRequest
    from tiercache.store.records import RecordManifest

KEEP_SECONDS = 600.0
_ARRAYS = 4096
"""The most layouts whose arrays are remembered."""


class ZarrEngine:
    """A Zarr store, on the local disk or elsewhere. One writer at a time; never used across a fork."""

    fields_apart = True

    def __init__(
        self,
        store: Any,
        *,
        create: bool,
        readonly: bool = False,
        store_budget: int | None = None,
        lock: WriterLock | None = None,
        keep_for: float = KEEP_SECONDS,
    ) -> None:
        """Open it; ``store`` is a path or a store object of Zarr.

        A writer holds, on a local disk, the one right to write until it is closed: ``lock``, or one that it takes
        itself. Elsewhere it takes over: a writer before it can commit no more, and finds that out with a
        StoreInUseError. There nobody knows who reads: what is free stays for ``keep_for`` seconds, and what it takes is
        not counted. ``store_budget`` bounds the bytes of blocks. Raises CorruptStoreError, StoreInUseError, and
        StoreError for writing through a store that has no conditional put.
        """
        self._objects, self._readonly, self._store_budget = Objects(store), readonly, store_budget
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
        self._writer: ChunkWriter = (RemoteWriter if root is None else DiskWriter)(self._objects, self.label)
        self._records = Records(self._objects, self.label)
        self._reader = ChunkReader(self._objects, self._writer.unwritten)
        self._holdings = Holdings()
        self._known: dict[tuple[int, int], Arrays] = {}
        self._listed: Mapping[str, int | None] | None = None
        self._dirty: set[str] = set()
        """Objects that are not durable yet."""
        self._unsynced = False
        self._epoch = 0
        """Elsewhere than on a local disk, the number of the manifest with which this writer took over."""
        self._name = secrets.token_hex(8) if root is None else ""
        self._fenced = self._unknown = False
        """Whether another writer took over; whether a manifest was put and the store did not say that it is there."""
        self._garbage = Garbage(keep_for)
        """Elsewhere than on a local disk, what is to be deleted later."""
        self._deleting: tuple[Future[None], set[str]] | None = None
        """What is being deleted, and the names of objects and folders."""
        try:
            self._manifest = self._records.newest(create=create)
            if not readonly:
                self._take_up()
        except BaseException:
            self.close()
            raise

    @property
    def memory_bytes(self) -> int:
        """What the writer keeps to."""
        return self._writer.memory_bytes

    @memory_bytes.setter
    def memory_bytes(self, memory_bytes: int) -> None:
        self._writer.memory_bytes = memory_bytes

    # -- records -----------------------------------------------------------------------------------------

    def records(self) -> dict[str, bytes]:
        """Read all records; for reading those of the newest manifest that there is now."""
        if self._readonly:
            before = self._manifest.number
            self._manifest, found = self._records.follow(self._manifest)
            if self._manifest.number > before:
                self._listed = None
            return found
        return self._records.of(self._manifest)

    def digests(self) -> dict[str, str]:
        """Those of the manifest."""
        return self._manifest.digests

    def drop_records(self) -> None:
        """Do nothing: they are read each time."""

    def commit(self, records: Mapping[str, bytes | None]) -> None:
        """Write and sync the records' objects, then the manifest; then delete those that it replaces."""
        self._check_writable()
        self._check_manifest()
        before, published = self._manifest, False
        fresh = before.after(records, before.number + 1 if self._epoch else self._next, writer=self._name)
        self._next += 1
        made: set[str] = set()
        try:
            self._writer.flush()
            for name, data in records.items():
                if data is not None:
                    key = record_key(name, fresh.links[name])
                    if key in made:
                        raise ValueError(f"two records of {self.label} would be object {key}: name one otherwise")
                    made.add(key)
                    self._writer.put_object(key, data)
            self._sync(self._dirty | made)
            if self._epoch:
                self._create(fresh)
            else:
                self._check_manifest()
                made.add(manifest_key(fresh))
                self._writer.publish(manifest_key(fresh), fresh.to_bytes())
                self._sync([manifest_key(fresh)])
            published = True
        finally:
            # An interrupt may come when the manifest is durable, or when nothing of it is.
            if published:
                self._manifest, self._dirty, self._unknown = fresh, set(), False
                dead = {record_key(name, link) for name, link in before.links.items()}
                self._delete_now(dead - {record_key(*pair) for pair in fresh.links.items()} | {manifest_key(before)})
            else:
                self._withdraw(manifest_key(fresh), made)

    # -- blocks ------------------------------------------------------------------------------------------

    def write(self, blocks: Iterable[Data], *, stable: bool = False) -> list[int]:
        """Write blocks into their chunks, several at a time, from copies."""
        self._check_writable()
        made: set[str] = set()
        written: list[Block] = []
        more = 0
        self._listed = None
        try:
            for unplaced, data in blocks:
                self._objects.check()
                block = unplaced._replace(place=self._epoch) if self._epoch else unplaced
                more += block.size
                if self._store_budget is not None and self._holdings.bytes + more > self._store_budget:
                    used = self._holdings.bytes + more - block.size
                    raise StoreFullError(
                        needed_bytes=block.size,
                        limit=f"the blocks of {self.label} take {used:,} and may hold {self._store_budget:,}",
                        advice="raise store_budget",
                    )
                self._write_block(block, data.reshape(-1).view(np.uint8), made)
                written.append(block)
            self._writer.finish()
        except BaseException:
            self._writer.abandon()
            self._writer.drop(made)
            self._delete_now(made)
            self._dirty -= made
            self._holdings.nodes -= made
            raise
        for block in written:
            self._holdings.hold(block, self._arrays(block) if block.layout is not None else None)
        return [self._epoch] * len(written)

    def read(self, request: ReadRequest) -> None:
        """Read the rows' bytes from each chunk that has a part of them."""
        block, offset, out = request
        if offset + out.size > block.size:
            raise BlockReadError(f"ends at byte {block.size:,} of {offset + out.size:,}")
        if block.kind == STATE:
            self._reader.read_bytes(Span(state_key(block), offset, offset + out.size, block.size), out)
        else:
            self._reader.read_rows(self._arrays(block), block, offset, out)

    @contextmanager
    def locate(self, requests: Sequence[ReadRequest]) -> Iterator[list[FieldSource | None]]:
        """Say where rows lie: on a local disk, where they are not compressed."""
        yield [
            None
            if self._objects.root is None or request.block.layout is None
            else self._reader.locate(self._arrays(request.block), request)
            for request in requests
        ]

    def problem(self, block: Block) -> str:
        """Compare with a list of what is there, which is made once after each change."""
        if self._listed is None:
            self._listed = self._records.sizes("segments", "state")
        if block.kind == STATE:
            return self._reader.missing(self._listed, state_key(block), block.size)
        arrays = self._arrays(block)
        if arrays.block_bytes(block.kind, block.index) != block.size:
            return "is none of its layout"
        for array in arrays.by_kind[block.kind]:
            key, _, _, size, *_ = array.place(block.index)
            least = None if array.shards is None else array.shards.index_bytes
            if problem := self._reader.missing(self._listed, key, size, least):
                return problem
        return ""

    def retain(self, blocks: Iterable[Block]) -> None:
        """Delete all objects that have nothing of these blocks, and punch the rest out of those that have."""
        self._check_writable()
        self._wait_for_deletes()
        self._holdings, self._listed = Holdings(), None
        for block in blocks:
            arrays = self._arrays(block) if block.layout is not None else None
            if arrays is not None and not self._fits(arrays, block):
                raise CorruptStoreError(
                    f"block {block.index} of segment {block.owner} of {self.label} overlaps others: "
                    "restore the store from a copy"
                )
            self._holdings.hold(block, arrays)
        needed, holes = self._holdings.everything()
        listed = self._records.sizes("segments", "state", "records", "manifests", *([PROBES] if self._epoch else []))
        needed |= {f"segments/{NODE}", manifest_key(self._manifest)}
        needed |= {record_key(name, link) for name, link in self._manifest.links.items()}
        self._holdings.nodes &= listed.keys()
        spare = [key for key in listed if key not in needed and key not in self._holdings.nodes]
        # A writer that took over since has objects that this one's manifest does not name.
        spare = [key for key in spare if not self._epoch or epoch_of(key) <= self._epoch]
        self._later(spare, holes, [], self._read_garbage())
        self._wait_for_deletes()
        self._write_garbage()
        self._objects.tidy("segments")

    def free(self, blocks: Iterable[Block]) -> None:
        """Delete chunks and folders of which nothing is held; on a local disk, punch what is free out of others."""
        self._check_writable()
        self._wait_for_deletes()
        self._listed = None
        keys, holes, folders = self._holdings.free(blocks)
        self._dirty -= {key for key in self._dirty if key in keys or key.startswith(tuple(f + "/" for f in folders))}
        self._writer.drop(keys)
        self._later([*keys], holes, folders)

    def shrink(self) -> None:
        """Wait for what is being deleted: nothing else is free."""
        self._wait_for_deletes()

    def close(self) -> None:
        """Give up threads and lock."""
        if self._epoch and not self._fenced:
            self._later([], {}, [])
        self._wait_for_deletes()
        if self._epoch and not self._fenced:
            self._write_garbage()
        self._writer.close()
        if self._lock is not None:
            self._lock.release()

    # -- inside ------------------------------------------------------------------------------------------

    def _take_up(self) -> None:
        """Make the newest manifest durable, and choose numbers that no object has."""
        if self._objects.root is None:
            with self._writer.translated(ROOM_FOR_RECORDS):
                problem = self._objects.overwrites()
            if problem:
                raise StoreError(
                    f"{self.label} cannot be written: {problem}, so one writer could destroy what another has "
                    "committed: use zarr.storage.ObjectStore on a server with conditional puts, or write to a local "
                    "disk and copy that"
                )
        if self._manifest.number:
            self._sync([manifest_key(self._manifest)])
        else:
            for key in (NODE, f"segments/{NODE}"):
                self._writer.put_object(key, group_node())
                self._dirty.add(key)
        self._next = self._records.next_number(self._manifest)
        if self._objects.root is None:
            before, fresh = self._manifest, self._manifest.after({}, writer=self._name)
            self._create(fresh)
            self._manifest, self._epoch, self._unknown = fresh, fresh.number, False
            if before.number:
                self._delete_now([manifest_key(before)])

    def _create(self, manifest: RecordManifest) -> None:
        """Publish a manifest whose number no other writer has taken; a writer that was overtaken is at its end."""
        key = manifest_key(manifest)
        self._unknown = True
        with self._writer.translated(ROOM_FOR_RECORDS):
            # A number that was taken is free again when the writer after it has deleted that manifest: then there is
            # a greater one.
            if self._objects.create(key, manifest.to_bytes()):
                if self._records.newest_number() == manifest.number:
                    return
                self._delete_now([key])
        self._fenced = True
        raise StoreInUseError(
            f"another writer has opened {self.label}: what it and this one wrote before stands; let one train at a time"
        )

    def _sync(self, keys: Iterable[str]) -> None:
        """Make objects durable; where that failed once, later success says nothing of what was lost."""
        if self._unsynced:
            raise StoreError(f"{self.label} could not be synced: mend that and open the store again")
        self._unsynced = True
        self._writer.sync(keys)
        self._unsynced = False

    def _withdraw(self, manifest: str, made: set[str]) -> None:
        """Take back a manifest that is not durable; the records that it names go after it."""
        if self._epoch:
            if self._fenced:
                self._delete_now(made)
            return
        try:
            if manifest in made:
                self._objects.delete([manifest])
                self._objects.sync((), self._objects.durable_paths([manifest])[1])
        except OSError:
            self._unsynced = True  # it may stand or not: opening the store again finds it out
        else:
            self._delete_now(made)

    def _arrays(self, block: Block) -> Arrays:
        """Return the arrays of a block's layout, mostly those that are known."""
        layout: BlockLayout | None = block.layout
        assert layout is not None, block
        name, epoch = (block.owner, block.group), max(0, block.place)
        arrays = self._known.get(name)
        if arrays is None or arrays.layout != layout or arrays.epoch != epoch:
            if len(self._known) >= _ARRAYS:
                self._known.clear()
            arrays = self._known[name] = Arrays(block.owner, layout, epoch)
        return arrays

    def _fits(self, arrays: Arrays, block: Block) -> bool:
        """Whether a block is what its layout says, which is that of all blocks of the layout."""
        used_arrays = self._holdings.arrays((block.owner, block.group))
        return (used_arrays is None or used_arrays.layout == arrays.layout) and (
            arrays.block_bytes(block.kind, block.index) == block.size
        )

    def _write_block(self, block: Block, data: NDArray[np.uint8], made: set[str]) -> None:
        if block.kind == STATE:
            place = Place(state_key(block), 0, block.size, block.size, block.size, 1)
            self._put(place, made, lambda out: np.copyto(out, data))
            return
        arrays = self._arrays(block)
        if data.size != block.size or not self._fits(arrays, block):
            raise ValueError(f"block {block.index} of segment {block.owner} is none of its layout")
        for key, node in self._holdings.undescribed(arrays, block.kind).items():
            self._wait_for(key)
            made.add(key)
            self._writer.put_object(key, node)
            self._dirty.add(key)
            self._holdings.nodes.add(key)
        at, parts = 0, arrays.by_kind[block.kind]
        for array in parts:
            place, fill = array.place(block.index), partial(np.copyto, src=data)
            if len(parts) > 1:
                fill = partial(split, arrays.layout.segment_layout, block.index, data, at)
            at += array.row_bytes
            if array.shards is None:
                self._put(place, made, fill)
                continue
            self._wait_for(place.key)
            made.add(place.key)
            self._dirty.add(place.key)
            self._writer.put_encoded(place.key, place.size, fill, array.shards.encode)

    def _put(self, place: Place, made: set[str], fill: Callable[[NDArray[np.uint8]], None]) -> None:
        self._wait_for(place.key)
        try:
            new = self._writer.put(place, fill)
        except StoreFullError:
            if self._deleting is None:
                raise
            self._wait_for_deletes()  # what is being deleted may make the room
            new = self._writer.put(place, fill)
        self._dirty.add(place.key)
        if new:
            made.add(place.key)

    def _read_garbage(self) -> Garbage:
        """Return what the writers before knew of free objects."""
        found = Garbage()
        with contextlib.suppress(OSError):
            for name in self._objects.names(FREE) if self._epoch else ():
                with contextlib.suppress(CorruptStoreError):  # what it said is found again, and free since now
                    found.join(Garbage.from_bytes(self._objects.get(f"{FREE}/{name}") or b"", name))
        self._garbage.changed = bool(found)
        return found

    def _write_garbage(self) -> None:
        """Write for the writers after this one what is free, and delete what those before it wrote."""
        if not self._epoch or not self._garbage.changed:
            return
        with contextlib.suppress(OSError):
            last = self._epoch - 1 if self._garbage else self._epoch
            if self._garbage:
                self._objects.put(free_key(self._epoch), self._garbage.to_bytes())
            epochs = (int(name) for name in self._objects.names(FREE) if name.isdecimal())
            self._objects.delete([free_key(epoch) for epoch in epochs if epoch <= last])
            self._garbage.changed = False

    def _later(
        self, keys: list[str], holes: Mapping[str, list[tuple[int, int]]], folders: list[str],
        before: Garbage | None = None,
    ) -> None:  # fmt: skip
        """Delete objects and folders and punch holes on another thread; what fails is left to the next opening."""
        if self._objects.root is None:
            holes = {}
            self._garbage.add([*keys, *(f"{folder}/" for folder in folders)], before)
            names = self._garbage.take_expired()
            keys, folders = [n for n in names if n[-1] != "/"], [n[:-1] for n in names if n[-1] == "/"]
        if not (keys or holes or folders):
            return

        def run() -> None:
            with contextlib.suppress(OSError):
                for key, runs in holes.items():
                    self._objects.punch(key, runs)
                self._objects.delete(keys)
                for folder in folders:
                    self._objects.delete_folder(folder)

        self._deleting = self._writer.later(run), {*keys, *holes, *(f"{folder}/" for folder in folders)}

    def _wait_for(self, key: str) -> None:
        """Return when neither this object nor its folder is being deleted."""
        if self._deleting is not None:
            deleting = self._deleting[1]
            parts = key.split("/")
            if key in deleting or any("/".join(parts[:n]) + "/" in deleting for n in range(1, len(parts))):
                self._wait_for_deletes()

    def _wait_for_deletes(self) -> None:
        """Return when nothing is being deleted."""
        if self._deleting is not None:
            (job, _), self._deleting = self._deleting, None
            job.exception()

    def _delete_now(self, keys: Iterable[str]) -> None:
        """Delete objects; those that cannot be deleted are left to the next opening."""
        with contextlib.suppress(OSError):
            self._objects.delete(keys)

    def _check_writable(self) -> None:
        if self._fenced:
            raise StoreInUseError(f"another writer has opened {self.label}: close this one")
        if self._unknown:
            raise StoreError(f"{self.label} did not say whether its newest commit is there: open it again")
        if self._readonly:
            raise ValueError(f"{self.label} is open for reading: open it with mode='a' to write")
        self._objects.check()

    def _check_manifest(self) -> None:
        """Raise StoreError if the newest manifest on a local disk is not the one that this writer wrote or read."""
        if self._objects.root is None:
            return
        own, number = self._manifest, self._records.newest_number()
        if number != own.number or (number and self._records.newest(create=False).digest != own.digest):
            raise StoreError(
                f"the newest manifest of {self.label} is {number}, and this process wrote {own.number}: "
                "another one has written to the store, or an older copy was put in its place. Nothing more is written: "
                "close it, and open it again"
            )
