"""Marks of readers: which commits other processes still read, where an engine has no table of readers of its own."""

from __future__ import annotations

import contextlib
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
_ANY = -1
"""Every commit."""


class ReaderMark:
    """A locked file that says which commit is being read, until ``release`` or the end of the process.

    It is there before the reader looks which commit is the newest: until ``set`` it holds them all.
    """

    def __init__(self, folder: Path) -> None:
        """Make the mark; where the file system is mounted read-only there is none, and a writer elsewhere goes on."""
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
            with contextlib.suppress(OSError):
                os.fchmod(handle, 0o644)  # whatever the umask: a writer that cannot read it keeps every commit
            return handle
        os.close(handle)  # the writer took it for one that was left behind
        return None

    @property
    def held(self) -> bool:
        """Whether a writer sees it."""
        return self._handle is not None

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
            with contextlib.suppress(OSError):  # the writer deletes it then
                self._path.unlink(missing_ok=True)
            self.drop()

    def drop(self) -> None:
        """Close the file, and leave the mark to whoever else has it open."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def commits_read(folder: Path) -> set[int] | None:
    """Return the commits that are being read; None where all may be. Deletes marks left behind, where it may.

    All may be read where a reader has not said yet which it reads, and where a mark cannot be opened, locked or
    understood. Raises nothing.
    """
    found: set[int] = set()
    try:
        for path in folder.iterdir() if folder.exists() else ():
            with contextlib.suppress(FileNotFoundError):
                commit = _commit_read(path)
                if commit == _ANY:
                    return None
                if commit is not None:
                    found.add(commit)
    except OSError:
        return None
    return found


def _commit_read(path: Path) -> int | None:
    """Return the commit that a mark names, ``_ANY`` where it does not say; None for one that was left behind."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # another user's may be read and not be written
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = os.pread(handle, 32, 0)
            return int(said) if said.endswith(b"\n") and said[:-1].isdigit() else _ANY
        with contextlib.suppress(OSError):  # of another user, in a folder where only they may delete it
            path.unlink(missing_ok=True)
        return None
    finally:
        os.close(handle)


_held: weakref.WeakSet[ReaderMark] = weakref.WeakSet()


def _drop_in_child() -> None:
    """Close a forked child's copies, which would keep the commit for as long as the child lives."""
    for mark in list(_held):
        mark.drop()


os.register_at_fork(after_in_child=_drop_in_child)
