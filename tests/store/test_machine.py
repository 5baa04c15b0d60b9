"""The store against a dict, through any order of dumps, commits, failures and crashes."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.store.conftest import small_tables
from tests.store.world import World
from tiercache.store import Cursor, LmdbEngine, MemoryEngine, Store, StoreFullError, ZarrEngine
from tiercache.store.testing import FailingEngine, KilledError


class StoreMachine(RuleBasedStateMachine):
    """Dumps, commits at and inside visits, forgets, fails and crashes as it likes."""

    kind = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.memory = MemoryEngine()
        self.store: Store

    @initialize(
        seed=st.integers(0, 50),
        num_passes=st.integers(1, 4),
        piece_rows=st.integers(1, 5),
        block_rows=st.integers(1, 9),
    )
    def begin(self, seed: int, num_passes: int, piece_rows: int, block_rows: int) -> None:
        """Make a store."""
        self.world = World(
            small_tables(),
            seed=seed,
            num_passes=num_passes,
            keys_per_pass=6,
            universe=12,
            piece_rows=piece_rows,
            block_rows=block_rows,
        )
        self.committed = copy.deepcopy(self.world)
        self.cursor: Cursor | None = None
        self.open(create=True)

    def open(self, *, create: bool = False) -> None:
        """Open what a process that died left behind."""
        engine: Any = self.memory
        if self.kind == "lmdb":
            engine = LmdbEngine(Path(self.place.name), create=create)
        elif self.kind == "zarr":
            engine = ZarrEngine(Path(self.place.name), create=create)
        self.engine = FailingEngine(engine)
        self.store = Store.open(None, tables=self.world.tables, engine=self.engine)

    def dump(self, bytes_: int, *, within: bool = False, part: int = 0) -> None:
        """Train and append the present visit."""
        self.world.train(part=part)
        self.world.append(self.store, within=within, transaction_bytes=bytes_)

    def commit(self, sample: int = 0) -> None:
        """Publish; from now on a crash leads here."""
        self.world.publish(self.store, sample=sample)
        self.committed, self.cursor = copy.deepcopy(self.world), Cursor(self.world.visit, sample)

    def step_back(self) -> None:
        """Be where the last commit was."""
        self.world = copy.deepcopy(self.committed)

    @rule(bytes_=st.sampled_from([1, 500, 1 << 20]))
    def visit(self, bytes_: int) -> None:
        """A visit is dumped."""
        self.dump(bytes_)
        self.world.visit += 1

    @rule()
    def publish(self) -> None:
        """What was dumped is committed."""
        if self.cursor is None or self.cursor <= (self.world.visit, 0):
            self.commit()

    @rule(sample=st.integers(1, 3))
    def publish_within(self, sample: int) -> None:
        """A commit inside the visit, with all its rows."""
        if self.cursor is None or self.cursor <= (self.world.visit, sample):
            self.dump(100, within=True, part=sample)
            self.commit(sample)

    @rule(draw=st.integers(0, 50), keys=st.integers(1, 6))
    def follow(self, draw: int, keys: int) -> None:
        """Another schedule begins: segments settle where most of their rows are not used by it."""
        if self.cursor is not None and not self.cursor.sample:
            self.step_back()
            self.world.keys_per_pass = keys
            self.world.follow(self.store, self.world.draw(draw))
            self.committed, self.cursor = copy.deepcopy(self.world), Cursor(0, 0)

    @rule()
    def forget(self) -> None:
        """What was dumped since the commit is dropped."""
        self.store.forget()
        self.step_back()

    @rule(blocks=st.integers(0, 4), num_bytes=st.sampled_from([0, 1, 30]))
    def die_writing(self, blocks: int, num_bytes: int) -> None:
        """The process dies in the middle of a write, and another opens the store."""
        self.engine.tear(blocks, num_bytes)
        with pytest.raises(KilledError):
            self.dump(1 << 20)
        self.crash()

    @rule()
    def crash(self) -> None:
        """The process dies and another opens the store."""
        self.store.close()
        self.open()
        self.step_back()

    @rule(call=st.integers(1, 6))
    def fail(self, call: int) -> None:
        """The disk is full at the next, or a later, call; training goes back to the commit."""
        self.engine.fail_in(call)
        try:
            self.dump(300)
            self.world.visit += 1
            self.commit()
        except StoreFullError:
            self.engine.fail_in(None)
            self.store.forget()
            self.step_back()
        self.engine.fail_in(None)

    @invariant()
    def rows_are_those_of_the_dict(self) -> None:
        """Every live row is found, with its bits, and nothing else."""
        if not hasattr(self, "store"):
            return
        assert (self.store.commit and self.store.commit.cursor) == self.cursor
        within = self.cursor is not None and self.cursor.sample and self.world.visit == self.cursor.visit
        self.world.check(self.store, after=self.world.visit)
        if within:
            self.world.check_within(self.store)
        else:
            self.world.check(self.store, after=self.world.visit - 1)
            self.world.check_load(self.store, self.world.visit)

    def teardown(self) -> None:
        """Clean up."""
        if hasattr(self, "store"):
            self.store.close()
        self.place.cleanup()


class LmdbMachine(StoreMachine):
    """The same on LMDB."""

    kind = "lmdb"


class ZarrMachine(StoreMachine):
    """The same on Zarr."""

    kind = "zarr"


@pytest.mark.parametrize(("machine", "examples"), [(StoreMachine, 20), (LmdbMachine, 8), (ZarrMachine, 5)])
def test_a_store_is_its_last_commit_and_what_was_appended_since(machine: type[StoreMachine], examples: int) -> None:
    """Through any order of dumps, commits, failures and crashes, rows are what a dict says."""
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=15, deadline=None))
