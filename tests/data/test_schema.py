"""Schemas: what TOML says, and what it must not say."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import tiercache as tc
from tests.data.cases import plain_schema, rich_schema, table
from tiercache.errors import SchemaError
from tiercache.schema import CsvFormat, Schema

if TYPE_CHECKING:
    from pathlib import Path

FULL = """
dense = ["distance", "price"]
[label]
column = "late"
[csv]
header = false
types = { hour = "integer" }
[defaults]
dim = 16
optimizer = { name = "adagrad", learning_rate = 0.1 }
initializer = { name = "uniform", low = -0.1, high = 0.1 }
[tables.airport]
[tables.route]
dim = 8
seed = 7
optimizer = { name = "adam" }
initializer = "zeros"
[features.origin]
key = "string"
table = "airport"
null = "own"
[features.dest]
column = "destination"
table = "airport"
key = "string"
[features.route]
columns = ["origin", "destination", "hour"]
[features.stops]
hotness = "ragged"
weights = "minutes"
table = "airport"
[features.last]
hotness = 4
table = "airport"
"""


def load(folder: Path, text: str) -> Schema:
    """Load a schema from a file with ``text``."""
    path = folder / "schema.toml"
    path.write_text(text)
    return Schema.load(path)


def test_a_toml_file_says_everything_that_a_schema_holds(tmp_path: Path) -> None:
    """Defaults fill tables, features default to column and table of their own name, hotness gives lengths."""
    airport = tc.Table(
        name="airport",
        dim=16,
        optimizer=tc.optim.Adagrad(learning_rate=0.1),
        initializer=tc.init.Uniform(low=-0.1, high=0.1),
    )
    route = tc.Table(name="route", dim=8, optimizer=tc.optim.Adam(), initializer=tc.init.Zeros(), seed=7)
    assert load(tmp_path, FULL) == Schema(
        label="late",
        dense=(tc.DenseFeature(column="distance"), tc.DenseFeature(column="price")),
        csv=CsvFormat(header=False, types={"hour": "integer"}),
        tables=(airport, route),
        features=(
            tc.Feature(name="origin", key="string", table="airport", null="own"),
            tc.Feature(name="dest", columns=("destination",), table="airport", key="string"),
            tc.Feature(name="route", columns=("origin", "destination", "hour"), key="cross"),
            tc.Feature(name="stops", hotness="ragged", weights="minutes", table="airport"),
            tc.Feature(name="last", hotness="fixed", length=4, table="airport"),
        ),
    )


def test_dense_features_can_say_what_null_is(tmp_path: Path) -> None:
    """An array of tables gives each dense column its own rule."""
    text = (
        FULL.replace('dense = ["distance", "price"]', "") + '[[dense]]\ncolumn = "x"\nnull = -1\n[[dense]]\ncolumn="z"'
    )
    assert load(tmp_path, text).dense == (tc.DenseFeature(column="x", null=-1.0), tc.DenseFeature(column="z"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("key =", "kee =", r"unknown key 'kee' \(did you mean 'key'\?\): known are column, columns"),
        ("dense =", "dence =", "the file has the unknown key 'dence'"),
        ("seed = 7", "sed = 7", r"\[tables.route\] has the unknown key 'sed'"),
        ('table = "airport"\nnull', 'table = "airprot"\nnull', r"unknown table 'airprot' \(did you mean 'airport'\?\)"),
        ('"adam"', '"adom"', r"\[tables.route\]: optimizer 'adom' is unknown"),
        ("learning_rate = 0.1", "rate = 0.1", "optimizer 'adagrad' has no 'rate'"),
        ("dim = 8", "dim = 0", "dim of table 'route' is 0"),
        ("dim = 8", 'dim = "8"', "dim of table 'route' is '8'"),
        ('column = "late"', "", r"\[label\] has no 'column'"),
        ("dim = 16", "", r"\[tables.airport\] has no 'dim'"),
        ("hotness = 4", "hotness = 0", "at least 1, not 0"),
        ("hotness = 4", 'hotness = "many"', "hotness = 'many'"),
        ('null = "own"', 'null = "drop"', "null = 'drop': one of 'error', 'own'"),
        ('key = "string"\ntable', 'key = "float"\ntable', "key = 'float': one of 'integer', 'string', 'cross'"),
        ('columns = ["origin", "destination", "hour"]', 'columns = ["origin"]\nkey = "cross"', "at least 2 columns"),
        ('column = "destination"', 'columns = ["a", "b"]', 'only key = "cross" takes more'),
        ('column = "destination"', 'column = "a"\ncolumns = ["b"]', "give one of them"),
        ('column = "destination"', "column = 3", "must be a text"),
        ('"price"]', '"distance"]', "dense column 'distance' stands twice"),
        ("header = false", "header = 0", "true or false"),
        ('hour = "integer"', 'hour = "float"', "one of 'integer', 'string'"),
        ("[features.origin]", "[features.origin", "is not TOML"),
        ("[features.origin]", "[features]\nroute2 = 3\n[features.origin]", "it must be a table of keys"),
    ],
)
def test_a_wrong_schema_names_file_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    """Everything a schema must not say is refused with one sentence that names the file."""
    assert old in FULL
    with pytest.raises(SchemaError, match=message) as caught:
        load(tmp_path, FULL.replace(old, new, 1))
    assert "schema.toml" in str(caught.value)
    assert "\n" not in str(caught.value).strip()


def test_a_schema_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A missing file is a SchemaError with its path."""
    with pytest.raises(SchemaError, match=r"none.toml cannot be read"):
        Schema.load(tmp_path / "none.toml")


def test_a_schema_survives_its_record() -> None:
    """from_record is the inverse of to_record."""
    for schema in (plain_schema(), rich_schema()):
        assert Schema.from_record(schema.to_record()) == schema


def test_the_digest_is_about_meaning_and_not_about_training() -> None:
    """Columns, keys and tables' names change the digest; dims, optimizers and seeds do not."""
    schema = rich_schema()
    trained = replace(schema, tables=tuple(replace(t, dim=3, seed=9, optimizer=tc.optim.Adam()) for t in schema.tables))
    assert trained.digest == schema.digest
    features = (replace(schema.features[0], null="own"), *schema.features[1:])
    for other in (
        replace(schema, label=None),
        replace(schema, dense=schema.dense[::-1]),
        replace(schema, features=features),
        replace(schema, tables=(*schema.tables, table("more"))),
    ):
        assert other.digest != schema.digest


def test_tables_stand_in_the_order_of_their_ids() -> None:
    """The order of key sets is that of unsigned table ids, whatever the order in the schema."""
    schema = rich_schema()
    ids = [t.table_id for t in schema.ordered_tables]
    assert ids == sorted(ids)
    assert replace(schema, tables=schema.tables[::-1]).ordered_tables == schema.ordered_tables


def test_a_schema_needs_a_feature() -> None:
    """Data without sparse features has no use for tables."""
    with pytest.raises(SchemaError, match="no features"):
        plain_schema(features=())
