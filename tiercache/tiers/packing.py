"""Packing and unpacking: rows between the slots of the device and blocks in dump order."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.kernels.arrays import NONE_I4
from tiercache.tiers.device_tier import initial_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.planning.positions import Positions
    from tiercache.planning.visit_plan import VisitPlan
    from tiercache.processors.entries import Array
    from tiercache.processors.processor import Mover, Pieces
    from tiercache.store.stream import Stream
    from tiercache.tiers.device_tier import DeviceTier
    from tiercache.tiers.host_tier import HostTier
    from tiercache.tiers.staging import Staged


_KEY_ROWS = 1 << 17
"""Whose keys are looked up at once, if that is more than a block: each look-up gives the interpreter away."""


class Target(NamedTuple):
    """Where rows [first, last) of a stream go."""

    first: int
    last: int
    pieces: Pieces


class StagedLayout(NamedTuple):
    """What was staged, and where it lies, by group."""

    staged: Staged
    rows_G: list[Pieces]
    vectors_G: list[Pieces]


class Packer:
    """Fills the blocks of a dump from the device, and finds the keys of their rows."""

    def __init__(
        self, device: DeviceTier, mover: Mover, positions: Positions, keys_of: Callable[[int, int], NDArray[np.int64]]
    ) -> None:
        self._device, self._mover, self._positions, self._keys_of = device, mover, positions, keys_of

    def target(self, stream: Stream, first_block: int, blocks: Sequence[NDArray[np.uint8]]) -> Target:
        """Lay out the pieces of neighbouring blocks, given by their bytes. Any thread."""
        pieces, cuts = self._mover.pieces(stream.row_bytes // 4), stream.block_piece_B[first_block:][: len(blocks) + 1]
        *first_row, last = stream.piece_first_row_P[cuts].tolist()
        first = first_row[0] if first_row else last
        of_blocks = zip(first_row, pairwise(cuts.tolist()), blocks, strict=True)
        _add_runs(pieces, [_Run(row - first, stream, low, high, data) for row, (low, high), data in of_blocks])
        return Target(first, last, pieces)

    def pack(self, group: int, order: NDArray[np.int32] | None, target: Target) -> None:
        """Fill blocks; ``order`` has the positions of the stream's rows.

        None: rows stand in the order of their positions. Of an order what these blocks have comes to the device, and
        no more. The bytes are there when a mark that is taken behind this call has passed.
        """
        first, last, pieces = target
        if first == last:
            return
        arrays, slots = self._device.arrays_G[group], self._device.slots_G[group]
        with self._mover.moving():
            if order is None:
                self._mover.pack(arrays.fields, slots[first:last], NONE_I4, pieces)
            else:
                self._mover.pack(arrays.fields, slots, self._mover.place(order[first:last], arrays.order), pieces)

    def keys(
        self, pass_index: int, group: int, order: NDArray[np.int32] | None, stream: Stream
    ) -> Iterator[NDArray[np.int64]]:
        """Yield the keys of each block in the order of its rows, as of `pack`; of many they are looked up together."""
        starts, first_table = self._positions.table_starts(pass_index, group), self._positions.first_table(group)
        keys_T = [np.asarray(self._keys_of(pass_index, first_table + i)) for i in range(len(starts) - 1)]
        first_row, at_once = stream.block_first_row_B.tolist(), max(1, _KEY_ROWS // stream.block_rows)
        for block in range(0, stream.num_blocks, at_once):
            cuts = first_row[block : block + at_once + 1]
            here = slice(cuts[0], cuts[-1])
            positions = np.arange(here.start, here.stop, dtype=np.int32) if order is None else order[here]
            if len(keys_T) == 1:
                keys = keys_T[0][positions]
            else:
                keys = np.empty(positions.size, dtype=np.int64)
                tables = np.searchsorted(starts, positions, side="right") - 1
                for i in np.unique(tables):
                    mine = tables == i
                    keys[mine] = keys_T[i][positions[mine] - starts[i]]
            for first, last in pairwise(cuts):
                yield keys[first - cuts[0] : last - cuts[0]]


class Unpacker:
    """Brings staged rows and rows in host blocks into their slots."""

    def __init__(
        self,
        device: DeviceTier,
        mover: Mover,
        host: HostTier,
        positions: Positions,
        keys_of: Callable[[int, int], NDArray[np.int64]],
    ) -> None:
        self._device, self._mover, self._host = device, mover, host
        self._positions, self._keys_of = positions, keys_of

    def lay_out_held(self, plan: VisitPlan | None) -> list[Pieces]:
        """Lay out what a visit takes from host blocks, by group; None: nothing. By who may use the host tier."""
        runs_G: list[list[_Run]] = [[] for _ in self._positions.groups]
        if plan is not None:
            next_G = list(plan.kept_G)
            for load in plan.loads:
                if load.host.first < load.host.last:
                    first, stream = next_G[load.group], self._host.stream(load.visit, load.group)
                    for low, high, data in self._host.runs(load.visit, load.group, load.host):
                        runs_G[load.group].append(_Run(first, stream, low, high, data))
                        first += int(stream.piece_first_row_P[high] - stream.piece_first_row_P[low])
                next_G[load.group] += load.rows
        return self._laid_out(runs_G)

    def lay_out_staged(self, staged: Staged) -> StagedLayout:
        """Lay out what was staged. Any thread."""
        runs_G: list[list[_Run]] = [[] for _ in self._positions.groups]
        for pieces in staged.pieces:
            runs_G[pieces.group].append(_Run(pieces.first_row, pieces.stream, *pieces.held, pieces.data))
        vectors_G = [self._mover.pieces(group.fields[0].words) for group in self._positions.groups]
        for new in staged.rows:
            one_piece = np.array([new.words_RW.shape[0]]), np.zeros(1, dtype=np.int64)
            vectors_G[new.group].add(new.first_row, *one_piece, new.words_RW.reshape(-1))
        return StagedLayout(staged, self._laid_out(runs_G), vectors_G)

    def _laid_out(self, runs_G: list[list[_Run]]) -> list[Pieces]:
        pieces_G = [self._mover.pieces(group.row_bytes // 4) for group in self._positions.groups]
        for pieces, runs in zip(pieces_G, runs_G, strict=True):
            _add_runs(pieces, runs)
        return pieces_G

    def unpack(self, layout: StagedLayout, held_G: list[Pieces]) -> list[Array]:
        """Load what host memory has of a visit's rows; return the slots of all, by group. Waits for no step."""
        staged, mover, slots_G = layout.staged, self._mover, []
        plan = staged.plan
        first_G = [kept + sum(n.rows for n in plan.loads if n.group == g) for g, kept in enumerate(plan.kept_G)]
        with mover.moving():
            for g, (arrays, group) in enumerate(zip(self._device.arrays_G, self._positions.groups, strict=True)):
                slots = mover.place(staged.placements[g].load_K, arrays.order)
                mover.unpack(arrays.fields, slots, held_G[g])
                mover.unpack(arrays.fields, slots, layout.rows_G[g])
                mover.unpack(arrays.fields[:1], slots, layout.vectors_G[g])
                for state, value in zip(arrays.fields[1:], initial_values(group), strict=True):
                    mover.set_rows(state, slots[first_G[g] : first_G[g] + plan.generated_G[g]], value)
                slots_G.append(slots)
        return slots_G

    def show(self, staged: Staged, slots_G: list[Array]) -> None:
        """Make what the keys say of rows in their slots, and show all; what was staged is free behind it."""
        mover, plan = self._mover, staged.plan
        with mover.moving():
            for due in staged.keys:
                arrays, mine = self._device.arrays_G[due.group], slice(due.first_row, due.first_row + due.keys.size)
                mover.generate(due.table, due.keys, arrays.fields[0], slots_G[due.group][mine], arrays.keys)
            self._device.show(staged.placements)
            self._device.note_keys(plan.pass_index, self._keys_of)
        mover.mark().wait()


class _Run(NamedTuple):
    """Pieces [low, high) of a stream, together in memory, whose rows stand from ``first`` on in the order of moving."""

    first: int
    stream: Stream
    low: int
    high: int
    data: NDArray[np.uint8]


def _add_runs(pieces: Pieces, runs: Sequence[_Run]) -> None:
    """Add all at once: a visit has many, and each call takes the interpreter from the training."""
    runs = [run for run in runs if run.low < run.high]
    if not runs:
        return
    rows = np.concatenate([run.stream.piece_rows_P[run.low : run.high] for run in runs])
    cuts, begin = np.zeros(len(runs) + 1, np.int64), np.zeros(rows.size, np.int64)
    np.cumsum([run.high - run.low for run in runs], out=cuts[1:])
    np.cumsum(rows[:-1], out=begin[1:])
    begin -= begin[cuts[:-1]].repeat(cuts[1:] - cuts[:-1])
    data = [run.data.view(np.float32) for run in runs]
    row_floats = runs[0].stream.row_bytes // 4
    pieces.add_each(np.array([run.first for run in runs]), rows, begin * row_floats, data, cuts)
