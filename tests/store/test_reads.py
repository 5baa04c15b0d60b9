"""Loads whose reads and checks are made by one call: as those that are made one by one, in bytes and in errors."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.files import flip
from tests.store.big import BIG, blocks_of, dump, file_of, publish
from tests.store.world import World
from tiercache.kernels.cpu.file_io import has_reads, read_checked, read_fields
from tiercache.store import CorruptBlockError, Store
from tiercache.store.layout import ROWS
from tiercache.store.reading import Pages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.store.conftest import Home
    from tiercache.store import Table
    from tiercache.store.engines.engine import FieldSource, Read, ReadSource
    from tiercache.store.layout import Part

pytestmark = [
    pytest.mark.disk,
    pytest.mark.skipif(not has_reads(), reason="the kernel is for other systems or processors"),
]

COUNTED = ("row_bytes_read", "rows_read", "reads")


def live(store: Store) -> list[Pages]:
    """Return what a load of all live ranges asks for."""
    wanted = []
    for segment in store.segments:
        for group, layout in enumerate(segment.layouts):
            for index in range(store.snapshot.first_range(segment, group), layout.num_ranges):
                low, high = layout.pages_of_range(index)
                size = layout.byte_of_page(high) - layout.byte_of_page(low)
                wanted.append(Pages(segment, group, low, high, np.zeros(size, np.uint8)))
    return wanted


def counting(store: Store) -> list[int]:
    """Have a store read by calls; returns the sources of each, as they come."""
    calls = list[int]()

    def reads(sources: Sequence[ReadSource], parts: Sequence[Part]) -> Read:
        calls.append(len(sources))
        return read_checked(sources, parts)

    def field_reads(sources: Sequence[FieldSource], parts: Sequence[Part]) -> Read:
        calls.append(len(sources))
        return read_fields(sources, parts)

    store.read_with(reads, field_reads)
    return calls


def checked(store: Store, wanted: Sequence[Pages]) -> None:
    """Compare pages with their checksums, and no more."""
    store.reader.load(wanted, 1, only_check=True)


@pytest.mark.parametrize("at_once", [None, 1, 3])
def test_a_load_by_one_call_is_the_load_one_by_one(home: Home, tables: list[Table], at_once: int | None) -> None:
    """The same bytes, counted alike, on every engine."""
    store = home.open(tables)
    World(store.tables, keys_per_pass=80).run(store, 3)
    found, calls = [], list[int]()
    for by_calls in (False, True):
        if by_calls:
            calls = counting(store)
        before = [getattr(store.counters, name) for name in COUNTED]
        wanted = live(store)
        store.load(wanted, at_once=at_once)
        counted = [getattr(store.counters, name) - b for name, b in zip(COUNTED, before, strict=True)]
        found.append((counted, [pages.out.tobytes() for pages in wanted]))
    assert found[0] == found[1]
    assert any(found[0][1])
    assert (sum(calls) > 0) == (home.kind != "memory")


def test_compressed_rows_are_read_one_by_one_beside_others_by_calls(tmp_path: Path) -> None:
    """On Zarr, where one table is compressed and another is not."""
    tables = [replace(BIG, compression="zstd"), replace(BIG, name="other", dim=3)]
    with Store.open(tmp_path / "s", tables=tables, engine="zarr") as store:
        World(store.tables, keys_per_pass=80).run(store, 3)
        one_by_one, by_calls = live(store), live(store)
        store.load(one_by_one)
        calls = counting(store)
        store.load(by_calls, at_once=1)
        store.load([pages for pages in live(store) if store.groups[pages.group].compression is None], at_once=1)
    assert [pages.out.tobytes() for pages in one_by_one] == [pages.out.tobytes() for pages in by_calls]
    assert sum(calls) > 0


@pytest.mark.parametrize("damage", ["flipped", "short", "missing"])
@pytest.mark.parametrize("kind", ["lmdb", "zarr"])
def test_damage_is_refused_in_the_same_words(tmp_path: Path, kind: str, damage: str) -> None:
    """A flipped byte, a file cut short while it is open, a block that nobody knows: block and place are named."""
    with Store.open(tmp_path / "s", tables=[BIG], engine=kind) as store:
        dump(store, 0, {1: 500, 2: 500})
        dump(store, 1, {2: 300})
        publish(store, 2)
        name = max(name for name in blocks_of(tmp_path / "s") if name[0] == ROWS)
        file, offset, size = file_of(tmp_path / "s", name)
        if damage == "flipped":
            flip(file, offset + size // 3)
        elif damage == "short":
            os.truncate(file, offset + 100)
        elif kind == "lmdb":
            store.segments[-1].places[0][ROWS][name[-1]] = -1
        else:
            file.unlink()
        said, calls = [], list[int]()
        for way in ("one by one", "by calls", "only checked"):
            if way == "by calls":
                calls = counting(store)
            read = partial(checked, store) if way == "only checked" else store.load
            with pytest.raises(CorruptBlockError) as caught:
                read(live(store))
            said.append((str(caught.value), caught.value.segment, caught.value.block, caught.value.tables))
        assert said[0] == said[1] == said[2]
        assert said[0][1] == 1
        assert damage == "missing" or sum(calls) > 0


def test_rows_that_are_only_checked_are_not_brought_together(tmp_path: Path) -> None:
    """Of fields that stand apart all checksums are compared, no memory is touched, and reads fill it as before."""
    with Store.open(tmp_path / "s", tables=[BIG], engine="zarr") as store:
        stored = dump(store, 0, {1: 500, 2: 77})
        publish(store, 1)
        wanted = live(store)
        checked(store, wanted)
        assert store.counters.row_bytes_read == sum(map(len, stored.values()))
        assert not any(pages.out.any() for pages in wanted)
        store.load(wanted)
        assert b"".join(pages.out.tobytes() for pages in wanted) == b"".join(stored.values())


@pytest.mark.parametrize("seen", [-errno.EIO, -errno.EINVAL, 0, 17])
@pytest.mark.parametrize("kind", ["lmdb", "zarr"])
def test_what_one_call_cannot_read_is_read_one_by_one(tmp_path: Path, kind: str, seen: int) -> None:
    """A file system that refuses, or gives less than was asked for, says so to the read that can go on or raise."""
    calls = []

    def refused(read: Callable[..., Read], sources: Sequence[Any], parts: Sequence[Part]) -> Read:
        done, sums = read(sources, parts)
        calls.append(len(parts))
        parts[-1][0][:] = 1
        done[-1] = seen
        return done, sums

    with Store.open(tmp_path / "s", tables=[BIG], engine=kind) as store:
        stored = dump(store, 0, {1: 200, 2: 200})
        publish(store, 1)
        store.read_with(partial(refused, read_checked), partial(refused, read_fields))
        wanted = live(store)
        store.load(wanted)
    assert calls
    assert [pages.out.tobytes() for pages in wanted] == [stored[use] for use in sorted(stored)]


def test_an_interrupted_load_leaves_no_call_that_reads(big: Store) -> None:
    """Ctrl-C while several threads read by calls of their own: it comes when none of them is in one any more."""
    dump(big, 0, dict.fromkeys(range(1, 20), 40))
    publish(big, 1)
    reading, begun = [], []

    def interrupting(sources: Sequence[ReadSource], parts: Sequence[Part]) -> Read:
        reading.append(len(begun))
        begun.append(len(parts))
        if len(begun) == 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.1)  # the main thread has time to go wrong
        found = read_checked(sources, parts)
        reading.pop()
        return found

    big.read_with(interrupting)
    with pytest.raises(KeyboardInterrupt):
        big.load(live(big))
    assert not reading
    assert len(begun) >= 2
    big.read_with(read_checked)
    big.load(live(big))


def test_a_reading_store_reads_by_one_call_too(big: Store, tmp_path: Path) -> None:
    """Whoever opens a store for reading may set what reads."""
    stored = dump(big, 0, {1: 200, 2: 200})
    publish(big, 1)
    big.close()
    with Store.open(tmp_path / "big.tc", mode="r") as store:
        store.read_with(read_checked)
        wanted = live(store)
        store.load(wanted)
    assert [pages.out.tobytes() for pages in wanted] == [stored[use] for use in sorted(stored)]
