"""A reader on a file system that is mounted read-only for it: the writer, elsewhere, does not see it."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.apart import ran
from tests.files import flip
from tests.store.big import BIG, dump, load, publish
from tiercache.store import CommitMissingError, CorruptBlockError, Store, verify

pytestmark = pytest.mark.disk

GO_ON = """
import sys
from tests.store.big import dump, publish
from tiercache.store import Store

with Store.open(sys.argv[1]) as store:
    for pass_index in range(1, 5):
        dump(store, pass_index, {pass_index + 1: 200})
        publish(store, pass_index + 1)
"""


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """The folder ``home`` once more, read-only."""
    home, there = tmp_path / "home", tmp_path / "there"
    home.mkdir()
    there.mkdir()
    try:
        subprocess.run(["mount", "--bind", str(home), str(there)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting is not permitted here")
    try:
        options = "remount,ro,bind"
        if subprocess.run(["mount", "-o", options, str(home), str(there)], capture_output=True, check=False).returncode:
            pytest.skip("mounting read-only is not permitted here")
        yield there
    finally:
        subprocess.run(["umount", str(there)], check=True)


@pytest.mark.parametrize("kind", ["lmdb", "zarr"])
def test_a_reader_that_was_left_behind_is_told_so_and_not_of_damage(tmp_path: Path, mounted: Path, kind: str) -> None:
    """It reads while the writer rests; then its commit is gone, the store is whole, and opened again it is read."""
    home, there = tmp_path / "home" / "s", mounted / "s"
    with Store.open(home, tables=[BIG], engine=kind) as store:
        stored = dump(store, 0, {1: 200, 9: 100})
        publish(store, 1)
    with Store.open(there, mode="r") as reader:
        assert load(reader, 1) == {0: stored[1]}
        assert ran(GO_ON, home).returncode == 0  # LMDB opens it once in a process
        with pytest.raises(CommitMissingError, match="was opened at commit 0, which its writer has given up since"):
            load(reader, 1)
    assert verify(there)["problems"] == []
    with Store.open(there, mode="r") as reader:
        assert load(reader, 9) == {0: stored[9]}


@pytest.mark.parametrize("kind", ["lmdb", "zarr"])
def test_damage_is_still_damage_there(tmp_path: Path, mounted: Path, kind: str) -> None:
    """Where no writer went on, what is wrong is wrong."""
    home = tmp_path / "home" / "s"
    with Store.open(home, tables=[BIG], engine=kind) as store:
        dump(store, 0, {1: 200})
        publish(store, 1)
    (file,) = [home / "blocks.bin"] if kind == "lmdb" else home.glob("segments/*/0/vector*/c.0.0")
    flip(file, 5000)
    with Store.open(mounted / "s", mode="r") as reader, pytest.raises(CorruptBlockError):
        load(reader, 1)
