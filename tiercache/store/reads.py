"""Reads of a store at its commit: rows by key, in order or changed, and dense state.

In a store of several ranks each has a part of every table. A key of a table by row or in one piece is on one rank;
column slices are joined. Values that each slice repeats are taken from the first.
"""

from __future__ import annotations

import warnings
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.bits import HASHES, hash_keys
from tiercache.store.external_sort import ExternalSorter
from tiercache.store.files import local_path
from tiercache.store.lookup import check_keys, locate, lookup, missing_keys, read_rows
from tiercache.store.reading import BlockReader, Pages
from tiercache.store.scan import SCAN_BYTES, VersionReader, check_scan, output_row_bytes, runs_of, scan_segments
from tiercache.store.sharding import ShardingPlan, Slice, TableSharding, hash_bounds
from tiercache.store.store_errors import CommitMissingError, KeyMissingError, damaged
from tiercache.store.table import Group, Table, table_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.live_keys import KeyMemory
    from tiercache.store.lookup import Fields, Found
    from tiercache.store.scan import Chunk, RowFilter, SortedRun
    from tiercache.store.segment import Segment
    from tiercache.store.snapshot import Snapshot

_CHANGES_BYTES = 16 << 20
_COUNT_BYTES = 64 << 20


class StoreReads:
    """The part of ``Store`` that reads. From any thread, also while commits are made."""

    label: str
    tables: tuple[Table, ...]
    """In the order of unsigned table ids; whole ones also with several ranks."""
    reader: BlockReader
    """Reads its blocks: reading functions take it, with a snapshot."""
    key_memory: KeyMemory | None
    """The keys that lookups remember, beyond this store; None if it is open for writing."""
    sharding: ShardingPlan | None
    """In a store of several ranks, the rank of each row."""

    @property
    def parts(self) -> Sequence[StoreReads]:
        """The store of each rank, all at one commit; with one rank, this store."""
        raise NotImplementedError

    @property
    def snapshot(self) -> Snapshot:
        """The newest commit and the segments appended since."""
        raise NotImplementedError

    def _pinned(self) -> AbstractContextManager[Snapshot]:
        """Return a context that keeps all blobs of the current snapshot; with several ranks, rank 0's."""
        raise NotImplementedError

    def pinned(self) -> AbstractContextManager[Snapshot]:
        """Yield the current snapshot and keep all its blobs until this ends, regardless of later commits.

        Raises ValueError for a store of several ranks: each of ``ranks`` has its snapshot.
        """
        if self.sharding is not None:
            raise ValueError(f"{self.label} has {len(self.parts)} ranks: read its rows by lookup, scan or changes")
        return self._pinned()

    def live_rows(self, table_name: str) -> int:
        """Return a table's number of rows at the newest commit without I/O. Raises ValueError for an unknown table."""
        return sum(part.snapshot.live_rows(table_name, self.label) for part in self._counting(table_name))

    def most_rows(self, table_name: str, hashes: tuple[int, int]) -> int:
        """Return the maximum rows of a table that have hashes in a range, from the ranks' counts: reads nothing.

        Because hashes are uniform, this is four standard deviations above the mean if a rank has others too.
        """
        bounds, by_hash = hash_bounds(len(self.parts)), self._sharding_of(table_name).by_hash
        total = variance = 0.0
        for rank, part in enumerate(self._counting(table_name)):
            first, last = (bounds[rank], bounds[rank + 1]) if by_hash else (0, HASHES)
            share = max(0, min(hashes[1], last) - max(hashes[0], first)) / (last - first)
            rows = part.live_rows(table_name) * share
            total, variance = total + rows, variance + rows * (1 - share)
        return min(self.live_rows(table_name), int(np.ceil(total + 4 * variance**0.5)))

    def scan(
        self,
        table_name: str,
        *,
        chunk_rows: int | None = None,
        memory_bytes: int = SCAN_BYTES,
        scratch: Path | None = None,
    ) -> Iterator[Chunk]:
        """Yield all rows of a table at the newest commit in hash order: keys (n,), and a tuple of fields (n, width).

        The first field is the vector; the optimizer's follow, in the order in which ``lookup`` has their names. At most
        ``chunk_rows`` rows at a time, by default about 4 MiB. Takes about ``memory_bytes``; more is sorted in a
        temporary file in ``scratch`` (None: the store's folder). Commits made during the scan change nothing. Raises
        ValueError, StoreFullError and CorruptStoreError.
        """
        scratch = None if scratch is None else local_path(scratch, "a folder for temporary files")
        check_scan(self.reader, self.snapshot, table_name, chunk_rows)
        table = table_named(self.tables, table_name, self.label)
        return self.rows(table, chunk_rows=chunk_rows, memory_bytes=memory_bytes, scratch=scratch)

    def rows(
        self,
        table: Table,
        hashes: tuple[int, int] = (0, HASHES),
        *,
        chunk_rows: int | None = None,
        memory_bytes: int = SCAN_BYTES,
        scratch: Path | None = None,
    ) -> Iterator[Chunk]:
        """Yield the rows of a table in hash order, with all columns or those that a rank of another sharding has.

        hashes: [first, last) of the keys. Only ranks, ranges and columns with such rows are read, and keys; values
        stored once per row go to each slice. Otherwise, and in its errors, as ``scan``.
        """
        sharding, whole = self._sharding_of(table.name), table_named(self.tables, table.name, self.label)
        first = table.first_column - whole.first_column  # a store of one rank may have slices itself
        requested = Slice(0, first, first + table.dim)

        def scan(part: StoreReads, inside: tuple[int, int] | None, share: int) -> Iterator[Chunk]:
            with part.pinned() as snapshot:
                yield from scan_segments(
                    part.reader, snapshot, snapshot.committed, table.name,
                    hashes=inside, chunk_rows=chunk_rows, memory_bytes=share, scratch=scratch,
                )  # fmt: skip

        if sharding.by_hash:
            bounds = hash_bounds(len(self.parts))
            for rank, part in enumerate(self.parts):  # ranks own rising ranges of hashes
                low, high = max(hashes[0], bounds[rank]), min(hashes[1], bounds[rank + 1])
                if low < high:
                    inside = None if (low, high) == bounds[rank : rank + 2] else (low, high)
                    for keys, fields in scan(part, inside, memory_bytes):
                        yield keys, _columns(whole, [(Slice(rank, 0, whole.dim), fields)], requested)
            return
        slices = [one for one in sharding.slices if one.first < requested.last and requested.first < one.last]
        inside, share = None if hashes == (0, HASHES) else hashes, memory_bytes // len(slices)
        scans = [scan(self.parts[one.rank], inside, share) for one in slices]
        yield from self._side_by_side(whole, slices, scans, requested)

    def state(self) -> bytes:
        """Return the dense state of the newest commit; with several ranks, rank 0's.

        Raises CorruptStoreError; ValueError without a commit.
        """
        with self._pinned() as snapshot:
            if snapshot.commit is None:
                raise ValueError(f"{self.label} has no commit yet: publish one first")
            return self.reader.state(snapshot.commit).tobytes()

    def read(self, segment: Segment, group: int, low: int, high: int, out: NDArray[np.uint8]) -> None:
        """Read pages [low, high) of a layout into ``out``, in the layout's order, and check each.

        One read of the engine for each block. Raises CorruptBlockError; ValueError for invalid pages.
        """
        self.load([Pages(segment, group, low, high, out)])

    def load(self, wanted: Sequence[Pages], *, at_once: int | None = None) -> None:
        """``read`` for many: ``at_once`` of them at a time (None: 4, the most), on threads as nice as the first caller.

        After this returns or raises, no ``out`` is written. Raises as ``read`` does.
        """
        self.reader.load(wanted, at_once)

    def locate(self, table_name: str, keys: NDArray[np.int64], *, after: int) -> Found:
        """Find the rows of distinct ``keys`` (n,): returns segment ids (n,), -1 for a missing key, and rows (n,).

        A row is an index into the group's layout of the segment. Only rows with a next use after pass ``after``, or in
        a retained segment, count; the newest wins. Sweeps the table's stored keys: ask for many keys at once.
        """
        with self.pinned() as snapshot:
            return locate(self.reader, snapshot, table_name, keys, after=after)

    def read_rows(
        self,
        segment: Segment,
        group: int,
        rows: NDArray[np.int64],
        *,
        cached: Callable[[int, int, int], NDArray[np.uint8] | None] | None = None,
    ) -> tuple[NDArray[np.float32], ...]:
        """Return the rows at ``rows`` (n,) of a layout: (n, width) for each field.

        Reads whole pages, neighbors together, 4 MiB ahead of 4 MiB. ``cached(segment id, group, page)`` may return the
        bytes of a page that is in memory. Raises CorruptBlockError.
        """
        return read_rows(self.reader, segment, group, rows, cached)

    def lookup(
        self,
        table_name: str,
        keys: NDArray[np.int64],
        *,
        missing: str = "error",
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Fields:
        """Return the rows of any ``keys`` (n,), repeated or not, in any order: field name to (n, width).

        Rows are from the newest commit, or newer if ``append`` was called since. A key without a row gets its first row
        with ``missing`` "initial", zeros with "zeros"; with "error" KeyMissingError is raised.

        Sweeps the table's stored keys, then reads whole pages, neighbors together: ask for many keys at once. For
        stores opened with mode "r" a process remembers keys, 8 bytes each, at most 256 MiB. ``progress(what, done,
        total)`` is called with "keys" and "rows"; with several ranks it restarts for each.
        Raises ValueError and CorruptBlockError.
        """
        if self.sharding is None:
            with self._pinned() as snapshot:
                return lookup(
                    self.reader, snapshot, table_name, keys,
                    missing=missing, memory=self.key_memory, progress=progress,
                )  # fmt: skip
        sharding, table = self._sharding_of(table_name), table_named(self.tables, table_name, self.label)
        keys = check_keys(keys)
        bounds = np.array(hash_bounds(len(self.parts))[1:-1], dtype=np.uint64)
        owners = np.searchsorted(bounds, hash_keys(keys, table.table_id), side="right")
        slices = sharding.slices or [Slice(rank, 0, table.dim) for rank in np.unique(owners).tolist() or [0]]
        out = {field.name: np.zeros((keys.size, field.width), dtype=np.float32) for field in table.fields}
        absent: list[NDArray[np.int64]] = []
        for one in reversed(slices):  # values stored once per row come from the first slice
            selected = slice(None) if sharding.slices else np.nonzero(owners == one.rank)[0]
            try:
                found = self.parts[one.rank].lookup(table_name, keys[selected], missing=missing, progress=progress)
            except KeyMissingError as error:
                absent.append(error.keys)
                continue
            for field in table.fields:
                columns = slice(one.first, one.last) if field.width == table.dim else slice(None)
                out[field.name][selected, columns] = found[field.name]
        if absent:
            raise missing_keys(table, np.unique(np.concatenate(absent)), np.unique(keys).size, self.label)
        return out

    def changes(self, table_name: str, *, since: int) -> Iterator[tuple[NDArray[np.int64], Fields]]:
        """Yield (keys, fields) of the rows of a table that changed after commit ``since``, which may be gone.

        Each key once, in no order, at most 16 MiB at a time; if stale rows may be among them, or columns of several
        ranks, as ``scan`` does. -1 yields every row. A row counts as changed when it is made or written again, even
        with the same bits, but not when it moves. Raises CommitMissingError for a commit that never was or that a
        rollback gave up, CorruptBlockError, ValueError if rows were appended and not committed. Commits that are made
        meanwhile change nothing. Forgotten keys are not listed: a UserWarning says if there may be some.
        """
        self.reader.check_open()
        table, slices = table_named(self.tables, table_name, self.label), self._sharding_of(table_name).slices
        self.warn_of_forgotten(table_name, since=since)
        in_order = len(slices) > 1  # looking up the keys of each chunk would read all keys each time

        def changed(part: StoreReads) -> Iterator[Chunk]:
            with part.pinned() as snapshot:
                share = SCAN_BYTES // max(1, len(slices))
                yield from _changes(part.reader, snapshot, table_name, since, in_order=in_order, memory_bytes=share)

        parts = [changed(part) for part in ([self.parts[one.rank] for one in slices] or self.parts)]
        whole = Slice(0, 0, table.dim)
        chunks = self._side_by_side(table, slices, parts, whole) if in_order else chain.from_iterable(parts)
        names = [field.name for field in table.fields]
        return ((keys, dict(zip(names, fields, strict=True))) for keys, fields in chunks)

    def changed_rows(self, table_name: str, *, since: int) -> int:
        """Return how many rows of a table ``changes`` yields; reads no rows. Raises the same errors."""
        total = 0
        for part in self._counting(table_name):
            with part.pinned() as snapshot:
                total += _changed_rows(part.reader, snapshot, table_name, since)
        return total

    def warn_of_forgotten(self, table_name: str, *, since: int) -> None:
        """Warn if rows of a table may have been forgotten after commit ``since``: copies of them are to be removed."""
        parts = self._counting(table_name)
        if any(_may_have_forgotten(part.snapshot, table_name, since, self.label) for part in parts):
            warnings.warn(
                f"rows of table {table_name!r} of {self.label} may have been forgotten after commit {since}, and "
                "changes do not list them: remove these keys from your copy, or copy all rows again (since=-1)",
                stacklevel=3,
            )

    def _sharding_of(self, table_name: str) -> TableSharding:
        """Return the sharding of a table. Raises ValueError if there is none of that name."""
        table_named(self.tables, table_name, self.label)
        return TableSharding("row_wise") if self.sharding is None else self.sharding.tables[table_name]

    def _counting(self, table_name: str) -> Sequence[StoreReads]:
        """Return parts that together have every row of a table once."""
        slices = self._sharding_of(table_name).slices
        return [self.parts[slices[0].rank]] if slices else self.parts

    def _side_by_side(
        self, table: Table, slices: Sequence[Slice], scans: Sequence[Iterator[Chunk]], requested: Slice
    ) -> Iterator[Chunk]:
        """Yield keys and requested columns of a table from scans of slices, which have the same keys."""
        held = [next(scan, None) for scan in scans]
        while any(one is not None for one in held):
            chunks = [one for one in held if one is not None]
            rows = min(keys.size for keys, _ in chunks)
            first = chunks[0][0][:rows]
            if len(chunks) < len(held) or any(not np.array_equal(keys[:rows], first) for keys, _ in chunks):
                raise damaged(f"the slices of table {table.name!r} of {self.label} have different keys")
            found = [tuple(values[:rows] for values in fields) for _, fields in chunks]
            yield first, _columns(table, list(zip(slices, found, strict=True)), requested)
            held = [
                (keys[rows:], tuple(values[rows:] for values in fields)) if keys.size > rows else next(scan, None)
                for (keys, fields), scan in zip(chunks, scans, strict=True)
            ]


def _columns(
    table: Table, slices: Sequence[tuple[Slice, tuple[NDArray[np.float32], ...]]], requested: Slice
) -> tuple[NDArray[np.float32], ...]:
    """Return some columns of every field of a whole table, from slices that have them all."""
    out = []
    for i, field in enumerate(table.fields):
        first, last = requested.first, requested.last
        found = [fields[i][:, max(0, first - one.first) : last - one.first] for one, fields in slices]
        once = field.width != table.dim
        out.append(slices[0][1][i] if once else found[0] if len(found) == 1 else np.concatenate(found, axis=1))
    return tuple(np.ascontiguousarray(values) for values in out)


def _changes(
    reader: BlockReader, snapshot: Snapshot, table_name: str, since: int, *, in_order: bool = False,
    memory_bytes: int = SCAN_BYTES,
) -> Iterator[Chunk]:  # fmt: skip
    """Yield keys and rows of one rank that changed after commit ``since``.

    ``in_order``: in hash order, as ``scan_segments``, with the same memory. Last changes of moved rows are read only
    for blocks that have both changed and unchanged rows.
    """
    table, group, before = snapshot.find(table_name, reader.label)
    changed, choice = _changed(reader, snapshot, group, since)
    if group is None:
        return
    rows = max(1, _CHANGES_BYTES // output_row_bytes(table))
    if in_order or before or snapshot.has_tombstones or snapshot.stale_rows(changed, group, table):
        # A moved row keeps its last change and a newer one has a greater: if an older copy is chosen, so is the newer.
        chunks = scan_segments(
            reader, snapshot, changed, table_name,
            choice=choice, alone=False, chunk_rows=rows, memory_bytes=memory_bytes,
        )  # fmt: skip
    else:
        chunks = _unordered(reader, runs_of(reader, snapshot, changed, group, table), group, choice, rows)
    yield from chunks


def _changed_rows(reader: BlockReader, snapshot: Snapshot, table_name: str, since: int) -> int:
    """Return how many rows ``_changes`` yields. Reads last changes as it does, and keys if some rows are stale."""
    table, group, _ = snapshot.find(table_name, reader.label)
    changed, choice = _changed(reader, snapshot, group, since)
    if group is None:
        return 0
    stale = snapshot.stale_rows(changed, group, table)
    if choice is None:
        return snapshot.living_rows(changed, group, table)
    if snapshot.has_tombstones:
        return sum(keys.size for keys, _ in _changes(reader, snapshot, table_name, since))
    runs = runs_of(reader, snapshot, changed, group, table, choice)
    return _count_keys(reader, runs, group, table, choice) if stale else sum(run.remaining for run in runs)


def _may_have_forgotten(snapshot: Snapshot, table_name: str, since: int, label: str) -> bool:
    """Return True if rows of a table may have been forgotten after commit ``since``, which ``_changes`` does not list.

    Tombstones tell. A rewrite leaves them out with the rows, and only its number is kept.
    """
    commit, stored = snapshot.commit, snapshot.find(table_name, label)
    if commit is None or since < 0 or commit.forgot > since or stored.group is None:
        return commit is not None and 0 <= since < commit.forgot
    new = [one for one in snapshot.committed if one.tombstone and commit.named[one.id] > since]
    return snapshot.rows_in(new, stored.group, stored.table) > 0


def _count_keys(reader: BlockReader, runs: Iterable[SortedRun], group: Group, table: Table, choice: RowFilter) -> int:
    what = f"counting the changed keys of table {table.name!r}"
    with ExternalSorter([], reader.scratch, what, _COUNT_BYTES, reader.counters) as sorter:
        for run in runs:
            for _, low, high in run.blocks():
                chosen = choice(run.segment, group.index, low, high)
                if np.any(chosen):
                    keys = reader.keys_between(run.segment, group.index, low, high)
                    sorter.add(hash_keys(keys[chosen], table.table_id))
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
        for _, low, high in run.blocks(step):
            rows = np.arange(low, high)
            if choice is not None:
                rows = rows[choice(run.segment, group.index, low, high)]
            if rows.size:
                keys = reader.keys_between(run.segment, group.index, low, high)[rows - low]
                yield keys, read_rows(reader, run.segment, group.index, rows)
