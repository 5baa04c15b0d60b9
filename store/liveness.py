"""Liveness: which rows a commit needs. It follows from the cursor, and of retained segments from the commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from tiercache.store.commit import Commit, Cursor
    from tiercache.store.retained_segment import RetainedSegment
    from tiercache.store.segment import Segment


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
    def of(cls, commit: Commit, segments: Iterable[Segment]) -> Liveness:
        """Return the rule of a commit; ``segments`` has at least those that it names."""
        return cls.at(commit.cursor, segments, commit.retained)

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

    def first_page(self, segment: Segment, group: int) -> int:
        """Return the first live page of a layout; the number of pages where none is."""
        layout, index = segment.layouts[group], self.first_range(segment, group)
        return layout.pages_of_range(index)[0] if index < layout.num_ranges else layout.num_pages

    def first_block(self, segment: Segment, group: int) -> int:
        """Return the first block of a layout that holds a live page; the number of blocks where none does."""
        layout, page = segment.layouts[group], self.first_page(segment, group)
        return layout.block_of_page(page) if page < layout.num_pages else layout.num_blocks

    def keeps(self, segment: Segment) -> bool:
        """Return whether any row of ``segment`` is live, or it is the one that the cursor's pass wrote."""
        return segment.id == self.within_id or any(
            self.first_page(segment, group) < layout.num_pages for group, layout in enumerate(segment.layouts)
        )
