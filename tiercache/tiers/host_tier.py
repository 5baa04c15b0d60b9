"""The host tier: dumps as blocks in memory, from which later passes load and the writer writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.planning.host_plan import Held
    from tiercache.store.stream import Stream
    from tiercache.tiers.pinned_arena import PinnedArena
    from tiercache.tiers.pinned_region import PinnedRegion


class Run(NamedTuple):
    """Pieces [first, last) of a stream, together in memory."""

    first: int
    last: int
    data: NDArray[np.uint8]


class HostTier:
    """Blocks of earlier dumps, by (pass, group).

    Used by one thread at a time: by the reader behind a load, by the writer when it makes room behind that, and by the
    training thread behind ``PassSwitcher.drain`` or when both rest. The writer also reads blocks at any time.
    """

    def __init__(self, memory: PinnedArena) -> None:
        self.memory = memory
        self._blocks: dict[tuple[int, int], dict[int, PinnedRegion]] = {}
        """By number, without those that were freed."""
        self._streams: dict[tuple[int, int], Stream] = {}

    def enter(self, pass_index: int, group: int, stream: Stream) -> list[PinnedRegion]:
        """Make room for a dump and return its blocks, to be filled."""
        blocks = [self.memory.take(int(n)) for n in stream.block_bytes_B]
        if blocks:
            self._blocks[pass_index, group] = dict(enumerate(blocks))
            self._streams[pass_index, group] = stream
        return blocks

    def keep(self, retained: Mapping[tuple[int, int], Held], *, not_before: int) -> None:
        """Free all that ``retained`` does not name of the dumps before pass ``not_before``."""
        for key in [key for key in self._blocks if key[0] < not_before]:
            held = retained.get(key)
            if held is None:
                self._drop(key)
            else:
                self._shrink(key, held)

    def clear(self) -> None:
        """Free everything."""
        for key in list(self._blocks):
            self._drop(key)

    def stream(self, pass_index: int, group: int) -> Stream:
        """Return how the blocks of a dump are laid out."""
        return self._streams[pass_index, group]

    def runs(self, pass_index: int, group: int, held: Held) -> Iterator[Run]:
        """Yield the pieces of ``held``, block after block."""
        key = pass_index, group
        stream = self._streams[key]
        piece = held.first
        while piece < held.last:
            block = int(stream.piece_block_P[piece])
            last = min(held.last, int(stream.block_piece_B[block + 1]))
            base = int(stream.piece_offset_P[stream.block_piece_B[block]])
            data = self._blocks[key][block].data
            yield Run(
                piece,
                last,
                data[int(stream.piece_offset_P[piece]) - base : int(stream.piece_offset_P[last]) - base],
            )
            piece = last

    def piece(self, pass_index: int, group: int, piece: int) -> NDArray[np.uint8] | None:
        """Return the bytes of one piece, or None where they are not here."""
        blocks = self._blocks.get((pass_index, group))
        if blocks is None:
            return None
        stream = self._streams[pass_index, group]
        block = int(stream.piece_block_P[piece])
        region = blocks.get(block)
        if region is None:
            return None
        base = int(stream.piece_offset_P[stream.block_piece_B[block]])
        low, high = int(stream.piece_offset_P[piece]) - base, int(stream.piece_offset_P[piece + 1]) - base
        return region.data[low:high] if region.holds(low, high) else None

    def _drop(self, key: tuple[int, int]) -> None:
        for region in self._blocks.pop(key).values():
            self.memory.give_back(region)
        del self._streams[key]

    def _shrink(self, key: tuple[int, int], held: Held) -> None:
        stream, blocks = self._streams[key], self._blocks[key]
        low, high = int(stream.piece_offset_P[held.first]), int(stream.piece_offset_P[held.last])
        for block, region in list(blocks.items()):
            base = int(stream.piece_offset_P[stream.block_piece_B[block]])
            end = base + region.data.size
            if end <= low or base >= high:
                self.memory.give_back(blocks.pop(block))
            elif low > base or high < end:
                self.memory.shrink(region, max(0, low - base), min(region.data.size, high - base))
