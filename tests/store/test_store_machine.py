"""A store on every engine is a dict, through any operations, failures and crashes."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.store import test_engines as engines
from tests.store.machine import StoreMachine
from tiercache.store import Engine, MemoryEngine, StoreError
from tiercache.store.engines.engine import BlobBytes, Head

CONTRACTS = {"memory": engines.TestMemoryEngine, "lmdb": engines.TestLmdbEngine, "zarr": engines.TestZarrEngine}


def run(machine: type[StoreMachine], examples: int, steps: int = 15, **options: Any) -> None:
    options = {"max_examples": examples, "stateful_step_count": steps, "deadline": None, **options}
    run_state_machine_as_test(machine, settings=settings(**options))


LONG = [pytest.param(engine, *size, marks=pytest.mark.long) for engine in CONTRACTS for size in [(100, 40), (2, 300)]]


@pytest.mark.parametrize(("engine", "examples", "steps"), [("memory", 30, 15), ("lmdb", 8, 15), ("zarr", 5, 15), *LONG])
def test_a_store_is_its_last_commit_and_what_was_appended_since(engine: str, examples: int, steps: int) -> None:
    run(StoreMachine.on(CONTRACTS[engine]), examples, steps)


class Forgetful(MemoryEngine):
    """Its newest head is not durable: a crash loses it together with its blobs."""

    before: tuple[Head | None, dict[str, BlobBytes]] = (None, {})

    def publish(self, head: Head, before: Head | None) -> None:
        if self.head is not None:
            self.before = self.head, dict(self.blobs)
        super().publish(head, before)


class Eager(MemoryEngine):
    """Drops a blob that is still needed once it has many."""

    def publish(self, head: Head, before: Head | None) -> None:
        super().publish(head, before)
        rows = sorted(name for name in self.blobs if name.endswith("/rows"))
        if len(rows) > 6:
            del self.blobs[rows[0]]


def broken(engine: type[MemoryEngine]) -> type[StoreMachine]:
    class Broken(StoreMachine):
        @classmethod
        def make(cls, path: Path) -> Engine:
            return engine()

        @classmethod
        def open(cls, path: Path, held: Any) -> Engine:
            if isinstance(held, Forgetful) and held.before[0] is not None:
                held.head, held.blobs = held.before
                held.before = None, {}
            return held

    return Broken


@pytest.mark.parametrize("engine", [Forgetful, Eager])
def test_the_machine_finds_an_engine_that_is_wrong(engine: type[MemoryEngine]) -> None:
    generate = {"phases": [Phase.generate], "derandomize": True, "report_multiple_bugs": False}
    with pytest.raises((AssertionError, StoreError)):
        run(broken(engine), 200, **generate, database=None, suppress_health_check=[*HealthCheck])
