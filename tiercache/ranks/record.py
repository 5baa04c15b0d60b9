"""The record of a sharded store: the one small file that says at which commits of its parts it stands."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.passes.durable import write_whole
from tiercache.store import (
    CommitMissingError,
    CorruptStoreError,
    Cursor,
    FormatVersionError,
    NotAStoreError,
    Table,
    group_tables,
)
from tiercache.store.full_disk import room_for
from tiercache.store.opening import ENGINES
from tiercache.store.record import whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiercache.store import Store

__all__ = ["RECORD", "Record", "in_words", "part_name"]

RECORD = "record.json"
_FORMAT = "tiercache sharded store"
_VERSION = 1
_NAME = re.compile(r"part-(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,8})")
_ID = re.compile(r"[0-9a-f]{32}")
_FIELDS = (
    "format", "version", "digest", "id", "generation", "engine", "retention", "tables", "placement", "parts",
    "cursor", "commits", "obsolete",
)  # fmt: skip


def part_name(generation: int, rank: int) -> str:
    """Return the name of a part's folder, wherever it is."""
    return f"part-{generation}-{rank}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Which parts a sharded store has, and the commit of each that belong together."""

    id: str
    """32 hexadecimal digits that no other sharded store has: its parts are marked with it."""
    generation: int
    """Counts the sets of parts from 0: another number of ranks or another placement is a new one."""
    engine: str
    """Of all parts."""
    retention: int
    """How many of its newest commits a user wants to be kept; parts keep one more."""
    tables: tuple[Table, ...]
    """Whole ones, in the order of unsigned table ids."""
    placement: dict[str, Any]
    """Which rank has which rows, as plain JSON values."""
    parts: tuple[str, ...]
    """The folder of each rank's part: a name within the store's, or an absolute path that was given for it."""
    cursor: Cursor | None = None
    """Where all parts stand; None: nothing was ever committed."""
    commits: tuple[int, ...] = ()
    """The commit of each part that stands there; none without a cursor."""
    obsolete: tuple[str, ...] = ()
    """Folders, as in ``parts``, of other generations: what is there and marked as a part of this store is deleted."""

    @property
    def num_ranks(self) -> int:
        """Ranks that it was made with."""
        return len(self.parts)

    @property
    def next_generation(self) -> int:
        """The first whose folders have names of their own."""
        return 1 + max([self.generation, *(_number(part)[0] for part in self.obsolete)])

    def folder(self, directory: Path, rank: int) -> Path:
        """Return the folder of a rank's part of the sharded store in ``directory``."""
        return directory / self.parts[rank]

    def at(self, cursor: Cursor, commits: Sequence[int]) -> Record:
        """Return the same parts at other commits."""
        return replace(self, cursor=cursor, commits=tuple(commits))

    def to_bytes(self) -> bytes:
        """Return it as JSON with a digest. Raises ValueError where the placement is not plain JSON values."""
        values = {
            "format": _FORMAT,
            "version": _VERSION,
            "id": self.id,
            "generation": self.generation,
            "engine": self.engine,
            "retention": self.retention,
            "tables": [table.to_record() for table in self.tables],
            "placement": self.placement,
            "parts": list(self.parts),
            "cursor": None if self.cursor is None else list(self.cursor),
            "commits": list(self.commits),
            "obsolete": list(self.obsolete),
        }
        return json.dumps(values | {"digest": _digest(values)}, indent=1, allow_nan=False).encode()

    def write(self, directory: Path) -> None:
        """Make it the record of the sharded store in ``directory``, in one step; it is on disk on return.

        Raises StoreFullError, after which the record before stands.
        """
        data = self.to_bytes()
        with room_for(len(data), directory, f"the record of the sharded store at {directory}"):
            write_whole(directory / RECORD, data)

    def check_part(self, store: Store, rank: int, label: str) -> None:
        """Raise where a part, however it was opened, lacks the commit that the record names of it.

        Raises CommitMissingError and CorruptStoreError, which call the sharded store ``label``.
        """
        wanted, kept = self.commits[rank], {commit.id: commit.cursor for commit in store.commits}
        if wanted not in kept:
            has = f"has commits {', '.join(map(str, kept))}" if kept else "has no commit"
            older = "older than" if max(kept, default=-1) < wanted else "newer than"
            raise CommitMissingError(
                f"part {rank} of {label} {has} and the record names commit {wanted}: {store.path} is {older} it: "
                "restore parts and record from copies of one moment"
            )
        if kept[wanted] != self.cursor:
            assert self.cursor is not None
            raise CorruptStoreError(
                f"commit {wanted} of part {rank} of {label} stands at {in_words(kept[wanted])} and the record at "
                f"{in_words(self.cursor)}: restore parts and record from copies of one moment"
            )

    @classmethod
    def read(cls, directory: Path) -> Record | None:
        """Read the record of the sharded store in ``directory``; None where there is none.

        Raises NotAStoreError, FormatVersionError and CorruptStoreError.
        """
        try:
            data = (directory / RECORD).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return cls.from_bytes(data, str(directory / RECORD))

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Record:
        """Read what ``to_bytes`` wrote, every field checked.

        Raises NotAStoreError, FormatVersionError and CorruptStoreError that call it ``name``.
        """
        try:
            values = json.loads(data, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise CorruptStoreError(f"{name} is not JSON ({error}): restore it from a copy") from error
        if not isinstance(values, dict) or values.get("format") != _FORMAT:
            raise NotAStoreError(f"{name} is not a sharded store's: give the path of one, or one that is free")
        version = values.get("version")
        if version != _VERSION or isinstance(version, bool):
            newer = isinstance(version, int) and version > _VERSION
            shown = repr(version)[:40]
            raise FormatVersionError(
                f"{name} has format version {shown} and this tiercache reads version {_VERSION}: "
                f"{'use a newer tiercache' if newer else 'use the tiercache that wrote it'}"
            )
        try:
            return cls._checked(values)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise CorruptStoreError(f"{name} cannot be read ({error}): restore it from a copy") from error

    @classmethod
    def _checked(cls, values: dict[str, Any]) -> Record:
        """Return the record that ``values`` describe. Raises ValueError, KeyError or TypeError where they do not."""
        if unknown := sorted(values.keys() - set(_FIELDS)):
            raise ValueError(f"it has {unknown[0]!r:.60}, which this version does not know")
        if missing := [name for name in _FIELDS if name not in values]:
            raise ValueError(f"it lacks {missing[0]!r}")
        if values.pop("digest") != _digest(values):
            raise ValueError("it does not match its own digest")
        if not isinstance(values["id"], str) or not _ID.fullmatch(values["id"]):
            raise ValueError(f"its id is {values['id']!r:.60}")
        if values["engine"] not in tuple(ENGINES):
            raise ValueError(f"its engine is {values['engine']!r:.60}")
        if not isinstance(values["placement"], dict):
            raise TypeError(f"its placement is {values['placement']!r:.60}")
        generation = whole(values["generation"], "the generation")
        retention = whole(values["retention"], "the retention")
        if retention < 1:
            raise ValueError("it keeps no commit")
        parts, obsolete = (tuple(map(_checked_part, _list(values, name))) for name in ("parts", "obsolete"))
        for rank, part in enumerate(parts):
            if _number(part) != (generation, rank):
                raise ValueError(f"it names {part!r:.200} as part {rank} of generation {generation}")
        if not parts:
            raise ValueError("it names no part")
        for part in obsolete:
            if _number(part)[0] == generation:
                raise ValueError(f"it names {part!r:.200} both as a part and as what is to be deleted")
        commits = tuple(whole(id_, "the commit of a part") for id_ in _list(values, "commits"))
        cursor = None
        if values["cursor"] is not None:
            visit, sample = _list(values, "cursor")
            cursor = Cursor(whole(visit, "the visit"), whole(sample, "the sample"))
        if len(commits) != (0 if cursor is None else len(parts)):
            raise ValueError(f"it names {len(commits)} commits of {len(parts)} parts")
        tables = tuple(Table.from_record(record) for record in _list(values, "tables"))
        group_tables(tables)
        return cls(
            id=values["id"],
            generation=generation,
            engine=values["engine"],
            retention=retention,
            tables=tuple(sorted(tables, key=lambda table: table.table_id)),
            placement=values["placement"],
            parts=parts,
            cursor=cursor,
            commits=commits,
            obsolete=obsolete,
        )


def in_words(cursor: Cursor) -> str:
    """Return where something stands, in the words of a message."""
    return f"visit {cursor.visit}" + (f", sample {cursor.sample}" if cursor.sample else "")


def _checked_part(part: Any) -> str:
    """Return the folder of a part. Raises ValueError for what could lead elsewhere."""
    if not isinstance(part, str) or not part.isprintable():
        raise ValueError(f"it names the folder {part!r:.60}")
    path = Path(part)
    if not _NAME.fullmatch(path.name) or ".." in path.parts or (not path.is_absolute() and len(path.parts) > 1):
        raise ValueError(f"it names the folder {part!r:.200}, which is none of a part")
    return part


def _number(part: str) -> tuple[int, int]:
    """Return generation and rank of a part."""
    found = _NAME.fullmatch(Path(part).name)
    assert found is not None
    return int(found[1]), int(found[2])


def _list(values: dict[str, Any], name: str) -> list[Any]:
    found = values[name]
    if not isinstance(found, list):
        raise TypeError(f"its {name} are {found!r:.60}")
    return found


def _digest(values: dict[str, Any]) -> str:
    """Return the SHA-256 of all other values, in one spelling."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _no_number(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")
