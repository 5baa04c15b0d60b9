"""What is special about Zarr: objects that are torn, missing, cut short or left over; readers; files that go."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
from zarr.storage import LocalStore, MemoryStore

from tests.files import files_of
from tests.store.big import dump, load, publish
from tiercache.store import (
    BlockReadError,
    CorruptBlockError,
    CorruptStoreError,
    Store,
    StoreError,
    StoreFullError,
    ZarrEngine,
    info,
    verify,
)
from tiercache.store.direct_file import write_file
from tiercache.store.testing.contract import bytes_of, form_of, given_as, segment_blocks
from tiercache.store.testing.world import World
from tiercache.store.zarr_objects import DiskStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tiercache.store import Segment, Table

pytestmark = pytest.mark.disk


@pytest.fixture
def store(tmp_path: Path, tables: list[Table]) -> Iterator[Store]:
    """A store on Zarr with two passes in it, closed."""
    with Store.open(tmp_path / "s", tables=tables, engine="zarr") as store:
        World(tables).run(store, 2)
    return store


def files(path: Path, *, but: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Return the objects of a store, by name."""
    found = files_of(path)
    return {name: data for name, data in found.items() if not name.startswith(("writer.lock", "readers", *but))}


def read_all(store: Store, segment: Segment, group: int) -> None:
    """Read all rows and keys of a segment stream."""
    stream = segment.streams[group]
    store.read(segment, group, 0, stream.num_pieces, np.empty(stream.rows * stream.row_bytes, np.uint8))
    for block in range(stream.num_blocks):
        store.read_keys(segment, group, block)


def newest(path: Path) -> Path:
    """Return the newest manifest of a store."""
    return max((path / "manifests").iterdir(), key=lambda file: int(file.name))


@pytest.mark.parametrize(
    ("array", "damage", "compression"),
    [
        *((array, damage, None) for array in ("keys", "vector", "sum") for damage in ("missing", "short", "long")),
        ("vector", "missing", "zstd"),
        ("vector", "short", "blosc"),
        ("vector", "long", "zstd"),
        ("keys", "long", "blosc"),
    ],
)
def test_a_chunk_that_is_not_whole_is_refused(
    tmp_path: Path, tables: list[Table], array: str, damage: str, compression: str | None
) -> None:
    """Never read as the array's fill value: on opening, and on reading where it went while the store was open."""
    path, tables = tmp_path / "s", [replace(table, compression=compression) for table in tables]
    with Store.open(path, tables=tables, engine="zarr") as store:
        World(tables).run(store, 2)
    with Store.open(path, mode="r") as reader:
        group = next(g for g in reader.groups if array in {"keys", *(f.name for f in g.fields)})
        segment = reader.segments[-1]
        folder = path / "segments" / str(segment.id) / str(group.index) / array
        chunk = max(file for file in folder.iterdir() if file.name != "zarr.json")
        data = chunk.read_bytes()
        if damage == "missing":
            chunk.unlink()
        else:
            chunk.write_bytes(data[:-1] if damage == "short" else data + b"\0")
        words = rf"block \d+ of segment {segment.id} .* is (missing|not whole), as"
        if compression is None or damage == "missing":
            with pytest.raises(CorruptBlockError, match=words):
                read_all(reader, segment, group.index)
    words = "is missing" if damage == "missing" else r"has [0-9,]+ bytes of [0-9,]+"
    for mode in ("a", "r"):
        with pytest.raises(CorruptBlockError, match=words + ": restore the store from a copy"):
            Store.open(path, mode=mode)
    if array == "vector":
        assert len(verify(path)["problems"]) == 1
    chunk.write_bytes(data)
    Store.open(path).close()


def test_a_damaged_record_is_refused(store: Store) -> None:
    """Missing, or with other bytes."""
    assert store.path is not None
    for record in (store.path / "records").iterdir():
        data = record.read_bytes()
        for wrong in (None, data[:-1], bytes([data[0] ^ 1]) + data[1:]):
            record.unlink()
            if wrong is not None:
                record.write_bytes(wrong)
            with pytest.raises(CorruptStoreError, match=r"object records/.*: restore the store from a copy"):
                Store.open(store.path)
            record.write_bytes(data)
    Store.open(store.path).close()


def test_a_writer_deletes_what_a_crash_left_and_a_reader_does_not(store: Store) -> None:
    """Half-written objects, chunks and records that no manifest names, folders without a chunk, dead readers' marks."""
    assert store.path is not None
    before = files(store.path)
    left = [
        "zarr.0123.partial", "segments/9/0/vector/c.0.0", "segments/9/0/vector/zarr.json", "segments/9/zarr.json",
        "segments/9/0/vector/c.1.0123.partial", "blocks/00ff", "records/7.0", "manifests/9.0123.partial",
        "manifests/1", "manifests/99.partial", "readers/12-ab",
    ]  # fmt: skip
    for name in left:
        (store.path / name).parent.mkdir(parents=True, exist_ok=True)
        (store.path / name).write_bytes(b"left")
    (store.path / "segments/8/0/vector").mkdir(parents=True)
    Store.open(store.path, mode="r").close()
    assert files(store.path) == before | {name: b"left" for name in left if not name.startswith("readers")}
    Store.open(store.path).close()
    assert files(store.path) == before
    assert not list((store.path / "readers").iterdir())
    assert {path.name for path in (store.path / "segments").iterdir()} == {"zarr.json"} | {
        str(segment.id) for segment in store.segments
    }


def test_files_go_with_the_rows_and_stay_for_readers(big_zarr: Store) -> None:
    """A steady state holds live rows; a reader keeps those of its commit, and gives them back when it closes."""
    assert big_zarr.path is not None
    sizes = []
    for pass_index in range(12):
        dump(big_zarr, pass_index, {pass_index + 1: 100, pass_index + 2: 60, pass_index + 4: 130})
        publish(big_zarr, pass_index + 1, bytes(5000))
        big_zarr._engine._sweep.wait()
        sizes.append(info(big_zarr.path)["file_bytes"])
        named = {key.split("/")[1] for key in files(big_zarr.path) if key.startswith("segments/") and "/c." in key}
        assert named == {str(segment.id) for segment in big_zarr.segments}
    stored = load(big_zarr, 12)
    reader = Store.open(big_zarr.path, mode="r")
    for pass_index in range(12, 24):
        dump(big_zarr, pass_index, {pass_index + 1: 100, pass_index + 2: 60, pass_index + 4: 130})
        publish(big_zarr, pass_index + 1, bytes(5000))
    assert load(reader, 12) == stored
    held = info(big_zarr.path)["file_bytes"]
    reader.close()
    publish(big_zarr, 24, bytes(5000))
    big_zarr.close()
    end = info(big_zarr.path)["file_bytes"]
    assert end < held
    assert max(sizes[5:]) < 1.01 * min(sizes[5:])
    assert end < 1.01 * max(sizes[5:])


def test_objects_of_one_name_are_never_written_over(tmp_path: Path) -> None:
    """A name that a reader still knows gets another folder: both are read as they were written."""
    form = form_of((10, 20))
    engine = ZarrEngine(tmp_path, create=True)
    first = segment_blocks(form, 1)
    engine.write(given_as(first))
    engine.commit({}, [])
    reader = ZarrEngine(tmp_path, create=False, readonly=True)
    engine.commit({}, [*first])
    second = {name: (data ^ 255, form) for name, (data, form) in first.items()}
    engine.write(given_as(second))
    engine.commit({}, [])
    for held, blocks in ((reader, first), (engine, second)):
        for name, (data, _) in blocks.items():
            assert bytes_of(held, name, form) == data.tobytes()
    assert {path.name for path in (tmp_path / "segments").iterdir()} == {"1", "1~1", "zarr.json"}
    reader.close()
    engine.commit({}, [])
    engine.close()
    assert {path.name for path in (tmp_path / "segments").iterdir()} == {"1~1", "zarr.json"}


@pytest.mark.parametrize("at", ["file", "manifest"])
def test_a_sync_that_failed_is_never_called_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """The commit fails, those after it too, and the store opens where it stood."""
    engine = ZarrEngine(tmp_path, create=True)
    engine.commit({"r": b"1"}, [])
    engine.write([(b"a", np.zeros(10, np.uint8), None)])
    from tiercache.store import zarr_objects

    def failing(sync: Callable[[str], None], path: str) -> None:
        if at == "file" or "manifests" in path:
            raise OSError(5, "the disk broke")
        sync(path)

    for name in ("sync_file", "sync_folder"):
        monkeypatch.setattr(zarr_objects, name, partial(failing, getattr(zarr_objects, name)))
    with pytest.raises(StoreError, match=r"cannot be written .*the disk broke"):
        engine.commit({"r": b"2"}, [])
    monkeypatch.undo()
    assert engine.contents().records == {"r": b"1"}
    with pytest.raises(StoreError, match="could not be synced: mend that and open the store again"):
        engine.commit({"r": b"3"}, [])
    engine.close()
    engine = ZarrEngine(tmp_path, create=False)
    assert engine.contents().records == {"r": b"1"}
    assert engine.contents().blocks == {}
    engine.commit({"r": b"4"}, [])
    engine.close()


def test_a_disk_that_is_full_is_a_sentence_at_every_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it fills up, in chunks, descriptions, records or the manifest, the store stays at its commit."""
    engine = ZarrEngine(tmp_path, create=True)
    form = form_of((10, 20))
    engine.write(given_as(segment_blocks(form, 0)))
    engine.commit({"r": b"0"}, [])
    from tiercache.store import zarr_objects

    put, set_ = write_file, LocalStore.set_sync
    left = 0

    def spend() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(zarr_objects, "write_file", lambda *a: (spend(), put(*a)))
    monkeypatch.setattr(LocalStore, "set_sync", lambda *a: (spend(), set_(*a)))
    before, writes = engine.contents(), 0
    while True:
        left = writes
        try:
            engine.write(given_as(segment_blocks(form, 1)))
            engine.commit({"r": b"1"}, [*segment_blocks(form, 0)])
        except StoreFullError as error:
            assert "free some" in str(error)  # noqa: PT017 - what else is raised fails the test
            dead = [name for name in engine.contents().blocks if name not in before.blocks]
            left = 1000
            engine.commit({}, dead)
            assert engine.contents() == before
            writes += 1
        else:
            break
    assert writes > 10
    engine.close()
    assert ZarrEngine(tmp_path, create=False).contents().records == {"r": b"1"}


def test_max_bytes_bound_the_chunks_with_their_zeros(tmp_path: Path) -> None:
    """A last block has the chunk of a whole one: where only its rows fit, it is refused."""
    form = form_of((10, 20))
    blocks = segment_blocks(form, 0)
    needed = {}
    for name, less in (("a", None), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        engine = ZarrEngine(tmp_path / name, create=True, max_bytes=None if less is None else needed["a"] - less)
        if less == 1:
            with pytest.raises(StoreFullError, match="raise max_bytes"):
                engine.write(given_as(blocks))
        else:
            engine.write(given_as(blocks))
            needed[name] = sum(file.stat().st_size for file in (tmp_path / name / "segments").rglob("c.*"))
        engine.close()
    assert sum(data.nbytes for data, _ in blocks.values()) < needed["a"] == needed["b"]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_max_bytes_bound_a_store_that_is_opened_again_wherever_it_is(tmp_path: Path, compression: str | None) -> None:
    """A store object does not say what its objects hold, and the manifest does."""
    form = form_of((10, 20), compression=compression)
    first, second = segment_blocks(form, 0), segment_blocks(form, 1)
    for place in (tmp_path / "s", MemoryStore()):
        engine = ZarrEngine(place, create=True)
        engine.write(given_as(first))
        engine.commit({"r": b"1"}, [])
        held = engine._sweep.chunk_bytes
        engine.write(given_as(second))
        most = held + sum(data.nbytes for data, _ in second.values()) // 2
        engine.commit({}, second)
        engine.close()
        engine = ZarrEngine(place, create=False, max_bytes=most)
        with pytest.raises(StoreFullError, match=rf"take [\d,]+ and may hold {most:,}"):
            engine.write(given_as(second))
        assert engine._sweep.chunk_bytes == held
        engine.close()


def test_a_store_object_of_zarr_may_be_given_instead_of_a_path(tmp_path: Path) -> None:
    """One for a folder is synced and read past the page cache as a path is."""
    engine = ZarrEngine(LocalStore(tmp_path / "s"), create=True)
    engine.write([(b"a", np.arange(10, dtype=np.uint8), None)])
    engine.commit({"r": b"1"}, [])
    engine.close()
    again = ZarrEngine(DiskStore(tmp_path / "s"), create=False)
    assert bytes_of(again, b"a") == bytes(range(10))
    again.close()


def test_a_read_of_a_block_that_is_gone_is_an_error_in_words(tmp_path: Path) -> None:
    """Whether the chunk or all of its folder went."""
    form = form_of((10,))
    engine = ZarrEngine(tmp_path, create=True)
    engine.write(given_as(segment_blocks(form)))
    shutil.rmtree(tmp_path / "segments" / "0")
    for name, (data, _) in segment_blocks(form).items():
        with pytest.raises(BlockReadError, match=r"is missing, as there is no .*segments/0/0/"):
            engine.read(name, 0, np.empty(data.size, np.uint8), form)
    engine.close()
