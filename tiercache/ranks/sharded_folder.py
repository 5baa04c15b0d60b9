"""The folder of a sharded store: whether one is there, or may be made there."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from tiercache.ranks.record import RECORD
from tiercache.store import NotAStoreError, StoreMissingError
from tiercache.store.directory import MARKER

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LOCK", "check_place", "check_there"]

LOCK = "ranks.lock"
"""The file that rank 0 of a training holds locked; a store's own lock has another name, so none is made here."""


def check_place(path: Path) -> None:
    """Raise NotAStoreError where ``path`` is anything else than a sharded store, or the place of one."""
    names: set[str] = set()
    with suppress(FileNotFoundError, NotADirectoryError):  # a file in its place gets the words of StoreDirectory
        names = {entry.name for entry in path.iterdir()} - {LOCK, RECORD + ".tmp"}
    if not names or RECORD in names:
        return
    if MARKER in names:
        raise NotAStoreError(f"{path} is the store of one process, not of several: give a path that is free")
    if any(name.startswith("part-") for name in names):
        raise NotAStoreError(f"{path} has parts and no {RECORD}: restore the record from a copy")
    raise NotAStoreError(
        f"{path} is a directory without {RECORD} that holds {min(names)!r}, not a sharded store: give the path of one, "
        "or one that is free"
    )


def check_there(path: Path) -> None:
    """Raise StoreMissingError or NotAStoreError where there is no record of a sharded store at ``path``."""
    if not path.exists():
        raise StoreMissingError(f"there is no sharded store at {path}: check the path")
    check_place(path)
    if not (path / RECORD).exists():
        raise StoreMissingError(f"there is no sharded store at {path}: check the path")
