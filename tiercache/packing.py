"""Packing and unpacking: rows between the slots of the device and blocks in dump order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.device_tier import initial_values
from tiercache.host_plan import Held
from tiercache.kernels.rows import pack, unpack
from tiercache.kernels.switch import take
from tiercache.staging import StagedPieces

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tiercache.device_tier import DeviceTier
    from tiercache.host_tier import HostTier
    from tiercache.positions import Positions
    from tiercache.staging import Staged
    from tiercache.store.stream import Stream


class Packer:
    """Fills the blocks of a dump from the device, and finds the keys of their rows."""

    def __init__(
        self, device: DeviceTier, positions: Positions, keys_of: Callable[[int, int], NDArray[np.int64]]
    ) -> None:
        self._device, self._positions, self._keys_of = device, positions, keys_of

    def pack(
        self,
        group: int,
        stream: Stream,
        block: int,
        slots_K: NDArray[np.int32],
        order: NDArray[np.int32],
        data: NDArray[np.uint8],
    ) -> None:
        """Fill ``data`` with the rows of a block; ``order`` has the positions of the stream's rows."""
        first, last = int(stream.block_first_row_B[block]), int(stream.block_first_row_B[block + 1])
        slots = np.empty(last - first, dtype=np.int32)
        take(slots_K, order[first:last], slots)
        low, high = int(stream.block_piece_B[block]), int(stream.block_piece_B[block + 1])
        pack(self._device.fields_G[group], slots, *_pieces(stream, low, high), data.view(np.float32))

    def keys(
        self, pass_index: int, group: int, order: NDArray[np.int32], stream: Stream, block: int
    ) -> NDArray[np.int64]:
        """Return the keys of a block in the order of its rows."""
        first, last = int(stream.block_first_row_B[block]), int(stream.block_first_row_B[block + 1])
        positions = order[first:last]
        starts = self._positions.table_starts(pass_index, group)
        first_table = self._positions.first_table(group)
        if len(starts) == 2:
            return np.asarray(self._keys_of(pass_index, first_table)[positions])
        tables = np.searchsorted(starts, positions, side="right") - 1
        keys = np.empty(positions.size, dtype=np.int64)
        for i in np.unique(tables):
            mine = tables == i
            keys[mine] = self._keys_of(pass_index, first_table + int(i))[positions[mine] - starts[i]]
        return keys


class Unpacker:
    """Brings staged rows and rows in host blocks into their slots."""

    def __init__(self, device: DeviceTier, host: HostTier, positions: Positions) -> None:
        self._device, self._host, self._positions = device, host, positions

    def unpack(self, staged: Staged) -> None:
        """Load all rows of a visit that are not on the device yet."""
        plan = staged.plan
        first_G = list(plan.kept_G)
        for load in plan.loads:
            first = first_G[load.group]
            first_G[load.group] += load.rows
            if load.host.first < load.host.last:
                stream = self._host.stream(load.visit, load.group)
                for run in self._host.runs(load.visit, load.group, load.host):
                    rows = int(stream.piece_first_row_P[run.first] - stream.piece_first_row_P[load.host.first])
                    self._unpack_pieces(
                        staged, StagedPieces(load.group, first + rows, stream, Held(run.first, run.last), run.data)
                    )  # fmt: skip
        for pieces in staged.pieces:
            self._unpack_pieces(staged, pieces)
        for rows_ in staged.rows:
            fields = self._device.fields_G[rows_.group]
            count = rows_.vectors_RD.shape[0]
            slots = staged.placements[rows_.group].load_K[rows_.first_row : rows_.first_row + count]
            one_piece = np.array([0, count], dtype=np.int64), np.zeros(1, dtype=np.int64)
            unpack(fields[:1], slots, *one_piece, rows_.vectors_RD.reshape(-1))
            for state, value in zip(fields[1:], initial_values(self._positions.groups[rows_.group]), strict=True):
                state[slots] = value

    def _unpack_pieces(self, staged: Staged, pieces: StagedPieces) -> None:
        stream, held = pieces.stream, pieces.held
        rows = int(stream.piece_first_row_P[held.last] - stream.piece_first_row_P[held.first])
        slots = staged.placements[pieces.group].load_K[pieces.first_row : pieces.first_row + rows]
        unpack(
            self._device.fields_G[pieces.group],
            slots,
            *_pieces(stream, held.first, held.last),
            pieces.data.view(np.float32),
        )


def _pieces(stream: Stream, low: int, high: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return first rows (P + 1) and float offsets (P) of pieces [low, high), counted from the first."""
    rows = stream.piece_first_row_P[low : high + 1]
    offsets = stream.piece_offset_P[low:high]
    return rows - rows[0], (offsets - offsets[0]) // 4
