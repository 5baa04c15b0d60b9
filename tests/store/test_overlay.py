"""Rows imported into a store with rows: they hide the old ones until a schedule merges them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.conftest import Home, small_tables
from tests.store.failing import FailingEngine
from tests.store.test_retained_segments import check
from tests.store.test_rewrite import rows_of
from tests.store.test_scan import check as check_scans
from tests.store.world import World
from tiercache.store import Commit, Cursor, MemoryEngine, Store, StoreFullError, load_rows
from tiercache.store.verification import Verification


def check_overlaid(store: Store, world: World, commit: Commit) -> None:
    """Assert that every way to read shows the imported rows and the others, and that the position of training is
    unchanged.
    """
    assert rows_of(store) == world.rows
    check_scans(store, world)
    world.check(store, after=world.pass_index - 1)
    for since in range(-1, commit.id + 1):
        world.check_changes(store, since)
    assert Verification(store).run()["problems"] == []
    assert (store.commit.id, store.commit.cursor) == (commit.id, Cursor(world.pass_index, 0))
    assert (store.commit.schedule_digest, store.state()) == ("", world.state)


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 99),
    trained=st.integers(1, 5),
    overlays=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=3),
    after=st.integers(0, 4),
)
def test_imported_rows_win_until_a_schedule_folds_them_in(
    seed: int, trained: int, overlays: list[tuple[int, int]], after: int
) -> None:
    """Existing and new keys, some tables or all, once or repeatedly: then training continues at the same pass."""
    world = World(small_tables()[:3], seed=seed, keys_per_pass=9, universe=30)
    draw = np.random.default_rng(seed)
    engine = MemoryEngine()
    with Store.open(None, tables=world.tables, engine=engine, retention=3) as store:
        world.run(store, trained)
        first = store.commit
        for counts in overlays:
            keys = {
                table.name: draw.choice(np.arange(-20, 25), count, replace=False).tolist()
                for table, count in zip(world.tables, counts, strict=False)
            }
            check_overlaid(store, world, world.lay_over(store, keys))
        assert store.commit.overlaid == first.schedule_digest
    with Store.open(None, engine=engine) as store:
        check_overlaid(store, world, store.commit)
        world.follow(store, world.passes, start=(world.pass_index, 0))
        assert not store.commit.overlaid
        check(store, world)
        for _ in range(after):
            world.run(store, 1)
            check(store, world)


def test_the_commit_before_an_import_can_be_gone_back_to(home: Home) -> None:
    """It has its rows and its schedule."""
    world = World(small_tables()[1:3])
    store = home.open(world.tables, retention=2)
    world.run(store, 2)
    before, rows = store.commit, rows_of(store)
    world.lay_over(store, {world.tables[0].name: [1, 2, 3]})
    assert rows_of(store) != rows
    store.rollback(before.id)
    assert rows_of(store) == rows
    assert store.commit.schedule_digest == before.schedule_digest


def test_an_import_that_fails_changes_nothing() -> None:
    """At any point where the store runs out of space."""
    refused = 0
    for call in range(1, 60):
        world, engine = World(small_tables()[1:3]), FailingEngine(MemoryEngine())
        with Store.open(None, tables=world.tables, engine=engine) as store:
            world.run(store, 2)
            rows, commit = rows_of(store), store.commit
            engine.fail_in(call)
            try:
                world.lay_over(store, {world.tables[0].name: [1, 2, 3]})
            except StoreFullError:
                refused += 1
                assert (rows_of(store), store.commit) == (rows, commit)
                continue
            if not engine.failed:
                engine.fail_in(None)
                assert rows_of(store) == world.rows
                break
    else:
        pytest.fail("no import came to its end")
    assert refused


def test_a_store_inside_a_pass_takes_no_rows(home: Home) -> None:
    """Its newest rows belong to the pass only: train the pass to its end first."""
    world = World(small_tables()[1:3])
    store = home.open(world.tables)
    world.run(store, 1)
    world.train()
    world.append(store, within=True)
    world.publish(store, sample=7)
    with pytest.raises(ValueError, match="stands inside pass 1: train to the end of a pass before rows are imported"):
        load_rows(store, [])
