"""Sources: every format gives the same rows, from any row on."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

import tiercache as tc
from tests.data.cases import table
from tiercache.data.inputs import find_inputs
from tiercache.data.source import Source
from tiercache.errors import SourceError
from tiercache.schema import CsvFormat, Schema

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 5000
FORMATS = ["parquet", "arrow", "arrows", "csv", "tsv", "csv.gz", "tsv.zst"]


def schema(**changes: Any) -> Schema:
    """Return a schema that reads y, a, s and the cross of a and t."""
    values: dict[str, Any] = {
        "label": "y",
        "features": (
            tc.Feature(name="a"),
            tc.Feature(name="s", key="string", table="a", null="embed"),
            tc.Feature(name="cross", columns=("a", "t"), table="a", null="embed"),
        ),
        "tables": (table("a"),),
    }
    return Schema(**{**values, **changes})


def rows(num_rows: int = ROWS, first: int = 0) -> pa.Table:
    """Return rows with nulls, quotes, newlines and a column that nobody reads."""
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
    """Write a table in the format that the suffix names."""
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
    """Return (file, row in the file, values) of every row that a source gives."""
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
    """A folder or pattern gives its files by name; files one by one come as they are given."""
    paths = [write(tmp_path / f"{name}.parquet", rows(1)) for name in "bca"]
    (tmp_path / "notes.txt").write_text("not data")
    assert [f.path.name for f in find_inputs(paths)] == ["b.parquet", "c.parquet", "a.parquet"]
    given: list[str | Path | list[str | Path]] = [
        str(tmp_path / "*.parquet"),
        tmp_path,
        [tmp_path / "a.parquet", str(tmp_path / "[bc].*")],
    ]
    for data in given:
        assert [f.path.name for f in find_inputs(data)] == ["a.parquet", "b.parquet", "c.parquet"]


def test_text_without_a_header_has_numbered_columns(tmp_path: Path) -> None:
    """With header = false the first line is data and columns are f0, f1, ..."""
    path = tmp_path / "x.tsv"
    path.write_text("1\t5\tab\n0\t\tcd\n")
    features = (
        tc.Feature(name="f1", null="embed", table="a"),
        tc.Feature(name="f2", key="string", table="a"),
    )
    spec = Schema(label="f0", features=features, tables=(table("a"),), csv=CsvFormat(header=False))
    (batch,) = Source(find_inputs(path), spec).batches()
    assert batch.columns.to_pydict() == {"f0": [1.0, 0.0], "f1": [5, None], "f2": ["ab", "cd"]}


def test_text_columns_of_crosses_have_the_type_that_the_schema_gives(tmp_path: Path) -> None:
    """A column that begins with digits is integers unless [csv] types says strings; then later letters are no error."""
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
