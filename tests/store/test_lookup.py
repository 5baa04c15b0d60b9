"""Looking up single rows by key, and changes since a commit."""

import copy
from collections.abc import Sequence
from dataclasses import replace

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
    CommitMissingError,
    CorruptBlockError,
    KeyMissingError,
    MemoryEngine,
    Range,
    Store,
    Table,
    Zeros,
    hash_keys,
)  # fmt: skip
from tiercache.store.engines.block_file import BlockFile, Extents
from tiercache.store.files import PAGE_BYTES
from tiercache.store.row_codec import blocks_of, initial_rows
from tiercache.store.segment import base_layout


def trained(seed: int, passes: int) -> tuple[Store, World]:
    """Return a store in memory after some passes."""
    tables = small_tables()
    store = Store.open(None, tables=tables, engine=MemoryEngine())
    world = World(tables, seed=seed, num_passes=1 + seed % 4, page_rows=1 + seed % 7, block_rows=1 + seed % 23)
    world.run(store, passes)
    return store, world


def test_pages_in_memory_are_not_read(home: Home, tables: list[Table]) -> None:
    """Pages in ``cached`` are used; only the others are read, neighbors at once: one read for each block."""
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

    rows, reads = np.arange(layout.rows), store.counters.reads
    plain = store.read_rows(segment, group, rows)
    assert store.counters.reads - reads == layout.num_blocks
    before = store.counters.row_bytes_read
    mixed = store.read_rows(segment, group, rows, cached=cached)
    assert asked == list(range(layout.num_pages))
    pages = layout.pages_of_rows(rows)
    odd = pages % 2 == 1
    assert store.counters.row_bytes_read - before == int(odd.sum()) * layout.row_bytes
    for a, b in zip(plain, mixed, strict=True):
        assert np.array_equal(a[odd], b[odd])
        assert np.array_equal(b[~odd], np.broadcast_to(pages[~odd, None], b[~odd].shape))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 6), st.sampled_from([1, 200, 1 << 22]), st.sampled_from([1, 3, 1 << 20]))
def test_a_lookup_gives_the_row_of_each_key_however_much_is_read_at_once(
    seed: int, passes: int, batch_bytes: int, page_keys: int
) -> None:
    """Keys in any order, some twice, from all segments, for any first keys in a record; zeros for missing rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiercache.store.lookup.BATCH_BYTES", batch_bytes)
        patch.setattr("tiercache.store.layout.KEY_PAGE_ROWS", page_keys)
        store, world = trained(seed, passes)
        keys = np.random.default_rng(seed).integers(-70, 70, 1 + seed % 200)
        for table in store.tables:
            found = store.lookup(table.name, keys, missing="zeros")
            for i, key in enumerate(keys.tolist()):
                row = b"".join(values[i].tobytes() for values in found.values())
                assert row == world.rows.get((table.name, key), bytes(table.row_bytes))


def test_damaged_rows_and_keys_of_another_segment_are_refused() -> None:
    """Rows are read ahead on another thread; other first hashes would lead a lookup to the wrong page."""
    store, _ = trained(3, 2)
    segment = store.segments[-1]
    store.reader.keys(segment, 0, 0)
    store._opened.engine.blobs[f"{segment.name}/0/rows"].data[:] ^= 1
    with pytest.raises(CorruptBlockError, match="restore the store from a copy"):
        store.read_rows(segment, 0, np.arange(segment.layouts[0].rows))
    first, *others = segment.meta
    segment.describe((replace(first, first_hashes=first.first_hashes[:] + np.uint64(1)), *others))
    with pytest.raises(CorruptBlockError, match="different first keys"):
        store.reader.keys(segment, 0, 0)


def test_large_runs_of_a_lookup_pass_the_page_cache(big: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the same offset in their page of memory as in the blob's page, also after a run of another length."""
    dump(big, 0, {1: 300, 2: 700}, block_bytes=1 << 20)
    publish(big, 1)
    segment, asked = big.segments[0], []
    plain = BlockFile.read

    def read(file: BlockFile, ranges: Sequence[tuple[Extents, int, NDArray[np.uint8]]]) -> None:
        asked.extend((out.size, (out.ctypes.data - offset) % PAGE_BYTES) for _, offset, out in ranges)
        plain(file, ranges)

    monkeypatch.setattr(BlockFile, "read", read)
    layout = segment.layouts[0]
    wanted = np.concatenate([np.arange(3, 9), np.arange(21, layout.rows - 5)])
    found = big.read_rows(segment, 0, wanted)
    assert max(size for size, _ in asked) > 256 << 10
    assert {shift for size, shift in asked if size > 8 << 10} == {0}  # the metadata of the segment is shorter
    alone = big.read_rows(segment, 0, wanted[7:8])
    assert found[0][7].tobytes() == alone[0][0].tobytes()


def test_one_key_costs_a_page_of_keys_and_one_of_rows() -> None:
    """In a table with one run of rows, as after compaction; a key without a row costs no page of rows."""
    table = Table(name="t", dim=8, optimizer=Adagrad(learning_rate=0.1), initializer=Zeros())
    store = Store.open(None, tables=[table], engine=MemoryEngine())
    (group,), rows = store.groups, 200_000
    keys = np.arange(rows, dtype=np.int64) * 3
    keys = keys[np.argsort(hash_keys(keys, table.table_id))]
    values = np.repeat(keys[:, None], table.row_bytes // 4, axis=1).astype(np.float32)
    layout = base_layout(group, [Range(NEVER, (rows,))])
    store.append(0, [layout], blocks_of([group], [layout], lambda *_: [(keys, values)]))
    publish(store, 1)
    for key, count in ((3 * 77, 1), (int(keys[0]), 1), (int(keys[-1]), 1), (3 * 78 + 1, 0)):
        before = store.counters.key_bytes_read, store.counters.row_bytes_read
        found = store.lookup("t", np.array([key]), missing="zeros")["vector"]
        assert (found == (key if count else 0)).all()
        assert store.counters.key_bytes_read - before[0] <= 8 << 10
        assert store.counters.row_bytes_read - before[1] <= count * 40 << 10


def test_keys_without_a_row_are_an_error_unless_asked_for() -> None:
    world = World(small_tables())
    with Store.open(None, tables=world.tables, engine=MemoryEngine()) as store:
        world.run(store, 3)
        table = store.tables[0]
        known = next(key for name, key in world.rows if name == table.name)
        assert store.lookup(table.name, np.array([known]))["vector"].shape == (1, table.dim)
        made = store.lookup(table.name, np.array([8000, known, 8000]), missing="initial")["vector"][[0, 2]]
        assert np.array_equal(made, initial_rows(table, np.array([8000, 8000]))[0])
        with pytest.raises(KeyMissingError, match=r"2 of 3 keys have no row .*\(7000, 8000\): leave them out") as error:
            store.lookup(table.name, np.array([8000, known, 7000, 8000]))
        assert (error.value.table, error.value.keys.tolist()) == (table.name, [7000, 8000])
        for name, key, options, words in (
            ("nobody", np.array([1]), {}, "has no table 'nobody': it has "),
            (table.name, np.array([1.0]), {}, "keys are 1-dimensional float64"),
            (table.name, np.array([2**63], np.uint64), {}, "does not fit in int64"),
            (table.name, np.array([1]), {"missing": "skip"}, "missing='skip' is unknown"),
        ):
            with pytest.raises(ValueError, match=words):
                store.lookup(name, key, **options)


def test_changes_since_a_commit_that_was_given_up_are_refused() -> None:
    """The holder of an abandoned commit gets advice; changes since the previous commit are right."""
    world, past = World(small_tables()), dict[int, World]()
    with Store.open(None, tables=world.tables, engine=MemoryEngine(), retention=4) as store:
        for _ in range(4):
            world.run(store, 1)
            past[store.commit.id] = copy.deepcopy(world)
        store.rollback(1)
        world = copy.deepcopy(past[1])
        world.run(store, 1)
        for since in (2, 3):
            with pytest.raises(
                CommitMissingError, match=rf"commit {since} .* dropped by a rollback to commit 1: pass 1"
            ):
                list(store.changes("user", since=since))
        world.check_changes(store, 1)
        world.check_changes(store, 4)
        with pytest.raises(CommitMissingError, match="has no changes since 6"):
            list(store.changes("user", since=6))
        world.train()
        world.append(store)
        with pytest.raises(ValueError, match="rows that no commit names"):
            list(store.changes("user", since=1))
