"""Caches in forks of their process, and caches that were not closed."""

import gc
import os
import signal
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tiercache as tc
from tests.dist.meeting import meet
from tests.train.cases import Case, Spec, assert_same_bits, resident_result, result_of, table, tiered, train
from tests.train.loops import train_store
from tiercache.dist.shard_writer import ShardWriter
from tiercache.errors import StateError
from tiercache.planning.schedule import Schedule
from tiercache.planning.sharding_planner import sharding_of
from tiercache.store import Cursor, verify

CASE = Case(
    tables=(table("a", 4), table("b", 6, tc.optim.SGD(learning_rate=0.1))),
    specs=(Spec(name="f", table="a", hotness="ragged"), Spec(name="g", table="b")),
    num_samples=240, pass_rows=60, num_keys=100, epochs=1,
)  # fmt: skip


def in_a_fork(call: Callable[[], object]) -> str:
    """Return the outcome of a call in a fork of this process: "returned", an error, or "hangs"."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover - in the child
        signal.alarm(30)
        said = "returned"
        try:
            call()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writes, said.encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as file:
        said = file.read().decode()
    os.waitpid(pid, 0)
    return said or "hangs"


def left_by_an_error(cache: Any) -> None:
    with cache:
        raise RuntimeError("mine")


CALLS: dict[str, tuple[Callable[[Any], object], str]] = {
    "close": (lambda cache: cache.close(), "returned"),
    "close twice": (lambda cache: (cache.close(), cache.close()), "returned"),
    "leaving a with statement": (left_by_an_error, "RuntimeError: mine"),
    "commit": (lambda cache: cache.commit(), "StateError"),
    "restore": (lambda cache: cache.restore(), "StateError"),
    "passes": (lambda cache: next(cache.passes(epochs=2)), "StateError"),
    "drain": (lambda cache: cache.drain(), "StateError"),
    "a report": (lambda cache: cache.write_report("report.jsonl"), "StateError"),
    "rows": (lambda cache: cache.live_rows(), "StateError"),
    "evaluation": (lambda cache: next(cache.evaluate(cache.dataset)), "StateError"),
    "registering": (lambda cache: cache.register(), "StateError"),
    "garbage": (lambda cache: gc.collect(), "returned"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_a_fork_of_a_training_ends_and_takes_nothing(tmp_path: Path, passes: tc.PassDataset, engine: str) -> None:
    said: dict[str, str] = {}
    with tiered(tmp_path / "model.tc", passes, engine=engine) as cache:

        def fork(pass_index: int, batch: int) -> None:
            if (pass_index, batch) == (2, 1):
                for name, (call, _) in CALLS.items():
                    said[name] = in_a_fork(partial(call, cache))

        model = train(cache, CASE, each_batch=fork)
    for name, (_, expected) in CALLS.items():
        assert said[name].startswith(expected), (name, said[name])
        assert "StateError" not in said[name] or "is used in its fork" in said[name]
    assert verify(tmp_path / "model.tc")["problems"] == []
    with tc.Store.open(tmp_path / "model.tc", mode="r") as store:
        assert_same_bits(result_of(store, passes, model), resident_result(CASE, passes))


def test_a_loop_that_a_fork_goes_on_with_ends_with_an_error(tmp_path: Path, passes: tc.PassDataset) -> None:
    """At the next pass, which it has no threads to load; a loop that it drops has no effect."""
    with tiered(tmp_path / "model.tc", passes) as cache:
        loop = cache.passes(epochs=1)
        next(loop).skip()
        assert in_a_fork(lambda: next(loop)).startswith("StateError: this cache was opened by process")
        assert in_a_fork(loop.close) == "returned"
        for p in loop:
            p.skip()


def begin_on_two_ranks(path: Path, passes: tc.PassDataset) -> None:
    """Create a store of two ranks without rows, at the beginning of the schedule of ``passes``."""

    def begin(ranks: Any) -> None:
        sharding = sharding_of(passes, 2, "auto", number_bytes=4)
        with ShardWriter.open(path, passes.tables, sharding, ranks) as shards:
            digest = Schedule.of(passes, None).digest
            shards.store.publish(Cursor(0), state=b"", schedule_digest=digest, settings={}, environment={})
            shards.publish()

    assert meet(2, begin) == [None, None]
    assert (path / "rank-1").is_dir()


def test_a_cache_that_is_garbage_lets_others_train(tmp_path: Path, passes: tc.PassDataset) -> None:
    for was_of_two in (False, True):
        path = tmp_path / f"model-{was_of_two}.tc"
        if was_of_two:
            begin_on_two_ranks(path, passes)
        cache = tiered(path, passes)
        train(cache, CASE)
        with pytest.warns(ResourceWarning, match=r"the cache of the store at .* was never closed: close it, or open"):
            del cache
        gc.collect()
        train_store(path, passes, CASE, epochs=2)
        assert not [*path.glob("leases/*"), *path.glob("rank-*")]


def test_a_cache_that_was_refused_or_closed_warns_of_nothing(tmp_path: Path, passes: tc.PassDataset) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        with pytest.raises(tc.TierCacheError):
            tiered(tmp_path / "model.tc", passes, host_budget=1)
        with pytest.raises(StateError):
            tiered(tmp_path / "model.tc", passes, model=object())
        with pytest.raises(TypeError):
            tc.TierCache()  # type: ignore[call-arg]
        tiered(tmp_path / "model.tc", passes).close()
        gc.collect()
    train_store(tmp_path / "model.tc", passes, CASE)
