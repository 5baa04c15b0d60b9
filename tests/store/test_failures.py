"""Whatever call fails, the store is at its last commit."""

import copy
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.conftest import engine_of, held_blocks, small_tables
from tests.store.failing import Between, FailingEngine, KilledError, SlowEngine
from tests.store.world import World
from tiercache.store import Cursor, MemoryEngine, Store, StoreFullError, Table
from tiercache.store.blocks import STATE
from tiercache.store.engine import Block
from tiercache.store.reading import Pages


@pytest.mark.parametrize("kind", ["memory", "lmdb", "zarr"])
@pytest.mark.parametrize("lasting", [False, True])
def test_any_failing_write_or_commit_leaves_the_last_commit(
    kind: str, lasting: bool, tables: list[Table], tmp_path: Path
) -> None:
    """Each call of a dump and its commit in turn: the error comes out, the store can be closed and read on, and
    opened again it stands where it stood; what is tried again then works.
    """
    inner = engine_of(kind, tmp_path)
    store, world = Store.open(None, tables=tables, engine=inner), World(tables)
    world.run(store, 3)
    call = 0
    while True:
        call += 1
        before = copy.deepcopy(world)
        engine = FailingEngine(inner, verbs=("write", "commit"), lasting=lasting)
        store.close()
        if kind != "memory":
            engine.engine = inner = engine_of(kind, tmp_path, create=False)
        store = Store.open(None, engine=engine)
        world.check(store, after=world.pass_index - 1)
        assert store.commit.cursor == Cursor(world.pass_index, 0)
        assert store.state() == f"state at {world.pass_index}, 0".encode()
        engine.fail_in(call)
        try:
            world.train()
            world.append(store)
            world.pass_index += 1
            world.publish(store)
        except StoreFullError:
            world = before
            engine.fail_in(None)
            if call % 2:
                store.discard_uncommitted()
                world.check(store, after=world.pass_index - 1)
        else:
            break
    assert call == 4
    world.check(store, after=world.pass_index - 1)
    store.close()


@pytest.mark.parametrize("kind", ["memory", "lmdb", "zarr"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_commit_can_be_tried_again(kind: str, call: int, tables: list[Table], tmp_path: Path) -> None:
    """After it failed while its state was written, or at the very end, with another state."""
    engine = FailingEngine(engine_of(kind, tmp_path))
    store, world = Store.open(None, tables=tables, engine=engine), World(tables)
    world.run(store, 2)
    plain: dict[str, Any] = {"schedule_digest": "", "settings": {}, "environment": {}}
    engine.fail_in(call)
    with pytest.raises(StoreFullError, match="commit 2 of the store in memory needs"):
        store.publish(Cursor(2, 0), state=b"x" * 9_000_000, **plain)
    assert store.state() == b"state at 2, 0"
    store.publish(Cursor(2, 0), state=b"y" * 5_000_000, **plain)
    assert store.state() == b"y" * 5_000_000
    assert sum(name[0] == STATE for name in held_blocks(store)) == 2
    world.check(store, after=1)
    store.close()


def test_a_failing_read_is_raised_where_it_happened(tables: list[Table]) -> None:
    """The next one works again."""
    engine = FailingEngine(MemoryEngine(), verbs=("read",), error=lambda: OSError("the cable"))
    store, world = Store.open(None, tables=tables, engine=engine), World(tables)
    world.run(store, 1)
    engine.fail_in(1)
    with pytest.raises(OSError, match="the cable"):
        world.check_load(store, 1)
    assert engine.failed == 1
    world.check_load(store, 1)


def test_a_slow_engine_changes_nothing_but_the_time(tables: list[Table]) -> None:
    """Reads on another thread while the writer waits give the same bits."""
    store = Store.open(None, tables=tables, engine=SlowEngine(MemoryEngine(), write_seconds=0.01, read_seconds=1e-4))
    world = World(tables)
    world.run(store, 2)
    before = copy.deepcopy(world)
    world.train()
    writer = threading.Thread(target=world.append, args=(store,))
    writer.start()
    before.check_load(store, 2)
    writer.join()
    world.pass_index += 1
    world.publish(store)
    world.check(store, after=2)


def test_a_torn_write_ends_the_process_as_far_as_its_engine_goes() -> None:
    """A part of the blocks arrives, and of one of them a part; then nothing is answered any more."""
    inner = MemoryEngine()
    engine = FailingEngine(inner)
    engine.tear(1, 3)
    with pytest.raises(KilledError):
        engine.write([(Block(STATE, 0, 0, i, 5), np.full(5, i, np.uint8)) for i in range(3)])
    for call in (lambda: engine.write([]), lambda: engine.commit({}), engine.records):
        with pytest.raises(KilledError, match="open the engine again"):
            call()
    assert {index: data.size for (*_, index), data in inner.blocks.items()} == {0: 5, 1: 3}


@pytest.mark.parametrize("interruptions", [1, 2])
def test_an_interrupted_load_leaves_nothing_that_is_being_read(interruptions: int) -> None:
    """Ctrl-C, pressed once or twice while threads read: the memory is the caller's when the interruption comes."""
    engine = Between(MemoryEngine())
    with Store.open(None, tables=small_tables(), engine=engine) as store:
        World(store.tables, keys_per_pass=80).run(store, 1)
        segment = store.segments[0]
        byte = segment.layouts[0].byte_of_page
        wanted = [
            Pages(segment, 0, i, i + 1, np.zeros(byte(i + 1) - byte(i), np.uint8))
            for i in range(segment.layouts[0].num_pages)
        ]

        def interrupt() -> None:
            for _ in range(interruptions):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                time.sleep(0.1)  # the other thread has time to go wrong

        engine.in_reads(2, interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.load(wanted)
        assert engine.reading == 0
        assert engine.reached
        store.load(wanted)
        data = np.concatenate([pages.out for pages in wanted])
        whole = np.empty_like(data)
        store.read(segment, 0, 0, segment.layouts[0].num_pages, whole)
        assert np.array_equal(data, whole)
