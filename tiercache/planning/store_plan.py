"""The bytes that a store takes at its fullest, from the sizes of passes: decided before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tiercache.errors import BudgetError
from tiercache.planning.budget import gap_bytes, paged
from tiercache.sizes import format_bytes
from tiercache.store.history import History
from tiercache.store.row_versions import CHANGED_BYTES
from tiercache.store.segment_layout import NEVER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tiercache.store import Commit
    from tiercache.store.segment_layout import SegmentLayout
    from tiercache.store.table import Group

RECORD_BYTES = 1 << 20
"""Records and what describes arrays: 4 bytes for each page, and little else."""
_KEY_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class StorePlan:
    """What a store holds at its fullest commit, and what a dump needs beside that; all in bytes."""

    live: int
    """Blocks with live rows and their keys, at the commit that has most of them; of those what no pass frees; and the
    last changes of all rows that were moved."""
    largest_pass: int
    """Blocks of rows and keys of the largest pass."""
    num_passes: int
    """How many of these stand beside the live rows: the passes from each commit that is kept to the next, and one whose
    room was freed and may not be used again yet."""
    state: int
    """Dense state of all commits that are kept, and of the next."""
    schedule: int
    """Next uses, in the files beside the store."""

    @classmethod
    def of(
        cls,
        groups: tuple[Group, ...],
        dumps: Mapping[int, tuple[SegmentLayout, ...]],
        stored: History,
        *,
        commits: int,
        commit_every: int,
        state_bytes: int,
        use_files: int,
    ) -> StorePlan:
        """Count the blocks that are live at each commit of an epoch, where every epoch is like this one.

        ``dumps`` are those of its passes, kept rows too. ``stored`` is in the store: rows that no pass needs stay,
        retained segments do, and so long as they are kept the commits of earlier schedules with all that they need.
        ``commits`` are kept; ``use_files`` hold the next uses of an epoch each.
        """
        live, largest, rows = np.zeros(max(1, len(dumps)), dtype=np.int64), 0, 0
        for pass_index, segment in dumps.items():
            taken = 0
            for group, ranges in zip(groups, segment, strict=True):
                block = block_bytes(group, min(ranges.block_rows, ranges.rows))
                taken, rows = taken + ranges.num_blocks * block, rows + ranges.rows
                # a range is live from the commit behind the next use before it to that of its own
                blocks_R = ranges.num_blocks - ranges.first_row_R[:-1] // ranges.block_rows
                live_C = np.repeat(blocks_R * block, np.diff(ranges.next_use_R, prepend=pass_index))
                np.add.at(live, (pass_index + 1 + np.arange(live_C.size)) % live.size, live_C)
            largest = max(largest, taken)
        return cls(
            live=int(live.max()) + _stored_bytes(groups, stored),
            largest_pass=largest,
            num_passes=1 + commits * commit_every,
            state=(1 + commits) * paged(max([state_bytes, *(commit.state_bytes for commit in stored.commits)])),
            schedule=sum(gap_bytes(rows)) * use_files,
        )

    @property
    def needed(self) -> int:
        """The most bytes of the store: 15 % for blocks that are live in part, and for free room between them."""
        blocks = self.live + self.num_passes * self.largest_pass
        return blocks + -(-15 * blocks // 100) + self.state + self.schedule + RECORD_BYTES

    def check(self, allowed: int) -> None:
        """Raise BudgetError, with the numbers, where the store may come to need more bytes than are allowed."""
        if self.needed > allowed:
            raise BudgetError(
                f"store_budget is {format_bytes(allowed)}, but the store needs {format_bytes(self.needed)} at its "
                f"fullest: {format_bytes(self.live)} of live rows, {self.num_passes} times the largest pass of "
                f"{format_bytes(self.largest_pass)}, 15 % beside these, {format_bytes(self.state)} of dense state and "
                f"{format_bytes(self.schedule)} of next uses: raise store_budget to {self.needed} bytes, keep fewer "
                "commits (retention), commit more often (commit_every), or extract smaller passes"
            )


def block_bytes(group: Group, rows: int) -> int:
    """Return what either engine takes at most for a block of so many rows with their keys: pages for each field."""
    return sum(paged(4 * field.words * rows) for field in group.fields) + paged(_KEY_BYTES * rows)


def _stored_bytes(groups: tuple[Group, ...], stored: History) -> int:
    """Return the bytes of the blocks that no pass frees, and of all last changes: dumps have none in their place."""
    newest, needed = stored.newest.commit, stored.needed
    retained = frozenset[int]() if newest is None else newest.retained_ids
    earlier = History(stored.snapshots[: _of_earlier_schedules(stored.commits)]).needed.first_blocks
    total = 0
    for id_, segment in needed.segments.items():
        for group, layout in zip(groups, segment.layouts, strict=True):
            firsts = [layout.num_blocks]
            if id_ in earlier:
                firsts.append(earlier[id_][group.index])
            if id_ in retained:
                firsts.append(needed.first_blocks[id_][group.index])
            if (never := layout.range_of_use(NEVER)) is not None and layout.first_row_R.item(never) < layout.rows:
                firsts.append(layout.first_row_R.item(never) // layout.block_rows)
            total += (layout.num_blocks - min(firsts)) * block_bytes(group, min(layout.block_rows, layout.rows))
            if segment.changed and segment.changed[group.index].stored:
                blocks = layout.num_blocks - needed.first_blocks[id_][group.index]
                total += blocks * paged(CHANGED_BYTES * min(layout.block_rows, layout.rows))
    return total


def _of_earlier_schedules(commits: Sequence[Commit]) -> int:
    """Return how many commits are before the one that began the schedule of the newest: a cursor goes back there."""
    for i in range(len(commits) - 2, -1, -1):
        before, after = commits[i], commits[i + 1]
        if before.schedule_digest != after.schedule_digest or before.cursor > after.cursor:
            return i + 1
    return 0
