"""Datasets and schemas made of any bytes: an error, or the written content, and no other effect."""

from __future__ import annotations

import json
import shutil
import tomllib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.data.cases import reference, rich_columns, rich_schema
from tests.store.damage import DEEP, LIES, assert_sentence, damaged, generator_of, lie, places
from tiercache.data.dataset import PassDataset
from tiercache.data.manifest import checksum_of
from tiercache.errors import SchemaError, TierCacheError

if TYPE_CHECKING:
    from pathlib import Path

TOML = """
label = { column = "y" }
dense = ["d", { column = "e", null = 0.5 }]
[features.user]
hotness = "ragged"
weights = "w"
[features.pair]
columns = ["a", "b"]
table = "user"
[tables.user]
dim = 8
optimizer = { name = "adagrad", learning_rate = 0.1 }
initializer = { name = "uniform", low = -0.1, high = 0.1 }
seed = 7
[defaults]
dim = 4
[csv]
header = false
types = { a = "string" }
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference(tmp_path_factory.mktemp("passes") / "passes", rich_schema(), rich_columns(60), [0, 30, 60]).path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "inside" / "passes")


def read_all(path: Path) -> None:
    """Open a dataset and read every key set and its digest."""
    passes = PassDataset.open(path)
    for each in passes:
        for table in passes.tables:
            assert each.keys(table.name).size == each.counts(table.name).size
        each.verify()
    assert passes.digest


def test_a_manifest_of_any_bytes_is_refused_or_read_right(copy: Path) -> None:
    """Random damage, any value replaced by a wrong one, and JSON that is too deep; files outside the folder do not
    change.
    """
    path = copy / "dataset.json"
    written = path.read_bytes()
    for seed in range(600):
        generator = generator_of(seed)
        record: Any = json.loads(written)
        lie(record, generator)
        sealed = seed % 4 == 3 and isinstance(record, dict)
        if sealed:  # by an attacker who can compute checksums
            record["checksum"] = checksum_of(record)
        data = DEEP if seed == 0 else json.dumps(record).encode() if seed % 2 else damaged(written, generator)
        path.write_bytes(data)
        try:
            read_all(copy)
        except TierCacheError as error:
            assert_sentence(error)
        else:
            assert sealed or json.loads(data) == json.loads(written)
    assert [entry.name for entry in copy.parent.iterdir()] == ["passes"]


def test_a_sub_dataset_of_any_bytes_is_refused_or_read_right(copy: Path) -> None:
    """Damage of its file, also to the same length as in the manifest."""
    path = next(copy.glob("*.safetensors"))
    written = path.read_bytes()
    for seed in range(600):
        data = damaged(written, generator_of(seed))
        if seed % 3:
            data = data[: len(written)].ljust(len(written), b"\0")
        path.unlink()
        path.write_bytes(data)
        try:
            read_all(copy)
        except TierCacheError as error:
            assert_sentence(error)
        else:
            assert data == written


def test_a_schema_of_any_text_is_refused_or_read(tmp_path: Path) -> None:
    """Damaged TOML, swapped words, and TOML that is too deep."""
    path, words = tmp_path / "schema.toml", TOML.split()
    path.write_text(TOML)
    assert tc.Schema.load(path).label == "y"
    for seed in range(600):
        generator = generator_of(seed)
        data = damaged(TOML.encode(), generator)
        if seed % 2:
            word, other = (words[int(i)] for i in generator.integers(0, len(words), 2))
            data = TOML.replace(word, other, 1).encode()
        path.write_bytes(b"label = " + DEEP if seed == 0 else data)
        try:
            tc.Schema.load(path)
        except SchemaError as error:
            assert_sentence(error)


VALUES = st.recursive(
    st.sampled_from([value for value in LIES if isinstance(value, int | float)])
    | st.sampled_from(["sgd", "adam", "uniform", "normal", "none", "error", "ragged", "bfloat16", "string"])
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "low", "high", "learning_rate", "column", "dim"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def as_toml(value: Any) -> str:
    """Return a value in TOML's inline spelling."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "") if isinstance(value, str) else str(value).lower()


RATE = list(places(tomllib.loads(TOML))).index(["tables", "user", "optimizer", "learning_rate"])


@settings(max_examples=150, deadline=None)
@example(which=RATE, value=1 << 1100, raw=None)
@given(which=st.integers(0, 1 << 16), value=VALUES, raw=st.none() | st.binary(max_size=60))
def test_a_schema_with_any_value_is_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, which: int, value: Any, raw: bytes | None
) -> None:
    """Well-formed TOML with one value in place of another; and any bytes."""
    path, record = tmp_path_factory.getbasetemp() / "schema.toml", tomllib.loads(TOML)
    found = list(places(record))
    *way, key = found[which % len(found)]
    inner: Any = record
    for step in way:
        inner = inner[step]
    inner[key] = value
    text = "\n".join(f"{name} = {as_toml(part)}" for name, part in record.items())
    tomllib.loads(text)
    path.write_bytes(text.encode() if raw is None else raw)
    try:
        assert tc.Schema.load(path).digest
    except SchemaError as error:
        assert_sentence(error)
