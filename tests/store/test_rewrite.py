"""Rewriting all rows of a store in a new order."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.store.conftest import small_tables
from tests.store.failing import FailingEngine
from tests.store.world import World, WorldUses
from tiercache.store import NEVER, MemoryEngine, Store, Table, Zeros, compaction_plan, external_sort, rewrite, verify
from tiercache.store.bulk_load import load_rows
from tiercache.store.files import ScratchFile
from tiercache.store.optimizer import SGD
from tiercache.store.row_codec import row_words
from tiercache.store.store_errors import StoreError, StoreFullError
from tiercache.store.verification import Verification

WIDE = Table(name="wide", dim=16, optimizer=SGD(learning_rate=0.1), initializer=Zeros())


@contextmanager
def sliced(slice_bytes: int | None, memory_bytes: int = 8000) -> Iterator[None]:
    """Use slices with few bytes, and little memory, so that rows are sorted in many of them and in files."""
    with pytest.MonkeyPatch.context() as patch:
        if slice_bytes is not None:
            patch.setattr(external_sort, "LEAST_SLICE_BYTES", slice_bytes)
            patch.setattr(rewrite, "REWRITE_BYTES", memory_bytes)
            patch.setattr(compaction_plan, "COMPACTION_BYTES", memory_bytes)
        yield


def rows_of(store: Store) -> dict[tuple[str, int], bytes]:
    return changed_rows(store, -1)


def changed_rows(store: Store, since: int) -> dict[tuple[str, int], bytes]:
    """Return the rows that changed after commit ``since``."""
    found = {}
    for table in store.tables:
        for keys, fields in store.changes(table.name, since=since):
            words = row_words(table.fields, tuple(fields.values()))
            for i, key in enumerate(keys.tolist()):
                assert (table.name, key) not in found
                found[table.name, key] = words[i].tobytes()
    return found


def test_a_compacted_store_has_one_range_for_each_table_in_hash_order(tmp_path: Path) -> None:
    world = World(small_tables(), num_passes=4, keys_per_pass=60)
    with Store.open(tmp_path / "s.tc", tables=world.tables) as store:
        world.run(store, 6)
        told = Counter[str]()
        store.compact(progress=lambda what, rows: told.update({what: rows}))
        assert told == {"read": len(world.rows), "write": len(world.rows)}
        assert rows_of(store) == world.rows
        assert [layout.num_ranges for layout in store.segments[0].layouts] == [1] * len(store.groups)
        assert {rows.next_use for layout in store.segments[0].layouts for rows in layout.ranges} == {NEVER}
    assert verify(tmp_path / "s.tc")["problems"] == []
    assert not list(tmp_path.glob("s.tc/tmp*"))


def rewrite_rows(store: Store, world: World, *, retain_segments: bool) -> None:
    """Rewrite the rows for a schedule that uses nine of them."""
    uses = WorldUses(store.tables, dict.fromkeys([*world.rows][:9], 0), slice_keys=4)
    assert store.rewrite(uses, schedule_digest="", retain_segments=retain_segments).retained_ids or not retain_segments


STEPS: dict[str, Callable[[Store, World], object]] = {
    "rewrite": partial(rewrite_rows, retain_segments=False),
    "rewrite and retain": partial(rewrite_rows, retain_segments=True),
    "import": lambda store, world: world.lay_over(store, {"item": [1, 2, 3]}),
    "roll back": lambda store, _: store.rollback(store.commit.id),
    "pin": lambda store, _: store.pin("best", 1),
    "unpin": lambda store, _: store.unpin("old"),
}


@pytest.mark.parametrize("step", STEPS)
def test_after_any_failure_the_store_stands_where_it_stood(step: str) -> None:
    """At any failing call of the engine: exactly the commit, its rows and its blobs remain."""
    world, memory = World(small_tables(), keys_per_pass=20), MemoryEngine()
    engine = FailingEngine(memory)
    with Store.open(None, tables=world.tables, engine=engine, retention=2) as store:
        world.run(store, 3)
        store.pin("old", 1)
        commit, blobs, rows = store.commit, memory.list(), rows_of(store)
        for call in count(1):
            engine.fail_in(call)
            after = copy.deepcopy(world)
            try:
                STEPS[step](store, after)
                break
            except StoreError:
                engine.fail_in(None)
                assert store.commit is commit
                assert memory.list() == blobs
                assert rows_of(store) == rows
        engine.fail_in(None)
        assert call > 2
        assert rows_of(store) == after.rows


def test_key_sets_that_change_meanwhile_are_found_out() -> None:
    """Inconsistent counts and slices would put rows in wrong places."""
    world = World(small_tables())
    with Store.open(None, tables=world.tables, engine=MemoryEngine()) as store:
        with pytest.raises(ValueError, match="has no commit"):
            store.compact()
        world.run(store, 2)
        key = next(iter(world.rows))
        lying = WorldUses(store.tables, {key: 1})
        lying.counts = lambda name: {1: 2} if name == key[0] else {}  # type: ignore[method-assign]
        with pytest.raises(StoreError, match=r"pass 1 was said to use 2 keys .* first, and others came"):
            store.rewrite(lying, schedule_digest="x")
        world.check(store, after=world.pass_index - 1)


def test_a_full_disk_is_said_with_the_bytes_needed(tmp_path: Path) -> None:
    world, path = World(small_tables(), keys_per_pass=200, universe=400), tmp_path / "s.tc"
    with Store.open(path, tables=world.tables) as store:
        world.run(store, 1)
    words = r"^a new segment with the rows of .* needs [\d,]+ more bytes but .*may hold"
    with Store.open(path, store_budget=(path / "blocks.bin").stat().st_size) as store:
        with pytest.raises(StoreFullError, match=words):
            store.compact()
        world.check(store, after=world.pass_index - 1)
        assert rows_of(store) == world.rows


@pytest.mark.parametrize("retain_segments", [False, True])
def test_slices_change_neither_rows_nor_last_changes_nor_what_is_retained(retain_segments: bool) -> None:
    told = []
    for slice_bytes in (None, 300):
        world = World(small_tables(), num_passes=4, keys_per_pass=30)
        with Store.open(None, tables=world.tables, engine=MemoryEngine(), retention=9) as store:
            world.run(store, 6)
            uses = WorldUses(store.tables, dict.fromkeys([*world.rows][:40], 3), slice_keys=7)
            with sliced(slice_bytes):
                commit = store.rewrite(uses, schedule_digest="new", retain_segments=retain_segments)
            new = len(store.segments) - len(commit.retained_ids)
            assert new > 3 if slice_bytes else new == 1
            assert Verification(store).run()["problems"] == []
            stale = store.snapshot.live.stale_ST[: len(commit.retained_ids)].tolist()
            changes = [changed_rows(store, since) for since in range(-1, commit.id + 1)]
            told.append((commit.retained_ids, stale, changes))
    assert bool(told[0][0]) == retain_segments
    assert told[0] == told[1]


class Scratch:
    """The temporary files of a process: the number of writes, and the most bytes that they had at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes = self.most = 0
        sizes = Counter[int]()
        write, free, close = ScratchFile.write, ScratchFile.free, ScratchFile.close

        def noted_write(file: ScratchFile, data: NDArray[Any], offset: int) -> None:
            sizes[id(file)] += data.nbytes
            self.writes, self.most = self.writes + 1, max(self.most, sizes.total())
            write(file, data, offset)

        def noted_free(file: ScratchFile, offset: int, num_bytes: int) -> None:
            sizes[id(file)] -= num_bytes
            free(file, offset, num_bytes)

        def noted_close(file: ScratchFile) -> None:
            del sizes[id(file)]
            close(file)

        monkeypatch.setattr(ScratchFile, "write", noted_write)
        monkeypatch.setattr(ScratchFile, "free", noted_free)
        monkeypatch.setattr(ScratchFile, "close", noted_close)


MEMORY_BYTES = 128 << 10
"""Less than a slice of the rows below."""


ROWS = 30_000


@pytest.fixture
def filled() -> Iterator[Store]:
    """A store of one table with rows that are their keys."""
    with Store.open(None, tables=[WIDE], engine=MemoryEngine()) as store:
        keys = np.arange(ROWS, dtype=np.int64)
        load_rows(store, [("wide", (keys, (np.repeat(keys.astype(np.float32), 16).reshape(-1, 16),)))])
        yield store


def first_uses(passes: int, step: int) -> WorldUses:
    """Return first uses of keys 0, ``step``, .. of the one table."""
    uses = {("wide", key): key * 7919 // step % passes for key in range(0, ROWS, step)}
    return WorldUses([WIDE], uses, slice_keys=5000)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("retain_segments", [False, True])
def test_a_rewrite_writes_scratch_files_front_to_back_whatever_the_passes(
    filled: Store, *, retain_segments: bool
) -> None:
    """For 200 passes at most twice the writes of one, and at most an eighth of the entries' bytes at a time."""
    counts = []
    for passes in (1, 200):
        with sliced(1, MEMORY_BYTES), pytest.MonkeyPatch.context() as patch:
            scratch, uses = Scratch(patch), first_uses(passes, step=1 if retain_segments else 2)
            filled.rewrite(uses, schedule_digest="new", retain_segments=retain_segments)
            counts.append(scratch.writes)
            assert filled.counters.spill_writes > 0
            assert scratch.most <= ROWS * (WIDE.row_bytes + 12) / 8
            found = [(keys, fields[0]) for keys, fields in filled.scan("wide")]
            assert sum(keys.size for keys, _ in found) == ROWS
            assert all(np.array_equal(vectors[:, 5], keys) for keys, vectors in found)
    assert counts[1] <= 2 * counts[0]


@pytest.mark.parametrize("schedules", [0, 4])
def test_a_compaction_writes_no_row_to_a_scratch_file(
    filled: Store, schedules: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a few ranges are merged as they are read, and written as they are merged."""
    with sliced(1 << 30, 8 << 20):
        rows = rows_of(filled)
        for start in range(schedules):
            filled.rewrite(first_uses(3 + start, step=5), schedule_digest=str(start))
        scratch = Scratch(monkeypatch)
        filled.compact()
        assert scratch.writes == 0
        assert rows_of(filled) == rows
