"""The map of LMDB: as large as records need, and larger when they grow."""

import os
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.apart import ran
from tests.store.big import BIG, dump, load, publish
from tests.store.damage import assert_sentence
from tiercache.store import LmdbEngine, Store, StoreError, StoreFullError
from tiercache.store.engines import lmdb_engine

TB = 1 << 40


@pytest.mark.parametrize("total", [1 << 30, 16 * TB, 100 * TB, 128 * TB, 1 << 50, (1 << 63) - (1 << 20)])
def test_the_size_of_the_file_system_is_nothing_to_the_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int
) -> None:
    """A store is made and committed on one of any size."""
    told = os.statvfs_result((1 << 20, 1 << 20, total >> 20, total >> 20, total >> 20, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: told)
    with Store.open(tmp_path / "s", tables=[BIG]) as store:
        stored = dump(store, 0, {1: 10})
        publish(store, 1)
        assert store._opened.engine._env.info()["map_size"] < 1 << 30
    with Store.open(tmp_path / "s") as store:
        assert load(store, 1) == {0: stored[1]}


LIMITED = """
import resource, sys
from tests.store.big import BIG, dump, publish
from tiercache.store import Store

status = open("/proc/self/status").read()
used = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmSize"))
limit = used + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
with Store.open(sys.argv[1], tables=[BIG]) as store:
    for pass_index in range(3):
        dump(store, pass_index, {90: 100})
        publish(store, pass_index + 1)
print(store.commit.id)
"""


@pytest.mark.parametrize("more", [512 << 20, 1 << 30, 16 << 30])
def test_a_limit_of_the_address_space_leaves_room_for_records(tmp_path: Path, more: int) -> None:
    """As ``ulimit -v`` sets one, far below the size of the disk."""
    done = ran(LIMITED, tmp_path / "s", more)
    assert (done.stdout, done.stderr) == ("2\n", "")


SIZES = st.integers(0, 90_000)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(st.sampled_from("abcdef"), st.none() | SIZES), min_size=1, max_size=8))
def test_a_map_that_is_too_small_grows_and_loses_nothing(
    tmp_path_factory: pytest.TempPathFactory, steps: list[dict[str, int | None]]
) -> None:
    """In the first commit, which copies all records, and in any other; the whole commit is made again."""
    path, wanted = tmp_path_factory.mktemp("store"), dict[str, bytes]()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lmdb_engine, "_MAP_BYTES", 1 << 16)
        engine = LmdbEngine(path, create=True)
        for number, step in enumerate(steps):
            records = {name: None if size is None else bytes([number + 1]) * size for name, size in step.items()}
            engine.commit(records)
            wanted = {name: data for name, data in (wanted | records).items() if data is not None}
            assert engine.records() == wanted
            if number % 3 == 2:
                engine.close()
                engine = LmdbEngine(path, create=False)
                assert engine.records() == wanted
        engine.close()
    reader = LmdbEngine(path, create=False, readonly=True)
    assert reader.records() == wanted
    reader.close()


def test_records_outgrow_the_map_that_a_writer_begins_with(tmp_path: Path) -> None:
    """As large as it really is."""
    engine, records = LmdbEngine(tmp_path, create=True), dict[str, bytes]()
    for number in range(5):
        records[f"r{number}"] = bytes([number]) * (9 << 20)
        engine.commit({f"r{number}": records[f"r{number}"]})
    assert engine.records() == records
    engine.close()
    engine = LmdbEngine(tmp_path, create=False)
    engine.commit({"r0": None})
    assert engine.records() == {name: data for name, data in records.items() if name != "r0"}
    engine.close()


def test_a_map_that_cannot_grow_is_said_and_the_next_commit_opens_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no full disk: nothing changed, and what is asked for then is done."""
    monkeypatch.setattr(lmdb_engine, "_MAP_BYTES", 1 << 46)
    engine = LmdbEngine(tmp_path, create=True)
    engine.commit({"r": b"1"})

    def full(txn: Any) -> None:
        raise lmdb.MapFullError("full")

    with pytest.raises(StoreError, match=r"cannot be mapped .*: raise ulimit -v") as caught:
        engine._transact(engine._env, full, 0)
    assert not isinstance(caught.value, StoreFullError)
    assert_sentence(caught.value)
    assert engine.records() == {"r": b"1"}
    engine.commit({"s": b"2"})
    assert engine.records() == {"r": b"1", "s": b"2"}
    engine.close()


FULL = """
import resource, signal, sys
from pathlib import Path
from tiercache.store import LmdbEngine, StoreFullError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
engine = LmdbEngine(Path(sys.argv[1]), create=True)
if sys.argv[2] == "later":
    engine.commit({"first": b"1"})
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, limit[1]))
try:
    engine.commit({f"r{i}": bytes(2 << 20) for i in range(4)})
except StoreFullError as error:
    print(error.needed_bytes)
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
engine.commit({"r0": b"2"})
print(sorted(engine.records()))
"""


@pytest.mark.disk
@pytest.mark.parametrize("when", ["first", "later"])
def test_a_full_disk_says_what_the_records_need(tmp_path: Path, when: str) -> None:
    """Not what a commit usually has."""
    done = ran(FULL, tmp_path, when)
    needed, names = done.stdout.splitlines()
    assert int(needed) == 8 << 20, done.stderr
    assert names == str(sorted({"r0"} | ({"first"} if when == "later" else set())))
