"""Problems that verification finds under correct checksums: duplicate rows, late changes, lost rows."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.store.conftest import Home, needed_bytes, small_tables
from tests.store.rewritten import rewritten
from tests.store.test_retained_segments import retained_store
from tests.store.test_retention import without_segment
from tests.store.world import World
from tiercache.store import CorruptStoreError, Store, key_invariants
from tiercache.store.layout import CHANGED, KEYS
from tiercache.store.verification import Verification

Plant = Callable[[Home], list[str]]
Arrays = dict[str, NDArray[Any]]
PASS, FIRST_COMMIT = 2, 4
"""Indices in a segment's entry of a rank list."""


def of_segment(home: Home, segment: int, index: int, value: int) -> None:
    """Change a value in a segment's entry of the newest commit."""

    def change(values: Any, _: Arrays) -> None:
        values["segments"][segment][index] = value

    rewritten(home.engine, "rank", change)


@pytest.fixture(params=[1 << 27, 6000, 1])
def sort_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that fit in memory, or not."""
    monkeypatch.setattr(key_invariants, "SORT_BYTES", request.param)


def stale_place(store: Store, name: str, *, some: bool = True) -> tuple[int, int]:
    """Return a retained segment that has stale rows of a table, or only other live ones: its index and the table's."""
    group, table = next((one, table) for one in store.groups for table in one.tables if table.name == name)
    for i, segment in enumerate(store.segments):
        stale = store.snapshot.stale_rows([segment], group, table)
        live = store.snapshot.rows_in([segment], group, table)
        if segment.id in store.commit.retained_ids and (stale > 0) == some and live - stale >= 4:
            return i, store.snapshot.live.first_tables[group.index] + group.place(name)
    raise AssertionError(f"no retained segment is like that for {name}")


def raised(home: Home, segment: int, table: int, more: int) -> None:

    def change(_: Any, arrays: Arrays) -> None:
        (at,) = np.nonzero((arrays["live_segments"] == segment) & (arrays["live_tables"] == table))[0]
        stale = np.zeros(arrays["live"].size, np.int64)
        stale[arrays["stale_at"]] = arrays["stale"]
        stale[at] += more
        arrays["stale_at"], arrays["stale"] = np.nonzero(stale)[0], stale[stale > 0]

    rewritten(home.engine, "rank", change)


@pytest.mark.usefixtures("sort_bytes")
@pytest.mark.parametrize(("more", "words"), [(-1, "has two live rows"), (1, "stale rows")])
def test_stale_rows_that_are_not_as_many_as_the_commit_says_are_found(more: int, words: str, tmp_path: Path) -> None:
    """Two live rows of a key are damage, as without retained segments; so is a missing duplicate."""
    home = Home("memory", tmp_path)
    raised(home, *stale_place(retained_store(home)[0], "user"), more)
    store = home.open()
    with pytest.raises(CorruptStoreError, match=words):
        list(store.scan("user"))
    (problem,) = Verification(store).run()["problems"]
    assert ("have two live rows" if more < 0 else "stale rows, but its commit says") in problem


def test_a_stale_row_that_is_missing_does_not_hide_a_key_that_is_there_twice(tmp_path: Path) -> None:
    """Two dumps of a pass, and an equal number of false stale rows: the sum is right, and both are found."""
    home = Home("memory", tmp_path)
    store, world = retained_store(home)
    world.train()
    world.append(store)
    twice = world.append(store)
    world.pass_index += 1
    world.publish(store)
    raised(home, *stale_place(store, "user"), twice.rows)
    assert twice.rows == 4
    problems = Verification(home.open()).run()["problems"]
    assert len(problems) == 2
    assert problems[0].startswith("4 keys of table 'user' of the store at")
    assert "have two live rows: restore" in problems[0]
    assert "stale rows, but its commit says" in problems[1]


def test_stale_rows_are_counted_in_the_segment_where_they_are(tmp_path: Path) -> None:
    """One more in one segment and one fewer in another give the same sum; a scan cannot tell."""
    home = Home("memory", tmp_path)
    raised(home, *stale_place(retained_store(home)[0], "user"), -1)
    store = home.open()
    without = stale_place(store, "user", some=False)
    raised(home, *without, 1)
    store = home.open()
    list(store.scan("user"))
    segment = store.segments[without[0]].id
    problems = Verification(store).run()["problems"]
    assert len(problems) == 2
    assert problems[0].startswith("1 keys of table 'user'")
    assert problems[1].endswith(
        f"has 0 stale rows, but its commit says 1, in segments {segment}: restore the store from a copy"
    )


def aged(home: Home) -> list[str]:
    """A stale row that the last commit claims to have changed, though only its newest version moved."""
    store, _ = retained_store(home)
    i = stale_place(store, "user")[0]
    of_segment(home, i, FIRST_COMMIT, store.commit.id)
    return ["3 keys of table 'user' of the store at", "have a row that changed after a newer one: restore"]


def trained(home: Home) -> Store:
    world = World(small_tables(), num_passes=4)
    store = home.open(world.tables, retention=2)
    world.run(store, 4)
    return store


def lost(home: Home) -> list[str]:
    """A commit that lacks a segment of the previous one with live rows."""
    trained(home)
    rewritten(home.engine, "rank", partial(without_segment, 0))
    return ["in commit 3,", "have no row, but had one at commit 2: roll the store back to that"]


def first_commit(home: Home) -> list[str]:
    """A commit that disagrees with the previous one about the last change of a segment's rows."""
    trained(home)
    of_segment(home, 0, FIRST_COMMIT, 3)
    return ["in commit 3, commit 3 says that commit 3 was the first with segment", "but commit 0 was"]


def over_at_once(home: Home) -> list[str]:
    """Rows that wait for a pass before their dump: none of them would be read."""
    store = trained(home)
    of_segment(home, -1, PASS, 77)
    return [f"segment {store.segments[-1].id} of the store at", "was dumped by pass 77 and has rows that wait for"]


@pytest.mark.usefixtures("sort_bytes")
@pytest.mark.parametrize("plant", [aged, lost, first_commit, over_at_once])
def test_what_no_checksum_sees_is_found_and_said_in_a_sentence(plant: Plant, tmp_path: Path) -> None:
    """One message for each affected table."""
    home = Home("memory", tmp_path)
    words = plant(home)
    problems = Verification(home.open()).run()["problems"]
    assert 1 <= len(problems) <= 5
    for problem in problems:
        assert all(word in problem for word in words), problem


@pytest.mark.usefixtures("sort_bytes")
def test_keys_and_last_changes_are_read_once_where_rows_are_stale(tmp_path: Path) -> None:
    store, _ = retained_store(Home("memory", tmp_path))
    before = store.counters.key_bytes_read, store.counters.changed_bytes_read
    Verification(store).run()["problems"]
    rows_of_kind = Counter[str]()
    for segment in store.segments:
        for blob in segment.blobs():
            group, kind = blob.of.group.index, blob.name.rsplit("/", 1)[1]
            first = store.snapshot.first_block(segment, group)
            rows_of_kind[kind] += max(0, blob.of.layout.rows - first * blob.of.layout.block_rows)
    assert rows_of_kind[CHANGED] > 0
    assert store.counters.key_bytes_read - before[0] == 8 * rows_of_kind[KEYS]
    assert store.counters.changed_bytes_read - before[1] == 4 * rows_of_kind[CHANGED]


def test_keys_that_cannot_be_read_are_all_that_is_said(tmp_path: Path) -> None:
    home = Home("memory", tmp_path)
    store, _ = retained_store(home)
    name = next(name for name in needed_bytes(store) if name.endswith(f"/{KEYS}"))
    home.engine.blobs[name].data[0] ^= 1
    (problem,) = Verification(store).run()["problems"]
    assert "over its keys" in problem
    with pytest.raises(CorruptStoreError, match="over its keys"):
        store.compact()
