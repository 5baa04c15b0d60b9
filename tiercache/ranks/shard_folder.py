"""The folder of one rank's part, which is an ordinary store, and the mark beside it that says whose part it is.

The mark of ``part-0-1`` is the file ``part-0-1.json`` in the same folder. It is there before the part is, and goes
after it, so a part that is half-made or half-deleted is known for what it is; nothing without a mark is ever deleted.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiercache.atomic_io import sync, write_whole
from tiercache.store import CorruptStoreError, FormatVersionError, NotAStoreError, Store, StoreMissingError
from tiercache.store.directory import StoreDirectory
from tiercache.store.full_disk import room_for
from tiercache.store.opening import check_options, open_engine
from tiercache.store.part import MARK_BYTES, PART_FORMAT, mark_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tiercache.store import Table

__all__ = ["Mark", "delete_part", "open_part"]

_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Which part of which sharded store a folder is."""

    store: str
    """The id of the sharded store."""
    generation: int
    rank: int

    def make(self, folder: Path) -> None:
        """Mark ``folder``, which need not be there, durably. Raises StoreFullError, and NotAStoreError where it is."""
        StoreDirectory(folder.parent).create()
        if folder.exists() or mark_of(folder).exists():
            raise NotAStoreError(
                f"{folder} is there already and is no part of this store: give shard_dirs= that are free"
            )
        values = {"format": PART_FORMAT, "version": _VERSION}
        values |= {"store": self.store, "generation": self.generation, "rank": self.rank}
        with room_for(MARK_BYTES, folder.parent, f"the mark of {folder}"):
            write_whole(mark_of(folder), json.dumps(values).encode() + b"\n")

    def check(self, folder: Path, sharded: str) -> None:
        """Raise where ``folder`` is not this part, whole, of the store that messages call ``sharded``.

        Raises StoreMissingError, NotAStoreError, FormatVersionError and CorruptStoreError.
        """
        part = f"part {self.rank} of {sharded}"
        advice = (
            "restore it from a copy, move it back, or train with as many ranks as before and shard_dirs= where it is"
        )
        if not folder.exists():
            raise StoreMissingError(f"{part} is missing: there is no {folder}: {advice}")
        found = Mark.read(folder)
        if found is None:
            raise NotAStoreError(f"{part} at {folder} has no mark beside it ({mark_of(folder).name}): {advice}")
        if found.store != self.store:
            raise NotAStoreError(f"{folder} is a part of another sharded store and not {part}: {advice}")
        if found != self:
            raise NotAStoreError(
                f"{folder} is marked as part {found.rank} of generation {found.generation} and not as {part}: {advice}"
            )
        if not StoreDirectory(folder).find():
            raise StoreMissingError(f"{part} is missing: {folder} holds no store: {advice}")

    @classmethod
    def read(cls, folder: Path) -> Mark | None:
        """Return whose part ``folder`` is; None where it has no mark. Raises FormatVersionError, CorruptStoreError."""
        path = mark_of(folder)
        try:
            values: Any = json.loads(path.read_bytes()[:MARK_BYTES])
            if not isinstance(values, dict) or values.get("format") != PART_FORMAT:
                raise ValueError("it is not that of a part")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, RecursionError) as error:
            raise CorruptStoreError(f"{path} cannot be read ({error}): restore it from a copy") from error
        version = values.get("version")
        if version != _VERSION or isinstance(version, bool):
            newer = isinstance(version, int) and version > _VERSION
            raise FormatVersionError(
                f"{path} has format version {version!r:.40} and this tiercache reads version {_VERSION}: "
                f"{'use a newer tiercache' if newer else 'use the tiercache that wrote it'}"
            )
        mark = values.get("store"), values.get("generation"), values.get("rank")
        match mark:
            case (str() as store, int() as generation, int() as rank) if values.keys() == _KEYS:
                return cls(store=store, generation=generation, rank=rank)
        raise CorruptStoreError(f"{path} cannot be read (it marks {mark!r:.80}): restore it from a copy")


_KEYS = {"format", "version", "store", "generation", "rank"}


def open_part(
    folder: Path, tables: Iterable[Table] | None, *, engine: str, store_budget: int | None, retention: int
) -> Store:
    """Open the store in a marked folder for writing, or make it, as ``Store.open`` does: for whoever may write to it.

    Raises what ``Store.open`` raises.
    """
    check_options("a", None, retention)
    opened = open_engine(folder, tables, engine, "a", store_budget, part=True)
    try:
        return Store(opened, folder, "a", None, retention)
    except BaseException:
        opened.close()
        raise


def delete_part(folder: Path, store: str) -> None:
    """Delete a part, and then its mark, durably, where it is marked as one of the sharded store with the id ``store``.

    Without a mark only the draft of one is deleted. Several may delete the same folder at once.
    """
    draft = mark_of(folder).with_name(mark_of(folder).name + ".tmp")
    draft.unlink(missing_ok=True)
    mark = Mark.read(folder)
    if mark is None or mark.store != store:
        return
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            continue  # somebody else deletes it, too
    sync(folder.parent)
    mark_of(folder).unlink(missing_ok=True)
    sync(folder.parent)
