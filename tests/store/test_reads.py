"""Loads of many ranges at a time equal loads one by one, in bytes and in errors."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.store.big import BIG, dump, publish
from tests.store.conftest import Home
from tests.store.world import World
from tiercache.store import CorruptBlockError, MemoryEngine, Store, Table
from tiercache.store.layout import ROWS
from tiercache.store.reading import Pages


def live(store: Store) -> list[Pages]:
    wanted = []
    for segment in store.segments:
        for group, layout in enumerate(segment.layouts):
            for index in range(store.snapshot.first_range(segment, group), layout.num_ranges):
                low, high = layout.pages_of_range(index)
                size = layout.byte_of_page(high) - layout.byte_of_page(low)
                wanted.append(Pages(segment, group, low, high, np.zeros(size, np.uint8)))
    return wanted


def loaded(store: Store, *, at_once: int | None) -> tuple[list[bytes], list[int]]:
    """Load all live ranges, or read one by one; return their bytes, and what the counters counted."""
    before, wanted = dict(vars(store.counters)), live(store)
    if at_once:
        store.load(wanted, at_once=at_once)
    else:
        for segment, group, low, high, out in wanted:
            store.read(segment, group, low, high, out)
    counted = [getattr(store.counters, name) - before[name] for name in ("row_bytes_read", "rows_read", "reads")]
    return [pages.out.tobytes() for pages in wanted], counted


@pytest.mark.parametrize("mode", ["a", "r"])
def test_ranges_that_are_loaded_together_are_those_that_are_read_one_by_one(
    home: Home, tables: list[Table], mode: str
) -> None:
    World(tables, keys_per_pass=80).run(home.open(tables), 3)
    store = home.open(mode=mode)
    data, counted = loaded(store, at_once=None)
    assert len(data) > 20
    assert all(map(any, data))
    assert counted[0] == sum(map(len, data))
    for at_once in (1, 3):
        assert loaded(store, at_once=at_once) == (data, counted)


def test_compressed_rows_are_loaded_beside_others(tmp_path: Path) -> None:
    tables = [replace(BIG, compression="zstd"), replace(BIG, name="other", dim=3)]
    world = World(tables, keys_per_pass=80)
    with Store.open(tmp_path / "s", tables=tables, engine="zarr") as store:
        world.run(store, 3)
        world.check_load(store, world.pass_index)
        assert loaded(store, at_once=3) == loaded(store, at_once=None)


@pytest.mark.parametrize(
    ("damage", "words"), [("flipped", "has checksum"), ("short", "ends at byte"), ("missing", "is missing")]
)
def test_damage_is_refused_in_the_same_words(damage: str, words: str) -> None:
    engine = MemoryEngine()
    with Store.open(None, tables=[BIG], engine=engine) as store:
        dump(store, 0, {1: 500, 2: 500})
        dump(store, 1, {2: 300})
        publish(store, 2)
        last = store.segments[-1]
        name = f"{last.name}/0/{ROWS}"
        blob = engine.blobs.pop(name)
        if damage == "flipped":
            blob.data[blob.data.size // 3] ^= 1
        if damage != "missing":
            engine.blobs[name] = blob._replace(data=blob.data[:100] if damage == "short" else blob.data)
        said = set()
        for at_once in (None, 1, 3):
            with pytest.raises(CorruptBlockError, match=rf"of segment {last.id} .*{words}.*: restore") as caught:
                loaded(store, at_once=at_once)
            said.add((str(caught.value), caught.value.segment, caught.value.block, caught.value.tables))
        assert [one[1] for one in said] == [last.id]
