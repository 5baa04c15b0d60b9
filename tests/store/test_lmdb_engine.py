"""Specifics of LMDB: runs of the file, interrupts, damaged files, concurrent readers."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.apart import ran
from tests.store.big import dump
from tests.store.big import publish as publish_big
from tests.store.blobs import Content, bytes_of, check, drop_all, head_of, plain, publish, put, some_bytes
from tests.store.damage import assert_sentence
from tiercache.store import LmdbEngine, Store
from tiercache.store.engines import block_file, lmdb_engine, lmdb_map
from tiercache.store.engines.engine import Blob, ReadRequest, Stored
from tiercache.store.engines.lmdb_map import Slot, extents_of
from tiercache.store.store_errors import BlockReadError, CorruptStoreError, StoreError, StoreFullError

PAGE_BYTES = 4096
FILES = ("HEAD", "data.mdb", "blocks.bin")
STEPS = 6


READ_ALL = """
import re, sys
import numpy as np
from tiercache.store import Store

store = Store.open(sys.argv[1], mode="r")
layout = store.segments[0].layouts[0]
out = np.ones(layout.byte_of_page(layout.num_pages), np.uint8)
store.read(store.segments[0], 0, 0, layout.num_pages, out)
print("data.mdb" in open("/proc/self/maps").read())
"""


@pytest.mark.disk
def test_no_reader_has_a_map(big: Store) -> None:
    """So truncating the file is not a signal for it."""
    for pass_index in range(4):
        dump(big, pass_index, {pass_index + 4: 200})
    publish_big(big, 4)
    big.close()
    assert ran(READ_ALL, big.path).stdout == "False\n"


# -- contents and times of writes -----------------------------------------------------------------------------


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


def read(path: Path) -> Any:
    """Return the names of blobs, and some of the blobs; None if the store is refused with an error."""
    try:
        engine = LmdbEngine(path, create=False, readonly=True)
    except StoreError as error:
        assert_sentence(error)
        return None
    try:
        assert engine.newest() == head_of(STEPS - 1)
        found = [bytes_of(engine, Blob(name, 72), 0, 72) for name in ("segments/0.0/0/rows", "commits/0")]
        return found, engine.list()
    except BlockReadError:
        return None
    except StoreError as error:
        assert_sentence(error)
        return None
    finally:
        engine.close()


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
        reader = LmdbEngine(tmp_path, create=False, readonly=True)
        for one in (engine, reader):
            check(one, [left, *rest])
            with pytest.raises(BlockReadError, match=f"lacks its first {cut * PAGE_BYTES:,} bytes"):
                bytes_of(one, whole.blob, 0, 1)
        reader.close()
    engine.close()
    engine = LmdbEngine(tmp_path, create=False)
    check(engine, [left, *rest])
    engine.close()


def test_a_full_file_shows_before_a_part_is_asked_for(tmp_path: Path) -> None:
    """The file is as long as before."""
    engine = LmdbEngine(tmp_path, create=True, store_budget=1 << 20)
    kept = publish(engine, 0)

    def parts() -> Any:
        pytest.fail("a part was asked for")
        yield

    with pytest.raises(StoreFullError, match="raise store_budget"):
        engine.put([Blob("states/0.0", 1 << 20)], parts())
    assert (tmp_path / "blocks.bin").stat().st_size == PAGE_BYTES
    check(engine, kept)
    engine.close()


@pytest.mark.parametrize("name", ["head", "", "größe", "x" * 512])
def test_a_name_that_lmdb_cannot_have_is_refused(tmp_path: Path, name: str) -> None:
    """Before anything is written; and so is an existing one."""
    engine = LmdbEngine(tmp_path, create=True)
    with pytest.raises(ValueError, match="cannot be named"):
        engine.put([Blob(name, 5)], [(0, 0, some_bytes(5))])
    put(engine, [plain("states/0.0", some_bytes(10))])
    with pytest.raises(ValueError, match="put it under another name"):
        put(engine, [plain("states/0.0", some_bytes(10))])
    assert engine.list() == {"states/0.0": Stored(10)}
    engine.close()


def test_a_reader_writes_nothing(tmp_path: Path) -> None:
    """The error says how to open the store for writing."""
    made(tmp_path)
    engine = LmdbEngine(tmp_path, create=False, readonly=True)
    for call in (
        lambda: engine.put([], []),
        lambda: engine.drop([("states/0.1", None)]),
        lambda: engine.publish(head_of(9), engine.newest()),
    ):
        with pytest.raises(ValueError, match="is open for reading: open it with mode='a'"):
            call()
    engine.close()


@pytest.mark.parametrize("where", ["before", "after", "noted"])
def test_an_interrupt_in_a_publish_leaves_what_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
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
    kept += [plain("commits/1", np.frombuffer(b"commit 1" * 9, np.uint8))]
    kept += put(engine, [plain("states/0.1", some_bytes(10))])
    assert engine.newest() == head_of(0 if where == "before" else 1)
    if where == "before":
        engine.publish(head_of(1), head_of(0))
    kept += publish(engine, 2)
    check(engine, kept)
    engine.close()
    reader = LmdbEngine(tmp_path, create=False, readonly=True)
    assert reader.newest() == head_of(2)
    check(reader, kept)
    reader.close()


def test_others_see_the_head_before_while_a_publish_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown state of the commit is not an error."""
    engine = LmdbEngine(tmp_path, create=True)
    put(engine, [plain("states/0.0", some_bytes(5000))])
    publish(engine, 0)
    seen = []

    def looked(*place: Any) -> Any:
        with ThreadPoolExecutor(1) as other:
            seen.append(other.submit(engine.newest).result())
        return lmdb_map.read_head(*place)

    monkeypatch.setattr(lmdb_engine, "read_head", looked)
    put(engine, [plain("states/0.1", some_bytes(5000))])
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
    engine = LmdbEngine(tmp_path, create=False)
    assert engine.newest() == head_of(1)
    check(engine, kept)
    kept += publish(engine, 2)
    check(engine, kept)
    engine.close()


# -- files that are damaged, truncated or of another kind ---------------------------------------------------------


@pytest.mark.parametrize("readonly", [True, False])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused(tmp_path: Path, name: str, make: Callable[[Path], None], *, readonly: bool) -> None:
    """A FIFO without a writer would block forever."""
    made(tmp_path)
    (tmp_path / name).unlink()
    make(tmp_path / name)
    with pytest.raises(CorruptStoreError, match=rf"{name} cannot be read .*: restore the store from a copy") as caught:
        LmdbEngine(tmp_path, create=False, readonly=readonly)
    assert_sentence(caught.value)


@pytest.mark.parametrize("readonly", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_is_refused(tmp_path: Path, name: str, *, readonly: bool) -> None:
    """Each of the three."""
    made(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CorruptStoreError, match=rf"{name} is missing: restore the store from a copy"):
        LmdbEngine(tmp_path, create=False, readonly=readonly)


@pytest.mark.parametrize("readonly", [True, False])
def test_a_file_that_this_user_may_not_open_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, readonly: bool
) -> None:
    """The advice is to grant read permission."""
    made(tmp_path)

    def denied(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(lmdb_map, "open_file", denied)
    with pytest.raises(StoreError, match=r"HEAD cannot be opened .*: grant this user") as caught:
        LmdbEngine(tmp_path, create=False, readonly=readonly)
    assert not isinstance(caught.value, CorruptStoreError)
    assert_sentence(caught.value)


def test_a_map_cut_short_at_any_length_is_refused_or_whole(tmp_path: Path) -> None:
    """It is intact if only free pages were cut off."""
    made(tmp_path)
    expected = read(tmp_path)
    whole = (tmp_path / "data.mdb").read_bytes()
    found = []
    for size in range(0, len(whole), 509):
        (tmp_path / "data.mdb").write_bytes(whole[:size])
        found.append(read(tmp_path))
        assert found[-1] in (None, expected), size
    assert found[0] is None
    assert found.count(None) > len(found) // 2


@pytest.mark.parametrize("bits", [2, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["data.mdb", "HEAD"])
def test_no_flipped_bit_shows_other_blobs(tmp_path: Path, name: str, bits: int) -> None:
    """Some or all bits per byte of headers, nodes, keys and entries, one of others: the same blobs, or an error."""
    made(tmp_path)
    expected = read(tmp_path)
    path = tmp_path / name
    whole, refused = path.read_bytes(), 0
    used = [at for at in range(len(whole)) if whole[at] or at % PAGE_BYTES < 160]
    with path.open("r+b", buffering=0) as file:
        for at in used:
            for bit in range(at, at + bits) if at % PAGE_BYTES < 160 else (at,):
                os.pwrite(file.fileno(), bytes([whole[at] ^ 1 << bit % 8]), at)
                found = read(tmp_path)
                assert found in (None, expected), (at, bit % 8)
                refused += found is None
            os.pwrite(file.fileno(), whole[at : at + 1], at)
    assert refused > 40 if name == "data.mdb" else refused == 0
    assert read(tmp_path) == expected


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
    kept += put(engine, [plain("states/3.0", some_bytes(700_000))])
    kept += publish(engine, 4)
    check(engine, kept)
    engine.close()
    reader = LmdbEngine(tmp_path, create=False, readonly=True)
    check(reader, kept)
    reader.close()


def test_what_a_creation_left_that_was_killed_counts_for_nothing(tmp_path: Path) -> None:
    """Before the first publish, or in its middle; blobs without a head are not overwritten."""
    engine = LmdbEngine(tmp_path, create=True)
    put(engine, [plain("tables", some_bytes(5000))])
    engine.close()
    for _ in range(2):
        engine = LmdbEngine(tmp_path, create=True)
        assert (engine.newest(), engine.list()) == (None, {})
        put(engine, [plain("tables", some_bytes(5000))])
        engine.close()
    engine = LmdbEngine(tmp_path, create=True)
    kept = publish(engine, 0)
    check(engine, kept)
    engine.close()
    (tmp_path / "HEAD").unlink()
    with pytest.raises(CorruptStoreError, match=r"has blobs but no HEAD with .*: restore the store from a copy"):
        LmdbEngine(tmp_path, create=True)


# -- a disk without space for a copy of the map --------------------------------------------------------------------


def test_a_writer_whose_map_has_no_room_opens_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        engine = LmdbEngine(tmp_path, create=False)
        check(engine, kept)
        with pytest.raises(StoreFullError):
            publish(engine, STEPS)
        assert engine.newest() == head_of(STEPS - 1)
        engine.close()
    assert path.read_bytes() == whole
    engine = LmdbEngine(tmp_path, create=False)
    for step in range(STEPS, 2 * STEPS):
        kept += publish(engine, step)
    check(engine, kept)
    engine.close()


# -- a reader next to the writer ----------------------------------------------------------------------------------

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
    """Return a state of a commit."""
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
