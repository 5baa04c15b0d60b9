"""What the keys of a store must say when those of all segments lie side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.store.commit import Commit
    from tiercache.store.store import Store
    from tiercache.store.table import Group

    UInt64s = NDArray[np.uint64]
    UInt32s = NDArray[np.uint32]

_ADVICE = "restore the store from a copy"


class KeyTally:
    """Counts, part by part, what must not be. Shapes: C commits, T tables, S segments, N runs.

    At each commit a key has one live row. Where a commit has settled segments it may have stale ones beside it: each in
    an older segment than the next, which is settled; in each segment as many as the commit says; and none that changed
    after the next. A key that a commit has those after it have, too, but for rollbacks that gave it up. Where no row is
    stale, keys are sorted alone; else their order is, too, which takes half as long again.
    """

    def __init__(self, stores: Sequence[Store], group: Group, segment_ids: Sequence[int]) -> None:
        """``stores`` are one store at each of its commits, the oldest first; ``segment_ids`` those of all, rising."""
        self._group, self._label, self._ids = group, stores[0].label, list(segment_ids)
        self._commits = [-1 if store.commit is None else store.commit.id for store in stores]
        self._before = [_before([store.commit for store in stores[: c + 1]]) for c in range(len(stores))]
        shape = len(stores), len(group.tables), len(segment_ids)
        place = {id_: i for i, id_ in enumerate(segment_ids)}
        self._stated_CTS = np.zeros(shape, np.int64)
        for c, store in enumerate(stores):
            for one in () if store.commit is None else store.commit.settled:
                self._stated_CTS[c, :, place[one.segment_id]] = one.stale_rows[group.index]
        self._found_CTS = np.zeros(shape, np.int64)
        self._twice_CT, self._aged_CT, self._lost_CT = np.zeros((3, *shape[:2]), np.int64)
        self._place = place

    @property
    def has_stale(self) -> bool:
        """Whether a commit says that a row is stale."""
        return bool(self._stated_CTS.any())

    def begin(self, table_N: NDArray[np.int64], segment_ids_N: Sequence[int], live_CN: NDArray[np.bool_]) -> None:
        """Take table, segment and life at each commit of the runs that ``add`` has keys of."""
        self._table_N, self._live_CN = table_N, live_CN
        self._segment_N = np.array([self._place[id_] for id_ in segment_ids_N], dtype=np.int64)

    def add(self, hashes: UInt64s, runs: UInt32s, changed: UInt32s) -> None:
        """Count hashes (n,), all that there are of theirs, in the order of segments; may sort the array.

        ``runs`` (n,) are theirs, and ``changed`` (n,) their last changes, which are looked at where rows are stale.
        """
        num_tables = len(self._group.tables)
        for i in range(num_tables):
            mine = slice(None) if num_tables == 1 else self._table_N[runs] == i
            self._add(i, hashes[mine], runs[mine], changed[mine if self.has_stale else slice(0)])

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

    def _add(self, i: int, hashes: UInt64s, runs: UInt32s, changed: UInt32s) -> None:
        # All keys are live where one commit is kept: most stores then need no copy of them.
        alone = len(self._live_CN) == 1 and bool(self._live_CN.all())
        for c, live_N in enumerate(self._live_CN):
            live = None if alone else live_N[runs]
            mine = hashes if live is None else hashes[live]
            if self._stated_CTS[c, i].any():
                if live is not None:
                    self._sort_stale(c, i, mine, runs[live], changed[live])
                else:
                    self._sort_stale(c, i, mine, runs, changed)
            else:
                mine.sort(kind="stable")  # a merge of runs, which ranges are: a third of the time of a sort of anything
                self._twice_CT[c, i] += np.count_nonzero(mine[1:] == mine[:-1])
            before = self._before[c]
            if before is not None and live is not None:
                # Whose rows of the same runs are live lost none.
                gone_N = self._live_CN[before] & ~live_N
                if gone_N.any():
                    self._lost_CT[c, i] += _missing(hashes[gone_N[runs]], mine)

    def _sort_stale(self, c: int, i: int, hashes: UInt64s, runs: UInt32s, changed: UInt32s) -> None:
        """Sort live hashes of one table and count the rows that are not the newest, in the segments where they are."""
        order = np.argsort(hashes, kind="stable")
        hashes[:] = hashes[order]
        again = np.nonzero(hashes[1:] == hashes[:-1])[0]
        older, newer = order[again], order[again + 1]
        in_segments = self._segment_N[runs[older]]
        same = in_segments == self._segment_N[runs[newer]]
        self._twice_CT[c, i] += np.count_nonzero(same)
        self._found_CTS[c, i] += np.bincount(in_segments[~same], minlength=len(self._ids))
        self._aged_CT[c, i] += np.count_nonzero(changed[older] > changed[newer])


def _before(commits: Sequence[Commit | None]) -> int | None:
    """Return the place of the commit that the last one came of: of those before it the newest that was not given up."""
    *older, last = commits
    for c in reversed(range(len(older))):
        one = older[c]
        if last is not None and one is not None and not any(a <= one.id <= b for a, b in last.abandoned):
            return c
    return None


def _missing(hashes: UInt64s, among: UInt64s) -> int:
    """Return how many different hashes are not ``among`` others, which are sorted."""
    if among.size:
        at = np.minimum(np.searchsorted(among, hashes), among.size - 1)
        hashes = hashes[among[at] != hashes]
    return np.unique(hashes).size
