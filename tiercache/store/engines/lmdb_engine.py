"""Records in an LMDB environment, blocks in a file beside it; the only module that imports lmdb.

A block is written where the file is free, and synced; then one transaction of LMDB sets the records that name it,
and its manifest; then HEAD names that. Only who writes uses LMDB, and begins with a fresh copy of checked records: so
no damaged list of free pages makes it write over live ones. What stands where is in docs/format/lmdb.md.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import lmdb

from tiercache.store.engines.block_file import BlockFile, Extent
from tiercache.store.engines.engine import WRITE_BYTES
from tiercache.store.engines.lmdb_records import (
    DATA,
    HEAD,
    MANIFEST_KEY,
    Head,
    LmdbRecords,
    join_record,
    read_head,
    record_keys,
    split_record,
)
from tiercache.store.files import (
    FULL,
    PAGE_BYTES,
    ROOM_FOR_RECORDS,
    check_limit,
    check_room,
    full_disk,
    local_path,
    sync,
    unreadable,
)
from tiercache.store.locks import WriterLock
from tiercache.store.records import RecordManifest
from tiercache.store.store_errors import BlockReadError, CorruptStoreError, StoreError, StoreFullError, StoreInUseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tiercache.store.engines.engine import Block, Data, ReadRequest, ReadSource

BLOCKS, FRESH = "blocks.bin", "fresh"
_MAP_BYTES = 16 << 20
"""Of a map to begin with: LMDB takes more for what is there, and it grows with the records."""


class LmdbEngine:
    """An environment and a file in a directory. One in a process for each directory; never used across a fork."""

    fields_apart = False
    memory_bytes = WRITE_BYTES  # it copies 3 MiB, whatever is said

    def __init__(
        self,
        path: Path,
        *,
        create: bool,
        readonly: bool = False,
        store_budget: int | None = None,
        lock: WriterLock | None = None,
    ) -> None:
        """Open it; ``store_budget`` bounds the file of blocks (None: the file system does).

        A writer holds the one right to write until it is closed: ``lock``, or one that it takes itself.
        Raises CorruptStoreError, StoreInUseError and StoreError.
        """
        path = self.path = local_path(path, "a store of engine 'lmdb'")
        self.label = f"the store at {path}"
        self._readonly, self._unsynced, self._written = readonly, False, False
        self.lease_folder: Path | None = path / "leases"
        self._env: lmdb.Environment | None = None
        self._env_lock = threading.RLock()
        """Held while the environment is used: its map grows, and must not under a transaction."""
        self._files = ExitStack()
        """Closes the file of blocks."""
        self._reads, self._count = 0, threading.Lock()
        self._lock = lock
        if not readonly and lock is None:
            self._lock = WriterLock(path)
        try:
            if create and not (path / HEAD).exists():
                self._clear()
                self._head, self._manifest = Head(0, ""), RecordManifest(number=0)
                self._records: dict[str, bytes] | None = {}
                """Those that were read, until somebody writes or lets go of them."""
            else:
                found = LmdbRecords.read(path, self.label)
                self._head, self._manifest, self._records = found.head, found.manifest, found.records
            self._open_blocks(create=create, store_budget=store_budget)
        except BaseException:
            self.close()
            raise

    # -- records -----------------------------------------------------------------------------------------

    def records(self) -> dict[str, bytes]:
        """Return those of the last commit; for reading those of the newest one that there is now."""
        with self._env_lock:
            return self._current_records()

    def _current_records(self) -> dict[str, bytes]:
        if self._env is not None:
            with self._translated(), self._env.begin() as txn:
                return self._manifest.read(lambda name, link: join_record(name, link.size, txn.get), self.label)
        if self._records is None or (self._readonly and read_head(self.path) != self._head):
            found = LmdbRecords.read(self.path, self.label)
            self._head, self._manifest, self._records = found.head, found.manifest, found.records
        return dict(self._records)

    def digests(self) -> dict[str, str]:
        """Those of the manifest."""
        return self._manifest.digests

    def drop_records(self) -> None:
        """Where they are read: what is written begins with a copy of them."""
        if self._readonly:
            self._records = None

    def commit(self, records: Mapping[str, bytes | None]) -> None:
        """Sync the file of blocks; then set records in one transaction; then have HEAD name its manifest."""
        self._check_writable()
        if wrong := [name for name in records if name == MANIFEST_KEY or "\0" in name]:
            raise ValueError(f"a record of {self.label} cannot be named {wrong[0]!r}: name it otherwise")
        self._check_head()
        self._name_manifest()
        self._sync()
        with self._env_lock:
            if self._env is None:
                self._env, self._records = self._open_records(), None
            self._set_records(records, self._env)
        self._name_manifest()

    def _set_records(self, records: Mapping[str, bytes | None], env: lmdb.Environment) -> None:
        """Set records and their manifest in one transaction."""
        manifest, number = self._manifest.after(records), -1

        def put(txn: lmdb.Transaction) -> None:
            nonlocal number
            number = txn.id()
            for name, data in records.items():
                known = self._manifest.links.get(name)
                stays = {} if data is None else dict(split_record(name, data))
                for key in () if known is None else record_keys(name, known.size):
                    if key not in stays:
                        txn.delete(key)
                for key, part in stays.items():
                    txn.put(key, part)
            txn.put(MANIFEST_KEY.encode(), manifest.to_bytes())

        try:
            self._transact(env, put, sum(len(data) for data in records.values() if data is not None))
        finally:
            # An interrupt may come when the transaction is done, or when nothing of it is.
            if self._env is not None and number >= 0 and int(env.info()["last_txnid"]) >= number:
                self._manifest = manifest

    def _transact(self, env: lmdb.Environment, put: Callable[[lmdb.Transaction], None], num_bytes: int) -> None:
        """Run a transaction of so many bytes, and again with a larger map if they do not fit."""
        try:
            with self._translated():
                while True:
                    try:
                        with env.begin(write=True) as txn:
                            put(txn)
                    except lmdb.MapFullError:
                        self._grow(env)
                    else:
                        return
        except StoreFullError as error:
            raise error.during(f"the records of {self.label}", num_bytes) from error

    def _grow(self, env: lmdb.Environment) -> None:
        """Double the map. If there is no address space for it, the next commit opens the environment again."""
        try:
            env.set_mapsize(2 * int(env.info()["map_size"]))
        except lmdb.Error:
            env.close()  # it has no map at all
            self._env = None
            raise

    # -- blocks ------------------------------------------------------------------------------------------

    def write(self, blocks: Iterable[Data], *, stable: bool = False) -> list[int]:
        """Write all blocks where the file is free."""
        self._check_writable()
        file, places = self._file, list[Extent]()
        self._written = True
        try:
            for _, data in blocks:
                self._check_writable()
                places.append(file.put(data, stable=stable))
            file.flush()
        except BaseException:
            file.discard(places)
            raise
        return [place.offset for place in places]

    def read(self, request: ReadRequest) -> None:
        """Read from the file at the block's place."""
        block, offset, out = request
        if problem := self.problem(block):
            raise BlockReadError(problem)
        if offset + out.size > block.size:
            raise BlockReadError(f"ends at byte {block.size:,} of {offset + out.size:,}")
        with self._reading():
            self._file.read(block.place + offset, out)

    @contextmanager
    def locate(self, requests: Sequence[ReadRequest]) -> Iterator[list[ReadSource | None]]:
        """Say where in the file they lie."""
        with self._reading():
            file = self._file
            yield [
                file.source(Extent(block.place, block.size) if block.place >= 0 else None, offset, out)
                for block, offset, out in requests
            ]

    def problem(self, block: Block) -> str:
        """Compare with the length of the file."""
        if block.place < 0 or block.place % PAGE_BYTES:
            return f"is said to begin at byte {block.place:,} of {BLOCKS}, which no page does"
        end, size = block.place + block.size, self._file.size
        return f"is cut short, as {BLOCKS} has {size:,} bytes of {end:,}" if block.size and end > size else ""

    def retain(self, blocks: Iterable[Block]) -> None:
        """Make everything else free; what is free at the end leaves the file.

        The records that say so are durable then, and HEAD names them: a killed process may have left them otherwise.
        """
        self._check_writable()
        places, end = list[Extent](), 0
        for block in sorted((block for block in blocks if block.size), key=lambda block: block.place):
            if wrong := self.problem(block):
                raise CorruptStoreError(f"a block of {self.label} {wrong}: restore the store from a copy")
            if block.place < end:
                raise CorruptStoreError(f"blocks of {self.label} overlap: restore the store from a copy")
            places.append(Extent(block.place, block.size))
            end = block.place + places[-1].pages
        if self._manifest.number:
            try:
                sync(self.path / DATA, data_only=True)
                sync(self.path)
            except OSError as error:
                raise self._unwritable(self.path / DATA, error) from error
            self._name_manifest()
        self._file.occupy(places)

    def free(self, blocks: Iterable[Block]) -> None:
        """Let their room be used."""
        self._check_writable()
        self._file.give(Extent(block.place, block.size) for block in blocks)

    def shrink(self) -> None:
        """Make the file shorter, and holes where it is free."""
        self._check_writable()
        self._file.shrink()

    def close(self) -> None:
        """Close environment and file, and give up the right to write."""
        self._files.close()
        with self._env_lock:
            if self._env is not None:
                self._env.close()
                self._env = None
        if self._lock is not None:
            self._lock.release()

    # -- opening -----------------------------------------------------------------------------------------

    def _clear(self) -> None:
        """Delete what a creation left that was killed: it has no block yet."""
        blocks, data = self.path / BLOCKS, self.path / DATA
        if blocks.exists() and blocks.stat().st_size:
            raise CorruptStoreError(
                f"{self.path} has blocks and no {HEAD} that tells which commit is the newest: restore the store from a "
                "copy"
            )
        try:
            data.unlink(missing_ok=True)
        except OSError as error:
            raise self._unwritable(data, error) from error

    def _open_blocks(self, *, create: bool, store_budget: int | None) -> None:
        path = self.path / BLOCKS
        try:
            if not create and not path.exists():
                raise FileNotFoundError(path)
            self._file = BlockFile(
                path, readonly=self._readonly, store_budget=store_budget, is_read=lambda: self._reads > 0
            )
            self._files.callback(self._file.close)
        except OSError as error:
            if error.errno in FULL:
                raise full_disk(self.path, error, ROOM_FOR_RECORDS) from error
            raise unreadable(path, error) from error

    def _open_records(self) -> lmdb.Environment:
        """Put the records into a fresh environment in place of the old one, and open it."""
        try:
            self._copy_records()
        except StoreFullError:
            self._file.shrink()  # what is free among the blocks may be the room
            self._copy_records()
        return self._environment(self.path)

    def _copy_records(self) -> None:
        records, fresh = self._current_records(), self.path / FRESH

        def put(txn: lmdb.Transaction) -> None:
            for name, data in records.items():
                for key, part in split_record(name, data):
                    txn.put(key, part)
            if self._manifest.number:
                txn.put(MANIFEST_KEY.encode(), self._manifest.to_bytes())

        try:
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            env = self._environment(fresh)
            try:
                self._transact(env, put, sum(map(len, records.values())))
            finally:
                env.close()
            self._check_head()
            (fresh / DATA).replace(self.path / DATA)
            sync(self.path)
        except OSError as error:
            raise self._unwritable(self.path, error) from error
        finally:
            with contextlib.suppress(StoreError):  # the folder may be another store's by now
                self._check_writable()
                shutil.rmtree(fresh, ignore_errors=True)

    def _unwritable(self, path: Path, error: OSError) -> StoreError:
        if error.errno in FULL:
            return full_disk(self.path, error, ROOM_FOR_RECORDS)
        return StoreError(f"{path} cannot be written ({error}): mend that and open the store again")

    def _environment(self, folder: Path) -> lmdb.Environment:
        options: dict[str, Any] = {} if not hasattr(lmdb.Environment, "lib_version") else {"lib_version": 0}
        try:
            return lmdb.open(
                os.fsencode(folder),  # a name need not be UTF-8
                map_size=_MAP_BYTES,
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

    # -- inside ------------------------------------------------------------------------------------------

    def _name_manifest(self) -> None:
        """Have HEAD name the newest manifest, if it does not yet."""
        newest = Head.of(self._manifest) if self._manifest.number else self._head
        if self._head == newest:
            return
        self._check_head()
        try:
            if self._head.number:
                newest.write(self.path)
            else:
                newest.create(self.path)
        except OSError as error:
            raise self._unwritable(self.path / HEAD, error) from error
        self._head = newest

    def _sync(self) -> None:
        """Make all blocks durable; where that failed once, later success says nothing of what was lost."""
        if self._unsynced:
            raise StoreError(f"{self.path / BLOCKS} could not be synced: mend that and open the store again")
        if self._written:
            self._unsynced = True
            self._file.sync()
            self._unsynced = self._written = False

    def _check_writable(self) -> None:
        """Raise ValueError if it is open for reading, and StoreError if it was moved."""
        if self._readonly or self._lock is None:
            raise ValueError(f"{self.label} is open for reading: open it with mode='a' to write")
        self._lock.check()

    def _check_head(self) -> None:
        """Raise StoreError if the store was moved, or HEAD is not what this writer wrote or read."""
        self._check_writable()
        seen = read_head(self.path) if self._head.number or (self.path / HEAD).exists() else self._head
        # An interrupt may come after HEAD is written and before that is noted.
        if seen not in {self._head, Head.of(self._manifest)}:
            raise StoreError(
                f"{self.path / HEAD} names manifest {seen.number}, and this process wrote {self._head.number}: "
                "another one has written to the store, or an older copy was put in its place. Nothing more is written: "
                "close it, and open it again"
            )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._count:
            self._reads += 1
        try:
            yield
        finally:
            with self._count:
                self._reads -= 1

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn errors of LMDB into the store's."""
        try:
            yield
        except lmdb.Error as error:
            raise self._translate(error) from error

    def _translate(self, error: lmdb.Error) -> StoreError:
        cause = OSError(getattr(error, "code", 0), str(error))
        if cause.errno == errno.EIO:  # what LMDB calls a write that came to an early end: it does not ask why
            try:
                check_room(self.path, ROOM_FOR_RECORDS)
                check_limit(self.path / DATA, ROOM_FOR_RECORDS)
            except OSError as full:
                cause = full
        if cause.errno in FULL:
            return full_disk(self.path, cause, ROOM_FOR_RECORDS)
        if cause.errno == errno.ENOMEM:
            return StoreError(
                f"{self.path / DATA} cannot be mapped ({error}), as this process has no address space left for it: "
                "raise ulimit -v, or have it use less"
            )
        with contextlib.suppress(AttributeError):
            if isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.InvalidError):
                return CorruptStoreError(f"{self.path / DATA} is damaged ({error}): restore the store from a copy")
        return StoreError(f"{self.path / DATA} cannot be used ({error}): mend that and open the store again")
