"""Segments: what one pass dumped, or a rewrite put in another order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiercache.store.blocks import CHANGED, KEYS, ROWS
from tiercache.store.engine import Block, BlockLayout
from tiercache.store.errors import CorruptStoreError
from tiercache.store.record import decode, encode, whole
from tiercache.store.row_versions import CHANGED_BYTES, Changed
from tiercache.store.segment_layout import SegmentLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.store.table import Group

BASE_PASS = -1
"""The pass of a segment whose rows no pass dumped: a schedule begins with it."""
_PLACES = {ROWS: "rows_at", KEYS: "keys_at", CHANGED: "changed_at"}


def base_pass(first_pass: int) -> int:
    """Return the pass of the segment with which a schedule is entered at ``first_pass``; ``BASE_PASS`` for 0."""
    return BASE_PASS - first_pass


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """The rows that one pass dumped: one layout for each group of the store; immutable."""

    id: int
    """Grows with every segment of a store: of two live rows of one key, that of the larger id is newer."""
    pass_index: int
    """The pass that dumped it; below 0 for a base, as ``base_pass`` says."""
    within: bool
    """Whether a commit inside the pass wrote it: then it holds the whole key set, with next use ``pass_index``. A base
    may stand for that too, where a schedule is entered inside its first pass."""
    layouts: tuple[SegmentLayout, ...]
    """By group; a group that dumped nothing has an empty one."""
    checksums: tuple[NDArray[np.uint32], ...]
    """By group: CRC32C of each page."""
    key_checksums: tuple[NDArray[np.uint32], ...]
    """By group: CRC32C of each key page."""
    first_keys: tuple[NDArray[np.int64], ...]
    """By group: the first key of each key page. A lookup reads only the key pages that may have its keys."""
    places: tuple[dict[bytes, NDArray[np.int64]], ...]
    """By group, for each kind of block that there is: where the engine keeps each block."""
    changed: tuple[Changed, ...] = ()
    """By group, where a rewrite wrote it: when its rows changed. Else all did with the first commit that named it."""

    @property
    def within_pass(self) -> int | None:
        """The pass whose whole key set it holds, for a cursor inside that pass; None where it is not ``within``."""
        if not self.within:
            return None
        return self.pass_index if self.pass_index >= 0 else BASE_PASS - self.pass_index

    @property
    def rows(self) -> int:
        """Rows of all groups."""
        return sum(layout.rows for layout in self.layouts)

    @property
    def row_bytes(self) -> int:
        """Bytes of rows of all groups."""
        return sum(layout.rows * layout.row_bytes for layout in self.layouts)

    @property
    def changed_bytes(self) -> int:
        """Bytes of the last changes that are stored beside them."""
        groups = zip(self.layouts, self.changed, strict=False)
        return sum(CHANGED_BYTES * layout.rows for layout, changed in groups if changed.stored)

    def block(self, kind: bytes, group: Group, index: int) -> Block:
        """Return a block as the engine knows it."""
        return next(one for one in self.blocks(group, index, index + 1) if one.kind == kind)

    def blocks(self, group: Group, first: int, last: int) -> Iterator[Block]:
        """Yield rows, keys and, where they are stored, last changes of blocks [first, last) of a layout."""
        layout, id_, number = self.layouts[group.index], self.id, group.index
        of_blocks, of_row = BlockLayout(group, layout), {ROWS: layout.row_bytes, KEYS: 8, CHANGED: CHANGED_BYTES}
        kinds = [(kind, of_row[kind], places_B[first:last].tolist()) for kind, places_B in self.places[number].items()]
        for i, index in enumerate(range(first, last)):
            rows = min(layout.block_rows, layout.rows - index * layout.block_rows)
            for kind, row_bytes, places in kinds:
                yield Block(kind, id_, number, index, rows * row_bytes, places[i], of_blocks)

    def to_bytes(self) -> bytes:
        """Return its record."""
        arrays: dict[str, NDArray[Any]] = {}
        for group, places in enumerate(self.places):
            arrays |= {f"{_PLACES[kind]}/{group}": places_B for kind, places_B in places.items()}
        layouts = []
        for group, layout in enumerate(self.layouts):
            numbers, of_layout = layout.to_record()
            layouts.append(numbers)
            arrays |= {f"{name}/{group}": array for name, array in of_layout.items()}
            arrays[f"pages/{group}"], arrays[f"key_pages/{group}"] = self.checksums[group], self.key_checksums[group]
            arrays[f"first_keys/{group}"] = self.first_keys[group]
        for group, changed in enumerate(self.changed):
            arrays[f"oldest/{group}"], arrays[f"newest/{group}"] = changed.oldest_B, changed.newest_B
            arrays[f"changed/{group}"] = changed.checksums_B
        values = {"id": self.id, "pass": self.pass_index, "within": self.within, "layouts": layouts}
        return encode("segment", values, arrays)

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Segment:
        """Read a record. Raises CorruptStoreError that calls it ``name``."""
        values, arrays = decode("segment", data, name)
        try:
            groups = range(len(values["layouts"]))
            checksums, key_checksums, first_keys = (
                tuple(arrays[f"{name}/{g}"] for g in groups) for name in ("pages", "key_pages", "first_keys")
            )
            layouts = tuple(
                SegmentLayout.from_record(
                    record, {name: arrays[f"{name}/{g}"] for name in ("next_use", "table_rows")},
                    most_pages=checksums[g].size,
                )
                for g, record in enumerate(values["layouts"])
            )  # fmt: skip
            changed: tuple[Changed, ...] = ()
            if "oldest/0" in arrays:
                changed = tuple(
                    Changed(
                        oldest_B=arrays[f"oldest/{g}"], newest_B=arrays[f"newest/{g}"],
                        checksums_B=arrays[f"changed/{g}"],
                    )
                    for g in range(len(layouts))
                )  # fmt: skip
            first = values["pass"]  # of a base, as Python counts from the end
            pass_index = ~whole(~first, "pass") if isinstance(first, int) and first < 0 else whole(first, "pass")
            segment = cls(
                id=whole(values["id"], "id"), pass_index=pass_index, within=bool(values["within"]),
                layouts=layouts, checksums=checksums, key_checksums=key_checksums,
                first_keys=first_keys, changed=changed,
                places=tuple(
                    {
                        kind: arrays[f"{name}/{g}"]
                        for kind, name in _PLACES.items()
                        if kind != CHANGED or (changed and changed[g].stored)
                    }
                    for g in range(len(layouts))
                ),
            )  # fmt: skip
            for layout, places in zip(layouts, segment.places, strict=True):
                if any(places_B.size != layout.num_blocks for places_B in places.values()):
                    raise ValueError(f"it has other places than those of {layout.num_blocks} blocks")
            for layout, one in zip(layouts, changed, strict=False):
                one.check(layout)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptStoreError(f"{name} cannot be read ({error}): restore the store from a copy") from error
        for layout, *of_group in zip(layouts, checksums, key_checksums, first_keys, strict=True):
            sizes = [array.size for array in of_group]
            if sizes != [layout.num_pages, layout.num_key_pages, layout.num_key_pages]:
                raise CorruptStoreError(
                    f"{name} has {sizes[0]} page and {sizes[1]} key checksums and {sizes[2]} first keys for "
                    f"{layout.num_pages} pages and {layout.num_key_pages} key pages: restore the store from a copy"
                )
        return segment
