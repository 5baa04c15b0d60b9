"""Packing and unpacking: rows between the slots of the device and blocks in dump order."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.kernels.arrays import NONE_I4
from tiercache.planning.host_plan import CachedRows
from tiercache.rows.device import initial_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.planning.pass_plan import PassPlan
    from tiercache.planning.row_offsets import RowOffsets
    from tiercache.rows.backends.base import Backend, Event, Pieces
    from tiercache.rows.device import DeviceTier, SlotAssignment
    from tiercache.rows.host import HostTier
    from tiercache.rows.pinned import PinnedRegion
    from tiercache.rows.prefetch import Staged
    from tiercache.store.layout import SegmentLayout
    from tiercache.values.ids import Array


_KEY_ROWS = 1 << 17
"""Whose keys are looked up at once, if that is more than a block: each look-up gives the interpreter away."""


_PART_BYTES = 32 << 20
"""Of what is moved by one launch: rows leave for these while others come, in half a millisecond over a fast link."""


class Part(NamedTuple):
    """What one launch moves: of rows that are dumped [first, last), of those that are loaded some before ``last``."""

    first: int
    last: int
    pieces: Pieces


class Departed(NamedTuple):
    """Rows of a group that are dumped from the first one to before ``last``, once a mark has passed."""

    last: int
    packed: Event


class StagedLayout(NamedTuple):
    """What was staged, and where it lies, by group."""

    staged: Staged
    rows_G: list[list[Part]]
    vectors_G: list[Pieces]


class Packer:
    """Fills the blocks of a dump from the device, and finds the keys of their rows."""

    def __init__(
        self,
        device: DeviceTier,
        backend: Backend,
        positions: RowOffsets,
        keys_of: Callable[[int, int], NDArray[np.int64]],
    ) -> None:
        self._device, self._backend, self._positions, self._keys_of = device, backend, positions, keys_of

    def target(self, layout: SegmentLayout, first_block: int, blocks: Sequence[NDArray[np.uint8]]) -> list[Part]:
        """Lay out the pieces of neighboring blocks, given by their bytes. Any thread."""
        numbers = range(first_block, first_block + len(blocks))
        of_blocks = ((layout.rows_of_block(n)[0], layout.pages_of_block(n), blocks[n - first_block]) for n in numbers)
        return _parts(
            self._backend,
            layout.row_bytes // 4,
            [_Run(row, layout, low, high, data) for row, (low, high), data in of_blocks],
        )

    def pack(self, group: int, order: NDArray[np.int32] | None, target: Sequence[Part]) -> list[Departed]:
        """Fill blocks; ``order`` has the positions of the layout's rows.

        None: rows stand in the order of their positions. Of an order what these blocks have comes to the device, and
        no more. The bytes are there when the last mark has passed.
        """
        arrays, slots, departed = self._device.arrays_G[group], self._device.slots_G[group], []
        with self._backend.streams.dumping():
            for first, last, pieces in target:
                if order is None:
                    self._backend.pack(arrays.fields, slots[first:last], NONE_I4, pieces)
                else:
                    mine = self._backend.place(order[first:last], arrays.dump_order)
                    self._backend.pack(arrays.fields, slots, mine, pieces)
                departed.append(Departed(last, self._backend.streams.dumped()))
        return departed

    def keys(
        self, sub_dataset: int, group: int, order: NDArray[np.int32] | None, layout: SegmentLayout
    ) -> Iterator[NDArray[np.int64]]:
        """Yield the keys of each block in the order of its rows, as of `pack`; of many they are looked up together."""
        starts, first_table = self._positions.table_starts(sub_dataset, group), self._positions.first_table(group)
        keys_T = [np.asarray(self._keys_of(sub_dataset, first_table + i)) for i in range(len(starts) - 1)]
        at_once = max(1, _KEY_ROWS // layout.block_rows)
        for block in range(0, layout.num_blocks, at_once):
            blocks = [layout.rows_of_block(b) for b in range(block, min(block + at_once, layout.num_blocks))]
            here = slice(blocks[0][0], blocks[-1][1])
            positions = np.arange(here.start, here.stop, dtype=np.int32) if order is None else order[here]
            if len(keys_T) == 1:
                keys = keys_T[0][positions]
            else:
                keys = np.empty(positions.size, dtype=np.int64)
                tables = np.searchsorted(starts, positions, side="right") - 1
                for i in np.unique(tables):
                    mine = tables == i
                    keys[mine] = keys_T[i][positions[mine] - starts[i]]
            for first, last in blocks:
                yield keys[first - here.start : last - here.start]


class Unpacker:
    """Brings staged rows and rows in host blocks into their slots."""

    def __init__(
        self,
        device: DeviceTier,
        backend: Backend,
        host: HostTier,
        positions: RowOffsets,
        keys_of: Callable[[int, int], NDArray[np.int64]],
    ) -> None:
        self._device, self._backend, self._host = device, backend, host
        self._positions, self._keys_of = positions, keys_of

    def lay_out_held(self, plan: PassPlan | None) -> list[list[Part]]:
        """Lay out what a pass takes from host blocks, by group; None: nothing. By who may use the host tier."""
        runs_G: list[list[_Run]] = [[] for _ in self._positions.groups]
        if plan is not None:
            next_G = list(plan.kept_G)
            for load in plan.loads:
                if load.host.first < load.host.last:
                    first, layout = next_G[load.group], self._host.layout(load.pass_index, load.group)
                    for low, high, data in self._host.runs(load.pass_index, load.group, load.host):
                        runs_G[load.group].append(_Run(first, layout, low, high, data))
                        first += layout.row_of_page(high) - layout.row_of_page(low)
                next_G[load.group] += load.rows
        return self._laid_out(runs_G)

    def lay_out_staged(self, staged: Staged) -> StagedLayout:
        """Lay out what was staged. Any thread."""
        runs_G: list[list[_Run]] = [[] for _ in self._positions.groups]
        for pages in staged.pages:
            runs_G[pages.group].append(_Run(pages.first_row, pages.layout, *pages.held, pages.data))
        vectors_G = [self._backend.pieces(group.fields[0].words) for group in self._positions.groups]
        for new in staged.rows:
            one_piece = np.array([new.words_RW.shape[0]]), np.zeros(1, dtype=np.int64)
            vectors_G[new.group].add(new.first_row, *one_piece, new.words_RW.reshape(-1))
        return StagedLayout(staged, self._laid_out(runs_G), vectors_G)

    def _laid_out(self, runs_G: list[list[_Run]]) -> list[list[Part]]:
        groups = self._positions.groups
        return [
            _parts(self._backend, group.row_bytes // 4, runs, apart=True)
            for group, runs in zip(groups, runs_G, strict=True)
        ]

    def unpack(
        self, layout: StagedLayout, held_G: list[list[Part]], departed_G: Sequence[Sequence[Departed]]
    ) -> list[Array]:
        """Load what host memory has of a pass's rows; return the slots of all, by group. Waits for no step.

        departed_G: what was dumped of the pass before. Rows go to its slots as soon as its rows have left them.
        """
        staged, backend, slots_G = layout.staged, self._backend, []
        plan = staged.plan
        first_G = [kept + sum(n.rows for n in plan.loads if n.group == g) for g, kept in enumerate(plan.kept_G)]
        with backend.streams.loading():
            for g, (arrays, group) in enumerate(zip(self._device.arrays_G, self._positions.groups, strict=True)):
                assignment, departed = staged.assignments[g], departed_G[g]
                slots = backend.place(assignment.load_K, arrays.load_slots)
                for part in sorted([*held_G[g], *layout.rows_G[g]], key=_last_row):
                    self._await_departed(assignment, departed, part.last)
                    backend.unpack(arrays.fields, slots, part.pieces)
                self._await_departed(assignment, departed, assignment.load_K.size)
                backend.unpack(arrays.fields[:1], slots, layout.vectors_G[g])
                for state, value in zip(arrays.fields[1:], initial_values(group), strict=True):
                    backend.set_rows(state, slots[first_G[g] : first_G[g] + plan.generated_G[g]], value)
                slots_G.append(slots)
        return slots_G

    def _await_departed(self, assignment: SlotAssignment, departed: Sequence[Departed], last: int) -> None:
        """Have what comes next come behind the dump of rows in whose slots rows before ``last`` are loaded."""
        if last > assignment.free:
            dumped = departed[-1].last - assignment.departing + last - assignment.free
            self._backend.streams.wait_event(departed[bisect_left(departed, dumped, key=_last_row)].packed)

    def activate(self, staged: Staged, slots_G: list[Array]) -> None:
        """Make what the keys say of rows in their slots, and show all; what was staged is free behind it."""
        backend, plan = self._backend, staged.plan
        with backend.streams.loading():
            for due in staged.keys:
                arrays, mine = self._device.arrays_G[due.group], slice(due.first_row, due.first_row + due.keys.size)
                backend.generate(due.table, due.keys, arrays.fields[0], slots_G[due.group][mine], arrays.keys)
            self._device.activate(staged.assignments)
            self._device.note_keys(plan.sub_dataset, staged.assignments, self._keys_of)
        backend.streams.loaded().wait()


class _Run(NamedTuple):
    """Pages [low, high) of a layout, together in memory, whose rows stand from ``first`` on in the order of moving."""

    first: int
    layout: SegmentLayout
    low: int
    high: int
    data: NDArray[np.uint8]

    @property
    def last(self) -> int:
        """The place behind its rows."""
        return self.first + self.layout.row_of_page(self.high) - self.layout.row_of_page(self.low)


def _last_row(of: Part | Departed) -> int:
    return of.last


def _parts(backend: Backend, row_floats: int, runs: Sequence[_Run], *, apart: bool = False) -> list[Part]:
    """Return the runs, which stand in the order of moving, in as many parts as their bytes ask for.

    Rows of a part are counted from its first one, or, where rows of others stand ``apart`` between, from 0.
    """
    parts, some, num_bytes = list[Part](), list[_Run](), 0
    for run in [*(run for run in runs if run.low < run.high), None]:
        if some and (run is None or num_bytes + run.data.nbytes > _PART_BYTES):
            first, pieces = some[0].first, backend.pieces(row_floats)
            _add_runs(pieces, some, 0 if apart else first)
            parts.append(Part(first, some[-1].last, pieces))
            some, num_bytes = [], 0
        if run is not None:
            some.append(run)
            num_bytes += run.data.nbytes
    return parts


def _add_runs(pieces: Pieces, runs: Sequence[_Run], before: int) -> None:
    """Add all at once: a pass has many, and each call takes the interpreter from the training."""
    rows = np.concatenate([run.layout.page_sizes(run.low, run.high) for run in runs])
    cuts, begin = np.zeros(len(runs) + 1, np.int64), np.zeros(rows.size, np.int64)
    np.cumsum([run.high - run.low for run in runs], out=cuts[1:])
    np.cumsum(rows[:-1], out=begin[1:])
    begin -= begin[cuts[:-1]].repeat(cuts[1:] - cuts[:-1])
    data = [run.data.view(np.float32) for run in runs]
    row_floats = runs[0].layout.row_bytes // 4
    pieces.add_each(np.array([run.first - before for run in runs]), rows, begin * row_floats, data, cuts)


class DumpBufferPool(NamedTuple):
    """For the rows of one group."""

    layout: SegmentLayout
    order: NDArray[np.int32]
    """Their positions."""
    regions: list[PinnedRegion]
    """Their blocks."""
    target: list[Part]


class DumpBuffers(NamedTuple):
    """What a switch needs to know of the host."""

    dumps: list[DumpBufferPool]
    """Where the pass that ends goes, by group."""
    held_G: list[list[Part]]
    """What the pass that begins takes from blocks of earlier dumps."""


def allocate_dump(
    host: HostTier, packer: Packer, unpacker: Unpacker, plan: PassPlan, assignments: Sequence[SlotAssignment],
    upcoming: PassPlan | None,
) -> DumpBuffers:  # fmt: skip
    """Make room for the dump of ``plan``; of the dumps before it the host keeps what the pass after it wants."""
    host.keep({} if upcoming is None else _wanted(upcoming), not_before=plan.pass_index)
    dumps = []
    for g, layout in enumerate(plan.dumps):
        order = assignments[g].dump_order_K
        order = order[order.size - layout.rows :]  # without the kept rows where they are not written
        regions = host.enter(plan.pass_index, g, layout)
        target = packer.target(layout, 0, [region.data for region in regions])
        dumps.append(DumpBufferPool(layout, order, regions, target))
    return DumpBuffers(dumps, unpacker.lay_out_held(upcoming))


def _wanted(upcoming: PassPlan) -> dict[tuple[int, int], CachedRows]:
    """Return what the host holds until the load of a pass is done: what it takes, and what stays beyond it."""
    wanted = dict(upcoming.retained)
    for load in upcoming.loads:
        if load.host.first < load.host.last:
            key = load.pass_index, load.group
            last = max(wanted[key].last, load.host.last) if key in wanted else load.host.last
            wanted[key] = CachedRows(load.host.first, last)
    return wanted
