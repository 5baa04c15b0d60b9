"""What the store's benchmark dumps and loads: sizes, tables, and schedules of made-up passes with real keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.disk_raw import blocks_of, reads_of, slot_bytes
from tiercache.planning.budget import HostBudget
from tiercache.store import Range, RowWiseAdagrad, SegmentLayout, Table, Zeros, hash_keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from benchmarks.disk_raw import Span

PASSES = 24
SEGMENTS = 400
RAW_SLOTS = 4
"""Dumps that the bare disk's file has room for: what stands beside each other in a load stands apart in the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is measured."""

    pass_bytes: int
    """Rows of one pass."""
    turns: int
    """Passes of the cycle that are measured."""
    verifications: int
    """Verifications of the whole store, each in a process of its own."""
    wide_passes: int
    """Passes that are loaded from 400 segments."""
    heap_bytes: int
    """Rows of the dump whose memory is measured."""
    lookup_pass_bytes: int
    """Rows of one pass in the store that keys are looked up in."""
    one_key_rows: int
    """Rows of the table in which one key is looked up."""
    commit_blocks: int
    """Blocks of each of the dumps whose commits are measured."""
    row_sizes: tuple[int, ...] = ()
    """Rows beside those of 260 bytes, in passes of ``row_size_pass_bytes``."""
    row_size_pass_bytes: int = 64 << 20


FULL = Size(
    pass_bytes=400 << 20, turns=11, verifications=3, wide_passes=11, heap_bytes=2 * 10**9, lookup_pass_bytes=64 << 20,
    one_key_rows=50_000_000, commit_blocks=5000, row_sizes=(32, 1540),
)  # fmt: skip
QUICK = Size(
    pass_bytes=40 << 20, turns=3, verifications=1, wide_passes=2, heap_bytes=5 * 10**8, lookup_pass_bytes=8 << 20,
    one_key_rows=1_000_000, commit_blocks=1000,
)  # fmt: skip
TINY = Size(
    pass_bytes=1 << 20, turns=1, verifications=1, wide_passes=1, heap_bytes=20 * 10**6, lookup_pass_bytes=1 << 20,
    one_key_rows=20_000, commit_blocks=48, row_sizes=(32,), row_size_pass_bytes=1 << 20,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Rows of one size in passes of one size, cut as the planner cuts them for a host budget of four passes."""

    table: Table
    rows: int
    """Of a pass."""
    budget: HostBudget

    @classmethod
    def of(cls, row_bytes: int, pass_bytes: int) -> Case:
        """Return the case of a vector and the row-wise Adagrad state in ``row_bytes``."""
        rule = RowWiseAdagrad(learning_rate=0.05)
        table = Table(name="items", dim=row_bytes // 4 - 1, optimizer=rule, initializer=Zeros())
        rows = max(SEGMENTS, pass_bytes // row_bytes)
        budget = HostBudget.plan(
            4 * rows * row_bytes, evaluation=0, largest_row=row_bytes, largest_pass=rows * row_bytes
        )
        return cls(table=table, rows=rows, budget=budget)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.table.row_bytes

    def layout(self, rows_by_use: Sequence[tuple[int, int]]) -> SegmentLayout:
        """Return the layout of a dump: so many rows for each next use."""
        return SegmentLayout.of(
            row_bytes=self.row_bytes,
            page_rows=max(1, self.budget.page // self.row_bytes),
            block_bytes=self.budget.block,
            ranges=tuple(Range(next_use=use, table_rows=(rows,)) for use, rows in rows_by_use),
        )

    @property
    def pass_bytes(self) -> int:
        """Bytes of the rows of a pass."""
        return self.rows * self.row_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Dump:
    """What one pass dumps."""

    pass_index: int
    layout: SegmentLayout
    keys: NDArray[np.int64]
    """(rows,), in the order of the layout."""

    @classmethod
    def of(cls, case: Case, pass_index: int, keys_by_use: Sequence[tuple[int, NDArray[np.int64]]]) -> Dump:
        """Lay rows out by next use, then hash."""
        ordered = [keys[np.argsort(hash_keys(keys, case.table.table_id))] for _, keys in keys_by_use]
        layout = case.layout([(use, keys.size) for use, keys in keys_by_use])
        return cls(pass_index=pass_index, layout=layout, keys=np.concatenate(ordered))

    def writes(self) -> list[Span]:
        """Return its blocks on the bare disk."""
        return blocks_of([self.layout], self.pass_index % RAW_SLOTS * slot_bytes([self.layout]))

    def reads(self, next_use: int, at: int | None = None) -> list[Span]:
        """Return its rows with a next use on the bare disk, where the dump stands at byte ``at`` or in its slot."""
        begin = self.pass_index % RAW_SLOTS * slot_bytes([self.layout]) if at is None else at
        return [
            span
            for index, rows in enumerate(self.layout.ranges)
            if rows.next_use == next_use
            for span in reads_of(self.layout, begin, *self.layout.pages_of_range(index))
        ]


class Cycle:
    """Passes whose rows are needed again 1 to ``PASSES`` passes later, as many after each number of passes.

    From pass ``PASSES`` on, a pass loads its rows from that many segments and no key is new.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.pass_index = 0
        self._waiting: dict[int, list[NDArray[np.int64]]] = {}
        self._num_keys = 0
        self._rng = np.random.default_rng(4)

    def next(self) -> Dump:
        """Return the next pass's dump."""
        known = self._waiting.pop(self.pass_index, [])
        fresh = self.case.rows - sum(keys.size for keys in known)
        new = np.arange(self._num_keys, self._num_keys + fresh, dtype=np.int64)
        self._num_keys += fresh
        parts = np.array_split(self._rng.permutation(np.concatenate([*known, new])), PASSES)
        by_use = [(self.pass_index + gap, keys) for gap, keys in enumerate(parts, 1)]
        for use, keys in by_use:
            self._waiting.setdefault(use, []).append(keys)
        dump = Dump.of(self.case, self.pass_index, by_use)
        self.pass_index += 1
        return dump

    def keys(self) -> NDArray[np.int64]:
        """Return all keys so far, of which each has one live row."""
        return np.arange(self._num_keys, dtype=np.int64)


def wide(case: Case, passes: int) -> Iterator[Dump]:
    """Yield ``SEGMENTS`` dumps, each with a part of the rows that each of the ``passes`` after them needs."""
    part, first = case.rows // SEGMENTS, 0
    for pass_index in range(SEGMENTS):
        by_use = []
        for use in range(SEGMENTS, SEGMENTS + passes):
            by_use.append((use, np.arange(first, first + part, dtype=np.int64)))
            first += part
        yield Dump.of(case, pass_index, by_use)
