"""Segments that a new schedule leaves in place."""

import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.store.conftest import Home, small_tables
from tests.store.rewritten import Change, rewritten
from tests.store.test_rewrite import rows_of
from tests.store.test_scan import check as check_scans
from tests.store.world import World, scheduled
from tiercache.store import NEVER, CorruptStoreError, MemoryEngine, Store, compaction_plan, differences, info
from tiercache.store.verification import Verification

Key = tuple[str, int]


def live_keys(store: Store) -> Iterator[tuple[int, int, int, Key]]:
    """Yield segment id, group, index of the table and key of every live row at the commit, stale or not."""
    for segment in store.segments:
        for group in store.groups:
            layout = segment.layouts[group.index]
            first = layout.first_row_R.item(store.snapshot.first_range(segment, group.index))
            counts = [count for rows in layout.ranges for count in rows.table_rows]
            places = np.repeat(np.tile(np.arange(len(group.tables)), layout.num_ranges), counts).tolist()
            for block in range(first // layout.block_rows, layout.num_blocks) if first < layout.rows else ():
                keys = store.reader.keys(segment, group.index, block).tolist()
                for row, key in enumerate(keys, block * layout.block_rows):
                    if row >= first:
                        yield segment.id, group.index, places[row], (group.tables[places[row]].name, key)


def check(store: Store, world: World) -> None:
    """Assert that every way to read returns the rows of the dict, and that the commit's counts of stale rows are
    correct.
    """
    assert rows_of(store) == world.rows
    check_scans(store, world)
    world.check(store, after=world.pass_index - 1)
    world.check_load(store, world.pass_index)
    for table in store.tables:
        keys = np.array([key for name, key in world.rows if name == table.name])
        fields = store.lookup(table.name, keys)
        for i, key in enumerate(keys.tolist()):
            assert b"".join(values[i].tobytes() for values in fields.values()) == world.rows[table.name, key]
    assert Verification(store).run()["problems"] == []
    live = list(live_keys(store))
    newest = {key: id_ for id_, _, _, key in live}
    stale = Counter((id_, group, place) for id_, group, place, key in live if newest[key] != id_)
    assert {id_ for id_, *_ in stale} <= store.commit.retained_ids
    for segment in store.segments:
        for group in store.groups:
            for place, table in enumerate(group.tables):
                listed = store.snapshot.stale_rows([segment], group, table)
                assert listed == stale[segment.id, group.index, place]


def check_halves(store: Store) -> None:
    """Assert that no retained segment takes more than twice its needed bytes."""
    for segment in store.segments:
        if segment.id in store.commit.retained_ids:
            live = stale = 0
            for group in store.groups:
                for table in group.tables:
                    live += store.snapshot.rows_in([segment], group, table) * group.row_bytes
                    stale += store.snapshot.stale_rows([segment], group, table) * group.row_bytes
            assert 0 < live <= 2 * (live - stale)


def live_bytes(store: Store) -> dict[int, int]:
    """Return the bytes of the live rows of each segment, stale ones included."""
    found = {segment.id: 0 for segment in store.segments}
    for id_, group, _, _ in live_keys(store):
        found[id_] += store.groups[group].row_bytes
    return found


def check_moved(store: Store, before: dict[int, int]) -> None:
    """Assert that unused rows moved only from segments with less than half of their live bytes in use."""
    gone = sum(size for id_, size in before.items() if id_ not in store.commit.retained_ids)
    unused = 0
    for segment in scheduled(store):
        for layout in segment.layouts:
            unused += sum(rows.rows * layout.row_bytes for rows in layout.ranges if rows.next_use == NEVER)
    assert unused == 0 or 2 * unused < gone


@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 99),
    schedules=st.lists(
        st.tuples(st.integers(0, 99), st.integers(1, 3), st.integers(1, 9), st.integers(0, 4)), min_size=2, max_size=3
    ),
    layout=st.tuples(st.integers(1, 5), st.integers(1, 9)),
    most=st.sampled_from([1, 2, 256]),
    within=st.booleans(),
)
def test_schedule_after_schedule_reads_the_newest_row_of_every_key(
    seed: int,
    schedules: list[tuple[int, int, int, int]],
    layout: tuple[int, int],
    most: int,
    within: bool,
) -> None:
    """For any keys of a schedule, at its beginning, in between and after it: lookups, scans, changes and loads.

    A key's newest row is never dead while an older one in a retained segment is live: the older one would be read.
    """
    world = World(small_tables(), seed=seed, keys_per_pass=9, universe=30, page_rows=layout[0], block_rows=layout[1])
    kept = compaction_plan.MOST_RETAINED
    compaction_plan.MOST_RETAINED = most
    try:
        with Store.open(None, tables=world.tables, engine=MemoryEngine()) as store:
            world.run(store, 3)
            for draw, passes, keys, trained in schedules:
                world.num_passes, world.keys_per_pass = passes, keys
                before = live_bytes(store)
                world.follow(store, world.draw(draw))
                assert len(store.commit.retained_ids) <= most
                check_halves(store)
                if most == 256:
                    check_moved(store, before)
                check(store, world)
                world.run(store, trained)
                if within:
                    world.train(part=1)
                    world.append(store, within=True)
                    world.publish(store, sample=1)
                    world.check(store, after=world.pass_index)
                    world.check_within(store)
                    assert rows_of(store) == world.rows
                    world.train(part=2)
                    world.append(store)
                    world.pass_index += 1
                    world.publish(store)
                check(store, world)
            check_scans(store, world, memory_bytes=900, chunk_rows=7)
    finally:
        compaction_plan.MOST_RETAINED = kept


def one_pass(world: World, keys: dict[str, list[int]]) -> list[dict[str, NDArray[np.int64]]]:
    """Return a schedule of one pass with some keys of some tables."""
    return [{table.name: np.array(keys.get(table.name, []), np.int64) for table in world.tables}]


def retained_store(home: Home, **options: Any) -> tuple[Store, World]:
    """Return a store that follows a schedule of three of its keys and a new one."""
    world = World(small_tables(), num_passes=4, keys_per_pass=20)
    store = home.open(world.tables, **options)
    world.run(store, 5)
    known = [key for name, key in world.rows if name == "user"]
    world.follow(store, one_pass(world, {"user": [*known[:3], 900]}))
    assert store.commit.retained_ids
    return store, world


def test_a_row_that_is_trained_is_newer_than_the_one_it_left_behind(home: Home) -> None:
    """For lookups, scans and changes; ``info`` counts each key once, and compaction removes stale rows."""
    store, world = retained_store(home)
    key = ("user", int(world.passes[0]["user"][0]))
    before = world.rows[key]
    world.run(store, 2)
    assert world.rows[key] != before
    assert [found for *_, found in live_keys(store)].count(key) == 2
    check(store, world)
    if home.kind != "memory":
        stale, retained = [key for *_, key in live_keys(store)], sorted(store.commit.retained_ids)
        home.close()
        found = info(home.path)
        store = home.open()
        assert found["rows"] == len(world.rows) == sum(segment["live_rows"] for segment in found["segments"])
        assert found["stale_rows"] == len(stale) - len(set(stale)) == 3
        assert found["stale_bytes"] == 3 * world.tables[0].row_bytes
        assert [segment["id"] for segment in found["segments"] if segment["retained"]] == retained
    store.compact()
    assert not store.commit.retained_ids
    assert [segment.rows for segment in store.segments] == [len(world.rows)]
    assert rows_of(store) == world.rows


def test_the_newest_row_hides_the_stale_one_where_it_does_not_count_itself(home: Home) -> None:
    """A key of the pass on the device is not found in the store, rather than found with its old row."""
    store, world = retained_store(home)
    key, other = int(world.passes[0]["user"][0]), 900
    ids, _ = store.locate("user", np.array([key, other]), after=0)
    assert ids.tolist() == [-1, -1]
    world.run(store, 1)
    ids, _ = store.locate("user", np.array([key, other]), after=0)
    assert ids.tolist() == [store.segments[-1].id] * 2


def test_a_key_that_waited_in_a_retained_segment_is_found_by_the_schedule_that_uses_it(home: Home) -> None:
    """Unused by one schedule, used by the next: it starts with its old row."""
    store, world = retained_store(home)
    waited = next(
        key for id_, _, _, key in live_keys(store) if id_ in store.commit.retained_ids and key not in world.keys(0)
    )
    row = world.rows[waited]
    world.run(store, 1)
    home.close()
    store = home.open()
    world.follow(store, one_pass(world, {waited[0]: [waited[1]]}))
    assert world.rows[waited] == row
    check(store, world)
    world.run(store, 2)
    assert world.rows[waited] != row
    check(store, world)


def test_commits_before_and_after_a_schedule_can_be_gone_back_to(home: Home) -> None:
    """A rollback to before the reorganization, and one to a commit after it, each with its retained segments."""
    store, world = retained_store(home, retention=4)
    begun, after = store.commit.id, copy.deepcopy(world)
    with store.at(begun - 1) as older:
        assert not older.commit.retained_ids
        before = rows_of(older)
    world.run(store, 2)
    store.rollback(begun)
    assert store.commit.retained_ids == next(c for c in store.commits if c.id == begun).retained_ids != frozenset()
    check(store, after)
    store.rollback(begun - 1)
    assert not store.commit.retained_ids
    assert rows_of(store) == before
    assert Verification(store).run()["problems"] == []


def test_what_changed_since_a_commit_is_given_once_though_it_was_moved(home: Home) -> None:
    """Rows that stayed and rows that moved, with the schedule or later, changed when they were trained."""
    store, world = retained_store(home, retention=9)
    for since in range(-1, store.commit.id + 1):
        world.check_changes(store, since)


def test_a_retained_store_equals_the_same_rows_compacted(tmp_path: Path) -> None:
    """Comparisons scan: stale rows are not a difference."""
    found = []
    for name in ("retained", "compacted"):
        (tmp_path / name).mkdir()
        store, world = retained_store(Home("lmdb", tmp_path / name))
        world.run(store, 1)
        if name == "compacted":
            store.compact()
        found.append(store)
    for one in differences(*found):
        assert (one.only_first, one.only_second, one.different) == (0, 0, 0)
        assert one.same == sum(name == one.table for name, _ in world.rows)
    for store in found:
        store.close()


def listing(name: str, add: int) -> Change:
    """Return a change of the first number above 0 in an array of a rank list."""

    def change(_: object, arrays: dict[str, NDArray[Any]]) -> None:
        arrays[name] = arrays[name].astype(np.int64)
        arrays[name][np.argmax(arrays[name] > 0)] += add

    return change


@pytest.mark.parametrize(
    ("name", "add"),
    [("first_ranges", 1), ("first_ranges", 99), ("live", -1), ("next_uses", 1), ("block_rows", 1), ("row_bytes", -4)],
)
def test_a_commit_that_lists_other_rows_of_a_segment_than_it_has_is_refused(
    name: str, add: int, tmp_path: Path
) -> None:
    """When the rows of the segment are first read, in any way; ``verify`` also reports it."""
    home = Home("memory", tmp_path)
    retained_store(home)
    rewritten(home.engine, "rank", listing(name, add))
    with pytest.raises(
        CorruptStoreError,
        match=r"lists other live rows of segment \d+ than it has|truncated|lacks its|is described as having",
    ):
        rows_of(home.open())


@pytest.mark.sampled(1)
def test_segments_of_other_schedules_belong_to_no_pass(home: Home) -> None:
    """A commit at a pass with the number of a retained segment succeeds, and its loads come from the schedule."""
    store, world = retained_store(home)
    assert {segment.pass_index for segment in store.segments} & {0, 1, 2, 3, 4}
    for _ in range(6):
        world.run(store, 1)
        check(store, world)
    assert all(segment.pass_index >= 4 for segment in scheduled(store))
