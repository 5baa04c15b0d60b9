"""The maximum bytes of a store, from the sizes of passes: decided before anything is written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tiercache.errors import BudgetError
from tiercache.planning.budgets import distance_bytes, paged
from tiercache.sizes import format_bytes
from tiercache.store import Commit, compaction_plan, rewrite
from tiercache.store.layout import CHANGED_BYTES, KEY_BYTES, NEVER, Range, SegmentLayout
from tiercache.store.segment import Layout, most_meta_bytes
from tiercache.store.snapshot import History

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tiercache.store.table import Group, Table


RECORD_BYTES = 1 << 20
"""Records, and the engine's overhead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorePlan:
    """The bytes of a store at its fullest commit, and of the dumps next to it."""

    live: int
    """Blocks with live rows and their keys at the commit that has most of them, blocks that no pass frees, and the last
    changes of all rows that were moved."""
    largest_pass: int
    """Blocks of rows and keys of the largest pass."""
    num_passes: int
    """Passes next to the live rows: those from each kept commit to the next, and one whose blocks were freed but may
    not be reused yet."""
    state: int
    """Dense state of all kept commits, and of the next."""
    schedule: int
    """Files of next uses, next to the store."""
    metadata: int = 0
    """Bytes of segment metadata, kept while any row of the segment is live."""

    @classmethod
    def of(
        cls,
        groups: tuple[Group, ...],
        dumps: Mapping[int, tuple[SegmentLayout, ...]],
        history: History,
        *,
        commits: int,
        commit_every: int,
        state_bytes: int,
        use_files: int,
    ) -> StorePlan:
        """Count the blocks that are live at each commit of an epoch; every epoch is like this one.

        ``dumps``: layouts of its passes, with kept rows. ``history``: the store's. Rows that no pass needs stay in it,
        as do retained segments and, while they are kept, commits of earlier schedules. ``commits``: commits kept.
        ``use_files``: files with the next uses of one epoch each.
        """
        live, largest, rows = np.zeros(max(1, len(dumps)), dtype=np.int64), 0, 0
        described, most_described = np.zeros_like(live), 0
        for pass_index, segment in dumps.items():
            num_bytes, meta = 0, paged(most_meta_bytes(segment))
            most_described = max(most_described, meta)
            last_use = max((int(layout.next_use_R[-1]) for layout in segment if layout.num_ranges), default=pass_index)
            np.add.at(described, np.arange(pass_index + 1, last_use + 1) % live.size, meta)
            for group, layout in zip(groups, segment, strict=True):
                block = block_bytes(group, min(layout.block_rows, layout.rows))
                num_bytes, rows = num_bytes + layout.num_blocks * block, rows + layout.rows
                # a range is live from the commit after the previous range's next use to the commit of its next use
                blocks_R = layout.num_blocks - layout.first_row_R[:-1] // layout.block_rows
                live_C = np.repeat(blocks_R * block, np.diff(layout.next_use_R, prepend=pass_index))
                np.add.at(live, (pass_index + 1 + np.arange(live_C.size)) % live.size, live_C)
            largest = max(largest, num_bytes)
        unfreed, unfreed_meta = _unfreed_bytes(history)
        num_passes = 1 + commits * commit_every
        return cls(
            live=int(live.max()) + unfreed,
            largest_pass=largest,
            num_passes=num_passes,
            state=(1 + commits) * paged(max([state_bytes, *(commit.state_bytes for commit in history.commits)])),
            schedule=sum(distance_bytes(rows)) * use_files,
            metadata=int(described.max()) + unfreed_meta + num_passes * most_described,
        )

    @property
    def needed(self) -> int:
        """Maximum bytes of the store; 15 % are for partly live blocks and for gaps between blocks."""
        blocks = self.live + self.num_passes * self.largest_pass
        return blocks + -(-15 * blocks // 100) + self.state + self.schedule + self.metadata + RECORD_BYTES

    def check(self, allowed: float) -> None:
        """Raise BudgetError, with the numbers, if the store may need more bytes than are allowed."""
        if self.needed > allowed:
            raise BudgetError(
                f"store_budget is {format_bytes(allowed)}, but the store needs {format_bytes(self.needed)} at its "
                f"fullest: {format_bytes(self.live)} of live rows, {self.num_passes} times the largest pass of "
                f"{format_bytes(self.largest_pass)}, 15 % of overhead, {format_bytes(self.metadata)} of metadata, "
                f"{format_bytes(self.state)} of dense state and {format_bytes(self.schedule)} of next uses: "
                f"raise store_budget to {self.needed} bytes, keep fewer commits (retention), commit more often "
                "(commit_every), or extract smaller passes"
            )


def block_bytes(group: Group, rows: int) -> int:
    """Return the maximum bytes of a block of rows and keys in either engine: whole pages for each field."""
    return sum(paged(4 * field.words * rows) for field in group.fields) + paged(KEY_BYTES * rows)


def _unfreed_bytes(history: History) -> tuple[int, int]:
    """Return the bytes of the blocks that no pass frees and of all last changes, and of their segments' metadata."""
    retained = history.newest.retained
    earlier = History(history.snapshots[: _num_earlier_schedules(history.commits)]).needed.segments
    total = metadata = 0
    for name, need in history.needed.segments.items():
        segment, before = need.segment, total
        for group, layout in zip(segment.groups, segment.layouts, strict=True):
            firsts, first_block = [layout.num_blocks], int(need.first_blocks_G[group.index])
            if name in earlier:
                firsts.append(int(earlier[name].first_blocks_G[group.index]))
            if segment.id in retained:
                firsts.append(first_block)
            if (never := layout.range_of_use(NEVER)) is not None and layout.first_row_R.item(never) < layout.rows:
                firsts.append(layout.first_row_R.item(never) // layout.block_rows)
            total += (layout.num_blocks - min(firsts)) * block_bytes(group, min(layout.block_rows, layout.rows))
            if (changed := segment.meta[group.index].changed) is not None and changed.stored:
                total += (layout.num_blocks - first_block) * paged(CHANGED_BYTES * min(layout.block_rows, layout.rows))
        metadata += paged(segment.meta_bytes) if total > before else 0
    return total, metadata


def _num_earlier_schedules(commits: Sequence[Commit]) -> int:
    """Return the number of commits before the newest one's schedule began: a rollback may return to their cursors."""
    for i in range(len(commits) - 2, -1, -1):
        before, after = commits[i], commits[i + 1]
        if before.schedule_digest != after.schedule_digest or before.cursor > after.cursor:
            return i + 1
    return 0


_MAP_ROW_BYTES = 3.5
"""Metadata bytes per row: the key map, and the checksums and hashes of key pages."""
_MOST_GROWTH = 64 << 20
"""Maximum growth of a file of blocks at once; a small one grows by a 32nd."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReorganizePlan:
    """Maximum bytes of a store while it is reorganized for other passes."""

    present: int
    """Bytes before: they stay until the new order is committed."""
    sorting: int
    """Temporary files while keys are sorted: a mark for each live row, and keys."""
    ordered: int
    """Temporary files while rows are sorted: the marks, and a slice of the rows."""
    segment: int
    """Blocks of these rows in the store, with gaps between them; not at the same time as ``sorting``."""
    other: int
    """Next uses, the dense state, the metadata of the new segment, and records."""

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        history: History,
        used: Mapping[str, int],
        layout: Layout,
        *,
        present: int | None,
        use_bytes: int,
    ) -> ReorganizePlan:
        """Count the rows that may move for passes that use ``used`` distinct keys of each table, including new ones.

        ``layout`` cuts the new segment into blocks. Used rows move, and unused ones of segments in which they take
        fewer bytes than used and stale ones, or of segments that are too many to retain. Only keys decide that, so the
        costliest are counted. ``present``: default: the blocks of ``history``.
        """
        tables = [_TableRows.of(group, table, history, used) for group in groups for table in group.tables]
        unused = _most_unused(tables, history)

        def moved(cost: Callable[[_TableRows], float]) -> int:
            return math.ceil(sum(cost(one) * one.used for one in tables) + _highest_cost(tables, unused, cost))

        of_rows = {g.index: _block_row_bytes(g, layout) for g in groups}
        blocks = moved(lambda one: of_rows[one.group][0]) + sum(block for _, block, _ in of_rows.values())
        if present is None:
            present = _block_bytes_of(history)
        sorting, marks = compaction_plan.key_scratch_bytes(
            [sum(one.live for one in tables if one.group == g.index) for g in groups]
        )
        ordered = rewrite.row_scratch_bytes(
            (one.group, min(one.live + one.used, one.used + -(-unused // one.row_bytes)), one.entry_bytes)
            for one in tables
        )
        commit = history.newest.commit
        metadata = moved(lambda one: _MAP_ROW_BYTES + 4 / of_rows[one.group][2])
        return cls(
            present=present,
            sorting=sorting,
            ordered=marks + ordered,
            segment=blocks + -(-15 * blocks // 100) + min(_MOST_GROWTH, (present + blocks) // 32),
            other=use_bytes + metadata + RECORD_BYTES + paged(0 if commit is None else commit.state_bytes),
        )

    @property
    def needed(self) -> int:
        """Maximum bytes of the store's folder, including temporary files."""
        return self.present + self.other + max(self.sorting, self.ordered + self.segment)

    def check(self, allowed: int) -> None:
        """Raise BudgetError, with the numbers, if more bytes are needed than are allowed."""
        if self.needed > allowed:
            present, other = map(format_bytes, (self.present, self.other))
            work = f"{format_bytes(self.ordered)} of temporary files and {format_bytes(self.segment)} of new segments"
            if self.sorting > self.ordered + self.segment:
                work = f"{format_bytes(self.sorting)} of temporary files to sort keys"
            raise BudgetError(
                f"store_budget is {format_bytes(allowed)}, but reordering the store for these passes may need "
                f"{format_bytes(self.needed)}: {present} that it takes now, {work}, and {other} of next uses, dense "
                f"state and metadata: raise store_budget to {self.needed} bytes, keep fewer commits (retention), or "
                "extract passes with fewer keys"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _TableRows:
    group: int
    row_bytes: int
    used: int
    """Distinct keys of the passes."""
    live: int
    """Live rows of the store, with stale ones."""
    stale: int
    within: int
    """Live rows of segments that a commit inside a pass wrote; these are not retained."""

    @property
    def entry_bytes(self) -> int:
        """Bytes of a row, its key and its last change."""
        return self.row_bytes + KEY_BYTES + CHANGED_BYTES

    @classmethod
    def of(cls, group: Group, table: Table, history: History, used: Mapping[str, int]) -> _TableRows:
        newest, live, within, stale = history.newest, 0, 0, 0
        stored = None if newest.commit is None else newest.find(table.name, "the store").group
        if newest.commit is not None and stored is not None:
            stale = newest.stale_rows(newest.committed, stored, table)
            live = newest.rows_in(newest.segments, stored, table)
            # no segment of other groups is retained
            alone = [s for s in newest.segments if newest.commit.stored or (s.within and s.pass_index >= 0)]
            within = newest.rows_in(alone, stored, table)
        return cls(
            group=group.index, row_bytes=group.row_bytes, used=used[table.name], live=live, stale=stale, within=within
        )


def _most_unused(tables: Sequence[_TableRows], history: History) -> int:
    """Return the maximum bytes of unused rows that move: fewer than used and stale ones of their segments, at most half
    (see ``CompactionPlan``).
    """
    live = sum(one.live * one.row_bytes for one in tables)
    within = sum(one.within * one.row_bytes for one in tables)
    if len(history.newest.segments) > compaction_plan.MOST_RETAINED:
        return live
    others = sum((one.used + one.stale) * one.row_bytes for one in tables)
    return min(live, others + within, -(-(live + within) // 2))


def _highest_cost(tables: Sequence[_TableRows], num_bytes: int, cost: Callable[[_TableRows], float]) -> float:
    """Return the highest cost of live rows of ``num_bytes``."""
    total = 0.0
    for one in sorted(tables, key=lambda one: cost(one) / one.row_bytes, reverse=True):
        rows = min(one.live, -(-num_bytes // one.row_bytes))
        total, num_bytes = total + rows * cost(one), max(0, num_bytes - rows * one.row_bytes)
    return total


def _block_row_bytes(group: Group, layout: Layout) -> tuple[float, int, int]:
    """Return the bytes of a row in a full block, with key and last change, those of the block, and a page's rows."""
    cut = layout(group, [Range(next_use=0, table_rows=(1,) * len(group.tables))])
    block = block_bytes(group, cut.block_rows) + paged(CHANGED_BYTES * cut.block_rows)
    return block / cut.block_rows, block, cut.page_rows


def _block_bytes_of(history: History) -> int:
    """Return the bytes of all blocks that a commit needs, with the metadata of their segments."""
    segments = history.needed.segments.values()
    return sum(paged(need.segment.meta_bytes) for need in segments) + sum(
        (layout.num_blocks - int(need.first_blocks_G[group.index]))
        * (block_bytes(group, min(layout.block_rows, layout.rows)) + paged(CHANGED_BYTES * layout.block_rows))
        for need in segments
        for group, layout in zip(need.segment.groups, need.segment.layouts, strict=True)
    )
