"""Kept commits of a store of several ranks: reads, rollbacks and changes since."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiercache as tc
from tests.cli.command import error_of, run, told
from tests.dist import sharded_world
from tests.dist.pool import RanksPool
from tests.dist.sharded_world import (
    WHOLE,
    ShardWorld,
    divide_among,
    expected,
    on_ranks,
    problems,
    sentences,
    take,
    train_on,
    train_shards,
    whole_row,
)
from tests.dist.trainings import CASES, stored, train
from tiercache.dist.shard_writer import ShardWriter
from tiercache.store import CommitMissingError, Cursor, Store, StoreClosedError, info, verify
from tiercache.store.locks import leased_commits
from tiercache.store.rank_writer import RankWriter
from tiercache.store.snapshot import Needed


def kept(path: Path) -> list[int]:
    with tc.Store.open(path, mode="r") as store:
        commits = store.commits
        assert (store.commit.id, store.commit.cursor) == (commits[-1].id, commits[-1].cursor)
        for commit in commits:
            assert list(problems(store.at(commit.id))) == []
    for commit in commits:
        with tc.Store.open(path, commit=commit.id, mode="r") as store:
            assert [one.id for one in store.commits] == [store.commit.id] == [commit.id]
            assert store.commit.cursor == commit.cursor
            assert list(problems(store)) == []
    return [commit.id for commit in commits]


def kept_by_ranks(path: Path) -> list[list[int]]:
    """Return the ids of the commits that each rank has a list for, once a writer has opened the store."""
    with Store.open(path) as store:
        return [lists_of(rank, i) for i, rank in enumerate(store.ranks or (store,))]


def lists_of(store: Store, rank: int) -> list[int]:
    """Return the ids of the commits that a rank has a list for; it has exactly the bytes that they need."""
    stored = {name: blob.size - blob.dropped for name, blob in store.reader.stored().items()}
    needed = Needed.of(store.history.snapshots)
    assert stored == {need.name: need.size - need.first_byte for need in needed.blobs()}
    lists = [name.removeprefix(f"ranks/{rank}.") for name in stored if name.startswith("ranks/")]
    return sorted(int(name.partition("-")[0]) for name in lists)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("num_ranks", "engine"), [(1, "lmdb"), (3, "lmdb"), (2, "zarr")])
def test_the_newest_commits_of_all_ranks_are_kept(tmp_path: Path, num_ranks: int, engine: str) -> None:
    path = tmp_path / "s"
    train_on(path, num_ranks, 5, engine=engine, retention=3)
    with tc.Store.open(path, mode="r") as store:
        assert {one.retention for one in (store, *store.ranks)} == {3}
    assert kept(path) == [2, 3, 4]
    assert kept_by_ranks(path) == [[2, 3, 4]] * num_ranks
    train_on(path, num_ranks, 2)
    assert kept(path) == [4, 5, 6]
    with pytest.raises(CommitMissingError, match=r"the store at .* has no commit 3: pass one of 4, 5, 6"):
        tc.Store.open(path, commit=3, mode="r")
    with tc.Store.open(path, mode="r") as store:
        with pytest.raises(CommitMissingError, match="has no commit 7: pass one of 4, 5, 6"):
            store.at(7)
        before = store.at(4)
        if engine == "zarr":  # a process opens the other engine's files once
            train_on(path, num_ranks, 3)
        assert list(problems(before.at(4))) == []  # a reader keeps what it sees
        if engine == "zarr":
            with pytest.raises(CommitMissingError, match="has no commit 5: pass one of 7, 8, 9"):
                before.at(5)
        else:
            assert list(problems(before.at(5))) == []
        before.close()
    with pytest.raises(StoreClosedError):
        store.at(5)
    train_on(path, num_ranks, 1, retention=1)
    assert kept(path) == [10 if engine == "zarr" else 7]
    assert kept_by_ranks(path) == [kept(path)] * num_ranks


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["r", "a"])
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_each_rank_is_read_at_each_commit(tmp_path: Path, engine: str, mode: str) -> None:
    """Its rows equal the rank's rows in the store at that commit; a view keeps them, and an unused one nothing."""
    path = tmp_path / "s"
    train_on(path, 2, 5, engine=engine, retention=3)
    with tc.Store.open(path, mode=mode) as store:
        for commit in store.commits:
            whole = store.at(commit.id)
            for rank, other in zip(store.ranks, whole.ranks, strict=True):
                views = (rank.at(commit.id), rank.at(commit.id).at(commit.id), other.at(commit.id))
                assert [one.commit.own.rank for one in views] == [other.commit.own.rank] * 3
                for name in WHOLE:
                    rows = [(keys.tolist(), [one.tobytes() for one in fields]) for keys, fields in other.scan(name)]
                    for view in views:
                        found = [(keys.tolist(), [one.tobytes() for one in fields]) for keys, fields in view.scan(name)]
                        assert found == rows
        del whole, rank, other, views, view
        assert leased_commits(store._opened.engine.lease_folder) == ({4} if mode == "r" else set())
        kept = store.ranks[1].at(3)
        rows = [keys.tolist() for keys, _ in kept.scan("item")]
        if mode == "a":
            for _ in range(4):
                store.compact()
        elif engine == "zarr":  # a process opens the other engine's files once
            train_on(path, 2, 5)
        assert [keys.tolist() for keys, _ in kept.scan("item")] == rows


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_ranks_free_what_no_kept_commit_needs_as_they_train(tmp_path: Path, engine: str) -> None:
    def body(ranks: Any, shards: ShardWriter, world: ShardWorld) -> None:
        for id_ in range(6):
            take(shards, world)
            assert lists_of(shards.store, ranks.rank) == [*range(max(0, id_ - 1), id_ + 1)]

    assert on_ranks(tmp_path / "s", 3, body, engine=engine, retention=2) == [None] * 3


def test_commits_beyond_a_lower_retention_go_with_the_next_commit(tmp_path: Path) -> None:
    """On all ranks, also if one had prepared a commit; without a next commit all kept ones stay."""
    path = tmp_path / "s"
    train_on(path, 2, 6, retention=4)
    sharded_world.ahead(path, 2, 1)
    train_on(path, 2, 0, retention=2)
    assert kept(path) == [2, 3, 4, 5]
    assert kept_by_ranks(path) == [[2, 3, 4, 5]] * 2
    train_on(path, 2, 1, retention=2)
    assert kept(path) == [5, 6]
    train_on(path, 2, 2)
    assert kept_by_ranks(path) == [[7, 8]] * 2


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_what_ranks_could_not_free_goes_when_they_open_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """It simulates a kill between publishing a commit and freeing older blobs."""
    path = tmp_path / "s"
    train_on(path, 2, 6, engine=engine, retention=4)
    with monkeypatch.context() as patch:
        patch.setattr(RankWriter, "_free", lambda *_, **__: None)
        train_on(path, 2, 1, retention=1)
    assert kept(path) == [6]
    with Store.open(path, mode="r") as store:
        for rank, one in enumerate(store.ranks):
            assert {f"ranks/{rank}.{id_}" for id_ in range(3, 7)} <= {
                name.partition("-")[0] for name in one.reader.stored()
            }
    train_on(path, 2, 0)
    assert kept_by_ranks(path) == [[6]] * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["zarr", "lmdb"])
@pytest.mark.parametrize(("to", "ahead"), [(3, 1), (2, None), (4, 0), (2, 1), (3, 0), (3, None), (4, None)])
def test_ranks_go_on_from_a_commit_that_was_rolled_back_to(
    tmp_path: Path, to: int, ahead: int | None, engine: str
) -> None:
    path = tmp_path / "s"
    train_on(path, 2, 5, engine=engine, retention=3)
    with tc.Store.open(path, mode="r") as store:
        cursors = {commit.id: commit.cursor for commit in store.commits}
    if ahead is not None:
        sharded_world.ahead(path, 2, ahead)
    commit = sharded_world.roll_back(path, to)
    assert (commit.id, commit.cursor) == (5, cursors[to])
    assert kept(path) == [*range(2, to + 1), 5][-3:]
    assert kept_by_ranks(path) == [kept(path)] * 2
    train_on(path, 2, 3)
    assert kept(path) == [6, 7, 8]
    assert verify(path)["problems"] == []
    with pytest.raises(CommitMissingError, match="has no commit 5: pass one of 6, 7, 8"):
        sharded_world.roll_back(path, 5)


def test_ranks_that_are_divided_anew_begin_their_commits_anew(tmp_path: Path) -> None:
    """Ids continue, and older commits are gone; all rows changed since each commit that was not rolled back."""
    path = tmp_path / "s"
    train_on(path, 2, 3, retention=3)
    assert sharded_world.roll_back(path, 1).id == 3
    train_on(path, 2, 2)
    assert divide_among(path, 3, 1) == [None] * 3
    assert kept(path) == [6]
    for back in (lambda: tc.Store.open(path, commit=5, mode="r"), lambda: sharded_world.roll_back(path, 5)):
        with pytest.raises(CommitMissingError, match="has no commit 5: pass one of 6"):
            back()
    with tc.Store.open(path, mode="r") as store:
        for since in (0, 1, 3, 4, 5):
            check_changes(store, since, None)
        with pytest.raises(CommitMissingError, match=r"commit 2 of .* was dropped by a rollback to commit 1: pass 1"):
            store.changed_rows("item", since=2)
    train_on(path, 3, 3, turn=1)
    assert kept(path) == [7, 8, 9]
    assert kept_by_ranks(path) == [[7, 8, 9]] * 3
    assert sharded_world.roll_back(path, 7).id == 10
    train_on(path, 3, 1, turn=1)
    assert kept(path) == [7, 10, 11]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_store_with_a_pinned_commit_is_not_divided_anew(tmp_path: Path, num_ranks: int) -> None:
    path = tmp_path / "s"
    train_on(path, 2, 4, retention=2)
    with tc.Store.open(path) as store:
        store.pin("best", 2)
    errors = divide_among(path, num_ranks, 1)
    assert "has the pinned commits 'best', which resharding would drop: unpin them first" in sentences(errors)
    assert kept(path) == [2, 4]
    train_on(path, 2, 0)
    assert kept_by_ranks(path) == [[2, 3]] * 2  # a pin lists the same rows
    assert sorted(one.name for one in path.glob("rank-*")) == ["rank-1"]
    with tc.Store.open(path) as store:
        store.unpin("best")
    assert divide_among(path, num_ranks, 1) == [None] * num_ranks
    assert kept(path) == [6]


def test_commands_read_pin_and_roll_back_a_store_of_several_ranks(tmp_path: Path) -> None:
    path = tmp_path / "s"
    train_on(path, 3, 6, retention=3)
    assert [one["id"] for one in told("info", path)["commits"]] == [3, 4, 5]
    for rank in told("info", path)["shards"]:
        assert rank["retention"] == 3
        assert [(one["id"], one["pass"], one["sample"]) for one in rank["commits"]] == [
            (3, 2, 0), (4, 3, 0), (5, 3, 5)
        ]  # fmt: skip
    assert "3 are kept" in run("info", path)
    assert "3 ranks at 3 commits" in run("verify", path)
    trained = {key: (pass_index, shard) for key, (pass_index, shard) in expected(Cursor(2))["item"].items()}
    later = expected(Cursor(3, 5))["item"]
    key = next(key for key, at in trained.items() if later[key] != at)
    rows = [told("lookup", path, "item", *at, "--", key)[0] for at in ([], ["--commit", 3])]
    for row, at in zip(rows, (later[key], trained[key]), strict=True):
        assert np.array_equal(np.float32(row["vector"]), whole_row(WHOLE["item"], key, *at)[0][0])

    changed = told("changes", path, "--since", 3)
    assert (changed["since"], changed["commit"]) == (3, 5)
    run("export", path, tmp_path / "changed", "--since", 3, "--format", "numpy")
    keys = np.load(tmp_path / "changed" / "item" / "keys.npy")
    assert changed["rows"]["item"] == keys.size == len(np.unique(keys)) > 0
    assert "item: " in run("changes", path, "--since", -1)
    assert told("diff", path)["same"]
    differences = told("diff", path, "--from", 3, "--to", 5, code=1)["tables"]
    item = next(one for one in differences if one["table"] == "item")
    assert item["different"] + item["only_second"] == keys.size

    run("export", path, tmp_path / "out", "--format", "numpy", "--commit", 4)
    run("import", tmp_path / "out", tmp_path / "one")
    assert "only first" in run("diff", path, tmp_path / "one", "--from", 4)
    run("diff", tmp_path / "one", path, code=1)

    done = told("rollback", path, "--to", 4)
    assert done == {"commit": 6, "pass": 3, "sample": 0}
    run("diff", path, tmp_path / "one")
    assert "commit 7 has the rows and the position of commit 4" in run("rollback", path, "--to", 4)
    assert info(path)["cursor"] == {"pass": 3, "sample": 0}

    assert told("pin", path, "best", 4) == {"commit": 8, "name": "best", "pinned": 4}
    assert "pinned   commit 4 as 'best'" in run("info", path)
    train_on(path, 3, 4)
    assert kept(path) == [4, 10, 11, 12]
    run("diff", path, tmp_path / "one", "--from", 4)
    assert "no commit is pinned as 'best' anymore" in run("unpin", path, "best")
    assert kept(path) == [10, 11, 13]
    assert "has no pinned commit 'best': it has none" in error_of("unpin", path, "best")
    assert "has no commit 4: pass one of 10, 11, 13" in error_of("pin", path, "best", 4)


def test_verification_beside_a_training_says_what_it_checked(tmp_path: Path) -> None:
    """The commits that were kept when it began stay until all were read."""
    path = tmp_path / "s"
    train_on(path, 2, 3, retention=2)
    told = list[list[Any]]()

    def go_on(*_: int) -> None:
        if not told:
            told.append(train_shards(path, 2, 3))

    report = verify(path, progress=go_on)
    assert told == [[None] * 2]
    assert (report["commits"], report["problems"]) == ([1, 2], [])
    train_on(path, 2, 0)
    assert kept_by_ranks(path) == [[4, 5]] * 2


def test_a_training_goes_on_from_a_rollback_to_the_same_bits(ranks_pool: RanksPool, tmp_path: Path) -> None:
    CASES["bags"].cut(tmp_path / "passes")
    path, training = tmp_path / "model.tc", {"case": "bags", "folder": str(tmp_path)}
    whole = ranks_pool.run(2, train, **training, retention=3)
    theirs = stored(tmp_path)
    with tc.Store.open(path, mode="r") as store:
        first, *_, last = store.commits
    assert (last.id - first.id, last.cursor.pass_index - first.cursor.pass_index) == (2, 2)
    assert sharded_world.roll_back(path, first.id).cursor == first.cursor
    assert different(stored(tmp_path), theirs)

    ended = ranks_pool.run(2, train, **training)

    with tc.Store.open(path, mode="r") as store:
        assert store.commit.cursor == last.cursor
        assert [commit.id for commit in store.commits] == [last.id + 1, last.id + 2, last.id + 3]
    assert different(stored(tmp_path), theirs) == []
    for name, value in whole[0].items():
        np.testing.assert_array_equal(ended[0][name], value, err_msg=name)
    words = "has 2 ranks, which write its rows together: train on it, or train with one rank"
    assert words in error_of("reorganize", path, tmp_path / "passes", "--order-seed", 5)
    assert different(stored(tmp_path), theirs) == []


def different(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return [
        name
        for name, (keys, fields) in ours.items()
        if [one.tobytes() for one in (keys, *fields)] != [one.tobytes() for one in (theirs[name][0], *theirs[name][1])]
    ]


# -- changes since a commit ------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_changed_since_a_commit_is_what_was_trained_since(tmp_path: Path, num_ranks: int) -> None:
    path = tmp_path / "s"
    train_on(path, num_ranks, 6, retention=4)
    sharded_world.ahead(path, num_ranks, 0)
    train_on(path, num_ranks, 1)
    for turn in range(2):
        with tc.Store.open(path, mode="r") as newest:
            for at in newest.commits:
                store = newest.at(at.id)
                for since in newest.commits:
                    if since.id <= at.id:
                        check_changes(store, since.id, since.cursor)
                check_changes(store, -1, None)
                words = "has no changes since" if at.id < since.id else "has no commit 99|has no changes"
                with pytest.raises(CommitMissingError, match=words):
                    store.changed_rows("item", since=max(99 * (at.id == since.id), since.id))
            assert newest.commits[0].id == 3
            check_changes(newest, 2, Cursor(1, 5))  # which is gone
            for since in (5, 6) if turn else ():
                with pytest.raises(CommitMissingError, match=f"commit {since} of .* was dropped by a rollback to"):
                    list(newest.changes("item", since=since))
        sharded_world.roll_back(path, 4)
        train_on(path, num_ranks, 1)


def test_changes_of_slices_read_the_keys_of_each_rank_a_few_times(tmp_path: Path) -> None:
    path = tmp_path / "s"
    train_on(path, 2, 7)
    with tc.Store.open(path, mode="r") as store:
        first, other = store.ranks
        rows = store.live_rows("word")
        keys = np.concatenate([keys for keys, _ in store.changes("word", since=-1)])
        assert sorted(keys.tolist()) == sorted(expected(store.commit.cursor)["word"])
        assert keys.size == rows
        assert 8 * rows <= first.counters.key_bytes_read == other.counters.key_bytes_read <= 4 * 8 * rows


def check_changes(store: tc.Store, since: int, cursor: Cursor | None) -> None:
    before = {name: {} for name in WHOLE} if cursor is None else expected(cursor)
    for name, rows in expected(store.commit.cursor).items():
        wanted = {key for key, trained in rows.items() if before[name].get(key) != trained}
        found = dict[int, list[bytes]]()
        for keys, fields in store.changes(name, since=since):
            assert list(fields) == [field.name for field in WHOLE[name].fields]
            for i, key in enumerate(keys.tolist()):
                assert key not in found
                found[key] = [values[i].tobytes() for values in fields.values()]
        assert found.keys() == wanted
        assert store.changed_rows(name, since=since) == len(wanted)
        for key, values in found.items():
            assert values == [one[0].tobytes() for one in whole_row(WHOLE[name], key, *rows[key])]
