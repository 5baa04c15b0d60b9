"""Filling an empty store with rows from outside."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.big import BIG, dump
from tests.store.conftest import Home, small_tables
from tests.store.failing import FailingEngine
from tests.store.test_scan import scanned
from tiercache.store import NEVER, Adagrad, MemoryEngine, Store, StoreFullError, Table, Zeros, info, load_rows, verify

ONE = Table(name="one", dim=2, optimizer=Adagrad(learning_rate=0.1, initial_accumulator=0.5), initializer=Zeros())


def rows_of(table: Table, keys: np.ndarray, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Return rows of random bits, including NaN."""
    generator = np.random.default_rng([seed, table.table_id & 0xFFFF])
    return tuple(
        generator.integers(0, 1 << 32, (keys.size, f.width), dtype=np.uint32).view(np.float32) for f in table.fields
    )


@settings(max_examples=12, deadline=None)
@given(
    counts=st.lists(st.integers(0, 300), min_size=5, max_size=5),
    chunk=st.integers(1, 120),
    memory_bytes=st.sampled_from([2_000, 8_000, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_a_filled_store_holds_the_rows_given(counts: list[int], chunk: int, memory_bytes: int, seed: int) -> None:
    tables = small_tables()
    generator = np.random.default_rng(seed)
    keys = {t.name: np.unique(generator.integers(-(1 << 62), 1 << 62, n)) for t, n in zip(tables, counts, strict=True)}
    rows = {t.name: rows_of(t, keys[t.name], seed) for t in tables}
    parts = []
    for t in tables:
        order = generator.permutation(keys[t.name].size)
        for low in range(0, order.size, chunk):
            at = order[low : low + chunk]
            parts.append((t.name, (keys[t.name][at], tuple(f[at] for f in rows[t.name]))))
    generator.shuffle(parts)  # type: ignore[arg-type]
    engine = MemoryEngine()
    with Store.open(None, tables=tables, engine=engine) as store:
        done = {"sort": 0, "write": 0}

        def count(stage: str, rows: int) -> None:
            done[stage] += rows

        assert load_rows(store, parts, memory_bytes=memory_bytes, progress=count).id == 0
        assert set(done.values()) == {sum(k.size for k in keys.values())}
    with Store.open(None, engine=engine, mode="r") as store:
        assert store.commit.cursor == (0, 0)
        assert {r.next_use for s in store.segments for layout in s.layouts for r in layout.ranges} <= {NEVER}
        for t in tables:
            expected = {
                key: b"".join(f[i].tobytes() for f in rows[t.name]) for i, key in enumerate(keys[t.name].tolist())
            }
            assert scanned(store, t.name) == expected


def test_rows_found_by_key_are_those_that_were_filled(home: Home) -> None:
    """Lookup needs nothing except a filled store, and verification finds it intact."""
    store, keys = home.open([ONE]), np.arange(1000, dtype=np.int64)
    rows = rows_of(ONE, keys)
    load_rows(store, [("one", (keys, rows))])
    for mine, given_ in zip(store.lookup("one", keys).values(), rows, strict=True):
        assert mine.tobytes() == given_.tobytes()
    home.close()
    if home.kind == "lmdb":
        assert verify(home.path)["problems"] == []
        assert info(home.path)["rows"] == 1000


KEYS = np.arange(3, dtype=np.int64)
ROWS = rows_of(ONE, KEYS)
ZEROS = np.zeros(100, dtype=np.int64)
LEAST = np.int64(-(1 << 63))


@pytest.mark.parametrize(
    ("chunks", "sentence"),
    [
        ([(KEYS, ROWS), (KEYS[2:], (ROWS[0][2:], ROWS[1][2:]))], "key 2 of table 'one' occurs twice"),
        ([(ZEROS, rows_of(ONE, ZEROS))], "key 0 of table 'one' occurs twice"),  # more than fit in memory
        ([(KEYS + LEAST, ROWS)], "key -9223372036854775808 .* reserved for the out-of-vocabulary row"),
        ([(KEYS + LEAST + 1, ROWS)], "key -9223372036854775807 .* reserved for the null row"),
        ([(KEYS, ROWS[:1])], "have 1 fields, not vector, sum: or pass initial_state to start from the initial state"),
        (
            [(KEYS, (ROWS[0][:, :1], ROWS[1]))],
            r"vector of table 'one' is \(3, 1\) .* expected float32 of shape \(3, 2\)",
        ),
        ([(KEYS, (ROWS[0].astype(np.float64), ROWS[1]))], "of float64"),
        ([(KEYS.astype(np.int32), ROWS)], "expected int64 of shape"),
    ],
)
def test_rows_that_cannot_be_taken_are_refused(home: Home, chunks: Any, sentence: str) -> None:
    """The store stays empty and can be filled."""
    store = home.open([ONE])
    with pytest.raises(ValueError, match=sentence):
        load_rows(store, [("one", chunk) for chunk in chunks], memory_bytes=1)
    with pytest.raises(ValueError, match=r"rows of table 'two', but the store .* has 'one'"):
        load_rows(store, [("two", (KEYS, ROWS))])
    store = home.open()
    assert store.commit is None
    assert store.segments == ()
    load_rows(store, [("one", (KEYS, ROWS))])


def test_state_and_reserved_keys_are_taken_where_they_are_asked_for(home: Home) -> None:
    """The state starts at the optimizer's initial value; the two reserved keys are ordinary rows."""
    store = home.open([ONE])
    keys = np.array([5, -(1 << 63), -(1 << 63) + 1], dtype=np.int64)
    load_rows(store, [("one", (keys, ROWS[:1]))], initial_state=True, reserved_keys={"one"})
    found = scanned(store, "one")
    assert found == {
        key: ROWS[0][i].tobytes() + np.full(2, 0.5, np.float32).tobytes() for i, key in enumerate(keys.tolist())
    }


def test_a_store_with_uncommitted_rows_is_refused(big: Store) -> None:
    """They would become part of the commit."""
    dump(big, 0, {1: 10})
    with pytest.raises(ValueError, match="has rows that no commit names"):
        load_rows(big, [])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_full_disk_leaves_the_store_empty(call: int) -> None:
    memory = MemoryEngine()
    engine = FailingEngine(memory)
    store = Store.open(None, tables=[BIG], engine=engine)
    engine.fail_in(call)
    keys = np.arange(40_000, dtype=np.int64)
    with pytest.raises(StoreFullError):
        load_rows(
            store, [("big", (keys[i : i + 1000], rows_of(BIG, keys[i : i + 1000]))) for i in range(0, 40_000, 1000)]
        )
    assert engine.failed == 1
    assert store.commit is None
    assert Store.open(None, engine=memory).commit is None
    assert [*memory.list()] == ["tables"]


def test_memory_is_bounded(tmp_path: Path) -> None:
    memory = 8 << 20

    def chunks() -> Iterator[tuple[str, Any]]:
        for i in range(24):
            keys = np.arange(1000 * i, 1000 * (i + 1), dtype=np.int64)
            yield "big", (keys, rows_of(BIG, keys))

    with Store.open(tmp_path / "s", tables=[BIG]) as store:
        tracemalloc.start()
        load_rows(store, chunks(), memory_bytes=memory)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        chunk = 3 * 1000 * BIG.row_bytes  # the input, its array, and the next one
        block = 4 * (4 << 20)
        assert peak < memory + chunk + block
        assert 24_000 * BIG.row_bytes > 5 * memory
        assert store.counters.spill_bytes_written == 24_000 * (BIG.row_bytes + 8)
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]
