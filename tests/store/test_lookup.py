"""Finding and reading single rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.conftest import small_tables
from tests.store.world import World
from tiercache.store import MemoryEngine, Store
from tiercache.store.lookup import locate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.store.conftest import Home
    from tiercache.store import Table


def trained(seed: int, visits: int, *, commit: bool = True) -> tuple[Store, World]:
    """Return a store in memory after some visits."""
    tables = small_tables()
    store = Store.open(None, tables=tables, engine=MemoryEngine())
    world = World(tables, seed=seed, num_passes=1 + seed % 4, piece_rows=1 + seed % 7, block_rows=1 + seed % 23)
    for _ in range(visits):
        world.train()
        world.append(store)
        world.visit += 1
        if commit:
            world.publish(store)
    return store, world


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 6), st.booleans())
def test_every_row_is_found_where_it_was_last_written(seed: int, visits: int, commit: bool) -> None:
    """Committed or not, for pieces and blocks of any size; keys that no visit trained are not found."""
    store, world = trained(seed, visits, commit=commit)
    world.check(store, after=visits - 1)
    world.check(store, after=visits)


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
    """Reading rows is indexing into the stream."""
    store, world = home.open(tables), World(tables)
    world.run(store, 1)
    segment = store.segments[0]
    for group in store.groups:
        everything = store.read_rows(segment, group.index, np.arange(segment.streams[group.index].rows))
        some = np.random.default_rng(1).integers(0, segment.streams[group.index].rows, 60)
        for field, all_rows, values in zip(
            group.fields, everything, store.read_rows(segment, group.index, some), strict=True
        ):
            assert values.shape == (60, field.width)
            assert np.array_equal(values, all_rows[some])
    assert store.read_rows(segment, 0, np.empty(0, np.int64))[0].shape == (0, store.groups[0].dim)


def test_pieces_in_memory_are_not_read(home: Home, tables: list[Table]) -> None:
    """What ``cached`` gives is taken as it is; only the other pieces are read, neighbours at once."""
    store, world = home.open(tables), World(tables, keys_per_pass=80)
    world.run(store, 1)
    segment, group = store.segments[0], 0
    stream = segment.streams[group]
    asked: list[int] = []

    def cached(segment_id: int, group_index: int, piece: int) -> NDArray[np.uint8] | None:
        assert (segment_id, group_index) == (segment.id, group)
        asked.append(piece)
        if piece % 2:
            return None
        size = int(stream.piece_offset_P[piece + 1] - stream.piece_offset_P[piece])
        return np.full(size // 4, piece, np.float32).view(np.uint8)

    rows = np.arange(stream.rows)
    plain = store.read_rows(segment, group, rows)
    before = store.counters.row_bytes_read
    mixed = store.read_rows(segment, group, rows, cached=cached)
    assert asked == list(range(stream.num_pieces))
    pieces = np.searchsorted(stream.piece_first_row_P, rows, side="right") - 1
    odd = pieces % 2 == 1
    assert store.counters.row_bytes_read - before == int(odd.sum()) * stream.row_bytes
    for a, b in zip(plain, mixed, strict=True):
        assert np.array_equal(a[odd], b[odd])
        assert np.array_equal(b[~odd], np.broadcast_to(pieces[~odd, None], b[~odd].shape))


def test_contiguous_pieces_are_read_at_once(home: Home, tables: list[Table]) -> None:
    """All rows of a stream take one read of the engine for each block."""
    store, world = home.open(tables), World(tables)
    world.run(store, 1)
    segment = store.segments[0]
    before = store.counters.reads
    store.read_rows(segment, 0, np.arange(segment.streams[0].rows))
    assert store.counters.reads - before == segment.streams[0].num_blocks


def test_rows_are_read_in_batches_of_bounded_memory(
    home: Home, tables: list[Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any bound gives the same rows."""
    store, world = home.open(tables), World(tables)
    world.run(store, 1)
    segment = store.segments[0]
    rows = np.random.default_rng(2).permutation(segment.streams[0].rows)
    whole = store.read_rows(segment, 0, rows)
    monkeypatch.setattr("tiercache.store.lookup.BATCH_BYTES", 1)
    for a, b in zip(whole, store.read_rows(segment, 0, rows), strict=True):
        assert np.array_equal(a, b)
