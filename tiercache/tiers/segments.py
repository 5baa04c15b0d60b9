"""Which segments of a store hold the rows of which pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiercache.store import Segment, Store
    from tiercache.store.segment_layout import SegmentLayout


def segments_by_pass(store: Store) -> dict[int, Segment]:
    """Return the newest segment of each pass: for a pass cut by a commit, the one the commit wrote.

    RetainedSegment segments are of passes of other schedules.
    """
    found: dict[int, Segment] = {}
    retained = frozenset[int]() if store.commit is None else store.commit.retained_ids
    for segment in store.segments:
        if segment.id in retained:
            continue
        if segment.pass_index not in found or segment.id > found[segment.pass_index].id:
            found[segment.pass_index] = segment
    return found


def waiting_streams(store: Store) -> list[SegmentLayout]:
    """Return the layouts of these segments."""
    return [layout for segment in segments_by_pass(store).values() for layout in segment.layouts]
