"""Keys: integers unchanged, strings and crosses by their hash, nulls by the feature's rule."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.data.cases import table
from tiercache.data.encode import encode
from tiercache.data.inputs import InputFile
from tiercache.data.raw_batch import NULL_KEY, OOV_KEY, RawBatch
from tiercache.data.source import SourceBatch
from tiercache.errors import SourceError
from tiercache.schema import Schema
from tiercache.store.bits import xxh64

FILE = InputFile(path=Path("data.parquet"), format="parquet", delimiter="", compression=None, size=1, mtime_ns=1)
NOT_UTF8 = pa.array([b"\xff"]).cast(pa.string(), safe=False)


def encoded(columns: dict[str, Any], *features: tc.Feature, **more: Any) -> RawBatch:
    """Encode columns that begin at row 1000 of a file."""
    schema = Schema(features=features, tables=tuple({f.table: table(f.table) for f in features}.values()), **more)
    arrays = [a if isinstance(a, pa.Array) else pa.array(a) for a in columns.values()]
    return encode(schema, SourceBatch(FILE, 0, 1000, pa.record_batch(arrays, names=list(columns))))


def word(value: int | str) -> bytes:
    """Return the 8 bytes that a value has in a cross."""
    number = xxh64(value.encode()) if isinstance(value, str) else value % (1 << 64)
    return number.to_bytes(8, "little")


def signed(number: int) -> int:
    """Return 64 bits as a key."""
    return number - (1 << 64) if number >> 63 else number


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64()])
def test_integers_of_any_width_are_keys(kind: Any) -> None:
    """The value is the key."""
    assert encoded({"a": pa.array([3, 0, 100], kind)}, tc.Feature(name="a")).features["a"].keys.tolist() == [3, 0, 100]


def test_unsigned_integers_keep_their_64_bits() -> None:
    """uint64 above the largest int64 wraps to the int64 of the same bits."""
    keys = encoded({"a": pa.array([(1 << 64) - 1, (1 << 63) + 2, 5], pa.uint64())}, tc.Feature(name="a"))
    assert keys.features["a"].keys.tolist() == [-1, -(1 << 63) + 2, 5]


@given(st.lists(st.text(max_size=50), min_size=1, max_size=20), st.integers(0, 5))
@settings(deadline=None, max_examples=15)
def test_strings_are_hashed_the_same_in_every_arrow_type(texts: list[str], skip: int) -> None:
    """The key is XXH64 of the UTF-8 bytes, for strings, large strings, dictionaries and slices."""
    texts = [t.encode("utf-8", "ignore").decode() for t in texts]
    wanted = [signed(xxh64(t.encode())) for t in texts][skip:]
    plain = pa.array(texts, pa.string())
    for array in (plain, plain.cast(pa.large_string()), plain.dictionary_encode(), plain.cast(pa.binary())):
        keys = encoded({"s": array.slice(skip)}, tc.Feature(name="s", key="string")).features["s"].keys
        assert keys.tolist() == wanted


@given(st.lists(st.tuples(st.integers(-(1 << 62), 1 << 62), st.text(max_size=9), st.integers(0, 255)), min_size=1))
@settings(deadline=None, max_examples=15)
def test_crosses_hash_the_words_of_their_columns(rows: list[tuple[int, str, int]]) -> None:
    """The key is XXH64 over each column's 8 bytes: an integer's value, a string's hash."""
    rows = [(i, t.encode("utf-8", "ignore").decode(), b) for i, t, b in rows]
    first, second, third = zip(*rows, strict=True)
    columns = {"i": pa.array(first, pa.int64()), "t": pa.array(second, pa.string()), "b": pa.array(third, pa.uint8())}
    keys = encoded(columns, tc.Feature(name="x", columns=("t", "i", "b"))).features["x"].keys
    assert keys.tolist() == [signed(xxh64(word(t) + word(i) + word(b))) for i, t, b in rows]


def test_a_hash_never_is_a_reserved_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash that hits a reserved key is moved by 2; no known string has one, so the hash is replaced here."""
    hashes = np.array([1 << 63, (1 << 63) + 1, (1 << 63) + 2, 7], np.uint64)
    monkeypatch.setattr("tiercache.data.encode.xxh64_strings", lambda *_: hashes.copy())
    keys = encoded({"s": ["a", "b", "c", "d"]}, tc.Feature(name="s", key="string")).features["s"].keys
    assert keys.tolist() == [OOV_KEY + 2, NULL_KEY + 2, OOV_KEY + 2, 7]


def test_null_has_its_own_row_where_the_schema_says_so() -> None:
    """Null integers, strings, dictionary entries and crosses with a null part become the null key."""
    columns = {
        "a": pa.array([1, None], pa.int32()), "s": ["x", None], "d": pa.array([None, "y"]).dictionary_encode(),
        "n": pa.array([None, None], pa.null()),
    }  # fmt: skip
    features = [tc.Feature(name=n, key="string" if n in "sd" else "integer", null="embed") for n in "asdn"]
    batch = encoded(columns, *features, tc.Feature(name="x", columns=("a", "s"), null="embed"))
    is_null = {name: (entry.keys == NULL_KEY).tolist() for name, entry in batch.features.items()}
    assert is_null == {"a": [False, True], "s": [False, True], "d": [True, False], "n": [True] * 2, "x": [False, True]}


def test_a_null_inside_a_dictionary_is_null() -> None:
    """A dictionary may hold null as one of its values."""
    array = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int8()), pa.array(["x", None]))
    keys = encoded({"d": array}, tc.Feature(name="d", key="string", null="embed")).features["d"].keys
    assert keys.tolist() == [signed(xxh64(b"x")), NULL_KEY, signed(xxh64(b"x"))]


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.uint16()), pa.list_(pa.int64(), 2)])
def test_lists_keep_their_order_and_slices(kind: Any) -> None:
    """Fixed and ragged features read every Arrow list type, sliced anywhere."""
    array = pa.array([[9, 9], [1, 2], [3, 4]], kind).slice(1)
    for hotness, length in (("ragged", None), ("multi_hot", 2)):
        entry = encoded({"l": array}, tc.Feature(name="l", hotness=hotness, length=length)).features["l"]  # type: ignore[arg-type]
        assert entry.keys.tolist() == [1, 2, 3, 4]
        assert entry.offsets is not None
        assert entry.offsets.tolist() == [0, 2, 4]


def test_ragged_lists_may_be_empty_and_null_lists_are_null_rows() -> None:
    """An empty list has no keys; a null list has one null key (as many as its length if that is fixed)."""
    columns = {
        "r": pa.array([[1], [], None, [2, None]], pa.list_(pa.int64())),
        "w": pa.array([[0.5], [], None, [1.5, 2.5]], pa.list_(pa.float64())),
        "f": pa.array([[1, 2], None, [3, 4], [5, 6]], pa.list_(pa.int64(), 2)),
        "t": pa.array([["a"], [], None, ["b"]], pa.list_(pa.string())),
    }
    batch = encoded(
        columns,
        tc.Feature(name="r", hotness="ragged", null="embed", weights="w"),
        tc.Feature(name="f", hotness="multi_hot", length=2, null="embed"),
        tc.Feature(name="t", hotness="ragged", key="string", null="embed"),
    )
    ragged, fixed, texts = batch.features["r"], batch.features["f"], batch.features["t"]
    assert ragged.keys.tolist() == [1, NULL_KEY, 2, NULL_KEY]
    assert ragged.offsets is not None
    assert ragged.offsets.tolist() == [0, 1, 1, 2, 4]
    assert ragged.weights is not None
    assert ragged.weights.tolist() == [0.5, 1.0, 1.5, 2.5]
    assert fixed.keys.tolist() == [1, 2, NULL_KEY, NULL_KEY, 3, 4, 5, 6]
    assert texts.keys.tolist() == [signed(xxh64(b"a")), NULL_KEY, signed(xxh64(b"b"))]


def test_hexadecimal_text_is_its_number() -> None:
    """Up to 64 bits, in either case, also in lists and dictionaries."""
    texts, keys = ["0", "68fd1e64", "FFffFFffFFffFFff", "a"], [0, 0x68FD1E64, -1, 10]
    for array in (pa.array(texts), pa.array(texts).dictionary_encode(), pa.array(["x", *texts])[1:]):
        assert encoded({"h": array}, tc.Feature(name="h", key="hex")).features["h"].keys.tolist() == keys
    lists = encoded({"h": [["a", "b"], []]}, tc.Feature(name="h", key="hex", hotness="ragged")).features["h"]
    assert lists.keys.tolist() == [10, 11]


def test_a_number_falls_into_a_bucket() -> None:
    """The key is the number of boundaries less than or equal to the number; NaN and null have their own row."""
    feature = tc.Feature(name="x", buckets=(-1.5, 0, 10), null="embed")
    columns: dict[str, Any] = {"x": [-2.0, -1.5, -0.1, 0.0, 9.9, 10.0, 1e300, float("-inf"), float("nan"), None]}
    keys = encoded(columns, feature).features["x"].keys.tolist()
    assert keys == [0, 1, 1, 2, 2, 3, 3, 0, NULL_KEY, NULL_KEY]
    assert encoded({"x": [9, 10]}, feature).features["x"].keys.tolist() == [2, 3]


@pytest.mark.parametrize(("kind", "low", "high"), [("int64", -(1 << 60), 1 << 60), ("uint64", 0, 1 << 63)])
def test_an_integer_beyond_2_to_53_falls_into_its_bucket(kind: str, low: int, high: int) -> None:
    """Times in nanoseconds are that large. Rounded to a float, some would be past a boundary."""
    feature = tc.Feature(name="x", buckets=(-1e30, float(low), 0.5, float(high), 1e30), null="embed")
    values = pa.array([low, low + 1, high - 1, high, None], pa.type_for_alias(kind))
    keys = encoded({"x": values}, feature).features["x"].keys.tolist()
    bounds = [Fraction(bound) for bound in feature.buckets]
    assert keys == [*(sum(bound <= one for bound in bounds) for one in (low, low + 1, high - 1, high)), NULL_KEY]
    assert encoded({"x": pa.array([-128, 127], pa.int8())}, feature).features["x"].keys.tolist() == [
        sum(bound <= one for bound in bounds) for one in (-128, 127)
    ]


def test_keys_are_hashed_to_a_bounded_range() -> None:
    """XXH64 modulo the number of buckets: of strings, of crosses and of the 8 bytes of integers; null is outside."""
    columns: dict[str, Any] = {"i": [5, -5, None], "s": ["x", None, "z"]}
    features = (
        tc.Feature(name="i", num_buckets=100, null="embed"),
        tc.Feature(name="s", key="string", num_buckets=100, null="embed"),
        tc.Feature(name="c", columns=("i", "s"), num_buckets=7, null="embed"),
    )
    found = {name: entry.keys.tolist() for name, entry in encoded(columns, *features).features.items()}
    assert found == {
        "i": [xxh64(word(5)) % 100, xxh64(word(-5)) % 100, NULL_KEY],
        "s": [xxh64(b"x") % 100, NULL_KEY, xxh64(b"z") % 100],
        "c": [xxh64(word(5) + word("x")) % 7, NULL_KEY, NULL_KEY],
    }


def test_a_longer_list_keeps_its_last_keys() -> None:
    """And their weights; shorter lists stay as they are."""
    columns = {"l": [[1, 2, 3, 4], [], [5], [6, 7, 8]], "w": [[0.1, 0.2, 0.3, 0.4], [], [0.5], [0.6, 0.7, 0.8]]}
    entry = encoded(columns, tc.Feature(name="l", hotness="ragged", max_length=2, weights="w")).features["l"]
    assert entry.keys.tolist() == [3, 4, 5, 7, 8]
    assert entry.offsets is not None
    assert entry.offsets.tolist() == [0, 2, 2, 3, 5]
    assert entry.weights is not None
    assert entry.weights.tolist() == np.array([0.3, 0.4, 0.5, 0.7, 0.8], np.float32).tolist()


def test_dense_features_may_be_logarithms() -> None:
    """log(1 + x), with negative values as 0; null becomes a number first."""
    dense = (tc.DenseFeature(column="d", null=1.0, transform="log"),)
    batch = encoded({"a": [1, 2, 3, 4], "d": [0.0, -5.0, 6.5, None]}, tc.Feature(name="a"), dense=dense)
    np.testing.assert_allclose(batch.dense[:, 0], np.log([1, 1, 7.5, 2]), rtol=1e-6)


def test_labels_and_dense_features_become_float32() -> None:
    """Bools, integers, decimals and floats are read; null and NaN become the number that the schema gives."""
    columns = {
        "a": [1, 2, 3],
        "y": [True, False, True],
        "i": pa.array([1, None, 3], pa.int16()),
        "f": [0.1, float("nan"), None],
        "m": pa.array([1, 2, 3]).cast(pa.decimal128(21, 2)),
    }
    dense = (tc.DenseFeature(column="i", null=-1.0), tc.DenseFeature(column="f", null=0.0), tc.DenseFeature(column="m"))
    batch = encoded(columns, tc.Feature(name="a"), label="y", dense=dense)
    assert batch.label is not None
    assert batch.label.tolist() == [1.0, 0.0, 1.0]
    np.testing.assert_array_equal(batch.dense, np.array([[1, 0.1, 1], [-1, 0, 2], [3, 0, 3]], np.float32))


INTEGERS = tc.Feature(name="a")
RAGGED = tc.Feature(name="l", hotness="ragged")
WEIGHTED = tc.Feature(name="l", hotness="ragged", weights="w")
LISTS = pa.list_(pa.int64())


@pytest.mark.parametrize(
    ("columns", "feature", "message"),
    [
        ({"a": [1, None]}, INTEGERS, "row 1001, column 'a': it is null, an error for feature 'a'"),
        ({"a": [1, 2, OOV_KEY]}, INTEGERS, "row 1002, column 'a': key -9223372036854775808 is reserved"),
        ({"a": [NULL_KEY]}, INTEGERS, "row 1000, column 'a': key -9223372036854775807 is reserved"),
        ({"a": pa.array([1 << 63], pa.uint64())}, INTEGERS, "key -9223372036854775808 is reserved"),
        ({"a": ["x", None]}, tc.Feature(name="a", key="string"), "row 1001, column 'a': it is null"),
        ({"a": [1, 2], "b": ["x", None]}, tc.Feature(name="x", columns=("a", "b")), "1001, column 'b': it is null"),
        ({"a": [1.0, 2.5]}, INTEGERS, "row 1001, column 'a': it is 2.5, but feature 'a' needs integers"),
        ({"a": [[1.0], [2.0, 3.5]]}, tc.Feature(name="a", hotness="ragged"), "row 1001, column 'a': it is 3.5"),
        ({"a": [2.0**53]}, INTEGERS, r"row 1000, column 'a': it is 9007199254740992.0, .*only below 2\^53"),
        ({"a": ["f", "0x1"]}, tc.Feature(name="a", key="hex"), "row 1001, .*: it is '0x1', but .* 1 to 16 hex"),
        ({"a": ["f", ""]}, tc.Feature(name="a", key="hex"), "row 1001, column 'a': it is '', but"),
        ({"a": ["1" * 17]}, tc.Feature(name="a", key="hex"), "row 1000, column 'a': it is '1{17}', but"),
        ({"a": NOT_UTF8}, tc.Feature(name="a", key="hex"), r"row 1000, column 'a': it is '\\+xff', but"),
        ({"a": [1.0, None]}, tc.Feature(name="a", buckets=(0,)), "row 1001, column 'a': it is null"),
        ({"a": [1, 2], "y": [1.0, float("nan")]}, INTEGERS, "row 1001, column 'y': it is nan"),
        ({"a": [1, 2], "y": [1.0, None]}, INTEGERS, "row 1001, column 'y': it is null, but a label"),
        ({"a": [1, 2], "y": [1.0, 1e300]}, INTEGERS, "row 1001, column 'y': it is 1e[+]300"),
        ({"a": [1], "d": [float("nan")]}, INTEGERS, "column 'd': it is nan, but a dense"),
        ({"a": [1], "e": [float("inf")]}, INTEGERS, "column 'e': it is inf, but a dense"),
        ({"l": pa.array([[1], [], [5], [2, None]], LISTS)}, RAGGED, "row 1003, column 'l': it is null"),
        ({"l": pa.array([[1], None], LISTS)}, RAGGED, "row 1001, column 'l': it is null"),
        ({"l": pa.array([[], [5], [1, OOV_KEY]], LISTS)}, RAGGED, "row 1002, column 'l': key -9223372036854775808 is"),
        (
            {"l": pa.array([[1, 2], [3]], LISTS)}, tc.Feature(name="l", hotness="multi_hot", length=2),
            "row 1001, column 'l': it has 1 keys, but feature 'l' has length = 2",
        ),
        (
            {"l": pa.array([[1, 2], [3]], LISTS), "w": [[0.5, 1.0], []]}, WEIGHTED,
            "row 1001, column 'w': it has 0 weights for the 1 keys of feature 'l'",
        ),
        (
            {"l": pa.array([[1, 2], [3]], LISTS), "w": [[0.5, float("nan")], [1.0]]}, WEIGHTED,
            "row 1000, column 'w': it is nan, but a weight",
        ),
    ],
)  # fmt: skip
def test_a_bad_value_names_file_row_and_column(columns: dict[str, Any], feature: tc.Feature, message: str) -> None:
    """Rows are counted from 0 in their file, regardless of the batch; ``e`` has a number for null."""
    dense = (tc.DenseFeature(column="d"), tc.DenseFeature(column="e", null=0.0))
    label = "y" if "y" in columns else None
    with pytest.raises(SourceError, match=message) as caught:
        encoded(columns, feature, label=label, dense=tuple(one for one in dense if one.column in columns))
    assert str(caught.value).startswith("data.parquet, row 10")
