"""Forgotten rows and changed settings of a store of several ranks: one commit of all of them."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dist.meeting import meet
from tests.dist.pool import RanksPool
from tests.dist.sharded_world import TABLES, UNIVERSE, divide_among, problems, sharding_on, train_on, train_shards
from tests.dist.trainings import CASES, assert_same_rows, on_ranks, stored
from tests.store.independent_reader import read_store
from tiercache.dist.shard_writer import ShardWriter
from tiercache.store import (
    SGD,
    Adagrad,
    Adam,
    CommitMissingError,
    KeyMissingError,
    RowWiseAdagrad,
    Store,
    StoreError,
    Table,
    alter,
    forget,
    info,
    verify,
)

KEYS = np.arange(0, UNIVERSE, 3)


def rows_of(store: Store) -> dict[str, dict[int, bytes]]:
    found: dict[str, dict[int, bytes]] = {}
    for table in store.tables:
        rows = found[table.name] = {}
        for keys, fields in store.scan(table.name):
            rows |= {key: b"".join(values[i].tobytes() for values in fields) for i, key in enumerate(keys.tolist())}
    return found


def as_the_format_says(path: Path) -> dict[str, dict[int, bytes]]:
    found = read_store(path).tables
    return {name: {key: b"".join(row.fields) for key, row in rows.items()} for name, rows in found.items()}


def without(rows: dict[str, dict[int, bytes]], name: str, keys: np.ndarray) -> dict[str, dict[int, bytes]]:
    gone = set(keys.tolist())
    return {**rows, name: {key: row for key, row in rows[name].items() if key not in gone}}


@pytest.fixture(params=["lmdb", "zarr"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    train_on(tmp_path / "s", 3, 4, engine=request.param, retention=2)
    yield tmp_path / "s"
    assert verify(tmp_path / "s")["problems"] == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [table.name for table in TABLES])
def test_rows_of_every_sharding_are_forgotten_on_all_ranks(path: Path, name: str) -> None:
    """A row of column slices is one row; other tables, dense state and position stay; a rewrite frees the bytes."""
    with Store.open(path) as store:
        before, commit, state = rows_of(store), store.commit, store.state()
        forgotten = [key for key in KEYS.tolist() if key in before[name]]
        done = forget(store, name, KEYS)
        assert (done.commit.id, done.rows) == (commit.id + 1, len(forgotten))
        assert done.unknown == KEYS.size - len(forgotten)
        assert done.waiting_bytes == store.waiting_bytes > 0
        assert done.listed_by == (f"commit {commit.id} (retention)",)
        after = without(before, name, KEYS)
        assert rows_of(store) == after
        assert (store.state(), store.commit.cursor) == (state, commit.cursor)
        with pytest.raises(KeyMissingError):
            store.lookup(name, np.array(forgotten))
        with store.at(commit.id) as old:
            assert rows_of(old) == before
    assert info(path)["waiting_bytes"] == done.waiting_bytes
    with Store.open(path, mode="r") as store:
        assert rows_of(store) == after
        assert store.live_rows(name) == len(after[name])
    with Store.open(path) as store:
        store.compact()
        assert (rows_of(store), store.waiting_bytes) == (after, 0)


@pytest.mark.sampled(1)
def test_rows_that_are_forgotten_now_are_in_no_commit(path: Path) -> None:
    with Store.open(path) as store:
        before = rows_of(store)
        done = forget(store, "word", KEYS, now=True)
        assert [commit.id for commit in store.commits] == [done.commit.id]
        assert (done.waiting_bytes, done.listed_by) == (0, ())
        store.pin("best")
        pinned = store.commit.id - 1
        done = forget(store, "item", KEYS, now=True)
        assert done.listed_by == (f"commit {pinned} (pin 'best')",)
        assert rows_of(store) == without(without(before, "word", KEYS), "item", KEYS)
        assert store.retention == 2


@pytest.mark.sampled(1)
def test_rows_that_no_later_commit_wrote_are_forgotten(path: Path) -> None:
    with Store.open(path) as store:
        since = store.commits[0].id
        for name in ("item", "word"):
            kept = {key for keys, _ in store.changes(name, since=since) for key in keys.tolist()}
            rows = store.live_rows(name)
            assert 0 < len(kept) < rows
            assert forget(store, name, unused_since=since).rows == rows - len(kept)
            assert set(rows_of(store)[name]) == kept


def test_settings_of_all_ranks_change_in_one_commit(path: Path) -> None:
    """No row moves, and a training with the old tables is refused."""
    with Store.open(path) as store:
        before, commit = rows_of(store), store.commit
        tables = [replace(t, optimizer=Adagrad(learning_rate=0.3)) if t.name == "item" else t for t in TABLES]
        altered = alter(store, tables)
        assert (altered.id, altered.cursor, altered.stored) == (commit.id + 1, commit.cursor, ())
        assert rows_of(store) == before
        assert alter(store, tables) is store.commit
    assert train_shards(path, 3, 0)[0] is not None
    with Store.open(path, mode="r") as store:
        assert {rank.commit.id for rank in store.ranks} == {altered.id}
        assert list(problems(store)) == []

    def go_on(ranks: object) -> int:
        with ShardWriter.open(path, tables, sharding_on(3), ranks) as shards:  # type: ignore[arg-type]
            (item,) = (table for table in shards.store.tables if table.name == "item")
            assert item.optimizer.learning_rate == 0.3
            return shards.store.commit.id

    assert meet(3, go_on) == [altered.id] * 3


CHANGES = {
    "wider": lambda: [replace(table, dim=table.dim + 3) for table in TABLES],
    "other optimizers": lambda: [
        replace(TABLES[0], optimizer=RowWiseAdagrad(learning_rate=0.1)),
        replace(TABLES[1], optimizer=Adagrad(initial_accumulator=0.25)),
        replace(TABLES[2], optimizer=SGD()),
        replace(TABLES[3], optimizer=Adam()),
    ],
    "dropped": lambda: [TABLES[0], TABLES[3]],
    "added": lambda: [*TABLES, Table(name="new", dim=5, optimizer=Adam())],
    "one rate of a group": lambda: [*TABLES[:2], replace(TABLES[2], optimizer=Adagrad(learning_rate=0.1)), TABLES[3]],
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("change", CHANGES)
def test_tables_of_several_ranks_change_as_those_of_one(path: Path, tmp_path: Path, change: str) -> None:
    """Rows, before and after a rewrite, equal those in a store of one rank with the same alteration."""
    shutil.copytree(path, tmp_path / "one")
    assert divide_among(tmp_path / "one", 1) == [None]
    with Store.open(path) as store, Store.open(tmp_path / "one") as one:
        before, state, kept = rows_of(store), store.state(), store.commit.id
        assert before == rows_of(one)
        for tables in (CHANGES[change](), [replace(table, dim=table.dim + 1) for table in CHANGES[change]()]):
            altered = alter(store, tables)
            alter(one, tables)
            assert rows_of(store) == rows_of(one)
            assert {rank.commit.id for rank in store.ranks} == {altered.id}
            assert (store.state(), altered.stored == one.commit.stored) == (state, True)
        assert store.waiting_bytes == info(path)["waiting_bytes"]
        keys = np.arange(0, UNIVERSE) - UNIVERSE // 2
        found, expected = (s.lookup("item", keys, missing="initial") for s in (store, one))
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
        after = rows_of(store)
    with Store.open(path, mode="r") as store:
        assert rows_of(store) == after
    assert verify(path)["problems"] == []
    assert as_the_format_says(path) == after
    with Store.open(path) as store:
        store.compact()
        assert (rows_of(store), store.waiting_bytes, store.commit.stored) == (after, 0, ())
        tables, sharding = store.tables, store.commit.sharding
        assert sharding.num_ranks == 3

    def opens(ranks: Any) -> int:
        with ShardWriter.open(path, tables, sharding, ranks) as shards:
            return shards.store.commit.id

    assert len({*meet(3, opens)}) == 1
    assert as_the_format_says(path) == after
    with Store.open(path) as store, pytest.raises(CommitMissingError):
        store.rollback(kept)


def test_a_rollback_brings_rows_settings_tables_and_sharding_of_all_ranks_back(path: Path) -> None:
    faster = [replace(t, optimizer=replace(t.optimizer, learning_rate=0.5)) for t in TABLES]
    steps: dict[str, Callable[[Store], Any]] = {
        "forgotten": lambda store: forget(store, "item", KEYS).commit,
        "faster": lambda store: alter(store, faster),
        "wider": lambda store: alter(store, CHANGES["wider"]()),
        "fewer": lambda store: alter(store, [replace(table, dim=table.dim + 4) for table in CHANGES["dropped"]()]),
    }
    with Store.open(path) as store:
        known = {"first": (store.commit, store.tables, rows_of(store))}
        store.pin("first")
        for name, step in steps.items():
            known[name] = step(store), store.tables, rows_of(store)
            store.pin(name, known[name][0].id)
        for name in ("wider", "first", "fewer", "faster", "forgotten", "wider"):
            commit, tables, rows = known[name]
            assert (store.rollback(commit.id).sharding, store.tables, rows_of(store)) == (commit.sharding, tables, rows)
            rates = {table.name: table.optimizer.learning_rate for table in tables}
            assert all(
                rates[table.name] == table.optimizer.learning_rate for rank in store.ranks for table in rank.tables
            )
        store.compact()
        assert rows_of(store) == known["wider"][2]
    for commit, _, rows in known.values():
        with Store.open(path, mode="r", commit=commit.id) as store:
            assert rows_of(store) == rows


def test_a_training_goes_on_with_altered_tables(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """In the middle of a schedule: to the bits of ranks that got the rows of one rank, altered there."""
    found = {}
    for way in ("ranks", "one rank"):
        first, second = tmp_path / way / "before", tmp_path / way / "after"
        on_ranks(ranks_pool, 2, first, "bags", epochs=1)
        if way == "one rank":
            on_ranks(ranks_pool, 1, first, "bags", epochs=1)
        with Store.open(first / "model.tc") as store:
            assert len(store.parts) == (2 if way == "ranks" else 1)
            commit = alter(store, CASES["other optimizers"].tables)
            assert len(commit.stored) == 1
        second.mkdir()
        shutil.move(first / "model.tc", second / "model.tc")
        dense = on_ranks(ranks_pool, 2, second, "other optimizers")
        found[way] = stored(second), dense
        with Store.open(second / "model.tc", mode="r") as store:
            assert (len(store.ranks), store.commit.stored) == (2, ())
            assert store.commit.cursor > commit.cursor
    ours, theirs = found.values()
    assert_same_rows(ours[0], theirs[0])
    for name, value in ours[1][0].items():
        np.testing.assert_array_equal(theirs[1][0][name], value, err_msg=name)


@pytest.mark.sampled(1)
def test_a_forget_that_fails_on_one_rank_is_one_of_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks before it drop the prepared commit, and the store continues."""
    with Store.open(path) as store:
        before, commit = rows_of(store), store.commit
        last = store.ranks[-1]
        monkeypatch.setattr(last, "overlay", lambda: (_ for _ in ()).throw(StoreError("no")))
        with pytest.raises(StoreError, match="no"):
            forget(store, "item", KEYS)
        assert store.commit is commit
        assert rows_of(store) == before
        monkeypatch.undo()
        assert forget(store, "item", KEYS).rows > 0
        assert rows_of(store) == without(before, "item", KEYS)
