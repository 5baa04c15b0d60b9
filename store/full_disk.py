"""The error of a disk without room, from what the system says of it."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tiercache.store.errors import StoreFullError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What the system calls a disk, a share of it or a file that may not grow."""
ROOM_FOR_RECORDS = 1 << 20
"""More bytes than the records of a commit need: blocks leave them free."""


def check_room(path: Path, needed_bytes: int) -> None:
    """Raise OSError, one of FULL, where the file system of ``path``, which is there, has less room than that."""
    system = os.statvfs(path)
    if system.f_frsize * system.f_bavail < needed_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check_limit(file: Path, more_bytes: int) -> None:
    """Raise OSError, one of FULL, where this process may not let ``file`` grow by so much."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if most != resource.RLIM_INFINITY and most < (file.stat().st_size if file.exists() else 0) + more_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


def full_disk(
    path: Path, error: OSError, needed_bytes: int, *, kept_bytes: int = 0, at_least: bool = False
) -> StoreFullError:
    """Return the error of ``path``, which could not take ``needed_bytes`` because of ``error``, one of FULL.

    ``kept_bytes`` were to stay free beside them. What it says to be free is less than what it says to be needed, but
    where other bytes were freed, or other things than bytes lack: it says so.
    """
    if error.errno == errno.EFBIG:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return StoreFullError(
            needed_bytes=needed_bytes,
            limit=f"files of this process may have {most:,} in all",
            advice="raise ulimit -f",
        )
    system = os.statvfs(path)
    free = system.f_frsize * system.f_bavail
    limit = f"the file system of {path} has {free:,} free"
    if error.errno == errno.EDQUOT:
        limit = f"the disk quota of {path} is used up"
    elif system.f_files and not system.f_favail:
        limit = f"the file system of {path} has no room for another file"
    elif free >= needed_bytes + kept_bytes:
        limit = f"the file system of {path} was full, and has {free:,} free by now"
    return StoreFullError(
        needed_bytes=needed_bytes + kept_bytes,
        limit=limit,
        advice="free some, or move the store to a larger one",
        kept_bytes=kept_bytes,
        at_least=at_least,
    )


@contextmanager
def room_for(needed_bytes: int, path: Path, what: str, *, at_least: bool = False) -> Iterator[None]:
    """Raise StoreFullError, which says that ``what`` needed so many bytes, in place of an OSError of a full disk.

    ``path`` must exist, or the folder that it stands in. ``at_least``: ``what`` needs more bytes later.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        there = path if path.exists() else path.parent
        raise full_disk(there, error, needed_bytes, at_least=at_least).during(what, needed_bytes) from error
