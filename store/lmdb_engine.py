"""Records in an LMDB environment, blocks in a file beside it; the only module that imports lmdb.

A block is written where the file is free, and synced; then one transaction of LMDB makes its place known together
with the records that name it, and gives up the places of dead blocks. Such a place is written over only when no
reader can still know it: when every read transaction is as new as the one that freed it. What was measured stands
in docs/design.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import lmdb
from tiercache.store.gate import Gate
from tiercache.store.manifest import COMMIT

from tiercache.store.block_file import BlockFile, Place
from tiercache.store.directory import WriterLock
from tiercache.store.engine import Contents
from tiercache.store.errors import (
    BlockReadError,
    CorruptStoreError,
    StoreError,
    StoreInUseError,
)
from tiercache.store.full_disk import FULL, ROOM_FOR_RECORDS, check_limit, check_room, full_disk
from tiercache.store.lmdb_file import LmdbFile, Meta
from tiercache.store.lmdb_head import HEAD, check_newest, create_head, read_head, write_head
from tiercache.store.write_queue import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.store.engine import Block, Form, Source, Wanted

DATA, BLOCKS = "data.mdb", "blocks.bin"
_BLOCK, _FREED, _RECORD, _NUMBER = b"b", b"f", b"r", b"t"
"""The first byte of a key: a block's place, places freed, a record. The transaction's own number has no other byte."""
_PLACE = struct.Struct("<QQ")
_TRANSACTION = struct.Struct(">Q")
_NO_TRANSACTION = 1 << 64
MOST_READERS = 4096
"""Places in LMDB's table of readers, which the processes of a store share; 64 bytes each, in a file with holes."""


class LmdbEngine:
    """An environment and a file in a directory. One in a process for each directory; never used across a fork."""

    fields_apart = False

    def __init__(
        self,
        path: Path,
        *,
        create: bool,
        readonly: bool = False,
        max_bytes: int | None = None,
        lock: WriterLock | None = None,
    ) -> None:
        """Open it; ``max_bytes`` bounds the file of blocks (None: the file system does).

        With ``readonly`` it stays at the commit that is newest now, and keeps its blocks from being written over.
        Else it holds the one right to write until it is closed: ``lock``, or one that it takes itself.
        Raises CorruptStoreError before the first access through the map, and StoreInUseError.
        """
        self.path = path
        self._data = path / DATA
        self._readonly = readonly
        self._unsynced, self._gate = False, Gate(f"the store at {path}")
        self._one_at_a_time = threading.Lock()
        """A transaction serves one thread at a time."""
        if create and self._data.exists() and self._data.stat().st_size < 8192:
            self._data.unlink()  # a creation that was killed before LMDB's first write
        if not create:
            self._check_files()
        self._lock = lock
        if not readonly and lock is None:
            self._lock = WriterLock(path)
        try:
            self._env = self._open(create)
        except BaseException:
            self._release()
            raise
        try:
            self._env.reader_check()  # readers that died must not fill the table
            if not readonly:
                self._env.sync(True)  # a commit that is seen is durable before what it freed is written over
            self._first, meta, named = self._begin_checked()
            self._gate.advance(meta.transaction)
            is_read = self._gate.is_read
            self._file = BlockFile(path / BLOCKS, readonly=readonly, max_bytes=max_bytes, is_read=is_read)
            # All places by name: those of the newest commit, and in ``_fresh`` those that no commit names yet.
            self._places: dict[bytes, Place] = {}
            self._fresh: dict[bytes, Place] = {}
            # Places that dead blocks left, by the transaction that freed them: some reader may still know them.
            self._freed: dict[int, list[Place]] = {}
            self._replaced: list[Place] = []
            self._settled: list[int] = []
            self._named = _NO_TRANSACTION if named is None else max(named)
            """The newest transaction in HEAD; no other may follow one that is not there."""
            try:
                has_commits = self._read_places()
                if named is None and self._file.size and not has_commits:
                    raise CorruptStoreError(
                        f"{path} has blocks, no commit and no {HEAD} that tells whether it had one: "
                        "restore the store from a copy"
                    )
                held = self._held_places()
                if not readonly:
                    self._file.occupy(held)
                    self._first.abort()
                    if named is None:
                        create_head(path, meta)
                        self._named = meta.transaction
                    self._name_transaction()
            except BaseException:
                self._file.close()
                raise
        except lmdb.Error as error:
            self._env.close()
            self._release()
            raise self._translate(error) from error
        except BaseException as error:
            self._env.close()
            self._release()
            if isinstance(error, OSError) and error.errno in FULL:
                raise full_disk(path, error, ROOM_FOR_RECORDS) from error
            raise

    # -- the seam ----------------------------------------------------------------------------------------

    def write(self, blocks: Iterable[Block], *, stable: bool = False) -> None:
        """Write all blocks where the file is free."""
        written: list[tuple[bytes, Place]] = []
        with self._writing():
            self._settle()
            try:
                for name, data, _ in blocks:
                    written.append((name, self._file.put(data, stable=stable)))
                self._file.flush()
            except BaseException:
                self._file.discard(place for _, place in written)
                raise
        for name, place in written:
            if name in self._places:
                self._replaced.append(self._places[name])
            self._fresh[name] = self._places[name] = place

    def read(self, name: bytes, offset: int, out: NDArray[np.uint8], form: Form | None = None) -> None:
        """Read from the file at the block's place."""
        with self._gate.reading():
            # A read begins before it looks for the place, and a place is dropped before the transaction that frees it:
            # so nothing is written over a place that is found before the read ends.
            place = self._places.get(name)
            if place is None:
                raise BlockReadError("is missing")
            if offset + out.size > place.size:
                raise BlockReadError(f"ends at byte {place.size:,} of {offset + out.size:,}")
            self._file.read(place.offset + offset, out)

    @contextmanager
    def locate(self, wanted: Sequence[Wanted]) -> Iterator[list[Source | None]]:
        """Look up places as ``read`` does, all within one read."""
        with self._gate.reading():
            yield [self._file.source(self._places.get(name), offset, out) for name, offset, out, _ in wanted]

    def overtaken(self) -> bool:
        """Tell whether the newest transaction is another one, where LMDB's table of readers cannot be written."""
        if not self._readonly or not os.statvfs(self.path).f_flag & os.ST_RDONLY:
            return False
        return int(self._env.info()["last_txnid"]) > self._first.id()

    def commit(self, records: Mapping[str, bytes | None], dead: Iterable[bytes], *, shrink: bool = False) -> None:
        """Sync the file; then name new blocks, set records and give up dead blocks in one transaction.

        With ``shrink`` the file becomes shorter and gets holes after it: no transaction that a crash can leave, and no
        reader, knows blocks there.
        """
        dropped = {name: self._places.pop(name) for name in dead if name in self._places}
        fresh = {name: place for name, place in self._fresh.items() if name not in dropped}
        freed = [*self._replaced, *dropped.values()]
        number, done = _NO_TRANSACTION, False
        try:
            with self._writing():
                self._name_transaction()
                self._env.reader_check()  # readers that died must not keep places from being used again
                self._settle()
                if fresh:
                    self._sync()
                with self._env.begin(write=True) as txn:
                    number = txn.id()
                    self._put(txn, fresh, freed, dropped)
                    for name, data in records.items():
                        if data is None:
                            txn.delete(_RECORD + name.encode())
                        else:
                            txn.put(_RECORD + name.encode(), data)
                    txn.put(_NUMBER, _TRANSACTION.pack(number))
                done = True
        finally:
            # An interrupt may come when the transaction is done, or when nothing of it is.
            newest = int(self._env.info()["last_txnid"]) if number != _NO_TRANSACTION else 0
            if newest >= number:
                self._gate.advance(newest)
                if freed:
                    self._freed[number] = freed
                self._fresh, self._replaced, self._settled = {}, [], []
            elif not done:
                self._places.update(dropped)
        with self._writing():
            self._name_transaction()
        if shrink:
            with self._writing():
                self._settle()
                self._file.shrink()

    def contents(self) -> Contents:
        """Return all records, and the names and sizes of all blocks."""
        blocks = {name: place.size for name, place in self._places.items()}
        with self._gate.reading():
            try:
                if not self._readonly:
                    with self._env.begin() as txn:
                        return Contents(dict(_records(txn)), blocks)
                with self._one_at_a_time:
                    return Contents(dict(_records(self._first)), blocks)
            except lmdb.Error as error:
                raise self._translate(error) from error
            except UnicodeDecodeError as error:
                raise CorruptStoreError(
                    f"{self._data} has a record named {error.object!r}: restore the store from a copy"
                ) from error

    def close(self) -> None:
        """Close environment and file, once reads and writes in other threads have ended."""
        if not self._gate.close():
            return
        if self._readonly:
            self._first.abort()
        self._file.close()
        self._env.close()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    # -- opening -----------------------------------------------------------------------------------------

    def _open(self, create: bool) -> lmdb.Environment:
        system = os.statvfs(self.path)
        options: dict[str, Any] = {} if not hasattr(lmdb.Environment, "lib_version") else {"lib_version": 0}
        try:
            return lmdb.open(
                str(self.path),
                map_size=max(system.f_frsize * system.f_blocks, 1 << 30) // PAGE_BYTES * PAGE_BYTES,
                readonly=self._readonly,
                create=create,
                readahead=False,
                max_readers=MOST_READERS,
                max_spare_txns=4,
                **options,
            )
        except lmdb.Error as error:
            if "already open" in str(error):
                raise StoreInUseError(
                    f"the store at {self.path} is already open in this process ({os.getpid()}): "
                    "use that one, or close it first",
                    pid=os.getpid(),
                ) from error
            raise self._translate(error) from error

    def _check_files(self) -> None:
        """Raise CorruptStoreError where there is no root to map (roots are all that opening touches), or no file."""
        for path in (self._data, self.path / BLOCKS):
            if not path.exists():
                raise CorruptStoreError(f"{path} is missing: restore the store from a copy")
        self._newest_meta()

    def _newest_meta(self) -> Meta:
        file = LmdbFile(str(self._data))
        try:
            return file.metas()[0]
        finally:
            file.close()

    def _begin_checked(self) -> tuple[lmdb.Transaction[bytes], Meta, dict[int, int] | None]:
        """Begin a read transaction, and check that all it can touch lies within the file: then its map is safe.

        Returns its root and what HEAD names, which was checked against it: LMDB shows an older transaction where the
        newest root is damaged.
        """
        file = LmdbFile(str(self._data))
        try:
            for _ in range(1000):  # a writer may go on meanwhile
                before = read_head(self.path)
                txn = self._env.begin()
                for meta in file.metas():
                    if meta.transaction == txn.id():
                        file.check(meta)
                        after = read_head(self.path)
                        number = txn.get(_NUMBER)
                        written = number if number is None else int.from_bytes(number, "big")
                        check_newest(self._data, meta, written, before, after)
                        return txn, meta, after
                txn.abort()
        finally:
            file.close()
        raise CorruptStoreError(f"{self._data} is damaged (its roots disagree): restore the store from a copy")

    def _read_places(self) -> bool:
        """Take up places of blocks and places that were freed; return whether there are commits.

        Freed places may lie beyond the end, however far: what is free there leaves the file before the next commit
        says so. Nobody needs that part of them, and it must not make the file longer.
        """
        size = self._file.size
        most = Place(0, size).pages
        has_commits = False
        try:
            with self._first.cursor() as cursor:
                for key in cursor.iternext(values=False):
                    kind, name = key[:1], key[1:]
                    if kind == _BLOCK:
                        self._places[name] = Place(*_PLACE.unpack(cursor.value()))
                    elif kind == _FREED:
                        self._freed[_TRANSACTION.unpack(name)[0]] = [
                            Place(offset, min(size, most - offset))
                            for offset, size in _PLACE.iter_unpack(cursor.value())
                            if offset < most
                        ]
                    elif kind == _RECORD:
                        has_commits = has_commits or name.startswith(COMMIT.encode())
                    elif key != _NUMBER:
                        raise CorruptStoreError(f"{self._data} has an entry {key!r}: restore the store from a copy")
        except struct.error as error:
            raise CorruptStoreError(f"{self._data} is damaged ({error}): restore the store from a copy") from error
        return has_commits

    def _held_places(self) -> list[Place]:
        """Return all places that are not free, in order, checked against the file and each other."""
        size = self._file.size
        end = max((place.offset + place.size for place in self._places.values()), default=0)
        held = sorted([*self._places.values(), *(place for places in self._freed.values() for place in places)])
        held = [place for place in held if place.size]
        if end > size:
            raise CorruptStoreError(
                f"{self.path / BLOCKS} ends at byte {size:,} of {end:,} that its records name: "
                "restore the store from a copy"
            )
        if any(a.offset + a.pages > b.offset or b.offset % PAGE_BYTES for a, b in pairwise([Place(0, 0), *held])):
            raise CorruptStoreError(f"{self._data} names places that overlap: restore the store from a copy")
        return held

    # -- inside ------------------------------------------------------------------------------------------

    def _put(
        self,
        txn: lmdb.Transaction[bytes],
        fresh: Mapping[bytes, Place],
        freed: list[Place],
        dropped: Iterable[bytes],
    ) -> None:
        for name in dropped:
            txn.delete(_BLOCK + name)
        for name, place in fresh.items():
            txn.put(_BLOCK + name, _PLACE.pack(*place))
        for number in self._settled:
            txn.delete(_FREED + _TRANSACTION.pack(number))
        if freed:
            txn.put(_FREED + _TRANSACTION.pack(txn.id()), b"".join(_PLACE.pack(*place) for place in freed))

    def _name_transaction(self) -> None:
        """Have HEAD name the newest transaction, if it does not yet."""
        newest = int(self._env.info()["last_txnid"])
        if self._named == newest:
            return
        try:
            write_head(self.path, self._newest_meta())
        except OSError as error:
            if error.errno in FULL:
                raise full_disk(self.path / HEAD, error, ROOM_FOR_RECORDS) from error
            raise StoreError(
                f"{self.path / HEAD} cannot be written ({error}): mend that and open the store again"
            ) from error
        self._named = newest

    def _sync(self) -> None:
        """Make all blocks durable; where that failed once, later success says nothing of what was lost."""
        if self._unsynced:
            raise StoreError(f"{self.path / BLOCKS} could not be synced: mend that and open the store again")
        self._unsynced = True
        self._file.sync()
        self._unsynced = False

    def _settle(self) -> None:
        """Make free what was freed before any read transaction that goes on; the next commit writes that down."""
        if self._freed:
            oldest = self._oldest_reader()
            for number in [number for number in self._freed if number <= oldest]:
                self._file.give(self._freed.pop(number))
                self._settled.append(number)

    def _oldest_reader(self) -> int:
        """Return the transaction that the oldest reader sees, in this process or another; the newest without one."""
        oldest = self._gate.oldest()
        for line in self._env.readers().splitlines()[1:]:
            seen = line.split()[-1]
            if seen.isdigit():
                oldest = min(oldest, int(seen))
        return oldest

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Keep the file open until this ends, and turn errors of LMDB into the store's."""
        if self._readonly:
            raise ValueError(f"the store at {self.path} is open for reading: open it with mode='a' to write")
        with self._gate.writing():
            try:
                yield
            except lmdb.Error as error:
                raise self._translate(error) from error

    def _translate(self, error: lmdb.Error) -> StoreError:
        cause = OSError(getattr(error, "code", 0), str(error))
        if isinstance(error, lmdb.MapFullError):
            cause.errno = errno.ENOSPC  # the map is as large as the file system
        if cause.errno == errno.EIO:  # what LMDB calls a write that came to an early end: it does not ask why
            try:
                check_room(self.path, ROOM_FOR_RECORDS)
                check_limit(self._data, ROOM_FOR_RECORDS)
            except OSError as full:
                cause = full
        if cause.errno in FULL:
            return full_disk(self._data if self._data.exists() else self.path, cause, ROOM_FOR_RECORDS)
        if isinstance(error, lmdb.ReadersFullError):
            return StoreError(
                f"the store at {self.path} is open for reading too often, {MOST_READERS:,} times at most: "
                "close some of those that read it and open it again"
            )
        if isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.InvalidError):
            return CorruptStoreError(f"{self._data} is damaged ({error}): restore the store from a copy")
        return StoreError(f"{self._data} cannot be used ({error}): mend that and open the store again")


def _records(txn: lmdb.Transaction[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield all records by name."""
    with txn.cursor() as cursor:
        found = cursor.set_range(_RECORD)
        while found and cursor.key()[:1] == _RECORD:
            yield cursor.key()[1:].decode(), cursor.value()
            found = cursor.next()
