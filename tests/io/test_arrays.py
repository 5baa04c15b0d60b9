"""Arrays in memory and state dicts become stores; whatever is no plain array of numbers is refused with a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import tiercache as tc
from tests.io.cases import table
from tiercache.errors import ImportExportError
from tiercache.store import MemoryEngine, Store

if TYPE_CHECKING:
    from pathlib import Path

T, U = table("t", 2, "sgd"), table("u", 3, "adagrad")
VECTORS = np.arange(8, dtype=np.float32).reshape(4, 2)


def imported(source: Any, *tables: tc.Table, **options: Any) -> dict[str, dict[int, list[float]]]:
    """Import into a store in memory; returns the vector of each key."""
    with Store.open(None, tables=tables, engine=MemoryEngine()) as store:
        tc.import_store(source, store, initial_state=True, **options)
        return {
            one.name: {
                key: vector.tolist()
                for keys, (vectors, *_) in store.scan(one.name)
                for key, vector in zip(keys.tolist(), vectors, strict=True)
            }
            for one in tables
        }


@pytest.mark.parametrize("values", [VECTORS, torch.from_numpy(VECTORS), torch.nn.Parameter(torch.from_numpy(VECTORS))])
def test_key_i_is_row_i_or_keys_are_given(values: Any) -> None:
    """Of arrays, tensors and parameters, which may be part of a graph."""
    expected = VECTORS.tolist()
    assert imported({"t": values}, T) == {"t": dict(enumerate(expected))}
    keys = np.array([-5, 1 << 62, 0, 9])
    for given in (keys, torch.from_numpy(keys)):
        assert imported({"t": (given, values)}, T) == {"t": dict(zip(keys.tolist(), expected, strict=True))}


def test_the_state_dict_of_a_module_is_searched_by_name() -> None:
    """A table's tensor is called after it, or named; half precision is taken by a table of that dtype."""
    model = torch.nn.ModuleDict({"t": torch.nn.Embedding(4, 2), "tower": torch.nn.EmbeddingBag(5, 3)})
    found = imported({f"m.{k}": v for k, v in model.state_dict().items()}, T, U, names={"u": "m.tower.weight"})
    assert found["t"] == dict(enumerate(model["t"].weight.detach().tolist()))
    assert found["u"] == dict(enumerate(model["tower"].weight.detach().tolist()))
    half = tc.Table(name="t", dim=2, optimizer=T.optimizer, initializer=T.initializer, dtype="bfloat16")
    weights = torch.tensor([[1.0, -2.5]] * 3, dtype=torch.bfloat16)
    assert imported({"t.weight": weights}, half, steps=3) == {"t": {key: [1.0, -2.5] for key in range(3)}}


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            {"t": torch.empty(4, 2, device="meta")},
            "'t' in the dict of arrays is on the meta device: it must be a dense",
        ),
        ({"t": torch.eye(2).to_sparse()}, "is sparse_coo: it must be a dense tensor with values"),
        ({"t": VECTORS.astype(np.float64)}, r"is \(4, 2\) of float64: table 't' with 4 keys needs \(4, 2\) of float32"),
        ({"t": VECTORS.tolist()}, "'t' in the dict of arrays is of list: give an array or a tensor"),
        ({"t": np.float32(3)}, "is of float32: give an array"),
        ({"t": np.zeros((), np.float32)}, r"is \(\) of float32"),
        ({"t": VECTORS[:, :1]}, r"is \(4, 1\) of float32"),
        ({"t": (np.arange(3), VECTORS)}, r"is \(4, 2\) of float32: table 't' with 3 keys"),
        ({"t": (np.arange(4.0), VECTORS)}, r"are \(4,\) of float64: they must be \(n,\) of int64"),
        ({"t": (np.array([1, 1, 2, 3]), VECTORS)}, "key 1 of table 't' is given twice"),
        ({"x": VECTORS}, "has no array for table 't': name one of x for it"),
        ({"a.t": VECTORS, "b.t": VECTORS}, "has several arrays for table 't': name one of a.t, b.t for it"),
    ],
)
def test_what_is_no_array_of_the_table_is_refused(tmp_path: Path, source: Any, sentence: str) -> None:
    """Before a store is made, but for what only reading the keys shows."""
    with pytest.raises(ImportExportError, match=sentence):
        tc.import_store(source, tmp_path / "s.tc", tables=[T])
    if (tmp_path / "s.tc").exists():
        with Store.open(tmp_path / "s.tc", mode="r") as store:
            assert store.commit is None


def test_an_export_of_some_tables_makes_a_store_of_all_that_are_given(tmp_path: Path) -> None:
    """The others begin empty."""
    with Store.open(None, tables=[T], engine=MemoryEngine()) as store:
        tc.import_store({"t": VECTORS}, store)
        tc.export_store(store, tmp_path / "out", format="numpy")
    tc.import_store(tmp_path / "out", tmp_path / "s.tc", tables=[T, U])
    with Store.open(tmp_path / "s.tc", mode="r") as store:
        assert {one.name: store.live_rows(one.name) for one in store.tables} == {"t": 4, "u": 0}
        assert store.lookup("t", np.arange(4))["vector"].tolist() == VECTORS.tolist()


def test_what_an_interrupted_creation_left_becomes_a_store_and_takes_rows_again(tmp_path: Path) -> None:
    """A folder with the lock alone, an empty one, and a store without a commit; then rows are imported over them."""
    path = tmp_path / "s.tc"
    path.mkdir()
    (path / "writer.lock").touch()
    (tmp_path / "e.tc").mkdir()
    Store.open(tmp_path / "o.tc", tables=[T]).close()
    for name in ("s.tc", "e.tc", "o.tc"):
        for value in (1.0, 2.0):
            tc.import_store({"t": np.full((3, 2), value, np.float32)}, tmp_path / name, tables=[T])
            with Store.open(tmp_path / name, mode="r") as store:
                assert (store.lookup("t", np.arange(3))["vector"] == value).all()


def test_tables_must_be_given_and_not_be_empty(tmp_path: Path) -> None:
    """An import of no tables would commit nothing."""
    with pytest.raises(ImportExportError, match="the dict of arrays does not describe its tables: give the tables"):
        tc.import_store({"t": VECTORS}, tmp_path / "s.tc")
    for source in ({"t": VECTORS}, tmp_path):
        with pytest.raises(ImportExportError, match="tables is empty: give the tables that the source holds"):
            tc.import_store(source, tmp_path / "s.tc", tables=[], format="numpy")
    assert not (tmp_path / "s.tc").exists()
