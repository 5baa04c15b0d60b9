"""A store against a dict, through any order of dumps, commits, failures and crashes: a test of engines.

class TestMyEngine(EngineContract): ...
test_store = StoreMachine.on(TestMyEngine).TestCase
"""

import copy
import tempfile
from pathlib import Path
from typing import Self

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.store.conftest import needed_bytes, small_tables, stored_bytes
from tests.store.engine_contract import EngineContract
from tests.store.failing import FailingEngine, KilledError
from tests.store.world import World
from tiercache.store.engines.engine import Engine
from tiercache.store.engines.zarr_engine import ZarrEngine
from tiercache.store.row_codec import initial_rows
from tiercache.store.store import Store
from tiercache.store.store_errors import StoreError, StoreFullError
from tiercache.store.table import Table
from tiercache.store.verification import Verification

TABLES = small_tables()[:4]
"""In three groups."""


class StoreMachine(RuleBasedStateMachine):
    """Randomly writes, commits, crashes, reopens, reads, compacts and rolls back a store; its model is a dict.

    After every step exactly the rows of the dict are found, with their bits, and exactly the newest commits are kept.
    Inherit and implement creation and opening of the engine, or run the machine ``on`` an engine's contract, which
    implements them. A crash is the state that ``open`` finds after ``close`` of the engine; real kills and losses of
    power need a harness of processes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.store: Store | None = None

    @classmethod
    def make(cls, path: Path) -> Engine:
        """Create an empty engine in an empty folder."""
        raise NotImplementedError

    @classmethod
    def open(cls, path: Path, engine: Engine) -> Engine:
        """Open the data of a dead process; ``engine`` is its closed engine."""
        raise NotImplementedError

    @classmethod
    def on(cls, contract: type[EngineContract]) -> type[Self]:
        """Return the machine on the engine of ``contract``."""

        class Machine(cls):  # type: ignore[valid-type, misc]
            make, open = contract.make, contract.open

        Machine.__name__ = Machine.__qualname__ = f"{cls.__name__}On{contract.__name__.removeprefix('Test')}"
        return Machine

    # -- writing -----------------------------------------------------------------------------------------

    @initialize(
        seed=st.integers(0, 50),
        num_passes=st.integers(1, 4),
        page_rows=st.integers(1, 5),
        block_rows=st.integers(1, 9),
        retention=st.integers(1, 3),
    )
    def begin(self, seed: int, num_passes: int, page_rows: int, block_rows: int, retention: int) -> None:
        sizes: dict[str, int] = {"num_passes": num_passes, "page_rows": page_rows, "block_rows": block_rows}
        self.world = World(TABLES, seed=seed, keys_per_pass=6, universe=12, **sizes)
        self.fresh = copy.deepcopy(self.world)
        self.kept: dict[int, World] = {}
        """The expected content of each kept commit, by its id, oldest first."""
        self.pins: dict[str, int] = {}
        self.retention = retention
        self.inner = self.make(self.path)
        self.engine = FailingEngine(self.inner)
        self.store = Store.open(None, tables=TABLES, engine=self.engine, retention=retention)

    @precondition(lambda self: self.world.scheduled)
    @rule()
    def write(self) -> None:
        self._dump()
        self.world.pass_index += 1

    @precondition(lambda self: self._may_commit(0))
    @rule()
    def commit(self) -> None:
        self.world.publish(self.store)
        self._keep()

    @precondition(lambda self: self._may_commit(3))
    @rule(sample=st.integers(1, 3))
    def commit_within(self, sample: int) -> None:
        if self._may_commit(sample):
            self._dump(within=True, part=sample)
            self.world.publish(self.store, sample=sample)
            self._keep()

    @rule()
    def forget(self) -> None:
        self.store.discard_uncommitted()
        self._step_back()

    @precondition(lambda self: self._between_passes())
    @rule()
    def compact(self) -> None:
        """Put all rows in hash order: training cannot continue from here, everything else can."""
        self._step_back()
        self.world.compact(self.store)
        self._keep()

    @precondition(lambda self: self._between_passes())
    @rule(keys=st.lists(st.integers(-9, 8), min_size=1, max_size=5, unique=True))
    def lay_over(self, keys: list[int]) -> None:
        """Import rows of existing and new keys: training cannot continue from here either."""
        self._step_back()
        self.store.discard_uncommitted()
        self.world.lay_over(self.store, {table.name: keys for table in TABLES[:2]})
        self._keep()

    @precondition(lambda self: self._between_passes())
    @rule(seed=st.integers(51, 99), keys=st.integers(1, 6))
    def reorganize(self, seed: int, keys: int) -> None:
        """Begin a schedule of other passes; segments of which it uses few rows are retained."""
        self._step_back()
        self.world.keys_per_pass = keys
        self.world.follow(self.store, self.world.draw(seed))
        self._keep()

    @precondition(lambda self: self.kept)
    @rule(back=st.integers(0, 3))
    def roll_back(self, back: int) -> None:
        """Make an older commit the newest again, under a new id; later ones are gone."""
        to = sorted(self.kept)[-1 - back % len(self.kept)]
        newest, commit = max(self.kept) + 1, self.store.rollback(to)
        self.world = copy.deepcopy(self.kept[to])
        assert (commit.id, commit.schedule_digest) == (newest, self.world.digest)
        pinned = self.pins.values()
        self.kept = {id_: world for id_, world in self.kept.items() if id_ <= to or id_ in pinned}
        self._keep(newest)

    @precondition(lambda self: self.kept)
    @rule(name=st.sampled_from("ab"), back=st.integers(0, 3))
    def pin(self, name: str, back: int) -> None:
        """Pin a commit; dumps since the newest one wait."""
        to = sorted(self.kept)[-1 - back % len(self.kept)]
        self.pins[name] = to
        assert self.store.pin(name, to).pins == self.pins
        self._keep_again()

    @precondition(lambda self: self.pins)
    @rule(back=st.integers(0, 1))
    def unpin(self, back: int) -> None:
        name = sorted(self.pins)[back % len(self.pins)]
        del self.pins[name]
        assert self.store.unpin(name).pins == self.pins
        self._keep_again()

    # -- failures ----------------------------------------------------------------------------------------

    @rule()
    def crash(self) -> None:
        """Kill the process, and open the store in another."""
        self.engine.close()
        self._open_again()

    @rule(retention=st.none() | st.integers(1, 3))
    def reopen(self, retention: int | None) -> None:
        self.store.close()
        self._open_again(retention)

    @precondition(lambda self: self.world.scheduled)
    @rule(blocks=st.integers(0, 4), num_bytes=st.sampled_from([0, 1, 30]))
    def die_writing(self, blocks: int, num_bytes: int) -> None:
        """Kill the process in the middle of a write, and open the store in another."""
        self.engine.tear(blocks, num_bytes)
        with pytest.raises(KilledError):
            self._dump()
        self.crash()

    @precondition(lambda self: self._may_commit(0))
    @rule(call=st.integers(1, 6))
    def fill_disk(self, call: int) -> None:
        """Fill the disk at some call; training returns to the commit."""
        self.engine.fail_in(call)
        try:
            self.write()
            self.commit()
        except StoreFullError:
            self.engine.fail_in(None)
            self.forget()
        self.engine.fail_in(None)

    @precondition(lambda self: self._between_passes())
    @rule(call=st.integers(1, 12))
    def fail_compacting(self, call: int) -> None:
        """Fill the disk, or fail a read, at some call of a compaction: the store does not change."""
        self._step_back()
        world = copy.deepcopy(self.world)
        self.engine.fail_in(call)
        try:
            world.compact(self.store)
        except StoreError:
            return
        finally:
            self.engine.fail_in(None)
        self.world = world
        self._keep()

    # -- reading -----------------------------------------------------------------------------------------

    @rule(
        keys=st.lists(st.integers(-6, 6), max_size=8),
        table=st.sampled_from(TABLES),
        missing=st.sampled_from(["zeros", "initial"]),
    )
    def read(self, keys: list[int], table: Table, missing: str) -> None:
        """Look up keys, repeated or not, with zeros or the initial row for keys without one."""
        asked = np.array(keys, np.int64)
        found, first = self.store.lookup(table.name, asked, missing=missing), initial_rows(table, asked)
        for i, key in enumerate(keys):
            row, absent = (b"".join(values[i].tobytes() for values in fields) for fields in (found.values(), first))
            absent = absent if missing == "initial" else bytes(table.row_bytes)
            assert row == self.world.rows.get((table.name, key), absent), (table.name, key)

    @precondition(lambda self: self.kept)
    @rule(back=st.integers(0, 3))
    def read_older(self, back: int) -> None:
        id_ = sorted(self.kept)[-1 - back % len(self.kept)]
        with self.store.at(id_) as older:
            _check(older, self.kept[id_])
            self.kept[id_].check_changes(older, id_ - 1)

    @precondition(lambda self: self.kept)
    @rule(since=st.integers(0, 6))
    def follow_changes(self, since: int) -> None:
        self._step_back()
        store = self.store
        store.discard_uncommitted()
        self.world.check_changes(store, store.commit.id - since % (store.commit.id + 2))

    @rule()
    def verify(self) -> None:
        self._step_back()
        self.store.discard_uncommitted()
        assert Verification(self.store).run()["problems"] == []
        if self.kept and not isinstance(self.inner, ZarrEngine):  # its chunks have several blocks
            assert stored_bytes(self.store) == needed_bytes(self.store)

    @invariant()
    def rows_are_those_of_the_dict(self) -> None:
        if self.store is None:
            return
        assert [commit.id for commit in self.store.commits] == list(self.kept)
        assert [commit.cursor for commit in self.store.commits] == [world.cursor for world in self.kept.values()]
        _check(self.store, self.world)

    def teardown(self) -> None:
        if self.store is not None:
            self.store.close()
        self.folder.cleanup()

    # -- inside ------------------------------------------------------------------------------------------

    def _may_commit(self, sample: int) -> bool:
        """Return True if a commit at a sample of the present pass would not go back."""
        world = self.world
        return world.scheduled and (world.cursor is None or world.cursor <= (world.pass_index, sample))

    def _between_passes(self) -> bool:
        return bool(self.kept) and self.kept[max(self.kept)].cursor.sample == 0

    def _dump(self, *, within: bool = False, part: int = 0) -> None:
        self.world.train(part=part)
        self.world.append(self.store, within=within)

    def _keep(self, id_: int | None = None) -> None:
        """Record a commit; from now on a crash returns to it."""
        self.kept[max(self.kept, default=-1) + 1 if id_ is None else id_] = copy.deepcopy(self.world)
        self._give_up()

    def _keep_again(self) -> None:
        """Record a commit that replaces the newest."""
        newest = max(self.kept)
        self.kept[newest + 1] = self.kept[newest]
        if newest not in self.pins.values():
            del self.kept[newest]
        self._give_up(more=newest in self.pins.values())

    def _give_up(self, *, more: bool = False) -> None:
        """Record the kept commits: the newest, one ``more`` if one pins another, and the pinned ones."""
        kept = {*list(self.kept)[-self.retention - more :], *self.pins.values()}
        self.kept = {id_: world for id_, world in self.kept.items() if id_ in kept}

    def _step_back(self) -> None:
        self.world = copy.deepcopy(self.kept[max(self.kept)] if self.kept else self.fresh)

    def _open_again(self, retention: int | None = None) -> None:
        self.inner = self.open(self.path, self.inner)
        self.engine = FailingEngine(self.inner)
        if retention is None and not self.kept:
            retention = self.retention  # no commit records yet how many are kept
        self.store = Store.open(None, tables=TABLES, engine=self.engine, retention=retention)
        self.retention = retention or (self.retention if self.store.commit is None else self.store.commit.retention)
        self._step_back()


def _check(store: Store, world: World) -> None:
    """Assert that a store at a commit, with the dumps since, holds the rows of a world."""
    if store.commit is not None:
        assert store.state() == world.state
    world.check(store, after=world.pass_index)
    if world.cursor is not None and world.cursor.sample and world.pass_index == world.cursor.pass_index:
        world.check_within(store)
        return
    world.check(store, after=world.pass_index - 1)
    if world.scheduled:
        world.check_load(store, world.pass_index)
