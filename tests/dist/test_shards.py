"""Shards of a sharded store: commits of all or none."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist import sharded_world
from tests.dist.meeting import meet
from tests.dist.sharded_world import (
    TABLES,
    advance,
    check_shards,
    divide_anew,
    opened,
    sentences,
    sharding_on,
    take,
    train_shards,
)
from tiercache.dist.shard_writer import ShardWriter
from tiercache.errors import RankError, StateError
from tiercache.store import Cursor, Store, verify
from tiercache.store.shards.shard_manifest import ShardManifest

ENGINES = ("lmdb", "zarr")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_sharded_store_goes_on_where_its_ranks_stopped(tmp_path: Path, num_ranks: int, engine: str) -> None:
    """Rows of every sharding, whole, after every commit; a second opening changes nothing."""
    path, cursor = tmp_path / "s", None
    for _ in range(3):
        assert train_shards(path, num_ranks, 3, engine=engine) == [None] * num_ranks
        with Store.open(path, mode="r") as store:
            assert cursor is None or store.commit.cursor > cursor
            cursor = store.commit.cursor
        check_shards(path, cursor)
    assert cursor == Cursor(5, 5)
    before = (path / "shards.json").read_bytes()
    assert train_shards(path, num_ranks, 0) == [None] * num_ranks
    assert (path / "shards.json").read_bytes() == before


def test_a_part_that_is_ahead_steps_back(tmp_path: Path) -> None:
    """Whichever of them made the next commit: all stand where the manifest says, with its rows."""
    for ahead in ([0], [1], [0, 1], [2], [0, 1, 2]):
        path = tmp_path / "".join(map(str, ahead))
        assert train_shards(path, 3, 4) == [None] * 3
        sharded_world.ahead(path, 3, *ahead)
        for rank in range(3):
            with Store.open(path / f"shard-0-{rank}", mode="r") as shard:
                assert shard.commit.id == 3 + (rank in ahead)
        check_shards(path, Cursor(2))  # readers see the manifest's commit before anybody stepped back
        assert train_shards(path, 3, 0) == [None] * 3
        check_shards(path, Cursor(2))
        assert train_shards(path, 3, 3) == [None] * 3
        check_shards(path, Cursor(4))


def test_shards_keep_one_commit_more_than_asked_for(tmp_path: Path) -> None:
    """So that the manifest's is there while the next is made; a later opening may ask for another number."""
    for retention, kept in ((None, 2), (3, 4), (None, 4), (1, 2)):
        assert train_shards(tmp_path / "s", 2, 5, retention=retention) == [None] * 2
        with Store.open(tmp_path / "s" / "shard-0-1", mode="r") as shard:
            assert (shard.retention, len(shard.commits)) == (kept, kept)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_part_keeps_the_commit_of_the_record_whatever_it_commits_beside(tmp_path: Path, engine: str) -> None:
    """Here compactions of one rank's open store: the ranks go on from the commit of all, and it goes when it is old."""
    path = tmp_path / "s"

    def body(ranks: Any) -> list[int]:
        shards, world = opened(path, ranks, engine=engine)
        with shards:
            for _ in range(4):
                take(shards, world)
            for _ in range(3 * ranks.rank):
                shards.store.compact()
            return [commit.id for commit in shards.store.commits]

    assert meet(2, body) == [[2, 3], [3, 6]]
    check_shards(path, Cursor(2))
    assert verify(path)["problems"] == []
    assert train_shards(path, 2, 0) == [None] * 2
    check_shards(path, Cursor(2))
    assert train_shards(path, 2, 3) == [None] * 2
    check_shards(path, Cursor(4))
    with Store.open(path / "shard-0-1", mode="r") as shard:
        assert [commit.id for commit in shard.commits] == [9, 10]


def test_nothing_is_published_unless_all_shards_stand_there(tmp_path: Path) -> None:
    """Another cursor on one rank, a commit that was not made, one that was left out: a sentence on every rank."""
    path = tmp_path / "s"

    def other(ranks: Any) -> None:
        shards, world = opened(path, ranks)
        with shards:
            take(shards, world)
            world.pass_index = 0
            world.train(part=1)
            world.append(shards.store)
            world.pass_index = 1 + ranks.rank
            world.publish(shards.store)
            shards.publish(Cursor(1 + ranks.rank))

    errors = meet(2, other)
    assert all(isinstance(error, StateError) for error in errors)
    assert "rank 1 commits at pass 2 and rank 0 at pass 1" in str(errors[0])
    check_shards(path, Cursor(0))

    def missing(ranks: Any) -> None:
        shards, world = opened(path, ranks)
        with shards:
            if ranks.rank:
                advance(shards.store, world, Cursor(0))
            shards.publish(Cursor(1))

    assert "stands at pass 0 and pass 1 is to be published" in sentences(meet(2, missing))

    def twice(ranks: Any) -> None:
        shards, world = opened(path, ranks)
        with shards:
            for pass_index in (0, 0):
                world.pass_index = pass_index
                world.publish(shards.store)
            shards.publish(Cursor(0))

    errors = meet(2, twice)
    assert all(isinstance(error, StateError) for error in errors)
    assert "made 2 commits since the manifest was written" in str(errors[0])


def test_a_publication_that_found_no_room_may_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank hears of it, and the manifest before stands."""
    path, full = tmp_path / "s", [False]
    plain = ShardManifest.write

    def write(manifest: ShardManifest, directory: Path) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        plain(manifest, directory)

    monkeypatch.setattr(ShardManifest, "write", write)

    def body(ranks: Any) -> Any:
        shards, world = opened(path, ranks)
        with shards:
            take(shards, world)
            ranks.all_gather_object(None)
            full[0] = True
            ranks.all_gather_object(None)
            with pytest.raises(OSError if ranks.rank == 0 else RankError, match="No space left"):
                take(shards, world)
            assert ShardManifest.read(path).cursor == Cursor(0)
            ranks.all_gather_object(None)
            full[0] = False
            ranks.all_gather_object(None)
            shards.publish(Cursor(1))
            take(shards, world)

    assert meet(2, body) == [None, None]
    check_shards(path, Cursor(1, 5))


def test_what_was_never_committed_is_made_anew(tmp_path: Path) -> None:
    """By as many ranks, or by more; nothing of the first attempt is left, and nothing else is touched."""
    path = tmp_path / "s"
    assert train_shards(path, 2, 0) == [None] * 2
    (path / "shard-7-0").mkdir()  # nobody's
    assert train_shards(path, 3, 2) == [None] * 3
    check_shards(path, Cursor(1))
    names = {entry.name for entry in path.iterdir()}
    new = {f"shard-1-{rank}" for rank in range(3)}
    assert names == {"shards.json", "ranks.lock", "writer.lock", "shard-7-0", *new, *(f"{name}.json" for name in new)}


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3), (3, 2), (2, 2)])
def test_shards_of_another_division_take_the_place_of_the_old_ones(tmp_path: Path, before: int, after: int) -> None:
    """Beside them until one manifest names them; a reader sees the old rows before, the new shards after."""
    path = tmp_path / "s"
    assert train_shards(path, before, 4) == [None] * before
    seen: list[tuple[str, int]] = []

    def note(**what: object) -> None:
        manifest = ShardManifest.read(path)
        assert manifest is not None
        seen.extend((name, manifest.generation) for name in what)

    assert meet(after, lambda ranks: divide_anew(path, ranks, sharding_on(ranks.size, 1), note)) == [None] * after
    assert set(seen) == {("switching", 0), ("done", 1)}
    check_shards(path, Cursor(2))
    names = {entry.name for entry in path.iterdir()}
    new = {f"shard-1-{rank}" for rank in range(after)}
    assert names == {"shards.json", "ranks.lock", "writer.lock", *new, *(f"{name}.json" for name in new)}
    assert train_shards(path, after, 3, turn=1) == [None] * after
    check_shards(path, Cursor(4))
    assert ShardManifest.read(path).obsolete == ()


def test_a_division_that_was_begun_changes_nothing(tmp_path: Path) -> None:
    """Its folders go when the store is opened for writing; readers never see them."""
    path = tmp_path / "s"
    assert train_shards(path, 2, 4) == [None] * 2

    def body(ranks: Any) -> None:
        sharding = sharding_on(ranks.size, 1)
        ShardWriter.begin_generation(path, TABLES, sharding, ranks).close()

    assert meet(3, body) == [None] * 3
    assert (path / "shard-1-2" / "store.json").exists()
    check_shards(path, Cursor(2))
    assert meet(1, body) == [None]  # once more, without opening it for training between
    assert not list(path.glob("shard-1-*"))
    assert (path / "shard-2-0" / "store.json").exists()
    check_shards(path, Cursor(2))
    assert train_shards(path, 2, 0) == [None] * 2
    assert not list(path.glob("shard-2-*"))
    check_shards(path, Cursor(2))
    assert ShardManifest.read(path).obsolete == ()


def test_shards_may_be_on_other_disks_and_move(tmp_path: Path) -> None:
    """Each in the folder that was given for its rank; moved by hand, with shard_dirs= saying where to."""
    path, disks = tmp_path / "s", [tmp_path / "disk 0", tmp_path / "disk ü" / "deep"]
    assert train_shards(path, 2, 3, shard_dirs=disks) == [None] * 2
    assert (disks[1] / "shard-0-1" / "store.json").exists()
    check_shards(path, Cursor(1, 5))
    assert train_shards(path, 2, 1) == [None] * 2
    (tmp_path / "new").mkdir()
    for name in ("shard-0-1", "shard-0-1.json"):
        (disks[1] / name).rename(tmp_path / "new" / name)
    assert "is missing: there is no" in sentences(train_shards(path, 2, 0))
    assert train_shards(path, 2, 1, shard_dirs=[disks[0], tmp_path / "new"]) == [None] * 2
    check_shards(path, Cursor(3))
    with pytest.raises(ValueError, match="shard_dirs= names 1 folders for 2 ranks: give one for each rank"):
        raise train_shards(path, 2, 0, shard_dirs=[disks[0]])[0]
    assert "is there already" in sentences(train_shards(tmp_path / "other", 2, 0, shard_dirs=disks))


def test_a_mark_and_a_record_are_plain_json(tmp_path: Path) -> None:
    """For people who look."""
    path = tmp_path / "s"
    assert train_shards(path, 2, 2) == [None] * 2
    manifest, mark = (json.loads((path / name).read_text()) for name in ("shards.json", "shard-0-1.json"))
    (commit,) = manifest["commits"]
    assert [len(digest) for digest in commit.pop("digests")] == [64, 64]
    assert commit == {"id": 1, "cursor": [1, 0], "shards": [1, 1]}
    assert manifest["shards"] == ["shard-0-0", "shard-0-1"]
    assert mark["store"] == manifest["id"]
