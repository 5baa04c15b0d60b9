"""The directory of a store, and opening it from a path, or from a given engine, with its tables."""

from __future__ import annotations

import json
import os
import uuid
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tiercache.store.commit import TABLES, CommitRecord, before_commits, head_of
from tiercache.store.commit_reader import CommitLoader, record_at, tables_at
from tiercache.store.engines.engine import Blob, Counters, Engine, Head
from tiercache.store.files import check_room, is_url, local_path, read_whole, reason, replace_file, room_for, sync
from tiercache.store.locks import LOCK, MARKER, UseCount, WriterLock
from tiercache.store.records import checked_retention, encode, integer
from tiercache.store.sharding import ShardingPlan, groups_of_rank
from tiercache.store.store_errors import (
    CorruptStoreError,
    FormatVersionError,
    NotAStoreError,
    StoreError,
    StoreMissingError,
    TableMismatchError,
    damaged,
)
from tiercache.store.table import Table, group_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


T = TypeVar("T")
FORMAT = "tiercache store"
FORMAT_VERSION = 5
RANK_FORMAT = "tiercache rank"
"""The format in the marker of a rank's folder, which has blobs of a store but is not a store."""
_OLDER_SHARDS = "shards.json"
"""The file of a store of several ranks before they made commits together."""
_EMPTY_BYTES = 1 << 20
"""More than a store without rows takes."""


def store_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a store as an absolute one. Raises ValueError, as ``local_path`` does."""
    return local_path(path, "a store", "for an object store, use Store.open(None, engine=ZarrEngine(...))")


class StoreDirectory:
    """A directory that is or will become a store."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def find(self) -> bool:
        """Tell a store (True) from a free path or an unfinished store. Raises NotAStoreError and FormatVersionError."""
        try:
            if "\0" in str(self.path):
                raise ValueError("a NUL ends the name of a file")
            if not self.path.exists():
                return False
        except (OSError, ValueError) as error:
            raise NotAStoreError(
                f"{str(self.path)[:200]!r} cannot be the path of a store ({reason(error)}): choose another"
            ) from error
        if not self.path.is_dir():
            raise NotAStoreError(f"{self.path} is a file, not a store: pass the path of a store, or an unused one")
        names = {entry.name for entry in self.path.iterdir()}
        if _OLDER_SHARDS in names:
            raise FormatVersionError(
                f"the store at {self.path} has {_OLDER_SHARDS}, of ranks with separate commits, but this tiercache "
                f"reads version {FORMAT_VERSION}: export the store with the tiercache that wrote it"
            )
        if MARKER in names:
            self._check_marker()
        elif names and LOCK not in names:
            raise NotAStoreError(
                f"{self.path} is a directory without {MARKER} that holds {min(names)!r}, not a store: "
                "pass the path of a store, or an unused one"
            )
        return MARKER in names

    def missing(self) -> StoreMissingError:
        """Return the error of a store that is missing and may not be created."""
        return StoreMissingError(f"no store at {self.path}: check the path, or pass tables to create a store there")

    def create(self) -> None:
        """Make the directory, durably, with those above it. Raises NotAStoreError, and StoreFullError."""
        place = self.path.absolute()
        made = [path for path in (place, *place.parents) if not path.exists()]
        above = next(path for path in (place, *place.parents) if path.exists())
        try:
            with room_for(_EMPTY_BYTES, above, f"the store at {self.path}"):
                self.path.mkdir(parents=True, exist_ok=True)
                check_room(self.path, _EMPTY_BYTES)  # LMDB's map of its readers would be SIGBUS
        except (FileExistsError, NotADirectoryError) as error:
            raise NotAStoreError(f"{error.filename} is a file: no store can be made below it") from error
        for path in made or [place]:  # a directory made by a killed process may not be durable yet
            with suppress(PermissionError):  # a parent directory that may be searched but not read
                sync(path.parent)

    def engine(self, engines: tuple[str, ...], requested: str | None) -> str:
        """Return the engine. Raises FormatVersionError for an unknown one, ValueError if another is ``requested``."""
        engine = self.marker().get("engine")
        if engine not in engines:
            raise FormatVersionError(
                f"the store at {self.path} was created with engine {engine!r}, but this tiercache has "
                f"{' and '.join(engines)}: use a newer tiercache"
            )
        if requested not in {None, engine}:
            raise ValueError(
                f"the store at {self.path} was created with engine {engine!r}, not {requested!r}: omit engine, "
                "or pass the path of a new store"
            )
        return str(engine)

    def finish(self, engine: str) -> None:
        """Write the marker, durably: from now on this is a store. All files of the engine must exist."""
        values = {"format": FORMAT, "version": FORMAT_VERSION, "engine": engine, "id": uuid.uuid4().hex}
        with room_for(_EMPTY_BYTES, self.path, f"the store at {self.path}"):
            sync(self.path)
        write_json(self.path / MARKER, values, _EMPTY_BYTES, f"the store at {self.path}")

    def marker(self) -> dict[str, Any]:
        """Return the marker's contents. Raises NotAStoreError."""
        path = self.path / MARKER
        try:
            marker: Any = json.loads(read_whole(str(path))[:65536])
        except OSError as error:
            raise NotAStoreError(f"{path} cannot be read ({reason(error)}): restore the store from a copy") from error
        except (ValueError, RecursionError) as error:
            raise NotAStoreError(f"{path} is not JSON ({error}): restore the store from a copy") from error
        if not isinstance(marker, dict):
            raise NotAStoreError(f"{path} is not the marker of a store: pass the path of a store, or an unused one")
        return marker

    def _check_marker(self) -> None:
        marker = self.marker()
        if marker.get("format") == RANK_FORMAT:
            raise NotAStoreError(
                f"{self.path} has the rows of one rank of a store: pass the path of the whole store, which all ranks "
                "commit together"
            )
        if marker.get("format") != FORMAT:
            raise NotAStoreError(
                f"{self.path / MARKER} is not the marker of a store: pass the path of a store, or an unused one"
            )
        check_version(marker.get("version"), f"the store at {self.path}")


def write_json(path: Path, values: object, needed_bytes: int, what: str) -> None:
    """Replace a small file by plain JSON values, durably. Raises StoreFullError: ``what`` needed ``needed_bytes``."""
    with room_for(needed_bytes, path.parent, what):
        replace_file(path, json.dumps(values).encode() + b"\n", suffix=".new")


def check_version(version: object, name: str) -> None:
    """Raise FormatVersionError if ``name`` has a different format version than this tiercache reads."""
    if version != FORMAT_VERSION or isinstance(version, bool):
        newer = isinstance(version, int) and version > FORMAT_VERSION
        raise FormatVersionError(
            f"{name} has format version {version!r:.40}, but this tiercache reads version {FORMAT_VERSION}: "
            f"{'use a newer tiercache' if newer else 'use the tiercache that wrote it'}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """One of the ranks that make the commits of a store together."""

    rank: int
    sharding: ShardingPlan
    """The rank of each row, also with one rank."""
    folders: tuple[str, ...]
    """By rank the folder of its blobs, as commits name it."""
    commits: Engine
    """Has the blobs of commits: the engine of rank 0, or a copy of those blobs."""
    store: str = ""
    """The id of the store."""
    leased: frozenset[int] = frozenset()
    """The commits that other processes lease, as rank 0 saw them, if ``commits`` is a copy."""
    anew: bool = False
    """True if the next commit is the first one of these ranks, without the previous ranks' lists."""


@dataclass(kw_only=True, slots=True)
class Opened:
    """An engine and the tables stored in it."""

    engine: Engine
    tables: tuple[Table, ...]
    """Whole tables, even if the rank has a slice of their columns."""
    path: Path | None = None
    lock: WriterLock | None = None
    """None if it is open for reading."""
    place: RankPlace | None = None
    """None without ranks."""
    ranks: list[Opened] = field(default_factory=list)
    """The engines of all ranks, in a store of several; for rank 0 the store's engine."""
    uses: UseCount = field(init=False)
    _loader: CommitLoader | None = None

    def __post_init__(self) -> None:
        self.uses = UseCount(label_of(self.path))

    def loader(self, counters: Counters) -> CommitLoader:
        """Return the loader of its commits; the first caller's ``counters`` count its reads."""
        if self._loader is None:
            place = self.place
            rank, sharding, commits = (0, None, None) if place is None else (place.rank, place.sharding, place.commits)
            groups, label = groups_of_rank(self.tables, sharding, rank), label_of(self.path)
            self._loader = CommitLoader(self.engine, groups, label, counters, self.uses, rank=rank, commits=commits)
        return self._loader

    def explain(self, error: CorruptStoreError) -> StoreError:
        """Return the error to raise for damage seen by a writer: a store that was moved is not damaged."""
        if self.lock is not None:
            try:
                self.lock.check()
            except StoreError as moved:
                return moved
        return error

    def moved_since(self, head: Head | None) -> bool:
        """Return True if another writer has published since ``head``."""
        try:
            return self.engine.newest() != head
        except StoreError:
            return False

    def close(self) -> None:
        """Close the engines and release the lock, once they are unused."""
        for one in (*self.ranks[1:], self):
            one.uses.close()
            one.engine.close()


_TRIES = 100
ENGINES = {"lmdb": "data.mdb", "zarr": "heads"}
"""By name of the engine, the file or folder of its commits; the first engine is the default."""
COMPRESSING = ("zarr",)
"""The engines with compression."""


def checked_options(mode: str, commit: int | None, retention: int | None) -> tuple[int | None, int | None]:
    """Return the commit and the retention of ``Store.open``. Raises ValueError for invalid options."""
    if mode not in {"a", "r"}:
        raise ValueError(f"mode {mode!r} is unknown: expected 'a' (read and write) or 'r' (read)")
    commit = None if commit is None else integer(commit, "commit")
    retention = None if retention is None else checked_retention(retention)
    if commit is not None and mode != "r":
        raise ValueError("an older commit can only be read: open it with mode='r', or roll the store back to it")
    return commit, retention


def check_pin(name: str) -> None:
    """Raise ValueError for an invalid name of a pinned commit."""
    if not isinstance(name, str) or not name or not name.isprintable() or len(name) > 200:
        raise ValueError(f"{name!r} cannot be the name of a pinned commit: use 1 to 200 printable characters")
    if name.isdecimal():
        raise ValueError(f"{name!r} cannot be the name of a pinned commit, whose ids are numbers: add a letter")


def label_of(path: Path | None) -> str:
    """Return a store's name in messages."""
    return "the store in memory" if path is None else f"the store at {path}"


def open_engine(
    path: Path | None, tables: Iterable[Table] | None, engine: str | Engine | None, mode: str, store_budget: int | None
) -> Opened:
    """Open the store at ``path``, or in the given engine. Raises what ``Store.open`` raises."""
    requested = None if tables is None else tuple(sorted(tables, key=lambda table: table.table_id))
    if requested is not None:
        group_tables(requested)
    if engine is not None and not isinstance(engine, str):
        store, fresh = label_of(path), engine.newest() is None
        if fresh and (tables is None or mode == "r"):
            raise StoreMissingError(f"no store in the engine of {store}: pass tables to create one")
        return Opened(engine=engine, tables=_tables_of(engine, requested, store, fresh=fresh), path=path)
    if path is None:
        raise ValueError(f"engine {engine or 'lmdb'!r} needs a path")
    return _open_path(path, requested, engine, mode, store_budget)


def newest_record(path: Path) -> CommitRecord | None:
    """Return the newest commit of the store at ``path``, without the ranks' lists; None if there is none."""
    try:
        opened = open_engine(path, None, None, "r", None)
    except StoreMissingError:
        return None
    with closing(opened):
        return _at_newest(opened.engine, label_of(path), record_at)


def _at_newest(engine: Engine, store: str, read: Callable[[Engine, Head, str], T]) -> T | None:
    """Return the result of ``read`` at the newest head; retries if a writer commits. None before the first."""
    head = engine.newest()
    for _ in range(_TRIES):
        if head is None:
            return None
        try:
            return read(engine, head, store)
        except CorruptStoreError:
            now = engine.newest()
            if now in {None, head}:
                raise
            head = now
    raise StoreError(f"{store} is committed to faster than it can be read: open it again")


def located(
    path: str | os.PathLike[str] | None, engine: str | Engine | None, mode: str, store_budget: int | None
) -> tuple[Path | None, str | Engine | None]:
    """Return a store's path or name, and its engine: for the URL of an object store an instance."""
    if path is None:
        return None, engine
    if not is_url(path):
        return store_path(path), engine
    if engine is None or isinstance(engine, str):
        url = os.fspath(path)
        if engine not in {None, "zarr"}:
            raise ValueError(f"{url} is on an object store, which engine {engine!r} cannot use: omit engine")
        from tiercache.store.engines.zarr_engine import ZarrEngine
        from tiercache.store.engines.zarr_objects import object_store

        engine = ZarrEngine(object_store(url), create=mode == "a", readonly=mode == "r", store_budget=store_budget)
    return Path(path), engine


def _open_path(
    path: Path, tables: tuple[Table, ...] | None, engine: str | None, mode: str, store_budget: int | None
) -> Opened:
    """Open or create the store at ``path``; if it has several ranks, the part of rank 0."""
    if engine is not None and engine not in ENGINES:
        raise ValueError(f"engine {engine!r} is unknown: expected 'lmdb', 'zarr' or an instance of an engine")
    directory = StoreDirectory(path)
    found = directory.find()
    if not found:
        if mode == "r" or tables is None:
            raise directory.missing()
        _new_engine(engine, tables)
        directory.create()
    with ExitStack() as undo:
        lock = _locked(path, mode, undo)
        found = directory.find()  # another process may have created it before this one took the lock
        kind = directory.engine(tuple(ENGINES), engine) if found else _new_engine(engine, tables or ())
        if not found:
            _check_alone(path, kind)
        opened = _engine(kind)(path, create=not found, readonly=mode == "r", store_budget=store_budget, lock=lock)
        undo.callback(opened.close)
        head = opened.newest()
        if not found and head is not None and not before_commits(head):
            raise NotAStoreError(f"{path} holds commits but lost its marker: restore the store from a copy")
        stored = _tables_of(opened, tables, label_of(path), fresh=not found)
        if not found:
            directory.finish(kind)
            if lock is not None:
                lock.take_marker()
        undo.pop_all()
    return Opened(engine=opened, tables=stored, path=path, lock=lock)


def open_folder(
    path: Path, tables: tuple[Table, ...], engine: str, mode: str, store_budget: int | None, *, create: bool
) -> Opened:
    """Open the engine of a rank, which has a marker; ``create``: make it."""
    with ExitStack() as undo:
        lock = _locked(path, mode, undo)
        opened = _engine(engine)(path, create=create, readonly=mode == "r", store_budget=store_budget, lock=lock)
        undo.callback(opened.close)
        if create:
            _tables_of(opened, tables, label_of(path), fresh=True)
        undo.pop_all()
    return Opened(engine=opened, tables=tables, path=path, lock=lock)


def _locked(path: Path, mode: str, undo: ExitStack) -> WriterLock | None:
    if mode != "a":
        return None
    lock = WriterLock(path)
    undo.callback(lock.release)
    return lock


def _new_engine(engine: str | None, tables: Iterable[Table]) -> str:
    """Return the engine of a new store, by default the first that can compress if a table needs it."""
    asking = next((table for table in tables if table.compression), None)
    kind = engine or next(kind for kind in ENGINES if kind in COMPRESSING or asking is None)
    if asking is not None and kind not in COMPRESSING:
        raise ValueError(
            f"table {asking.name!r} has compression {asking.compression!r}, but engine {kind!r} has none: "
            f"use engine={COMPRESSING[0]!r}, or omit the compression of the table"
        )
    return kind


def _check_alone(path: Path, kind: str) -> None:
    """Raise NotAStoreError if a new store would hide one of another engine."""
    for other, name in ENGINES.items():
        if other != kind and (path / name).exists():
            raise NotAStoreError(
                f"{path} holds {name} of a store with engine {other!r} that lost its marker or was never finished: "
                "restore the store from a copy, or choose another path"
            )


def _engine(kind: str) -> Callable[..., Engine]:
    """Return the class of an engine, importing its library only now."""
    if kind == "zarr":
        from tiercache.store.engines.zarr_engine import ZarrEngine

        return ZarrEngine
    from tiercache.store.engines.lmdb_engine import LmdbEngine

    return LmdbEngine


def _tables_of(engine: Engine, requested: tuple[Table, ...] | None, store: str, *, fresh: bool) -> tuple[Table, ...]:
    """Return the tables of the store; writes those given for a fresh one."""
    if fresh:
        assert requested is not None
        before = engine.newest()
        data = encode("tables", {"tables": [table.to_record() for table in requested]}, {})
        head = head_of(f"{TABLES}-{engine.epoch}" if engine.epoch else TABLES, data)
        if head != before:  # an interrupted creation may have got this far
            engine.drop([(head.name, None)])
            engine.put([Blob(head.name, head.size)], [(0, 0, np.frombuffer(data, np.uint8))])
            engine.publish(head, before)
        return requested
    stored = _at_newest(engine, store, tables_at)
    if stored is None:
        raise damaged(f"{store} has no description of its contents")
    if requested is not None:
        compare_tables(stored, requested, store)
    return stored


def compare_tables(stored: Sequence[Table], requested: Sequence[Table], store: str) -> None:
    """Raise TableMismatchError that names the first difference between the tables of ``store`` and those given."""
    advice = (
        "pass the tables it has, alter the store with tiercache.store.alter(store, tables) or `tiercache alter STORE "
        "--schema FILE`, or pass the path of a new one"
    )
    stored_by_name, requested_by_name = ({table.name: table for table in tables} for tables in (stored, requested))
    for name in sorted(stored_by_name.keys() | requested_by_name.keys()):
        if name not in requested_by_name:
            raise TableMismatchError(f"{store} has a table {name!r} that was not given: {advice}")
        if name not in stored_by_name:
            raise TableMismatchError(f"{store} has no table {name!r}: {advice}")
        kept, given = stored_by_name[name], requested_by_name[name]
        one, other = kept.to_record(), given.to_record()
        if kept.initializer == given.initializer:
            other["initializer"] = one["initializer"]  # files may have moved
        # compression that was not requested is not in the record: the store's setting stays
        part = next((key for key in other if one.get(key) != other[key]), None)
        if part is None:
            continue
        before, after = one.get(part), other[part]
        if part == "optimizer" and type(kept.optimizer) is type(given.optimizer):  # records leave out some settings
            settings = [one.name for one in fields(kept.optimizer)]  # type: ignore[arg-type]
            changed = [one for one in settings if getattr(kept.optimizer, one) != getattr(given.optimizer, one)]
            before, after = ({one: getattr(each.optimizer, one) for one in changed} for each in (kept, given))
        raise TableMismatchError(f"table {name!r} of {store} has {part} {before!r}, but {after!r} was given: {advice}")
