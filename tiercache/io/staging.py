"""Drafts: what is written beside its final place, by one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from tiercache.errors import ImportExportError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["staging_directory"]

_NO_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""What a file system says that locks no folders: there, two exports to one place are the caller's to avoid."""


@contextmanager
def staging_directory(out: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Yield an empty folder ``.NAME.unfinished`` beside ``out``, for the caller to publish; what is left of it goes.

    What a killed process left there goes, too. Raises ImportExportError where another process, or thread, has the
    folder, and where ``out`` exists, unless what is published ``replaces`` it.
    """
    draft = out.with_name(f".{out.name}.unfinished")
    handle = _hold(draft, out)
    try:
        if not replaces and out.exists():  # it was published between the caller's look and the lock
            raise ImportExportError(f"{out} exists: give a path that is free")
        for entry in draft.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        yield draft
    finally:
        if _is(draft, handle):
            shutil.rmtree(draft, ignore_errors=True)
        os.close(handle)


def _hold(draft: Path, out: Path) -> int:
    """Return a handle of the draft folder, which is locked as long as it is open."""
    draft.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with suppress(FileExistsError):
            draft.mkdir()
        try:
            handle = os.open(draft, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # who had it has published or deleted it since
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise ImportExportError(
                f"{draft} is being written by another process: wait until it has ended, or give another path than {out}"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(handle)
                raise
        if _is(draft, handle):
            return handle
        os.close(handle)


def _is(draft: Path, handle: int) -> bool:
    """Return whether a handle is that of the folder which has the name now."""
    try:
        return os.path.samestat(draft.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
