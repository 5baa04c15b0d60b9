"""p.loader on several ranks: each gets its part of every batch, and all end as one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import tiercache as tc
from tests.dist.pool import RanksPool, RunFailedError
from tests.dist.trainings import assert_same_rows, step_by, stored
from tests.train.recorded import ITEMS, SAMPLES, USERS, Clicks
from tiercache.dist.communicator import AnyCommunicator

OPTIONS: dict[str, Any] = {"device_budget": "1MiB", "host_budget": "64MiB", "progress": False}


class Pairs(nn.Module):
    """Two tables and no other parameter, so that only rows are averaged over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, 4), nn.Embedding(ITEMS, 4, padding_idx=0)

    def forward(self, user: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return (self.user(user) * self.item(items).sum(1)).sum(1)


def converted() -> nn.Module:
    torch.manual_seed(3)
    return tc.convert(Pairs(), optimizer=tc.optim.SGD(learning_rate=0.2))


def run(data: str, store: str, stop: int | None = None, batch_size: int = 20, **options: Any) -> int:
    model, done, samples = converted(), 0, 0
    with tc.TierCache(store, data, model=model, **OPTIONS | options) as cache:
        for p in cache.passes(epochs=2):
            for user, items, _, label in p.loader(Clicks(), batch_size, shuffle=True):
                step_by(cache, nn.functional.mse_loss(model(user, items), label))
                done, samples = done + 1, samples + len(label)
                if done == stop:
                    cache.commit()
                    p.stop()
                    break
    return samples


def noise(_: AnyCommunicator, folder: str, store: str) -> list[float]:
    """Return the random numbers that the dataset draws for this rank's samples of a pass."""
    model, found = converted(), list[float]()
    with tc.TierCache(f"{folder}/{store}", f"{folder}/keys", model=model, **OPTIONS) as cache:
        for p in cache.passes(epochs=1):
            for _, _, drawn, _ in p.loader(Clicks(), 20, shuffle=True):
                found += drawn.tolist()
            p.stop()
    return found


def train(_: AnyCommunicator, folder: str, store: str = "ranks.tc", **options: Any) -> int:
    return run(f"{folder}/keys", f"{folder}/{store}", **options)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with key sets, and a store that one process trained."""
    loader = DataLoader(Clicks(), batch_size=20, shuffle=True)
    tc.record_key_sets(
        converted(), loader, tmp_path / "keys", device_budget="6KiB", devices=2, progress=False,
        call=lambda model, batch: model(batch[0], batch[1]),
    )  # fmt: skip
    assert run(str(tmp_path / "keys"), str(tmp_path / "alone.tc")) == 2 * SAMPLES
    return tmp_path


def test_ranks_share_each_batch_and_end_as_one_process(ranks_pool: RanksPool, place: Path) -> None:
    """In two runs; the first one is committed inside a pass."""
    first = ranks_pool.run(2, train, folder=str(place), stop=9)
    rest = ranks_pool.run(2, train, folder=str(place))
    assert first == [90, 90]
    assert [a + b for a, b in zip(first, rest, strict=True)] == [SAMPLES, SAMPLES]
    assert_same_rows(stored(place, "ranks.tc"), stored(place, "alone.tc"), 1e-5)


def test_each_rank_draws_its_own_random_numbers(ranks_pool: RanksPool, place: Path) -> None:
    """Augmentations and negatives of the samples of a batch are as many as in one process, and always the same."""
    one, two = ranks_pool.run(2, noise, folder=str(place), store="noise.tc")
    assert len(one) == len(two) > 10
    assert len({*one, *two}) == 2 * len(one)
    again = ranks_pool.run(2, noise, folder=str(place), store="noise.tc")
    assert again == [one, two]


def test_a_batch_without_a_sample_for_each_rank_is_refused(ranks_pool: RanksPool, place: Path) -> None:
    with pytest.raises(RunFailedError, match="a batch of 1 samples, which leaves some of 3 ranks without"):
        ranks_pool.run(3, train, folder=str(place), store="other.tc", batch_size=1)
