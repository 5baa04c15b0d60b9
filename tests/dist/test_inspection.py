"""Looking at a sharded store from outside: ``tiercache info``, ``verify`` and ``lookup``."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.command import error_of, run
from tests.dist.meeting import meet
from tests.dist.sharded_world import TABLES, divide_anew, expected, sharding_on, train_shards
from tiercache.store import Cursor, Store, StoreInUseError, TableMismatchError, info, inspect, verify
from tiercache.store.shards.shard_manifest import ShardCommit, ShardManifest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store of three shards after some commits."""
    assert train_shards(tmp_path / "s", 3, 4) == [None] * 3
    return tmp_path / "s"


def test_info_counts_every_row_once(path: Path) -> None:
    """By table over all shards, slices of a table together; and each shard for itself."""
    found = json.loads(run("info", path, "--json"))
    wanted = {name: len(keys) for name, keys in expected(Cursor(2)).items()}
    assert {table["name"]: table["rows"] for table in found["tables"]} == wanted
    assert found["rows"] == sum(wanted.values())
    assert found["cursor"] == {"pass": 2, "sample": 0}
    assert found["commits"] == [{"id": 3, "pass": 2, "sample": 0, "shards": [3, 3, 3]}]
    assert [shard["commit"]["id"] for shard in found["shards"]] == [3, 3, 3]
    word = next(table for table in found["tables"] if table["name"] == "word")
    assert word["sharding"] == {"kind": "column_wise", "slices": [[0, 0, 2], [1, 2, 4], [2, 4, 5]]}
    kept = json.loads((path / "shards.json").read_text())["sharding"]["tables"]
    assert {one["kind"] for one in kept.values()} == {"row", "table", "column", "replicate"}  # bytes on disk stay
    shown = run("info", path)
    assert "shards   3, one a rank" in shown
    assert "commit   3, training goes on at pass 2" in shown
    assert "column_wise: 2 on rank 0, 2 on rank 1, 1 on rank 2" in shown
    assert "table_wise: rank 2" in shown
    assert "shard-0-2" in shown
    assert "segments of shard 2" in run("info", path, "--segments")


def test_info_of_a_store_without_a_commit(tmp_path: Path) -> None:
    """Says so, and who was to have which rows."""
    assert train_shards(tmp_path / "s", 2, 0) == [None, None]
    assert info(tmp_path / "s")["cursor"] is None
    assert "commit   none yet\n  rows     0 live rows" in run("info", tmp_path / "s")
    assert "is whole" in run("verify", tmp_path / "s")


def test_verify_reads_all_shards_and_whether_they_belong_together(path: Path, tmp_path: Path) -> None:
    """A damaged shard, one that is missing, rows of another rank, slices with different keys."""
    assert "is whole: 3 shards that belong together" in run("verify", path)
    found = json.loads(run("verify", path, "--json"))
    assert found["problems"] == []
    assert found["rows"] == sum(shard["rows"] for shard in found["shards"]) > 0
    calls: list[tuple[int, int]] = []
    verify(path, progress=lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == calls[-1][1] == found["bytes"]

    def words(damaged: Path) -> str:
        (sentence,) = verify(damaged)["problems"]
        assert "\n" not in sentence
        assert error_of("verify", damaged) == sentence
        return str(sentence)

    copies = [tmp_path / str(i) for i in range(4)]
    for copy in copies:
        shutil.copytree(path, copy)
    shutil.rmtree(copies[0] / "shard-0-1")
    assert "shard 1: there is no store at" in words(copies[0])
    with (copies[1] / "shard-0-2" / "data.mdb").open("r+b") as file:
        file.seek(2 * 4096)
        file.write(bytes(np.random.default_rng(0).bytes(20_000)))
    assert any("shard 2: " in problem for problem in verify(copies[1])["problems"])
    for name in ("shard-0-1", "shard-0-2"):
        (copies[2] / name).rename(copies[2] / f"{name} x")
    for old, new in (("shard-0-1 x", "shard-0-2"), ("shard-0-2 x", "shard-0-1")):
        (copies[2] / old).rename(copies[2] / new)
    assert "commit 3 of shard 1 of" in words(copies[2])
    manifest = ShardManifest.read(copies[2])
    one, *others = (ShardCommit(3, digest) for digest in manifest.newest.digests)
    manifest.renewed([one, *others[::-1]]).write(copies[2])
    strays = verify(copies[2])["problems"]
    assert any("shard 1 of the store at" in one and "gives to other ranks" in one for one in strays)
    manifest = ShardManifest.read(copies[3])
    others = [ShardCommit(3, digest) for digest in manifest.newest.digests]
    manifest.renewed([*others[:2], ShardCommit(2, others[2].digest)]).write(copies[3])
    assert "commit 2 of shard 2 of" in words(copies[3])


@pytest.mark.parametrize("meanwhile", ["trained", "rolled back", "compacted", "sharded anew", "made plain"])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_training_beside_verification_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str, after: int
) -> None:
    """After one shard was verified, or both, or the first commit of both: older commits go, or all shards do."""
    path, calls = tmp_path / "s", [0]
    assert train_shards(path, 2, 4, retention=3) == [None] * 2

    def counted(plain: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[0] += 1
            found = plain(*arguments, **options)
            if calls[0] == after:
                go_on(path, meanwhile)
            return found

        return call

    monkeypatch.setattr(inspect, "_verify_plain", counted(inspect._verify_plain))
    monkeypatch.setattr(inspect, "_strays", counted(inspect._strays))
    assert verify(path)["problems"] == []
    assert info(path)["rows"]


def go_on(path: Path, meanwhile: str) -> None:
    """Make commits that give up all that there were."""
    match meanwhile:
        case "trained":
            assert train_shards(path, 2, 4) == [None] * 2
        case "sharded anew":
            assert meet(3, lambda ranks: divide_anew(path, ranks, sharding_on(3, 1))) == [None] * 3
        case "made plain":
            assert meet(1, lambda ranks: divide_anew(path, ranks, sharding_on(1), plain=True)) == [None]
        case _:
            with Store.open(path) as store:
                for _ in range(4):
                    if meanwhile == "compacted":
                        store.compact()
                    else:
                        store.rollback(store.commits[0].id)


def test_lookup_shows_whole_rows(path: Path) -> None:
    """As they are over all shards; a commit that is not kept cannot be chosen."""
    key = next(iter(expected(Cursor(2))["word"]))
    (row,) = json.loads(run("lookup", path, "word", "--json", "--", key))
    assert (row["key"], len(row["vector"]), len(row["sum"])) == (key, 5, 1)
    assert str(key) in run("lookup", path, "word", "--", key)
    assert "keys have no row in table 'word' of the store" in error_of("lookup", path, "word", 999)
    assert "has no commit 2: give one of 3" in error_of("lookup", path, "word", 1, "--commit", 2)


def test_commands_that_write_are_for_all_shards(path: Path) -> None:
    """A commit of one shard alone is none of the store's; what reads one store reads a shard."""
    for command in (("compact",), ("reorganize", path), ("rollback", "--to", 2)):
        assert "shard-0-1 is one shard of a store, and all shards make commits together: give the path" in error_of(
            command[0], path / "shard-0-1", *command[1:]
        )
    assert "rows changed" in run("changes", path / "shard-0-1", "--since", -1)
    with Store.open(path / "shard-0-1", mode="r") as shard:
        assert shard.commit.id == 3
        assert {table.name for table in shard.tables} == {table.name for table in TABLES}
        rows = {table.name: [keys.tolist() for keys, _ in shard.scan(table.name)] for table in TABLES}
    before = {name: len(keys) for name, keys in expected(Cursor(2)).items()}
    assert f"commit 4 has {sum(before.values())} rows in hash order" in run("compact", path)
    with Store.open(path, mode="r") as store:
        assert {table.name: store.live_rows(table.name) for table in TABLES} == before
        assert [commit.id for commit in store.commits] == [4]
        assert rows == {table.name: [keys.tolist() for keys, _ in store.shards[1].scan(table.name)] for table in TABLES}
    assert run("verify", path)


def test_one_process_writes_to_no_shard(path: Path) -> None:
    """What it may do to all shards it may; what a store of one process may beside that is refused in a sentence."""
    with Store.open(path) as store:
        assert store.mode == "a"
        for write in (
            store.discard_uncommitted,
            lambda: store.append(0, [], []),
            lambda: store.publish(Cursor(9), state=b"", schedule_digest="", settings={}, environment={}),
            lambda: store.segments,
        ):
            with pytest.raises(ValueError, match=r"has 3 shards, which the ranks of a training write together: train"):
                write()
        with pytest.raises(StoreInUseError, match=r"is being written by process .*this process"):
            Store.open(path)
        assert [store.rollback(3).id, store.compact().id] == [4, 5]
        assert (store.commit.id, store.commit.cursor) == (5, Cursor(2))
        assert {table.name: store.live_rows(table.name) for table in TABLES} == {
            name: len(keys) for name, keys in expected(Cursor(2)).items()
        }
    with Store.open(path, mode="r") as store, pytest.raises(ValueError, match="is open for reading"):
        store.compact()
    with pytest.raises(TableMismatchError, match="has a table 'item' that was not given"):
        Store.open(path, tables=TABLES[1:])
    with pytest.raises(ValueError, match="was made with engine 'lmdb', not 'zarr'"):
        Store.open(path, engine="zarr")
