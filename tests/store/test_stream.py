"""The layout of a stream against a slow obvious one."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.store import NEVER, Range, Stream


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    """Draw a stream of up to 200 rows."""
    rows = draw(st.lists(st.lists(st.integers(0, 15), min_size=2, max_size=2), max_size=8))
    uses = sorted(draw(st.sets(st.integers(0, 50), min_size=len(rows), max_size=len(rows))))
    row_bytes = draw(st.integers(1, 40))
    return Stream(
        row_bytes=row_bytes,
        piece_rows=draw(st.integers(1, 20)),
        block_bytes=row_bytes * draw(st.integers(1, 40)) + draw(st.integers(0, row_bytes - 1)),
        ranges=tuple(Range(next_use=use, table_rows=tuple(counts)) for use, counts in zip(uses, rows, strict=True)),
    )


def pieces_by_hand(stream: Stream) -> list[tuple[int, int, int, int]]:
    """Return (first row, rows, range, block) of each piece, row by row."""
    pieces: list[tuple[int, int, int, int]] = []
    row, block_rows = 0, stream.block_bytes // stream.row_bytes
    for index, ranges in enumerate(stream.ranges):
        for i in range(ranges.rows):
            block = row // block_rows
            fresh = i == 0 or row % block_rows == 0 or pieces[-1][1] == stream.piece_rows
            if fresh:
                pieces.append((row, 1, index, block))
            else:
                first, rows, *rest = pieces[-1]
                pieces[-1] = (first, rows + 1, rest[0], rest[1])
            row += 1
    return pieces


@given(streams())
def test_pieces_are_cut_at_ranges_and_blocks_and_piece_rows(stream: Stream) -> None:
    """Every derived array says what cutting row by row says."""
    pieces = pieces_by_hand(stream)
    assert stream.rows == sum(r.rows for r in stream.ranges)
    assert stream.num_pieces == len(pieces)
    assert stream.piece_first_row_P.tolist() == [p[0] for p in pieces] + [stream.rows]
    assert stream.piece_rows_P.tolist() == [p[1] for p in pieces]
    assert stream.piece_range_P.tolist() == [p[2] for p in pieces]
    assert stream.piece_block_P.tolist() == [p[3] for p in pieces]
    assert stream.piece_offset_P.tolist() == [n * stream.row_bytes for n in stream.piece_first_row_P.tolist()]
    assert stream.num_blocks == len({p[3] for p in pieces})
    for block in range(stream.num_blocks):
        low, high = stream.block_piece_B[block : block + 2].tolist()
        mine = [p for p in pieces if p[3] == block]
        assert pieces[low:high] == mine
        assert stream.block_first_row_B[block] == mine[0][0]
        assert stream.block_bytes_B[block] == sum(p[1] for p in mine) * stream.row_bytes <= stream.block_bytes
    assert len(set(stream.block_bytes_B[:-1].tolist())) <= 1
    for index in range(len(stream.ranges)):
        low, high = stream.pieces_of(index)
        assert [p for p in pieces if p[2] == index] == pieces[low:high]
    for array in (stream.piece_first_row_P, stream.piece_range_P, stream.block_piece_B, stream.piece_block_P):
        assert array.dtype == np.int64


@given(streams())
def test_a_record_gives_the_same_stream_back(stream: Stream) -> None:
    """Through JSON; the arrays are derived anew."""
    again = Stream.from_record(json.loads(json.dumps(stream.to_record())), most_pieces=stream.num_pieces)
    assert again == stream
    assert np.array_equal(again.piece_offset_P, stream.piece_offset_P)


def test_a_stream_of_a_million_pieces_is_laid_out_at_once() -> None:
    """64 GB of rows: nothing is done piece by piece."""
    ranges = tuple(Range(next_use=i, table_rows=(2_500_000,)) for i in range(100))
    stream = Stream(row_bytes=260, piece_rows=252, block_bytes=4 << 20, ranges=ranges)
    assert stream.num_pieces >= 990_000
    assert stream.num_blocks == -(-250_000_000 // stream.block_rows)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"row_bytes": 0}, "both must be at least 1"),
        ({"piece_rows": 0}, "both must be at least 1"),
        ({"block_bytes": 7}, "cannot hold a row"),
        ({"ranges": [(3, 1), (3, 1)]}, "must increase"),
        ({"ranges": [(4, 1), (3, 1)]}, "must increase"),
        ({"ranges": [(-1, 1)]}, "no pass"),
        ({"ranges": [(NEVER + 1, 1)]}, "no pass"),
        ({"ranges": [(1, -1)]}, "must not be negative"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(changes: dict[str, Any], words: str) -> None:
    """Sizes below one row, next uses out of order, negative rows."""
    values: dict[str, Any] = {"row_bytes": 8, "piece_rows": 4, "block_bytes": 64, "ranges": [(1, 3)], **changes}
    with pytest.raises(ValueError, match=words):
        Stream(
            row_bytes=values["row_bytes"],
            piece_rows=values["piece_rows"],
            block_bytes=values["block_bytes"],
            ranges=tuple(Range(next_use=use, table_rows=(rows,)) for use, rows in values["ranges"]),
        )


def test_a_record_of_any_sizes_is_laid_out_or_refused() -> None:
    """No sum or product of what a record says goes beyond what counts it: what is laid out adds up."""
    sizes, laid_out = [0, 1, 3, 260, 1 << 31, 1 << 53, (1 << 62) - 1, 1 << 62, (1 << 63) - 1], 0
    for row_bytes, piece_rows, block_bytes, rows, more in itertools.product(sizes, repeat=5):
        record = {
            "row_bytes": row_bytes,
            "piece_rows": piece_rows,
            "block_bytes": block_bytes,
            "ranges": [[1, rows, more], [9, more]],
        }
        try:
            stream = Stream.from_record(record, most_pieces=6)
        except ValueError as error:
            assert ": " in str(error) or "record" in str(error)  # noqa: PT017 - what else is raised fails the test
            continue
        laid_out += 1
        assert int(stream.piece_rows_P.sum()) == stream.rows == rows + 2 * more
        assert int(stream.block_bytes_B.sum()) == int(stream.piece_offset_P[-1]) == stream.rows * row_bytes
        assert (stream.piece_rows_P > 0).all()
        assert stream.num_pieces <= 16
    assert laid_out > 1000


@pytest.mark.parametrize(
    "record",
    [
        None,
        {},
        {"row_bytes": 4, "piece_rows": 1, "block_bytes": 64, "ranges": None},
        {"row_bytes": 4, "piece_rows": 1, "block_bytes": 64, "ranges": [[]]},
        {"row_bytes": 4, "piece_rows": 1, "block_bytes": 64, "ranges": [[1, "2"]]},
        {"row_bytes": "4", "piece_rows": 1, "block_bytes": 64, "ranges": []},
        {"row_bytes": 4, "piece_rows": 1, "block_bytes": 64, "ranges": [[1, 10**15]]},
    ],
)
def test_a_record_asks_for_no_more_than_there_are_checksums(record: Any) -> None:
    """Records of other shapes, and of rows beyond the pieces at hand, are refused before an array is made."""
    with pytest.raises(ValueError, match=r"record|next use"):
        Stream.from_record(record, most_pieces=10)
