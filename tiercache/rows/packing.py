"""Packing and unpacking: rows between the slots of the device and blocks in dump order."""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.kernels.arrays import NONE_I4
from tiercache.planning.host_plan import PageRange
from tiercache.rows.device import initial_values
from tiercache.rows.host import PageRun

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.kernels.pieces import Pieces
    from tiercache.planning.pass_plan import PassPlan
    from tiercache.planning.row_offsets import KeysOf, RowOffsets
    from tiercache.rows.backends.base import Backend, Event
    from tiercache.rows.device import DeviceTier, SlotAssignment
    from tiercache.rows.host import HostTier
    from tiercache.rows.pinned import PinnedRegion
    from tiercache.rows.prefetch import Staged
    from tiercache.store.layout import SegmentLayout
    from tiercache.values.ids import Array


_LOOKUP_ROWS = 1 << 17
"""Rows whose keys are looked up together, if a block has fewer: each lookup releases the interpreter."""
_TRANSFER_BYTES = 32 << 20
"""Bytes that one launch moves: half a millisecond over a fast link, so that dumps and loads overlap."""
_LAST = attrgetter("last")


class PreparedPass(NamedTuple):
    """A planned pass whose rows have slots."""

    plan: PassPlan
    assignments: list[SlotAssignment]


class Transfer(NamedTuple):
    """The rows that one launch moves: for a dump rows [first, last), for a load some of the rows before ``last``."""

    first: int
    last: int
    pieces: Pieces


class DumpedRows(NamedTuple):
    """The rows of a group before ``last`` in dump order, which are in host memory after an event."""

    last: int
    packed: Event


class StagedLayout(NamedTuple):
    """Staged rows, and the transfers that load them by group."""

    staged: Staged
    rows_G: list[list[Transfer]]
    vectors_G: list[Pieces]


class PassLoad:
    """The load of one pass; a part of it may be moved during the previous pass."""

    def __init__(self, layout: StagedLayout, cached_G: Sequence[list[Transfer]]) -> None:
        self.layout = layout
        self.slots_G: list[Array] = []
        """The slots of loaded rows, by group, once they are on the device."""
        self.transfers_G = [
            sorted([*cached, *staged], key=_LAST, reverse=True)
            for cached, staged in zip(cached_G, layout.rows_G, strict=True)
        ]
        """Transfers that were not begun, the first one last."""
        self.rows_ahead = 0
        """Rows that were loaded ahead."""


class GroupDump(NamedTuple):
    """The dump of one group."""

    layout: SegmentLayout
    order: NDArray[np.int32]
    """The positions of its rows."""
    regions: list[PinnedRegion]
    """Its blocks."""
    transfers: list[Transfer]


class SwitchBuffers(NamedTuple):
    """The host memory of a switch."""

    dumps: list[GroupDump]
    """The dump of the pass that ends, by group."""
    cached_G: list[list[Transfer]]
    """Rows that the next pass loads from blocks of earlier dumps."""


class Packer:
    """Moves rows between the slots of the device and host memory, and finds the keys of dumped rows."""

    def __init__(
        self, device: DeviceTier, backend: Backend, host: HostTier, positions: RowOffsets, keys_of: KeysOf
    ) -> None:
        self._device, self._backend, self._host = device, backend, host
        self._positions, self._keys_of = positions, keys_of

    # -- dump ---------------------------------------------------------------------------------------------

    def allocate(self, current: PreparedPass, upcoming: PreparedPass | None) -> SwitchBuffers:
        """Allocate the dump of ``current``; the host keeps the rows of earlier dumps that ``upcoming`` needs."""
        plan, assignments = current
        self._host.keep({} if upcoming is None else _needed(upcoming.plan), not_before=plan.pass_index)
        dumps = []
        for g, layout in enumerate(plan.dumps):
            order = assignments[g].dump_order_K
            order = order[order.size - layout.rows :]  # without the kept rows if they are not written
            regions = self._host.enter(plan.pass_index, g, layout)
            dumps.append(
                GroupDump(layout, order, regions, self.lay_out(layout, 0, [region.data for region in regions]))
            )
        return SwitchBuffers(dumps, [] if upcoming is None else self._lay_out_cached(*upcoming))

    def lay_out(self, layout: SegmentLayout, first_block: int, blocks: Sequence[NDArray[np.uint8]]) -> list[Transfer]:
        """Lay out neighboring blocks, given by their bytes. Any thread."""
        numbered = enumerate(blocks, first_block)
        runs = [PageRun(layout.rows_of_block(n)[0], layout, *layout.pages_of_block(n), data) for n, data in numbered]
        return self._transfers(layout.row_bytes // 4, runs, relative=True)

    def pack(self, group: int, order: NDArray[np.int32] | None, transfers: Sequence[Transfer]) -> list[DumpedRows]:
        """Fill blocks; ``order`` has the positions of the layout's rows.

        None: rows are in position order. Only these blocks' part of an order is copied to the device.
        """
        arrays, slots, dumped = self._device.arrays_G[group], self._device.slots_G[group], []
        with self._backend.streams.dumping():
            for first, last, pieces in transfers:
                if order is None:
                    self._backend.pack(arrays.fields, slots[first:last], NONE_I4, pieces)
                else:
                    placed = self._backend.place(order[first:last], arrays.dump_order)
                    self._backend.pack(arrays.fields, slots, placed, pieces)
                dumped.append(DumpedRows(last, self._backend.streams.dumped()))
        return dumped

    def keys(
        self, sub_dataset: int, group: int, order: NDArray[np.int32] | None, layout: SegmentLayout
    ) -> Iterator[NDArray[np.int64]]:
        """Yield the keys of each block in the order of its rows, see `pack`."""
        starts, first_table = self._positions.table_starts(sub_dataset, group), self._positions.first_table(group)
        keys_T = [np.asarray(self._keys_of(sub_dataset, first_table + i)) for i in range(len(starts) - 1)]
        at_once = max(1, _LOOKUP_ROWS // layout.block_rows)
        for block in range(0, layout.num_blocks, at_once):
            blocks = [layout.rows_of_block(b) for b in range(block, min(block + at_once, layout.num_blocks))]
            begin, end = blocks[0][0], blocks[-1][1]
            positions = np.arange(begin, end, dtype=np.int32) if order is None else order[begin:end]
            if len(keys_T) == 1:
                keys = keys_T[0][positions]
            else:
                keys = np.empty(positions.size, dtype=np.int64)
                tables = np.searchsorted(starts, positions, side="right") - 1
                for i in np.unique(tables):
                    of_table = tables == i
                    keys[of_table] = keys_T[i][positions[of_table] - starts[i]]
            for first, last in blocks:
                yield keys[first - begin : last - begin]

    # -- load ---------------------------------------------------------------------------------------------

    def _lay_out_cached(self, plan: PassPlan, assignments: Sequence[SlotAssignment]) -> list[list[Transfer]]:
        """Lay out the rows that a pass loads from host blocks, by group. For a thread that may use the host tier."""
        runs_G: list[list[PageRun]] = [[] for _ in assignments]
        next_G = list(plan.kept_G)
        for load in plan.loads:
            if load.host.first < load.host.last:
                runs_G[load.group] += self._host.runs(load.pass_index, load.group, load.host, next_G[load.group])
            next_G[load.group] += load.rows
        return self._load_transfers(runs_G, assignments)

    def lay_out_staged(self, staged: Staged) -> StagedLayout:
        """Lay out staged rows. Any thread."""
        vectors_G = [self._backend.pieces(group.fields[0].words) for group in self._positions.groups]
        for new in staged.rows:
            one_piece = np.array([new.words_RW.shape[0]]), np.zeros(1, dtype=np.int64)
            vectors_G[new.group].add(new.first_row, *one_piece, new.words_RW.reshape(-1))
        return StagedLayout(staged, self._load_transfers(staged.runs_G, staged.assignments), vectors_G)

    def _load_transfers(
        self, runs_G: list[list[PageRun]], assignments: Sequence[SlotAssignment]
    ) -> list[list[Transfer]]:
        return [
            self._transfers(group.row_bytes // 4, runs, cut=assignment.free)
            for group, runs, assignment in zip(self._positions.groups, runs_G, assignments, strict=True)
        ]

    def load_ahead(self, load: PassLoad) -> None:
        """Load the next rows of each group into free slots: one transfer, during the training of another pass."""
        ahead_G = [
            bool(transfers) and transfers[-1].last <= assignment.free
            for transfers, assignment in zip(load.transfers_G, load.layout.staged.assignments, strict=True)
        ]
        if any(ahead_G):
            with self._backend.streams.loading(ahead=True):
                self._place(load)
                for g in np.flatnonzero(ahead_G).tolist():
                    pieces = load.transfers_G[g].pop().pieces
                    self._backend.unpack(self._device.arrays_G[g].fields, load.slots_G[g], pieces)
                    load.rows_ahead += pieces.num_rows

    def _place(self, load: PassLoad) -> None:
        """Copy the slots of loaded rows to the device, once."""
        load.slots_G = load.slots_G or [
            self._backend.place(assignment.load_K, arrays.load_slots)
            for assignment, arrays in zip(load.layout.staged.assignments, self._device.arrays_G, strict=True)
        ]

    def unpack(self, load: PassLoad, dumped_G: Sequence[Sequence[DumpedRows]]) -> None:
        """Load the other rows of a pass from host memory. Does not wait for steps.

        dumped_G: the dump of the previous pass. Slots are filled as soon as its rows have left them.
        """
        staged, backend = load.layout.staged, self._backend
        plan = staged.plan
        first_G = [kept + sum(n.rows for n in plan.loads if n.group == g) for g, kept in enumerate(plan.kept_G)]
        with backend.streams.loading():
            self._place(load)
            for g, (arrays, group) in enumerate(zip(self._device.arrays_G, self._positions.groups, strict=True)):
                assignment, dumped, slots = staged.assignments[g], dumped_G[g], load.slots_G[g]
                for transfer in reversed(load.transfers_G[g]):
                    self._await_dump(assignment, dumped, transfer.last)
                    backend.unpack(arrays.fields, slots, transfer.pieces)
                self._await_dump(assignment, dumped, assignment.load_K.size)
                backend.unpack(arrays.fields[:1], slots, load.layout.vectors_G[g])
                for state, value in zip(arrays.fields[1:], initial_values(group), strict=True):
                    backend.set_rows(state, slots[first_G[g] : first_G[g] + plan.generated_G[g]], value)

    def _await_dump(self, assignment: SlotAssignment, dumped: Sequence[DumpedRows], last: int) -> None:
        """Make later loads wait for the dump of rows whose slots are reused by loaded rows before ``last``."""
        if last > assignment.free:
            row = dumped[-1].last - assignment.departing + last - assignment.free
            self._backend.streams.wait_event(dumped[bisect_left(dumped, row, key=_LAST)].packed)

    def activate(self, load: PassLoad) -> None:
        """Generate rows from their keys and activate all rows; staged memory is free once the loads are done."""
        backend, staged = self._backend, load.layout.staged
        with backend.streams.loading():
            for new in staged.keys:
                arrays, slots = self._device.arrays_G[new.group], load.slots_G[new.group]
                slots = slots[new.first_row : new.first_row + new.keys.size]
                backend.generate(new.table, new.keys, arrays.fields[0], slots, arrays.keys)
            self._device.activate(staged.assignments)
            self._device.write_streams(staged.plan.sub_dataset, staged.assignments, self._keys_of)

    def _transfers(
        self, row_floats: int, runs: Sequence[PageRun], *, relative: bool = False, cut: int = 0
    ) -> list[Transfer]:
        """Divide runs, in moving order, into transfers, of which only one has rows on both sides of ``cut``.

        ``relative``: rows of each are counted from its first one.
        """
        transfers, batch, num_bytes = list[Transfer](), list[PageRun](), 0
        for run in [*(run for run in runs if run.low < run.high), None]:
            is_full = run is None or num_bytes + run.data.nbytes > _TRANSFER_BYTES
            if batch and (is_full or (run is not None and batch[-1].end <= cut < run.end)):
                first, pieces = batch[0].first, self._backend.pieces(row_floats)
                _add_runs(pieces, batch, first if relative else 0)
                transfers.append(Transfer(first, batch[-1].end, pieces))
                batch, num_bytes = [], 0
            if run is not None:
                batch.append(run)
                num_bytes += run.data.nbytes
        return transfers


def _add_runs(pieces: Pieces, runs: Sequence[PageRun], origin: int) -> None:
    """Add all at once: a pass has many, and each call takes the interpreter from the training."""
    rows = np.concatenate([run.layout.page_sizes(run.low, run.high) for run in runs])
    cuts, begin = np.zeros(len(runs) + 1, np.int64), np.zeros(rows.size, np.int64)
    np.cumsum([run.high - run.low for run in runs], out=cuts[1:])
    np.cumsum(rows[:-1], out=begin[1:])
    begin -= begin[cuts[:-1]].repeat(cuts[1:] - cuts[:-1])
    data = [run.data.view(np.float32) for run in runs]
    row_floats = runs[0].layout.row_bytes // 4
    pieces.add_each(np.array([run.first - origin for run in runs]), rows, begin * row_floats, data, cuts)


def _needed(upcoming: PassPlan) -> dict[tuple[int, int], PageRange]:
    """Return the rows that the host keeps until a pass is loaded: those it loads and those cached after it."""
    needed = dict(upcoming.retained)
    for load in upcoming.loads:
        if load.host.first < load.host.last:
            key = load.pass_index, load.group
            last = max(needed[key].last, load.host.last) if key in needed else load.host.last
            needed[key] = PageRange(load.host.first, last)
    return needed
