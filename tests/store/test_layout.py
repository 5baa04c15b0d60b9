"""The layout of a segment against a slow obvious one."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.store import NEVER, Range, SegmentLayout
from tiercache.store import layout as segment_layout_module
from tiercache.store.layout import key_page_bounds


@st.composite
def layouts(draw: st.DrawFn) -> SegmentLayout:
    """Draw a layout of up to 200 rows."""
    rows = draw(st.lists(st.lists(st.integers(0, 15), min_size=2, max_size=2), max_size=8))
    uses = sorted(draw(st.sets(st.integers(0, 50), min_size=len(rows), max_size=len(rows))))
    row_bytes = draw(st.integers(1, 40))
    return SegmentLayout.of(
        [Range(use, tuple(counts)) for use, counts in zip(uses, rows, strict=True)],
        row_bytes=row_bytes,
        page_rows=draw(st.integers(1, 20)),
        block_bytes=row_bytes * draw(st.integers(1, 40)) + draw(st.integers(0, row_bytes - 1)),
    )


def pages_by_hand(layout: SegmentLayout) -> list[tuple[int, int, int, int]]:
    """Return (first row, rows, range, block) of each page, row by row."""
    pages: list[tuple[int, int, int, int]] = []
    row, block_rows = 0, layout.block_bytes // layout.row_bytes
    for index, ranges in enumerate(layout.ranges):
        for i in range(ranges.rows):
            if i == 0 or row % block_rows == 0 or pages[-1][1] == layout.page_rows:
                pages.append((row, 0, index, row // block_rows))
            first, rows, *rest = pages[-1]
            pages[-1] = (first, rows + 1, *rest)
            row += 1
    return pages


@given(layouts())
def test_pages_are_cut_at_ranges_and_blocks_and_page_rows(layout: SegmentLayout) -> None:
    pages = pages_by_hand(layout)
    numbers, rows = np.arange(len(pages) + 1), np.arange(layout.rows + 1)
    firsts = [p[0] for p in pages] + [layout.rows]
    assert layout.rows == sum(r.rows for r in layout.ranges)
    assert layout.num_pages == len(pages)
    assert layout.most_page_rows >= max([p[1] for p in pages], default=0)
    assert layout.rows_of_pages(numbers).tolist() == [layout.row_of_page(p) for p in numbers.tolist()] == firsts
    assert [layout.byte_of_page(p) for p in numbers.tolist()] == [n * layout.row_bytes for n in firsts]
    assert layout.page_sizes(0, len(pages)).tolist() == [p[1] for p in pages]
    assert layout.page_bounds(0, len(pages)).tolist() == [n * layout.row_bytes for n in firsts]
    ends = range(0, len(pages) + 1, max(1, len(pages) // 12))
    for low, high in ((low, high) for low in ends for high in ends if low <= high):
        bounds = [(first - firsts[low]) * layout.row_bytes for first in firsts[low : high + 1]]
        assert layout.page_bounds(low, high).tolist() == bounds
    assert [layout.range_of_page(p) for p in range(len(pages))] == [p[2] for p in pages]
    assert [layout.block_of_page(p) for p in range(len(pages))] == [p[3] for p in pages]
    held = [i for i, page in enumerate(pages) for _ in range(page[1])] + [len(pages)]
    assert layout.pages_of_rows(rows).tolist() == [layout.page_of_row(row) for row in rows.tolist()] == held
    assert layout.num_blocks == len({p[3] for p in pages})
    for block in range(layout.num_blocks):
        low, high = layout.pages_of_block(block)
        mine = [p for p in pages if p[3] == block]
        assert pages[low:high] == mine
        assert layout.rows_of_block(block) == (mine[0][0], mine[-1][0] + mine[-1][1])
        assert layout.byte_of_block(block) == mine[0][0] * layout.row_bytes
        assert layout.bytes_of_block(block) == sum(p[1] for p in mine) * layout.row_bytes <= layout.block_bytes
        assert block == layout.num_blocks - 1 or layout.bytes_of_block(block) == layout.block_rows * layout.row_bytes
    for index in range(layout.num_ranges):
        low, high = layout.pages_of_range(index)
        assert [p for p in pages if p[2] == index] == pages[low:high]
        assert layout.range_of_use(layout.next_use_R.item(index)) == index
    assert layout.range_of_use(51) is None


@given(layouts())
def test_runs_of_a_table_are_its_rows_in_each_range(layout: SegmentLayout) -> None:
    for place, first in itertools.product(range(2), range(layout.num_ranges + 1)):
        begins, ends = layout.runs_of_table(place, first)
        expected = []
        for index in range(first, layout.num_ranges):
            counts = layout.ranges[index].table_rows
            low = layout.rows_of_range(index)[0] + sum(counts[:place])
            expected += [(low, low + counts[place])] if counts[place] else []
        assert [*zip(begins.tolist(), ends.tolist(), strict=True)] == expected
        assert layout.rows_of_table(place, first) == sum(high - low for low, high in expected)


@given(layouts(), st.integers(1, 9))
def test_key_pages_cut_blocks_of_keys(layout: SegmentLayout, rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_layout_module, "KEY_PAGE_ROWS", rows)
        sizes = {name: getattr(layout, name) for name in ("row_bytes", "page_rows", "block_bytes")}
        layout = SegmentLayout.of(layout.ranges, **sizes)
        page = 0
        for block in range(layout.num_blocks):
            low, high = layout.rows_of_block(block)
            cuts = [*range(0, high - low, rows), high - low]
            assert layout.key_pages_of_rows(np.array([low, high - 1])).tolist() == [page, page + len(cuts) - 2]
            assert key_page_bounds(high - low).tolist() == [8 * cut for cut in cuts]
            page += len(cuts) - 1
        assert layout.num_key_pages == page


@given(layouts())
def test_a_record_gives_the_same_layout_back(layout: SegmentLayout) -> None:
    values, arrays = layout.to_record()
    again = SegmentLayout.from_record(values, arrays, most_pages=layout.num_pages)
    assert again == layout
    assert repr(again) == repr(layout)
    assert np.array_equal(again.first_page_R, layout.first_page_R)


def test_a_layout_of_a_million_pages_takes_what_its_ranges_take() -> None:
    """64 GB of rows: no work or memory per page."""
    layout = SegmentLayout.of(
        (Range(i, (2_500_000,)) for i in range(100)), row_bytes=260, page_rows=252, block_bytes=4 << 20
    )
    assert layout.num_pages >= 990_000
    assert layout.num_blocks == -(-250_000_000 // layout.block_rows)
    arrays = [getattr(layout, name) for name in layout.__slots__ if isinstance(getattr(layout, name), np.ndarray)]
    assert sum(array.nbytes for array in arrays) < 4_000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"row_bytes": 0}, "both must be at least 1"),
        ({"page_rows": 0}, "both must be at least 1"),
        ({"block_bytes": 7}, "cannot hold a row"),
        ({"ranges": [(3, (1,)), (3, (1,))]}, "must increase"),
        ({"ranges": [(4, (1,)), (3, (1,))]}, "must increase"),
        ({"ranges": [(-1, (1,))]}, "not all of a pass"),
        ({"ranges": [(NEVER + 1, (1,))]}, "not all of a pass"),
        ({"ranges": [(1, (-1,))]}, "must not be negative"),
        ({"ranges": [(1, (1,)), (2, (1, 1))]}, "rows of 1 and of 2 tables"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(changes: dict[str, Any], words: str) -> None:
    values: dict[str, Any] = {"row_bytes": 8, "page_rows": 4, "block_bytes": 64, "ranges": [(1, (3,))], **changes}
    with pytest.raises(ValueError, match=words):
        SegmentLayout.of((Range(*of) for of in values.pop("ranges")), **values)


def test_a_record_of_any_sizes_is_laid_out_or_refused() -> None:
    """No sum or product of a record's values overflows: an accepted layout is consistent."""
    sizes, laid_out = [0, 1, 3, 260, 1 << 31, 1 << 53, (1 << 62) - 1, 1 << 62, (1 << 63) - 1], 0
    for row_bytes, page_rows, block_bytes, rows, more in itertools.product(sizes, repeat=5):
        values = {"row_bytes": row_bytes, "page_rows": page_rows, "block_bytes": block_bytes, "tables": 2}
        arrays = {"next_use": np.array([1, 9]), "table_rows": np.array([rows, more, more, 0])}
        try:
            layout = SegmentLayout.from_record(values, arrays, most_pages=6)
        except ValueError as error:
            assert ": " in str(error) or "record" in str(error)  # noqa: PT017 - what else is raised fails the test
            continue
        laid_out += 1
        sizes_P = layout.page_sizes(0, layout.num_pages)
        assert int(sizes_P.sum()) == layout.rows == rows + 2 * more
        assert layout.byte_of_page(layout.num_pages) == layout.rows * row_bytes
        assert (sizes_P > 0).all()
        assert layout.num_pages <= 16
    assert laid_out > 1000


USUAL = {"row_bytes": 4, "page_rows": 1, "block_bytes": 64, "tables": 1}


@pytest.mark.parametrize(
    ("values", "uses", "rows"),
    [
        pytest.param(None, [], [], id="no values"),
        pytest.param({}, [], [], id="missing values"),
        pytest.param(USUAL | {"row_bytes": "4"}, [], [], id="text"),
        pytest.param(USUAL | {"tables": None}, [], [], id="no tables"),
        pytest.param(USUAL | {"tables": 2}, [1], [1], id="rows of one of two tables"),
        pytest.param(USUAL, [1, 2], [1], id="rows of one of two ranges"),
        pytest.param(USUAL, [1], [10**15], id="more rows than the pages allow"),
        pytest.param(USUAL, [1], [-1], id="negative rows"),
        pytest.param(USUAL, [2, 1], [1, 1], id="next uses out of order"),
    ],
)
def test_a_record_asks_for_no_more_than_there_are_checksums(values: Any, uses: list[int], rows: list[int]) -> None:
    arrays = {"next_use": np.array(uses, np.int64), "table_rows": np.array(rows, np.int64)}
    with pytest.raises(ValueError, match=r"record|next use|negative"):
        SegmentLayout.from_record(values, arrays, most_pages=10)
