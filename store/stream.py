"""The layout of a segment stream: which bytes hold which rows, derived from four values.

Shapes: R ranges, P pieces, B blocks of one stream.

Rows stand in the order of ranges. Blocks hold ``block_bytes // row_bytes`` rows each (the last one fewer), so that
all blocks of a stream take the same room in a file. A piece is a run of at most ``piece_rows`` rows of one range in
one block, field-major inside: all vectors, then all of each optimizer state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.record import whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]

NEVER = (1 << 63) - 1
"""The next use of rows that no pass will need."""
MOST_BYTES = 1 << 53
"""The most of a stream: what stands where in it is counted without loss."""
COMPRESSED_BYTES = 16 << 10
"""Of rows that are compressed together: what is read beside a range, at each of its ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """The rows of a segment stream with one next use."""

    next_use: int
    """The next pass that needs them, or ``NEVER``."""
    table_rows: tuple[int, ...]
    """Rows of each table of the group, in the group's order."""

    def __post_init__(self) -> None:
        if not 0 <= self.next_use <= NEVER:
            raise ValueError(f"next use {self.next_use} of a range is no pass: it must be 0 .. {NEVER}")
        if any(rows < 0 for rows in self.table_rows):
            raise ValueError(f"a range has {min(self.table_rows)} rows of a table: rows must not be negative")

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(self.table_rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """The layout of the rows that one pass dumped of one group. The arrays are derived: do not change them."""

    row_bytes: int
    """Bytes of a row."""
    piece_rows: int
    """The most rows of a piece."""
    block_bytes: int
    """The most bytes of a block."""
    ranges: tuple[Range, ...]
    """In the order of next use; empty ranges are allowed and have no piece."""

    rows: int = field(init=False, repr=False, compare=False)
    num_pieces: int = field(init=False, repr=False, compare=False)
    num_blocks: int = field(init=False, repr=False, compare=False)
    block_rows: int = field(init=False, repr=False, compare=False)
    """Rows of every block but the last."""
    range_first_row_R: Int64s = field(init=False, repr=False, compare=False)
    """(R + 1,): the first row of each range, and the number of rows."""
    range_piece_R: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """(R + 1,): the first piece of each range, and the number of pieces."""
    piece_first_row_P: Int64s = field(init=False, repr=False, compare=False)
    """(P + 1,): the first row of each piece, and the number of rows."""
    piece_rows_P: Int64s = field(init=False, repr=False, compare=False)
    piece_offset_P: Int64s = field(init=False, repr=False, compare=False)
    """(P + 1,): the byte of the stream at which each piece begins, and the bytes of the stream."""
    piece_range_P: Int64s = field(init=False, repr=False, compare=False)
    piece_block_P: Int64s = field(init=False, repr=False, compare=False)
    block_piece_B: Int64s = field(init=False, repr=False, compare=False)
    """(B + 1,): the first piece of each block, and the number of pieces."""
    block_first_row_B: Int64s = field(init=False, repr=False, compare=False)
    """(B + 1,): the first row of each block, and the number of rows."""
    block_bytes_B: Int64s = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.row_bytes < 1 or self.piece_rows < 1:
            raise ValueError(
                f"a stream has rows of {self.row_bytes} bytes and pieces of {self.piece_rows} rows: "
                "both must be at least 1"
            )
        block_rows = self.block_bytes // self.row_bytes
        if block_rows < 1:
            raise ValueError(
                f"blocks of {self.block_bytes} bytes cannot hold a row of {self.row_bytes}: make them larger"
            )
        rows = sum(rows.rows for rows in self.ranges)
        if rows * self.row_bytes > MOST_BYTES:
            raise ValueError(
                f"a stream has {rows} rows of {self.row_bytes} bytes: all may have {MOST_BYTES} at most, dump fewer"
            )
        uses = [rows.next_use for rows in self.ranges]
        if any(b <= a for a, b in pairwise(uses)):
            raise ValueError(f"the next uses of a stream are {uses}: they must increase from range to range")
        derived = _lay_out([rows.rows for rows in self.ranges], self.piece_rows, block_rows, self.row_bytes)
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def pieces_of(self, range_index: int) -> tuple[int, int]:
        """Return (low, high): the pieces of a range are low, low + 1, ... high - 1."""
        return self.range_piece_R[range_index], self.range_piece_R[range_index + 1]

    def to_record(self) -> dict[str, Any]:
        """Return the stream as plain JSON values."""
        return {
            "row_bytes": self.row_bytes,
            "piece_rows": self.piece_rows,
            "block_bytes": self.block_bytes,
            "ranges": [[rows.next_use, *rows.table_rows] for rows in self.ranges],
        }

    @classmethod
    def from_record(cls, record: Any, *, most_pieces: int) -> Stream:
        """Build the stream that ``to_record`` wrote; ``most_pieces`` bounds what it may ask for.

        Raises ValueError for anything else, before an array is made.
        """
        row_bytes, piece_rows, block_bytes = (
            whole(record.get(name) if isinstance(record, dict) else None, name)
            for name in ("row_bytes", "piece_rows", "block_bytes")
        )
        values = record.get("ranges")
        if not isinstance(values, list) or not all(isinstance(v, list) and len(v) >= 1 for v in values):
            raise ValueError("a stream's record has no list of ranges")
        ranges = tuple(
            Range(next_use=whole(use, "next use"), table_rows=tuple(whole(n, "rows") for n in rows))
            for use, *rows in values
        )
        most_rows = most_pieces * max(1, min(piece_rows, block_bytes // max(1, row_bytes)))
        if sum(rows.rows for rows in ranges) > most_rows:
            raise ValueError(
                f"a stream's record names {sum(rows.rows for rows in ranges)} rows in {most_pieces} pieces"
            )
        return cls(row_bytes=row_bytes, piece_rows=piece_rows, block_bytes=block_bytes, ranges=ranges)


def compressed_rows(row_bytes: int, piece_rows: int) -> int:
    """Return how many rows are compressed together where blocks are a multiple of them: a piece at most."""
    return max(1, min(piece_rows, COMPRESSED_BYTES // row_bytes))


def _lay_out(rows_R: list[int], piece_rows: int, block_rows: int, row_bytes: int) -> dict[str, Any]:
    """Cut rows at ranges, blocks and every ``piece_rows`` rows in between."""
    range_first_row_R = np.zeros(len(rows_R) + 1, dtype=np.int64)
    np.cumsum(np.array(rows_R, dtype=np.int64), out=range_first_row_R[1:])
    rows = int(range_first_row_R[-1])
    block_first_row_B = np.append(np.arange(0, rows, block_rows, dtype=np.int64), rows)
    if not rows:
        block_first_row_B = np.zeros(1, dtype=np.int64)
    run_first_row = np.union1d(range_first_row_R, block_first_row_B)
    run_rows = np.diff(run_first_row)
    run_pieces = -(-run_rows // piece_rows)
    run_first_piece = np.cumsum(run_pieces) - run_pieces
    num_pieces = int(run_pieces.sum())
    piece_in_run = np.arange(num_pieces, dtype=np.int64) - np.repeat(run_first_piece, run_pieces)
    piece_first_row_P = np.empty(num_pieces + 1, dtype=np.int64)
    piece_first_row_P[:-1] = np.repeat(run_first_row[:-1], run_pieces) + piece_in_run * piece_rows
    piece_first_row_P[-1] = rows
    num_blocks = block_first_row_B.size - 1
    block_piece_B = np.searchsorted(piece_first_row_P, block_first_row_B)
    return {
        "rows": rows,
        "num_pieces": num_pieces,
        "num_blocks": num_blocks,
        "block_rows": block_rows,
        "range_first_row_R": range_first_row_R,
        "range_piece_R": tuple(np.searchsorted(piece_first_row_P, range_first_row_R).tolist()),
        "piece_first_row_P": piece_first_row_P,
        "piece_rows_P": np.diff(piece_first_row_P),
        "piece_offset_P": piece_first_row_P * row_bytes,
        "piece_range_P": np.searchsorted(range_first_row_R, piece_first_row_P[:-1], side="right") - 1,
        "piece_block_P": piece_first_row_P[:-1] // block_rows,
        "block_piece_B": block_piece_B,
        "block_first_row_B": block_first_row_B,
        "block_bytes_B": np.diff(block_first_row_B) * row_bytes,
    }
