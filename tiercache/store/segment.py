"""Segments: the rows that one pass dumped or a rewrite reordered, their descriptions, and which rows are live."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tiercache.store.bits import hash_keys, hash_runs
from tiercache.store.engines.engine import Blob, BlobRows
from tiercache.store.key_map import KeyMap, map_entries
from tiercache.store.layout import CHANGED, CHANGED_BYTES, KEYS, NEVER, ROWS, Range, SegmentLayout, compressed_rows
from tiercache.store.records import CHUNK_BYTES, decode, describe, encode, end_of, page_checksums, places_of, whole
from tiercache.store.store_errors import parsing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tiercache.store.key_map import Entries
    from tiercache.store.records import ArrayPlace, PagedArray, PagedArrays, Part
    from tiercache.store.table import Group, Table

    Int64s = NDArray[np.int64]
    Uint32s = NDArray[np.uint32]
    Hashes = NDArray[np.uint64]
    Numbers = NDArray[Any] | PagedArray
    """In memory or read in place; use slices."""


class Compute(NamedTuple):
    """The array functions of a store, for any thread; training has kernels that return the same bits."""

    checksums: Callable[[Sequence[Part]], NDArray[np.uint32]] = page_checksums
    hashes: Callable[[NDArray[np.int64], NDArray[np.uint64], NDArray[np.int64]], NDArray[np.uint64]] = hash_runs
    map_entries: Entries = map_entries


BASE_PASS = -1
"""The pass of a segment that no pass dumped: a schedule begins with it."""


class Changed(NamedTuple):
    """The last changes of the rows of one layout, which a rewrite wrote. Shapes: B blocks of it.

    Segments of a pass or a fill have none: all their rows last changed at the first commit that named them.
    """

    oldest_B: Numbers
    """(B,): the least last change in each block."""
    newest_B: Numbers
    """(B,): the greatest."""
    checksums_B: Numbers
    """(B,): CRC32C of the last changes of each block; (0,) if the whole layout has one last change, and none is stored.
    """

    @property
    def stored(self) -> bool:
        """True if every block of rows has a block of last changes."""
        return self.checksums_B.size > 0


def base_pass(first_pass: int) -> int:
    """Return the pass of the segment with which a schedule is entered at ``first_pass``; ``BASE_PASS`` for 0."""
    return BASE_PASS - first_pass


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupMeta:
    """The description of a segment's rows of one group; arrays are in memory, or read in place."""

    layout: SegmentLayout
    """An empty one if the group dumped nothing."""
    checksums: Numbers
    """CRC32C of each page (uint32)."""
    key_checksums: Numbers
    """CRC32C of each key page (uint32)."""
    first_hashes: Numbers
    """The hash of the first key of each key page (uint64). A lookup reads only the key pages that may have its keys."""
    key_map: KeyMap | None = None
    """The ranges that may have a key; None for too few ranges or too many rows."""
    changed: Changed | None = None
    """The last changes, for all groups, if a rewrite wrote it. Otherwise all rows changed at the first commit that
    named it."""

    def check(self) -> None:
        """Raise ValueError if its arrays do not match its layout."""
        layout, blocks = self.layout, self.layout.num_blocks
        sizes = [array.size for array in (self.checksums, self.key_checksums, self.first_hashes)]
        if sizes != [layout.num_pages, layout.num_key_pages, layout.num_key_pages]:
            raise ValueError(
                f"{sizes[0]} page and {sizes[1]} key checksums and {sizes[2]} first hashes are of "
                f"{layout.num_pages} pages and {layout.num_key_pages} key pages"
            )
        sizes = [blocks, blocks, 0] if self.changed is None else [array.size for array in self.changed]
        if not sizes[0] == sizes[1] == blocks or sizes[2] not in {0, blocks}:
            raise ValueError(
                f"{sizes[0]}, {sizes[1]} and {sizes[2]} numbers for the last changes of {blocks} blocks do not match"
            )

    def arrays(self) -> dict[str, Numbers]:
        """Return all arrays except those in ``changed``, by name."""
        own = {"pages": self.checksums, "key_pages": self.key_checksums, "first_hashes": self.first_hashes}
        return own if self.key_map is None else own | self.key_map.arrays()


_CHANGED = ("oldest", "newest", "changed")
"""Names of the arrays of ``Changed``."""


def meta_to_bytes(
    meta: Sequence[GroupMeta], id_: int, groups: Sequence[Group]
) -> tuple[bytes, list[NDArray[np.uint8]]]:
    """Return the head of segment ``id_``, whose rows are described by ``groups``, and the arrays after it."""
    small: dict[str, NDArray[Any]] = {}
    large: dict[str, NDArray[Any]] = {}
    layouts = []
    for g, (one, group) in enumerate(zip(meta, groups, strict=True)):
        numbers, of_layout = one.layout.to_record()
        fields = [[field.name, field.dtype, field.width] for field in group.fields]
        layouts.append({**numbers, "tables": [table.name for table in group.tables], "fields": fields})
        small |= {f"{name}/{g}": array for name, array in of_layout.items()}
        large |= {f"{name}/{g}": array[:] for name, array in one.arrays().items()}
    for g, one in enumerate(meta):
        large |= {f"{name}/{g}": array[:] for name, array in zip(_CHANGED, one.changed or (), strict=False)}
    described, parts, small["chunks"] = describe(large)
    maps = [None if one.key_map is None else one.key_map.to_record() for one in meta]
    return encode("segment", {"id": id_, "layouts": layouts, "maps": maps, "arrays": described}, small), parts


def meta_from_bytes(
    head: bytes, id_: int, name: str, arrays_of: Callable[[dict[str, ArrayPlace], Uint32s], PagedArrays]
) -> tuple[GroupMeta, ...]:
    """Read the head of segment ``id_``; ``arrays_of`` returns the arrays after it.

    Raises CorruptStoreError; ``name`` is its name in messages.
    """
    values, small = decode("segment", head, name)
    with parsing(name):
        if whole(values["id"], "id") != id_:
            raise ValueError(f"it is of segment {values['id']}")
        places = places_of(values["arrays"])
        _, num_chunks = end_of(places)
        if small["chunks"].size != num_chunks:
            raise ValueError(f"it has {small['chunks'].size} checksums of {num_chunks} chunks")
        if len(values["maps"]) != len(values["layouts"]):
            raise ValueError(f"it has {len(values['maps'])} maps of keys for {len(values['layouts'])} layouts")
        arrays, found = arrays_of(places, small["chunks"]), []
        for g, (record, key_map) in enumerate(zip(values["layouts"], values["maps"], strict=True)):
            layout = SegmentLayout.from_record(
                {**record, "tables": len(record["tables"])},
                {name: small[f"{name}/{g}"] for name in ("next_use", "table_rows")},
                most_pages=places[f"pages/{g}"].size,
            )
            checksums, key_checksums, first_hashes = (
                arrays.array(f"{array}/{g}") for array in ("pages", "key_pages", "first_hashes")
            )
            changed = Changed(*(arrays.array(f"{array}/{g}") for array in _CHANGED)) if "oldest/0" in places else None
            found.append(
                GroupMeta(
                    layout=layout, checksums=checksums, key_checksums=key_checksums, first_hashes=first_hashes,
                    key_map=None if key_map is None else KeyMap.from_record(key_map, arrays, g, layout),
                    changed=changed,
                )
            )  # fmt: skip
            found[-1].check()
        return tuple(found)


class Segment:
    """The rows that one pass dumped: one layout for each group of the store; immutable.

    Its description is read on first use, from any thread: each of these properties raises CorruptStoreError if it
    cannot be read.
    """

    __slots__ = (
        "__weakref__", "_layouts", "_lock", "_meta", "_read", "groups", "head_bytes", "head_digest", "id", "meta_bytes",
        "name", "pass_index", "tombstone", "within",
    )  # fmt: skip

    def __init__(
        self,
        *,
        id_: int,
        name: str,
        pass_index: int,
        within: bool,
        groups: Sequence[Group] = (),
        tombstone: bool = False,
        read: Callable[[Segment], tuple[GroupMeta, ...]] | None = None,
        meta_bytes: int = 0,
        head_bytes: int = 0,
        head_digest: str = "",
    ) -> None:
        """``read`` reads its description, a blob of ``meta_bytes`` whose head has ``head_bytes``."""
        self.id = id_
        """Grows with every segment of a rank: of two live rows of one key, the one with the larger id is newer."""
        self.name = name
        """Prefix of the names of its blobs."""
        self.pass_index = pass_index
        """The pass that dumped it; below 0 for a base, as ``base_pass`` says."""
        self.within = within
        """True if a commit inside the pass wrote it: then it holds the whole key set, with next use ``pass_index``. A
        base may do the same if a schedule is entered inside its first pass."""
        self.groups = groups
        """The groups of its layouts: tables as they were when it was written."""
        self.tombstone = tombstone
        """True if its keys were forgotten: they have no row here, and none in older segments."""
        self.meta_bytes, self.head_bytes, self.head_digest = meta_bytes, head_bytes, head_digest
        self._read, self._lock = read, threading.Lock()
        self._meta: tuple[GroupMeta, ...] | None = None
        self._layouts: tuple[SegmentLayout, ...] = ()

    def __repr__(self) -> str:
        return f"<segment {self.id} of pass {self.pass_index}>"

    def describe(self, meta: tuple[GroupMeta, ...]) -> None:
        """Set its description."""
        self._layouts = tuple(one.layout for one in meta)
        self._meta = meta

    @property
    def meta(self) -> tuple[GroupMeta, ...]:
        """The description of its rows, by group, read on first use."""
        if self._meta is None:
            with self._lock:
                if self._meta is None:
                    assert self._read is not None, "it is described or can be read"
                    self.describe(self._read(self))
        assert self._meta is not None, "it was read"
        return self._meta

    @property
    def layouts(self) -> tuple[SegmentLayout, ...]:
        """By group; a group that dumped nothing has an empty one."""
        _ = self.meta
        return self._layouts

    @property
    def changed(self) -> tuple[Changed, ...]:
        """The last changes of its rows, by group, if a rewrite wrote it."""
        return tuple(one.changed for one in self.meta if one.changed is not None)

    @property
    def within_pass(self) -> int | None:
        """The pass whose whole key set it holds, for a cursor inside that pass; None if it is not ``within``."""
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
        """Bytes of stored last changes."""
        stored = [one.layout.rows for one in self.meta if one.changed is not None and one.changed.stored]
        return CHANGED_BYTES * sum(stored)

    @property
    def meta_blob(self) -> Blob:
        """The blob of its description."""
        return Blob(meta_name(self.name), self.meta_bytes)

    def blob(self, kind: str, group: Group) -> Blob:
        """Return the blob with its rows, keys or last changes of a group."""
        layout = self.layouts[group.index]
        return Blob(rows_name(self.name, group.index, kind), layout.blob_bytes(kind), BlobRows(group, layout))

    def blobs(self) -> Iterator[Blob]:
        """Yield the blobs of its rows, keys and, if stored, last changes, group after group."""
        for group in self.groups:
            if self.layouts[group.index].rows:
                yield self.blob(ROWS, group)
                yield self.blob(KEYS, group)
                if (changed := self.meta[group.index].changed) is not None and changed.stored:
                    yield self.blob(CHANGED, group)


def first_hashes_of(keys: NDArray[np.int64], rows: Int64s, layout: SegmentLayout, group: Group) -> Hashes:
    """Return the hashes of ``keys`` (n,) in ``rows`` (n,) of a layout, each with its table's id."""
    ids = np.array([table.table_id for table in group.tables], np.uint64)
    return hash_keys((keys.view(np.uint64) ^ ids[layout.tables_of_rows(rows)]).view(np.int64), 0)


def most_meta_bytes(layouts: Iterable[SegmentLayout]) -> int:
    """Return approximately the maximum bytes of the description of ``layouts``, one for each group."""
    total = _HEAD_BYTES
    for layout in layouts:
        total += layout.next_use_R.nbytes + layout.table_rows_RT.nbytes + _TABLE_BYTES * layout.table_rows_RT.shape[1]
        total += 4 * layout.num_pages + 12 * (layout.num_key_pages + layout.num_blocks) + KeyMap.most_bytes(layout)
        total += _LAYOUT_BYTES
    return total + 4 * -(-total // CHUNK_BYTES)


def meta_name(segment_name: str) -> str:
    """Return the name of a segment's description."""
    return f"{segment_name}/meta"


def rows_name(segment_name: str, group: int, kind: str) -> str:
    """Return the name of a blob of one kind with rows of one group of a segment."""
    return f"{segment_name}/{group}/{kind}"


GROUP_COUNTS = ("first_ranges_SG", "next_uses_SG", "rows_SG", "block_rows_SG", "row_bytes_SG", "changed_SG")
TABLE_COUNTS = ("live_ST", "stale_ST")
COUNTS = (*GROUP_COUNTS, *TABLE_COUNTS)
"""Names of the counts per group, per table, and of both."""
_MOST = 1 << 48
"""More than any number of rows or bytes of a segment: sums and products of a few are exact."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Live:
    """The live rows in S segments of one rank: G groups, and T tables in the order of groups.

    The live rows of a group are the last ones of its layout: from its first live range on.
    """

    first_ranges_SG: Int64s
    """(S, G): the first live range of each layout, or the number of ranges."""
    next_uses_SG: Int64s
    """(S, G): the next use of that range; ``NEVER`` if there is none."""
    rows_SG: Int64s
    """(S, G): rows of each layout, dead ones too."""
    block_rows_SG: Int64s
    """(S, G): rows of each block of it."""
    row_bytes_SG: Int64s
    """(S, G): bytes of a row."""
    changed_SG: Int64s
    """(S, G): 1 if last changes of rows are stored, else 0."""
    live_ST: Int64s
    """(S, T): rows of each table in live ranges, stale ones too."""
    stale_ST: Int64s
    """(S, T): those of them whose key has a row in a newer segment."""
    first_tables: tuple[int, ...]
    """(G + 1): the first table of each group, and the number of tables."""

    @classmethod
    def zeros(cls, segments: int, groups: Sequence[Group]) -> Live:
        """Return counts to fill in."""
        first_tables = (0, *accumulate(len(group.tables) for group in groups))
        shapes = {name: (segments, first_tables[-1] if name in TABLE_COUNTS else len(groups)) for name in COUNTS}
        arrays = {name: np.zeros(shape, np.int64) for name, shape in shapes.items()}
        return cls(**arrays, first_tables=first_tables)

    @classmethod
    def of(cls, segments: Sequence[Segment], groups: Sequence[Group]) -> Live:
        """Return the counts if all rows of ``segments`` are live and not stale."""
        live = cls.zeros(len(segments), groups)
        for row, segment in enumerate(segments):
            live.set_from(row, segment, -1)
        return live

    def taken(self, rows: Sequence[int]) -> Live:
        """Return a copy with the given segments."""
        return replace(self, **{name: getattr(self, name)[list(rows)] for name in COUNTS})

    def joined(self, other: Live) -> Live:
        """Return the counts of these segments followed by those in ``other``."""
        both: dict[str, Any] = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in COUNTS}
        return replace(self, **both)

    def set_from(self, row: int, segment: Segment, first_use: int) -> None:
        """Set a segment's rows with next uses from ``first_use`` on live."""
        for g, layout in enumerate(segment.layouts):
            self.set_group(row, g, segment, int(layout.next_use_R.searchsorted(first_use)))

    def set_group(self, row: int, g: int, segment: Segment, first_range: int) -> None:
        """Set one group's rows in a segment live from a range on."""
        layout, first_table = segment.layouts[g], self.first_tables[g]
        self.first_ranges_SG[row, g] = first_range
        self.next_uses_SG[row, g] = layout.next_use_R[first_range] if first_range < layout.num_ranges else NEVER
        self.rows_SG[row, g], self.block_rows_SG[row, g] = layout.rows, layout.block_rows
        self.row_bytes_SG[row, g] = layout.row_bytes
        self.changed_SG[row, g] = (changed := segment.meta[g].changed) is not None and changed.stored
        live_T = layout.table_rows_RT[first_range:].sum(axis=0, dtype=np.int64) if layout.num_ranges else 0
        self.live_ST[row, first_table : self.first_tables[g + 1]] = live_T

    def fits(self, row: int, segment: Segment) -> bool:
        """Return True unless a segment has other rows than these; stale rows are not checked."""
        actual = self.taken([row])
        for g, layout in enumerate(segment.layouts):
            if (first_range := int(self.first_ranges_SG[row, g])) > layout.num_ranges:
                return False
            actual.set_group(0, g, segment, first_range)
        return all(np.array_equal(getattr(actual, name)[0], getattr(self, name)[row]) for name in COUNTS)

    def check(self) -> None:
        """Raise ValueError for numbers that no store can have."""
        if any(int(getattr(self, name).min(initial=0)) < 0 for name in COUNTS):
            raise ValueError("it has a number below 0")
        counts = [getattr(self, name) for name in COUNTS if name != "next_uses_SG"]
        if any(int(count.max(initial=0)) > _MOST for count in counts):
            raise ValueError(f"it has a number above {_MOST:,}")
        if np.any(self.stale_ST > self.live_ST):
            raise ValueError("more rows of a segment are stale than are live")
        if np.any(self._live_rows() > self.rows_SG) or np.any((self.rows_SG > 0) & (self.block_rows_SG == 0)):
            raise ValueError("more rows of a segment are live than it has in its blocks")

    def _live_rows(self) -> Int64s:
        """Return (S, G): rows in live ranges."""
        return np.stack([self.live_ST[:, a:b].sum(axis=1) for a, b in pairwise(self.first_tables)], axis=1)

    def first_blocks(self) -> Int64s:
        """Return (S, G): the first block of each layout that has a live row; the number of blocks where none has."""
        live_SG = self._live_rows()
        block_rows_SG = np.maximum(self.block_rows_SG, 1)
        dead = (self.rows_SG - live_SG) // block_rows_SG
        return np.where(live_SG > 0, dead, -(-self.rows_SG // block_rows_SG))


Layout = Callable[["Group", Iterable["Range"]], SegmentLayout]
"""Splits ranges of a group's rows into pages and blocks."""
_HEAD_BYTES, _LAYOUT_BYTES, _TABLE_BYTES = 512, 1536, 64
"""Approximate bytes of the header of a segment's metadata: fixed, per layout, and per table."""
_BASE_PAGE_BYTES, _BASE_BLOCK_BYTES = 40 << 10, 4 << 20


def base_layout(group: Group, ranges: Iterable[Range]) -> SegmentLayout:
    """Return the layout of rows that no pass waits for: pages of 40 KiB, blocks of 4 MiB."""
    page_rows = max(1, _BASE_PAGE_BYTES // group.row_bytes)
    block_bytes = max(_BASE_BLOCK_BYTES, page_rows * group.row_bytes)
    if group.compression is not None:
        block_bytes -= block_bytes % (group.row_bytes * compressed_rows(group.row_bytes, page_rows))
    sizes = {"row_bytes": group.row_bytes, "page_rows": page_rows, "block_bytes": block_bytes}
    return SegmentLayout.of(ranges, **sizes)


def base_layouts(
    groups: Iterable[Group], rows: Callable[[Table], int], layout: Layout = base_layout
) -> tuple[SegmentLayout, ...]:
    """Return the layouts of ``rows`` rows of each table without a next use."""
    found = []
    for group in groups:
        counts = tuple(rows(table) for table in group.tables)
        found.append(layout(group, [Range(next_use=NEVER, table_rows=counts)] if any(counts) else []))
    return tuple(found)
