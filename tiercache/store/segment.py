"""Segments: what one pass dumped, or a rewrite put in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tiercache.store.engines.engine import Block, BlockLayout
from tiercache.store.layout import CHANGED, KEYS, ROWS, SegmentLayout, compressed_rows
from tiercache.store.records import decode, encode, whole
from tiercache.store.store_errors import CorruptBlockError, CorruptStoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.store.layout import Range
    from tiercache.store.table import Group

    Int64s = NDArray[np.int64]
    Floats = NDArray[np.float32]


BASE_PASS = -1
"""The pass of a segment whose rows no pass dumped: a schedule begins with it."""
_PLACES = {ROWS: "rows_at", KEYS: "keys_at", CHANGED: "changed_at"}
CHANGED_BYTES = 4
"""Of a row's last change."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Changed:
    """The last changes of the rows of one layout, which a rewrite wrote. Shapes: B blocks of it.

    What a pass dumped or a fill took has none: all its rows last changed with the first commit that named it.
    """

    oldest_B: NDArray[np.uint32]
    """(B,): the least last change in each block."""
    newest_B: NDArray[np.uint32]
    """(B,): the greatest."""
    checksums_B: NDArray[np.uint32]
    """(B,): CRC32C of the last changes of each block; (0,) where those of the whole layout are one number, and none is
    stored."""

    @classmethod
    def to_come(cls, layout: SegmentLayout, *, stored: bool) -> Changed:
        """Return what is still to be filled in."""
        oldest, newest, sums = (np.zeros(n, np.uint32) for n in [layout.num_blocks] * 2 + [layout.num_blocks * stored])
        return cls(oldest_B=oldest, newest_B=newest, checksums_B=sums)

    @property
    def stored(self) -> bool:
        """Whether there is a block of last changes beside each of rows."""
        return self.checksums_B.size > 0

    def check(self, layout: SegmentLayout) -> None:
        """Raise ValueError where it is not of ``layout``, or contradicts itself."""
        blocks = layout.num_blocks
        if not self.oldest_B.size == self.newest_B.size == blocks or self.checksums_B.size not in {0, blocks}:
            raise ValueError(
                f"{self.oldest_B.size}, {self.newest_B.size} and {self.checksums_B.size} numbers say which commits "
                f"changed the rows of {blocks} blocks"
            )
        if np.any(self.oldest_B > self.newest_B):
            raise ValueError("rows of a block were last changed later than the last of them")
        if blocks and not self.stored and self.oldest_B.min() < self.newest_B.max():
            raise ValueError("several commits changed rows, and nothing says which row was changed by which")


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
        layout, number = self.layouts[group.index], group.index
        rows = min(layout.block_rows, layout.rows - index * layout.block_rows)
        size = rows * (layout.row_bytes if kind == ROWS else 8 if kind == KEYS else CHANGED_BYTES)
        place = self.places[number][kind].item(index)
        return Block(kind, self.id, number, index, size, place, BlockLayout(group, layout))

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


@dataclass(frozen=True, kw_only=True, slots=True)
class RetainedSegment:
    """A segment of an earlier schedule, as a commit says what is live in it: the next uses of its ranges are void.

    Retained segments are older than all others that a commit names. A row of theirs is stale where a newer segment
    has its key too. Rows become stale only at the commit that begins a schedule: no pass of it dumps a key whose
    row it left here.
    """

    segment_id: int
    first_ranges: tuple[int, ...]
    """By group: the first live range of its layout."""
    stale_rows: tuple[tuple[int, ...], ...]
    """By group, for each table: how many of its live rows are stale."""

    def to_record(self) -> list[Any]:
        """Return it as plain JSON values."""
        groups = zip(self.first_ranges, self.stale_rows, strict=True)
        return [self.segment_id, *([first, *rows] for first, rows in groups)]

    @classmethod
    def from_record(cls, record: Any) -> Self:
        """Build what ``to_record`` wrote. Raises ValueError and TypeError for anything else."""
        id_, *groups = record
        return cls(
            segment_id=whole(id_, "the id of a retained segment"),
            first_ranges=tuple(whole(first, "a first live range") for first, *_ in groups),
            stale_rows=tuple(tuple(whole(n, "stale rows") for n in rows) for _, *rows in groups),
        )

    def check(self, segment: Segment, groups: Sequence[Group]) -> None:
        """Raise ValueError where ``segment`` has no such ranges, or no more live rows than are said to be stale."""
        if segment.within and segment.pass_index >= 0:
            raise ValueError(
                f"retained segment {segment.id} was written inside a pass: all its rows were needed by that"
            )
        if len(self.first_ranges) != len(groups):
            raise ValueError(f"retained segment {segment.id} has {len(self.first_ranges)} groups of {len(groups)}")
        needed = 0
        for group, first, stale in zip(groups, self.first_ranges, self.stale_rows, strict=True):
            layout = segment.layouts[group.index]
            live = [layout.rows_of_table(place, first) for place in range(len(group.tables))]
            if (
                first > layout.num_ranges
                or len(stale) != len(live)
                or any(a > b for a, b in zip(stale, live, strict=True))
            ):
                raise ValueError(
                    f"retained segment {segment.id} has {live} live rows of group {group.index} from range {first} "
                    f"of {layout.num_ranges} on, and {list(stale)} of them are said to be stale"
                )
            needed += sum(live) - sum(stale)
        if not needed:
            raise ValueError(f"retained segment {segment.id} has stale rows only")


Layout = Callable[["Group", Iterable["Range"]], SegmentLayout]
"""How ranges of a group's rows are cut into pages and blocks."""
_BASE_PAGE_BYTES, _BASE_BLOCK_BYTES = 40 << 10, 4 << 20


def base_layout(group: Group, ranges: Iterable[Range]) -> SegmentLayout:
    """Return the layout of rows that no pass waits for: pages of 40 KiB, blocks of 4 MiB."""
    page_rows = max(1, _BASE_PAGE_BYTES // group.row_bytes)
    block_bytes = max(_BASE_BLOCK_BYTES, page_rows * group.row_bytes)
    if group.compression is not None:
        block_bytes -= block_bytes % (group.row_bytes * compressed_rows(group.row_bytes, page_rows))
    return SegmentLayout.of(
        row_bytes=group.row_bytes, page_rows=page_rows, block_bytes=block_bytes, ranges=tuple(ranges)
    )


def corrupt_block(
    store: str, segment: Segment, group: Group, block: int, seen: str, expected: int | None = None
) -> CorruptBlockError:
    """Return the error of a block that is not what was written; where known, with the checksum ``expected``."""
    tables = tuple(table.name for table in group.tables)
    named = ", ".join(repr(name) for name in tables[:3]) + (f" and {len(tables) - 3} more" if tables[3:] else "")
    wanted = "" if expected is None else f" where {expected:08x} was written"
    return CorruptBlockError(
        f"block {block} of segment {segment.id} (pass {segment.pass_index}; tables {named}) of {store} {seen}{wanted}: "
        "restore the store from a copy, or train again from the start",
        segment=segment.id,
        block=block,
        tables=tables,
    )
