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
        id_: int,
        pass_index: int,
        layouts: Sequence[SegmentLayout],
        groups: Sequence[Group],
        blocks: Iterable[RowBlock] | Iterable[MovedBlock],
        checksums: Checksums,
        *,
        within: bool,
        stable: bool,
        moved: Sequence[bool] = (),
    ) -> None:
        """``moved``: by group, if last changes are stored; empty: no row has one."""
        self._groups = groups
        self._stored = list(moved) or [False] * len(layouts)
        """By group: True if last changes are written."""
        self.segment = Segment(
            id=id_,
            pass_index=pass_index,
            within=within,
            layouts=tuple(layouts),
            checksums=tuple(np.zeros(layout.num_pages, np.uint32) for layout in layouts),
            key_checksums=tuple(np.zeros(layout.num_key_pages, np.uint32) for layout in layouts),
            first_keys=tuple(np.zeros(layout.num_key_pages, np.int64) for layout in layouts),
            places=tuple(
                {
                    kind: np.full(layout.num_blocks, -1, np.int64)
                    for kind in ((ROWS, KEYS, CHANGED) if stored else (ROWS, KEYS))
                }
                for layout, stored in zip(layouts, self._stored, strict=True)
            ),
            changed=tuple(
                Changed.to_come(layout, stored=stored) for layout, stored in zip(layouts, moved, strict=bool(moved))
            ),
        )
        """Its checksums and places are there when it is written."""
        self.written = {
            "rows_written": sum(layout.rows for layout in layouts),
            "row_bytes_written": sum(layout.rows * layout.row_bytes for layout in layouts),
            "key_bytes_written": sum(8 * layout.rows for layout in layouts),
            "changed_bytes_written": sum(
                CHANGED_BYTES * layout.rows for layout, stored in zip(layouts, self._stored, strict=True) if stored
            ),
        }
        """By name of a counter: what the blocks hold."""
        self.num_bytes = sum(self.written.values()) - self.written["rows_written"]
        """Of all blocks."""
        self._source: Iterator[RowBlock | MovedBlock] = iter(blocks)
        self._checksums, self._stable = checksums, stable
        self._missing = {(g, b) for g, layout in enumerate(layouts) for b in range(layout.num_blocks)}
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
            try:
                given = next(self._source)
            except StopIteration:
                raise ValueError(f"append was given {len(self._missing)} blocks too few") from None
            group, block, data, keys = given[:4]
            if (group, block) not in self._missing:
                raise ValueError(f"append was given block {block} of group {group}, which is none or came before")
            self._missing.remove((group, block))
            keys, changed = np.ascontiguousarray(keys), np.ascontiguousarray(given[4]) if len(given) == 5 else None
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
                raise ValueError(
                    f"block {block} of group {group} came without the uint32 last change of each of its rows"
                )
            self._unsealed.append((group, block, data, keys, changed))
            self._unsealed_bytes += data.size + keys.nbytes
            if not self._stable:
                self._seal(self._unsealed)
                self._unsealed = []
            elif self._unsealed_bytes >= _SEAL_BYTES:
                self._seal_meanwhile()
            parts = {ROWS: data, KEYS: keys.view(np.uint8)}
            if changed is not None and self._stored[group]:
                parts[CHANGED] = changed.view(np.uint8)
            for one in self.segment.blocks(self._groups[group], block, block + 1):
                order.append((group, one.kind, block))
                yield one, parts[one.kind]
        if self._stable:
            self._seal_meanwhile()  # while the engine writes what it has

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
            rows = layout.rows_of_pages(np.arange(low, high + 1))
            parts.append((data, (rows - rows[0]) * layout.row_bytes))
            targets.append(self.segment.checksums[group][low:high])
            bounds = key_page_bounds(keys.size)
            first = block * layout.key_pages
            last = first + bounds.size - 1
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
