"""The predicted maximum of rows that a reorganization moves is never exceeded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.conftest import held_blocks, small_tables
from tests.store.world import World
from tiercache.errors import BudgetError
from tiercache.planning.budgets import paged
from tiercache.planning.store_plan import ReorganizePlan
from tiercache.store import MemoryEngine, Store, compaction_plan
from tiercache.store.segment import base_layout


def plan_of(store: Store, world: World) -> ReorganizePlan:
    """Return the prediction before the passes of a world are followed."""
    used = {
        table.name: len({key for keys in world.passes for key in keys[table.name].tolist()}) for table in world.tables
    }
    return ReorganizePlan.of(store.groups, store.history, used, base_layout, present=None, use_bytes=0)


@settings(max_examples=12)
@given(
    seed=st.integers(0, 99),
    days=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 3), st.integers(1, 12)), min_size=1, max_size=4),
    most=st.sampled_from([1, 256]),
)
def test_no_more_rows_move_than_were_said(seed: int, days: list[tuple[int, int, int]], most: int) -> None:
    world = World(small_tables(), seed=seed, keys_per_pass=9, universe=40, page_rows=3, block_rows=7)
    with pytest.MonkeyPatch.context() as patch, Store.open(None, tables=world.tables, engine=MemoryEngine()) as store:
        patch.setattr(compaction_plan, "MOST_RETAINED", most)
        world.run(store, 3)
        for draw, passes, keys in days:
            world.num_passes, world.keys_per_pass = passes, keys
            world.passes = world.draw(draw)
            plan, held = plan_of(store, world), held_blocks(store)
            assert plan.present >= sum(paged(size) for size in held.values()) - paged(store.commit.state_bytes)
            world.follow(store, world.passes)
            blocks = held_blocks(store).keys() - held.keys()
            assert sum(paged(held_blocks(store)[name]) for name in blocks) <= plan.segment
            world.run(store, 1)


def test_a_budget_that_is_met_says_nothing() -> None:
    plan = ReorganizePlan(present=1 << 20, sorting=1 << 12, ordered=1 << 14, segment=1 << 13, other=1 << 11)
    assert plan.needed == (1 << 20) + (1 << 14) + (1 << 13) + (1 << 11)
    plan.check(plan.needed)
    words = "1 MiB that it takes now, 16 KiB of temporary .* 8 KiB of new segments, and 2 KiB .* to {} bytes"
    with pytest.raises(BudgetError, match=words.format(plan.needed)):
        plan.check(plan.needed - 1)
    other = ReorganizePlan(present=0, sorting=1 << 13, ordered=0, segment=1 << 12, other=0)
    with pytest.raises(BudgetError, match="8 KiB of temporary files to sort keys"):
        other.check(other.needed - 1)
