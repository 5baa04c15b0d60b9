"""Marks of readers: which commits other processes still read, where an engine has no table of readers of its own."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import weakref
from typing import TYPE_CHECKING

from tiercache.store.errors import StoreError
from tiercache.store.full_disk import FULL, full_disk

if TYPE_CHECKING:
    from pathlib import Path


_MARK_BYTES = 4096


class ReaderMark:
    """A locked file that says which commit is being read, until ``release`` or the end of the process.

    It is there before the reader looks which commit is the newest: until ``set`` it holds them all.
    """

    def __init__(self, folder: Path) -> None:
        """Make the mark; on a file system that is read-only there is none, and nobody to see it."""
        self._path = folder / f"{os.getpid()}-{secrets.token_hex(8)}"
        self._handle: int | None = None
        try:
            folder.mkdir(exist_ok=True)
            while self._handle is None:
                self._handle = self._make()
        except OSError as error:
            if error.errno in FULL:
                raise full_disk(folder.parent, error, _MARK_BYTES).during(
                    f"the mark of a reader in {folder}", _MARK_BYTES
                ) from error
            if error.errno != errno.EROFS:
                raise StoreError(
                    f"a reader cannot leave its mark in {folder} ({error}): give it the right to write there, "
                    "so that the writer keeps what it reads"
                ) from error
        _held.add(self)

    def _make(self) -> int | None:
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle
        os.close(handle)  # the writer took it for one that was left behind
        return None

    def set(self, commit: int) -> None:
        """Say which commit is read; where the disk is full nothing is said, and every commit is held."""
        if self._handle is not None:
            try:
                os.pwrite(self._handle, f"{commit}\n".encode(), 0)
            except OSError as error:
                if error.errno not in FULL:
                    raise

    def release(self) -> None:
        """Let the commit go; a second time does nothing."""
        if self._handle is not None:
            self._path.unlink(missing_ok=True)
            self.drop()

    def drop(self) -> None:
        """Close the file, and leave the mark to whoever else has it open."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def commits_read(folder: Path) -> set[int] | None:
    """Return the commits that are being read; None where a reader has not said yet. Deletes marks left behind."""
    found: set[int] = set()
    for path in folder.iterdir() if folder.exists() else ():
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = os.pread(handle, 32, 0)
            if not said.endswith(b"\n"):
                return None
            found.add(int(said))
        else:
            path.unlink(missing_ok=True)
        finally:
            os.close(handle)
    return found


_held: weakref.WeakSet[ReaderMark] = weakref.WeakSet()


def _drop_in_child() -> None:
    """Close a forked child's copies, which would keep the commit for as long as the child lives."""
    for mark in list(_held):
        mark.drop()


os.register_at_fork(after_in_child=_drop_in_child)
