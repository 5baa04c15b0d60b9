"""All rows of one table in hash order, as they stand at the newest commit.

The rows of a table lie in runs, one for each live range of each segment, and each run is in hash order. A few runs
are merged as they are read; many short ones, which no memory could merge without reading their pages again and
again, are sorted (``ExternalSorter``). Of several rows of a key, which retained segments leave, the newest is given:
runs come in the order of segments, and sorting keeps the order of equal keys.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.bits import hash_keys, keys_of
from tiercache.store.external_sort import ExternalSorter, part_rows
from tiercache.store.layout import CHANGED_BYTES
from tiercache.store.row_codec import from_words
from tiercache.store.runs import (
    FORGOTTEN,
    LastKeys,
    SortedCursor,
    VersionReader,
    join_runs,
    merged,
    rising,
    runs_of,
    whole_keys,
)
from tiercache.store.store_errors import CorruptStoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.reading import BlockReader
    from tiercache.store.runs import RowFilter, Rows, SortedRun
    from tiercache.store.segment import Segment
    from tiercache.store.snapshot import Snapshot
    from tiercache.store.stored_table import StoredTable
    from tiercache.store.table import Table

    Chunk = tuple[NDArray[np.int64], tuple[NDArray[np.float32], ...]]
    """Keys (n,), and each field (n, width)."""

SCAN_BYTES = 256 << 20
SCAN_CHUNK_BYTES = 4 << 20
_KEY_FRACTION = 4


def scan_segments(
    reader: BlockReader,
    snapshot: Snapshot,
    segments: Sequence[Segment],
    table_name: str,
    *,
    choice: RowFilter | None = None,
    alone: bool = True,
    hashes: tuple[int, int] | None = None,
    chunk_rows: int | None = None,
    memory_bytes: int = SCAN_BYTES,
    scratch: Path | None = None,
    as_words: bool = False,
    changed: bool = False,
) -> Iterator[Chunk]:
    """Yield all rows of a table in segments of a snapshot in hash order: keys (n,), and each field (n, width).

    Chunks have at most ``chunk_rows`` rows (about 4 MiB where not said). Beside the caller's chunk at most
    ``memory_bytes`` are taken, or what four pages and the keys of a block take. Every live page is read once and
    its keys about once (at most a quarter of the rows' bytes more). Where a table lies in too many runs to merge
    them in that memory, its rows are written to a temporary file without a name in ``scratch`` (the store's folder
    where not said, or the system's where that cannot be written to) and read again, once for each factor of 256 by
    which they exceed it. A page is read whole: where ranges are shorter than pages, rows of the group's other tables
    are read with them.

    Of the segments, none may be left out that has a newer row of a key than one that is there. ``choice`` says of rows
    of a layout which are wanted; pages without one are not read. Where it may have several of a key, not
    ``alone``, the newest of all must be one of them, and is given. ``as_words``: fields are given as they are kept,
    (n, words); then with ``changed`` the last one, (n, 1), has the last changes. ``hashes``: only rows whose hash is at
    least the first and below the second; pages at either end of a run are then read for the rows on both sides.

    Raises ValueError for no table and without a commit, StoreFullError and CorruptStoreError.
    """
    stored = check_scan(reader, snapshot, table_name, chunk_rows)
    table, group = stored.table, stored.group
    if group is None:
        return iter(())
    firsts = {} if snapshot.commit is None else snapshot.commit.named
    forgotten = any(segment.tombstone for segment in segments)
    last = (lambda: VersionReader(reader, firsts)) if changed or forgotten else None
    runs = runs_of(reader, snapshot, segments, group, table, choice, last, hashes)
    chunks = _chunks(reader, runs, table, chunk_rows or chunk_rows_of(table), memory_bytes, scratch)
    label = f"table {table.name!r} of {reader.label}"
    stale = 0 if choice is not None and alone else snapshot.stale_rows(segments, group, table)
    if stale or forgotten:
        chunks = _newest(chunks, stale, label, all_rows=choice is None and hashes is None)
    if forgotten:
        chunks = _with_rows(chunks, changed=changed)
    return _checked(table, label, as_words, ((keys, stored.rows(keys, rows)) for keys, rows in chunks))


def check_scan(reader: BlockReader, snapshot: Snapshot, name: str, chunk_rows: int | None) -> StoredTable:
    """Return the table that is to be scanned. Raises ValueError if it cannot be."""
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}: it must be at least 1")
    found = snapshot.find(name, reader.label)
    if snapshot.commit is None:
        raise ValueError(f"{reader.label} has no commit yet: publish one first")
    return found


def chunk_rows_of(table: Table) -> int:
    """Return the rows of ``table`` that take about ``SCAN_CHUNK_BYTES``."""
    return max(1, SCAN_CHUNK_BYTES // output_row_bytes(table))


def output_row_bytes(table: Table) -> int:
    """Return the bytes of a row as callers get it: its key, and its numbers in float32 whatever their dtype is."""
    return 8 + 4 * sum(field.width for field in table.fields)


def _newest(chunks: Iterator[Rows], stale: int, label: str, *, all_rows: bool) -> Iterator[Rows]:
    """Yield the last of several rows of a key.

    Raises CorruptStoreError where more than ``stale`` others came, or fewer where these are ``all_rows``.
    """
    remaining = stale
    for keys, rows in whole_keys(chunks):
        last = np.append(keys[1:] != keys[:-1], True)
        remaining -= last.size - int(np.count_nonzero(last))
        if remaining < 0:
            raise CorruptStoreError(f"a key of {label} has two live rows: restore the store from a copy")
        yield keys[last], rows[last]
    if remaining and all_rows:
        raise CorruptStoreError(
            f"{label} has {remaining} stale rows of {stale} less than its commit says: restore the store from a copy"
        )


def _with_rows(chunks: Iterator[Rows], *, changed: bool) -> Iterator[Rows]:
    """Yield the keys that were not forgotten; with their last changes if ``changed``."""
    for keys, rows in chunks:
        have = rows[:, -1].view(np.uint32) != FORGOTTEN
        if np.any(have):
            yield keys[have], rows[have] if changed else rows[have, :-1]


def _checked(table: Table, label: str, as_words: bool, chunks: Iterator[Rows]) -> Iterator[Chunk]:
    """Cut rows into fields, and raise for a key with two live rows."""
    cuts = list(accumulate(field.words for field in table.fields))
    last: int | None = None
    for keys, rows in chunks:
        hashes = hash_keys(keys, table.table_id)
        if not rising(hashes, last):
            raise CorruptStoreError(f"a key of {label} has two live rows: restore the store from a copy")
        last = int(hashes[-1])
        ends = cuts if rows.shape[1] > cuts[-1] else cuts[:-1]
        fields = tuple(np.ascontiguousarray(part) for part in np.split(rows, ends, axis=1))
        yield keys, fields if as_words else from_words(table.fields, fields)


def _chunks(
    reader: BlockReader,
    runs: Sequence[SortedRun],
    table: Table,
    chunk_rows: int,
    memory_bytes: int,
    scratch: Path | None,
) -> Iterator[Rows]:
    """Merge or sort the runs, whichever reads less."""
    row_bytes = 4 * runs[0].words if runs else table.row_bytes
    most = part_rows(row_bytes, memory_bytes)
    if sum(run.remaining for run in runs) > most and _can_merge(runs, table, memory_bytes):
        yield from _merge(runs, table, chunk_rows, most)
        return
    copies = len({run.segment.id for run in runs})
    folder = scratch or reader.scratch
    with ExternalSorter(
        [("<f4", (row_bytes // 4,))], folder, f"sorting the rows of table {table.name!r} in {folder}", memory_bytes,
        reader.counters, copies=copies, total_rows=sum(run.remaining for run in runs),
    ) as sorter:  # fmt: skip
        step = max(1, most // 4)
        for run in join_runs(runs, LastKeys(reader)):
            while run.remaining:
                keys, rows = run.read(step)
                sorter.add(hash_keys(keys, table.table_id), rows)
        yield from ((keys_of(hashes, table.table_id), rows) for hashes, rows in sorter.sorted(chunk_rows))


def _can_merge(runs: Sequence[SortedRun], table: Table, memory_bytes: int) -> bool:
    """Whether every run can have pages and keys in memory, and blocks of keys are read about once."""
    key_row_bytes = [8 if run.changed is None else 8 + CHANGED_BYTES for run in runs]
    buffered_bytes = sum(
        run.page_bytes + size * min(run.remaining, run.block_rows)
        for run, size in zip(runs, key_row_bytes, strict=True)
    )
    key_bytes = sum(run.key_bytes for run in runs)
    useful = sum(run.remaining for run in runs) * (table.row_bytes + 8)
    return buffered_bytes <= memory_bytes // 4 and key_bytes <= useful // _KEY_FRACTION + 8 * sum(
        run.remaining for run in runs
    )


def _merge(runs: Sequence[SortedRun], table: Table, chunk_rows: int, most: int) -> Iterator[Rows]:
    """Merge runs: each holds a share of ``most`` rows, by its own, and is read on where half of it is free."""
    total = sum(run.remaining for run in runs)
    halves = [max(1, most * run.remaining // total) // 2 for run in runs]
    cursors = [
        SortedCursor(_parts(run, table, max(1, half)), np.int64, (np.float32, (run.words,)), least=half)
        for run, half in zip(runs, halves, strict=True)
    ]
    for parts in merged(*cursors):
        hashes, keys, rows = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        del parts
        order = np.argsort(hashes, kind="stable")
        for low in range(0, order.size, chunk_rows):
            chunk = order[low : low + chunk_rows]
            yield keys[chunk], rows[chunk]


def _parts(run: SortedRun, table: Table, part_rows: int) -> Iterator[tuple[NDArray[Any], ...]]:
    """Yield hashes, keys and rows of a run, about ``part_rows`` at a time. Raises CorruptStoreError for no order."""
    last: int | None = None
    while run.remaining:
        keys, rows = run.read(part_rows)
        hashes = hash_keys(keys, table.table_id)
        if not rising(hashes, last):
            raise CorruptStoreError(
                f"segment {run.segment.id} has keys of table {table.name!r} that are not in hash order: "
                "restore the store from a copy"
            )
        last = int(hashes[-1])
        yield hashes, keys, rows
