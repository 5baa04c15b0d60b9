"""Sources: every format gives the same rows, from any row on; bad rows are dropped, filled, counted or named."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

import tiercache as tc
from tests.data.cases import extracted, plain_schema, table
from tests.files import files_of
from tiercache.data import text_reader
from tiercache.data.extract import ExtractionProgress, extract
from tiercache.data.inputs import find_inputs
from tiercache.data.source import BadRows, Source
from tiercache.errors import SourceError
from tiercache.schema import CsvFormat, Schema, SourceFormat

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 5000
FORMATS = ["parquet", "arrow", "arrows", "csv", "tsv", "csv.gz", "tsv.zst"]


def schema(**changes: Any) -> Schema:
    """Return a schema that reads y, a, s and the cross of a and t."""
    text = tc.Feature(name="s", key="string", table="a", null="embed")
    cross = tc.Feature(name="cross", columns=("a", "t"), table="a", null="embed")
    features = tc.Feature(name="a"), text, cross
    return plain_schema(**{"features": features, "csv": CsvFormat(quote='"'), **changes})


def rows(num_rows: int = ROWS, first: int = 0) -> pa.Table:
    """Return rows with nulls, quotes, newlines and an unused column."""
    numbers = range(first, first + num_rows)
    return pa.table(
        {
            "unused": [f"u{i}" for i in numbers],
            "s": [None if i % 11 == 0 else f'x"{i % 97},\n' if i % 5 == 0 else f"v{i}" for i in numbers],
            "a": [i * 7 - 100 for i in numbers],
            "t": [None if i % 13 == 0 else f"t{i % 3}" for i in numbers],
            "y": [float(i % 2) for i in numbers],
        }
    )


def write(path: Path, data: pa.Table) -> Path:
    """Write a table in the format of the suffix."""
    name = path.name
    if name.endswith("parquet"):
        pq.write_table(data, path, row_group_size=611)
    elif name.endswith(("arrow", "arrows")):
        new = pa.ipc.new_file if name.endswith("arrow") else pa.ipc.new_stream
        with new(str(path), data.schema) as writer:
            writer.write_table(data, max_chunksize=901)
    else:
        sink = pa.BufferOutputStream()
        pacsv.write_csv(data, sink, pacsv.WriteOptions(delimiter="\t" if "tsv" in name else ","))
        text = sink.getvalue().to_pybytes()
        if name.endswith("gz"):
            text = gzip.compress(text)
        elif name.endswith("zst"):
            text = pa.Codec("zstd").compress(text, asbytes=True)
        path.write_bytes(text)
    return path


def read(paths: list[Path], file_index: int = 0, row: int = 0, batch_bytes: int = 4096) -> list[Any]:
    """Return (file, row in the file, values) of every row of a source."""
    source = Source(find_inputs(paths), schema())
    out = []
    for batch in source.batches(file_index, row, batch_bytes=batch_bytes):
        part = [batch.columns.column(name).to_pylist() for name in ("y", "a", "s", "t")]
        out += [(batch.file_index, batch.first_row + i, *values) for i, values in enumerate(zip(*part, strict=True))]
    assert source.done_bytes == source.total_bytes
    return out


def expected(data: list[pa.Table]) -> list[Any]:
    """Return what ``read`` should give."""
    out = []
    for index, one in enumerate(data):
        columns = [one[name].to_pylist() for name in ("y", "a", "s", "t")]
        out += [(index, i, *values) for i, values in enumerate(zip(*columns, strict=True))]
    return out


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_gives_the_same_rows_from_any_row_on(tmp_path: Path, suffix: str) -> None:
    """Values, nulls and row numbers are the same in all formats, and reading can begin anywhere."""
    data = [rows(), rows(300, first=ROWS)]
    paths = [write(tmp_path / f"part-{i}.{suffix}", one) for i, one in enumerate(data)]
    wanted = expected(data)
    assert read(paths) == wanted
    for file_index, row in ((0, 1), (0, 611), (0, 2000), (0, ROWS - 1), (0, ROWS), (1, 0), (1, 299)):
        assert read(paths, file_index, row) == [r for r in wanted if (r[0], r[1]) >= (file_index, row)]


def test_patterns_are_sorted_and_named_files_keep_their_order(tmp_path: Path) -> None:
    """A folder or pattern yields its files by name; individual files keep their order."""
    paths = [write(tmp_path / f"{name}.parquet", rows(1)) for name in "bca"]
    (tmp_path / "notes.txt").write_text("not data")
    assert [f.path.name for f in find_inputs(paths)] == ["b.parquet", "c.parquet", "a.parquet"]
    given: list[Any] = [str(tmp_path / "*.parquet"), tmp_path, [tmp_path / "a.parquet", str(tmp_path / "[bc].*")]]
    for data in given:
        assert [f.path.name for f in find_inputs(data)] == ["a.parquet", "b.parquet", "c.parquet"]


def test_text_without_a_header_has_numbered_columns(tmp_path: Path) -> None:
    """With header = false the first line is data and columns are f0, f1, ..."""
    path = tmp_path / "x.tsv"
    path.write_text("1\t5\tab\n0\t\tcd\n")
    features = tc.Feature(name="f1", null="embed", table="a"), tc.Feature(name="f2", key="string", table="a")
    spec = Schema(label="f0", features=features, tables=(table("a"),), csv=CsvFormat(header=False))
    (batch,) = Source(find_inputs(path), spec).batches()
    assert batch.columns.to_pydict() == {"f0": [1.0, 0.0], "f1": [5, None], "f2": ["ab", "cd"]}


def test_text_columns_of_crosses_have_the_type_that_the_schema_gives(tmp_path: Path) -> None:
    """A column that begins with digits is integers unless [csv] types says strings; then later letters are not an
    error.
    """
    path = tmp_path / "x.csv"
    path.write_text("y,a,s,t\n" + "1,1,s,10\n" * 3 + "0,2,s,N9\n")
    guessed = Source(find_inputs(path), schema())
    assert next(guessed.batches()).columns.column("t").to_pylist() == ["10", "10", "10", "N9"]
    path.write_text("y,a,s,t\n" + "1,1,s,10\n" * 300_000 + "0,2,s,N9\n")
    with pytest.raises(SourceError, match=r"x.csv, row 300000, column 't' cannot be read .*invalid value 'N9'"):
        list(Source(find_inputs(path), schema()).batches())
    typed = Source(find_inputs(path), schema(csv=CsvFormat(types={"t": "string"})))
    assert sum(batch.columns.num_rows for batch in typed.batches()) == 300_001


def test_a_column_of_a_cross_has_one_type_in_all_files(tmp_path: Path) -> None:
    """Integers and strings hash differently, so a mixture between files is refused."""
    one = write(tmp_path / "a.parquet", rows(5))
    other = write(tmp_path / "b.parquet", rows(5).set_column(3, "t", pa.array([1, 2, 3, 4, 5])))
    with pytest.raises(SourceError, match=r"b.parquet, column 't': it holds integers here and strings in .*a.parquet"):
        Source(find_inputs([one, other]), schema())


RAGGED = "a,y,b\n1,0,x\n2,1\n\n3,1,z\n4,0,x,9\n5\n6,1,y\n"
"""Rows 1 and 4 have too few fields, row 3 too many."""


def spec_of(bad_rows: str, **changes: Any) -> Schema:
    """Return a schema of a, b and the label y."""
    features = (tc.Feature(name="a"), tc.Feature(name="b", key="string", null="embed"))
    csv = CsvFormat(bad_rows=bad_rows)  # type: ignore[arg-type]
    return plain_schema(**{"features": features, "csv": csv, "tables": (), **changes})


def read_all(source: Source, file_index: int = 0, row: int = 0, batch_bytes: int = 1 << 20) -> list[tuple[Any, ...]]:
    """Return (file, cursor, row number for errors, values) of every row."""
    found = []
    for batch in source.batches(file_index, row, batch_bytes=batch_bytes):
        names = [str(batch.error(i, "a", "")).split("row ")[1].split(",")[0] for i in range(batch.columns.num_rows)]
        values = zip(*(batch.columns.column(name).to_pylist() for name in ("a", "y", "b")), strict=True)
        found += [
            (batch.file_index, batch.first_row + i, int(name), *one)
            for i, (name, one) in enumerate(zip(names, values, strict=True))
        ]
    return found


@pytest.mark.parametrize(
    ("bad_rows", "rows", "counts"),
    [
        ("skip", [(0, 1, 0.0, "x"), (2, 3, 1.0, "z"), (5, 6, 1.0, "y")], BadRows(skipped=3)),
        (
            "pad",
            [(0, 1, 0.0, "x"), (1, 2, 1.0, None), (2, 3, 1.0, "z"), (4, 5, None, None), (5, 6, 1.0, "y")],
            BadRows(skipped=1, padded=2),
        ),
    ],
)
def test_bad_rows_are_skipped_or_padded_and_counted(
    tmp_path: Path, bad_rows: str, rows: list[Any], counts: BadRows
) -> None:
    """Rows keep their number in the file; the cursor counts the kept ones."""
    (tmp_path / "x.csv").write_text(RAGGED)
    source = Source(find_inputs(tmp_path), spec_of(bad_rows))
    assert read_all(source) == [(0, cursor, *row) for cursor, row in enumerate(rows)]
    assert source.bad_rows == counts


def test_an_error_names_the_first_bad_row(tmp_path: Path) -> None:
    """The row, its fields, and the setting that decides."""
    (tmp_path / "x.csv").write_text(RAGGED)
    words = r'x.csv, row 1: it has 2 fields, but the first line has 3: .* "skip" or "pad"'
    with pytest.raises(SourceError, match=words):
        Source(find_inputs(tmp_path), spec_of("error"))
    with pytest.raises(SourceError, match=r"x.csv, row 0: it has 1 field, but Criteo's files have 40"):
        Source(find_inputs(tmp_path, "criteo"), Schema.of(None, "criteo"))
    text, source = tc.Feature(name="a", key="string"), SourceFormat(columns=("a",))
    named = Schema(features=(text,), source=source, csv=CsvFormat(header=False))
    (tmp_path / "x.csv").write_text("1,2\n")
    with pytest.raises(SourceError, match=r"x.csv, row 0: it has 2 fields, but \[source\] columns names 1"):
        Source(find_inputs(tmp_path), named)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bad_rows", ["skip", "pad"])
@pytest.mark.parametrize("label_null", ["error", "drop"])
def test_reading_goes_on_behind_any_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad_rows: str, label_null: str
) -> None:
    """With rows dropped before or after it, in files of many blocks, with floats among the integers."""
    monkeypatch.setattr(text_reader, "_BLOCK_BYTES", 512)
    random = np.random.default_rng(0)
    for name in "pq":
        lines = ["a,y,b"]
        for i in range(1000):
            label = "" if label_null == "drop" and random.random() < 0.2 else "1"
            number = f"{i}.0" if i > 400 and random.random() < 0.1 else str(i)
            lines.append([f"{number},{label},s{i}", f"{number},1", f"{i},1,2,3"][random.choice(3, p=[0.9, 0.06, 0.04])])
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    spec = spec_of(bad_rows, label_null=label_null)
    whole = read_all(Source(find_inputs(tmp_path), spec))
    assert [a for _, _, _, a, *_ in whole] == [row for _, _, row, *_ in whole]
    for at in [0, 1, 399, 400, 401, 700, len(whole) - 1]:
        file_index, row = whole[at][:2]
        assert read_all(Source(find_inputs(tmp_path), spec), file_index, row) == whole[at:]


@pytest.mark.parametrize("name", ["x.parquet", "x.csv"])
def test_rows_without_a_label_are_dropped_and_counted(tmp_path: Path, name: str) -> None:
    """Null and NaN; the rows of errors are those in the file, and batches end anywhere."""
    random = np.random.default_rng(1)
    labels = [[0.0, 1.0, None, float("nan")][i] for i in random.choice(4, 5000)]
    kept = [i for i, label in enumerate(labels) if label in {0.0, 1.0}]
    if name == "x.csv":
        text = "\n".join(f"{i},{'' if label is None else label},s" for i, label in enumerate(labels))
        (tmp_path / name).write_text(f"a,y,b\n{text}\n")
    else:
        data = {"a": range(5000), "y": pa.array(labels, pa.float64()), "b": ["s"] * 5000}
        pq.write_table(pa.table(data), tmp_path / name, row_group_size=611)
    source = Source(find_inputs(tmp_path), spec_of("error", label_null="drop"))
    whole = read_all(source, batch_bytes=4096)
    assert [row[1:4] for row in whole] == [(cursor, i, i) for cursor, i in enumerate(kept)]
    assert source.bad_rows == BadRows(unlabeled=5000 - len(kept))
    for at in (1, 300, len(whole) - 1):
        assert read_all(source, 0, at) == whole[at:]


def test_the_extraction_says_how_many_rows_were_bad(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the line that remains."""
    (tmp_path / "x.csv").write_text(RAGGED)
    found = extract(tmp_path / "x.csv", spec_of("pad", label_null="drop"), tmp_path / "out", device_budget="1GiB")
    assert found.samples == 4
    assert "1 row skipped, 2 rows padded, 1 row dropped without a label" in capsys.readouterr().err


def test_a_stopped_extraction_goes_on_among_bad_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the row after the last closed pass, to the same bits and the same counts of its file."""
    monkeypatch.setattr(text_reader, "_BLOCK_BYTES", 1 << 10)
    lines = [f"{i},{'' if i % 7 == 0 else 1},s{i % 50}"[: None if i % 5 else -4] for i in range(20_000)]
    (tmp_path / "x.csv").write_text("a,y,b\n" + "\n".join(lines))
    how: dict[str, Any] = {"device_budget": "1GiB", "split_by": "rows=1000", "batch_multiple": 100}
    spec = spec_of("pad", label_null="drop")

    def stop(progress: ExtractionProgress) -> None:
        if progress.passes == 7:
            raise KeyboardInterrupt

    extract(tmp_path / "x.csv", spec, tmp_path / "whole", **how)
    with pytest.raises(KeyboardInterrupt):
        extract(tmp_path / "x.csv", spec, tmp_path / "out", progress=stop, **how)
    assert (tmp_path / "out" / "unfinished").exists()
    extract(tmp_path / "x.csv", spec, tmp_path / "out", **how)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    first, second = (line.split("; ")[1] for line in capsys.readouterr().err.splitlines())
    assert first == second


def test_whole_numbers_may_be_written_as_floats(tmp_path: Path) -> None:
    """Nullable integers of pandas are written so, in text and in Parquet; large ones are not rounded silently."""
    (tmp_path / "x.csv").write_text("a,y,b\n1,0,x\n5.0,1,y\n-3.0,1,\n")
    spec = spec_of("error")
    expected = extracted(tmp_path / "x.csv", spec, tmp_path / "csv")
    data = {"a": [1.0, 5.0, -3.0], "y": [0, 1, 1], "b": ["x", "y", None]}
    pq.write_table(pa.table(data), tmp_path / "x.parquet")
    found = extracted(tmp_path / "x.parquet", spec, tmp_path / "parquet")
    assert sorted(expected.passes[0].keys("a").tolist()) == [-3, 1, 5]
    assert found.passes[0].keys("a").tolist() == expected.passes[0].keys("a").tolist()
    (tmp_path / "x.csv").write_text(f"a,y,b\n{2**53 + 1},0,x\n5.0,1,y\n")
    large = extracted(tmp_path / "x.csv", spec, tmp_path / "large")
    assert sorted(large.passes[0].keys("a").tolist()) == [5, 2**53 + 1]
    (tmp_path / "x.csv").write_text(f"a,y,b\n5,0,x\n{2**53}.0,1,y\n")
    with pytest.raises(SourceError, match=r"row 1, column 'a' cannot be read \(invalid value '9007199254740992.0'"):
        extracted(tmp_path / "x.csv", spec, tmp_path / "larger")


def test_first_rows_are_checked_before_anything_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad first row is an error within a second, before half a minute of compiling; nothing is written."""
    (tmp_path / "x.csv").write_text("a,y,b\n1,0,x\n,1,y\n")
    monkeypatch.setattr("tiercache.data.encode.xxh64_strings", lambda *_: pytest.fail("a kernel was called"))
    with pytest.raises(SourceError, match=r"x.csv, row 1, column 'a': it is null"):
        extracted(tmp_path / "x.csv", spec_of("error"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_lists_stand_in_text_behind_a_separator(tmp_path: Path) -> None:
    """Lists of integers, strings and weights; an empty field is an empty list, and a bad value is named with its
    row.
    """
    (tmp_path / "x.csv").write_text('y,h,w,t\n1,3 4,0.5 1,a b\n0,,,\n2,1,1\n1, 5.0 ,2,"c"\n')
    numbers, texts = (
        tc.Feature(name="h", hotness="ragged", weights="w"),
        tc.Feature(name="t", hotness="ragged", key="string"),
    )
    spec = Schema(label="y", features=(numbers, texts), csv=CsvFormat(list_separator=" ", bad_rows="skip"))
    (batch,) = Source(find_inputs(tmp_path), spec).batches()
    assert batch.columns.to_pydict() == {
        "y": [1.0, 0.0, 1.0], "h": [[3.0, 4.0], [], [5.0]], "w": [[0.5, 1.0], [], [2.0]],
        "t": [["a", "b"], [], ["c"]],
    }  # fmt: skip
    (tmp_path / "x.csv").write_text("y,h,w,t\n2,1,1\n1,3,1,a\n1,3 x,1 1,a\n")
    with pytest.raises(SourceError, match=r"x.csv, row 2, column 'h' cannot be read \(invalid value 'x'"):
        list(Source(find_inputs(tmp_path), spec).batches())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,y,b\n1,0,x\n2\n3,1,z\nx4,0,y\n", r"row 3, column 'a' cannot be read .*invalid value 'x4'"),
        ("a,y,b\n1,0,x\n2,1\nx3\n4,0,y\n", r"row 2, column 'a' cannot be read .*invalid value 'x3'"),
        ('a,y,b\n1,0,x\n"2\n3,0,y\n', "x.csv, row 1: a quote is not closed"),
        ("a,y,b\n1,0,x\n2,1,\xff\n", "row 1, column 'b' cannot be read .*invalid UTF8"),
        ("a,y,b\xff\n1,0,x\n", "x.csv cannot be read .*codec can't decode"),
    ],
)
def test_a_bad_value_among_bad_rows_is_named(tmp_path: Path, text: str, message: str) -> None:
    """By its row in the file, in complete rows and in padded ones."""
    (tmp_path / "x.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(SourceError, match=message):
        list(Source(find_inputs(tmp_path), spec_of("pad")).batches())
