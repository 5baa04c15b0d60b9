"""Rows whose vectors are bfloat16 or float16, in stores of every engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.independent_reader import read_table
from tiercache.store import SGD, Adagrad, Constant, MemoryEngine, RowWiseAdagrad, Store, Table, Uniform, Zeros
from tiercache.store.difference import differences
from tiercache.store.filling import fill
from tiercache.store.initial import initial_rows
from tiercache.store.testing.world import World
from tiercache.store.vectors import from_bits, nearest, row_words, to_bits

if TYPE_CHECKING:
    from pathlib import Path

    from tests.store.conftest import Home

DTYPES = ("bfloat16", "float16")


def narrow_tables() -> list[Table]:
    """Six tables in five groups, with even and odd dims."""
    start = Uniform(low=-0.1, high=0.1)
    adagrad = Adagrad(learning_rate=0.1)
    return [
        Table(name="user", dim=3, optimizer=adagrad, initializer=start, dtype="bfloat16"),
        Table(name="item", dim=3, optimizer=adagrad, initializer=start, dtype="bfloat16"),
        Table(name="word", dim=3, optimizer=adagrad, initializer=start, dtype="float16", seed=7),
        Table(name="day", dim=1, optimizer=SGD(learning_rate=1.0), initializer=Constant(value=0.3), dtype="float16"),
        Table(name="place", dim=6, optimizer=RowWiseAdagrad(learning_rate=0.1), initializer=start, dtype="bfloat16"),
        Table(name="wide", dim=3, optimizer=adagrad, initializer=start),
    ]


def test_passes_loads_other_schedules_and_compacting_keep_every_bit(home: Home) -> None:
    """The same walk that float32 tables take, with the rows of the definition as the oracle."""
    tables = narrow_tables()
    world = World(tables, piece_rows=3, block_rows=11)
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


@pytest.mark.parametrize("kind", ["lmdb", "zarr"])
def test_a_reader_that_knows_only_the_format_reads_vectors_of_16_bits(kind: str, tmp_path: Path) -> None:
    """Their own bits, without those that fill a word."""
    tables = narrow_tables()
    world = World(tables, piece_rows=3, block_rows=11)
    with Store.open(tmp_path / "s", tables=tables, engine=kind) as store:
        world.run(store, 5)
        groups = [[table.name for table in group.tables] for group in store.groups]
    for table in tables:
        widths = [field.width for field in table.fields]
        for key, (vector, *states) in read_table(tmp_path / "s", groups, widths, table.name).items():
            row = world.rows[table.name, key]
            assert len(vector) == table.dim * (4 if table.dtype == "float32" else 2)
            assert row[: len(vector)] == vector
            assert row[4 * table.fields[0].words :] == b"".join(states)
            assert not any(row[len(vector) : 4 * table.fields[0].words])


def test_plain_zarr_reads_vectors_of_16_bits(tmp_path: Path) -> None:
    """float16 as it is, bfloat16 as its bits with an attribute that says so; an odd dim has a column of zeros more."""
    tables = narrow_tables()
    world = World(tables, num_passes=2, keys_per_pass=60, block_rows=7)
    with Store.open(tmp_path / "s", tables=tables, engine="zarr") as store:
        world.run(store, 1)
        segment, groups = store.segments[0], store.groups
    root = zarr.open(str(tmp_path / "s"), mode="r")
    for group in groups:
        node = root[f"segments/{segment.id}/{group.index}"]
        keys, vectors = node["keys"][:], node["vector"]
        assert str(vectors.dtype) == {"bfloat16": "uint16"}.get(group.dtype, group.dtype)
        assert dict(vectors.attrs) == ({"dtype": "bfloat16"} if group.dtype == "bfloat16" else {})
        if group.dtype != "float32":
            assert vectors.shape[1] == group.dim + group.dim % 2
        tables_of = [t.name for t in group.tables]
        for i, key in enumerate(keys.tolist()):
            row = vectors[i].tobytes()
            assert any(world.rows.get((name, key), b"")[: len(row)] == row for name in tables_of)


@pytest.mark.parametrize("compression", ["zstd", "blosc"])
def test_compressed_tables_may_have_16_bits(tmp_path: Path, compression: str) -> None:
    """What is written is what is read."""
    start = Uniform(low=-0.1, high=0.1)
    tables = [
        Table(
            name=dtype, dim=5, optimizer=Adagrad(learning_rate=0.1), initializer=start, dtype=dtype,
            compression=compression,
        )
        for dtype in DTYPES
    ]  # fmt: skip
    world = World(tables, piece_rows=3, block_rows=12)
    with Store.open(tmp_path / "s", tables=tables, engine="zarr") as store:
        world.run(store, 3)
        world.check(store, after=world.pass_index - 1)
        root = zarr.open(str(tmp_path / "s"), mode="r")
        segment = store.segments[-1]
        vectors = root[f"segments/{segment.id}/0/vector"][:]
        assert vectors.itemsize == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_from_outside_are_rounded_to_the_nearest(home: Home, dtype: str) -> None:
    """What the dtype has comes back bit for bit; the optimizer state is float32."""
    table = Table(name="t", dim=3, optimizer=Adagrad(learning_rate=0.1), initializer=Constant(value=0.1), dtype=dtype)
    rng = np.random.default_rng(3)
    keys = np.arange(50, dtype=np.int64)
    fields = tuple(rng.standard_normal((50, 3)).astype(np.float32) for _ in range(2))
    with home.open([table]) as store:
        fill(store, [("t", (keys, fields))])
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
    monkeypatch.setattr("tiercache.store.serving._CHUNK_BYTES", most)
    with Store.open(None, tables=[table], engine=MemoryEngine()) as store:
        fill(store, [("t", (np.arange(500, dtype=np.int64), (np.ones((500, 64), np.float32),)))])
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
