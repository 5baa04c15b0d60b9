"""What is special about Zarr: what stands where, for ``zarr.open`` too; objects that are torn, missing or swapped."""

import os
import shutil
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.storage import LocalStore, MemoryStore

from tests.files import files_of, flip
from tests.store.engine_contract import bytes_of, check, layout_of, put, segment_blocks, some_bytes, state_block
from tiercache.store.engines import zarr_chunks, zarr_layout
from tiercache.store.engines.engine import WRITE_BYTES, Block, BlockLayout
from tiercache.store.engines.zarr_chunks import Buffers
from tiercache.store.engines.zarr_engine import ZarrEngine
from tiercache.store.files import PAGE_BYTES, huge_pages, write_at
from tiercache.store.layout import CHANGED, KEYS, ROWS
from tiercache.store.store_errors import BlockReadError, CorruptStoreError, StoreInUseError

pytestmark = pytest.mark.disk

VECTOR = 12
"""Bytes of a vector of the layouts here: rows of 16 bytes with one number of state."""


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of three blocks of vectors of seven rows, and more of keys and state."""
    monkeypatch.setattr(zarr_layout, "CHUNK_BYTES", 3 * 7 * VECTOR + 5)


def made(path: Path, *blocks: Any) -> dict[Block, bytes]:
    """Make an engine with some blocks and a record, and close it."""
    engine = ZarrEngine(path, create=True)
    written = put(engine, blocks)
    engine.commit({"r": bytes(100)})
    engine.close()
    return written


def objects(path: Path) -> dict[str, bytes]:
    """Return the objects of a store, by name."""
    return {name: data for name, data in files_of(path).items() if name != "writer.lock"}


@pytest.mark.usefixtures("small_chunks")
def test_chunks_are_few_and_have_their_whole_length(tmp_path: Path) -> None:
    """Three blocks of vectors in each, nine of state; a layout with one chunk has no padding."""
    made(tmp_path, *segment_blocks(layout_of((10, 47)), 1), *segment_blocks(layout_of((10,)), 2))
    sizes = {name: len(data) for name, data in objects(tmp_path).items() if "/c." in name}
    chunk = 21 * VECTOR
    assert {name: size for name, size in sizes.items() if "vector" in name} == {
        "segments/1/0/vector/c.0.0": chunk,
        "segments/1/0/vector/c.1.0": chunk,
        "segments/1/0/vector/c.2.0": chunk,
        "segments/2/0/vector/c.0.0": 10 * VECTOR,
    }
    assert {size for name, size in sizes.items() if "1/0/sum" in name} == {57 * 4}
    assert {name for name in sizes if "2/0/keys" in name} == {"segments/2/0/keys/c.0"}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(st.integers(1, 400_000), min_size=1, max_size=6, unique=True),
    order=st.randoms(),
    direct=st.booleans(),
)
def test_bytes_are_written_to_any_place(tmp_path: Path, cuts: list[int], order: Any, direct: bool) -> None:
    """In any order, past the page cache or through it: neighbors share pages, and neither spoils the other's bytes."""
    ends = sorted(cuts)
    data, path = some_bytes(ends[-1], 3), tmp_path / "file"
    runs = list(zip([0, *ends[:-1]], ends, strict=True))
    order.shuffle(runs)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    second = os.open(path, os.O_WRONLY | os.O_DIRECT) if direct else None
    os.ftruncate(handle, data.size)
    for low, high in runs:
        lead = low % PAGE_BYTES
        buffer = huge_pages(lead + high - low)
        buffer[lead : lead + high - low] = data[low:high]
        write_at(handle, second, buffer, low, high - low)
    os.close(handle)
    if second is not None:
        os.close(second)
    assert path.read_bytes() == data.tobytes()


DAMAGES = ("missing", "short", "long", "folder", "pipe", "empty")


def spoil(file: Path, damage: str) -> None:
    """Damage a file, or put something else in its place."""
    data = file.read_bytes()
    file.unlink()
    match damage:
        case "short":
            file.write_bytes(data[:-1])
        case "long":
            file.write_bytes(data + b"\0")
        case "empty":
            file.write_bytes(b"")
        case "folder":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("array", ["keys", "vector", "sum", "changed"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_chunk_that_is_not_whole_is_a_sentence(
    tmp_path: Path, array: str, damage: str, compression: str | None
) -> None:
    """Never read as the array's fill value, never another error, and nothing waits for the end of a pipe."""
    written = made(tmp_path, *segment_blocks(layout_of((100, 900), block_rows=2000, compression=compression), 1))
    (chunk,) = (file for file in (tmp_path / "segments/1/0" / array).iterdir() if file.name != "zarr.json")
    spoil(chunk, damage)
    reader = ZarrEngine(tmp_path, create=False, readonly=True)
    kind = {"keys": KEYS, "changed": CHANGED}.get(array, ROWS)
    for block, data in written.items():
        if block.kind != kind:
            check(reader, {block: data})
            continue
        if damage in {"missing", "folder", "empty"} or compression is None:
            assert "is missing, as" in reader.problem(block) or "is not whole, as" in reader.problem(block)
        with pytest.raises(BlockReadError, match=r"is (missing|not whole), as|cannot be read|has checksum"):
            bytes_of(reader, block)
    reader.close()


@pytest.mark.parametrize("which", ["records", "manifests"])
@pytest.mark.parametrize("damage", [*DAMAGES, "flipped"])
def test_a_damaged_record_is_refused(tmp_path: Path, which: str, damage: str) -> None:
    """Missing, with other bytes, or something else in its place: an older commit does not stand in for it."""
    made(tmp_path)
    shutil.copytree(tmp_path / which, tmp_path / "copy")
    (file,) = (tmp_path / which).iterdir()
    if damage == "flipped":
        flip(file, file.stat().st_size // 2)
    else:
        spoil(file, damage)
    for readonly in (False, True):
        refused = pytest.raises(CorruptStoreError, match=r"(restore the store from a copy|mend that)")
        with refused, closing(ZarrEngine(tmp_path, create=False, readonly=readonly)) as engine:
            engine.records()
    shutil.rmtree(tmp_path / which)
    (tmp_path / "copy").rename(tmp_path / which)
    with closing(ZarrEngine(tmp_path, create=False)) as again:
        assert again.records() == {"r": bytes(100)}


def test_segments_without_a_manifest_are_no_new_store(tmp_path: Path) -> None:
    """They are what is left of one: nothing is deleted."""
    made(tmp_path, *segment_blocks(layout_of((10,)), 1))
    shutil.rmtree(tmp_path / "manifests")
    before = objects(tmp_path)
    for create in (False, True):
        with pytest.raises(CorruptStoreError, match=r"the manifest of .* is missing: restore the store from a copy"):
            ZarrEngine(tmp_path, create=create)
    assert objects(tmp_path) == before


def test_one_writer_at_a_time_whatever_way_it_was_opened(tmp_path: Path) -> None:
    """By path or as a store object of Zarr; readers are no writers, and closing lets the next one in."""
    ways = (lambda: tmp_path, lambda: LocalStore(tmp_path), lambda: str(tmp_path))
    made(tmp_path)
    for first in ways:
        engine = ZarrEngine(first(), create=False)
        assert engine.lease_folder == tmp_path / "leases"
        for second in ways:
            with pytest.raises(StoreInUseError, match="may have one writer: close it there"):
                ZarrEngine(second(), create=False)
            ZarrEngine(second(), create=False, readonly=True).close()
        engine.close()
    assert ZarrEngine(MemoryStore(), create=True).lease_folder is None


def test_a_reader_is_refused_to_write(tmp_path: Path) -> None:
    """Whatever it asks for."""
    made(tmp_path)
    reader = ZarrEngine(tmp_path, create=False, readonly=True)
    for call in (reader.commit, reader.write, reader.free, reader.retain):
        with pytest.raises(ValueError, match="is open for reading"):
            call({})
    reader.close()


def taken(path: Path) -> int:
    """Return the bytes that the file system keeps for a file."""
    return path.stat().st_blocks * 512


@pytest.mark.usefixtures("_large_chunks")
class TestRoom:
    """What is freed goes: pages out of chunks, chunks, folders."""

    @pytest.fixture
    def _large_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(zarr_layout, "CHUNK_BYTES", 1 << 20)

    @staticmethod
    def layout() -> BlockLayout:
        """Return one with eight blocks of 100,008 bytes of vectors, so that blocks begin within pages."""
        return layout_of((8 * 8334,), page_rows=1000, block_rows=8334)

    def test_pages_that_only_freed_blocks_have_are_holes(self, tmp_path: Path) -> None:
        """A page that two blocks share goes with the second; what stays is read as it was."""
        engine = ZarrEngine(tmp_path, create=True)
        written = put(engine, segment_blocks(self.layout(), 1))
        engine.commit({"r": b"1"})
        file = tmp_path / "segments/1/0/vector/c.0.0"
        whole, held = taken(file), dict(written)
        for index, least in ((3, 90_000), (5, 180_000), (4, 290_000), (7, 390_000), (0, 490_000)):
            gone = [block for block in held if block.index == index]
            engine.free(gone)
            engine.shrink()
            for block in gone:
                del held[block]
            assert least <= whole - taken(file) <= least + 20_000
            check(engine, held)
        assert file.stat().st_size == 8 * 8334 * VECTOR
        engine.close()
        # What a crash left is given back by the next opening.
        held = {block: data for block, data in held.items() if block.index == 6}
        engine = ZarrEngine(tmp_path, create=False)
        engine.retain(held)
        assert taken(file) < 120_000
        check(engine, held)
        engine.close()

    def test_files_and_folders_go_with_their_blocks(self, tmp_path: Path) -> None:
        """A chunk with its last block, the folder of a layout with its last chunk."""
        engine = ZarrEngine(tmp_path, create=True)
        written = put(engine, [*segment_blocks(self.layout(), 1), *segment_blocks(layout_of((10,)), 2)])
        written |= put(engine, [state_block(some_bytes(5000), 3, commit=7)])
        engine.commit({"r": b"1"})
        assert (tmp_path / "state/7.3").stat().st_size == 5000
        engine.free([block for block in written if block.kind == CHANGED and block.owner == 1])
        engine.shrink()
        assert {file.name for file in (tmp_path / "segments/1/0/changed").iterdir()} == {"zarr.json"}
        engine.free([block for block in written if block.owner == 1])
        engine.shrink()
        assert {file.name for file in (tmp_path / "segments").iterdir()} == {"2", "zarr.json"}
        engine.free(written)
        engine.shrink()
        assert {file.name for file in (tmp_path / "segments").iterdir()} == {"zarr.json"}
        assert not list((tmp_path / "state").iterdir())
        engine.close()


def test_an_opening_for_writing_deletes_what_a_crash_left(tmp_path: Path) -> None:
    """Half-written objects, chunks and records that nothing names, bare folders; a reader deletes nothing."""
    written = made(tmp_path, *segment_blocks(layout_of((10,)), 1), state_block(some_bytes(50)))
    before = objects(tmp_path)
    left = [
        "segments/9/0/vector/c.0.0", "segments/9/0/vector/zarr.json", "segments/9/zarr.json", "state/8.0",
        "segments/1/0/vector/c.7.0", "segments/1/1/keys/c.0", "records/7-x", "records/1-x", "manifests/9.01.partial",
        "manifests/0",
    ]  # fmt: skip
    for name in left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"left")
    (tmp_path / "segments/8/0/vector").mkdir(parents=True)
    ZarrEngine(tmp_path, create=False, readonly=True).close()
    assert objects(tmp_path) == before | dict.fromkeys(left, b"left")
    engine = ZarrEngine(tmp_path, create=False)
    engine.retain(written)
    check(engine, written)
    assert objects(tmp_path) == before
    assert {path.name for path in (tmp_path / "segments").iterdir()} == {"1", "zarr.json"}
    engine.commit({"s": b"2"})
    assert (tmp_path / "records/8-s").exists()
    engine.close()


@pytest.mark.parametrize("place", ["disk", "elsewhere"])
def test_a_write_that_fails_leaves_no_object(tmp_path: Path, place: str) -> None:
    """And the same blocks can be written after it."""
    store: Any = tmp_path if place == "disk" else MemoryStore()
    engine = ZarrEngine(store, create=True)
    blocks = segment_blocks(layout_of((9, 12), block_rows=6))

    def failing():  # type: ignore[no-untyped-def]
        yield from blocks
        raise OSError("the source broke")

    with pytest.raises(OSError, match="the source broke"):
        engine.write(failing())
    assert not [key for key in engine._objects.sizes("segments") if key != "segments/zarr.json"]
    check(engine, put(engine, blocks))
    engine.close()


@pytest.mark.usefixtures("small_chunks")
def test_elsewhere_a_chunk_is_set_once_when_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever writes its blocks come; what is not whole is read from memory, and set by the commit."""
    engine = ZarrEngine(MemoryStore(), create=True)
    sets: list[str] = []
    put_ = engine._objects.put
    monkeypatch.setattr(engine._objects, "put", lambda key, data: (sets.append(key), put_(key, data)))
    layout = layout_of((10, 47))
    written: dict[Block, bytes] = {}
    for data in segment_blocks(layout, 1)[:-3]:
        written |= put(engine, [data])
        check(engine, written)
    chunks = [key for key in sets if "/vector/c." in key]
    assert chunks == ["segments/1-1/0/vector/c.0.0", "segments/1-1/0/vector/c.1.0"]
    engine.commit({"r": b"1"})
    assert [key for key in sets if "/vector/c." in key] == [*chunks, "segments/1-1/0/vector/c.2.0"]
    written |= put(engine, segment_blocks(layout, 1)[-3:])
    engine.commit({"r": b"2"})
    check(engine, written)
    engine.close()


def test_a_writer_holds_bounded_memory() -> None:
    """Buffers are used again, and one more is not given before one came back; a large one comes alone."""
    buffers = Buffers()
    held = [buffers.take(16 << 20) for _ in range(4)]
    assert sum(buffer.size for buffer in held) <= WRITE_BYTES
    import threading

    got: list[np.ndarray] = []
    waiting = threading.Thread(target=lambda: got.append(buffers.take(16 << 20)))
    waiting.start()
    assert not got
    first = held.pop()
    buffers.give(first)
    waiting.join()
    assert got[0] is first
    for buffer in (*held, *got):
        buffers.give(buffer)
    large = buffers.take(2 * WRITE_BYTES)
    assert large.size >= 2 * WRITE_BYTES


def test_copies_of_blocks_keep_to_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 blocks of 16 KiB, 64 KiB at a time; the rows are all there."""
    taken: list[weakref.ref[np.ndarray]] = []
    most = 0

    def take(num_bytes: int) -> np.ndarray:
        nonlocal most
        buffer = huge_pages(num_bytes)
        taken.append(weakref.ref(buffer))
        most = max(most, sum(one.nbytes for one in (ref() for ref in taken) if one is not None))
        return buffer

    monkeypatch.setattr(zarr_chunks, "huge_pages", take)
    layout = layout_of((65536,), block_rows=1024)
    blocks = segment_blocks(layout, 1)
    engine = ZarrEngine(tmp_path / "store", create=True)
    engine.memory_bytes = 64 << 10
    written = put(engine, blocks)
    engine.commit({"r": b"1"})
    assert 0 < most <= 64 << 10
    check(engine, written)
    engine.close()
