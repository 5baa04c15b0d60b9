"""Finding rows by key, and reading rows from anywhere in a segment stream."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.hashing import hash_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from tiercache.store.segment import Segment
    from tiercache.store.store import Store
    from tiercache.store.stream import Stream
    from tiercache.store.table import Group

    Found = tuple[NDArray[np.int64], NDArray[np.int64]]
    Cached = Callable[[int, int, int], NDArray[np.uint8] | None]

BATCH_BYTES = 16 << 20


def locate(store: Store, keys: Mapping[str, NDArray[np.int64]], *, after: int) -> dict[str, Found]:
    """Return segment ids and rows of the keys of each table (see ``Store.locate``). Raises KeyError for no table."""
    groups = {table.name: group for group in store.groups for table in group.tables}
    wanted = {name: _Wanted(groups[name], name, values) for name, values in keys.items()}
    for group in store.groups:
        tables = {group.place(name): w for name, w in wanted.items() if groups[name] is group and w.hashes.size}
        if tables:
            for segment in store.segments:  # by id, so that the newest of several rows is seen last
                _sweep(store, segment, group, tables, after)
    return {name: (w.segment_ids, w.rows) for name, w in wanted.items()}


class _Wanted:
    """The keys that a lookup wants of one table, in hash order, and what was found of them."""

    def __init__(self, group: Group, name: str, keys: NDArray[np.int64]) -> None:
        hashes = hash_keys(np.asarray(keys, dtype=np.int64), group.tables[group.place(name)].table_id)
        self.table_id = group.tables[group.place(name)].table_id
        self.order = np.argsort(hashes)
        self.hashes = hashes[self.order]
        self.segment_ids = np.full(hashes.size, -1, dtype=np.int64)
        self.rows = np.full(hashes.size, -1, dtype=np.int64)

    def match(self, segment_id: int, stored: NDArray[np.int64], first_rows: NDArray[np.int64]) -> None:
        """Note where ``stored`` keys are wanted; ``first_rows`` are their rows."""
        hashes = hash_keys(stored, self.table_id)
        at = np.searchsorted(self.hashes, hashes)
        at[at == self.hashes.size] = 0
        hit = np.nonzero(self.hashes[at] == hashes)[0]
        places = self.order[at[hit]]
        self.segment_ids[places] = segment_id
        self.rows[places] = first_rows[hit]


def _sweep(store: Store, segment: Segment, group: Group, tables: Mapping[int, _Wanted], after: int) -> None:
    """Compare the keys of all ranges of a segment stream with next use after ``after``, block by block."""
    stream = segment.streams[group.index]
    live = store.first_range(segment, group.index)
    runs = {place: _runs(stream, live, place, after) for place in tables}
    if not any(starts.size for starts, _ in runs.values()):
        return
    for block in range(stream.num_blocks):
        low, high = int(stream.block_first_row_B[block]), int(stream.block_first_row_B[block + 1])
        keys: NDArray[np.int64] | None = None
        for place, (starts, ends) in runs.items():
            first, last = np.searchsorted(ends, low, side="right"), np.searchsorted(starts, high)
            if first >= last:
                continue
            if keys is None:
                keys = store.read_keys(segment, group.index, block)
            rows = np.concatenate(
                [
                    np.arange(max(a, low), min(b, high))
                    for a, b in zip(starts[first:last].tolist(), ends[first:last].tolist(), strict=True)
                ]
            )
            tables[place].match(segment.id, keys[rows - low], rows)


def _runs(stream: Stream, live: int, place: int, after: int) -> Found:
    """Return first rows and last rows + 1 of one table in ranges from ``live`` on with next use after ``after``."""
    starts, ends = [], []
    for rows, first in zip(stream.ranges[live:], stream.range_first_row_R[live:].tolist(), strict=False):
        if rows.next_use > after and rows.table_rows[place]:
            starts.append(first + sum(rows.table_rows[:place]))
            ends.append(starts[-1] + rows.table_rows[place])
    return np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)


def read_rows(
    store: Store, segment: Segment, group: int, rows: NDArray[np.int64], cached: Cached | None
) -> tuple[NDArray[np.float32], ...]:
    """Return rows of a segment stream by index, field by field (see ``Store.read_rows``)."""
    stream, fields = segment.streams[group], store.groups[group].fields
    rows = np.asarray(rows, dtype=np.int64)
    if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < stream.rows:
        raise ValueError(f"rows {rows.min()} to {rows.max()} are not all in segment {segment.id} of {stream.rows} rows")
    out = tuple(np.empty((rows.size, field.width), dtype=np.float32) for field in fields)
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    pieces = np.searchsorted(stream.piece_first_row_P, ordered, side="right") - 1
    for first, last in _batches(stream, pieces):
        wanted, which = np.unique(pieces[first:last], return_inverse=True)
        data, base = _read_pieces(store, segment, group, wanted, cached)
        local = ordered[first:last] - stream.piece_first_row_P[wanted[which]]
        start, piece_rows = base[which], stream.piece_rows_P[wanted[which]]
        for field, values in zip(fields, out, strict=True):
            at = (start + local * field.width)[:, None] + np.arange(field.width)
            values[order[first:last]] = data[at]
            start = start + piece_rows * field.width
    return out


def _batches(stream: Stream, pieces: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Cut places with rising ``pieces`` into runs whose pieces take about ``BATCH_BYTES``; a piece is never cut."""
    most = max(1, BATCH_BYTES // (stream.piece_rows * stream.row_bytes))
    fresh = np.nonzero(np.diff(pieces, prepend=-1))[0]
    starts = [*fresh[::most].tolist(), pieces.size]
    yield from pairwise(starts)


def _read_pieces(
    store: Store, segment: Segment, group: int, pieces: NDArray[np.int64], cached: Cached | None
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the numbers of ``pieces``, and where each begins among them."""
    offset = segment.streams[group].piece_offset_P
    sizes = offset[pieces + 1] - offset[pieces]
    ends = np.cumsum(sizes)
    starts = ends - sizes
    data = np.empty(int(ends[-1]), dtype=np.uint8)
    missing = np.ones(pieces.size, dtype=bool)
    if cached is not None:
        for i, piece in enumerate(pieces.tolist()):
            held = cached(segment.id, group, piece)
            if held is not None:
                data[starts[i] : ends[i]] = held.view(np.uint8)
                missing[i] = False
    places = np.nonzero(missing)[0]
    cuts = np.nonzero(np.diff(pieces[places]) > 1)[0] + 1
    for run in np.split(places, cuts):
        if run.size:
            low, high = int(run[0]), int(run[-1])
            store.read(segment, group, int(pieces[low]), int(pieces[high]) + 1, data[starts[low] : ends[high]])
    return data.view(np.float32), starts // 4
