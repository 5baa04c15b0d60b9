"""Rows changed since a commit, for serving, and the difference between two commits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tiercache.store.bits import hash_keys
from tiercache.store.external_sort import ExternalSorter, SortedCursor, hashed, merged
from tiercache.store.lookup import read_rows
from tiercache.store.scan import SCAN_BYTES, VersionReader, output_row_bytes, runs_of, scan_segments
from tiercache.store.store_errors import CommitMissingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tiercache.store.reading import BlockReader
    from tiercache.store.scan import Chunk, RowFilter, SortedRun
    from tiercache.store.segment import Segment
    from tiercache.store.snapshot import Snapshot
    from tiercache.store.table import Group, Table


_CHUNK_BYTES = 16 << 20
_COUNT_BYTES = 64 << 20


def changes(
    reader: BlockReader, snapshot: Snapshot, table_name: str, since: int, *, in_order: bool = False,
    memory_bytes: int = SCAN_BYTES,
) -> Iterator[Chunk]:  # fmt: skip
    """Yield keys and rows that changed after commit ``since`` (see ``Store.changes``).

    ``in_order``: in hash order, as ``scan_segments``, with the same memory. Last changes of moved rows are read only
    for blocks that have both changed and unchanged rows.
    """
    stored = snapshot.find(table_name, reader.label)
    table, group = stored.table, stored.group
    changed, choice = _changed(reader, snapshot, group, since)
    if group is None:
        return
    rows = max(1, _CHUNK_BYTES // output_row_bytes(table))
    if in_order or stored.before or snapshot.has_tombstones or snapshot.stale_rows(changed, group, table):
        # A moved row keeps its last change and a newer one has a greater: if an older copy is chosen, so is the newer.
        chunks = scan_segments(
            reader, snapshot, changed, table_name,
            choice=choice, alone=False, chunk_rows=rows, memory_bytes=memory_bytes,
        )  # fmt: skip
    else:
        chunks = _unordered(reader, runs_of(reader, snapshot, changed, group, table), group, choice, rows)
    yield from chunks


def changed_rows(reader: BlockReader, snapshot: Snapshot, table_name: str, since: int) -> int:
    """Return how many rows of a table ``changes`` yields; reads no rows. Raises the same errors.

    Reads last changes of moved rows as ``changes`` does, and keys if some rows are stale.
    """
    stored = snapshot.find(table_name, reader.label)
    table, group = stored.table, stored.group
    changed, choice = _changed(reader, snapshot, group, since)
    if group is None:
        return 0
    stale = snapshot.stale_rows(changed, group, table)
    if choice is None:
        return snapshot.living_rows(changed, group, table)
    if snapshot.has_tombstones:
        return sum(keys.size for keys, _ in changes(reader, snapshot, table_name, since))
    runs = runs_of(reader, snapshot, changed, group, table, choice)
    return _count_keys(reader, runs, group, table, choice) if stale else sum(run.remaining for run in runs)


def may_have_forgotten(snapshot: Snapshot, table_name: str, since: int, label: str) -> bool:
    """Return True if rows of a table may have been forgotten after commit ``since``, which ``changes`` does not list.

    Tombstones tell. A rewrite leaves them out with the rows, and only its number is kept.
    """
    commit, stored = snapshot.commit, snapshot.find(table_name, label)
    if commit is None or since < 0 or commit.forgot > since or stored.group is None:
        return commit is not None and 0 <= since < commit.forgot
    new = [one for one in snapshot.committed if one.tombstone and commit.named[one.id] > since]
    return snapshot.rows_in(new, stored.group, stored.table) > 0


def _count_keys(reader: BlockReader, runs: Iterable[SortedRun], group: Group, table: Table, choice: RowFilter) -> int:
    """Return how many keys the chosen rows of runs have."""
    what = f"counting the changed keys of table {table.name!r}"
    with ExternalSorter([], reader.scratch, what, _COUNT_BYTES, reader.counters) as sorter:
        for run in runs:
            for block, low, high in run.blocks():
                chosen = choice(run.segment, group.index, low, high)
                if np.any(chosen):
                    keys = reader.keys(run.segment, group.index, block)
                    start = block * run.block_rows
                    sorter.add(hash_keys(keys[low - start : high - start][chosen], table.table_id))
        return sum(1 + int(np.count_nonzero(hashes[1:] != hashes[:-1])) for (hashes,) in sorter.sorted())


def _changed(
    reader: BlockReader, snapshot: Snapshot, group: Group | None, since: int
) -> tuple[list[Segment], RowFilter | None]:
    """Return the segments with rows of a group that changed after commit ``since``, and which rows did; None: all."""
    commit, segments = snapshot.commit, snapshot.segments
    newest = -1 if commit is None else commit.id
    if len(segments) > len(snapshot.committed):
        raise ValueError(f"{reader.label} has rows that no commit names: publish or discard them first")
    if not -1 <= since <= newest:
        raise CommitMissingError(
            f"{reader.label} is at commit {newest} and has no changes since {since}: pass -1 to {newest}"
        )
    if commit is None:
        return [], None
    for first, last in commit.abandoned:
        if first <= since <= last:
            raise CommitMissingError(
                f"commit {since} of {reader.label} was dropped by a rollback to commit {first - 1}: "
                f"pass {first - 1}, or get all rows with -1"
            )
    changed: list[Segment] = []
    changes, choice = VersionReader(reader, commit.named), None
    for segment in segments:
        if group is None:
            break
        blocks = range(snapshot.first_block(segment, group.index), segment.layouts[group.index].num_blocks)
        bounds = [changes.bounds(segment, group.index, block) for block in blocks]
        if any(newest > since for _, newest in bounds):
            changed.append(segment)
            if any(oldest <= since for oldest, _ in bounds):
                choice = changes.after(since)
    return changed, choice


def _unordered(
    reader: BlockReader, runs: Iterable[SortedRun], group: Group, choice: RowFilter | None, step: int
) -> Iterator[Chunk]:
    """Yield the chosen rows of runs, at most ``step`` at a time, never beyond a block."""
    for run in runs:
        for block, low, high in run.blocks(step):
            rows = np.arange(low, high)
            if choice is not None:
                rows = rows[choice(run.segment, group.index, low, high)]
            if rows.size:
                keys = reader.keys(run.segment, group.index, block)[rows - block * run.block_rows]
                yield keys, read_rows(reader, run.segment, group.index, rows)


_EXAMPLES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Counts of differing rows in one table; vectors and optimizer state are compared bit for bit."""

    table: str
    only_first: int
    """Rows whose keys the second does not have."""
    only_second: int
    different: int
    same: int
    examples: tuple[int, ...]
    """The first few keys, in hash order, whose rows are not the same."""


class Comparable(Protocol):
    """A store, or several that read as one."""

    @property
    def tables(self) -> tuple[Table, ...]:
        """In the order of unsigned table ids."""

    @property
    def label(self) -> str:
        """The store's name in messages."""

    def live_rows(self, table_name: str) -> int:
        """Return how many rows a table has."""

    def scan(self, table_name: str) -> Iterator[Chunk]:
        """Yield all rows of a table in hash order."""


def differences(
    first: Comparable, second: Comparable, *, progress: Callable[[int, int], None] | None = None
) -> list[Difference]:
    """Compare all rows of two stores of the same tables, table by table, in about 512 MiB of memory.

    ``progress(done, total)`` is called with rows of both.

    Raises ValueError for stores of different tables, or without a commit, and CorruptStoreError.
    """
    if first.tables != second.tables:
        names = sorted({table.name for table in {*first.tables} ^ {*second.tables}})
        raise ValueError(
            f"{first.label} and {second.label} have different tables (see {', '.join(names)}): "
            "compare stores of the same tables"
        )
    total = sum(store.live_rows(table.name) for store in (first, second) for table in first.tables)
    found, done = [], 0
    for table in first.tables:
        one, other = (_cursor(store, table) for store in (first, second))
        only_first = only_second = different = same = 0
        examples: list[int] = []
        for (hashes, keys, rows), (second_hashes, second_keys, second_rows) in merged(one, other):
            _, first_at, second_at = np.intersect1d(hashes, second_hashes, assume_unique=True, return_indices=True)
            unequal = first_at[np.any(rows[first_at].view(np.uint32) != second_rows[second_at].view(np.uint32), axis=1)]
            left, right = np.delete(keys, first_at), np.delete(second_keys, second_at)
            only_first, only_second = only_first + left.size, only_second + right.size
            different, same = different + unequal.size, same + first_at.size - unequal.size
            done += 2 * first_at.size + left.size + right.size
            if progress is not None:
                progress(done, total)
            examples += np.concatenate([keys[unequal], left, right]).tolist()[: _EXAMPLES - len(examples)]
        found.append(
            Difference(
                table=table.name,
                only_first=only_first,
                only_second=only_second,
                different=different,
                same=same,
                examples=tuple(examples),
            )
        )
    return found


def _cursor(store: Comparable, table: Table) -> SortedCursor:
    """Return a cursor over the hashes, keys and rows of a table."""
    rows = ((keys, np.concatenate(fields, axis=1)) for keys, fields in store.scan(table.name))
    width = sum(field.width for field in table.fields)
    return SortedCursor(hashed(table, rows), np.int64, (np.float32, (width,)))
