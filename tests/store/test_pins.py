"""Commits kept by name, independent of later commits."""

import copy
from pathlib import Path

import pytest

from tests.dist.meeting import meet
from tests.dist.sharded_world import divide_anew, problems, sharding_on, train_shards
from tests.store.conftest import Home, needed_bytes, small_tables, stored_bytes
from tests.store.failing import disk_full
from tests.store.test_rewrite import rows_of
from tests.store.world import World
from tiercache.store import CommitMissingError, Store, StoreFullError, info, verify
from tiercache.store.snapshot import Needed
from tiercache.store.verification import Verification


def small_world() -> World:
    return World(small_tables(), keys_per_pass=12, universe=30, block_rows=4, page_rows=2)


def ids(store: Store) -> list[int]:
    return [commit.id for commit in store.commits]


def check_pinned(store: Store, commit: int, world: World) -> None:
    """Assert that a store has an unchanged commit, and that its engine has no unneeded byte."""
    with store.at(commit) as older:
        assert rows_of(older) == world.rows
        assert older.state() == world.state
    assert Verification(store).run()["problems"] == []
    assert stored_bytes(store) == needed_bytes(store)


def test_a_pinned_commit_outlives_passes_reopening_schedules_compaction_and_rollback(home: Home) -> None:
    world = small_world()
    store = home.open(world.tables)
    world.run(store, 2)
    best, commit = copy.deepcopy(world), store.pin("best")
    assert (commit.id, commit.pins, commit.cursor) == (2, {"best": 1}, (2, 0))
    world.run(store, 4)
    assert ids(store) == [1, 6]
    check_pinned(store, 1, best)
    store = home.open()
    assert store.commit.pins == {"best": 1}
    check_pinned(store, 1, best)
    world.follow(store, world.draw(9))
    world.run(store, 1)
    world.compact(store)
    check_pinned(store, 1, best)
    world.follow(store, world.draw(10))
    store.pin("also")
    store.rollback(1)
    assert ids(store) == [1, 10, 12]
    assert rows_of(store) == best.rows
    check_pinned(store, 10, world)
    store.rollback(10)
    assert rows_of(store) == world.rows
    assert store.commit.pins == {"best": 1, "also": 10}
    best.check_changes(store.at(1), -1)
    store.unpin("best")
    store = home.open()
    assert ids(store) == [10, 14]
    with pytest.raises(CommitMissingError, match="has no commit 1: pass one of 10, 14"):
        store.at(1)
    store.unpin("also")
    assert ids(store) == [15]
    assert stored_bytes(store) == needed_bytes(store)
    assert rows_of(store) == world.rows


def test_a_pin_writes_one_small_blob_and_takes_the_place_of_the_commit_before(home: Home) -> None:
    """Its rank list and state are shared with it; the number of kept training commits does not change."""
    world = small_world()
    store = home.open(world.tables, retention=3)
    world.run(store, 5)
    before, written = store.commit, store.counters.meta_bytes_written
    commit = store.pin("first", 2)
    assert ids(store) == [2, 3, 5]
    assert (commit.ranks, commit.own.state.name) == (before.ranks, before.own.state.name)
    assert store.counters.meta_bytes_written - written == commit.head.size
    assert store.counters.state_bytes_written == 5 * len(b"state at 1, 0")
    assert store.pin("first", 3).pins == {"first": 3}
    store.unpin("first")
    assert ids(store) == [2, 3, 7]
    world.run(store, 3)
    assert ids(store) == [8, 9, 10]
    assert stored_bytes(store) == needed_bytes(store)
    world.check(store, after=world.pass_index - 1)


def test_what_cannot_be_pinned_is_refused(tmp_path: Path) -> None:
    world = small_world()
    with Store.open(tmp_path / "s", tables=world.tables) as store:
        with pytest.raises(ValueError, match="has no commit yet: publish one first"):
            store.pin("best")
        world.run(store, 2)
        with pytest.raises(CommitMissingError, match="has no commit 0: pass one of 1"):
            store.pin("best", 0)
        for name in ("", "a\nb", "x" * 201, 5):
            with pytest.raises(
                ValueError, match="cannot be the name of a pinned commit: use 1 to 200 printable characters"
            ):
                store.pin(name)  # type: ignore[arg-type]
        for name in ("1", "007", "\uff11"):  # the command line would take it for the id of a commit
            with pytest.raises(ValueError, match=r"commit, whose ids are numbers: add a letter"):
                store.pin(name)
        store.pin("best", 1)
        with pytest.raises(ValueError, match="has no pinned commit 'worst': it has 'best'"):
            store.unpin("worst")
    with Store.open(tmp_path / "s", mode="r") as store, pytest.raises(ValueError, match="open for reading"):
        store.pin("best")
    assert info(tmp_path / "s")["pins"] == {"best": 1}
    assert verify(tmp_path / "s")["problems"] == []


# -- a store of several ranks ---------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_all_ranks_keep_a_pinned_commit(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "s"
    assert train_shards(path, 3, 4, engine=engine) == [None] * 3
    with Store.open(path) as store:
        assert store.pin("best").pins == {"best": 3}
        assert (store.commit.id, store.commit.cursor, ids(store)) == (4, (2, 0), [3, 4])
    assert train_shards(path, 3, 3) == [None] * 3
    with Store.open(path) as store:
        assert ids(store) == [3, 7]
        store.pin("also")
        store.compact()
        assert ids(store) == [3, 7, 9]
        check_ranks(store)
    assert info(path)["pins"] == {"best": 3, "also": 7}
    assert [rank["pins"] for rank in info(path)["shards"]] == [{"best": 3, "also": 7}] * 3
    assert verify(path)["commits"] == [3, 7, 9]
    assert verify(path)["problems"] == []
    with Store.open(path) as store:
        store.rollback(3)
        assert ids(store) == [3, 7, 10]
        check_ranks(store)
    assert train_shards(path, 3, 1) == [None] * 3
    with Store.open(path) as store:
        assert store.unpin("best").pins == {"also": 7}
        assert ids(store) == [7, 12]
        with pytest.raises(CommitMissingError, match="has no commit 3: pass one of 7, 12"):
            store.at(3)
        with pytest.raises(ValueError, match="has no pinned commit 'best': it has 'also'"):
            store.unpin("best")
        check_ranks(store)
        store.unpin("also")
        assert ids(store) == [13]
        check_ranks(store)
    assert train_shards(path, 3, 1) == [None] * 3
    assert verify(path)["problems"] == []


def test_ranks_and_their_number_leave_the_digest_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert train_shards(path, 2, 2) == [None] * 2
    with Store.open(path) as store:
        digest = store.commit.digest
        store.pin("best")
        store.compact()
        store.unpin("best")
        assert {one.commit.rows_digest for one in (store, *store.ranks)} == {digest}
    assert meet(3, lambda ranks: divide_anew(path, ranks, sharding_on(3))) == [None] * 3
    with Store.open(path, mode="r") as store:
        assert (store.commit.rows_digest, len(store.ranks)) == (digest, 3)
    assert train_shards(path, 3, 1) == [None] * 3
    with Store.open(path, mode="r") as store:
        assert store.commit.rows_digest == store.commit.digest != digest


def check_ranks(store: Store) -> None:
    """Assert that each commit has its rows, and that no rank has an unneeded byte."""
    for commit in store.commits:
        with store.at(commit.id) as older:
            assert list(problems(older)) == []
    for rank in store.ranks:
        assert ids(rank) == ids(store)
        needed = Needed.of(rank.history.snapshots)
        assert stored_bytes(rank) == {need.name: need.size - need.first_byte for need in needed.blobs()}


@pytest.mark.parametrize("verb", ["put", "publish"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_one_rank_fails_at_is_one_of_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, verb: str
) -> None:
    path = tmp_path / "s"
    assert train_shards(path, 2, 4, retention=2) == [None] * 2
    with Store.open(path) as store:
        steps = [store.compact, lambda: store.rollback(store.commit.id)]
        if not rank:  # a commit that lists the same rows is put by rank 0
            steps = [lambda: store.pin("best", 2), *steps, lambda: store.unpin("best")]
        for step in steps:
            before, kept = store.commit, ids(store)
            with monkeypatch.context() as patch:
                patch.setattr(store.ranks[rank]._opened.engine, verb, failing)
                with pytest.raises(StoreFullError):
                    step()
            assert store.commit is before
            assert ids(store) == kept
            check_ranks(store)
            step()
            check_ranks(store)


def failing(*_: object, **__: object) -> None:
    raise disk_full()
