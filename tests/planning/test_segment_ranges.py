"""The ranges that planning lays out are cut as the streams that are made of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiercache.planning.segment_ranges import SegmentRanges
from tiercache.store.stream import Range, Stream


@given(
    st.lists(st.lists(st.integers(0, 30), min_size=2, max_size=2), max_size=6),
    st.integers(1, 7),
    st.integers(1, 20),
    st.integers(1, 50),
)
def test_numbers_of_pieces_and_rows_are_those_of_the_stream(
    rows_RT: list[list[int]], piece_rows: int, block_rows: int, row_bytes: int
) -> None:
    """Whatever the ranges, empty ones too; and there and back is the same stream."""
    stream = Stream(
        row_bytes=row_bytes, piece_rows=piece_rows, block_bytes=block_rows * row_bytes,
        ranges=tuple(Range(next_use=3 * i + 1, table_rows=tuple(rows)) for i, rows in enumerate(rows_RT)),
    )  # fmt: skip
    cut = SegmentRanges.cut(
        3 * np.arange(len(rows_RT)) + 1, np.array(rows_RT, dtype=np.int32).reshape(-1, 2),
        row_bytes=row_bytes, piece_rows=piece_rows, block_bytes=block_rows * row_bytes,
    )  # fmt: skip
    for ranges in (cut, SegmentRanges.of(stream)):
        assert ranges.stream() == stream
        assert (ranges.rows, ranges.num_pieces, ranges.num_blocks) == (
            stream.rows,
            stream.num_pieces,
            stream.num_blocks,
        )
        assert tuple(ranges.first_piece_R.tolist()) == stream.range_piece_R
        assert ranges.first_row_R.tolist() == stream.range_first_row_R.tolist()
        assert [ranges.row_of(p) for p in range(stream.num_pieces + 1)] == stream.piece_first_row_P.tolist()
        assert [ranges.range_of(p) for p in range(stream.num_pieces)] == stream.piece_range_P.tolist()
        assert [ranges.find(use) for use in range(3 * len(rows_RT))] == [
            use // 3 if use % 3 == 1 else None for use in range(3 * len(rows_RT))
        ]
