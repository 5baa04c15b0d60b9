"""What ranks do at the same time: batches that are asked for and rows that arrive while one is trained."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dist.pool import RanksPool
from tests.dist.trainings import CASES, KINDS, assert_close, every_table, model_of, on_ranks, open_sharded, step
from tiercache.dist.communicator import AnyCommunicator


def noting_rows(rows: Any, events: list[str], check: Callable[[], None] = lambda: None) -> list[threading.Event]:
    """Have the exchange of rows record "rows 0", "rows 1" and so on; return events that are set in order."""
    serve, arrived = rows.serve, [threading.Event() for _ in range(5)]

    def answered(*arguments: Any, **options: Any) -> Any:
        check()
        number = sum(event.is_set() for event in arrived)
        found = serve(*arguments, **options)
        events.append(f"rows {number}")
        arrived[number].set()
        return found

    rows.serve = answered
    return arrived


def note_dense(number: int, events: list[str], arrived: list[threading.Event], schedule: str) -> None:
    """Record "dense" of a batch, after the next one's rows have arrived if the schedule says so."""
    if schedule == "interleaved" and number < 3:
        assert arrived[number + 1].wait(30), "the next rows never come while this one is in the dense part"
    events.append(f"dense {number}")


def spy(there: Any, name: str, note: Callable[[], object]) -> None:
    """Have a method of an object call ``note`` when it returns."""
    plain = getattr(there, name)

    def noted(*arguments: Any, **options: Any) -> Any:
        found = plain(*arguments, **options)
        note()
        return found

    setattr(there, name, noted)


def overlapped(ranks: AnyCommunicator, case: str, folder: str, *, schedule: str, queued: bool = False) -> list[str]:
    """Train one batch of 4 micro-batches, whose dense parts wait for earlier events; return the order.

    queued: the training thread brings rows, and another one only asks for them.
    """
    one, events = CASES[case], list[str]()
    with open_sharded(one, folder, queued=queued) as cache:
        model, optimizer = model_of(cache, one)

        def asked() -> None:
            assert threading.current_thread().name.startswith("tiercache-input")

        def check() -> None:
            assert (threading.current_thread() is threading.main_thread()) == (queued or schedule == "simple")

        spy(cache._exchange.input_dist, "exchange", asked)
        arrived = noting_rows(cache._exchange.rows, events, check)
        passes = cache.passes(epochs=1)
        for batches in next(passes).steps(one.batch, micro_batches=4, schedule=schedule):
            for number, batch in enumerate(batches):
                out = model(batch)
                note_dense(number, events, arrived, schedule)
                (nn.functional.binary_cross_entropy_with_logits(out, batch.label) * batch.weight).backward()
            optimizer.step()
            events.append("step")
            break
    return events


def asked_ahead(ranks: AnyCommunicator, case: str, folder: str, *, queued: bool) -> list[str]:
    """Train a pass, each batch of which waits for the next one's request; return the calls in order.

    Each by the names of its thread, its communicator and its operation.
    """
    one, events = CASES[case], list[str]()
    with open_sharded(one, folder, queued=queued) as cache:
        model, optimizer = model_of(cache, one)
        done = threading.Condition()

        def note(call: str) -> None:
            with done:
                events.append(f"{call} {threading.current_thread().name.split('_')[0]}")
                done.notify_all()

        for name in ("input", "exchange"):
            for method in ("exchange_splits", "all_to_all"):
                spy(getattr(cache._parts.communicators, name), method, partial(note, f"{name} {method}"))
        passes = cache.passes(epochs=1)
        first = next(passes)
        for number, batch in enumerate(first.batches(one.batch)):
            events.append("train")
            following = number + 1 < -(-first.num_samples // one.batch)
            with done:
                wanted = number + 1 + following
                assert done.wait_for(lambda: _count(events, "input all_to_all") >= wanted, 30), events  # noqa: B023
                ahead = max(cache._backend.ahead, cache._exchange.least_ahead)
                assert _count(events, "input all_to_all") <= number + 1 + ahead, events
            step([batch], model, optimizer)
            events.append("step")
    return events


def _count(events: list[str], begin: str) -> int:
    return sum(event.startswith(begin) for event in events)


WAITING = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "index", "repeat_interleave"}
"""Torch operators that read from a GPU: an index if it is a mask."""


def waits(ranks: AnyCommunicator, case: str, folder: str, *, sharding: dict[str, str]) -> list[str]:
    """Train on the shim; return the operations in later steps for which the host would have waited."""
    one, found = CASES[case], list[str]()

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            is_mask = name != "index" or any(i is not None and i.dtype in {torch.bool, torch.uint8} for i in args[1])
            if name in WAITING and is_mask:
                found.append(name)
            return func(*args, **kwargs or {})

    with open_sharded(one, folder, queued=True, sharding=sharding) as cache:
        model, optimizer = model_of(cache, one)
        backend, runtime = cache._backend, cache._backend._runtime

        def note(name: str) -> None:
            if threading.current_thread() is threading.main_thread():
                found.append(name)

        for there, name in ((backend, "slot_mask"), (runtime, "download"), (runtime, "synchronize")):
            spy(there, name, partial(note, name))
        passes = cache.passes(epochs=1)
        for number, batch in enumerate(next(passes).batches(one.batch)):
            if number == 1:
                found.clear()
            with Noting():
                step([batch], model, optimizer)
        assert number > 1
        return [*found]


def overlapped_evaluation(ranks: AnyCommunicator, case: str, folder: str, *, schedule: str) -> list[str]:
    """Evaluate 4 batches, each of which is read after its predecessors' events; return the order."""
    one, events, arrived = CASES[case], list[str](), list[threading.Event]()
    with open_sharded(one, folder) as cache:
        model, _ = model_of(cache, one)
        evaluating = cache._exchange.evaluating

        def noted(passes: Any) -> Any:
            exchange = evaluating(passes)
            arrived.extend(noting_rows(exchange.rows, events))
            return exchange

        cache._exchange.evaluating = noted  # type: ignore[method-assign]
        some = next(iter(cache.evaluate(cache.dataset)))
        with torch.no_grad():
            for number, batch in enumerate(some.batches(-(-some.num_samples // 4), schedule=schedule)):
                model(batch)
                note_dense(number, events, arrived, schedule)
    return events


def resumed_late(ranks: AnyCommunicator, case: str, folder: str, *, queued: bool) -> str:
    """Leave the micro-batches of a pass, continue with them in the next one, and look one up."""
    one = CASES[case]
    with open_sharded(one, folder, queued=queued) as cache:
        model, _ = model_of(cache, one)
        passes = cache.passes(epochs=1)
        p = next(passes)
        kept = next(p.steps(one.batch, micro_batches=4))
        next(kept)
        p.skip()
        next(passes)
        try:
            for batch in kept:
                model(batch)
        except RuntimeError as error:
            return str(error)
    return "nothing was said"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro_batches", [2, 5])
def test_micro_batches_end_as_one_batch(ranks_pool: RanksPool, tmp_path: Path, micro_batches: int) -> None:
    """All see the rows before the step; micro-batches without samples on a rank are among them."""
    found = on_ranks(ranks_pool, 3, tmp_path, "bags", micro_batches=micro_batches)

    assert_close(tmp_path, "bags", found[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_whose_rows_are_a_gpus_ends_as_on_one_process(
    ranks_pool: RanksPool, tmp_path: Path, kind: str
) -> None:
    """On the shim: the training thread queues transfers of rows and pooled vectors, one micro-batch after another."""
    options = {"queued": True, "micro_batches": 3, "steps": 4, "sharding": every_table("bags", kind)}
    found = on_ranks(ranks_pool, 2, tmp_path, "bags", **options)

    assert_close(tmp_path, "bags", found[0], steps=4)


@pytest.mark.parametrize("queued", [False, True])
def test_ids_and_counts_of_the_next_batch_travel_while_one_is_trained(
    ranks_pool: RanksPool, tmp_path: Path, queued: bool
) -> None:
    """By default: on a separate thread and communicator. The training thread transfers rows, by another one."""
    for told in on_ranks(ranks_pool, 2, tmp_path, body=asked_ahead, queued=queued):
        assert {event for event in told if event.startswith("input")} == {
            "input exchange_splits tiercache-input", "input all_to_all tiercache-input"
        }  # fmt: skip
        assert {event.split()[-1] for event in told if event.startswith("exchange ")} == {"MainThread"}
        before = told[: told.index("step")]
        assert sum(event.startswith("input all_to_all") for event in before) >= 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_a_gpu_has_the_host_wait_for_nothing(ranks_pool: RanksPool, tmp_path: Path, kind: str) -> None:
    """Forward, backward and step: the exchange must not read from the device, which would wait."""
    assert on_ranks(ranks_pool, 2, tmp_path, "bags", waits, sharding=every_table("bags", kind)) == [[], []]


OVERLAPPED = ["rows 0", "rows 1", "dense 0", "rows 2", "dense 1", "rows 3", "dense 2", "dense 3"]
ONE_BY_ONE = [f"{what} {number}" for number in range(4) for what in ("rows", "dense")]


@pytest.mark.parametrize(
    ("schedule", "queued", "order"),
    [("interleaved", False, OVERLAPPED), ("interleaved", True, OVERLAPPED), ("simple", False, ONE_BY_ONE)],
)
def test_the_rows_of_the_next_micro_batch_come_while_one_is_in_the_dense_part(
    ranks_pool: RanksPool, tmp_path: Path, schedule: str, queued: bool, order: list[str]
) -> None:
    """On a CPU from another thread; queued for a GPU by the training thread, in the same order on all ranks.

    The simple schedule does one thing after the other.

    From another thread they might precede the model's collectives on one rank and follow them on the next: a deadlock.
    """
    told = on_ranks(ranks_pool, 2, tmp_path, body=overlapped, schedule=schedule, queued=queued)

    assert told[0] == told[1] == [*order, "step"]


@pytest.mark.parametrize(("schedule", "order"), [("interleaved", OVERLAPPED), ("simple", ONE_BY_ONE)])
def test_rows_of_an_evaluation_come_while_the_batch_before_is_looked_at(
    ranks_pool: RanksPool, tmp_path: Path, schedule: str, order: list[str]
) -> None:
    """Or after it, by the order of events."""
    told = on_ranks(ranks_pool, 2, tmp_path, body=overlapped_evaluation, schedule=schedule)

    assert told[0] == told[1] == order


@pytest.mark.parametrize("queued", [False, True])
def test_micro_batches_that_are_resumed_in_the_next_pass_are_refused(
    ranks_pool: RanksPool, tmp_path: Path, queued: bool
) -> None:
    """Also one that was requested in its pass and delivered later: its numbers mean other rows now."""
    told = on_ranks(ranks_pool, 2, tmp_path, body=resumed_late, queued=queued)

    assert all("which has ended: use batches inside their own loop" in one for one in told)
