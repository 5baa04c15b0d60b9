"""Object stores without a conditional put are refused for writing; what one writer leaves free the next one deletes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fsspec
import obstore
import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from zarr.core.buffer import Buffer
from zarr.storage import FsspecStore, LoggingStore, MemoryStore, ObjectStore, WrapperStore

from tests.store.conftest import small_tables
from tests.store.damage import assert_sentence
from tests.store.test_rewrite import rows_of
from tests.store.world import World
from tiercache.store import Store, StoreError, ZarrEngine
from tiercache.store.engines import zarr_garbage
from tiercache.store.engines.zarr_garbage import Garbage

NO_PUT = "has no put that fails where the object exists"
REPLACES = "replaces an object by a put that is to fail where it exists"


class Careless(MemoryStore):
    """Ignores the condition, as a server that does not know the header."""

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """Put."""
        await self.set(key, value)


class Lost(MemoryStore):
    """Takes a conditional put, and writes nothing."""

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """Do nothing."""


class Slow(FsspecStore):
    """A store of a user's own, which changes something else."""

    async def set(self, key: str, value: Buffer, byte_range: Any = None) -> None:
        """Put."""
        await super().set(key, value)


class CarelessWrapper(WrapperStore):  # type: ignore[type-arg]
    """Decides by itself, and not well."""

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """Put."""
        await self.set(key, value)


class Careful(WrapperStore):  # type: ignore[type-arg]
    """Has a conditional put of its own over a store that has none."""

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """Put."""
        await MEMORY.set_if_not_exists(key, value)
        await self.set(key, await MEMORY.get(key, None))  # type: ignore[arg-type]


MEMORY = MemoryStore()


def fsspec_store(kind: type[FsspecStore] = FsspecStore, path: str = "/bucket/m") -> FsspecStore:
    """Return a store over an fsspec file system in memory."""
    system = fsspec.filesystem("memory", skip_instance_cache=True)
    return kind(AsyncFileSystemWrapper(system, asynchronous=True), path=path)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "fsspec": (fsspec_store, f"FsspecStore {NO_PUT}"),
    "subclass": (lambda: fsspec_store(Slow), f"Slow {NO_PUT}"),
    "wrapped": (lambda: WrapperStore(fsspec_store()), f"FsspecStore {NO_PUT}"),
    "logged": (lambda: LoggingStore(WrapperStore(fsspec_store())), f"FsspecStore {NO_PUT}"),
    "ignored": (Careless, f"Careless {REPLACES}"),
    "ignored and wrapped": (lambda: WrapperStore(Careless()), f"Careless {REPLACES}"),
    "lost": (Lost, f"Lost {REPLACES}"),
    "own wrapper": (lambda: CarelessWrapper(MemoryStore()), f"CarelessWrapper {REPLACES}"),
}


def objects(store: Any) -> set[str]:
    """Return the names of all objects."""
    from zarr.core.sync import sync

    async def collect() -> set[str]:
        return {key async for key in store.list()}

    return sync(collect())


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_a_store_that_does_not_decide_between_writers_is_not_written(make: Callable[[], Any], words: str) -> None:
    """In a sentence, and nothing is left."""
    store = make()
    with pytest.raises(StoreError, match=rf"cannot be written: {words}, so one writer could destroy") as caught:
        ZarrEngine(store, create=True)
    assert_sentence(caught.value)
    assert objects(store) == set()


@pytest.mark.parametrize(
    "wrap", [lambda store: store, WrapperStore, LoggingStore], ids=["as it is", "wrapped", "logged"]
)
def test_a_store_that_decides_is_written_and_has_no_probe(wrap: Callable[[Any], Any]) -> None:
    """Also through wrappers that pass the put on."""
    store, world = wrap(MemoryStore()), World(small_tables()[1:3])
    with Store.open(None, tables=world.tables, engine=ZarrEngine(store, create=True)) as opened:
        world.run(opened, 2)
    assert not any(name.startswith("probes") for name in objects(store))
    with Store.open(None, engine=ZarrEngine(store, create=False)) as opened:
        assert rows_of(opened) == world.rows


def test_a_wrapper_with_a_put_of_its_own_is_believed() -> None:
    """It is asked, and not what it wraps."""
    world = World(small_tables()[1:3])
    with Store.open(None, tables=world.tables, engine=ZarrEngine(Careful(MemoryStore()), create=True)) as store:
        world.run(store, 1)


def test_a_store_that_is_not_written_is_read() -> None:
    """Objects that another client wrote."""
    memory, world = MemoryStore(), World(small_tables()[1:3])
    with Store.open(None, tables=world.tables, engine=ZarrEngine(memory, create=True)) as store:
        world.run(store, 2)

    class Reading(Careless):
        pass

    reading = Reading(memory._store_dict)
    with Store.open(None, engine=ZarrEngine(reading, create=False, readonly=True), mode="r") as store:
        assert rows_of(store) == world.rows
    with pytest.raises(StoreError, match=f"Reading {REPLACES}"):
        ZarrEngine(reading, create=False)


# -- garbage of short runs ---------------------------------------------------------------------------------


class Runs:
    """Runs of one object store, each shorter than what is free is kept for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory, self.now = obstore.store.MemoryStore(), 1e9
        self.world = World(small_tables()[1:3])
        monkeypatch.setattr(zarr_garbage, "time", SimpleNamespace(time=lambda: self.now))

    def run(self, *, killed: bool = False, passes: int = 2, **options: Any) -> None:
        """Train some passes."""
        create = self.world.pass_index == 0
        engine = ZarrEngine(ObjectStore(self.memory), create=create, **options)
        store = Store.open(None, tables=self.world.tables, engine=engine)
        self.world.run(store, passes)
        assert rows_of(store) == self.world.rows
        if not killed:
            store.close()

    def names(self) -> set[str]:
        """Return the names of all objects."""
        return {str(entry["path"]) for page in obstore.list(self.memory) for entry in page}

    def dead(self) -> set[str]:
        """Return the segments and states that the newest commit does not need."""
        engine = ZarrEngine(ObjectStore(self.memory), create=False, readonly=True)
        with Store.open(None, engine=engine, mode="r") as store:
            segments = {str(segment.id) for segment in store.segments}
            state = str(store.commit.id)
        parts = [name.split("/") for name in self.names() if name.split("/")[0] in {"segments", "state"}]
        return {
            "/".join(part[:2])
            for part in parts
            if part[1] != "zarr.json"
            and (part[1].split("-")[0] not in segments if part[0] == "segments" else part[1].split(".")[0] != state)
        }


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """A store in memory, whose clock stands still."""
    return Runs(monkeypatch)


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("distance", [700.0, 300.0, 150.0, 50.0])
def test_what_a_short_run_leaves_is_deleted_by_a_later_one(runs: Runs, distance: float, killed: bool) -> None:
    """So the objects of a store are bounded, whatever the length of its runs and however they end."""
    most: list[int] = []
    for _ in range(40):
        runs.run(killed=killed)
        most.append(len(runs.names()))
        runs.now += distance
    kept_runs = 600 / distance + 3  # what is free for less than that, and one that begins anew where it was killed
    assert max(most[20:]) <= max(most[:20])
    assert len({name.split("/")[1].split("-")[0] for name in runs.dead()}) <= 6 * kept_runs
    assert sum(name.startswith("free/") for name in runs.names()) <= 1


def test_what_is_free_for_a_shorter_time_stays_over_runs(runs: Runs) -> None:
    """A reader of it goes on, until it is due; then the next run deletes it, and what that run frees stays."""
    runs.run()
    engine = ZarrEngine(ObjectStore(runs.memory), create=False, readonly=True)
    before = dict(runs.world.rows)
    with Store.open(None, engine=engine, mode="r") as reader:
        runs.now += 10
        runs.run(passes=4)
        for _ in range(3):
            runs.now += 190
            runs.run(passes=0)
            assert rows_of(reader) == before
    dead = runs.dead()
    runs.now += 50
    runs.run(passes=0)
    assert dead
    assert not runs.dead()
    assert not any(name.startswith("free/") for name in runs.names())


@pytest.mark.parametrize("damage", [b"", b"TCR1", b"x" * 100, Garbage().to_bytes()[:-1]])
def test_a_damaged_list_of_what_is_free_costs_only_time(runs: Runs, damage: bytes) -> None:
    """What it said is free since the next run began."""
    runs.run()
    runs.run()
    (told,) = [name for name in runs.names() if name.startswith("free/")]
    obstore.put(runs.memory, told, damage)
    runs.now += 700
    runs.run(passes=0)
    assert runs.dead()
    runs.now += 700
    runs.run(passes=0)
    assert not runs.dead()


def test_a_clock_that_was_ahead_keeps_nothing_for_ever(runs: Runs) -> None:
    """What is said to be free since later is free since now."""
    runs.now += 1e6
    runs.run()
    runs.now -= 1e6
    runs.run(passes=0)
    runs.now += 700
    runs.run(passes=0)
    assert not runs.dead()


def test_a_list_of_what_is_free_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects, and all in folders, since the earliest time."""
    now = [100.0]
    monkeypatch.setattr(zarr_garbage, "time", SimpleNamespace(time=lambda: now[0]))
    one, other = Garbage(50.0), Garbage(50.0)
    one.add(["state/1.0-3", "segments/2-3/"])
    now[0] = 120.0
    other.add(["state/1.0-3", "segments/2-3/0/", "records/4-a"])
    other.join(Garbage.from_bytes(one.to_bytes(), "it"))
    again = Garbage.from_bytes(other.to_bytes(), "it")
    assert [again.since(name, 7.0) for name in ("state/1.0-3", "segments/2-3/0/keys/c.0", "records/4-a", "x")] == [
        100, 100, 120, 7
    ]  # fmt: skip
    now[0] = 160.0
    assert sorted(other.take_expired()) == ["segments/2-3/", "state/1.0-3"]
    assert other.take_expired() == []
    now[0] = 170.0
    assert sorted(other.take_expired()) == ["records/4-a", "segments/2-3/0/"]
    assert not other
