"""What stands in the place of a small file of a sharded store and is none: a sentence, and at once."""

from pathlib import Path

import pytest

from tests.dist.sharded_world import train_shards
from tests.no_files import NO_FILES, at_once
from tests.store.damage import assert_sentence
from tiercache.store import Store, StoreError, info, verify
from tiercache.store.shards.shard_mark import Mark, is_shard

SMALL = ["shards.json", "shard-0-0.json", "shard-0-1.json", "shard-0-1/store.json", "shard-0-1/HEAD", "ranks.lock"]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two shards."""
    path = tmp_path_factory.mktemp("sharded") / "s"
    assert train_shards(path, 2, 2) == [None] * 2
    return path


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("what", [*NO_FILES])
def test_every_way_to_open_says_what_is_there(sharded: Path, name: str, what: str) -> None:
    """For reading, for writing, and as the ranks of a training do; afterward the store is as it was."""
    path, aside = sharded / name, sharded.parent / "aside"
    existed = path.exists()
    if existed:
        path.rename(aside)
    NO_FILES[what](path)
    try:
        with at_once():
            for opening in (
                lambda: Store.open(sharded, mode="r").close(),
                lambda: Store.open(sharded).close(),
                lambda: info(sharded),
                lambda: verify(sharded)["problems"],
            ):
                try:
                    problems = opening()
                except (StoreError, ValueError) as error:
                    problems = [str(error)]
                    assert_sentence(error)
                assert problems or name == "ranks.lock", (what, name)
    finally:
        for left in (path, Path(f"{path}.fifo")):
            if left.is_dir() and not left.is_symlink():
                left.rmdir()
            else:
                left.unlink(missing_ok=True)
        if existed:
            aside.rename(path)
    assert verify(sharded)["problems"] == []


@pytest.mark.parametrize("what", [*NO_FILES])
def test_a_mark_that_is_none_still_guards_its_shard(tmp_path: Path, what: str) -> None:
    """Nobody writes to one shard alone; a folder of another name has no mark by that."""
    for folder in ("shard-0-1", "mine"):
        (tmp_path / folder).mkdir()
        NO_FILES[what](tmp_path / f"{folder}.json")
    with at_once():
        assert is_shard(tmp_path / "shard-0-1")
        assert not is_shard(tmp_path / "mine")
        with pytest.raises(StoreError):
            Mark.read(tmp_path / "shard-0-1")


@pytest.mark.parametrize("what", ["a FIFO", "a socket", "a device", "a link to itself", "a link to a FIFO"])
def test_a_draft_is_written_over(tmp_path: Path, what: str) -> None:
    """That of a manifest, whoever left it."""
    assert train_shards(tmp_path / "s", 2, 1) == [None] * 2
    NO_FILES[what](tmp_path / "s" / "shards.json.tmp")
    with at_once(60):
        assert train_shards(tmp_path / "s", 2, 1) == [None] * 2
    assert verify(tmp_path / "s")["problems"] == []
