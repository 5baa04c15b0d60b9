"""The manifest of a sharded store: the one small file that says which commits of its shards belong together."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tiercache.store.commit import Cursor
from tiercache.store.directory import FORMAT_VERSION, StoreDirectory, check_version
from tiercache.store.files import read_whole, replace_file, room_for, sync
from tiercache.store.openers import SHARD_MANIFEST
from tiercache.store.opening import ENGINES, label_of
from tiercache.store.records import checked_digest, no_number, whole
from tiercache.store.shards.shard_mark import Mark, delete_shard
from tiercache.store.shards.sharding import ShardingPlan
from tiercache.store.store_errors import CommitMissingError, CorruptStoreError, NotAStoreError
from tiercache.store.table import Table, group_tables

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tiercache.store.store import Store

HERE = "."
"""The folder of the one shard that is the plain store in the same directory: while that becomes sharded, or again
plain."""
_FORMAT = "tiercache sharded store"
_NAME = re.compile(r"shard-(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,8})")
_ID = re.compile(r"[0-9a-f]{32}")
_FIELDS = (
    "format", "version", "digest", "id", "generation", "engine", "retention", "tables", "sharding", "shards",
    "obsolete", "first_commit", "commits",
)  # fmt: skip


def shard_name(generation: int, rank: int) -> str:
    """Return the name of a shard's folder, wherever it is."""
    return f"shard-{generation}-{rank}"


class ShardCommit(NamedTuple):
    """A commit of a shard, and what it is."""

    id: int
    digest: str
    """The SHA-256 of its blob, which names all that it has."""

    @classmethod
    def of(cls, shard: Store) -> Self:
        """Return the newest commit of a shard."""
        assert shard.commit is not None, "it has one"
        return cls(shard.commit.id, shard.commit.digest)


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalCommit:
    """One atomic step of a sharded store: the commits of all shards that belong together."""

    id: int
    """Counts commits of the whole store; never used again. Shards count their own."""
    cursor: Cursor
    """Where all shards stand."""
    shards: tuple[int, ...]
    """By rank the commit of its shard."""
    digests: tuple[str, ...]
    """By rank the digest of that commit: no other store, no other rank and no other moment has it."""

    @classmethod
    def of(cls, id_: int, cursor: Cursor, shards: Iterable[ShardCommit]) -> Self:
        """Return the step that makes these commits of shards one."""
        ids, digests = zip(*shards, strict=True)
        return cls(id=id_, cursor=cursor, shards=ids, digests=digests)

    def to_record(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        shards, digests = list(self.shards), list(self.digests)
        return {"id": self.id, "cursor": list(self.cursor), "shards": shards, "digests": digests}

    @classmethod
    def from_record(cls, record: Any) -> Self:
        """Read what ``to_record`` returned. Raises TypeError or ValueError for anything else."""
        if not isinstance(record, dict) or record.keys() != {"id", "cursor", "shards", "digests"}:
            raise TypeError(f"a commit of it is {record!r:.80}")
        for name in ("shards", "digests"):
            if not isinstance(record[name], list):
                raise TypeError(f"the {name} of a commit of it are {record[name]!r:.60}")
        if not isinstance(record["cursor"], list):
            raise TypeError(f"its cursor is {record['cursor']!r:.60}")
        pass_index, sample = record["cursor"]
        return cls(
            id=whole(record["id"], "the id of a commit"),
            cursor=Cursor(whole(pass_index, "the pass"), whole(sample, "the sample")),
            shards=tuple(whole(id_, "the commit of a shard") for id_ in record["shards"]),
            digests=tuple(map(checked_digest, record["digests"])),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardManifest:
    """Which shards a store has, and the commits of each that belong together."""

    id: str
    """32 hexadecimal digits that no other store has: its shards are marked with it."""
    generation: int
    """Counts the sets of shards from 0: another number of ranks or another sharding is a new one."""
    engine: str
    """Of all shards."""
    retention: int
    """How many of its newest commits are kept; shards keep one more, while the next is made."""
    tables: tuple[Table, ...]
    """Whole ones, in the order of unsigned table ids."""
    sharding: ShardingPlan
    """Which rank has which rows."""
    shards: tuple[str, ...]
    """The folder of each rank's shard: a name within the store's, or an absolute path that was given for it; ``HERE``
    alone where the store is a plain one."""
    commits: tuple[GlobalCommit, ...] = ()
    """Those that are kept, the oldest first. Of a plain store on disk none: it has its own."""
    first_commit: int = 0
    """The id of the first commit that these shards made; those before it were of other shards, which are gone."""
    obsolete: tuple[str, ...] = ()
    """Folders, as in ``shards``, of other generations: what is there and marked as a shard of this store is deleted."""

    @property
    def num_ranks(self) -> int:
        """Ranks that it was made with."""
        return len(self.shards)

    @property
    def is_plain(self) -> bool:
        """Whether its rows are in the plain store in its directory."""
        return self.shards == (HERE,)

    @property
    def next_generation(self) -> int:
        """The first whose folders have names of their own."""
        return 1 + max([self.generation, *(_number(name)[0] for name in self.obsolete if name != HERE)])

    @property
    def newest(self) -> GlobalCommit | None:
        """Where the store stands; None: nothing was ever committed."""
        return self.commits[-1] if self.commits else None

    @property
    def cursor(self) -> Cursor | None:
        """Where all shards stand; None: nothing was ever committed."""
        return self.commits[-1].cursor if self.commits else None

    @property
    def next_commit(self) -> int:
        """The id of the next commit."""
        return self.commits[-1].id + 1 if self.commits else self.first_commit

    def folder(self, directory: Path, rank: int) -> Path:
        """Return the folder of a rank's shard of the store in ``directory``."""
        return directory / self.shards[rank]

    def mark(self, rank: int) -> Mark:
        """Return what a rank's shard is marked with."""
        return Mark(store=self.id, generation=self.generation, rank=rank)

    def commits_of(self, rank: int) -> tuple[int, ...]:
        """Return the commits of a rank's shard that it names, the oldest first."""
        return tuple(commit.shards[rank] for commit in self.commits)

    def at(self, cursor: Cursor, shards: Sequence[ShardCommit]) -> ShardManifest:
        """Return the one with another newest commit, of these commits of shards; itself where it stands there."""
        commit = GlobalCommit.of(self.next_commit, cursor, shards)
        if self.newest is not None and replace(self.newest, id=commit.id) == commit:
            return self
        return replace(self, commits=(*self.commits, commit)[-self.retention :])

    def renewed(self, shards: Sequence[ShardCommit]) -> ShardManifest:
        """Return the one with the same newest commit, for which shards have other commits with the same rows."""
        newest = self.commits[-1]
        return replace(self, commits=(*self.commits[:-1], GlobalCommit.of(newest.id, newest.cursor, shards)))

    def trimmed(self) -> ShardManifest:
        """Return the one without the oldest commits, where it names more than are kept."""
        return replace(self, commits=self.commits[-self.retention :])

    def back_at(self, to: GlobalCommit, shards: Sequence[ShardCommit]) -> ShardManifest:
        """Return the one with a newest commit that stands where ``to`` stood, and without those between."""
        commit = GlobalCommit.of(self.next_commit, to.cursor, shards)
        kept = (one for one in self.commits if one.id <= to.id)
        return replace(self, commits=(*kept, commit)[-self.retention :])

    def find(self, id_: int, label: str) -> GlobalCommit:
        """Return a commit that is kept. Raises CommitMissingError, which calls the store ``label``."""
        for commit in self.commits:
            if commit.id == id_:
                return commit
        kept = ", ".join(str(commit.id) for commit in self.commits)
        advice = f"give one of {kept}" if kept else "it has none yet"
        if 0 <= id_ < self.first_commit:
            raise CommitMissingError(
                f"commit {id_} of {label} went with the shards that other ranks or another sharding had before commit "
                f"{self.first_commit}: {advice}"
            )
        raise CommitMissingError(f"{label} has no commit {id_}: {advice}")

    def check_shard(self, store: Store, rank: int, label: str, commits: Sequence[GlobalCommit] | None = None) -> None:
        """Raise where a shard, with all its commits, lacks one that the manifest names, or one of ``commits`` of these.

        A commit is the one that is named if it stands there and has that digest: a shard of another run, of another
        rank or of another moment has none of them.

        Raises CommitMissingError and CorruptStoreError, which call the whole store ``label``.
        """
        kept = {commit.id: commit for commit in store.commits}
        for commit in reversed(self.commits if commits is None else commits):  # the newest says most of what went wrong
            wanted = commit.shards[rank]
            if wanted not in kept:
                has = f"has commits {', '.join(map(str, kept))}" if kept else "has no commit"
                older = "older than" if max(kept, default=-1) < wanted else "newer than"
                raise CommitMissingError(
                    f"shard {rank} of {label} {has} and the manifest names commit {wanted}: {store.path} is {older} "
                    "it: restore shards and manifest from copies of one moment"
                )
            if kept[wanted].cursor != commit.cursor:
                raise CorruptStoreError(
                    f"commit {wanted} of shard {rank} of {label} stands at {in_words(kept[wanted].cursor)} and the "
                    f"manifest at {in_words(commit.cursor)}: restore shards and manifest from copies of one moment"
                )
            if kept[wanted].digest != commit.digests[rank]:
                raise CorruptStoreError(
                    f"commit {wanted} of shard {rank} of {label} is not the one that the manifest names: {store.path} "
                    "is a shard of another run, another rank or another moment: restore shards and manifest from "
                    "copies of one moment"
                )

    # -- on disk -----------------------------------------------------------------------------------------

    def delete_obsolete(self, directory: Path, *, here: bool = True) -> None:
        """Delete the folders that are obsolete, as far as they are there.

        Several may do so at once, but only one of them what is ``here``: the plain store in ``directory``.
        """
        for name in self.obsolete:
            if name != HERE:
                delete_shard(directory / name, self.id)
            elif here:
                StoreDirectory(directory).delete()

    def to_bytes(self) -> bytes:
        """Return it as JSON with a digest."""
        values = {
            "format": _FORMAT,
            "version": FORMAT_VERSION,
            "id": self.id,
            "generation": self.generation,
            "engine": self.engine,
            "retention": self.retention,
            "tables": [table.to_record() for table in self.tables],
            "sharding": self.sharding.to_record(),
            "shards": list(self.shards),
            "first_commit": self.first_commit,
            "commits": [commit.to_record() for commit in self.commits],
            "obsolete": list(self.obsolete),
        }
        return json.dumps(values | {"digest": _digest(values)}, indent=1, allow_nan=False).encode()

    def write(self, directory: Path) -> None:
        """Make it the manifest of the store in ``directory``, in one step; it is on disk on return.

        A plain store with nothing obsolete beside it has none. Raises StoreFullError: the one before stands then.
        """
        if self.is_plain and not self.obsolete:
            (directory / SHARD_MANIFEST).unlink(missing_ok=True)
            sync(directory)
            return
        data = self.to_bytes()
        with room_for(len(data), directory, f"the manifest of {label_of(directory)}"):
            replace_file(directory / SHARD_MANIFEST, data)

    @classmethod
    def read(cls, directory: Path) -> ShardManifest | None:
        """Read the manifest of the store in ``directory``; None where there is none.

        Raises NotAStoreError, FormatVersionError and CorruptStoreError.
        """
        try:
            data = read_whole(str(directory / SHARD_MANIFEST))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise NotAStoreError(
                f"{directory / SHARD_MANIFEST} cannot be read ({error}): give the path of a store"
            ) from error
        return cls.from_bytes(data, str(directory / SHARD_MANIFEST))

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> ShardManifest:
        """Read what ``to_bytes`` wrote, every field checked.

        Raises NotAStoreError, FormatVersionError and CorruptStoreError that call it ``name``.
        """
        try:
            values = json.loads(data, parse_constant=no_number)
        except (ValueError, RecursionError) as error:
            raise CorruptStoreError(f"{name} is not JSON ({error}): restore it from a copy") from error
        if not isinstance(values, dict) or values.get("format") != _FORMAT:
            raise NotAStoreError(f"{name} is not a sharded store's: give the path of one, or one that is free")
        check_version(values.get("version"), name)
        try:
            return cls._checked(values)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise CorruptStoreError(f"{name} cannot be read ({error}): restore it from a copy") from error

    @classmethod
    def _checked(cls, values: dict[str, Any]) -> ShardManifest:
        """Return the manifest that ``values`` describe. Raises ValueError, KeyError or TypeError where they do not."""
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
        generation = whole(values["generation"], "the generation")
        retention = whole(values["retention"], "the retention")
        if retention < 1:
            raise ValueError("it keeps no commit")
        shards, obsolete = (tuple(map(_checked_folder, _list(values, name))) for name in ("shards", "obsolete"))
        for rank, shard in enumerate(() if shards == (HERE,) else shards):
            if shard == HERE or _number(shard) != (generation, rank):
                raise ValueError(f"it names {shard!r:.200} as shard {rank} of generation {generation}")
        if not shards:
            raise ValueError("it names no shard")
        for shard in obsolete:
            if shard in shards or (shard != HERE and _number(shard)[0] == generation):
                raise ValueError(f"it names {shard!r:.200} both as a shard and as what is to be deleted")
        commits, first_commit = _commits(values, len(shards))
        tables = tuple(Table.from_record(record) for record in _list(values, "tables"))
        group_tables(tables)
        sharding = ShardingPlan.from_record(values["sharding"])
        sharding.check(tables)
        if sharding.num_ranks != len(shards):
            raise ValueError(f"it shards tables over {sharding.num_ranks} ranks and there are {len(shards)} shards")
        return cls(
            id=values["id"],
            generation=generation,
            engine=values["engine"],
            retention=retention,
            tables=tuple(sorted(tables, key=lambda table: table.table_id)),
            sharding=sharding,
            shards=shards,
            commits=commits,
            first_commit=first_commit,
            obsolete=obsolete,
        )


def in_words(cursor: Sequence[int]) -> str:
    """Return where something stands, in the words of a message."""
    pass_index, sample = cursor
    return f"pass {pass_index}" + (f", sample {sample}" if sample else "")


def _commits(values: dict[str, Any], num_ranks: int) -> tuple[tuple[GlobalCommit, ...], int]:
    """Return the commits that are kept, and the id of the first of these shards."""
    first = whole(values["first_commit"], "the first commit")
    commits = tuple(map(GlobalCommit.from_record, _list(values, "commits")))
    if any(commit.id < first for commit in commits):
        raise ValueError(f"it names commit {commits[0].id} and begins with commit {first}")
    for commit in commits:
        for what, named in (("commits", commit.shards), ("digests", commit.digests)):
            if len(named) != num_ranks:
                raise ValueError(f"it names {len(named)} {what} of {num_ranks} shards")
    for one, other in pairwise(commits):
        if one.id >= other.id or any(a >= b for a, b in zip(one.shards, other.shards, strict=True)):
            raise ValueError(f"its commits {one.id} and {other.id} do not stand in the order in which they were made")
    return commits, first


def _checked_folder(shard: Any) -> str:
    """Return the folder of a shard. Raises ValueError for what could lead elsewhere."""
    if not isinstance(shard, str) or not shard.isprintable():
        raise ValueError(f"it names the folder {shard!r:.60}")
    path = Path(shard)
    alone = path.is_absolute() or len(path.parts) == 1
    if shard != HERE and not (_NAME.fullmatch(path.name) and ".." not in path.parts and alone):
        raise ValueError(f"it names the folder {shard!r:.200}, which is none of a shard")
    return shard


def _number(shard: str) -> tuple[int, int]:
    """Return generation and rank of a shard."""
    found = _NAME.fullmatch(Path(shard).name)
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
