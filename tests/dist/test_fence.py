"""The fence of several ranks: a sharded store that is not in its place any more is written by none of them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.meeting import meet
from tests.dist.sharded_world import check_shards, opened, sentences, take, train_shards
from tests.files import files_of
from tiercache.store import Cursor, Store, StoreError, StoreInUseError, verify

KINDS = pytest.mark.parametrize("engine", ["lmdb", "zarr"])


def a_backup(path: Path) -> None:
    """Move the folder away and put a copy in its place."""
    path.rename(path.with_name("away"))
    shutil.copytree(path.with_name("away"), path)


def another_store(path: Path) -> None:
    """Or another store."""
    path.rename(path.with_name("away"))
    path.with_name("other").rename(path)


def gone(path: Path) -> None:
    """Or nothing."""
    path.rename(path.with_name("away"))


def no_lock(path: Path) -> None:
    """Delete the lock of the ranks as stale."""
    (path / "ranks.lock").unlink()


def a_new_lock(path: Path) -> None:
    """And have another process make one."""
    no_lock(path)
    (path / "ranks.lock").write_text("7\n")


def trained(path: Path, engine: str, between: Callable[[Path], None]) -> list[Any]:
    """Train two commits on two ranks, do something to the store, and try another; return what each rank raised."""

    def body(ranks: Any) -> None:
        shards, world = opened(path, ranks, engine=engine)
        with shards:
            for _ in range(2):
                take(shards, world)
            ranks.all_gather_object(None)
            if ranks.rank == 0:
                between(path)
            ranks.all_gather_object(None)
            take(shards, world)

    return meet(2, body)


@KINDS
@pytest.mark.parametrize("change", [a_backup, another_store, gone, no_lock, a_new_lock])
def test_ranks_whose_store_was_moved_write_nothing_there(
    tmp_path: Path, engine: str, change: Callable[[Path], None]
) -> None:
    """All of them end with an error; what stands at the path, and where the store went, opens at its commit."""
    path, held = tmp_path / "s", dict[str, bytes]()
    assert train_shards(tmp_path / "other", 2, 4, engine=engine) == [None] * 2

    def between(path: Path) -> None:
        change(path)
        held.update(files_of(path) if path.exists() else {})

    errors = trained(path, engine, between)
    assert "was moved, replaced or deleted while it was written" in sentences(errors)
    if change in {a_backup, another_store}:
        assert files_of(path) == held
    for folder in (path, tmp_path / "away"):
        if folder.exists():
            assert verify(folder)["problems"] == []
    check_shards(tmp_path / "away" if change in {a_backup, another_store, gone} else path, Cursor(1))


@KINDS
@pytest.mark.parametrize("change", ["another store's", "none", "an older one"])
def test_a_manifest_that_something_else_wrote_is_not_replaced(tmp_path: Path, engine: str, change: str) -> None:
    """It may be all that says which commits belong together: what stands there stays, and no rank goes on."""
    path, kept = tmp_path / "s", list[bytes]()
    assert train_shards(tmp_path / "other", 2, 4, engine=engine) == [None] * 2
    assert train_shards(path, 2, 2, engine=engine) == [None] * 2
    older = (path / "shards.json").read_bytes()

    def between(path: Path) -> None:
        there = path / "shards.json"
        if change == "none":
            there.unlink()
            return
        there.write_bytes(older if change == "an older one" else (tmp_path / "other" / "shards.json").read_bytes())
        kept.append(there.read_bytes())

    assert "is not what this training wrote" in sentences(trained(path, engine, between))
    there = path / "shards.json"
    assert [there.read_bytes()] == kept if kept else not there.exists()


@KINDS
def test_shards_keep_out_a_second_training_whose_lock_was_deleted(tmp_path: Path, engine: str) -> None:
    """Each is locked by its own marker, too."""
    refused: list[BaseException] = []

    def second(path: Path) -> None:
        for lock in path.rglob("*.lock"):
            lock.unlink()
        try:
            Store.open(path)
        except StoreError as error:
            refused.append(error)

    trained(tmp_path / "s", engine, second)
    assert isinstance(refused[0], StoreInUseError)
    assert verify(tmp_path / "s")["problems"] == []
    check_shards(tmp_path / "s", Cursor(1))
