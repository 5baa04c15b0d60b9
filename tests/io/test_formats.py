"""Exports read by each format's own library; 16 bits in their dtype or in float32."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open

import tiercache as tc
from tests.files import files_of
from tests.io.cases import FORMATS, filled, table
from tiercache.errors import ImportExportWarning
from tiercache.io import exporting, parquet_format
from tiercache.io.staging import check_space
from tiercache.store import Adagrad, MemoryEngine, Store, Table, Uniform, hash_keys, load_rows
from tiercache.store.bits import ITEM_BYTES, from_bits, nearest

ADAM, ADAGRAD = table("user", 3, "adam"), table("item", 2, "adagrad")


@pytest.fixture
def numbers() -> dict[str, tuple[np.ndarray, tuple[np.ndarray, ...]]]:
    """Return keys in hash order and plain numbers for two tables."""
    generator = np.random.default_rng(0)
    found = {}
    for one, count in ((ADAM, 500), (ADAGRAD, 70)):
        keys = np.unique(generator.integers(-(10**12), 10**12, count))
        keys = keys[np.argsort(hash_keys(keys, one.table_id))]
        found[one.name] = keys, tuple(generator.random((keys.size, f.width), dtype=np.float32) for f in one.fields)
    return found


@pytest.fixture
def store(tmp_path: Path, numbers: dict[str, tuple[np.ndarray, tuple[np.ndarray, ...]]]) -> Store:
    rows = {
        name: {key: b"".join(f[i].tobytes() for f in fields) for i, key in enumerate(keys.tolist())}
        for name, (keys, fields) in numbers.items()
    }
    with filled(tmp_path / "s.tc", [ADAM, ADAGRAD], rows) as opened:
        yield opened


def items(path: Path) -> dict[int, tuple[list[float], list[float]]]:
    with Store.open(path, mode="r") as store:
        return {
            key: (vector.tolist(), state.tolist())
            for keys, (vectors, states) in store.scan("item")
            for key, vector, state in zip(keys.tolist(), vectors, states, strict=True)
        }


def test_numpy_reads_plain_arrays(tmp_path: Path, store: Store, numbers: dict) -> None:
    tc.export_store(store, tmp_path / "out", format="numpy")
    for one in (ADAM, ADAGRAD):
        keys, fields = numbers[one.name]
        assert np.array_equal(np.load(tmp_path / "out" / one.name / "keys.npy", allow_pickle=False), keys)
        for field, values in zip(one.fields, fields, strict=True):
            found = np.load(tmp_path / "out" / one.name / f"{field.name}.npy", allow_pickle=False)
            assert np.array_equal(found, values)


def test_duckdb_reads_equal_counts_and_sums(tmp_path: Path, store: Store, numbers: dict) -> None:
    tc.export_store(store, tmp_path / "out", format="parquet")
    for one in (ADAM, ADAGRAD):
        keys, fields = numbers[one.name]
        path = tmp_path / "out" / f"{one.name}.parquet"
        found = duckdb.sql(f"select count(*), sum(key::HUGEINT) from '{path}'").fetchall()[0]
        assert found == (keys.size, sum(keys.tolist()))
        for field, values in zip(one.fields, fields, strict=True):
            query = f"select sum(x::DOUBLE) from (select unnest({field.name}) as x from '{path}')"
            assert duckdb.sql(query).fetchall()[0] == pytest.approx((values.astype(np.float64).sum(),), rel=1e-12)
            assert pq.read_schema(path).field(field.name).type.list_size == field.width


def test_a_row_group_holds_a_bounded_number_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiercache.store import scan as scanning

    monkeypatch.setattr(scanning, "SCAN_CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(parquet_format, "_GROUP_BYTES", 1 << 14)
    one = table("item", 2, "adagrad")
    rows = {"item": {key: bytes(16) for key in range(5_000)}}
    with filled(None, [one], rows) as store:
        tc.export_store(store, tmp_path / "out", format="parquet")
    file = pq.ParquetFile(tmp_path / "out" / "item.parquet")
    groups = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    assert sum(groups) == 5_000
    assert max(groups) * (one.row_bytes + 8) <= (1 << 14) + (1 << 12)


def test_the_safetensors_library_reads_tensors_and_metadata(tmp_path: Path, store: Store, numbers: dict) -> None:
    tc.export_store(store, tmp_path / "out", format="safetensors")
    for one in (ADAM, ADAGRAD):
        keys, fields = numbers[one.name]
        with safe_open(tmp_path / "out" / f"{one.name}.safetensors", framework="np") as file:
            assert file.metadata()["table"] == one.name
            assert json.loads(file.metadata()["optimizer"]) == one.to_record()["optimizer"]
            assert set(file.keys()) == {"keys", *(f.name for f in one.fields)}
            assert np.array_equal(file.get_tensor("keys"), keys)
            for field, values in zip(one.fields, fields, strict=True):
                assert np.array_equal(file.get_tensor(field.name), values)


def test_a_hugectr_folder_is_packed_numbers_without_a_header(tmp_path: Path, store: Store, numbers: dict) -> None:
    """``key``, ``emb_vector`` and the optimizer's files, as HugeCTR spells them."""
    tc.export_store(store, tmp_path / "out", format="hugectr")
    for one, names in (
        (ADAM, ["key", "emb_vector", "Adam.m", "Adam.v"]),
        (ADAGRAD, ["key", "emb_vector", "AdaGrad.accm"]),
    ):
        folder, (keys, fields) = tmp_path / "out" / one.name, numbers[one.name]
        assert sorted(p.name for p in folder.iterdir()) == sorted(names)
        for name, values in zip(names, (keys, *fields), strict=True):
            assert (folder / name).read_bytes() == values.tobytes()


def test_a_hugectr_folder_from_elsewhere_is_imported(tmp_path: Path) -> None:
    """In any order of keys; slots and files of another optimizer are left out, with one warning."""
    folder = tmp_path / "model" / "item"
    folder.mkdir(parents=True)
    keys = np.array([9, -4, 7], dtype="<i8")
    vectors = np.arange(6, dtype="<f4").reshape(3, 2)
    for name, values in {
        "key": keys,
        "emb_vector": vectors,
        "slot_id": np.zeros(3, "<u8"),
        "AdaGrad.accm": vectors + 1,
        "Adam.m": vectors,
    }.items():
        values.tofile(folder / name)
    with pytest.warns(ImportExportWarning, match=r"item/slot_id, .*item/Adam.m: ignored") as caught:
        tc.import_store(tmp_path / "model", tmp_path / "s.tc", format="hugectr", tables=[ADAGRAD])
    assert len(caught) == 1
    expected = {k: (vectors[i].tolist(), (vectors[i] + 1).tolist()) for i, k in enumerate(keys.tolist())}
    assert items(tmp_path / "s.tc") == expected
    for name in ("slot_id", "Adam.m"):
        (folder / name).unlink()
    tc.import_store(folder, tmp_path / "alone.tc", format="hugectr", tables=[ADAGRAD])
    assert items(tmp_path / "alone.tc") == expected


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_a_state_dict_fits_an_embedding(
    tmp_path: Path, store: Store, numbers: dict, kind: type[torch.nn.Embedding]
) -> None:
    with pytest.warns(ImportExportWarning, match="cannot hold the optimizer state"):
        tc.export_store(store, tmp_path / "out", format="torch")
    keys, (vector, *_) = numbers["user"]
    module = kind(keys.size, ADAM.dim)
    module.load_state_dict(torch.load(tmp_path / "out" / "user" / "table.pt", weights_only=True))
    assert np.array_equal(np.load(tmp_path / "out" / "user" / "vocabulary.npy"), keys)
    assert np.array_equal(module.weight.detach().numpy(), vector)
    assert sorted(p.name for p in (tmp_path / "out" / "user").iterdir()) == ["table.pt", "vocabulary.npy"]


def test_the_state_dict_of_a_trained_module_is_imported(tmp_path: Path) -> None:
    module = torch.nn.Embedding(4, 2)
    (tmp_path / "out" / "item").mkdir(parents=True)
    torch.save(module.state_dict(), tmp_path / "out" / "item" / "table.pt")
    np.save(tmp_path / "out" / "item" / "vocabulary.npy", np.array([3, 1, 4, 15]))
    tc.import_store(tmp_path / "out", tmp_path / "s.tc", format="torch", tables=[ADAGRAD], initial_state=True)
    vectors = zip([3, 1, 4, 15], module.weight.detach().tolist(), strict=True)
    assert items(tmp_path / "s.tc") == {key: (vector, [0.25, 0.25]) for key, vector in vectors}


def test_lists_of_any_arrow_kind_are_imported(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    duckdb.sql(
        "copy (select range - 3 as key, [range, 0.5]::FLOAT[] as vector, [1, range]::FLOAT[] as sum from range(3000)) "
        f"to '{tmp_path}/out/item.parquet' (format parquet)"
    )
    tc.import_store(tmp_path / "out", tmp_path / "s.tc", format="parquet", tables=[ADAGRAD])
    assert items(tmp_path / "s.tc") == {i - 3: ([i, 0.5], [1.0, i]) for i in range(3000)}


DTYPES = ("bfloat16", "float16")
NARROW_ROWS = 70


def narrow_table(dtype: str) -> Table:
    start = Uniform(low=-0.1, high=0.1)
    return Table(name="t", dim=3, optimizer=Adagrad(learning_rate=0.1), initializer=start, dtype=dtype)


def narrow_numbers(dtype: str) -> tuple[Any, tuple[Any, ...]]:
    """Return keys, vectors of any bits but those of NaN that are not quiet, and state."""
    rng = np.random.default_rng(0)
    vectors = nearest(from_bits(rng.integers(0, 1 << 16, (NARROW_ROWS, 3), dtype=np.uint16), dtype), dtype)
    return np.arange(NARROW_ROWS, dtype=np.int64), (vectors, rng.random((NARROW_ROWS, 3), dtype=np.float32))


def narrow_store(path: Path, dtype: str) -> Path:
    with Store.open(path, tables=[narrow_table(dtype)]) as store:
        load_rows(store, [("t", narrow_numbers(dtype))])
    return path


@pytest.mark.parametrize("dtype", DTYPES)
def test_others_read_the_dtype_where_the_format_has_it(tmp_path: Path, dtype: str) -> None:
    keys, (vectors, _) = narrow_numbers(dtype)
    path = narrow_store(tmp_path / "s.tc", dtype)
    for format_ in FORMATS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ImportExportWarning)
            tc.export_store(path, tmp_path / format_, format=format_)
    own = getattr(torch, dtype)
    weight = torch.load(tmp_path / "torch" / "t" / "table.pt", weights_only=True)["weight"]
    with safe_open(tmp_path / "safetensors" / "t.safetensors", framework="pt") as file:
        tensor = file.get_tensor("vector")
    column = pq.read_table(tmp_path / "parquet" / "t.parquet")["vector"]
    assert str(column.type.value_type) == {"float16": "halffloat"}.get(dtype, "float")
    array = np.load(tmp_path / "numpy" / "t" / "vector.npy")
    assert array.dtype == {"float16": np.float16}.get(dtype, np.float32)
    plain = np.fromfile(tmp_path / "hugectr" / "t" / "emb_vector", np.float32).reshape(-1, 3)
    lists = np.array(column.combine_chunks().flatten().to_numpy(zero_copy_only=False)).reshape(-1, 3)
    order = np.load(tmp_path / "numpy" / "t" / "keys.npy")
    assert np.array_equal(np.sort(order), keys)
    assert weight.dtype == tensor.dtype == own
    for found in (weight.float().numpy(), tensor.float().numpy(), lists, array, plain):
        np.testing.assert_array_equal(np.asarray(found, np.float32), vectors[order])
    assert json.loads((tmp_path / "torch" / "tables.json").read_text())["tables"][0]["table"]["dtype"] == dtype


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("dtype", ["float32", *DTYPES])
@pytest.mark.parametrize("format_", FORMATS)
def test_the_room_that_an_export_asks_for_is_what_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: str, dtype: str, with_state: bool
) -> None:
    """The files in their dtypes, and temporarily torch's vectors once more."""
    wide = replace(narrow_table(dtype), dim=64)
    fields = tuple(np.ones((NARROW_ROWS, field.width), np.float32) for field in wide.fields)
    asked: list[int] = []

    def noted(folder: Path, needed: int, what: str) -> None:
        asked.append(needed)
        check_space(folder, needed, what)

    monkeypatch.setattr(exporting, "check_space", noted)
    with Store.open(None, tables=[wide], engine=MemoryEngine()) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportExportWarning)
        load_rows(store, [("t", (np.arange(NARROW_ROWS, dtype=np.int64), fields))])
        tc.export_store(store, tmp_path / "out", format=format_, with_state=with_state)
    found = {name: len(data) for name, data in files_of(tmp_path / "out").items() if name != "tables.json"}
    took = sum(found.values()) + (NARROW_ROWS * 64 * ITEM_BYTES[dtype] if format_ == "torch" else 0)
    headers = took - asked[0]
    assert 0 <= headers < 3000


@pytest.mark.parametrize("format_", ["numpy", "parquet", "safetensors", "torch"])
def test_a_table_of_16_bits_takes_float32_and_a_table_of_float32_no_16_bits(tmp_path: Path, format_: str) -> None:
    """Numbers are rounded to the nearest on import; nothing is widened unless requested."""
    rng = np.random.default_rng(1)
    fields = tuple(rng.standard_normal((NARROW_ROWS, 3)).astype(np.float32) for _ in range(2))
    keys = np.arange(NARROW_ROWS, dtype=np.int64)
    with Store.open(None, tables=[narrow_table("float32")], engine=MemoryEngine()) as store:
        load_rows(store, [("t", (keys, fields))])
        tc.export_store(store, tmp_path / "wide", format=format_, with_state=False)
    (tmp_path / "wide" / "tables.json").unlink()
    for dtype in DTYPES:
        with Store.open(None, tables=[narrow_table(dtype)], engine=MemoryEngine()) as copy:
            tc.import_store(tmp_path / "wide", copy, format=format_, initial_state=True)
            assert np.array_equal(copy.lookup("t", keys)["vector"], nearest(fields[0], dtype))
    tc.export_store(narrow_store(tmp_path / "s.tc", "float16"), tmp_path / "narrow", format=format_, with_state=False)
    (tmp_path / "narrow" / "tables.json").unlink()
    with (
        Store.open(None, tables=[narrow_table("float32")], engine=MemoryEngine()) as copy,
        pytest.raises(tc.TierCacheError, match="float32"),
    ):
        tc.import_store(tmp_path / "narrow", copy, format=format_, initial_state=True)
