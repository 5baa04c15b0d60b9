"""Leases: what readers in other processes read of a store, so that its writer frees none of it.

A lease of a commit is a shared lock on the file of its number; it ends with its process, however that ends. Where a
folder cannot be locked (a file system that is mounted read-only, or of another user) there is none, and the writer may
free what is being read: the reader says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Lease:
    """A shared lock on the file of a commit, until ``release``."""

    def __init__(self, path: Path, handle: int) -> None:
        """Only ``take`` calls this."""
        self._path = path
        self._handle: int | None = handle
        _held.add(self)

    @classmethod
    def take(cls, folder: Path, commit: int) -> Lease | None:
        """Return a lease of ``commit``, which may be gone by now; None where the folder takes none."""
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
                os.close(handle)  # the writer took it for one that was left behind
        except OSError:
            return None

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Give it up, and delete its file where nobody else has a lease; a second time does nothing."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(self._path.stat(), os.fstat(self._handle)):  # the store may be elsewhere by now
                    self._path.unlink()
            self.drop()

    def drop(self) -> None:
        """Close the file, and leave it to whoever else has it open."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def leased_commits(folder: Path) -> set[int]:
    """Return the commits that are leased; deletes what ended leases left. A lease that cannot be looked at counts."""
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
            with contextlib.suppress(OSError):  # of another user, in a folder where only they may delete it
                path.unlink()
        except OSError:
            found.add(int(name))
        finally:
            os.close(handle)
    return found


_held: weakref.WeakSet[Lease] = weakref.WeakSet()


def _drop_in_child() -> None:
    """Close a forked child's copies, which would keep the lease for as long as the child lives."""
    for lease in list(_held):
        lease.drop()


os.register_at_fork(after_in_child=_drop_in_child)
