"""Commits, the atomic steps of a store; snapshots and histories of them, and the rows that are live."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tiercache.store.engines.engine import Block
from tiercache.store.layout import STATE, checksum
from tiercache.store.records import decode, digest, encode, whole
from tiercache.store.segment import RetainedSegment
from tiercache.store.store_errors import CorruptStoreError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.store.segment import Segment
    from tiercache.store.table import Group, Table


STATE_CHUNK_BYTES = 4 << 20


class Cursor(NamedTuple):
    """Where training stands: the next pass to train, and how many of its samples are trained already."""

    pass_index: int
    sample: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Commit:
    """One atomic step of the store."""

    id: int
    """Counts commits from 0."""
    cursor: Cursor
    schedule_digest: str
    """The dataset and order that next uses come from."""
    settings: dict[str, Any]
    """Plain values that decide the bits of what follows."""
    environment: dict[str, Any]
    """Plain values that describe where it was made."""
    segment_ids: tuple[int, ...]
    """The segments with live rows."""
    first_commits: tuple[int, ...]
    """For each of them the first commit that named it: with that its rows last changed, where it does not say of each
    row with which it did."""
    next_segment: int
    """Above the id of every segment that was ever written before: ids are never used twice."""
    retention: int
    """How many of the newest commits are kept, this one included."""
    abandoned: tuple[tuple[int, int], ...]
    """First and last id of the commits that each rollback gave up, in their order."""
    state_bytes: int
    """Bytes of the dense state."""
    state_chunk_bytes: int
    """Bytes of every block of the state but the last."""
    state_checksums: NDArray[np.uint32]
    """CRC32C of each block of the state."""
    state_places: NDArray[np.int64]
    """Where the engine keeps each block of the state."""
    retained: tuple[RetainedSegment, ...] = ()
    """What is live in the first of its segments, which schedules before this one left where they are."""
    overlaid: str = ""
    """The digest of the schedule that a compaction or an import interrupted: reorganized for it, the store goes on at
    the cursor."""

    @property
    def made_of(self) -> int:
        """The commit whose rows and state it has: its own id, or that of the one that was rolled back to."""
        found = self.id
        for first, last in reversed(self.abandoned):
            if last + 1 != found:
                break
            found = first - 1
        return found

    @property
    def named(self) -> dict[int, int]:
        """Its segments by id, each with the first commit that named it."""
        return dict(zip(self.segment_ids, self.first_commits, strict=True))

    @property
    def retained_ids(self) -> frozenset[int]:
        """The retained ones of its segments."""
        return frozenset(retained.segment_id for retained in self.retained)

    def state_blocks(self) -> list[Block]:
        """Return the blocks of the dense state, in order."""
        chunk, places = self.state_chunk_bytes, self.state_places.tolist()
        sizes = [min(chunk, self.state_bytes - start) for start in range(0, self.state_bytes, chunk)]
        return [Block(STATE, self.id, 0, i, size, places[i]) for i, size in enumerate(sizes)]

    def to_bytes(self) -> bytes:
        """Return its record. Raises ValueError where settings or environment are not plain JSON values."""
        values = {
            "id": self.id,
            "cursor": list(self.cursor),
            "schedule_digest": self.schedule_digest,
            "settings": self.settings,
            "environment": self.environment,
            "segments": [list(pair) for pair in zip(self.segment_ids, self.first_commits, strict=True)],
            "next_segment": self.next_segment,
            "retention": self.retention,
            "abandoned": [list(ids) for ids in self.abandoned],
            "state_bytes": self.state_bytes,
            "state_chunk_bytes": self.state_chunk_bytes,
        }
        if self.retained:
            values["retained"] = [retained.to_record() for retained in self.retained]
        if self.overlaid:
            values["overlaid"] = self.overlaid
        try:
            return encode("commit", values, {"state": self.state_checksums, "state_at": self.state_places})
        except (TypeError, ValueError) as error:
            raise ValueError(f"settings and environment of a commit must be plain JSON values: {error}") from error

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Commit:
        """Read a record. Raises CorruptStoreError that calls it ``name``."""
        values, arrays = decode("commit", data, name)
        try:
            pass_index, sample = values["cursor"]
            state_bytes, chunk = (whole(values[name], name) for name in ("state_bytes", "state_chunk_bytes"))
            segment_ids = tuple(whole(id_, "the id of a segment") for id_, _ in values["segments"])
            next_segment, retention = (whole(values[name], name) for name in ("next_segment", "retention"))
            if any(b <= a for a, b in pairwise([*segment_ids, next_segment])):
                raise ValueError("its segments do not stand in the order of their ids")
            retained = tuple(RetainedSegment.from_record(record) for record in values.get("retained", []))
            if tuple(one.segment_id for one in retained) != segment_ids[: len(retained)]:
                raise ValueError("its retained segments are not the first ones")
            if retention < 1:
                raise ValueError("it keeps no commit")
            if chunk < 1 or -(-state_bytes // chunk) != arrays["state"].size:
                raise ValueError(f"{arrays['state'].size} checksums for {state_bytes} bytes of state")
            if arrays["state_at"].size != arrays["state"].size:
                raise ValueError(f"{arrays['state_at'].size} places for {arrays['state'].size} blocks of state")
            return cls(
                id=whole(values["id"], "id"),
                cursor=Cursor(whole(pass_index, "pass"), whole(sample, "sample")),
                schedule_digest=str(values["schedule_digest"]),
                settings=dict(values["settings"]),
                environment=dict(values["environment"]),
                segment_ids=segment_ids,
                first_commits=tuple(whole(first, "a segment's first commit") for _, first in values["segments"]),
                next_segment=next_segment,
                retention=retention,
                abandoned=tuple((whole(a, "abandoned"), whole(b, "abandoned")) for a, b in values["abandoned"]),
                state_bytes=state_bytes,
                state_chunk_bytes=chunk,
                state_checksums=arrays["state"],
                state_places=arrays["state_at"],
                retained=retained,
                overlaid=str(values.get("overlaid", "")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptStoreError(f"{name} cannot be read ({error}): restore the store from a copy") from error


def state_chunks(state: NDArray[np.uint8]) -> tuple[list[NDArray[np.uint8]], NDArray[np.uint32]]:
    """Cut the dense state into blocks and return them with their checksums."""
    chunks = [state[i : i + STATE_CHUNK_BYTES] for i in range(0, state.size, STATE_CHUNK_BYTES)]
    return chunks, np.array([checksum(chunk) for chunk in chunks], dtype=np.uint32)


COMMIT, SEGMENT, TABLES, KEPT = "commit/", "segment/", "tables", "kept"
"""Names of records: those of commits and segments end in an id; ``KEPT`` says which commits are kept."""


def commit_digest(commit: Commit, digests: Mapping[str, str]) -> str:
    """Return the SHA-256 of the names of all records of a commit, each with its own, as hexadecimal digits.

    Commits with the same one have the same tables, rows and state. ``digests`` has those of the records, by name.
    """
    names = [TABLES, f"{COMMIT}{commit.id}", *(f"{SEGMENT}{id_}" for id_ in commit.segment_ids)]
    return digest("".join(f"{name} {digests[name]}\n" for name in sorted(names)).encode())


@dataclass(frozen=True, slots=True)
class History:
    """The commits that are kept, each as a snapshot, the oldest first."""

    snapshots: tuple[Snapshot, ...] = ()

    @classmethod
    def of(cls, commits: Iterable[Commit], segments: Mapping[int, Segment]) -> History:
        """Return the history of ``commits``; ``segments`` has at least all that they name.

        Raises ValueError for a commit whose cursor none of its segments can stand at.
        """
        return cls(tuple(Snapshot(commit, (segments[id_] for id_ in commit.segment_ids)) for commit in commits))

    @property
    def commits(self) -> tuple[Commit, ...]:
        """The oldest first."""
        return tuple(snapshot.commit for snapshot in self.snapshots if snapshot.commit is not None)

    @property
    def newest(self) -> Snapshot:
        """The newest commit; without one a snapshot of nothing."""
        return self.snapshots[-1] if self.snapshots else Snapshot(None, ())

    @property
    def needed(self) -> Needed:
        """What the commits need."""
        return Needed.of(self.snapshots)


@dataclass(frozen=True, slots=True)
class Liveness:
    """The one rule of liveness: which ranges of which segments are needed at a cursor.

    A range with next use u is live at cursor (v, x) where u > v; and u == v, unless x > 0: then only in the newest
    segment that is within pass v, which holds the whole key set of v. Of retained segments, whose next
    uses are those of another schedule, the same ranges are live at every cursor: a commit names them.
    """

    cursor: Cursor
    within_id: int | None
    """The segment that alone is live for the pass of the cursor; None where the pass has not begun."""
    retained: Mapping[int, RetainedSegment]
    """By segment id."""

    @classmethod
    def at(cls, cursor: Cursor, segments: Iterable[Segment], retained: Collection[RetainedSegment]) -> Liveness:
        """Return the rule at ``cursor``. Raises ValueError for a cursor inside a pass that wrote no segment."""
        by_id = {one.segment_id: one for one in retained}
        if cursor.sample == 0:
            return cls(cursor, None, by_id)
        written = [s.id for s in segments if s.within_pass == cursor.pass_index and s.id not in by_id]
        if not written:
            raise ValueError(
                f"a commit at sample {cursor.sample} of pass {cursor.pass_index} needs its rows: "
                "append them with within=True first"
            )
        return cls(cursor, max(written), by_id)

    def first_range(self, segment: Segment, group: int) -> int:
        """Return the first live range of a layout: those before are dead, those after are live."""
        if segment.id in self.retained:
            return self.retained[segment.id].first_ranges[group]
        pass_index = self.cursor.pass_index
        if self.within_id is not None and segment.id != self.within_id:
            pass_index += 1
        return int(segment.layouts[group].next_use_R.searchsorted(pass_index))

    def first_block(self, segment: Segment, group: int) -> int:
        """Return the first block of a layout that has a live row; the number of blocks where none has."""
        layout = segment.layouts[group]
        row = layout.first_row_R.item(self.first_range(segment, group))
        return row // layout.block_rows if row < layout.rows else layout.num_blocks

    def keeps(self, segment: Segment) -> bool:
        """Return whether any row of ``segment`` is live, or it is the one that the cursor's pass wrote."""
        return segment.id == self.within_id or any(
            self.first_block(segment, group) < layout.num_blocks for group, layout in enumerate(segment.layouts)
        )


class Snapshot:
    """An immutable view of a commit, or of a commit and the segments appended since.

    Who reads takes it once and passes it on: a store replaces it with every commit. What it needs stays where it is
    while somebody holds it (``Store.pinned``).
    """

    def __init__(self, commit: Commit | None, segments: Iterable[Segment]) -> None:
        """``segments`` by id: those of the commit, then those appended since.

        Raises ValueError for a commit whose cursor none of its segments can stand at.
        """
        self.commit = commit
        self.segments = tuple(segments)
        """Those of the commit and those appended since, by id."""
        self._committed = frozenset[int]() if commit is None else frozenset(commit.segment_ids)
        self.retained: Mapping[int, RetainedSegment] = {}
        """The retained segments of the commit, by id."""
        self._liveness: Liveness | None = None
        if commit is not None:
            self._liveness = Liveness.at(commit.cursor, self.committed, commit.retained)
            self.retained = self._liveness.retained

    @cached_property
    def committed(self) -> tuple[Segment, ...]:
        """The segments of the commit, without those appended since."""
        return tuple(segment for segment in self.segments if segment.id in self._committed)

    def first_range(self, segment: Segment, group: int) -> int:
        """Return the first live range of a layout: those before are dead, those after are live."""
        if self._liveness is None or segment.id not in self._committed:
            return 0
        return self._liveness.first_range(segment, group)

    def rows_in(self, segments: Iterable[Segment], group: Group, table: Table) -> int:
        """Return how many rows of a table are in live ranges of ``segments``, the stale ones included."""
        index, place = group.index, group.place(table.name)
        return sum(s.layouts[index].rows_of_table(place, self.first_range(s, index)) for s in segments)

    def live_rows(self, group: Group, table: Table) -> int:
        """Return how many rows a table has at the commit; reads nothing."""
        return self.rows_in(self.committed, group, table) - self.stale_rows(self.committed, group, table)

    def stale_rows(self, segments: Iterable[Segment], group: Group, table: Table) -> int:
        """Return how many rows of a table in ``segments`` are stale."""
        ids, place = {segment.id for segment in segments}, group.place(table.name)
        return sum(one.stale_rows[group.index][place] for id_, one in self.retained.items() if id_ in ids)

    @cached_property
    def first_blocks(self) -> dict[int, tuple[int, ...]]:
        """By segment id, for each group: the first block that it needs; the number of blocks where it needs none."""
        liveness, found = self._liveness, {}
        for segment in self.segments:
            groups = range(len(segment.layouts))
            live = liveness is not None and segment.id in self._committed
            found[segment.id] = tuple(liveness.first_block(segment, g) if live and liveness else 0 for g in groups)
        return found


@dataclass(frozen=True, slots=True)
class Needed:
    """How much of each segment, and the dense state of which commits, somebody needs."""

    segments: Mapping[int, Segment]
    """By id."""
    first_blocks: Mapping[int, tuple[int, ...]]
    """By segment id, for each group: the first block that is needed."""
    states: Mapping[int, Commit]
    """By id: the commits whose dense state is needed."""

    @classmethod
    def of(cls, snapshots: Iterable[Snapshot]) -> Needed:
        """Return what any of ``snapshots`` needs."""
        segments: dict[int, Segment] = {}
        first_blocks: dict[int, tuple[int, ...]] = {}
        states: dict[int, Commit] = {}
        for snapshot in snapshots:
            if snapshot.commit is not None:
                states[snapshot.commit.id] = snapshot.commit
            for segment in snapshot.segments:
                first = snapshot.first_blocks[segment.id]
                known = first_blocks.get(segment.id)
                segments[segment.id] = segment
                first_blocks[segment.id] = first if known is None else tuple(map(min, known, first))
        return cls(segments, first_blocks, states)

    def blocks(self, groups: Sequence[Group], *, but: Needed | None = None) -> Iterator[Block]:
        """Yield all blocks, or those that ``but`` does not need: the state of commits, then rows, keys and changes."""
        for id_, commit in self.states.items():
            if but is None or id_ not in but.states:
                yield from commit.state_blocks()
        for id_, segment in self.segments.items():
            ends = tuple(layout.num_blocks for layout in segment.layouts)
            if but is not None and id_ in but.segments:
                ends = but.first_blocks[id_]
            first = self.first_blocks[id_]
            if first != ends:
                for group in groups:
                    yield from segment.blocks(group, first[group.index], ends[group.index])

    def num_bytes(self, groups: Sequence[Group], *, but: Needed | None = None) -> int:
        """Return the bytes of what ``blocks`` yields."""
        return sum(block.size for block in self.blocks(groups, but=but))
