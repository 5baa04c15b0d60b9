"""Finding rows by key, and reading rows by index."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from tiercache.store.bits import hash_keys
from tiercache.store.files import PAGE_BYTES, huge_pages
from tiercache.store.live_keys import KEY_THREADS, KeyMemory, Recall, live_keys
from tiercache.store.reading import BlockReader, Pages, read_ahead
from tiercache.store.row_codec import from_words, initial_rows
from tiercache.store.store_errors import KeyMissingError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.store.optimizer import Field
    from tiercache.store.segment import Segment
    from tiercache.store.snapshot import Snapshot
    from tiercache.store.table import Table

    Found = tuple[NDArray[np.int64], NDArray[np.int64]]
    Fields = dict[str, NDArray[np.float32]]
    LookupProgress = Callable[[str, int, int], None]
    _Columns = tuple[NDArray[np.float32], ...]
    Cached = Callable[[int, int, int], NDArray[np.uint8] | None]

MISSING = ("error", "initial", "zeros")
BATCH_BYTES = 4 << 20
"""Approximate size of a batch's pages. While its rows are copied, each of ``KEY_THREADS`` reads or holds another."""
_NO_BUFFER: NDArray[np.uint8] = np.empty(0, np.uint8)


def locate(
    reader: BlockReader,
    snapshot: Snapshot,
    table_name: str,
    keys: NDArray[np.int64],
    *,
    after: int,
    recall: Recall | None = None,
    progress: Callable[[int], None] | None = None,
) -> Found:
    """Return segments and rows of the keys of a table (see ``Store.locate``). Raises ValueError for an unknown table.

    All rows of retained segments count, since their next uses are passes of another schedule. ``recall`` is as for
    ``live_keys``. ``progress`` is called with the number of stored keys checked since the last call.
    """
    # The newest row of a key hides the stale one of a retained segment, even if its next use excludes it.
    least = -1 if snapshot.retained else after
    table, group, _ = snapshot.find(table_name, reader.label)
    search = _Search(table.table_id, keys)
    if group is None or not search.hashes.size:
        return search.segment_ids, search.rows
    place, newest_first = group.place(table_name), reversed(snapshot.segments)
    sought = {place: search.remaining}
    with ThreadPoolExecutor(KEY_THREADS) as readers:
        for segment, _, found, rows in live_keys(
            reader, snapshot, newest_first, group, sought, readers, after=least, recall=recall
        ):
            search.match(segment.id, found, rows)
            sought[place] = search.remaining
            if progress is not None:
                progress(found.size)
    if snapshot.retained or snapshot.has_tombstones:
        search.drop(snapshot.segments, snapshot.retained, group.index, after)
    return search.segment_ids, search.rows


class _Search:
    """A search for keys of one table: their hashes in order, and the rows found."""

    def __init__(self, table_id: int, keys: NDArray[np.int64]) -> None:
        hashes = hash_keys(np.asarray(keys, dtype=np.int64), table_id)
        self.table_id, self.order = table_id, np.argsort(hashes)
        self.hashes = self.remaining = hashes[self.order]
        """``remaining`` are those not found yet."""
        self._shift = np.uint64(64 - min(24, 4 + keys.size.bit_length()))
        self._prefixes = np.zeros(1 << 64 - int(self._shift), dtype=np.bool_)
        self._prefixes[self.hashes >> self._shift] = True
        self.segment_ids = np.full(hashes.size, -1, dtype=np.int64)
        self.rows = np.full(hashes.size, -1, dtype=np.int64)
        self._is_missing = np.ones(hashes.size, dtype=np.bool_)
        """By ``hashes``."""

    def match(self, segment_id: int, stored: NDArray[np.int64], first_rows: NDArray[np.int64]) -> None:
        """Note the ``stored`` keys that match and were not found before; ``first_rows`` are their rows."""
        hashes = hash_keys(stored, self.table_id)
        likely = np.nonzero(self._prefixes[hashes >> self._shift])[0]  # a search for each costs ten times as much
        hashes = hashes[likely]
        at = np.searchsorted(self.hashes, hashes)
        at[at == self.hashes.size] = 0
        found = (self.hashes[at] == hashes) & self._is_missing[at]
        if not np.any(found):
            return
        places, hit = self.order[at[found]], likely[found]
        self.segment_ids[places] = segment_id
        self.rows[places] = first_rows[hit]
        self._is_missing[at[found]] = False
        self.remaining = self.hashes[self._is_missing]

    def drop(self, segments: Iterable[Segment], retained: Collection[int], group: int, after: int) -> None:
        """Forget rows whose next use is ``after`` or before; in retained segments next uses do not count."""
        for segment in segments:
            selected = np.nonzero(self.segment_ids == segment.id)[0]
            if selected.size and segment.id not in retained:
                layout = segment.layouts[group]
                ranges = np.searchsorted(layout.first_row_R, self.rows[selected], side="right") - 1
                dropped = selected[layout.next_use_R[ranges] <= after]
                self.segment_ids[dropped] = self.rows[dropped] = -1
            if segment.tombstone:
                self.segment_ids[selected] = self.rows[selected] = -1


def read_rows(
    reader: BlockReader, segment: Segment, group: int, rows: NDArray[np.int64], cached: Cached | None = None
) -> _Columns:
    """Return rows of a layout by index, field by field (see ``Store.read_rows``)."""
    layout, fields = segment.layouts[group], segment.groups[group].fields
    rows = np.asarray(rows, dtype=np.int64)
    if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < layout.rows:
        raise ValueError(f"rows {rows.min()} to {rows.max()} are not all in segment {segment.id} of {layout.rows} rows")
    return from_words(fields, _read(reader, group, fields, [(segment, np.arange(rows.size))], rows, cached))


def read_found(
    reader: BlockReader,
    snapshot: Snapshot,
    group: int,
    segment_ids: NDArray[np.int64],
    rows: NDArray[np.int64],
    *,
    progress: Callable[[int], None] | None = None,
) -> _Columns:
    """Return the words of rows that ``locate`` found in ``snapshot``, field by field: zeros if it found none.

    As ``read_rows`` for each segment, but one segment is read while rows of the previous one are copied. ``progress``
    is called with the number of rows read since the last call. Raises StoreError if the snapshot lacks a segment.
    """
    present = set(np.unique(segment_ids).tolist())
    segments = [segment for segment in snapshot.segments if segment.id in present]
    parts = [(segment, np.nonzero(segment_ids == segment.id)[0]) for segment in segments]
    if sum(places.size for _, places in parts) < np.count_nonzero(segment_ids >= 0):
        missing = np.setdiff1d(segment_ids[segment_ids >= 0], [segment.id for segment in snapshot.segments])
        raise StoreError(
            f"{reader.label} no longer has segment {missing[0]}, where rows were found: locate them again, or do "
            "both with a store that was opened with mode='r', which stays at its commit"
        )
    return _read(reader, group, snapshot.groups[group].fields, parts, rows, None, progress)


def _read(
    reader: BlockReader,
    group: int,
    fields: Sequence[Field],
    parts: Sequence[tuple[Segment, NDArray[np.int64]]],
    rows: NDArray[np.int64],
    cached: Cached | None,
    progress: Callable[[int], None] | None = None,
) -> _Columns:
    """Return (n, words) of each field; ``parts`` are segments and the indices of their ``rows`` (n,)."""
    out = tuple(np.zeros((rows.size, field.words), dtype=np.float32) for field in fields)
    buffers: deque[NDArray[np.uint8]] = deque()
    batches = (batch for segment, places in parts for batch in _batches(segment, group, places, rows, cached, buffers))
    with ThreadPoolExecutor(KEY_THREADS) as readers:
        for (batch,), _ in read_ahead(readers, lambda one: reader.load(one.pages, 1), batches, most=KEY_THREADS):
            data = batch.buffer.view(np.float32)
            start, page_rows = batch.starts[batch.which] // 4, batch.page_rows[batch.which]
            for field, values in zip(fields, out, strict=True):
                values[batch.places] = sliding_window_view(data, field.words)[start + batch.local * field.words]
                start = start + page_rows * field.words
            buffers.append(batch.buffer)
            if progress is not None:
                progress(batch.places.size)
    return out


class _Batch(NamedTuple):
    """Pages to read, each at its offset in the file's page, so that reads can bypass the page cache."""

    places: NDArray[np.int64]
    """(n,): the indices of its rows in the result."""
    which: NDArray[np.int64]
    """(n,): the index of each row's page."""
    local: NDArray[np.int64]
    """(n,): the row of each in its page."""
    starts: NDArray[np.int64]
    """(pages,): the byte of ``buffer`` at which each page begins."""
    page_rows: NDArray[np.int64]
    """(pages,): rows of each page."""
    buffer: NDArray[np.uint8]
    pages: list[Pages]
    """The pages to read into it."""


def _batches(
    segment: Segment,
    group: int,
    places: NDArray[np.int64],
    rows: NDArray[np.int64],
    cached: Cached | None,
    buffers: deque[NDArray[np.uint8]],
) -> Iterator[tuple[_Batch]]:
    """Cut rows in their order into batches whose pages take about ``BATCH_BYTES``; a page is never cut."""
    layout = segment.layouts[group]
    all_places = places[np.argsort(rows[places], kind="stable")]
    all_pages = layout.pages_of_rows(rows[all_places])
    most = max(1, BATCH_BYTES // (layout.page_rows * layout.row_bytes))
    begun = np.nonzero(np.diff(all_pages, prepend=-1))[0]
    for low, high in pairwise([*begun[::most].tolist(), all_pages.size]):
        places = all_places[low:high]
        pages, which = np.unique(all_pages[low:high], return_inverse=True)
        begin_rows, end_rows = layout.rows_of_pages(pages), layout.rows_of_pages(pages + 1)
        blocks = begin_rows // layout.block_rows
        cached_pages = [None if cached is None else cached(segment.id, group, page) for page in pages.tolist()]
        fresh = np.array([data is None for data in cached_pages], dtype=bool)
        # A run is read at once: uncached neighbors in one block; each cached page is a run by itself.
        cuts = (np.diff(pages) > 1) | (np.diff(blocks) > 0) | ~(fresh[1:] & fresh[:-1])
        first = np.append(0, np.nonzero(cuts)[0] + 1)
        last = np.append(first[1:], pages.size)
        begins, ends = begin_rows[first] * layout.row_bytes, end_rows[last - 1] * layout.row_bytes
        inside = (begins - blocks[first] * layout.block_rows * layout.row_bytes) % PAGE_BYTES
        sizes = -(-(inside + ends - begins) // PAGE_BYTES) * PAGE_BYTES
        at = np.cumsum(sizes) - sizes + inside
        starts = np.repeat(at - begins, last - first) + begin_rows * layout.row_bytes
        buffer = buffers.popleft() if buffers else _NO_BUFFER
        if buffer.size < sizes.sum():
            buffer = huge_pages(int(sizes.sum()))
        runs = zip(*(one.tolist() for one in (first, last, at, ends - begins)), strict=True)
        to_read = [
            Pages(segment, group, int(pages[a]), int(pages[b - 1]) + 1, buffer[begin : begin + size])
            for a, b, begin, size in runs
            if fresh[a]
        ]
        for data, begin in zip(cached_pages, starts.tolist(), strict=True):
            if data is not None:
                buffer[begin : begin + data.nbytes] = data.view(np.uint8)
        local = rows[places] - begin_rows[which]
        yield (_Batch(places, which, local, starts, end_rows - begin_rows, buffer, to_read),)


def lookup(
    reader: BlockReader,
    snapshot: Snapshot,
    table_name: str,
    keys: NDArray[np.int64],
    *,
    missing: str = "error",
    memory: KeyMemory | None = None,
    progress: LookupProgress | None = None,
) -> Fields:
    """Return the fields of the rows of ``keys`` (see ``Store.lookup``); ``memory`` caches keys by the store's path.

    ``progress(what, done, total)`` is called with "keys" and the stored keys that were checked, then with "rows" and
    the rows that were read.
    """
    if missing not in MISSING:
        raise ValueError(f"missing={missing!r} is unknown: expected one of {', '.join(map(repr, MISSING))}")
    table, group, before = stored = snapshot.find(table_name, reader.label)
    keys = check_keys(keys)
    distinct, which = np.unique(keys, return_inverse=True)
    twice = distinct.size < keys.size
    keys = distinct if twice else keys
    recall = None
    if memory is not None and reader.folder is not None:
        recall = Recall(memory, reader.folder, {segment.id for segment in snapshot.segments})
    count_keys = count_rows = None
    if progress is not None:
        rows_in = 0 if group is None else snapshot.rows_in(snapshot.segments, group, table)
        count_keys = _counted("keys", rows_in, progress)
    with closing(recall) if recall else nullcontext():
        ids, rows = locate(reader, snapshot, table.name, keys, after=-1, recall=recall, progress=count_keys)
    if count_keys is not None:
        count_keys(None)  # the other pages cannot have the keys
    absent = np.nonzero(ids < 0)[0]
    if absent.size and missing == "error":
        raise missing_keys(table, np.sort(keys[absent]), keys.size, reader.label)
    if progress is not None:
        count_rows = _counted("rows", keys.size - absent.size, progress)
    if group is None:  # no segment has rows of it
        fields = tuple(np.zeros((keys.size, field.width), np.float32) for field in table.fields)
    else:
        words = read_found(reader, snapshot, group.index, ids, rows, progress=count_rows)
        if before:
            cuts, found = np.cumsum([field.words for field in table.fields])[:-1], ids >= 0
            whole = np.zeros((keys.size, table.row_bytes // 4), np.float32)
            whole[found] = stored.rows(keys[found], np.concatenate(words, axis=1)[found])
            words = tuple(np.split(whole, cuts, axis=1))
        fields = from_words(table.fields, words)
    firsts = initial_rows(table, keys[absent]) if missing == "initial" else [np.float32(0)] * len(fields)
    for values, first in zip(fields, firsts, strict=True):
        values[absent] = first
    named = zip(table.fields, fields, strict=True)
    return {field.name: values[which] if twice else values for field, values in named}


def check_keys(keys: Any) -> NDArray[np.int64]:
    """Return keys to look up as int64; an empty list has none. Raises ValueError for invalid keys."""
    if np.ma.is_masked(keys):
        raise ValueError("keys have masked values: leave them out with keys.compressed()")
    if isinstance(keys, list | tuple) and not keys:
        return np.empty(0, np.int64)
    found: NDArray[Any] = np.asarray(keys)
    if found.dtype.kind not in "iu" or found.ndim != 1:
        raise ValueError(f"keys are {found.ndim}-dimensional {found.dtype}: expected a flat array of integers")
    if found.dtype.kind == "u" and found.size and int(found.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"key {found.max()} does not fit in int64: pass keys of at most 2**63 - 1")
    return found.astype(np.int64, copy=False)


def missing_keys(table: Table, gone: NDArray[np.int64], asked: int, label: str) -> KeyMissingError:
    """Return the error for keys, ascending, that have no row."""
    shown = ", ".join(map(str, gone[:3].tolist())) + (", ..." if gone.size > 3 else "")
    return KeyMissingError(
        f"{gone.size:,} of {asked:,} keys have no row in table {table.name!r} of {label} ({shown}): leave them out, or "
        "pass missing='initial' or missing='zeros'",
        table=table.name,
        keys=gone,
    )


def _counted(what: str, total: int, progress: LookupProgress) -> Callable[[int | None], None]:
    """Return a callback that turns increments into a running total; None means "the rest"."""
    done = 0

    def tell(rows: int | None) -> None:
        nonlocal done
        remaining_rows = total - done
        done += remaining_rows if rows is None else rows
        if rows is not None or remaining_rows or not total:
            progress(what, done, total)

    return tell
