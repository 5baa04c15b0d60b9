"""How the host budget is shared out: pure arithmetic, the same in the plan and in the tiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiercache.planning.positions import Positions
    from tiercache.store.stream import Stream

PAGE_BYTES = 4096
ALIGNED_BYTES = 64 << 10
"""Reads of at least so many bytes are staged as they lie in their pages of the file, and then need no copy."""
MAX_PIECE_BYTES = 64 << 10
CHECKED_BYTES = 4 << 20
"""Bytes of a file of next uses for each checksum in it."""
MAX_BLOCK_BYTES = 16 << 20
MAX_TRANSACTION_BYTES = 64 << 20


def gap_bytes(num_positions: int) -> tuple[int, int]:
    """Return the bytes of the gaps of so many positions, of all passes, and of their checksums in a file."""
    gaps = 8 * num_positions
    return gaps, 4 * -(-gaps // CHECKED_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBudget:
    """Shares of the host budget that do not change from pass to pass; all in bytes."""

    total: int
    """What the user allows: anonymous and pinned memory of rows on the host."""
    evaluation: int
    """Reserved for rows of evaluation passes."""
    transaction: int
    """What the engine is given at once, and what a commit inside a pass packs at a time."""
    piece: int
    """The most bytes of a piece: the unit of checksums and of eviction."""
    block: int
    """The most bytes of a block: the unit of writing and freeing."""
    staged_piece: int
    """The most bytes of a piece that is read: one of a store that was put in order otherwise may be larger."""
    evaluation_given: bool = False
    """Whether the user said how much evaluation may have."""

    @classmethod
    def plan(
        cls, total: int, *, evaluation: int | None, largest_row: int, largest_pass: int, stored_piece: int = 0
    ) -> HostBudget:
        """Share out ``total``: blocks of a 32nd of the largest sub-dataset, transactions of a 16th of the budget.

        Blocks lie between one row (a page) and 16 MiB, transactions between two blocks and 64 MiB. ``stored_piece``
        bytes have the largest piece in the store that a pass waits for.

        Blocks are whole pages, which they take in memory anyway: so one with as many rows as it holds, of a page at
        most, has the pages of a region, and a region that was staging becomes a block with not a page locked anew.
        """
        block = _clamp(paged(largest_pass // 32), max(largest_row, PAGE_BYTES), max(largest_row, MAX_BLOCK_BYTES))
        piece = _clamp(block // 8, largest_row, max(largest_row, MAX_PIECE_BYTES))
        return cls(
            total=total,
            evaluation=total // 16 if evaluation is None else evaluation,
            transaction=_clamp(total // 16, 2 * paged(block), MAX_TRANSACTION_BYTES),
            piece=piece,
            block=block,
            staged_piece=max(piece, stored_piece),
            evaluation_given=evaluation is not None,
        )

    @classmethod
    def of(cls, positions: Positions, total: int, evaluation: int | None, stored: Iterable[Stream] = ()) -> HostBudget:
        """Share out ``total`` for these passes, of which rows wait in the segment streams ``stored``."""
        return cls.plan(
            total,
            evaluation=evaluation,
            largest_row=max(group.row_bytes for group in positions.groups),
            largest_pass=max(positions.row_bytes(p) for p in range(positions.num_passes)),
            stored_piece=max(
                (int(stream.piece_rows_P.max(initial=0)) * stream.row_bytes for stream in stored), default=0
            ),
        )

    def smallest(self, rows: int) -> int:
        """Return the smallest total that leaves ``rows`` bytes for rows: the shares grow with the total."""
        total, before = rows, -1
        while total != before:
            evaluation = self.evaluation if self.evaluation_given else total // 16
            transaction = _clamp(total // 16, 2 * paged(self.block), MAX_TRANSACTION_BYTES)
            total, before = rows + evaluation + transaction, total
        return total

    @property
    def region(self) -> int:
        """Bytes of a region of host memory: whole pages of a block, or of two pieces that are read and are larger."""
        pieces = 2 * self.staged_piece + PAGE_BYTES if self.staged_piece > self.piece else 0
        return paged(max(self.block, pieces))

    @property
    def rows(self) -> int:
        """Bytes left for dumps, staging and cached rows."""
        return self.total - self.evaluation - self.transaction


def paged(num_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
