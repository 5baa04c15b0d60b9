"""What a crash left and a reader holds back: nothing is written to its names, so no later sweep deletes what counts."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest
import zarr

from tests.store.big import BIG, dump, load, publish
from tiercache.store import Store, StoreError, StoreFullError, ZarrEngine, zarr_objects
from tiercache.store.reader_mark import ReaderMark
from tiercache.store.testing.contract import bytes_of, form_of, given_as, segment_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[ReaderMark]:
    """The mark of a reader that has not said which commit it reads: nothing is deleted until it goes."""
    (tmp_path / "readers").mkdir()
    mark = ReaderMark(tmp_path / "readers")
    yield mark
    mark.release()


def test_a_commit_takes_no_name_of_a_record_that_a_killed_one_left(tmp_path: Path, mark: ReaderMark) -> None:
    """The record is deleted when the reader is gone, and those of the commits after it stay."""
    engine = ZarrEngine(tmp_path, create=True)
    engine.commit({"r": b"one"}, [])
    engine.close()
    left = tmp_path / "records" / "2.0"
    left.write_bytes(b"half")
    engine = ZarrEngine(tmp_path, create=False)
    engine.commit({"r": b"two"}, [])
    assert left.read_bytes() == b"half"
    mark.release()
    engine.commit({"s": b"three"}, [])
    engine.close()
    assert not left.exists()
    assert ZarrEngine(tmp_path, create=False).contents().records == {"r": b"two", "s": b"three"}


def test_a_commit_after_a_full_disk_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a reader opened while the disk was full, so that its mark never says anything."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "it is full")

    path = tmp_path / "s"
    with Store.open(path, tables=[BIG], engine="zarr") as store:
        dump(store, 0, {1: 32})
        publish(store, 1)
    with Store.open(path) as store:
        dump(store, 1, {2: 32, 9: 32})
        with monkeypatch.context() as patch:
            patch.setattr(zarr_objects.DiskStore, "publish", full)
            with pytest.raises(StoreFullError):
                publish(store, 2)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            reader = Store.open(path, mode="r")
    with Store.open(path) as store:
        wanted = dump(store, 1, {2: 32, 9: 32})
        publish(store, 2)
        reader.close()
        dump(store, 2, {3: 32})
        publish(store, 3)
    with Store.open(path, mode="r") as store:
        assert load(store, 9) == {1: wanted[9]}


def test_an_object_that_is_to_be_deleted_is_not_written(tmp_path: Path, mark: ReaderMark) -> None:
    """Whatever asks for it: the commit fails, and the store stands where it did."""
    engine = ZarrEngine(tmp_path, create=True)
    engine.commit({"r": b"one"}, [])
    engine.commit({"r": b"two"}, [])
    engine._next = 1
    with pytest.raises(StoreError, match=r"object records/1\.0 of .* is to be deleted and written"):
        engine.commit({"r": b"three"}, [])
    mark.release()
    engine.close()
    engine = ZarrEngine(tmp_path, create=False)
    assert engine.contents().records == {"r": b"two"}
    engine.close()


@pytest.mark.parametrize("left", ["zarr.json", "0/zarr.json", "0/keys/zarr.json", "0/vector/zarr.json"])
def test_arrays_are_described_in_a_folder_of_which_nothing_is_to_be_deleted(
    tmp_path: Path, mark: ReaderMark, left: str
) -> None:
    """Where a killed dump left a torn description, a segment gets a folder with descriptions of its own."""
    form = form_of((10, 20))
    blocks = segment_blocks(form, 1)
    engine = ZarrEngine(tmp_path, create=True)
    engine.commit({}, [])
    engine.close()
    torn = tmp_path / "segments" / "1" / left
    torn.parent.mkdir(parents=True)
    torn.write_bytes(b'{"zarr')
    engine = ZarrEngine(tmp_path, create=False)
    engine.write(given_as(blocks))
    engine.commit({}, [])
    mark.release()
    engine.commit({}, [])
    engine.close()
    assert {path.name for path in (tmp_path / "segments").iterdir()} == {"1~1", "zarr.json"}
    assert zarr.open(str(tmp_path), mode="r")["segments/1~1/0/vector"][:].shape[0] == form.stream.rows
    engine = ZarrEngine(tmp_path, create=False)
    for name, (data, _) in blocks.items():
        assert bytes_of(engine, name, form) == data.tobytes()
    engine.close()
