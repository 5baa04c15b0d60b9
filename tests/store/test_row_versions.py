"""Last changes: kept when a row moves, and read only if necessary."""

import copy
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.store.conftest import Home, small_tables, stored_bytes
from tests.store.rewritten import described
from tests.store.test_rewrite import rows_of
from tests.store.world import World
from tiercache.store import Group, MemoryEngine, Range, SegmentLayout, Store, Table, info, load_rows, verify
from tiercache.store.compaction_plan import NoUses
from tiercache.store.layout import CHANGED, CHANGED_BYTES
from tiercache.store.store_errors import CorruptBlockError, CorruptStoreError
from tiercache.store.verification import Verification


def check_all(store: Store, world: World) -> None:
    """Assert the changes since every possible commit."""
    for since in range(-1, store.commit.id + 1):
        world.check_changes(store, since)


def small_pages(group: Group, ranges: Iterable[Range]) -> SegmentLayout:
    return SegmentLayout.of(
        row_bytes=group.row_bytes, page_rows=2, block_bytes=8 * group.row_bytes, ranges=tuple(ranges)
    )


def mixed(store: Store, world: World) -> None:
    """Train two schedules, so that the rows of the last base segment changed with several commits."""
    world.run(store, 3)
    world.follow(store, world.draw(world.seed + 1))
    world.run(store, 2)
    world.compact(store)


def test_only_what_may_have_changed_is_read() -> None:
    """No last changes of blocks that are entirely older or newer than a commit; of rows, only changed ones."""
    world = World(small_tables(), keys_per_pass=30, universe=60, block_rows=8, page_rows=2)
    with Store.open(None, tables=world.tables, engine=MemoryEngine()) as store:
        mixed(store, world)
        store.rewrite(NoUses(), schedule_digest="", retain_segments=False, layout=small_pages)
        segment, last = store.segments[0], store.commit.id

        def read(since: int) -> tuple[int, int, int]:
            before = copy.copy(vars(store.counters))
            world.check_changes(store, since)
            now = vars(store.counters)
            return tuple(now[f"{name}_bytes_read"] - before[f"{name}_bytes_read"] for name in ("changed", "row", "key"))

        assert read(last) == (0, 0, 0)
        assert read(-1)[0] == 0
        oldest = min(int(one.oldest_B[:].min()) for one in segment.changed)
        assert read(oldest)[0] > 0
        newest = last - 2  # the last pass: later commits changed nothing
        asked, rows, _ = read(newest - 1)
        # Twice: returned and counted; a block shared by two tables is read for both.
        stored = CHANGED_BYTES * sum(layout.rows for layout in segment.layouts)
        assert 0 < asked <= 2 * (stored + 8 * CHANGED_BYTES * len(store.tables))
        assert 0 < rows < segment.row_bytes
        before = store.counters.row_bytes_read
        assert sum(store.changed_rows(table.name, since=newest - 1) for table in store.tables) == 5 * 30
        assert store.counters.row_bytes_read == before


def test_rows_that_one_commit_changed_need_no_last_changes_stored(home: Home) -> None:
    """Such as imported rows that are put in the order of a schedule: the record has the information."""
    world = World(small_tables(), keys_per_pass=9, universe=9)
    with Store.open(None, tables=world.tables, engine=MemoryEngine()) as trained:
        world.run(trained, 1)
        with home.open(small_tables()) as store:
            load_rows(store, [(table.name, chunk) for table in store.tables for chunk in trained.scan(table.name)])
            world.changed = dict.fromkeys(world.rows, 0)
            world.compact(store)
            assert [one.stored for one in store.segments[0].changed] == [False] * len(store.groups)
            assert store.counters.changed_bytes_written == store.segments[0].changed_bytes == 0
            check_all(store, world)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_last_changes_are_counted_and_freed_with_their_segment(engine: str, tmp_path: Path) -> None:
    world = World(small_tables(), keys_per_pass=20, universe=40)
    with Store.open(tmp_path / "s", tables=world.tables, engine=engine) as store:
        mixed(store, world)
        check_all(store, world)
        segment = store.segments[0]
        stored = CHANGED_BYTES * segment.rows
        assert store.counters.changed_bytes_written >= stored == segment.changed_bytes
        kept = [name for name in stored_bytes(store) if name.endswith(f"/{CHANGED}")]
        assert sorted(kept) == [f"{segment.name}/{group.index}/{CHANGED}" for group in store.groups]
    assert info(tmp_path / "s")["changed_bytes"] == stored
    with Store.open(tmp_path / "s") as store:
        check_all(store, world)
        assert store.segments[0].changed_bytes == stored
        world.follow(store, world.draw(5))
        world.compact(store)
        assert not set(kept) & stored_bytes(store).keys()
    assert verify(tmp_path / "s")["problems"] == []


def moved_store(tables: list[Table]) -> tuple[MemoryEngine, int]:
    """Return the engine of a store whose rows moved, and the id of their segment."""
    engine = MemoryEngine()
    with Store.open(None, tables=tables, engine=engine) as store:
        mixed(store, World(tables, keys_per_pass=20, universe=40, block_rows=7))
        return engine, store.segments[0].id


def problems(engine: MemoryEngine) -> list[str]:
    with Store.open(None, engine=engine, mode="r") as store:
        try:
            return Verification(store).run()["problems"]
        except CorruptStoreError as error:
            return [str(error)]


def test_a_flipped_bit_in_last_changes_is_refused_and_found_by_verify(tables: list[Table]) -> None:
    """Rows and keys are intact: they are read as before."""
    engine, id_ = moved_store(tables)
    engine.blobs[min(name for name in engine.blobs if name.endswith(f"/{CHANGED}"))].data[0] ^= 1
    with Store.open(None, engine=engine, mode="r") as store:
        table = store.groups[0].tables[0].name
        for read in (store.changed_rows, lambda *name, **since: list(store.changes(*name, **since))):
            with pytest.raises(
                CorruptBlockError, match=rf"block 0 of segment {id_} .* over the commits that changed its rows, but"
            ):
                read(table, since=2)
        assert rows_of(store)
    (found,) = problems(engine)
    assert "over the commits that changed its rows" in found


@pytest.mark.parametrize(("cut", "seen"), [(0, "is missing"), (4, r"is truncated: [\d,]+ of its [\d,]+ bytes")])
def test_last_changes_that_are_not_whole_are_found_by_the_next_writer(tables: list[Table], cut: int, seen: str) -> None:
    """Like missing and truncated rows; a reader detects it when it reads them."""
    engine, _ = moved_store(tables)
    name = min(name for name in engine.blobs if name.endswith(f"/{CHANGED}"))
    blob = engine.blobs.pop(name)
    if cut:
        engine.blobs[name] = blob._replace(data=blob.data[:-cut])
    with pytest.raises(CorruptStoreError, match=f"{name} of the store in memory {seen}"):
        Store.open(None, engine=engine)
    of_blob, of_rows = problems(engine)
    assert name in of_blob
    assert "block" in of_rows


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("newest", "changed rows of segment"),
        ("oldest", "has rows that were changed by different commits than its record says"),
        ("checksums", "lists other live rows of segment"),
        ("short", "numbers for the last changes of"),
    ],
)
def test_a_description_of_last_changes_that_cannot_be_is_found(tables: list[Table], what: str, words: str) -> None:
    engine, _ = moved_store(tables)
    with Store.open(None, engine=engine, mode="r") as store:
        segment = store.segments[0]
        first_group, *others = segment.meta
        first = first_group.changed
        wrong = {
            "newest": lambda: first._replace(newest_B=first.newest_B[:] + np.uint32(99)),
            "oldest": lambda: first._replace(oldest_B=first.newest_B[:] + np.uint32(1)),
            "checksums": lambda: first._replace(checksums_B=np.empty(0, np.uint32)),
            "short": lambda: first._replace(oldest_B=first.oldest_B[1:]),
        }[what]()
        meta = (replace(first_group, changed=wrong), *others)
        described(engine, store, segment, meta)
    found = problems(engine)
    assert found
    assert any(re.search(words, one) for one in found), found
