"""Stores made of any bytes: an error, or the written data, and no other effect."""

import json
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.conftest import small_tables
from tests.store.damage import (
    DEEP,
    LIES,
    assert_sentence,
    damaged,
    front_of,
    generator_of,
    lying,
    miscounting,
    mismapped,
    records_of,
    resealed,
    sealed,
    signed,
)
from tests.store.world import World
from tiercache.store import (
    SGD,
    CorruptStoreError,
    MemoryEngine,
    NotAStoreError,
    Store,
    StoreError,
    Table,
    Zeros,
)
from tiercache.store.commit import CommitRecord, RankList, head_of
from tiercache.store.commit_reader import tables_at
from tiercache.store.engines.engine import BlobBytes, Head, HeadRecord
from tiercache.store.opening import StoreDirectory
from tiercache.store.records import PagedArrays, encode
from tiercache.store.segment import Segment, meta_from_bytes
from tiercache.store.store_errors import FormatVersionError
from tiercache.store.table import group_tables
from tiercache.store.verification import Verification

MORE_BYTES = 1 << 30
"""What a test may allocate: far more than a store could need, far less than a wrong size asks for."""


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """Make an allocation for a wrong size fail; otherwise it would succeed unnoticed: its pages are not touched."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MORE_BYTES, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.fixture(scope="module")
def written() -> tuple[World, MemoryEngine]:
    """A store of two schedules: retained segments, and a commit inside a pass."""
    world, engine = World(small_tables(), num_passes=2, keys_per_pass=9, universe=14), MemoryEngine()
    with Store.open(None, tables=world.tables, engine=engine) as store:
        world.run(store, 3)
        world.keys_per_pass = 3
        world.follow(store, world.draw(5))
        world.run(store, 1)
        assert store.commit.retained_ids
        world.train(part=1)
        world.append(store, within=True)
        world.publish(store, sample=2)
    return world, engine


def read_all(engine: MemoryEngine) -> None:
    """Open the store of an engine, and read and check all of it."""
    with Store.open(None, engine=engine, mode="r") as store:
        if store.commit is not None:
            store.state()
        for group in store.groups:
            for table in group.tables:
                ids, rows = store.locate(table.name, np.arange(-10, 10), after=2)
                for segment in store.segments:
                    store.read_rows(segment, group.index, rows[ids == segment.id])
        Verification(store).run()


def copy_of(engine: MemoryEngine, changed: Mapping[str, bytes], head: Head | None) -> MemoryEngine:
    """Return an engine with the same blobs, except some records and the head."""
    other = MemoryEngine()
    records = {name: BlobBytes(0, np.frombuffer(data, np.uint8)) for name, data in changed.items()}
    other.blobs, other.head = engine.blobs | records, head
    return other


def random_bytes(_: bytes, generator: np.random.Generator) -> bytes:
    return generator.bytes(int(generator.integers(0, 300)))


def parse(kind: str, data: bytes, engine: MemoryEngine) -> None:
    """Read a record like a store."""
    groups = group_tables(tuple(small_tables()))
    match kind:
        case "commits":
            CommitRecord.from_bytes(data, "it")
        case "ranks":
            RankList.from_bytes(data, groups, Segment, "it")
        case "segments":
            no_arrays: Any = (None, None, "it")
            meta_from_bytes(data, 1, "it", lambda places, sums: PagedArrays("it", places, sums, *no_arrays))
        case "heads":
            HeadRecord.from_bytes(data, "it")
        case _:
            head = head_of("tables", data)
            tables_at(copy_of(engine, {"tables": data}, head), head, "it")


@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("kind", ["commits", "ranks", "segments", "tables", "heads"])
def test_records_of_any_bytes_are_refused_in_a_sentence(written: tuple[World, MemoryEngine], kind: str) -> None:
    """Random bytes, damaged real ones, and damage or wrong values under a correct checksum; digests are not updated."""
    world, engine = written
    records = records_of(engine) | {
        "tables": encode("tables", {"tables": [table.to_record() for table in world.tables]}, {}),
        "heads": HeadRecord(7, engine.head, "ab" * 32, 9, 12345, "writer").to_bytes(),
    }
    record = next(data for name, data in sorted(records.items()) if name.startswith(kind))
    record = record[: front_of(record)]
    parse(kind, record, engine)
    with pytest.raises(CorruptStoreError, match=r"^(it|tables of it) "):
        parse(kind, sealed(DEEP), engine)  # must not crash the parser of JSON
    refused, ways = 0, [random_bytes, damaged, resealed, lying]
    for seed in range(600):
        try:
            parse(kind, ways[seed % 4](record, generator_of(seed)), engine)
        except CorruptStoreError as error:
            assert_sentence(error)
            refused += 1
    assert refused > 400


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("seed", range(6))
def test_a_store_whose_records_lie_is_refused_or_read_right(written: tuple[World, MemoryEngine], seed: int) -> None:
    """Any value of a header or number of an array is replaced, under correct digests up to the head."""
    _, engine = written
    records, refused = records_of(engine), 0
    names = sorted(records)
    for case in range(200):
        generator = generator_of(1000 * seed + case)
        name = names[int(generator.integers(0, len(names)))]
        how = [lying, miscounting, mismapped if name.endswith("/meta") else miscounting][case % 3]
        data = how(records[name], generator)
        try:
            read_all(copy_of(engine, *signed(records, engine.head, name, data)))
        except StoreError as error:
            assert_sentence(error)
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("seed", range(2))
def test_a_record_that_was_not_signed_again_is_refused(written: tuple[World, MemoryEngine], seed: int) -> None:
    """Whatever its content, and even with a correct checksum."""
    world, engine = written
    records = records_of(engine)
    assert "tables" not in records, "commits have them"
    for name, record in records.items():
        data = lying(record, generator_of(seed))
        with pytest.raises(CorruptStoreError, match=r"is not what was written|ends at byte"):
            read_all(copy_of(engine, {name: data}, engine.head))
    assert records_of(engine) == records
    with Store.open(None, engine=engine, mode="r") as store:
        world.check(store, after=world.pass_index)


def test_a_marker_of_any_bytes_is_refused_or_read_right(tmp_path: Path) -> None:
    Store.open(tmp_path, tables=small_tables()).close()
    marker = (tmp_path / "store.json").read_bytes()
    lies = [json.dumps({**json.loads(marker), key: value}).encode() for key in json.loads(marker) for value in LIES]
    cases = [damaged(marker, generator_of(seed)) for seed in range(300)]
    for data in (*lies, *cases, DEEP, b"\xff\xfe" + marker):
        (tmp_path / "store.json").write_bytes(data)
        try:
            assert StoreDirectory(tmp_path).find()
        except (NotAStoreError, FormatVersionError) as error:
            assert_sentence(error)


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", ".", "..", "con", "~", "a" * 5000, "x.json", "*", "größe"])
def test_names_of_tables_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    place = tmp_path / "inside" / "store.tc"
    world = World([Table(name=name, dim=2, optimizer=SGD(learning_rate=0.1), initializer=Zeros())], keys_per_pass=8)
    with Store.open(place, tables=world.tables) as store:
        world.run(store, 2)
    with Store.open(place) as store:
        world.check(store, after=world.pass_index - 1)
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
    assert [path.name for path in (tmp_path / "inside").iterdir()] == ["store.tc"]


@pytest.mark.parametrize("name", ["", "\n", "a\0b", "\u202e", "\ud800"])
def test_names_that_cannot_be_shown_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        Table(name=name, dim=2, optimizer=SGD(learning_rate=0.1), initializer=Zeros())
