"""Prefetching: rows read from the store, and initial vectors generated on the host, before their pass begins."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tiercache.errors import StateError
from tiercache.kernels.cpu.initial import initial_rows
from tiercache.planning.budgets import ALIGNED_BYTES, PAGE_BYTES
from tiercache.rows.host import PageRun
from tiercache.rows.store_kernels import COMPUTE
from tiercache.store.bits import nearest
from tiercache.store.checkpoint import checkpoint_vectors, initial_checkpoint_vectors
from tiercache.store.initializer import Checkpoint, initializer_code
from tiercache.store.reading import Pages
from tiercache.store.row_codec import to_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.planning.host_plan import PageRange
    from tiercache.planning.pass_plan import PassPlan
    from tiercache.planning.row_offsets import KeysOf, RowOffsets
    from tiercache.rows.backends.base import Backend
    from tiercache.rows.device import SlotAssignment
    from tiercache.rows.pinned import PinnedArena, PinnedRegion
    from tiercache.store import Segment, Store
    from tiercache.store.table import Table
    from tiercache.store.tensor_file import Reads


_BATCH_NUMBERS = 1 << 16


def first_vectors(table: Table, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    """Write the initial vector of each key (n,) to its words (n, words), rounded to the nearest of the table's dtype.

    For 16-bit dtypes and for column slices this takes another MiB: 16 bytes for each of 65,536 numbers.
    """
    if isinstance(table.initializer, Checkpoint):
        read_vectors(table, keys, [out])
        return
    if table.dtype == "float32":
        _write(table, keys, out)
        return
    step = max(1, _BATCH_NUMBERS // table.dim)
    vectors = np.empty((min(step, keys.size), table.dim), dtype=np.float32)
    for first in range(0, keys.size, step):
        batch = keys[first : first + step]
        _write(table, batch, vectors[: batch.size])
        to_words(table.fields[0], vectors[: batch.size], out[first : first + step])


def initial_vectors(table: Table, keys: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the initial vectors of keys (n,), rounded to the nearest of the table's dtype: float32 (n, dim)."""
    if isinstance(table.initializer, Checkpoint):
        return initial_checkpoint_vectors(table, keys)
    vectors = np.empty((keys.size, table.dim), dtype=np.float32)
    _write(table, keys, vectors)
    return nearest(vectors, table.dtype)


def read_vectors(table: Table, keys: NDArray[np.int64], outs: Sequence[NDArray[np.float32]]) -> Reads:
    """Write the first vectors of keys (n,) to their words in ``outs``, of n rows in all; returns the bytes read.

    They are rows of a checkpoint, read in the order of its file. Raises CheckpointError. Memory: CHECKPOINT_BYTES, and
    KEY_ORDER_BYTES per key.
    """
    starts = np.cumsum([0, *(out.shape[0] for out in outs)])

    def put(index: NDArray[np.int64], raw: NDArray[np.uint8], vectors: NDArray[np.float32] | None) -> None:
        words = np.zeros((index.size, outs[0].shape[1]), np.float32)
        if vectors is None:
            words.view(np.uint8)[:, : raw.shape[1]] = raw
        else:
            to_words(table.fields[0], np.ascontiguousarray(vectors), words)
        if len(outs) == 1:
            outs[0][index] = words
            return
        which = np.searchsorted(starts, index, side="right") - 1
        order = np.argsort(which, kind="stable")
        cuts = np.searchsorted(which[order], np.arange(len(outs) + 1))
        for number in np.flatnonzero(np.diff(cuts)).tolist():
            of_out = order[cuts[number] : cuts[number + 1]]
            outs[number][index[of_out] - starts[number]] = words[of_out]

    return checkpoint_vectors(table, np.ascontiguousarray(keys), put, COMPUTE.checksums)


def _write(table: Table, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    """Write vectors (n, dim) that are not rounded; a column slice is cut out of whole vectors."""
    how = table.table_id, table.seed, *initializer_code(table.initializer)
    if table.whole_dim is None:
        initial_rows(np.ascontiguousarray(keys), *how, out)
        return
    width = table.first_column + table.dim  # a vector begins with the numbers of a narrower one
    step = max(1, _BATCH_NUMBERS // width)
    whole = np.empty((min(step, keys.size), width), dtype=np.float32)
    for first in range(0, keys.size, step):
        batch = np.ascontiguousarray(keys[first : first + step])
        initial_rows(batch, *how, whole[: batch.size])
        out[first : first + batch.size] = whole[: batch.size, table.first_column :]


_KEY_BYTES = 8


@dataclass(frozen=True, slots=True)
class StagedRows:
    """Vectors of new rows; their optimizer state is the initial one."""

    group: int
    first_row: int
    words_RW: NDArray[np.float32]
    """The words of each vector."""


@dataclass(frozen=True, slots=True)
class StagedKeys:
    """New keys of one table, whose vectors the device generates."""

    group: int
    first_row: int
    table: Table
    keys: NDArray[np.int64]


@dataclass(slots=True)
class Staged:
    """Rows that the reader prepared for one pass."""

    plan: PassPlan
    assignments: list[SlotAssignment]
    runs_G: list[list[PageRun]]
    """Pages read from the store, by group."""
    rows: list[StagedRows] = field(default_factory=list)
    keys: list[StagedKeys] = field(default_factory=list)
    regions: list[PinnedRegion] = field(default_factory=list)
    rows_read: int = 0
    bytes_read: int = 0
    checkpoint_rows: int = 0
    checkpoint_bytes: int = 0
    """Bytes read from files of checkpoints: whole chunks."""
    read_span: tuple[float, float] = (0.0, 0.0)
    """When reading began and ended."""


class RowPrefetcher:
    """Reads and generates rows; called on the reader thread."""

    def __init__(
        self,
        store: Store,
        backend: Backend,
        memory: PinnedArena,
        positions: RowOffsets,
        keys_of: KeysOf,
        segments: Mapping[int, tuple[Segment, ...]],
    ) -> None:
        self._store, self._backend, self._memory, self._segments = store, backend, memory, segments
        self._positions, self._keys_of = positions, keys_of
        self._rest: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        """The unused bytes of the current region."""

    def stage(self, plan: PassPlan, assignments: list[SlotAssignment]) -> Staged:
        """Stage the rows of ``plan`` that neither device nor host has."""
        staged = Staged(plan, assignments, [[] for _ in assignments])
        try:
            self._fill(staged)
        except BaseException:
            for region in staged.regions:
                self._memory.give_back(region)
            raise
        return staged

    def _fill(self, staged: Staged) -> None:
        plan, begun = staged.plan, time.perf_counter()
        self._rest = np.empty(0, dtype=np.uint8)
        first_G, requests = list(plan.kept_G), list[Pages]()
        for load in plan.loads:
            if load.store.first < load.store.last:
                first_row = first_G[load.group] + load.rows - load.store_rows
                segment = self._segments[load.pass_index][load.part]
                requests += self._place_pages(staged, segment, load.group, load.store, first_row)
            first_G[load.group] += load.rows
        self._store.load(requests, at_once=1)  # each thread more takes the interpreter from the training more often
        staged.read_span = begun, time.perf_counter()
        for group, rows in enumerate(plan.generated_G):
            if rows:
                self._generate(staged, group, first_G[group])
        for assignment in staged.assignments:
            assignment.resolve()

    def _buffer(self, staged: Staged, num_bytes: int, in_page: int | None = None) -> NDArray[np.uint8]:
        """Return the rest of the current region, or a new region if fewer than ``num_bytes`` are left.

        in_page: the offset in a page of memory at which the buffer begins; None: any.
        """
        buffer = _from(self._rest, in_page)
        if buffer.size < num_bytes:
            region = self._memory.take(self._memory.region_bytes)
            staged.regions.append(region)
            buffer = _from(region.data, in_page)
            if buffer.size < num_bytes:
                raise StateError(
                    f"pass {staged.plan.pass_index} reads a page of {num_bytes:,} bytes into regions of "
                    f"{self._memory.region_bytes:,}: open the training again, so that its plan knows all of the store"
                )
        return buffer

    def _place_pages(
        self, staged: Staged, segment: Segment, group: int, pages: PageRange, first_row: int
    ) -> Iterator[Pages]:
        """Find memory for pages of the store, and yield the reads that fill it."""
        layout = segment.layouts[group]
        page, begin, pages_end = pages.first, layout.byte_of_page(pages.first), layout.byte_of_page(pages.last)
        first_byte = begin
        while page < pages.last:
            last, end, page_bytes = pages.last, pages_end, layout.byte_of_page(page + 1) - begin
            in_page = None
            if layout.block_bytes >= ALIGNED_BYTES:
                low, high = layout.rows_of_block(begin // (layout.block_rows * layout.row_bytes))
                if high * layout.row_bytes < end:
                    last, end = layout.page_of_row(high), high * layout.row_bytes
                if end - begin >= ALIGNED_BYTES:
                    in_page = begin - low * layout.row_bytes
            buffer = self._buffer(staged, page_bytes, in_page)
            if end - begin > buffer.size:
                last = layout.page_of_row((begin + buffer.size) // layout.row_bytes)
                end = layout.byte_of_page(last)
            num_bytes = end - begin
            data, self._rest = buffer[:num_bytes], buffer[num_bytes:]
            yield Pages(segment, group, page, last, data)
            row = first_row + (begin - first_byte) // layout.row_bytes
            staged.runs_G[group].append(PageRun(row, layout, page, last, data))
            staged.rows_read += num_bytes // layout.row_bytes
            staged.bytes_read += num_bytes
            page, begin = last, end

    def _generate(self, staged: Staged, group: int, first_row: int) -> None:
        """Generate new vectors, or stage their keys if the device generates them."""
        plan, spec = staged.plan, self._positions.groups[group]
        width = spec.fields[0].words
        starts = self._positions.table_starts(plan.sub_dataset, group)
        order = staged.assignments[group].load_K[first_row:]
        first_table = self._positions.first_table(group)
        cuts = np.searchsorted(order, starts)  # generated rows are in position order
        for i, table in enumerate(spec.tables):
            low, high = int(cuts[i]), int(cuts[i + 1])
            keys = self._keys_of(plan.sub_dataset, first_table + i)
            on_device = self._backend.generates(table) and 4 * width >= _KEY_BYTES + 4
            row_bytes = _KEY_BYTES if on_device else 4 * width
            if isinstance(table.initializer, Checkpoint) and low < high:
                local = order[low:high] - int(starts[i])
                outs: list[NDArray[np.float32]] = []
                while low < high:
                    outs.append(self._words(staged, high - low, width))
                    staged.rows.append(StagedRows(group, first_row + low, outs[-1]))
                    low += outs[-1].shape[0]
                reads = read_vectors(table, keys[local], outs)
                staged.checkpoint_rows += local.size
                staged.checkpoint_bytes += reads.num_bytes
            while low < high:
                if not on_device:
                    words = self._words(staged, high - low, width)
                    first_vectors(table, keys[order[low : low + words.shape[0]] - int(starts[i])], words)
                    staged.rows.append(StagedRows(group, first_row + low, words))
                    low += words.shape[0]
                    continue
                buffer = self._buffer(staged, row_bytes + 4)
                buffer = buffer[-buffer.ctypes.data % _KEY_BYTES :]
                rows = min(high - low, buffer.size // row_bytes)
                data, self._rest = buffer[: rows * row_bytes], buffer[rows * row_bytes :]
                new_keys = data.view(np.int64)
                np.take(keys, order[low : low + rows] - int(starts[i]), out=new_keys)
                staged.keys.append(StagedKeys(group, first_row + low, table, new_keys))
                low += rows

    def _words(self, staged: Staged, most: int, width: int) -> NDArray[np.float32]:
        """Return memory for the vectors of up to ``most`` rows: words (rows, width)."""
        buffer = self._buffer(staged, 4 * width)
        rows = min(most, buffer.size // (4 * width))
        data, self._rest = buffer[: 4 * rows * width], buffer[4 * rows * width :]
        return data.view(np.float32).reshape(rows, width)


def _from(buffer: NDArray[np.uint8], in_page: int | None) -> NDArray[np.uint8]:
    """Return a buffer from the first byte at an offset in a page of memory."""
    if in_page is None:
        return buffer
    return buffer[(in_page - int(buffer.__array_interface__["data"][0])) % PAGE_BYTES :]
