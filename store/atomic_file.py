"""Files that are there whole or not at all, whenever the process or the machine stops."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` in one step; both are on disk on return."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # opening a FIFO there would wait forever
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    publish(temporary, path)


def publish(temporary: Path, path: Path) -> None:
    """Give a file, whose content is on disk already, its final name; the name is on disk on return."""
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Return when a file's content, or a directory's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
