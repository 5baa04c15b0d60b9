"""A manifest binds its shards: one of another run, another rank or another moment is refused by whoever opens it."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dist import sharded_world
from tests.dist.sharded_world import check_shards, sentences, train_shards
from tests.store.independent_reader import check_manifest
from tiercache.store import CommitMissingError, CorruptStoreError, Cursor, Store, Table, verify
from tiercache.store.shards.shard_manifest import ShardManifest

WORDS = r"commit \d of shard \d of .* is not the one that the manifest names: .* is a shard of another run"


def take_from(other: Path, path: Path) -> None:
    """Put shard 1 of another store in place of the own one; the mark stays."""
    shutil.rmtree(path / "shard-0-1")
    shutil.copytree(other / "shard-0-1", path / "shard-0-1")


def other_rows(patch: pytest.MonkeyPatch) -> None:
    """Have trainings leave other rows under the same keys."""
    plain = sharded_world.whole_row

    def row(table: Table, key: int, pass_index: int, half: int) -> Any:
        return tuple(values + np.float32(1) for values in plain(table, key, pass_index, half))

    patch.setattr(sharded_world, "whole_row", row)


def another_run(path: Path, patch: pytest.MonkeyPatch, engine: str) -> None:
    """Take the shard of a run of the same script that ended with other rows."""
    other_rows(patch)
    assert train_shards(path.parent / "twin", 2, 4, engine=engine, retention=2) == [None] * 2
    take_from(path.parent / "twin", path)


def another_rank(path: Path, _patch: pytest.MonkeyPatch, _engine: str) -> None:
    """Exchange the folders of two shards."""
    (path / "shard-0-0").rename(path / "x")
    (path / "shard-0-1").rename(path / "shard-0-0")
    (path / "x").rename(path / "shard-0-1")


def a_fork(path: Path, patch: pytest.MonkeyPatch, _engine: str) -> None:
    """Train a copy of the store and the store from the same commit on, to other rows."""
    shutil.copytree(path, path.parent / "fork")
    assert train_shards(path, 2, 2) == [None] * 2
    other_rows(patch)
    assert train_shards(path.parent / "fork", 2, 2) == [None] * 2
    take_from(path.parent / "fork", path)


def a_compacted_fork(path: Path, _patch: pytest.MonkeyPatch, _engine: str) -> None:
    """Compact a copy where the store was rolled back: the same rows at the same ids, in other segments."""
    shutil.copytree(path, path.parent / "fork")
    with Store.open(path) as store, Store.open(path.parent / "fork") as fork:
        assert store.rollback(store.commit.id).id == fork.compact().id
    take_from(path.parent / "fork", path)


def one_row(path: Path, patch: pytest.MonkeyPatch, engine: str) -> None:
    """Take the shard of a run in which one number of the last pass was another."""
    plain = sharded_world.whole_row

    def row(table: Table, key: int, pass_index: int, half: int) -> Any:
        fields = plain(table, key, pass_index, half)
        fields[0][0, -1] += pass_index == 1
        return fields

    patch.setattr(sharded_world, "whole_row", row)
    assert train_shards(path.parent / "twin", 2, 4, engine=engine, retention=2) == [None] * 2
    take_from(path.parent / "twin", path)


def another_state(path: Path, patch: pytest.MonkeyPatch, engine: str) -> None:
    """Take the shard of a run with other dense state."""
    plain = Store.publish

    def publish(store: Store, cursor: Cursor, **options: Any) -> Any:
        return plain(store, cursor, **options | {"state": options["state"].upper()})

    patch.setattr(Store, "publish", publish)
    assert train_shards(path.parent / "twin", 2, 4, engine=engine, retention=2) == [None] * 2
    take_from(path.parent / "twin", path)


MIXES: list[Callable[[Path, pytest.MonkeyPatch, str], None]] = [
    another_run, another_rank, a_fork, a_compacted_fork, one_row, another_state
]  # fmt: skip


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
@pytest.mark.parametrize("mix", MIXES)
def test_a_shard_that_the_manifest_does_not_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mix: Callable[[Path, pytest.MonkeyPatch, str], None], engine: str
) -> None:
    """For reading, at the newest commit and at an older one, for writing, by all ranks and by ``verify``."""
    path = tmp_path / "s"
    assert train_shards(path, 2, 4, engine=engine, retention=2) == [None] * 2
    check_manifest(path)
    with monkeypatch.context() as patch:
        mix(path, patch, engine)
    with pytest.raises(AssertionError):
        check_manifest(path)
    newest = ShardManifest.read(path).newest.id
    for options in ({"mode": "r"}, {"mode": "r", "commit": newest}, {}):
        with pytest.raises(CorruptStoreError, match=WORDS):
            Store.open(path, **options)
    (problem,) = verify(path)["problems"]
    assert "is not the one that the manifest names" in problem
    assert "is not the one that the manifest names" in sentences(train_shards(path, 2, 0))


def test_tables_are_bound_where_there_are_no_rows_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another seed gives the first rows of later keys."""
    path, tables = tmp_path / "s", sharded_world.TABLES
    assert train_shards(path, 2, 1) == [None] * 2
    with monkeypatch.context() as patch:
        patch.setattr(sharded_world, "TABLES", tuple(replace(table, seed=5) for table in tables))
        assert train_shards(tmp_path / "twin", 2, 1) == [None] * 2
    take_from(tmp_path / "twin", path)
    with pytest.raises(CorruptStoreError, match=WORDS):
        Store.open(path, mode="r")


def test_an_older_commit_with_another_digest_is_left_out_and_told(tmp_path: Path) -> None:
    """Others are read; ``verify`` and ranks say what is wrong."""
    path = tmp_path / "s"
    assert train_shards(path, 2, 4, retention=3) == [None] * 2
    manifest = ShardManifest.read(path)
    oldest = replace(manifest.commits[0], digests=("0" * 64, manifest.commits[0].digests[1]))
    replace(manifest, commits=(oldest, *manifest.commits[1:])).write(path)
    with Store.open(path, mode="r") as store:
        assert [commit.id for commit in store.commits] == [2, 3]
        with pytest.raises(CommitMissingError, match="has no commit 1: give one of 2, 3"):
            store.at(1)
    (problem,) = verify(path)["problems"]
    for sentence in (problem, sentences(train_shards(path, 2, 0))):
        assert "commit 1 of shard 0 of" in sentence
        assert "is not the one that the manifest names" in sentence


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_a_copy_of_all_shards_is_the_store(tmp_path: Path, engine: str) -> None:
    """Also where a shard is ahead, and after rollbacks and compactions; a reader of the format finds the digests."""
    assert train_shards(tmp_path / "s", 2, 4, engine=engine, retention=2) == [None] * 2
    sharded_world.ahead(tmp_path / "s", 2, 1)
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    check_manifest(tmp_path / "copy")
    check_shards(tmp_path / "copy", Cursor(2))
    assert train_shards(tmp_path / "copy", 2, 1) == [None] * 2
    with Store.open(tmp_path / "copy") as store:
        store.rollback(store.commits[0].id)
    check_manifest(tmp_path / "copy")
    with Store.open(tmp_path / "copy") as store:
        store.compact()
    check_manifest(tmp_path / "copy")
    assert verify(tmp_path / "copy")["problems"] == []
    assert train_shards(tmp_path / "copy", 2, 0) == [None] * 2
