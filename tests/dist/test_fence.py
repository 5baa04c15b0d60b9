"""The fence of several ranks: a store that was moved is not written by any of them."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.sharded_world import (
    ShardWorld,
    advance,
    check_shards,
    cursor_of,
    on_ranks,
    sentences,
    take,
    train_on,
    train_shards,
)
from tests.files import files_of
from tiercache.dist.shard_writer import ShardWriter
from tiercache.errors import RankError
from tiercache.store import Cursor, Store, StoreError, StoreInUseError, verify

KINDS = pytest.mark.parametrize("engine", ["lmdb", "zarr"])


def a_backup(place: Path, _: Path) -> None:
    """Move the folder away and put a copy in its place."""
    place.rename(place.with_name("away"))
    shutil.copytree(place.with_name("away"), place)


def another(place: Path, other: Path) -> None:
    place.rename(place.with_name("away"))
    other.rename(place)


def gone(place: Path, _: Path) -> None:
    place.rename(place.with_name("away"))


def no_marker(place: Path, _: Path) -> None:
    (place / "store.json").unlink()


def a_new_marker(place: Path, _: Path) -> None:
    marker = place / "store.json"
    text = marker.read_text()
    marker.unlink()
    marker.write_text(text)


def trained(path: Path, engine: str, between: Callable[[Path], None]) -> list[Any]:
    """Train two commits on two ranks, call ``between``, and try another commit; return each rank's error."""

    def body(ranks: Any, shards: ShardWriter, world: ShardWorld) -> None:
        for _ in range(2):
            take(shards, world)
        ranks.all_gather_object(None)
        if ranks.rank == 0:
            between(path)
        ranks.all_gather_object(None)
        with ranks.raise_on_all("training"):
            after = advance(shards.store, world, cursor_of(shards))
        shards.publish(after)

    return on_ranks(path, 2, body, engine=engine)


@pytest.mark.sampled(8)
@KINDS
@pytest.mark.parametrize("of", ["the store", "a rank"])
@pytest.mark.parametrize("change", [a_backup, another, gone, no_marker, a_new_marker])
def test_ranks_whose_store_was_moved_write_nothing_there(
    tmp_path: Path, engine: str, of: str, change: Callable[[Path, Path], None]
) -> None:
    """Nor if the folder of rank 1 alone was moved: all end with an error. Put back, the store is at its commit."""
    path, held = tmp_path / "s", dict[str, bytes]()
    place, other = (at / "rank-1" if of == "a rank" else at for at in (path, tmp_path / "other"))
    away = place.with_name("away")
    train_on(tmp_path / "other", 2, 4, engine=engine)

    def between(_: Path) -> None:
        markers.append((place / "store.json").read_bytes())
        change(place, other)
        held.update(files_of(place) if place.exists() else {})

    markers = list[bytes]()
    errors = trained(path, engine, between)
    assert "was moved, replaced or deleted while it was written" in sentences(errors)
    if away.exists():
        if place.exists():
            assert files_of(place) == held
            assert of == "a rank" or verify(path)["problems"] == []
            shutil.rmtree(place)
        away.rename(place)
    (place / "store.json").write_bytes(markers[0])
    check_shards(path, Cursor(1))
    train_on(path, 2, 1, Cursor(1, 5))
    assert verify(path)["problems"] == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("change", ["another store's", "none", "an older one"])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_do_not_write_over_a_head_that_something_else_wrote(tmp_path: Path, change: str, rank: int) -> None:
    """It stays, and no rank continues; engine LMDB has its head in a file that it keeps open."""
    path, kept = tmp_path / "s", dict[str, bytes]()
    train_on(tmp_path / "other", 2, 5, engine="zarr")
    train_on(path, 2, 2, engine="zarr")
    inside = Path("rank-1" if rank else ".") / "heads"
    shutil.copytree(path / inside, tmp_path / "older")

    def between(path: Path) -> None:
        shutil.rmtree(path / inside)
        if change == "none":
            (path / inside).mkdir()
        else:
            source = tmp_path / "older" if change == "an older one" else tmp_path / "other" / inside
            shutil.copytree(source, path / inside)
        kept.update(files_of(path / inside))

    errors = trained(path, "zarr", between)
    assert re.search(
        "the newest head of .* is .*another process has written|the head of .* is missing", sentences(errors)
    )
    assert files_of(path / inside) == kept


@pytest.mark.sampled(1)
@KINDS
def test_ranks_keep_out_a_second_training_whose_locks_were_deleted(tmp_path: Path, engine: str) -> None:
    """Each rank is also locked by its marker: the first training continues, and none of its commits is lost."""
    refused: list[Any] = []

    def second(path: Path) -> None:
        for lock in path.rglob("*.lock"):
            lock.unlink()
        try:
            Store.open(path)
        except StoreError as error:
            refused.append(error)
        refused.extend(train_shards(path, 2, 1))
        (path / "writer.lock").write_text("7\n")
        refused.extend(train_shards(path, 2, 1))

    assert trained(tmp_path / "s", engine, second) == [None, None]
    assert [type(error) for error in refused] == [StoreInUseError, *[StoreInUseError, RankError] * 2]
    assert verify(tmp_path / "s")["problems"] == []
    check_shards(tmp_path / "s", Cursor(1, 5))


@KINDS
def test_a_rank_keeps_out_a_training_when_rank_0_is_gone(tmp_path: Path, engine: str) -> None:
    """By its lock and its marker, whatever was deleted."""
    path, refused = tmp_path / "s", list[Any]()

    def body(ranks: Any, shards: ShardWriter, world: ShardWorld) -> None:
        take(shards, world)
        ranks.all_gather_object(None)
        if ranks.rank == 0:
            shards.close()
            (path / "rank-1" / "writer.lock").unlink()
            refused.extend(train_shards(path, 2, 1))
        ranks.all_gather_object(None)

    assert on_ranks(path, 2, body, engine=engine) == [None, None]
    assert [type(error) for error in refused] == [RankError, StoreInUseError]
    train_on(path, 2, 1, Cursor(1))
