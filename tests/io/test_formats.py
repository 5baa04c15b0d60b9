"""What others see of an export: each format read with its own library, or by its published layout."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open

import tiercache as tc
from tests.io.cases import filled, table
from tiercache.errors import ImportExportWarning
from tiercache.io import parquet_format
from tiercache.store import Store, hash_keys

if TYPE_CHECKING:
    from pathlib import Path

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
    """Return a path of a store with these rows."""
    rows = {
        name: {key: b"".join(f[i].tobytes() for f in fields) for i, key in enumerate(keys.tolist())}
        for name, (keys, fields) in numbers.items()
    }
    with filled(tmp_path / "s.tc", [ADAM, ADAGRAD], rows) as opened:
        yield opened


def items(path: Path) -> dict[int, tuple[list[float], list[float]]]:
    """Return vector and state of every key of table ``item``."""
    with Store.open(path, mode="r") as store:
        return {
            key: (vector.tolist(), state.tolist())
            for keys, (vectors, states) in store.scan("item")
            for key, vector, state in zip(keys.tolist(), vectors, states, strict=True)
        }


def test_numpy_reads_plain_arrays(tmp_path: Path, store: Store, numbers: dict) -> None:
    """Keys (n,), vector and each state (n, width), without pickles."""
    tc.export_store(store, tmp_path / "out", format="numpy")
    for one in (ADAM, ADAGRAD):
        keys, fields = numbers[one.name]
        assert np.array_equal(np.load(tmp_path / "out" / one.name / "keys.npy", allow_pickle=False), keys)
        for field, values in zip(one.fields, fields, strict=True):
            found = np.load(tmp_path / "out" / one.name / f"{field.name}.npy", allow_pickle=False)
            assert np.array_equal(found, values)


def test_duckdb_reads_equal_counts_and_sums(tmp_path: Path, store: Store, numbers: dict) -> None:
    """Count and sum of the keys, and the sum of each field; the schema has the widths."""
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
    """However many rows a table has."""
    from tiercache.store import scan as scanning

    monkeypatch.setattr(scanning, "CHUNK_BYTES", 1 << 12)
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
    """Tensors in order, aligned, with the table's name and optimizer."""
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
    """In any order of keys; slots and the files of another optimizer are left out, with one warning.

    The folder of one table may be given itself.
    """
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
def test_a_state_dict_goes_straight_into_an_embedding(
    tmp_path: Path, store: Store, numbers: dict, kind: type[torch.nn.Embedding]
) -> None:
    """Row i of the module is the vector of key i of the vocabulary."""
    with pytest.warns(ImportExportWarning, match="no place for the optimizer state"):
        tc.export_store(store, tmp_path / "out", format="torch")
    keys, (vector, *_) = numbers["user"]
    module = kind(keys.size, ADAM.dim)
    module.load_state_dict(torch.load(tmp_path / "out" / "user" / "table.pt", weights_only=True))
    assert np.array_equal(np.load(tmp_path / "out" / "user" / "vocabulary.npy"), keys)
    assert np.array_equal(module.weight.detach().numpy(), vector)
    assert sorted(p.name for p in (tmp_path / "out" / "user").iterdir()) == ["table.pt", "vocabulary.npy"]


def test_the_state_dict_of_a_trained_module_is_imported(tmp_path: Path) -> None:
    """What a user saves, with a vocabulary of their own."""
    module = torch.nn.Embedding(4, 2)
    (tmp_path / "out" / "item").mkdir(parents=True)
    torch.save(module.state_dict(), tmp_path / "out" / "item" / "table.pt")
    np.save(tmp_path / "out" / "item" / "vocabulary.npy", np.array([3, 1, 4, 15]))
    tc.import_store(tmp_path / "out", tmp_path / "s.tc", format="torch", tables=[ADAGRAD], initial_state=True)
    vectors = zip([3, 1, 4, 15], module.weight.detach().tolist(), strict=True)
    assert items(tmp_path / "s.tc") == {key: (vector, [0.25, 0.25]) for key, vector in vectors}


def test_lists_of_any_arrow_kind_are_imported(tmp_path: Path) -> None:
    """As DuckDB writes them, for one."""
    (tmp_path / "out").mkdir()
    duckdb.sql(
        "copy (select range - 3 as key, [range, 0.5]::FLOAT[] as vector, [1, range]::FLOAT[] as sum from range(3000)) "
        f"to '{tmp_path}/out/item.parquet' (format parquet)"
    )
    tc.import_store(tmp_path / "out", tmp_path / "s.tc", format="parquet", tables=[ADAGRAD])
    assert items(tmp_path / "s.tc") == {i - 3: ([i, 0.5], [1.0, i]) for i in range(3000)}
