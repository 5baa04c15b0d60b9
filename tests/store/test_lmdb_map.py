"""The map of LMDB: sized for its entries, grown with them, and read in its file without LMDB."""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.apart import ran
from tests.files import flip
from tests.store.blobs import Content, bytes_of, check, drop_all, head_of, plain, publish, put, some_bytes
from tests.store.damage import assert_sentence
from tests.store.test_head import look
from tiercache.store import CorruptStoreError, LmdbEngine, StoreError, StoreFullError
from tiercache.store.engines import lmdb_engine
from tiercache.store.engines.block_file import BlockFile
from tiercache.store.engines.lmdb_map import LmdbFile

TB = 1 << 40


@pytest.mark.parametrize("total", [1 << 30, 16 * TB, 100 * TB, 128 * TB, 1 << 50, (1 << 63) - (1 << 20)])
def test_the_map_ignores_the_size_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int) -> None:
    told = os.statvfs_result((1 << 20, 1 << 20, total >> 20, total >> 20, total >> 20, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: told)
    with closing(LmdbEngine(tmp_path, create=True)) as engine:
        kept = publish(engine, 0)
        assert engine._env.info()["map_size"] < 17 << 20
    look(tmp_path, kept, readonly=False, commits=1)


LIMITED = """
import resource, sys
from pathlib import Path
from tests.store.blobs import Content, check, plain, publish, some_bytes
from tiercache.store import LmdbEngine

status = open("/proc/self/status").read()
used = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmSize"))
limit = used + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
engine, kept = LmdbEngine(Path(sys.argv[1]), create=True), []
for number in range(3):
    kept += publish(engine, number, [plain(f"states/0.{number}", some_bytes(200_000))])
check(engine, kept)
print(engine.newest().name)
"""


@pytest.mark.parametrize("more", [512 << 20, 1 << 30, 16 << 30])
def test_a_limit_of_the_address_space_leaves_room_for_the_map(tmp_path: Path, more: int) -> None:
    """Such as a limit by ``ulimit -v``, far below the size of the disk."""
    done = ran(LIMITED, tmp_path, more)
    assert (done.stdout, done.stderr) == ("commits/2\n", "")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 900)), min_size=1, max_size=7))
def test_a_map_that_is_too_small_grows_and_loses_nothing(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]]
) -> None:
    """In the first publish, which copies all entries, and in any other; the whole publish is repeated."""
    path, contents, number = tmp_path_factory.mktemp("store"), [], 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lmdb_engine, "_MAP_BYTES", 1 << 15)
        engine = LmdbEngine(path, create=True)
        for step, (added, dropped) in enumerate(steps):
            contents += put(engine, [plain(f"states/0.{number + i}", some_bytes(0)) for i in range(added)])
            number += added
            gone, contents = contents[:dropped], contents[dropped:]
            contents += publish(engine, step)
            drop_all(engine, gone)
            if step % 3 == 2:
                engine.close()
                engine = LmdbEngine(path, create=False)
                drop_all(engine, gone)
            assert engine.list().keys() == {one.blob.name for one in contents}
            assert engine.newest() == head_of(step)
        contents += publish(engine, len(steps))
        engine.close()
    look(path, contents, commits=len(steps) + 1)


def test_a_map_without_address_space_is_said_and_opened_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not a full disk: nothing changed, and the next request succeeds."""
    engine = LmdbEngine(tmp_path, create=True)
    kept = publish(engine, 0)

    def full(*_: Any) -> None:
        raise lmdb.MapFullError("full")

    with monkeypatch.context() as patched:
        patched.setattr(lmdb_engine, "_MAP_BYTES", 1 << 50)
        patched.setattr(lmdb_engine.HeadRecord, "to_bytes", full)
        with pytest.raises(StoreError, match=r"cannot be mapped .*: raise ulimit -v") as caught:
            publish(engine, 1)
    assert not isinstance(caught.value, StoreFullError)
    assert_sentence(caught.value)
    assert engine.newest() == head_of(0)
    engine.publish(head_of(1), head_of(0))
    kept += publish(engine, 2)
    check(engine, kept)
    engine.close()


def test_an_interrupt_while_entries_change_leaves_a_whole_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any time, the sum of checksums in the head matches the entries."""
    left = 0

    def interrupted(call: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return call(*arguments)

        return counted

    engine = LmdbEngine(tmp_path, create=True)
    publish(engine, 0)
    for number in range(1, 9):
        blobs = put(engine, [plain(f"states/{number}.{i}", some_bytes(5000)) for i in range(4)])
        with monkeypatch.context() as patched:
            for owner, name in ((lmdb_engine, "extents_of"), (lmdb_engine, "entry_of"), (BlockFile, "give")):
                patched.setattr(owner, name, interrupted(getattr(owner, name)))
            left = number
            with pytest.raises(KeyboardInterrupt):
                engine.drop([*((one.blob.name, 4096) for one in blobs), *((one.blob.name, None) for one in blobs)])
        publish(engine, number)
        with closing(LmdbEngine(tmp_path, create=False, readonly=True)) as reader:
            assert reader.list() == engine.list()
    engine.close()


FULL = """
import resource, signal, sys
from pathlib import Path
from tests.store.blobs import Content, check, head_of, plain, publish, put, some_bytes
from tiercache.store import LmdbEngine, StoreFullError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
engine, number, kept = LmdbEngine(Path(sys.argv[1]), create=True), 0, []
if sys.argv[2] == "later":
    kept, number = publish(engine, 0), 1
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
kept += put(engine, [plain(f"states/{i:0400d}", some_bytes(0)) for i in range(20_000)])
resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, limit[1]))
try:
    publish(engine, number)
except StoreFullError as error:
    print(error.needed_bytes)
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
assert engine.newest() == (head_of(number - 1) if number else None)
engine.publish(head_of(number), engine.newest())
check(engine, kept)
print(engine.newest().name)
"""


@pytest.mark.disk
@pytest.mark.parametrize("when", ["first", "later"])
def test_a_full_disk_says_what_the_map_needs(tmp_path: Path, when: str) -> None:
    done = ran(FULL, tmp_path, when)
    needed, name = done.stdout.splitlines()
    assert int(needed) > 20_000 * 400, done.stderr
    assert name == ("commits/0" if when == "first" else "commits/1")


def test_a_reader_descends_once_for_the_blobs_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged entry among them only prevents reading its blob."""
    with closing(LmdbEngine(tmp_path, create=True)) as engine:
        kept = publish(engine, 0, [plain(f"states/0.{number}", some_bytes(300 + number)) for number in range(20)])
        entry = engine._entries["states/0.7"]

    def read(one: Content) -> None:
        assert bytes_of(engine, one.blob, 0, one.blob.size) == one.pieces[0].tobytes()

    descents: list[bytes] = []
    near = LmdbFile.near
    monkeypatch.setattr(LmdbFile, "near", lambda file, key: descents.append(key) or near(file, key))
    with closing(LmdbEngine(tmp_path, create=False, readonly=True)) as engine:
        descents.clear()
        for one in kept:
            read(one)
        assert len(descents) == 1
    flip(tmp_path / "data.mdb", (tmp_path / "data.mdb").read_bytes().rindex(entry), 4)
    with closing(LmdbEngine(tmp_path, create=False, readonly=True)) as engine:
        for one in kept:
            if one.blob.name != "states/0.7":
                read(one)
                continue
            with pytest.raises(CorruptStoreError, match=r"the entry of blob 'states/0.7' in data\.mdb is not what"):
                read(one)


@pytest.mark.disk
def test_the_file_tells_where_lmdb_has_each_value(tmp_path: Path) -> None:
    """For values of all sizes, in trees of several levels: one after another, and each by its key."""
    generator = np.random.default_rng(0)
    values = {f"{i:05d}".encode(): generator.bytes(int(generator.integers(0, 9000))) for i in range(1500)}
    gone = list(values)[::7]
    with lmdb.open(str(tmp_path), map_size=1 << 26, sync=False) as environment:
        for _ in range(3):
            with environment.begin(write=True) as txn:
                for key, value in values.items():
                    txn.put(key, value)
        for key in gone:
            with environment.begin(write=True) as txn:
                txn.delete(key)
            del values[key]
    with closing(LmdbFile(str(tmp_path / "data.mdb"))) as file:
        found = {value.key: os.pread(file.handle, value.size, value.offset) for value in file.values()}
        assert found == values
        assert list(found) == sorted(values)
        assert {value.key: file.read(value) for value in file.values()} == values
        for key, data in values.items():
            value = file.find(key)
            assert value is not None
            assert file.read(value) == data
        for key in [*gone, b"", b"0", b"99999", b"00000\0", b"zzz"]:
            assert file.find(key) is None


def test_an_empty_tree_has_no_value(tmp_path: Path) -> None:
    """One that was never filled, and one that lost all values."""
    with lmdb.open(str(tmp_path), map_size=1 << 20) as environment:
        for _ in range(2):
            with closing(LmdbFile(str(tmp_path / "data.mdb"))) as file:
                assert (file.find(b"a"), list(file.values())) == (None, [])
            with environment.begin(write=True) as txn:
                txn.put(b"a", b"1")
                txn.delete(b"a")
