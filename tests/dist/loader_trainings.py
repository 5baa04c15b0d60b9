"""Trainings on every rank of a run, or in one process, from the user's own dataset."""

from typing import Any

import torch
from torch import nn

import tiercache as tc
from tests.train.recorded import ITEMS, USERS, Clicks
from tiercache.dist.communicator import AnyCommunicator


class Pairs(nn.Module):
    """Two tables and no other parameter, so that only rows are averaged over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, 4), nn.Embedding(ITEMS, 4, padding_idx=0)

    def forward(self, user: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return a number for each sample."""
        return (self.user(user) * self.item(items).sum(1)).sum(1)


def converted() -> nn.Module:
    """Return the converted model, the same on each rank."""
    torch.manual_seed(3)
    return tc.convert(Pairs(), optimizer=tc.optim.SGD(learning_rate=0.2))


def run(data: str, store: str, stop: int | None = None, batch_size: int = 20, **options: Any) -> int:
    """Train two epochs, or until a commit after ``stop`` batches; return this rank's number of samples."""
    model, done, samples = converted(), 0, 0
    options = {"device_budget": "1MiB", "host_budget": "64MiB", "progress": False} | options
    with tc.TierCache(store, data, model=model, **options) as cache:
        for p in cache.passes(epochs=2):
            for user, items, _, label in p.loader(Clicks(), batch_size, shuffle=True):
                nn.functional.mse_loss(model(user, items), label).backward()
                cache.optimizer.step()
                cache.optimizer.zero_grad()
                done, samples = done + 1, samples + len(label)
                if done == stop:
                    cache.commit()
                    p.stop()
                    break
    return samples


def noise(_: AnyCommunicator, folder: str, store: str) -> list[float]:
    """Return the random numbers that the dataset draws for this rank's samples of a pass."""
    model, found = converted(), list[float]()
    options: dict[str, Any] = {"device_budget": "1MiB", "host_budget": "64MiB", "progress": False}
    with tc.TierCache(f"{folder}/{store}", f"{folder}/keys", model=model, **options) as cache:
        for p in cache.passes(epochs=1):
            for _, _, drawn, _ in p.loader(Clicks(), 20, shuffle=True):
                found += drawn.tolist()
            p.stop()
    return found


def train(_: AnyCommunicator, folder: str, store: str = "ranks.tc", **options: Any) -> int:
    """Train on this rank."""
    return run(f"{folder}/keys", f"{folder}/{store}", **options)
