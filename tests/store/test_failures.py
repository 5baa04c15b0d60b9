"""Errors on a full disk; and after any failing call, the store is at its last commit."""

import errno
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.store.big import BIG, dump, publish
from tests.store.conftest import engine_of, needed_bytes, small_tables, stored_bytes
from tests.store.failing import Between, FailingEngine
from tests.store.test_alter import check, converted, grown
from tests.store.world import World, WorldUses
from tiercache.store import SGD, Cursor, MemoryEngine, SegmentLayout, Store, StoreFullError, Table, alter, forget
from tiercache.store import rewrite as rewrite_module
from tiercache.store.files import ROOM_FOR_RECORDS, ScratchFile, full_disk, room_for
from tiercache.store.reading import Pages

Leave = Callable[..., None]


def room_of(free: int, files: tuple[int, int] = (0, 0)) -> os.statvfs_result:
    """Return what is told of a file system with this number of free bytes, and of files and free ones."""
    return os.statvfs_result((4096, 1, 1 << 40, free, free, *files, files[1], 0, 255))


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Leave:
    """Return a function that leaves this number of bytes free, on every file system."""
    return lambda *room: monkeypatch.setattr(os, "statvfs", lambda _: room_of(*room))


def numbers(error: StoreFullError) -> list[int]:
    """Return the numbers in a message before its advice: bytes needed, reserved bytes among them, bytes free."""
    found = re.search(r" needs (.*) more bytes, (.*) of them kept free for records, but .* has (.*) free: ", str(error))
    assert found, error
    return [int(number.replace(",", "")) for number in found.groups()]


@pytest.mark.disk
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
@pytest.mark.parametrize("free", [0, 921_600, ROOM_FOR_RECORDS + 4095])
def test_a_dump_needs_more_than_what_is_free(tmp_path: Path, leave: Leave, engine: str, free: int) -> None:
    """Its own bytes may be less: bytes reserved for records are included, and named."""
    with Store.open(tmp_path / "s", tables=[BIG], engine=engine) as store:
        dump(store, 0, {1: 10})
        publish(store, 1)
        leave(free)
        with pytest.raises(StoreFullError, match="the dump of pass 1 to the store at") as full:
            dump(store, 1, {2: 10})
        needed, kept, said = numbers(full.value)
        assert (kept, said) == (ROOM_FOR_RECORDS, free)
        assert needed == full.value.needed_bytes > free
        with pytest.raises(StoreFullError, match="commit 1 of the store at") as full:
            publish(store, 1, bytes(2 << 20))
        assert numbers(full.value)[0] == full.value.needed_bytes > free


@pytest.mark.disk
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_a_dump_with_more_description_than_rows_says_what_it_needs(tmp_path: Path, leave: Leave, engine: str) -> None:
    """30,000 ranges of 26 tables: 3 MB of row counts, for 120 kB of rows."""
    tables, counts = [Table(name=f"t{i}", dim=1, optimizer=SGD()) for i in range(26)], np.zeros((30_000, 26), np.int64)
    counts[:, 0] = 1
    layout = SegmentLayout(
        row_bytes=4, page_rows=10_240, block_bytes=4 << 20, next_use_R=np.arange(30_000) + 100, table_rows_RT=counts
    )
    with Store.open(tmp_path / "s", tables=tables, engine=engine) as store:
        leave(3 << 20)
        with pytest.raises(StoreFullError, match="the dump of pass 0 to the store at") as full:
            store.append(0, [layout], [(0, 0, np.zeros(4 * layout.rows, np.uint8), np.arange(layout.rows))])
        assert full.value.needed_bytes > ROOM_FOR_RECORDS + 4 * counts.size
        assert store.segments == ()
    with Store.open(tmp_path / "s") as store:
        assert stored_bytes(store, "segments") == {}


@pytest.mark.disk
def test_other_causes_than_bytes_are_named(tmp_path: Path, leave: Leave) -> None:
    for code, free, files, words in (
        (errno.ENOSPC, 99, (0, 0), r"needs 100 more bytes but the file system of .* has 99 free: free some"),
        (errno.ENOSPC, 500, (0, 0), r"but the file system of .* was full, but now has 500 free: free some"),
        (errno.ENOSPC, 500, (9, 0), r"but the file system of .* has no room for another file: free some"),
        (errno.EDQUOT, 500, (9, 5), r"but the disk quota of .* is used up: free some"),
    ):
        leave(free, files)
        assert re.search(words, str(full_disk(tmp_path, OSError(code, "full"), 100)))
    with (
        pytest.raises(StoreFullError, match=r"^it needs at least 7 more bytes but"),
        room_for(7, tmp_path / "a", "it", at_least=True),
    ):
        raise OSError(errno.ENOSPC, "full")
    error = full_disk(tmp_path, OSError(errno.ENOSPC, "full"), 1000, kept_bytes=50)
    assert error.needed_bytes == 1050
    assert error.during("a step", 2000).needed_bytes == 2050
    assert error.during("a step", 10).needed_bytes == 1050


@pytest.mark.disk
@pytest.mark.parametrize("retain_segments", [False, True])
def test_a_rewrite_names_its_whole_temporary_files_before_it_reads_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, retain_segments: bool
) -> None:
    """Not more than the bytes it writes there, if there is space. A compaction writes none."""
    world = World(small_tables(), keys_per_pass=60, universe=150)
    monkeypatch.setattr(rewrite_module, "REWRITE_BYTES", 1000)
    written: list[int] = []
    write = ScratchFile.write

    def counted(file: ScratchFile, data: NDArray[np.generic], offset: int) -> None:
        written.append(data.nbytes if "new order" in file._what else 0)
        write(file, data, offset)

    monkeypatch.setattr(ScratchFile, "write", counted)
    with Store.open(tmp_path / "s", tables=world.tables) as store:
        world.run(store, 6)
        keys = [(table.name, key) for table in world.tables for key in range(40)]
        uses = WorldUses(store.tables, dict.fromkeys(keys, 1), slice_keys=7)
        said: list[str] = []
        rewrite = partial(
            store.rewrite, uses, schedule_digest="x", progress=lambda stage, _: said.append(stage),
            retain_segments=retain_segments,
        )  # fmt: skip
        with monkeypatch.context() as patched:
            patched.setattr(os, "statvfs", lambda _: room_of(300))
            words = r"^a new order of the store's rows, with .* eighth .* needs at least [\d,]+ more .* has 300 free"
            with pytest.raises(StoreFullError, match=words) as full:
                rewrite()
        assert not any(written)
        assert "read" not in said
        rewrite()
        assert sum(written) >= full.value.needed_bytes > 300
        written.clear()
        store.compact()
        assert not any(written)


@pytest.mark.disk
def test_a_file_of_unknown_size_needs_at_least_what_is_written_next(tmp_path: Path, leave: Leave) -> None:
    """One of a known size is refused when it is made: a scan that sorts names all rows, not only the next batch."""
    world = World(small_tables(), keys_per_pass=60)
    with Store.open(None, tables=world.tables, engine=MemoryEngine()) as store:
        world.run(store, 5)
        name = world.tables[0].name
        whole = sum(table == name for table, _ in world.rows) * (8 + world.tables[0].row_bytes)
        leave(whole - 1)
        with pytest.raises(StoreFullError, match=rf"needs {whole:,} more bytes but .* has {whole - 1:,} free"):
            list(store.scan(name, memory_bytes=2000))
    leave(1000)
    with ScratchFile(tmp_path, "a test") as file:
        file._file.close()
        file._file = Path("/dev/full").open("r+b", buffering=0)  # noqa: SIM115 - the file closes it
        with pytest.raises(StoreFullError, match=r"a test needs at least 8,000 more bytes but .* has 1,000 free"):
            file.write(np.arange(1000), 0)


@pytest.mark.disk
@pytest.mark.parametrize("code", [errno.EFBIG, errno.EDQUOT, errno.ENOSPC])
def test_a_file_of_marks_that_does_not_fit_is_a_full_disk(
    tmp_path: Path, leave: Leave, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A file system may refuse a size before a byte is written."""

    def refuse(*_: Any) -> None:
        raise OSError(code, "full")

    leave(1000)
    with ScratchFile(tmp_path, "a test") as file, monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", refuse)
        with pytest.raises(StoreFullError, match=r"^a test needs (at least )?5,000 more bytes"):
            file.extend(5000)


class CableError(OSError):
    """The error of a test."""


@pytest.mark.parametrize("kind", ["memory", "lmdb", "zarr"])
def test_whatever_call_fails_the_step_can_be_tried_again(kind: str, tables: list[Table], tmp_path: Path) -> None:
    """The commit, its rows and its state stay, and at the end no blob is left over."""
    engine = FailingEngine(engine_of(kind, tmp_path), error=CableError)
    world = World(tables, keys_per_pass=6, universe=10)
    with Store.open(None, tables=tables, engine=engine, retention=2) as store:
        world.run(store, 3)
        engine.fail_in(1)
        with pytest.raises(CableError):
            world.check_load(store, 3)
        world.check_load(store, 3)
        world.train()
        state = bytes(5_000_000)

        def publish_next() -> None:
            """Commit with another state in each try."""
            nonlocal state
            state = state[1:]
            world.pass_index = 4
            store.publish(Cursor(4), state=state, schedule_digest="cyclic", settings={}, environment={})

        def seen() -> Any:
            return store.commit, store.state(), [store.live_rows(table.name) for table in store.tables]

        forgotten, altered = [("item", key) for name, key in world.rows if name == "item"][:3], grown(tables)
        for name, step in (
            ("pin", lambda: store.pin("best")),
            ("pin another", lambda: store.pin("first", 1)),
            ("unpin", lambda: store.unpin("first")),
            ("dump", lambda: world.append(store)),
            ("rollback", lambda: store.rollback(store.commit.id)),
            ("dump again", lambda: world.append(store)),
            ("publish", publish_next),
            ("compact", store.compact),
            ("alter", lambda: alter(store, altered)),
            ("forget", lambda: forget(store, "item", np.array([key for _, key in forgotten]))),
        ):
            for calls in itertools.count(1):
                before = seen()
                engine.fail_in(calls)
                try:
                    step()
                    break
                except CableError:
                    engine.fail_in(None)
                    # after its commit, a forget reads which older commits list the rows
                    is_done = name == "forget" and store.commit.id == before[0].id + 1
                    assert is_done or seen() == before, (name, calls)
            engine.fail_in(None)
            assert calls > 1, f"nothing of {name} failed"
        rows = converted(world.rows, tables, altered)
        check(store, {key: row for key, row in rows.items() if key not in forgotten})
        assert store.state() == state
        assert stored_bytes(store) == needed_bytes(store)


@pytest.mark.parametrize("interruptions", [1, 2])
def test_an_interrupted_load_leaves_nothing_that_is_being_read(interruptions: int) -> None:
    """Ctrl-C, pressed once or twice while threads read: when it is raised, no thread uses the caller's memory."""
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
                time.sleep(0.1)  # time for the other thread to fail

        engine.in_reads(2, interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.load(wanted)
        assert engine.reading == 0
        assert engine.reached
        store.load(wanted)
        whole = np.empty(byte(segment.layouts[0].num_pages), np.uint8)
        store.read(segment, 0, 0, segment.layouts[0].num_pages, whole)
        assert np.array_equal(np.concatenate([pages.out for pages in wanted]), whole)
