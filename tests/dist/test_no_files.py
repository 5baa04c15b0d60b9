"""Anything but a file in place of a small file of a store of several ranks gets an error message, without hanging."""

import os
from pathlib import Path

import pytest

from tests.dist.sharded_world import divide_among, sentences, train_on, train_shards
from tests.no_files import NO_FILES, at_once
from tests.store.damage import assert_sentence
from tiercache.store import Store, StoreError, info, verify

SMALL = ["HEAD", "rank-1", "rank-1/store.json", "rank-1/HEAD"]
"""Without them nothing can be read."""
OF_WRITERS = ["other-ranks.json", "rank-1/store.json.new", "other-ranks.json.new", "rank-2"]
"""Only writers read them; they ignore drafts and anything with the name of a rank."""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded") / "s"
    train_on(path, 2, 2)
    return path


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [*SMALL, *OF_WRITERS])
@pytest.mark.parametrize("what", [*NO_FILES])
def test_every_way_to_open_says_what_is_there(sharded: Path, name: str, what: str) -> None:
    """For reading, for writing, and as the ranks of a training do; afterward the store is as it was."""
    path, aside = sharded / name, sharded.parent / "aside"
    existed = path.exists()
    if existed:
        path.rename(aside)
    NO_FILES[what](path)
    try:
        with at_once(60):
            for opening in (
                lambda: Store.open(sharded, mode="r").close(),
                lambda: info(sharded),
                lambda: verify(sharded)["problems"],
                lambda: Store.open(sharded).close(),
                lambda: [sentences(found)] if any(found := train_shards(sharded, 2, 0)) else [],
            ):
                try:
                    problems = opening()
                except (StoreError, ValueError) as error:
                    problems = [str(error)]
                    assert_sentence(error)
                assert problems or name in OF_WRITERS, (what, name)
    finally:
        for left in (path, Path(f"{path}.fifo")):
            if left.is_dir() and not left.is_symlink():
                left.rmdir()
            else:
                left.unlink(missing_ok=True)
        if existed:
            aside.rename(path)
    assert verify(sharded)["problems"] == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", [*NO_FILES])
def test_what_has_the_name_of_a_new_rank_is_not_written_over(tmp_path: Path, what: str) -> None:
    path = tmp_path / "s"
    train_on(path, 2, 2)
    NO_FILES[what](path / "rank-2")
    with at_once(60):
        found = divide_among(path, 3)
    if what == "a folder":
        assert found == [None] * 3
        assert verify(path)["ranks"] == 3
    else:
        assert "rank-2" in sentences(found)
        assert isinstance(found[2], StoreError)
        assert os.path.lexists(path / "rank-2")
        assert verify(path)["ranks"] == 2
    assert verify(path)["problems"] == []


@pytest.mark.parametrize("what", ["a FIFO", "a socket", "a device", "a link to itself"])
def test_drafts_are_written_over(tmp_path: Path, what: str) -> None:
    path, disk = tmp_path / "s", tmp_path / "disk"
    train_on(path, 2, 1)
    (disk / "rank-2").mkdir(parents=True)
    NO_FILES[what](disk / "rank-2" / "store.json.new")
    NO_FILES[what](path / "other-ranks.json.new")
    folders = [path, path, disk]
    with at_once(60):
        assert divide_among(path, 3, shard_dirs=folders) == [None] * 3
    assert verify(path)["problems"] == []
    assert not os.path.lexists(path / "other-ranks.json.new")
