"""Rows imported into a store with rows: they hide the old ones until a schedule merges them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.conftest import Home, small_tables
from tests.store.test_retained_segments import check
from tests.store.test_rewrite import rows_of
from tests.store.test_scan import check as check_scans
from tests.store.world import World
from tiercache.store import Commit, Cursor, MemoryEngine, Store, load_rows
from tiercache.store.verification import Verification


def check_overlaid(store: Store, world: World, commit: Commit) -> None:
    """Assert that every way to read has the imported rows and the others, and training has its position."""
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


def test_a_store_inside_a_pass_takes_no_rows(home: Home) -> None:
    world = World(small_tables()[1:3])
    store = home.open(world.tables)
    world.run(store, 1)
    world.train()
    world.append(store, within=True)
    world.publish(store, sample=7)
    with pytest.raises(ValueError, match="stands inside pass 1: train to the end of a pass before rows are imported"):
        load_rows(store, [])
