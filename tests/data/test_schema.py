"""Schemas: valid TOML, and errors for invalid TOML."""

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
null = "embed"
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
hotness = "multi_hot"
length = 4
table = "airport"
"""


def test_a_misspelled_column_of_the_types_of_text_is_refused(tmp_path: Path) -> None:
    """Its type would be inferred: the strings 007 and 7 would be one integer."""
    with pytest.raises(SchemaError, match=r"has a type in \[csv\] for the column 'huor', .*mean 'hour'"):
        load(tmp_path, FULL.replace("types = { hour", "types = { huor"))


def load(folder: Path, text: str) -> Schema:
    """Load a schema from a file with ``text``."""
    path = folder / "schema.toml"
    path.write_text(text)
    return Schema.load(path)


def test_a_toml_file_says_everything_that_a_schema_holds(tmp_path: Path) -> None:
    """Defaults fill tables, features default to the column and table with their name, hotness sets lengths."""
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
            tc.Feature(name="origin", key="string", table="airport", null="embed"),
            tc.Feature(name="dest", columns=("destination",), table="airport", key="string"),
            tc.Feature(name="route", columns=("origin", "destination", "hour"), key="cross"),
            tc.Feature(name="stops", hotness="ragged", weights="minutes", table="airport"),
            tc.Feature(name="last", hotness="multi_hot", length=4, table="airport"),
        ),
    )


def test_what_is_not_said_has_a_default(tmp_path: Path) -> None:
    """Every feature has a table, and optimizers and initializers need no numbers."""
    text = """
        [features.user]
        [features.item]
        [features.pair]
        columns = ["user", "item"]
        [tables.item]
        optimizer = { name = "adagrad" }
        initializer = "normal"
        [tables.pair]
        optimizer = "rowwise_adagrad"
        initializer = { name = "uniform" }
    """
    schema = load(tmp_path, text)
    assert schema.tables == (
        tc.Table(name="item", dim=16, optimizer=tc.optim.Adagrad(), initializer=tc.init.Normal(mean=0.0, std=1.0)),
        tc.Table(name="pair", optimizer=tc.optim.RowWiseAdagrad(learning_rate=0.01), initializer=tc.init.Uniform()),
        tc.Table(
            name="user",
            dim=16,
            optimizer=tc.optim.Adagrad(learning_rate=0.01),
            initializer=tc.init.Uniform(low=-0.05, high=0.05),
        ),
    )
    assert Schema(features=(tc.Feature(name="user"),)).tables == schema.tables[2:]


@pytest.mark.parametrize("null", ["nan", "inf", "1e300", '"drop"', "true"])
def test_null_of_a_dense_feature_is_a_finite_number(tmp_path: Path, null: str) -> None:
    """The replacement of null must be a float32."""
    with pytest.raises(SchemaError, match=r"\[\[dense\]\] has null = "):
        load(tmp_path, f'[[dense]]\ncolumn = "x"\nnull = {null}\n[features.a]')


def test_dense_features_can_say_what_null_is(tmp_path: Path) -> None:
    """An array of tables gives each dense column its own rule."""
    text = (
        FULL.replace('dense = ["distance", "price"]', "") + '[[dense]]\ncolumn = "x"\nnull = -1\n[[dense]]\ncolumn="z"'
    )
    assert load(tmp_path, text).dense == (tc.DenseFeature(column="x", null=-1.0), tc.DenseFeature(column="z"))


@pytest.mark.parametrize("label", ['"y"', '["y", "z"]', '{ column = ["y", "z"] }'])
def test_a_label_that_is_not_a_section_says_how_to_write_it(tmp_path: Path, label: str) -> None:
    """One label or several, as in the schema."""
    with pytest.raises(
        SchemaError, match=r'write label = \{ column = "click" \}, or for several .* columns = \["click"'
    ):
        load(tmp_path, f"label = {label}\n[features.a]\n")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "key =",
            "kee =",
            r"\[features.origin\] has the unknown key 'kee' \(did you mean 'key'\?\): the known keys are buckets",
        ),
        ("dense =", "dence =", r"the file has the unknown key 'dence' \(did you mean 'dense'"),
        ("seed = 7", "sed = 7", r"\[tables.route\] has the unknown key 'sed' \(did you mean 'seed'"),
        ("dim = 16", "dims = 16", r"\[defaults\] has the unknown key 'dims' \(did you mean 'dim'"),
        ('table = "airport"\nnull', 'table = "airprot"\nnull', r"unknown table 'airprot' \(did you mean 'airport'\?\)"),
        ("[tables.route]", "[tables.ruote]", r"\[tables.ruote\] is not used by any feature \(did you mean 'route'\?\)"),
        ('"adam"', '"adom"', r"\[tables.route\]: optimizer 'adom' is unknown"),
        ('name = "adam"', 'name = "sgd", kind = "adam"', r"\[tables.route\]: optimizer has the unknown key 'kind'"),
        ("learning_rate = 0.1", "rate = 0.1", "optimizer 'adagrad' has no 'rate'"),
        ("learning_rate = 0.1", "learning_rate = 1e300", "learning_rate of Adagrad is 1e[+]300: float32 holds at most"),
        ("learning_rate = 0.1", "learning_rate = nan", "learning_rate of Adagrad is nan"),
        ("dim = 8", "dim = 0", "dim of table 'route' is 0"),
        ("dim = 8", 'dim = "8"', "dim of table 'route' is '8'"),
        ('column = "late"', "", r"\[label\] has no 'column'"),
        (
            "length = 4",
            "dim = 8",
            r"has 'dim', which belongs to its table: write it in \[tables\.airport\] or \[defaults\]",
        ),
        (
            'column = "late"',
            'column = "late"\nnull = "own"',
            r"\[label\] has null = 'own': it must be 'error' or 'drop'",
        ),
        ("length = 4", "", 'has hotness = "multi_hot" and no length: set length to'),
        ('hotness = "ragged"', "length = 3", 'has length = 3: only hotness = "multi_hot" takes one'),
        ("length = 4", "length = 0", r"\[features.last\] has length = 0: it must be greater than or equal to 1"),
        ('hotness = "ragged"', 'hotness = "many"', "hotness = 'many': it must be 'one_hot', 'multi_hot' or 'ragged'"),
        ('hotness = "ragged"', "max_length = 3", 'only hotness = "ragged" takes one'),
        ('hotness = "ragged"', "buckets = [1, 3, 2]", "each boundary must be above the previous one"),
        ('hotness = "ragged"', "buckets = [1, nan]", "buckets.1 = nan: it must be a finite number"),
        ('hotness = "ragged"', "buckets = []", r"buckets = \[\]: remove it"),
        ('hotness = "ragged"', 'key = "bucket"', 'key = "bucket" takes boundaries'),
        ('hotness = "ragged"', "num_buckets = 2.5", "num_buckets = 2.5: it must be a whole number"),
        ('null = "embed"', 'null = "drop"', "null = 'drop': it must be 'error' or 'embed'"),
        ('key = "string"\ntable', 'key = "float"\ntable', "key = 'float': it must be 'integer', 'string', 'hex'"),
        ('columns = ["origin", "destination", "hour"]', "columns = []", r"\[features.route\] has columns = \[\]"),
        ('columns = ["origin", "destination", "hour"]', 'columns = ["origin"]\nkey = "cross"', "at least 2 columns"),
        ('column = "destination"', 'columns = ["a", "b"]', 'only key = "cross" takes more'),
        ('column = "destination"', 'column = "a"\ncolumns = ["b"]', "set only one of them"),
        ('column = "destination"', "column = 3", "columns.0 = 3: it must be a string"),
        ('column = "destination"', 'name = "x"', r"\[features.dest\] has the unknown key 'name'"),
        ('"price"]', '"distance"]', "dense column 'distance' twice"),
        ('"price"]', "3]", "dense has column = 3: it must be a string"),
        ("header = false", "header = 0", r"\[csv\] has header = 0: it must be true or false"),
        ("header = false", 'bad_rows = "drop"', "bad_rows = 'drop': it must be 'error', 'skip' or 'pad'"),
        ('hour = "integer"', 'hour = "float"', "types.hour = 'float': it must be 'integer' or 'string'"),
        ("[features.origin]", "[features.origin", "is not TOML"),
        ("[features.origin]", "[features]\nroute2 = 3\n[features.origin]", "it must be a table of keys"),
    ],
)
def test_a_wrong_schema_names_file_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    """Every invalid setting is refused with one message that names the file."""
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
    features = (replace(schema.features[0], null="embed"), *schema.features[1:])
    for other in (
        replace(schema, label=None),
        replace(schema, dense=schema.dense[::-1]),
        replace(schema, features=features),
        replace(schema, tables=(*schema.tables, table("more"))),
    ):
        assert other.digest != schema.digest


def test_tables_stand_in_the_order_of_their_ids() -> None:
    """The order of key sets is by unsigned table ids, whatever the order in the schema."""
    schema = rich_schema()
    ids = [t.table_id for t in schema.ordered_tables]
    assert ids == sorted(ids)
    assert replace(schema, tables=schema.tables[::-1]).ordered_tables == schema.ordered_tables


def test_a_schema_needs_a_feature() -> None:
    """Data without sparse features needs no tables."""
    with pytest.raises(SchemaError, match="no features"):
        plain_schema(features=())
