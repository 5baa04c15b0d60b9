"""All rows of one table in hash order, as they stand at the newest commit.

The rows of a table lie in runs, one for each live range of each segment, and each run is in hash order. A few runs
are merged as they are read; many short ones, which no memory could merge without reading their pieces again and
again, are sorted (``Spill``). Of several rows of a key, which settled segments leave, the newest is given: runs come
in the order of segments, and sorting keeps the order of equal keys.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.changed import CHANGED_BYTES, LastChanges
from tiercache.store.errors import CorruptStoreError
from tiercache.store.hashing import hash_keys
from tiercache.store.run import LastKeys, joined, runs_of
from tiercache.store.scratch_file import scratch_of
from tiercache.store.spill import Spill, part_rows
from tiercache.store.standing import undisturbed
from tiercache.store.sweep import whole_keys
from tiercache.store.table import find_table
from tiercache.store.vectors import from_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.run import Choice, Run
    from tiercache.store.segment import Segment
    from tiercache.store.spill import Rows
    from tiercache.store.standing import Standing
    from tiercache.store.store import Store
    from tiercache.store.table import Group, Table

    Chunk = tuple[NDArray[np.int64], tuple[NDArray[np.float32], ...]]
    """Keys (n,), and each field (n, width)."""

SCAN_BYTES = 256 << 20
CHUNK_BYTES = 4 << 20
_KEY_SHARE = 4


def live_rows(store: Store, table_name: str) -> int:
    """Return how many rows a table has at the newest commit; reads nothing. Raises ValueError for no table."""
    group, table = find_table(store.groups, table_name, store.label)
    standing = store.standing
    segments = standing.named
    runs = runs_of(store, standing, segments, group, table)
    return sum(run.left for run in runs) - stale_rows(standing, segments, group, table)


def scan(
    store: Store,
    table_name: str,
    *,
    chunk_rows: int | None = None,
    memory_bytes: int = SCAN_BYTES,
    scratch: Path | None = None,
) -> Iterator[Chunk]:
    """Yield all rows of a table at the newest commit in hash order: keys (n,), and each field (n, width).

    Chunks have at most ``chunk_rows`` rows (about 4 MiB where not said). Beside the caller's chunk at most
    ``memory_bytes`` are taken, or what four pieces and the keys of a block take. Every live piece is read once and
    its keys about once (at most a quarter of the rows' bytes more). Where a table lies in too many runs to merge
    them in that memory, its rows are written to a temporary file without a name in ``scratch`` (the store's folder
    where not said, or the system's where that cannot be written to) and read again, once for each factor of 256 by
    which they exceed it. A piece is read whole: where ranges are
    shorter than pieces, rows of the group's other tables are read with them. No commit may be made meanwhile.

    Raises ValueError for no table and without a commit, StoreFullError, CorruptStoreError, and StoreError for a commit.
    """
    standing = store.standing
    return scan_segments(
        store, standing.named, table_name,
        chunk_rows=chunk_rows, memory_bytes=memory_bytes, scratch=scratch, standing=standing,
    )  # fmt: skip


def scan_segments(
    store: Store,
    segments: Sequence[Segment],
    table_name: str,
    *,
    choice: Choice | None = None,
    alone: bool = True,
    chunk_rows: int | None = None,
    memory_bytes: int = SCAN_BYTES,
    scratch: Path | None = None,
    standing: Standing | None = None,
    as_words: bool = False,
    changed: bool = False,
) -> Iterator[Chunk]:
    """Do what ``scan`` does, with the newest of the commit's segments, or with the rows of a ``choice``.

    Of the segments, none may be left out that has a newer row of a key than one that is there. ``choice`` says of rows
    of a segment stream which are wanted; pieces without one are not read. Where it may have several of a key, not
    ``alone``, the newest of all must be one of them, and is given. ``standing`` is where the segments are from, the
    store's own where not said. ``as_words``: fields are given as they are kept, (n, words); then with ``changed`` the
    last one, (n, 1), has the last changes.
    """
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}: it must be at least 1")
    group, table = find_table(store.groups, table_name, store.label)
    standing = standing or store.standing
    if standing.commit is None:
        raise ValueError(f"{store.label} has no commit yet: publish one first")
    firsts = standing.commit.named
    last = (lambda: LastChanges(store, firsts)) if changed else None
    runs = runs_of(store, standing, segments, group, table, choice, last)
    chunks = _chunks(store, runs, table, chunk_rows or chunk_rows_of(table), memory_bytes, scratch)
    stale = 0 if choice is not None and alone else stale_rows(standing, segments, group, table)
    if stale:
        chunks = _newest(chunks, stale, f"table {table.name!r} of {store.label}", all_rows=choice is None)
    return _checked(store, table, as_words, undisturbed(store, standing, f"table {table.name!r} was scanned", chunks))


def chunk_rows_of(table: Table) -> int:
    """Return the rows of ``table`` that take about ``CHUNK_BYTES``."""
    return max(1, CHUNK_BYTES // given_bytes(table))


def given_bytes(table: Table) -> int:
    """Return the bytes of a row as callers get it: its key, and its numbers in float32 whatever their dtype is."""
    return 8 + 4 * sum(field.width for field in table.fields)


def stale_rows(standing: Standing, segments: Iterable[Segment], group: Group, table: Table) -> int:
    """Return how many rows of a table in ``segments`` are stale."""
    ids, place = {segment.id for segment in segments}, group.place(table.name)
    settled = () if standing.commit is None else standing.commit.settled
    return sum(one.stale_rows[group.index][place] for one in settled if one.segment_id in ids)


def _newest(chunks: Iterator[Rows], stale: int, label: str, *, all_rows: bool) -> Iterator[Rows]:
    """Yield the last of several rows of a key.

    Raises CorruptStoreError where more than ``stale`` others came, or fewer where these are ``all_rows``.
    """
    left = stale
    for keys, rows in whole_keys(chunks):
        last = np.append(keys[1:] != keys[:-1], True)
        left -= last.size - int(np.count_nonzero(last))
        if left < 0:
            raise CorruptStoreError(f"a key of {label} has two live rows: restore the store from a copy")
        yield keys[last], rows[last]
    if left and all_rows:
        raise CorruptStoreError(
            f"{label} has {left} stale rows of {stale} less than its commit says: restore the store from a copy"
        )


def _checked(store: Store, table: Table, as_words: bool, chunks: Iterator[Rows]) -> Iterator[Chunk]:
    """Cut rows into fields, and raise for a key with two live rows."""
    cuts = list(accumulate(field.words for field in table.fields))
    last: int | None = None
    for keys, rows in chunks:
        hashes = hash_keys(keys, table.table_id)
        if np.any(hashes[1:] <= hashes[:-1]) or (last is not None and int(hashes[0]) <= last):
            raise CorruptStoreError(
                f"a key of table {table.name!r} of {store.label} has two live rows: restore the store from a copy"
            )
        last = int(hashes[-1])
        ends = cuts if rows.shape[1] > cuts[-1] else cuts[:-1]
        fields = tuple(np.ascontiguousarray(part) for part in np.split(rows, ends, axis=1))
        yield keys, fields if as_words else from_words(table.fields, fields)


def _chunks(
    store: Store, runs: Sequence[Run], table: Table, chunk_rows: int, memory_bytes: int, scratch: Path | None
) -> Iterator[Rows]:
    """Merge or sort the runs, whichever reads less."""
    row_bytes = 4 * runs[0].words if runs else table.row_bytes
    most = part_rows(row_bytes, memory_bytes)
    if sum(run.left for run in runs) > most and _can_merge(runs, table, memory_bytes):
        yield from _merge(runs, table, chunk_rows, most)
        return
    copies = len({run.segment.id for run in runs})
    row = np.dtype(("<f4", (row_bytes // 4,)))
    with Spill(
        table, scratch or scratch_of(store), memory_bytes, store.counters,
        row=row, copies=copies, total_rows=sum(run.left for run in runs),
    ) as spill:  # fmt: skip
        step = max(1, most // 4)
        for run in joined(runs, LastKeys(store)):
            while run.left:
                spill.add(*run.read(step))
        yield from spill.sorted(chunk_rows)


def _can_merge(runs: Sequence[Run], table: Table, memory_bytes: int) -> bool:
    """Whether every run can have pieces and keys in memory, and blocks of keys are read about once."""
    beside = [8 if run.changed is None else 8 + CHANGED_BYTES for run in runs]
    held = sum(run.piece_bytes + size * min(run.left, run.block_rows) for run, size in zip(runs, beside, strict=True))
    key_bytes = sum(run.key_bytes for run in runs)
    useful = sum(run.left for run in runs) * (table.row_bytes + 8)
    return held <= memory_bytes // 4 and key_bytes <= useful // _KEY_SHARE + 8 * sum(run.left for run in runs)


def _merge(runs: Sequence[Run], table: Table, chunk_rows: int, most: int) -> Iterator[Rows]:
    """Merge runs: each holds a share of ``most`` rows, by its own, and what lies below the least end goes out."""
    total = sum(run.left for run in runs)
    held = [_Held(run, table, max(1, most * run.left // total)) for run in runs]
    while held:
        for one in held:
            one.fill()
        ends = [one.hashes[-1] for one in held if one.run.left]
        bound = min(ends) if ends else None
        parts = [one.take(bound) for one in held]
        held = [one for one in held if one.run.left or one.hashes.size]
        hashes, keys, rows = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        del parts
        order = np.argsort(hashes, kind="stable")
        for low in range(0, order.size, chunk_rows):
            chunk = order[low : low + chunk_rows]
            yield keys[chunk], rows[chunk]


class _Held:
    """The rows of a run that are in memory, of about ``share`` rows at most."""

    def __init__(self, run: Run, table: Table, share: int) -> None:
        self.run, self._table, self._share = run, table, share
        self.hashes: NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
        self._keys: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._rows: NDArray[np.float32] = np.empty((0, run.words), dtype=np.float32)

    def fill(self) -> None:
        """Read on where half of the share is free."""
        if not self.run.left or self.hashes.size > self._share // 2:
            return
        keys, rows = self.run.read(self._share - self.hashes.size)
        fresh = hash_keys(keys, self._table.table_id)
        hashes = np.concatenate([self.hashes, fresh])
        if np.any(hashes[1:] <= hashes[:-1]):
            raise CorruptStoreError(
                f"segment {self.run.segment.id} has keys of table {self._table.name!r} that are not in hash order: "
                "restore the store from a copy"
            )
        self.hashes = hashes
        self._keys, self._rows = np.concatenate([self._keys, keys]), np.concatenate([self._rows, rows])

    def take(self, bound: np.uint64 | None) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.float32]]:
        """Give away the rows with hashes up to ``bound``; None: all."""
        at = self.hashes.size if bound is None else int(np.searchsorted(self.hashes, bound, side="right"))
        taken = self.hashes[:at], self._keys[:at], self._rows[:at]
        self.hashes, self._keys, self._rows = self.hashes[at:], self._keys[at:], self._rows[at:]
        return taken
