"""Scanning a table: all live rows in hash order, in bounded memory."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.big import BIG, dump, publish
from tests.store.conftest import Careless, Home, small_tables
from tests.store.world import World
from tiercache.store import CorruptStoreError, MemoryEngine, Store, Table, hash_keys
from tiercache.store.external_sort import hash_slices
from tiercache.store.row_codec import row_words
from tiercache.store.scan import scan_segments


def scanned(store: Store, name: str, **options: Any) -> dict[int, bytes]:
    """Scan a table, check the order, and return each row's bytes."""
    table = next(one for one in store.tables if one.name == name)
    found: dict[int, bytes] = {}
    hashes: list[int] = []
    for keys, fields in store.scan(name, **options):
        assert keys.dtype == np.int64
        assert [f.shape for f in fields] == [(keys.size, f.width) for f in table.fields]
        assert keys.size <= options.get("chunk_rows", keys.size)
        hashes += hash_keys(keys, table.table_id).tolist()
        words = row_words(table.fields, fields)
        found |= {key: words[i].tobytes() for i, key in enumerate(keys.tolist())}
    assert hashes == sorted(hashes)
    return found


def check(store: Store, world: World, **options: Any) -> None:
    """Assert that scans of all tables give the rows of the dict."""
    for table in store.tables:
        expected = {key: row for (name, key), row in world.rows.items() if name == table.name}
        assert scanned(store, table.name, **options) == expected
        assert store.live_rows(table.name) == len(expected)


def check_slices(store: Store, world: World, count: int, **options: Any) -> None:
    """Assert that scans of slices of hashes, one after another, give the rows of the whole, without stale ones."""
    for table in store.tables:
        found: list[int] = []
        for hashes in hash_slices(count):
            for keys, fields in scan_segments(
                store.reader, store.snapshot, store.segments, table.name, hashes=hashes, as_words=True, **options
            ):
                assert all(hashes[0] <= one < hashes[1] for one in hash_keys(keys, table.table_id).tolist())
                found += keys.tolist()
                rows = np.concatenate(fields, axis=1)
                assert [row.tobytes() for row in rows] == [world.rows[table.name, key] for key in keys.tolist()]
        assert found == [key for keys, _ in store.scan(table.name, **options) for key in keys.tolist()]


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 99),
    passes=st.integers(1, 4),
    trained=st.integers(1, 6),
    layout=st.tuples(st.integers(1, 7), st.integers(1, 20)),
    within=st.booleans(),
    chunk_rows=st.integers(1, 60),
    slices=st.integers(1, 9),
    memory_bytes=st.sampled_from([1, 500, 2_000, 6_000, 20_000, 1 << 20]),
)
def test_a_scan_gives_every_live_row_once_in_hash_order(
    seed: int,
    passes: int,
    trained: int,
    layout: tuple[int, int],
    within: bool,
    chunk_rows: int,
    slices: int,
    memory_bytes: int,
) -> None:
    """At and inside passes."""
    tables = small_tables()
    world = World(tables, seed=seed, num_passes=passes, page_rows=layout[0], block_rows=layout[1])
    with Store.open(None, tables=tables, engine=MemoryEngine()) as store:
        world.run(store, trained)
        if within:
            world.train(part=1)
            world.append(store, within=True)
            world.publish(store, sample=1)
        check(store, world, chunk_rows=chunk_rows, memory_bytes=memory_bytes)
        check_slices(store, world, slices, chunk_rows=chunk_rows, memory_bytes=memory_bytes)


def test_rows_that_no_commit_names_are_not_scanned(home: Home, tables: list[Table]) -> None:
    world, store = World(tables), home.open(tables)
    with pytest.raises(ValueError, match="has no commit yet"):
        store.scan("user")
    world.run(store, 1)
    before = dict(world.rows)
    world.train()
    world.append(store)
    world.rows = before
    check(store, world)
    with pytest.raises(ValueError, match="has no table"):
        store.scan("nobody")
    with pytest.raises(ValueError, match="chunk_rows is 0"):
        store.scan("user", chunk_rows=0)


def test_a_key_with_two_live_rows_is_an_error() -> None:
    tables = small_tables()
    with Store.open(None, tables=tables, engine=MemoryEngine()) as store:
        Careless(tables).run(store, 1)
        with pytest.raises(CorruptStoreError, match="'day' of the store in memory has two live rows"):
            list(store.scan("day"))
        with pytest.raises(CorruptStoreError, match=r"'day' that are not in hash order|has two live rows"):
            list(store.scan("day", memory_bytes=1_000))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_ranges", [1, 8, 300])
def test_memory_is_bounded_and_pages_are_read_once(tmp_path: Path, num_ranges: int) -> None:
    """A store of several times the memory: few ranges are merged, many are sorted, in an unlinked file."""
    memory, rows = 8 << 20, 24_000

    def names() -> set[Path]:
        return {*tmp_path.iterdir(), *(tmp_path / "s").iterdir()}

    with Store.open(tmp_path / "s", tables=[BIG]) as store:
        for pass_index in range(2):
            dump(store, pass_index, {pass_index + 10 + i: rows // 2 // num_ranges for i in range(num_ranges)})
        publish(store, 2)
        stored, files = store.live_rows("big") * BIG.row_bytes, names()
        assert stored > 5 * memory
        before = store.counters.row_bytes_read, store.counters.key_bytes_read
        count = 0
        tracemalloc.start()
        for keys, _ in store.scan("big", memory_bytes=memory, chunk_rows=500):
            count += keys.size
            assert names() == files
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert count * BIG.row_bytes == stored
        assert peak < memory
        assert store.counters.row_bytes_read - before[0] == stored
        assert store.counters.key_bytes_read - before[1] <= stored // 4 + 8 * count
        sorted_rows = count if num_ranges == 300 else 0
        assert store.counters.spill_bytes_written == sorted_rows * (BIG.row_bytes + 8)
