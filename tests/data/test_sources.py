"""Sources besides plain files: folders of partitions, URLs, Criteo, split-binary, NumPy and Python iterables."""

from __future__ import annotations

import csv
import io
import sqlite3
import zipfile
from collections import namedtuple
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tiercache as tc
from tests.data.cases import (
    Jagged,
    KeyedJagged,
    arrow,
    extracted,
    plain_schema,
    rich_columns,
    rich_schema,
    write_parquet,
)
from tests.files import files_of
from tiercache.data.encode import encode
from tiercache.data.inputs import find_inputs
from tiercache.data.raw_batch import NULL_KEY
from tiercache.data.source import Source
from tiercache.errors import SourceError
from tiercache.schema import Schema, SourceFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ROWS = 3000
COLUMNS = rich_columns(ROWS)


def contents(out: Path) -> dict[str, bytes]:
    """Return the content of passes: the files of a dataset except its manifest, which names inputs and times."""
    return {name: data for name, data in files_of(out).items() if name.startswith("pass-")}


def run(data: Any, schema: Schema, out: Path, **options: Any) -> tc.PassDataset:
    """Extract passes of 1000 samples."""
    return extracted(data, schema, out, **{"split_by": "rows=1000", "batch_multiple": 100, **options})


def rows_of(data: Any, schema: Schema, row: int = 0) -> list[dict[str, Any]]:
    """Return the rows of a source, from a row of its first file on."""
    source = Source(find_inputs(data, schema.source.format), schema)
    return [r for batch in source.batches(0, row, batch_bytes=4096) for r in batch.columns.to_pylist()]


def lists(values: list[list[Any]]) -> tuple[Any, Any]:
    return np.concatenate([np.asarray(v) for v in values]), np.cumsum([0, *map(len, values)])


def batches(size: int = 700) -> Iterator[dict[str, Any]]:
    """Yield the columns as dicts: arrays, matrices, and pairs of values and offsets."""
    for low in range(0, ROWS, size):
        part = {name: values[low : low + size] for name, values in COLUMNS.items()}
        yield part | {name: lists(part[name]) for name in ("tags", "tags_w")}


class Again:
    """A re-iterable object."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return self.make()


def tuples() -> Iterator[Any]:
    """Yield tuples in the order of the columns."""
    return (tuple(batch.values()) for batch in batches())


def tensors() -> Iterator[Any]:
    """Yield named tuples of tensors."""
    kind = namedtuple("Batch", COLUMNS)
    for batch in batches(512):
        yield kind(
            *(tuple(map(torch.as_tensor, v)) if isinstance(v, tuple) else torch.as_tensor(v) for v in batch.values())
        )


@pytest.mark.parametrize(
    "data",
    [
        batches(), Again(batches), Again(tuples), Again(tensors), [arrow(COLUMNS)],
        [arrow(COLUMNS).slice(0, 1700).to_pandas(), arrow(COLUMNS).slice(1700).to_pandas()],
    ],
    ids=["a generator", "dicts", "tuples", "tensors", "an Arrow table", "data frames"],
)  # fmt: skip
def test_a_python_iterable_gives_the_bits_of_a_file(tmp_path: Path, data: Any) -> None:
    """For any kind and size of batches."""
    schema = rich_schema()
    run(write_parquet(tmp_path, COLUMNS, [0, ROWS]), schema, tmp_path / "file")
    run(data, replace(schema, source=SourceFormat(columns=tuple(COLUMNS))), tmp_path / "python")
    assert contents(tmp_path / "python") == contents(tmp_path / "file")


def test_an_iterable_goes_on_behind_the_last_closed_pass(tmp_path: Path) -> None:
    """Batches before the cursor are skipped; another iterable is refused."""
    run(Again(batches), rich_schema(), tmp_path / "whole")

    def broken() -> Iterator[Any]:
        for number, batch in enumerate(batches()):
            if number == 3:
                raise RuntimeError("the loader broke")
            yield batch

    with pytest.raises(RuntimeError, match="the loader broke"):
        run(Again(broken), rich_schema(), tmp_path / "out", memory_limit="32MiB")
    assert (tmp_path / "out" / "unfinished").exists()
    with pytest.raises(ValueError, match="an extraction of other data"):
        run(Again(lambda: batches(600)), rich_schema(), tmp_path / "out", memory_limit="32MiB")
    run(Again(batches), rich_schema(), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_data_loader_is_read_as_it_is(tmp_path: Path) -> None:
    """Its tuples have the names in [source] columns; a matrix of dense features is the schema's dense columns."""
    keys, labels = torch.arange(100) % 7, torch.ones(100)
    loader = DataLoader(TensorDataset(torch.rand(100, 2), keys, labels), batch_size=32)
    dense = tc.DenseFeature(column="d0"), tc.DenseFeature(column="d1")
    schema = plain_schema(dense=dense, source=SourceFormat(columns=("dense", "a", "y")))
    found = run(loader, schema, tmp_path / "out")
    assert (found.samples, sorted(found.passes[0].keys("a").tolist())) == (100, list(range(7)))
    assert found.passes[0].read(np.arange(100)).dense.shape == (100, 2)


def test_a_tuple_of_two_samples_is_not_values_and_offsets() -> None:
    """A collation that transposes its samples makes tuples, of two samples in the last batch."""
    samples = [(number, f"s{number}", 0.5) for number in range(5)]
    loader = DataLoader(samples, 3, collate_fn=lambda rows: tuple(zip(*rows, strict=True)))  # type: ignore[arg-type]
    features = tc.Feature(name="a"), tc.Feature(name="b", key="string")
    schema = plain_schema(features=features, tables=(), source=SourceFormat(columns=("a", "b", "y")))
    batches = [encode(schema, batch).features for batch in Source(find_inputs(loader), schema).batches()]
    assert [key for batch in batches for key in batch["a"].keys] == [*range(5)]
    assert [key for batch in batches for key in batch["b"].keys] == [tc.key_of(text) for _, text, _ in samples]


@pytest.mark.parametrize("size", [2, 3])
def test_lists_that_torch_collates_are_those_of_the_samples(size: int) -> None:
    """It makes a list of the first elements of all samples, one of the second ones, and so on."""
    samples = [{"a": [i, i + 10], "b": [f"s{i}", "t"], "w": [0.5, i], "dense": [i, -1.0], "y": 1.0} for i in range(6)]
    features = tc.Feature(name="a", hotness="ragged", weights="w"), tc.Feature(name="b", key="string", hotness="ragged")
    dense = tc.DenseFeature(column="d0"), tc.DenseFeature(column="d1")
    schema = plain_schema(features=features, tables=(), dense=dense)
    loader = DataLoader(samples, size)  # type: ignore[arg-type]
    found = [encode(schema, batch) for batch in Source(find_inputs(loader), schema).batches()]
    assert [key for one in found for key in one.features["a"].keys] == [k for one in samples for k in one["a"]]
    assert [w for one in found for w in one.features["a"].weights] == [w for one in samples for w in one["w"]]
    assert [k for one in found for k in one.features["b"].keys] == [tc.key_of(t) for one in samples for t in one["b"]]
    assert [row for one in found for row in one.dense.tolist()] == [one["dense"] for one in samples]


def test_a_keyed_jagged_tensor_is_its_features() -> None:
    """Recognized by its methods, in a dict or in torchrec's Batch; the schema names the column of weights."""
    keyed = KeyedJagged(u=Jagged([5, 6, 7], [0, 2, 2, 3], [0.5, 1.5, 2.0]), v=Jagged([1], [0, 0, 1, 1]))
    features = tc.Feature(name="u", hotness="ragged", weights="w"), tc.Feature(name="v", hotness="ragged")
    schema = Schema(label="y", dense=(tc.DenseFeature(column="d"),), features=features)
    dense, label = torch.tensor([[3.0], [4.0], [5.0]]), torch.tensor([0.0, 1.0, 1.0])
    batch = SimpleNamespace(dense_features=dense, sparse_features=keyed, labels=label)
    wanted = [(3, 0, [5, 6], [0.5, 1.5], []), (4, 1, [], [], [1]), (5, 1, [7], [2.0], [])]
    for item in ({"sparse": keyed, "y": label, "dense": dense}, batch):
        assert [(r["d"], r["y"], r["u"], r["w"], r["v"]) for r in rows_of([item], schema)] == wanted


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([3], "batch 0 is int: expected dicts of arrays"),
        ([(1, 2)], "batch 0 is tuple: .* tuples of as many arrays as"),
        ([None], "batch 0 is NoneType: expected dicts of arrays"),
        (pl.LazyFrame({"a": [1], "y": [0.0]}), "batch 0 is LazyFrame: .* data frames in memory"),
        (pads.dataset(pa.table({"a": [1]})), "or an iterable of batches, such as its to_batches"),
        (csv.DictReader(io.StringIO("a,y\nxy,10\n")), "column '[ay]': one str instead of the values of all samples"),
        ([{"a": 1, "y": 0.0}], "column '[ay]': one (int|float) instead of the values of all samples of a batch"),
        ([{"a": {1: 2}, "y": [0.0]}], "column 'a': one dict instead of"),
        ([{"a": map(int, "12"), "y": [0.0, 1.0]}], "column 'a': one map instead of"),
        ([{"a": [1, 2], "y": [0.0]}], r"batch 0 has columns of different lengths \(y: 1, a: 2\)"),
        ([{"a": [1], "y": [0.0]}, {"a": ["x"], "y": [0.0]}], "batch 1, column 'a': it holds string"),
        ([{"a": [1 << 64], "y": [0.0]}], "batch 0, column 'a': integers go beyond 64 bits, .*: expected an array"),
        (
            [{"a": [1 << 63, -1], "y": [0.0]}],
            "batch 0, column 'a': .* or there are some from 2.63 on and negative ones",
        ),
        ([{"a": [1], "y": [0.0]}, {"a": [1]}], r"batch 1 has no column 'y'"),
        ([{"a": ([1, 2], [0, 3]), "y": [0.0]}], "column 'a': offsets .* do not go from 0 to the number of values, 2"),
        ([{"a": [1], "y": [0.0]}, {"a": [2, None], "y": [1.0, 1.0]}], "the Python iterable, row 2, column 'a': it is"),
    ],
)
def test_a_bad_batch_is_named(tmp_path: Path, data: Any, message: str) -> None:
    """By its number, or by the row counted over all batches."""
    with pytest.raises(SourceError, match=message):
        run(data, plain_schema(), tmp_path / "out", split_by="budget")


def test_a_cross_takes_one_type_in_all_batches(tmp_path: Path) -> None:
    """Pandas reads a column of a text file as integers in one chunk and as strings in another."""
    schema = plain_schema(features=(tc.Feature(name="c", columns=("a", "b")),))
    chunks = list(pd.read_csv(io.StringIO("y,a,b\n0,1,5\n1,2,6\n1,1,5\n0,x,6\n"), chunksize=2))
    message = "column 'a': it holds strings from row 2 on and integers before, whose hashes differ: use .* all batches"
    with pytest.raises(SourceError, match=message):
        run(chunks, schema, tmp_path / "out")
    nulls = [{"a": [None], "b": [1], "y": [0.0]}, *(chunk.astype({"a": str}) for chunk in chunks)]
    schema = replace(schema, features=(replace(schema.features[0], null="embed"),))
    assert run(nulls, schema, tmp_path / "out").passes[0].rows("c") == 4


def test_python_integers_have_all_64_bits() -> None:
    """As uint64 of NumPy: in a list, a list of lists, and an array of objects with None, in any batch."""
    big, large = (1 << 63) + 3, (1 << 64) - 1
    features = (tc.Feature(name="a"), tc.Feature(name="b", null="embed"), tc.Feature(name="u", hotness="ragged"))
    schema = Schema(label="y", features=features, tables=())
    data = [
        {"a": [1, 2], "b": [3, None], "u": [[1], [2, 3]], "y": [0.0, 1.0]},
        {"a": [big, 1], "b": np.array([large - 1, None], object), "u": [[large, 1], []], "y": [0.0, 1.0]},
    ]
    found = [encode(schema, batch).features for batch in Source(find_inputs(data), schema).batches()]
    keys = {name: [key for one in found for key in one[name].keys.tolist()] for name in ("a", "b", "u")}
    assert keys == {
        "a": [1, 2, big - (1 << 64), 1], "b": [3, NULL_KEY, -2, NULL_KEY], "u": [1, 2, 3, -1, 1]
    }  # fmt: skip


def test_an_archive_with_two_arrays_of_one_name_is_refused(tmp_path: Path) -> None:
    """NumPy reads the last one."""
    np.savez(tmp_path / "x.npz", a=np.arange(3), y=np.zeros(3))
    with zipfile.ZipFile(tmp_path / "x.npz", "a") as archive:
        archive.writestr("a", archive.read("a.npy"))
    with pytest.raises(SourceError, match=r"x.npz has two arrays 'a' \(a.npy and a\): name each once"):
        run(tmp_path / "x.npz", plain_schema(), tmp_path / "out")


def test_an_iterator_that_must_be_read_twice_is_refused(tmp_path: Path) -> None:
    """Counting keys takes a separate pass over the data."""
    with pytest.raises(SourceError, match="can be read only once, but it must be read again"):
        run(batches(), rich_schema(), tmp_path / "out", min_count=2)


def test_folders_named_by_values_are_columns(tmp_path: Path) -> None:
    """Hive partitions, as integers or strings according to the schema; hidden files are skipped."""
    for day, country, key in ((1, "at", 10), (2, "de%2Fx", 20), (3, "__HIVE_DEFAULT_PARTITION__", 30)):
        folder = tmp_path / f"day={day}" / f"country={country}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"a": [key], "y": [0.0]}), folder / "part-0.parquet")
        (folder / "_SUCCESS.csv").write_text("")
    country = tc.Feature(name="country", key="string", null="embed")
    cross = tc.Feature(name="x", columns=("day", "country"), null="embed")
    schema = plain_schema(features=(tc.Feature(name="a"), tc.Feature(name="day"), country, cross))
    found = [(r["a"], r["day"], r["country"]) for r in rows_of(tmp_path, schema)]
    assert found == [(10, 1, "at"), (20, 2, "de/x"), (30, 3, None)]
    assert [r["day"] for r in rows_of(str(tmp_path / "day=2" / "*" / "*.parquet"), schema)] == [2]


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "x.csv", "x.csv.gz", "x.npz"])
def test_urls_are_read_through_fsspec(tmp_path: Path, name: str) -> None:
    """A file, a folder and a pattern of another file system; the same rows as from a local file."""
    import fsspec

    from tests.data.test_source import write

    data = pa.table({"a": range(2000), "y": [0.5] * 2000})
    if name.endswith("npz"):
        np.savez(tmp_path / name, **{n: data[n].to_numpy() for n in data.column_names})
    else:
        write(tmp_path / name, data)
    memory, folder = fsspec.filesystem("memory"), f"/{tmp_path.name}/{name}"
    memory.pipe(f"{folder}/day=4/{name}", (tmp_path / name).read_bytes())
    schema = plain_schema(features=(tc.Feature(name="a"), tc.Feature(name="day")))
    expected = [{"y": 0.5, "a": i, "day": 4} for i in range(2000)]
    for url in (f"memory:/{folder}/day=4/{name}", f"memory:/{folder}", f"memory:/{folder}/*/{name[:3]}*"):
        assert rows_of(url, schema) == expected
        assert rows_of(url, schema, row=1500) == expected[1500:]
    (file,) = find_inputs(f"memory:/{folder}")
    memory.pipe(f"{folder}/day=4/{name}", b"other")
    with pytest.raises(SourceError, match="was changed while it was read"):
        file.check_unchanged()


def test_a_url_that_cannot_be_opened_says_what_to_install() -> None:
    """Or that the path does not exist."""
    with pytest.raises(SourceError, match=r"s3://bucket/x\.parquet cannot be opened: Install s3fs"):
        find_inputs("s3://bucket/x.parquet")
    with pytest.raises(SourceError, match="zz://x cannot be opened: Protocol not known"):
        find_inputs("zz://x")
    with pytest.raises(SourceError, match=r"no file matches 'memory://nothing/here.csv'"):
        find_inputs("memory://nothing/here.csv")


CRITEO = """[source]
format = "criteo"
[defaults]
dim = 8
"""


def test_criteo_files_need_one_line_of_schema(tmp_path: Path) -> None:
    """Label, 13 numbers as log(1 + x), 26 hexadecimal keys; empty is missing; any suffix."""
    (tmp_path / "criteo.toml").write_text(CRITEO)
    schema = Schema.load(tmp_path / "criteo.toml")
    assert [len(schema.dense), len(schema.features), {t.dim for t in schema.tables}] == [13, 26, {8}]
    assert Schema.of(None, "criteo").digest == schema.digest
    (tmp_path / "day_0").write_text("\t".join(["1", "7", "-2", *[""] * 11, "68fd1e64", "", *["ff"] * 24]) + "\n")
    found = extracted(tmp_path / "day_0", None, tmp_path / "out", format="criteo").passes[0]
    samples = found.read(np.arange(1))
    np.testing.assert_allclose(samples.dense[0], [np.log(8), *[0] * 12], rtol=1e-6)
    keys = [found.keys(f"C{i}")[samples.ids[f"C{i}"].ids].tolist() for i in (1, 2, 3)]
    assert [samples.label.tolist(), *keys] == [[1], [0x68FD1E64], [NULL_KEY], [0xFF]]


SPEC = """
channel_spec: {categorical: [cat_0.bin, cat_1.bin], label: [label], numerical: [num_0, num_1]}
feature_spec:
  label: {dtype: bool}
  num_0: {dtype: float16}
  num_1: {dtype: float16}
  cat_0.bin: {dtype: int8, cardinality: 100}
  cat_1.bin: {dtype: int32, cardinality: 100000}
metadata: {}
source_spec:
  train: &chunks
  - {type: split_binary, features: [label], files: [train/label.bin]}
  - {type: split_binary, features: [num_0, num_1], files: [train/numerical.bin]}
  - {type: split_binary, features: [cat_0.bin], files: [train/cat_0.bin]}
  - {type: split_binary, features: [cat_1.bin], files: [train/cat_1.bin]}
  test: []
"""


def write_split_binary(folder: Path, rows: int) -> dict[str, np.ndarray[Any, Any]]:
    """Write a split-binary dataset, and return its columns."""
    random = np.random.default_rng(0)
    columns = {
        "label": random.integers(0, 2, rows).astype(bool),
        "numerical": random.random((rows, 2)).astype(np.float16),
        "cat_0": random.integers(0, 100, rows).astype(np.int8),
        "cat_1": random.integers(0, 100_000, rows).astype(np.int32),
    }
    (folder / "train").mkdir(parents=True)
    (folder / "feature_spec.yaml").write_text(SPEC)
    for name, values in columns.items():
        values.tofile(folder / "train" / f"{name}.bin")
    return columns


BINARY = Schema(
    label="label",
    dense=(tc.DenseFeature(column="num_1"),),
    features=(tc.Feature(name="cat_0.bin"), tc.Feature(name="cat_1", columns=("cat_1.bin",))),
)


def test_split_binary_data_is_read_by_its_spec(tmp_path: Path) -> None:
    """A folder with feature_spec.yaml is one file of rows, from any row on."""
    columns = write_split_binary(tmp_path, 5000)
    values = columns["label"], columns["numerical"][:, 1], columns["cat_0"], columns["cat_1"]
    wanted = [
        dict(zip(("label", "num_1", "cat_0.bin", "cat_1.bin"), row, strict=True))
        for row in zip(*(one.tolist() for one in values), strict=True)
    ]
    assert rows_of(tmp_path, BINARY) == wanted
    assert rows_of(f"{tmp_path}/feature_spec.yaml#train", BINARY, row=4321) == wanted[4321:]
    (file,) = find_inputs(tmp_path)
    (tmp_path / "train" / "cat_0.bin").write_bytes(bytes(5000))
    with pytest.raises(SourceError, match="was changed"):
        file.check_unchanged()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train/cat_1.bin", "0" * 4001, "4,001 bytes, not a multiple of 4"),
        ("train/cat_1.bin", "0" * 400, "different lengths .*cat_1.bin: 100"),
        ("train/cat_1.bin", None, "cat_1.bin cannot be read: No such file"),
        ("feature_spec.yaml", "a: [", "feature_spec.yaml cannot be read"),
        ("feature_spec.yaml", "a: 1", "has no source_spec"),
        ("feature_spec.yaml", SPEC.replace("int8", "int9"), "cat_0.bin no common dtype"),
        ("feature_spec.yaml", SPEC.replace("train:", "t:"), "no part 'train', or an empty one: it has t, test"),
        ("feature_spec.yaml", SPEC.replace("type: split", "type: no"), "has a chunk of 'train'"),
    ],
)
def test_split_binary_data_that_disagrees_is_refused(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    """Sizes, names and types of the spec."""
    write_split_binary(tmp_path, 1000)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SourceError, match=message):
        rows_of(tmp_path, BINARY)


@pytest.mark.parametrize("form", ["npz", "compressed", "folder", "structured"])
def test_numpy_arrays_are_columns(tmp_path: Path, form: str) -> None:
    """A .npz file, a folder of .npy files, or one structured .npy file; matrices are lists of one length."""
    columns = {"y": np.arange(3000) % 2, "a": np.arange(3000) * 3, "l": np.arange(6000).reshape(3000, 2)}
    path = tmp_path / "x.npz"
    if form == "folder":
        path = tmp_path
        for name, values in columns.items():
            np.save(tmp_path / f"{name}.npy", values)
    elif form == "structured":
        path = tmp_path / "x.npy"
        rows = np.empty(3000, [("y", "i1"), ("a", "i8"), ("l", "i4", (2,))])
        for name, values in columns.items():
            rows[name] = values
        np.save(path, rows)
    else:
        (np.savez if form == "npz" else np.savez_compressed)(path, **columns)
    features = tc.Feature(name="a"), tc.Feature(name="l", hotness="multi_hot", length=2)
    schema = plain_schema(features=features, tables=())
    wanted = [{"y": i % 2, "a": 3 * i, "l": [2 * i, 2 * i + 1]} for i in range(3000)]
    assert rows_of(path, schema) == wanted
    assert rows_of(path, schema, row=2001) == wanted[2001:]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: np.save(f / "a.npy", np.array([{}])), "a.npy holds object of shape"),
        (lambda f: np.save(f / "a.npy", np.arange(2)), r"different lengths \(a: 2, y: 3\)"),
        (lambda f: np.save(f / "a.npy", np.ones((3, 2)).T), "in Fortran order"),
        (lambda f: (f / "a.npy").write_bytes(b"no"), "a.npy is not a readable .npy file"),
        (lambda f: (f / "a.npy").write_bytes((f / "a.npy").read_bytes()[:-8]), "a.npy is truncated"),
    ],
)
def test_numpy_files_that_are_none_are_refused(tmp_path: Path, make: Callable[[Path], Any], message: str) -> None:
    """One message that names the file; nothing is unpickled."""
    np.save(tmp_path / "a.npy", np.arange(3))
    np.save(tmp_path / "y.npy", np.zeros(3))
    make(tmp_path)
    with pytest.raises(SourceError, match=message):
        rows_of(tmp_path, plain_schema())


@pytest.mark.parametrize("name", ["x.npz", "y.npz", "x.npy", "x.arrow", "x.parquet"])
def test_damaged_files_are_sentences(tmp_path: Path, name: str) -> None:
    """Flips in the metadata of the arrays, whichever library raises; 60 of each format."""
    columns = {"a": np.arange(300), "y": np.zeros(300)}
    path, random = tmp_path / name, np.random.default_rng(0)
    if name.endswith("npz"):
        (np.savez if name[0] == "x" else np.savez_compressed)(path, **columns)
    elif name.endswith("npy"):
        np.save(path, np.zeros(300, [("a", "i8"), ("y", "f4")]))
    elif name.endswith("arrow"):
        with pa.ipc.new_file(str(path), pa.table(columns).schema) as writer:
            writer.write_table(pa.table(columns))
    else:
        pq.write_table(pa.table(columns), path)
    good, messages = path.read_bytes(), []
    for _ in range(60):
        damaged, at = bytearray(good), int(random.integers(0, 200))
        damaged[at if random.random() < 0.5 else -1 - at] = int(random.integers(0, 256))
        path.write_bytes(damaged)
        try:
            rows_of(path, plain_schema())
        except SourceError as error:
            messages.append(str(error))
    assert messages
    assert "\n" not in "".join(messages)


def test_an_iterable_is_read_on_the_thread_of_its_owner(tmp_path: Path) -> None:
    """Its resources may belong to one thread, such as an SQLite connection."""
    connection = sqlite3.connect(tmp_path / "clicks.db")
    connection.execute("CREATE TABLE clicks (a INTEGER, y REAL)")
    connection.executemany("INSERT INTO clicks VALUES (?, ?)", [(i % 7, 0.0) for i in range(100)])

    class Clicks:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            rows = connection.execute("SELECT a, y FROM clicks")
            while some := rows.fetchmany(30):
                yield {"a": np.array([a for a, _ in some]), "y": np.array([y for _, y in some])}

    made = extracted(Clicks(), plain_schema(), tmp_path / "out")
    assert made.samples == 100
    assert sorted(made.passes[0].keys("a").tolist()) == list(range(7))
