"""Locks of a store: its one writer, leases of readers in other processes, and calls in this one."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import warnings
import weakref
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from tiercache.store.files import FULL, ROOM_FOR_RECORDS, open_file, reason, room_for, sync
from tiercache.store.store_errors import StoreClosedError, StoreError, StoreInUseError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MARKER = "store.json"
LOCK = "writer.lock"
IN_USE = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES})
"""Errors of ``flock`` for a file that another process has locked; SMB uses the last."""


class WriterLock:
    """The right to write to a store, held by one process until ``release`` or its end, however it ends."""

    def __init__(self, directory: Path) -> None:
        """Lock ``writer.lock``, and the marker as soon as it exists, so that it is not taken for stale and deleted.

        Raises StoreInUseError, StoreFullError and StoreError.
        """
        self._directory = directory
        self._handles: dict[str, int] = {}
        """Open files by name; the marker identifies the directory, and "" is the directory itself."""
        _open_locks.add(self)
        try:
            try:
                self._handles[""] = os.open(directory, os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY))
            except OSError as error:
                raise self._unusable(directory, error) from error
            self._take(LOCK, os.O_RDWR | os.O_CREAT)
            handle = self._handles[LOCK]
            if not os.fstat(handle).st_size:
                with suppress(PermissionError):  # a folder that may be searched but not listed
                    sync(directory)  # without a marker, a folder is an unfinished store only if this file exists
            self.take_marker()
            os.ftruncate(handle, 0)
            try:
                os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)  # used only in a message
            except OSError as error:  # a store must open on a full disk, too
                if error.errno not in FULL:
                    raise
        except BaseException:
            self.release()
            raise

    def take_marker(self) -> None:
        """Lock the marker too, if it is there. Raises StoreInUseError and StoreError."""
        path = self._directory / MARKER
        if path.is_file():
            self._take(MARKER, os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY)

    def check(self) -> None:
        """Raise StoreError if the store at the path is not the one that was locked: it must not be written then."""
        for part in ("", next(reversed(self._handles), "")):
            path = self._directory / part
            try:
                if part in self._handles and os.path.samestat(path.stat(), os.fstat(self._handles[part])):
                    continue
                seen = f"{path} is not the one that this process opened and locked"
            except OSError as error:
                seen = f"{path} cannot be accessed ({reason(error)})"
            raise StoreError(
                f"the store at {self._directory} was moved, replaced or deleted while it was written: {seen}. Nothing "
                "more is written: close it, move the store back, and open it again"
            )

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Let others write; a second time does nothing."""
        while self._handles:
            os.close(self._handles.popitem()[1])

    drop = release  # a fork's copy, which releases nothing

    def _take(self, name: str, flags: int) -> None:
        path = self._directory / name
        with room_for(ROOM_FOR_RECORDS, path, f"the lock of the store at {self._directory}"):
            try:
                handle = open_file(path, flags)
            except OSError as error:
                if error.errno in FULL:
                    raise
                raise self._unusable(path, error) from error
        self._handles[name] = handle
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in IN_USE:
                raise StoreError(
                    f"the file system of {self._directory} does not lock files ({reason(error)}), so nothing would "
                    "stop a second writer: put the store on one that has flock, or open it with mode='r'"
                ) from error
            holder = os.pread(self._handles[LOCK], 32, 0)
            pid = int(holder) if holder.strip().isdigit() else None
            who = f"process {pid}" if pid else "another process"
            own = " (this process)" if pid == os.getpid() else ""
            raise StoreInUseError(
                f"the store at {self._directory} is being written by {who}{own} and can have only one writer: close "
                "it there, or open it here with mode='r'",
                pid=pid,
            ) from error

    def _unusable(self, path: Path, error: OSError) -> StoreError:
        return StoreError(
            f"the lock of the store at {self._directory} cannot be opened ({reason(error)}): fix {path}, or open the "
            "store with mode='r'"
        )


class UseCount:
    """Lets uses through until it is closed; from any thread."""

    def __init__(self, label: str) -> None:
        """``label`` is the store's name in messages."""
        self._label = label
        self._changed = threading.Condition()
        self._uses: Counter[int] = Counter()
        """By thread."""
        self._closed = False

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keep the engine open until this ends. Raises StoreClosedError."""
        with self._changed:
            if self._closed:
                raise StoreClosedError(f"{self._label} is closed: open it again")
            self._uses[threading.get_ident()] += 1
        try:
            yield
        finally:
            with self._changed:
                self._uses[threading.get_ident()] -= 1
                self._uses = +self._uses
                self._changed.notify_all()

    def check_outside(self) -> None:
        """Raise StoreError if this thread is inside a use: closing would wait for itself."""
        with self._changed:
            if threading.get_ident() in self._uses:
                raise StoreError(
                    f"{self._label} cannot be closed inside a function that it calls, such as progress=: raise an "
                    "error there to stop the method, and close the store afterward"
                )

    def close(self) -> None:
        """Refuse new uses, and wait for the current ones."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._uses)


def warn_unclosed(what: object, label: str) -> None:
    """Warn of an object that was never closed and closes itself: with its lock, leases and files."""
    message = f"{label} was never closed: close it, or open it in a with statement"
    warnings.warn(message, ResourceWarning, stacklevel=3, source=what)


class Lease:
    """A shared lock on the file of a commit, until ``release``."""

    def __init__(self, path: Path, handle: int) -> None:
        self._path, self._handle = path, handle
        _open_locks.add(self)

    @classmethod
    def take(cls, folder: Path, commit: int) -> Lease | None:
        """Return a lease of ``commit``, which may be gone by now; None if none can be taken."""
        path = folder / str(commit)
        try:
            folder.mkdir(exist_ok=True)
            while True:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
                try:
                    fcntl.flock(handle, fcntl.LOCK_SH)
                    if os.fstat(handle).st_nlink:
                        return cls(path, handle)
                except BaseException:
                    os.close(handle)
                    raise
                os.close(handle)  # the writer took it for stale
        except OSError:
            return None

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock, and delete its file if it was the last lease; a second time does nothing."""
        if self._handle >= 0:
            with suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(self._path.stat(), os.fstat(self._handle)):  # the store may have moved
                    self._path.unlink()
            self.drop()

    def drop(self) -> None:
        """Close the file without deleting it."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def leased_commits(folder: Path) -> set[int]:
    """Return the commits that are leased; deletes the files of ended leases. A lease that cannot be checked counts."""
    found: set[int] = set()
    try:
        names = [path.name for path in folder.iterdir() if path.name.isdecimal()]
    except OSError:
        return found
    for name in names:
        path = folder / name
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            continue
        except OSError:
            found.add(int(name))
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(OSError):  # another user's, in a folder where only they may delete it
                path.unlink()
        except OSError:
            found.add(int(name))
        finally:
            os.close(handle)
    return found


_open_locks: weakref.WeakSet[WriterLock | Lease] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close a forked child's copies, which would hold locks and leases for as long as the child lives."""
    for lock in list(_open_locks):
        lock.drop()


os.register_at_fork(after_in_child=_close_in_child)
