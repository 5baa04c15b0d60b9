"""The layout of one group's rows in a segment: computes the bytes of each row.

Shapes: R ranges, T tables of the group.

Rows are in the order of ranges. Blocks hold ``block_bytes // row_bytes`` rows each (the last one fewer), so that
all blocks of a layout take the same room in a file. A page is a run of at most ``page_rows`` rows of one range in
one block, field-major inside: all vectors, then all of each optimizer state. The keys of a block are cut into key
pages of ``KEY_PAGE_ROWS``, whatever their ranges. Memory: 16 bytes for each range, and its counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tiercache.store.files import paged
from tiercache.store.records import whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]


NEVER = (1 << 63) - 1
"""The next use of rows that no pass will need."""
MAX_LAYOUT_BYTES = 1 << 53
"""The largest layout: float64 counts its bytes exactly."""
KEY_PAGE_ROWS = 1024
"""Keys that are read and checked together: 8 KiB."""
COMPRESSED_BYTES = 16 << 10
"""Target size of rows that are compressed together; a read may take up to this much more at each end."""


class Range(NamedTuple):
    """The rows of a segment with one next use."""

    next_use: int
    """The next pass that needs them, or ``NEVER``."""
    table_rows: tuple[int, ...]
    """Rows of each table of the group, in the group's order."""

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(self.table_rows)


class SegmentLayout:
    """The layout of the rows of one group that one pass dumped. Immutable: do not change the arrays."""

    __slots__ = (
        "block_bytes", "block_rows", "first_page_R", "first_row_R", "key_pages", "next_use_R", "num_blocks",
        "num_key_pages", "num_pages", "num_ranges", "page_rows", "pages_per_block", "row_bytes", "rows",
        "table_rows_RT",
    )  # fmt: skip

    def __init__(
        self,
        *,
        row_bytes: int,
        page_rows: int,
        block_bytes: int,
        next_use_R: Int64s,
        table_rows_RT: NDArray[np.integer],
    ) -> None:
        """Cut ranges at blocks, and between them every ``page_rows`` rows.

        ``next_use_R`` rises; empty ranges are allowed and have no page. ``table_rows_RT`` may be a view of counts that
        others share. Raises ValueError for an invalid layout.
        """
        if row_bytes < 1 or page_rows < 1:
            found = f"rows of {row_bytes} bytes and pages of {page_rows} rows"
            raise ValueError(f"a layout has {found}: both must be at least 1")
        self.row_bytes, self.page_rows, self.block_bytes = row_bytes, page_rows, block_bytes
        self.block_rows = block_bytes // row_bytes
        """Rows of every block but the last."""
        if self.block_rows < 1:
            raise ValueError(f"blocks of {block_bytes} bytes cannot hold a row of {row_bytes}: use larger blocks")
        if next_use_R.size and int(next_use_R.min()) < 0:
            raise ValueError(f"next use {next_use_R.min()} of a range is not a pass: it must be 0 .. {NEVER}")
        if np.any(next_use_R[1:] <= next_use_R[:-1]):
            uses = next_use_R.tolist()
            raise ValueError(f"the next uses of a layout are {uses}: they must increase from range to range")
        if table_rows_RT.shape[0] != next_use_R.size:
            raise ValueError(f"a layout has {next_use_R.size} next uses and rows of {table_rows_RT.shape[0]} ranges")
        if table_rows_RT.size and int(table_rows_RT.min()) < 0:
            raise ValueError(f"a range has {table_rows_RT.min()} rows of a table: rows must not be negative")
        rows = float(table_rows_RT.sum(dtype=np.float64))
        if rows * row_bytes > MAX_LAYOUT_BYTES:
            raise ValueError(
                f"a layout has {rows:.0f} rows of {row_bytes} bytes: "
                f"the limit is {MAX_LAYOUT_BYTES} bytes in all, dump fewer"
            )
        self.next_use_R, self.table_rows_RT = next_use_R, table_rows_RT
        self.num_ranges = next_use_R.size
        """Ranges, empty ones too."""
        self.pages_per_block = -(-self.block_rows // page_rows)
        """Pages of a block that one range fills."""
        self.key_pages = -(-self.block_rows // KEY_PAGE_ROWS)
        """Key pages of every block but the last."""
        self.first_row_R = np.zeros(next_use_R.size + 1, dtype=np.int64)
        """(R + 1,): the first row of each range, and the number of rows."""
        np.cumsum(table_rows_RT.sum(axis=1, dtype=np.int64), out=self.first_row_R[1:])
        self.rows = int(self.first_row_R[-1])
        self.num_blocks = -(-self.rows // self.block_rows)
        full, rest = divmod(self.rows, self.block_rows)
        self.num_key_pages = full * self.key_pages - (-rest // KEY_PAGE_ROWS)
        heads_R = np.minimum(-self.first_row_R[:-1] % self.block_rows, np.diff(self.first_row_R))
        full_R, tails_R = np.divmod(np.diff(self.first_row_R) - heads_R, self.block_rows)
        self.first_page_R = np.zeros_like(self.first_row_R)
        """(R + 1,): the first page of each range, and the number of pages."""
        pages_R = -(-heads_R // page_rows) + full_R * self.pages_per_block - (-tails_R // page_rows)
        np.cumsum(pages_R, out=self.first_page_R[1:])
        self.num_pages = int(self.first_page_R[-1])

    @classmethod
    def of(cls, ranges: Iterable[Range], *, row_bytes: int, page_rows: int, block_bytes: int) -> SegmentLayout:
        """Return the layout of ``ranges``. Raises ValueError."""
        ranges = list(ranges)
        tables = {len(rows.table_rows) for rows in ranges} or {0}
        if len(tables) > 1:
            raise ValueError(f"the ranges of a layout count rows of {min(tables)} and of {max(tables)} tables")
        if any(not 0 <= rows.next_use <= NEVER for rows in ranges):
            uses = [rows.next_use for rows in ranges]
            raise ValueError(f"next uses {uses} are not all of a pass: they must be 0 .. {NEVER}")
        return cls(
            row_bytes=row_bytes, page_rows=page_rows, block_bytes=block_bytes,
            next_use_R=np.array([rows.next_use for rows in ranges], dtype=np.int64),
            table_rows_RT=np.array([rows.table_rows for rows in ranges], np.int64).reshape(len(ranges), tables.pop()),
        )  # fmt: skip

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SegmentLayout) and (
            (self.row_bytes, self.page_rows, self.block_bytes) == (other.row_bytes, other.page_rows, other.block_bytes)
            and np.array_equal(self.next_use_R, other.next_use_R)
            and np.array_equal(self.table_rows_RT, other.table_rows_RT)
        )

    def __hash__(self) -> int:
        return hash((self.row_bytes, self.page_rows, self.block_bytes, self.rows, self.num_ranges))

    def __repr__(self) -> str:
        return (
            f"SegmentLayout.of({self.ranges!r}, row_bytes={self.row_bytes}, page_rows={self.page_rows}, "
            f"block_bytes={self.block_bytes})"
        )

    @property
    def ranges(self) -> list[Range]:
        """The ranges, built at each call."""
        counts = zip(self.next_use_R.tolist(), self.table_rows_RT.tolist(), strict=True)
        return [Range(next_use, tuple(rows)) for next_use, rows in counts]

    @property
    def most_page_rows(self) -> int:
        """Maximum rows in a page; an upper bound if ranges are cut by blocks."""
        return min(self.page_rows, self.block_rows, int(np.diff(self.first_row_R).max(initial=0)))

    def range_of_use(self, next_use: int) -> int | None:
        """Return the index of the range with this next use, or None."""
        index = int(self.next_use_R.searchsorted(next_use))
        return index if index < self.next_use_R.size and self.next_use_R.item(index) == next_use else None

    def range_of_page(self, page: int) -> int:
        """Return the index of the range that a page belongs to, or R for the number of pages."""
        return int(self.first_page_R.searchsorted(page, side="right")) - 1

    def rows_of_range(self, index: int) -> tuple[int, int]:
        """Return (low, high): the rows of a range are low, low + 1, ... high - 1."""
        return self.first_row_R.item(index), self.first_row_R.item(index + 1)

    def pages_of_range(self, index: int) -> tuple[int, int]:
        """Return (low, high): the pages of a range are low, low + 1, ... high - 1."""
        return self.first_page_R.item(index), self.first_page_R.item(index + 1)

    def runs_of_table(self, place: int, first_range: int = 0) -> tuple[Int64s, Int64s]:
        """Return first rows and last rows + 1 of one table in each range from ``first_range`` on that has any."""
        if not self.num_ranges:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        counts = self.table_rows_RT[first_range:, place].astype(np.int64)
        before = self.table_rows_RT[first_range:, :place].sum(axis=1, dtype=np.int64)
        low = self.first_row_R[first_range:-1] + before
        return low[counts > 0], (low + counts)[counts > 0]

    def rows_of_table(self, place: int, first_range: int = 0) -> int:
        """Return the rows of one table in the ranges from ``first_range`` on."""
        return int(self.table_rows_RT[first_range:, place].sum(dtype=np.int64)) if self.num_ranges else 0

    def tables_of_rows(self, rows: Int64s) -> Int64s:
        """Return the index in its group of each row's table (n,)."""
        ranges = np.searchsorted(self.first_row_R, rows, side="right") - 1
        ends = np.cumsum(self.table_rows_RT[ranges], axis=1, dtype=np.int64)
        places: Int64s = (ends <= (rows - self.first_row_R[ranges])[:, None]).sum(axis=1)
        return places

    def tables_between(self, low: int, high: int) -> tuple[Int64s, Int64s]:
        """Return the index in its group of the table of each run of rows in [low, high), and the rows of the run."""
        first, last = (int(self.first_row_R.searchsorted(row, side="right")) for row in (low, high - 1))
        ends = self.first_row_R[first - 1] + np.cumsum(self.table_rows_RT[first - 1 : last].reshape(-1), dtype=np.int64)
        bounds = np.clip(np.append(self.first_row_R[first - 1], ends), low, high)
        places: Int64s = np.arange(ends.size) % self.table_rows_RT.shape[1]
        return places, np.diff(bounds)

    def rows_of_block(self, block: int) -> tuple[int, int]:
        """Return (low, high): the rows of a block are low, low + 1, ... high - 1."""
        return block * self.block_rows, min((block + 1) * self.block_rows, self.rows)

    def blocks_between(self, low: int, high: int, most: int | None = None) -> Iterator[tuple[int, int, int]]:
        """Yield the blocks of rows [low, high), and the rows in each, at most ``most`` at a time."""
        while low < high:
            block = low // self.block_rows
            end = min(high, (block + 1) * self.block_rows, low + (most or self.block_rows))
            yield block, low, end
            low = end

    def pages_of_block(self, block: int) -> tuple[int, int]:
        """Return (low, high): the pages of a block are low, low + 1, ... high - 1."""
        low = block * self.block_rows
        return self.page_of_row(low), self.page_of_row(min(low + self.block_rows, self.rows))

    def bytes_of_block(self, block: int) -> int:
        """Return the bytes of the rows of a block."""
        return min(self.block_rows, self.rows - block * self.block_rows) * self.row_bytes

    def byte_of_block(self, block: int) -> int:
        """Return the byte of all rows at which a block begins."""
        return block * self.block_rows * self.row_bytes

    def item_bytes(self, kind: str) -> int:
        """Return the bytes that a blob of a kind has for each row."""
        return self.row_bytes if kind == ROWS else KEY_BYTES if kind == KEYS else CHANGED_BYTES

    def byte_in_blob(self, kind: str, block: int) -> int:
        """Return the byte at which a block begins in the blob of a kind."""
        return block * block_stride(self.block_rows, self.item_bytes(kind))

    def blob_bytes(self, kind: str) -> int:
        """Return the bytes of the blob of a kind: all blocks, and zeros up to the next page after each but the last."""
        return blob_bytes(self.rows, self.block_rows, self.item_bytes(kind))

    def block_of_page(self, page: int) -> int:
        """Return the block of a page."""
        return self.row_of_page(page) // self.block_rows

    def byte_of_page(self, page: int) -> int:
        """Return the byte of all rows at which a page begins, or all bytes for the number of pages."""
        return self.row_of_page(page) * self.row_bytes

    def row_of_page(self, page: int) -> int:
        """Return the first row of a page, or the number of rows for the number of pages."""
        index = int(self.first_page_R.searchsorted(page, side="right")) - 1
        row, inside = self.first_row_R.item(index), page - self.first_page_R.item(index)
        if not inside:
            return row
        head = min(-row % self.block_rows, self.first_row_R.item(index + 1) - row)
        in_head = -(-head // self.page_rows)
        if inside < in_head:
            return row + inside * self.page_rows
        full, rest = divmod(inside - in_head, self.pages_per_block)
        return row + head + full * self.block_rows + rest * self.page_rows

    def page_of_row(self, row: int) -> int:
        """Return the page of a row, or the number of pages for the number of rows."""
        index = int(self.first_row_R.searchsorted(row, side="right")) - 1
        first, page = self.first_row_R.item(index), self.first_page_R.item(index)
        if row == first:
            return page
        head = min(-first % self.block_rows, self.first_row_R.item(index + 1) - first)
        if row - first < head:
            return page + (row - first) // self.page_rows
        full, rest = divmod(row - first - head, self.block_rows)
        return page - (-head // self.page_rows) + full * self.pages_per_block + rest // self.page_rows

    def rows_of_pages(self, pages: Int64s) -> Int64s:
        """Return ``row_of_page`` of each page (n,)."""
        index = np.searchsorted(self.first_page_R, pages, side="right") - 1
        row, inside = self.first_row_R[index], pages - self.first_page_R[index]
        after = self.first_row_R[np.minimum(index + 1, self.num_ranges)]
        head = np.minimum(-row % self.block_rows, after - row)
        in_head = -(-head // self.page_rows)
        full, rest = np.divmod(inside - in_head, self.pages_per_block)
        tail = head + full * self.block_rows + rest * self.page_rows
        found: Int64s = row + np.where(inside < in_head, inside * self.page_rows, tail)
        return found

    def pages_of_rows(self, rows: Int64s) -> Int64s:
        """Return ``page_of_row`` of each row (n,)."""
        index = np.searchsorted(self.first_row_R, rows, side="right") - 1
        first = self.first_row_R[index]
        after = self.first_row_R[np.minimum(index + 1, self.num_ranges)]
        head = np.minimum(-first % self.block_rows, after - first)
        full, rest = np.divmod(rows - first - head, self.block_rows)
        tail = -(-head // self.page_rows) + full * self.pages_per_block + rest // self.page_rows
        found: Int64s = self.first_page_R[index] + np.where(rows - first < head, (rows - first) // self.page_rows, tail)
        return found

    def key_pages_of_rows(self, rows: Int64s) -> Int64s:
        """Return the key page of each row (n,)."""
        blocks, inside = np.divmod(rows, self.block_rows)
        pages: Int64s = blocks * self.key_pages + inside // KEY_PAGE_ROWS
        return pages

    def rows_of_key_pages(self, pages: Int64s) -> tuple[Int64s, Int64s]:
        """Return the first row and the last row + 1 of each key page (n,)."""
        blocks, inside = np.divmod(pages, self.key_pages)
        low = blocks * self.block_rows + inside * KEY_PAGE_ROWS
        high = np.minimum(np.minimum(low + KEY_PAGE_ROWS, (blocks + 1) * self.block_rows), self.rows)
        return low, high

    def page_sizes(self, low: int, high: int) -> Int64s:
        """Return the rows of each of the pages [low, high)."""
        sizes: Int64s = np.diff(self.page_bounds(low, high)) // self.row_bytes
        return sizes

    def page_bounds(self, low: int, high: int) -> Int64s:
        """Return the byte, counted from that of page ``low``, at which each of the pages [low, high] begins."""
        first, last = self.row_of_page(low), self.row_of_page(high)
        ends_R = self.first_row_R[1:]
        if low < high and (  # of one block and one range: all pages but the last have ``page_rows``
            first // self.block_rows == (last - 1) // self.block_rows
            and last <= ends_R[ends_R.searchsorted(first, side="right")]
        ):
            bounds = np.arange(0, (high - low + 1) * self.page_rows, self.page_rows) * self.row_bytes
            bounds[-1] = (last - first) * self.row_bytes
            return bounds
        rows = self.rows_of_pages(np.arange(low, high + 1))
        every: Int64s = (rows - first) * self.row_bytes
        return every

    def to_record(self) -> tuple[dict[str, int], dict[str, NDArray[Any]]]:
        """Return the layout as plain JSON values and arrays."""
        values = {
            "row_bytes": self.row_bytes, "page_rows": self.page_rows, "block_bytes": self.block_bytes,
            "tables": self.table_rows_RT.shape[1],
        }  # fmt: skip
        wide = int(self.table_rows_RT.max(initial=0)) >> 32
        counts = self.table_rows_RT.astype(np.int64 if wide else np.uint32).reshape(-1)
        return values, {"next_use": self.next_use_R, "table_rows": counts}

    @classmethod
    def from_record(cls, values: Any, arrays: Mapping[str, NDArray[Any]], *, most_pages: int) -> SegmentLayout:
        """Build a layout from its record; ``most_pages`` bounds its size. Raises ValueError for anything else."""
        row_bytes, page_rows, block_bytes, tables = (
            whole(values.get(name) if isinstance(values, dict) else None, name)
            for name in ("row_bytes", "page_rows", "block_bytes", "tables")
        )
        next_use_R, counts = arrays["next_use"], arrays["table_rows"]
        if counts.size != next_use_R.size * tables:
            raise ValueError(
                f"a layout's record has {counts.size} numbers of rows for {next_use_R.size} ranges of {tables} tables"
            )
        most_rows = most_pages * max(1, min(page_rows, block_bytes // max(1, row_bytes)))
        if counts.sum(dtype=np.float64) > most_rows:
            raise ValueError(f"a layout's record names {counts.sum()} rows in {most_pages} pages")
        return cls(
            row_bytes=row_bytes, page_rows=page_rows, block_bytes=block_bytes,
            next_use_R=next_use_R, table_rows_RT=counts.reshape(next_use_R.size, tables),
        )  # fmt: skip


def block_stride(block_rows: int, item_bytes: int) -> int:
    """Return the bytes from one block to the next in a blob with ``item_bytes`` per row: whole pages."""
    return paged(block_rows * item_bytes)


def blob_bytes(rows: int, block_rows: int, item_bytes: int) -> int:
    """Return the bytes of a blob with ``item_bytes`` per row, in blocks."""
    if not rows:
        return 0
    full, rest = divmod(rows, block_rows)
    last = rest or block_rows
    return (full - (not rest)) * block_stride(block_rows, item_bytes) + last * item_bytes


def key_page_bounds(num_keys: int) -> Int64s:
    """Return the first byte of each key page in a block of ``num_keys`` keys, and the end."""
    bounds: Int64s = np.append(np.arange(0, 8 * num_keys, 8 * KEY_PAGE_ROWS), 8 * num_keys)
    return bounds


def compressed_rows(row_bytes: int, page_rows: int) -> int:
    """Return how many rows are compressed together if blocks are a multiple of them: a page at most."""
    return max(1, min(page_rows, COMPRESSED_BYTES // row_bytes))


ROWS, KEYS, CHANGED = "rows", "keys", "changed"
"""The kinds of blobs with the rows of a segment: its rows, their keys, and their last changes."""
KEY_BYTES, CHANGED_BYTES = 8, 4
"""Bytes of a row's key, and of its last change."""
