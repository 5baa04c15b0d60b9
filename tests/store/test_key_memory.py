"""Key memory: a process that reopens a store sees the rows of each commit, and does not read keys twice."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dist.sharded_world import train_shards
from tests.store.conftest import small_tables
from tests.store.world import Key, World
from tiercache.store import Store, hash_keys
from tiercache.store.live_keys import KeyMemory, Recall

KEYS = np.arange(-90, 90)
NONE = np.arange(1000, 1100)
"""Keys without rows."""


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> KeyMemory:
    """An empty memory of this test only."""
    made = KeyMemory()
    monkeypatch.setattr("tiercache.store.store.KEY_MEMORY", made)
    return made


def look(path: Path, commit: int, rows: dict[Key, bytes]) -> None:
    """Look up all keys of all tables in a commit, and compare them with its rows."""
    with Store.open(path, mode="r", commit=commit) as store:
        for table in store.tables:
            fields = store.lookup(table.name, KEYS, missing="zeros")
            for i, key in enumerate(KEYS.tolist()):
                found = b"".join(values[i].tobytes() for values in fields.values())
                assert found == rows.get((table.name, key), bytes(len(found))), (commit, table.name, key)


def look_for_none(path: Path, commit: int) -> int:
    with Store.open(path, mode="r", commit=commit) as store:
        return read_of_keys(store)


def read_of_keys(store: Store) -> int:
    """Look up keys without a row; return the bytes of keys read."""
    ranks = store.ranks or (store,)
    before = sum(rank.counters.key_bytes_read for rank in ranks)
    for table in store.tables:
        assert not any(np.any(values) for values in store.lookup(table.name, NONE, missing="zeros").values())
    return sum(rank.counters.key_bytes_read for rank in ranks) - before


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_lookups_again_and_again_have_the_rows_of_their_commit(engine: str, memory: KeyMemory, tmp_path: Path) -> None:
    """Newer and older ones in turns, through a rollback after which other segments get the same numbers."""
    path = tmp_path / "s"
    world = World(small_tables(), num_passes=5, keys_per_pass=60, universe=150)
    worlds: dict[int, World] = {}
    with Store.open(path, tables=world.tables, engine=engine, retention=3) as store:
        for step in range(14):
            world.run(store, 1)
            worlds[store.commit.id] = copy.deepcopy(world)
            for commit in store.commits if step % 2 else reversed(store.commits):
                first, again = (look_for_none(path, commit.id) for _ in range(2))
                assert again == 0
                assert first > 0 or commit is not store.commit
                look(path, commit.id, worlds[commit.id].rows)
            if step == 8:
                oldest = store.commits[0].id
                worlds[store.rollback(oldest).id], world = worlds[oldest], copy.deepcopy(worlds[oldest])
                world.schedule += 1  # other rows follow
    assert memory.num_bytes > 0


def test_a_store_in_place_of_another_is_read_with_its_keys(memory: KeyMemory, tmp_path: Path) -> None:
    """Its segments have the numbers of the former ones, and other keys."""
    path = tmp_path / "s"
    for seed in range(3):
        world = World(small_tables(), num_passes=5, keys_per_pass=60, universe=150, seed=seed)
        with Store.open(path, tables=world.tables) as store:
            world.run(store, 3)
            look_for_none(path, store.commit.id)
            assert memory.num_bytes > 0
            look(path, store.commit.id, world.rows)
        shutil.rmtree(path)


def test_what_is_remembered_has_a_bound_and_goes_with_its_segments(memory: KeyMemory, tmp_path: Path) -> None:
    """Beyond it lookups read as before; segments that lookups no longer use are evicted."""
    path, world = tmp_path / "s", World(small_tables(), num_passes=4, keys_per_pass=60, universe=150)
    memory.most_bytes = 1200
    with Store.open(path, tables=world.tables) as store:
        for _ in range(8):
            world.run(store, 1)
            look(path, store.commit.id, world.rows)
            assert 0 < memory.num_bytes <= memory.most_bytes
        store.compact()
        look(path, store.commit.id, world.rows)
        memory.keep(path, {segment.id for segment in store.segments})
    assert memory.num_bytes <= 8 * len(world.rows)
    memory.keep(path, [])
    assert memory.num_bytes == 0


@pytest.mark.parametrize("num_segments", [1, 2, 6])
@pytest.mark.parametrize("room", [0.5, 1, 2.5, 100])
def test_a_lookup_that_reads_segments_ahead_stays_within_the_bound(
    memory: KeyMemory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_segments: int, room: float
) -> None:
    """Memory counts from the allocation of new keys on; it fits ``room`` segments."""
    path, world = tmp_path / "s", World(small_tables(), num_passes=num_segments, keys_per_pass=60, universe=150)
    with Store.open(path, tables=world.tables) as store:
        world.run(store, num_segments)
        group = store.groups[0]
        rows = max(segment.layouts[group.index].rows for segment in store.segments)
    memory.most_bytes = int(room * 8 * rows)
    held = list[int]()
    learn = Recall.learn

    def learning(self: Recall, *given: Any) -> None:
        reserved = sum(made.entries.nbytes for made, _ in self._learned.values())
        known = sum(one.entries.nbytes for mine in memory._known.values() for one in mine.values())
        held.append(reserved + known)
        assert reserved + known <= memory.num_bytes
        learn(self, *given)

    monkeypatch.setattr(Recall, "learn", learning)
    with Store.open(path, mode="r") as reader:
        for _ in range(2):
            reader.lookup(group.tables[0].name, KEYS, missing="zeros")
    assert max(held, default=0) <= memory.most_bytes
    assert memory.num_bytes == sum(one.entries.nbytes for mine in memory._known.values() for one in mine.values())


def test_a_failed_lookup_keeps_no_memory(memory: KeyMemory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the middle of a segment, by an error of the disk or of the caller's progress function."""
    path, world = tmp_path / "s", World(small_tables(), num_passes=3, keys_per_pass=60)
    with Store.open(path, tables=world.tables) as store:
        world.run(store, 1)

    def fail(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(Recall, "learn", fail)
    with Store.open(path, mode="r") as reader, pytest.raises(OSError, match="the disk is gone"):
        reader.lookup("user", KEYS, missing="zeros")
    assert memory.num_bytes == 0


VIEWS: dict[str, Callable[[Store], Store]] = {
    "as it is": lambda store: store,
    "at the newest": lambda store: store.at(store.commit.id),
    "at an older one": lambda store: store.at(store.commits[0].id),
    "at one of that": lambda store: store.at(store.commits[0].id).at(store.commits[0].id),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
@pytest.mark.parametrize("num_ranks", [0, 1, 3])
def test_every_view_of_a_store_for_reading_remembers(
    memory: KeyMemory, tmp_path: Path, num_ranks: int, engine: str, view: Callable[[Store], Store]
) -> None:
    """A second lookup reads no key, in this or another view or opening. Only lookups remember, and only those of stores
    for reading: memory of a training is planned.
    """
    path = tmp_path / "s"
    if num_ranks:
        assert train_shards(path, num_ranks, 4, engine=engine, retention=2) == [None] * num_ranks
    else:
        world = World(small_tables(), num_passes=3, keys_per_pass=60, universe=150)
        with Store.open(path, tables=world.tables, engine=engine, retention=2) as store:
            world.run(store, 3)
    with Store.open(path) as writer:
        read_of_keys(view(writer))
        assert memory.num_bytes == 0
    with Store.open(path, mode="r") as store:
        seen = view(store)
        if not num_ranks:
            seen.locate("user", KEYS, after=-1)
        assert memory.num_bytes == 0
        assert read_of_keys(seen) > 0
        assert read_of_keys(seen) == 0
        assert read_of_keys(store.at(seen.commit.id)) == 0
    assert memory.num_bytes > 0
    with Store.open(path, mode="r") as store:
        assert read_of_keys(view(store)) == 0


def test_a_hash_that_is_alike_in_its_first_half_is_looked_at(memory: KeyMemory, tmp_path: Path) -> None:
    """Half hashes in memory only say where a key may be; the stored key is compared in full."""
    world = World(small_tables(), num_passes=3, keys_per_pass=40)
    with Store.open(tmp_path / "s", tables=world.tables) as store:
        world.run(store, 1)
        (segment,) = store.segments
    look(tmp_path / "s", 0, world.rows)
    recall = Recall(memory, tmp_path / "s", [segment.id])
    group = store.groups[0]
    table = group.tables[0]
    keys = np.array([key for name, key in world.rows if name == table.name])
    hashes = hash_keys(keys, table.table_id)
    near = np.sort(hashes ^ np.uint64(1))
    rows = recall.rows(segment, group.index, 0, 0, near)
    assert rows is not None
    assert rows.size == keys.size
    far = recall.rows(segment, group.index, 0, 0, np.sort(hashes ^ np.uint64(1 << 63)))
    assert far is not None
    assert far.size == 0
