"""The budgets of training, and the division of the host budget: pure arithmetic."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tiercache.errors import BudgetError
from tiercache.sizes import parse_bytes
from tiercache.store.initializer import Checkpoint
from tiercache.store.key_map import BUILD_BYTES, MOST_ROWS
from tiercache.store.layout import Range, SegmentLayout, compressed_rows
from tiercache.store.records import integer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tiercache.planning.row_offsets import RowOffsets
    from tiercache.store.table import Group

PAGE_BYTES = 4096
ALIGNED_BYTES = 64 << 10
"""Minimum bytes of a read that is staged at its offset within a page of the file, which saves a copy."""
MAX_PAGE_BYTES = 64 << 10
CHECKED_BYTES = 4 << 20
"""Bytes per checksum in a file of next uses."""
MAX_BLOCK_BYTES = 16 << 20
MAX_TRANSACTION_BYTES = 64 << 20
MAX_OVERHEAD_BYTES = 12 << 20
MAX_SWEEP_BYTES = 512 << 20
SWEPT_KEY_BYTES = 128
"""Maximum bytes per key of a hash range while its uses are found."""
_RANGE_BYTES, _RANGE_TABLE_BYTES = 288, 48
"""Bytes of a range, and of each table in it: its counts and offsets, and its record in the store while it is live."""
_PAGE_RECORD_BYTES = 56
"""Bytes of a page: its offset and its checksum."""
_PASS_BYTES = 8 << 10
"""Bytes of a pass and of each of its groups: its key set, its report, and the arrays of its segment."""
KEY_ORDER_BYTES = 24
"""Maximum bytes per new key while rows of a checkpoint are read: the key, its place in the file, and a copy."""
CHECKPOINT_BYTES = 24 << 20
"""Bytes for reading rows of a checkpoint, besides the order of the keys."""
_INDEX_BYTES = 48
"""Bytes of a row of the pass on the device: slots and orders of three passes, and its key while it is written."""


def distance_bytes(num_positions: int) -> tuple[int, int]:
    """Return the bytes of the distances of all positions of all passes, and of their checksums in a file."""
    distances = 8 * num_positions
    return distances, 4 * -(-distances // CHECKED_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Budgets:
    """Limits of training; those in bytes count for each rank. Raises ValueError for ``commit_every`` below 1."""

    device_budget: int
    """Bytes on the device for rows, slot maps and, if it fits, the index of raw keys."""
    host_budget: int
    """Bytes of anonymous and pinned memory on the host."""
    eval_budget: int | None = None
    """The part of ``host_budget`` that is reserved for evaluation, which may be 0; None: a sixteenth."""
    store_budget: int | None = None
    """Maximum bytes of the store; None: no limit."""
    commit_every: int = 1
    """Passes between commits."""
    pinned: bool = False
    """True if rows travel to a GPU, see ``HostBudget.grain``."""

    def __post_init__(self) -> None:
        if self.commit_every < 1:
            raise ValueError(f"commit_every is {self.commit_every}: expected at least 1 pass")

    @classmethod
    def parse(cls, planned: Budgets | None, **arguments: int | str | None) -> Self:
        """Read the arguments of a cache; those that are None are the plan's. Raises BudgetError."""
        given = {name: value for name, value in arguments.items() if value is not None}
        chosen: dict[str, int | str | None] = ({} if planned is None else asdict(planned)) | given
        device, host = chosen.get("device_budget"), chosen.get("host_budget")
        if device is None or host is None:
            raise BudgetError(
                f"device_budget is {device!r} and host_budget {host!r}: pass both, or the plan of `tiercache plan`"
            )
        every, _ = chosen.pop("commit_every", None), chosen.pop("pinned", None)
        sizes: dict[str, Any] = {
            name: parse_bytes(size, least=0 if name == "eval_budget" else 1)
            for name, size in chosen.items()
            if size is not None
        }
        return cls(commit_every=1 if every is None else integer(every, "commit_every"), **sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBudget:
    """The division of the host budget, the same in all passes; all in bytes."""

    total: int
    """Anonymous and pinned memory on the host: ``Budgets.host_budget``."""
    evaluation: int
    """Reserved for rows of evaluation passes."""
    transaction: int
    """One write to the engine, and one batch of rows that a commit inside a pass packs."""
    page: int
    """Maximum bytes of a page: the unit of checksums and of eviction."""
    block: int
    """Maximum bytes of a block: the unit of writing and freeing."""
    staged_page: int
    """Maximum bytes of a page that is read: pages of a store that was reorganized elsewhere may be larger."""
    evaluation_given: bool = False
    planning: int = 0
    """Records of ranges, pages and passes in planner and store, and the slots and orders of rows."""
    seeded: bool = False
    """True if each epoch has its own order, so that uses are found while other passes train."""
    pinned: bool = False

    @classmethod
    def plan(
        cls, total: int, *, evaluation: int | None, largest_row: int, largest_pass: int, stored_page: int = 0
    ) -> HostBudget:
        """Divide ``total``: blocks of a 32nd of the largest sub-dataset, transactions of a 16th of the budget.

        A block has from one row to 16 MiB, a transaction from two blocks to 64 MiB. A block takes whole pages of
        memory, as a region does, so a staging region becomes a block without locking more memory. ``stored_page``: the
        bytes of the largest page in the store that a pass will load.
        """
        block = _clamp(paged(largest_pass // 32), max(largest_row, PAGE_BYTES), max(largest_row, MAX_BLOCK_BYTES))
        page = _clamp(block // 8, largest_row, max(largest_row, MAX_PAGE_BYTES))
        return cls(
            total=total,
            evaluation=total // 16 if evaluation is None else evaluation,
            transaction=_clamp(total // 16, 2 * paged(block), MAX_TRANSACTION_BYTES),
            page=page,
            block=block,
            staged_page=max(page, stored_page),
            evaluation_given=evaluation is not None,
        )

    @classmethod
    def of(
        cls,
        positions: RowOffsets,
        total: int,
        evaluation: int | None,
        stored: Iterable[SegmentLayout] = (),
        *,
        seeded: bool = False,
        pinned: bool = False,
        records: int = 0,
    ) -> HostBudget:
        """Divide ``total`` for passes that load rows from the layouts ``stored``; records: other bytes of the store."""
        budget = cls.plan(
            total,
            evaluation=evaluation,
            largest_row=max(group.row_bytes for group in positions.groups),
            largest_pass=int((positions.pass_rows @ [group.row_bytes for group in positions.groups]).max()),
            stored_page=max((layout.most_page_rows * layout.row_bytes for layout in stored), default=0),
        )
        planning = _planning_bytes(positions, budget, seeded=seeded) + _checkpoint_bytes(positions) + records
        return replace(budget, planning=planning, seeded=seeded, pinned=pinned)

    def cut(self, group: Group) -> tuple[int, int]:
        """Return the rows of a page and the bytes of a block; compressed blocks have whole parts."""
        page_rows = max(1, self.page // group.row_bytes)
        block_bytes = max(self.block, page_rows * group.row_bytes)
        if group.compression is not None:
            block_bytes -= block_bytes % (group.row_bytes * compressed_rows(group.row_bytes, page_rows))
        return page_rows, block_bytes

    def layout(self, group: Group, ranges: Iterable[Range]) -> SegmentLayout:
        """Cut ranges into pages and blocks."""
        page_rows, block_bytes = self.cut(group)
        return SegmentLayout.of(
            row_bytes=group.row_bytes, page_rows=page_rows, block_bytes=block_bytes, ranges=tuple(ranges)
        )

    def smallest(self, rows: int) -> int:
        """Return the smallest total that leaves ``rows`` bytes for rows; the other parts grow with the total."""
        total, before = rows, -1
        while total != before:
            one = replace(
                self,
                total=total,
                evaluation=self.evaluation if self.evaluation_given else total // 16,
                transaction=_clamp(total // 16, 2 * paged(self.block), MAX_TRANSACTION_BYTES),
            )
            total, before = rows + one.total - one.rows, total
        return total

    @property
    def overhead(self) -> int:
        """Bytes for batches, threads and the allocator: 12 MiB, or an eighth of a small budget."""
        return min(self.total // 8, MAX_OVERHEAD_BYTES)

    @property
    def sweep(self) -> int:
        """Bytes for finding the uses of an epoch; 0 if the order repeats, as that is done before rows are cached."""
        return min(self.total // 16, MAX_SWEEP_BYTES) if self.seeded else 0

    @property
    def keys_per_sweep(self) -> int:
        """Keys of all passes whose uses are found at a time."""
        num_bytes = self.sweep if self.seeded else min(self.total // 4, MAX_SWEEP_BYTES)
        return max(4096, num_bytes // SWEPT_KEY_BYTES)

    @property
    def region(self) -> int:
        """Bytes of a region of host memory, in whole pages of memory: a block, or two larger pages of the store."""
        pages = 2 * self.staged_page + PAGE_BYTES if self.staged_page > self.page else 0
        return paged(max(self.block, pages))

    @property
    def grain(self) -> int:
        """Bytes of host memory that are freed together: a page, or a pinned region, as unpinning waits for the GPU."""
        return self.region if self.pinned else PAGE_BYTES

    @property
    def rows(self) -> int:
        """Bytes left for dumps, staging and cached rows."""
        return self.total - self.evaluation - self.transaction - self.overhead - self.sweep - self.planning


def _planning_bytes(positions: RowOffsets, budget: HostBudget, *, seeded: bool) -> int:
    """Return the maximum bytes of planning; in a seeded order, distances and dumps are of up to two epochs."""
    epochs, rows_PG = 2 if seeded else 1, positions.pass_rows
    total = 0
    for rows_P, group in zip(rows_PG.T, positions.groups, strict=True):
        ranges_P = np.minimum(rows_P, epochs * positions.num_passes)
        cuts_P = rows_P // max(1, budget.page // group.row_bytes) + rows_P // max(1, budget.block // group.row_bytes)
        total += int(ranges_P.sum()) * (_RANGE_BYTES + _RANGE_TABLE_BYTES * len(group.tables))
        total += int((ranges_P + cuts_P).sum()) * _PAGE_RECORD_BYTES
    total += positions.num_passes * (1 + len(positions.groups)) * _PASS_BYTES
    mapped = int(np.minimum(rows_PG, MOST_ROWS).sum(axis=1).max())
    indexed = int(rows_PG.sum(axis=1).max())
    return epochs * total + BUILD_BYTES * mapped + _INDEX_BYTES * indexed


def _checkpoint_bytes(positions: RowOffsets) -> int:
    """Return the maximum bytes of reading rows of checkpoints."""
    read_G = [any(isinstance(one.initializer, Checkpoint) for one in group.tables) for group in positions.groups]
    if not any(read_G):
        return 0
    return CHECKPOINT_BYTES + KEY_ORDER_BYTES * int(positions.pass_rows[:, read_G].max(initial=0))


MOST_SLOTS = (1 << 31) - 1
"""Maximum slots of a group: a slot is an int32."""
_ARRAY_BYTES = 4096
"""Maximum padding of the arrays of a group on the device."""


def reserved_rows(rows_G: Sequence[int], row_bytes_G: Sequence[int], num_bytes: int) -> tuple[int, ...]:
    """Return the slots of each group that fit in ``num_bytes``: the same share of the rows of its largest pass."""
    total = sum(rows * size for rows, size in zip(rows_G, row_bytes_G, strict=True))
    share = min(max(0, num_bytes - _ARRAY_BYTES * len(rows_G)), total)
    return tuple(max(0, min(rows * share // max(1, total), MOST_SLOTS - rows)) for rows in rows_G)


def paged(num_bytes: int, grain: int = PAGE_BYTES) -> int:
    """Round up to whole pages, or to whole multiples of ``grain``."""
    return -(-num_bytes // grain) * grain


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
