"""The host keeps the soonest-used rows, within its capacity."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.planning.budgets import PAGE_BYTES, paged
from tiercache.planning.host_plan import HostCache, PageRange, _fitting_end, cached_bytes
from tiercache.store.layout import Range, SegmentLayout


def layout_of(*ranges: tuple[int, int], row_bytes: int, block_rows: int) -> SegmentLayout:
    """Lay out (next use, rows) with one row a page."""
    return SegmentLayout.of(
        row_bytes=row_bytes,
        page_rows=1,
        block_bytes=block_rows * row_bytes,
        ranges=tuple(Range(next_use=use, table_rows=(rows,)) for use, rows in ranges),
    )


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=8, unique_by=lambda r: r[0]),
    st.integers(1, 5),
    st.integers(0, 100),
    st.integers(1, 6000),
    st.data(),
)
def test_the_bytes_charged_are_never_less_than_the_pages_held(
    uses: list[tuple[int, int]], block_rows: int, room: int, row_bytes: int, data: st.DataObject
) -> None:
    """Pages are counted block by block from their real starts; the charge is at least that."""
    layout = layout_of(*sorted(uses), row_bytes=row_bytes, block_rows=block_rows)
    first = data.draw(st.integers(0, layout.num_pages))
    last = data.draw(st.integers(first, layout.num_pages))
    pages: set[tuple[int, int]] = set()
    for page in range(first, last):
        block = layout.block_of_page(page)
        low = layout.byte_of_page(page) - layout.byte_of_block(block)
        pages |= {(block, at) for at in range(low // PAGE_BYTES, -(-(low + row_bytes) // PAGE_BYTES))}
    assert len(pages) * PAGE_BYTES <= cached_bytes(layout, PageRange(first, last))
    fitted = _fitting_end(layout, PageRange(first, last), first, room * PAGE_BYTES)
    assert fitted == first or cached_bytes(layout, PageRange(first, fitted)) <= room * PAGE_BYTES
    assert fitted == last or cached_bytes(layout, PageRange(first, fitted + 1)) > room * PAGE_BYTES


class SortingContent:
    """The slow obvious way: sort all ranges by next use at every pass, and keep as many as fit."""

    def __init__(self) -> None:
        self.layouts: dict[tuple[int, int], SegmentLayout] = {}
        self.held: dict[tuple[int, int], PageRange] = {}

    def enter(self, pass_index: int, group: int, entering: SegmentLayout) -> None:
        self.layouts[pass_index, group] = entering
        self.held[pass_index, group] = PageRange(0, entering.num_pages)

    def keep(self, *, after: int, capacity: int) -> int:
        pages = []
        for (pass_index, group), held in self.held.items():
            layout = self.layouts[pass_index, group]
            for page in range(*held):
                use = int(layout.next_use_R[layout.range_of_page(page)])
                if use > after:
                    pages.append((use, pass_index, group, page))
        self.held, held_bytes = {}, dict[tuple[int, int], int]()
        for _, pass_index, group, page in sorted(pages):
            key = pass_index, group
            longer = PageRange(self.held.get(key, PageRange(page, page)).first, page + 1)
            num_bytes = bytes_of(self.layouts[key], *longer)
            if sum(held_bytes.values()) - held_bytes.get(key, 0) + num_bytes > capacity:
                break
            self.held[key], held_bytes[key] = longer, num_bytes
        return sum(held_bytes.values())


def bytes_of(layout: SegmentLayout, first: int, last: int) -> int:
    """Return the charged pages of [first, last): one more at either end, one more at the end of a block."""
    if first >= last:
        return 0
    span = layout.byte_of_page(last) - layout.byte_of_page(first)
    return paged(span) + PAGE_BYTES * (1 + layout.block_of_page(last - 1) - layout.block_of_page(first))


USES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), max_size=6, unique_by=lambda r: r[0]).map(sorted)


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.lists(USES, min_size=2, max_size=2), st.integers(0, 40)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 6000),
)
def test_kept_are_the_soonest_used(
    passes: list[tuple[list[list[tuple[int, int]]], int]], block_rows: int, row_bytes: int
) -> None:
    content, obvious = HostCache(), SortingContent()
    for pass_index, (groups, pages) in enumerate(passes):
        for group, distances in enumerate(groups):
            entering = layout_of(
                *((pass_index + distance, rows) for distance, rows in distances),
                row_bytes=row_bytes,
                block_rows=block_rows,
            )
            obvious.enter(pass_index, group, entering)
            content.enter(pass_index, group, entering)
        options = {"after": pass_index + 1, "capacity": pages * PAGE_BYTES}
        assert content.keep(**options) == obvious.keep(**options)
        assert content.pages == obvious.held
