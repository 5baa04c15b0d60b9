"""The record of a sharded store: the one small file that says which commits of its parts belong together."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.atomic_io import write_whole
from tiercache.ranks.common_commit import CommonCommit, checked_cursor, in_words
from tiercache.store import (
    CommitMissingError,
    CorruptStoreError,
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

    from tiercache.store import Cursor, Store

__all__ = ["RECORD", "Record", "part_name"]

RECORD = "record.json"
_FORMAT = "tiercache sharded store"
_VERSION = 2
"""What is written. Version 1, which is read, names one commit, without an id: `_ALONE` in place of `_SEVERAL`."""
_NAME = re.compile(r"part-(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,8})")
_ID = re.compile(r"[0-9a-f]{32}")
_FIELDS = (
    "format", "version", "digest", "id", "generation", "engine", "retention", "tables", "placement", "parts",
    "obsolete", "commits",
)  # fmt: skip
_ALONE, _SEVERAL = ("cursor",), ("first_commit",)


def part_name(generation: int, rank: int) -> str:
    """Return the name of a part's folder, wherever it is."""
    return f"part-{generation}-{rank}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Which parts a sharded store has, and the commits of each that belong together."""

    id: str
    """32 hexadecimal digits that no other sharded store has: its parts are marked with it."""
    generation: int
    """Counts the sets of parts from 0: another number of ranks or another sharding is a new one."""
    engine: str
    """Of all parts."""
    retention: int
    """How many of its newest commits are kept; parts keep one more, while the next is made."""
    tables: tuple[Table, ...]
    """Whole ones, in the order of unsigned table ids."""
    sharding: dict[str, Any]
    """Which rank has which rows, as plain JSON values."""
    parts: tuple[str, ...]
    """The folder of each rank's part: a name within the store's, or an absolute path that was given for it."""
    commits: tuple[CommonCommit, ...] = ()
    """Those that are kept, the oldest first."""
    first_commit: int = 0
    """The id of the first commit that these parts made; those before it were of other parts, which are gone.

    0 where a record of version 1 did not say."""
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

    @property
    def newest(self) -> CommonCommit | None:
        """Where the store stands; None: nothing was ever committed."""
        return self.commits[-1] if self.commits else None

    @property
    def cursor(self) -> Cursor | None:
        """Where all parts stand; None: nothing was ever committed."""
        return self.commits[-1].cursor if self.commits else None

    @property
    def next_commit(self) -> int:
        """The id of the next commit."""
        return self.commits[-1].id + 1 if self.commits else self.first_commit

    def of_part(self, rank: int) -> tuple[int, ...]:
        """Return the commits of a rank's part that it names, the oldest first."""
        return tuple(commit.parts[rank] for commit in self.commits)

    def at(self, cursor: Cursor, parts: Sequence[int]) -> Record:
        """Return the record with another newest commit, of these commits of ``parts``; itself where it stands there."""
        newest = self.newest
        if newest is not None and (newest.cursor, newest.parts) == (cursor, tuple(parts)):
            return self
        commit = CommonCommit(id=self.next_commit, cursor=cursor, parts=tuple(parts))
        return replace(self, commits=(*self.commits, commit)[-self.retention :])

    def renewed(self, parts: Sequence[int]) -> Record:
        """Return the record with the same newest commit, for which ``parts`` have other commits with the same rows."""
        return replace(self, commits=(*self.commits[:-1], replace(self.commits[-1], parts=tuple(parts))))

    def trimmed(self) -> Record:
        """Return the record without the oldest commits, where it names more than are kept."""
        return replace(self, commits=self.commits[-self.retention :])

    def back_at(self, to: CommonCommit, parts: Sequence[int]) -> Record:
        """Return the record with a newest commit that stands where ``to`` stood, and without those between."""
        commit = CommonCommit(id=self.next_commit, cursor=to.cursor, parts=tuple(parts))
        kept = (one for one in self.commits if one.id <= to.id)
        return replace(self, commits=(*kept, commit)[-self.retention :])

    def find(self, id_: int, label: str) -> CommonCommit:
        """Return a commit that is kept. Raises CommitMissingError, which calls the sharded store ``label``."""
        for commit in self.commits:
            if commit.id == id_:
                return commit
        kept = ", ".join(str(commit.id) for commit in self.commits)
        advice = f"give one of {kept}" if kept else "it has none yet"
        if 0 <= id_ < self.first_commit:
            raise CommitMissingError(
                f"commit {id_} of {label} went with the parts that other ranks or another sharding had before commit "
                f"{self.first_commit}: {advice}"
            )
        raise CommitMissingError(f"{label} has no commit {id_}: {advice}")

    def to_bytes(self) -> bytes:
        """Return it as JSON with a digest. Raises ValueError where the sharding is not plain JSON values."""
        values = {
            "format": _FORMAT,
            "version": _VERSION,
            "id": self.id,
            "generation": self.generation,
            "engine": self.engine,
            "retention": self.retention,
            "tables": [table.to_record() for table in self.tables],
            "placement": self.sharding,
            "parts": list(self.parts),
            "first_commit": self.first_commit,
            "commits": [commit.to_record() for commit in self.commits],
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

    def check_part(self, store: Store, rank: int, label: str, commits: Sequence[CommonCommit] | None = None) -> None:
        """Raise where a part, with all its commits, lacks one that the record names, or one of ``commits`` of these.

        Raises CommitMissingError and CorruptStoreError, which call the sharded store ``label``.
        """
        kept = {commit.id: commit.cursor for commit in store.commits}
        for commit in reversed(self.commits if commits is None else commits):  # the newest says most of what went wrong
            wanted = commit.parts[rank]
            if wanted not in kept:
                has = f"has commits {', '.join(map(str, kept))}" if kept else "has no commit"
                older = "older than" if max(kept, default=-1) < wanted else "newer than"
                raise CommitMissingError(
                    f"part {rank} of {label} {has} and the record names commit {wanted}: {store.path} is {older} it: "
                    "restore parts and record from copies of one moment"
                )
            if kept[wanted] != commit.cursor:
                raise CorruptStoreError(
                    f"commit {wanted} of part {rank} of {label} stands at {in_words(kept[wanted])} and the record at "
                    f"{in_words(commit.cursor)}: restore parts and record from copies of one moment"
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
        if version not in (1, _VERSION) or isinstance(version, bool):
            newer = isinstance(version, int) and version > _VERSION
            shown = repr(version)[:40]
            raise FormatVersionError(
                f"{name} has format version {shown} and this tiercache reads versions 1 and {_VERSION}: "
                f"{'use a newer tiercache' if newer else 'use the tiercache that wrote it'}"
            )
        try:
            return cls._checked(values)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise CorruptStoreError(f"{name} cannot be read ({error}): restore it from a copy") from error

    @classmethod
    def _checked(cls, values: dict[str, Any]) -> Record:
        """Return the record that ``values`` describe. Raises ValueError, KeyError or TypeError where they do not."""
        fields = _FIELDS + (_ALONE if values["version"] == 1 else _SEVERAL)
        if unknown := sorted(values.keys() - set(fields)):
            raise ValueError(f"it has {unknown[0]!r:.60}, which this version does not know")
        if missing := [name for name in fields if name not in values]:
            raise ValueError(f"it lacks {missing[0]!r}")
        if values.pop("digest") != _digest(values):
            raise ValueError("it does not match its own digest")
        if not isinstance(values["id"], str) or not _ID.fullmatch(values["id"]):
            raise ValueError(f"its id is {values['id']!r:.60}")
        if values["engine"] not in tuple(ENGINES):
            raise ValueError(f"its engine is {values['engine']!r:.60}")
        if not isinstance(values["placement"], dict):
            raise TypeError(f"its sharding is {values['placement']!r:.60}")
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
        commits, first_commit = _commit_alone(values) if values["version"] == 1 else _commits(values)
        for commit in commits:
            if len(commit.parts) != len(parts):
                raise ValueError(f"it names {len(commit.parts)} commits of {len(parts)} parts")
        tables = tuple(Table.from_record(record) for record in _list(values, "tables"))
        group_tables(tables)
        return cls(
            id=values["id"],
            generation=generation,
            engine=values["engine"],
            retention=retention,
            tables=tuple(sorted(tables, key=lambda table: table.table_id)),
            sharding=values["placement"],
            parts=parts,
            commits=commits,
            first_commit=first_commit,
            obsolete=obsolete,
        )


def _commits(values: dict[str, Any]) -> tuple[tuple[CommonCommit, ...], int]:
    """Return the commits that are kept, and the id of the first of these parts."""
    first = whole(values["first_commit"], "the first commit")
    commits = tuple(map(CommonCommit.from_record, _list(values, "commits")))
    if any(commit.id < first for commit in commits):
        raise ValueError(f"it names commit {commits[0].id} and begins with commit {first}")
    for one, other in pairwise(commits):
        if one.id >= other.id or any(a >= b for a, b in zip(one.parts, other.parts, strict=False)):
            raise ValueError(f"its commits {one.id} and {other.id} do not stand in the order in which they were made")
    return commits, first


def _commit_alone(values: dict[str, Any]) -> tuple[tuple[CommonCommit, ...], int]:
    """Return the one commit of a record of version 1, whose id is the greatest of those of the parts, and 0.

    Which commit was the first of these parts it does not say: of none is it said that it went with others.
    """
    parts = tuple(whole(id_, "the commit of a part") for id_ in _list(values, "commits"))
    cursor = None if values["cursor"] is None else checked_cursor(values["cursor"])
    if cursor is None and not parts:
        return (), 0
    if cursor is None or not parts:
        raise ValueError(f"it names {len(parts)} commits of {len(_list(values, 'parts'))} parts")
    return (CommonCommit(id=max(parts), cursor=cursor, parts=parts),), 0


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
