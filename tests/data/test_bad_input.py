"""Bad input: one message that names file, row and column, and no dataset."""

from __future__ import annotations

import gzip
import os
import resource
import shutil
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import tiercache as tc
from tests.data.cases import extracted, plain_schema, table
from tests.files import files_of
from tiercache.errors import ExtractionError, SourceError
from tiercache.schema import Schema

if TYPE_CHECKING:
    from pathlib import Path

GOOD: dict[str, Any] = {"a": [1, 2, 3], "y": [0.0, 1.0, 0.0]}


def refuse(tmp_path: Path, data: Any, message: str, schema: Schema | None = None) -> None:
    """Expect a SourceError in one line, and no finished dataset."""
    with pytest.raises(SourceError, match=message) as caught:
        extracted(data, schema or plain_schema(), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out" / "dataset.json").exists()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"aa": [1], "y": [0.0]}, r"x.parquet has no column 'a' \(did you mean 'aa'\?\), which feature 'a' needs"),
        ({"a": [1], "label": [0.0]}, "x.parquet has no column 'y', which the label needs"),
        ({"a": ["1"], "y": [0.0]}, "x.parquet, column 'a': it holds string, but feature 'a' needs integers"),
        ({"a": [1.5], "y": [0.0]}, "x.parquet, row 0, column 'a': it is 1.5, but feature 'a' needs integers"),
        ({"a": [[1]], "y": [0.0]}, "column 'a': it holds list<.*>, but feature 'a' needs integers"),
        ({"a": [1], "y": ["yes"]}, "column 'y': it holds string, but the label needs numbers"),
        ({**GOOD, "y": [0.0, float("nan"), 1.0]}, "x.parquet, row 1, column 'y': it is nan, but a label"),
        ({**GOOD, "a": [1, 2, None]}, "x.parquet, row 2, column 'a': it is null, an error for feature 'a'"),
        ({**GOOD, "a": [1, -(1 << 63), 5]}, "x.parquet, row 1, column 'a': key -9223372036854775808 is reserved"),
    ],
)
def test_a_bad_file_is_named_with_row_and_column(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    """The message gives the value found and the values expected."""
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    refuse(tmp_path, tmp_path / "x.parquet", message)


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (tc.Feature(name="a", key="string"), "column 'a': it holds int64, but feature 'a' needs strings"),
        (tc.Feature(name="a", hotness="ragged"), "column 'a': it holds int64, but feature 'a' needs lists of integers"),
        (tc.Feature(name="x", columns=("a", "y")), "column 'y': it holds double, but feature 'x' needs integers or"),
        (tc.Feature(name="a", weights="w"), "has no column 'w', which the weights of feature 'a' needs"),
    ],
)
def test_a_column_of_the_wrong_type_is_named_with_its_feature(
    tmp_path: Path, feature: tc.Feature, message: str
) -> None:
    """Types are checked before anything is read."""
    pq.write_table(pa.table(GOOD), tmp_path / "x.parquet")
    schema = Schema(features=(feature,), tables=(table(feature.table),))
    refuse(tmp_path, tmp_path / "x.parquet", message, schema)


def test_every_file_is_checked_before_the_first_is_read(tmp_path: Path) -> None:
    """A missing column in the last file is found before reading: not even a work folder is created."""
    pq.write_table(pa.table(GOOD), tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "b.parquet")
    refuse(tmp_path, str(tmp_path / "*.parquet"), "b.parquet has no column 'y'")
    assert not (tmp_path / "out").exists()


def test_rows_are_counted_in_their_own_file(tmp_path: Path) -> None:
    """The row of an error is 0-based in its file, wherever its batch began."""
    pq.write_table(pa.table({"a": range(50_000), "y": [0.0] * 50_000}), tmp_path / "a.parquet", row_group_size=1000)
    data = {"a": [None if i == 43_210 else i for i in range(50_000)], "y": [0.0] * 50_000}
    pq.write_table(pa.table(data), tmp_path / "b.parquet", row_group_size=1000)
    refuse(tmp_path, tmp_path, "b.parquet, row 43210, column 'a'")


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "x.csv.gz", "x.tsv.zst"])
def test_truncated_and_empty_files_are_named(tmp_path: Path, name: str) -> None:
    """A truncated or empty file is an error, not fewer samples."""
    path = tmp_path / name
    if name == "x.parquet":
        pq.write_table(pa.table(GOOD), path)
    elif name == "x.arrow":
        with pa.ipc.new_file(str(path), pa.table(GOOD).schema) as writer:
            writer.write_table(pa.table(GOOD))
    else:
        text = b"a,y\n" + b"".join(b"%d,0\n" % i for i in range(100_000))
        text = text.replace(b",", b"\t") if "tsv" in name else text
        path.write_bytes(gzip.compress(text) if "gz" in name else pa.Codec("zstd").compress(text, asbytes=True))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refuse(tmp_path, path, f"{name} cannot be read .*damaged, truncated")
    path.write_bytes(b"")
    refuse(tmp_path, path, rf"{name} is empty \(0 bytes\)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,y\n1,0\nx7,0\n", r"x.csv, row 1, column 'a' cannot be read .*invalid value 'x7'"),
        ("a,y\n1,0\n2\n", r"x.csv, row 1: it has 1 field, but the first line has 2"),
        ("a,y\n1,0\n,0\n", r"x.csv, row 1, column 'a': it is null"),
        ("a,y\n1,0\n2,\n", r"x.csv, row 1, column 'y': it is null, but a label"),
        ("a,y\n1,0\n2,nan\n", r"x.csv, row 1, column 'y': it is (null|nan), but a label"),
        ("a,y,a\n1,0,2\n", r"x.csv has 2 columns 'a': name each column once"),
        ("a,z\n1,0\n", r"x.csv has no column 'y'"),
        ("a , y\n1,0\n", r"x.csv has no column 'y': its first line has ' y': remove the spaces"),
        ('"a", "y"\n1,0\n', "x.csv has no column 'y': its first line has ' \"y\"': remove the spaces"),
        ("a\0b,y\n1,0\n", r"x.csv begins with zero bytes between others"),
        ("a,y\n1,0\n1.5,0\n", r"x.csv, row 1, column 'a': it is 1.5, but feature 'a' needs integers"),
    ],
)
def test_a_bad_line_of_text_is_named(tmp_path: Path, text: str, message: str) -> None:
    """Rows of text files are counted from 0 after the header."""
    (tmp_path / "x.csv").write_text(text)
    refuse(tmp_path, tmp_path / "x.csv", message)


@pytest.mark.parametrize("where", ["x.parquet/out", "x.parquet/a/b", "n" * 300, "a/" + "n" * 300, "loop/out"])
def test_a_place_that_cannot_be_made_is_named(tmp_path: Path, where: str) -> None:
    """Below a file, with too long a name, through a link to itself."""
    pq.write_table(pa.table(GOOD), tmp_path / "x.parquet")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ExtractionError, match="is not writable") as caught:
        extracted(tmp_path / "x.parquet", plain_schema(), tmp_path / where)
    assert str(tmp_path / where) in str(caught.value)


def test_an_empty_name_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty shell variable does not mean the current folder."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table(GOOD), "x.parquet")
    refuse(tmp_path, "", "'' is not a file name")


def test_bytes_that_are_no_text_are_one_sentence(tmp_path: Path) -> None:
    """Arrow's threads must not call Python for them, which would also print a traceback."""
    (tmp_path / "x.csv").write_bytes(b"a,y\n1,0\n2\xe4\n3,0\n")
    refuse(tmp_path, tmp_path / "x.csv", "x.csv, row 1: it has 1 field, but the first line has 2")


def test_data_without_rows_is_refused(tmp_path: Path) -> None:
    """Some files may have no rows, but not all of them."""
    empty = pa.table({"a": pa.array([], pa.int64()), "y": pa.array([], pa.float64())})
    pq.write_table(empty, tmp_path / "a.parquet")
    refuse(tmp_path, tmp_path / "a.parquet", "no row was found in .*/a.parquet: pass files with data")
    pq.write_table(pa.table(GOOD), tmp_path / "b.parquet")
    assert extracted(tmp_path / "*.parquet", plain_schema(), tmp_path / "two", split_by="file").samples == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("none-*.parquet", "no file matches '.*none-.*parquet'"),
        ("nothing.csv", "no file matches"),
        ([], "no files were given"),
        ("notes.txt", "notes.txt has no known suffix: .arrow"),
        ("x.parquet.gz", "x.parquet.gz has no known suffix"),
        ("texts", "the folder .*texts has no files of a known suffix"),
        ("pipe.csv", "pipe.csv is not a regular file"),
        ("a\0b", "'.*a.x00b' is not a file name"),
    ],
)
def test_files_that_are_not_there_or_unknown_are_named(tmp_path: Path, data: Any, message: str) -> None:
    """The message contains the given path."""
    (tmp_path / "texts").mkdir()
    os.mkfifo(tmp_path / "pipe.csv")
    for name in ("notes.txt", "x.parquet.gz", "texts/a.txt"):
        (tmp_path / name).write_text("x")
    refuse(tmp_path, [] if data == [] else str(tmp_path / data), message)


def test_a_file_given_twice_is_refused(tmp_path: Path) -> None:
    """Overlapping patterns would count samples twice, and so would links to the same files; other links are read."""
    (tmp_path / "days" / "1").mkdir(parents=True)
    (tmp_path / "linked").mkdir()
    pq.write_table(pa.table(GOOD), tmp_path / "days" / "1" / "x.parquet")
    (tmp_path / "linked" / "days").symlink_to(tmp_path / "days")
    assert extracted(tmp_path / "linked", plain_schema(), tmp_path / "out").samples == 3
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "days" / "again").symlink_to(tmp_path / "days" / "1")
    refuse(tmp_path, tmp_path / "linked", "x.parquet is listed twice")
    pq.write_table(pa.table(GOOD), tmp_path / "x.parquet")
    refuse(tmp_path, [str(tmp_path / "*.parquet"), tmp_path / "x.parquet"], "x.parquet is listed twice")


def test_a_bad_value_leaves_the_closed_passes(tmp_path: Path) -> None:
    """Passes before the bad row stay closed, but a repaired file counts as a different file."""
    path = tmp_path / "x.parquet"
    data = {"a": [None if i == 99_000 else i for i in range(100_000)], "y": [0.0] * 100_000}
    call: dict[str, Any] = {"split_by": "rows=20000", "batch_multiple": 1000}
    pq.write_table(pa.table(data), path)
    with pytest.raises(SourceError, match="row 99000"):
        extracted(path, plain_schema(), tmp_path / "out", **call)
    kept = sorted(name for name in files_of(tmp_path / "out") if name.startswith("pass-"))
    assert kept == [f"pass-0000{i}.safetensors" for i in range(4)]
    with pytest.raises(ValueError, match="is unfinished"):
        tc.PassDataset.open(tmp_path / "out")
    pq.write_table(pa.table({**data, "a": range(100_000)}), path)
    with pytest.raises(ValueError, match=r"an extraction of other data .*delete this one to start over"):
        extracted(path, plain_schema(), tmp_path / "out", **call)


@pytest.mark.parametrize(
    ("changes", "columns", "message"),
    [
        (
            {"tables": (table("a", 8),)},
            GOOD,
            r"a row of table 'a' took 44 bytes .* now takes 60, because of its dim, "
            "dtype",
        ),
        (
            {"dense": (tc.DenseFeature(column="b"),)},
            GOOD,
            r"\(the schema now has different columns, features or tables\)",
        ),
        ({}, {**GOOD, "a": [4, 5, 6], "b": [0.0, 0.0, 1.0]}, r"add files .* with append=True \(--append\)"),
    ],
)
def test_another_extraction_into_a_finished_dataset_says_what_differs(
    tmp_path: Path, changes: dict[str, Any], columns: dict[str, Any], message: str
) -> None:
    """In the terms of the schema and of Python's arguments; the dataset stays."""
    path = tmp_path / "x.parquet"
    schema = {"tables": (table("a", 4),)}
    pq.write_table(pa.table({**GOOD, "b": [0.0, 1.0, 0.0]}), path)
    dataset = extracted(path, plain_schema(**schema), tmp_path / "out")
    if columns is not GOOD:
        pq.write_table(pa.table(columns), path)
    with pytest.raises(ExtractionError, match=message):
        extracted(path, plain_schema(**schema | changes), tmp_path / "out")
    assert tc.PassDataset.open(tmp_path / "out").digest == dataset.digest


def test_a_disk_that_fills_is_a_sentence_and_the_same_call_goes_on(tmp_path: Path) -> None:
    """The kernel refuses further writes, as on a full disk; closed passes stay."""
    n = 40_000
    pq.write_table(pa.table({"a": list(range(n)), "y": [0.0] * n}), tmp_path / "x.parquet")
    how: dict[str, Any] = {"split_by": f"rows={n // 4}", "batch_multiple": 100}
    extracted(tmp_path / "x.parquet", plain_schema(), tmp_path / "whole", **how)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    try:
        with pytest.raises(ExtractionError, match=r"out has no space left \(.*\): free some space there") as caught:
            extracted(tmp_path / "x.parquet", plain_schema(), tmp_path / "out", **how)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    extracted(tmp_path / "x.parquet", plain_schema(), tmp_path / "out", **how)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        (None, "no passes were given"),
        ([None], "sub-dataset 0 is NoneType: pass a mapping from tables to their keys"),
        (
            [{"a": None}],
            "the keys of table 'a' in sub-dataset 0 are None: pass an array of integers, or an iterable of",
        ),
        ([{"a": 5}], "the keys of table 'a' in sub-dataset 0 are 5: pass an array of integers"),
        ([{"a": torch.empty(2, dtype=torch.int64, device="meta")}], "keys are a sparse tensor, or one without values"),
        ([{"a": torch.eye(2, dtype=torch.int64).to_sparse()}], "keys are a sparse tensor, or one without values"),
    ],
)
def test_what_are_no_key_sets_is_a_sentence(tmp_path: Path, passes: Any, message: str) -> None:
    """None instead of keys, and tensors without readable values."""
    with pytest.raises(ValueError, match=message):
        tc.write_key_sets(tmp_path / "out", plain_schema().tables, passes)
