"""Blocks and records in one LMDB environment; the only module that imports lmdb.

What was measured and why it is so stands in docs/design: values are written through LMDB, in bounded transactions,
and read by ``pread`` at the places that the file's trees name, under a read transaction that keeps them from being
written over.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np

from tiercache.store.engine import Contents
from tiercache.store.errors import (
    BlockReadError,
    CorruptStoreError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreInUseError,
)
from tiercache.store.lmdb_file import LmdbFile
from tiercache.store.lmdb_space import FILLER, Space

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.lmdb_file import Meta, Place

DATA = "data.mdb"
_BLOCK, _RECORD, _AGE = b"b", b"r", b"a"


class LmdbEngine:
    """An environment in a directory. One in a process for each directory; never used across a fork."""

    def __init__(self, path: Path, *, create: bool, readonly: bool = False, map_bytes: int | None = None) -> None:
        """Open it; ``map_bytes`` bounds the file (None: the size of the file system).

        With ``readonly`` it stays at the commit that is newest now, and keeps its pages from being used again.
        Raises CorruptStoreError before the first access through the map, and StoreInUseError.
        """
        self.path = path
        self._data = path / DATA
        self._readonly, self._map_bytes = readonly, map_bytes
        self._state = threading.Condition()
        self._reading, self._closed = 0, False
        if create and self._data.exists() and self._data.stat().st_size < 8192:
            self._data.unlink()  # a creation that was killed before LMDB's first write
        if not create:
            self._check_file()
        self._env = self._open(create)
        self._space = Space(self._env)
        try:
            if create and self._env.info()["last_pgno"] < 2:
                with self._writing():
                    self._space.begin_file()
            self._file = LmdbFile(str(self._data))
            self._first, meta = self._begin_at_meta()
            # All pages of the trees, and what they point at, lie within the file: from here on, its map is safe.
            self._file.check_free_pages(meta)
            self._places: dict[bytes, Place] = {k: p for k, p in self._file.values(meta) if k < FILLER}
            if not readonly:
                self._first.abort()
        except BaseException:
            self._env.close()
            raise

    # -- the seam ----------------------------------------------------------------------------------------

    def write(self, blocks: Iterable[tuple[bytes, NDArray[Any]]]) -> None:
        """Put all blocks in one transaction: LMDB holds a copy of them until it commits."""
        names: list[bytes] = []
        sizes: list[int] = []
        with self._writing() as wrote, self._env.begin(write=True) as txn:
            for name, data in blocks:
                names.append(_BLOCK + name)
                sizes.append(data.nbytes)
                wrote[0] += data.nbytes
                txn.put(names[-1], data.data)
        self._learn(names)
        self._space.wrote(sizes)

    def read(self, name: bytes, offset: int, out: NDArray[np.uint8]) -> None:
        """Read from the file at the block's place."""
        txn = self._begin()
        try:
            # The snapshot begins before the place is looked up, and a place is dropped before its block is
            # deleted: a place that is found belongs to the snapshot, whose pages nothing writes over.
            place = self._places.get(_BLOCK + name)
            if place is None:
                raise BlockReadError("is missing")
            if offset + out.size > place.size:
                raise BlockReadError(f"ends at byte {place.size:,} of {offset + out.size:,}")
            if place.fixed:
                self._pread(place.offset + offset, out)
            else:
                value = self._get(txn, _BLOCK + name)
                out[:] = np.frombuffer(value, np.uint8)[offset : offset + out.size]
        finally:
            self._end(txn)

    def commit(self, records: Mapping[str, bytes | None], dead: Iterable[bytes]) -> None:
        """Set records and delete blocks in one transaction."""
        keys = [_BLOCK + name for name in dead]
        dropped = {key: self._places.pop(key) for key in keys if key in self._places}
        try:
            with self._writing() as wrote:
                self._env.reader_check()  # readers that died must not keep pages from being used again
                with self._env.begin(write=True) as txn:
                    for key in keys:
                        txn.delete(key)
                    for name, data in records.items():
                        if data is None:
                            txn.delete(_RECORD + name.encode())
                        else:
                            wrote[0] += len(data)
                            txn.put(_RECORD + name.encode(), data)
        except BaseException:
            self._places.update(dropped)
            raise
        self._learn([_RECORD + name.encode() for name, data in records.items() if data is not None])
        for name, data in records.items():
            if data is None:
                self._places.pop(_RECORD + name.encode(), None)
        with suppress(StoreError), self._writing():  # the commit stands, whatever becomes of this
            if dropped and not records:
                self._age()
            self._space.committed(sum(place.size for place in dropped.values()))

    def contents(self) -> Contents:
        """Return all records, and the names and sizes of all blocks."""
        places = dict(self._places)
        blocks = {key[1:]: place.size for key, place in places.items() if key[:1] == _BLOCK}
        txn = self._begin()
        try:
            names = [key for key in places if key[:1] == _RECORD]
            records = {name[1:].decode(): self._get(txn, name) for name in names}
        finally:
            self._end(txn)
        return Contents(records, blocks)

    def close(self) -> None:
        """Close environment and file, once reads in other threads have ended."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            self._state.wait_for(lambda: self._reading == 0)
        if self._readonly:
            self._first.abort()
        self._file.close()
        self._env.close()

    # -- inside ------------------------------------------------------------------------------------------

    def _open(self, create: bool) -> lmdb.Environment:
        options: dict[str, Any] = {} if not hasattr(lmdb.Environment, "lib_version") else {"lib_version": 0}
        try:
            return lmdb.open(
                str(self.path),
                map_size=self._map_size(),
                readonly=self._readonly,
                create=create,
                readahead=False,
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
            raise self._translate(error, 0) from error

    def _map_size(self) -> int:
        if self._map_bytes is not None:
            return max(self._map_bytes // 4096 * 4096, 1 << 16)
        system = os.statvfs(self.path)
        return max(system.f_frsize * system.f_blocks, 1 << 30) // 4096 * 4096

    def _check_file(self) -> None:
        """Raise CorruptStoreError where there is no root to map: the roots are all that opening touches."""
        if not self._data.exists():
            raise CorruptStoreError(f"{self._data} is missing: restore the store from a copy")
        file = LmdbFile(str(self._data))
        try:
            file.metas()
        finally:
            file.close()

    def _begin_at_meta(self) -> tuple[lmdb.Transaction[bytes], Meta]:
        """Begin a read transaction and find its root in the file, though a writer may go on meanwhile."""
        for _ in range(1000):
            txn = self._env.begin()
            for meta in self._file.metas():
                if meta.transaction == txn.id():
                    return txn, meta
            txn.abort()
        raise CorruptStoreError(f"{self._data} is damaged (its roots disagree): restore the store from a copy")

    def _learn(self, keys: list[bytes]) -> None:
        """Take the places of new values from the file."""
        if keys:
            meta = self._file.metas()[0]
            for kind in {key[:2] for key in keys}:
                mine = [key for key in keys if key[:2] == kind]
                self._places.update(self._file.values(meta, min(mine), max(mine) + b"\0"))

    def _age(self) -> None:
        """Let the next transaction use freed pages again, as it must after a full disk: LMDB waits for one between."""
        with self._env.begin(write=True) as txn:
            txn.put(_AGE, str(txn.id()).encode())

    def _begin(self) -> lmdb.Transaction[bytes]:
        """Keep the file open, and what is read unchanged, until ``_end``."""
        with self._state:
            if self._closed:
                raise StoreClosedError(f"the store at {self.path} is closed: open it again")
            self._reading += 1
        return self._first if self._readonly else self._env.begin()

    def _end(self, txn: lmdb.Transaction[bytes]) -> None:
        if not self._readonly:
            txn.abort()
        with self._state:
            self._reading -= 1
            if self._closed:
                self._state.notify_all()

    def _get(self, txn: lmdb.Transaction[bytes], key: bytes) -> bytes:
        """Return a copy of a small value."""
        with self._state:  # a transaction serves one thread at a time
            value = txn.get(key)
        if value is None:
            raise BlockReadError("is missing")
        return value

    def _pread(self, offset: int, out: NDArray[np.uint8]) -> None:
        done = os.preadv(self._file.handle, [out.data], offset)
        while done < out.size:
            count = os.preadv(self._file.handle, [out[done:].data], offset + done)
            if count == 0:
                raise BlockReadError(f"is cut short, as {DATA} ends at byte {self._file.size:,}")
            done += count

    @contextmanager
    def _writing(self) -> Iterator[list[int]]:
        """Turn LMDB's errors into the store's; the list counts the bytes that the transaction was to write."""
        if self._readonly:
            raise ValueError(f"the store at {self.path} is open for reading: open it with mode='a' to write")
        if self._closed:
            raise StoreClosedError(f"the store at {self.path} is closed: open it again")
        wrote = [0]
        try:
            yield wrote
        except lmdb.Error as error:
            raise self._translate(error, wrote[0]) from error

    def _translate(self, error: lmdb.Error, needed: int) -> StoreError:
        if isinstance(error, lmdb.MapFullError):
            held = self._env.info()["map_size"]
            return StoreFullError(
                needed_bytes=needed,
                limit=f"{self._data} may hold {held:,} and they do not all fit",
                advice="raise map_bytes" if self._map_bytes else "move the store to a larger file system",
            )
        system, code = os.statvfs(self.path), getattr(error, "code", 0)
        free, most = system.f_frsize * system.f_bavail, resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        # LMDB calls a write that came to an early end EIO: it does not ask why
        if code == errno.EFBIG or (code == errno.EIO and 0 <= most < self._data.stat().st_size + needed):
            return StoreFullError(
                needed_bytes=needed,
                limit=f"files of this process may have {most:,} in all",
                advice="raise ulimit -f",
            )
        if code in {errno.ENOSPC, errno.EDQUOT} or (code == errno.EIO and free < needed + (1 << 20)):
            return StoreFullError(
                needed_bytes=needed,
                limit=f"the file system of {self.path} has {free:,} free",
                advice="free some, or move the store to a larger one",
            )
        if isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.InvalidError):
            return CorruptStoreError(f"{self._data} is damaged ({error}): restore the store from a copy")
        return StoreError(f"{self._data} cannot be used ({error}): mend that and open the store again")
