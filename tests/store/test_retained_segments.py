"""Segments that a new schedule leaves in place, and imported rows that hide theirs."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.store.conftest import Home, small_tables
from tests.store.rewritten import Change, rewritten
from tests.store.test_rewrite import rows_of, sliced
from tests.store.test_scan import check as check_scans
from tests.store.test_scan import check_slices
from tests.store.world import World, scheduled
from tiercache.store import NEVER, Commit, CorruptStoreError, Cursor, MemoryEngine, Store, compaction_plan, differences
from tiercache.store.bulk_load import load_rows
from tiercache.store.inspect import info
from tiercache.store.row_codec import row_words
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
    """Assert that every way to read has the rows of the dict, and that the commit's counts of stale rows are right."""
    assert rows_of(store) == world.rows
    check_scans(store, world)
    world.check(store, after=world.pass_index - 1)
    world.check_load(store, world.pass_index)
    for table in store.tables:
        keys = np.array([key for name, key in world.rows if name == table.name])
        found = row_words(table.fields, tuple(store.lookup(table.name, keys).values()))
        assert [row.tobytes() for row in found] == [world.rows[table.name, key] for key in keys.tolist()]
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


def live_bytes(store: Store) -> dict[int, int]:
    """Return the bytes of the live rows of each segment, stale ones included."""
    found = {segment.id: 0 for segment in store.segments}
    for id_, group, _, _ in live_keys(store):
        found[id_] += store.groups[group].row_bytes
    return found


def check_moved(store: Store, before: dict[int, int]) -> None:
    """Assert that unused rows moved only from segments with less than half of their live bytes in use."""
    gone = sum(size for id_, size in before.items() if id_ not in store.commit.retained_ids)
    unused = sum(
        rows.rows * layout.row_bytes
        for segment in scheduled(store)
        for layout in segment.layouts
        for rows in layout.ranges
        if rows.next_use == NEVER
    )
    assert unused == 0 or 2 * unused < gone


class Schedule(NamedTuple):
    """What a store trains next."""

    imports: list[list[int]]
    """The keys of imports before it."""
    draw: int
    passes: int
    keys: int
    first: int
    """The pass at which it is entered."""
    sample: int
    """The sample of that pass."""
    retain: bool
    trained: int
    """Passes until the next schedule."""
    inside: bool
    """True if the next schedule is entered inside a pass."""


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 99),
    schedules=st.lists(
        st.builds(
            Schedule,
            imports=st.lists(st.lists(st.integers(-20, 24), unique=True, max_size=20), max_size=2),
            draw=st.integers(0, 99),
            passes=st.integers(1, 3),
            keys=st.integers(1, 9),
            first=st.integers(0, 7),
            sample=st.sampled_from([0, 5]),
            retain=st.booleans(),
            trained=st.integers(0, 4),
            inside=st.booleans(),
        ),
        min_size=2,
        max_size=3,
    ),
    page_rows=st.integers(1, 5),
    block_rows=st.integers(1, 9),
    most=st.sampled_from([1, 2, 256]),
    slice_bytes=st.sampled_from([None, 400]),
)
def test_schedule_after_schedule_reads_the_newest_row_of_every_key(
    seed: int, schedules: list[Schedule], page_rows: int, block_rows: int, most: int, slice_bytes: int | None
) -> None:
    """Entered at any pass and inside one, after imports: lookups, scans, changes and loads.

    A key's newest row is never dead while an older one in a retained segment is live: the older one would be read.
    """
    world = World(small_tables(), seed=seed, keys_per_pass=9, universe=30, page_rows=page_rows, block_rows=block_rows)
    with (
        pytest.MonkeyPatch.context() as patch,
        Store.open(None, tables=world.tables, engine=MemoryEngine(), retention=2) as store,
    ):
        patch.setattr(compaction_plan, "MOST_RETAINED", most)
        world.run(store, 3)
        for one in schedules:
            inside = store.commit.cursor.sample > 0
            if inside:
                with pytest.raises(ValueError, match=r"stands inside pass \d+: train to the end of a pass before rows"):
                    load_rows(store, [])
            else:
                overlaid = store.commit.schedule_digest
                for keys in one.imports:
                    commit = world.lay_over(store, {table.name: keys for table in world.tables[:2]})
                    assert commit.overlaid == overlaid
                    check_overlaid(store, world, commit)
            world.num_passes, world.keys_per_pass = one.passes, one.keys
            before = live_bytes(store)
            with sliced(slice_bytes):
                start = one.first, one.sample
                commit = world.follow(store, world.draw(one.draw), start=start, retain_segments=one.retain)
            assert (commit.cursor, commit.overlaid) == (start, "")
            assert store.segments[-1].pass_index == -1 - one.first
            assert len(commit.retained_ids) <= most * one.retain
            check_halves(store)
            if most == 256 and one.retain and not inside:
                check_moved(store, before)
            check(store, world)
            for use in range(one.first, one.first + one.passes):
                assert world.loaded(store, use) == {
                    key: world.rows[key] for key, wait in world.uses.items() if wait == use
                }
            world.check_changes(store, commit.id - 1)
            if one.sample:
                commit_within(store, world, sample=one.sample + 2)
            if one.trained:
                world.run(store, one.trained)
                check(store, world)
                world.check_changes(store, store.commit.id - 1)
            if one.inside:
                commit_within(store, world, sample=one.sample + 4)
        assert rows_of(store) == world.rows
        check_scans(store, world, memory_bytes=900, chunk_rows=7)
        for memory_bytes in (500, 1 << 20):
            check_slices(store, world, 1 + seed % 9, memory_bytes=memory_bytes, chunk_rows=7)


def commit_within(store: Store, world: World, *, sample: int) -> None:
    """Commit inside the pass, and compare its rows."""
    world.train(part=sample)
    world.append(store, within=True)
    world.publish(store, sample=sample)
    world.check(store, after=world.pass_index)
    world.check_within(store)
    assert rows_of(store) == world.rows


def retained_store(home: Home) -> tuple[Store, World]:
    """Return a store that follows a schedule of three of its keys and a new one."""
    world = World(small_tables(), num_passes=4, keys_per_pass=20)
    store = home.open(world.tables)
    world.run(store, 5)
    known = [key for name, key in world.rows if name == "user"]
    keys = {"user": np.array([*known[:3], 900], np.int64)}
    world.follow(store, [{table.name: keys.get(table.name, np.zeros(0, np.int64)) for table in world.tables}])
    assert store.commit.retained_ids
    return store, world


def test_a_row_that_is_trained_is_newer_than_the_one_it_left_behind(home: Home) -> None:
    """``info`` counts each key once, and compaction removes stale rows."""
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
    for one in differences(store, store):
        rows = sum(name == one.table for name, _ in world.rows)
        assert (one.same, one.only_first, one.only_second, one.different) == (rows, 0, 0, 0)
    store.compact()
    assert not store.commit.retained_ids
    assert [segment.rows for segment in store.segments] == [len(world.rows)]
    assert rows_of(store) == world.rows


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
    home = Home("memory", tmp_path)
    retained_store(home)
    rewritten(home.engine, "rank", listing(name, add))
    with pytest.raises(
        CorruptStoreError,
        match=r"lists other live rows of segment \d+ than it has|truncated|lacks its|is described as having",
    ):
        rows_of(home.open())
