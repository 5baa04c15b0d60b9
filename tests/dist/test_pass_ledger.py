"""On several ranks a pass is committed as trained by the same rule as on one, by all ranks or by none."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tiercache as tc
from tests.train.cases import SPECS, Case, Net, table
from tiercache.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.dist.pool import RanksPool
    from tiercache.dist.communicator import AnyCommunicator

CASE = Case(
    tables=(table("a", 4, tc.optim.SGD(learning_rate=0.1)), table("b", 6)), specs=SPECS, num_samples=96, pass_rows=48
)
"""2 passes of 3 batches."""
ROWS = {"a": "row_wise", "b": "row_wise"}
OPTIONS: dict[str, Any] = {"device_budget": "1MiB", "host_budget": "32MiB", "sharding": ROWS, "progress": False}


class Training:
    """One rank's part of a training."""

    def __init__(self, ranks: AnyCommunicator, cache: tc.TierCache) -> None:
        torch.manual_seed(1)
        self.rank, self.cache = ranks.rank, cache
        self.model = DistributedDataParallel(Net(cache, CASE)) if ranks.size > 1 else Net(cache, CASE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        cache.register(model=self.model, optimizer=self.optimizer)
        self.optimizer = cache.optimizer

    def backward(self, batch: tc.Batch) -> None:
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(batch), batch.label)
        (loss * batch.weight).backward()

    def step(self, batch: tc.Batch) -> None:
        self.backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()


def every_batch(call: Callable[[Training, tc.Batch], object]) -> Callable[[Training], None]:
    def run(t: Training) -> None:
        for p in t.cache.passes(epochs=1):
            for batch in p.batches(16):
                call(t, batch)

    return run


def max_steps(t: Training) -> None:
    for p in t.cache.passes(epochs=1):
        for batch in islice(p.batches(16), 3 - p.index):
            t.step(batch)


def skip(t: Training) -> None:
    for p in t.cache.passes(epochs=1):
        for batch in islice(p.batches(16), 3 - p.index):
            t.step(batch)
        p.skip()


def stop(t: Training, *, ranks: tuple[int, ...] = (0, 1)) -> None:
    for p in t.cache.passes(epochs=1):
        for batch in p.batches(16):
            t.step(batch)
        if p.index == 1 and t.rank in ranks:
            p.stop()


def other_optimizer(t: Training) -> None:
    """Train with an optimizer that no cache has, on one rank."""
    if t.rank:
        t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.1)
    every_batch(lambda t, batch: (t.backward(batch), t.optimizer.zero_grad()))(t)


def a_rank_without_samples(t: Training) -> None:
    for p in t.cache.passes(epochs=1):
        keys = {name: np.array(p.source.whole.keys(name)[:4]) for name in "ab"}
        ones = np.arange(4)
        given = {
            "keys": {"f": keys["a"], "g": (keys["b"], ones), "h": np.stack([keys["b"]] * 3, 1),
                     "i": (keys["a"], ones, )},
            "weights": {"i": np.ones(4, np.float32)}, "label": np.ones(4, np.float32),
            "dense": np.ones((4, 1), np.float32),
        }  # fmt: skip
        for batch in p.wrap([] if t.rank else [given] * 2, dict):
            t.step(batch)


def empty_loaders(t: Training) -> None:
    for p in t.cache.passes(epochs=1):
        for batch in p.wrap([], dict):
            t.step(batch)


LOOPS: dict[str, tuple[Callable[[Training], object], str, int]] = {
    "max_steps": (max_steps, "pass 1 ended after 2 batches with 32 of its 48 samples", 1),
    "another optimizer": (other_optimizer, "no optimizer of this cache has stepped", 0),
    "stopped on one rank": (lambda t: stop(t, ranks=(1,)), "called on some ranks but not on others in pass 1", 1),
    "skipped": (skip, "", 2),
    "stopped": (stop, "", 1),
    "dropped": (every_batch(lambda t, batch: (t.backward(batch), t.optimizer.zero_grad())), "", 2),
    "a rank without samples": (a_rank_without_samples, "", 2),
    "no samples": (empty_loaders, "", 2),
}


def run(ranks: AnyCommunicator, folder: str, *, what: str) -> str:
    said, path = "", Path(folder) / f"{what}.tc"
    try:
        with tc.TierCache(path, tc.PassDataset.open(Path(folder) / "passes"), **OPTIONS) as cache:
            LOOPS[what][0](Training(ranks, cache))
    except (StateError, tc.errors.RankError) as error:
        said = str(error)
    return said


@pytest.mark.sampled(6)
@pytest.mark.parametrize("what", LOOPS)
def test_ranks_commit_a_pass_together_or_not_at_all(ranks_pool: RanksPool, tmp_path: Path, what: str) -> None:
    CASE.cut(tmp_path / "passes")
    _, words, commits = LOOPS[what]
    for said in ranks_pool.run(2, run, folder=str(tmp_path), what=what):
        assert words in said
        assert bool(said) == bool(words)
    with tc.Store.open(tmp_path / f"{what}.tc", mode="r") as store:
        assert store.commit is not None
        at = store.commit.cursor.pass_index  # after an error the commit of the last pass may not have come
        assert at in {commits, commits - bool(words)}
