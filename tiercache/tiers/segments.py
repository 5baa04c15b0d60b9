"""Which segments of a store hold the rows of which visit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiercache.store import Segment, Store
    from tiercache.store.stream import Stream


def segments_by_visit(store: Store) -> dict[int, Segment]:
    """Return the newest segment of each visit: for a visit cut by a commit, the one the commit wrote.

    Settled segments are of visits of other schedules.
    """
    found: dict[int, Segment] = {}
    settled = frozenset[int]() if store.commit is None else store.commit.settled_ids
    for segment in store.segments:
        if segment.id in settled:
            continue
        if segment.visit not in found or segment.id > found[segment.visit].id:
            found[segment.visit] = segment
    return found


def waiting_streams(store: Store) -> list[Stream]:
    """Return the streams of these segments."""
    return [stream for segment in segments_by_visit(store).values() for stream in segment.streams]
