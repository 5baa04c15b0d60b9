"""Specifics of LMDB: runs of the file, interrupts, damaged files, concurrent readers."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.apart import ran
from tests.store.big import dump
from tests.store.big import publish as publish_big
from tests.store.blobs import Content, bytes_of, check, commit_of, drop_all, head_of, plain, publish, put, some_bytes
from tests.store.damage import assert_sentence
from tests.store.test_head import look
from tiercache.store import LmdbEngine, Store
from tiercache.store.engines import block_file, lmdb_engine, lmdb_map
from tiercache.store.engines.engine import Blob, ReadRequest, Stored
from tiercache.store.engines.lmdb_map import Slot, extents_of
from tiercache.store.store_errors import BlockReadError, CorruptStoreError, StoreError, StoreFullError

PAGE_BYTES = 4096
FILES = ("HEAD", "data.mdb", "blocks.bin")
STEPS = 6


READ_ALL = """
import sys
from tiercache.store import Store

with Store.open(sys.argv[1], mode="r") as store:
    list(store.scan("big"))
    print("data.mdb" in open("/proc/self/maps").read())
"""


@pytest.mark.disk
def test_no_reader_has_a_map(big: Store) -> None:
    """So truncating the file is not a signal for it."""
    dump(big, 0, {4: 200})
    publish_big(big, 1)
    big.close()
    assert ran(READ_ALL, big.path).stdout == "False\n"


def made(path: Path) -> list[Content]:
    """Create an engine with a few publishes and a blob in several runs; return its content."""
    engine = LmdbEngine(path, create=True)
    holes = put(engine, [plain(f"states/0.{i}", some_bytes(12_000, i)) for i in range(20)])
    drop_all(engine, holes[::2])
    contents = holes[1::2] + put(engine, [plain("segments/0.0/0/rows", some_bytes(90_000))])
    assert len(extents_of(engine._entries["segments/0.0/0/rows"]).runs) == 8
    for step in range(STEPS):
        contents += publish(engine, step, [plain(f"states/1.{step}", some_bytes(5000, step))])
    engine.close()
    return contents


def test_a_blob_in_many_runs_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its writer and by readers, though its entry is longer than a page of LMDB; also after its front is dropped."""
    monkeypatch.setattr(block_file, "_SPLIT_BYTES", PAGE_BYTES)
    engine = LmdbEngine(tmp_path, create=True)
    small = put(engine, [plain(f"states/0.{i}", some_bytes(10, i)) for i in range(900)])
    drop_all(engine, small[::2])
    (whole,) = put(engine, [plain("segments/0.0/0/rows", some_bytes(440 * PAGE_BYTES), 6 * PAGE_BYTES)])
    assert len(engine._entries[whole.blob.name]) == 440 * 16 + 20
    rest = publish(engine, 0) + small[1::2]
    for number, cut in enumerate((30, 60), start=1):
        engine.drop([(whole.blob.name, cut * PAGE_BYTES)])
        left = whole._replace(pieces={at: data for at, data in whole.pieces.items() if at >= cut * PAGE_BYTES})
        rest += publish(engine, number)
        with closing(LmdbEngine(tmp_path, create=False, readonly=True)) as reader:
            for one in (engine, reader):
                check(one, [left, *rest])
                with pytest.raises(BlockReadError, match=f"lacks its first {cut * PAGE_BYTES:,} bytes"):
                    bytes_of(one, whole.blob, 0, 1)
    engine.close()
    look(tmp_path, [left, *rest], readonly=False)


def test_a_full_file_shows_before_a_part_is_asked_for(tmp_path: Path) -> None:
    """The file is as long as before."""

    def parts() -> Any:
        pytest.fail("a part was asked for")
        yield

    with closing(LmdbEngine(tmp_path, create=True, store_budget=1 << 20)) as engine:
        kept = publish(engine, 0)
        with pytest.raises(StoreFullError, match="raise store_budget"):
            engine.put([Blob("states/0.0", 1 << 20)], parts())
        assert (tmp_path / "blocks.bin").stat().st_size == PAGE_BYTES
        check(engine, kept)


def test_a_name_that_lmdb_cannot_have_is_refused(tmp_path: Path) -> None:
    """Before anything is written; and so is an existing one."""
    with closing(LmdbEngine(tmp_path, create=True)) as engine:
        put(engine, [plain("states/0.0", some_bytes(10))])
        for name in ("head", "", "größe", "x" * 512):
            with pytest.raises(ValueError, match="cannot be named"):
                put(engine, [plain(name, some_bytes(5))])
        with pytest.raises(ValueError, match="put it under another name"):
            put(engine, [plain("states/0.0", some_bytes(10))])
        assert engine.list() == {"states/0.0": Stored(10)}


def test_a_reader_writes_nothing(tmp_path: Path) -> None:
    made(tmp_path)
    with closing(LmdbEngine(tmp_path, create=False, readonly=True)) as engine:
        for call in (
            lambda: engine.put([], []),
            lambda: engine.drop([("states/0.1", None)]),
            lambda: engine.publish(head_of(9), engine.newest()),
        ):
            with pytest.raises(ValueError, match="is open for reading: open it with mode='a'"):
                call()


@pytest.mark.parametrize("where", ["before", "after", "noted"])
def test_an_interrupted_publish_is_done_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Before the transaction, after it, or before HEAD: the engine is at the state of its file."""
    engine = LmdbEngine(tmp_path, create=True)
    kept = publish(engine, 0)
    transact = LmdbEngine._transact

    def interrupted(self: LmdbEngine, *arguments: Any) -> None:
        if where == "after":
            transact(self, *arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(*((Slot, "write") if where == "noted" else (LmdbEngine, "_transact")), interrupted)
        with pytest.raises(KeyboardInterrupt):
            publish(engine, 1)
    kept += [commit_of(1), *put(engine, [plain("states/0.1", some_bytes(10))])]
    assert engine.newest() == head_of(0 if where == "before" else 1)
    if where == "before":
        engine.publish(head_of(1), head_of(0))
    kept += publish(engine, 2)
    check(engine, kept)
    engine.close()
    look(tmp_path, kept)


def test_others_see_the_old_head_while_a_publish_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown state of the commit is not an error."""
    engine = LmdbEngine(tmp_path, create=True)
    publish(engine, 0)
    seen = []

    def looked(*place: Any) -> Any:
        with ThreadPoolExecutor(1) as other:
            seen.append(other.submit(engine.newest).result())
        return lmdb_map.read_head(*place)

    monkeypatch.setattr(lmdb_engine, "read_head", looked)
    publish(engine, 1)
    assert seen == [head_of(0)]
    assert engine.newest() == head_of(1)
    engine.close()


def test_a_publish_that_nobody_can_look_at_stops_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data of a possible newest head is overwritten; opening the store again finds out which it is."""
    engine = LmdbEngine(tmp_path, create=True)
    kept = publish(engine, 0, [plain("states/0.0", some_bytes(5000))])

    def broken(*_: Any) -> None:
        raise CorruptStoreError("the disk broke: mend it")

    with monkeypatch.context() as patched:
        patched.setattr(lmdb_engine, "read_head", broken)
        with pytest.raises(CorruptStoreError, match="the disk broke"):
            publish(engine, 1)
    for call in (
        engine.newest,
        lambda: put(engine, [plain("states/0.1", some_bytes(5000))]),
        lambda: drop_all(engine, kept),
        lambda: engine.publish(head_of(1), head_of(0)),
    ):
        with pytest.raises(StoreError, match=r"could not be read after a publish: .* open the store again"):
            call()
    engine.close()
    with closing(LmdbEngine(tmp_path, create=False)) as engine:
        assert engine.newest() == head_of(1)
        check(engine, kept)
        check(engine, kept + publish(engine, 2))


@pytest.mark.parametrize("readonly", [True, False])
@pytest.mark.parametrize("make", [None, os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused(tmp_path: Path, name: str, make: Any, *, readonly: bool) -> None:
    """A FIFO without a writer would block forever."""
    made(tmp_path)
    (tmp_path / name).unlink()
    if make is not None:
        make(tmp_path / name)
    words = rf"{name} {'is missing' if make is None else 'cannot be read .*'}: restore the store from a copy"
    with pytest.raises(CorruptStoreError, match=words) as caught:
        LmdbEngine(tmp_path, create=False, readonly=readonly)
    assert_sentence(caught.value)


@pytest.mark.parametrize("readonly", [True, False])
def test_missing_permission_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, readonly: bool) -> None:
    made(tmp_path)

    def denied(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(lmdb_map, "open_file", denied)
    with pytest.raises(StoreError, match=r"HEAD cannot be opened .*: grant this user") as caught:
        LmdbEngine(tmp_path, create=False, readonly=readonly)
    assert not isinstance(caught.value, CorruptStoreError)
    assert_sentence(caught.value)


def test_a_file_of_blobs_that_was_cut_short_is_not_made_whole(tmp_path: Path) -> None:
    """It reports which blobs lack bytes; puts are refused until they are dropped, and the file does not grow with
    zeros.
    """
    contents = made(tmp_path)
    path = tmp_path / "blocks.bin"
    whole = path.stat().st_size
    os.truncate(path, whole // 2 + 5)
    for readonly in (True, False):
        engine = LmdbEngine(tmp_path, create=False, readonly=readonly)
        assert engine.newest() == head_of(STEPS - 1)
        short = [one for one in contents if engine.list()[one.blob.name].size < one.blob.size]
        assert 0 < len(short) < len(contents)
        check(engine, [one for one in contents if one not in short])
        for one in short:
            kept = engine.list()[one.blob.name].size
            assert bytes_of(engine, one.blob, 0, kept) == one.pieces[0].tobytes()[:kept]
            with pytest.raises(BlockReadError, match=r"is truncated: blocks.bin ends at byte"):
                engine.read(ReadRequest(one.blob, 0, np.empty(one.blob.size, np.uint8)))
        if not readonly:
            with pytest.raises(CorruptStoreError, match=r"blocks.bin ends at byte .*: restore the store from a copy"):
                put(engine, [plain("states/9.9", some_bytes(10))])
            assert path.stat().st_size <= whole // 2 + 5
            drop_all(engine, short)
            rest = [one for one in contents if one not in short]
            rest += put(engine, [plain("states/9.9", some_bytes(3 << 20))])
            check(engine, rest)
        engine.close()


def test_what_left_the_file_before_a_crash_is_no_damage(tmp_path: Path) -> None:
    """Stale entries are corrected by the next publish: they may refer to bytes beyond the end of the file."""
    engine = LmdbEngine(tmp_path, create=True)
    gone = put(engine, [plain(f"states/0.{i}", some_bytes(100_000, i)) for i in range(4)])
    kept = publish(engine, 0)
    gone = publish(engine, 1, gone[:0]) + gone
    kept += [gone.pop(0)]
    kept += publish(engine, 2, [plain("states/1.0", some_bytes(10))])
    gone += put(engine, [plain("states/2.0", some_bytes(500_000))])
    kept += publish(engine, 3)
    drop_all(engine, gone, shrink=True)
    engine.close()  # without a publish
    engine = LmdbEngine(tmp_path, create=False)
    assert {one.blob.name for one in gone} < engine.list().keys()
    drop_all(engine, gone)
    assert engine.list().keys() == {one.blob.name for one in kept}
    kept += publish(engine, 4, [plain("states/3.0", some_bytes(700_000))])
    check(engine, kept)
    engine.close()
    look(tmp_path, kept, commits=5)


def test_what_a_creation_left_that_was_killed_counts_for_nothing(tmp_path: Path) -> None:
    """Before the first publish, or in its middle; blobs without a head are not overwritten."""
    for _ in range(3):
        with closing(LmdbEngine(tmp_path, create=True)) as engine:
            assert (engine.newest(), engine.list()) == (None, {})
            put(engine, [plain("tables", some_bytes(5000))])
    with closing(LmdbEngine(tmp_path, create=True)) as engine:
        check(engine, publish(engine, 0))
    (tmp_path / "HEAD").unlink()
    with pytest.raises(CorruptStoreError, match=r"has blobs but no HEAD with .*: restore the store from a copy"):
        LmdbEngine(tmp_path, create=True)


def test_a_map_without_room_opens_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first publish reports a full disk; with space, a damaged list of free pages is gone."""
    kept = made(tmp_path)
    path = tmp_path / "data.mdb"
    whole = path.read_bytes()
    usual = LmdbEngine._environment

    def environment(self: LmdbEngine, folder: Path, map_bytes: int) -> Any:
        if folder.name == "fresh":
            raise OSError(errno.ENOSPC, "No space left on device")
        return usual(self, folder, map_bytes)

    with monkeypatch.context() as patched:
        patched.setattr(LmdbEngine, "_environment", environment)
        with closing(LmdbEngine(tmp_path, create=False)) as engine:
            check(engine, kept)
            with pytest.raises(StoreFullError):
                publish(engine, STEPS)
            assert engine.newest() == head_of(STEPS - 1)
    assert path.read_bytes() == whole
    with closing(LmdbEngine(tmp_path, create=False)) as engine:
        for step in range(STEPS, 2 * STEPS):
            kept += publish(engine, step)
        check(engine, kept)


PUBLISH_ON = """
import sys
from pathlib import Path
from tests.store.blobs import drop_all, plain, publish, put
from tests.store.test_lmdb_engine import STEPS, value_of
from tiercache.store import LmdbEngine

number = STEPS
for opened in range(4):
    engine = LmdbEngine(Path(sys.argv[1]), create=False)
    old = []
    for i in range(60):
        new = [plain(f"ranks/{j}.{number}", value_of(number, j)) for j in range(4)]
        new = publish(engine, number, new)
        if number > STEPS + 20:
            drop_all(engine, [plain(f"ranks/{j}.{number - 20}", value_of(0, 0)) for j in range(4)])
        number += 1
    engine.close()
"""


def value_of(number: int, which: int) -> Any:
    return np.frombuffer(f"{number} {which} ".encode() * (900 + number % 7 * 300), np.uint8)


def test_a_reader_in_another_process_sees_whole_publishes_in_order(tmp_path: Path) -> None:
    """Pages are reused during its read, and the file is replaced: it reads again."""
    made(tmp_path)
    writer = subprocess.Popen([sys.executable, "-c", PUBLISH_ON, str(tmp_path)])
    last, running, seen = -1, True, 0
    while running:
        running = writer.poll() is None
        reader = LmdbEngine(tmp_path, create=False, readonly=True)
        for _ in range(20):
            head = reader.newest()
            assert head is not None
            number = int(head.name.rpartition("/")[2])
            assert number >= last
            last = number
            if number >= STEPS:
                for which in range(4):
                    value = value_of(number, which)
                    try:
                        found = bytes_of(reader, Blob(f"ranks/{which}.{number}", value.size), 0, value.size)
                    except BlockReadError:
                        assert int(reader.newest().name.rpartition("/")[2]) >= number + 20  # type: ignore[union-attr]
                    else:
                        assert found == value.tobytes() or reader.newest() != head
                        seen += 1
        stored = reader.list()
        assert stored[f"commits/{last}"].size > 0
        reader.close()
    assert writer.returncode == 0
    assert (last, seen > 40) == (STEPS + 239, True)
