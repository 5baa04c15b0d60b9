"""The layout of a segment's ranges for planning: what a `Stream` says of pieces, in 24 bytes a range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tiercache.planning.budget import PAGE_BYTES, paged
from tiercache.store.stream import Range, Stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SegmentRanges:
    """The ranges of one group that one pass dumps, cut into the pieces and blocks of the stream they will be.

    Shapes: R ranges, T tables of the group. Numbers of pieces, rows and blocks are those of `stream`.
    """

    row_bytes: int
    piece_rows: int
    block_bytes: int
    next_use_R: Int64s
    """Ascending."""
    rows_RT: NDArray[np.integer]
    """The rows of each table in each range; may be a view of counts that others share."""
    first_row_R: Int64s
    """(R + 1,): the first row of each range, and the number of rows."""
    first_piece_R: Int64s
    """(R + 1,): the first piece of each range, and the number of pieces."""

    @classmethod
    def cut(
        cls, next_use_R: Int64s, rows_RT: NDArray[np.integer], *, row_bytes: int, piece_rows: int, block_bytes: int
    ) -> SegmentRanges:
        """Cut ranges at blocks, and between them every ``piece_rows`` rows, as a stream does."""
        block_rows = block_bytes // row_bytes
        first_row_R = np.zeros(next_use_R.size + 1, dtype=np.int64)
        np.cumsum(rows_RT.sum(axis=1, dtype=np.int64), out=first_row_R[1:])
        low_R, rows_R = first_row_R[:-1], np.diff(first_row_R)
        head_R = np.minimum(-low_R % block_rows, rows_R)  # up to the next block
        full_R, tail_R = np.divmod(rows_R - head_R, block_rows)
        first_piece_R = np.zeros_like(first_row_R)
        np.cumsum(
            -(-head_R // piece_rows) + full_R * -(-block_rows // piece_rows) - (-tail_R // piece_rows),
            out=first_piece_R[1:],
        )
        return cls(
            row_bytes=row_bytes, piece_rows=piece_rows, block_bytes=block_bytes,
            next_use_R=next_use_R, rows_RT=rows_RT, first_row_R=first_row_R, first_piece_R=first_piece_R,
        )  # fmt: skip

    @classmethod
    def of(cls, stream: Stream) -> SegmentRanges:
        """Return the ranges of a stream."""
        tables = max((len(one.table_rows) for one in stream.ranges), default=1)
        return cls(
            row_bytes=stream.row_bytes, piece_rows=stream.piece_rows, block_bytes=stream.block_bytes,
            next_use_R=np.array([one.next_use for one in stream.ranges], dtype=np.int64),
            rows_RT=np.array([one.table_rows for one in stream.ranges], dtype=np.int64).reshape(-1, tables),
            first_row_R=stream.range_first_row_R, first_piece_R=np.array(stream.range_piece_R, dtype=np.int64),
        )  # fmt: skip

    def stream(self) -> Stream:
        """Return the stream that these are the ranges of."""
        ranges = tuple(
            Range(next_use=next_use, table_rows=tuple(rows))
            for next_use, rows in zip(self.next_use_R.tolist(), self.rows_RT.tolist(), strict=True)
        )
        return Stream(row_bytes=self.row_bytes, piece_rows=self.piece_rows, block_bytes=self.block_bytes, ranges=ranges)

    @property
    def rows(self) -> int:
        """Rows of all ranges."""
        return int(self.first_row_R[-1])

    @property
    def num_pieces(self) -> int:
        """Pieces of all ranges."""
        return int(self.first_piece_R[-1])

    @property
    def block_rows(self) -> int:
        """Rows of every block but the last."""
        return self.block_bytes // self.row_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks of all rows."""
        return -(-self.rows // self.block_rows)

    def find(self, next_use: int) -> int | None:
        """Return the index of the range with this next use, or None."""
        index = int(self.next_use_R.searchsorted(next_use))
        return index if index < self.next_use_R.size and self.next_use_R.item(index) == next_use else None

    def rows_in(self, index: int) -> int:
        """Return the rows of a range."""
        return self.first_row_R.item(index + 1) - self.first_row_R.item(index)

    def range_of(self, piece: int) -> int:
        """Return the index of the range that a piece belongs to, or R for the number of pieces."""
        return int(self.first_piece_R.searchsorted(piece, side="right")) - 1

    def row_of(self, piece: int) -> int:
        """Return the first row of a piece, or the number of rows for the number of pieces."""
        index = self.range_of(piece)
        row, inside = self.first_row_R.item(index), piece - self.first_piece_R.item(index)
        if not inside:
            return row
        block_rows, piece_rows = self.block_rows, self.piece_rows
        head = min(-row % block_rows, self.first_row_R.item(index + 1) - row)
        in_head = -(-head // piece_rows)
        if inside < in_head:
            return row + inside * piece_rows
        full, rest = divmod(inside - in_head, -(-block_rows // piece_rows))
        return row + head + full * block_rows + rest * piece_rows

    def bytes_held(self, first: int, last: int) -> int:
        """Return the pages of memory that hold pieces [first, last), at most.

        One page more at either end, as the run may begin and end inside one, and one more where a block ends.
        """
        if first >= last:
            return 0
        low, high = self.row_of(first), self.row_of(last)
        blocks = self.row_of(last - 1) // self.block_rows - low // self.block_rows
        return paged((high - low) * self.row_bytes) + PAGE_BYTES * (1 + blocks)
