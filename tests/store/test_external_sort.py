"""The external sort: its output, memory and temporary file, which is always deleted."""

import os
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.conftest import small_tables
from tests.store.world import World
from tiercache.store import Store, StoreError, StoreFullError, files
from tiercache.store.engines.engine import Counters
from tiercache.store.external_sort import ExternalSorter
from tiercache.store.files import ScratchFile, check_room


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 999),
    count=st.integers(0, 3000),
    distinct=st.integers(1, 3000),
    columns=st.integers(0, 2),
    memory_bytes=st.sampled_from([200, 3000, 100_000, 10_000_000]),
    chunk_rows=st.none() | st.integers(1, 700),
)
def test_rows_come_back_in_hash_order_whatever_the_memory(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    count: int,
    distinct: int,
    columns: int,
    memory_bytes: int,
    chunk_rows: int | None,
) -> None:
    """Rows with the same hash keep their order: a stable sort is the oracle."""
    rng = np.random.default_rng(seed)
    hashes = rng.integers(0, 1 << 64, distinct, dtype=np.uint64)[rng.integers(0, distinct, count)]
    payload: list[Any] = [np.arange(count, dtype=np.uint32), np.arange(3 * count, dtype=np.float32).reshape(count, 3)]
    dtypes: list[Any] = [np.uint32, (np.float32, (3,))]
    counters = Counters()
    with ExternalSorter(
        dtypes[:columns], tmp_path_factory.getbasetemp(), "a test", memory_bytes, counters, copies=count
    ) as sorter:
        for low in range(0, count, 97):
            sorter.add(hashes[low : low + 97], *(values[low : low + 97] for values in payload[:columns]))
        chunks = list(sorter.sorted(chunk_rows))
        assert sorter.rows == count
    order = np.argsort(hashes, kind="stable")
    for i, values in enumerate([hashes, *payload][: columns + 1]):
        np.testing.assert_array_equal(np.concatenate([values[:0], *(chunk[i] for chunk in chunks)]), values[order])
    if chunk_rows is None:
        assert all(one[0][-1] < other[0][0] for one, other in pairwise(chunks))
    else:
        assert all(chunk[0].size <= chunk_rows for chunk in chunks)
    assert counters.spill_bytes_read == counters.spill_bytes_written


def test_a_temporary_directory_replaces_a_folder_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one that is not writable for this process; without either, the error says how much is needed."""
    hashes = np.arange(10, dtype=np.uint64) << np.uint64(60)
    full: list[Path] = [tmp_path]

    def room(path: Path, needed_bytes: int) -> None:
        if path in full:
            raise OSError(28, "No space left on device")
        check_room(path, needed_bytes)

    def sorted_in(folder: Path) -> list[int]:
        with ExternalSorter([np.uint32], folder, "the check", 400, Counters(), total_rows=10) as sorter:
            sorter.add(hashes[::-1], 7)
            return [int(one) for found, _ in sorter.sorted() for one in found]

    monkeypatch.setattr(files, "check_room", room)
    for folder in (tmp_path, tmp_path / "missing"):
        assert sorted_in(folder) == hashes.tolist()
    system = tempfile.gettempdir()
    full.append(Path(system))
    with pytest.raises(StoreFullError, match=r"the check needs 120 more bytes"):
        sorted_in(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(StoreError, match=r"the check needs .* file of 120 bytes, but .* cannot hold it .*TMPDIR"):
        sorted_in(tmp_path)


@pytest.mark.disk
def test_a_reader_that_may_not_write_to_the_store_scans_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sort files are in the system's folder for temporary files; the writer's are in the store's."""
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


@pytest.mark.disk
def test_room_that_is_not_needed_any_more_comes_back(tmp_path: Path) -> None:
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
    assert not [*tmp_path.iterdir()]
