"""Every engine keeps the contract of ``store/engines/engine.py``, and a store on it is a dict."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from zarr.storage import MemoryStore

from tests.store.engine_contract import EngineContract
from tests.store.machine import StoreMachine
from tiercache.store import Engine, LmdbEngine, MemoryEngine, StoreError, ZarrEngine


class TestMemoryEngine(EngineContract):
    """The executable definition."""

    outlives = False

    @classmethod
    def make(cls, path: Path, *, store_budget: int | None = None) -> Engine:
        """Make an empty one."""
        return MemoryEngine(capacity_bytes=store_budget)

    @classmethod
    def open(cls, path: Path, engine: Engine) -> Engine:
        """Open what was left."""
        return engine


class TestLmdbEngine(EngineContract):
    """A file of blocks, and records in LMDB."""

    kind: ClassVar[Any] = LmdbEngine

    @classmethod
    def make(cls, path: Path, *, store_budget: int | None = None) -> Engine:
        """Make an empty one."""
        return cls.kind(path, create=True, store_budget=store_budget)

    @classmethod
    def open(cls, path: Path, engine: Engine) -> Engine:
        """Open what was left."""
        return cls.kind(path, create=False)

    @classmethod
    def open_reader(cls, path: Path) -> Engine:
        """Open for reading."""
        return cls.kind(path, create=False, readonly=True)


class TestZarrEngine(TestLmdbEngine):
    """Arrays on the local disk."""

    kind = ZarrEngine


class TestZarrEngineWithZstd(TestZarrEngine):
    """Arrays that are compressed."""

    compression = "zstd"


class TestZarrEngineWithBlosc(TestZarrEngine):
    """Arrays that are compressed."""

    compression = "blosc"


class TestZarrEngineElsewhere(EngineContract):
    """Arrays in a store of Zarr that is no folder: the path that object stores take."""

    stores: ClassVar[dict[Path, object]] = {}

    @classmethod
    def make(cls, path: Path, *, store_budget: int | None = None) -> Engine:
        """Make an empty one."""
        cls.stores[path] = MemoryStore()
        return ZarrEngine(cls.stores[path], create=True, store_budget=store_budget)

    @classmethod
    def open(cls, path: Path, engine: Engine) -> Engine:
        """Open what was left."""
        return ZarrEngine(cls.stores[path], create=False)

    def test_a_reader_in_another_process_sees_the_newest_commit(self, engine: Engine, tmp_path: Path) -> None:
        """Its processes share no memory."""
        pytest.skip("memory is not seen by another process")


class TestZarrEngineElsewhereWithZstd(TestZarrEngineElsewhere):
    """Compressed arrays there."""

    compression = "zstd"


# -- a store on them -----------------------------------------------------------------------------------------

CONTRACTS = {"memory": TestMemoryEngine, "lmdb": TestLmdbEngine, "zarr": TestZarrEngine}


def run(machine: type[StoreMachine], examples: int, steps: int = 15, **options: Any) -> None:
    """Run a machine."""
    options = {"max_examples": examples, "stateful_step_count": steps, "deadline": None, **options}
    run_state_machine_as_test(machine, settings=settings(**options))


LONG = [pytest.param(engine, 100, 40, marks=pytest.mark.long) for engine in CONTRACTS]


@pytest.mark.parametrize(
    ("engine", "examples", "steps"), [("memory", 50, 15), ("lmdb", 20, 15), ("zarr", 10, 15), *LONG]
)
def test_a_store_is_its_last_commit_and_what_was_appended_since(engine: str, examples: int, steps: int) -> None:
    """Through any order of writes, commits, crashes, failures, rewrites and rollbacks, rows are what a dict says."""
    run(StoreMachine.on(CONTRACTS[engine]), examples, steps)


class Forgetful(MemoryEngine):
    """Its newest commit is not durable: a process that dies loses it."""

    before: tuple[dict[str, bytes], Any] | None = None

    def commit(self, records: Mapping[str, bytes | None]) -> None:
        """Commit, and know how it was before."""
        self.before = dict(self.by_name), dict(self.blocks)
        super().commit(records)


class Eager(MemoryEngine):
    """Frees a block that is still needed once it has many."""

    def commit(self, records: Mapping[str, bytes | None]) -> None:
        """Commit, and delete the first block too."""
        super().commit(records)
        if len(self.blocks) > 20:
            del self.blocks[min(self.blocks)]


def broken(engine: type[MemoryEngine]) -> type[StoreMachine]:
    """Return the machine on an engine that is wrong."""

    class Broken(StoreMachine):
        @classmethod
        def make(cls, path: Path) -> Engine:
            return engine()

        @classmethod
        def open(cls, path: Path, held: Any) -> Engine:
            if isinstance(held, Forgetful) and held.before is not None:
                held.by_name, held.blocks = held.before
                held.before = None
            return held

    return Broken


@pytest.mark.parametrize("engine", [Forgetful, Eager])
def test_the_machine_finds_an_engine_that_is_wrong(engine: type[MemoryEngine]) -> None:
    """A commit that a crash loses, a block that is freed too early."""
    generate = {"phases": [Phase.generate], "derandomize": True, "report_multiple_bugs": False}
    with pytest.raises((AssertionError, StoreError)):
        run(broken(engine), 200, **generate, database=None, suppress_health_check=[*HealthCheck])
