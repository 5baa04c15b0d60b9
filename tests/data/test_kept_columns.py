"""Kept columns and several labels: stored with the samples in their dtype, shuffled and checked with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

import tiercache as tc
from tests.data.cases import decimals, extracted, plain_schema, table, write_parquet
from tests.datasets import raw_batch, write_dataset
from tiercache.errors import DatasetError, SchemaError, SourceError
from tiercache.schema import Schema

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"
)  # fmt: skip
SAMPLES = 500


def values_of(dtype: str, samples: int = SAMPLES) -> np.ndarray[Any, Any]:
    """Return values of a dtype, including its extremes."""
    chance, kind = np.random.default_rng(len(dtype)), np.dtype(dtype)
    if kind.kind == "b":
        return chance.random(samples) < 0.5
    if kind.kind == "f":
        found = chance.standard_normal(samples).astype(kind)
        found[:3] = np.nan, np.inf, np.finfo(kind).max
        return found
    limits = np.iinfo(kind)
    found = chance.integers(limits.min, limits.max, samples, dtype=kind, endpoint=True)
    found[:2] = limits.min, limits.max
    return found


def columns_of() -> dict[str, Any]:
    """Return a feature, a label, and a column of every dtype."""
    chance = np.random.default_rng(0)
    found: dict[str, Any] = {"a": chance.integers(0, 90, SAMPLES), "y": chance.integers(0, 2, SAMPLES)}
    return found | {f"k_{dtype}": values_of(dtype) for dtype in DTYPES}


def keeping(*columns: str, **changes: Any) -> Schema:
    """Return a schema that keeps columns."""
    return plain_schema(keep=tuple(tc.KeptColumn(column=name) for name in columns), **changes)


def assert_column(dataset: tc.PassDataset, name: str, expected: np.ndarray[Any, Any]) -> None:
    """Compare a column of all sub-datasets with the rows of the data, in order and shuffled."""
    first = 0
    for one in dataset:
        order = np.random.default_rng(1).permutation(one.samples)
        for places in (np.arange(one.samples), order, order[:7], np.array([one.samples - 1] * 3), order[:0]):
            found = one.read(places).columns[name]
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected[first + places])
        first += one.samples
    assert first == expected.size


def test_kept_columns_are_stored_in_their_own_dtype(tmp_path: Path) -> None:
    """This holds for every dtype, over several files and passes, and for any reader of safetensors."""
    columns = columns_of()
    schema = keeping(*(f"k_{dtype}" for dtype in DTYPES))
    files = write_parquet(tmp_path, columns, [0, 200, SAMPLES])
    dataset = extracted(files, schema, tmp_path / "out", split_by="rows=130", batch_multiple=10)
    assert len(dataset) == 4
    for dtype in DTYPES:
        assert_column(dataset, f"k_{dtype}", columns[f"k_{dtype}"].astype(dtype))
    assert [one.dtype for one in dataset.schema.keep] == [*DTYPES]
    plain = load_file(dataset.passes[1].path)
    for dtype in DTYPES:
        np.testing.assert_array_equal(plain[f"column.k_{dtype}"], columns[f"k_{dtype}"][130:260])
    dataset.verify()
    assert tc.PassDataset.open(tmp_path / "out").digest == dataset.digest


def test_each_array_of_a_file_is_aligned(tmp_path: Path) -> None:
    """Wider numbers come first, for any kept columns."""
    dataset = extracted(
        write_parquet(tmp_path, columns_of(), [0, 333]), keeping("k_int8", "k_float64", "k_bool", "k_uint16"),
        tmp_path / "out",
    )  # fmt: skip
    layout = dataset.passes[0]._arrays
    sizes = [np.dtype(spec.dtype).itemsize for spec in layout.specs.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert {*sizes} == {8, 4, 2, 1}
    assert all(layout.offset(name) % np.dtype(spec.dtype).itemsize == 0 for name, spec in layout.specs.items())


def test_a_dataset_without_kept_columns_has_the_bits_that_it_had(tmp_path: Path) -> None:
    """Its schema's digest does not include them, so older datasets still open."""
    schema = plain_schema()
    assert not {"keep", "labels"} & schema.to_record().keys()
    batch = raw_batch(schema, {"a": np.arange(5)}, label=np.zeros(5))
    dataset = write_dataset(tmp_path / "out", schema, [batch])
    assert [*dataset.passes[0]._arrays.specs] == ["keys.a", "counts.a", "label", "ids"]


FORMATS: dict[str, Callable[[Path, dict[str, Any]], Any]] = {}


def wrote(name: str) -> Any:
    """Register a writer of data."""
    return lambda write: FORMATS.setdefault(name, write)


@wrote("ipc")
def write_ipc(folder: Path, columns: dict[str, Any]) -> Any:
    with pa.OSFile(str(folder / "x.arrow"), "wb") as sink, pa.ipc.new_file(sink, pa.table(columns).schema) as writer:
        writer.write_table(pa.table(columns))
    return folder / "x.arrow"


@wrote("numpy")
def write_npz(folder: Path, columns: dict[str, Any]) -> Any:
    np.savez(folder / "x.npz", **columns)
    return folder / "x.npz"


@wrote("csv")
def write_csv(folder: Path, columns: dict[str, Any]) -> Any:
    pd.DataFrame(columns).to_csv(folder / "x.csv", index=False)
    return folder / "x.csv"


@wrote("python")
def write_python(_: Path, columns: dict[str, Any]) -> Any:
    return [{name: values[low : low + 70] for name, values in columns.items()} for low in range(0, SAMPLES, 70)]


@wrote("hive")
def write_hive(folder: Path, columns: dict[str, Any]) -> Any:
    """Write a folder whose name is the column ``day``."""
    (folder / "data" / "day=20260102").mkdir(parents=True)
    whole = {name: values for name, values in columns.items() if name != "day"}
    pq.write_table(pa.table(whole), folder / "data" / "day=20260102" / "x.parquet")
    return folder / "data"


@pytest.mark.parametrize("format_", FORMATS)
def test_every_reader_gives_kept_columns(tmp_path: Path, format_: str) -> None:
    """Text has integers, numbers and bools; the others have the dtypes of the data."""
    chance = np.random.default_rng(3)
    columns = {
        "a": chance.integers(0, 50, SAMPLES), "y": chance.integers(0, 2, SAMPLES),
        "group": chance.integers(-(1 << 60), 1 << 60, SAMPLES), "weight": chance.random(SAMPLES),
        "is_new": chance.random(SAMPLES) < 0.3, "day": np.full(SAMPLES, 20260102),
    }  # fmt: skip
    data = FORMATS[format_](tmp_path, columns)
    dataset = extracted(
        data, keeping("group", "weight", "is_new", "day"), tmp_path / "out", split_by="rows=200", batch_multiple=10
    )
    for name in ("group", "weight", "is_new", "day"):
        assert_column(dataset, name, columns[name])


def test_several_labels_have_their_own_dtypes(tmp_path: Path) -> None:
    """Then ``label`` does not exist, and rows that lack one of them are dropped if the schema says so."""
    chance = np.random.default_rng(3)
    click, seconds = chance.random(SAMPLES) < 0.5, chance.random(SAMPLES)
    seconds[[3, 77]] = np.nan
    buy = pa.array(np.where(chance.random(SAMPLES) < 0.1, 1, 0).astype(np.int8), mask=np.arange(SAMPLES) == 50)
    columns = {"a": chance.integers(0, 50, SAMPLES), "click": click, "seconds": seconds, "buy": buy}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    (tmp_path / "x.toml").write_text('label = {columns = ["click", "seconds", "buy"], null = "drop"}\n[features.a]')
    dataset = extracted(tmp_path / "x.parquet", tmp_path / "x.toml", tmp_path / "out")  # type: ignore[arg-type]
    kept = ~np.isin(np.arange(SAMPLES), [3, 77, 50])
    assert_column(dataset, "click", click[kept])
    assert_column(dataset, "seconds", seconds[kept])
    assert_column(dataset, "buy", np.array(buy.fill_null(0))[kept])
    assert dataset.passes[0].read(np.arange(2)).label is None
    (tmp_path / "x.toml").write_text('label = {columns = ["click", "seconds", "buy"]}\n[features.a]')
    with pytest.raises(SourceError, match=r"row 3, column 'seconds': it is nan, but a label must be a finite number"):
        extracted(tmp_path / "x.parquet", tmp_path / "x.toml", tmp_path / "other")  # type: ignore[arg-type]


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "dtype", "message"),
    [
        (pa.array(["x", "y", "z"]), None, "it holds string, but keep needs numbers or bools: keep a column of numbers"),
        (pa.array([1, 2, 3], pa.timestamp("s")), None, r"it holds timestamp\[ms\], but keep needs numbers or bools: k"),
        (pa.array([[1], [2], [3]]), None, "holds list<.*>, but keep needs numbers or bools: put one value"),
        (
            pa.array([1, None, 3]),
            None,
            "row 1, column 'k': it is null, but int64 has no null: replace it with a value, or set",
        ),
        (pa.array([True, None, True]), None, "row 1, column 'k': it is null, but bool has no null"),
        (
            pa.array([1, 2, 300]),
            "int8",
            "row 2, column 'k': it is 300, which int8 cannot represent: set a different dtype",
        ),
        (pa.array([1, -2, 3]), "uint64", "row 1, column 'k': it is -2, which uint64 cannot represent"),
        (pa.array([1.0, 2.5, 3.0]), "int32", "row 1, column 'k': it is 2.5, which int32 cannot represent"),
        (pa.array([1.0, 2.0, float("nan")]), "int32", "row 2, column 'k': it is nan, which int32 cannot represent"),
        (pa.array([0, 1, 2]), "bool", "row 2, column 'k': it is 2, which bool cannot represent"),
        (
            decimals(5, (1 << 63) + 1, 6),
            None,
            "row 1, column 'k': it is 9223372036854775809, which int64 cannot represent",
        ),
        (decimals(5, -6, (1 << 64) - 1), "uint64", "row 1, column 'k': it is -6, which uint64 cannot represent"),
        (decimals(1, 2, "2.5", scale=1), "int8", "row 2, column 'k': it is 2.5, which int8 cannot represent"),
        (decimals(1, 300, 2), "int8", "row 1, column 'k': it is 300, which int8 cannot represent"),
        (decimals(1, 0, 2), "bool", "row 2, column 'k': it is 2, which bool cannot represent"),
        (decimals(1, None, 2), None, "row 1, column 'k': it is null, but int64 has no null"),
        (
            pa.array([1, (1 << 24) + 1, 3]),
            "float32",
            "row 1, column 'k': it is 16777217, which float32 cannot represent",
        ),
        (
            pa.array([None, -(1 << 53) - 1, 3]),
            "float64",
            "row 1, column 'k': it is -9007199254740993, which float64 cannot represent: set a different dtype",
        ),
        (pa.array([0, (1 << 63) - 1, 3]), "float64", "row 1, column 'k': it is 9223372036854775807, which float64"),
        (pa.array([0, 1 << 16, 3]), "float16", "row 1, column 'k': it is 65536, which float16 cannot represent"),
        (pa.array([1.0, 1e300, 3.0]), "float32", "row 1, column 'k': it is 1e.300, which float32 cannot represent"),
    ],
)
def test_what_a_dtype_cannot_hold_is_refused(tmp_path: Path, values: Any, dtype: Any, message: str) -> None:
    """The error names file, row and column; no dataset is created."""
    pq.write_table(pa.table({"a": [1, 2, 3], "y": [0, 1, 0], "k": values}), tmp_path / "x.parquet")
    schema = plain_schema(keep=(tc.KeptColumn(column="k", dtype=dtype),))
    with pytest.raises(SourceError, match=message):
        extracted(tmp_path / "x.parquet", schema, tmp_path / "out")


def test_whole_decimals_keep_their_digits(tmp_path: Path) -> None:
    """Also above 2^53, where floats round, with a scale, as labels and in dictionaries."""
    big = 9007199254740993
    columns = {
        "a": [1, 2, 3], "y": [0, 1, 0], "plain": decimals(big, big + 2, -big), "scaled": decimals(big, 1, 2, scale=4),
        "wide": decimals((1 << 64) - 1, big, 0), "real": decimals("0.5", 1, None, scale=2),
    }  # fmt: skip
    columns["coded"] = pa.DictionaryArray.from_arrays([1, 0, 1], decimals(7, big))
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    keep = [
        tc.KeptColumn(column=name, dtype=dtype)
        for name, dtype in {"plain": None, "scaled": "int64", "wide": "uint64", "real": None, "coded": "int64"}.items()
    ]
    labels = (tc.KeptColumn(column="plain", name="of_label", dtype="int64"),)
    schema = plain_schema(keep=tuple(keep), label=None, labels=labels)
    dataset = extracted(tmp_path / "x.parquet", schema, tmp_path / "out")
    for name in ("plain", "of_label"):
        assert_column(dataset, name, np.array([big, big + 2, -big]))
    assert_column(dataset, "scaled", np.array([big, 1, 2]))
    assert_column(dataset, "wide", np.array([(1 << 64) - 1, big, 0], np.uint64))
    assert_column(dataset, "real", np.array([0.5, 1, np.nan]))
    assert_column(dataset, "coded", np.array([big, 7, big]))


def test_a_null_of_floats_is_nan(tmp_path: Path) -> None:
    """Also for integers that are kept as floats."""
    columns = {"a": [1, 2, 3], "y": [0, 1, 0], "k": pa.array([1.5, None, 3]), "n": pa.array([None, 2, -(1 << 62)])}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    schema = plain_schema(keep=(tc.KeptColumn(column="k"), tc.KeptColumn(column="n", dtype="float32")))
    dataset = extracted(tmp_path / "x.parquet", schema, tmp_path / "out")
    assert_column(dataset, "k", np.array([1.5, np.nan, 3]))
    assert_column(dataset, "n", np.array([np.nan, 2, -(2.0**62)], np.float32))


def test_files_of_different_dtypes_need_one_in_the_schema(tmp_path: Path) -> None:
    """The error shows the line; with it, each value must fit."""
    for name, dtype in (("x", np.int32), ("z", np.int64)):
        pq.write_table(pa.table({"a": [1, 2], "y": [0, 1], "k": np.array([1, 2], dtype)}), tmp_path / f"{name}.parquet")
    with pytest.raises(SourceError, match=r"it holds int64 here and int32 in other files: set it in the schema"):
        extracted(tmp_path, keeping("k"), tmp_path / "out")
    schema = plain_schema(keep=(tc.KeptColumn(column="k", dtype="int16"),))
    assert_column(extracted(tmp_path, schema, tmp_path / "out"), "k", np.array([1, 2, 1, 2], np.int16))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('keep = ["a"]\n[features.a]', "keeps the column 'a', which is also the name of a feature, a dense column or"),
        ('keep = ["k", "k"]\n[features.a]', "has the name of a column 'k' twice"),
        ('keep = [{column = "k", dtype = "int7"}]\n[features.a]', "keep has dtype = 'int7': it must be 'bool', 'int8'"),
        ('keep = [7]\n[features.a]', "keep has column = 7: it must be a string"),
        ('keep = [{column = "k", nam = "x"}]\n[features.a]', r"keep has the unknown key 'nam' \(did you mean 'name'"),
        ('label = {column = "y", columns = ["z"]}\n[features.a]', r"\[label\] has 'column' and 'columns': set"),
        ('label = {null = "drop"}\n[features.a]', r"\[label\] has no 'column': set the column of the label"),
    ],
)  # fmt: skip
def test_what_a_schema_cannot_keep_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """The error names the key and the change."""
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(SchemaError, match=message):
        Schema.load(tmp_path / "x.toml")


def test_raw_ids_of_a_feature_are_kept_under_another_name(tmp_path: Path) -> None:
    """One column is read for both."""
    columns = columns_of()
    (tmp_path / "x.toml").write_text('label={column="y"}\nkeep=[{column="a", name="raw_a"}]\n[features.a]')
    dataset = extracted(write_parquet(tmp_path, columns, [0, SAMPLES]), tmp_path / "x.toml", tmp_path / "out")  # type: ignore[arg-type]
    assert_column(dataset, "raw_a", columns["a"])
    samples = dataset.passes[0].read(np.arange(SAMPLES))
    np.testing.assert_array_equal(dataset.passes[0].keys("a")[samples.ids["a"].ids], samples.columns["raw_a"])


# -- the life of a dataset -----------------------------------------------------------------------------------


def test_a_damaged_kept_column_is_never_read(tmp_path: Path) -> None:
    """A flipped bit of it raises when the sample is read, and in ``verify``."""
    dataset = extracted(write_parquet(tmp_path, columns_of(), [0, SAMPLES]), keeping("k_int8"), tmp_path / "out")
    one = dataset.passes[0]
    data = bytearray(one.path.read_bytes())
    data[len(one._arrays.header) + one._arrays.offset("column.k_int8", 123)] ^= 4
    one.path.write_bytes(data)
    dataset = tc.PassDataset.open(tmp_path / "out")
    with pytest.raises(DatasetError, match="is not what was extracted"):
        dataset.passes[0].read(np.array([123]))
    with pytest.raises(DatasetError, match="is not what was extracted"):
        dataset.verify()


def test_the_same_extraction_again_goes_on_or_is_done(tmp_path: Path) -> None:
    """Then dtypes come from the dataset; other dtypes are another dataset; new files are appended in its dtypes."""
    columns = columns_of()
    first, second = write_parquet(tmp_path, columns, [0, 300, SAMPLES])
    schema = keeping("k_int16", "k_float16")
    once = extracted(first, schema, tmp_path / "out")
    assert extracted(first, schema, tmp_path / "out").digest == once.digest
    other = plain_schema(keep=(tc.KeptColumn(column="k_int16", dtype="int64"), tc.KeptColumn(column="k_float16")))
    with pytest.raises(tc.TierCacheError, match="schema"):
        extracted(first, other, tmp_path / "out")
    both = extracted([first, second], schema, tmp_path / "out", append=True)
    assert_column(both, "k_int16", columns["k_int16"])
    assert_column(both, "k_float16", columns["k_float16"])


def test_kept_columns_follow_their_samples_through_rare_keys_and_repartition(tmp_path: Path) -> None:
    """Into smaller passes too."""
    columns = columns_of()
    files = write_parquet(tmp_path, columns, [0, SAMPLES])
    dataset = extracted(files, keeping("k_uint32", "k_bool"), tmp_path / "out", min_count=3)
    parts = tc.repartition(dataset, tmp_path / "parts", rows=40, batch_multiple=10)
    assert len(parts) > 1
    for one in (dataset, parts):
        assert_column(one, "k_uint32", columns["k_uint32"])
        assert_column(one, "k_bool", columns["k_bool"])


def test_the_reference_writer_makes_the_same_files(tmp_path: Path) -> None:
    columns = columns_of()
    dataset = extracted(
        write_parquet(tmp_path, columns, [0, SAMPLES]), keeping("k_uint8", "k_int64"), tmp_path / "out",
        split_by="rows=100", batch_multiple=1,
    )  # fmt: skip
    batches = [
        raw_batch(
            dataset.schema, {"a": columns["a"][low : low + 100]}, label=columns["y"][low : low + 100],
            columns={name: columns[name][low : low + 100] for name in ("k_uint8", "k_int64")},
        )
        for low in range(0, SAMPLES, 100)
    ]  # fmt: skip
    assert write_dataset(tmp_path / "reference", dataset.schema, batches).digest == dataset.digest
    with pytest.raises(DatasetError, match="the schema has no dtype for the kept column 'k_uint8': set one"):
        write_dataset(tmp_path / "other", keeping("k_uint8", "k_int64"), batches)


def test_several_tables_and_a_shared_name_of_a_dense_column_keep_working() -> None:
    """Names of features and dense columns can be equal, as before."""
    schema = Schema(
        label="y", dense=(tc.DenseFeature(column="a"),), features=(tc.Feature(name="a"),), tables=(table("a"),)
    )
    assert schema.columns == ("y", "a")
