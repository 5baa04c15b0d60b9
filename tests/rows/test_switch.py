"""Work during training that leaves only row moves to a switch, and its failures."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.train.cases import (
    Case,
    Net,
    Spec,
    assert_bits_of_memory,
    open_store,
    registered,
    run,
    smallest_host_budget,
    table,
    tiered,
    train,
)
from tiercache.planning.pass_plan import PassPlan, Planner
from tiercache.reporting import report
from tiercache.rows import switch, threads
from tiercache.rows.backends.base import Streams
from tiercache.rows.backends.cpu import CpuBackend
from tiercache.rows.host import HostTier
from tiercache.rows.packing import Packer, PreparedPass
from tiercache.rows.pinned import PinnedArena
from tiercache.rows.prefetch import RowPrefetcher
from tiercache.rows.switch import PassSwitcher
from tiercache.train.cache import TierCache

CASE = Case(
    tables=(table("a", 8), table("b", 3)), specs=(Spec(name="f", table="a"), Spec(name="g", table="b")),
    num_samples=400, pass_rows=120, num_keys=300, batch=50, epochs=2,
)  # fmt: skip
NUM_PASSES = CASE.epochs * -(-CASE.num_samples // CASE.pass_rows)
SLOW = 0.01
"""Seconds that each call of the slow host tier takes."""
STEPS = 1000.0
"""Seconds that the steps of a pass take on a busy device."""


@contextmanager
def goes_on(folder: Path, stands: int | None = None) -> Iterator[tuple[TierCache, pytest.MonkeyPatch]]:
    """Yield a cache to train; then its store is between passes, and another cache ends with the bits of memory."""
    passes = CASE.cut(folder / "passes")
    with open_store(folder / "x", CASE, "lmdb") as store:
        with pytest.MonkeyPatch.context() as patch, tiered(store, passes) as cache:
            yield cache, patch
        assert store.commit is not None
        assert store.commit.cursor.pass_index == (CASE.epochs * len(passes.passes) if stands is None else stands)
        with tiered(store, passes) as cache:
            model = train(cache, CASE)
        assert_bits_of_memory(store, passes, model, CASE)


def precede(patch: pytest.MonkeyPatch, owner: Any, name: str, first: Callable[..., object]) -> None:
    """Call an action before each call of a function or method, with its arguments."""
    right = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        first(*arguments, **options)
        return right(*arguments, **options)

    patch.setattr(owner, name, call)


def test_a_pass_that_cannot_be_planned_does_not_end_those_before_it(tmp_path: Path) -> None:
    """It is planned during the last pass but one, and its error is raised when its rows are to be staged."""
    plan_next, begun, planned = Planner.plan_next, list[int](), list[int]()

    def plan(planner: Planner) -> PassPlan:
        plan = plan_next(planner)
        planned.append(plan.pass_index)
        if plan.pass_index == 3 and begun:
            raise RuntimeError("pass 3 cannot be planned")
        return plan

    with goes_on(tmp_path, stands=2) as (cache, patch):
        patch.setattr(Planner, "plan_next", plan)
        with pytest.raises(RuntimeError, match="pass 3 cannot be planned"):
            train(cache, CASE, each_batch=lambda pass_index, _: begun.append(pass_index))
        assert planned[-1] == 3, "a pass after one that failed was planned"
        assert max(begun) in {1, 2}  # pass 2 begins, and ends with its first batch at the earliest


def test_room_that_cannot_be_made_ends_the_training_and_loses_no_commit(tmp_path: Path) -> None:
    def refuse(_packer: Any, current: PreparedPass, *_: Any) -> None:
        if current.plan.pass_index == 2:
            raise MemoryError("no room for pass 2")

    with goes_on(tmp_path, stands=2) as (cache, patch):
        precede(patch, Packer, "allocate", refuse)
        with pytest.raises(MemoryError, match="no room for pass 2"):
            train(cache, CASE)


@pytest.mark.parametrize("engine", ["memory", "lmdb"])
def test_room_that_comes_late_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """A commit inside a pass needs none; current rows are read after it, and the switch waits for it."""
    passes, allocate = CASE.cut(tmp_path / "passes"), Packer.allocate
    wanted = [threading.Event() for _ in range(CASE.epochs * len(passes.passes))]
    made, keys = list[int](), passes.passes[0].keys("a")

    def make(packer: Packer, current: PreparedPass, *others: Any) -> Any:
        pass_index = current.plan.pass_index
        assert wanted[pass_index].wait(timeout=60), f"no batch was trained of pass {pass_index}"
        room = allocate(packer, current, *others)
        made.append(pass_index)
        return room

    def look(pass_index: int, batch: int) -> None:
        if batch == 0:
            if pass_index % 2:
                cache.commit()
            assert pass_index not in made
            wanted[pass_index].set()
            if not pass_index % 2:
                cache.live_rows().fields("a", np.asarray(keys))
                assert pass_index in made

    monkeypatch.setattr(Packer, "allocate", make)
    with open_store(tmp_path / "x", CASE, engine) as store:
        smallest = smallest_host_budget(store, passes)
        with tiered(store, passes, host_budget=smallest) as cache:
            model = train(cache, CASE, each_batch=look)
            assert cache.host_bytes_peak <= smallest
        assert_bits_of_memory(store, passes, model, CASE)
    assert len(made) == len(wanted)


def test_a_dump_is_written_behind_the_load_of_rows_that_are_there(tmp_path: Path) -> None:
    """Both need memory; and a dump followed by a failing load is written all the same."""
    unpack, loading, seen = Packer.unpack, threading.Event(), list[bool]()

    def slow(self: Packer, load: Any, dumped_G: Any) -> Any:
        loading.set()
        try:
            time.sleep(SLOW)  # long enough for the writer to begin
            if load.layout.staged.plan.pass_index == 3:
                raise MemoryError("no memory to load pass 3")
            return unpack(self, load, dumped_G)
        finally:
            loading.clear()

    def writing(*_: Any) -> None:
        time.sleep(SLOW / 2)  # a concurrent load would have begun
        seen.append(loading.is_set())

    with goes_on(tmp_path, stands=3) as (cache, patch):
        patch.setattr(Packer, "unpack", slow)
        precede(patch, PassSwitcher, "_write", writing)
        with pytest.raises(MemoryError, match="no memory to load pass 3"):
            train(cache, CASE, each_batch=lambda _, __: cache.drain())
        cache.close()
        assert seen == [False] * 3


def test_a_dump_is_written_at_once_where_the_rows_of_the_next_pass_are_not_there(tmp_path: Path) -> None:
    """Then the training waits for the disk."""
    begun = [threading.Event() for _ in range(NUM_PASSES)]

    def late(_: RowPrefetcher, plan: PassPlan, *_others: Any) -> None:
        if plan.pass_index:
            assert begun[plan.pass_index - 1].wait(timeout=60), f"pass {plan.pass_index - 1} was not written"

    with goes_on(tmp_path) as (cache, patch):
        precede(patch, RowPrefetcher, "stage", late)
        precede(patch, PassSwitcher, "_write", lambda _, plan, *_others: begun[plan.pass_index].set())
        train(cache, CASE)


class QueueingBackend(Streams, CpuBackend):
    """A GPU with pending steps: they take long, and each later move a second. A thread has its own clock."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = self
        self.seconds: dict[int, float] = defaultdict(float)
        self._queued: set[int] = set()  # passes: the writer may wait for the steps of one when the next has begun
        self.over = [threading.Event() for _ in range(NUM_PASSES)]
        self.log: list[str] = []
        self._lock = threading.Lock()

    def queue(self, pass_index: int, _batch: int) -> None:
        with self._lock:
            self._queued.add(pass_index)

    def reach(self, name: str, seconds: float) -> Any:
        """Return an event after the steps; waiting for it takes `seconds` more."""

        def wait() -> None:
            with self._lock:
                if threading.current_thread() is threading.main_thread():
                    self.log.append(name)
                self.seconds[threading.get_ident()] += STEPS * len(self._queued) + seconds
                for one in self._queued:
                    self.over[one].set()
                self._queued.clear()

        return SimpleNamespace(wait=wait)

    def now(self) -> float:
        return self.seconds[threading.get_ident()]

    def dumped(self) -> Any:
        return self.reach("dumped", 1.0)

    def loaded(self) -> Any:
        return self.reach("loaded", 1.0)

    def trained(self) -> Any:
        return self.reach("trained", 0.0)

    def pack(self, *arguments: Any) -> None:
        self.log.append("pack")
        super().pack(*arguments)

    def unpack(self, *arguments: Any) -> None:
        self.log.append("unpack")
        super().unpack(*arguments)


@pytest.mark.parametrize("disk", ["quick", "late"])
def test_seconds_of_running_steps_are_no_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: str) -> None:
    """Neither after moved rows nor after a late disk. If everything is ready, the training thread waits for nothing."""
    passes, backend = CASE.cut(tmp_path / "passes"), QueueingBackend()

    def late(_: RowPrefetcher, plan: PassPlan, *_others: Any) -> None:
        before = plan.pass_index - 1
        assert before < 0 or backend.over[before].wait(timeout=60), f"the steps of pass {before} were not awaited"

    def each_batch(pass_index: int, batch: int) -> None:
        backend.queue(pass_index, batch)
        if disk == "quick":
            cache._rows.drain(staged=True)

    for module in (report, threads, switch):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=backend.now))
    if disk == "late":
        precede(monkeypatch, RowPrefetcher, "stage", late)
    with open_store(tmp_path / "x", CASE, "lmdb") as store, tiered(store, passes, device=backend) as cache:
        train(cache, CASE, each_batch=each_batch)
        reports = cache.reports
    assert len(reports) == len(backend.over)
    assert all(r.waited + r.switched < STEPS for r in reports)
    assert sum(backend.seconds.values()) >= STEPS * len(reports)
    if disk == "quick":
        assert [r.switched for r in reports] == [0.0] * len(reports)
        waits = [name for name in backend.log if name in {"dumped", "loaded", "trained"}]
        assert waits == ["trained"] * 2, "the training thread waits for the first rows and the last dump alone"
        assert all(r.load_seconds == 1.0 for r in reports)


def test_no_two_threads_are_in_the_host_tier_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while rows are evaluated in the middle of passes, nor when a loop is left early and restarted."""
    passes, held, met = CASE.cut(tmp_path / "passes"), threading.Lock(), set[str]()
    clashes = list[str]()

    def alone(name: str) -> Callable[..., Any]:
        method = getattr(HostTier, name)

        def call(*arguments: Any, **options: Any) -> Any:
            mine = held.acquire(blocking=False)
            if not mine:
                clashes.append(f"{threading.current_thread().name} in {name}")
            try:
                time.sleep(SLOW)  # long enough for others to come
                return method(*arguments, **options)
            finally:
                if mine:
                    held.release()
                met.add(threading.current_thread().name.split("_")[0])

        return call

    for name in ("enter", "keep", "clear", "page"):
        monkeypatch.setattr(HostTier, name, alone(name))
    keys = np.asarray(passes.passes[-1].keys("a"))
    with open_store(tmp_path / "x", CASE, "lmdb") as store, tiered(store, passes) as cache:
        train(cache, CASE, epochs=1, each_batch=lambda _, __: cache.live_rows().fields("a", keys))
        for _ in range(2):
            for p in cache.passes(epochs=2):
                next(p.batches(CASE.batch))
                break
        for p in cache.passes(epochs=2):
            assert p.epoch == 1
            p.skip()
    assert not clashes
    assert {"MainThread", "tiercache-reader", "tiercache-writer"} <= met


def fails(cache: TierCache, owner: type, method: str, call: int, *, drains: bool = False) -> tuple[Net, Any]:
    """Train to an error at a call of a method; return model and optimizer."""
    model, optimizer = registered(cache, CASE)
    calls = count(1)

    def fail(self: Any, *_: Any, **__: Any) -> None:
        if next(calls) == call:
            if drains:
                self.drain()
            raise OSError(f"no {method} today")

    with pytest.MonkeyPatch.context() as patch:
        precede(patch, owner, method, fail)
        with pytest.raises(OSError, match=f"no {method} today"):
            run(cache, CASE, model, optimizer)
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize(
    ("owner", "method"),
    [(Packer, "unpack"), (Packer, "activate"), (Packer, "lay_out_staged"), (HostTier, "keep"), (HostTier, "enter")],
)
def test_a_failure_keeps_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> None:
    passes = CASE.cut(tmp_path / "passes")
    take, out = PinnedArena.take, list[int]()

    def taking(memory: PinnedArena, num_bytes: int) -> Any:
        region = take(memory, num_bytes)
        out.append(id(region))
        return region

    with open_store(tmp_path / "x", CASE, "lmdb") as store:
        smallest = smallest_host_budget(store, passes)
        with tiered(store, passes, host_budget=smallest) as cache:
            monkeypatch.setattr(PinnedArena, "take", taking)
            precede(monkeypatch, PinnedArena, "give_back", lambda _, region: out.remove(id(region)))
            model, optimizer = fails(cache, owner, method, 4)
            assert not out
            run(cache, CASE, model, optimizer)
            assert cache.host_bytes_peak <= smallest
        assert_bits_of_memory(store, passes, model, CASE)


@pytest.mark.parametrize(("method", "call"), [("switch", 3), ("finish", 1)])
def test_a_pass_that_fails_while_it_ends_is_trained_again(tmp_path: Path, method: str, call: int) -> None:
    """Also if that commit was durable by then, so that the newest commit is where the pass began."""
    passes = CASE.cut(tmp_path / "passes")
    with open_store(tmp_path / "x", CASE, "lmdb") as store:
        with tiered(store, passes) as cache:
            model, optimizer = fails(cache, PassSwitcher, method, call, drains=True)
            run(cache, CASE, model, optimizer)
        assert_bits_of_memory(store, passes, model, CASE)
