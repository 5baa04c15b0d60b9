"""Blobs as runs of pages in one file, and their map in an LMDB environment; the only module that imports LMDB.

docs/format/lmdb.md describes the files and the order of a publish: blocks.bin is synced; one transaction sets head and
entries; HEAD is overwritten and synced. Dropped runs are free at once, and their entries follow with the next publish.
So before a drop HEAD names the newest head, in both slots: no valid slot may name bytes that can be overwritten.

Only writers use LMDB, and begin with a fresh copy of the checked entries: so no damaged list of free pages makes it
overwrite live ones. Readers look up a blob's entry at its first read, in LMDB's pages.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import lmdb

from tiercache.store.engines.block_file import BlockFile
from tiercache.store.engines.engine import WRITE_BYTES, HeadRecord, Stored, check_names, checked_parts
from tiercache.store.engines.lmdb_map import (
    DATA,
    HEAD,
    HEAD_KEY,
    NOTHING,
    Slot,
    checksum_of,
    entry_of,
    extents_of,
    read_entries,
    read_head,
    read_map,
)
from tiercache.store.files import (
    FULL,
    ROOM_FOR_RECORDS,
    FolderNotes,
    check_limit,
    check_room,
    full_disk,
    local_path,
    sync,
    unreadable,
    writing,
)
from tiercache.store.locks import WriterLock
from tiercache.store.store_errors import BlockReadError, StoreError, StoreFullError, StoreInUseError, damaged

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from pathlib import Path

    from tiercache.store.engines.engine import Blob, Head, Part, ReadRequest
    from tiercache.store.files import Notes

BLOCKS, FRESH = "blocks.bin", "fresh"
_MAP_BYTES = 16 << 20
"""The size of the map of a store with few blobs."""
_BYTES_PER_BYTE = 8
"""Bytes of the map for each byte of an entry: LMDB fills half of a page, and the store may grow fourfold."""
_CHECKED_BYTES = 4 << 20
"""Bytes of parts between two checks that the store still exists."""
_KEY_BYTES = 511
"""LMDB's limit on a key."""


class LmdbEngine:
    """An environment and a file in a directory. One in a process for each directory; never used across a fork."""

    epoch = 0
    memory_bytes = WRITE_BYTES  # it copies 3 MiB, whatever the setting

    def __init__(
        self,
        path: Path,
        *,
        create: bool,
        readonly: bool = False,
        store_budget: int | None = None,
        lock: WriterLock | None = None,
    ) -> None:
        """Open it; ``store_budget`` bounds the file of blobs (None: the file system does).

        A writer holds the one right to write until it is closed: ``lock``, or one that it takes itself.
        Raises CorruptStoreError, StoreInUseError and StoreError.
        """
        path = self.path = local_path(path, "a store of engine 'lmdb'")
        self.label = f"the store at {path}"
        self.lease_folder: Path | None = path / "leases"
        self.notes: Notes | None = FolderNotes(path)
        self._readonly, self._settled = readonly, False
        self._unknown = False
        """True if the last publish may or may not be durable: nothing is written or freed after that."""
        self._env: lmdb.Environment | None = None
        self._resources = ExitStack()
        self._changed = set[str]()
        """Names of blobs whose entries the next publish sets or deletes."""
        self._changing = threading.Lock()
        """Held while entries are set or copied."""
        self._lock = WriterLock(path) if lock is None and not readonly else lock
        if self._lock is not None:
            self._resources.callback(self._lock.release)
        try:
            if create and not (path / HEAD).exists():
                self._create()
            self._slot: Slot
            """The contents of HEAD."""
            self._record: HeadRecord | None
            """The newest head: the one in HEAD, or the next."""
            self._entries = dict[str, bytes]()
            """By name of each blob; in a reader, only the used ones."""
            self._slot, self._record = read_head(path, self.label)
            self._open_blocks(create=create, store_budget=store_budget)
            if not readonly:
                self._slot, self._record, self._entries = read_map(path, self.label)
                self._file.occupy(run for entry in self._entries.values() for run in extents_of(entry).runs)
        except BaseException:
            self.close()
            raise

    def put(self, blobs: Sequence[Blob], parts: Iterable[Part], *, stable: bool = False) -> None:
        """Write blobs into free runs of the file."""
        self._settle()
        check_names(blobs, self._entries, self.label)
        for blob in blobs:
            if not blob.name.isascii() or not 0 < len(blob.name) <= _KEY_BYTES or blob.name == HEAD_KEY:
                raise ValueError(
                    f"a blob of {self.label} cannot be named {blob.name[:99]!r}: let a name be 1 to {_KEY_BYTES} "
                    f"characters of ASCII, and not {HEAD_KEY!r}"
                )
        rooms = self._file.take([blob.size for blob in blobs])
        try:
            unchecked = 0
            for index, offset, data in checked_parts(blobs, parts, self.label):
                unchecked += data.nbytes
                if unchecked >= _CHECKED_BYTES:
                    self._check_writable()
                    unchecked = 0
                self._file.write(rooms[index], offset, data, stable=stable)
            self._check_writable()
            self._file.flush()
        except BaseException:
            self._file.discard(rooms)
            raise
        added = {blob.name: entry_of(blob.name, room) for blob, room in zip(blobs, rooms, strict=True)}
        self._change({*added}, added)

    def read(self, *requests: ReadRequest) -> None:
        """Read from the file where the blobs are."""
        self._file.read([(extents_of(self._entry(blob.name)), offset, out) for blob, offset, out in requests])

    def _entry(self, name: str) -> bytes:
        """Return the entry of a blob, which a reader may have to look up. Raises BlockReadError."""
        entry = self._entries.get(name)
        if entry is None:
            if not self._readonly:
                raise BlockReadError("is missing")
            self._entries |= (found := read_entries(self.path, name))
            entry = found[name]
        return entry

    def drop(self, blobs: Iterable[tuple[str, int | None]], *, shrink: bool = False) -> None:
        """Free runs of the file; free space may be cut off the end or become holes."""
        self._settle()
        with writing(self.path / HEAD):
            self._slot.write(self.path, other=True)
        for name, upto in [*blobs]:
            if (entry := self._entries.get(name)) is None:
                continue
            extents = extents_of(entry)
            rest, freed = extents.drop(extents.size if upto is None else upto)
            self._change({name}, {} if upto is None else {name: entry_of(name, rest)})
            self._file.give(freed)
        if shrink:
            self._file.shrink()

    def list(self) -> Mapping[str, Stored]:
        """Compare the map with the length of the file."""
        if self._readonly:
            entries = read_map(self.path, self.label)[2]
        else:
            with self._changing:
                entries = dict(self._entries)
        file_bytes = self._file.size
        extents = {name: extents_of(entry) for name, entry in entries.items()}
        return {name: Stored(one.whole_bytes(file_bytes), one.dropped) for name, one in extents.items()}

    def newest(self) -> Head | None:
        """Return the head that this engine published last or found; a reader looks again."""
        with self._changing:
            if self._readonly and Slot.read(self.path) != self._slot:
                (self._slot, self._record), self._entries = read_head(self.path, self.label), {}
            if self._unknown:
                raise self._lost()
            return None if self._record is None else self._record.head

    def publish(self, head: Head, before: Head | None) -> None:
        """Sync the file of blobs; set head and entries in one transaction; then update HEAD."""
        self._settle()
        if before != self.newest():
            raise StoreError(
                f"{self.label} is at {self.newest()}, not at {before}: another writer has written to it: close it, and "
                "open it again"
            )
        if head.name not in self._entries:
            raise ValueError(f"{self.label} has no blob {head.name!r}: put it before it is published")
        self._file.sync()
        self._check_head()
        number, digest = Slot.of(self._record)
        checksums = sum(map(checksum_of, self._entries.values()))
        record = HeadRecord(number + 1, head, digest, len(self._entries), checksums)
        try:
            if self._env is None or not self._transact(self._env, record, self._changed):
                self._replace(record)
            self._note(record)
        except BaseException:
            with contextlib.suppress(StoreError):
                self._note(record)
            raise
        self._name_head()

    def close(self) -> None:
        """Close environment and file, and release the lock."""
        self._close_environment()
        self._resources.close()

    def _note(self, record: HeadRecord) -> None:
        """Take a head if LMDB has it: after an error, all or nothing of the transaction is done."""
        is_unknown = True
        try:
            shown = read_head(self.path, self.label)[1]
            is_unknown = shown not in (record, self._record)
        finally:  # not earlier: other threads ask for the newest head meanwhile
            self._unknown = is_unknown
        if shown != record:
            raise damaged(f"{self.path / DATA} does not have what was written")
        self._record = record
        self._changed.clear()

    def _transact(self, env: lmdb.Environment, record: HeadRecord, names: Iterable[str]) -> bool:
        """Set the head and the entries of blobs in a transaction; return False if the map is too small for them."""
        changed = {name: self._entries.get(name) for name in sorted(names)}
        try:
            with env.begin(write=True) as txn:
                for name, entry in changed.items():
                    if entry is None:
                        txn.delete(name.encode())
                    else:
                        txn.put(name.encode(), entry)
                txn.put(HEAD_KEY.encode(), record.to_bytes())
        except lmdb.MapFullError:
            return False
        except lmdb.Error as error:
            found = self._translate(error)
            if isinstance(found, StoreFullError):
                needed = sum(len(name) + len(entry) for name, entry in changed.items() if entry is not None)
                found = found.during(f"the map of {self.label}", needed)
            raise found from error
        return True

    def _replace(self, record: HeadRecord) -> None:
        """Put the head and all entries into a fresh environment in place of the old one, and open it."""
        self._close_environment()
        entry_bytes = sum(len(name) + len(entry) for name, entry in self._entries.items())
        map_bytes = _MAP_BYTES + _BYTES_PER_BYTE * entry_bytes
        try:
            self._write_fresh(record, map_bytes)
        except StoreFullError:
            self._file.shrink()  # free space among the blobs may be enough
            self._write_fresh(record, map_bytes)
        self._env = self._environment(self.path, map_bytes)

    def _write_fresh(self, record: HeadRecord, map_bytes: int) -> None:
        fresh = self.path / FRESH
        try:
            with writing(self.path):
                shutil.rmtree(fresh, ignore_errors=True)
                fresh.mkdir()
                with closing(self._environment(fresh, map_bytes)) as env:
                    if not self._transact(env, record, self._entries):
                        raise StoreError(f"the map of {self.label} does not fit {map_bytes:,} bytes: report this")
                self._check_head()
                (fresh / DATA).replace(self.path / DATA)
                sync(self.path)
        finally:
            with contextlib.suppress(StoreError):  # the folder may belong to another store now
                self._check_writable()
                shutil.rmtree(fresh, ignore_errors=True)

    def _environment(self, folder: Path, map_bytes: int) -> lmdb.Environment:
        options: dict[str, Any] = {} if not hasattr(lmdb.Environment, "lib_version") else {"lib_version": 0}
        try:
            return lmdb.open(
                os.fsencode(folder),  # a name need not be UTF-8
                map_size=map_bytes,
                lock=False,
                readahead=False,
                max_spare_txns=0,
                **options,
            )
        except lmdb.Error as error:
            if "already open" in str(error):
                raise StoreInUseError(
                    f"{self.label} is already open in this process ({os.getpid()}): use that one, or close it first",
                    pid=os.getpid(),
                ) from error
            raise self._translate(error) from error

    def _create(self) -> None:
        """Write a HEAD before the first publish: the remains of a killed creation do not count."""
        blocks, data = self.path / BLOCKS, self.path / DATA
        if blocks.exists() and blocks.stat().st_size:
            raise damaged(f"{self.path} has blobs but no {HEAD} with the newest commit")
        with writing(self.path):
            data.unlink(missing_ok=True)
            Slot(0, NOTHING).create(self.path)

    def _open_blocks(self, *, create: bool, store_budget: int | None) -> None:
        path = self.path / BLOCKS
        try:
            self._file = BlockFile(path, readonly=self._readonly, store_budget=store_budget, create=create)
            self._resources.callback(self._file.close)
        except OSError as error:
            if error.errno in FULL:
                raise full_disk(self.path, error, ROOM_FOR_RECORDS) from error
            raise unreadable(path, error) from error

    def _change(self, names: AbstractSet[str], entries: Mapping[str, bytes]) -> None:
        with self._changing:
            self._changed |= names
            for name in names - entries.keys():
                self._entries.pop(name, None)
            self._entries |= entries

    def _settle(self) -> None:
        """Make HEAD name the newest head, which is durable then; called before anything is overwritten or freed.

        A killed process may have left the older one there. Free space at the end is cut off.
        """
        self._check_head()
        if self._record is not None and (not self._settled or Slot.of(self._record) != self._slot):
            with writing(self.path / DATA):
                sync(self.path / DATA, data_only=True)
                sync(self.path)
        self._name_head()
        if not self._settled:
            self._file.trim()
        self._settled = True

    def _name_head(self) -> None:
        if Slot.of(self._record) == self._slot:
            return
        self._check_head()
        with writing(self.path / HEAD):
            Slot.of(self._record).write(self.path)
        self._slot = Slot.of(self._record)

    def _check_writable(self) -> None:
        if self._readonly or self._lock is None:
            raise ValueError(f"{self.label} is open for reading: open it with mode='a' to write")
        if self._unknown:
            raise self._lost()
        self._lock.check()

    def _check_head(self) -> None:
        """Raise StoreError if the store was moved, or HEAD differs from the last one written or read."""
        self._check_writable()
        seen = Slot.read(self.path)
        # An interrupt may come after HEAD is written and before ``_slot`` is set.
        if seen not in {self._slot, Slot.of(self._record)}:
            raise StoreError(
                f"{self.path / HEAD} names publish {seen.number}, but this process wrote {self._slot.number}: "
                "another process has written to the store, or an older copy replaced it. Nothing more is written: "
                "close it, and open it again"
            )

    def _lost(self) -> StoreError:
        return StoreError(f"{self.path / DATA} could not be read after a publish: fix that and open the store again")

    def _close_environment(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _translate(self, error: lmdb.Error) -> StoreError:
        known = (*FULL, errno.EIO, errno.ENOMEM)
        named = next((one for one in known if str(error).endswith(os.strerror(one))), 0)  # lmdb before 3 has no code
        cause = OSError(getattr(error, "code", named), str(error))
        if cause.errno == errno.EIO:  # LMDB reports a short write this way, without a reason
            try:
                check_room(self.path, ROOM_FOR_RECORDS)
                for folder in (self.path, self.path / FRESH):
                    check_limit(folder / DATA, ROOM_FOR_RECORDS)
            except OSError as full:
                cause = full
        if cause.errno in FULL:
            return full_disk(self.path, cause, ROOM_FOR_RECORDS)
        if cause.errno == errno.ENOMEM:
            return StoreError(
                f"{self.path / DATA} cannot be mapped ({error}), because this process has no address space left: "
                "raise ulimit -v, or use less memory"
            )
        with contextlib.suppress(AttributeError):
            if isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.InvalidError):
                return damaged(f"{self.path / DATA} is damaged ({error})")
        return StoreError(f"{self.path / DATA} cannot be used ({error}): fix that and open the store again")
