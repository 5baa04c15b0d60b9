"""Rows whose vectors are bfloat16 or float16, in stores of every engine."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.conftest import Home, narrow_tables
from tests.store.world import World
from tiercache.store import SGD, Adagrad, Constant, MemoryEngine, Store, Table, Zeros
from tiercache.store.bulk_load import load_rows
from tiercache.store.diff import differences
from tiercache.store.initial import initial_rows
from tiercache.store.vectors import from_bits, nearest, row_words, to_bits

DTYPES = ("bfloat16", "float16")


def test_passes_loads_other_schedules_and_compacting_keep_every_bit(home: Home) -> None:
    """The same walk that float32 tables take, with the rows of the definition as the oracle."""
    tables = narrow_tables()
    world = World(tables, page_rows=3, block_rows=11)
    with home.open(tables) as store:
        world.run(store, 4)
        world.check(store, after=world.pass_index - 1)
        world.check_load(store, world.pass_index)
        world.follow(store, world.draw(1))
        world.check_load(store, 0)
        world.run(store, 2)
        world.check(store, after=world.pass_index - 1)
        world.compact(store)
        world.check(store, after=-1)
        for table in tables:
            found = {}
            for keys, fields in store.scan(table.name, chunk_rows=5):
                rows = row_words(table.fields, fields)
                found |= {key: rows[i].tobytes() for i, key in enumerate(keys.tolist())}
            assert found == {key: row for (name, key), row in world.rows.items() if name == table.name}
            keys = np.array(sorted(found), np.int64)
            looked_up = store.lookup(table.name, keys)
            assert all(values.dtype == np.float32 for values in looked_up.values())
            rows = row_words(table.fields, list(looked_up.values()))
            assert [row.tobytes() for row in rows] == [found[key] for key in keys.tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_from_outside_are_rounded_to_the_nearest(home: Home, dtype: str) -> None:
    """What the dtype has comes back bit for bit; the optimizer state is float32."""
    table = Table(name="t", dim=3, optimizer=Adagrad(learning_rate=0.1), initializer=Constant(value=0.1), dtype=dtype)
    rng = np.random.default_rng(3)
    keys = np.arange(50, dtype=np.int64)
    fields = tuple(rng.standard_normal((50, 3)).astype(np.float32) for _ in range(2))
    with home.open([table]) as store:
        load_rows(store, [("t", (keys, fields))])
        found = store.lookup("t", np.append(keys, 99), missing="initial")
        assert np.array_equal(found["vector"][:50], nearest(fields[0], dtype))
        assert not np.array_equal(found["vector"][:50], fields[0])
        assert np.array_equal(found["sum"][:50], fields[1])
        assert np.array_equal(found["vector"][50:], initial_rows(table, np.array([99]))[0])
        assert [(one.same, one.different) for one in differences(store, store)] == [(50, 0)]
        ((changed, values),) = store.changes("t", since=-1)
        assert np.array_equal(values["vector"], found["vector"][np.argsort(keys)[changed]])


def test_chunks_are_bounded_as_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their bytes in float32, of scans and of changes, and about as many."""
    table = Table(name="t", dim=64, optimizer=SGD(learning_rate=0.1), initializer=Zeros(), dtype="bfloat16")
    most = 1 << 14
    monkeypatch.setattr("tiercache.store.scan.CHUNK_BYTES", most)
    monkeypatch.setattr("tiercache.store.changes._CHUNK_BYTES", most)
    with Store.open(None, tables=[table], engine=MemoryEngine()) as store:
        load_rows(store, [("t", (np.arange(500, dtype=np.int64), (np.ones((500, 64), np.float32),)))])
        scans = [keys.nbytes + sum(field.nbytes for field in fields) for keys, fields in store.scan("t")]
        changes = [
            keys.nbytes + sum(f.nbytes for f in fields.values()) for keys, fields in store.changes("t", since=-1)
        ]
    assert 0.9 * most < max(scans) <= most
    assert 0.9 * most < max(changes) <= most


@settings(max_examples=200, deadline=None)
@given(st.floats(width=32), st.sampled_from(DTYPES))
def test_rounding_to_the_nearest_is_that_of_all_numbers(value: float, dtype: str) -> None:
    """Against a search among all of them; ties to even; at half a step beyond the largest it is infinity."""
    number = np.array([value], np.float32)
    bits = to_bits(number, dtype)
    if np.isnan(value):
        assert np.isnan(from_bits(bits, dtype)[0])
        return
    lattice = from_bits(np.arange(1 << 16, dtype=np.uint16), dtype)
    lattice = lattice[~np.isnan(lattice)].astype(np.float64)
    largest = np.max(lattice[np.isfinite(lattice)])
    lattice[np.isinf(lattice)] = np.sign(lattice[np.isinf(lattice)]) * {"bfloat16": 2.0**128, "float16": 65536.0}[dtype]
    exact = np.clip(float(number[0]), -2 * largest, 2 * largest)
    away = np.abs(lattice - exact)
    near = lattice[away == away.min()].tolist()
    found = float(from_bits(bits, dtype)[0])
    assert (found if np.isfinite(found) else np.copysign(np.max(lattice), found)) in near
    assert len(set(near)) == 1 or int(bits[0]) % 2 == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_pattern_survives_float32(dtype: str) -> None:
    """A number of 16 bits is one of float32; NaN stays NaN."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    numbers = from_bits(bits, dtype)
    nan = np.isnan(numbers)
    assert np.array_equal(to_bits(numbers, dtype)[~nan], bits[~nan])
    assert np.isnan(from_bits(to_bits(numbers[nan], dtype), dtype)).all()
