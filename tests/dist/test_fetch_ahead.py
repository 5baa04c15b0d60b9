"""Loops of several ranks may fetch batches ahead of their training, across passes, or be flat, as with one rank."""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiercache as tc
from tests.cache_options import gathered
from tests.dist.pool import RanksPool
from tests.dist.trainings import assert_same_rows, dense_of, stored
from tests.train.devices import shim
from tests.train.test_fetch_ahead import CASE, STEPS, Training, evaluate_of_the_next_pass, leave_gradients
from tiercache.dist.communicator import AnyCommunicator
from tiercache.errors import StateError


class GivenUpError(Exception):
    """A loop is left by an error."""


def opened(folder: str, name: str, kind: str = "row_wise", **options: Any) -> tc.TierCache:
    sharding, passes = dict.fromkeys(["a", "b"], kind), tc.PassDataset.open(Path(folder) / "passes")
    budgets: dict[str, Any] = {"device_budget": "96KiB", "host_budget": "16MiB", "progress": False}
    return tc.TierCache(Path(folder) / name, passes, sharding=sharding, **gathered(budgets | options))


def fetch(
    ranks: AnyCommunicator, folder: str, name: str, *, depth: int, prefetch: int | None = None, kind: str = "row_wise",
    queued: bool = False, steps: int | None = None, how: str = "closed",
) -> dict[str, Any]:  # fmt: skip
    """Train with batches fetched ahead; stopped by an error, a commit or a close after ``steps`` steps."""
    device, found = {"device": shim()} if queued else {}, dict[str, Any]()
    commit_every = 3 if how == "closed" else 1
    errors = (StateError,) if how == "closed" and steps is not None else (GivenUpError,)
    with suppress(*errors), opened(folder, name, kind, commit_every=commit_every, **device) as trained:
        training = Training(trained)
        training.run(depth, prefetch=prefetch, steps=steps)
        found["losses"] = [training.losses[place] for place in sorted(training.losses)]
        found |= {"passes": len(trained.reports)} | dense_of(training.net)
        if how == "committed":
            trained.commit()
        if how == "given up":
            trained.drain(staged=False)
            raise GivenUpError
    return found


def go_through(ranks: AnyCommunicator, folder: str, name: str, *, what: str) -> None:
    with opened(folder, name) as trained:
        {"evaluate": evaluate_of_the_next_pass, "leave": leave_gradients}[what](trained)


def take_apart(
    ranks: AnyCommunicator, folder: str, name: str, *, schedule: str, queued: bool = False
) -> dict[str, Any]:  # fmt: skip
    """Train in micro-batches, with a batch of the first pass that is yielded and left untrained."""
    device = {"device": shim()} if queued else {}
    with opened(folder, name, **device) as trained:
        training = Training(trained)
        for p in trained.passes(epochs=2):
            if p.index == 0:
                untrained = 2
                for i, batch in enumerate(p.batches(CASE.batch)):
                    if i == untrained:
                        break
                    training.step(p, batch.end, batch)
                p.skip()
                continue
            for micro_batches in p.steps(CASE.batch, micro_batches=3, schedule=schedule):
                for batch in micro_batches:
                    (training.model(batch).mean() * batch.weight).backward()
                training.optimizer.step()
                training.optimizer.zero_grad()
        return dense_of(training.net)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fetched")
    CASE.cut(folder / "passes")
    return folder


Plain = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def plain(folder: Path, ranks_pool: RanksPool) -> Plain:
    @cache
    def trained(name: str = "plain.tc", **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = ranks_pool.run(2, fetch, folder=str(folder), name=name, depth=0, **options)[0]
        return found

    return trained


def assert_same(folder: Path, name: str, found: dict[str, Any], plain: dict[str, Any], theirs: str) -> None:
    for key, value in plain.items():
        if key.startswith("dense."):
            np.testing.assert_array_equal(found[key], value, err_msg=key)
    assert_same_rows(stored(folder, name), stored(folder, theirs))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("depth", "prefetch", "options"),
    [(1, None, {}), (3, 2, {}), (3, None, {"kind": "table_wise"}), (1, 0, {"kind": "column_wise", "queued": True}),
     (3, None, {"kind": "data_parallel"})],
)  # fmt: skip
def test_a_loop_that_fetches_ahead_ends_with_the_same_bits(
    ranks_pool: RanksPool, folder: Path, plain: Plain, depth: int, prefetch: int | None, options: dict[str, Any]
) -> None:
    name, theirs = f"{depth}-{prefetch}-{options}.tc", f"plain-{options}.tc" if options else "plain.tc"
    given = {"folder": str(folder), "depth": depth, "prefetch": prefetch}
    (found, _) = ranks_pool.run(2, fetch, name=name, **given, **options)
    assert len(found["losses"]) == STEPS
    assert found["losses"] == plain(theirs, **options)["losses"]
    assert found["passes"] == 8
    with tc.Store.open(folder / name, mode="r") as store:
        assert store.commit.cursor.pass_index == 8
    assert_same(folder, name, found, plain(theirs, **options), theirs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("steps", "how", "at"),
    [(10, "given up", (1, 0)), (6, "committed", (1, 2 * CASE.batch)), (31, "closed", (7, 3 * CASE.batch))],
)
def test_a_loop_that_fetched_ahead_goes_on_to_the_same_bits(
    ranks_pool: RanksPool, folder: Path, plain: Plain, steps: int, how: str, at: tuple[int, int]
) -> None:
    """Stopped by an error, a commit inside a pass, or a close before the end: untrained batches do not count."""
    name = f"{how}.tc"
    ranks_pool.run(2, fetch, folder=str(folder), name=name, depth=2, steps=steps, how=how)
    with tc.Store.open(folder / name, mode="r") as store:
        assert (store.commit.cursor.pass_index, store.commit.cursor.sample) == at
    (found, _) = ranks_pool.run(2, fetch, folder=str(folder), name=name, depth=2)
    assert_same(folder, name, found, plain(), "plain.tc")


@pytest.mark.parametrize("what", ["evaluate", "leave"])
def test_what_is_refused_over_the_end_of_a_pass_is_what_one_rank_refuses(
    ranks_pool: RanksPool, folder: Path, what: str
) -> None:
    """Evaluation before a pass begins, a batch of one that ended, and gradients that would be lost."""
    ranks_pool.run(2, go_through, folder=str(folder), name=f"{what}.tc", what=what)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("queued", [False, True])
def test_micro_batches_of_a_pass_that_was_fetched_ahead_look_up_its_rows(
    ranks_pool: RanksPool, folder: Path, queued: bool
) -> None:
    """The rows of the first one arrive with its lookup, which ends the previous pass, not during that pass."""
    found = {}
    for schedule in ("simple", "interleaved"):
        name = f"{schedule}-{queued}.tc"
        given = {"folder": str(folder), "name": name, "schedule": schedule, "queued": queued}
        found[schedule] = ranks_pool.run(2, take_apart, **given)[0]
    assert_same(
        folder, f"interleaved-{queued}.tc", found["interleaved"], found["simple"], f"simple-{queued}.tc"
    )  # fmt: skip


# -- flat loops ---------------------------------------------------------------------------------------------


def train_flat(ranks: AnyCommunicator, folder: str, name: str, *, how: str, stop: int = STEPS) -> dict[str, Any]:
    """Train by a loop over passes, or in a flat one: to its end, by ``len`` batches, or up to a ``stop``."""
    with opened(folder, name) as trained:
        training = Training(trained)
        if how == "passes":
            training.run(0)
            return dense_of(training.net)
        loader = trained.batches(CASE.batch, epochs=2, shuffle=True)
        lengths, batches = [len(loader)], iter(loader)
        for batch in batches if how == "flat" else islice(batches, min(stop, lengths[0])):
            current = loader.current_pass
            assert current is not None
            training.step(current, batch.end, batch)
            if how == "stopped" and batch.end == current.num_samples and current.index == 7:
                current.stop()
        return dense_of(training.net) | {"lengths": [*lengths, len(loader)]}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_end_with_the_bits_of_a_loop_over_passes(tmp_path: Path, ranks_pool: RanksPool, size: int) -> None:
    CASE.cut(tmp_path / "passes")
    expected = ranks_pool.run(size, train_flat, folder=str(tmp_path), name="passes.tc", how="passes")[0]
    rows = stored(tmp_path, "passes.tc")
    runs = {"flat.tc": {"flat": 0}, "sized.tc": {"sized": 0}, "resumed.tc": {"left": 0, "stopped": 4, "sized": 28}}
    for name, trained_before in runs.items():
        for how, before in trained_before.items():
            stop = 10 if how == "left" else STEPS
            found = ranks_pool.run(size, train_flat, folder=str(tmp_path), name=name, how=how, stop=stop)
            lengths = {tuple(one.pop("lengths")) for one in found}
            assert lengths == {(STEPS - before, 0 if how == "flat" else STEPS - before)}
        assert found[0].keys() == expected.keys()
        # after a restart, three ranks may add the gradients of dense parameters in another order; two cannot
        tolerance = 1e-6 if size > 2 and name == "resumed.tc" else 0.0
        for weight, value in expected.items():
            np.testing.assert_allclose(value, found[0][weight], rtol=0, atol=tolerance, err_msg=weight)
        assert_same_rows(stored(tmp_path, name), rows, tolerance)
        with tc.Store.open(tmp_path / name, mode="r") as store:
            assert store.commit is not None
            assert store.commit.cursor.pass_index == 8
