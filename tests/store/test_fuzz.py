"""Whatever bytes stand where a store's should: a sentence, or what was written; nothing else happens."""

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.conftest import small_tables
from tests.store.damage import DEEP, LIES, assert_sentence, damaged, generator_of, lying, resealed, sealed
from tests.store.world import World
from tiercache.store import (
    SGD,
    Commit,
    CorruptStoreError,
    MemoryEngine,
    NotAStoreError,
    Segment,
    Store,
    StoreError,
    Table,
    Zeros,
)
from tiercache.store.directory import StoreDirectory
from tiercache.store.records import decode
from tiercache.store.store_errors import FormatVersionError
from tiercache.store.verification import Verification

MORE_BYTES = 1 << 30
"""What a test may allocate beside what the process has: far more than the file could need, far less than a lie says."""


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """Let an allocation that a lie asks for fail, rather than succeed unseen because no page of it is touched."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:  # noqa: PTH123
        held = int(file.read().split()[0]) * resource.getpagesize()
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
        assert store.commit.retained
        world.train(part=1)
        world.append(store, within=True)
        world.publish(store, sample=2)
    return world, engine


def read_all(engine: MemoryEngine) -> None:
    """Open the store of an engine, and read and check all that it holds."""
    with Store.open(None, engine=engine, mode="r") as store:
        if store.commit is not None:
            store.state()
        for group in store.groups:
            for table in group.tables:
                ids, rows = store.locate(table.name, np.arange(-10, 10), after=2)
                for segment in store.segments:
                    store.read_rows(segment, group.index, rows[ids == segment.id])
        Verification(store).run()


def copy_of(engine: MemoryEngine, **records: bytes) -> MemoryEngine:
    """Return an engine with the same blocks and other records."""
    other = MemoryEngine()
    other.blocks, other.by_name = dict(engine.blocks), {**engine.by_name, **records}
    return other


@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("kind", ["commit", "segment", "tables"])
def test_records_of_any_bytes_are_refused_in_a_sentence(written: tuple[World, MemoryEngine], kind: str) -> None:
    """Random bytes, real ones with damage, and damage under a right checksum."""
    _, engine = written
    record = next(data for name, data in sorted(engine.by_name.items()) if name.startswith(kind))
    for seed in range(400):
        generator = generator_of(seed)
        match seed % 3:
            case 0:
                data = generator.bytes(int(generator.integers(0, 300)))
            case 1:
                data = damaged(record, generator)
            case _:
                data = resealed(record, generator)
        if data == record:
            continue
        try:
            decode(kind, data, "it")
        except CorruptStoreError as error:
            assert_sentence(error)


@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("seed", range(6))
def test_a_store_whose_records_lie_is_refused_or_read_right(written: tuple[World, MemoryEngine], seed: int) -> None:
    """Any value of any header replaced, under a right checksum: opening, reading and verifying end in a sentence."""
    _, engine = written
    names = sorted(engine.by_name)
    for case in range(200):
        generator = generator_of(1000 * seed + case)
        name = names[int(generator.integers(0, len(names)))]
        try:
            read_all(copy_of(engine, **{name: lying(engine.by_name[name], generator)}))
        except StoreError as error:
            assert_sentence(error)


@pytest.mark.parametrize("kind", [Commit, Segment])
def test_a_header_that_is_too_deep_is_refused(kind: Any) -> None:
    """JSON that ends a reader by its depth is no way out of the error."""
    with pytest.raises(CorruptStoreError, match=r"^it "):
        kind.from_bytes(sealed(DEEP, b""), "it")


def test_a_marker_of_any_bytes_is_refused_or_read_right(tmp_path: Path) -> None:
    """store.json in any state is a store of this version, or a sentence."""
    Store.open(tmp_path, tables=small_tables()).close()
    marker = (tmp_path / "store.json").read_bytes()
    lies = [json.dumps({**json.loads(marker), key: lie}).encode() for key in json.loads(marker) for lie in LIES]
    cases = [damaged(marker, generator_of(seed)) for seed in range(300)]
    for data in (*lies, *cases, DEEP, b"\xff\xfe" + marker):
        (tmp_path / "store.json").write_bytes(data)
        try:
            assert StoreDirectory(tmp_path).find()
        except (NotAStoreError, FormatVersionError) as error:
            assert_sentence(error)


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", ".", "..", "con", "~", "a" * 5000, "x.json", "*", "größe"])
def test_names_of_tables_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    """Nothing is written beside the store, whatever its table is called, and its rows come back by that name."""
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
    """Before there is a table."""
    with pytest.raises(ValueError, match="name"):
        Table(name=name, dim=2, optimizer=SGD(learning_rate=0.1), initializer=Zeros())
