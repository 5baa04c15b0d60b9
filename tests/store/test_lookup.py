"""Finding and reading single rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.store.big import dump, publish
from tests.store.conftest import Home, small_tables
from tests.store.world import World
from tiercache.store import (
    NEVER,
    Adagrad,
    CorruptBlockError,
    MemoryEngine,
    Range,
    Store,
    Table,
    Zeros,
    hash_keys,
)  # fmt: skip
from tiercache.store.base_segment import base_layout, blocks_of
from tiercache.store.block_file import BlockFile
from tiercache.store.lookup import locate, read_found
from tiercache.store.write_queue import PAGE_BYTES


def trained(seed: int, passes: int, *, commit: bool = True) -> tuple[Store, World]:
    """Return a store in memory after some passes."""
    tables = small_tables()
    store = Store.open(None, tables=tables, engine=MemoryEngine())
    world = World(tables, seed=seed, num_passes=1 + seed % 4, page_rows=1 + seed % 7, block_rows=1 + seed % 23)
    for _ in range(passes):
        world.train()
        world.append(store)
        world.pass_index += 1
        if commit:
            world.publish(store)
    return store, world


def test_a_lookup_of_one_table_is_that_of_many(home: Home, tables: list[Table]) -> None:
    """``Store.locate`` gives what one sweep for several tables gives, in the order of the keys that were asked for."""
    store, world = home.open(tables), World(tables)
    world.run(store, 4)
    keys = np.random.default_rng(0).permutation(np.arange(-60, 60))
    both = locate(store, {"user": keys, "word": keys[:7], "day": keys[:0]}, after=3)
    for name, wanted in (("user", keys), ("word", keys[:7]), ("day", keys[:0])):
        ids, rows = store.locate(name, wanted, after=3)
        assert np.array_equal(ids, both[name][0])
        assert np.array_equal(rows, both[name][1])
        assert ids.dtype == rows.dtype == np.int64
        assert ids.shape == wanted.shape
    with pytest.raises(KeyError):
        store.locate("nobody", keys, after=0)


def test_rows_come_in_the_order_asked_for_and_twice_where_asked_twice(home: Home, tables: list[Table]) -> None:
    """Reading rows is indexing into the layout."""
    store, world = home.open(tables), World(tables)
    world.run(store, 1)
    segment = store.segments[0]
    for group in store.groups:
        everything = store.read_rows(segment, group.index, np.arange(segment.layouts[group.index].rows))
        some = np.random.default_rng(1).integers(0, segment.layouts[group.index].rows, 60)
        for field, all_rows, values in zip(
            group.fields, everything, store.read_rows(segment, group.index, some), strict=True
        ):
            assert values.shape == (60, field.width)
            assert np.array_equal(values, all_rows[some])
    assert store.read_rows(segment, 0, np.empty(0, np.int64))[0].shape == (0, store.groups[0].dim)


def test_pages_in_memory_are_not_read(home: Home, tables: list[Table]) -> None:
    """What ``cached`` gives is taken as it is; only the other pages are read, neighbors at once."""
    store, world = home.open(tables), World(tables, keys_per_pass=80)
    world.run(store, 1)
    segment, group = store.segments[0], 0
    layout = segment.layouts[group]
    asked: list[int] = []

    def cached(segment_id: int, group_index: int, page: int) -> NDArray[np.uint8] | None:
        assert (segment_id, group_index) == (segment.id, group)
        asked.append(page)
        if page % 2:
            return None
        size = layout.byte_of_page(page + 1) - layout.byte_of_page(page)
        return np.full(size // 4, page, np.float32).view(np.uint8)

    rows = np.arange(layout.rows)
    plain = store.read_rows(segment, group, rows)
    before = store.counters.row_bytes_read
    mixed = store.read_rows(segment, group, rows, cached=cached)
    assert asked == list(range(layout.num_pages))
    pages = layout.pages_of_rows(rows)
    odd = pages % 2 == 1
    assert store.counters.row_bytes_read - before == int(odd.sum()) * layout.row_bytes
    for a, b in zip(plain, mixed, strict=True):
        assert np.array_equal(a[odd], b[odd])
        assert np.array_equal(b[~odd], np.broadcast_to(pages[~odd, None], b[~odd].shape))


def test_contiguous_pages_are_read_at_once(home: Home, tables: list[Table]) -> None:
    """All rows of a layout take one read of the engine for each block."""
    store, world = home.open(tables), World(tables)
    world.run(store, 1)
    segment = store.segments[0]
    before = store.counters.reads
    store.read_rows(segment, 0, np.arange(segment.layouts[0].rows))
    assert store.counters.reads - before == segment.layouts[0].num_blocks


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 6), st.sampled_from([1, 200, 1 << 22]))
def test_what_was_found_is_read_as_each_segment_alone_would_be(seed: int, passes: int, batch_bytes: int) -> None:
    """Rows of all segments at once, in batches of any size, are those of one segment after another; else zeros."""
    store, _ = trained(seed, passes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiercache.store.lookup.BATCH_BYTES", batch_bytes)
        for group in store.groups:
            keys = np.random.default_rng(seed).permutation(np.arange(-70, 70))
            ids, rows = store.locate(group.tables[0].name, keys, after=passes - 1)
            together = read_found(store, group.index, ids, rows)
            assert all(np.all(values[ids < 0] == 0) for values in together)
            for segment in store.segments:
                mine = np.nonzero(ids == segment.id)[0]
                alone = store.read_rows(segment, group.index, rows[mine])
                for values, expected in zip(together, alone, strict=True):
                    assert np.array_equal(values[mine], expected)


def test_a_damaged_page_ends_a_lookup_with_its_error() -> None:
    """Although it is read ahead, on another thread."""
    store, world = trained(0, 2)
    segment = store.segments[0]
    segment.checksums[0][:] ^= 1
    with pytest.raises(CorruptBlockError, match="restore the store from a copy"):
        store.read_rows(segment, 0, np.arange(segment.layouts[0].rows))
    assert world.pass_index == 2


def test_large_runs_of_a_lookup_pass_the_page_cache(big: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin in their page of memory as they do in that of the file, also behind a run of another length."""
    dump(big, 0, {1: 300, 2: 700}, block_bytes=1 << 20)
    publish(big, 1)
    segment, asked = big.segments[0], []
    plain = BlockFile.read

    def read(file: BlockFile, offset: int, out: NDArray[np.uint8]) -> None:
        asked.append((out.size, (out.ctypes.data - offset) % PAGE_BYTES))
        plain(file, offset, out)

    monkeypatch.setattr(BlockFile, "read", read)
    layout = segment.layouts[0]
    wanted = np.concatenate([np.arange(3, 9), np.arange(21, layout.rows - 5)])
    found = big.read_rows(segment, 0, wanted)
    assert max(size for size, _ in asked) > 256 << 10
    assert {shift for _, shift in asked} == {0}
    alone = big.read_rows(segment, 0, wanted[7:8])
    assert found[0][7].tobytes() == alone[0][0].tobytes()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 6), st.sampled_from([1, 3, 1 << 20]))
def test_key_pages_of_any_size_find_the_same_rows(seed: int, passes: int, page_keys: int) -> None:
    """Whatever first keys a record has, and wherever its ranges and tables begin among them."""
    asked = np.random.default_rng(seed).permutation(np.arange(-70, 70))[: 1 + seed % 140]

    def found() -> list[NDArray[np.int64]]:
        store, _ = trained(seed, passes)
        tables = (table.name for group in store.groups for table in group.tables)
        return [part for name in tables for part in store.locate(name, asked, after=passes - 1)]

    expected = found()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiercache.store.segment_layout.KEY_PAGE_ROWS", page_keys)
        for mine, other in zip(found(), expected, strict=True):
            assert np.array_equal(mine, other)


def test_one_key_costs_a_page_of_keys_and_one_of_rows() -> None:
    """Of a table whose rows stand in one run, as compaction leaves them; a key without a row costs no page of rows."""
    table = Table(name="t", dim=8, optimizer=Adagrad(learning_rate=0.1), initializer=Zeros())
    store = Store.open(None, tables=[table], engine=MemoryEngine())
    (group,), rows = store.groups, 200_000
    keys = np.arange(rows, dtype=np.int64) * 3
    keys = keys[np.argsort(hash_keys(keys, table.table_id))]
    values = np.repeat(keys[:, None], table.row_bytes // 4, axis=1).astype(np.float32)
    layout = base_layout(group, [Range(NEVER, (rows,))])
    store.append(0, [layout], blocks_of(group, layout, [(keys, values)]))
    publish(store, 1)
    for key, count in ((3 * 77, 1), (int(keys[0]), 1), (int(keys[-1]), 1), (3 * 78 + 1, 0)):
        before = store.counters.key_bytes_read, store.counters.row_bytes_read
        found = store.lookup("t", np.array([key]), missing="zeros")["vector"]
        assert (found == (key if count else 0)).all()
        assert store.counters.key_bytes_read - before[0] <= 8 << 10
        assert store.counters.row_bytes_read - before[1] <= count * 40 << 10


def test_keys_that_do_not_begin_as_their_record_says_are_refused() -> None:
    """A record of other rows has other first keys, where a lookup would look in the wrong page."""
    store, _ = trained(3, 2)
    segment = store.segments[-1]
    store.read_keys(segment, 0, 0)
    segment.first_keys[0][0] += 1
    with pytest.raises(CorruptBlockError, match="other first keys"):
        store.read_keys(segment, 0, 0)
