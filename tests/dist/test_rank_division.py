"""Dividing a store over another number of ranks: by one commit, at any interruption, on any disks."""

from pathlib import Path
from typing import Any

import pytest

from tests.dist import sharded_world
from tests.dist.meeting import meet
from tests.dist.sharded_world import (
    TABLES,
    check_shards,
    divide_among,
    divide_anew,
    roll_back,
    sentences,
    sharding_on,
    train_on,
    train_shards,
    world_of,
)
from tests.dist.test_shards import ENGINES, digest, folders, rank_folders, stored
from tests.files import files_of
from tiercache.dist.shard_writer import ShardWriter
from tiercache.store import Cursor, Store, verify


@pytest.mark.sampled(4)
@ENGINES
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 1), (1, 3), (3, 2), (2, 2)])
def test_ranks_of_another_division_take_the_place_of_the_old_ones(
    tmp_path: Path, before: int, after: int, engine: str
) -> None:
    """One commit does it: a reader sees the old ranks' rows before it and the new ranks' after it."""
    path = tmp_path / "s"
    train_on(path, before, 4, engine=engine, retention=2)
    seen: list[tuple[str, int, int]] = []

    def note(**what: object) -> None:
        with Store.open(path, mode="r") as store:
            seen.extend((name, len(store.ranks), store.commit.id) for name in what)
            assert list(sharded_world.problems(store) if before > 1 or "done" in what else ()) == []

    assert meet(after, lambda ranks: divide_anew(path, ranks, sharding_on(ranks.size, 1), note)) == [None] * after
    in_parts = [num_ranks if num_ranks > 1 else 0 for num_ranks in (before, after)]
    assert {one for one in seen if one[0] == "done"} == {("done", in_parts[1], 4)}
    assert ("switching", in_parts[0], 3) in seen
    check_shards(path, Cursor(2))
    assert folders(path) == rank_folders(after)
    with Store.open(path, mode="r") as store:
        assert [commit.id for commit in store.commits] == [4]
        assert store.retention == 2
        assert after > 1 or (store.ranks, store.commit.sharding, store.commit.folders) == ((), None, ())
    for rank, names in enumerate(stored(path)):
        assert {name.split("-")[0] for name in names if name.startswith("ranks/")} == {f"ranks/{rank}.4"}
    assert verify(path)["problems"] == []
    train_on(path, after, 3, Cursor(4), turn=1)
    assert folders(path) == rank_folders(after)


@pytest.mark.sampled(4)
@ENGINES
@pytest.mark.parametrize("until", ["opened", "filled", "prepared", "abandoned"])
def test_a_division_that_was_begun_changes_nothing(tmp_path: Path, until: str, engine: str) -> None:
    """Its folders go when it is abandoned, or when the store is opened for writing; readers never see them."""
    path = tmp_path / "s"
    train_on(path, 2, 4, engine=engine)
    before, names, blobs = digest(path), {*files_of(path)}, stored(path)

    def body(ranks: Any) -> None:
        sharding = sharding_on(ranks.size, 1)
        shards, world = ShardWriter.open(path, TABLES, sharding, ranks, resharded=True), world_of(sharding, ranks.rank)
        world.pass_index = 1
        world.train(part=1)
        if until != "opened":
            world.append(shards.store)
        if until in {"prepared", "abandoned"}:
            world.pass_index = 2
            world.publish(shards.store)
        if until == "abandoned":
            shards.abandon()
        shards.close()

    def assert_unchanged() -> None:
        assert folders(path) == {"rank-1"}
        assert digest(path) == before
        assert stored(path) == blobs
        check_shards(path, Cursor(2))

    assert meet(3, body) == [None] * 3
    if until != "abandoned":
        assert (path / "rank-2" / "store.json").exists()
    elif engine == "lmdb":
        assert {*files_of(path)} == names
    check_shards(path, Cursor(2))
    assert meet(1, body) == [None]  # once more, without opening it for training between
    assert folders(path) == {"rank-1"}
    assert meet(3, body) == [None] * 3
    train_on(path, 2, 0)
    assert_unchanged()
    assert meet(3, body) == [None] * 3
    Store.open(path).close()
    assert_unchanged()
    train_on(path, 2, 1, Cursor(3))


def test_ranks_may_be_on_other_disks_and_move(tmp_path: Path) -> None:
    path, disk = tmp_path / "s", tmp_path / "disk ü" / "deep"
    train_on(path, 2, 3, shard_dirs=[path, disk])
    assert (disk / "rank-1" / "store.json").exists()
    assert folders(path) == set()
    check_shards(path, Cursor(1, 5))
    train_on(path, 2, 1)
    (tmp_path / "new").mkdir()
    (disk / "rank-1").rename(tmp_path / "new" / "rank-1")
    assert "does not exist: restore it from a copy" in sentences(train_shards(path, 2, 0))
    train_on(path, 2, 1, Cursor(3), shard_dirs=[path, tmp_path / "new"])
    train_on(path, 2, 1, Cursor(3, 5))
    other = tmp_path / "other"
    words = "exists and is not a rank of this store"
    assert words in sentences(train_shards(other, 2, 0, shard_dirs=[other, tmp_path / "new"]))
    check_shards(path, Cursor(3, 5))


def test_older_commits_are_read_and_rolled_back_to_where_a_rank_is_now(tmp_path: Path) -> None:
    path = tmp_path / "s"
    train_on(path, 2, 3, retention=5, shard_dirs=[path, tmp_path / "old"])
    (tmp_path / "new").mkdir()
    (tmp_path / "old" / "rank-1").rename(tmp_path / "new" / "rank-1")
    train_on(path, 2, 1, shard_dirs=[path, tmp_path / "new"])
    with Store.open(path, mode="r", commit=1) as store:
        assert store.commit.cursor == Cursor(1)
        assert list(sharded_world.problems(store)) == []
    with Store.open(path, mode="r") as store, store.at(1) as older:
        assert list(sharded_world.problems(older)) == []
    assert roll_back(path, 1).id == 4
    check_shards(path, Cursor(1))
    train_on(path, 2, 1, Cursor(1, 5))
    assert verify(path)["problems"] == []


@pytest.mark.parametrize("to", [1, 2, 3])
def test_a_division_deletes_what_only_old_ranks_had_on_their_disks(tmp_path: Path, to: int) -> None:
    """Their old folders are taken from the commit; new ranks are in the store's folder unless others are given."""
    path, disks = tmp_path / "s", [tmp_path / "disk 1", tmp_path / "disk 2"]
    train_on(path, 3, 4, shard_dirs=[path, *disks])
    assert [[*disk.iterdir()] for disk in disks] == [[disks[0] / "rank-1"], [disks[1] / "rank-2"]]
    assert divide_among(path, to, 1) == [None] * to
    check_shards(path, Cursor(2))
    assert [[*disk.iterdir()] for disk in disks] == [[], []]
    assert folders(path) == rank_folders(to)
