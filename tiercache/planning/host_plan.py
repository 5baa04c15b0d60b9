"""Which rows the host keeps: farthest next use out first, decided from sizes alone.

Farthest-next-use is Belady's MIN (L. A. Belady, 1966); with capacities that change over time it stays optimal
because a row's stay in memory is an interval of visits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tiercache.planning.budget import PAGE_BYTES, paged

if TYPE_CHECKING:
    from tiercache.store.stream import Stream


class Held(NamedTuple):
    """Pieces ``[first, last)`` of one segment stream that the host holds."""

    first: int
    last: int


@dataclass(slots=True)
class HostContent:
    """What the host holds beside dump and staging: for (visit dumped, group) a run of pieces in next-use order."""

    streams: dict[tuple[int, int], Stream] = field(default_factory=dict)
    held: dict[tuple[int, int], Held] = field(default_factory=dict)

    def enter(self, visit: int, group: int, stream: Stream) -> None:
        """Take in a whole dump."""
        if stream.num_pieces:
            self.streams[visit, group] = stream
            self.held[visit, group] = Held(0, stream.num_pieces)

    def find(self, visit: int, group: int) -> Held:
        """Return the pieces held of a segment stream; an empty run where none is."""
        return self.held.get((visit, group), Held(0, 0))

    def keep(self, *, after: int, capacity: int) -> int:
        """Drop rows whose next use is not after visit ``after``, then the farthest, to at most ``capacity`` bytes.

        Returns the bytes held, in whole pages. Equal next uses go by dump order, the oldest kept first.
        """
        candidates = []
        for (visit, group), held in self.held.items():
            stream = self.streams[visit, group]
            for index, rows in enumerate(stream.ranges):
                if rows.next_use > after:
                    low, high = stream.pieces_of(index)
                    low, high = max(low, held.first), min(high, held.last)
                    if low < high:
                        candidates.append((rows.next_use, visit, group, low, high))
        candidates.sort()
        kept: dict[tuple[int, int], Held] = {}
        bytes_of: dict[tuple[int, int], int] = {}
        held_bytes = 0
        for _, visit, group, low, high in candidates:
            key = visit, group
            first = kept[key].first if key in kept else low
            now = bytes_of.get(key, 0)
            last, num_bytes = _fit(self.streams[key], first, low, high, capacity - held_bytes + now)
            if last > low:
                kept[key], bytes_of[key] = Held(first, last), num_bytes
                held_bytes += num_bytes - now
            if last < high:
                break
        self.held = kept
        self.streams = {key: self.streams[key] for key in kept}
        return held_bytes


def _fit(stream: Stream, first: int, low: int, high: int, room: int) -> tuple[int, int]:
    """Return the largest ``last`` in [low, high] for which [first, last) takes at most ``room`` bytes, and how many."""
    num_bytes = _bytes_of(stream, first, high)
    if num_bytes <= room:
        return high, num_bytes
    while low < high:
        middle = (low + high + 1) // 2
        if _bytes_of(stream, first, middle) <= room:
            low = middle
        else:
            high = middle - 1
    return low, _bytes_of(stream, first, low)


def _bytes_of(stream: Stream, first: int, last: int) -> int:
    """Return the pages that hold pieces [first, last): one more at either end, one more where a block ends."""
    if first >= last:
        return 0
    span = int(stream.piece_offset_P[last] - stream.piece_offset_P[first])
    blocks = int(stream.piece_block_P[last - 1] - stream.piece_block_P[first])
    return paged(span) + PAGE_BYTES * (1 + blocks)
