"""Whatever bytes a pass set or a schema is made of: a sentence, or what was written; nothing else happens."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

import tiercache as tc
from tests.extraction.cases import reference, rich_columns, rich_schema
from tests.store.damage import DEEP, assert_sentence, damaged, generator_of, lie
from tiercache.errors import SchemaError, TierCacheError
from tiercache.passes.passset import PassSet

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
    """A finished pass set."""
    return reference(tmp_path_factory.mktemp("passes") / "passes", rich_schema(), rich_columns(60), [0, 30, 60]).path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A pass set to damage."""
    return shutil.copytree(whole, tmp_path / "inside" / "passes")


def read_all(path: Path) -> None:
    """Open a pass set and read every key set and its digest."""
    passes = PassSet.open(path)
    for each in passes:
        for table in passes.tables:
            assert each.keys(table.name).size == each.counts(table.name).size
        each.key_set.digest()
    assert passes.digest


def test_a_manifest_of_any_bytes_is_refused_or_read_right(copy: Path) -> None:
    """Random damage, any value replaced by a lie, and JSON that is too deep; nothing outside the folder is touched."""
    path = copy / "passes.json"
    written = path.read_bytes()
    for seed in range(600):
        generator = generator_of(seed)
        record: Any = json.loads(written)
        lie(record, generator)
        path.write_bytes(json.dumps(record).encode() if seed % 2 else damaged(written, generator))
        if seed == 0:
            path.write_bytes(DEEP)
        try:
            read_all(copy)
        except TierCacheError as error:
            assert_sentence(error)
    assert [entry.name for entry in copy.parent.iterdir()] == ["passes"]


def test_a_key_set_of_any_bytes_is_refused_or_read_right(copy: Path) -> None:
    """Damage of Arrow's file, to the same length as the manifest says, too."""
    path = next(copy.glob("*.keys.arrow"))
    written = path.read_bytes()
    for seed in range(600):
        data = damaged(written, generator_of(seed))
        if seed % 3:
            data = data[: len(written)].ljust(len(written), b"\0")
        path.write_bytes(data)
        try:
            read_all(copy)
        except TierCacheError as error:
            assert_sentence(error)


def test_a_schema_of_any_text_is_refused_or_read(tmp_path: Path) -> None:
    """Damaged TOML, words in each other's place, and TOML that is too deep."""
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
