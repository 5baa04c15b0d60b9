"""Inspecting a store of several ranks: ``tiercache info``, ``verify`` and ``lookup``."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.command import error_of, run, told
from tests.dist.sharded_world import TABLES, ShardWorld, expected, on_ranks, sharding_on, take, train_on, world_of
from tests.dist.test_sharded_store import go_on as go_on_elsewhere
from tiercache.dist.shard_writer import ShardWriter
from tiercache.store import (
    CorruptStoreError,
    Cursor,
    NotAStoreError,
    Store,
    StoreInUseError,
    TableMismatchError,
    info,
    verification,
    verify,
)
from tiercache.store.verification import Verification


@pytest.fixture
def path(tmp_path: Path) -> Path:
    train_on(tmp_path / "s", 3, 4)
    return tmp_path / "s"


def test_info_counts_every_row_once(path: Path) -> None:
    found = json.loads(run("info", path, "--json"))
    wanted = {name: len(keys) for name, keys in expected(Cursor(2)).items()}
    assert {table["name"]: table["rows"] for table in found["tables"]} == wanted
    assert found["rows"] == sum(wanted.values())
    assert found["cursor"] == {"pass": 2, "sample": 0}
    with Store.open(path, mode="r") as store:
        segments = [len(rank.segments) for rank in store.ranks]
        assert len(store.segments) == sum(segments)
    assert found["commits"] == [{"id": 3, "pass": 2, "sample": 0, "segments": sum(segments)}]
    for rank, one in enumerate(found["shards"]):
        assert one["commit"]["id"] == 3
        assert one["commits"] == [{"id": 3, "pass": 2, "sample": 0, "segments": segments[rank]}]
        assert len(one["segments"]) == segments[rank]
    assert found["folders"] == [str(path), str(path / "rank-1"), str(path / "rank-2")]
    blocks = sum(file.stat().st_blocks for file in path.rglob("*") if file.is_file())
    assert found["file_bytes"] == sum(one["file_bytes"] for one in found["shards"]) == 512 * blocks
    word = next(table for table in found["tables"] if table["name"] == "word")
    assert word["sharding"] == {"kind": "column_wise", "slices": [[0, 0, 2], [1, 2, 4], [2, 4, 5]]}
    shown = run("info", path)
    assert "ranks    3" in shown
    assert "commit   3, training resumes at pass 2" in shown
    assert "column_wise: 2 on rank 0, 2 on rank 1, 1 on rank 2" in shown
    assert "table_wise: rank 2" in shown
    assert "rank-2" in shown
    assert "segments of rank 2" in run("info", path, "--segments")


def test_info_of_a_store_on_other_disks(tmp_path: Path) -> None:
    path = tmp_path / "s"
    disks = [path, tmp_path / "a", tmp_path / "b"]
    train_on(path, 3, 4, shard_dirs=disks)
    found = info(path)
    assert found["folders"] == [str(path), str(tmp_path / "a" / "rank-1"), str(tmp_path / "b" / "rank-2")]
    blocks = sum(file.stat().st_blocks for file in tmp_path.rglob("*") if file.is_file())
    assert found["file_bytes"] == sum(one["file_bytes"] for one in found["shards"]) == 512 * blocks
    assert "3 ranks at " in run("verify", path)


def test_info_of_a_store_without_a_commit(tmp_path: Path) -> None:
    train_on(tmp_path / "s", 2, 0)
    assert (info(tmp_path / "s")["commit"], info(tmp_path / "s")["commits"]) == (None, [])
    assert "commit   none yet\n  rows     0, " in run("info", tmp_path / "s")
    assert "is intact" in run("verify", tmp_path / "s")


def test_verify_reads_all_ranks(path: Path) -> None:
    assert "rows in 3 ranks at " in run("verify", path)
    found = told("verify", path)
    assert found["problems"] == []
    assert found["ranks"] == len(found["shards"]) == 3
    assert found["rows"] == info(path)["rows"]
    assert found["stored_rows"] == sum(one["stored_rows"] for one in found["shards"]) >= found["rows"] > 0
    calls: list[tuple[int, int]] = []
    verify(path, progress=lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == calls[-1][1] == found["bytes"]


@pytest.mark.parametrize("name", ["data.mdb", "rank-2/data.mdb"])
def test_verify_says_which_rank_is_damaged(path: Path, name: str) -> None:
    with (path / name).open("r+b") as file:
        file.seek(2 * 4096)
        file.write(bytes(np.random.default_rng(0).bytes(20_000)))
    found = verify(path)["problems"]
    assert found
    assert all(str(path / name).removesuffix("data.mdb") in sentence for sentence in found)
    assert any("rank-2" in sentence for sentence in found) == (name != "data.mdb")


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_rows_that_belong_to_other_ranks_are_problems(tmp_path: Path, engine: str) -> None:
    """Even if no byte is damaged; and slices of a table with different keys."""
    path = tmp_path / "s"

    def body(ranks: Any, shards: ShardWriter, world: ShardWorld) -> None:
        other = world_of(sharding_on(3), 1 - ranks.rank) if ranks.rank < 2 else world
        for keys, others in zip(world.passes, other.passes, strict=True):
            keys["item"] = others["item"]
            keys["word"] = keys["word"][ranks.rank :]
        for _ in range(4):
            take(shards, world)

    assert on_ranks(path, 3, body, engine=engine) == [None] * 3
    found = verify(path)["problems"]
    for words in (
        "rank 0 of the store at .* has rows of table 'item' that the sharding gives to other ranks: restore",
        "rank 1 of the store at .* has rows of table 'item' that the sharding gives to other ranks: restore",
        "the slices of table 'word' of the store at .* have .* rows: restore the store from a copy",
    ):
        (sentence,) = (one for one in found if re.search(words, one))
        found.remove(sentence)
    assert found == []
    with (
        Store.open(path, mode="r") as store,
        pytest.raises(CorruptStoreError, match=r"'word' of .* have different keys"),
    ):
        list(store.scan("word"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("meanwhile", ["trained", "rolled back", "compacted", "divided", "one rank"])
@pytest.mark.parametrize(("engine", "after"), [("zarr", 1), ("lmdb", 2), ("zarr", 3)])
def test_a_training_beside_verification_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str, engine: str, after: int
) -> None:
    """After the store was opened, or one rank was verified, or both: older commits go, or ranks do."""
    path, calls, told = tmp_path / "s", [0], list[dict[str, Any]]()
    train_on(path, 2, 4, engine=engine, retention=3)

    def counted(plain: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == after:
                go_on(path, meanwhile)
            return plain(*arguments, **options)

        return call

    monkeypatch.setattr(Verification, "run", counted(Verification.run))
    monkeypatch.setattr(verification, "_strays", counted(verification._strays))
    monkeypatch.setattr(verification, "_say", lambda **message: told.append(message))
    verification.main(str(path), deep=True)
    assert calls[0] >= after
    assert told[-1]["kind"] == "report"
    assert told[-1]["report"]["problems"] == []
    monkeypatch.undo()
    assert verify(path)["problems"] == []
    assert info(path)["rows"]


MAKE_COMMITS = """
import sys
from tiercache.store import Store
with Store.open(sys.argv[1]) as store:
    for _ in range(4):
        store.compact() if sys.argv[2] == "compacted" else store.rollback(store.commits[0].id)
"""


def go_on(path: Path, meanwhile: str) -> None:
    """Make commits, in another process, that replace all existing ones."""
    match meanwhile:
        case "trained":
            go_on_elsewhere(path, 2, 4)
        case "divided":
            go_on_elsewhere(path, 3)
        case "one rank":
            go_on_elsewhere(path, 1)
        case _:
            subprocess.run([sys.executable, "-c", MAKE_COMMITS, str(path), meanwhile], check=True)


def test_lookup_shows_whole_rows(path: Path) -> None:
    key = next(iter(expected(Cursor(2))["word"]))
    (row,) = json.loads(run("lookup", path, "word", "--json", "--", key))
    assert (row["key"], len(row["vector"]), len(row["sum"])) == (key, 5, 1)
    assert str(key) in run("lookup", path, "word", "--", key)
    assert "keys have no row in table 'word' of the store" in error_of("lookup", path, "word", 999)
    assert "has no commit 2: pass one of 3" in error_of("lookup", path, "word", 1, "--commit", 2)


def test_commands_are_for_all_ranks(path: Path) -> None:
    words = "/rank-1 has the rows of one rank of a store: pass the path of the whole store, which all ranks commit"
    for command in (
        ("info",), ("verify",), ("compact",), ("reorganize", path), ("rollback", "--to", 2), ("pin", "best"), ("diff",),
        ("unpin", "best"), ("changes", "--since", -1), ("lookup", "item", 1),
        ("export", path / "out", "--format", "numpy"),
    ):  # fmt: skip
        assert words in error_of(command[0], path / "rank-1", *command[1:]), command
    for open_rank in (lambda: Store.open(path / "rank-1"), lambda: Store.open(path / "rank-1", mode="r")):
        with pytest.raises(NotAStoreError, match=words):
            open_rank()
    before = {name: len(keys) for name, keys in expected(Cursor(2)).items()}
    with Store.open(path, mode="r") as store:
        rows = {table.name: [keys.tolist() for keys, _ in store.ranks[1].scan(table.name)] for table in TABLES}
    assert f"commit 4 has {sum(before.values())} rows in hash order" in run("compact", path)
    with Store.open(path, mode="r") as store:
        assert {table.name: store.live_rows(table.name) for table in TABLES} == before
        assert [commit.id for commit in store.commits] == [4]
        assert rows == {table.name: [keys.tolist() for keys, _ in store.ranks[1].scan(table.name)] for table in TABLES}
        assert [len(rank.segments) for rank in store.ranks] == [1, 1, 1]
    assert run("verify", path)


def test_one_process_writes_no_rows(path: Path) -> None:
    """Operations on all ranks are allowed; a training's collective ones are refused with a message."""
    with Store.open(path) as store:
        assert store.mode == "a"
        for write in (
            store.discard_uncommitted,
            lambda: store.append(0, [], []),
            lambda: store.publish(Cursor(9), state=b"", schedule_digest="", settings={}, environment={}),
            store.overlay,
            lambda: store.commit_writer,
        ):
            with pytest.raises(ValueError, match=r"has 3 ranks, which write its rows together: train on it, or train"):
                write()
        with pytest.raises(ValueError, match="has 3 ranks: read its rows by lookup, scan or changes"), store.pinned():
            pass
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
    with pytest.raises(ValueError, match="was created with engine 'lmdb', not 'zarr'"):
        Store.open(path, engine="zarr")
