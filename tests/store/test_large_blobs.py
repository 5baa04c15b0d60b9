"""Blobs and entries beyond the limit of one read: read completely, however little a read returns."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.blobs import publish
from tests.store.conftest import small_tables
from tests.store.world import World
from tiercache.store import LmdbEngine, Store
from tiercache.store.engines.engine import Blob, ReadRequest
from tiercache.store.files import read_at, read_whole


@pytest.fixture(params=[7, 999, 4096])
def short_reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the bytes of each read, as Linux limits it to 2,147,479,552."""
    most, pread, preadv = request.param, os.pread, os.preadv

    def shortened(handle: int, buffers: list[Any], offset: int) -> int:
        first = next(memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes)
        return preadv(handle, [first[:most]], offset)

    monkeypatch.setattr(os, "pread", lambda handle, size, offset: pread(handle, min(size, most), offset))
    monkeypatch.setattr(os, "preadv", shortened)


@pytest.mark.usefixtures("short_reads")
@pytest.mark.parametrize("size", [0, 1, 6, 7, 8, 998, 999, 1000, 5000])
def test_a_file_is_read_to_its_end_by_any_number_of_reads(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    path = tmp_path / "file"
    path.write_bytes(data)
    assert read_whole(str(path)) == data
    for last in (1, 7, 2000):
        assert read_whole(str(path), last) == data[-last:]
    with path.open("rb") as file:
        for low, count in ((0, size), (3, 2000), (size, 1), (size + 5, 5), (1, 0)):
            assert read_at(file.fileno(), count, low) == data[low : low + count]


@pytest.mark.parametrize("kind", ["lmdb", "zarr"])
@pytest.mark.usefixtures("short_reads")
def test_a_store_is_whole_however_little_a_read_returns(tmp_path: Path, kind: str) -> None:
    world = World(small_tables())
    with Store.open(tmp_path / "s", tables=small_tables(), engine=kind) as store:
        world.run(store, 2)
    with Store.open(tmp_path / "s") as store:
        world.check(store, after=2)
        world.run(store, 1)
        world.check(store, after=3)


@pytest.mark.long
@pytest.mark.disk
def test_a_blob_of_more_than_four_gibibytes_is_read_again(tmp_path: Path) -> None:
    """In one read of more than two, and at both ends."""
    engine, step = LmdbEngine(tmp_path, create=True), 64 << 20
    blob, block = Blob("segments/0.0/0/rows", (4 << 30) + 5), np.zeros(step, np.uint8)

    def parts() -> Any:
        for i in range(64):
            block[:] = i
            yield 0, i * step, block
        yield 0, 64 * step, np.full(5, 64, np.uint8)

    engine.put([blob], parts())
    publish(engine, 0)
    engine.close()
    engine = LmdbEngine(tmp_path, create=False, readonly=True)
    out = np.empty((2 << 30) + (1 << 20), np.uint8)
    for low in (0, blob.size - out.size):
        engine.read(ReadRequest(blob, low, out))
        for at in (0, 1, step, out.size - step, out.size - 1):
            assert out[at] == (low + at) // step
        assert np.array_equal(np.unique(out), np.unique(np.arange(low, low + out.size, 5) // step))
    engine.close()
