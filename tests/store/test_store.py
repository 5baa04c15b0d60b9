"""The contract of a store, on every engine."""

from typing import Any

import numpy as np
import pytest

from tests.store.conftest import Home, needed_bytes, stored_bytes
from tests.store.world import World
from tiercache.store import CorruptBlockError, Cursor, SegmentLayout, Store, StoreClosedError, Table

PLAIN: dict[str, Any] = {"state": b"", "schedule_digest": "", "settings": {}, "environment": {}}


def test_a_new_store_has_tables_and_no_commit(home: Home, tables: list[Table]) -> None:
    store = home.open(tables)
    assert (store.commit, store.segments, len(store.groups)) == (None, (), 4)
    assert list(store.tables) == sorted(tables, key=lambda table: table.table_id)
    assert home.open().tables == store.tables


def test_a_commit_survives_a_reopen(home: Home, tables: list[Table]) -> None:
    store, world = home.open(tables), World(tables)
    world.run(store, 4)
    store = home.open(tables)
    commit = store.commit
    assert (commit.cursor, commit.schedule_digest) == (Cursor(4, 0), "cyclic")
    assert (commit.settings, commit.environment) == ({"seed": 0}, {"threads": 1})
    assert store.state() == b"state at 4, 0"
    world.check(store, after=3)
    world.check_load(store, 4)


def test_blocks_without_live_rows_are_freed_by_the_commit(home: Home, tables: list[Table]) -> None:
    store, world = home.open(tables), World(tables)
    cut = 0
    for _ in range(7):
        world.run(store, 1)
        assert stored_bytes(store) == needed_bytes(store)
        cut += sum(0 < one.dropped < one.size for one in store._opened.engine.list().values())
    assert cut > 7
    assert stored_bytes(home.open()) == needed_bytes(home.opened[0])


def test_a_commit_that_cannot_be_is_refused(home: Home, tables: list[Table]) -> None:
    """Freed rows cannot return, and inside a pass its rows are those dumped within it since the last commit."""
    store, world = home.open(tables), World(tables)
    for bad in ({"x": object()}, {"x": float("nan")}):
        with pytest.raises(ValueError, match="plain JSON values"):
            store.publish(Cursor(0, 0), **{**PLAIN, "settings": bad})
    world.train()
    world.append(store)
    with pytest.raises(ValueError, match="cannot name a dump of pass 0"):
        store.publish(Cursor(0, 0), **PLAIN)
    assert store.commit is None
    world.pass_index = 1
    world.publish(store)
    with pytest.raises(ValueError, match="cannot go back"):
        store.publish(Cursor(0, 0), **PLAIN)
    with pytest.raises(ValueError, match="append them with within=True first"):
        world.publish(store, sample=5)
    world.train()
    world.append(store, within=True)
    world.publish(store, sample=5)
    with pytest.raises(ValueError, match="append them with within=True first"):
        world.publish(store, sample=6)


def test_a_commit_inside_a_pass_without_rows_is_a_commit(home: Home, tables: list[Table]) -> None:
    store = home.open(tables)
    layouts = [SegmentLayout.of(row_bytes=g.row_bytes, page_rows=1, block_bytes=1000, ranges=()) for g in store.groups]
    store.append(0, layouts, [], within=True)
    store.publish(Cursor(0, 7), **PLAIN)
    store = home.open()
    assert store.commit.cursor == Cursor(0, 7)
    assert [segment.rows for segment in store.segments] == [0]


@pytest.mark.parametrize("size", [0, 1, (4 << 20) - 1, 4 << 20, (9 << 20) + 5])
def test_dense_state_of_any_size_comes_back(home: Home, tables: list[Table], size: int) -> None:
    """Each 4 MiB of it has a checksum, and the previous state is freed."""
    store = home.open(tables)
    state = np.random.default_rng(size).bytes(size)
    for one in (b"x" * 5_000_000, state):
        store.publish(Cursor(0, 0), **{**PLAIN, "state": one})
    store = home.open()
    assert (store.state(), store.commit.id) == (state, 1)
    assert stored_bytes(store, "states/") == {store.commit.own.state.name: size}
    assert store.commit.own.state.checksums.size == -(-size // (4 << 20))


def test_append_refuses_blocks_that_are_not_what_was_announced(home: Home, tables: list[Table]) -> None:
    """No part of them is left."""
    store, world = home.open(tables), World(tables)
    world.train()
    laid = [world.layout(group, within=False) for group in store.groups]
    layouts = [layout for layout, _ in laid]
    whole: list[Any] = [
        (g, b, data.copy(), keys.copy())
        for (layout, names), group in zip(laid, store.groups, strict=True)
        for g, b, data, keys in world.blocks(layout, names, group)
    ]
    (g, b, data, keys), rest = whole[0], whole[1:]
    bad = {
        "too few": whole[1:],
        "which does not exist or was already given": [whole[0], whole[0], *rest],
        "contiguous bytes": [(g, b, data[:-1], keys), *rest],
        "each with an int64 key": [(g, b, data, keys[:-1]), *rest],
        "block 999": [(g, 999, data, keys), *rest],
    }
    for words, given in bad.items():
        with pytest.raises(ValueError, match=words):
            store.append(0, layouts, given)
    with pytest.raises(ValueError, match="layouts for"):
        store.append(0, layouts[:1], whole)
    assert store.segments == ()
    assert stored_bytes(store, "segments/") == {}
    store.append(0, layouts, whole, stable=True)
    store.publish(Cursor(1, 0), **PLAIN)
    world.pass_index = 1
    world.check(store, after=0)
    assert stored_bytes(home.open()) == needed_bytes(home.opened[0])


def test_counters_count_rows_and_bytes(home: Home, tables: list[Table]) -> None:
    store, world = home.open(tables), World(tables)
    world.train()
    segment = world.append(store)
    world.pass_index += 1
    world.publish(store)
    counters, commit = store.counters, store.commit
    assert counters.rows_written == segment.rows == 5 * world.keys_per_pass
    assert counters.row_bytes_written == segment.row_bytes
    assert counters.key_bytes_written == 8 * segment.rows
    assert counters.state_bytes_written == len(b"state at 1, 0")
    described = sum(one.meta_bytes for one in store.segments) + commit.head.size + sum(one.size for one in commit.ranks)
    assert counters.meta_bytes_written == described
    assert counters.commits == 1
    world.check_load(store, 1)
    assert counters.row_bytes_read == sum(len(world.rows.get(key, b"")) for key in world.keys(1))


def test_reads_of_what_is_not_there_are_refused(home: Home, tables: list[Table]) -> None:
    store, world = home.open(tables), World(tables)
    world.run(store, 1)
    segment = store.segments[0]
    layout = segment.layouts[0]
    with pytest.raises(ValueError, match="are not there"):
        store.read(segment, 0, 0, layout.num_pages + 1, np.empty(0, np.uint8))
    with pytest.raises(ValueError, match="contiguous bytes"):
        store.read(segment, 0, 0, 1, np.empty(1, np.uint8))
    with pytest.raises(ValueError, match="are not all in segment"):
        store.read_rows(segment, 0, np.array([layout.rows]))
    world.run(store, 4)  # frees the segment
    with pytest.raises(CorruptBlockError, match=r"block 0 of segment 0 .* (is missing|has checksum)"):
        store.read(segment, 0, 0, 1, np.empty(layout.byte_of_page(1), np.uint8))


def test_a_closed_store_says_so(home: Home, tables: list[Table]) -> None:
    store: Store = home.open(tables)
    store.close()
    store.close()
    for call in (store.discard_uncommitted, store.state):
        with pytest.raises(StoreClosedError, match="is closed: open it again"):
            call()


def test_a_store_open_for_reading_refuses_to_write(home: Home, tables: list[Table]) -> None:
    store, world = home.open(tables), World(tables)
    world.run(store, 3)
    store = home.open(mode="r")
    world.check(store, after=2)
    for write in (world.append, world.publish):
        with pytest.raises(ValueError, match="open for reading"):
            write(store)
