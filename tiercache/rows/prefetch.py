"""The vectors of rows that are used for the first time: the one place where a training makes them on the host."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tiercache.errors import StateError
from tiercache.kernels.cpu.initial import initial_rows
from tiercache.planning.budgets import ALIGNED_BYTES, PAGE_BYTES
from tiercache.store.bits import nearest, to_words
from tiercache.store.reading import Pages
from tiercache.store.table import initializer_code

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from tiercache.planning.host_plan import CachedRows
    from tiercache.planning.pass_plan import PassPlan
    from tiercache.planning.row_offsets import RowOffsets
    from tiercache.rows.backends.base import Backend
    from tiercache.rows.device import SlotAssignment
    from tiercache.rows.pinned import PinnedArena, PinnedRegion
    from tiercache.store import Segment, Store
    from tiercache.store.layout import SegmentLayout
    from tiercache.store.table import Table


_BATCH_NUMBERS = 1 << 16


def first_vectors(table: Table, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    """Write the initial vector of each key (n,) to its words (n, words), rounded to the nearest of the table's dtype.

    For 16-bit dtypes and for column slices takes about 16 bytes a number beside them, for 65,536 numbers or a row at a
    time: a MiB.
    """
    if table.dtype == "float32":
        _write(table, keys, out)
        return
    step = max(1, _BATCH_NUMBERS // table.dim)
    vectors = np.empty((min(step, keys.size), table.dim), dtype=np.float32)
    for first in range(0, keys.size, step):
        some = keys[first : first + step]
        _write(table, some, vectors[: some.size])
        to_words(table.fields[0], vectors[: some.size], out[first : first + step])


def initial_vectors(table: Table, keys: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the initial vectors of keys (n,), rounded to the nearest of the table's dtype: float32 (n, dim)."""
    vectors = np.empty((keys.size, table.dim), dtype=np.float32)
    _write(table, keys, vectors)
    return nearest(vectors, table.dtype)


def _write(table: Table, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    """Write vectors (n, dim) that are not rounded; those of a column slice are cut out of the whole ones."""
    how = table.table_id, table.seed, *initializer_code(table.initializer)
    if table.whole_dim is None:
        initial_rows(np.ascontiguousarray(keys), *how, out)
        return
    width = table.first_column + table.dim  # a vector begins with the numbers of a narrower one
    step = max(1, _BATCH_NUMBERS // width)
    whole = np.empty((min(step, keys.size), width), dtype=np.float32)
    for first in range(0, keys.size, step):
        some = np.ascontiguousarray(keys[first : first + step])
        initial_rows(some, *how, whole[: some.size])
        out[first : first + some.size] = whole[: some.size, table.first_column :]


_KEY_BYTES = 8


@dataclass(frozen=True, slots=True)
class StagedPages:
    """Pages read from the store, and the first place of their rows in the order of loading."""

    group: int
    first_row: int
    layout: SegmentLayout
    held: CachedRows
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StagedRows:
    """Vectors of rows that no pass has used before; their optimizer state is the initial one."""

    group: int
    first_row: int
    words_RW: NDArray[np.float32]
    """The words of each vector."""


@dataclass(frozen=True, slots=True)
class StagedKeys:
    """Keys of one table that no pass has used before, whose vectors the device makes itself."""

    group: int
    first_row: int
    table: Table
    keys: NDArray[np.int64]


@dataclass(slots=True)
class Staged:
    """All that the reader prepared for one pass."""

    plan: PassPlan
    assignments: list[SlotAssignment]
    pages: list[StagedPages] = field(default_factory=list)
    rows: list[StagedRows] = field(default_factory=list)
    keys: list[StagedKeys] = field(default_factory=list)
    regions: list[PinnedRegion] = field(default_factory=list)
    rows_read: int = 0
    bytes_read: int = 0
    read_span: tuple[float, float] = (0.0, 0.0)
    """When reading began and ended."""


class RowPrefetcher:
    """Reads and generates; called on the reader thread."""

    def __init__(
        self,
        store: Store,
        backend: Backend,
        memory: PinnedArena,
        positions: RowOffsets,
        keys_of: Callable[[int, int], NDArray[np.int64]],
        segments: Mapping[int, Segment],
    ) -> None:
        self._store, self._backend, self._memory, self._segments = store, backend, memory, segments
        self._positions, self._keys_of = positions, keys_of
        self._room: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self._wanted: list[Pages] = []

    def stage(self, plan: PassPlan, assignments: list[SlotAssignment]) -> Staged:
        """Bring the rows of ``plan`` that neither device nor host holds into staging."""
        staged = Staged(plan, assignments)
        try:
            self._fill(staged)
        except BaseException:
            for region in staged.regions:
                self._memory.give_back(region)
            raise
        return staged

    def _fill(self, staged: Staged) -> None:
        plan, begun = staged.plan, time.perf_counter()
        self._room, self._wanted = np.empty(0, dtype=np.uint8), []
        first_G = list(plan.kept_G)
        for load in plan.loads:
            first = first_G[load.group]
            first_G[load.group] += load.rows
            self._want(staged, load.pass_index, load.group, load.store, first + load.rows - load.store_rows)
        wanted, self._wanted = self._wanted, []
        self._store.load(wanted, at_once=1)  # each thread more takes the interpreter from the training more often
        staged.read_span = begun, time.perf_counter()
        for group, rows in enumerate(plan.generated_G):
            if rows:
                self._generate(staged, group, first_G[group])
        for assignment in staged.assignments:
            assignment.settle()

    def _take(self, staged: Staged, wanted: int, in_page: int | None = None) -> NDArray[np.uint8]:
        """Return what is left of the current region, or a new one where ``wanted`` bytes do not fit.

        It begins ``in_page`` bytes behind a page where that is said.
        """
        room = _from(self._room, in_page)
        if room.size < wanted:
            region = self._memory.take(self._memory.region_bytes)
            staged.regions.append(region)
            room = _from(region.data, in_page)
            if room.size < wanted:
                raise StateError(
                    f"pass {staged.plan.pass_index} reads a page of {wanted:,} bytes into regions of "
                    f"{self._memory.region_bytes:,}: open the training again, so that its plan knows all of the store"
                )
        return room

    def _want(self, staged: Staged, pass_index: int, group: int, held: CachedRows, first_row: int) -> None:
        """Find room for pages that are to be read."""
        if held.first >= held.last:
            return
        segment = self._segments[pass_index]
        layout = segment.layouts[group]
        page, begin, held_end = held.first, layout.byte_of_page(held.first), layout.byte_of_page(held.last)
        first_byte = begin
        while page < held.last:
            end, end_byte, first_bytes = held.last, held_end, layout.byte_of_page(page + 1) - begin
            if layout.block_bytes >= ALIGNED_BYTES:
                block = begin // (layout.block_rows * layout.row_bytes)
                low, high = layout.rows_of_block(block)
                if high * layout.row_bytes < end_byte:
                    end, end_byte = layout.page_of_row(high), high * layout.row_bytes
            if layout.block_bytes >= ALIGNED_BYTES and end_byte - begin >= ALIGNED_BYTES:
                inside = begin - low * layout.row_bytes
                room = self._take(staged, first_bytes, inside)
            else:
                room = self._take(staged, first_bytes)
            last, last_byte = end, end_byte
            if end_byte - begin > room.size:
                last = layout.page_of_row((begin + room.size) // layout.row_bytes)
                last_byte = layout.byte_of_page(last)
            num_bytes = last_byte - begin
            data, self._room = room[:num_bytes], room[num_bytes:]
            self._wanted.append(Pages(segment, group, page, last, data))
            rows = (begin - first_byte) // layout.row_bytes
            staged.pages.append(StagedPages(group, first_row + rows, layout, type(held)(page, last), data))
            staged.rows_read += num_bytes // layout.row_bytes
            staged.bytes_read += num_bytes
            page, begin = last, last_byte

    def _generate(self, staged: Staged, group: int, first_row: int) -> None:
        plan, spec = staged.plan, self._positions.groups[group]
        width = spec.fields[0].words
        starts = self._positions.table_starts(plan.sub_dataset, group)
        order = staged.assignments[group].load_K[first_row:]
        first_table = self._positions.first_table(group)
        cuts = np.searchsorted(order, starts)  # generated rows stand in position order
        for i, table in enumerate(spec.tables):
            low, high = int(cuts[i]), int(cuts[i + 1])
            keys = self._keys_of(plan.sub_dataset, first_table + i)
            on_device = self._backend.generates(table) and 4 * width >= _KEY_BYTES + 4
            while low < high:
                if on_device:
                    low = self._stage_keys(staged, group, table, keys, order, int(starts[i]), low, high, first_row)
                    continue
                room = self._take(staged, 4 * width)
                rows = min(high - low, room.size // (4 * width))
                words = room[: rows * 4 * width].view(np.float32).reshape(rows, width)
                self._room = room[rows * 4 * width :]
                mine = keys[order[low : low + rows] - starts[i]]
                first_vectors(table, mine, words)
                staged.rows.append(StagedRows(group, first_row + low, words))
                low += rows

    def _stage_keys(
        self, staged: Staged, group: int, table: Table, keys: NDArray[np.int64], order: NDArray[np.int32], start: int,
        low: int, high: int, first_row: int,
    ) -> int:  # fmt: skip
        """Stage keys of places [low, high) of ``order``, as many as there is room for; return the place behind them."""
        room = self._take(staged, _KEY_BYTES + 4)
        room = room[-room.ctypes.data % _KEY_BYTES :]
        rows = min(high - low, room.size // _KEY_BYTES)
        mine, self._room = room[: rows * _KEY_BYTES].view(np.int64), room[rows * _KEY_BYTES :]
        np.take(keys, order[low : low + rows] - start, out=mine)
        staged.keys.append(StagedKeys(group, first_row + low, table, mine))
        return low + rows


def _from(room: NDArray[np.uint8], in_page: int | None) -> NDArray[np.uint8]:
    """Leave out the bytes before the first that stands so far behind a page as ``in_page`` does."""
    if in_page is None:
        return room
    return room[(in_page - int(room.__array_interface__["data"][0])) % PAGE_BYTES :]
