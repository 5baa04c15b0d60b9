"""The commits that a store keeps, and what they need: decided from their cursors, before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiercache.store.blocks import segment_names
from tiercache.store.life import Life

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tiercache.store.commit import Commit
    from tiercache.store.segment import Segment

COMMIT, SEGMENT, TABLES = "commit/", "segment/", "tables"
"""Names of records; those of commits and segments end in an id."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Commits, the segments that they name, and how much of each segment any of them needs."""

    commits: tuple[Commit, ...]
    """The oldest first."""
    segments: Mapping[int, Segment]
    """By id."""
    first_blocks: Mapping[int, tuple[int, ...]]
    """By segment id, for each group: the first block that a commit needs."""

    @classmethod
    def of(cls, commits: Iterable[Commit], segments: Mapping[int, Segment]) -> Manifest:
        """Decide what ``commits`` need; ``segments`` has at least all that they name.

        Raises ValueError for a commit whose cursor none of its segments can stand at.
        """
        commits, first_blocks = tuple(commits), dict[int, tuple[int, ...]]()
        for commit in commits:
            named = [segments[id_] for id_ in commit.segment_ids]
            life = Life.of(commit, named)
            for segment in named:
                first = tuple(life.first_block(segment, group) for group in range(len(segment.streams)))
                known = first_blocks.get(segment.id, first)
                first_blocks[segment.id] = tuple(map(min, known, first))
        return cls(commits, {id_: segments[id_] for id_ in first_blocks}, first_blocks)

    @property
    def newest(self) -> Commit | None:
        """The newest commit."""
        return self.commits[-1] if self.commits else None

    def named(self, commit: Commit) -> tuple[Segment, ...]:
        """Return the segments of a commit, by id."""
        return tuple(self.segments[id_] for id_ in commit.segment_ids)

    def blocks(self) -> Iterator[bytes]:
        """Yield the names of all blocks that a commit needs."""
        for id_, segment in self.segments.items():
            for group, stream in enumerate(segment.streams):
                yield from segment_names(segment, group, self.first_blocks[id_][group], stream.num_blocks)
        for commit in self.commits:
            yield from commit.state_blocks()

    def records_before(self, after: Manifest) -> dict[str, bytes | None]:
        """Return the records to set, and with None those to remove, on the way to ``after``."""
        mine, others = ({commit.id: commit for commit in m.commits} for m in (self, after))
        records: dict[str, bytes | None] = {f"{COMMIT}{id_}": None for id_ in mine.keys() - others.keys()}
        records |= {f"{SEGMENT}{id_}": None for id_ in self.segments.keys() - after.segments.keys()}
        records |= {f"{COMMIT}{id_}": others[id_].to_bytes() for id_ in others.keys() - mine.keys()}
        new = sorted(after.segments.keys() - self.segments.keys())
        return records | {f"{SEGMENT}{id_}": after.segments[id_].to_bytes() for id_ in new}

    def dead_before(self, after: Manifest, appended: Iterable[Segment]) -> Iterator[bytes]:
        """Yield the names of blocks that nothing needs on the way to ``after``, those of ``appended`` included."""
        for segment in {**self.segments, **{segment.id: segment for segment in appended}}.values():
            for group, stream in enumerate(segment.streams):
                first = self.first_blocks[segment.id][group] if segment.id in self.segments else 0
                upto = after.first_blocks[segment.id][group] if segment.id in after.segments else stream.num_blocks
                yield from segment_names(segment, group, first, upto)
        kept = {commit.id for commit in after.commits}
        for commit in self.commits:
            if commit.id not in kept:
                yield from commit.state_blocks()
