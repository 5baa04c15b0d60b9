"""Inspection of a store, and differences between two: from Python and from the command line."""

import copy
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.store.conftest import Careless, small_tables
from tests.store.world import World
from tiercache.cli import app
from tiercache.store import (
    CommitMissingError,
    MemoryEngine,
    NotAStoreError,
    Store,
    StoreMissingError,
    Table,
    differences,
    info,
    verify,
)


def make(path: Path, tables: list[Table], passes: int) -> World:
    world = World(tables)
    with Store.open(path, tables=tables) as store:
        world.run(store, passes)
    return world


def test_info_counts_the_live_rows_of_every_table(tmp_path: Path, tables: list[Table]) -> None:
    world = make(tmp_path / "s", tables, 5)
    found = info(tmp_path / "s")
    assert json.loads(json.dumps(found)) == found
    rows = {table["name"]: table["rows"] for table in found["tables"]}
    assert rows == {t.name: sum(name == t.name for name, _ in world.rows) for t in tables}
    assert found["rows"] == len(world.rows)
    assert found["row_bytes"] == sum(t.row_bytes * rows[t.name] for t in tables)
    assert found["commit"]["pass"] == 5
    assert found["commit"]["settings"] == {"seed": 0}
    assert [segment["pass"] for segment in found["segments"]] == [2, 3, 4]
    assert sum(segment["live_rows"] for segment in found["segments"]) == found["rows"]
    assert found["live_ranges"] + found["dead_ranges"] == sum(
        segment["live_ranges"] + segment["dead_ranges"] for segment in found["segments"]
    )
    assert found["file_bytes"] > found["row_bytes"]


def test_verify_finds_keys_out_of_order(tmp_path: Path, tables: list[Table]) -> None:
    world = Careless(tables)
    with Store.open(tmp_path / "s", tables=tables) as store:
        world.run(store, 1)
    problems = verify(tmp_path / "s")["problems"]
    assert len(problems) == 2
    assert "keys of table 'day' that are not in hash order" in problems[0]
    assert "keys of table 'day'" in problems[1]
    assert "have two live rows" in problems[1]


def test_stores_without_rows_and_paths_without_a_store(tmp_path: Path, tables: list[Table]) -> None:
    make(tmp_path / "s", tables, 0)
    assert info(tmp_path / "s")["commit"] is None
    assert verify(tmp_path / "s")["problems"] == []
    (tmp_path / "file").touch()
    for look in (info, verify):
        with pytest.raises(StoreMissingError):
            look(tmp_path / "nothing")
        with pytest.raises(NotAStoreError):
            look(tmp_path / "file")


def test_the_command_line_shows_a_store(tmp_path: Path, tables: list[Table]) -> None:
    """Tables for people, and JSON equal to the results of ``info`` and ``verify``."""
    make(tmp_path / "s", tables, 3)

    def shown(*words: str) -> str:
        done = CliRunner().invoke(app, [words[0], str(tmp_path / "s"), *words[1:]])
        assert done.exit_code == 0
        return done.stdout

    rows, text = f"{info(tmp_path / 's')['rows']:,}", shown("info")
    assert all(table.name in text for table in tables)
    assert "2, training resumes at pass 3" in text
    assert re.search(r"segments 3, with \d+ live and \d+ dead ranges", text)
    assert f"rows     {rows}, " in text
    assert json.loads(shown("info", "--json")) == info(tmp_path / "s")
    assert f"is intact: {rows} rows in 1 commit;" in shown("verify")
    assert json.loads(shown("verify", "--json"))["problems"] == []


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 30), passes=st.integers(1, 4), more=st.integers(0, 3), second=st.integers(0, 5))
def test_differences_are_those_of_two_dicts(seed: int, passes: int, more: int, second: int) -> None:
    """Between an older commit and the newest, in either direction, with a compacted other store, and an empty one."""
    world = World(small_tables(), seed=seed, keys_per_pass=8, universe=16)
    other = World(small_tables(), seed=seed + second, keys_per_pass=8, universe=16)
    with Store.open(None, tables=world.tables, engine=MemoryEngine(), retention=9) as store:
        world.run(store, passes)
        before = copy.deepcopy(world.rows)
        world.run(store, more)
        check(store.at(passes - 1), store, before, world.rows)
        check(store, store.at(passes - 1), world.rows, before)
        with Store.open(None, tables=world.tables, engine=MemoryEngine()) as twin:
            other.run(twin, passes)
            twin.compact()
            check(store, twin, world.rows, other.rows)
        with Store.open(None, tables=world.tables, engine=MemoryEngine()) as empty:
            World(world.tables, keys_per_pass=0).run(empty, 1)
            check(store, empty, world.rows, {})
            check(empty, store, {}, world.rows)


def check(first: Store, second: Store, ours: dict, theirs: dict) -> None:
    """Compare the counts of every table with those of two dicts of rows."""
    for found in differences(first, second):
        a, b = ({key: row for (name, key), row in rows.items() if name == found.table} for rows in (ours, theirs))
        unequal = {key for key in a.keys() & b.keys() if a[key] != b[key]}
        assert found.only_first == len(a.keys() - b.keys())
        assert found.only_second == len(b.keys() - a.keys())
        assert (found.different, found.same) == (len(unequal), len(a.keys() & b.keys()) - len(unequal))
        assert set(found.examples) <= unequal | (a.keys() ^ b.keys())
        assert len(found.examples) == min(5, len(unequal | (a.keys() ^ b.keys())))


def test_stores_of_other_tables_are_not_compared() -> None:
    """And a commit that is not kept cannot be opened."""
    tables = small_tables()
    with Store.open(None, tables=tables, engine=MemoryEngine()) as store:
        World(tables).run(store, 2)
        with pytest.raises(CommitMissingError, match="has no commit 0: pass one of 1"):
            store.at(0)
        other = Store.open(None, tables=tables[:1], engine=MemoryEngine())
        with other, pytest.raises(ValueError, match="have different tables"):
            differences(store, other)
