"""What is done beside the training so that a switch has but rows to move, and what happens where it fails."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.training.cases import (
    Case,
    Spec,
    assert_same_bits,
    open_store,
    resident_result,
    result_of,
    smallest_host_budget,
    table,
    tiered,
    train,
)
from tiercache.planning.visit_plan import Planner, VisitPlan
from tiercache.tiers import transfer
from tiercache.tiers.host_tier import HostTier

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import tiercache as tc

CASE = Case(
    tables=(table("a", 8), table("b", 3)), specs=(Spec(name="f", table="a"), Spec(name="g", table="b")),
    num_samples=400, pass_rows=120, num_keys=300, batch=50, epochs=2,
)  # fmt: skip
LATE = 0.03
"""Seconds by which the writer makes room later than it would."""


def delayed(make_room: Callable[..., Any], made: list[int]) -> Callable[..., Any]:
    """Return ``make_room``, slower; notes the visits for whose dump it made room."""

    def make(*arguments: Any) -> Any:
        time.sleep(LATE)
        room = make_room(*arguments)
        made.append(next(one for one in arguments if isinstance(one, VisitPlan)).visit)
        return room

    return make


def assert_goes_on(store: tc.Store, passes: tc.PassSet) -> None:
    """From where it stands to the bits of a training in memory."""
    with tiered(store, passes) as cache:
        model = train(cache, CASE)
    assert_same_bits(result_of(store, passes, model), resident_result(CASE, passes))


def test_a_visit_that_cannot_be_planned_does_not_end_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is planned while the visit before the last one is trained, and it is missed when its rows are to be staged."""
    passes, plan_next = CASE.cut(tmp_path / "passes"), Planner.plan_next
    begun, planned = list[int](), list[int]()

    def plan(planner: Planner) -> VisitPlan:
        plan = plan_next(planner)
        planned.append(plan.visit)
        if plan.visit == 3 and begun:
            raise RuntimeError("visit 3 cannot be planned")
        return plan

    with open_store(tmp_path / "x", CASE, "lmdb") as store:
        with tiered(store, passes) as cache:
            monkeypatch.setattr(Planner, "plan_next", plan)
            with pytest.raises(RuntimeError, match="visit 3 cannot be planned"):
                train(cache, CASE, each_batch=lambda visit, _: begun.append(visit))
        assert planned[-1] == 3, "a visit behind one that failed was planned"
        assert max(begun) in {1, 2}  # visit 2 begins, and ends with its first batch at the earliest
        assert store.commit is not None
        assert store.commit.cursor.visit == 2
        monkeypatch.undo()
        assert_goes_on(store, passes)


def test_room_that_cannot_be_made_ends_the_training_and_loses_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words of what went wrong reach the training loop; a new run goes on from the last commit to the same bits."""
    passes, make_room = CASE.cut(tmp_path / "passes"), transfer.make_room

    def make(*arguments: Any) -> Any:
        if next(one for one in arguments if isinstance(one, VisitPlan)).visit == 2:
            raise MemoryError("no room for visit 2")
        return make_room(*arguments)

    with open_store(tmp_path / "x", CASE, "lmdb") as store:
        monkeypatch.setattr(transfer, "make_room", make)
        with tiered(store, passes) as cache, pytest.raises(MemoryError, match="no room for visit 2"):
            train(cache, CASE)
        assert store.commit is not None
        assert store.commit.cursor.visit == 2
        monkeypatch.undo()
        assert_goes_on(store, passes)


@pytest.mark.parametrize("engine", ["memory", "lmdb"])
def test_room_that_comes_late_changes_no_bit_within_the_smallest_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """The switch waits for it; what rows are now is read behind it; a commit inside a visit goes on beside it."""
    passes, made, seen = CASE.cut(tmp_path / "passes"), list[int](), set[bool]()
    monkeypatch.setattr(transfer, "make_room", delayed(transfer.make_room, made))

    def look(visit: int, batch: int) -> None:
        if batch == 0:
            seen.add(visit in made)
            if visit % 2:
                cache.commit()
            else:
                keys = np.asarray(passes.passes[0].keys("a"))
                cache.rows_now().fields("a", keys)
                assert visit in made

    with open_store(tmp_path / "x", CASE, engine) as store:
        smallest = smallest_host_budget(store, passes, device_budget="64MiB")
        with tiered(store, passes, host_budget=smallest) as cache:
            model = train(cache, CASE, each_batch=look)
            assert cache.host_bytes_peak <= smallest
        result = result_of(store, passes, model)
    assert False in seen, "room was never late"
    assert_same_bits(result, resident_result(CASE, passes))


def test_no_two_threads_are_in_the_host_tier_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while rows are evaluated in the middle of visits, nor when a loop is left early and begun anew."""
    passes, held, met = CASE.cut(tmp_path / "passes"), threading.Lock(), set[str]()
    monkeypatch.setattr(transfer, "make_room", delayed(transfer.make_room, []))

    def alone(name: str) -> Callable[..., Any]:
        method = getattr(HostTier, name)

        def call(*arguments: Any, **options: Any) -> Any:
            assert held.acquire(blocking=False), "another thread is in the host tier"
            try:
                time.sleep(0.001)
                return method(*arguments, **options)
            finally:
                held.release()
                met.add(threading.current_thread().name.split("_")[0])

        return call

    for name in ("enter", "keep", "clear", "piece"):
        monkeypatch.setattr(HostTier, name, alone(name))
    keys = np.asarray(passes.passes[-1].keys("a"))
    with open_store(tmp_path / "x", CASE, "lmdb") as store, tiered(store, passes) as cache:
        train(cache, CASE, epochs=1, each_batch=lambda _, __: cache.rows_now().fields("a", keys))
        for _ in range(2):
            for visit in cache.passes(epochs=2):
                next(visit.batches(CASE.batch))
                break
        for visit in cache.passes(epochs=2):
            assert visit.epoch == 1
    assert {"MainThread", "tiercache-writer"} <= met
