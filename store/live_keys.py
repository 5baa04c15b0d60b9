"""The live keys of a group: all of them, or those of the key pages that may have a key that is looked for."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.store.hashing import hash_keys
from tiercache.store.read_ahead import read_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from numpy.typing import NDArray

    from tiercache.store.key_memory import Recall
    from tiercache.store.segment import Segment
    from tiercache.store.segment_layout import SegmentLayout
    from tiercache.store.snapshot import Snapshot
    from tiercache.store.store import Store
    from tiercache.store.table import Group

    Int64s = NDArray[np.int64]
    Wanted = NDArray[np.uint64] | None
    """Hashes in order; None: all."""
    Asked = Callable[[], Wanted]
    """What is wanted by now."""

READERS = 2
"""Threads that read keys or rows: the disk has some to read while others are checked."""
_PAGES = 1 << 16
"""Key pages that are decided on at once."""
_PAGES_AT_ONCE = 32
"""That a thread reads at least, where there are so many of a segment."""


def live_keys(
    store: Store,
    snapshot: Snapshot,
    segments: Iterable[Segment],
    group: Group,
    tables: Mapping[int, Asked],
    readers: ThreadPoolExecutor,
    *,
    after: int,
    recall: Recall | None = None,
) -> Iterator[tuple[Segment, int, Int64s, Int64s]]:
    """Yield (segment, place of the table, keys, rows) of live rows of ``tables``, each key page read at most once.

    ``tables`` gives, by place in the group, the hashes that are looked for; a few segments later what it gives by then.
    Of each run of rows in hash order only the key pages are read that may have one: for a single hash one page at most.
    ``segments`` come in their order. Only rows with a next use after pass ``after``. ``recall`` knows where the keys of
    some segments are, and learns it of others, of which all keys are read then.
    """
    readings = (_readings(snapshot, segment, group, tables, after, recall) for segment in segments)
    sweep = ((some,) for of_segment in readings for some in _together(of_segment))
    for (some,), found in read_ahead(readers, partial(_read, store), sweep, most=2 * READERS):
        for place, keys, rows in found:
            if recall is not None:
                recall.learn(some[0].segment, group, place, keys, rows)
            yield some[0].segment, place, keys, rows


def all_keys() -> None:
    """Want all keys of a table."""


class _Reading(NamedTuple):
    """Neighboring key pages of one block, and the rows in them that count."""

    segment: Segment
    group: int
    block: int
    first: int
    last: int
    first_row: int
    """Of the first key page."""
    rows: dict[int, Int64s]
    """By place of the table."""


def _together(readings: Iterable[_Reading]) -> Iterator[list[_Reading]]:
    """Yield readings of a segment, so many that a thread has something to do."""
    some: list[_Reading] = []
    for reading in readings:
        some.append(reading)
        if sum(one.last - one.first for one in some) >= _PAGES_AT_ONCE:
            yield some
            some = []
    if some:
        yield some


def _read(store: Store, readings: Sequence[_Reading]) -> list[tuple[int, Int64s, Int64s]]:
    """Return the keys of all rows that count, and these rows, by place of the table."""
    found: dict[int, list[tuple[Int64s, Int64s]]] = {}
    for one in readings:
        stored = store.read_keys(one.segment, one.group, one.block, one.first, one.last)
        for place, rows in one.rows.items():
            found.setdefault(place, []).append((stored[rows - one.first_row], rows))
    return [
        (place, np.concatenate([keys for keys, _ in parts]), np.concatenate([rows for _, rows in parts]))
        for place, parts in found.items()
    ]


def _readings(
    snapshot: Snapshot,
    segment: Segment,
    group: Group,
    tables: Mapping[int, Asked],
    after: int,
    recall: Recall | None,
) -> Iterator[_Reading]:
    """Yield what is read of the keys of a segment, in the order of its rows."""
    if all((wanted := asked()) is not None and not wanted.size for asked in tables.values()):
        return
    layout = segment.layouts[group.index]
    live = max(snapshot.first_range(segment, group.index), int(layout.next_use_R.searchsorted(after, side="right")))
    runs = {place: layout.runs_of_table(place, live) for place in tables}
    known: dict[int, Int64s] = {}
    if recall is not None:
        tables = dict(tables)
        for place, asked in tables.items():
            if (wanted := asked()) is None or not wanted.size:
                continue
            if (rows := recall.rows(segment, group.index, place, live, wanted)) is not None:
                known[place] = rows
            elif recall.is_learning(segment, group.index, place, live, runs[place][0].size, wanted):
                tables[place] = all_keys
    step = max(1, _PAGES // layout.key_pages)
    for block in range(0, layout.num_blocks, step):
        low, high = layout.rows_of_block(block)[0], layout.rows_of_block(min(block + step, layout.num_blocks) - 1)[1]
        spans = []
        for place, asked in tables.items():
            if place in known:
                spans.append(_Spans.of_rows(layout, known[place], low, high))
                continue
            wanted, table_id = asked(), group.tables[place].table_id
            spans.append(_Spans.of(layout, segment.first_keys[group.index], *runs[place], low, high, wanted, table_id))
        yield from _joined(segment, group.index, layout, dict(zip(tables, spans, strict=True)))


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
        first_keys: Int64s,
        starts: Int64s,
        ends: Int64s,
        low: int,
        high: int,
        wanted: Wanted,
        table_id: int,
    ) -> _Spans:
        """Return the rows of runs [starts, ends) in the whole blocks with rows [low, high) whose key may be wanted."""
        mine = slice(int(ends.searchsorted(low, side="right")), int(starts.searchsorted(high)))
        starts, ends = starts[mine], ends[mine]
        first = layout.key_pages_of_rows(np.maximum(starts, low))
        counts = layout.key_pages_of_rows(np.minimum(ends, high) - 1) + 1 - first
        run = np.repeat(np.arange(starts.size), counts)
        pages = np.arange(run.size) - np.repeat(np.cumsum(counts) - counts, counts) + first[run]
        page_low, page_high = layout.rows_of_key_pages(pages)
        if wanted is not None and pages.size:
            base = int(pages[0])
            known = first_keys[base : int(pages.max()) + 2]
            before = np.append(np.searchsorted(wanted, hash_keys(known, table_id)), wanted.size)
            least = np.where(page_low >= starts[run], before[pages - base], 0)
            most = np.where(page_high < ends[run], before[pages - base + 1], wanted.size)
            hit = np.nonzero(least < most)[0]
            # A hash that is the first of its page is in that page, not in the one before.
            run, pages, page_low, page_high = run[hit], pages[hit], page_low[hit], page_high[hit]
        lows, highs = np.maximum(page_low, starts[run]), np.minimum(page_high, ends[run])
        blocks = pages // layout.key_pages
        cut = np.nonzero((lows[1:] != highs[:-1]) | (blocks[1:] != blocks[:-1]))[0] + 1
        begin, end = np.append(0, cut)[: lows.size or 0], np.append(cut, lows.size)[: lows.size or 0] - 1
        return cls(lows[begin], highs[end], pages[begin], pages[end] + 1)

    @classmethod
    def of_rows(cls, layout: SegmentLayout, rows: Int64s, low: int, high: int) -> _Spans:
        """Return those of ``rows``, in order, that are in [low, high)."""
        mine = rows[int(rows.searchsorted(low)) : int(rows.searchsorted(high))]
        pages = layout.key_pages_of_rows(mine)
        return cls(mine, mine + 1, pages, pages + 1)


def _joined(segment: Segment, group: int, layout: SegmentLayout, spans: Mapping[int, _Spans]) -> Iterator[_Reading]:
    """Yield neighboring key pages of a block as one reading, whatever tables they are of."""
    found = sorted(
        (first, last, place, low, high)
        for place, of_table in spans.items()
        for low, high, first, last in zip(*(column.tolist() for column in of_table), strict=True)
    )
    some: list[tuple[int, int, int, int, int]] = []
    end = -1
    for span in [*found, None]:
        if some and (span is None or span[0] > end or span[0] // layout.key_pages != some[0][0] // layout.key_pages):
            block, first = divmod(some[0][0], layout.key_pages)
            first_row = int(layout.rows_of_key_pages(np.array(some[0][0]))[0])
            rows: dict[int, list[Int64s]] = {}
            for _, _, place, low, high in some:
                rows.setdefault(place, []).append(np.arange(low, high))
            yield _Reading(
                segment, group, block, first, end - block * layout.key_pages, first_row,
                {place: np.concatenate(parts) for place, parts in rows.items()},
            )  # fmt: skip
            some, end = [], -1
        if span is not None:
            some.append(span)
            end = max(end, span[1])
