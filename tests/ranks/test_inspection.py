"""Looking at a sharded store from outside: ``tiercache info``, ``verify`` and ``lookup``."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.cli.command import error_of, run
from tests.ranks.meeting import meet
from tests.ranks.sharded_world import TABLES, expected, opened, take
from tiercache.ranks.inspection import is_sharded, sharded_info, verify_sharded
from tiercache.ranks.record import Record
from tiercache.store import Cursor, Store

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store of three parts after some commits."""

    def body(ranks: Any) -> None:
        parts, world = opened(tmp_path / "s", ranks)
        with parts:
            for _ in range(4):
                take(parts, world)

    assert meet(3, body) == [None] * 3
    return tmp_path / "s"


def test_info_counts_every_row_once(path: Path) -> None:
    """By table over all parts, slices of a table together; and each part for itself."""
    found = json.loads(run("info", path, "--json"))
    wanted = {name: len(keys) for name, keys in expected(Cursor(2)).items()}
    assert {table["name"]: table["rows"] for table in found["tables"]} == wanted
    assert found["rows"] == sum(wanted.values())
    assert found["cursor"] == {"pass": 2, "sample": 0}
    assert found["commits"] == [{"id": 3, "pass": 2, "sample": 0, "parts": [3, 3, 3]}]
    assert [part["commit"]["id"] for part in found["parts"]] == [3, 3, 3]
    word = next(table for table in found["tables"] if table["name"] == "word")
    assert word["sharding"] == {"kind": "column", "slices": [[0, 0, 2], [1, 2, 4], [2, 4, 5]]}
    shown = run("info", path)
    assert "shards   3, one a rank" in shown
    assert "commit   3, training goes on at pass 2" in shown
    assert "column: 2 on rank 0, 2 on rank 1, 1 on rank 2" in shown
    assert "table: rank 2" in shown
    assert "part-0-2" in shown
    assert "segments of shard 2" in run("info", path, "--segments")
    assert is_sharded(path)
    assert not is_sharded(path / "part-0-0")


def test_info_of_a_store_without_a_commit(tmp_path: Path) -> None:
    """Says so, and who was to have which rows."""

    def body(ranks: Any) -> None:
        opened(tmp_path / "s", ranks)[0].close()

    assert meet(2, body) == [None, None]
    assert sharded_info(tmp_path / "s")["cursor"] is None
    assert "commit   none yet\n  rows     0 live rows" in run("info", tmp_path / "s")
    assert "is whole" in run("verify", tmp_path / "s")


def test_verify_reads_all_parts_and_whether_they_belong_together(path: Path, tmp_path: Path) -> None:
    """A damaged part, one that is missing, rows of another rank, slices with different keys."""
    assert "is whole: 3 shards that belong together" in run("verify", path)
    found = json.loads(run("verify", path, "--json"))
    assert found["problems"] == []
    assert found["rows"] == sum(part["rows"] for part in found["parts"]) > 0
    calls: list[tuple[int, int]] = []
    verify_sharded(path, progress=lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == calls[-1][1] == found["bytes"]

    def words(damaged: Path) -> str:
        (sentence,) = verify_sharded(damaged)["problems"]
        assert "\n" not in sentence
        assert error_of("verify", damaged) == sentence
        return str(sentence)

    copies = [tmp_path / str(i) for i in range(4)]
    for copy in copies:
        shutil.copytree(path, copy)
    shutil.rmtree(copies[0] / "part-0-1")
    assert "part 1: there is no store at" in words(copies[0])
    with (copies[1] / "part-0-2" / "data.mdb").open("r+b") as file:
        file.seek(2 * 4096)
        file.write(bytes(np.random.default_rng(0).bytes(20_000)))
    assert any("part 2: " in problem for problem in verify_sharded(copies[1])["problems"])
    for name in ("part-0-1", "part-0-2"):
        (copies[2] / name).rename(copies[2] / f"{name} x")
    for old, new in (("part-0-1 x", "part-0-2"), ("part-0-2 x", "part-0-1")):
        (copies[2] / old).rename(copies[2] / new)
    strays = verify_sharded(copies[2])["problems"]
    assert any("part 1 of the sharded store at" in one and "gives to other ranks" in one for one in strays)
    Record.read(copies[3]).renewed((3, 3, 2)).write(copies[3])
    assert "commit 2 of part 2 of" in words(copies[3])


def test_lookup_shows_whole_rows(path: Path) -> None:
    """As they are over all parts; a commit that is not kept cannot be chosen."""
    key = next(iter(expected(Cursor(2))["word"]))
    (row,) = json.loads(run("lookup", path, "word", "--json", "--", key))
    assert (row["key"], len(row["vector"]), len(row["sum"])) == (key, 5, 1)
    assert str(key) in run("lookup", path, "word", "--", key)
    assert "keys have no row in table 'word' of the sharded store" in error_of("lookup", path, "word", 999)
    assert "has no commit 2: give one of 3" in error_of("lookup", path, "word", 1, "--commit", 2)


def test_commands_that_would_part_the_parts_refuse(path: Path) -> None:
    """A commit of one part alone is none of the store's; what reads one store reads a part."""
    for command in (("compact",), ("reorganize", path)):
        for place, words in ((path, "is a sharded store"), (path / "part-0-1", "is a shard of a sharded store")):
            assert f"{words}, whose shards make commits together: {command[0]} works" in error_of(
                command[0], place, *command[1:]
            )
    assert "part-0-1 is a shard of a store, and all shards make commits together: give the path" in error_of(
        "rollback", path / "part-0-1", "--to", 2
    )
    assert "rows changed" in run("changes", path / "part-0-1", "--since", -1)
    with Store.open(path / "part-0-1", mode="r") as part:
        assert part.commit.id == 3
        assert {table.name for table in part.tables} == {table.name for table in TABLES}
