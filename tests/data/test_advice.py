"""The advice of errors about data: with the suggested change of the schema, the file is read.

Each piece of advice in the package (``say X = ...``) is followed here, word for word as in the error.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiercache as tc
from tiercache.data.encode import check_first_rows, encode
from tiercache.data.inputs import find_inputs
from tiercache.data.raw_batch import NULL_KEY
from tiercache.data.source import Source
from tiercache.errors import SourceError
from tiercache.schema import Schema

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Sections = dict[str, dict[str, str]]
"""A schema: TOML's spelling of each value, by section and name."""
_VALUE = r"\"[^\"]*\"|'[^']*'|\{[^}]*\}|false"
_SAID = re.compile(rf"set ((?:\w+ = (?:{_VALUE})(?: and )?)+)(?: in (\[csv\]|\[label\]|the schema)| for the feature)?")
_DATA = Path(tc.__file__).parent / "data"


class Case(NamedTuple):
    """A refused file, and its keys after following the advice of the error."""

    write: Callable[[Path], Path]
    sections: Sections
    keys: Sequence[Any]
    """Keys of each row after following all advice."""
    choice: int = 0
    """The index of the suggested setting to follow."""


def text(content: str | bytes, name: str = "x.csv") -> Callable[[Path], Path]:
    """Return a function that writes a text file."""

    def write(folder: Path) -> Path:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def parquet(**columns: Any) -> Callable[[Path], Path]:
    """Return a function that writes a Parquet file."""

    def write(folder: Path) -> Path:
        pq.write_table(pa.table(columns), folder / "x.parquet")
        return folder / "x.parquet"

    return write


def of_u(**more: str) -> Sections:
    """Return a schema of one feature u."""
    return {"features.u": more}


KEY, A, B = tc.key_of, tc.key_of("a"), tc.key_of("b")
CASES = {
    "text where integers are wanted": Case(text("u,y\n1,0\na,1\n"), of_u(), [KEY("1"), A]),
    "lists of text": Case(
        text("u,y\n1|a,0\n2,1\n"),
        of_u(hotness='"ragged"') | {"csv": {"list_separator": '"|"'}},
        [[KEY("1"), A], [KEY("2")]],
    ),
    "lists without a separator": Case(text("u,y\n1;20,0\n3,1\n"), of_u(hotness='"ragged"'), [[1, 20], [3]]),
    "single keys of a text where lists are wanted": Case(
        text("u,y\n1,0\n2,1\n"), of_u(hotness='"ragged"'), [1, 2], choice=1
    ),
    "another delimiter, by the header": Case(text("u;y\n1;0\n2;1\n"), of_u(), [1, 2]),
    "a delimiter of several characters": Case(text("u::y\n1::0\n2::1\n"), of_u(), [1, 2]),
    "tabs in a csv": Case(text("u\ty\n1\t0\n"), of_u(), [1]),
    "another delimiter, by the fields": Case(
        text("1;0\n2;1\n"), of_u() | {"source": {"columns": '["u", "y"]'}, "csv": {"header": "false"}}, [1, 2]
    ),
    "names of columns of text without a header": Case(
        text("1,0\n2,1\n"), of_u() | {"source": {"columns": '["u", "y"]'}}, [1, 2]
    ),
    "a lone quote": Case(text('u,y\n"a,0\nb,1\n"c"d,2\n'), of_u(key='"string"'), [KEY('"a'), B, KEY('"c"d')]),
    "a quote that is not closed": Case(text('u,y\n"a,0\nb,1\n'), of_u(key='"string"'), [KEY('"a'), B]),
    "quoted fields in a tsv": Case(text('u\ty\n"a\tb"\t0\n', "x.tsv"), of_u(key='"string"'), [KEY("a\tb")]),
    "quotes of a long delimiter": Case(
        text('u::y\na::0\n'), of_u(key='"string"') | {"csv": {"delimiter": '"::"', "quote": "'\"'"}}, [A]
    ),
    "a column of a cross that changes its type": Case(
        text("u,v,y\n" + "1,2,0\n" * 400_000 + "a,2,1\n"),
        {"features.u": {"columns": '["u", "v"]', "key": '"cross"', "num_buckets": "10"}},
        [],
    ),
    "no hexadecimal digits": Case(text("u,y\nxyz,0\n"), of_u(key='"hex"'), [KEY("xyz")]),
    "a null key": Case(text("u,y\n1,0\n,1\n"), of_u(null='"error"'), [1, NULL_KEY]),
    "a null list": Case(
        parquet(u=pa.array([[1], None], pa.list_(pa.int64()))),
        of_u(hotness='"ragged"', null='"error"'),
        [[1], [NULL_KEY]],
    ),
    "a label that is null": Case(
        text("u,y\n1,0\n2,\n3,1\n"), of_u() | {"label": {"column": '"y"'}}, [1, 3]
    ),
    "a label that is not a number": Case(
        text("u,y\n1,0\n2,NaN\n3,1\n"), of_u() | {"label": {"column": '"y"'}}, [1, 3]
    ),
    "lists where one key is wanted": Case(parquet(u=[[1, 2], [3]]), of_u(), [[1, 2], [3]]),
    "one key where lists are wanted": Case(parquet(u=[1, 2]), of_u(hotness='"ragged"'), [1, 2]),
    "lists of another length": Case(
        parquet(u=[[1, 2], [3]]), of_u(hotness='"multi_hot"', length="2"), [[1, 2], [3]]
    ),
    "strings where integers are wanted": Case(parquet(u=["a", "b"]), of_u(), [A, B]),
    "integers where strings are wanted": Case(parquet(u=[1, 2]), of_u(key='"string"'), [1, 2]),
    "decimals where strings are wanted": Case(
        parquet(u=pa.array([1, 2]).cast(pa.decimal128(20, 0))), of_u(key='"string"'), [1, 2]
    ),
    "a folder that is no integer": Case(text("v,y\n1,0\n", "u=a/x.csv"), of_u(), [A]),
}  # fmt: skip


def toml_of(sections: Sections) -> str:
    """Spell a schema."""
    lines = ['[tables.u]\ndim = 4\noptimizer = { name = "sgd", learning_rate = 0.1 }']
    for name, values in sections.items():
        table = {"table": '"u"'} if name.startswith("features.") else {}
        lines.append(f"[{name}]\n" + "\n".join(f"{key} = {value}" for key, value in (table | values).items()))
    return "\n".join(lines)


def read(path: Path, folder: Path, sections: Sections) -> list[Any]:
    """Return the keys of each row, read by ``tc.extract``."""
    (folder / "schema.toml").write_text(toml_of(sections))
    schema = Schema.load(folder / "schema.toml")
    data = path.parent if "=" in path.parent.name else path
    source = Source(find_inputs(data), schema)
    check_first_rows(schema, source)
    found = list[Any]()
    for batch in source.batches():
        raw = encode(schema, batch).features["u"]
        is_flat = raw.offsets is None
        found += raw.keys.tolist() if is_flat else [one.tolist() for one in np.split(raw.keys, raw.offsets[1:-1])]
    return found


def followed(sections: Sections, error: str, choice: int) -> Sections:
    """Return the schema with the suggestion of an error applied."""
    said = list(_SAID.finditer(error))
    assert said, error
    settings, where = said[choice].groups()
    section = where.strip("[]") if where in ("[csv]", "[label]") else "features.u"
    changed = sections.get(section, {}) | dict(re.findall(rf"(\w+) = ({_VALUE})", settings))
    if left_out := re.search(r"omit (\w+)$", error):
        del changed[left_out[1]]
    return sections | {section: changed}


@pytest.mark.parametrize("name", CASES)
def test_what_an_error_says_to_write_into_the_schema_reads_the_file(name: str, tmp_path: Path) -> None:
    """One error after another, each with new advice, until the file is read."""
    case = CASES[name]
    path, sections = case.write(tmp_path), case.sections
    with pytest.raises(SourceError) as first:
        read(path, tmp_path, sections)
    assert path.name in str(first.value)
    sections = followed(sections, str(first.value), case.choice)
    found = read(path, tmp_path, sections)
    if case.keys:
        assert found == case.keys
    else:
        assert found


def test_every_piece_of_advice_is_followed_by_a_case(tmp_path: Path) -> None:
    """The cases follow every suggestion in the package's messages."""
    said = set[str]()
    for case in CASES.values():
        with pytest.raises(SourceError) as error:
            read(case.write(tmp_path), tmp_path, case.sections)
        said |= {
            name for one in _SAID.finditer(str(error.value)) for name in re.findall(rf"(\w+) = (?:{_VALUE})", one[1])
        }
    given = set[str]()
    for path in _DATA.glob("*.py"):
        given |= set(re.findall(r"\bset (\w+) = ", path.read_text()))
    assert given <= said
