"""Vectors of 16 bits in every format: in their own dtype where it has it, else in float32, and back."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open

import tiercache as tc
from tests.files import files_of
from tests.io.cases import FORMATS, keeps_state
from tiercache.errors import ImportExportWarning
from tiercache.io import exporting
from tiercache.io.staging import check_space
from tiercache.store import Adagrad, MemoryEngine, Store, Table, Uniform, load_rows
from tiercache.store.vectors import ITEM_BYTES, from_bits, nearest, to_bits

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = ("bfloat16", "float16")
ROWS = 70


def table(dtype: str) -> Table:
    """Return a table with an odd dim."""
    start = Uniform(low=-0.1, high=0.1)
    return Table(name="t", dim=3, optimizer=Adagrad(learning_rate=0.1), initializer=start, dtype=dtype)


def numbers(dtype: str) -> tuple[Any, tuple[Any, ...]]:
    """Return keys, vectors of any bits but those of NaN that are not quiet, and state."""
    rng = np.random.default_rng(0)
    vectors = nearest(from_bits(rng.integers(0, 1 << 16, (ROWS, 3), dtype=np.uint16), dtype), dtype)
    return np.arange(ROWS, dtype=np.int64), (vectors, rng.random((ROWS, 3), dtype=np.float32))


def filled(path: Path, dtype: str) -> Path:
    """Make a store with these rows."""
    with Store.open(path, tables=[table(dtype)]) as store:
        load_rows(store, [("t", numbers(dtype))])
    return path


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format_", FORMATS)
def test_vectors_of_16_bits_survive_a_round_trip(tmp_path: Path, format_: str, dtype: str) -> None:
    """Every bit of vector and state, and the files of an export of the import are the same."""
    whole = keeps_state(format_, table(dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportExportWarning)
        tc.export_store(filled(tmp_path / "s.tc", dtype), tmp_path / "one", format=format_)
        tc.import_store(tmp_path / "one", tmp_path / "copy.tc", initial_state=not whole)
        tc.export_store(tmp_path / "copy.tc", tmp_path / "two", format=format_)
    keys, (vectors, state) = numbers(dtype)
    with Store.open(tmp_path / "copy.tc") as copy:
        assert copy.tables == (table(dtype),)
        found = copy.lookup("t", keys)
    assert np.array_equal(to_bits(found["vector"], dtype), to_bits(vectors, dtype))
    assert np.array_equal(found["sum"], state if whole else np.zeros_like(state))
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


@pytest.mark.parametrize("dtype", DTYPES)
def test_others_read_the_dtype_where_the_format_has_it(tmp_path: Path, dtype: str) -> None:
    """Safetensors and torch have both; NumPy and Parquet float16; what they lack is float32, with the same numbers."""
    keys, (vectors, _) = numbers(dtype)
    path = filled(tmp_path / "s.tc", dtype)
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
    """Its files in the dtypes they are in, and for a while torch's vectors once more."""
    wide = replace(table(dtype), dim=64)
    fields = tuple(np.ones((ROWS, field.width), np.float32) for field in wide.fields)
    asked: list[int] = []

    def noted(folder: Path, needed: int, what: str) -> None:
        asked.append(needed)
        check_space(folder, needed, what)

    monkeypatch.setattr(exporting, "check_space", noted)
    with Store.open(None, tables=[wide], engine=MemoryEngine()) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportExportWarning)
        load_rows(store, [("t", (np.arange(ROWS, dtype=np.int64), fields))])
        tc.export_store(store, tmp_path / "out", format=format_, with_state=with_state)
    found = {name: len(data) for name, data in files_of(tmp_path / "out").items() if name != "tables.json"}
    took = sum(found.values()) + (ROWS * 64 * ITEM_BYTES[dtype] if format_ == "torch" else 0)
    headers = took - asked[0]
    assert 0 <= headers < 3000


@pytest.mark.parametrize("format_", ["numpy", "parquet", "safetensors", "torch"])
def test_a_table_of_16_bits_takes_float32_and_a_table_of_float32_no_16_bits(tmp_path: Path, format_: str) -> None:
    """Numbers are rounded to the nearest on the way in; nothing is widened that was not asked for."""
    rng = np.random.default_rng(1)
    fields = tuple(rng.standard_normal((ROWS, 3)).astype(np.float32) for _ in range(2))
    keys = np.arange(ROWS, dtype=np.int64)
    with Store.open(None, tables=[table("float32")], engine=MemoryEngine()) as store:
        load_rows(store, [("t", (keys, fields))])
        tc.export_store(store, tmp_path / "wide", format=format_, with_state=False)
    (tmp_path / "wide" / "tables.json").unlink()
    for dtype in DTYPES:
        with Store.open(None, tables=[table(dtype)], engine=MemoryEngine()) as copy:
            tc.import_store(tmp_path / "wide", copy, format=format_, initial_state=True)
            assert np.array_equal(copy.lookup("t", keys)["vector"], nearest(fields[0], dtype))
    tc.export_store(filled(tmp_path / "s.tc", "float16"), tmp_path / "narrow", format=format_, with_state=False)
    (tmp_path / "narrow" / "tables.json").unlink()
    with (
        Store.open(None, tables=[table("float32")], engine=MemoryEngine()) as copy,
        pytest.raises(tc.TierCacheError, match="float32"),
    ):
        tc.import_store(tmp_path / "narrow", copy, format=format_, initial_state=True)
