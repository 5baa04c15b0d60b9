"""The store against a dict on every engine, and the machine against engines that are wrong."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.store import test_engines
from tests.store.machine import StoreMachine
from tiercache.store import Engine, MemoryEngine, StoreError

CONTRACTS = {
    "memory": test_engines.TestMemoryEngine,
    "lmdb": test_engines.TestLmdbEngine,
    "zarr": test_engines.TestZarrEngine,
}


def run(machine: type[StoreMachine], examples: int, **options: Any) -> None:
    """Run a machine."""
    options = {"deadline": None, "stateful_step_count": 15, **options}
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, **options))


@pytest.mark.parametrize(("engine", "examples"), [("memory", 50), ("lmdb", 20), ("zarr", 10)])
def test_a_store_is_its_last_commit_and_what_was_appended_since(engine: str, examples: int) -> None:
    """Through any order of writes, commits, crashes, failures, rewrites and rollbacks, rows are what a dict says."""
    run(StoreMachine.on(CONTRACTS[engine]), examples)


@pytest.mark.long
@pytest.mark.parametrize("engine", CONTRACTS)
def test_a_store_is_what_a_dict_says_for_long(engine: str) -> None:
    """The same with more and longer examples."""
    run(StoreMachine.on(CONTRACTS[engine]), 100, stateful_step_count=40)


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
