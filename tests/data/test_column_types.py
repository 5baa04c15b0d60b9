"""Types of columns: readable key types, their canonical form, and messages for the others."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiercache as tc
from tests.data.cases import decimals, extracted, plain_schema
from tiercache.data.encode import encode
from tiercache.data.inputs import find_inputs
from tiercache.data.raw_batch import NULL_KEY
from tiercache.data.source import Source
from tiercache.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

IDS = [uuid.UUID(int=0x0123456789ABCDEF0123456789ABCDEF), uuid.UUID(int=(1 << 128) - 1)]
TEXTS = ["01234567-89ab-cdef-0123-456789abcdef", "ffffffff-ffff-ffff-ffff-ffffffffffff"]
EMBED: dict[str, Any] = {"name": "a", "null": "embed"}
STRING: dict[str, Any] = {**EMBED, "key": "string"}


def stored(folder: Path, array: Any, suffix: str) -> Path:
    """Write a file with a column ``a`` and a label."""
    path = folder / f"x.{suffix}"
    data = pa.table({"a": array, "y": np.zeros(len(array))})
    if suffix == "parquet":
        pq.write_table(data, path)
    else:
        with pa.ipc.new_file(str(path), data.schema) as writer:
            writer.write_table(data)
    return path


def keys(data: Any, feature: dict[str, Any]) -> list[int]:
    """Return the keys of the feature ``a``."""
    schema = plain_schema(features=(tc.Feature(**feature),))
    return [k for b in Source(find_inputs(data), schema).batches() for k in encode(schema, b).features["a"].keys]


def encoded_runs(values: Any) -> Any:
    """Return an array of runs of one."""
    return pa.RunEndEncodedArray.from_arrays(list(range(1, len(values) + 1)), values)


TEXT_ARRAYS = {
    "string view": pa.array(["x", None, "a longer text than a view holds"], pa.string_view()),
    "binary view": pa.array([b"x", None, b"a longer text than a view holds"], pa.binary_view()),
    "runs": encoded_runs(pa.array(["x", None, "a longer text than a view holds"])),
    "json": pa.array(["x", None, "a longer text than a view holds"], pa.json_()),
    "dictionary of views": pa.DictionaryArray.from_arrays(
        [0, None, 1], pa.array(["x", "a longer text than a view holds"], pa.string_view())
    ),
}


@pytest.mark.parametrize("name", TEXT_ARRAYS)
def test_every_type_of_text_has_the_keys_of_its_bytes(tmp_path: Path, name: str) -> None:
    """Alone, sliced, and in lists."""
    array = TEXT_ARRAYS[name]
    expected = [tc.key_of("x"), NULL_KEY, tc.key_of("a longer text than a view holds")]
    assert keys(stored(tmp_path, array, "arrow"), STRING) == expected
    assert keys([{"a": array.slice(1), "y": np.zeros(2)}], STRING) == expected[1:]
    if name not in ("json", "runs"):
        lists = pa.ListArray.from_arrays([0, 1, 1, 3], array)
        assert keys(stored(tmp_path, lists, "arrow"), {**STRING, "hotness": "ragged"}) == expected


def test_rows_without_a_label_are_left_out_whatever_the_types() -> None:
    """Arrow cannot filter views or runs."""
    schema = plain_schema(label="y", label_null="drop", features=(tc.Feature(**STRING),))
    data = [{"a": TEXT_ARRAYS[name], "y": np.array([0, np.nan, 1])} for name in ("string view", "runs")]
    found = [row["a"] for b in Source(find_inputs(data), schema).batches() for row in b.columns.to_pylist()]
    assert found == ["x", "a longer text than a view holds"] * 2


def test_bytes_of_a_fixed_size_have_the_keys_of_their_bytes(tmp_path: Path) -> None:
    """Like other bytes."""
    array = pa.array([b"ab", None, b"cd"], pa.binary(2))
    for suffix in ("parquet", "arrow"):
        assert keys(stored(tmp_path, array, suffix), STRING) == [tc.key_of("ab"), NULL_KEY, tc.key_of("cd")]
    lists = pa.array([[b"ab"], [], [b"cd", None]], pa.list_(pa.binary(2)))
    expected = [tc.key_of("ab"), tc.key_of("cd"), NULL_KEY]
    assert keys(stored(tmp_path, lists, "arrow"), {**STRING, "hotness": "ragged"}) == expected


UUIDS = pa.array([IDS[0].bytes, None, IDS[1].bytes], pa.uuid())


@pytest.mark.parametrize(
    "array",
    [
        UUIDS,
        pa.DictionaryArray.from_arrays([0, None, 1], UUIDS.take(pa.array([0, 2]))),
        pa.ListArray.from_arrays([0, 2, 3, 3], UUIDS),
    ],
)
def test_uuids_are_texts_in_their_canonical_spelling(tmp_path: Path, array: Any) -> None:
    """Lower case with hyphens: the keys of the same ids as text."""
    feature = {**STRING, "hotness": "ragged"} if pa.types.is_list(array.type) else STRING
    expected = [tc.key_of(TEXTS[0]), NULL_KEY, tc.key_of(TEXTS[1])]
    assert keys([{"a": array, "y": np.zeros(len(array))}], feature) == expected
    if not pa.types.is_dictionary(array.type):  # Arrow writes such a dictionary but cannot read it
        assert keys(stored(tmp_path, array, "parquet"), feature) == expected


def test_uuids_of_duckdb_and_of_python_are_texts(tmp_path: Path) -> None:
    """DuckDB writes them to Parquet as UUIDs; Python's objects become Arrow UUIDs."""
    path, values = tmp_path / "x.parquet", ", ".join(f"('{text.upper()}'::UUID, 0.0)" for text in TEXTS)
    duckdb.sql(f"COPY (SELECT * FROM (VALUES {values}) t(a, y)) TO '{path}' (FORMAT parquet)")
    expected = [tc.key_of(text) for text in TEXTS]
    assert keys(path, STRING) == expected
    assert keys([{"a": IDS, "y": [0.0, 0.0]}], STRING) == expected


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (decimals(5, 7, None), [5, 7, NULL_KEY]),
        (decimals(-5, 7, precision=9, make=pa.decimal32), [-5, 7]),
        (decimals(-5, None, precision=18, make=pa.decimal64), [-5, NULL_KEY]),
        (decimals(5, 7, precision=76, make=pa.decimal256), [5, 7]),
        (decimals("5.00", "-7.00", scale=2), [5, -7]),
        (decimals(500, 700, precision=5, scale=-2), [500, 700]),
        (decimals((1 << 63) + 5, 7), [5 - (1 << 63), 7]),
        (decimals((1 << 64) - 5, -7, None), [-5, -7, NULL_KEY]),
        (pa.DictionaryArray.from_arrays([1, 0, None], decimals(5, 7)), [7, 5, NULL_KEY]),
        (pa.ListArray.from_arrays([0, 2, 3], decimals(5, None, 7)), [5, NULL_KEY, 7]),
    ],
)
def test_whole_decimals_are_integer_keys(tmp_path: Path, array: Any, expected: list[int]) -> None:
    """Any precision and scale; beyond int64 they keep their 64 bits, like uint64."""
    feature = {**EMBED, "hotness": "ragged"} if pa.types.is_list(array.type) else EMBED
    assert keys(stored(tmp_path, array, "arrow"), feature) == expected


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (decimals(5, "1.50", scale=2), r"x\.parquet, row 1, column 'a': it is 1\.50, but keys are integers"),
        (decimals(5, 1 << 64), r"row 1, column 'a': it is 18446744073709551616, but keys"),
        (decimals(-1 - (1 << 63), 5), r"row 0, column 'a': it is -9223372036854775809, but keys"),
        (pa.ListArray.from_arrays([0, 2, 2, 3], decimals(5, 6, "0.5", scale=1)), r"row 2, column 'a': it is 0\.5"),
    ],
)
def test_a_decimal_that_is_no_integer_of_64_bits_is_named_by_its_row(tmp_path: Path, array: Any, message: str) -> None:
    """Values are not rounded or truncated."""
    feature = {**EMBED, "hotness": "ragged"} if pa.types.is_list(array.type) else EMBED
    with pytest.raises(SourceError, match=message):
        keys(stored(tmp_path, array, "parquet"), feature)


def test_decimals_are_labels_dense_features_weights_and_buckets(tmp_path: Path) -> None:
    """And a column of decimals may be a label and a key; a dictionary of numbers is numbers."""
    data = pa.table({
        "y": decimals("0.25", 1, scale=2), "d": decimals("1.5", 2, scale=1), "a": decimals(5, 7),
        "w": decimals("0.5", 2, scale=1), "c": pa.array([0.5, 2.5]).dictionary_encode(),
    })  # fmt: skip
    pq.write_table(data, tmp_path / "x.parquet")
    features = tc.Feature(name="a", weights="w"), tc.Feature(name="b", columns=("d",), buckets=(1.6,))
    dense = tuple(tc.DenseFeature(column=name) for name in "dac")
    schema = plain_schema(features=features, dense=dense, tables=())
    (found,) = (encode(schema, b) for b in Source(find_inputs(tmp_path / "x.parquet"), schema).batches())
    assert found.label.tolist() == [0.25, 1.0]
    assert found.dense.tolist() == [[1.5, 5.0, 0.5], [2.0, 7.0, 2.5]]
    assert [found.features["a"].weights.tolist(), found.features["b"].keys.tolist()] == [[0.5, 2.0], [0, 1]]


@pytest.mark.parametrize("kind", [pa.list_view(pa.int64()), pa.large_list_view(pa.int32()), pa.list_(pa.int16(), 2)])
def test_lists_of_every_kind_are_lists(kind: Any) -> None:
    """With nulls and empty lists."""
    rows = [[1, 2], None, [3, 4]]
    feature = {**EMBED, "hotness": "ragged"}
    assert keys([{"a": pa.array(rows, kind), "y": np.zeros(3)}], feature) == [1, 2, NULL_KEY, 3, 4]


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_lists_of_dictionaries_are_read_over_row_groups(tmp_path: Path, kind: Any) -> None:
    """From any row on. Each row group has its own dictionary."""
    rows = [[f"a{row % 7}"] * (row % 3) for row in range(200)]
    array = pa.array(rows, kind(pa.dictionary(pa.int16(), pa.string())))
    pq.write_table(pa.table({"a": array, "y": np.zeros(len(rows))}), tmp_path / "x.parquet", row_group_size=30)
    feature = tc.Feature(name="a", key="string", hotness="ragged")
    schema = plain_schema(features=(feature,))
    source = Source(find_inputs(tmp_path / "x.parquet"), schema)
    for first in (0, 29, 100, 200):
        found = [key for b in source.batches(0, first) for key in encode(schema, b).features["a"].keys]
        assert found == [tc.key_of(text) for row in rows[first:] for text in row]


LISTS: dict[str, Any] = {"hotness": "ragged"}


@pytest.mark.parametrize(
    ("array", "feature", "message"),
    [
        (pa.array(["1"]), {}, r'it holds string, but feature .a. needs integers: set key = "string" for the feature'),
        (UUIDS[:1], {}, r'extension<arrow\.uuid>, but .* integers: set key = "string" for the feature'),
        (pa.array([1]), {"key": "string"}, r'it holds int64, but .* strings: set key = "integer"'),
        (decimals(1), {"key": "string"}, r'it holds decimal128\(38, 0\), but .* strings: set key = "integer"'),
        (pa.array([1.5]), {"key": "string"}, "it holds double, but .* strings: cast the column to strings"),
        (pa.array([True]), {}, "it holds bool, but .* integers: cast the column to integers"),
        (pa.array([1, 0], pa.bool8())[:1], {}, "bool8>?, but .* integers: cast the column to integers"),
        (pa.array([1], pa.timestamp("us")), {}, r"it holds timestamp\[us\], but .*: cast the column to integers"),
        (pa.array([1], pa.duration("s")), {"key": "string"}, r"it holds duration\[s\], but .*: cast the column"),
        (pa.array([[1]]), {}, r'it holds list<.*>, but .*: set hotness = "ragged" for the feature'),
        (pa.array([["x"]]), {}, r"it holds list<.*>, but .*: put one value in each row"),
        (pa.array([1]), LISTS, r'it holds int64, but .* needs lists of integers: set hotness = "one_hot"'),
        (pa.array([[[1]]]), LISTS, r"it holds list<.*list<.*: put the values to read in a separate column"),
        (pa.array([{"id": 1}]), {}, r"it holds struct<id: int64>, but .*: put the values to read in a separate column"),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), LISTS, r"it holds map<string, int64>, but .*: "),
    ],
)  # fmt: skip
def test_a_refusal_names_the_type_and_the_change(
    tmp_path: Path, array: Any, feature: dict[str, Any], message: str
) -> None:
    """The schema line that would accept the column, or a way to convert the column."""
    schema = plain_schema(features=(tc.Feature(name="a", **feature),))
    with pytest.raises(SourceError, match=r"x\.arrow, column 'a': .*" + message) as caught:
        extracted(stored(tmp_path, array, "arrow"), schema, tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_a_column_of_nothing_but_nulls_has_any_type(tmp_path: Path) -> None:
    """Some tools write them for columns that are all null."""
    assert keys(stored(tmp_path, pa.nulls(2), "arrow"), STRING) == [NULL_KEY] * 2


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("name", ["u.id", "u.id.x", "u."])
def test_a_column_is_not_the_field_of_a_struct_that_is_spelled_like_it(tmp_path: Path, suffix: str, name: str) -> None:
    """A file can have both."""
    table = pa.table({name: [1, 2], "u": pa.array([{"id": 8}, {"id": 9}]), "y": [0.0, 1.0]})
    path = tmp_path / f"x.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    schema = plain_schema(label="y", features=(tc.Feature(name=name),), tables=())
    found = [encode(schema, b).features[name].keys.tolist() for b in Source(find_inputs(path), schema).batches()]
    assert found == [[1, 2]]
