"""What the keys of a store must say when those of all segments lie side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import DTypeLike, NDArray

    from tiercache.store.commit import Commit
    from tiercache.store.segment import Segment
    from tiercache.store.store import Store
    from tiercache.store.table import Group

    UInt64s = NDArray[np.uint64]
    UInt32s = NDArray[np.uint32]

_ADVICE = "restore the store from a copy"


class KeyCounts:
    """Counts the violations in the keys of one group. Shapes: C commits, T tables, S segments, N ranges of all.

    At each commit a key has one live row. Where a commit has retained segments it may have stale ones beside it: each
    in an older segment than the next, which is retained; in each segment as many as the commit says; and none that
    changed after the next. A key that a commit has those after it have, too, but for rollbacks that gave it up.
    """

    def __init__(self, stores: Sequence[Store], group: Group, segments: Sequence[Segment]) -> None:
        """``stores`` are one store at each of its commits, the oldest first; ``segments`` those of all, by id."""
        self._group, self._label, self._ids = group, stores[0].label, [segment.id for segment in segments]
        self._commits = [-1 if store.commit is None else store.commit.id for store in stores]
        self._before = [_before([store.commit for store in stores[: c + 1]]) for c in range(len(stores))]
        counts = np.array([segment.layouts[group.index].num_ranges for segment in segments], np.int64)
        self.first_range_S = np.cumsum(counts) - counts
        """(S,): the number of each segment's first range, among those of all."""
        self._segment_N = np.repeat(np.arange(counts.size), counts)
        self._live_CN = np.zeros((len(stores), self._segment_N.size), np.bool_)
        shape = len(stores), len(group.tables), len(segments)
        self._stated_CTS, self._found_CTS = np.zeros((2, *shape), np.int64)
        self._twice_CT, self._aged_CT, self._lost_CT = np.zeros((3, *shape[:2]), np.int64)
        place = {id_: i for i, id_ in enumerate(self._ids)}
        for c, store in enumerate(stores):
            for segment in store.segments:
                first, i = int(self.first_range_S[place[segment.id]]), place[segment.id]
                self._live_CN[c, first + store.first_range(segment, group.index) : first + int(counts[i])] = True
            for one in () if store.commit is None else store.commit.retained:
                self._stated_CTS[c, :, place[one.segment_id]] = one.stale_rows[group.index]

    def payload(self, table: int) -> list[DTypeLike]:
        """Return the dtypes of what ``add`` needs beside the hashes of a table: ranges, or also last changes, or none.

        At most one live row of each key needs neither, where one commit is kept: most stores are like that.
        """
        if self._stated_CTS[:, table].any():
            return [np.uint32, np.uint32]
        return [np.uint32] if len(self._commits) > 1 else []

    def add(self, table: int, hashes: UInt64s, ranges: UInt32s | None = None, changed: UInt32s | None = None) -> None:
        """Count rows of a table in hash order, those of a hash in the order of segments and all at once.

        They are live at a commit at least. ``ranges`` are the numbers of their ranges among those of all segments,
        ``changed`` their last changes: what ``payload`` says.
        """
        for c, live_N in enumerate(self._live_CN):
            live = None if ranges is None or len(self._commits) == 1 else live_N[ranges]
            mine = hashes if live is None else hashes[live]
            again = np.nonzero(mine[1:] == mine[:-1])[0]
            if self._stated_CTS[c, table].any() and ranges is not None and changed is not None:
                self._add_stale(
                    c, table, again, *((ranges, changed) if live is None else (ranges[live], changed[live]))
                )
            else:
                self._twice_CT[c, table] += again.size
            before = self._before[c]
            if before is not None and ranges is not None:
                # Whose rows of the same ranges are live lost none.
                gone_N = self._live_CN[before] & ~live_N
                if gone_N.any():
                    self._lost_CT[c, table] += _missing(hashes[gone_N[ranges]], mine)

    def problems(self, unread: Collection[int]) -> Iterator[tuple[str, int]]:
        """Yield what is wrong, and the commit that it is in.

        Of commits of which something could not be read, ``unread``, nothing is said that may come of that.
        """
        over_CT = np.maximum(self._found_CTS - self._stated_CTS, 0).sum(axis=2) + self._twice_CT
        for i, table in enumerate(self._group.tables):
            name = f"table {table.name!r} of {self._label}"
            for c, commit in enumerate(self._commits):
                if over := int(over_CT[c, i]):
                    yield f"{over} keys of {name} have two live rows: {_ADVICE}", commit
                if commit in unread:
                    continue
                if lacking := np.nonzero(self._found_CTS[c, i] < self._stated_CTS[c, i])[0].tolist():
                    found, stated = (int(n[c, i, lacking].sum()) for n in (self._found_CTS, self._stated_CTS))
                    where = f"in segments {', '.join(str(self._ids[s]) for s in lacking)}"
                    yield f"{name} has {found} stale rows and its commit says {stated}, {where}: {_ADVICE}", commit
                if aged := int(self._aged_CT[c, i]):
                    yield f"{aged} keys of {name} have a row that changed after one that is newer: {_ADVICE}", commit
                if lost := int(self._lost_CT[c, i]):
                    before = self._before[c]
                    assert before is not None, "only of those is a key lost"
                    had = f"{lost} keys of {name} have no row, and had one at commit {self._commits[before]}"
                    yield f"{had}: roll the store back to that, or restore it from a copy", commit

    def _add_stale(self, c: int, table: int, again: NDArray[Any], ranges: UInt32s, changed: UInt32s) -> None:
        """Count the rows that the next one, of the same hash, makes stale, in the segments where they are."""
        in_segments = self._segment_N[ranges[again]]
        same = in_segments == self._segment_N[ranges[again + 1]]
        self._twice_CT[c, table] += np.count_nonzero(same)
        self._found_CTS[c, table] += np.bincount(in_segments[~same], minlength=len(self._ids))
        self._aged_CT[c, table] += np.count_nonzero(changed[again] > changed[again + 1])


def _before(commits: Sequence[Commit | None]) -> int | None:
    """Return the place of the commit that the last one came of: of those before it the newest that was not given up."""
    *older, last = commits
    for c in reversed(range(len(older))):
        one = older[c]
        if last is not None and one is not None and not any(a <= one.id <= b for a, b in last.abandoned):
            return c
    return None


def _missing(hashes: UInt64s, among: UInt64s) -> int:
    """Return how many different hashes are not ``among`` others; both are sorted."""
    if among.size:
        at = np.minimum(np.searchsorted(among, hashes), among.size - 1)
        hashes = hashes[among[at] != hashes]
    return 0 if not hashes.size else 1 + int(np.count_nonzero(hashes[1:] != hashes[:-1]))
