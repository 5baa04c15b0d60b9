"""The live keys of a group, and the memory of keys that a process has read before."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.store.bits import hash_keys
from tiercache.store.layout import KEY_PAGE_ROWS, SegmentLayout
from tiercache.store.reading import BlockReader, read_ahead

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.segment import Numbers, Segment
    from tiercache.store.table import Group

    Hashes = NDArray[np.uint64]
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from tiercache.store.snapshot import Snapshot

    Int64s = NDArray[np.int64]
    Sought = Mapping[int, Hashes | None]
    """By index of the table in its group: the hashes to look for, in order; None: all."""


KEY_MEMORY_BYTES = 256 << 20
"""Limit for all keys that a process remembers, at 8 bytes per key; keys of further segments are read each time."""
_ROW = np.uint64((1 << 32) - 1)


class _Keys(NamedTuple):
    """The keys of one table in one segment, from a range on."""

    first_range: int
    entries: NDArray[np.uint64]
    """Sorted entries, one per key: the high half of its hash, then its row in place of the low half."""


class KeyMemory:
    """The keys of all stores that this process has open for reading, or had; from any thread."""

    def __init__(self, most_bytes: int = KEY_MEMORY_BYTES) -> None:
        self.most_bytes = most_bytes
        self.num_bytes = 0
        """Bytes of all known keys, and of keys being learned."""
        self._known: dict[tuple[Path, int], dict[tuple[int, int, str], _Keys]] = {}
        """By store and segment; then by group, table and the digest of the segment's head."""
        self._lock = threading.Lock()

    def find(self, path: Path, segment: Segment, group: int, table: int) -> _Keys | None:
        """Return the known keys of a table in a segment."""
        part = self._known.get((path, segment.id))
        return None if part is None else part.get((group, table, segment.head_digest))

    def reserve(self, num_bytes: int) -> bool:
        """Count memory before it is allocated; return False, and count nothing, if it does not fit."""
        with self._lock:
            if self.num_bytes + num_bytes > self.most_bytes:
                return False
            self.num_bytes += num_bytes
            return True

    def release(self, num_bytes: int) -> None:
        """Stop counting memory that was reserved."""
        with self._lock:
            self.num_bytes -= num_bytes

    def add(self, path: Path, segment: Segment, group: int, table: int, made: _Keys) -> None:
        """Remember keys whose memory is reserved. Of these and the known ones, the narrower is dropped."""
        with self._lock:
            part, place = self._known.setdefault((path, segment.id), {}), (group, table, segment.head_digest)
            dropped = part.get(place)
            if dropped is None or made.first_range < dropped.first_range:
                part[place] = made
            else:
                dropped = made
            self.num_bytes -= 0 if dropped is None else dropped.entries.nbytes

    def keep(self, path: Path, segments: Collection[int]) -> None:
        """Forget all other segments of a store."""
        with self._lock:
            for place in [place for place in self._known if place[0] == path and place[1] not in segments]:
                self.num_bytes -= sum(one.entries.nbytes for one in self._known.pop(place).values())


KEY_MEMORY = KeyMemory()


class Recall:
    """The keys of one store that one lookup knows and learns. Close it when the lookup ends."""

    def __init__(self, memory: KeyMemory, path: Path, segments: Collection[int]) -> None:
        self._memory, self._path = memory, path
        memory.keep(path, segments)
        self._learned: dict[tuple[int, int, int], tuple[_Keys, int]] = {}
        """By segment, group and table, if all keys are read: room for all, and the number so far."""

    def rows(self, segment: Segment, group: int, table: int, first_range: int, queries: Hashes) -> Int64s | None:
        """Return, in order, the rows from ``first_range`` on that may have one of the hashes; None if any may."""
        keys = self._memory.find(self._path, segment, group, table)
        if keys is None or keys.first_range > first_range:
            return None
        low = keys.entries.searchsorted(queries & ~_ROW)
        high = keys.entries.searchsorted(queries | _ROW, side="right")
        places = [np.arange(a, b) for a, b in zip(low.tolist(), high.tolist(), strict=True) if a < b]
        found = (keys.entries[np.concatenate([np.empty(0, np.int64), *places])] & _ROW).astype(np.int64)
        return np.unique(found[found >= segment.layouts[group].first_row_R[first_range]])

    def is_learning(
        self, segment: Segment, group: int, table: int, first_range: int, runs: tuple[Int64s, Int64s], queries: Hashes
    ) -> bool:
        """Return True if all keys of ``runs`` (first rows, ends) should be read: most are anyway, and they fit."""
        rows = int((runs[1] - runs[0]).sum())
        if not rows or segment.layouts[group].rows > int(_ROW) or queries.size * runs[0].size * KEY_PAGE_ROWS < rows:
            return False
        if not self._memory.reserve(8 * rows):
            return False
        self._learned[segment.id, group, table] = _Keys(first_range, np.empty(rows, np.uint64)), 0
        return True

    def learn(self, segment: Segment, group: Group, table: int, keys: NDArray[np.int64], rows: Int64s) -> None:
        """Add keys that were read from a segment, and their rows."""
        place = segment.id, group.index, table
        if place in self._learned:
            made, begin = self._learned.pop(place)
            end = begin + keys.size
            made.entries[begin:end] = (hash_keys(keys, group.tables[table].table_id) & ~_ROW) | rows.astype(np.uint64)
            if end < made.entries.size:
                self._learned[place] = made, end
            else:
                made.entries.sort()
                self._memory.add(self._path, segment, group.index, table, made)

    def close(self) -> None:
        """Release the memory of segments that were not read to the end."""
        while self._learned:
            made, _ = self._learned.popitem()[1]
            self._memory.release(made.entries.nbytes)


KEY_THREADS = 2
"""Threads that read keys or rows: one reads the disk while others check."""
_PAGES = 1 << 16
"""Key pages per decision."""
_MANY = 64
"""With at least this many hashes all segments are searched at once; with fewer, one after another."""
_SWEPT_KEYS = 64
"""A layout with fewer keys than this for each hash is swept."""
_MOST_CANDIDATES = 4096
_NO_HASHES, _NO_ROWS = np.empty(0, np.uint64), np.empty(0, np.int64)
_NEAR_PAGES = 64
"""First hashes that are read around the expected place of a hash."""
_PAGES_AT_ONCE = 32
"""Pages that a thread reads at least, if a segment has them."""


def live_keys(
    reader: BlockReader,
    snapshot: Snapshot,
    segments: Iterable[Segment],
    group: Group,
    sought: Sought,
    readers: ThreadPoolExecutor,
    *,
    after: int,
    recall: Recall | None = None,
) -> Iterator[tuple[Segment, int, Int64s, Int64s]]:
    """Yield (segment, index of the table, keys, rows) of live rows of ``sought`` tables; reads a key page once at most.

    The caller may remove hashes from ``sought`` as they are found: a few segments later they are not looked for. In
    each run of rows in hash order only the key pages that may have a hash are read: for a single hash, one page at
    most. ``segments`` are read in order. Only rows with a next use after pass ``after``. ``recall`` knows the keys of
    some segments, and learns others, whose keys are then all read.
    """
    every = (batch for segment in segments for batch in _readings(snapshot, segment, group, sought, after, recall))
    if sum(_MANY if hashes is None else hashes.size for hashes in sought.values()) < _MANY:
        results = ((batch, _read(reader, batch)) for batch in every)  # what newer ones have decides what is read
    else:
        ahead = read_ahead(readers, partial(_read, reader), ((batch,) for batch in every), most=2 * KEY_THREADS)
        results = ((batch, found) for (batch,), found in ahead)
    for batch, found in results:
        for place, keys, rows in found:
            if recall is not None:
                recall.learn(batch[0].segment, group, place, keys, rows)
            yield batch[0].segment, place, keys, rows


class _Reading(NamedTuple):
    """Neighboring key pages of one block, and the matching rows in them."""

    segment: Segment
    group: int
    block: int
    first: int
    last: int
    first_row: int
    """First row of the first key page."""
    rows: dict[int, Int64s]
    """By index of the table."""


def _read(reader: BlockReader, readings: Sequence[_Reading]) -> list[tuple[int, Int64s, Int64s]]:
    """Return the keys of all matching rows, and these rows, by index of the table."""
    found: dict[int, list[tuple[Int64s, Int64s]]] = {}
    for one in readings:
        stored = reader.keys(one.segment, one.group, one.block, one.first, one.last)
        for place, rows in one.rows.items():
            found.setdefault(place, []).append((stored[rows - one.first_row], rows))
    return [
        (place, np.concatenate([keys for keys, _ in parts]), np.concatenate([rows for _, rows in parts]))
        for place, parts in found.items()
    ]


def _readings(
    snapshot: Snapshot, segment: Segment, group: Group, sought: Sought, after: int, recall: Recall | None
) -> Iterator[list[_Reading]]:
    """Yield the readings of a segment's keys in the order of its rows, in batches large enough for a thread."""
    pending = [hashes for hashes in sought.values() if hashes is None or hashes.size]
    if not pending:
        return
    key_map = segment.meta[group.index].key_map
    if key_map is not None and all(  # most of many segments are skipped here, and quickly
        hashes is not None and hashes.size < _MANY and not key_map.find_few(hashes.tolist())[0] for hashes in pending
    ):
        return
    layout = segment.layouts[group.index]
    live = max(snapshot.first_range(segment, group.index), int(layout.next_use_R.searchsorted(after, side="right")))
    spans: dict[int, _Spans] = {}
    runs: dict[int, tuple[Int64s, Int64s]] = {}
    learned: set[int] = set()
    for place, hashes in sought.items():
        mapped = None if hashes is None or recall is not None else _mapped(segment, group.index, place, hashes, live)
        if mapped is None:
            runs[place] = layout.runs_of_table(place, live)
            known = None
            if recall is not None and hashes is not None and hashes.size:
                known = recall.rows(segment, group.index, place, live, hashes)
                if known is None and recall.is_learning(segment, group.index, place, live, runs[place], hashes):
                    learned.add(place)
            if known is not None:
                spans[place] = _Spans.of_rows(layout, known)
                continue
            if place in learned or hashes is None:
                continue
            mapped = _mapped(segment, group.index, place, hashes, live) or _in_runs(hashes, runs[place])
        if mapped is not None and not mapped[0].size:
            spans[place] = _NOTHING
        elif mapped is not None:
            spans[place] = _Spans.of_candidates(layout, segment.meta[group.index].first_hashes, *mapped)
    swept = {place: None if place in learned else hashes for place, hashes in sought.items() if place not in spans}
    if not swept and not any(found.low.size for found in spans.values()):
        return
    batch: list[_Reading] = []
    step = max(1, _PAGES // layout.key_pages) if swept else max(1, layout.num_blocks)
    for block in range(0, layout.num_blocks, step):
        low, high = block * layout.block_rows, min((block + step) * layout.block_rows, layout.rows)
        parts = {place: found.between(low, high) for place, found in spans.items()}
        for place, hashes in swept.items():
            parts[place] = _Spans.of(layout, segment.meta[group.index].first_hashes, *runs[place], low, high, hashes)
        for reading in _neighboring(segment, group.index, layout, parts):
            batch.append(reading)
            if sum(one.last - one.first for one in batch) >= _PAGES_AT_ONCE:
                yield batch
                batch = []
    if batch:
        yield batch


_Candidates = tuple["Hashes", "Int64s", "Int64s"]
"""Hashes (n,), and first rows and last rows + 1 of the runs that may have them, by first row."""


def _mapped(segment: Segment, group: int, place: int, hashes: Hashes, live: int) -> _Candidates | None:
    """Return the runs that may have hashes by the layout's map; None without a map, or for many hashes."""
    layout, key_map = segment.layouts[group], segment.meta[group].key_map
    if key_map is None or hashes.size * _SWEPT_KEYS > layout.rows:
        return None
    which, ranges = key_map.find(hashes)
    if which.size:
        which, ranges = which[ranges >= live], ranges[ranges >= live]
    if not which.size:
        return _NO_HASHES, _NO_ROWS, _NO_ROWS
    counts = layout.table_rows_RT[ranges]
    lows = layout.first_row_R[ranges] + counts[:, :place].sum(axis=1, dtype=np.int64)
    highs = lows + counts[:, place]
    order = np.argsort(lows, kind="stable")
    order = order[(lows < highs)[order]]
    return hashes[which[order]], lows[order], highs[order]


def _in_runs(hashes: Hashes, runs: tuple[Int64s, Int64s]) -> _Candidates | None:
    """Return each hash with each run; None for many, in which case all key pages are swept."""
    if hashes.size * runs[0].size > _MOST_CANDIDATES:
        return None
    lows, highs = (np.repeat(bounds, hashes.size) for bounds in runs)
    return np.tile(hashes, runs[0].size), lows, highs


class _Spans(NamedTuple):
    """Runs of rows [low, high) of one table, cut where blocks end, in order; each in its key pages [first, last)."""

    low: Int64s
    high: Int64s
    first: Int64s
    last: Int64s

    @classmethod
    def of(
        cls,
        layout: SegmentLayout,
        first_hashes: Numbers,
        starts: Int64s,
        ends: Int64s,
        low: int,
        high: int,
        queries: Hashes | None,
    ) -> _Spans:
        """Return the rows of runs [starts, ends) in the whole blocks with rows [low, high) whose key may match."""
        part = slice(int(ends.searchsorted(low, side="right")), int(starts.searchsorted(high)))
        starts, ends = starts[part], ends[part]
        first = layout.key_pages_of_rows(np.maximum(starts, low))
        counts = layout.key_pages_of_rows(np.minimum(ends, high) - 1) + 1 - first
        run = np.repeat(np.arange(starts.size), counts)
        pages = np.arange(run.size) - np.repeat(np.cumsum(counts) - counts, counts) + first[run]
        page_low, page_high = layout.rows_of_key_pages(pages)
        if queries is not None and pages.size:
            base = int(pages[0])
            known = first_hashes[base : int(pages.max()) + 2]
            before = np.append(np.searchsorted(queries, known), queries.size)
            least = np.where(page_low >= starts[run], before[pages - base], 0)
            most = np.where(page_high < ends[run], before[pages - base + 1], queries.size)
            hit = np.nonzero(least < most)[0]
            # A hash that is the first of its page is in that page, not in the one before.
            run, pages, page_low, page_high = run[hit], pages[hit], page_low[hit], page_high[hit]
        lows, highs = np.maximum(page_low, starts[run]), np.minimum(page_high, ends[run])
        blocks = pages // layout.key_pages
        cut = np.nonzero((lows[1:] != highs[:-1]) | (blocks[1:] != blocks[:-1]))[0] + 1
        begin, end = np.append(0, cut)[: lows.size or 0], np.append(cut, lows.size)[: lows.size or 0] - 1
        return cls(lows[begin], highs[end], pages[begin], pages[end] + 1)

    @classmethod
    def of_rows(cls, layout: SegmentLayout, rows: Int64s) -> _Spans:
        """Return rows, in order, each as a span."""
        pages = layout.key_pages_of_rows(rows)
        return cls(rows, rows + 1, pages, pages + 1)

    @classmethod
    def of_candidates(
        cls, layout: SegmentLayout, first_hashes: Numbers, hashes: Hashes, starts: Int64s, ends: Int64s
    ) -> _Spans:
        """For each run [starts, ends) return the rows of the one page that may have its hash."""
        pages, last = layout.key_pages_of_rows(starts), layout.key_pages_of_rows(ends - 1)
        for i in np.nonzero(last > pages)[0].tolist():
            pages[i] = _page_with(first_hashes, int(pages[i]), int(last[i]), int(hashes[i]))
        page_low, page_high = layout.rows_of_key_pages(pages)
        lows, firsts = np.unique(np.maximum(page_low, starts), return_index=True)
        highs = np.minimum(page_high, ends)[firsts]
        return cls(lows, highs, pages[firsts], pages[firsts] + 1)

    def between(self, low: int, high: int) -> _Spans:
        """Return the spans that begin in rows [low, high)."""
        part = slice(int(self.low.searchsorted(low)), int(self.low.searchsorted(high)))
        return _Spans(*(column[part] for column in self))


_NOTHING = _Spans(*[_NO_ROWS] * 4)


def _page_with(first_hashes: Numbers, first: int, last: int, wanted: int) -> int:
    """Return the key page in [first, last] of a run that may have a hash, by interpolation: hashes are uniform."""
    low, high = first, last  # the page is among [low, high]
    width = _NEAR_PAGES
    guess = first + int((wanted / 2**64) * (last + 1 - first))
    while low < high:
        begin = min(max(guess - width // 2, low + 1), high)
        near = first_hashes[begin : min(begin + width, high + 1)]
        before = int(np.searchsorted(near, np.uint64(wanted), side="right"))
        if before == 0:
            high = begin - 1
            guess = high
        elif before == near.size:
            low = begin + before - 1
            guess = low + width
        else:
            return begin + before - 1
        width *= 4
    return low


def _neighboring(
    segment: Segment, group: int, layout: SegmentLayout, spans: Mapping[int, _Spans]
) -> Iterator[_Reading]:
    """Yield neighboring key pages of a block as one reading, whatever their tables."""
    found = sorted(
        (first, last, place, low, high)
        for place, of_table in spans.items()
        for low, high, first, last in zip(*(column.tolist() for column in of_table), strict=True)
    )
    neighbors: list[tuple[int, int, int, int, int]] = []
    end = -1
    for span in [*found, None]:
        if neighbors and (
            span is None or span[0] > end or span[0] // layout.key_pages != neighbors[0][0] // layout.key_pages
        ):
            block, first = divmod(neighbors[0][0], layout.key_pages)
            first_row = int(layout.rows_of_key_pages(np.array(neighbors[0][0]))[0])
            rows: dict[int, list[Int64s]] = {}
            for _, _, place, low, high in neighbors:
                rows.setdefault(place, []).append(np.arange(low, high))
            yield _Reading(
                segment, group, block, first, end - block * layout.key_pages, first_row,
                {place: np.concatenate(parts) for place, parts in rows.items()},
            )  # fmt: skip
            neighbors, end = [], -1
        if span is not None:
            neighbors.append(span)
            end = max(end, span[1])
