"""Loads whose reads and checks are made by one call: as those that are made one by one, in bytes and in errors."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.store.big import dump, places, publish
from tiercache.kernels.file_io import has_reads, read_checked
from tiercache.store import CorruptBlockError, Store
from tiercache.store.reading import Pieces
from tiercache.store.testing.world import World

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.store.conftest import Home
    from tiercache.store import Table
    from tiercache.store.blocks import Part
    from tiercache.store.engine import Source

pytestmark = pytest.mark.skipif(not has_reads(), reason="the kernel is for other systems or processors")

COUNTED = ("row_bytes_read", "rows_read", "reads")


def live(store: Store) -> list[Pieces]:
    """Return what a load of all live ranges asks for."""
    wanted = []
    for segment in store.segments:
        for group, stream in enumerate(segment.streams):
            for index in range(store.first_range(segment, group), len(stream.ranges)):
                low, high = stream.pieces_of(index)
                size = int(stream.piece_offset_P[high] - stream.piece_offset_P[low])
                wanted.append(Pieces(segment, group, low, high, np.zeros(size, np.uint8)))
    return wanted


@pytest.mark.parametrize("at_once", [None, 1, 3])
def test_a_load_by_one_call_is_the_load_one_by_one(home: Home, tables: list[Table], at_once: int | None) -> None:
    """The same bytes, counted alike, on every engine."""
    store = home.open(tables)
    World(store.tables, keys_per_pass=80).run(store, 3)
    found = []
    for reads in (None, read_checked):
        store.read_with(reads)
        before = [getattr(store.counters, name) for name in COUNTED]
        wanted = live(store)
        store.load(wanted, at_once=at_once)
        counted = [getattr(store.counters, name) - b for name, b in zip(COUNTED, before, strict=True)]
        found.append((counted, [pieces.out.tobytes() for pieces in wanted]))
    assert found[0] == found[1]
    assert any(found[0][1])


@pytest.mark.parametrize("damage", ["flipped", "short", "missing"])
def test_damage_is_refused_in_the_same_words(big: Store, damage: str) -> None:
    """A flipped byte, a file cut short while it is open, a block that nobody knows: block and place are named."""
    dump(big, 0, {1: 500, 2: 500})
    dump(big, 1, {2: 300})
    publish(big, 2)
    assert big.path is not None
    file = big.path / "blocks.bin"
    name, at = max((name, place) for name, place in places(big.path).items() if name[:1] == b"r")
    data = file.read_bytes()
    if damage == "flipped":
        with file.open("r+b") as opened:
            opened.seek(at.offset + at.size // 2)
            opened.write(bytes([data[at.offset + at.size // 2] ^ 1]))
    elif damage == "short":
        os.truncate(file, at.offset + 100)
    else:
        del big._engine._places[name]
    said = []
    for reads in (None, read_checked):
        big.read_with(reads)
        with pytest.raises(CorruptBlockError) as caught:
            big.load(live(big))
        said.append((str(caught.value), caught.value.segment, caught.value.block, caught.value.tables))
    assert said[0] == said[1]
    assert said[0][1] == 1


@pytest.mark.parametrize("seen", [-errno.EIO, -errno.EINVAL, 0, 17])
def test_what_one_call_cannot_read_is_read_one_by_one(big: Store, seen: int) -> None:
    """A file system that refuses, or gives less than was asked for, says so to the read that can go on or raise."""
    stored = dump(big, 0, {1: 200, 2: 200})
    publish(big, 1)
    calls = []

    def refused(sources: Sequence[Source], parts: Sequence[Part]) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        done, sums = read_checked(sources, parts)
        calls.append(len(parts))
        parts[-1][0][:] = 1
        done[-1] = seen
        return done, sums

    big.read_with(refused)
    wanted = live(big)
    big.load(wanted)
    assert calls
    assert [pieces.out.tobytes() for pieces in wanted] == [stored[use] for use in sorted(stored)]


def test_an_interrupted_load_leaves_no_call_that_reads(big: Store) -> None:
    """Ctrl-C while several threads read by calls of their own: it comes when none of them is in one any more."""
    dump(big, 0, dict.fromkeys(range(1, 20), 40))
    publish(big, 1)
    reading, begun = [], []

    def interrupting(sources: Sequence[Source], parts: Sequence[Part]) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
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
    assert [pieces.out.tobytes() for pieces in wanted] == [stored[use] for use in sorted(stored)]
