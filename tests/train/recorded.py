"""A model and a dataset in plain torch, whose key sets are recorded."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tiercache as tc
from tests.crash.told import Told

USERS, ITEMS, TAGS, DIM, BATCH, SAMPLES = 400, 250, 30, 8, 20, 600
RATE, DENSE_RATE = 0.4, 0.05
BUDGET, TRAINING_BUDGET = "12KiB", "16KiB"
"""Budgets of a recording and of a training, about a quarter of the tables; a training needs room for padding too."""
TABLES = ("user", "item", "tag")


class Clicks(Dataset[Any]):
    """A dataset that does not know tiercache: a user, four items with padding, a tag, and random noise."""

    def __init__(self, samples: int = SAMPLES, *, draws: bool = False) -> None:
        """draws: True if the last two items are negatives drawn when a sample is read."""
        chance = np.random.default_rng(0)
        self.users = torch.from_numpy(chance.integers(0, USERS, samples))
        self.items = torch.from_numpy(chance.integers(0, ITEMS, (samples, 4)))
        self.labels = torch.from_numpy(chance.random(samples, np.float32))
        self._draws = draws

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, index: int) -> Any:
        items = self.items[index].clone()
        if self._draws:
            items[2] = int(np.random.randint(1, ITEMS))  # noqa: NPY002 - as users do
            items[3] = int(torch.randint(1, ITEMS, ()))
        noise = torch.rand(()) + float(np.random.rand())  # noqa: NPY002
        return self.users[index], items, noise, self.labels[index]


class Net(nn.Module):
    """Two tables of single keys and one of bags, a batch norm, and dropout."""

    def __init__(self, *, device: str = "cpu", more: int = 0) -> None:
        """device: of the tables. more: extra rows of each table after the last key."""
        super().__init__()
        self.user = nn.Embedding(USERS + more, DIM, sparse=True, device=device)
        self.item = nn.Embedding(ITEMS + more, DIM, padding_idx=0, sparse=True, device=device)
        self.tag = nn.EmbeddingBag(TAGS + more, DIM, mode="mean", sparse=True, device=device)
        self.norm, self.drop, self.top = nn.BatchNorm1d(DIM), nn.Dropout(0.2), nn.Linear(DIM, 1)

    def forward(self, user: torch.Tensor, items: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        x = self.user(user) * self.item(items).sum(1) + self.tag(items % TAGS)
        return self.top(self.drop(self.norm(x) if len(x) > 1 else x))[:, 0] + noise


def call(model: nn.Module, batch: Any) -> Any:
    return model(*batch[:3])


def converted(device: str = "cpu") -> nn.Module:
    torch.manual_seed(3)
    return tc.convert(Net(device=device), optimizer=tc.optim.SGD(learning_rate=RATE))


def loader(dataset: Any = None, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(Clicks() if dataset is None else dataset, **({"batch_size": BATCH} | arguments))


def record(folder: Path, loader_: Any = None, model: nn.Module | None = None, **options: Any) -> tc.PassDataset:
    options = {"device_budget": BUDGET, "progress": False} | ({} if "keys" in options else {"call": call}) | options
    return tc.record_key_sets(model or converted(), loader_ or loader(), folder, **options)


def indices(data: tc.PassDataset) -> list[np.ndarray[Any, Any]]:
    return [one.recorded.indices(np.arange(one.samples)) for one in data.passes]


class Step:
    def __init__(self, model: nn.Module, optimizers: list[Any]) -> None:
        self.model, self._optimizers = model, optimizers

    def __call__(self, batch: Any) -> float:
        loss = nn.functional.mse_loss(call(self.model, batch), batch[3])
        loss.backward()
        for one in self._optimizers:
            one.step()
            one.zero_grad()
        return float(loss.item())


def torch_step(model: Net | None = None) -> Step:
    torch.manual_seed(3)
    model = model or Net()
    tables = [model.user.weight, model.item.weight, model.tag.weight]
    dense = [p for p in model.parameters() if all(p is not one for one in tables)]
    return Step(model, [torch.optim.SGD(dense, lr=DENSE_RATE), torch.optim.SGD(tables, lr=RATE)])


def opened(
    folder: Path, data: tc.PassDataset, model: nn.Module | None = None, **options: Any
) -> tuple[tc.TierCache, Step]:
    """Open a cache of a new model, and return the step of its loop."""
    model = model or converted()
    dense = torch.optim.SGD(model.parameters(), lr=DENSE_RATE)
    options = {"device_budget": TRAINING_BUDGET, "host_budget": "64MiB", "progress": False} | options
    cache = tc.TierCache(folder, data, model=model, optimizer=dense, **options)
    return cache, Step(model, [cache.optimizer])


def result(cache: tc.TierCache, step: Step) -> dict[str, Any]:
    assert isinstance(cache.store, tc.Store)
    cache.drain(staged=False)
    found: dict[str, Any] = {
        name: dict(zip(keys.tolist(), fields[0].tolist(), strict=True))
        for name in TABLES
        for keys, fields in cache.store.scan(name)
    }
    return found | {name: one.tolist() for name, one in copy.deepcopy(step.model.state_dict()).items()}


def killed(folder: Path, options: dict[str, Any], fatal: int) -> None:
    """Record in a separate process, which dies at an event; write the number of events to a file."""
    told = Told(fatal)
    record(folder / "keys", loader(shuffle=True), converted("meta"), progress=told, **options)
    (folder / "events").write_text(str(told.events))
