"""A store of several ranks is read as whole tables by one process, also while it is trained."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dist.meeting import meet
from tests.dist.sharded_world import (
    TABLES,
    WHOLE,
    check_shards,
    divide_among,
    divide_anew,
    expected,
    problems,
    sentences,
    train_on,
    train_shards,
    whole_row,
)
from tiercache import import_store
from tiercache.store import CorruptStoreError, Cursor, KeyMissingError, Store, StoreError, StoreFullError, verify
from tiercache.store import store as store_module
from tiercache.store.locks import Lease
from tiercache.store.opening import StoreDirectory
from tiercache.store.row_codec import initial_rows
from tiercache.store.sharding import ShardingPlan

GO_ON = """
import sys
from pathlib import Path
from tests.dist.meeting import meet
from tests.dist.sharded_world import divide_anew, sharding_on, train_shards
path, num_ranks, commits = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
def divide(ranks):
    divide_anew(path, ranks, sharding_on(num_ranks))
done = train_shards(path, num_ranks, commits) if commits else meet(num_ranks, divide)
assert done == [None] * num_ranks, done
"""


def go_on(path: Path, num_ranks: int, commits: int = 0) -> None:
    """Train ``commits`` commits in another process, or, if 0, divide the store among ``num_ranks`` ranks."""
    command = [sys.executable, "-c", GO_ON, str(path), str(num_ranks), str(commits)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])


def test_lookup_gives_whole_rows_of_any_keys(tmp_path: Path) -> None:
    path = tmp_path / "s"
    train_on(path, 3, 5)
    with Store.open(path, mode="r") as store:
        for name, wanted in expected(store.commit.cursor).items():
            table = WHOLE[name]
            keys = np.array([*wanted, *wanted][::-1])
            found = store.lookup(name, keys)
            assert list(found) == [field.name for field in table.fields]
            for i, key in enumerate(keys.tolist()):
                for values, other in zip(found.values(), whole_row(table, key, *wanted[key]), strict=True):
                    assert values[i].tobytes() == other[0].tobytes()
            gone = np.array([10**9, 7 * 10**9, 10**10])
            with pytest.raises(KeyMissingError, match=f"3 of 4 keys have no row in table '{name}' of the store"):
                store.lookup(name, np.array([*gone, keys[0]]))
            zeros = store.lookup(name, gone, missing="zeros")
            assert not any(np.any(values) for values in zeros.values())
            for values, first in zip(
                store.lookup(name, gone, missing="initial").values(), initial_rows(table, gone), strict=True
            ):
                assert np.array_equal(values, first)
            assert all(values.shape[0] == 0 for values in store.lookup(name, keys[:0]).values())
        with pytest.raises(ValueError, match="has no table 'nobody': it has"):
            store.lookup("nobody", keys)
        with pytest.raises(ValueError, match="keys are 1-dimensional float64"):
            store.lookup("item", np.array([0.5]))
        with pytest.raises(ValueError, match="does not fit in int64"):
            store.lookup("item", np.array([2**63, 5], dtype=np.uint64))


FROM_ITS_OWN_MODULE = """
import sys
from tiercache.store.store import Store
with Store.open(sys.argv[1], mode="r") as store:
    print(type(store).__name__, sum(store.live_rows(table.name) for table in store.tables))
"""


def test_the_class_opens_a_store_of_several_ranks_whatever_module_it_comes_from(tmp_path: Path) -> None:
    """A process that imports nothing but the module of ``Store`` has it too."""
    train_on(tmp_path / "s", 2, 3)
    with Store.open(tmp_path / "s", mode="r") as store:
        rows = sum(store.live_rows(table.name) for table in store.tables)
    command = [sys.executable, "-c", FROM_ITS_OWN_MODULE, str(tmp_path / "s")]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert found.split() == [type(store).__name__, str(rows)]


def hooked(patch: pytest.MonkeyPatch, where: str, call: Callable[[], None]) -> None:
    """Call a function whenever a store opens: at its folder, before its lease, or before its other ranks."""
    of, name = {
        "folder": (StoreDirectory, "find"), "lease": (Lease, "take"), "ranks": (store_module, "open_ranks"),
    }[where]  # fmt: skip
    plain = getattr(of, name)

    def slow(*arguments: Any, **options: Any) -> Any:
        call()
        return plain(*arguments, **options)

    patch.setattr(of, name, slow)


AT = {"folder": Cursor(3, 5), "lease": Cursor(5), "ranks": Cursor(2)}
"""Where a reader stands if two commits are made meanwhile: a lease keeps the commit that it found."""


@pytest.mark.sampled(6)
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
@pytest.mark.parametrize(
    ("where", "before", "after"),
    [*((where, 2, after) for where in AT for after in (2, 1)), ("folder", 1, 2), ("lease", 1, 2)],
)
def test_a_reader_stands_at_one_commit_if_a_training_goes_on_while_it_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, where: str, before: int, after: int
) -> None:
    """Commits, or another number of ranks, may remove the commit that it is opening: it starts over."""
    path, times, commits = tmp_path / "s", [0], 2 if before == after else 0
    train_on(path, before, 4, engine=engine)

    def change() -> None:
        times[0] += 1
        if times[0] <= (2 if where == "lease" and commits else 1):
            go_on(path, after, commits)

    hooked(monkeypatch, where, change)
    with Store.open(path, mode="r") as store:
        assert len(store.ranks) == (after if after > 1 else 0)
        assert store.commit.cursor == (AT[where] if commits else Cursor(2))
        assert list(problems(store)) == []
    if where == "lease":
        assert times[0] == (3 if commits else 2)


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_a_store_of_one_rank_is_read_on_while_it_gets_several(tmp_path: Path, engine: str) -> None:
    """Its lease keeps the rows that it reads until it is closed; then the next training frees them."""
    path = tmp_path / "s"
    train_on(path, 1, 4, engine=engine)
    with Store.open(path, mode="r") as store:
        go_on(path, 2)
        assert list(problems(store)) == []
        go_on(path, 2, 3)
        assert list(problems(store)) == []
    train_on(path, 2, 1)
    with Store.open(path) as store:
        assert [name for name in store.reader.stored() if name.startswith("commits/")] == ["commits/8"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_a_reader_opens_while_a_training_drops_the_oldest_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """It is at the newest that it leased, with the older ones that still exist."""
    path, times = tmp_path / "s", [0]
    train_on(path, 2, 6, engine=engine, retention=4)

    def change() -> None:
        times[0] += 1
        if times[0] == 1:
            go_on(path, 2, 2)

    with monkeypatch.context() as patch:
        hooked(patch, "ranks", change)
        store = Store.open(path, mode="r")
    with store:
        assert (store.commit.id, times[0]) == (5, 1)
        assert {4, 5} <= {commit.id for commit in store.commits} <= {2, 3, 4, 5}
        assert [list(problems(store.at(id_))) for id_ in (4, 5)] == [[], []]
        assert list(problems(store)) == []
    assert verify(path)["commits"] == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("states/1.2", Path.unlink, r"states/1\.2 of the store|the dense state of commit 2 "),
        ("ranks/1.2", Path.unlink, r"ranks/1\.2 of the store at .*/rank-1 is missing"),
        (
            "ranks/1.2",
            lambda file: file.write_bytes(bytes(file.stat().st_size)),
            r"ranks/1\.2 of .* is not what was wri",
        ),
    ],
    ids=["no state", "no list", "another list"],
)
def test_damage_that_an_older_commit_alone_needs_spoils_no_other(
    tmp_path: Path, name: str, damage: Callable[[Path], object], words: str
) -> None:
    path = tmp_path / "s"
    train_on(path, 2, 4, engine="zarr", retention=3)
    damage(path / "rank-1" / name)
    for commit in (None, 1, 3):
        with Store.open(path, commit=commit, mode="r") as store:
            assert [one.id for one in store.commits] == ([1, 2, 3] if commit is None else [commit])
            assert list(problems(store)) == []
    with pytest.raises(CorruptStoreError, match=words):
        state_of_rank(path, 1, 2)
    with Store.open(path, mode="r") as store, pytest.raises(CorruptStoreError, match=words), store.at(2) as older:
        older.ranks[1].state()
    found = verify(path)["problems"]
    assert any(re.search(words, sentence) for sentence in found)
    assert all(sentence.startswith("in commit 2, ") and "/s/rank-1" in sentence for sentence in found)
    for _ in range(2):
        assert re.search(words, sentences(train_shards(path, 2, 0)))
        with pytest.raises(CorruptStoreError, match=words):
            Store.open(path)
    check_shards(path, Cursor(2))


def state_of_rank(path: Path, rank: int, commit: int) -> bytes:
    with Store.open(path, commit=commit, mode="r") as store:
        return store.ranks[rank].state()


def test_a_reader_of_ranks_that_went_away_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "s"
    train_on(path, 2, 4, engine="zarr")
    keys = np.array([*expected(Cursor(2))["item"]])
    with Store.open(path, mode="r") as store:
        state = store.state()
        assert divide_among(path, 1) == [None]
        for read in (lambda: store.lookup("item", keys), lambda: list(store.scan("word")), store.ranks[1].state):
            with pytest.raises(StoreError, match=r"was divided among other ranks while it was read: open it again"):
                read()
        assert store.state() == state
    check_shards(path, Cursor(2))


def test_one_process_begins_anew_where_nothing_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    train_on(path, 2, 0)
    with Store.open(path, mode="r") as store:
        assert (store.commit, store.ranks, {table.name for table in store.tables}) == (None, (), set(WHOLE))
    assert (path / "rank-1").exists()
    rows = {table.name: np.ones((4, table.dim), np.float32) for table in TABLES}
    import_store(rows, path, tables=TABLES, initial_state=True)
    with Store.open(path, mode="r") as store:
        assert store.ranks == ()
        assert {table.name: store.live_rows(table.name) for table in store.tables} == dict.fromkeys(WHOLE, 4)
    assert list(path.glob("rank-*")) == []


def test_a_budget_of_blocks_binds_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "s"
    train_on(path, 3, 5, engine="zarr")
    with Store.open(path, store_budget=1) as store:
        for one in (store, *store.ranks):
            with pytest.raises(StoreFullError, match="store_budget"):
                one.compact()
        assert list(problems(store)) == []
    with Store.open(path, store_budget=1 << 30) as store:
        store.compact()
        assert list(problems(store)) == []


@pytest.mark.parametrize("commits", [0, 3])
def test_tables_may_be_given_as_an_iterator(tmp_path: Path, commits: int) -> None:
    path = tmp_path / "s"
    train_on(path, 2, commits)
    with Store.open(path, tables=iter(TABLES)) as store:
        assert {table.name for table in store.tables} == set(WHOLE)
        assert len(store.ranks) == (2 if commits else 0)


def test_what_others_keep_in_the_folder_stays(tmp_path: Path) -> None:
    """Also if it has the name of a folder that a store of another engine has, or of a rank."""
    path = tmp_path / "s"
    train_on(path, 2, 4)
    others = [path / folder / "notes.txt" for folder in ("states", "ranks", "rank-2", "rank-x", "rank-07", ".")]
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.touch()
    assert meet(1, lambda ranks: divide_anew(path, ranks, ShardingPlan.of_one(TABLES))) == [None]
    assert not (path / "rank-1").exists()
    assert "rank-2 exists and is not a rank of this store: pass unused folders as shard_dirs=" in sentences(
        divide_among(path, 3)
    )
    check_shards(path, Cursor(2))
    assert divide_among(path, 2) == [None] * 2
    assert all(other.exists() for other in others)
    check_shards(path, Cursor(2))
