"""Segments: what one pass dumped, or a rewrite put in another order, and what describes its rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.bits import hash_keys
from tiercache.store.engines.engine import Blob, BlobRows
from tiercache.store.key_map import KeyMap
from tiercache.store.layout import CHANGED, CHANGED_BYTES, KEYS, ROWS, SegmentLayout, compressed_rows
from tiercache.store.paged import CHUNK_BYTES, describe, end_of, places_of
from tiercache.store.records import decode, encode, whole
from tiercache.store.store_errors import CorruptBlockError, CorruptStoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.store.layout import Range
    from tiercache.store.paged import ArrayPlace, PagedArray, PagedArrays
    from tiercache.store.table import Group

    Int64s = NDArray[np.int64]
    Uint32s = NDArray[np.uint32]
    Hashes = NDArray[np.uint64]
    Numbers = NDArray[Any] | PagedArray
    """In memory, or read in place: take slices of it."""


BASE_PASS = -1
"""The pass of a segment whose rows no pass dumped: a schedule begins with it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Changed:
    """The last changes of the rows of one layout, which a rewrite wrote. Shapes: B blocks of it.

    What a pass dumped or a fill took has none: all its rows last changed with the first commit that named it.
    """

    oldest_B: Numbers
    """(B,): the least last change in each block."""
    newest_B: Numbers
    """(B,): the greatest."""
    checksums_B: Numbers
    """(B,): CRC32C of the last changes of each block; (0,) where those of the whole layout are one number, and none is
    stored."""

    @property
    def stored(self) -> bool:
        """True if every block of rows has a block of last changes."""
        return self.checksums_B.size > 0

    def check_sizes(self, layout: SegmentLayout) -> None:
        """Raise ValueError where it is not of ``layout``."""
        blocks = layout.num_blocks
        if not self.oldest_B.size == self.newest_B.size == blocks or self.checksums_B.size not in {0, blocks}:
            raise ValueError(
                f"{self.oldest_B.size}, {self.newest_B.size} and {self.checksums_B.size} numbers say which commits "
                f"changed the rows of {blocks} blocks"
            )


def base_pass(first_pass: int) -> int:
    """Return the pass of the segment with which a schedule is entered at ``first_pass``; ``BASE_PASS`` for 0."""
    return BASE_PASS - first_pass


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SegmentMeta:
    """The description of a segment's rows: a separate blob, whose head is read at the segment's first use.

    Arrays in memory are those of a segment that this process wrote; else they are read in place.
    """

    layouts: tuple[SegmentLayout, ...]
    """By group; a group that dumped nothing has an empty one."""
    checksums: tuple[Numbers, ...]
    """By group: CRC32C of each page (uint32)."""
    key_checksums: tuple[Numbers, ...]
    """By group: CRC32C of each key page (uint32)."""
    first_hashes: tuple[Numbers, ...]
    """By group: the hash of the first key of each key page (uint64). A lookup reads only the key pages that may have
    its keys."""
    maps: tuple[KeyMap | None, ...]
    """By group: in which ranges a key may be; None where there are too few ranges or too many rows for that."""
    changed: tuple[Changed, ...] = ()
    """By group, where a rewrite wrote it: when its rows changed. Else all did with the first commit that named it."""

    def to_bytes(self, id_: int, groups: Sequence[Group]) -> tuple[bytes, list[NDArray[np.uint8]]]:
        """Return the head of segment ``id_``, whose rows are those of ``groups``, and the arrays behind it."""
        small: dict[str, NDArray[Any]] = {}
        large: dict[str, NDArray[Any]] = {}
        layouts, maps = [], []
        for group, layout in enumerate(self.layouts):
            numbers, of_layout = layout.to_record()
            fields = [[field.name, field.dtype, field.width] for field in groups[group].fields]
            names = [table.name for table in groups[group].tables]
            layouts.append({**numbers, "tables": names, "fields": fields})
            small |= {f"{name}/{group}": array for name, array in of_layout.items()}
            large |= {f"pages/{group}": self.checksums[group][:], f"key_pages/{group}": self.key_checksums[group][:]}
            large[f"first_hashes/{group}"] = self.first_hashes[group][:]
            key_map = self.maps[group]
            maps.append(None if key_map is None else key_map.to_record())
            if key_map is not None:
                large |= {f"{name}/{group}": array for name, array in key_map.arrays().items()}
        for group, changed in enumerate(self.changed):
            large |= {f"oldest/{group}": changed.oldest_B[:], f"newest/{group}": changed.newest_B[:]}
            large[f"changed/{group}"] = changed.checksums_B[:]
        described, parts, small["chunks"] = describe(large)
        values = {"id": id_, "layouts": layouts, "maps": maps, "arrays": described}
        return encode("segment", values, small), parts

    def arrays(self) -> Iterator[Numbers]:
        """Yield all arrays behind the head."""
        yield from (*self.checksums, *self.key_checksums, *self.first_hashes)
        for key_map in self.maps:
            yield from () if key_map is None else (key_map.starts, key_map.counts, key_map.entries)
        for changed in self.changed:
            yield from (changed.oldest_B, changed.newest_B, changed.checksums_B)

    @classmethod
    def from_bytes(
        cls, head: bytes, id_: int, name: str, arrays_of: Callable[[dict[str, ArrayPlace], Uint32s], PagedArrays]
    ) -> SegmentMeta:
        """Read the head of segment ``id_``; ``arrays_of`` gives the arrays behind it.

        Raises CorruptStoreError that calls it ``name``.
        """
        values, small = decode("segment", head, name)
        try:
            if whole(values["id"], "id") != id_:
                raise ValueError(f"it is of segment {values['id']}")
            places = places_of(values["arrays"])
            _, num_chunks = end_of(places)
            if small["chunks"].size != num_chunks:
                raise ValueError(f"it has {small['chunks'].size} checksums of {num_chunks} chunks")
            layouts = tuple(
                SegmentLayout.from_record(
                    {**record, "tables": len(record["tables"])},
                    {name: small[f"{name}/{g}"] for name in ("next_use", "table_rows")},
                    most_pages=places[f"pages/{g}"].size,
                )
                for g, record in enumerate(values["layouts"])
            )
            arrays, groups = arrays_of(places, small["chunks"]), range(len(layouts))
            checksums, key_checksums, first_hashes = (
                tuple(arrays.array(f"{name}/{g}") for g in groups) for name in ("pages", "key_pages", "first_hashes")
            )
            maps = tuple(
                None if record is None else KeyMap.from_record(record, arrays, g, layouts[g])
                for g, record in enumerate(values["maps"])
            )
            changed: tuple[Changed, ...] = ()
            if "oldest/0" in places:
                changed = tuple(
                    Changed(**{f"{field}_B": arrays.array(f"{array}/{g}") for field, array in _CHANGED.items()})
                    for g in groups
                )
            for layout, one in zip(layouts, changed, strict=False):
                one.check_sizes(layout)
            for layout, *of_group in zip(layouts, checksums, key_checksums, first_hashes, strict=True):
                sizes = [array.size for array in of_group]
                if sizes != [layout.num_pages, layout.num_key_pages, layout.num_key_pages]:
                    raise ValueError(
                        f"{sizes[0]} page and {sizes[1]} key checksums and {sizes[2]} first hashes are of "
                        f"{layout.num_pages} pages and {layout.num_key_pages} key pages"
                    )
            if len(maps) != len(layouts):
                raise ValueError(f"it has {len(maps)} maps of keys for {len(layouts)} layouts")
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CorruptStoreError(f"{name} cannot be read ({error}): restore the store from a copy") from error
        return cls(
            layouts=layouts, checksums=checksums, key_checksums=key_checksums, first_hashes=first_hashes, maps=maps,
            changed=changed,
        )  # fmt: skip


_CHANGED = {"oldest": "oldest", "newest": "newest", "checksums": "changed"}
"""By field of ``Changed`` the name of its array."""


class Segment:
    """The rows that one pass dumped: one layout for each group of the store; immutable.

    What describes its rows is read when it is first asked for, from any thread: each of these properties raises
    CorruptStoreError where that cannot be read.
    """

    __slots__ = (
        "__weakref__", "_lock", "_meta", "_read", "groups", "head_bytes", "head_digest", "id", "meta_bytes", "name",
        "pass_index", "tombstone", "within",
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
        meta: SegmentMeta | None = None,
        read: Callable[[Segment], SegmentMeta] | None = None,
        meta_bytes: int = 0,
        head_bytes: int = 0,
        head_digest: str = "",
    ) -> None:
        """``meta`` is at hand, or ``read`` reads it: a blob of ``meta_bytes``, whose head has ``head_bytes``."""
        self.id = id_
        """Grows with every segment of a rank: of two live rows of one key, that of the larger id is newer."""
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
        self._meta, self._read, self._lock = meta, read, threading.Lock()

    def __repr__(self) -> str:
        return f"<segment {self.id} of pass {self.pass_index}>"

    def describe(self, meta: SegmentMeta) -> SegmentMeta:
        """Have it described by ``meta`` from now on, which adds what was to come; returns that."""
        self._meta = meta
        return meta

    @property
    def meta(self) -> SegmentMeta:
        """The description of its rows, read at first use."""
        if self._meta is None:
            with self._lock:
                if self._meta is None:
                    assert self._read is not None, "it has one or the other"
                    self._meta = self._read(self)
        return self._meta

    @property
    def layouts(self) -> tuple[SegmentLayout, ...]:
        """By group; a group that dumped nothing has an empty one."""
        return self.meta.layouts

    @property
    def checksums(self) -> tuple[Numbers, ...]:
        """By group: CRC32C of each page."""
        return self.meta.checksums

    @property
    def key_checksums(self) -> tuple[Numbers, ...]:
        """By group: CRC32C of each key page."""
        return self.meta.key_checksums

    @property
    def first_hashes(self) -> tuple[Numbers, ...]:
        """By group: the hash of the first key of each key page."""
        return self.meta.first_hashes

    @property
    def maps(self) -> tuple[KeyMap | None, ...]:
        """By group: in which ranges a key may be; None where nothing says so."""
        return self.meta.maps

    @property
    def changed(self) -> tuple[Changed, ...]:
        """By group, where a rewrite wrote it: when its rows changed."""
        return self.meta.changed

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

    @property
    def meta_blob(self) -> Blob:
        """The blob of what describes its rows."""
        return Blob(meta_name(self.name), self.meta_bytes)

    def blob(self, kind: str, group: Group) -> Blob:
        """Return the blob with its rows, keys or last changes of a group."""
        layout = self.layouts[group.index]
        return Blob(rows_name(self.name, group.index, kind), layout.blob_bytes(kind), BlobRows(group, layout))

    def blobs(self, groups: Sequence[Group]) -> Iterator[Blob]:
        """Yield the blobs with its rows, keys and, where they are stored, last changes, group after group."""
        for group in groups:
            if self.layouts[group.index].rows:
                yield self.blob(ROWS, group)
                yield self.blob(KEYS, group)
                if self.changed and self.changed[group.index].stored:
                    yield self.blob(CHANGED, group)


def first_hashes_of(keys: NDArray[np.int64], rows: Int64s, layout: SegmentLayout, group: Group) -> Hashes:
    """Return the hashes of ``keys`` (n,) of ``rows`` (n,) of a layout, each as a key of its own table."""
    ids = np.array([table.table_id for table in group.tables], np.uint64)
    return hash_keys((keys.view(np.uint64) ^ ids[layout.tables_of_rows(rows)]).view(np.int64), 0)


def most_meta_bytes(layouts: Iterable[SegmentLayout]) -> int:
    """Return about the most bytes of the blob that describes rows in ``layouts``, one for each group."""
    total = _HEAD_BYTES
    for layout in layouts:
        total += layout.next_use_R.nbytes + layout.table_rows_RT.nbytes + _TABLE_BYTES * layout.table_rows_RT.shape[1]
        total += 4 * layout.num_pages + 12 * (layout.num_key_pages + layout.num_blocks) + KeyMap.most_bytes(layout)
        total += _LAYOUT_BYTES
    return total + 4 * -(-total // CHUNK_BYTES)


def meta_name(segment_name: str) -> str:
    """Return the name of the blob that describes the rows of a segment."""
    return f"{segment_name}/meta"


def rows_name(segment_name: str, group: int, kind: str) -> str:
    """Return the name of the blob of a kind with rows of one group of a segment."""
    return f"{segment_name}/{group}/{kind}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RetainedSegment:
    """A segment that a rewrite leaves where it is: all its live rows stay live, some of them stale.

    Retained segments are older than all others that the commit names. A row of theirs is stale where a newer segment
    has its key too. Rows become stale only at the commit that begins a schedule: no pass of it dumps a key whose
    row it left here.
    """

    segment_id: int
    stale_rows: tuple[tuple[int, ...], ...]
    """By group, for each table: how many of its live rows are stale."""


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
