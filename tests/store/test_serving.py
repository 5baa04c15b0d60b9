"""Rows by key at any time, and what changed since a commit."""

import copy

import numpy as np
import pytest

from tests.store.conftest import small_tables
from tests.store.world import World
from tiercache.store import CommitMissingError, KeyMissingError, MemoryEngine, Store
from tiercache.store.initial import initial_rows


def test_keys_without_a_row_are_an_error_unless_asked_for() -> None:
    """The error has the table and all such keys; tables and keys that cannot be are refused."""
    world = World(small_tables())
    with Store.open(None, tables=world.tables, engine=MemoryEngine()) as store:
        world.run(store, 3)
        table = store.tables[0]
        known = next(key for name, key in world.rows if name == table.name)
        assert store.lookup(table.name, np.array([known]))["vector"].shape == (1, table.dim)
        made = store.lookup(table.name, np.array([8000, known, 8000]), missing="initial")["vector"][[0, 2]]
        assert np.array_equal(made, initial_rows(table, np.array([8000, 8000]))[0])
        with pytest.raises(KeyMissingError, match=r"2 of 3 keys have no row .*\(7000, 8000\): leave them out") as error:
            store.lookup(table.name, np.array([8000, known, 7000, 8000]))
        assert (error.value.table, error.value.keys.tolist()) == (table.name, [7000, 8000])
        with pytest.raises(ValueError, match="has no table 'nobody': it has "):
            store.lookup("nobody", np.array([1]))
        with pytest.raises(ValueError, match="keys are 1-dimensional float64"):
            store.lookup(table.name, np.array([1.0]))
        with pytest.raises(ValueError, match="is beyond int64"):
            store.lookup(table.name, np.array([2**63], np.uint64))
        with pytest.raises(ValueError, match="missing='skip' is unknown"):
            store.lookup(table.name, np.array([1]), missing="skip")


def test_changes_since_a_commit_that_was_given_up_are_refused() -> None:
    """Whoever has rows of an abandoned commit is told what to do; rows since the commit before are right."""
    world, past = World(small_tables()), dict[int, World]()
    with Store.open(None, tables=world.tables, engine=MemoryEngine(), retention=4) as store:
        for _ in range(4):
            world.run(store, 1)
            past[store.commit.id] = copy.deepcopy(world)
        store.rollback(1)
        world = copy.deepcopy(past[1])
        world.run(store, 1)
        for since in (2, 3):
            with pytest.raises(
                CommitMissingError, match=rf"commit {since} .* given up by a rollback to commit 1: give 1"
            ):
                list(store.changes("user", since=since))
        world.check_changes(store, 1)
        world.check_changes(store, 4)
        with pytest.raises(CommitMissingError, match="knows no changes since 6"):
            list(store.changes("user", since=6))
        world.train()
        world.append(store)
        with pytest.raises(ValueError, match="rows that no commit names"):
            list(store.changes("user", since=1))
