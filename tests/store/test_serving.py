"""Rows by key at any time, and what changed since a commit."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.conftest import small_tables
from tiercache.store import CommitMissingError, KeyMissingError, MemoryEngine, Store
from tiercache.store.initial import initial_rows
from tiercache.store.testing.world import World

if TYPE_CHECKING:
    from tiercache.store import Table


def row_of(fields: dict[str, np.ndarray], i: int) -> bytes:
    """Return one row of a result as the bytes that a World keeps."""
    return b"".join(values[i].tobytes() for values in fields.values())


def changed(store: Store, table: Table, since: int) -> dict[tuple[str, int], bytes]:
    """Return all that changed, and assert that no key comes twice."""
    found: dict[tuple[str, int], bytes] = {}
    for keys, fields in store.changes(table.name, since=since):
        for i, key in enumerate(keys.tolist()):
            assert (table.name, key) not in found
            found[table.name, key] = row_of(fields, i)
    return found


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 30),
    passes=st.integers(0, 5),
    appended=st.booleans(),
    keys=st.lists(st.integers(-9, 9), max_size=30),
    missing=st.sampled_from(["initial", "zeros"]),
)
def test_a_lookup_returns_the_rows_of_any_keys_as_they_are_now(
    seed: int, passes: int, appended: bool, keys: list[int], missing: str
) -> None:
    """Repeated keys, keys that were never trained, rows that were appended: each place gets its row."""
    world = World(small_tables(), seed=seed, keys_per_pass=8, universe=16)
    with Store.open(None, tables=world.tables, engine=MemoryEngine()) as store:
        world.run(store, passes)
        if appended:
            world.train()
            world.append(store)
        for table in store.tables:
            fields = store.lookup(table.name, np.array(keys, np.int64), missing=missing)
            assert list(fields) == [field.name for field in table.fields]
            first = initial_rows(table, np.array(keys, np.int64))
            for i, key in enumerate(keys):
                absent = b"".join(values[i].tobytes() for values in first)
                absent = absent if missing == "initial" else bytes(len(absent))
                assert row_of(fields, i) == world.rows.get((table.name, key), absent)


def test_keys_without_a_row_are_an_error_unless_asked_for() -> None:
    """The error has the table and all such keys; tables and keys that cannot be are refused."""
    world = World(small_tables())
    with Store.open(None, tables=world.tables, engine=MemoryEngine()) as store:
        world.run(store, 3)
        table = store.tables[0]
        known = next(key for name, key in world.rows if name == table.name)
        assert store.lookup(table.name, np.array([known]))["vector"].shape == (1, table.dim)
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


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 30), passes=st.integers(1, 6), since=st.integers(-1, 5))
def test_changes_are_the_rows_trained_after_a_commit(seed: int, passes: int, since: int) -> None:
    """Rows of the passes after it, each once, as they are now; the commit itself need not be kept."""
    world = World(small_tables(), seed=seed, keys_per_pass=8, universe=16)
    with Store.open(None, tables=world.tables, engine=MemoryEngine()) as store:
        trained: dict[int, set[tuple[str, int]]] = {}
        for _ in range(passes):
            trained[world.pass_index] = set(world.keys(world.pass_index))
            world.run(store, 1)
        if since >= passes:
            with pytest.raises(CommitMissingError, match="knows no changes since"):
                changed(store, store.tables[0], since)
            return
        keys = set().union(*(trained[pass_index] for pass_index in range(since + 1, passes)), set())
        for table in store.tables:
            wanted = {key: world.rows[key] for key in keys if key[0] == table.name}
            assert changed(store, table, since) == wanted


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
                changed(store, store.tables[0], since)
        for table in store.tables:
            wanted = {key: world.rows[key] for key in world.keys(world.pass_index - 1) if key[0] == table.name}
            assert changed(store, table, 1) == wanted
            assert changed(store, table, 4) == wanted
        world.train()
        world.append(store)
        with pytest.raises(ValueError, match="rows that no commit names"):
            changed(store, store.tables[0], 1)
