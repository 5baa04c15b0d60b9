"""Text files: one rule for nulls, empty fields, quotes, numbers and lists; delimiters; quotes that are characters."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import re
import zipfile
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.feather as pafeather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.data.cases import plain_schema
from tiercache.data.encode import encode
from tiercache.data.inputs import find_inputs
from tiercache.data.manifest import checksum_of
from tiercache.data.raw_batch import NULL_KEY
from tiercache.data.source import Source
from tiercache.data.text_fields import TextStream
from tiercache.data.text_reader import TextReader
from tiercache.errors import ExtractionError, SourceError
from tiercache.schema import CsvFormat, Schema

if TYPE_CHECKING:
    from pathlib import Path

WORDS = ("NA", "N/A", "NULL", "null", "NaN", "#N/A", r"\N")
LISTS = CsvFormat(list_separator="|")


def keys_of(path: Path, feature: tc.Feature, csv_format: CsvFormat | None = None, **source: Any) -> list[Any]:
    """Return the keys of each row of a file, a list of lists for a feature with lists."""
    schema = Schema(features=(feature,), csv=csv_format or CsvFormat(), **source)
    found = list[Any]()
    for batch in Source(find_inputs(path), schema).batches():
        raw = encode(schema, batch).features[feature.name]
        if raw.offsets is None:
            found += raw.keys.tolist()
        else:
            found += [part.tolist() for part in np.split(raw.keys, raw.offsets[1:-1])]
    return found


def written(tmp_path: Path, text: str, name: str = "x.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


def feature(key: str, **more: Any) -> tc.Feature:
    """Return a feature of column u with a key for null."""
    return tc.Feature(name="u", key=key, **{"null": "embed", **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["integer", "string", "hex"])
@pytest.mark.parametrize("word", ["", *WORDS])
def test_a_null_word_is_null_unless_it_is_the_quoted_text_of_a_string(tmp_path: Path, key: str, word: str) -> None:
    """Quotes matter for strings only: writers that quote everything also quote missing numbers."""
    path = written(tmp_path, f'u,y\n{word},0\n"{word}",1\n12,2\n')
    text = {"integer": 12, "string": tc.key_of("12"), "hex": 0x12}[key]
    quoted = tc.key_of(word) if key == "string" else NULL_KEY
    assert keys_of(path, feature(key)) == [NULL_KEY, quoted, text]
    with pytest.raises(SourceError, match=r"x.csv, row 0, column 'u': it is null, .*set null = \"embed\""):
        keys_of(path, feature(key, null="error"))


@pytest.mark.parametrize("word", ["", *WORDS])
def test_a_label_or_dense_column_follows_the_same_rule(tmp_path: Path, word: str) -> None:
    """A quoted null word is null in a column of numbers."""
    path = written(tmp_path, f'u,d,y\n1,{word},0\n2,"{word}",1\n3,"2.5","true"\n')
    dense = (tc.DenseFeature(column="d", null=-1.0),)
    schema = plain_schema(label="y", dense=dense, features=(tc.Feature(name="u"),), tables=())
    (batch,) = Source(find_inputs(path), schema).batches()
    raw = encode(schema, batch)
    assert raw.dense[:, 0].tolist() == [-1, -1, 2.5]
    assert raw.label is not None
    assert raw.label.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("field", "keys"),
    [
        ("", []), ('""', []), ("  ", []), ("3", [3]), ("3|4", [3, 4]), ("3|4|", [3, 4]), ('"3|4|"', [3, 4]),
        ("3||4", [3, None, 4]), ("|3", [None, 3]), ("3|NA", [3, None]), ('"3|NULL"', [3, None]), (" 3 | 4 ", [3, 4]),
        ("NA", [None]), (r"\N", [None]), ("3||", [3, None]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", ["integer", "string"])
def test_an_empty_field_is_an_empty_list_and_an_empty_element_is_null(
    tmp_path: Path, key: str, field: str, keys: list[int | None]
) -> None:
    """A trailing separator ends the last element; null words are null in lists of every type."""
    path = written(tmp_path, f"u,y\n1|2,0\n{field},1\n7,0\n")

    def key_of(value: int | None) -> int:
        return NULL_KEY if value is None else value if key == "integer" else tc.key_of(str(value))

    ragged = feature(key, hotness="ragged")
    assert keys_of(path, ragged, LISTS) == [[key_of(v) for v in row] for row in ([1, 2], keys, [7])]
    if None in keys:
        with pytest.raises(SourceError, match=r"x.csv, row 1, column 'u': it is null"):
            keys_of(path, feature(key, hotness="ragged", null="error"), LISTS)


def test_null_lists_among_padded_rows_and_beside_strings_are_told_from_empty_ones(tmp_path: Path) -> None:
    """In blocks that are parsed again for it, and in rows that lack fields."""
    lines = "".join("a,1|2\nb,\nNA,NA\n\"\",\"\"\nc\n" for _ in range(300))  # fmt: skip
    path = written(tmp_path, f"t,u\n{lines}")
    csv_format = CsvFormat(list_separator="|", bad_rows="pad")
    assert keys_of(path, feature("integer", hotness="ragged"), csv_format) == [[1, 2], [], [NULL_KEY], [], []] * 300
    text = tc.Feature(name="t", key="string", null="embed")
    assert keys_of(path, text, csv_format)[:5] == [
        tc.key_of("a"),
        tc.key_of("b"),
        NULL_KEY,
        tc.key_of(""),
        tc.key_of("c"),
    ]


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        (["14857091259186476033", "5"], [14857091259186476033 - 2**64, 5]),
        (["18446744073709551615", "0"], [-1, 0]),
        (["9223372036854775810", "9007199254740993", "5.0"], [2 - 2**63, 2**53 + 1, 5]),
        (["-9223372036854775806", "9223372036854775807"], [-(2**63) + 2, 2**63 - 1]),
        (["+5", "007", "-0", "1e3", " 8 ", '"9"'], [5, 7, 0, 1000, 8, 9]),
        (["1.0", "NA", "-3.0", ""], [1, NULL_KEY, -3, NULL_KEY]),
    ],
)
def test_integers_in_text_keep_all_their_bits(tmp_path: Path, values: list[str], keys: list[int]) -> None:
    """Up to 2^64, with whole floats, signs and quotes among them."""
    path = written(tmp_path, "u,y\n" + "".join(f"{value},0\n" for value in values))
    assert keys_of(path, feature("integer")) == keys
    lists = written(
        tmp_path, "u,y\n" + "".join(f"{value},0\n" for value in values if value.strip('" ') not in ("", "NA"))
    )
    assert keys_of(lists, feature("integer", hotness="ragged"), LISTS) == [[key] for key in keys if key != NULL_KEY]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("x7", "invalid value 'x7', expected a number"),
        ("18446744073709551616", "invalid value '18446744073709551616', expected an integer of 64 bits"),
        ("9007199254740992.0", "expected whole numbers written as floats only below 2"),
        ("1 000", "invalid value '1 000'"),
        ("1_000", "invalid value '1_000'"),
        ("5,0", "invalid value '5,0'"),
    ],
)
def test_text_that_is_no_integer_is_refused_by_row_and_column(tmp_path: Path, value: str, said: str) -> None:
    """The error suggests other settings; also in a list."""
    path = written(tmp_path, f'u,y\n1,0\n"{value}",1\n')
    with pytest.raises(SourceError, match=f"x.csv, row 1, column 'u' cannot be read .*{said}.*set key = \"string\""):
        keys_of(path, feature("integer"))
    with pytest.raises(SourceError, match=f"x.csv, row 1, column 'u' cannot be read .*{said}"):
        keys_of(path, feature("integer", hotness="ragged"), LISTS)
    taken = keys_of(path, feature("string"))
    assert taken == [tc.key_of("1"), tc.key_of(value)], "the advice works"


@pytest.mark.parametrize("rest", ["1,2", "1,2.0", "1,18446744073709551615", "1,2\n2", "1,2\n" * 400_000 + "1,2"])
@pytest.mark.parametrize("value", ["0x10", "0X1f", "0xFFFFFFFFFFFFFFFF", " 0x1 ", "-0x1", "0x", "0x" + "1" * 40])
def test_hexadecimal_integers_are_refused_whatever_else_is_in_the_column(tmp_path: Path, value: str, rest: str) -> None:
    """The parser takes some of them: 0x10 as 16, 0xFFFFFFFFFFFFFFFF as -1."""
    advice = 'expected an integer in decimal digits.*set key = "hex" for the feature and write the digits without 0x'
    padded = CsvFormat(bad_rows="pad")
    for row, text in ((0, f"y,u\n0,{value}\n{rest}\n"), (rest.count("\n") + 1, f"y,u\n{rest}\n0,{value}\n")):
        path = written(tmp_path, text)
        with pytest.raises(SourceError, match=f"x.csv, row {row}, column 'u' cannot be read .*{advice}"):
            keys_of(path, feature("integer"), padded)
    path = written(tmp_path, f"y,u\n0,1\n1,{value},\n")
    with pytest.raises(SourceError, match=f"x.csv, row 1, column 'u' cannot be read .*{advice}"):
        keys_of(path, feature("integer"), padded)
    with pytest.raises(SourceError, match=f"x.csv, row 1, column 'u' cannot be read .*{advice}"):
        keys_of(written(tmp_path, f"y,u\n0,1\n1,{value}|3\n"), feature("integer", hotness="ragged"), LISTS)


@settings(deadline=None, max_examples=300)
@given(parts=st.lists(st.sampled_from([b"0x", b"0X", b"0", b"x", b"a1", b",", b"g", b"1" * 9, b"f" * 14]), max_size=9),
       size=st.integers(1, 40))  # fmt: skip
def test_hexadecimal_numbers_are_found_across_reads(parts: list[bytes], size: int) -> None:
    """As a regular expression finds them in the whole text."""
    text = b"u," + b"".join(parts)
    stream = TextStream("x.csv", io.BytesIO(text), b",", b"")
    while stream.read(size):
        pass
    found = re.search(rb"(?<![0-9])0[xX][0-9a-fA-F]{1,16}(?![0-9a-fA-F])", text)
    assert stream.has_hex == (found is not None)


def test_hexadecimal_text_of_other_columns_changes_no_integers(tmp_path: Path) -> None:
    """Short and long, before and after plain rows, and across blocks."""
    rows = [f"{n},{text}" for n, text in enumerate(["plain", "0x10", "0x" + "ab" * 20, "10x10"] * 100_000)]
    path = written(tmp_path, "u,s\n" + "\n".join(rows) + "\n")
    assert keys_of(path, feature("integer")) == [*range(400_000)]
    kept = Schema(features=(feature("integer"),), keep=(tc.KeptColumn(column="k", dtype="int64"),))
    (batch,) = Source(find_inputs(written(tmp_path, "u,k\n1,5\n2,7\n")), kept).batches()
    assert encode(kept, batch).columns["k"].tolist() == [5, 7]
    with pytest.raises(SourceError, match=r"row 1, column 'k' cannot be read .*decimal digits"):
        [*Source(find_inputs(written(tmp_path, "u,k\n1,5\n2,0x7\n")), kept).batches()]


def test_a_column_of_negative_numbers_and_numbers_above_2_63_is_refused(tmp_path: Path) -> None:
    """In 64 bits, -1 and 2^64 - 1 are one key."""
    path = written(tmp_path, "u,y\n-1,0\n18446744073709551615,1\n")
    with pytest.raises(SourceError, match=r"row 1, column 'u' .*no integer above 2"):
        keys_of(path, feature("integer"))


@pytest.mark.parametrize(
    "printed", ["['a', 'b']", '["a", "b"]', "['a' 'b']", "[]", "[ ]", "[1, 2]", "[1 2 3]", "[-1.5]"]
)
def test_a_list_that_python_printed_is_refused(tmp_path: Path, printed: str) -> None:
    """Its brackets and quotes would be part of keys."""
    path = tmp_path / "x.csv"
    pd.DataFrame({"u": ["a,b", printed], "y": [0, 1]}).to_csv(path, index=False)
    with pytest.raises(SourceError, match=r"x.csv, row 1, column 'u' .*not a list as Python prints it"):
        keys_of(path, feature("string", hotness="ragged"), CsvFormat(list_separator=","))


def test_a_bracket_in_the_text_of_a_list_is_text(tmp_path: Path) -> None:
    """Unless the whole field is a printed list."""
    path = written(tmp_path, "u,y\n[a]|[b],0\n[x|y],1\n")
    found = keys_of(path, feature("string", hotness="ragged"), LISTS)
    assert found == [[tc.key_of("[a]"), tc.key_of("[b]")], [tc.key_of("[x"), tc.key_of("y]")]]


def test_null_words_of_the_schema_replace_the_usual_ones(tmp_path: Path) -> None:
    """Namibia's code is a string if the schema says so, and other words are null."""
    path = written(tmp_path, "u,y\nNA,0\n-,1\n,2\n")
    own = CsvFormat(null_words=("", "-"))
    assert keys_of(path, feature("string"), own) == [tc.key_of("NA"), NULL_KEY, NULL_KEY]


# -- quotes and delimiters -----------------------------------------------------------------------------------


def test_quotes_in_tab_separated_text_are_characters_unless_the_schema_says_so(tmp_path: Path) -> None:
    """Dumps of knowledge graphs contain such quotes."""
    path = written(tmp_path, 'u\ty\n"Oh\t0\n12" record\t1\n"No"\t2\n', "x.tsv")
    assert keys_of(path, feature("string")) == [tc.key_of(text) for text in ('"Oh', '12" record', '"No"')]
    quoted = written(tmp_path, 'u\ty\n"a\tb"\t0\n"c\nd"\t1\n', "q.tsv")
    assert keys_of(quoted, feature("string"), CsvFormat(quote='"')) == [tc.key_of("a\tb"), tc.key_of("c\nd")]
    with pytest.raises(SourceError, match=r"q.tsv, row 0: it has 3 fields, .*set quote = '\"' in \[csv\]"):
        keys_of(quoted, feature("string"))


@pytest.mark.parametrize("lines", [0, 1, 3, 60_000])
@pytest.mark.parametrize("end", ['"No,1', 'x,"y"z', '"a""b,1'])
def test_a_lone_quote_that_swallows_lines_is_refused(tmp_path: Path, lines: int, end: str) -> None:
    """Also across blocks of the parser; the error says where the field began."""
    text = "u,y\na,0\n" + '"Oh,0\n' + "b,1\n" * lines + f"{end}\nc,1\n"
    path = written(tmp_path, text)
    with pytest.raises(
        SourceError, match=r"x.csv, line 3: a quoted field continues to line .*set quote = \"\" in \[csv\]"
    ):
        keys_of(path, feature("string"))
    if '"z' not in end:
        found = keys_of(path, feature("string"), CsvFormat(quote=""))
        assert found[:2] == [tc.key_of("a"), tc.key_of('"Oh')]
        assert len(found) == lines + 4


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_text_that_a_csv_writer_quotes_is_never_refused(tmp_path: Path, data: st.DataObject) -> None:
    """Quotes, delimiters and line breaks within fields, in blocks of any size; also quotes within plain fields."""
    alphabet = st.sampled_from(["a", '"', ",", "\n", '""', '",', '\n"', " ", "é"])
    rows = data.draw(st.lists(st.lists(alphabet, max_size=6).map("".join), min_size=1, max_size=30))
    every = data.draw(st.booleans())
    sink = io.StringIO()
    writer = csv.writer(sink, quoting=csv.QUOTE_ALL if every else csv.QUOTE_MINIMAL, lineterminator="\n")
    writer.writerow(["u", "y"])
    writer.writerows([f"v{row}", 0] for row in rows)
    path = written(tmp_path, sink.getvalue())
    reads = data.draw(st.integers(1, 40))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiercache.data.text_reader._BLOCK_BYTES", max(reads, 400))
        found = keys_of(path, feature("string"))
    assert found == [tc.key_of(f"v{row}") for row in rows]


@pytest.mark.parametrize(
    ("delimiter", "quote"), [(";", '"'), ("|", '"'), (":", ""), (" ", ""), ("::", ""), ("||", ""), ("\t", "")]
)
def test_a_delimiter_of_the_schema_is_read_and_one_that_is_not_named_is_told(
    tmp_path: Path, delimiter: str, quote: str
) -> None:
    """With a header, without one, and with a delimiter of several characters."""
    text = delimiter.join("uvy") + "\n" + "".join(delimiter.join((f"k{i}", "x", "1")) + "\n" for i in range(2000))
    path = written(tmp_path, text)
    found = keys_of(path, feature("string"), CsvFormat(delimiter=delimiter, quote=quote))
    assert found == [tc.key_of(f"k{i}") for i in range(2000)]
    if delimiter != "||":
        with pytest.raises(
            SourceError, match=r"its first line is separated by .*: set delimiter = \".*\" .*in \[csv\]"
        ):
            keys_of(path, feature("string"))


def test_a_field_longer_than_a_block_of_the_parser_is_read(tmp_path: Path) -> None:
    """Blocks grow to the size of the row."""
    long = "|".join(map(str, range(400_000)))
    path = written(tmp_path, "u,y\n" + "1|2,0\n" * 10 + f"{long},1\n3,0\n")
    found = keys_of(path, feature("integer", hotness="ragged"), LISTS)
    assert found[9:] == [[1, 2], list(range(400_000)), [3]]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_text_in_another_encoding_is_named(tmp_path: Path, encoding: str) -> None:
    """Instead of columns that are missing."""
    (tmp_path / "x.csv").write_bytes("u,y\n1,0\n".encode(encoding))
    with pytest.raises(SourceError, match=r"x.csv is text in UTF-.*expected UTF-8: convert it"):
        keys_of(tmp_path / "x.csv", feature("integer"))


def test_a_file_of_one_line_needs_no_line_break(tmp_path: Path) -> None:
    """With a header, that one has no rows; without one, it has a row."""
    (tmp_path / "x.csv").write_text("f1,u,y")
    assert keys_of(tmp_path / "x.csv", feature("integer")) == []
    (tmp_path / "y.csv").write_text("7,1")
    schema = replace(plain_schema(features=(tc.Feature(name="u", columns=("f0",)),)), label="f1")
    source = Source(find_inputs(tmp_path / "y.csv"), replace(schema, csv=CsvFormat(header=False)))
    assert [batch.columns.column("f0").to_pylist() for batch in source.batches()] == [[7]]


@pytest.mark.parametrize("content", ["gzip", "zstd", "xz", "ZIP", "Parquet", "Arrow"])
def test_a_binary_file_that_is_named_like_text_is_no_text_in_utf_16(tmp_path: Path, content: str) -> None:
    path, table = tmp_path / "x.csv", pa.table({"u": [1], "y": [0.0]})
    if content == "Parquet":
        pq.write_table(table, path)
    elif content == "Arrow":
        pafeather.write_feather(table, path)
    elif content == "ZIP":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.csv", "u,y\n1,0\n")
    else:
        text = b"u,y\n1,0\n"
        zstd = pa.Codec("zstd").compress(text, asbytes=True)
        path.write_bytes({"gzip": gzip.compress(text), "xz": lzma.compress(text), "zstd": zstd}[content])
    with pytest.raises(SourceError, match=rf"x.csv is .*{content}.*, expected text in UTF-8: [ulds]"):
        keys_of(path, feature("integer"))


def test_rows_with_empty_fields_behind_the_last_are_padded_rows(tmp_path: Path) -> None:
    """The advice of the error works."""
    path = written(tmp_path, "u,y\n1,0,\n2,1,,\n3,0,x\n4,1\n")
    with pytest.raises(SourceError, match=r'row 0: it has 3 fields, .*bad_rows = "skip" or "pad"'):
        keys_of(path, feature("integer"))
    assert keys_of(path, feature("integer"), CsvFormat(bad_rows="pad")) == [1, 2, 4]


# -- what other programs write -------------------------------------------------------------------------------

ODD = (*WORDS, "", " ", '"', "a,b", "x\ny", "[]", "1", "-", "é")
TEXTS = st.one_of(st.none(), st.sampled_from(ODD), st.text("ab\",\n' |;", max_size=5))


def _separator(path: Path) -> str:
    return "\t" if path.suffix == ".tsv" else ","


def _pyarrow(table: pa.Table, path: Path) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        options = {} if path.suffix == ".csv" else {"quoting_style": "none", "quoting_header": "none"}
        pacsv.write_csv(table, path, pacsv.WriteOptions(delimiter=_separator(path), **options))


def _pandas(table: pa.Table, path: Path) -> None:
    frame = table.to_pandas()
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        quoting = csv.QUOTE_NONNUMERIC if path.suffix == ".csv" else csv.QUOTE_NONE
        frame.to_csv(path, index=False, quoting=quoting, na_rep="NULL", sep=_separator(path))


def _duckdb(table: pa.Table, path: Path) -> None:
    connection = duckdb.connect()
    connection.register("source", table)
    how = "FORMAT parquet"
    if path.suffix != ".parquet":
        how = f"FORMAT csv, HEADER, DELIMITER '{_separator(path)}'" + ", FORCE_QUOTE (u)" * (path.suffix == ".csv")
    connection.execute(f"COPY source TO '{path}' ({how})")


def _polars(table: pa.Table, path: Path) -> None:
    frame = pl.DataFrame(pl.from_arrow(table))
    if path.suffix == ".parquet":
        frame.write_parquet(path)
    else:
        style = "non_numeric" if path.suffix == ".csv" else "never"
        frame.write_csv(path, separator=_separator(path), quote_style=style)  # type: ignore[arg-type]


@pytest.mark.sampled(1)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(TEXTS, min_size=1, max_size=20))
@pytest.mark.parametrize("write", [_pyarrow, _duckdb, _polars])
def test_texts_that_other_programs_quote_come_back(tmp_path: Path, write: Any, texts: list[str | None]) -> None:
    """Null is null and the empty string is a string, or the file is refused."""
    path = tmp_path / "x.csv"
    write(pa.table({"u": pa.array(texts, pa.string()), "y": [0] * len(texts)}), path)
    assert keys_of(path, feature("string")) == [NULL_KEY if text is None else tc.key_of(text) for text in texts]


@pytest.mark.sampled(4)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(numbers=st.lists(st.one_of(st.none(), st.integers(-(2**63) + 2, 2**63 - 1)), min_size=1, max_size=20))
@pytest.mark.parametrize("write", [_pyarrow, _duckdb, _pandas, _polars])
@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet"])
def test_integers_that_other_programs_write_come_back(
    tmp_path: Path, write: Any, suffix: str, numbers: list[int | None]
) -> None:
    """With nulls. pandas writes integers with nulls as floats: those from 2^53 on are refused."""
    path = tmp_path / f"x.{suffix}"
    write(pa.table({"u": pa.array(numbers, pa.int64()), "y": [0] * len(numbers)}), path)
    whole = [number for number in numbers if number is not None]
    if write is _pandas and len(whole) < len(numbers) and any(abs(number) >= 2**53 for number in whole):
        with pytest.raises(SourceError, match=rf"x.{suffix}, (?s:.*)row [0-9]+, (?s:.*)'u'|'u'(?s:.*)row [0-9]+"):
            keys_of(path, feature("integer"))
    else:
        assert keys_of(path, feature("integer")) == [NULL_KEY if number is None else number for number in numbers]


@pytest.mark.sampled(1)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=20),
    lists=st.lists(st.lists(st.integers(-(2**63) + 2, 2**63 - 1), max_size=4), min_size=1, max_size=20),
)
@pytest.mark.parametrize("write", [_pyarrow, _duckdb, _pandas, _polars])
def test_texts_and_lists_of_parquet_files_that_other_programs_write_come_back(
    tmp_path: Path, write: Any, texts: list[str | None], lists: list[list[int]]
) -> None:
    """For any string, because Parquet marks null values."""
    path = tmp_path / "x.parquet"
    write(pa.table({"u": pa.array(texts, pa.string()), "y": [0] * len(texts)}), path)
    assert keys_of(path, feature("string")) == [NULL_KEY if text is None else tc.key_of(text) for text in texts]
    write(pa.table({"u": pa.array(lists, pa.list_(pa.int64())), "y": [0] * len(lists)}), path)
    assert keys_of(path, feature("integer", hotness="ragged")) == lists


@pytest.mark.parametrize("version", [2, 3])
def test_a_dataset_of_older_rules_trains_on_and_takes_no_new_files(tmp_path: Path, version: int) -> None:
    """The error says which rules made it; running its extraction again is not an error."""
    first = written(tmp_path, "u,y\n1,0\n2,1\n", "a.csv")
    more = written(tmp_path, "u,y\n3,0\n", "b.csv")
    schema = plain_schema(label="y", features=(tc.Feature(name="u"),), tables=())
    out, how = tmp_path / "out", {"device_budget": "1MiB", "progress": False}
    tc.extract(first, schema, out, **how)
    path = out / "dataset.json"
    record = json.loads(path.read_text())
    record["version"] = version
    record["checksum"] = checksum_of(record)
    path.write_text(json.dumps(record, indent=1))
    assert tc.extract(first, schema, out, **how).samples == 2
    if version == 3:
        assert tc.extract([first, more], schema, out, append=True, **how).samples == 3
    else:
        with pytest.raises(ExtractionError, match="was extracted by the rules of dataset version 2"):
            tc.extract([first, more], schema, out, append=True, **how)
        assert tc.PassDataset.open(out).samples == 2


def test_a_reader_of_text_counts_the_bytes_of_its_blocks(tmp_path: Path) -> None:
    """Memory of decoding is planned."""
    path = written(tmp_path, "u,y\n1,0\n")
    (file,) = find_inputs(path)
    schema = Schema(features=(tc.Feature(name="u"),))
    assert TextReader(file, schema, ()).decoding_bytes == 2 << 20
