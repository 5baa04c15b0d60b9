"""Arrays that are read in place, and the key map made of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.store.conftest import small_tables
from tests.store.world import World
from tiercache.store import CorruptStoreError, MemoryEngine, Range, SegmentLayout, Store
from tiercache.store.key_map import MOST_ROWS, KeyMap, map_entries, needs_map
from tiercache.store.records import CHUNK_BYTES, ChunkCache, PagedArrays, describe, places_of


class Metadata:
    """Arrays after a head, and the reads of them."""

    def __init__(self, arrays: dict[str, NDArray[np.generic]], *, cache_bytes: int = 1 << 20) -> None:
        described, parts, self.checksums = describe(arrays)
        self.data = np.concatenate(parts)
        self.reads: list[tuple[int, int]] = []
        self.cache = ChunkCache(cache_bytes)
        self.arrays = PagedArrays("blob", places_of(described), self.checksums, self._read, self.cache, "it")

    def _read(self, begin: int, out: NDArray[np.uint8]) -> None:
        self.reads.append((begin, out.size))
        out[:] = self.data[begin : begin + out.size]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9000), min_size=1, max_size=4),
    dtype=st.sampled_from(["|u1", "<u4", "<u8", "<i8"]),
    parts=st.lists(st.tuples(st.integers(0, 3), st.integers(-9100, 9100), st.integers(-9100, 9100)), max_size=12),
    cache_bytes=st.sampled_from([1, 2 * CHUNK_BYTES, 1 << 20]),
)
def test_slices_are_those_of_the_arrays(
    sizes: list[int], dtype: str, parts: list[tuple[int, int, int]], cache_bytes: int
) -> None:
    rng = np.random.default_rng(sum(sizes))
    arrays = {str(i): rng.integers(0, 255, size).astype(dtype) for i, size in enumerate(sizes)}
    metadata = Metadata(arrays, cache_bytes=cache_bytes)
    for which, low, high in parts:
        name = str(which % len(sizes))
        found = metadata.arrays.array(name)
        assert (found.size, found.dtype) == (arrays[name].size, arrays[name].dtype)
        assert np.array_equal(found[low:high], arrays[name][low:high])
        if -found.size <= low < found.size:
            assert found[low] == arrays[name][low]
        else:
            with pytest.raises(IndexError):
                found[low]
        assert metadata.cache.num_bytes <= max(cache_bytes, CHUNK_BYTES)


def test_a_chunk_is_read_once_and_neighbors_by_one_read() -> None:
    """Until they leave the cache; an array of 64 KiB or less is read at once."""
    metadata = Metadata({"a": np.arange(6000, dtype=np.int64), "b": np.arange(10_000, dtype=np.int64)})
    small, array = metadata.arrays.array("a"), metadata.arrays.array("b")
    assert (small[2047], small[4096], array[3]) == (2047, 4096, 3)
    assert np.array_equal(small[:], np.arange(6000))
    assert metadata.reads == [(0, 48_000), (48_000, CHUNK_BYTES)]
    assert np.array_equal(array[:], np.arange(10_000))
    assert metadata.reads[2:] == [(48_000 + CHUNK_BYTES, 80_000 - CHUNK_BYTES)]
    assert np.array_equal(array[2000:2100], np.arange(2000, 2100))
    assert len(metadata.reads) == 3


def test_a_damaged_chunk_is_refused_and_the_others_are_read() -> None:
    """The error names it; it is not cached."""
    metadata = Metadata({"a": np.arange(10_000, dtype=np.int64)})
    metadata.data[CHUNK_BYTES + 5] ^= 1
    array = metadata.arrays.array("a")
    for _ in range(2):
        with pytest.raises(CorruptStoreError, match=r"chunk 1 of it has checksum .* was written: restore"):
            array[2048:2050]
    assert (array[2047], array[4096]) == (2047, 4096)


def layout_of(rows: list[int]) -> SegmentLayout:
    """Return a layout of one table with the given number of rows in each range."""
    ranges = tuple(Range(next_use=use, table_rows=(n,)) for use, n in enumerate(rows, 1))
    return SegmentLayout.of(row_bytes=8, page_rows=8, block_bytes=800, ranges=ranges)


def map_of(layout: SegmentLayout, hashes: NDArray[np.uint64]) -> KeyMap | None:
    assert needs_map(layout)
    return KeyMap.of(layout, hashes.astype(np.uint32), map_entries)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 999), rows=st.lists(st.integers(0, 300), min_size=2, max_size=60))
def test_a_map_finds_every_key_in_its_range(seed: int, rows: list[int]) -> None:
    """For any hashes, also equal ones; read in place it equals the one in memory."""
    if sum(n > 0 for n in rows) < 2:
        return
    layout, rng = layout_of(rows), np.random.default_rng(seed)
    hashes = rng.integers(0, 1 << 64, layout.rows, dtype=np.uint64)
    hashes[rng.random(layout.rows) < 0.1] &= np.uint64(0xFFFF << 48)
    made = map_of(layout, hashes)
    if made is None:  # too many of them are equal
        assert np.unique(hashes, return_counts=True)[0].size < layout.rows or layout.rows > 255
        return
    metadata = Metadata({f"{name}/0": array for name, array in made.arrays().items()})
    stored = KeyMap.from_record(made.to_record(), metadata.arrays, 0, layout)
    ranges = np.searchsorted(layout.first_row_R, np.arange(layout.rows), side="right") - 1
    order = np.argsort(hashes, kind="stable")
    for found in (made, stored):
        which, where = found.find(hashes[order])
        pairs = set(zip(which.tolist(), where.tolist(), strict=True))
        assert {(i, int(ranges[row])) for i, row in enumerate(order)} <= pairs


def test_a_map_is_small_and_rules_most_keys_out() -> None:
    """At most 3.5 bytes per key, and of a hundred missing keys fewer than four are searched."""
    for num_ranges, num_ranks in ((2, 1), (50, 1), (2000, 1), (50, 64)):  # a rank has one of 64 ranges of hashes
        layout = layout_of([100_000 // num_ranges] * num_ranges)
        rng = np.random.default_rng(num_ranges)
        made = map_of(layout, rng.integers(0, (1 << 64) // num_ranks, layout.rows, dtype=np.uint64))
        assert made is not None
        assert sum(array.nbytes for array in made.arrays().values()) <= 3.5 * layout.rows
        others = np.sort(rng.integers(0, (1 << 64) // num_ranks, 20_000, dtype=np.uint64))
        assert made.find(others)[0].size < 0.04 * others.size


def test_a_map_that_would_be_of_no_use_is_not_made() -> None:
    assert not needs_map(layout_of([70, 0]))
    assert not needs_map(layout_of([MOST_ROWS, 1]))
    assert map_of(layout_of([300, 300]), np.full(600, 7, np.uint64)) is None


def test_one_key_of_25_segments_of_many_ranges_costs_about_a_page() -> None:
    """The maps of 25 segments limit it to a range; a lookup finds each key with its row."""
    world = World(small_tables(), num_passes=25, keys_per_pass=150, universe=600, block_rows=40, page_rows=4)
    engine = MemoryEngine()
    with Store.open(None, tables=world.tables, engine=engine) as store:
        world.run(store, 25)
    with Store.open(None, engine=engine, mode="r") as store:
        assert max(layout.num_ranges for segment in store.segments for layout in segment.layouts) > 15
        name = store.tables[0].name
        keys = np.array([key for table, key in world.rows if table == name])
        before = store.counters.key_bytes_read
        for key in keys[:40].tolist():
            found = store.lookup(name, np.array([key]))
            assert b"".join(values[0].tobytes() for values in found.values()) == world.rows[name, key]
        pages = (store.counters.key_bytes_read - before) / (8 * world.block_rows)
        assert pages <= 1.5 * 40
