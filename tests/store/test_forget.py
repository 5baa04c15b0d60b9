"""Forgotten rows: hidden at once from every read, removed by the next rewrite, and from the files on request."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.store.conftest import Home, small_tables
from tests.store.test_alter import changed, check, converted
from tests.store.world import World
from tiercache.store import Adam, Cursor, MemoryEngine, Store, alter, differences, forget, verify
from tiercache.store.store_errors import CommitMissingError


def keys_of(world: World, name: str) -> np.ndarray:
    return np.array(sorted(key for table, key in world.rows if table == name), np.int64)


def drop(world: World, name: str, keys: np.ndarray) -> None:
    for key in keys.tolist():
        del world.rows[name, key]
        del world.changed[name, key]


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 99),
    trained=st.integers(1, 4),
    steps=st.lists(st.sampled_from(["forget", "import", "alter", "compact"]), min_size=1, max_size=5),
    share=st.floats(0, 1),
)
@example(seed=0, trained=2, steps=["alter", "forget", "compact"], share=0.5)
def test_forgotten_keys_have_no_row_whatever_follows(seed: int, trained: int, steps: list[str], share: float) -> None:
    world, draw = World(small_tables()[:3], seed=seed, keys_per_pass=9, universe=30), np.random.default_rng(seed)
    with Store.open(None, tables=world.tables, engine=MemoryEngine(), retention=3) as store:
        world.run(store, trained)
        for step in ["forget", *steps]:
            cursor, state = store.commit.cursor, store.state()
            match step:
                case "forget":
                    keys = keys_of(world, "item")
                    keys = keys[draw.random(keys.size) < share]
                    done = forget(store, "item", np.append(keys, [7777, 7778]))
                    assert (done.rows, done.unknown, done.commit) == (keys.size, 2, store.commit)
                    drop(world, "item", keys)
                case "import" if not store.commit.stored:
                    world.lay_over(store, {"item": draw.choice(np.arange(-20, 25), 9, replace=False).tolist()})
                case "alter":
                    dim = 1 + next(table.dim for table in store.tables if table.name == "item")
                    tables = changed(store.tables, "item", dim=dim, optimizer=Adam())
                    world.rows = converted(world.rows, store.tables, tables)
                    alter(store, tables)
                    world.tables = tables
                case "compact":
                    store.compact()
            check(store, world.rows)
            for since in range(-1, store.commit.id + 1):
                world.check_changes(store, since)
            assert (store.commit.cursor, store.state()) == (cursor, state)
        world.follow(store, world.passes, start=(world.pass_index, 0))
        assert not store.snapshot.has_tombstones
        check(store, world.rows)
        for _ in range(3):
            world.check_load(store, world.pass_index)
            world.run(store, 1)
            check(store, world.rows)


@pytest.mark.sampled(1)
def test_rows_are_hidden_at_once_and_freed_by_the_next_rewrite(home: Home) -> None:
    """With the position and the dense state; the report has the pending bytes; a diff shows the keys."""
    world = World(small_tables(), keys_per_pass=30)
    store = home.open(world.tables, retention=2)
    world.run(store, 4)
    before, keys = store.commit, keys_of(world, "word")[::3]
    done = forget(store, "word", keys)
    assert (done.rows, done.unknown) == (keys.size, 0)
    assert done.waiting_bytes == keys.size * 8 * 4 * 3
    assert done.listed_by == (f"commit {before.id} (retention)",)
    commit = store.commit
    assert (commit.cursor, commit.overlaid, store.state()) == (before.cursor, "cyclic", world.state)
    store = home.open()
    with store.at(before.id) as older:
        check(older, world.rows)
        (found,) = (one for one in differences(older, store) if one.table == "word")
        assert (found.only_first, found.only_second, found.different) == (keys.size, 0, 0)
    drop(world, "word", keys)
    check(store, world.rows)
    world.follow(store, world.passes, start=(4, 0))
    assert store.snapshot.waiting_bytes <= done.waiting_bytes
    check(store, world.rows)
    world.run(store, 4)
    check(store, world.rows)


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_rows_that_are_forgotten_now_are_in_no_file(tmp_path: Path, engine: str) -> None:
    """Not under a retained commit; under a pin and for a reader they stay, and these are named."""
    world, path = World(small_tables(), keys_per_pass=30), tmp_path / "s.tc"
    with Store.open(path, tables=world.tables, engine=engine, retention=3) as store:
        world.run(store, 4)
        keys = keys_of(world, "word")[::3]
        vectors = store.lookup("word", keys)["vector"]

    def are_there() -> int:
        files = [file.read_bytes() for file in path.rglob("*") if file.is_file()]
        return sum(any(vector.tobytes() in data for data in files) for vector in vectors)

    assert are_there() == keys.size
    with Store.open(path) as store, Store.open(path, mode="r") as reader:
        store.pin("best", 2)
        done = forget(store, "word", keys, now=True)
        assert done.listed_by == ("commit 2 (pin 'best')", "commit 3 (a reader)")
        assert reader.lookup("word", keys)["vector"].tobytes() == vectors.tobytes()
    with Store.open(path) as store:
        assert [line.split(" (")[1] for line in forget(store, "word", keys, now=True).listed_by] == ["pin 'best')"]
        store.unpin("best")
        done = forget(store, "word", keys, now=True)
        assert (done.rows, done.listed_by, done.waiting_bytes) == (0, (), 0)
        assert store.commit.retention == 3
        drop(world, "word", keys)
        check(store, world.rows)
    assert are_there() == 0
    assert verify(path)["problems"] == []


def test_rows_that_no_commit_wrote_since_are_forgotten(home: Home) -> None:
    """A row that was only moved counts as unused."""
    world = World(small_tables(), num_passes=4)
    store = home.open(world.tables)
    world.run(store, 3)
    store.compact()
    old = np.array([key for (name, key), id_ in world.changed.items() if name == "item" and id_ <= 1])
    assert 0 < old.size < keys_of(world, "item").size
    assert forget(store, "item", unused_since=1).rows == old.size
    drop(world, "item", old)
    check(store, world.rows)
    words = r"no row of .* changed after commit 4, because the newest is 4: pass an older commit"
    with pytest.raises(ValueError, match=words):
        forget(store, "item", unused_since=4)


def test_changes_warn_of_rows_that_were_forgotten_since(home: Home) -> None:
    """Of that table until a rewrite, and of any table after it, because a rewrite keeps no keys."""
    world = World(small_tables())
    store = home.open(world.tables, retention=9)
    world.run(store, 2)
    keys = keys_of(world, "item")[:2]
    before = store.commit.id
    forget(store, "item", keys)

    def warned(since: int) -> list[str]:
        """Return the tables that changes since a commit warn of."""
        found = []
        for table in store.tables:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                list(store.changes(table.name, since=since))
            assert all("changes do not list them" in str(one.message) for one in caught)
            found += [table.name] * len(caught)
        return found

    assert (warned(before), warned(before + 1), warned(-1)) == (["item"], [], [])
    store.compact()
    names = [table.name for table in store.tables]
    store = home.open()
    assert (warned(before), warned(before + 2), warned(-1)) == (names, [], [])


def test_what_cannot_be_forgotten_is_refused() -> None:
    world, keys = World(small_tables()), np.array([1, 2])
    masked = np.ma.array([1, 2], mask=[False, True])
    with Store.open(None, tables=world.tables, engine=MemoryEngine()) as store:

        def refuses(words: str, name: str, given: Any = None, **options: Any) -> None:
            with pytest.raises(ValueError, match=words):
                forget(store, name, given, **options)

        refuses("has no commit yet", "item", keys)
        world.run(store, 2)
        refuses("has no table 'none': it has", "none", keys)
        refuses("expected a flat array of integers", "item", np.array([0.5]))
        refuses("pass either keys or unused_since", "item")
        refuses("pass either keys or unused_since", "item", keys, unused_since=0)
        refuses(r"keys have masked values: leave them out with keys.compressed\(\)", "item", masked)
        with pytest.raises(ValueError, match=r"keys have masked values: leave them out with keys.compressed\(\)"):
            store.lookup("item", masked)
        assert (forget(store, "item", []).rows, store.lookup("item", [])["vector"].size) == (0, 0)
        with pytest.raises(CommitMissingError, match="has no changes since -2"):
            forget(store, "item", unused_since=-2)
        world.train()
        world.append(store, within=True)
        world.publish(store, sample=3)
        refuses("stands inside pass 2: train to the end of a pass before rows are forgotten", "item", keys)
        assert store.commit.cursor == Cursor(2, 3)
