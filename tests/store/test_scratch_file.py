"""Temporary files: what they keep, where they stand, and that nothing of them is left."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.store.conftest import small_tables
from tests.store.world import World
from tiercache.store import MemoryEngine, Store
from tiercache.store.scratch_file import ScratchFile, scratch_of

pytestmark = pytest.mark.disk


def names(path: Path) -> set[str]:
    """Return the names of all there is."""
    return {str(entry.relative_to(path)) for entry in path.rglob("*")}


def test_a_reader_that_may_not_write_to_the_store_scans_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it sorts stands in the system's folder for temporary files; its writer sorts in the store's."""
    world = World(small_tables(), keys_per_pass=60)
    with Store.open(tmp_path / "s", tables=world.tables) as store:
        world.run(store, 5)
    used, make = [], tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: used.append(options["dir"]) or make(**options))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for allowed, folder in ((True, tmp_path / "s"), (False, tmp_path / "tmp")):
        with Store.open(tmp_path / "s", mode="r") as store:
            monkeypatch.setattr(os, "access", lambda path, how, allowed=allowed: allowed)
            keys = [key for keys, _ in store.scan("user", memory_bytes=2000) for key in keys.tolist()]
        assert sorted(keys) == sorted(key for name, key in world.rows if name == "user")
        assert used
        assert {os.fspath(path) for path in used} == {os.fspath(folder)}
        used.clear()


def test_room_that_is_not_needed_any_more_comes_back(tmp_path: Path) -> None:
    """Where the file system has holes; what was not freed is still there."""
    with ScratchFile(tmp_path, "a test") as file:
        data = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)
        file.write(data, 0)
        handle = file._file.fileno()
        os.fsync(handle)
        taken = os.fstat(handle).st_blocks
        file.free(0, 1 << 19)
        out = np.empty(1 << 19, dtype=np.uint8)
        file.read(out, 1 << 19)
        np.testing.assert_array_equal(out, data[1 << 19 :])
        file.read(out, 0)
        if out.any():
            pytest.skip("the file system has no holes")
        assert os.fstat(handle).st_blocks < taken
    assert not names(tmp_path)


def test_a_store_without_a_place_sorts_in_the_folder_of_the_system() -> None:
    """In memory there is no folder of the store."""
    with Store.open(None, tables=small_tables(), engine=MemoryEngine()) as store:
        assert os.fspath(scratch_of(store)) == tempfile.gettempdir()
