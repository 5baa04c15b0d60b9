"""What the records of a store must say of each other, where opening it looks at each alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tiercache.store.commit import Commit
    from tiercache.store.segment import Segment

_ADVICE = "restore the store from a copy"


def record_problems(commits: Iterable[Commit], segments: Iterable[Segment], label: str) -> Iterator[tuple[str, int]]:
    """Yield what is wrong in the records of the store ``label``, and a commit that it is in; reads nothing.

    All commits name the same first commit of a segment, and none is before that. What a pass dumped waits for a later
    one, or, of a commit inside the pass, for that: other rows would be dead before anything reads them.
    """
    firsts: dict[int, int] = {}
    by_id = {segment.id: segment for segment in segments}
    for commit in commits:
        for id_, first in commit.named.items():
            known = firsts.setdefault(id_, first)
            if not known == first <= commit.id:
                said = f"commit {commit.id} of {label} says that commit {first} was the first with segment {id_}"
                known_words = f"commit {known} was" if known != first else "that is newer"
                yield f"{said}, and {known_words}: {_ADVICE}", commit.id
            if (use := _over_at_once(by_id[id_])) is not None:
                said = (
                    f"segment {id_} of {label} was dumped by pass {by_id[id_].pass_index} and has rows that wait for "
                    f"{use}"
                )
                yield f"{said}: {_ADVICE}", commit.id


def _over_at_once(segment: Segment) -> int | None:
    """Return a next use that was over when the rows were dumped; None where there is none, and for a base."""
    soonest = segment.pass_index + (not segment.within)
    if segment.pass_index < 0:
        return None
    uses = (layout.next_use_R[np.diff(layout.first_row_R) > 0] for layout in segment.layouts)
    first = [int(mine[0]) for mine in uses if mine.size]
    return next((use for use in first if use < soonest), None)
