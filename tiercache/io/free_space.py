"""The error of a disk without room for files that are exported."""

from __future__ import annotations

import errno
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tiercache.errors import ImportExportError
from tiercache.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["free_space_in"]


@contextmanager
def free_space_in(folder: Path, needed: int, what: str, advice: str) -> Iterator[None]:
    """Raise ImportExportError where ``folder`` has less than ``needed`` bytes free, or its disk fills up meanwhile.

    ``what`` needs so many; ``advice`` says what to do.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ImportExportError(
            f"{what} needs {format_bytes(needed)} ({needed:,} bytes) and {folder} has {format_bytes(free)} free: "
            f"{advice}"
        )
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise ImportExportError(
            f"the disk of {folder} is full, and {what} needs about {needed:,} bytes: {advice}"
        ) from error
