"""Kept commits, opening them and rolling back to them; and the size of a store on disk."""

import copy
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.store.big import BIG, dump, publish
from tests.store.conftest import Home, needed_bytes, small_tables, stored_bytes
from tests.store.rewritten import rewritten
from tests.store.world import World
from tiercache.store import CommitMissingError, CorruptStoreError, MemoryEngine, Store, forget, verify
from tiercache.store.verification import Verification

if TYPE_CHECKING:
    from collections.abc import Callable


def test_the_newest_commits_are_kept_and_older_ones_are_freed(tmp_path: Path) -> None:
    past: dict[int, World] = {}
    world = World(small_tables(), num_passes=4)
    with Store.open(tmp_path / "s.tc", tables=world.tables, retention=3) as store:
        for id_ in range(7):
            world.run(store, 1)
            past[id_] = copy.deepcopy(world)
        assert [commit.id for commit in store.commits] == [4, 5, 6]
    for id_ in (4, 5, 6):
        with Store.open(tmp_path / "s.tc", mode="r", commit=id_) as store:
            past[id_].check(store, after=id_)
            past[id_].check_load(store, id_ + 1)
            assert store.state() == past[id_].state
            assert store.commits == (store.commit,)
    with pytest.raises(CommitMissingError, match="has no commit 3: pass one of 4, 5, 6"):
        Store.open(tmp_path / "s.tc", mode="r", commit=3)
    assert verify(tmp_path / "s.tc")["problems"] == []


def test_retention_is_kept_until_another_is_asked_for(home: Home) -> None:
    """By any commit, such as that of a pin; a smaller one frees the rest."""
    world, alone = World(small_tables()), World(small_tables())
    world.run(home.open(world.tables, retention=2), 3)
    home.open(retention=3).pin("best", 1)
    store = home.open()
    assert store.retention == 3
    world.run(store, 3)
    assert [commit.id for commit in store.commits] == [1, 4, 5, 6]
    store = home.open(retention=1)
    assert [commit.id for commit in store.commits] == [1, 4, 5, 6]
    store.unpin("best")
    assert [commit.id for commit in store.commits] == [7]
    assert stored_bytes(store) == needed_bytes(store)
    with Store.open(None, tables=alone.tables, engine=MemoryEngine()) as other:
        alone.run(other, 6)
        assert stored_bytes(store, "segments/") == stored_bytes(other, "segments/")


def test_rolling_back_to_a_commit_that_is_gone_is_refused(tmp_path: Path) -> None:
    world = World(small_tables())
    with Store.open(tmp_path / "s.tc", tables=world.tables) as store:
        with pytest.raises(CommitMissingError, match="has no commit 0: it has none yet"):
            store.rollback(0)
        world.run(store, 2)
        with pytest.raises(CommitMissingError, match="has no commit 0: pass one of 1"):
            store.rollback(0)
    with pytest.raises(ValueError, match="can only be read"):
        Store.open(tmp_path / "s.tc", commit=1)
    with pytest.raises(ValueError, match="retention is 0"):
        Store.open(tmp_path / "s.tc", retention=0)


NOT_INTS = [1.0, True, np.True_, "1", np.array([1, 2]), np.float32(1)]


@pytest.mark.parametrize("wrong", NOT_INTS, ids=repr)
def test_a_number_that_a_commit_could_not_be_read_with_is_refused(tmp_path: Path, wrong: Any) -> None:
    world, path = World(small_tables()), tmp_path / "s.tc"
    publish = partial(Store.publish, state=b"", schedule_digest="", settings={}, environment={})
    doors: list[tuple[str, Callable[[Store], object]]] = [
        ("the pass", lambda store: publish(store, (wrong, 0))),
        ("the sample", lambda store: publish(store, (2, wrong))),
        ("the pass", lambda store: store.append(wrong, [], [])),
        ("the commit", lambda store: store.pin("x", wrong)),
        ("unused_since", lambda store: forget(store, "item", unused_since=wrong)),
        ("retention", lambda _: Store.open(path, retention=wrong)),
        ("commit", lambda _: Store.open(path, mode="r", commit=wrong)),
    ]
    if not isinstance(wrong, str):  # the name of a pin
        doors += [("the commit", lambda store: store.rollback(wrong)), ("the commit", lambda store: store.at(wrong))]
    with Store.open(path, tables=world.tables, retention=3) as store:
        world.run(store, 2)
        for name, door in doors:
            with pytest.raises(ValueError, match=rf"{name} is .* of type .*: expected an int"):
                door(store)
    with Store.open(path, mode="r") as store:
        assert [commit.id for commit in store.commits] == [0, 1]


def test_whole_numbers_of_numpy_are_taken_and_too_large_ones_refused(tmp_path: Path) -> None:
    world, path = World(small_tables()), tmp_path / "s.tc"
    with Store.open(path, tables=world.tables, retention=np.int64(3)) as store:
        world.run(store, 2)
        store.pin("x", np.uint8(0))
        store.rollback(np.int32(0))
        with pytest.raises(CommitMissingError, match=f"has no commit {10**30}"):
            store.pin("x", 10**30)
    with Store.open(path, mode="r") as store:
        assert (store.commit.id, store.commit.pins, store.retention) == (3, {"x": 0}, 3)
    with pytest.raises(ValueError, match=r"retention is 1000.*: expected at most 2\*\*63 - 1"):
        Store.open(path, retention=10**30)
    Store.open(path, retention=2**63 - 1).close()


def test_a_commit_that_could_not_be_read_again_is_not_written() -> None:
    """Each record is read before it is put."""
    world, engine = World(small_tables()), MemoryEngine()
    with Store.open(None, tables=world.tables, engine=engine, retention=3) as store:
        world.run(store, 2)
        writer, before = store.commit_writer, engine.list()
        with pytest.raises(ValueError, match=r"commit 2 was not made, because it could not be read again \(a pinned"):
            writer.pin("x", 1.0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="commit 2 was not made"):
            writer.amend(own=replace(store.commit.own, next_segment=2.5), ranks=())  # type: ignore[arg-type]
        assert engine.list() == before
        world.run(store, 1)


def test_a_kept_commit_that_is_another_one_is_refused() -> None:
    world, engine = World(small_tables()), MemoryEngine()
    with Store.open(None, tables=world.tables, engine=engine, retention=3) as store:
        world.run(store, 4)

    def change(values: dict[str, Any], _: object) -> None:
        values["kept"][0][0] = 0

    rewritten(engine, "commit", change)
    with pytest.raises(CorruptStoreError, match="commit 0 of the store in memory is commit 1: restore"):
        Store.open(None, tables=world.tables, engine=engine)


def without_segment(place: int, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
    """Remove the segment at an index, without stale rows, from a rank list."""
    values["segments"].pop(place)
    groups = values["groups"]
    for name in ("first_ranges", "next_uses", "rows", "block_rows", "row_bytes", "changed"):
        arrays[name] = np.delete(arrays[name], slice(place * groups, (place + 1) * groups))
    assert not arrays["stale_at"].size
    others = arrays["live_segments"] != place
    arrays["live_segments"] -= arrays["live_segments"] > place
    for name in ("live_segments", "live_tables", "live"):
        arrays[name] = arrays[name][others]


def test_keys_that_only_commits_given_up_have_are_not_lost() -> None:
    """A commit is compared with its parent; keys missing from the parent are still reported."""
    world, engine = World(small_tables(), num_passes=4), MemoryEngine()
    with Store.open(None, tables=world.tables, engine=engine, retention=4) as store:
        world.run(store, 3)
        store.pin("two", 2)
        store.pin("one", 1)
        store.rollback(0)
        assert Verification(store).run()["problems"] == []
        store.rollback(1)
        assert store.commit.abandoned == ((2, 5),)
        assert Verification(store).run()["problems"] == []
        newest = len(store.segments) - 1
    rewritten(engine, "rank", partial(without_segment, newest))
    with Store.open(None, tables=world.tables, engine=engine) as store:
        assert [commit.id for commit in store.commits] == [0, 1, 2, 6]
        found = Verification(store).run()["problems"]
    assert found
    assert all(
        one.startswith("in commit 6, ") and "had one at commit 1: roll the store back to that" in one for one in found
    )


# -- the size of a store on disk, pass after pass ------------------------------------------------------------

TRAINED, PASSES, PASS_ROWS = 50, 6, 1000
PASS_BYTES = PASS_ROWS * BIG.row_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("commits", [1, 3])
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_a_store_stays_within_its_live_rows_two_passes_and_15_percent(
    tmp_path: Path, engine: str, commits: int
) -> None:
    """At each of 50 commits and for any next uses; one more kept commit may cost a sub-dataset.

    Live rows are the peak of an epoch: space of its fullest pass stays in the file for the next epoch.
    """
    rng = np.random.default_rng(0)
    shapes = [rng.multinomial(PASS_ROWS, rng.dirichlet(np.ones(PASSES))) for _ in range(PASSES)]
    waiting, live = Counter[int](), list[int]()
    with Store.open(tmp_path / "s", tables=[BIG], engine=engine, retention=commits) as store:
        for pass_index in range(TRAINED):
            rows = {pass_index + distance: int(n) for distance, n in enumerate(shapes[pass_index % PASSES], 1)}
            dump(store, pass_index, rows, block_bytes=PASS_BYTES // 32)
            publish(store, pass_index + 1)
            del waiting[pass_index]
            waiting.update(rows)
            live.append(waiting.total() * BIG.row_bytes)
            assert file_bytes(tmp_path / "s", store) <= 1.15 * (max(live[-PASSES:]) + (1 + commits) * PASS_BYTES)
        assert len(store.commits) == commits


def file_bytes(path: Path, store: Store) -> int:
    store._opened.engine.drop([], shrink=True)  # delete dead data, which otherwise happens during training
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
