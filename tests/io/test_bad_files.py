"""Files and arrays that become stores; invalid ones get one error message, and no commit."""

import errno
import itertools
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import tiercache as tc
from tests.files import flip
from tests.io.cases import FORMATS, filled, random_rows, table
from tiercache.errors import ImportExportError
from tiercache.io.formats import ColumnFile
from tiercache.io.key_set_file import read_key_set
from tiercache.io.numpy_format import map_array
from tiercache.store import MemoryEngine, Store

ITEM = table("item", 2, "adagrad")
ROWS = random_rows([ITEM], [50])
FOLDERS = {"numpy": "item", "parquet": "", "safetensors": "", "hugectr": "item", "torch": "item"}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    with filled(None, [ITEM], ROWS) as store:
        for format_ in FORMATS:
            tc.export_store(store, folder / format_, format=format_, with_state=format_ != "torch")
    return folder


def refused(source: Any, path: Path, sentence: str, **options: Any) -> None:
    """Assert that an import is refused with one message and makes no commit."""
    with pytest.raises(ImportExportError, match=sentence) as caught:
        tc.import_store(source, path, **options)
    assert "\n" not in str(caught.value)
    if path.exists():
        with Store.open(path, mode="r") as store:
            assert store.commit is None


def changed(data: bytes, damage: str) -> bytes:
    return {"cut": data[: len(data) * 2 // 3], "empty": b"", "longer": data + b"12345"}[damage]


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("damage", ["cut", "empty", "longer", "missing"])
def test_files_of_the_wrong_size_are_refused(tmp_path: Path, exports: Path, format_: str, damage: str) -> None:
    names = [
        path.relative_to(exports / format_)
        for path in (exports / format_ / FOLDERS[format_]).iterdir()
        if path.is_file() and path.name != "tables.json"
    ]
    assert names
    for index, name in enumerate(names):
        if (name.suffix, damage) == (".pt", "longer"):
            continue  # a zip archive is found from its end: extra bytes are ignored
        source = tmp_path / str(index)
        shutil.copytree(exports / format_, source)
        path = source / name
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(changed(path.read_bytes(), damage))
        refused(source, tmp_path / "s.tc", "item", initial_state=format_ == "torch")
        assert not (tmp_path / "s.tc").exists()


def edit(source: Path, change: Callable[[dict[str, Any]], None]) -> None:
    record = json.loads((source / "tables.json").read_text())
    change(record)
    (source / "tables.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda r: r.update(version=2), "version: Input should be 1"),
        (lambda r: r.update(format="excel"), "unknown format 'excel': expected one of numpy, parquet"),
        (lambda r: r["tables"][0].update(rows=49), "lists 49 rows of table 'item', but its files hold 50"),
        (lambda r: r["tables"][0].update(rows=-1), "cannot be read"),
        (lambda r: r["tables"][0]["table"].update(dim=3), r"is \(50, 2\) of float32: table 'item' with 50 keys needs"),
        (lambda r: r["tables"][0]["table"].update(name="../item"), "%2E%2E%2Fitem.* does not exist"),
        (lambda r: r["tables"][0].update(rows=10**40), r"cannot be read \(tables.0.rows: "),
        (lambda r: r.pop("tables"), r"cannot be read \(tables: Field required\): export again"),
        *((lambda r, n=n: r.update(steps=n), r"cannot be read \(steps: ") for n in (1 << 63, -1, True, "7", 1.5)),
        (lambda r: r.update(since=3), "holds only the rows that changed since commit 3: import an export of all"),
        (lambda r: r["tables"].append(r["tables"][0]), "two tables are named 'item'"),
    ],
)
def test_bad_listings_are_refused(
    tmp_path: Path, exports: Path, change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    shutil.copytree(exports / "numpy", tmp_path / "out")
    edit(tmp_path / "out", change)
    refused(tmp_path / "out", tmp_path / "s.tc", sentence)
    (tmp_path / "out" / "tables.json").write_text("no JSON")
    refused(tmp_path / "out", tmp_path / "s.tc", "Invalid JSON")
    for deep in (b"[" * 100_000, b'{"a":' * 100_000):
        (tmp_path / "out" / "tables.json").write_bytes(deep)
        refused(tmp_path / "out", tmp_path / "s.tc", "Invalid JSON: recursion limit exceeded")


def test_numpy_files_of_other_types_are_refused(tmp_path: Path, exports: Path) -> None:
    """Pickles are never loaded; float64 would lose bits; a state alone is half a row."""
    folder = tmp_path / "out" / "item"
    shutil.copytree(exports / "numpy", tmp_path / "out")
    good = np.load(folder / "vector.npy")
    np.save(folder / "vector.npy", np.zeros(good.shape, dtype=np.float64))
    refused(tmp_path / "out", tmp_path / "s.tc", "of float64: table 'item' with 50 keys needs")
    np.save(folder / "vector.npy", np.array([{"a": 1}] * 50), allow_pickle=True)
    refused(tmp_path / "out", tmp_path / "s.tc", "is not a complete array of numbers")
    np.save(folder / "vector.npy", good)
    np.save(folder / "keys.npy", np.arange(50, dtype=np.uint64))
    refused(tmp_path / "out", tmp_path / "s.tc", r"are \(50,\) of uint64: expected int64 of shape \(n,\)")
    np.save(folder / "keys.npy", np.zeros(50, np.int64))
    refused(tmp_path / "out", tmp_path / "s.tc", "key 0 of table 'item' occurs twice")
    shutil.copytree(exports / "numpy", tmp_path / "half")
    np.save(tmp_path / "half" / "item" / "exp_avg.npy", good)
    words = "only part of the optimizer state of table 'item' and lacks exp_avg_sq"
    refused(tmp_path / "half", tmp_path / "t.tc", words, tables=[table("item", 2, "adam")])


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"vector": [[1.0, 2.0]]}, "has no column 'key', only 'vector': name the column of keys key"),
        ({"key": [1]}, "has no column 'vector', only 'key': name"),
        ({"key": pa.array([1], pa.int32()), "vector": [[1.0, 2.0]]}, r"keys in .* are \(1,\) of int32"),
        ({"key": [1], "vector": pa.array([[1.0, 2.0]], pa.list_(pa.float64()))}, "double: .* of float32"),
        ({"key": [1], "vector": pa.array([[1.0] * 3], pa.list_(pa.float32(), 3))}, r"is \(1, 3\) of .*\(1, 2\)"),
        ({"key": [1, 2], "vector": [[1.0, 2.0], [1.0]]}, "lacks a list of 2 numbers in a row"),
        ({"key": [1, 2], "vector": [[1.0, 2.0], None]}, "lacks a list of 2 numbers in a row"),
        ({"key": [1, 2], "vector": [[1.0, None], [1.0, 2.0]]}, "lacks a list of 2 numbers in a row"),
        ({"key": [1, 2], "vector": [[1.0, 2.0, 3.0], [1.0]]}, "lacks a list of 2 numbers in a row"),
        ({"key": [1, None], "vector": [[1.0, 2.0]] * 2}, "column 'key' of .* lacks a number in a row"),
    ],
)
def test_parquet_columns_that_are_no_rows_are_refused(tmp_path: Path, columns: dict[str, Any], sentence: str) -> None:
    (tmp_path / "out").mkdir()
    kinds = {"key": pa.int64(), "vector": pa.list_(pa.float32())}
    arrays = {n: v if isinstance(v, pa.Array) else pa.array(v, kinds[n]) for n, v in columns.items()}
    pq.write_table(pa.table(arrays), tmp_path / "out" / "item.parquet")
    options = {"format": "parquet", "tables": [ITEM], "initial_state": True}
    refused(tmp_path / "out", tmp_path / "s.tc", sentence, **options)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("exploded"),)


def test_a_state_dict_runs_no_code(tmp_path: Path, exports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(exports / "torch", tmp_path / "out")
    path = tmp_path / "out" / "item" / "table.pt"
    for content, sentence in (
        ({"weight": Bomb()}, r"more than tensors and plain values \(it names .* was not loaded"),
        ({"weight": torch.zeros(50, 2), "lr": np.float64(1)}, "it names numpy.* save model.state_dict"),
        ({"bias": torch.zeros(50, 2)}, "holds 'bias': expected the state dict of an embedding"),
        (torch.zeros(50, 2), "holds Tensor"),
        ({"weight": torch.zeros(50, 2, dtype=torch.float16)}, "of float16: .* of float32"),
        ({"weight": torch.zeros(49, 2)}, r"is \(49, 2\) of float32"),
    ):
        torch.save(content, path)
        refused(tmp_path / "out", tmp_path / "s.tc", sentence, initial_state=True)
    within: dict[str, Any] = {"weight": torch.zeros(50, 2)}
    within["within"] = {"a": {"b": within}}
    torch.save(within, path)
    refused(
        tmp_path / "out",
        tmp_path / "s.tc",
        "has dicts that are nested too deeply, or contain themselves",
        initial_state=True,
    )
    path.write_bytes(pickle.dumps({"weight": Bomb()}))
    refused(tmp_path / "out", tmp_path / "s.tc", "more than tensors and plain values", initial_state=True)
    path.write_text("a,b\n1,2\n")
    refused(tmp_path / "out", tmp_path / "s.tc", "is not a file of torch.save: pass one, or the folder")
    refused(torch.nn.Embedding(5, 2), tmp_path / "s.tc", r"is Embedding, not its tensors: pass its state_dict\(\)")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("format_", FORMATS)
def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path, exports: Path, format_: str) -> None:
    source = tmp_path / "out"
    shutil.copytree(exports / format_, source)
    names = [path for path in source.rglob("*") if path.is_file()]
    assert len(names) > 1
    for path in names:
        path.rename(tmp_path / "kept")
        os.mkfifo(path)
        refused(source, tmp_path / "s.tc", f"{path.name} is not a regular file", initial_state=True)
        path.unlink()
        (tmp_path / "kept").rename(path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ImportExportError, match="fifo is not a regular file"):
        read_key_set(tmp_path / "fifo", "int64")
    refused(tmp_path / "fifo", tmp_path / "s.tc", "folder .* does not exist", format=format_, tables=[ITEM])


@pytest.mark.filterwarnings("ignore:Reading")
def test_a_damaged_npy_header_is_a_sentence(tmp_path: Path, exports: Path) -> None:
    """Any byte is replaced by any other: NumPy parses it as Python, and raises Python's errors."""
    shutil.copytree(exports / "numpy", tmp_path / "out")
    path = tmp_path / "out" / "item" / "vector.npy"
    whole = path.read_bytes()
    for at, byte in itertools.product(range(128), b"\0\xff({'L9\n"):
        path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
        with suppress(ImportExportError):
            map_array(path)
    path.write_bytes(whole.replace(b"(50, 2)", b"(50, 2("))
    refused(tmp_path / "out", tmp_path / "s.tc", "vector.npy is not a complete array of numbers")


def test_a_path_with_nul_is_refused(tmp_path: Path, exports: Path) -> None:
    for arguments in (("a\0b", tmp_path / "s.tc"), (exports / "numpy", "a\0b")):
        with pytest.raises(ImportExportError, match="has a NUL character: choose one without"):
            tc.import_store(*arguments)
    with filled(None, [ITEM], ROWS) as store, pytest.raises(ImportExportError, match="has a NUL character"):
        tc.export_store(store, "a\0b", format="numpy")


@contextmanager
def nobody() -> Iterator[None]:
    """Drop root's rights, if the tests run as root."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_what_may_not_be_read_or_written_is_named(tmp_path: Path, exports: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    for format_ in FORMATS:
        shutil.copytree(exports / format_, tmp_path / format_)
        for path in (tmp_path / format_).rglob("*"):
            if path.is_file() and path.name != "tables.json":
                path.chmod(0)
        with nobody():
            refused(tmp_path / format_, tmp_path / "s.tc", "the import of .*Permission denied", initial_state=True)
    with filled(None, [ITEM], ROWS) as store:
        with nobody(), pytest.raises(ImportExportError, match=r"the export to .*: Permission denied$"):
            tc.export_store(store, tmp_path / "new" / "out", format="numpy")
        (tmp_path / "numpy" / "tables.json").chmod(0)
    with nobody():
        refused(tmp_path / "numpy", tmp_path / "s.tc", r"tables.json: Permission denied$")


def test_a_hugectr_folder_whose_sizes_disagree_is_refused(tmp_path: Path, exports: Path) -> None:
    shutil.copytree(exports / "hugectr", tmp_path / "out")
    words = "emb_vector has 400 bytes, but 50 keys of 12 bytes each make 600"
    refused(tmp_path / "out", tmp_path / "s.tc", words, tables=[table("item", 3, "adagrad")])
    (tmp_path / "out" / "item" / "key").write_bytes(b"123456789")
    refused(tmp_path / "out", tmp_path / "s.tc", "key has 9 bytes, not whole rows of 8")


def test_what_cannot_be_asked_for_is_refused(tmp_path: Path, exports: Path) -> None:
    with filled(tmp_path / "full.tc", [ITEM], ROWS) as store:
        for options, sentence in (
            ({"format": "excel"}, "unknown format 'excel'"),
            ({"format": "numpy", "tables": ["user"]}, "has no table 'user': it has 'item'"),
            ({"format": "numpy", "tables": []}, "tables is empty: pass the names"),
        ):
            with pytest.raises(ImportExportError, match=sentence):
                tc.export_store(store, tmp_path / "new", **options)
        with pytest.raises(ImportExportError, match="exists: choose another path for the export"):
            tc.export_store(store, tmp_path, format="numpy")
        with pytest.raises(ImportExportError, match=r"table 'item' is not in .*, or is different there"):
            tc.import_store(exports / "numpy", store, tables=[table("item", 7, "sgd")])
    with Store.open(tmp_path / "empty.tc", tables=[table("user", 2, "sgd")]) as store:
        with pytest.raises(ImportExportError, match="has no commit, so no rows to export"):
            tc.export_store(store, tmp_path / "new", format="numpy")
        with pytest.raises(ImportExportError, match="has a table 'item' that the store does not"):
            tc.import_store(exports / "numpy", store)
    refused(tmp_path / "nowhere", tmp_path / "s.tc", r"nothing at .*nowhere: pass a folder")
    refused(tmp_path / "nowhere", tmp_path / "s.tc", "nothing at", format="numpy", tables=[ITEM])
    assert not (tmp_path / "new").exists()


def test_names_and_formats_that_would_be_ignored_are_refused(tmp_path: Path, exports: Path) -> None:
    store, torch_file = tmp_path / "s.tc", exports / "torch/item/table.pt"
    arrays = {"item": np.zeros((4, 2), np.float32)}
    torch.save({"item": torch.zeros(4, 2)}, tmp_path / "model.pt")
    for source in (arrays, tmp_path / "model.pt"):
        words = r"names \(--map\) has a table 'itm', which is not imported: the tables are 'item'"
        refused(source, store, words, tables=[ITEM], names={"itm": "item"})
        refused(source, store, "but format is 'hugectr': pass the folder", tables=[ITEM], format="hugectr")
        refused(source, store, "unknown format 'pickle'", tables=[ITEM], format="pickle")
    refused(arrays, store, "is in memory, but format is 'torch'", tables=[ITEM], format="torch")
    refused(exports / "numpy", store, r"numpy is a folder, .*: omit names \(--map\)", names={"item": "item"})
    assert not store.exists()
    names = {"item": "weight"}
    tc.import_store(torch_file, store, tables=[ITEM], names=names, format="torch", initial_state=True)


def test_a_state_dict_of_torch_before_1_6_is_read(tmp_path: Path) -> None:
    """It is a pickle and not an archive, so it cannot be mapped."""
    weight = torch.rand(4, 2)
    torch.save({"item.weight": weight}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    tc.import_store(tmp_path / "old.pt", tmp_path / "s.tc", tables=[ITEM], initial_state=True)
    with Store.open(tmp_path / "s.tc", mode="r") as store:
        assert np.array_equal(store.lookup("item", np.arange(4))["vector"], weight.numpy())


def test_masked_keys_and_vectors_are_refused(tmp_path: Path) -> None:
    """Their values beneath the mask would be rows."""
    keys, vectors = np.arange(4), np.zeros((4, 2), np.float32)
    some = np.arange(4) == 2
    for pair in ((np.ma.array(keys, mask=some), vectors), (keys, np.ma.array(vectors, mask=np.tile(some[:, None], 2)))):
        refused({"item": pair}, tmp_path / "s.tc", "has masked values: leave", tables=[ITEM], initial_state=True)
        with Store.open(None, tables=[ITEM], engine=MemoryEngine()) as store:
            with pytest.raises(ValueError, match="rows of table 'item' have masked values"):
                tc.store.load_rows(store, [("item", (pair[0], (pair[1],)))], initial_state=True)
            assert store.commit is None


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("owner", "name", "instead", "sentence"),
    [
        (shutil, "disk_usage", lambda _: SimpleNamespace(free=100), r"needs .*\(1,200 bytes\), but .* free"),
        (ColumnFile, "write", full, r"the export to .*/new failed: No space left on device"),
    ],
)
def test_an_export_that_does_not_fit_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, instead: Any, sentence: str
) -> None:
    monkeypatch.setattr(owner, name, instead)
    with filled(None, [ITEM], ROWS) as store, pytest.raises(ImportExportError, match=sentence):
        tc.export_store(store, tmp_path / "new", format="numpy")
    assert list(tmp_path.iterdir()) == []


def test_a_changed_byte_of_a_parquet_file_is_found(tmp_path: Path, exports: Path) -> None:
    """Its pages have checksums; the other formats have none."""
    shutil.copytree(exports / "parquet", tmp_path / "out")
    path = tmp_path / "out" / "item.parquet"
    flip(path, path.read_bytes().index(next(iter(ROWS["item"].values()))[:4]))
    refused(tmp_path / "out", tmp_path / "s.tc", "is not a complete Parquet file")


T, U = table("t", 2, "sgd"), table("u", 3, "adagrad")
VECTORS = np.arange(8, dtype=np.float32).reshape(4, 2)


def imported(source: Any, *tables: tc.Table, **options: Any) -> dict[str, dict[int, list[float]]]:
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
    expected = VECTORS.tolist()
    assert imported({"t": values}, T) == {"t": dict(enumerate(expected))}
    keys = np.array([-5, 1 << 62, 0, 9])
    for given in (keys, torch.from_numpy(keys)):
        assert imported({"t": (given, values)}, T) == {"t": dict(zip(keys.tolist(), expected, strict=True))}


def test_the_state_dict_of_a_module_is_searched_by_name() -> None:
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
        ({"t": torch.empty(4, 2, device="meta")}, "'t' in the dict of arrays is on the meta device: expected a d"),
        ({"t": torch.eye(2).to_sparse()}, "is sparse_coo: expected a dense tensor with values"),
        ({"t": VECTORS.astype(np.float64)}, r"is \(4, 2\) of float64: table 't' with 4 keys needs \(4, 2\) of float32"),
        ({"t": VECTORS.tolist()}, "'t' in the dict of arrays is of type list: pass an array or a tensor"),
        ({"t": np.float32(3)}, "is of type float32: pass an array"),
        ({"t": np.zeros((), np.float32)}, r"is \(\) of float32"),
        ({"t": VECTORS[:, :1]}, r"is \(4, 1\) of float32"),
        ({"t": (np.arange(3), VECTORS)}, r"is \(4, 2\) of float32: table 't' with 3 keys"),
        ({"t": (np.arange(4.0), VECTORS)}, r"are \(4,\) of float64: expected int64 of shape \(n,\)"),
        ({"t": (np.array([1, 1, 2, 3]), VECTORS)}, "key 1 of table 't' occurs twice"),
        ({"x": VECTORS}, "has no array for table 't': choose one of x for it"),
        ({"a.t": VECTORS, "b.t": VECTORS}, "has several arrays for table 't': choose one of a.t, b.t for it"),
    ],
)
def test_what_is_no_array_of_the_table_is_refused(tmp_path: Path, source: Any, sentence: str) -> None:
    """Before a store is made, except errors that only reading the keys shows."""
    with pytest.raises(ImportExportError, match=sentence):
        tc.import_store(source, tmp_path / "s.tc", tables=[T])
    if (tmp_path / "s.tc").exists():
        with Store.open(tmp_path / "s.tc", mode="r") as store:
            assert store.commit is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_refused(tmp_path: Path, layout: torch.layout) -> None:
    """Its rows may have any lengths."""
    nested = torch.nested.nested_tensor([torch.zeros(4, 2)], layout=layout)
    with pytest.raises(ImportExportError, match="is nested: expected a dense tensor with values"):
        tc.import_store({"t": nested}, tmp_path / "s.tc", tables=[T])
    assert not (tmp_path / "s.tc").exists()


def test_an_export_of_some_tables_makes_a_store_of_all_that_are_given(tmp_path: Path) -> None:
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
    with pytest.raises(ImportExportError, match="the dict of arrays does not describe its tables: pass the tables"):
        tc.import_store({"t": VECTORS}, tmp_path / "s.tc")
    for source in ({"t": VECTORS}, tmp_path):
        with pytest.raises(ImportExportError, match="tables is empty: pass the tables that the source holds"):
            tc.import_store(source, tmp_path / "s.tc", tables=[], format="numpy")
    assert not (tmp_path / "s.tc").exists()
