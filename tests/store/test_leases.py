"""Leases: commits that readers hold, in any process, and the data that the writer frees afterwards."""

import multiprocessing
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.apart import command, ran
from tests.files import flipped
from tests.store.big import BIG, dump, load, publish
from tests.store.conftest import held_blocks
from tests.store.reader import READER
from tiercache.store import CommitMissingError, CorruptBlockError, Store, StoreFullError, load_rows, verify
from tiercache.store.compaction_plan import NoUses
from tiercache.store.engines.engine import Head
from tiercache.store.locks import Lease, leased_commits


@pytest.fixture(params=["lmdb", "zarr"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "s", tables=[BIG], engine=request.param) as made:
        dump(made, 0, {1: 200, 9: 100})
        publish(made, 1)
        yield made


def go_on(store: Store, passes: range) -> None:
    for pass_index in passes:
        dump(store, pass_index, {pass_index + 1: 200})
        publish(store, pass_index + 1)


def rows_of(store: Store) -> dict[int, list[bytes]]:
    return {
        key: [values[i].tobytes() for values in fields]
        for keys, fields in store.scan("big")
        for i, key in enumerate(keys.tolist())
    }


def test_what_a_reader_sees_stays_until_it_is_closed(store: Store) -> None:
    """Whatever is committed, and when the writer is opened again; then the next commit frees it."""
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
    """Its record exists while they read; its blocks are freed when they end, before the next commit."""
    reader = Store.open(store.path, mode="r")
    go_on(store, range(1, 3))
    for _ in range(2):
        with pytest.raises(CommitMissingError, match="has no commit 0: pass one of 2"):
            Store.open(store.path, mode="r", commit=0)
        if not reader.closed:
            assert list(reader.at(0).scan("big"))  # its reader can open it again
        reader.close()
        dump(store, 3 + len(store.segments), {9: 200})  # over the blocks of that commit
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(20):
        Store.open(store.path, mode="r").close()
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def import_rows(store: Store) -> None:
    (keys, fields), *_ = store.scan("big", chunk_rows=5)
    load_rows(store, [("big", (keys, tuple(fields)))])


GIVING_UP: dict[str, Callable[[Store], object]] = {
    "publish": lambda store: go_on(store, range(1, 2)),
    "compact": lambda store: store.compact(),
    "rewrite": lambda store: store.rewrite(NoUses(), schedule_digest="new"),
    "import": import_rows,
    "rollback": lambda store: store.rollback(0),
    "publish twice": lambda store: go_on(store, range(1, 3)),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("give_up", GIVING_UP.values(), ids=GIVING_UP.keys())
def test_a_lease_that_comes_while_its_commit_is_given_up_holds(
    store: Store, monkeypatch: pytest.MonkeyPatch, give_up: Callable[[Store], object]
) -> None:
    """Taken while the writer publishes the commit that drops it; later writers also know it."""
    readers: list[Store] = []
    engine = store._opened.engine
    publish_ = engine.publish

    def late(head: Head, before: Head | None) -> None:
        if not readers:
            readers.append(Store.open(store.path, mode="r"))
        publish_(head, before)

    stored = rows_of(store)
    monkeypatch.setattr(engine, "publish", late)
    give_up(store)
    (reader,) = readers
    assert [one.id for one in reader.commits] == [0]
    assert 0 not in [one.id for one in store.commits]
    store.close()
    for passes in (range(3, 5), range(5, 6)):
        with Store.open(store.path) as again:
            go_on(again, passes)
            assert rows_of(reader) == stored
    reader.close()
    with Store.open(store.path) as again:
        go_on(again, range(6, 7))
        assert not {"commits/0", "ranks/0.0", "states/0.0"} & again._opened.engine.list().keys()
    assert verify(store.path)["problems"] == []


def test_a_reader_that_was_killed_holds_nothing(store: Store) -> None:
    with subprocess.Popen(command(READER, store.path), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline().startswith(b"0 ")
        assert leased_commits(store.path / "leases") == {0}
        go_on(store, range(1, 3))
        before = len(held_blocks(store))
        process.kill()
    go_on(store, range(3, 4))
    assert len(held_blocks(store)) < before
    assert not any((store.path / "leases").iterdir())


def test_a_lease_is_of_its_process_and_not_of_a_fork(store: Store) -> None:
    """A surviving child keeps nothing."""
    reader, fork = Store.open(store.path, mode="r"), multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=lambda: (theirs.send("here"), theirs.recv()))
    child.start()
    assert ours.recv() == "here"
    assert leased_commits(store.path / "leases") == {0}
    reader.close()
    assert leased_commits(store.path / "leases") == set()
    ours.send(None)
    child.join()


def test_a_lease_that_comes_when_its_commit_goes_is_seen_or_refused(tmp_path: Path) -> None:
    """If the writer just deleted the file, it is created again; other files are not touched."""
    folder = tmp_path / "leases"
    first, second = Lease.take(folder, 3), Lease.take(folder, 3)
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


@pytest.mark.parametrize("retaken", [False, True])
@pytest.mark.parametrize("deleted", [False, True])
def test_a_lease_of_a_store_that_is_elsewhere_deletes_no_other(tmp_path: Path, *, deleted: bool, retaken: bool) -> None:
    """Its folder was moved, or its file deleted; the lease at its path may belong to a reader of another store."""
    folder = tmp_path / "leases"
    lease, other = Lease.take(folder, 3), None
    if deleted:
        (folder / "3").unlink()
    else:
        folder.rename(tmp_path / "away")
    if retaken:
        other = Lease.take(folder, 3)
    lease.release()
    assert leased_commits(folder) == ({3} if retaken else set())
    assert not (tmp_path / "away" / "3").exists() or leased_commits(tmp_path / "away") == set()
    if other is not None:
        other.release()
    assert leased_commits(folder) == set()


def test_a_writer_that_readers_leave_no_room_says_so(tmp_path: Path) -> None:
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


# -- on a file system that is mounted read-only for the reader, which the writer does not see ------------------

GO_ON = """
import sys
from tests.store.test_leases import go_on
from tiercache.store import Store

with Store.open(sys.argv[1]) as store:
    go_on(store, range(1, 5))
"""


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """The folder ``home`` once more, read-only."""
    home, there = tmp_path / "home", tmp_path / "there"
    home.mkdir()
    there.mkdir()

    def mount(*options: str) -> None:
        try:
            subprocess.run(["mount", *options, str(home), str(there)], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("mounting is not permitted here")

    mount("--bind")
    try:
        mount("-o", "remount,ro,bind")
        yield there
    finally:
        subprocess.run(["umount", str(there)], check=True)


@pytest.mark.sampled(1)
@pytest.mark.disk
@pytest.mark.parametrize("kind", ["lmdb", "zarr"])
def test_a_reader_that_was_left_behind_is_told_so_and_not_of_damage(tmp_path: Path, mounted: Path, kind: str) -> None:
    """Once its commit is gone, the store is intact, and can be opened again. Before that, damage is damage."""
    home, there = tmp_path / "home" / "s", mounted / "s"
    with Store.open(home, tables=[BIG], engine=kind) as store:
        stored = dump(store, 0, {1: 200, 9: 100})
        publish(store, 1)
    (file,) = [home / "blocks.bin"] if kind == "lmdb" else home.glob("segments/*/0/vector*/c.0.0")
    with Store.open(there, mode="r") as reader:
        assert load(reader, 1) == {0: stored[1]}
        with flipped(file, 5000), pytest.raises(CorruptBlockError):
            load(reader, 1)
        assert ran(GO_ON, home).returncode == 0  # LMDB is opened once per process
        with pytest.raises(CommitMissingError, match="was opened at commit 0, which its writer has dropped since"):
            load(reader, 1)
    assert verify(there)["problems"] == []
    with Store.open(there, mode="r") as reader:
        assert load(reader, 9) == {0: stored[9]}
