"""Records beyond what one read returns and what one value of LMDB holds: read whole, and kept in parts."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store import independent_reader
from tests.store.conftest import small_tables
from tests.store.world import World
from tiercache.store import LmdbEngine, Store
from tiercache.store.engines import lmdb_records
from tiercache.store.engines.lmdb_records import LmdbFile
from tiercache.store.files import read_at, read_whole

KINDS = pytest.mark.parametrize("kind", ["lmdb", "zarr"])
PART = 700


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of at most so many bytes, in place of a gibibyte."""
    monkeypatch.setattr(lmdb_records, "PART_BYTES", PART)
    monkeypatch.setattr(independent_reader, "PART_BYTES", PART)


@pytest.fixture(params=[7, 999, 4096])
def short_reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no read return more than so many bytes, as Linux has none return more than 2,147,479,552."""
    most, pread, preadv = request.param, os.pread, os.preadv

    def shortened(handle: int, buffers: list[Any], offset: int) -> int:
        views, room = [], most
        for buffer in buffers:
            view = memoryview(buffer).cast("B")[:room]
            views.append(view)
            room -= len(view)
        return preadv(handle, [view for view in views if len(view)], offset)

    monkeypatch.setattr(os, "pread", lambda handle, size, offset: pread(handle, min(size, most), offset))
    monkeypatch.setattr(os, "preadv", shortened)


@pytest.mark.usefixtures("short_reads")
@pytest.mark.parametrize("size", [0, 1, 6, 7, 8, 998, 999, 1000, 5000])
def test_a_file_is_read_to_its_end_by_any_number_of_reads(tmp_path: Path, size: int) -> None:
    """From any byte on, and not beyond."""
    data = os.urandom(size)
    path = tmp_path / "file"
    path.write_bytes(data)
    assert read_whole(str(path)) == data
    for last in (1, 7, 2000):
        assert read_whole(str(path), last) == data[-last:]
    with path.open("rb") as file:
        for low, count in ((0, size), (3, 2000), (size, 1), (size + 5, 5), (1, 0)):
            assert read_at(file.fileno(), count, low) == data[low : low + count]


@KINDS
@pytest.mark.usefixtures("short_reads")
def test_a_store_is_whole_however_little_a_read_returns(tmp_path: Path, kind: str) -> None:
    """Its records, rows, keys and state."""
    world = World(small_tables())
    with Store.open(tmp_path / "s", tables=small_tables(), engine=kind) as store:
        world.run(store, 2)
    with Store.open(tmp_path / "s") as store:
        world.check(store, after=2)
        world.run(store, 1)
        world.check(store, after=3)


# -- records in parts ---------------------------------------------------------------------------------------


def keys_of(path: Path) -> set[bytes]:
    """Return the keys of all values in the file."""
    file = LmdbFile(str(path / "data.mdb"))
    found = {value.key for value in file.values(file.metas()[0])}
    file.close()
    return found


SIZE = st.one_of(st.integers(0, 6), st.sampled_from([k * PART + d for k in (1, 2, 3) for d in (-1, 0, 1)]))


@pytest.mark.usefixtures("small_parts")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.none() | SIZE, min_size=1), min_size=1, max_size=6))
def test_records_of_any_size_are_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, steps: list[dict[str, int | None]]
) -> None:
    """However they grow, shrink and go, to their writer, to readers and when opened again; no part is left over."""
    path, wanted = tmp_path_factory.mktemp("store"), dict[str, bytes]()
    engine = LmdbEngine(path, create=True)
    for number, step in enumerate(steps):
        records = {name: None if size is None else bytes([number + 1]) * size for name, size in step.items()}
        engine.commit(records)
        wanted = {name: data for name, data in (wanted | records).items() if data is not None}
        assert engine.records() == wanted
        reader = LmdbEngine(path, create=False, readonly=True)
        assert reader.records() == wanted
        reader.close()
        parts = {
            f"{name}\0{part}" if part else name
            for name, data in wanted.items()
            for part in range(max(1, -(-len(data) // PART)))
        }
        assert keys_of(path) == {key.encode() for key in parts} | {b"manifest"}
        if number % 2:
            engine.close()
            engine = LmdbEngine(path, create=False)
            assert engine.records() == wanted
    engine.close()


@pytest.mark.usefixtures("small_parts")
def test_a_store_of_records_in_parts_is_a_store(tmp_path: Path) -> None:
    """It is trained, rolled back, compacted and read by the format alone."""
    world = World(small_tables())
    with Store.open(tmp_path / "s", tables=small_tables(), retention=2) as store:
        world.run(store, 3)
        assert any(b"\0" in key for key in keys_of(tmp_path / "s"))
        world.check(store, after=3)
        store.rollback(store.commits[0].id)
    with Store.open(tmp_path / "s") as store:
        store.compact()
        rows = dict(_rows(store))
    found = independent_reader.LmdbFiles(tmp_path / "s").records
    with Store.open(tmp_path / "s", mode="r") as store:
        assert dict(_rows(store)) == rows
        assert found.keys() == store._opened.engine.records().keys()


def _rows(store: Store) -> Any:
    for table in store.tables:
        for keys, fields in store.scan(table.name):
            for i, key in enumerate(keys.tolist()):
                yield (table.name, key), tuple(field[i].tobytes() for field in fields)


@pytest.mark.parametrize("name", ["a\0", "a\x001", "\0", "manifest", "segment/1\x002"])
def test_a_name_that_a_part_may_have_is_none_of_a_record(tmp_path: Path, name: str) -> None:
    """It is refused before anything is written."""
    engine = LmdbEngine(tmp_path, create=True)
    with pytest.raises(ValueError, match="cannot be named"):
        engine.commit({"r": b"1", name: b"2"})
    assert engine.records() == {}
    engine.close()


@pytest.mark.long
@pytest.mark.disk
def test_a_record_of_more_than_two_gibibytes_is_read_again(tmp_path: Path) -> None:
    """With the parts that it really has."""
    data = bytes((2 << 30) + 5) + b"end"
    engine = LmdbEngine(tmp_path, create=True)
    engine.commit({"segment/0": data})
    engine.close()
    engine = LmdbEngine(tmp_path, create=False, readonly=True)
    assert engine.records()["segment/0"] == data
    engine.close()
