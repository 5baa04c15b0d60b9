"""Segments that a new schedule left where they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from tiercache.store.record import whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiercache.store.segment import Segment
    from tiercache.store.table import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class RetainedSegment:
    """A segment of an earlier schedule, as a commit says what is live in it: the next uses of its ranges are void.

    Retained segments are older than all others that a commit names. A row of theirs is stale where a newer segment
    has its key too. Rows become stale only at the commit that begins a schedule: no pass of it dumps a key whose
    row it left here.
    """

    segment_id: int
    first_ranges: tuple[int, ...]
    """By group: the first live range of its layout."""
    stale_rows: tuple[tuple[int, ...], ...]
    """By group, for each table: how many of its live rows are stale."""

    def to_record(self) -> list[Any]:
        """Return it as plain JSON values."""
        groups = zip(self.first_ranges, self.stale_rows, strict=True)
        return [self.segment_id, *([first, *rows] for first, rows in groups)]

    @classmethod
    def from_record(cls, record: Any) -> Self:
        """Build what ``to_record`` wrote. Raises ValueError and TypeError for anything else."""
        id_, *groups = record
        return cls(
            segment_id=whole(id_, "the id of a retained segment"),
            first_ranges=tuple(whole(first, "a first live range") for first, *_ in groups),
            stale_rows=tuple(tuple(whole(n, "stale rows") for n in rows) for _, *rows in groups),
        )

    def check(self, segment: Segment, groups: Sequence[Group]) -> None:
        """Raise ValueError where ``segment`` has no such ranges, or no more live rows than are said to be stale."""
        if segment.within and segment.pass_index >= 0:
            raise ValueError(
                f"retained segment {segment.id} was written inside a pass: all its rows were needed by that"
            )
        if len(self.first_ranges) != len(groups):
            raise ValueError(f"retained segment {segment.id} has {len(self.first_ranges)} groups of {len(groups)}")
        needed = 0
        for group, first, stale in zip(groups, self.first_ranges, self.stale_rows, strict=True):
            layout = segment.layouts[group.index]
            live = [layout.rows_of_table(place, first) for place in range(len(group.tables))]
            if (
                first > layout.num_ranges
                or len(stale) != len(live)
                or any(a > b for a, b in zip(stale, live, strict=True))
            ):
                raise ValueError(
                    f"retained segment {segment.id} has {live} live rows of group {group.index} from range {first} "
                    f"of {layout.num_ranges} on, and {list(stale)} of them are said to be stale"
                )
            needed += sum(live) - sum(stale)
        if not needed:
            raise ValueError(f"retained segment {segment.id} has stale rows only")
