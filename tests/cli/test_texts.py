"""Texts and crosses are looked up by their values: the same keys as an extraction makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiercache as tc
from tests.cli.command import error_of, run, told
from tests.io.cases import filled
from tiercache.data.raw_batch import NULL_KEY, OOV_KEY

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ["alice", "bob", "", "größe", "x" * 100, "17", "[b]"]
IDS = [17, 0, -5, 1 << 62, 8, 9, 10]
FEW: dict[str, Any] = {
    "user": {"columns": ("user",), "key": "string"},
    "id": {"columns": ("id",)},
    "both": {"columns": ("user", "hour")},
}
"""Features whose keys are hashes modulo 7."""
HOURS = [0, 5, -1, (1 << 63) - 1, -(1 << 63), 17, 3]


def table(name: str) -> tc.Table:
    """Return a table of one number."""
    return tc.Table(name=name, dim=1, optimizer=tc.optim.SGD(learning_rate=1.0), initializer=tc.init.Zeros())


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> tc.PassDataset:
    """An extraction of a column of texts, one of integers, and crosses of them."""
    folder = tmp_path_factory.mktemp("texts")
    pq.write_table(pa.table({"user": TEXTS, "hour": HOURS, "id": IDS}), folder / "data.parquet")
    schema = tc.Schema(
        features=(
            tc.Feature(name="user", key="string"),
            tc.Feature(name="user_hour", key="cross", columns=("user", "hour")),
            tc.Feature(name="hour_user", key="cross", columns=("hour", "user")),
            *(tc.Feature(name=f"few_{name}", num_buckets=7, **columns) for name, columns in FEW.items()),
        ),
        tables=tuple(map(table, ("user", "user_hour", "hour_user", *(f"few_{name}" for name in FEW)))),
    )
    return tc.extract(folder / "data.parquet", schema, folder / "passes", device_budget="1MiB", progress=False)


def test_key_of_gives_the_keys_of_an_extraction(dataset: tc.PassDataset) -> None:
    """For texts, and for crosses of texts and integers in both orders."""
    (only,) = dataset
    assert set(only.keys("user").tolist()) == {tc.key_of(text) for text in TEXTS}
    pairs = list(zip(TEXTS, HOURS, strict=True))
    assert set(only.keys("user_hour").tolist()) == {tc.key_of(text, hour) for text, hour in pairs}
    assert set(only.keys("hour_user").tolist()) == {tc.key_of(hour, text) for text, hour in pairs}


def test_key_of_gives_the_buckets_of_an_extraction(dataset: tc.PassDataset) -> None:
    """For texts, integers and crosses of a feature with a number of buckets."""
    (only,) = dataset
    values = {"user": zip(TEXTS, strict=True), "id": zip(IDS, strict=True), "both": zip(TEXTS, HOURS, strict=True)}
    for name, given in values.items():
        assert set(only.keys(f"few_{name}").tolist()) == {tc.key_of(*one, num_buckets=7) for one in given}
    assert tc.key_of(None, num_buckets=7) == NULL_KEY


def test_key_of_knows_integers_bytes_nulls_and_reserved_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """An integer is its own key; null is the key of the null row; a hash that is reserved moves by two."""
    assert tc.key_of(17) == tc.key_of(np.int32(17)) == 17
    assert tc.key_of((1 << 64) - 1) == -1
    assert tc.key_of("a") == tc.key_of(b"a") == -3292477735350538661
    assert tc.key_of(None) == tc.key_of("a", None) == NULL_KEY
    for reserved in (OOV_KEY, NULL_KEY):
        with pytest.raises(ValueError, match="is reserved: keys start at"):
            tc.key_of(reserved)
        monkeypatch.setattr("tiercache.data.key_of.xxh64", lambda _, key=reserved: key & ((1 << 64) - 1))
        assert tc.key_of("a") == tc.key_of("a", 1) == reserved + 2
    with pytest.raises(ValueError, match="at least one value"):
        tc.key_of()
    with pytest.raises(ValueError, match="is beyond 64 bits"):
        tc.key_of(1 << 64)
    with pytest.raises(TypeError):
        tc.key_of(1.5)  # type: ignore[arg-type]


def test_the_rows_of_texts_and_crosses_are_shown(dataset: tc.PassDataset, tmp_path: Path) -> None:
    """By the words of the data; integers among a cross's values are those of an integer column, unless quoted."""
    (only,) = dataset
    rows = {
        one.name: {key: np.float32(i).tobytes() for i, key in enumerate(only.keys(one.name).tolist())}
        for one in dataset.tables
    }
    filled(tmp_path / "s.tc", dataset.tables, rows).close()

    def number(name: str, key: int) -> list[float]:
        return [float(only.keys(name).tolist().index(key))]

    found = told("lookup", tmp_path / "s.tc", "user", "--string", "alice", "17")
    assert [row["text"] for row in found] == ["alice", "17"]
    assert [row["vector"] for row in found] == [number("user", tc.key_of(text)) for text in ("alice", "17")]
    (cross,) = told("lookup", tmp_path / "s.tc", "hour_user", "--cross", "17", '"17"')
    assert cross["vector"] == number("hour_user", tc.key_of(17, "17"))
    assert cross["key"] == tc.key_of(17, "17")
    assert "[b]" in run("lookup", tmp_path / "s.tc", "user", "--string", "[b]")
    (few,) = told("lookup", tmp_path / "s.tc", "few_user", "--string", "bob", "--num-buckets", 7)
    assert few["key"] == tc.key_of("bob", num_buckets=7)
    (few,) = told("lookup", tmp_path / "s.tc", "few_id", "17", "--num-buckets", 7)
    assert few["key"] == tc.key_of(17, num_buckets=7)
    assert "bob x 5" in run("lookup", tmp_path / "s.tc", "user_hour", "--cross", "bob", "5")
    assert "table 'user' of the store" in (
        gone := error_of("lookup", tmp_path / "s.tc", "user", "--string", "bob", "eve")
    )
    assert gone.endswith("(eve): leave them out, or give --missing initial or zeros")
    assert "no row in table 'user_hour'" in error_of("lookup", tmp_path / "s.tc", "user_hour", "--cross", "bob", "6")
