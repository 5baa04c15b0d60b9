"""The mark of a shard: the file beside its folder that says of which store it is a shard.

A shard is an ordinary store that one rank writes, so nobody alone may write to it. The mark of ``shard-0-1`` is the
file ``shard-0-1.json`` in the same folder. It is there before the shard is, and goes after it, so a shard that is
half-made or half-deleted is known for what it is; nothing without a mark is ever deleted.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tiercache.store.directory import FORMAT_VERSION, StoreDirectory, check_version, delete_folder
from tiercache.store.files import read_whole, replace_file, room_for, sync, unreadable
from tiercache.store.store_errors import CorruptStoreError, NotAStoreError, StoreMissingError

_FORMAT = "tiercache shard"
_BYTES = 4096
"""More than a mark has."""
_NAME = re.compile(r"shard-[0-9]+-[0-9]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Which shard of which store a folder is."""

    store: str
    """The id of the store."""
    generation: int
    rank: int

    def make(self, folder: Path) -> None:
        """Mark ``folder``, which need not be there, durably. Raises StoreFullError, and NotAStoreError where it is."""
        StoreDirectory(folder.parent).create()
        if folder.exists() or mark_of(folder).exists():
            raise NotAStoreError(
                f"{folder} is there already and is no shard of this store: give shard_dirs= that are free"
            )
        values = {"format": _FORMAT, "version": FORMAT_VERSION, **asdict(self)}
        with room_for(_BYTES, folder.parent, f"the mark of {folder}"):
            replace_file(mark_of(folder), json.dumps(values).encode() + b"\n")

    def check(self, folder: Path, store: str) -> None:
        """Raise where ``folder`` is not this shard, whole, of what messages call ``store``.

        Raises StoreMissingError, NotAStoreError, FormatVersionError and CorruptStoreError.
        """
        shard = f"shard {self.rank} of {store}"
        advice = (
            "restore it from a copy, move it back, or train with as many ranks as before and shard_dirs= where it is"
        )
        if not folder.exists():
            raise StoreMissingError(f"{shard} is missing: there is no {folder}: {advice}")
        found = Mark.read(folder)
        if found is None:
            raise NotAStoreError(f"{shard} at {folder} has no mark beside it ({mark_of(folder).name}): {advice}")
        if found.store != self.store:
            raise NotAStoreError(f"{folder} is a shard of another store and not {shard}: {advice}")
        if found != self:
            raise NotAStoreError(
                f"{folder} is marked as shard {found.rank} of generation {found.generation} and not as {shard}: "
                f"{advice}"
            )
        if not StoreDirectory(folder).find():
            raise StoreMissingError(f"{shard} is missing: {folder} holds no store: {advice}")

    @classmethod
    def read(cls, folder: Path) -> Mark | None:
        """Return whose shard ``folder`` is; None where it has no mark. Raises FormatVersionError, CorruptStoreError."""
        path = mark_of(folder)
        try:
            values: Any = json.loads(read_whole(str(path))[:_BYTES])
            if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
                raise ValueError("it is not that of a shard")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise unreadable(path, error) from error
        except (ValueError, RecursionError) as error:
            raise CorruptStoreError(f"{path} cannot be read ({error}): restore it from a copy") from error
        check_version(values.pop("version", None), str(path))
        match values:
            case {"store": str() as store, "generation": int() as generation, "rank": int() as rank, **rest} if (
                not rest
            ):
                return cls(store=store, generation=generation, rank=rank)
        raise CorruptStoreError(f"{path} cannot be read (it marks {values!r:.80}): restore it from a copy")


def mark_of(folder: Path) -> Path:
    """Return the file that marks the store in ``folder`` as a shard: that of ``shard-0-1`` is ``shard-0-1.json``."""
    return folder.with_name(folder.name + ".json")


def delete_shard(folder: Path, store: str) -> None:
    """Delete a shard, and then its mark, durably, where it is marked as one of the store with the id ``store``.

    Without a mark only the draft of one is deleted. Several may delete the same folder at once.
    """
    draft = mark_of(folder).with_name(mark_of(folder).name + ".tmp")
    draft.unlink(missing_ok=True)
    mark = Mark.read(folder)
    if mark is None or mark.store != store:
        return
    delete_folder(folder)
    sync(folder.parent)
    mark_of(folder).unlink(missing_ok=True)
    sync(folder.parent)


def is_shard(folder: Path) -> bool:
    """Return whether ``folder``, which need not be there, is marked as a shard, by the name given or by its own.

    A mark that is damaged counts where the folder has the name of a shard.
    """
    return any(_is_marked(place) for place in {folder.absolute(), Path(os.path.realpath(folder))} if place.name)


def refuse_shard(folder: Path) -> None:
    """Raise ValueError where ``folder`` is a shard, which its own rank alone may write to."""
    if is_shard(folder):
        raise ValueError(
            f"{folder} is one shard of a store, and all shards make commits together: give the path of the whole "
            "store, or open the shard with mode='r'"
        )


def _is_marked(folder: Path) -> bool:
    try:
        values: Any = json.loads(read_whole(str(mark_of(folder)))[:_BYTES])
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError, RecursionError):
        values = None
    if isinstance(values, dict) and values.get("format") == _FORMAT:
        return True
    return _NAME.fullmatch(folder.name) is not None  # else it is somebody's own file
