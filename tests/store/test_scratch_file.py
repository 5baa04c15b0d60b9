"""Temporary files: what they keep, where they stand, and that nothing of them is left."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.conftest import small_tables
from tiercache.store import MemoryEngine, Store, Table, Zeros
from tiercache.store.counters import Counters
from tiercache.store.hashing import hash_keys
from tiercache.store.optimizer import SGD
from tiercache.store.scratch_file import ScratchFile, scratch_of
from tiercache.store.spill import Spill
from tiercache.store.testing.world import World

if TYPE_CHECKING:
    from pathlib import Path

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


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 999),
    count=st.integers(0, 3000),
    distinct=st.integers(1, 3000),
    memory_bytes=st.sampled_from([200, 3000, 100_000, 10_000_000]),
    chunk_rows=st.integers(1, 700),
)
def test_rows_come_back_in_hash_order_whatever_the_memory(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int, distinct: int, memory_bytes: int, chunk_rows: int
) -> None:
    """Those of a key side by side in the order in which they came: a stable sort by hash is the oracle."""
    table = Table(name="t", dim=3, optimizer=SGD(learning_rate=0.1), initializer=Zeros())
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, distinct, count) * 7919
    rows = np.arange(3 * count, dtype=np.float32).reshape(count, 3)
    counters = Counters()
    with Spill(table, tmp_path_factory.getbasetemp(), memory_bytes, counters, copies=count) as spill:
        for low in range(0, count, 97):
            spill.add(keys[low : low + 97], rows[low : low + 97])
        chunks = list(spill.sorted(chunk_rows))
    order = np.argsort(hash_keys(keys, table.table_id), kind="stable")
    np.testing.assert_array_equal(np.concatenate([np.empty(0, int), *(k for k, _ in chunks)]), keys[order])
    np.testing.assert_array_equal(np.concatenate([np.empty((0, 3)), *(r for _, r in chunks)]), rows[order])
    assert all(k.size <= chunk_rows for k, _ in chunks)
    assert counters.spill_bytes_read == counters.spill_bytes_written


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
