"""Leases: what readers hold, whoever they are, and what the writer frees when they are gone."""

import multiprocessing
import os
import subprocess
from pathlib import Path

import pytest

from tests.apart import command
from tests.store.big import BIG, dump, load, publish
from tests.store.conftest import held_blocks
from tiercache.store import CommitMissingError, Store, StoreFullError
from tiercache.store.leases import Lease, leased_commits


@pytest.fixture(params=["lmdb", "zarr"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store with a commit."""
    made = Store.open(tmp_path / "s", tables=[BIG], engine=request.param)
    dump(made, 0, {1: 200, 9: 100})
    publish(made, 1)
    return made


def go_on(store: Store, passes: range) -> None:
    """Dump and commit."""
    for pass_index in passes:
        dump(store, pass_index, {pass_index + 1: 200})
        publish(store, pass_index + 1)


def test_what_a_reader_sees_stays_until_it_is_closed(store: Store) -> None:
    """Whatever is committed, and when the writer is opened again; then the next commit frees it."""
    assert store.path is not None
    reader = Store.open(store.path, mode="r")
    stored = load(reader, 1)
    go_on(store, range(1, 4))
    assert load(reader, 1) == stored
    assert [commit.id for commit in store.commits] == [3]
    more = len(held_blocks(store))
    store.close()
    with Store.open(store.path) as again:
        assert load(reader, 1) == stored
        assert len(held_blocks(again)) == more
        go_on(again, range(4, 6))
        assert load(reader, 1) == stored
        reader.close()
        go_on(again, range(6, 7))
        assert len(held_blocks(again)) < more
        assert leased_commits(store.path / "leases") == set()


def test_a_commit_that_only_its_readers_keep_is_opened_by_no_other(store: Store) -> None:
    """Its record is there for as long as they read; its blocks go when they end, before the next commit."""
    assert store.path is not None
    reader = Store.open(store.path, mode="r")
    go_on(store, range(1, 3))
    for _ in range(2):
        with pytest.raises(CommitMissingError, match="has no commit 0: give one of 2"):
            Store.open(store.path, mode="r", commit=0)
        if not reader.closed:
            assert list(reader.at(0).scan("big"))  # who reads it opens it again
        reader.close()
        dump(store, 3 + len(store.segments), {9: 200})  # over the blocks of that commit
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(20):
        Store.open(store.path, mode="r").close()
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    store.close()


def test_a_reader_that_was_killed_holds_nothing(store: Store) -> None:
    """Its lock went with it."""
    code = """
import sys
from tiercache.store import Store
with Store.open(sys.argv[1], mode="r"):
    print(1, flush=True)
    input()
"""
    assert store.path is not None
    with subprocess.Popen(command(code, store.path), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        assert leased_commits(store.path / "leases") == {0}
        go_on(store, range(1, 3))
        before = len(held_blocks(store))
        process.kill()
    go_on(store, range(3, 4))
    assert len(held_blocks(store)) < before
    assert not any((store.path / "leases").iterdir())
    store.close()


def test_a_lease_is_of_its_process_and_not_of_a_fork(store: Store) -> None:
    """A child that lives on keeps nothing."""
    assert store.path is not None
    reader = Store.open(store.path, mode="r")
    ours, theirs = multiprocessing.get_context("fork").Pipe()

    def stay() -> None:
        theirs.send("here")
        theirs.recv()

    child = multiprocessing.get_context("fork").Process(target=stay)
    child.start()
    assert ours.recv() == "here"
    assert leased_commits(store.path / "leases") == {0}
    reader.close()
    assert leased_commits(store.path / "leases") == set()
    ours.send(None)
    child.join()
    store.close()


def test_a_lease_that_comes_when_its_commit_goes_is_seen_or_refused(tmp_path: Path) -> None:
    """The file of one that the writer just deleted is made again; what is no lease is let alone."""
    folder = tmp_path / "leases"
    first, second = Lease.take(folder, 3), Lease.take(folder, 3)
    assert first is not None
    assert second is not None
    (folder / "note.txt").touch()
    os.mkfifo(folder / "7")
    first.release()
    assert leased_commits(folder) >= {3}
    second.release()
    second.release()
    assert leased_commits(folder) == set()
    assert [path.name for path in folder.iterdir()] == ["note.txt"]
    (tmp_path / "file").touch()
    assert Lease.take(tmp_path / "file", 1) is None


def test_a_writer_that_readers_leave_no_room_says_so(tmp_path: Path) -> None:
    """With the bytes that they hold."""
    with Store.open(tmp_path / "s", tables=[BIG], store_budget=3 << 20) as store:
        dump(store, 0, {1: 500})
        publish(store, 1)
        with Store.open(tmp_path / "s", mode="r"):
            dump(store, 1, {2: 500})
            publish(store, 2)
            with pytest.raises(StoreFullError, match=r"readers of older commits hold 1,0\d\d,\d{3} bytes: close them"):
                dump(store, 2, {3: 500})
        dump(store, 2, {3: 500})
        publish(store, 3)
