"""The bytes of a store at its fullest, against counting blocks one by one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.conftest import held_blocks, small_tables
from tests.store.world import World
from tiercache.errors import BudgetError
from tiercache.planning.budgets import distance_bytes
from tiercache.planning.store_plan import RECORD_BYTES, StorePlan
from tiercache.store import Adagrad, MemoryEngine, Range, SegmentLayout, Store, Table, Zeros, hash_keys
from tiercache.store.layout import CHANGED
from tiercache.store.segment import most_meta_bytes
from tiercache.store.snapshot import History
from tiercache.store.table import group_tables

GROUPS = group_tables([Table(name="t", dim=4, optimizer=Adagrad(learning_rate=0.1), initializer=Zeros())])
NOTHING = History()


def layout_of(pass_index: int, counts: list[int], block_rows: int) -> SegmentLayout:
    ranges = tuple(Range(next_use=pass_index + distance, table_rows=(n,)) for distance, n in enumerate(counts, 1) if n)
    return SegmentLayout.of(row_bytes=32, page_rows=2, block_bytes=32 * block_rows, ranges=ranges)


@settings(max_examples=60)
@given(
    counts=st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=n, max_size=n)
    ),
    block_rows=st.integers(1, 6),
    epoch=st.integers(0, 3),
)
def test_live_blocks_are_those_that_some_later_pass_needs(counts: list[list[int]], block_rows: int, epoch: int) -> None:
    """At each commit of a typical epoch: every block with a row whose next use is not over yet."""
    n = len(counts)
    dumps = {epoch * n + i: (layout_of(epoch * n + i, counts[i], block_rows),) for i in range(n)}
    plan = StorePlan.of(GROUPS, dumps, NOTHING, commits=1, commit_every=1, state_bytes=0, use_files=1)
    taken = []
    for cursor in range(2 * n, 3 * n):
        total = 0
        for pass_index in range(cursor - n, cursor):
            layout = layout_of(pass_index, counts[pass_index % n], block_rows)
            uses = np.repeat([r.next_use for r in layout.ranges], [r.rows for r in layout.ranges])
            blocks = {row // block_rows for row, use in enumerate(uses) if use >= cursor}
            rows = min(block_rows, layout.rows)
            total += len(blocks) * (2 * -(-16 * rows // 4096) + -(-8 * rows // 4096)) * 4096
        taken.append(total)
    assert plan.live == max(taken)
    assert plan.schedule == sum(distance_bytes(sum(map(sum, counts))))


@pytest.mark.parametrize(("commits", "commit_every", "passes"), [(1, 1, 2), (3, 1, 4), (1, 3, 4), (2, 5, 11)])
def test_passes_beside_the_live_rows_follow_from_the_commits(commits: int, commit_every: int, passes: int) -> None:
    """Two at least, one more for each pass that a commit is late, and for each further kept commit."""
    plan = StorePlan.of(
        GROUPS,
        {0: (layout_of(0, [9], 4),)},
        NOTHING,
        commits=commits,
        commit_every=commit_every,
        state_bytes=5000,
        use_files=3,
    )
    assert plan.num_passes == passes
    assert plan.largest_pass == plan.live == 3 * 3 * 4096
    assert plan.state == (1 + commits) * 8192
    assert plan.metadata == (1 + passes) * 4096
    blocks = (1 + passes) * plan.live
    others = plan.state + 3 * (8 * 9 + 4) + plan.metadata + RECORD_BYTES
    assert plan.needed == blocks + -(-15 * blocks // 100) + others


@pytest.mark.parametrize(("dim", "rows"), [(1, 200_000), (64, 30_000), (8, 12)])
def test_metadata_of_a_dump_takes_what_is_planned_for_it(dim: int, rows: int) -> None:
    table = Table(name="t", dim=dim, optimizer=Adagrad(learning_rate=0.1), initializer=Zeros())
    ranges = [Range(next_use=use, table_rows=(rows // 4,)) for use in range(1, 5)]
    layout = SegmentLayout.of(ranges, row_bytes=table.row_bytes, page_rows=100, block_bytes=200 * table.row_bytes)
    hashes = [hash_keys(keys, table.table_id) for keys in np.split(np.arange(rows), 4)]
    keys = np.concatenate([part[np.argsort(of)] for part, of in zip(np.split(np.arange(rows), 4), hashes, strict=True)])
    blocks = (
        (0, block, np.zeros((high - low) * table.row_bytes, np.uint8), keys[low:high])
        for block in range(layout.num_blocks)
        for low, high in [layout.rows_of_block(block)]
    )
    with Store.open(None, tables=[table], engine=MemoryEngine()) as store:
        actual = store.append(0, [layout], blocks).meta_bytes
    assert actual <= most_meta_bytes([layout]) <= 1.05 * actual + 2048


def test_last_changes_of_rows_that_were_moved_are_counted() -> None:
    """A page or more for each block that a commit still needs, whether a pass will free it or not."""
    world = World(small_tables(), keys_per_pass=30, universe=60)
    options = {"commits": 1, "commit_every": 1, "state_bytes": 0, "use_files": 1}
    with Store.open(None, tables=world.tables, engine=MemoryEngine()) as store:
        world.run(store, 3)
        world.follow(store, world.draw(1))
        world.run(store, 1)
        stored = store.history
        blocks = [name for name, _ in held_blocks(store) if name.endswith(f"/{CHANGED}")]
        with_them = StorePlan.of(store.groups, {}, stored, **options).live
        for segment in store.segments:
            segment.describe(tuple(replace(one, changed=None) for one in segment.meta))
        without = StorePlan.of(store.groups, {}, stored, **options).live
        assert with_them - without == 4096 * len(blocks) > 0


def test_a_budget_that_is_met_says_nothing() -> None:
    plan = StorePlan(
        live=1 << 20, largest_pass=1 << 19, num_passes=2, state=1 << 10, schedule=1 << 11, metadata=1 << 12
    )
    plan.check(plan.needed)
    words = "1 MiB of live rows, 2 times the largest pass of 512 KiB, 15 % .* 4 KiB of metadata, 1 KiB .* 2 KiB .* {} b"
    with pytest.raises(BudgetError, match=words.format(plan.needed)):
        plan.check(plan.needed - 1)
