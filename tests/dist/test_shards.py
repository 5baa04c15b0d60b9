"""The ranks of a store: they make every commit together, or none of them does."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.dist import sharded_world
from tests.dist.meeting import meet
from tests.dist.sharded_world import (
    TABLES,
    ShardWorld,
    advance,
    check_shards,
    cursor_of,
    divide_among,
    on_ranks,
    sentences,
    sharding_on,
    take,
    train_on,
)
from tiercache.dist.shard_writer import ShardWriter
from tiercache.errors import RankError, StateError
from tiercache.store import Cursor, Store, StoreError, StoreFullError, info, verify
from tiercache.store.commit_writer import CommitWriter
from tiercache.store.compaction_plan import NoUses
from tiercache.store.opening import newest_record, open_folder
from tiercache.store.rank_writer import RankWriter
from tiercache.store.sharding import ShardingPlan, TableSharding

ENGINES = pytest.mark.parametrize("engine", ["lmdb", "zarr"])


def folders(path: Path) -> set[str]:
    return {entry.name for entry in path.glob("rank-*")}


def rank_folders(num_ranks: int) -> set[str]:
    return {f"rank-{rank}" for rank in range(1, num_ranks)}


def stored(path: Path) -> list[set[str]]:
    """Return the blobs of each rank by name, once uncommitted ones are dropped."""
    with Store.open(path) as store:
        return [{*rank._opened.engine.list()} for rank in store.ranks or (store,)]


def lists_of(path: Path, rank: int, engine: str) -> set[str]:
    """Return the durable lists of a rank above 0, by their names in commits."""
    whole = open_folder(path / f"rank-{rank}", TABLES, engine, "r", None, create=False)
    try:
        return {name.split("-")[0] for name in whole.engine.list() if name.startswith("ranks/")}
    finally:
        whole.close()


def no_room() -> StoreFullError:
    return StoreFullError(needed_bytes=100, limit="no space is left on the disk", advice="free some")


def digest(path: Path) -> str:
    with Store.open(path, mode="r") as store:
        return store.commit.digest


@pytest.mark.sampled(3)
@ENGINES
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_store_of_several_ranks_resumes_where_they_stopped(tmp_path: Path, num_ranks: int, engine: str) -> None:
    path, cursor = tmp_path / "s", None
    for _ in range(3):
        train_on(path, num_ranks, 3, engine=engine)
        with Store.open(path, mode="r") as store:
            assert cursor is None or store.commit.cursor > cursor
            cursor = store.commit.cursor
            assert len(store.ranks) == (num_ranks if num_ranks > 1 else 0)
        check_shards(path, cursor)
    assert cursor == Cursor(5, 5)
    before = digest(path)
    train_on(path, num_ranks, 0)
    assert digest(path) == before
    check_shards(path, cursor)
    assert folders(path) == rank_folders(num_ranks)


@pytest.mark.sampled(5)
@ENGINES
@pytest.mark.parametrize("ahead", [[0], [1], [0, 1], [2], [0, 1, 2]])
def test_what_some_ranks_prepared_is_dropped_at_the_next_opening(tmp_path: Path, ahead: list[int], engine: str) -> None:
    """For any of them, even all: the previous commit is valid, and nothing of the next one remains."""
    path = tmp_path / "s"
    train_on(path, 3, 4, engine=engine)
    before, blobs = digest(path), stored(path)
    commits = info(path)["commits"]
    sharded_world.ahead(path, 3, *ahead)
    for rank in (1, 2):
        assert (f"ranks/{rank}.4" in lists_of(path, rank, engine)) == (rank in ahead)
    check_shards(path, Cursor(2))
    assert verify(path)["problems"] == []
    assert info(path)["commits"] == commits
    train_on(path, 3, 0)
    assert digest(path) == before
    assert stored(path) == blobs
    check_shards(path, Cursor(2))
    sharded_world.ahead(path, 3, *ahead)
    with Store.open(path) as store:  # all ranks in one process
        assert store.commit.digest == before
    assert stored(path) == blobs
    train_on(path, 3, 3, Cursor(4))
    with Store.open(path, mode="r") as store:
        assert store.commit.id == 6


def compact(shard: Store) -> None:
    """Prepare the compaction of one rank's rows."""
    assert shard.commit is not None
    shard.rewrite(NoUses(), schedule_digest="", retain_segments=False, start=shard.commit.cursor)


@pytest.mark.sampled(1)
@ENGINES
def test_a_rank_that_prepared_a_commit_prepares_no_other_one(tmp_path: Path, engine: str) -> None:
    """A rewrite of one rank is not a commit of the store; one of all ranks is."""
    path = tmp_path / "s"

    def alone(ranks: Any, shards: ShardWriter, world: ShardWorld) -> list[int]:
        for _ in range(4):
            take(shards, world)
        if ranks.rank:
            compact(shards.store)
            for step in (lambda: compact(shards.store), lambda: advance(shards.store, world, cursor_of(shards))):
                with pytest.raises(StoreError, match=r"commit 4 of .* waits for the other ranks: publish it"):
                    step()
        with pytest.raises(StateError if ranks.rank == 0 else RankError, match="has prepared no commit"):
            shards.publish()
        return [commit.id for commit in shards.store.commits]

    assert on_ranks(path, 2, alone, engine=engine) == [[3], [3]]
    assert verify(path)["problems"] == []
    train_on(path, 2, 0, Cursor(2))
    train_on(path, 2, 3, Cursor(4))

    def together(_: Any, shards: ShardWriter, __: ShardWorld) -> list[int]:
        for _ in range(2):
            compact(shards.store)
            shards.publish()
        return [commit.id for commit in shards.store.commits]

    assert on_ranks(path, 2, together) == [[8], [8]]
    check_shards(path, Cursor(4))
    assert verify(path)["problems"] == []


def test_nothing_is_published_unless_all_ranks_prepared_it(tmp_path: Path) -> None:
    path = tmp_path / "s"
    train_on(path, 2, 1, Cursor(0))

    def other(ranks: Any, shards: ShardWriter, world: ShardWorld) -> None:
        world.pass_index = 0
        world.train(part=1)
        world.append(shards.store)
        world.pass_index = 1 + ranks.rank
        world.publish(shards.store)
        shards.publish(Cursor(1 + ranks.rank))

    def missing(ranks: Any, shards: ShardWriter, world: ShardWorld) -> None:
        if ranks.rank:
            advance(shards.store, world, Cursor(0))
        shards.publish(Cursor(1))

    def elsewhere(_: Any, shards: ShardWriter, world: ShardWorld) -> None:
        advance(shards.store, world, Cursor(0))
        shards.publish(Cursor(2))

    for body, words in (
        (other, "rank 1 commits at pass 2 but rank 0 at pass 1"),
        (missing, "has prepared no commit, but pass 1 is to be published"),
        (elsewhere, "is at pass 1, but pass 2 is to be published"),
    ):
        errors = on_ranks(path, 2, body)
        assert {type(error) for error in errors} <= {StateError, RankError}
        assert any(words in str(error) for error in errors), errors
        check_shards(path, Cursor(0))

    def twice(ranks: Any, shards: ShardWriter, world: ShardWorld) -> None:
        world.pass_index = 0
        world.publish(shards.store)
        if ranks.rank:
            with pytest.raises(StoreError, match="waits for the other ranks"):
                world.publish(shards.store)
        shards.publish(Cursor(0))
        assert shards.store.commit.id == 1

    assert on_ranks(path, 2, twice) == [None, None]
    check_shards(path, Cursor(0))


class Switch:
    """Has calls of a method fail while it is on, on all ranks at the same time."""

    def __init__(
        self, patch: pytest.MonkeyPatch, of: type, name: str, fails: Callable[[Any], Exception | None]
    ) -> None:
        self.is_on, plain = False, getattr(of, name)

        def limited(writer: Any, *given: Any, **options: Any) -> Any:
            if self.is_on and (error := fails(writer)) is not None:
                raise error
            return plain(writer, *given, **options)

        patch.setattr(of, name, limited)

    def turn(self, ranks: Any, is_on: bool) -> None:
        ranks.all_gather_object(None)
        self.is_on = is_on
        ranks.all_gather_object(None)


@ENGINES
@pytest.mark.parametrize("step", ["_put", "_publish"])
def test_a_publication_that_found_no_room_may_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, step: str
) -> None:
    path, full = tmp_path / "s", Switch(monkeypatch, CommitWriter, step, lambda _: no_room())

    def body(ranks: Any, shards: ShardWriter, world: ShardWorld) -> None:
        take(shards, world)
        advance(shards.store, world, cursor_of(shards))
        full.turn(ranks, True)
        with pytest.raises(StoreFullError if ranks.rank == 0 else RankError, match="no space is left"):
            shards.publish(Cursor(1))
        assert newest_record(path).cursor == cursor_of(shards) == Cursor(0)
        full.turn(ranks, False)
        shards.publish(Cursor(1))
        take(shards, world)

    assert on_ranks(path, 2, body, engine=engine) == [None, None]
    check_shards(path, Cursor(1, 5))


@pytest.mark.sampled(2)
@ENGINES
@pytest.mark.parametrize("which", [0, 1])
def test_a_commit_that_one_rank_found_no_room_for_is_no_commit_of_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, which: int
) -> None:
    """The others drop their prepared commits at the next meeting, and all make it again."""
    path = tmp_path / "s"
    full = Switch(monkeypatch, RankWriter, "_advance", lambda writer: no_room() if writer.rank == which else None)

    def body(ranks: Any, shards: ShardWriter, world: ShardWorld) -> None:
        take(shards, world)
        full.turn(ranks, True)
        with pytest.raises(StoreFullError) if ranks.rank == which else nullcontext():
            advance(shards.store, world, cursor_of(shards))
        full.turn(ranks, False)
        shards.meet()
        assert not shards.ahead
        shards.store.discard_uncommitted()
        for _ in range(3):
            take(shards, world)

    assert on_ranks(path, 2, body, engine=engine) == [None, None]
    check_shards(path, Cursor(2))
    assert verify(path)["problems"] == []


@pytest.mark.sampled(3)
@ENGINES
@pytest.mark.parametrize("heard", [[0], [0, 2], [0, 1, 2]])
def test_a_commit_that_not_all_ranks_heard_of_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: list[int], engine: str
) -> None:
    """It was published: surviving ranks meet at it, and a new opening finds it."""
    path = tmp_path / "s"
    deaf = Switch(
        monkeypatch, RankWriter, "take", lambda writer: None if writer.rank in heard else KeyError("interrupted")
    )

    def take_deaf(ranks: Any, shards: ShardWriter, world: ShardWorld) -> int:
        deaf.turn(ranks, True)
        with nullcontext() if len(heard) == 3 else pytest.raises(RankError if ranks.rank in heard else KeyError):
            take(shards, world)
        return shards.store.commit.id

    def body(ranks: Any, shards: ShardWriter, world: ShardWorld) -> list[int]:
        take(shards, world)
        stood = take_deaf(ranks, shards, world)
        deaf.turn(ranks, False)
        shards.meet()
        assert cursor_of(shards) == Cursor(1)
        take(shards, world)
        return [stood, take_deaf(ranks, shards, world)]

    assert on_ranks(path, 3, body, engine=engine) == [[1, 3] if rank in heard else [0, 2] for rank in range(3)]
    check_shards(path, Cursor(2))
    deaf.is_on = False
    train_on(path, 3, 0, Cursor(2))
    assert verify(path)["problems"] == []
    train_on(path, 3, 2, Cursor(3, 5))


@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, 2), (3, 1)])
def test_what_was_never_committed_is_made_anew(tmp_path: Path, first: int, second: int) -> None:
    """By more ranks or by fewer; nothing of the first attempt stays, and nothing else is touched."""
    path = tmp_path / "s"
    train_on(path, first, 0)
    assert folders(path) == rank_folders(first)
    for name in ("rank-7", "rank-x"):  # foreign folders
        (path / name).mkdir()
        (path / name / "notes.txt").touch()
    train_on(path, second, 2, Cursor(1))
    assert folders(path) == rank_folders(second) | {"rank-7", "rank-x"}
    assert (path / "rank-7" / "notes.txt").exists()
    rows = ShardingPlan(8, {table.name: TableSharding("row_wise") for table in TABLES})
    errors = meet(8, lambda ranks: ShardWriter.open(path, TABLES, rows, ranks, resharded=True).close())
    assert "rank-7 exists and is not a rank of this store: pass unused folders as shard_dirs=" in sentences(errors)
    assert (path / "rank-7" / "notes.txt").exists()
    check_shards(path, Cursor(1))


def test_the_marker_of_a_rank_is_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "s"
    train_on(path, 2, 2)
    whole, one = (json.loads((folder / "store.json").read_text()) for folder in (path, path / "rank-1"))
    assert one == {"format": "tiercache rank", "version": 5, "engine": "lmdb", "store": whole["id"], "rank": 1}
    assert (whole["format"], whole["version"], len(whole["id"])) == ("tiercache store", 5, 32)
    record = newest_record(path)
    assert record.folders == (".", "rank-1")
    assert [head.name.split("-")[0] for head in record.ranks] == ["ranks/0.1", "ranks/1.1"]


@pytest.mark.parametrize("inside", [True, False], ids=["in the store", "on a disk"])
def test_a_folder_by_another_name_is_the_same_folder(tmp_path: Path, inside: bool) -> None:
    """Its rows are neither deleted as old ranks' leftovers, nor by a division that is not published."""
    path, disk, link = tmp_path / "s", tmp_path / "disk", tmp_path / "link"
    disk = path if inside else disk
    link.symlink_to(disk)
    train_on(path, 2, 3, retention=3, shard_dirs=[path, disk])
    for place in (link, disk, link):
        train_on(path, 2, 1, shard_dirs=[path, place])
        train_on(path, 2, 0)
        Store.open(path).close()
    check_shards(path, Cursor(3, 5))

    def body(ranks: Any) -> None:
        ShardWriter.open(path, TABLES, sharding_on(2, 1), ranks, resharded=True, shard_dirs=[path, disk]).close()

    assert meet(2, body) == [None] * 2
    check_shards(path, Cursor(3, 5))
    train_on(path, 2, 1)
    check_shards(path, Cursor(4))
    assert divide_among(path, 2, 1, shard_dirs=[path, disk]) == [None] * 2
    check_shards(path, Cursor(4))
    train_on(path, 2, 1, turn=1)
