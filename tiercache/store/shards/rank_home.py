"""The home of a rank's folder outside its store: the one store that may write to it.

A copy of a store has the same id, and its commits name the rank folders of the original. So each folder outside a store
has a file ``home.json`` with the path of its store and its own path. A writer checks it before it takes the lock of the
folder, and writes it under that lock.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.store.directory import StoreDirectory
from tiercache.store.files import read_whole, reason, replace_file, room_for
from tiercache.store.locks import MARKER
from tiercache.store.store_errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping

HOME = "home.json"
_HOME_BYTES = 16384
"""More than the file has."""


class RankHome:
    """The home of the folder of one rank; a folder inside its store, with links followed, needs none."""

    def __init__(self, folder: Path, store: Path, id_: str, rank: int) -> None:
        """``id_``: that of the store at ``store``."""
        self._folder, self._store, self._id, self._rank = folder.resolve(), store.resolve(), id_, rank
        self._is_inside = self._folder.is_relative_to(self._store)

    def check(self) -> None:
        """Raise StoreError if another store with the same id is the home: writing here would change its rows.

        A store that is no longer at its path was moved. A folder that is a copy of the one it names has no home yet.
        """
        values = self._read()
        if values is None:
            return
        home, folder = Path(values["store"]), Path(values["folder"])
        is_copy = not _is_same(folder, self._folder) and self._is_rank(folder)
        if is_copy or _is_same(home, self._store) or not self._is_store(home):
            return
        raise StoreError(
            f"{self._folder} has rank {self._rank} of the store at {home}, and the store at {self._store} is a copy "
            "of that one, without this folder: writing to the copy would change the original. Copy the folders of "
            f"other ranks, too, and train with shard_dirs= that name the copies; or delete {home} if the copy replaces "
            "it; or open the copy with mode='r'"
        )

    def take(self) -> None:
        """Make the store the home, durably. Call it with the lock of the folder held. Raises as ``check`` does."""
        self.check()
        values = {"store": str(self._store), "folder": str(self._folder)}
        if not self._is_inside and values != self._read():
            with room_for(_HOME_BYTES, self._folder, f"{HOME} of rank {self._rank}"):
                replace_file(self._folder / HOME, json.dumps(values).encode() + b"\n", suffix=".new")

    def _read(self) -> Mapping[str, str] | None:
        """Return the paths in the file; None without one. Raises StoreError for a file that cannot be read."""
        path = self._folder / HOME
        if self._is_inside:
            return None
        try:
            values: Any = json.loads(read_whole(str(path)))
            if not isinstance(values, dict) or not {*map(type, map(values.get, ("store", "folder")))} <= {str}:
                raise ValueError("it does not name two folders")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise StoreError(
                f"{path}, which names the store of the rank, cannot be read ({reason(error)}): delete it if the folder "
                f"belongs to the store at {self._store}"
            ) from error
        return values

    def _is_store(self, folder: Path) -> bool:
        """Return True if a folder has a store with this id, or one whose marker cannot be read."""
        try:
            return StoreDirectory(folder).marker().get("id") == self._id
        except StoreError:
            return os.path.lexists(folder / MARKER)

    def _is_rank(self, folder: Path) -> bool:
        """Return True if a folder has the same rank of a store with this id."""
        with suppress(StoreError):
            marker = StoreDirectory(folder).marker()
            return (marker.get("store"), marker.get("rank")) == (self._id, self._rank)
        return False


def _is_same(one: Path, other: Path) -> bool:
    """Return True if two paths name the same folder, as those of a bind mount and its source do."""
    with suppress(OSError, ValueError):
        return one == other or one.samefile(other)
    return False
