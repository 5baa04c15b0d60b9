"""Writing a segment to an engine: blocks are checked, get their checksums, and are put into blobs."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tiercache.store.key_map import KeyMap, needs_map
from tiercache.store.layout import CHANGED, KEY_BYTES, KEYS, ROWS, SegmentLayout, key_page_bounds
from tiercache.store.records import digest
from tiercache.store.segment import Changed, Compute, GroupMeta, Segment, first_hashes_of, meta_to_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.store.engines.engine import Engine, Part
    from tiercache.store.row_codec import MovedBlock, RowBlock
    from tiercache.store.table import Group

    Int64s = NDArray[np.int64]
    Hashes = NDArray[np.uint64]
    Taken = tuple[int, int, NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint32] | None]

_HELD_BYTES = 4 << 20
"""Bytes of stable keys to write together, so that the rows between them are one run in the file."""
_SEAL_BYTES = 64 << 20
"""Bytes of blocks for one call that computes checksums: few calls, and a short tail after the last write."""


class SegmentWriter:
    """Writes the blocks of one segment; checksums of ``stable`` ones are computed on a thread meanwhile."""

    def __init__(
        self,
        segment: Segment,
        layouts: Sequence[SegmentLayout],
        blocks: Iterable[RowBlock] | Iterable[MovedBlock],
        compute: Compute,
        *,
        stable: bool,
        moved: Sequence[bool] = (),
    ) -> None:
        """``moved``: by group, True if last changes are stored; empty: no row has one."""
        self._segment = segment
        """Fully described once it is written."""
        self._meta = tuple(
            GroupMeta(
                layout=layout, checksums=np.zeros(layout.num_pages, np.uint32),
                key_checksums=np.zeros(layout.num_key_pages, np.uint32),
                first_hashes=np.zeros(layout.num_key_pages, np.uint64),
                changed=Changed(*(np.zeros(layout.num_blocks * n, np.uint32) for n in (1, 1, moved[g])))
                if moved else None,
            )
            for g, layout in enumerate(layouts)
        )  # fmt: skip
        """Its arrays are filled as blocks are sealed."""
        segment.describe(self._meta)
        self._lows = [np.empty(one.rows, np.uint32) if needs_map(one) else None for one in layouts]
        """For the map of each group: the last 32 bits of the hash of each key."""
        self.written = {
            "rows_written": segment.rows, "row_bytes_written": segment.row_bytes,
            "key_bytes_written": KEY_BYTES * segment.rows, "changed_bytes_written": segment.changed_bytes,
        }  # fmt: skip
        """Counts of its contents, by name of the counter."""
        self.num_bytes = sum(self.written.values()) - segment.rows
        """Bytes of all blocks."""
        self._source: Iterator[RowBlock | MovedBlock] = iter(blocks)
        self._compute, self._stable = compute, stable
        self._missing = {(g, b) for g, layout in enumerate(layouts) for b in range(layout.num_blocks)}
        self._unsealed: list[Taken] = []
        self._unsealed_bytes = 0
        self._sealer: ThreadPoolExecutor
        self._maps: Future[tuple[KeyMap | None, ...]]
        self._seals: list[Future[None]] = []

    def write(self, engine: Engine) -> bytes:
        """Write all blobs, then the description; returns its head. After an error, also ValueError, nothing is left."""
        blobs = list(self._segment.blobs())
        numbers = {(blob.of.group.index, blob.name.rsplit("/", 1)[1]): i for i, blob in enumerate(blobs) if blob.of}
        with ThreadPoolExecutor(1, thread_name_prefix="tiercache-checksums") as sealer:
            self._sealer = sealer
            engine.put(blobs, self._parts(numbers), stable=self._stable)
            try:
                for seal in self._seals:
                    seal.result()
                return self._write_meta(engine, self._maps.result() if self._stable else self._made_maps())
            except BaseException:
                engine.drop((blob.name, None) for blob in blobs)
                raise

    def _made_maps(self) -> tuple[KeyMap | None, ...]:
        """Return the map of each group, once all its keys were added."""
        maps = tuple(
            None if lows is None else KeyMap.of(one.layout, lows, self._compute.map_entries)
            for one, lows in zip(self._meta, self._lows, strict=True)
        )
        self._lows.clear()
        return maps

    def _write_meta(self, engine: Engine, maps: tuple[KeyMap | None, ...]) -> bytes:
        meta = tuple(replace(one, key_map=key_map) for one, key_map in zip(self._meta, maps, strict=True))
        segment = self._segment
        segment.describe(meta)
        head, parts = meta_to_bytes(meta, segment.id, segment.groups)
        data = np.concatenate([np.frombuffer(head, np.uint8), *parts])
        segment.meta_bytes, segment.head_bytes, segment.head_digest = data.size, len(head), digest(head)
        engine.put([segment.meta_blob], [(0, 0, data)])
        self.written["meta_bytes_written"] = data.size
        return head

    def _parts(self, numbers: Mapping[tuple[int, str], int]) -> Iterator[Part]:
        """Yield the blocks of all blobs; ``numbers`` has the blob number of a group and a kind."""
        pending: list[Part] = []
        held_bytes = 0
        while self._missing:
            try:
                item = next(self._source)
            except StopIteration:
                raise ValueError(f"append was given {len(self._missing)} blocks too few") from None
            group, block, data, keys = item[:4]
            if (group, block) not in self._missing:
                what = f"block {block} of group {group}, which does not exist or was already given"
                raise ValueError(f"append was given {what}")
            self._missing.remove((group, block))
            keys, changed = np.ascontiguousarray(keys), np.ascontiguousarray(item[4]) if len(item) == 5 else None
            layout = self._meta[group].layout
            size = layout.bytes_of_block(block)
            if data.dtype != np.uint8 or data.size != size or not data.flags.c_contiguous:
                raise ValueError(
                    f"block {block} of group {group} has {data.size:,} of {data.dtype}: "
                    f"expected {size:,} contiguous bytes"
                )
            if keys.dtype != np.int64 or keys.size != size // layout.row_bytes:
                raise ValueError(
                    f"block {block} of group {group} came with {keys.size:,} keys of {keys.dtype}: "
                    f"it has {size // layout.row_bytes:,} rows, each with an int64 key"
                )
            has_changed = changed is not None and changed.dtype == np.uint32 and changed.size == keys.size
            if self._meta[group].changed is not None and not has_changed:
                raise ValueError(f"block {block} of group {group} came without uint32 last changes of its rows")
            self._unsealed.append((group, block, data, keys, changed))
            self._unsealed_bytes += data.size + keys.nbytes
            if not self._stable:
                self._seal(self._unsealed)
                self._unsealed = []
            elif self._unsealed_bytes >= _SEAL_BYTES:
                self._seal_meanwhile()
            yield numbers[group, ROWS], layout.byte_in_blob(ROWS, block), data
            pending.append((numbers[group, KEYS], layout.byte_in_blob(KEYS, block), keys))
            held_bytes += keys.nbytes
            if not self._stable or held_bytes >= _HELD_BYTES:
                yield from pending
                pending, held_bytes = [], 0
            if changed is not None and (stored := self._meta[group].changed) is not None and stored.stored:
                yield numbers[group, CHANGED], layout.byte_in_blob(CHANGED, block), changed
        if self._stable:
            self._seal_meanwhile()  # while the engine writes the previous blocks
            self._maps = self._sealer.submit(self._made_maps)
        yield from pending

    def _hashes(self, group: int, block: int, keys: Int64s, starts: Int64s) -> Hashes:
        """Return the hashes of the keys of a block at ``starts``; the map of the group takes all of them."""
        layout, lows = self._meta[group].layout, self._lows[group]
        first_row = block * layout.block_rows
        if lows is None:
            return first_hashes_of(keys[starts], first_row + starts, layout, self._segment.groups[group])
        ids = np.array([table.table_id for table in self._segment.groups[group].tables], np.uint64)
        places, counts = layout.tables_between(first_row, first_row + keys.size)
        hashes = self._compute.hashes(keys, ids[places], counts)
        lows[first_row : first_row + keys.size] = hashes.astype(np.uint32)
        return hashes[starts]

    def _seal_meanwhile(self) -> None:
        """Start computing the checksums of the blocks since the last call."""
        unsealed, self._unsealed, self._unsealed_bytes = self._unsealed, [], 0
        if unsealed:
            self._seals.append(self._sealer.submit(self._seal, unsealed))

    def _seal(self, unsealed: list[Taken]) -> None:
        """Compute the checksums of blocks, their keys and last changes, in one call."""
        parts, targets = [], []
        for group, block, data, keys, changed in unsealed:
            meta = self._meta[group]
            layout, arrays = meta.layout, (meta.checksums, meta.key_checksums, meta.first_hashes, *(meta.changed or ()))
            page_sums, key_sums, first_hashes, *of_changes = cast("tuple[NDArray[Any], ...]", arrays)
            low, high = layout.pages_of_block(block)
            rows = layout.rows_of_pages(np.arange(low, high + 1))
            parts.append((data, (rows - rows[0]) * layout.row_bytes))
            targets.append(page_sums[low:high])
            bounds = key_page_bounds(keys.size)
            first = block * layout.key_pages
            last = first + bounds.size - 1
            parts.append((keys.view(np.uint8), bounds))
            targets.append(key_sums[first:last])
            first_hashes[first:last] = self._hashes(group, block, keys, bounds[:-1] // KEY_BYTES)
            if changed is not None and of_changes:
                oldest_B, newest_B, checksums_B = of_changes
                oldest_B[block], newest_B[block] = changed.min(), changed.max()
                if checksums_B.size:
                    parts.append((changed.view(np.uint8), np.array([0, changed.nbytes])))
                    targets.append(checksums_B[block : block + 1])
        sums, begin = self._compute.checksums(parts), 0
        for target in targets:
            target[:] = sums[begin : begin + target.size]
            begin += target.size


def check_layouts(layouts: Sequence[SegmentLayout], groups: Sequence[Group]) -> None:
    """Raise ValueError if layouts do not fit the groups' rows."""
    if len(layouts) != len(groups):
        raise ValueError(f"there are {len(layouts)} layouts for {len(groups)} groups: pass one for each")
    for group, layout in zip(groups, layouts, strict=True):
        if layout.row_bytes != group.row_bytes:
            found = f"rows of {layout.row_bytes} bytes, not {group.row_bytes}"
            raise ValueError(f"the layout of group {group.index} has {found}")
        if layout.num_ranges and layout.table_rows_RT.shape[1] != len(group.tables):
            raise ValueError(f"a range of group {group.index} does not count rows of {len(group.tables)} tables")
