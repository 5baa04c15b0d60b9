"""A sharded store is read as whole tables by one process, beside a training too."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dist.meeting import meet
from tests.dist.sharded_world import (
    TABLES,
    WHOLE,
    check_shards,
    divide_anew,
    expected,
    problems,
    sentences,
    sharding_on,
    train_shards,
    whole_row,
)
from tiercache import import_store
from tiercache.store import (
    CommitMissingError,
    CorruptStoreError,
    Cursor,
    KeyMissingError,
    Store,
    StoreError,
    StoreFullError,
    StoreMissingError,
    alter,
    forget,
    info,
    verify,
)
from tiercache.store.directory import StoreDirectory
from tiercache.store.initial_rows import initial_rows
from tiercache.store.shards import open_shards
from tiercache.store.shards.shard_manifest import GlobalCommit, ShardManifest
from tiercache.store.shards.sharding import ShardingPlan


def test_lookup_gives_whole_rows_of_any_keys(tmp_path: Path) -> None:
    """Repeated, in any order, of every sharding; keys without a row as asked for."""
    path = tmp_path / "s"
    assert train_shards(path, 3, 5) == [None] * 3
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
        with pytest.raises(ValueError, match="is beyond int64"):
            store.lookup("item", np.array([2**63, 5], dtype=np.uint64))


FROM_ITS_OWN_MODULE = """
import sys
from tiercache.store.store import Store
with Store.open(sys.argv[1], mode="r") as store:
    print(type(store).__name__, sum(store.live_rows(table.name) for table in store.tables))
"""


def test_the_class_opens_a_sharded_store_whatever_module_it_comes_from(tmp_path: Path) -> None:
    """A process that imports nothing but the module of ``Store`` has it too."""
    assert train_shards(tmp_path / "s", 2, 3) == [None] * 2
    with Store.open(tmp_path / "s", mode="r") as store:
        rows = sum(store.live_rows(table.name) for table in store.tables)
    command = [sys.executable, "-c", FROM_ITS_OWN_MODULE, str(tmp_path / "s")]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert found.split() == [type(store).__name__, str(rows)]


def test_a_sharded_store_is_neither_altered_nor_made_to_forget(tmp_path: Path) -> None:
    """It says so, and stays as it was."""
    assert train_shards(tmp_path / "s", 2, 3) == [None] * 2
    with Store.open(tmp_path / "s") as store:
        commit = store.commit.id
        with pytest.raises(ValueError, match="has shards and cannot be altered: train with one rank to make it plain"):
            alter(store, store.tables[:1])
        with pytest.raises(ValueError, match="has shards and cannot be made to forget rows: train with one rank"):
            forget(store, store.tables[0].name, np.array([1]))
        assert store.commit.id == commit


@pytest.mark.parametrize("divided", [False, True])
def test_a_reader_begins_anew_where_a_training_goes_on_while_it_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, divided: bool
) -> None:
    """Between reading the manifest and opening the shards: commits, or another division, took them away."""
    path, times = tmp_path / "s", [0]
    assert train_shards(path, 2, 4) == [None] * 2
    plain = open_shards._open_all

    def slow(place: Path, manifest: ShardManifest, only: GlobalCommit | None) -> tuple[Store, ...]:
        times[0] += 1
        if times[0] == 1 and divided:
            assert meet(1, lambda ranks: divide_anew(path, ranks, sharding_on(1))) == [None]
        elif times[0] <= 2 and not divided:
            assert train_shards(path, 2, 2) == [None] * 2
        return plain(place, manifest, only)

    monkeypatch.setattr(open_shards, "_open_all", slow)
    check_shards(path, Cursor(2) if divided else Cursor(5))
    assert times[0] == (2 if divided else 3)


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_a_reader_opens_while_a_store_is_sharded_or_made_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """What it began to open went away meanwhile: it opens the other. A plain store that is open says so, or reads."""
    path, find, open_all = tmp_path / "s", StoreDirectory.find, open_shards._open_all
    assert train_shards(path, 2, 4, engine=engine) == [None] * 2
    changing: list[bool] = []

    def change() -> None:
        if changing and changing.pop():
            is_plain = not (path / "shards.json").exists()
            sharding = sharding_on(2) if is_plain else ShardingPlan.of_one(TABLES)
            divided = meet(
                sharding.num_ranks,
                lambda ranks: divide_anew(path, ranks, sharding, plain=not is_plain),
            )
            assert divided == [None] * sharding.num_ranks

    def slow_find(directory: StoreDirectory) -> bool:
        change()
        return find(directory)

    def slow_open(*arguments: Any) -> tuple[Store, ...]:
        change()
        return open_all(*arguments)

    monkeypatch.setattr(StoreDirectory, "find", slow_find)
    monkeypatch.setattr(open_shards, "_open_all", slow_open)
    for look in (lambda: check_shards(path, Cursor(2)), lambda: info(path)["rows"]):
        rows = look()
        for _ in range(2):
            changing.append(True)
            assert look() == rows
            assert not changing
    changing.append(True)
    change()
    with Store.open(path, mode="r") as store:
        changing.append(True)
        change()
        if engine == "lmdb":  # whose files stay open
            assert store.lookup("item", np.arange(3), missing="zeros")["vector"].shape == (3, 8)
            return
        for read in (lambda: store.lookup("item", np.arange(3)), lambda: list(store.scan("word")), store.state):
            with pytest.raises(StoreError, match=r"the store at .* was sharded while it was read: open it again"):
                read()


def test_a_reader_opens_while_a_training_drops_the_oldest_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands at the newest of the manifest that it read, at once, with the older ones that are still there."""
    path, times = tmp_path / "s", [0]
    assert train_shards(path, 2, 6, retention=4) == [None] * 2
    plain = open_shards._open_all

    def slow(place: Path, manifest: ShardManifest, only: GlobalCommit | None) -> tuple[Store, ...]:
        times[0] += 1
        assert train_shards(path, 2, 3) == [None] * 2
        return plain(place, manifest, only)

    monkeypatch.setattr(open_shards, "_open_all", slow)
    with Store.open(path, mode="r") as store:
        assert [commit.id for commit in store.commits] == [4, 5]
        assert [list(problems(store.at(commit.id))) for commit in store.commits] == [[], []]
        store.check_shards()  # the manifest names none any more that is gone
    assert times[0] == 1


def test_damage_that_an_older_commit_alone_needs_spoils_no_other(tmp_path: Path) -> None:
    """The newest is read, and each older one that is whole; the damaged one, verification and writers say what is."""
    path = tmp_path / "s"
    assert train_shards(path, 2, 4, engine="zarr", retention=3) == [None] * 2
    manifest = ShardManifest.read(path)
    assert [commit.shards for commit in manifest.commits] == [(1, 1), (2, 2), (3, 3)]
    (path / "shard-0-1" / "state" / "2.0").unlink()
    for commit in (None, 1, 3):
        with Store.open(path, commit=commit, mode="r") as store:
            assert [one.id for one in store.commits] == ([1, 2, 3] if commit is None else [commit])
            assert list(problems(store)) == []
    with pytest.raises(CorruptStoreError, match=r"the dense state of commit 2 of the store at .*shard-0-1"):
        Store.open(path, commit=2, mode="r")
    (sentence,) = verify(path)["problems"]
    assert "shard 1: in commit 2, the dense state of commit 2" in sentence
    assert "the dense state of commit 2" in sentences(train_shards(path, 2, 0))


def test_an_older_commit_that_a_part_lacks_is_left_out_and_told(tmp_path: Path) -> None:
    """Readers have the others; verification and writers say what is wrong, as nobody dropped it."""
    path = tmp_path / "s"
    assert train_shards(path, 2, 4, retention=3) == [None] * 2
    manifest = ShardManifest.read(path)
    oldest = replace(manifest.commits[0], shards=(1, 0))
    replace(manifest, commits=(oldest, *manifest.commits[1:])).write(path)
    with Store.open(path, mode="r") as store:
        assert [commit.id for commit in store.commits] == [2, 3]
        with pytest.raises(CommitMissingError, match="has no commit 1: give one of 2, 3"):
            store.at(1)
    words = "commit 0 of shard 1 of the store at .* stands at pass 0 and the manifest at pass 1"
    with pytest.raises(CorruptStoreError, match=words):
        Store.open(path, commit=1, mode="r")
    (sentence,) = verify(path)["problems"]
    assert re.match(words, sentence)
    assert re.search(words, sentences(train_shards(path, 2, 0)))


def test_a_reader_of_shards_that_went_away_is_told_so(tmp_path: Path) -> None:
    """Another number of ranks made its own: what was open reads no more, and says why."""
    path = tmp_path / "s"
    assert train_shards(path, 2, 4, engine="zarr") == [None] * 2
    with Store.open(path, mode="r") as store:
        assert meet(1, lambda ranks: divide_anew(path, ranks, sharding_on(1))) == [None]
        for read in (lambda: store.lookup("item", np.arange(3)), lambda: list(store.scan("word")), store.state):
            with pytest.raises(StoreError, match=r"the store at .* was sharded anew while it was read: open it"):
                read()
    check_shards(path, Cursor(2))


def test_one_process_begins_anew_where_nothing_was_committed(tmp_path: Path) -> None:
    """What ranks left before their first commit is nothing to go on with; only who brings tables makes a store."""
    path = tmp_path / "s"
    assert train_shards(path, 2, 0) == [None] * 2
    for options in ({}, {"mode": "r", "tables": TABLES}):
        with pytest.raises(StoreMissingError, match="has no commit yet: train to its first one"):
            Store.open(path, **options)  # type: ignore[arg-type]
    rows = {table.name: np.ones((4, table.dim), np.float32) for table in TABLES}
    import_store(rows, path, tables=TABLES, initial_state=True)
    with Store.open(path, mode="r") as store:
        assert type(store) is Store
        assert {table.name: store.live_rows(table.name) for table in store.tables} == dict.fromkeys(WHOLE, 4)
    assert [entry.name for entry in path.iterdir() if "shard" in entry.name] == []


def test_a_budget_of_blocks_binds_every_shard(tmp_path: Path) -> None:
    """Also where one process has all of them open."""
    path = tmp_path / "s"
    assert train_shards(path, 3, 5, engine="zarr") == [None] * 3
    with Store.open(path, store_budget=1) as store, pytest.raises(StoreFullError, match="store_budget"):
        store.compact()
    with Store.open(path, store_budget=1 << 30) as store:
        store.compact()


def test_tables_may_be_given_as_an_iterator(tmp_path: Path) -> None:
    """Where a manifest is there, too."""
    path = tmp_path / "s"
    assert train_shards(path, 2, 0) == [None] * 2
    with Store.open(path, tables=iter(TABLES)) as store:
        assert {table.name for table in store.tables} == set(WHOLE)


def test_what_others_keep_in_the_folder_stays(tmp_path: Path) -> None:
    """Where it has the name of a folder that a store of another engine has."""
    path = tmp_path / "s"
    assert train_shards(path, 2, 4) == [None] * 2
    others = [path / "state" / "notes.txt", path / "records" / "notes.txt", path / "notes.txt"]
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.touch()
    one = ShardingPlan.of_one(TABLES)
    assert meet(1, lambda ranks: divide_anew(path, ranks, one, plain=True)) == [None]
    assert meet(2, lambda ranks: divide_anew(path, ranks, sharding_on(2))) == [None] * 2
    assert not (path / "data.mdb").exists()
    assert all(other.exists() for other in others)
    check_shards(path, Cursor(2))
