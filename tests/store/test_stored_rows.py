"""Rows whose vectors are bfloat16 or float16, and tables that are compressed."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.store.conftest import Home, narrow_tables
from tests.store.test_independent_reader import compressed_tables
from tests.store.world import World
from tiercache.store import (
    SGD,
    Adagrad,
    Constant,
    MemoryEngine,
    Range,
    Store,
    Table,
    TableMismatchError,
    ZarrEngine,
    Zeros,
    group_tables,
    info,
    verify,
)
from tiercache.store.bits import from_bits, nearest, to_bits
from tiercache.store.bulk_load import load_rows
from tiercache.store.engines.zarr_layout import cut
from tiercache.store.inspect import differences
from tiercache.store.row_codec import initial_rows, row_words
from tiercache.store.segment import base_layout

DTYPES = ("bfloat16", "float16")


def test_passes_loads_other_schedules_and_compacting_keep_every_bit(home: Home) -> None:
    """The same walk as for float32 tables, with the definition's rows as the oracle."""
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
    """Representable values are unchanged bit for bit; the optimizer state is float32."""
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
    """By their bytes in float32, for scans and for changes, with about that size."""
    table = Table(name="t", dim=64, optimizer=SGD(learning_rate=0.1), initializer=Zeros(), dtype="bfloat16")
    most = 1 << 14
    monkeypatch.setattr("tiercache.store.scan.SCAN_CHUNK_BYTES", most)
    monkeypatch.setattr("tiercache.store.reads._CHANGES_BYTES", most)
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
    """Compared with a search among all numbers; ties to even; half a step beyond the largest becomes infinity."""
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
    """Every 16-bit number is a float32; NaN stays NaN."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    numbers = from_bits(bits, dtype)
    nan = np.isnan(numbers)
    assert np.array_equal(to_bits(numbers, dtype)[~nan], bits[~nan])
    assert np.isnan(from_bits(to_bits(numbers[nan], dtype), dtype)).all()


# -- tables that are compressed ------------------------------------------------------------------------------

KINDS = ("zstd", "blosc")


def plain(**changes: object) -> Table:
    """Return a table of rows of 256 bytes."""
    table = Table(name="t", dim=64, optimizer=SGD(learning_rate=1.0), initializer=Zeros())
    return dataclasses.replace(table, **changes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_compressed_store_holds_the_rows_that_any_store_holds(tmp_path: Path, kind: str) -> None:
    """Through passes, a commit inside one, a reopen, a rollback and a compaction: loads, lookups, scans and changes."""
    chosen = compressed_tables(kind)
    world = World(chosen, num_passes=4, keys_per_pass=60)
    with Store.open(tmp_path / "s", tables=chosen, retention=2) as store:
        assert isinstance(store._opened.engine, ZarrEngine)
        for _ in range(6):
            world.check_load(store, world.pass_index)
            world.run(store, 1)
        world.train(part=1)
        world.append(store, within=True)
        world.publish(store, sample=7)
        world.check_within(store)
    with Store.open(tmp_path / "s", mode="r") as store:
        world.check(store, after=world.pass_index - 1)
        for table in chosen:
            keys = np.array([key for name, key in world.rows if name == table.name])
            found = store.lookup(table.name, keys)
            scanned = {int(k): i for keys, _ in store.scan(table.name) for i, k in enumerate(keys)}
            changed = {int(k) for keys, _ in store.changes(table.name, since=-1) for k in keys}
            assert set(scanned) == changed == set(keys.tolist())
            for i, key in enumerate(keys.tolist()):
                assert b"".join(f[i].tobytes() for f in found.values()) == world.rows[table.name, key]
    assert verify(tmp_path / "s")["problems"] == []
    with Store.open(tmp_path / "s") as store:
        store.rollback(store.commits[0].id)
        before = {t.name: [(k.tobytes(), *(f.tobytes() for f in fs)) for k, fs in store.scan(t.name)] for t in chosen}
        store.compact()
        after = {t.name: [(k.tobytes(), *(f.tobytes() for f in fs)) for k, fs in store.scan(t.name)] for t in chosen}
        assert after == before
        tc.export_store(store, tmp_path / "out", format="numpy")
    assert verify(tmp_path / "s")["problems"] == []
    assert [t["compression"] for t in info(tmp_path / "s")["tables"] if "compression" in t] == [kind] * 4
    tc.import_store(tmp_path / "out", tmp_path / "copy", steps=1)
    with Store.open(tmp_path / "copy") as copy:
        assert {t.name: t.compression for t in copy.tables} == {t.name: t.compression for t in chosen}


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_compressed_rows_are_cut_evenly(kind: str) -> None:
    """Into inner chunks of 16 KiB, or of a larger row; plain blocks are unchanged."""
    for dim in (1, 3, 65, 500, 40_000):
        (group,) = group_tables([plain(dim=dim, compression=kind)])
        layout = base_layout(group, [])
        rows = Range(next_use=1, table_rows=(3 * layout.block_rows,))
        chunk_rows, inner_rows = cut(base_layout(group, [rows]))
        assert chunk_rows == layout.block_rows
        assert inner_rows == max(1, (16 << 10) // group.row_bytes)
        (group,) = group_tables([plain(dim=dim)])
        assert base_layout(group, []).block_bytes == max(4 << 20, group.row_bytes)


def test_tables_of_different_compression_share_no_layout() -> None:
    """Without compression, records and groups are unchanged."""
    one, two = plain(), plain(name="u")
    assert len(group_tables([one, two])) == 1
    assert len(group_tables([one, dataclasses.replace(two, compression="zstd")])) == 2
    assert "compression" not in one.to_record()
    squeezed = plain(compression="blosc")
    assert Table.from_record(squeezed.to_record()).compression == "blosc"
    assert squeezed == one
    with pytest.raises(ValueError, match="compression of table 't' is 'gzip': it must be 'zstd', 'blosc' or None"):
        plain(compression="gzip")


def test_an_engine_that_cannot_compress_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """The message names the engine that can; by default that engine is used."""
    table = plain(compression="zstd")
    with pytest.raises(
        ValueError, match=r"table 't' has compression .*'zstd', but engine 'lmdb' has none: use engine='zarr'"
    ):
        Store.open(tmp_path / "s", tables=[table], engine="lmdb")
    assert not (tmp_path / "s").exists()
    Store.open(tmp_path / "s", tables=[table]).close()
    assert json.loads((tmp_path / "s" / "store.json").read_text())["engine"] == "zarr"
    Store.open(None, tables=[table], engine=MemoryEngine()).close()


def test_a_store_keeps_its_compression(tmp_path: Path) -> None:
    """Tables without a setting open it; tables with another one are refused."""
    Store.open(tmp_path / "s", tables=[plain(compression="zstd")]).close()
    with Store.open(tmp_path / "s", tables=[plain()]) as store:
        assert store.tables[0].compression == "zstd"
    with pytest.raises(TableMismatchError, match="has compression 'zstd', but 'blosc' was given"):
        Store.open(tmp_path / "s", tables=[plain(compression="blosc")])
    Store.open(tmp_path / "p", tables=[plain()], engine="zarr").close()
    with pytest.raises(TableMismatchError, match="has compression None, but 'blosc' was given"):
        Store.open(tmp_path / "p", tables=[plain(compression="blosc")])


def test_a_schema_may_ask_for_compression(tmp_path: Path) -> None:
    """For all tables or for one; "none" excludes one."""
    (tmp_path / "s.toml").write_text(
        '[defaults]\ndim = 2\noptimizer = { name = "sgd", learning_rate = 0.1 }\ninitializer = "zeros"\n'
        'compression = "zstd"\n'
        '[tables.a]\n[tables.b]\ncompression = "none"\n[tables.c]\ncompression = "blosc"\n'
        "[features.a]\n[features.b]\n[features.c]\n"
    )
    schema = tc.Schema.load(tmp_path / "s.toml")
    assert {t.name: t.compression for t in schema.tables} == {"a": "zstd", "b": None, "c": "blosc"}
    assert tc.Schema.from_record(schema.to_record()).tables[0].compression == "zstd"
