"""Folders named ``name=value``: their values, and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiercache as tc
from tests.data.cases import extracted, plain_schema
from tiercache.data.encode import encode
from tiercache.data.inputs import find_inputs
from tiercache.data.raw_batch import NULL_KEY
from tiercache.data.source import Source
from tiercache.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

NULL = "__HIVE_DEFAULT_PARTITION__"
INTEGER = tc.Feature(name="p", null="embed")
STRING = tc.Feature(name="p", null="embed", key="string")


def place(root: Path, folder: str, **columns: Any) -> Path:
    """Write a file of two rows into a folder."""
    path = root / folder
    path.mkdir(parents=True)
    columns = {"a": [1, 2], "y": [0.0, 1.0]} | columns
    pq.write_table(pa.table({k: v for k, v in columns.items() if v is not None}), path / "x.parquet")
    return path


def keys(root: Path, feature: tc.Feature) -> list[int]:
    """Return the keys of a feature, in the order of the folders."""
    schema = plain_schema(features=(feature,), tables=())
    found = Source(find_inputs(root), schema).batches()
    return [int(key) for batch in found for key in encode(schema, batch).features[feature.name].keys]


@pytest.mark.parametrize("feature", [INTEGER, STRING])
@pytest.mark.parametrize("folder", [f"p={NULL}", "p="])
def test_hives_name_for_null_and_an_empty_value_are_null(tmp_path: Path, folder: str, feature: tc.Feature) -> None:
    """For keys of every type, next to folders that have values; an error unless the schema embeds null."""
    place(tmp_path, folder)
    place(tmp_path, "p=zz" if feature is STRING else "p=2")
    assert sorted(keys(tmp_path, feature)) == sorted(
        [NULL_KEY] * 2 + ([tc.key_of("zz")] * 2 if feature is STRING else [2] * 2)
    )
    with pytest.raises(SourceError, match="row 0, column 'p': it is null, an error for feature 'p'"):
        keys(tmp_path, tc.Feature(name="p", key=feature.key))


def test_null_is_null_for_buckets_crosses_numbers_and_cuts(tmp_path: Path) -> None:
    """Dense features fill it, crosses embed it, and a cut is made at its begin."""
    for value in ("1", NULL, "3"):
        place(tmp_path, f"p={value}")
    features = (
        tc.Feature(name="b", columns=("p",), buckets=(2,), null="embed"),
        tc.Feature(name="x", columns=("a", "p"), null="embed"),
    )
    schema = plain_schema(features=features, dense=(tc.DenseFeature(column="p", null=-1),), tables=())
    batches = [encode(schema, b) for b in Source(find_inputs(tmp_path), schema).batches()]
    assert [float(b.dense[0, 0]) for b in batches] == [1, 3, -1]
    assert [int(b.features["b"].keys[0]) for b in batches] == [0, 1, NULL_KEY]
    assert [bool((b.features["x"].keys == NULL_KEY).all()) for b in batches] == [False, False, True]
    made = extracted(tmp_path, plain_schema(), tmp_path / "out", split_by="column=p", batch_multiple=1)
    assert [p.samples for p in made] == [2, 2, 2]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("14857091259186476033", 14857091259186476033 - (1 << 64)),
        (str((1 << 64) - 1), -1),
        (str(1 << 63), NULL_KEY - 1),
        (str((1 << 63) - 1), (1 << 63) - 1),
        (str(NULL_KEY + 1), NULL_KEY + 1),
        ("007", 7),
        ("-0", 0),
        ("%37", 7),
    ],
)
def test_integers_keep_64_bits(tmp_path: Path, text: str, key: int) -> None:
    """Up to 2^64 - 1; like other columns of uint64 they can hit a reserved key."""
    place(tmp_path, f"p={text}")
    if key < NULL_KEY:
        with pytest.raises(SourceError, match="is reserved"):
            keys(tmp_path, INTEGER)
    else:
        assert keys(tmp_path, INTEGER) == [key, key]


@pytest.mark.parametrize(
    "text", [str(1 << 64), str(-(1 << 63) - 1), "x", "1.5", "+1", "1_0", " 1", "٣", "0x1", "9" * 200]
)
def test_a_value_that_is_no_integer_is_named(tmp_path: Path, text: str) -> None:
    """The error names file, column and the feature that needs it."""
    place(tmp_path, f"p={text}")
    with pytest.raises(
        SourceError, match=r"x\.parquet, column 'p': its folder says .*, but feature 'p' needs integers"
    ):
        keys(tmp_path, INTEGER)
    assert keys(tmp_path, STRING) == [tc.key_of(text)] * 2


@pytest.mark.parametrize(
    ("folder", "text"),
    [("p=de%2Fx", "de/x"), ("p=a%3Db", "a=b"), ("p=a=b", "a=b"), ("p=50%", "50%"),
     ("p=%E4%BD%A0", "你"), ("p=2024-01-01 00%3A00", "2024-01-01 00:00")],
)  # fmt: skip
def test_percent_encoded_values_are_decoded(tmp_path: Path, folder: str, text: str) -> None:
    """And names too; the first equals sign ends the name."""
    place(tmp_path, folder)
    assert keys(tmp_path, STRING) == [tc.key_of(text)] * 2


@pytest.mark.parametrize("folder", ["p=%E4", "p=a%FF", "p=%C3%28"])
def test_a_value_that_is_no_utf8_is_refused_if_it_is_used(tmp_path: Path, folder: str) -> None:
    """It is not replaced by other text."""
    place(tmp_path, folder)
    with pytest.raises(SourceError, match=r"column 'p': its folder says .* needs text in UTF-8: rename the folder"):
        keys(tmp_path, STRING)
    assert keys(tmp_path, tc.Feature(name="a")) == [1, 2]


@pytest.mark.parametrize(
    ("text", "number"),
    [("0.5", 0.5), ("-1e2", -100.0), ("7", 7.0), (".5", 0.5), ("true", 1.0), (str(1 << 70), 2.0**70)],
)
def test_numbers_of_folders_are_labels_and_dense_features(tmp_path: Path, text: str, number: float) -> None:
    """Bools are numbers, as in files."""
    place(tmp_path, f"p={text}")
    schema = plain_schema(label="p", dense=(tc.DenseFeature(column="p"),))
    (found,) = (encode(schema, b) for b in Source(find_inputs(tmp_path), schema).batches())
    assert [found.label.tolist(), found.dense.tolist()] == [[number] * 2, [[number]] * 2]


@pytest.mark.parametrize("text", ["x", "1,5", "inf?", "--1", "1e", "."])
def test_a_value_that_is_no_number_is_named(tmp_path: Path, text: str) -> None:
    """The error names the feature that needs it."""
    place(tmp_path, f"p={text}")
    with pytest.raises(SourceError, match=r"column 'p': its folder says .*, but the label needs numbers"):
        list(Source(find_inputs(tmp_path), plain_schema(label="p")).batches())


def test_two_folders_of_one_name_must_agree(tmp_path: Path) -> None:
    """If the column is read."""
    place(tmp_path, "p=1/q=2/p=1")
    assert keys(tmp_path, INTEGER) == [1, 1]
    place(tmp_path, "p=1/q=3/p=2")
    assert keys(tmp_path, tc.Feature(name="q")) == [2, 2, 3, 3]
    with pytest.raises(SourceError, match="is in several folders 'p' with different values"):
        keys(tmp_path, INTEGER)


@pytest.mark.parametrize(
    ("values", "text", "feature", "row"),
    [
        ([5, 5], "5", INTEGER, None),
        ([5, 6], "5", INTEGER, 1),
        ([5, None], "5", INTEGER, 1),
        ([5, 5], "x", INTEGER, 0),
        ([None, 5], NULL, INTEGER, 1),
        (np.array([44, 44], np.int8), "300", INTEGER, 0),
        (np.array([(1 << 64) - 1] * 2, np.uint64), str((1 << 64) - 1), INTEGER, None),
        (["de", "de"], "de", STRING, None),
        (["de", "at"], "de", STRING, 1),
        (pa.array(["de", "at"]).dictionary_encode(), "de", STRING, 1),
        (["007", "7"], "007", STRING, 1),
        (pa.array([b"de", b"\xff"]).cast(pa.string(), safe=False), "de", STRING, 1),
    ],
)
def test_a_column_that_the_file_has_too_must_agree_with_its_folder(
    tmp_path: Path, values: Any, text: str, feature: tc.Feature, row: int | None
) -> None:
    """Writers may repeat it; if the two values differ, one is wrong."""
    place(tmp_path, f"p={text}", p=values)
    if row is None:
        assert len(keys(tmp_path, feature)) == 2
    else:
        with pytest.raises(SourceError, match=rf"x\.parquet, row {row}, column 'p': it is .*, but its folder says"):
            keys(tmp_path, feature)
