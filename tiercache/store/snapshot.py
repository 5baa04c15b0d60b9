"""Snapshots of a store, and the blobs that they need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.store.layout import CHANGED, CHANGED_BYTES, KEY_BYTES, KEYS, ROWS, blob_bytes, block_stride
from tiercache.store.row_codec import StoredTable
from tiercache.store.segment import Live, Segment, meta_name, rows_name
from tiercache.store.store_errors import damaged
from tiercache.store.table import Group, Table, group_tables

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.store.commit import Commit, Cursor
    from tiercache.store.sharding import ShardingPlan

    Int64s = NDArray[np.int64]


class Snapshot:
    """An immutable view of a commit, or of a commit and the segments appended since.

    Take it once per read: every commit replaces ``Store.snapshot``. Its blobs stay while it is held (``Store.pinned``).
    """

    def __init__(self, commit: Commit | None, groups: Sequence[Group], appended: Iterable[Segment] = ()) -> None:
        """``groups``: for a store without a commit. ``appended``, by id: the segments appended since the commit."""
        self.commit = commit
        self.groups = tuple(groups) if commit is None else commit.groups
        """The groups of its segments' layouts."""
        self.committed: tuple[Segment, ...] = () if commit is None else commit.own.segments
        """The segments of the commit, without those appended since."""
        self.appended = tuple(appended)
        self.segments = (*self.committed, *self.appended)
        """The segments of the commit and those appended since, by id."""
        self.retained = frozenset[int]() if commit is None else commit.retained_ids
        """The ids of segments of earlier schedules, whose next uses are void."""
        self._rows = {segment.id: row for row, segment in enumerate(self.segments)}
        self._checked = {segment.id for segment in self.appended}
        self._tables: dict[str, StoredTable] = {}
        self.has_tombstones = any(segment.tombstone for segment in self.segments)
        """True if a segment hides keys that were forgotten."""

    @property
    def id(self) -> int:
        """The id of its commit; -1 without one."""
        return -1 if self.commit is None else self.commit.id

    @property
    def tables(self) -> tuple[Table, ...]:
        """The current tables of its rank, whole or a slice of their columns."""
        if self.commit is not None:
            return self._of_rank(self.commit.tables, self.commit.sharding)
        return tuple(sorted((t for group in self.groups for t in group.tables), key=lambda table: table.table_id))

    def _of_rank(self, tables: tuple[Table, ...], sharding: ShardingPlan | None) -> tuple[Table, ...]:
        return tables if sharding is None else sharding.shard_tables(tables, self.rank)

    @property
    def rank(self) -> int:
        """The rank whose segments these are."""
        return 0 if self.commit is None else self.commit.own.rank

    @property
    def next_groups(self) -> tuple[Group, ...]:
        """The groups that a rewrite writes."""
        is_altered = self.commit is not None and self.commit.stored
        return group_tables(self.tables) if is_altered else self.groups

    def find(self, name: str, label: str) -> StoredTable:
        """Return a table by name. Raises ValueError; ``label`` is the store's name in messages."""
        if name not in self._tables:
            commit = self.commit
            shardings = () if commit is None else commit.stored_sharding or repeat(None)  # None: one rank
            stored = () if commit is None else tuple(map(self._of_rank, commit.stored, shardings))
            self._tables[name] = StoredTable.of(name, self.tables, self.groups, stored, label)
        return self._tables[name]

    @cached_property
    def live(self) -> Live:
        """The live rows of each segment."""
        appended = Live.of(self.appended, self.groups)
        return appended if self.commit is None else self.commit.own.live.joined(appended)

    @cached_property
    def first_blocks(self) -> Int64s:
        """(S, G): the first needed block of each layout; the number of blocks if none is needed."""
        return self.live.first_blocks()

    def first_range(self, segment: Segment, group: int) -> int:
        """Return a layout's first live range. Raises CorruptStoreError if the commit lists other rows than it has."""
        return int(self.live.first_ranges_SG[self._row(segment), group])

    def first_block(self, segment: Segment, group: int) -> int:
        """Return a layout's first block with a live row, or the number of blocks. Raises as ``first_range``."""
        return int(self.first_blocks[self._row(segment), group])

    @property
    def waiting_bytes(self) -> int:
        """Bytes of stale rows and rows of dropped tables. The next rewrite frees them."""
        total, live = 0, {table.name: self.find(table.name, "") for table in self.tables}
        for group in self.groups:
            for table in group.tables:
                rows = self.rows_in((s for s in self.committed if not s.tombstone), group, table)
                if table.name in live and live[table.name].group is group:
                    rows -= self.live_rows(table.name)
                total += rows * group.row_bytes
        return total

    def rows_in(self, segments: Iterable[Segment], group: Group, table: Table) -> int:
        """Return how many rows of a table are in live ranges of ``segments``, including stale ones."""
        return self._sum(self.live.live_ST, segments, group, table)

    def live_rows(self, name: str, label: str = "the store") -> int:
        """Return how many rows a table has at the commit; reads nothing. Raises as ``find`` does."""
        stored = self.find(name, label)
        if stored.group is None:
            return 0
        return self.living_rows(self.committed, stored.group, stored.table)

    def living_rows(self, segments: Iterable[Segment], group: Group, table: Table) -> int:
        """Return how many keys of a table have their newest row in ``segments``: none in tombstones."""
        rows = [segment for segment in segments if not segment.tombstone], group, table
        return self.rows_in(*rows) - self.stale_rows(*rows)

    def stale_rows(self, segments: Iterable[Segment], group: Group, table: Table) -> int:
        """Return how many rows of a table in ``segments`` are stale."""
        return self._sum(self.live.stale_ST, segments, group, table)

    def _row(self, segment: Segment) -> int:
        """Return the index of a segment; on first use compare its listed rows with its description."""
        row = self._rows[segment.id]
        if segment.id not in self._checked:
            if not self.live.fits(row, segment):
                at = "" if self.commit is None else f"commit {self.commit.id} "
                raise damaged(f"{at}lists other live rows of segment {segment.id} than it has")
            self._checked.add(segment.id)
        return row

    def check_cursor(self, cursor: Cursor, label: str) -> None:
        """Raise ValueError unless a commit at ``cursor`` may follow, and may name all segments."""
        before = None if self.commit is None else self.commit.cursor
        if min(cursor) < 0 or (before is not None and cursor < before):
            raise ValueError(f"{label} is at {before} and cannot go back to {cursor}")
        for segment in self.segments:
            if segment.id not in self.retained and segment.pass_index > cursor.pass_index - (not segment.within):
                raise ValueError(f"a commit at {cursor} cannot name a dump of pass {segment.pass_index}")
        appended = any(segment.within_pass == cursor.pass_index for segment in self.appended)
        if cursor.sample and cursor != before and not appended:
            raise ValueError(f"a commit at {cursor} needs the rows of its pass: append them with within=True first")

    def live_at(self, cursor: Cursor) -> tuple[list[Segment], Live]:
        """Return the segments with rows that are live at ``cursor``, and the live rows of each.

        A range with next use u is live at cursor (v, x) if u > v; and if u == v, unless x > 0: then only in the newest
        segment within pass v, which holds the whole key set of v, or in all segments of the base if that is one. In
        segments of earlier schedules the live rows stay live.
        """
        pass_index, sample = cursor
        written = [s for s in self.segments if s.within_pass == pass_index and s.id not in self.retained]
        if sample and not written:
            where = f"sample {sample} of pass {pass_index}"
            raise ValueError(f"a commit at {where} needs its rows: append them with within=True first")
        whole_pass = frozenset[int]()
        if sample:
            newest = written[-1]
            base = newest.pass_index if newest.pass_index < 0 else None
            whole_pass = frozenset(s.id for s in written if s is newest or s.pass_index == base)
        live = self.live.taken(range(len(self.segments)))
        for row, segment in enumerate(self.segments):
            if segment.id not in self.retained:
                first_use = pass_index + (bool(whole_pass) and segment.id not in whole_pass)
                if np.any(live.next_uses_SG[row] < first_use):
                    live.set_from(row, segment, first_use)
        rows_S = live.live_ST.sum(axis=1).tolist()
        rows = [i for i, one in enumerate(self.segments) if rows_S[i] or one.id in whole_pass]
        return [self.segments[row] for row in rows], live.taken(rows)

    def _sum(self, counts_ST: Int64s, segments: Iterable[Segment], group: Group, table: Table) -> int:
        rows = [self._rows[segment.id] for segment in segments]
        return int(counts_ST[rows, self.live.first_tables[group.index] + group.place(table.name)].sum())


class BlobNeed(NamedTuple):
    """The part of a blob that is needed."""

    name: str
    first_byte: int
    size: int
    """Bytes of the whole blob, needed or not."""


class SegmentNeed(NamedTuple):
    """The part of a segment that is needed."""

    segment: Segment
    first_blocks_G: Int64s
    """(G,): the first needed block of each layout; the number of blocks if none is needed."""
    live: Live
    """The live rows, which give the sizes of its blobs."""
    row: int
    """The segment's row in ``live``."""

    def blobs(self) -> Iterator[BlobNeed]:
        """Yield the needed part of each blob with rows, group after group."""
        live, columns = self.live, [self.first_blocks_G]
        columns += [one[self.row] for one in (live.rows_SG, live.block_rows_SG, live.row_bytes_SG, live.changed_SG)]
        facts = zip(*(column.tolist() for column in columns), strict=True)
        for g, (first, rows, block_rows, row_bytes, changed) in enumerate(facts):
            if first * block_rows >= rows:
                continue
            kinds = [(ROWS, row_bytes), (KEYS, KEY_BYTES), *([(CHANGED, CHANGED_BYTES)] if changed else [])]
            for kind, item_bytes in kinds:
                first_byte = first * block_stride(block_rows, item_bytes)
                size = blob_bytes(rows, block_rows, item_bytes)
                yield BlobNeed(rows_name(self.segment.name, g, kind), first_byte, size)


@dataclass(frozen=True, slots=True)
class Needed:
    """The part of each blob that commits or readers need."""

    whole: dict[str, int]
    """By name, bytes of blobs needed as a whole: commits, ranks' lists, dense state."""
    segments: dict[str, SegmentNeed]
    """By name."""

    @classmethod
    def of(cls, snapshots: Iterable[Snapshot], *, also: Needed | None = None) -> Needed:
        """Return the needs of ``snapshots``, and those in ``also``."""
        whole = {} if also is None else {**also.whole}
        segments = {} if also is None else {**also.segments}
        for snapshot in snapshots:
            commit, firsts_SG = snapshot.commit, snapshot.first_blocks
            if commit is not None:  # with several ranks each needs its list, and rank 0 the commit
                rank = commit.own.rank
                heads = [*commit.ranks[rank : rank + 1], *([] if commit.head is None or rank else [commit.head])]
                whole |= {head.name: head.size for head in heads}
                whole[commit.own.state.name] = commit.own.state.size
            for row, segment in enumerate(snapshot.segments):
                need = segments.get(segment.name)
                if need is None:
                    segments[segment.name] = SegmentNeed(segment, firsts_SG[row], snapshot.live, row)
                elif np.any(firsts_SG[row] < need.first_blocks_G):
                    firsts_G = np.minimum(firsts_SG[row], need.first_blocks_G)
                    segments[segment.name] = need._replace(first_blocks_G=firsts_G)
        return cls(whole, segments)

    def blobs(self) -> Iterator[BlobNeed]:
        """Yield the needed part of each blob."""
        for name, size in self.whole.items():
            yield BlobNeed(name, 0, size)
        for need in self.segments.values():
            yield BlobNeed(meta_name(need.segment.name), 0, need.segment.meta_bytes)
            yield from need.blobs()

    def given_up(self, after: Needed) -> Iterator[tuple[str, int | None]]:
        """For each blob that ``after`` needs less of, yield how much of its front to drop, or None for all of it."""
        for name in self.whole:
            if name not in after.whole:
                yield name, None
        for name, need in self.segments.items():
            kept = after.segments.get(name)
            if kept is None:
                yield meta_name(name), None
            if kept is None or np.any(kept.first_blocks_G > need.first_blocks_G):
                remaining = {} if kept is None else {blob.name: blob.first_byte for blob in kept.blobs()}
                for blob in need.blobs():
                    upto = remaining.get(blob.name)
                    if upto is None or upto > blob.first_byte:
                        yield blob.name, upto

    def num_bytes(self, but: Needed) -> int:
        """Return the bytes that are needed and that ``but`` does not need."""
        kept = {blob.name: blob.first_byte for blob in but.blobs()}
        return sum(max(0, kept.get(blob.name, blob.size) - blob.first_byte) for blob in self.blobs())


@dataclass(frozen=True, slots=True)
class History:
    """The commits that are kept, each as a snapshot, the oldest first."""

    snapshots: tuple[Snapshot, ...] = ()

    @property
    def commits(self) -> tuple[Commit, ...]:
        """The oldest first."""
        return tuple(snapshot.commit for snapshot in self.snapshots if snapshot.commit is not None)

    @property
    def newest(self) -> Snapshot:
        """The newest commit; an empty snapshot without one."""
        return self.snapshots[-1] if self.snapshots else Snapshot(None, ())

    @property
    def needed(self) -> Needed:
        """The needs of the commits."""
        return Needed.of(self.snapshots)
