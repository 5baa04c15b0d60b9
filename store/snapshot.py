"""Snapshots: one commit with its segments and what is live in them, and what several of them need together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tiercache.store.liveness import Liveness

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tiercache.store.commit import Commit
    from tiercache.store.engine import Block
    from tiercache.store.segment import Segment
    from tiercache.store.table import Group


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
        self._liveness = None if commit is None else Liveness.of(commit, self.committed)

    @cached_property
    def committed(self) -> tuple[Segment, ...]:
        """The segments of the commit, without those appended since."""
        return tuple(segment for segment in self.segments if segment.id in self._committed)

    def first_range(self, segment: Segment, group: int) -> int:
        """Return the first live range of a layout: those before are dead, those after are live."""
        if self._liveness is None or segment.id not in self._committed:
            return 0
        return self._liveness.first_range(segment, group)

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
