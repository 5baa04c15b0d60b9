"""Segments: what one pass dumped, or a rewrite put in another order, and what describes its rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.engines.engine import Blob, BlobRows
from tiercache.store.layout import CHANGED, CHANGED_BYTES, KEYS, ROWS, SegmentLayout, compressed_rows
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
class SegmentMeta:
    """What describes the rows of a segment: a blob of its own, which the segment's first use reads."""

    layouts: tuple[SegmentLayout, ...]
    """By group; a group that dumped nothing has an empty one."""
    checksums: tuple[NDArray[np.uint32], ...]
    """By group: CRC32C of each page."""
    key_checksums: tuple[NDArray[np.uint32], ...]
    """By group: CRC32C of each key page."""
    first_keys: tuple[NDArray[np.int64], ...]
    """By group: the first key of each key page. A lookup reads only the key pages that may have its keys."""
    changed: tuple[Changed, ...] = ()
    """By group, where a rewrite wrote it: when its rows changed. Else all did with the first commit that named it."""

    def to_bytes(self, id_: int, groups: Sequence[Group]) -> bytes:
        """Return the record of segment ``id_``, whose rows are those of ``groups``."""
        arrays: dict[str, NDArray[Any]] = {}
        layouts = []
        for group, layout in enumerate(self.layouts):
            numbers, of_layout = layout.to_record()
            fields = [[field.name, field.dtype, field.width] for field in groups[group].fields]
            names = [table.name for table in groups[group].tables]
            layouts.append({**numbers, "tables": names, "fields": fields})
            arrays |= {f"{name}/{group}": array for name, array in of_layout.items()}
            arrays[f"pages/{group}"], arrays[f"key_pages/{group}"] = self.checksums[group], self.key_checksums[group]
            arrays[f"first_keys/{group}"] = self.first_keys[group]
        for group, changed in enumerate(self.changed):
            arrays[f"oldest/{group}"], arrays[f"newest/{group}"] = changed.oldest_B, changed.newest_B
            arrays[f"changed/{group}"] = changed.checksums_B
        return encode("segment", {"id": id_, "layouts": layouts}, arrays)

    @classmethod
    def from_bytes(cls, data: bytes, id_: int, name: str) -> SegmentMeta:
        """Read the record of segment ``id_``. Raises CorruptStoreError that calls it ``name``."""
        values, arrays = decode("segment", data, name)
        try:
            if whole(values["id"], "id") != id_:
                raise ValueError(f"it is of segment {values['id']}")
            groups = range(len(values["layouts"]))
            checksums, key_checksums, first_keys = (
                tuple(arrays[f"{name}/{g}"] for g in groups) for name in ("pages", "key_pages", "first_keys")
            )
            layouts = tuple(
                SegmentLayout.from_record(
                    {**record, "tables": len(record["tables"])},
                    {name: arrays[f"{name}/{g}"] for name in ("next_use", "table_rows")},
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
                    for g in groups
                )  # fmt: skip
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
        return cls(
            layouts=layouts, checksums=checksums, key_checksums=key_checksums, first_keys=first_keys, changed=changed
        )


class Segment:
    """The rows that one pass dumped: one layout for each group of the store; immutable.

    What describes its rows is read when it is first asked for, from any thread: each of these properties raises
    CorruptStoreError where that cannot be read.
    """

    __slots__ = (
        "__weakref__", "_lock", "_meta", "_read", "id", "meta_bytes", "meta_digest", "name", "pass_index", "within",
    )  # fmt: skip

    def __init__(
        self,
        *,
        id_: int,
        name: str,
        pass_index: int,
        within: bool,
        meta: SegmentMeta | None = None,
        read: Callable[[Segment], SegmentMeta] | None = None,
        meta_bytes: int = 0,
        meta_digest: str = "",
    ) -> None:
        """``meta`` is at hand, or ``read`` reads it; ``meta_bytes`` and ``meta_digest`` are those of its blob."""
        self.id = id_
        """Grows with every segment of a rank: of two live rows of one key, that of the larger id is newer."""
        self.name = name
        """What the names of its blobs begin with."""
        self.pass_index = pass_index
        """The pass that dumped it; below 0 for a base, as ``base_pass`` says."""
        self.within = within
        """Whether a commit inside the pass wrote it: then it holds the whole key set, with next use ``pass_index``. A
        base may stand for that too, where a schedule is entered inside its first pass."""
        self.meta_bytes, self.meta_digest = meta_bytes, meta_digest
        self._meta, self._read, self._lock = meta, read, threading.Lock()

    def __repr__(self) -> str:
        return f"<segment {self.id} of pass {self.pass_index}>"

    @property
    def meta(self) -> SegmentMeta:
        """What describes its rows."""
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
    def checksums(self) -> tuple[NDArray[np.uint32], ...]:
        """By group: CRC32C of each page."""
        return self.meta.checksums

    @property
    def key_checksums(self) -> tuple[NDArray[np.uint32], ...]:
        """By group: CRC32C of each key page."""
        return self.meta.key_checksums

    @property
    def first_keys(self) -> tuple[NDArray[np.int64], ...]:
        """By group: the first key of each key page."""
        return self.meta.first_keys

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
