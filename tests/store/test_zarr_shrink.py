"""Files of the Zarr engine shrink as the fronts of their blobs are dropped."""

from pathlib import Path

import pytest

from tests.store.blobs import OPTIMIZERS, check, drop_all, drop_fronts, layout_of, publish, put, segment
from tests.store.test_zarr_engine import VECTOR
from tiercache.store.engines import zarr_layout
from tiercache.store.engines.engine import BlobRows
from tiercache.store.engines.zarr_engine import ZarrEngine
from tiercache.store.files import PAGE_BYTES

pytestmark = pytest.mark.disk


def taken(path: Path) -> int:
    return path.stat().st_blocks * 512


def large_layout() -> BlobRows:
    """Return a layout with eight blocks of 100,008 bytes of vectors, so that blocks begin within pages."""
    return layout_of([8 * 8334], page_rows=1000, block_rows=8334)


def test_pages_before_the_first_block_that_is_left_are_holes(tmp_path: Path) -> None:
    """A page that two blocks share is kept for the second. A reopened engine knows blocks from array metadata alone."""
    engine = ZarrEngine(tmp_path, create=True)
    contents = segment(large_layout(), 1)
    rest = publish(engine, 0, contents)[-1:]
    file = tmp_path / "segments/0.1/0/vector/c.0.0"
    whole = taken(file)
    for blocks in (1, 2, 3, 4, 5, 6, 7, 7):
        if blocks > 5:
            engine.close()
            engine = ZarrEngine(tmp_path, create=False)
        left = drop_fronts(engine, contents, blocks)
        engine.drop([], shrink=True)
        assert blocks * 100_008 - PAGE_BYTES <= whole - taken(file) <= blocks * 100_008
        check(engine, left + rest)
    assert file.stat().st_size == 8 * 8334 * VECTOR


def test_files_and_folders_go_with_their_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zarr_layout, "PART_BYTES", 3 * 7 * VECTOR + 5)  # chunks of three blocks of vectors
    engine = ZarrEngine(tmp_path, create=True)
    meta, rows, keys, changed = put(engine, segment(layout_of([10, 47]), 1))
    put(engine, segment(layout_of([10], optimizer=OPTIMIZERS[2]), 2))
    folder = tmp_path / "segments/0.1/0"
    for blocks, chunks in ((2, {0, 1, 2}), (3, {1, 2}), (5, {1, 2}), (6, {2}), (8, {2})):
        drop_fronts(engine, [rows, keys, changed], blocks)
        engine.drop([], shrink=True)
        assert {file.name for file in (folder / "vector").iterdir()} == {f"c.{i}.0" for i in chunks} | {"zarr.json"}
        assert (folder / "sum/c.0.0").exists()
    engine.drop([(rows.blob.name, rows.blob.size)], shrink=True)
    assert {file.name for file in (folder / "sum").iterdir()} == {"zarr.json"}
    assert engine.list()[rows.blob.name] == (rows.blob.size, rows.blob.size)
    drop_all(engine, [rows, changed], shrink=True)
    assert {file.name for file in folder.iterdir()} == {"keys", "zarr.json"}
    drop_all(engine, [keys], shrink=True)
    assert not folder.exists()
    drop_all(engine, [meta], shrink=True)
    assert {file.name for file in (tmp_path / "segments").iterdir()} == {"0.2", "zarr.json"}
