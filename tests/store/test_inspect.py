"""Looking at a store from outside, from Python and from the command line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.store.conftest import Careless
from tests.store.world import World
from tiercache.cli import app
from tiercache.store import NotAStoreError, Store, StoreMissingError, Table, info, verify


def make(path: Path, tables: list[Table], passes: int) -> World:
    """Train a store for some passes."""
    world = World(tables)
    with Store.open(path, tables=tables) as store:
        world.run(store, passes)
    return world


def test_info_counts_the_live_rows_of_every_table(tmp_path: Path, tables: list[Table]) -> None:
    """Rows, bytes, ranges and the commit, as plain values."""
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


def test_a_store_without_a_commit_can_be_looked_at(tmp_path: Path, tables: list[Table]) -> None:
    """It has tables and nothing else, and all of it is whole."""
    make(tmp_path / "s", tables, 0)
    assert info(tmp_path / "s")["commit"] is None
    assert verify(tmp_path / "s")["problems"] == []


def test_verify_finds_keys_out_of_order(tmp_path: Path, tables: list[Table]) -> None:
    """And keys with two live rows: what checksums cannot see."""
    world = Careless(tables)
    with Store.open(tmp_path / "s", tables=tables) as store:
        world.run(store, 1)
    problems = verify(tmp_path / "s")["problems"]
    assert len(problems) == 2
    assert "keys of table 'day' that are not in hash order" in problems[0]
    assert "keys of table 'day'" in problems[1]
    assert "have two live rows" in problems[1]


def test_missing_stores_are_errors_not_reports(tmp_path: Path) -> None:
    """As they are for opening."""
    for look in (info, verify):
        with pytest.raises(StoreMissingError):
            look(tmp_path / "nothing")
        (tmp_path / "file").touch()
        with pytest.raises(NotAStoreError):
            look(tmp_path / "file")


def test_the_command_line_shows_a_store(tmp_path: Path, tables: list[Table]) -> None:
    """Tables for people, and JSON that is what ``info`` and ``verify`` return."""
    make(tmp_path / "s", tables, 3)
    runner = CliRunner()
    shown = runner.invoke(app, ["info", str(tmp_path / "s")])
    assert shown.exit_code == 0
    assert all(table.name in shown.stdout for table in tables)
    assert "2, training goes on at pass 3" in shown.stdout
    as_json = runner.invoke(app, ["info", str(tmp_path / "s"), "--json"])
    assert json.loads(as_json.stdout) == info(tmp_path / "s")
    assert "is whole" in runner.invoke(app, ["verify", str(tmp_path / "s")]).stdout
    assert json.loads(runner.invoke(app, ["verify", str(tmp_path / "s"), "--json"]).stdout)["problems"] == []


def test_the_command_line_ends_with_1_where_something_is_wrong(tmp_path: Path, tables: list[Table]) -> None:
    """With one sentence for each thing that is wrong."""
    make(tmp_path / "s", tables, 3)
    data = tmp_path / "s" / "data.mdb"
    data.write_bytes(data.read_bytes()[:10_000])
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "s")])
    assert result.exit_code == 1
    assert result.stderr.count("error: ") == 1
    assert "restore the store from a copy" in result.stderr
