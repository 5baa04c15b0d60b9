"""Rows that are not as they should be: left out, filled, counted, and never in the way of a cursor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiercache as tc
from tests.data.cases import plain_schema
from tests.files import files_of
from tiercache.data import text_reader
from tiercache.data.extract import ExtractionProgress, extract
from tiercache.data.inputs import find_inputs
from tiercache.data.source import BadRows, Source
from tiercache.errors import SourceError
from tiercache.schema import CsvFormat, Schema

if TYPE_CHECKING:
    from pathlib import Path

RAGGED = "a,y,b\n1,0,x\n2,1\n\n3,1,z\n4,0,x,9\n5\n6,1,y\n"
"""Rows 1 and 4 have too few fields, row 3 too many."""


def schema(bad_rows: str, **changes: Any) -> Schema:
    """Return a schema of a, b and the label y."""
    features = (tc.Feature(name="a"), tc.Feature(name="b", key="string", null="embed"))
    csv = CsvFormat(bad_rows=bad_rows)  # type: ignore[arg-type]
    return plain_schema(**{"features": features, "csv": csv, "tables": (), **changes})


def read(source: Source, file_index: int = 0, row: int = 0, batch_bytes: int = 1 << 20) -> list[tuple[Any, ...]]:
    """Return (file, cursor, row that an error would name, values) of every row."""
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
    """Rows keep the number that they have in the file; the cursor counts those that are kept."""
    (tmp_path / "x.csv").write_text(RAGGED)
    source = Source(find_inputs(tmp_path), schema(bad_rows))
    assert read(source) == [(0, cursor, *row) for cursor, row in enumerate(rows)]
    assert source.bad_rows == counts


def test_an_error_names_the_first_bad_row(tmp_path: Path) -> None:
    """The row, its fields, and what decides about it."""
    (tmp_path / "x.csv").write_text(RAGGED)
    with pytest.raises(
        SourceError, match=r'x.csv, row 1: it has 2 fields, but the first line has 3: .* "skip" or "pad"'
    ):
        Source(find_inputs(tmp_path), schema("error"))


@pytest.mark.parametrize("bad_rows", ["skip", "pad"])
@pytest.mark.parametrize("label_null", ["error", "drop"])
def test_reading_goes_on_behind_any_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad_rows: str, label_null: str
) -> None:
    """Whatever is left out before or behind it, in files of many blocks, with floats among the integers."""
    monkeypatch.setattr(text_reader, "_BLOCK_BYTES", 512)
    random = np.random.default_rng(0)
    for name in "pq":
        lines = ["a,y,b"]
        for i in range(1000):
            label = "" if label_null == "drop" and random.random() < 0.2 else "1"
            number = f"{i}.0" if i > 400 and random.random() < 0.1 else str(i)
            lines.append([f"{number},{label},s{i}", f"{number},1", f"{i},1,2,3"][random.choice(3, p=[0.9, 0.06, 0.04])])
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    spec = schema(bad_rows, label_null=label_null)
    whole = read(Source(find_inputs(tmp_path), spec))
    assert [a for _, _, _, a, *_ in whole] == [row for _, _, row, *_ in whole]
    for at in [0, 1, 399, 400, 401, 700, len(whole) - 1]:
        file_index, row = whole[at][:2]
        assert read(Source(find_inputs(tmp_path), spec), file_index, row) == whole[at:]


@pytest.mark.parametrize("name", ["x.parquet", "x.csv"])
def test_rows_without_a_label_are_dropped_and_counted(tmp_path: Path, name: str) -> None:
    """Null and NaN; the rows of errors stay those of the file, and batches end anywhere."""
    random = np.random.default_rng(1)
    labels = [[0.0, 1.0, None, float("nan")][i] for i in random.choice(4, 5000)]
    kept = [i for i, label in enumerate(labels) if label in {0.0, 1.0}]
    if name == "x.csv":
        text = "\n".join(f"{i},{'' if label is None else label},s" for i, label in enumerate(labels))
        (tmp_path / name).write_text(f"a,y,b\n{text}\n")
    else:
        data = {"a": range(5000), "y": pa.array(labels, pa.float64()), "b": ["s"] * 5000}
        pq.write_table(pa.table(data), tmp_path / name, row_group_size=611)
    source = Source(find_inputs(tmp_path), schema("error", label_null="drop"))
    whole = read(source, batch_bytes=4096)
    assert [row[1:4] for row in whole] == [(cursor, i, i) for cursor, i in enumerate(kept)]
    assert source.bad_rows == BadRows(unlabeled=5000 - len(kept))
    for at in (1, 300, len(whole) - 1):
        assert read(source, 0, at) == whole[at:]


def test_the_extraction_says_how_many_rows_were_bad(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the line that stays."""
    (tmp_path / "x.csv").write_text(RAGGED)
    found = extract(tmp_path / "x.csv", schema("pad", label_null="drop"), tmp_path / "out", device_budget="1GiB")
    assert found.samples == 4
    assert "1 row skipped, 2 rows padded, 1 row dropped without a label" in capsys.readouterr().err


def test_a_stopped_extraction_goes_on_among_bad_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the row behind the last closed pass, to the same bits and the same counts of its file."""
    monkeypatch.setattr(text_reader, "_BLOCK_BYTES", 1 << 10)
    lines = [f"{i},{'' if i % 7 == 0 else 1},s{i % 50}"[: None if i % 5 else -4] for i in range(20_000)]
    (tmp_path / "x.csv").write_text("a,y,b\n" + "\n".join(lines))
    how: dict[str, Any] = {"device_budget": "1GiB", "split_by": "rows=1000", "batch_multiple": 100}
    spec = schema("pad", label_null="drop")

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
    """What pandas writes for nullable integers, in text and in Parquet; large ones are not rounded silently."""
    (tmp_path / "x.csv").write_text("a,y,b\n1,0,x\n5.0,1,y\n-3.0,1,\n")
    spec = schema("error")
    expected = extract(tmp_path / "x.csv", spec, tmp_path / "csv", device_budget="1GiB", progress=False)
    data = {"a": [1.0, 5.0, -3.0], "y": [0, 1, 1], "b": ["x", "y", None]}
    pq.write_table(pa.table(data), tmp_path / "x.parquet")
    found = extract(tmp_path / "x.parquet", spec, tmp_path / "parquet", device_budget="1GiB", progress=False)
    assert sorted(expected.passes[0].keys("a").tolist()) == [-3, 1, 5]
    assert found.passes[0].keys("a").tolist() == expected.passes[0].keys("a").tolist()
    (tmp_path / "x.csv").write_text(f"a,y,b\n{2**53 + 1},0,x\n5.0,1,y\n")
    with pytest.raises(SourceError, match=r"row 0, column 'a': it is 9007199254740992.0, .* only below 2\^53"):
        extract(tmp_path / "x.csv", spec, tmp_path / "large", device_budget="1GiB", progress=False)


def test_first_rows_are_checked_before_anything_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad first row is an error within a second, not after half a minute of compiling; nothing is written."""
    (tmp_path / "x.csv").write_text("a,y,b\n1,0,x\n,1,y\n")
    monkeypatch.setattr("tiercache.data.extract.is_cached", lambda: False)
    monkeypatch.setattr("tiercache.data.extract.prepare", lambda: pytest.fail("kernels were compiled first"))
    monkeypatch.setattr("tiercache.data.encode.xxh64_strings", lambda *_: pytest.fail("a kernel was called"))
    with pytest.raises(SourceError, match=r"x.csv, row 1, column 'a': it is null"):
        extract(tmp_path / "x.csv", schema("error"), tmp_path / "out", device_budget="1GiB", progress=False)
    assert not (tmp_path / "out").exists()


def test_lists_stand_in_text_behind_a_separator(tmp_path: Path) -> None:
    """Of integers, strings and weights; an empty field is an empty list, and a bad value is named with its row."""
    (tmp_path / "x.csv").write_text('y,h,w,t\n1,3 4,0.5 1,a b\n0,,,\n2,1,1\n1, 5.0 ,2,"c"\n')
    spec = Schema(
        label="y",
        features=(
            tc.Feature(name="h", hotness="ragged", weights="w"),
            tc.Feature(name="t", hotness="ragged", key="string"),
        ),
        csv=CsvFormat(list_separator=" ", bad_rows="skip"),
    )
    (batch,) = Source(find_inputs(tmp_path), spec).batches()
    assert batch.columns.to_pydict() == {
        "y": [1.0, 0.0, 1.0],
        "h": [[3.0, 4.0], [], [5.0]],
        "w": [[0.5, 1.0], [], [2.0]],
        "t": [["a", "b"], [], ["c"]],
    }
    (tmp_path / "x.csv").write_text("y,h,w,t\n2,1,1\n1,3,1,a\n1,3 x,1 1,a\n")
    with pytest.raises(SourceError, match=r"x.csv, row 2, column 'h': 'x' in its list is no number"):
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
    """By its row in the file, in whole rows and in those that were padded."""
    (tmp_path / "x.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(SourceError, match=message):
        list(Source(find_inputs(tmp_path), schema("pad")).batches())
