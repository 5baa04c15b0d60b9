"""Staged writes: one process at a time, with a check of free space, published in one step."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from tiercache.errors import ImportExportError, TierCacheError
from tiercache.sizes import format_bytes
from tiercache.store.files import local_path

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NO_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of file systems without locks on folders. There the caller must avoid two exports to one path."""


def to_path(path: str | os.PathLike[str], what: str) -> Path:
    """Return the absolute path of ``what``. Raises ImportExportError for a URL and for a NUL character."""
    if "\0" in os.fspath(path):
        raise ImportExportError(f"the path {os.fspath(path)!r} has a NUL character: choose one without")
    with file_errors(f"finding {what}"):
        return local_path(path, what)


@contextmanager
def file_errors(what: str) -> Iterator[None]:
    """Turn an error of the file system, such as a missing permission, and a ValueError into an ImportExportError."""
    try:
        yield
    except TierCacheError:
        raise
    except ValueError as error:
        raise ImportExportError(str(error)) from error
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise ImportExportError(f"{what} failed: {place}{error.strerror or error}") from error


def check_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raise ImportExportError if ``folder`` has less than ``needed_bytes`` free."""
    free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        raise ImportExportError(
            f"{what} needs {format_bytes(needed_bytes)} ({needed_bytes:,} bytes), but {folder} has "
            f"{format_bytes(free)} free: free some space, export fewer tables, or export elsewhere"
        )


@contextmanager
def staging_directory(out: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Yield an empty folder ``.NAME.unfinished`` next to ``out``. Publish it, or it is deleted.

    Leftovers of a killed process are deleted too. Raises ImportExportError if another process or thread has the folder,
    and if ``out`` exists, unless ``replaces``.
    """
    draft = out.with_name(f".{out.name}.unfinished")
    handle = _lock(draft, out)
    try:
        if not replaces and out.exists():  # another process published it before the lock was taken
            raise ImportExportError(f"{out} exists: choose another path")
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


def _lock(draft: Path, out: Path) -> int:
    """Return a handle of the draft folder, locked until it is closed."""
    draft.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with suppress(FileExistsError):
            draft.mkdir()
        try:
            handle = os.open(draft, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # its previous owner has published or deleted it
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise ImportExportError(
                f"{draft} is being written by another process: wait until it ends, or choose a different path than "
                f"{out}"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(handle)
                raise
        if _is(draft, handle):
            return handle
        os.close(handle)


def _is(draft: Path, handle: int) -> bool:
    """Return True if a handle belongs to the folder that has this name now."""
    try:
        return os.path.samestat(draft.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
