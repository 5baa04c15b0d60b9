"""What differs between commits and stores."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.conftest import small_tables
from tests.store.world import World
from tiercache.store import CommitMissingError, MemoryEngine, Store, differences


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 30), passes=st.integers(1, 4), more=st.integers(0, 3), second=st.integers(0, 5))
def test_differences_are_those_of_two_dicts(seed: int, passes: int, more: int, second: int) -> None:
    """Between an older commit and the newest, in either direction, and between a store and a compacted other one."""
    world = World(small_tables(), seed=seed, keys_per_pass=8, universe=16)
    other = World(small_tables(), seed=seed + second, keys_per_pass=8, universe=16)
    with Store.open(None, tables=world.tables, engine=MemoryEngine(), retention=9) as store:
        world.run(store, passes)
        before = copy.deepcopy(world.rows)
        world.run(store, more)
        check(store.at(passes - 1), store, before, world.rows)
        check(store, store.at(passes - 1), world.rows, before)
        with Store.open(None, tables=world.tables, engine=MemoryEngine()) as twin:
            other.run(twin, passes)
            twin.compact()
            check(store, twin, world.rows, other.rows)


def check(first: Store, second: Store, ours: dict, theirs: dict) -> None:
    """Compare the counts of every table with those of two dicts of rows."""
    for found in differences(first, second):
        a, b = ({key: row for (name, key), row in rows.items() if name == found.table} for rows in (ours, theirs))
        unequal = {key for key in a.keys() & b.keys() if a[key] != b[key]}
        assert found.only_first == len(a.keys() - b.keys())
        assert found.only_second == len(b.keys() - a.keys())
        assert (found.different, found.same) == (len(unequal), len(a.keys() & b.keys()) - len(unequal))
        assert set(found.examples) <= unequal | (a.keys() ^ b.keys())
        assert len(found.examples) == min(5, len(unequal | (a.keys() ^ b.keys())))


def test_a_table_without_rows_has_only_those_of_the_other() -> None:
    """Of tables of any width."""
    tables = small_tables()
    world = World(tables)
    with Store.open(None, tables=tables, engine=MemoryEngine()) as store:
        world.run(store, 2)
        with Store.open(None, tables=tables, engine=MemoryEngine()) as empty:
            World(tables, keys_per_pass=0).run(empty, 1)
            check(store, empty, world.rows, {})
            check(empty, store, {}, world.rows)


def test_stores_of_other_tables_are_not_compared() -> None:
    """And a commit that is not kept cannot be looked at."""
    tables = small_tables()
    with Store.open(None, tables=tables, engine=MemoryEngine()) as store:
        World(tables).run(store, 2)
        with pytest.raises(CommitMissingError, match="has no commit 0: give one of 1"):
            store.at(0)
        other = Store.open(None, tables=tables[:1], engine=MemoryEngine())
        with other, pytest.raises(ValueError, match="have different tables"):
            differences(store, other)
