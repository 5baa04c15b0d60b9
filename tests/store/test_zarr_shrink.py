"""Files of the Zarr engine shrink as the fronts of their blobs are dropped."""

from pathlib import Path

import pytest

from tests.store.blobs import OPTIMIZERS, check, drop_all, drop_fronts, layout_of, publish, put, segment
from tiercache.store.engines import zarr_layout
from tiercache.store.engines.engine import BlobRows
from tiercache.store.engines.zarr_engine import ZarrEngine
from tiercache.store.files import PAGE_BYTES

pytestmark = pytest.mark.disk

VECTOR_BYTES = 12
"""Bytes of a vector in these layouts: rows of 16 bytes with one number of state."""


def taken(path: Path) -> int:
    """Return the bytes of a file on disk."""
    return path.stat().st_blocks * 512


def large_layout() -> BlobRows:
    """Return a layout with eight blocks of 100,008 bytes of vectors, so that blocks begin within pages."""
    return layout_of([8 * 8334], page_rows=1000, block_rows=8334)


def test_pages_before_the_first_block_that_is_left_are_holes(tmp_path: Path) -> None:
    """A page that two blocks share is kept for the second; other data is unchanged, and a reopening drops it again."""
    engine = ZarrEngine(tmp_path, create=True)
    contents = segment(large_layout(), 1)
    rest = publish(engine, 0, contents)[-1:]
    file = tmp_path / "segments/0.1/0/vector/c.0.0"
    whole = taken(file)
    for blocks in range(1, 8):
        left = drop_fronts(engine, contents, blocks)
        engine.drop([], shrink=True)
        assert blocks * 100_008 - PAGE_BYTES <= whole - taken(file) <= blocks * 100_008
        check(engine, left + rest)
    assert file.stat().st_size == 8 * 8334 * VECTOR_BYTES
    engine.close()
    engine = ZarrEngine(tmp_path, create=False)
    drop_fronts(engine, contents, 7)
    check(engine, left)
    engine.close()


def test_a_front_that_a_crash_kept_is_given_back_by_the_next_opening(tmp_path: Path) -> None:
    """From the array metadata alone."""
    contents = segment(large_layout(), 1)
    engine = ZarrEngine(tmp_path, create=True)
    publish(engine, 0, contents)
    engine.close()
    file = tmp_path / "segments/0.1/0/vector/c.0.0"
    whole, engine = taken(file), ZarrEngine(tmp_path, create=False)
    left = drop_fronts(engine, contents, 6)
    engine.drop([], shrink=True)
    assert whole - taken(file) >= 590_000
    check(engine, left)
    engine.close()


def test_files_and_folders_go_with_their_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk with its last block, the folder of a group with its last blob, and of a segment with its last group."""
    monkeypatch.setattr(zarr_layout, "PART_BYTES", 3 * 7 * VECTOR_BYTES + 5)  # chunks of three blocks of vectors
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
    engine.close()
