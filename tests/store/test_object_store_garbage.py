"""Object stores without a conditional put are refused for writing; the next writer deletes garbage."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fsspec
import obstore
import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LoggingStore, MemoryStore, ObjectStore, WrapperStore

from tests.store.blobs import Content, check, drop_all, head_of, layout_of, plain, publish, put, segment, some_bytes
from tests.store.damage import assert_sentence
from tests.store.test_object_store import of_epoch, sweep
from tiercache.store.engines import zarr_inventory
from tiercache.store.engines.zarr_engine import ZarrEngine
from tiercache.store.records import encode
from tiercache.store.store_errors import StoreError

NO_PUT = "has no put that fails if the object exists"
REPLACES = "replaces an object in a put that should fail if it exists"


class Careless(MemoryStore):
    """Ignores the condition, like a server that does not know the header."""

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        await self.set(key, value)


class Lost(MemoryStore):
    """Accepts a conditional put, but writes nothing."""

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """Do nothing."""


class Slow(FsspecStore):
    """A custom store that overrides something else."""

    async def set(self, key: str, value: Buffer, byte_range: Any = None) -> None:
        await super().set(key, value)


class CarelessWrapper(WrapperStore):  # type: ignore[type-arg]
    """Implements the conditional put itself, incorrectly."""

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        await self.set(key, value)


class Careful(WrapperStore):  # type: ignore[type-arg]
    """Implements a correct conditional put over a store without one."""

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        await MEMORY.set_if_not_exists(key, value)
        await self.set(key, await MEMORY.get(key, default_buffer_prototype()))  # type: ignore[arg-type]


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
    async def collect() -> set[str]:
        return {key async for key in store.list()}

    return sync(collect())


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_a_store_that_does_not_decide_between_writers_is_not_written(make: Callable[[], Any], words: str) -> None:
    store = make()
    with pytest.raises(StoreError, match=rf"cannot be written: {words}, so one writer could destroy") as caught:
        ZarrEngine(store, create=True)
    assert_sentence(caught.value)
    assert objects(store) == set()


@pytest.mark.parametrize(
    "wrap", [lambda store: store, WrapperStore, LoggingStore, Careful], ids=["as it is", "wrapped", "logged", "own put"]
)
def test_a_store_that_decides_is_written_and_has_no_probe(wrap: Callable[[Any], Any]) -> None:
    store = wrap(MemoryStore())
    engine = ZarrEngine(store, create=True)
    contents = publish(engine, 0, segment(layout_of([10]), 1))
    check(engine, contents)
    engine.close()
    assert not any(name.startswith("probes") for name in objects(store))
    engine = ZarrEngine(store, create=False)
    check(engine, contents)


@pytest.mark.parametrize("make", [Careless, fsspec_store])
def test_a_store_that_is_not_written_is_read(make: Callable[..., Any]) -> None:
    memory, reading = MemoryStore(), make()
    engine = ZarrEngine(memory, create=True)
    contents = publish(engine, 0, [*segment(layout_of([10]), 1), plain("states/0.1", some_bytes(70_000))])
    engine.close()
    for key, value in memory._store_dict.items():
        sync(reading.set(key, value))
    engine = ZarrEngine(reading, create=False, readonly=True)
    assert engine.newest() == head_of(0)
    check(engine, contents)
    engine.close()
    with pytest.raises(StoreError, match="cannot be written"):
        ZarrEngine(reading, create=False)


# -- garbage of short runs ---------------------------------------------------------------------------------


class Runs:
    """Runs of one object store, each shorter than the time before garbage is deleted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory, self.now, self.commits = obstore.store.MemoryStore(), 1e9, 0
        self.needed: list[Content] = []
        monkeypatch.setattr(zarr_inventory, "time", SimpleNamespace(time=lambda: self.now))

    def run(self, *, commits: int = 2, later: float = 0.0, killed: bool = False) -> None:
        """Publish some commits, each of which needs nothing of those before it, some seconds after the last run."""
        self.now += later
        engine = ZarrEngine(ObjectStore(self.memory), create=not self.commits)
        sweep(engine, self.needed)
        for _ in range(commits):
            contents = of_epoch(segment(layout_of([10]), self.commits), engine)
            before, self.needed = self.needed, publish(engine, self.commits, contents)
            drop_all(engine, before)
            self.commits += 1
        check(engine, self.needed)
        if killed:
            engine._objects.close()
        else:
            engine.close()

    def names(self) -> set[str]:
        return {str(entry["path"]) for page in obstore.list(self.memory) for entry in page}

    def dead(self) -> set[str]:
        """Return the segments and commits that the newest commit does not need."""
        names = {"/".join(one.blob.name.split("/")[:2]) for one in self.needed}
        there = {"/".join(name.split("/")[:2]) for name in self.names() if name.startswith(("segments/0", "commits"))}
        return there - names


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(monkeypatch)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("distance", [700.0, 300.0, 150.0, 50.0])
def test_garbage_of_a_short_run_is_deleted_by_a_later_one(runs: Runs, distance: float, killed: bool) -> None:
    """So the objects of a store are bounded."""
    most: list[int] = []
    for _ in range(40):
        runs.run(later=distance, killed=killed)
        most.append(len(runs.names()))
    kept_runs = 600 / distance + 3  # younger garbage, and one run whose list was not written
    assert max(most[20:]) <= max(most[:20])
    assert len(runs.dead()) <= 4 * kept_runs
    assert sum(name.startswith("free/") for name in runs.names()) <= 1


def test_garbage_stays_over_runs_until_it_is_due(runs: Runs) -> None:
    """A reader can continue until then."""
    runs.run()
    reader, before = ZarrEngine(ObjectStore(runs.memory), create=False, readonly=True), runs.needed
    runs.run(commits=4, later=10)
    for _ in range(3):
        runs.run(commits=0, later=190)
        check(reader, before)
    assert runs.dead()
    runs.run(commits=0, later=50)
    reader.close()
    assert not runs.dead()
    assert not any(name.startswith("free/") for name in runs.names())


LIST = encode("free", {"since": [[1.0, ["segments/0.0-1/"]]]}, {})


@pytest.mark.parametrize(
    "damage",
    [b"", b"TCR1", b"x" * 100, LIST[:-1], encode("free", {"since": [[1.0]]}, {}), encode("free", {"since": 1}, {})],
)
def test_a_damaged_list_of_garbage_costs_only_time(runs: Runs, damage: bytes) -> None:
    for _ in range(2):
        runs.run()
    (listed,) = [name for name in runs.names() if name.startswith("free/")]
    obstore.put(runs.memory, listed, damage)
    runs.run(commits=0, later=700)
    assert runs.dead()
    runs.run(commits=0, later=700)
    assert not runs.dead()


def test_a_list_names_nothing_that_is_needed(runs: Runs) -> None:
    """A copy of a store can have a list that is newer than its head."""
    runs.run()
    names = [one.blob.name for one in runs.needed] + ["segments/", "commits/"]
    obstore.put(runs.memory, "free/1", encode("free", {"since": [[1.0, names]]}, {}))
    for _ in range(3):
        runs.run(commits=0, later=700)  # checks that they exist


def test_a_clock_that_was_ahead_keeps_nothing_for_ever(runs: Runs) -> None:
    """Garbage with a time in the future counts from now on."""
    runs.run(later=1e6)
    runs.run(commits=0, later=-1e6)
    runs.run(commits=0, later=700)
    assert not runs.dead()


def test_a_name_that_is_put_again_is_not_deleted_later(runs: Runs) -> None:
    """Old garbage of that name was deleted before the put: alone, with its folder, or some of its chunks."""
    engine = ZarrEngine(ObjectStore(runs.memory), create=True)
    first = publish(engine, 0, segment(layout_of([30], compression="zstd"), 1))
    engine.drop([(one.blob.name, 4096) for one in first if one.blob.of])
    for dropped, seed in ((2, 1), (4, 2)):
        drop_all(engine, first[:dropped])
        again = put(engine, segment(layout_of([12]), 1, seed=seed)[:dropped])
        check(engine, again)
        runs.now += 700
        engine.drop([], shrink=True)
        check(engine, again)
