"""Commits, the atomic steps of a store: the record of each, and its lists of live segments.

A commit is a small Merkle tree. Its blob names, by digest, one blob for each rank, which lists the rank's live
segments; that blob names, by digest, the descriptions of each segment's rows. Live segments are listed, never derived.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tiercache.store.engines.engine import Blob, Head
from tiercache.store.records import checked_digest, checksum, decode, digest, encode, integer, whole
from tiercache.store.segment import GROUP_COUNTS, Live
from tiercache.store.sharding import ShardingPlan, groups_of_rank
from tiercache.store.store_errors import CorruptStoreError, parsing
from tiercache.store.table import Group, Table, group_tables, tombstone_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from tiercache.store.segment import Segment

    Int64s = NDArray[np.int64]
    MakeSegment = Callable[..., Segment]

STATE_CHUNK_BYTES = 4 << 20
TABLES = "tables"
"""Prefix of the name of the blob that describes a store without a commit."""


class Cursor(NamedTuple):
    """The position of training: the next pass to train, and the number of its samples already trained."""

    pass_index: int
    sample: int = 0

    @classmethod
    def of(cls, values: Iterable[Any]) -> Cursor:
        """Return the cursor of one or two ints. Raises ValueError for other values."""
        return cls(*(integer(value, f"the {name}") for name, value in zip(("pass", "sample"), values, strict=False)))


class State(NamedTuple):
    """The dense state of one rank."""

    name: str
    """The name of its blob."""
    size: int
    """Bytes."""
    chunk_bytes: int
    """Bytes of every part with a checksum but the last."""
    checksums: NDArray[np.uint32]
    """CRC32C of each part."""

    @classmethod
    def of(cls, name: str, data: NDArray[np.uint8]) -> State:
        """Return the state with these bytes."""
        parts = (data[i : i + STATE_CHUNK_BYTES] for i in range(0, data.size, STATE_CHUNK_BYTES))
        return cls(name, data.size, STATE_CHUNK_BYTES, np.array([*map(checksum, parts)], np.uint32))

    @property
    def blob(self) -> Blob:
        """The blob that has it."""
        return Blob(self.name, self.size)


@dataclass(frozen=True, kw_only=True, eq=False)
class RankList:
    """One rank's part of a commit."""

    rank: int
    next_segment: int
    """Greater than any segment id that the rank has used: ids are never reused."""
    segments: tuple[Segment, ...]
    """Those with live rows, by id."""
    first_commits: tuple[int, ...]
    """The first commit that named each segment. Its rows last changed at that commit, unless the segment stores a last
    change for each row."""
    live: Live
    """The live rows of each segment."""
    state: State

    def to_bytes(self) -> bytes:
        """Return its record."""
        live_S, live_T = np.nonzero(self.live.live_ST)
        live, stale = self.live.live_ST[live_S, live_T], self.live.stale_ST[live_S, live_T]
        counts = {name[:-3]: getattr(self.live, name).reshape(-1) for name in GROUP_COUNTS} | {
            "live_segments": live_S, "live_tables": live_T, "live": live,
            "stale_at": np.nonzero(stale)[0], "stale": stale[stale > 0],
        }  # fmt: skip
        arrays = {name: _narrow(array) for name, array in counts.items()} | {"state": self.state.checksums}
        values = {
            "rank": self.rank,
            "next_segment": self.next_segment,
            "groups": self.live.rows_SG.shape[1],
            "tables": self.live.live_ST.shape[1],
            "segments": [
                [one.id, one.name, one.pass_index, one.within, first, one.meta_bytes, one.head_bytes, one.head_digest]
                for one, first in zip(self.segments, self.first_commits, strict=True)
            ],
            "tombstones": [one.id for one in self.segments if one.tombstone],
            "state": [self.state.name, self.state.size, self.state.chunk_bytes],
        }
        return encode("rank", values, arrays)

    @classmethod
    def from_bytes(cls, data: bytes, groups: tuple[Group, ...], make: MakeSegment, name: str) -> RankList:
        """Read a record; ``make`` gives segments. Raises CorruptStoreError; ``name`` is its name in the message."""
        values, arrays = decode("rank", data, name)
        with parsing(name):
            entries = values["segments"]
            live = Live.zeros(len(entries), groups)
            if [values["groups"], values["tables"]] != [len(groups), live.live_ST.shape[1]]:
                raise ValueError(f"it is of {values['groups']} groups with {values['tables']} tables")
            for dense in GROUP_COUNTS:
                getattr(live, dense)[:] = arrays[dense[:-3]].reshape(len(entries), len(groups))
            places = arrays["live_segments"], arrays["live_tables"]
            live.live_ST[places] = arrays["live"]
            live.stale_ST[tuple(place[arrays["stale_at"]] for place in places)] = arrays["stale"]
            live.check()
            ids = [whole(entry[0], "the id of a segment") for entry in entries]
            next_segment = whole(values["next_segment"], "next_segment")
            if any(b <= a for a, b in pairwise([*ids, next_segment])):
                raise ValueError("its segments are not in the order of their ids")
            tombstones, without_rows = {*values["tombstones"]}, tombstone_groups(groups)
            if tombstones - {*ids}:
                raise ValueError(f"it has no segment {min(tombstones - {*ids})}, which is said to be a tombstone")
            state_name, size, chunk_bytes = values["state"]
            state = State(str(state_name), whole(size, "state"), whole(chunk_bytes, "a chunk"), arrays["state"])
            if chunk_bytes < 1 or -(-size // chunk_bytes) != state.checksums.size:
                raise ValueError(f"{state.checksums.size} checksums for {size} bytes of state")
            return cls(
                rank=whole(values["rank"], "rank"),
                next_segment=next_segment,
                segments=tuple(
                    make(
                        id_=id_, name=str(segment_name), pass_index=_pass(pass_index), within=bool(within),
                        meta_bytes=whole(meta_bytes, "a size"), head_bytes=whole(head_bytes, "a size"),
                        head_digest=checked_digest(head_digest), tombstone=id_ in tombstones,
                        groups=without_rows if id_ in tombstones else groups,
                    )
                    for id_, (_, segment_name, pass_index, within, _, meta_bytes, head_bytes, head_digest)
                    in zip(ids, entries, strict=True)
                ),
                first_commits=tuple(whole(entry[4], "a segment's first commit") for entry in entries),
                live=live,
                state=state,
            )  # fmt: skip


def _narrow(counts: Int64s) -> NDArray[Any]:
    return counts.astype(np.uint32) if int(counts.max(initial=0)) < 1 << 32 else counts.astype(np.int64)


def _pass(value: Any) -> int:
    """Return the pass of a segment: below 0 of a base, as Python counts from the end."""
    return ~whole(~value, "pass") if isinstance(value, int) and value < 0 else whole(value, "pass")


class Kept(NamedTuple):
    """An older commit that a commit keeps."""

    id: int
    head: Head


@dataclass(frozen=True, kw_only=True, eq=False)
class CommitRecord:
    """The contents of a commit's blob, which names the lists of its ranks."""

    id: int
    """Counts commits from 0."""
    cursor: Cursor
    schedule_digest: str
    """The dataset and order that next uses come from."""
    settings: dict[str, Any]
    """Plain values that later bits depend on."""
    environment: dict[str, Any]
    """Plain values that describe the machine."""
    tables: tuple[Table, ...]
    """The current tables, in the order of unsigned table ids."""
    retention: int
    """The number of newest commits to keep, this one included."""
    since: int = 0
    """The commit that began the schedule: the next uses of segments that an earlier one named first are void, and their
    rows are live until a commit moves them."""
    overlaid: str = ""
    """The digest of the schedule that a compaction or an import interrupted: if reorganized for it, the store resumes
    at the cursor."""
    abandoned: tuple[tuple[int, int], ...] = ()
    """First and last id of the commits that each rollback dropped, in order."""
    stored: tuple[tuple[Table, ...], ...] = ()
    """The tables as its segments have them, then those after each alteration but the last; empty if segments have them
    as they are now."""
    forgot: int = 0
    """The newest rewrite that left out rows of forgotten keys or dropped tables: older commits may have them."""
    pins: dict[str, int] = field(default_factory=dict)
    """The commits that are kept by name."""
    kept: tuple[Kept, ...] = ()
    """The older commits that are kept, the oldest first."""
    parent: str = ""
    """The digest of the previous commit; for the first one, of the record that the store was created with."""
    origin: str = ""
    """The digest of the earlier commit that last changed rows or dense state; empty if this one did."""
    ranks: tuple[Head, ...] = ()
    """By rank, the blob with its list."""
    sharding: ShardingPlan | None = None
    """The rank that has each row; None for one rank, which has all of them."""
    stored_sharding: tuple[ShardingPlan, ...] = ()
    """For each of ``stored`` the sharding of several ranks then."""
    folders: tuple[str, ...] = ()
    """By rank the folder of its blobs: see ``rank_folder``. Empty for one rank."""

    def to_bytes(self) -> bytes:
        """Return its record. Raises ValueError if settings or environment are not plain JSON values."""
        values = {
            "id": self.id,
            "parent": self.parent,
            "origin": self.origin,
            "cursor": list(self.cursor),
            "schedule_digest": self.schedule_digest,
            "overlaid": self.overlaid,
            "since": self.since,
            "settings": self.settings,
            "environment": self.environment,
            "tables": [table.to_record() for table in self.tables],
            "stored": [[table.to_record() for table in tables] for tables in self.stored],
            "forgot": self.forgot,
            "retention": self.retention,
            "pins": self.pins,
            "kept": [[one.id, *one.head] for one in self.kept],
            "abandoned": [list(ids) for ids in self.abandoned],
            "ranks": [list(head) for head in self.ranks],
        }
        if self.sharding is not None:
            values |= {"sharding": self.sharding.to_record(), "folders": list(self.folders)}
            values["stored_sharding"] = [sharding.to_record() for sharding in self.stored_sharding]
        try:
            return encode("commit", values, {})
        except (TypeError, ValueError) as error:
            raise ValueError(f"settings and environment of a commit must be plain JSON values: {error}") from error

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> CommitRecord:
        """Read a record. Raises CorruptStoreError; ``name`` is its name in the message."""
        values, _ = decode("commit", data, name)
        with parsing(name):
            pass_index, sample = values["cursor"]
            kept = tuple(Kept(whole(id_, "a commit"), _head(head)) for id_, *head in values["kept"])
            pins = {str(pin): whole(id_, "a pinned commit") for pin, id_ in values["pins"].items()}
            id_, retention = whole(values["id"], "id"), whole(values["retention"], "retention")
            if retention < 1:
                raise ValueError("it keeps no commit")
            if any(b <= a for a, b in pairwise([*(one.id for one in kept), id_])):
                raise ValueError("the commits that it keeps are not in the order of their ids")
            if missing := set(pins.values()) - {one.id for one in kept} - {id_}:
                raise ValueError(f"it pins commit {min(missing)} and does not keep it")
            ranks, tables = tuple(_head(head) for head in values["ranks"]), tables_of(values)
            return CommitRecord(
                id=id_, cursor=Cursor(whole(pass_index, "pass"), whole(sample, "sample")),
                schedule_digest=str(values["schedule_digest"]), overlaid=str(values["overlaid"]),
                since=whole(values["since"], "since"), settings=dict(values["settings"]),
                environment=dict(values["environment"]), retention=retention, pins=pins, kept=kept,
                parent=checked_digest(values["parent"]) if values["parent"] else "",
                origin=checked_digest(values["origin"]) if values["origin"] else "",
                abandoned=tuple((whole(a, "abandoned"), whole(b, "abandoned")) for a, b in values["abandoned"]),
                forgot=whole(values["forgot"], "forgot"),
                stored=tuple(tables_of({"tables": tables}) for tables in values["stored"]),
                ranks=ranks, tables=tables, **_sharding(values, tables, len(ranks)),
            )  # fmt: skip

    def groups_of(self, rank: int) -> tuple[Group, ...]:
        """Return the groups of the layouts of a rank's segments, of tables that it has whole or a slice of."""
        tables, sharding = [*self.stored, self.tables][0], [*self.stored_sharding, self.sharding][0]
        return groups_of_rank(tables, sharding, rank)


@dataclass(frozen=True, kw_only=True, eq=False)
class Commit(CommitRecord):
    """One atomic step of the store, with the list of one rank."""

    own: RankList
    """This rank's part."""
    groups: tuple[Group, ...] = ()
    """The groups of the layouts of its segments."""
    head: Head | None = None
    """Its own blob; None of one that is not written."""

    @property
    def segment_ids(self) -> tuple[int, ...]:
        """The segments with live rows."""
        return tuple(segment.id for segment in self.own.segments)

    @property
    def named(self) -> dict[int, int]:
        """Its segments by id, each with the first commit that named it."""
        return dict(zip(self.segment_ids, self.own.first_commits, strict=True))

    @property
    def retained_ids(self) -> frozenset[int]:
        """Its segments of earlier schedules, whose next uses are void."""
        return frozenset(id_ for id_, first in self.named.items() if first < self.since)

    @property
    def state_bytes(self) -> int:
        """Bytes of the dense state."""
        return self.own.state.size

    @property
    def digest(self) -> str:
        """The SHA-256 of its blob: commits with the same one have the same tables, rows and state."""
        assert self.head is not None, "it is written"
        return self.head.digest

    @property
    def rows_digest(self) -> str:
        """The digest of the commit that last changed rows or dense state, by which checkpoints name them."""
        return self.origin or self.digest

    @property
    def made_of(self) -> int:
        """The commit with the same rows and state: its own id, or the commit that was rolled back to."""
        found = self.id
        for first, last in reversed(self.abandoned):
            if last + 1 != found:
                break
            found = first - 1
        return found


def _sharding(values: dict[str, Any], tables: tuple[Table, ...], num_ranks: int) -> dict[str, Any]:
    """Return the sharding and the folders of the ranks. Raises ValueError if they contradict the rest."""
    if "sharding" not in values:
        if num_ranks != 1:
            raise ValueError(f"it has {num_ranks} ranks and no sharding")
        return {"sharding": None, "folders": (), "stored_sharding": ()}
    sharding = ShardingPlan.from_record(values["sharding"])
    sharding.check(tables)
    older = tuple(ShardingPlan.from_record(record) for record in values["stored_sharding"])
    for before, record in zip(older, values["stored"], strict=True):
        before.check(tables_of({"tables": record}))
        if before.num_ranks != num_ranks:
            raise ValueError(f"it has {num_ranks} ranks and a sharding for {before.num_ranks} before an alteration")
    folders = tuple(values["folders"])
    if not num_ranks == sharding.num_ranks == len(folders) > 1:
        raise ValueError(f"it has {num_ranks} ranks, {len(folders)} folders and a sharding for {sharding.num_ranks}")
    for rank, folder in enumerate(folders):
        path = PurePosixPath(folder)
        alone = path.is_absolute() or len(path.parts) == 1
        fits = folder == "." if rank == 0 else path.name == rank_folder(rank) and alone and ".." not in path.parts
        if not (folder.isprintable() and fits):
            raise ValueError(f"{folder!r:.200} is not a folder of rank {rank}")
    return {"sharding": sharding, "folders": folders, "stored_sharding": older}


def between_passes(commit: Commit | None, label: str, what: str) -> Commit:
    """Return a commit that is between passes. Raises ValueError for any other; ``what`` follows "before"."""
    if commit is None or commit.cursor.sample:
        at = "has no commit" if commit is None else f"stands inside pass {commit.cursor.pass_index}"
        raise ValueError(f"{label} {at}: train to the end of a pass before {what}")
    return commit


def check_readable(id_: int, read: Callable[[str], object]) -> None:
    """Raise ValueError if a record that is about to be written for commit ``id_`` could not be read again."""
    try:
        read("its record")
    except CorruptStoreError as error:
        raise ValueError(
            f"commit {id_} was not made, because it could not be read again ({error.__cause__}): pass other values"
        ) from error


def rank_folder(rank: int) -> str:
    """Return the name of a rank's folder: rank 0 uses the folder of the store itself."""
    return f"rank-{rank}" if rank else "."


def tables_of(values: dict[str, Any]) -> tuple[Table, ...]:
    """Return the tables of a record. Raises ValueError, KeyError and TypeError for anything else."""
    tables = tuple(Table.from_record(record) for record in values["tables"])
    group_tables(tables)
    return tables


def before_commits(head: Head) -> bool:
    """Return True if ``head`` is of a store without a commit."""
    return head.name.split("-")[0] == TABLES


def head_of(name: str, data: bytes) -> Head:
    """Return the head of a blob, with its digest."""
    return Head(name, len(data), digest(data))


def _head(value: Sequence[Any]) -> Head:
    name, size, sha256 = value
    return Head(str(name), whole(size, "a size"), checked_digest(sha256))
