"""The ranks of a store: they make every commit together, or none of them does."""

import json
from contextlib import nullcontext
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
    roll_back,
    sentences,
    sharding_on,
    take,
    train_shards,
    world_of,
)
from tests.files import files_of
from tiercache.dist.shard_writer import ShardWriter
from tiercache.errors import RankError, StateError
from tiercache.store import (
    CorruptStoreError,
    Cursor,
    NotAStoreError,
    Store,
    StoreError,
    StoreFullError,
    StoreMissingError,
    verify,
)
from tiercache.store.commit_writer import CommitWriter
from tiercache.store.opening import newest_record, open_folder
from tiercache.store.rank_writer import RankWriter
from tiercache.store.sharding import ShardingPlan

ENGINES = pytest.mark.parametrize("engine", ["lmdb", "zarr"])


def folders(path: Path) -> set[str]:
    """Return the folders of ranks in the folder of a store."""
    return {entry.name for entry in path.glob("rank-*")}


def rank_folders(num_ranks: int) -> set[str]:
    """Return the folders that so many ranks have beside that of the store itself."""
    return {f"rank-{rank}" for rank in range(1, num_ranks)}


def stored(path: Path) -> list[set[str]]:
    """Return the blobs of each rank by name, once what no commit names is dropped."""
    with Store.open(path) as store:
        return [{*rank._opened.engine.list()} for rank in store.ranks or (store,)]


def lists_of(path: Path, rank: int, engine: str) -> set[str]:
    """Return which lists a rank above 0 has durably, as commits name them."""
    whole = open_folder(path / f"rank-{rank}", TABLES, engine, "r", None, create=False)
    try:
        return {name.split("-")[0] for name in whole.engine.list() if name.startswith("ranks/")}
    finally:
        whole.close()


def full() -> StoreFullError:
    """Return the error of a disk without room."""
    return StoreFullError(needed_bytes=100, limit="no space is left on the disk", advice="free some")


def digest(path: Path) -> str:
    """Return the digest of the newest commit, which stands for all that its ranks have."""
    with Store.open(path, mode="r") as store:
        return store.commit.digest


@ENGINES
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_store_of_several_ranks_resumes_where_they_stopped(tmp_path: Path, num_ranks: int, engine: str) -> None:
    """Rows of every sharding are whole after every commit, and a second opening changes nothing."""
    path, cursor = tmp_path / "s", None
    for _ in range(3):
        assert train_shards(path, num_ranks, 3, engine=engine) == [None] * num_ranks
        with Store.open(path, mode="r") as store:
            assert cursor is None or store.commit.cursor > cursor
            cursor = store.commit.cursor
            assert len(store.ranks) == (num_ranks if num_ranks > 1 else 0)
        check_shards(path, cursor)
    assert cursor == Cursor(5, 5)
    before = digest(path)
    assert train_shards(path, num_ranks, 0) == [None] * num_ranks
    assert digest(path) == before
    check_shards(path, cursor)
    assert folders(path) == rank_folders(num_ranks)


@ENGINES
@pytest.mark.parametrize("ahead", [[0], [1], [0, 1], [2], [0, 1, 2]])
def test_what_some_ranks_prepared_is_dropped_at_the_next_opening(tmp_path: Path, ahead: list[int], engine: str) -> None:
    """Whichever of them did, even all: the commit before stands, and nothing of the next one stays."""
    path = tmp_path / "s"
    assert train_shards(path, 3, 4, engine=engine) == [None] * 3
    before, blobs = digest(path), stored(path)
    sharded_world.ahead(path, 3, *ahead)
    for rank in (1, 2):
        assert (f"ranks/{rank}.4" in lists_of(path, rank, engine)) == (rank in ahead)
    check_shards(path, Cursor(2))
    assert train_shards(path, 3, 0) == [None] * 3
    assert digest(path) == before
    assert stored(path) == blobs
    check_shards(path, Cursor(2))
    sharded_world.ahead(path, 3, *ahead)
    with Store.open(path) as store:  # all ranks in one process
        assert store.commit.digest == before
    assert stored(path) == blobs
    assert train_shards(path, 3, 3) == [None] * 3
    check_shards(path, Cursor(4))
    with Store.open(path, mode="r") as store:
        assert store.commit.id == 6


@ENGINES
def test_ranks_keep_as_many_commits_as_asked_for(tmp_path: Path, engine: str) -> None:
    """A later opening may ask for another number; all ranks have the same commits."""
    last = -1
    for retention, kept in ((None, 1), (3, 3), (None, 3), (1, 1)):
        assert train_shards(tmp_path / "s", 2, 5, retention=retention, engine=engine) == [None] * 2
        last += 5
        with Store.open(tmp_path / "s", mode="r") as store:
            ids = [commit.id for commit in store.commits]
            assert ids == [*range(last - kept + 1, last + 1)]
            assert store.retention == kept
            assert all(rank.retention == kept and rank.commit.id == last for rank in store.ranks)
        names = [{name for name in names if name.startswith("ranks/")} for names in stored(tmp_path / "s")]
        assert [len(of_rank) for of_rank in names] == [kept, kept]


@ENGINES
def test_a_rank_that_prepared_a_commit_prepares_no_other_one(tmp_path: Path, engine: str) -> None:
    """Compactions of one rank are no commit of the store; those of all ranks are."""
    path = tmp_path / "s"

    def alone(ranks: Any) -> list[int]:
        shards, world = opened(path, ranks, engine=engine)
        with shards:
            for _ in range(4):
                take(shards, world)
            if ranks.rank:
                shards.store.compact()
                for step in (shards.store.compact, lambda: advance(shards.store, world, shards.cursor)):
                    with pytest.raises(StoreError, match=r"commit 4 of .* waits for the other ranks: publish it"):
                        step()
            with pytest.raises(StateError if ranks.rank == 0 else RankError, match="has prepared no commit"):
                shards.publish()
            return [commit.id for commit in shards.store.commits]

    assert meet(2, alone) == [[3], [3]]
    check_shards(path, Cursor(2))
    assert verify(path)["problems"] == []
    assert train_shards(path, 2, 0) == [None] * 2
    check_shards(path, Cursor(2))

    assert train_shards(path, 2, 2) == [None] * 2
    check_shards(path, Cursor(3, 5))
    assert train_shards(path, 2, 1) == [None] * 2

    def together(ranks: Any) -> list[int]:
        shards, _ = opened(path, ranks)
        with shards:
            for _ in range(2):
                shards.store.compact()
                shards.publish()
            return [commit.id for commit in shards.store.commits]

    assert meet(2, together) == [[8], [8]]
    check_shards(path, Cursor(4))
    assert verify(path)["problems"] == []


def test_nothing_is_published_unless_all_ranks_prepared_it(tmp_path: Path) -> None:
    """Another cursor on one rank and a commit that was not prepared are told on every rank, and change nothing."""
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

    assert "has prepared no commit and pass 1 is to be published" in sentences(meet(2, missing))
    check_shards(path, Cursor(0))

    def elsewhere(ranks: Any) -> None:
        shards, world = opened(path, ranks)
        with shards:
            advance(shards.store, world, Cursor(0))
            shards.publish(Cursor(2))

    assert "is at pass 1 and pass 2 is to be published" in sentences(meet(2, elsewhere))
    check_shards(path, Cursor(0))

    def twice(ranks: Any) -> None:
        shards, world = opened(path, ranks)
        with shards:
            world.pass_index = 0
            world.publish(shards.store)
            if ranks.rank:
                with pytest.raises(StoreError, match="waits for the other ranks"):
                    world.publish(shards.store)
            shards.publish(Cursor(0))
            assert shards.store.commit.id == 1

    assert meet(2, twice) == [None, None]
    check_shards(path, Cursor(0))


@ENGINES
@pytest.mark.parametrize("step", ["put", "publish"])
def test_a_publication_that_found_no_room_may_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, step: str
) -> None:
    """Every rank raises an error, and the commit before stands."""
    path, is_full = tmp_path / "s", [False]
    plain = getattr(CommitWriter, f"_{step}")

    def limited(writer: CommitWriter, *given: Any) -> None:
        if is_full[0]:
            raise full()
        plain(writer, *given)

    monkeypatch.setattr(CommitWriter, f"_{step}", limited)

    def body(ranks: Any) -> Any:
        shards, world = opened(path, ranks, engine=engine)
        with shards:
            take(shards, world)
            advance(shards.store, world, shards.cursor)
            ranks.all_gather_object(None)
            is_full[0] = True
            ranks.all_gather_object(None)
            with pytest.raises(StoreFullError if ranks.rank == 0 else RankError, match="no space is left"):
                shards.publish(Cursor(1))
            assert newest_record(path).cursor == shards.cursor == Cursor(0)
            ranks.all_gather_object(None)
            is_full[0] = False
            ranks.all_gather_object(None)
            shards.publish(Cursor(1))
            take(shards, world)

    assert meet(2, body) == [None, None]
    check_shards(path, Cursor(1, 5))


@ENGINES
@pytest.mark.parametrize("which", [0, 1])
def test_a_commit_that_one_rank_found_no_room_for_is_no_commit_of_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, which: int
) -> None:
    """What the others prepared is dropped when they meet, and all make it again."""
    path, is_full = tmp_path / "s", [False]
    plain = RankWriter._advance

    def limited(writer: RankWriter, *given: Any, **options: Any) -> Any:
        if is_full[0] and writer.rank == which:
            raise full()
        return plain(writer, *given, **options)

    monkeypatch.setattr(RankWriter, "_advance", limited)

    def body(ranks: Any) -> None:
        shards, world = opened(path, ranks, engine=engine)
        with shards:
            take(shards, world)
            ranks.all_gather_object(None)
            is_full[0] = True
            ranks.all_gather_object(None)
            if ranks.rank == which:
                with pytest.raises(StoreFullError):
                    advance(shards.store, world, shards.cursor)
            else:
                advance(shards.store, world, shards.cursor)
            ranks.all_gather_object(None)
            is_full[0] = False
            shards.meet()
            assert not shards.ahead
            shards.store.discard_uncommitted()
            for _ in range(3):
                take(shards, world)

    assert meet(2, body) == [None, None]
    check_shards(path, Cursor(2))
    assert verify(path)["problems"] == []


@ENGINES
@pytest.mark.parametrize("heard", [[0], [0, 2], [0, 1, 2]])
def test_a_commit_that_not_all_ranks_heard_of_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: list[int], engine: str
) -> None:
    """It was published: those that go on meet at it, and those that open the store again find it."""
    path = tmp_path / "s"
    plain, deaf = RankWriter.take, [False]

    def limited(writer: RankWriter, *given: Any) -> None:
        if deaf[0] and writer.rank not in heard:
            raise KeyError("interrupted")
        plain(writer, *given)

    monkeypatch.setattr(RankWriter, "take", limited)

    def body(ranks: Any) -> list[int]:
        shards, world = opened(path, ranks, engine=engine)
        with shards:
            take(shards, world)
            ranks.all_gather_object(None)
            deaf[0] = True
            ranks.all_gather_object(None)
            with nullcontext() if len(heard) == 3 else pytest.raises(RankError if ranks.rank in heard else KeyError):
                take(shards, world)
            stood = shards.store.commit.id
            ranks.all_gather_object(None)
            deaf[0] = False
            ranks.all_gather_object(None)
            shards.meet()
            assert shards.cursor == Cursor(1)
            take(shards, world)
            ranks.all_gather_object(None)
            deaf[0] = True
            ranks.all_gather_object(None)
            with nullcontext() if len(heard) == 3 else pytest.raises(RankError if ranks.rank in heard else KeyError):
                take(shards, world)
            return [stood, shards.store.commit.id]

    assert meet(3, body) == [[1, 3] if rank in heard else [0, 2] for rank in range(3)]
    check_shards(path, Cursor(2))
    deaf[0] = False
    assert train_shards(path, 3, 0) == [None] * 3
    check_shards(path, Cursor(2))
    assert verify(path)["problems"] == []
    assert train_shards(path, 3, 2) == [None] * 3
    check_shards(path, Cursor(3, 5))


@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, 2), (3, 1)])
def test_what_was_never_committed_is_made_anew(tmp_path: Path, first: int, second: int) -> None:
    """By more ranks or by fewer; nothing of the first attempt stays, and nothing else is touched."""
    path = tmp_path / "s"
    assert train_shards(path, first, 0) == [None] * first
    assert folders(path) == rank_folders(first)
    for name in ("rank-7", "rank-x"):  # somebody else's
        (path / name).mkdir()
        (path / name / "notes.txt").touch()
    assert train_shards(path, second, 2) == [None] * second
    check_shards(path, Cursor(1))
    assert folders(path) == rank_folders(second) | {"rank-7", "rank-x"}
    assert (path / "rank-7" / "notes.txt").exists()
    with pytest.raises(NotAStoreError, match=r"rank-7 is there already and is no rank of this store: give shard_dirs="):
        raise next(error for error in meet(8, _divided(path)) if not isinstance(error, RankError))
    assert (path / "rank-7" / "notes.txt").exists()
    check_shards(path, Cursor(1))


def _divided(path: Path) -> Any:
    """Return what a rank does that begins to divide a store anew."""
    return lambda ranks: ShardWriter.divide(path, TABLES, _rows(ranks.size), ranks).close()


def _rows(num_ranks: int) -> ShardingPlan:
    """Return a sharding of so many ranks, however many columns tables have."""
    return ShardingPlan(num_ranks, {table.name: sharding_on(1).tables["item"] for table in TABLES})


@ENGINES
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3), (3, 2), (2, 2)])
def test_ranks_of_another_division_take_the_place_of_the_old_ones(
    tmp_path: Path, before: int, after: int, engine: str
) -> None:
    """One commit does that: a reader sees the old ranks' rows before it and the new ranks' after it."""
    path = tmp_path / "s"
    assert train_shards(path, before, 4, engine=engine, retention=2) == [None] * before
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
    for rank, names in enumerate(stored(path)):
        assert {name.split("-")[0] for name in names if name.startswith("ranks/")} == {f"ranks/{rank}.4"}
    assert verify(path)["problems"] == []
    assert train_shards(path, after, 3, turn=1) == [None] * after
    check_shards(path, Cursor(4))
    assert folders(path) == rank_folders(after)


@ENGINES
@pytest.mark.parametrize("until", ["opened", "filled", "prepared"])
def test_a_division_that_was_begun_changes_nothing(tmp_path: Path, until: str, engine: str) -> None:
    """Its folders go when the store is opened for writing; readers never see them."""
    path = tmp_path / "s"
    assert train_shards(path, 2, 4, engine=engine) == [None] * 2
    before, blobs = digest(path), stored(path)

    def body(ranks: Any) -> None:
        sharding = sharding_on(ranks.size, 1)
        with ShardWriter.divide(path, TABLES, sharding, ranks) as shards:
            world = world_of(sharding, ranks.rank)
            world.pass_index = 1
            world.train(part=1)
            if until != "opened":
                world.append(shards.store)
            if until == "prepared":
                world.pass_index = 2
                world.publish(shards.store)

    assert meet(3, body) == [None] * 3
    assert (path / "rank-2" / "store.json").exists()
    check_shards(path, Cursor(2))
    assert meet(1, body) == [None]  # once more, without opening it for training between
    assert folders(path) == {"rank-1"}
    check_shards(path, Cursor(2))
    assert meet(3, body) == [None] * 3
    assert train_shards(path, 2, 0) == [None] * 2
    assert folders(path) == {"rank-1"}
    assert digest(path) == before
    assert stored(path) == blobs
    assert meet(3, body) == [None] * 3
    with Store.open(path) as store:
        assert store.commit.digest == before
    assert folders(path) == {"rank-1"}
    assert stored(path) == blobs
    check_shards(path, Cursor(2))
    assert train_shards(path, 2, 1) == [None] * 2
    check_shards(path, Cursor(3))


@ENGINES
def test_a_division_that_was_abandoned_leaves_the_files_that_were_there(tmp_path: Path, engine: str) -> None:
    """All of them, and no other."""
    path = tmp_path / "s"
    assert train_shards(path, 2, 4, engine=engine) == [None] * 2
    before, names, blobs = digest(path), {*files_of(path)}, stored(path)

    def body(ranks: Any) -> None:
        sharding = sharding_on(ranks.size, 1)
        shards = ShardWriter.divide(path, TABLES, sharding, ranks)
        world = world_of(sharding, ranks.rank)
        world.pass_index = 1
        world.train(part=1)
        world.append(shards.store)
        world.pass_index = 2
        world.publish(shards.store)
        shards.abandon()

    assert meet(3, body) == [None] * 3
    assert digest(path) == before
    assert stored(path) == blobs
    if engine == "lmdb":
        assert {*files_of(path)} == names
    check_shards(path, Cursor(2))


def test_ranks_may_be_on_other_disks_and_move(tmp_path: Path) -> None:
    """Each is in the folder that was given for it; moved by hand, with shard_dirs= saying where to."""
    path, disk = tmp_path / "s", tmp_path / "disk ü" / "deep"
    assert train_shards(path, 2, 3, shard_dirs=[path, disk]) == [None] * 2
    assert (disk / "rank-1" / "store.json").exists()
    assert folders(path) == set()
    check_shards(path, Cursor(1, 5))
    assert train_shards(path, 2, 1) == [None] * 2
    (tmp_path / "new").mkdir()
    (disk / "rank-1").rename(tmp_path / "new" / "rank-1")
    assert "is missing: there is no" in sentences(train_shards(path, 2, 0))
    assert train_shards(path, 2, 1, shard_dirs=[path, tmp_path / "new"]) == [None] * 2
    check_shards(path, Cursor(3))
    assert train_shards(path, 2, 1) == [None] * 2
    check_shards(path, Cursor(3, 5))
    with pytest.raises(ValueError, match="shard_dirs= names 1 folders for 2 ranks: give one for each rank"):
        raise train_shards(path, 2, 0, shard_dirs=[path])[0]
    with pytest.raises(ValueError, match=r"shard_dirs\[0\] is .*: rank 0 has its rows in the store itself, so give"):
        raise train_shards(path, 2, 0, shard_dirs=[disk, disk])[0]
    other = tmp_path / "other"
    words = "is there already and is no rank of this store"
    assert words in sentences(train_shards(other, 2, 0, shard_dirs=[other, tmp_path / "new"]))
    check_shards(path, Cursor(3, 5))


def test_older_commits_are_read_and_rolled_back_to_where_a_rank_is_now(tmp_path: Path) -> None:
    """They name the folder that it had then."""
    path = tmp_path / "s"
    assert train_shards(path, 2, 3, retention=5, shard_dirs=[path, tmp_path / "old"]) == [None] * 2
    (tmp_path / "new").mkdir()
    (tmp_path / "old" / "rank-1").rename(tmp_path / "new" / "rank-1")
    assert train_shards(path, 2, 1, shard_dirs=[path, tmp_path / "new"]) == [None] * 2
    with Store.open(path, mode="r", commit=1) as store:
        assert store.commit.cursor == Cursor(1)
        assert list(sharded_world.problems(store)) == []
    with Store.open(path, mode="r") as store, store.at(1) as older:
        assert list(sharded_world.problems(older)) == []
    assert roll_back(path, 1).id == 4
    check_shards(path, Cursor(1))
    assert train_shards(path, 2, 1) == [None] * 2
    check_shards(path, Cursor(1, 5))
    assert verify(path)["problems"] == []


@pytest.mark.parametrize("to", [1, 2, 3])
def test_a_division_deletes_what_only_old_ranks_had_on_their_disks(tmp_path: Path, to: int) -> None:
    """Where they were is taken from the commit; new ranks are in the store's folder unless others are given."""
    path, disks = tmp_path / "s", [tmp_path / "disk 1", tmp_path / "disk 2"]
    assert train_shards(path, 3, 4, shard_dirs=[path, *disks]) == [None] * 3
    assert [[*disk.iterdir()] for disk in disks] == [[disks[0] / "rank-1"], [disks[1] / "rank-2"]]
    assert meet(to, lambda ranks: divide_anew(path, ranks, sharding_on(to, 1))) == [None] * to
    check_shards(path, Cursor(2))
    assert [[*disk.iterdir()] for disk in disks] == [[], []]
    assert folders(path) == rank_folders(to)


def test_a_rank_that_is_missing_is_not_made_anew(tmp_path: Path) -> None:
    """Neither by its own training, nor by one that divides the store: the rows of others would be all that is left."""
    path = tmp_path / "s"
    assert train_shards(path, 2, 4) == [None] * 2
    (path / "rank-1").rename(tmp_path / "away")
    for mode in ("r", "a"):
        with pytest.raises(StoreMissingError, match=r"rank 1 of the store at .* is missing: there is no folder"):
            Store.open(path, mode=mode)
    assert isinstance(train_shards(path, 2, 1)[1], StoreMissingError)
    assert not (path / "rank-1").exists()
    (tmp_path / "away").rename(path / "rank-1")
    check_shards(path, Cursor(2))


def test_the_marker_of_a_rank_is_plain_json(tmp_path: Path) -> None:
    """For people who look."""
    path = tmp_path / "s"
    assert train_shards(path, 2, 2) == [None] * 2
    whole, one = (json.loads((folder / "store.json").read_text()) for folder in (path, path / "rank-1"))
    assert one == {"format": "tiercache rank", "version": 5, "engine": "lmdb", "store": whole["id"], "rank": 1}
    assert (whole["format"], whole["version"], len(whole["id"])) == ("tiercache store", 5, 32)
    record = newest_record(path)
    assert record.folders == (".", "rank-1")
    assert [head.name.split("-")[0] for head in record.ranks] == ["ranks/0.1", "ranks/1.1"]


def test_ranks_that_lack_a_commit_are_not_trained(tmp_path: Path) -> None:
    """Another one of them may have it: the list of the commit that stands was deleted."""
    path = tmp_path / "s"
    assert train_shards(path, 2, 4, engine="zarr") == [None] * 2
    whole = open_folder(path / "rank-1", TABLES, "zarr", "a", None, create=False)
    whole.engine.drop([(name, None) for name in whole.engine.list() if name.startswith("ranks/1.3")])
    whole.close()
    errors = train_shards(path, 2, 1)
    assert any(isinstance(error, CorruptStoreError) for error in errors), errors
    assert "ranks/1.3" in sentences(errors)


@pytest.mark.parametrize("inside", [True, False], ids=["in the store", "on a disk"])
def test_a_folder_by_another_name_is_the_same_folder(tmp_path: Path, inside: bool) -> None:
    """Its rows are neither deleted as what old ranks left, nor by a division that is not published."""
    path, disk, link = tmp_path / "s", tmp_path / "disk", tmp_path / "link"
    disk = path if inside else disk
    link.symlink_to(disk)
    assert train_shards(path, 2, 3, retention=3, shard_dirs=[path, disk]) == [None] * 2
    for place in (link, disk, link):
        assert train_shards(path, 2, 1, shard_dirs=[path, place]) == [None] * 2
        assert train_shards(path, 2, 0) == [None] * 2
        Store.open(path).close()
    check_shards(path, Cursor(3, 5))

    def body(ranks: Any) -> None:
        ShardWriter.divide(path, TABLES, sharding_on(2, 1), ranks, shard_dirs=[path, disk]).close()

    assert meet(2, body) == [None] * 2
    check_shards(path, Cursor(3, 5))
    assert train_shards(path, 2, 1) == [None] * 2

    def divided(ranks: Any) -> None:
        divide_anew(path, ranks, sharding_on(2, 1), shard_dirs=[path, disk])

    check_shards(path, Cursor(4))
    assert meet(2, divided) == [None] * 2
    check_shards(path, Cursor(4))
    assert train_shards(path, 2, 1, turn=1) == [None] * 2
