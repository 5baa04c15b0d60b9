"""The Zarr engine's objects, also read by ``zarr.open``, and errors for torn, missing and leftover ones."""

import os
import threading
import weakref
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.storage import LocalStore, MemoryStore

from tests.files import files_of
from tests.store.blobs import (
    OPTIMIZERS,
    Content,
    bytes_of,
    check,
    drop_all,
    drop_fronts,
    layout_of,
    plain,
    publish,
    put,
    segment,
    some_bytes,
)
from tiercache.store.engines import zarr_chunks, zarr_layout
from tiercache.store.engines.engine import WRITE_BYTES
from tiercache.store.engines.zarr_chunks import Buffers
from tiercache.store.engines.zarr_engine import ZarrEngine
from tiercache.store.files import PAGE_BYTES, huge_pages, paged, write_at
from tiercache.store.store_errors import BlockReadError, StoreInUseError

pytestmark = pytest.mark.disk

VECTOR = 12
"""Bytes of a vector in these layouts: rows of 16 bytes with one number of state."""


@pytest.fixture
def small_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use chunks with three blocks of vectors of seven rows, and more of keys and state."""
    monkeypatch.setattr(zarr_layout, "PART_BYTES", 3 * 7 * VECTOR + 5)


def made(path: Path, *contents: Content) -> list[Content]:
    """Create an engine with some blobs and a commit, and close it."""
    engine = ZarrEngine(path, create=True)
    put_ = publish(engine, 0, contents)
    engine.close()
    return put_


def objects(path: Path) -> dict[str, bytes]:
    return {name: data for name, data in files_of(path).items() if name != "writer.lock"}


# -- the objects ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_objects")
def test_chunks_are_few_and_have_their_whole_length(tmp_path: Path) -> None:
    """Three blocks of vectors in each, nine of state; a layout with one chunk has no padding."""
    made(tmp_path, *segment(layout_of([10, 47]), 1)[1:], *segment(layout_of([10]), 2)[1:])
    sizes = {name: len(data) for name, data in objects(tmp_path).items() if "/c." in name}
    chunk = 21 * VECTOR
    assert {name: size for name, size in sizes.items() if "vector" in name} == {
        "segments/0.1/0/vector/c.0.0": chunk,
        "segments/0.1/0/vector/c.1.0": chunk,
        "segments/0.1/0/vector/c.2.0": chunk,
        "segments/0.2/0/vector/c.0.0": 10 * VECTOR,
    }
    assert {size for name, size in sizes.items() if "0.1/0/sum" in name} == {57 * 4}
    assert {name for name in sizes if "0.2/0/keys" in name} == {"segments/0.2/0/keys/c.0"}


def test_a_large_blob_is_cut_into_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zarr_layout, "PART_BYTES", 1 << 16)
    data = some_bytes(300_000)
    contents = made(
        tmp_path, plain("states/0.1", data, 20_480), plain("states/0.2", data), plain("states/0.3", data[:1])
    )
    names = [f"states/0.{i}{part}" for i in (1, 2) for part in ("", ".1", ".2", ".3", ".4")]
    assert sorted(name for name in objects(tmp_path) if name.startswith("states")) == [*names, "states/0.3"]
    assert b"".join((tmp_path / name).read_bytes() for name in names[:5]) == data.tobytes()
    engine = ZarrEngine(tmp_path, create=False)
    check(engine, contents)
    assert bytes_of(engine, contents[0].blob, 60_000, 200_001) == data[60_000:200_001].tobytes()
    drop_all(engine, contents[:1], shrink=True)
    assert engine.list().keys() == {"states/0.2", "states/0.3", "commits/0"}
    assert not list((tmp_path / "states").glob("0.1*"))
    (tmp_path / "states/0.2.2").unlink()
    assert engine.list()["states/0.2"].size == 2 << 16


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(st.integers(1, 400_000), min_size=1, max_size=6, unique=True),
    order=st.randoms(),
    direct=st.booleans(),
)
def test_bytes_are_written_to_any_place(tmp_path: Path, cuts: list[int], order: Any, direct: bool) -> None:
    """In any order, past the page cache or through it: neighbors share pages, and neither damages the other's bytes."""
    runs = list(pairwise([0, *sorted(cuts)]))
    data, path = some_bytes(max(cuts), 3), tmp_path / "file"
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


def test_a_read_over_blocks_has_zeros_between_them(tmp_path: Path) -> None:
    contents = made(tmp_path, *segment(layout_of([17], page_rows=100), 1))
    engine = ZarrEngine(tmp_path, create=False, readonly=True)
    for blob, pieces in contents[1:4]:
        whole = np.zeros(blob.size, np.uint8)
        for at, data in pieces.items():
            whole[at : at + data.size] = data
        assert bytes_of(engine, blob, 0, blob.size) == whole.tobytes()
    with pytest.raises(BlockReadError, match="ends at byte 5,000 of 5,001"):
        bytes_of(engine, contents[0].blob, 1, 5001)


# -- damage --------------------------------------------------------------------------------------------------

DAMAGES = ("missing", "short", "long", "folder", "pipe", "empty")


def spoil(file: Path, damage: str) -> None:
    """Damage a file, or replace it by something else."""
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
def test_a_chunk_that_is_not_whole_is_an_error_in_words(
    tmp_path: Path, array: str, damage: str, compression: str | None
) -> None:
    """Never the array's fill value, and no wait for the end of a pipe."""
    contents = made(tmp_path, *segment(layout_of([100, 900], block_rows=2000, compression=compression), 1))
    (chunk,) = (file for file in (tmp_path / "segments/0.1/0" / array).iterdir() if file.name != "zarr.json")
    spoil(chunk, damage)
    reader = ZarrEngine(tmp_path, create=False, readonly=True)
    kind = array if array in {"keys", "changed"} else "rows"
    for one in contents:
        if not one.blob.name.endswith(kind):
            check(reader, [one])
            continue
        if damage in {"missing", "folder", "empty"} or compression is None:
            stored = reader.list()[one.blob.name]
            assert stored.dropped > 0 or stored.size < one.blob.size
        with pytest.raises(BlockReadError, match=r"is (missing|incomplete):|cannot be read|has checksum"):
            bytes_of(reader, one.blob, 0, one.blob.size)


@pytest.mark.usefixtures("small_objects")
def test_a_blob_ends_where_a_chunk_is_missing(tmp_path: Path) -> None:
    """In any field; missing chunks at the front may have been dropped."""
    contents = made(tmp_path, *segment(layout_of([63]), 1)[1:])
    rows, engine = contents[0].blob, ZarrEngine(tmp_path, create=False, readonly=True)
    step = paged(7 * 16)
    assert engine.list()[rows.name] == (rows.size, 0)
    (tmp_path / "segments/0.1/0/vector/c.2.0").unlink()
    assert engine.list()[rows.name] == (6 * step, 0)
    (tmp_path / "segments/0.1/0/vector/c.0.0").unlink()
    assert engine.list()[rows.name] == (6 * step, 3 * step)
    (tmp_path / "segments/0.1/0/sum/c.0.0").write_bytes(b"short")
    assert engine.list()[rows.name] == (rows.size, rows.size)


NO_ROWS = (
    b'{"shape": [9], "attributes": {"page_rows": 1, "block_rows": 0, "compression": null, "fields": [["v", 1, "f"]]}}'
)


@pytest.mark.parametrize(
    "node", [b"", b"{", b"[]", b'{"shape": []}', NO_ROWS, NO_ROWS.replace(b"[[", b'[["w", 0, "f"], ['), b"\xff"]
)
def test_arrays_that_nothing_describes_are_leftovers(tmp_path: Path, node: bytes) -> None:
    contents = made(tmp_path, *segment(layout_of([10]), 1))
    nodes = [*(tmp_path / "segments/0.1/0").glob("*/zarr.json")]
    whole = nodes[0].read_bytes()
    for path in nodes:
        path.write_bytes(node)
    engine = ZarrEngine(tmp_path, create=False, readonly=True)
    for one in contents[1:4]:
        assert engine.list()[one.blob.name] == (0, 0)
    keys = contents[2]
    assert bytes_of(engine, keys.blob, 0, 56) == keys.pieces[0].tobytes()
    engine.close()
    engine = ZarrEngine(tmp_path, create=False)
    drop_all(engine, [keys], shrink=True)
    assert not (tmp_path / "segments/0.1/0/keys").exists()
    engine.close()
    for path in nodes:
        if path.parent.exists():
            path.write_bytes(whole)
    engine = ZarrEngine(tmp_path, create=False)
    check(engine, [one for one in contents if one is not keys])


def test_one_object_of_a_group_says_how_long_its_blobs_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing reads only one unknown object."""
    ways = (None, "zstd", "blosc")
    segments = [segment(layout_of([10, 47], compression=way), i) for i, way in enumerate(ways)]
    contents = made(tmp_path, *chain(*segments))
    engine = ZarrEngine(tmp_path, create=False)
    get_all = Mock(side_effect=engine._objects.get_all)
    monkeypatch.setattr(engine._objects, "get_all", get_all)
    for _ in range(2):
        assert engine.list() == {one.blob.name: (one.blob.size, 0) for one in contents}
    read = [name for call in get_all.call_args_list for name in call.args[0]]
    assert sorted(name.rsplit("/", 2)[0] for name in read) == [f"segments/0.{i}/0" for i in range(3)]


def test_a_blob_that_is_not_what_its_layout_says_is_refused(tmp_path: Path) -> None:
    engine = ZarrEngine(tmp_path, create=True)
    for compression in (None, "zstd"):
        rows = segment(layout_of([9], block_rows=6, compression=compression), 1)[1]
        wrong = rows._replace(blob=rows.blob._replace(size=rows.blob.size + 16))
        with pytest.raises(ValueError, match=r"has .* bytes, but its layout has"):
            put(engine, [wrong])
        with pytest.raises(BlockReadError, match="is not what its layout says"):
            bytes_of(engine, wrong.blob, 0, 16)
        cut = rows._replace(pieces={at: data[:16] for at, data in rows.pieces.items()})
        with pytest.raises(ValueError, match="is not a block of it"):
            put(engine, [cut])
    assert engine.list() == {}


# -- writers -------------------------------------------------------------------------------------------------


def test_one_writer_at_a_time_whatever_way_it_was_opened(tmp_path: Path) -> None:
    made(tmp_path)
    for first in (tmp_path, LocalStore(tmp_path), str(tmp_path)):
        engine = ZarrEngine(first, create=False)
        assert engine.lease_folder == tmp_path / "leases"
        for second in (tmp_path, LocalStore(tmp_path), str(tmp_path)):
            with pytest.raises(StoreInUseError, match="can have only one writer: close it there"):
                ZarrEngine(second, create=False)
            ZarrEngine(second, create=False, readonly=True).close()
        engine.close()
    assert ZarrEngine(MemoryStore(), create=True).lease_folder is None


def test_a_reader_is_refused_to_write(tmp_path: Path) -> None:
    contents = made(tmp_path)
    reader = ZarrEngine(tmp_path, create=False, readonly=True)
    for call in (lambda: put(reader, contents), lambda: publish(reader, 1), lambda: reader.drop([])):
        with pytest.raises(ValueError, match="is open for reading"):
            call()
    reader.close()
    ZarrEngine(tmp_path / "none", create=False, readonly=True).close()
    assert not (tmp_path / "none").exists()


def test_an_opening_for_writing_finds_what_a_crash_left(tmp_path: Path) -> None:
    contents = made(tmp_path, *segment(layout_of([10]), 1), plain("states/0.1", some_bytes(50)))
    before = objects(tmp_path)
    left = [
        "segments/0.9/0/vector/c.0.0", "segments/0.9/0/vector/zarr.json", "segments/0.9/zarr.json", "states/0.8",
        "segments/0.1/1/keys/c.0", "segments/0.6/0/zarr.json", "commits/7", "states/0.9.4", "heads/9.01.partial",
        "heads/0", "segments/0.4/meta", "ranks/0.7", "segments/0.5/zarr.json",
    ]  # fmt: skip
    others = ["states.txt", "notes/states", "tables.txt"]
    for name in left + others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"left")
    bare = ["segments/0.8/0/vector", "segments/0.3/0", "segments/0.2"]
    for name in bare:
        (tmp_path / name).mkdir(parents=True)
    after = objects(tmp_path)
    reader = ZarrEngine(tmp_path, create=False, readonly=True)
    reader.list()
    reader.close()
    assert objects(tmp_path) == after
    engine = ZarrEngine(tmp_path, create=False)
    needed = {one.blob.name for one in contents}
    assert engine.list().keys() - needed == {
        "segments/0.9/0/rows", "states/0.8", "segments/0.1/1/keys", "segments/0.6/0/rows", "commits/7", "states/0.9.4",
        "segments/0.4/meta", "ranks/0.7", "segments/0.5/meta", "segments/0.8/0/rows", "segments/0.3/0/rows",
        "segments/0.2/meta",
    }  # fmt: skip
    engine.drop([(name, None) for name in engine.list() if name not in needed], shrink=True)
    check(engine, contents)
    assert objects(tmp_path) == before | dict.fromkeys(others, b"left")
    assert {path.name for path in (tmp_path / "segments").iterdir()} == {"0.1", "zarr.json"}
    assert {path.name for path in (tmp_path / "segments/0.1").iterdir()} == {"0", "meta", "zarr.json"}


# -- memory --------------------------------------------------------------------------------------------------


def test_a_writer_holds_bounded_memory() -> None:
    """Buffers are reused, and a further one waits until one is returned; a large one is exclusive."""
    buffers, got = Buffers(), list[np.ndarray]()
    held = [buffers.take(16 << 20) for _ in range(4)]
    assert sum(buffer.size for buffer in held) <= WRITE_BYTES
    waiting = threading.Thread(target=lambda: got.append(buffers.take(16 << 20)))
    waiting.start()
    assert not got
    first = held.pop()
    buffers.give(first)
    waiting.join()
    assert got[0] is first
    for buffer in (*held, *got):
        buffers.give(buffer)
    assert buffers.take(2 * WRITE_BYTES).size >= 2 * WRITE_BYTES


def test_copies_of_parts_keep_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 blocks of 16 KiB, 64 KiB at a time."""
    taken: list[weakref.ref[np.ndarray]] = []
    sizes: list[int] = []

    def take(num_bytes: int) -> np.ndarray:
        buffer = huge_pages(num_bytes)
        taken.append(weakref.ref(buffer))
        sizes.append(sum(one.nbytes for one in (ref() for ref in taken) if one is not None))
        return buffer

    monkeypatch.setattr(zarr_chunks, "huge_pages", take)
    engine = ZarrEngine(tmp_path / "store", create=True)
    engine.memory_bytes = 64 << 10
    contents = publish(engine, 0, segment(layout_of([65536], block_rows=1024), 1))
    assert 0 < max(sizes) <= 64 << 10
    check(engine, contents)


def test_a_writer_looks_for_its_blobs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = made(tmp_path, *segment(layout_of([30]), 1))
    engine = ZarrEngine(tmp_path, create=False)
    sizes = Mock(side_effect=engine._objects.sizes)
    monkeypatch.setattr(engine._objects, "sizes", sizes)
    assert engine.list().keys() == {one.blob.name for one in contents}
    drop_fronts(engine, contents, 2)
    put(engine, [plain("states/0.1", some_bytes(10))])
    drop_all(engine, contents[:1])
    assert sizes.call_count == 1


# -- room that dropped fronts leave ---------------------------------------------------------------------------


def taken(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_pages_before_the_first_block_that_is_left_are_holes(tmp_path: Path) -> None:
    """A page that two blocks share is kept for the second. A reopened engine knows blocks from array metadata alone."""
    engine = ZarrEngine(tmp_path, create=True)
    contents = segment(layout_of([8 * 8334], page_rows=1000, block_rows=8334), 1)  # blocks of 100,008 bytes of vectors
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


@pytest.mark.usefixtures("small_objects")
def test_files_and_folders_go_with_their_blocks(tmp_path: Path) -> None:
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
