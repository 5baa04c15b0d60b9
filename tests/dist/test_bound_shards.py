"""A commit binds its ranks' contents: those of another run, rank or moment are refused at opening."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.dist import sharded_world
from tests.dist.sharded_world import check_shards, sentences, train_on, train_shards
from tests.store.independent_reader import read_store
from tiercache.store import CorruptStoreError, Cursor, Store, StoreError, Table, verify
from tiercache.store.opening import newest_record

LISTS = (
    r"ranks/1\.\d of the store at .*rank-1 (is not what was written|is missing.*|ends at byte .*|is incomplete: .*): "
    "restore the store from a copy"
)


def take_from(other: Path, path: Path, rank: int = 1, as_rank: int = 1) -> None:
    """Replace a rank's folder by another store's rank; the marker, which identifies it, stays."""
    folder = path / f"rank-{as_rank}"
    marker = (folder / "store.json").read_bytes()
    shutil.rmtree(folder)
    shutil.copytree(other / f"rank-{rank}", folder)
    (folder / "store.json").write_bytes(marker)


def another_rank(path: Path, _patch: pytest.MonkeyPatch, _engine: str) -> None:
    shutil.copytree(path, path.parent / "twin")
    take_from(path.parent / "twin", path, 2, 1)
    take_from(path.parent / "twin", path, 1, 2)


def a_compacted_fork(path: Path, _patch: pytest.MonkeyPatch, _engine: str) -> None:
    """Compact a copy where the store was rolled back: the same rows at the same ids, in other segments."""
    shutil.copytree(path, path.parent / "fork")
    with Store.open(path) as store, Store.open(path.parent / "fork") as fork:
        assert store.rollback(store.commit.id).id == fork.compact().id
    take_from(path.parent / "fork", path)


def one_row(path: Path, patch: pytest.MonkeyPatch, engine: str) -> None:
    """Take the rank of a run in which one number of the last pass differs."""
    plain = sharded_world.whole_row

    def row(table: Table, key: int, pass_index: int, half: int) -> Any:
        fields = plain(table, key, pass_index, half)
        fields[0][0, -1] += pass_index == 1
        return fields

    patch.setattr(sharded_world, "whole_row", row)
    train_on(path.parent / "twin", 3, 4, engine=engine, retention=2)
    take_from(path.parent / "twin", path)


def another_state(path: Path, patch: pytest.MonkeyPatch, engine: str) -> None:
    plain = Store.publish

    def publish(store: Store, cursor: Cursor, **options: Any) -> Any:
        return plain(store, cursor, **options | {"state": options["state"].upper()})

    patch.setattr(Store, "publish", publish)
    train_on(path.parent / "twin", 3, 4, engine=engine, retention=2)
    take_from(path.parent / "twin", path)


MIXES: list[Callable[[Path, pytest.MonkeyPatch, str], None]] = [
    another_rank, a_compacted_fork, one_row, another_state
]  # fmt: skip


def assert_refused(path: Path, kind: type[StoreError], words: str) -> None:
    """Assert that every way to open a store of three ranks says so: also ``verify``, and the ranks themselves."""
    newest = read_id(path)
    for options in ({"mode": "r"}, {"mode": "r", "commit": newest}, {}):
        with pytest.raises(kind, match=words):
            Store.open(path, **options)
    try:
        problems = verify(path)["problems"]
    except StoreError as error:
        problems = [str(error)]
    assert problems
    for problem in [*problems, sentences(train_shards(path, 3, 0))]:
        assert re.search(words, problem)


def read_id(path: Path) -> int:
    record = newest_record(path)
    assert record is not None
    return int(record.id)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
@pytest.mark.parametrize("mix", MIXES)
def test_a_rank_that_the_commit_does_not_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mix: Callable[[Path, pytest.MonkeyPatch, str], None], engine: str
) -> None:
    """For reading, at the newest commit and by its number, for writing, by all ranks and by ``verify``."""
    path = tmp_path / "s"
    train_on(path, 3, 4, engine=engine, retention=2)
    read_store(path)
    with monkeypatch.context() as patch:
        mix(path, patch, engine)
    with pytest.raises((AssertionError, KeyError, OSError)):
        read_store(path)
    assert_refused(path, CorruptStoreError, LISTS)


def test_tables_are_bound_where_there_are_no_rows_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another seed changes the first rows of later keys: the commit has the tables, and ranks compare them."""
    path, tables = tmp_path / "s", sharded_world.TABLES
    train_on(path, 2, 1)
    with monkeypatch.context() as patch:
        patch.setattr(sharded_world, "TABLES", tuple(replace(table, seed=5) for table in tables))
        assert "has seed 0, but 5 was given: pass the tables it has" in sentences(train_shards(path, 2, 0))
        train_on(tmp_path / "twin", 2, 1)
    with Store.open(path, mode="r") as store:
        seeds = [table.seed for table in store.tables]
    take_from(tmp_path / "twin", path)  # its list is the same: it has no rows, and tables are in the commit
    with Store.open(path, mode="r") as store:
        assert [table.seed for table in store.tables] == [table.seed for table in store.ranks[1].tables] == seeds


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_a_copy_of_the_store_is_the_store(tmp_path: Path, engine: str) -> None:
    """Also if a rank has prepared a commit, and after rollbacks and compactions; digests follow the format."""
    train_on(tmp_path / "s", 2, 4, engine=engine, retention=2)
    sharded_world.ahead(tmp_path / "s", 2, 1)
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    read_store(tmp_path / "copy")
    check_shards(tmp_path / "copy", Cursor(2))
    train_on(tmp_path / "copy", 2, 1)
    with Store.open(tmp_path / "copy") as store:
        store.rollback(store.commits[0].id)
    read_store(tmp_path / "copy")
    with Store.open(tmp_path / "copy") as store:
        store.compact()
    read_store(tmp_path / "copy")
    assert verify(tmp_path / "copy")["problems"] == []
    train_on(tmp_path / "copy", 2, 0)
