"""A segment on its way into an engine: blocks are checked, get their checksums, and learn their places."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.layout import CHANGED, KEYS, ROWS, key_page_bounds
from tiercache.store.segment import CHANGED_BYTES, Changed, Segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from tiercache.store.engines.engine import Data, Engine
    from tiercache.store.layout import Checksums, SegmentLayout
    from tiercache.store.row_codec import MovedBlock, RowBlock
    from tiercache.store.table import Group

    Taken = tuple[int, int, NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint32] | None]

_SEAL_BYTES = 64 << 20
"""Of blocks whose checksums are computed by one call: few calls, and little that is left when all is written."""


class SegmentWriter:
    """Writes the blocks of one segment.

    Checksums of ``stable`` ones are computed on a thread of their own while the engine writes.
    """

    def __init__(
        self,
        segment: Segment,
        groups: Sequence[Group],
        blocks: Iterable[RowBlock] | Iterable[MovedBlock],
        checksums: Checksums,
        *,
        stable: bool,
    ) -> None:
        self.segment, self._groups = segment, groups
        self._stored = [bool(segment.changed) and segment.changed[g].stored for g in range(len(segment.layouts))]
        """By group: whether last changes are written."""
        row_bytes = [s.row_bytes + 8 + CHANGED_BYTES * n for s, n in zip(segment.layouts, self._stored, strict=True)]
        self.num_bytes = sum(s.rows * n for s, n in zip(segment.layouts, row_bytes, strict=True))
        """Of all blocks."""
        self._source: Iterator[RowBlock | MovedBlock] = iter(blocks)
        self._checksums, self._stable = checksums, stable
        self._missing = {(g, b) for g, layout in enumerate(segment.layouts) for b in range(layout.num_blocks)}
        self._unsealed: list[Taken] = []
        self._unsealed_bytes = 0
        self._sealer: ThreadPoolExecutor
        self._seals: list[Future[None]] = []

    def write(self, engine: Engine) -> None:
        """Write all blocks; then the segment has its places, and all its checksums.

        Raises what the engine raises, and ValueError for blocks that are not what the layouts say: nothing is left.
        """
        order: list[tuple[int, bytes, int]] = []
        with ThreadPoolExecutor(1, thread_name_prefix="tiercache-checksums") as sealer:
            self._sealer = sealer
            places = engine.write(self._blocks(order), stable=self._stable)
            for (group, kind, block), place in zip(order, places, strict=True):
                self.segment.places[group][kind][block] = place
            try:
                for seal in self._seals:
                    seal.result()
            except BaseException:
                engine.free(self.segment.block(kind, self._groups[group], block) for group, kind, block in order)
                raise

    def _blocks(self, order: list[tuple[int, bytes, int]]) -> Iterator[Data]:
        """Yield all blocks, and add to ``order`` which they are."""
        while self._missing:
            taken = group, block, data, keys, changed = self._next()
            self._check(taken)
            self._unsealed.append(taken)
            self._unsealed_bytes += data.size + keys.nbytes
            if not self._stable:
                self._seal(self._unsealed)
                self._unsealed = []
            elif self._unsealed_bytes >= _SEAL_BYTES:
                self._seal_meanwhile()
            parts = [(ROWS, data), (KEYS, keys.view(np.uint8))]
            if changed is not None and self._stored[group]:
                parts.append((CHANGED, changed.view(np.uint8)))
            for kind, part in parts:
                order.append((group, kind, block))
                yield self.segment.block(kind, self._groups[group], block), part
        if self._stable:
            self._seal_meanwhile()  # while the engine writes what it has

    def _next(self) -> Taken:
        try:
            given = next(self._source)
        except StopIteration:
            raise ValueError(f"append was given {len(self._missing)} blocks too few") from None
        group, block, data, keys = given[:4]
        if (group, block) not in self._missing:
            raise ValueError(f"append was given block {block} of group {group}, which is none or came before")
        self._missing.remove((group, block))
        changed = np.ascontiguousarray(given[4]) if len(given) == 5 else None
        return group, block, data, np.ascontiguousarray(keys), changed

    def _check(self, taken: Taken) -> None:
        group, block, data, keys, changed = taken
        layout = self.segment.layouts[group]
        size = layout.bytes_of_block(block)
        if data.dtype != np.uint8 or data.size != size or not data.flags.c_contiguous:
            raise ValueError(
                f"block {block} of group {group} has {data.size:,} of {data.dtype}: "
                f"it must be {size:,} contiguous bytes"
            )
        if keys.dtype != np.int64 or keys.size != size // layout.row_bytes:
            raise ValueError(
                f"block {block} of group {group} came with {keys.size:,} keys of {keys.dtype}: "
                f"it has {size // layout.row_bytes:,} rows, each with an int64 key"
            )
        if self.segment.changed and (changed is None or changed.dtype != np.uint32 or changed.size != keys.size):
            raise ValueError(f"block {block} of group {group} came without the uint32 last change of each of its rows")

    def _seal_meanwhile(self) -> None:
        """Have the checksums of what came since the last time computed."""
        unsealed, self._unsealed, self._unsealed_bytes = self._unsealed, [], 0
        if unsealed:
            self._seals.append(self._sealer.submit(self._seal, unsealed))

    def _seal(self, unsealed: list[Taken]) -> None:
        """Compute the checksums of blocks, their keys and last changes, by one computation."""
        parts, targets = [], []
        for group, block, data, keys, changed in unsealed:
            layout = self.segment.layouts[group]
            low, high = layout.pages_of_block(block)
            parts.append((data, layout.page_bounds(low, high)))
            targets.append(self.segment.checksums[group][low:high])
            first, last = layout.key_pages_of_block(block)
            bounds = key_page_bounds(keys.size)
            parts.append((keys.view(np.uint8), bounds))
            targets.append(self.segment.key_checksums[group][first:last])
            self.segment.first_keys[group][first:last] = keys[bounds[:-1] // 8]
            if changed is not None and self.segment.changed:
                known = self.segment.changed[group]
                known.oldest_B[block], known.newest_B[block] = changed.min(), changed.max()
                if self._stored[group]:
                    parts.append((changed.view(np.uint8), np.array([0, changed.nbytes])))
                    targets.append(known.checksums_B[block : block + 1])
        sums, begin = self._checksums(parts), 0
        for target in targets:
            target[:] = sums[begin : begin + target.size]
            begin += target.size


def new_segment(
    id_: int, pass_index: int, layouts: Sequence[SegmentLayout], *, within: bool, moved: Sequence[bool] = ()
) -> Segment:
    """Return a segment whose checksums and places are to come; ``moved``: of which layouts last changes are stored."""
    kinds = [(ROWS, KEYS, CHANGED) if stored else (ROWS, KEYS) for stored in moved or [False] * len(layouts)]
    return Segment(
        id=id_,
        pass_index=pass_index,
        within=within,
        layouts=tuple(layouts),
        checksums=tuple(np.zeros(layout.num_pages, np.uint32) for layout in layouts),
        key_checksums=tuple(np.zeros(layout.num_key_pages, np.uint32) for layout in layouts),
        first_keys=tuple(np.zeros(layout.num_key_pages, np.int64) for layout in layouts),
        places=tuple(
            {kind: np.full(layout.num_blocks, -1, np.int64) for kind in of_group}
            for layout, of_group in zip(layouts, kinds, strict=True)
        ),
        changed=tuple(
            Changed.to_come(layout, stored=stored) for layout, stored in zip(layouts, moved, strict=bool(moved))
        ),
    )


def check_layouts(layouts: Sequence[SegmentLayout], groups: Sequence[Group]) -> None:
    """Raise ValueError where layouts are not of the groups' rows."""
    if len(layouts) != len(groups):
        raise ValueError(f"there are {len(layouts)} layouts for {len(groups)} groups: give one for each")
    for group, layout in zip(groups, layouts, strict=True):
        if layout.row_bytes != group.row_bytes:
            raise ValueError(
                f"the layout of group {group.index} has rows of {layout.row_bytes} bytes, not {group.row_bytes}"
            )
        if layout.num_ranges and layout.table_rows_RT.shape[1] != len(group.tables):
            raise ValueError(f"a range of group {group.index} does not count rows of {len(group.tables)} tables")
