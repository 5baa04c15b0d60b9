"""The folders of ranks on other disks belong to one store: a copy never writes to the original's."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.meeting import meet
from tests.dist.sharded_world import TABLES, check_shards, divide_among, sentences, sharding_on, train_on, train_shards
from tests.files import files_of
from tiercache.dist.shard_writer import ShardWriter
from tiercache.store import Cursor, Store, StoreError, StoreInUseError
from tiercache.store.locks import WriterLock
from tiercache.store.rank_folder import note_folders

ENGINES = pytest.mark.parametrize("engine", ["lmdb", "zarr"])
COMMITS = 3


def made(path: Path, disk: Path, **options: Any) -> Path:
    """Make a store of two ranks, the second on another disk; returns its folder."""
    train_on(path, 2, COMMITS, shard_dirs=[path, disk], **options)
    return disk / "rank-1"


def home_of(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / "home.json").read_bytes())
    return found


WRITERS: dict[str, Callable[[Path], list[Any]]] = {
    "a training": lambda path: train_shards(path, 2, 1),
    "other ranks": lambda path: divide_among(path, 3),
    "one rank": lambda path: divide_among(path, 1),
}


@ENGINES
@pytest.mark.parametrize("writer", WRITERS)
def test_a_copy_of_the_store_alone_is_not_trained(tmp_path: Path, writer: str, engine: str) -> None:
    path, copy = tmp_path / "s", tmp_path / "copy"
    folder = made(path, tmp_path / "disk", engine=engine)
    shutil.copytree(path, copy)
    before, held = files_of(folder), WriterLock(folder)  # the original is being trained
    found = WRITERS[writer](copy)
    with pytest.raises(StoreError, match="a copy of that one") as caught:
        Store.open(copy)
    held.release()
    for words in (sentences(found), str(caught.value)):
        assert f"{folder} has rank 1 of the store at {path}, and the store at {copy} is a copy of that one" in words
        assert "pass the copies as shard_dirs=" in words
    assert not any(isinstance(error, StoreInUseError) for error in found)
    assert {name: data for name, data in files_of(folder).items() if name != "writer.lock"} == {
        name: data for name, data in before.items() if name != "writer.lock"
    }
    check_shards(copy, Cursor(1, 5))
    train_on(path, 2, 1, Cursor(2))


@ENGINES
@pytest.mark.parametrize("inside", [False, True])
def test_a_copy_with_its_folders_trains_beside_the_original(tmp_path: Path, engine: str, inside: bool) -> None:
    """Each has separate rows from then on, and is refused in the other's folder. Folders inside the copy are not
    mistaken for the leftovers of a change of ranks.
    """
    path, copy = tmp_path / "s", tmp_path / "copy"
    other = copy if inside else tmp_path / "other"
    folder = made(path, tmp_path / "disk", engine=engine)
    shutil.copytree(path, copy)
    shutil.copytree(folder, other / "rank-1")
    with pytest.raises(StoreError, match="a copy of that one"):
        Store.open(copy)
    before = files_of(folder)
    train_on(copy, 2, 1, Cursor(2), shard_dirs=[copy, other])
    assert files_of(folder) == before
    check_shards(path, Cursor(1, 5))
    train_on(path, 2, 2, Cursor(3))
    train_on(copy, 2, 1, Cursor(3))
    check_shards(path, Cursor(3))
    assert home_of(folder) == {"store": str(path), "folder": str(folder)}
    if not inside:
        assert home_of(other / "rank-1") == {"store": str(copy), "folder": str(other / "rank-1")}
        assert "is a copy of that one" in sentences(train_shards(path, 2, 1, shard_dirs=[path, other]))
    assert "is a copy of that one" in sentences(train_shards(copy, 2, 1, shard_dirs=[copy, tmp_path / "disk"]))


def test_a_store_that_was_moved_goes_on(tmp_path: Path) -> None:
    path, disk = tmp_path / "s", tmp_path / "disk"
    folder = made(path, disk)
    path.rename(tmp_path / "moved")
    train_on(tmp_path / "moved", 2, 1)
    assert home_of(folder) == {"store": str(tmp_path / "moved"), "folder": str(folder)}
    assert train_shards(path, 2, 1) == [None] * 2  # another store
    (tmp_path / "moved").rename(tmp_path / "again")
    path.rename(tmp_path / "moved")
    train_on(tmp_path / "again", 2, 1, Cursor(3))


def test_other_names_of_the_same_store_are_its_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    made(path, tmp_path / "disk")
    (tmp_path / "link").symlink_to(path)
    train_on(tmp_path / "link", 2, 1)
    monkeypatch.chdir(path)
    train_on(Path("../s"), 2, 1)
    check_shards(path, Cursor(3))


def test_a_link_to_another_disk_is_outside_too(tmp_path: Path) -> None:
    """A copy of the store that keeps links names the same folder."""
    path, copy = tmp_path / "s", tmp_path / "copy"
    train_on(path, 2, COMMITS)
    assert not (path / "rank-1" / "home.json").exists()
    (path / "rank-1").rename(tmp_path / "disk")
    (path / "rank-1").symlink_to(tmp_path / "disk")
    train_on(path, 2, 1)
    shutil.copytree(path, copy, symlinks=True)
    before = files_of(tmp_path / "disk")
    assert "is a copy of that one" in sentences(train_shards(copy, 2, 1))
    assert files_of(tmp_path / "disk") == before
    shutil.copytree(path, tmp_path / "whole")
    train_on(tmp_path / "whole", 2, 1, Cursor(3))


def test_an_older_store_gets_its_homes_when_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "s"
    folder = made(path, tmp_path / "disk")
    (folder / "home.json").unlink()
    check_shards(path, Cursor(1, 5))
    assert not (folder / "home.json").exists()
    (folder / "home.json.new").write_bytes(b"{")  # a kill's leftover
    Store.open(path).close()
    assert home_of(folder) == {"store": str(path), "folder": str(folder)}
    assert not (folder / "home.json.new").exists()


def test_a_home_is_written_under_the_lock_of_the_folder(tmp_path: Path) -> None:
    """If the original is gone, one of two copies gets the folder; the other is then refused."""
    path, disk = tmp_path / "s", tmp_path / "disk"
    folder = made(path, disk)
    shutil.copytree(path, tmp_path / "a")
    path.rename(tmp_path / "b")
    held = WriterLock(folder)
    assert isinstance(train_shards(tmp_path / "a", 2, 0)[1], StoreInUseError)
    assert home_of(folder)["store"] == str(path)
    held.release()
    train_on(tmp_path / "b", 2, 0)
    assert "is a copy of that one" in sentences(train_shards(tmp_path / "a", 2, 0))


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"store": 1, "folder": "x"}', b"\xff"])
def test_a_home_that_cannot_be_read_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "s"
    folder = made(path, tmp_path / "disk")
    (folder / "home.json").write_bytes(data)
    assert f"{folder}/home.json, which names the store of the rank, cannot be read" in sentences(
        train_shards(path, 2, 1)
    )
    (folder / "home.json").unlink()
    train_on(path, 2, 1)


def test_a_store_whose_marker_cannot_be_read_is_still_there(tmp_path: Path) -> None:
    path, copy = tmp_path / "s", tmp_path / "copy"
    made(path, tmp_path / "disk")
    shutil.copytree(path, copy)
    (path / "store.json").write_bytes(b"?")
    assert "is a copy of that one" in sentences(train_shards(copy, 2, 1))


def test_folders_that_a_copy_noted_stay(tmp_path: Path) -> None:
    """A copy that was made while ranks changed names folders of the original, which deletes them if they are left."""
    path, copy, disk = tmp_path / "s", tmp_path / "copy", tmp_path / "disk"
    train_on(path, 2, 2)

    def body(ranks: Any) -> None:
        with ShardWriter.open(path, TABLES, sharding_on(3), ranks, resharded=True, shard_dirs=[path, disk, disk]):
            ranks.all_gather_object(None)
            if ranks.rank == 0:
                shutil.copytree(path, copy)
            ranks.all_gather_object(None)
            raise OSError("the machine is gone")

    assert all(isinstance(error, OSError) for error in meet(3, body))
    before = {one: files_of(disk / one) for one in ("rank-1", "rank-2")}
    Store.open(copy).close()
    assert {one: files_of(disk / one) for one in ("rank-1", "rank-2")} == before
    note_folders(copy, [str(disk / "rank-1")])
    train_on(copy, 2, 0)
    assert {one: files_of(disk / one) for one in ("rank-1", "rank-2")} == before
    Store.open(path).close()
    assert [*disk.iterdir()] == []
