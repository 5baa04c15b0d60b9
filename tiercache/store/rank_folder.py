"""The folders of a store's ranks: each has a separate engine, and a marker that identifies its store.

Rank 0 uses the store's folder. The folder of rank R is ``rank-R`` in it, or in a folder that was given. Its marker is
written before anything else and deleted last, so that the remains of a kill can be identified.

A copy of a store has the same id, and its commits name the rank folders of the original. So each folder outside a store
has a file ``home.json`` with the path of its store and its own path. A writer checks it before it takes the lock of the
folder, and writes it under that lock.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.store.commit import CommitRecord, rank_folder
from tiercache.store.commit_reader import record_at
from tiercache.store.files import read_whole, reason, sync
from tiercache.store.locks import MARKER
from tiercache.store.opening import (
    ENGINES,
    FORMAT_VERSION,
    RANK_FORMAT,
    Opened,
    RankPlace,
    StoreDirectory,
    check_version,
    label_of,
    open_folder,
    write_json,
)
from tiercache.store.store_errors import NotAStoreError, StoreError, StoreMissingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tiercache.store.sharding import ShardingPlan
    from tiercache.store.table import Table


_DRAFT = f"{MARKER}.new"
_NOTE = "other-ranks.json"
_NOTE_DRAFT = f"{_NOTE}.new"
_MARKER_BYTES = 4096
"""More than a marker has."""
HOME = "home.json"
_HOME_BYTES = 16384
"""More than the file has."""


class RankFolder:
    """The folder of a rank, which need not exist."""

    def __init__(self, store: Path, folder: str, rank: int, id_: str) -> None:
        """``folder``: as a commit names it. ``id_``: the store's id."""
        self.path, self._store, self._rank, self._id = store / folder, store, rank, id_

    def check(self) -> str:
        """Return the engine of the rank. Raises StoreMissingError, NotAStoreError and FormatVersionError."""
        what = f"rank {self._rank} of the store at {self._store}"
        advice = "restore it from a copy, move it back, or pass its new location in shard_dirs="
        if not self.path.is_dir():
            raise StoreMissingError(f"{what} is missing: {self.path} does not exist: {advice}")
        directory = StoreDirectory(self.path)
        try:
            marker = directory.marker()
        except NotAStoreError as error:
            raise NotAStoreError(f"{what} has no marker: {error}") from error
        if marker.get("format") != RANK_FORMAT:
            raise NotAStoreError(f"{self.path / MARKER} does not belong to {what}: {advice}")
        check_version(marker.get("version"), str(self.path))
        if marker.get("store") != self._id or marker.get("rank") != self._rank:
            whose = "that store" if marker.get("store") == self._id else "another store"
            raise NotAStoreError(f"{self.path} has rank {marker.get('rank')!r:.20} of {whose}, not {what}: {advice}")
        return directory.engine(tuple(ENGINES), None)

    def check_home(self) -> None:
        """Raise StoreError if another store with the same id is the home: writing here would change its rows.

        A store missing from its path was moved. A folder that is a copy of the one it names has no home yet.
        """
        own, store = self._resolved()
        if (values := _home_of(own, store)) is None:
            return
        home, folder = Path(values["store"]), Path(values["folder"])
        is_copy = not _is_same(folder, own) and self._is_rank(folder)
        if is_copy or _is_same(home, store) or not self._is_store(home):
            return
        raise StoreError(
            f"{own} has rank {self._rank} of the store at {home}, and the store at {store} is a copy of that one, "
            "without this folder: writing to the copy would change the original. Copy the folders of the other ranks "
            f"too, and pass the copies as shard_dirs=; or delete {home} if the copy replaces it; or open the copy with "
            "mode='r'"
        )

    def take_home(self) -> None:
        """Make the store the home, durably. Call it with the lock of the folder held. Raises as ``check_home``."""
        self.check_home()
        folder, store = self._resolved()
        values = {"store": str(store), "folder": str(folder)}
        if not folder.is_relative_to(store) and values != _home_of(folder, store):
            write_json(folder / HOME, values, _HOME_BYTES, f"{HOME} of rank {self._rank}")

    def make(self, engine: str) -> None:
        """Make an empty folder, durably, in place of its remains. Raises NotAStoreError, StoreError, StoreFullError."""
        try:
            (self.path / _DRAFT).unlink(missing_ok=True)  # a kill came before the marker
            is_used = self.path.exists() and any(self.path.iterdir())
        except OSError as error:
            raise NotAStoreError(
                f"{self.path} cannot be made the folder of rank {self._rank} ({reason(error)}): pass unused folders as "
                "shard_dirs="
            ) from error
        if is_used:
            try:
                self.check()
            except StoreError as error:
                raise NotAStoreError(
                    f"{self.path} exists and is not a rank of this store: pass unused folders as shard_dirs="
                ) from error
            self.check_home()
            self._empty()
        StoreDirectory(self.path).create()
        values = {
            "format": RANK_FORMAT, "version": FORMAT_VERSION, "engine": engine, "store": self._id, "rank": self._rank,
        }  # fmt: skip
        write_json(self.path / MARKER, values, _MARKER_BYTES, f"the marker of rank {self._rank}")

    def delete(self) -> None:
        """Delete the folder, durably, if it is empty or belongs to this rank and store; several may do so at once."""
        with suppress(OSError):  # a kill left an empty one, or came before the marker
            if {entry.name for entry in self.path.iterdir()} <= {_DRAFT}:
                (self.path / _DRAFT).unlink(missing_ok=True)
                self.path.rmdir()
        with suppress(StoreError, FileNotFoundError, NotADirectoryError):
            self.check()
            self.check_home()
            self._empty()
            (self.path / MARKER).unlink(missing_ok=True)
            _delete(self.path)
            sync(self.path.parent)

    def _resolved(self) -> tuple[Path, Path]:
        try:
            return self.path.resolve(), self._store.resolve()
        except (OSError, RuntimeError) as error:  # a loop of links
            raise StoreError(f"{self.path}, the folder of rank {self._rank}, cannot be found: {error}") from error

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

    def _empty(self) -> None:
        for entry in list(os.scandir(self.path)):
            if entry.is_dir(follow_symlinks=False):
                _delete(Path(entry.path))
            elif entry.name != MARKER:
                Path(entry.path).unlink(missing_ok=True)
        sync(self.path)


def _delete(folder: Path) -> None:
    """Delete a folder and everything in it, even if others delete files or readers take leases there meanwhile."""
    while folder.exists():
        try:
            shutil.rmtree(folder)
            break
        except OSError as error:  # errno is missing if a folder was recreated while it was opened
            if error.errno not in {errno.ENOENT, errno.ENOTEMPTY, None} or folder.is_symlink():
                raise


def is_among(folder: Path, others: Iterable[Path]) -> bool:
    """Return True if a folder is one of ``others``, possibly by another name, such as a symbolic link."""
    with suppress(OSError):
        folder.stat()
        return any(_is_same(folder, other) for other in others)
    return False


def store_id(path: Path) -> str:
    """Return the id of the store at ``path``, which the markers of its ranks have."""
    return str(StoreDirectory(path).marker().get("id", ""))


def open_rank(
    whole_tables: tuple[Table, ...], path: Path, place: RankPlace, mode: str, store_budget: int | None, *,
    engine: str = "",
) -> Opened:  # fmt: skip
    """Open the engine of a rank above 0, as ``Store.open`` does; ``engine``: create it, empty, with this one."""
    folder = RankFolder(path, place.folders[place.rank], place.rank, place.store)
    tables = place.sharding.shard_tables(whole_tables, place.rank)
    if engine:
        folder.make(engine)
    kind = folder.check()
    if mode == "a":
        folder.check_home()
    opened = open_folder(folder.path, tables, kind, mode, store_budget, create=bool(engine))
    if mode == "a":
        try:
            folder.take_home()
        except BaseException:
            opened.close()
            raise
    return replace(opened, tables=whole_tables, place=place)


def open_ranks(
    whole: Opened, path: Path, of: CommitRecord, sharding: ShardingPlan, mode: str, store_budget: int | None
) -> None:
    """Open the engines of all ranks for a commit where the newest one says that they are; rank 0's is open."""
    folders = of.folders
    id_, head = store_id(path), whole.engine.newest()
    newest = None if head is None else record_at(whole.engine, head, label_of(path))
    if newest is not None and len(newest.folders) == sharding.num_ranks:
        folders = newest.folders
    places = [
        RankPlace(rank=rank, sharding=sharding, folders=tuple(folders), commits=whole.engine, store=id_)
        for rank in range(sharding.num_ranks)
    ]
    whole.ranks.append(replace(whole, tables=of.tables, place=places[0], ranks=[], _loader=None))
    for place in places[1:]:
        whole.ranks.append(open_rank(of.tables, path, place, mode, store_budget))


def open_ranks_to_write(whole: Opened, path: Path, store_budget: int | None) -> None:
    """Delete other ranks' remains, and open the engines of all ranks if the newest commit has several."""
    head = whole.engine.newest()
    assert head is not None, "it is a store"
    record = record_at(whole.engine, head, label_of(path))
    folders = () if record is None else record.folders
    check_homes(path, folders)
    delete_others(path, folders, noted_folders(path))
    note_folders(path, ())
    if record is not None and record.sharding is not None:
        open_ranks(whole, path, record, record.sharding, "a", store_budget)


def check_homes(path: Path, folders: Sequence[str]) -> None:
    """Raise StoreError if a store is a copy and its ranks' folders belong to the original."""
    id_ = store_id(path)
    for rank, folder in enumerate(folders[1:], 1):
        RankFolder(path, folder, rank, id_).check_home()


def note_folders(path: Path, folders: Sequence[str]) -> None:
    """Note, durably, the folders outside a store that its ranks have or get while they change; none: they do not.

    A kill may leave some that no commit names. Those in the store are found by their names.
    """
    outside = sorted({folder for folder in folders if Path(folder).is_absolute()})
    if not outside:
        (path / _NOTE).unlink(missing_ok=True)
        with suppress(OSError):  # a kill left it, or it is not ours
            (path / _NOTE_DRAFT).unlink()
        return
    write_json(path / _NOTE, outside, _MARKER_BYTES + len(json.dumps(outside)), f"the ranks of the store at {path}")


def noted_folders(path: Path) -> tuple[str, ...]:
    """Return the noted folders, which may hold remains of ranks. Raises StoreError if the note cannot be read."""
    what = "which names folders of ranks that a change of ranks may have left"
    noted = _json_at(path / _NOTE, what, "delete it", lambda one: isinstance(one, list) and {*map(type, one)} <= {str})
    return tuple(noted or ())


def delete_others(path: Path, folders: Sequence[str], left: Sequence[str] = ()) -> None:
    """Delete folders of ranks that a store lacks, in its folder and in ``left``; call it with the store's lock held."""
    id_, current = store_id(path), [path / folder for folder in folders]
    inside = [entry.name for entry in path.glob("rank-*")]
    for folder in dict.fromkeys([*inside, *left]):
        name, number = Path(folder).name, Path(folder).name[5:]
        is_rank = number.isdecimal() and name == rank_folder(int(number)) != "."
        if is_rank and folder not in folders and not is_among(path / folder, current):
            RankFolder(path, folder, int(number), id_).delete()


def _home_of(folder: Path, store: Path) -> Mapping[str, str] | None:
    """Return the paths in a folder's home.json, if it is outside of its store. Raises StoreError if unreadable."""
    if folder.is_relative_to(store):
        return None

    def fits(values: Any) -> bool:
        return isinstance(values, dict) and {*map(type, map(values.get, ("store", "folder")))} <= {str}

    advice = f"delete it if the folder belongs to the store at {store}"
    found: Mapping[str, str] | None = _json_at(folder / HOME, "which names the store of the rank", advice, fits)
    return found


def _json_at(path: Path, what: str, advice: str, fits: Callable[[Any], bool]) -> Any:
    """Return the values of a small file; None without one. Raises StoreError for a file that cannot be read."""
    try:
        values = json.loads(read_whole(str(path)))
        if not fits(values):
            raise ValueError("it has other values")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path}, {what}, cannot be read ({reason(error)}): {advice}") from error
    return values


def _is_same(one: Path, other: Path) -> bool:
    """Return True if two paths name the same folder, such as a bind mount and its source."""
    with suppress(OSError, ValueError):
        return one == other or one.samefile(other)
    return False
