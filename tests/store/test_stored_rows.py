"""Rows whose vectors are bfloat16 or float16, and tables that are compressed."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.store.conftest import Home
from tests.store.test_independent_reader import KINDS, compressed_tables
from tests.store.test_retained_segments import check
from tests.store.test_rewrite import rows_of
from tests.store.test_scan import check as check_scans
from tests.store.world import World
from tiercache.errors import ImportExportError
from tiercache.store import SGD, Adagrad, Constant, MemoryEngine, Range, Store, Table, Zeros, group_tables, info, verify
from tiercache.store.bits import from_bits, nearest, to_bits
from tiercache.store.bulk_load import load_rows
from tiercache.store.engines.zarr_layout import cut
from tiercache.store.inspect import differences
from tiercache.store.row_codec import initial_rows
from tiercache.store.segment import base_layout
from tiercache.store.store_errors import TableMismatchError

DTYPES = ("bfloat16", "float16")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("engine", "kind"),
    [(engine, "16 bits") for engine in ("memory", "lmdb", "zarr")]
    + [("zarr", kind) for kind in ("zstd", "blosc", "16 bits, zstd")],
)
def test_passes_other_schedules_reopening_and_compacting_keep_every_bit(engine: str, kind: str, tmp_path: Path) -> None:
    """The same walk as for float32 tables, with the definition's rows as the oracle."""
    home, world = Home(engine, tmp_path), World(KINDS[kind], page_rows=3, block_rows=11)
    store = home.open(list(world.tables))
    world.run(store, 4)
    check(store, world)
    world.follow(store, world.draw(1))
    check(store, world)
    world.run(store, 2)
    world.train(part=1)
    world.append(store, within=True)
    world.publish(store, sample=7)
    store = home.open()
    world.check_within(store)
    assert rows_of(store) == world.rows
    world.train(part=2)
    world.append(store)
    world.pass_index += 1
    world.publish(store)
    check(store, world)
    world.compact(store)
    assert rows_of(store) == world.rows
    check_scans(store, world, chunk_rows=5)
    store.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_from_outside_are_rounded_to_the_nearest(home: Home, dtype: str) -> None:
    """The optimizer state is float32."""
    table = Table(name="t", dim=3, optimizer=Adagrad(learning_rate=0.1), initializer=Constant(value=0.1), dtype=dtype)
    rng = np.random.default_rng(3)
    keys = np.arange(50, dtype=np.int64)
    vectors, sums = (rng.standard_normal((50, 3)).astype(np.float32) for _ in range(2))
    store = home.open([table])
    load_rows(store, [("t", (keys, (vectors, sums)))])
    found = store.lookup("t", np.append(keys, 99), missing="initial")
    assert all(values.dtype == np.float32 for values in found.values())
    assert np.array_equal(found["vector"][:50], nearest(vectors, dtype))
    assert not np.array_equal(found["vector"][:50], vectors)
    assert np.array_equal(found["sum"][:50], sums)
    assert np.array_equal(found["vector"][50:], initial_rows(table, np.array([99]))[0])
    assert [(one.same, one.different) for one in differences(store, store)] == [(50, 0)]
    ((changed, values),) = store.changes("t", since=-1)
    assert np.array_equal(values["vector"], found["vector"][np.argsort(keys)[changed]])


def test_chunks_are_bounded_as_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their bytes in float32."""
    table = Table(name="t", dim=64, optimizer=SGD(learning_rate=0.1), initializer=Zeros(), dtype="bfloat16")
    most = 1 << 14
    monkeypatch.setattr("tiercache.store.scan.SCAN_CHUNK_BYTES", most)
    monkeypatch.setattr("tiercache.store.reads._CHANGES_BYTES", most)
    with Store.open(None, tables=[table], engine=MemoryEngine()) as store:
        load_rows(store, [("t", (np.arange(500, dtype=np.int64), (np.ones((500, 64), np.float32),)))])
        scans = [keys.nbytes + vectors.nbytes for keys, (vectors,) in store.scan("t")]
        changes = [keys.nbytes + fields["vector"].nbytes for keys, fields in store.changes("t", since=-1)]
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


# -- finite numbers that a dtype lacks are refused in imports --------------------------------------------------

INF, NAN = float("inf"), float("nan")
BF16_MOST = float(from_bits(np.array([0x7F7F], np.uint16), "bfloat16")[0])


def imported(path: Path, dtype: str, rows: list[list[float]]) -> np.ndarray:
    """Import rows as keys 10, 11, ... and return the stored rows."""
    keys = np.arange(len(rows)) + 10
    pair = keys, np.array(rows, np.float32)
    tc.import_store(
        {"t": pair},
        path,
        tables=(Table(name="t", dim=2, dtype=dtype, optimizer=SGD(learning_rate=1.0)),),
        initial_state=True,
        steps=0,
    )
    with Store.open(path, mode="r") as store:
        return store.lookup("t", keys)["vector"]


@pytest.mark.parametrize(
    ("dtype", "number", "shown"),
    [
        ("float16", 1e6, r"1e\+06"),
        ("float16", -65520.0, "-65520"),
        ("float16", 65520.0, "65520"),
        ("float16", 3e38, r"3e\+38"),
        ("bfloat16", 3.4e38, r"3\.4e\+38"),
        ("bfloat16", -3.4e38, r"-3\.4e\+38"),
    ],
)
def test_a_number_beyond_the_dtype_is_refused_by_key(tmp_path: Path, dtype: str, number: float, shown: str) -> None:
    """Infinities and NaN next to it are accepted."""
    rows = [[1.0, INF], [NAN, number], [2.0, 3.0]]
    expected = rf'vector of table \'t\' has {shown} for key 11, which is infinite in {dtype}: clip .* dtype = "float32"'
    with pytest.raises(ImportExportError, match=expected):
        imported(tmp_path / "m", dtype, rows)
    with Store.open(tmp_path / "m") as store:
        assert store.commit is None


@pytest.mark.parametrize(
    ("dtype", "number", "stored"),
    [
        ("float16", 65504.0, 65504.0),
        ("float16", 65519.0, 65504.0),
        ("float16", -65519.996, -65504.0),
        ("float16", INF, INF),
        ("float16", -INF, -INF),
        ("float16", NAN, NAN),
        ("bfloat16", BF16_MOST, BF16_MOST),
        ("bfloat16", 1e6, 999424.0),
        ("bfloat16", INF, INF),
        ("bfloat16", NAN, NAN),
        ("float32", 3.4e38, np.float32(3.4e38)),
    ],
)
def test_numbers_within_the_dtype_are_rounded(tmp_path: Path, dtype: str, number: float, stored: float) -> None:
    np.testing.assert_array_equal(imported(tmp_path / "m", dtype, [[number, 1.0]]), [[stored, 1.0]])


def test_a_refused_import_leaves_the_rows_of_a_store(tmp_path: Path) -> None:
    """An overlay is one commit or none."""
    imported(tmp_path / "m", "float16", [[1.0, 2.0]])
    with Store.open(tmp_path / "m") as store:
        with pytest.raises(ImportExportError, match="which is infinite in float16"):
            tc.import_store({"t": np.full((20, 2), 7e4, np.float32)}, store, initial_state=True)
        assert store.lookup("t", np.array([10]))["vector"].tolist() == [[1.0, 2.0]]


# -- tables that are compressed ------------------------------------------------------------------------------

COMPRESSIONS = ("zstd", "blosc")


def plain(**changes: object) -> Table:
    """Return a table of rows of 256 bytes."""
    table = Table(name="t", dim=64, optimizer=SGD(learning_rate=1.0), initializer=Zeros())
    return dataclasses.replace(table, **changes)


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_an_exported_store_keeps_its_compression(tmp_path: Path, kind: str) -> None:
    chosen = compressed_tables(kind)
    with Store.open(tmp_path / "s", tables=chosen) as store:
        World(chosen).run(store, 1)
        tc.export_store(store, tmp_path / "out", format="numpy")
    assert verify(tmp_path / "s")["problems"] == []
    assert [t["compression"] for t in info(tmp_path / "s")["tables"] if "compression" in t] == [kind] * 4
    tc.import_store(tmp_path / "out", tmp_path / "copy", steps=1)
    with Store.open(tmp_path / "copy") as copy:
        assert {t.name: t.compression for t in copy.tables} == {t.name: t.compression for t in chosen}


@pytest.mark.parametrize("kind", COMPRESSIONS)
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
    """By default the engine that can is used."""
    table, path = plain(compression="zstd"), tmp_path / "s"
    words = r"table 't' has compression .*'zstd', but engine 'lmdb' has none: use engine='zarr'"
    with pytest.raises(ValueError, match=words):
        Store.open(path, tables=[table], engine="lmdb")
    assert not path.exists()
    Store.open(path, tables=[table]).close()
    assert json.loads((path / "store.json").read_text())["engine"] == "zarr"
    Store.open(None, tables=[table], engine=MemoryEngine()).close()


@pytest.mark.parametrize("made", ["zstd", None])
def test_a_store_keeps_its_compression(tmp_path: Path, made: str | None) -> None:
    """Tables without a setting open it; tables with another one are refused."""
    Store.open(tmp_path / "s", tables=[plain(compression=made)], engine="zarr").close()
    with Store.open(tmp_path / "s", tables=[plain()]) as store:
        assert store.tables[0].compression == made
    with pytest.raises(TableMismatchError, match=f"has compression {made!r}, but 'blosc' was given"):
        Store.open(tmp_path / "s", tables=[plain(compression="blosc")])


def test_a_schema_may_ask_for_compression(tmp_path: Path) -> None:
    """For all tables or for one; "none" excludes one."""
    (tmp_path / "s.toml").write_text("""
        [defaults]
        dim = 2
        optimizer = { name = "sgd", learning_rate = 0.1 }
        initializer = "zeros"
        compression = "zstd"
        [tables]
        a = {}
        b = { compression = "none" }
        c = { compression = "blosc" }
        [features]
        a = {}
        b = {}
        c = {}
    """)
    schema = tc.Schema.load(tmp_path / "s.toml")
    assert {t.name: t.compression for t in schema.tables} == {"a": "zstd", "b": None, "c": "blosc"}
    assert tc.Schema.from_record(schema.to_record()).tables[0].compression == "zstd"
