"""The training that every stack repeats, and its bits in a plain loop."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import tiercache as tc
from tests.train.cases import Case, Net, Spec, table

CASE = Case(
    tables=(table("item", 4), table("user", 6)),
    specs=(Spec(name="a", table="item"), Spec(name="b", table="user", hotness="ragged")),
    num_samples=96, pass_rows=24, batch=8,
)  # fmt: skip
EPOCHS, STEPS, MAX_NORM = 2, 24, 0.05


def opened(folder: Path, name: str) -> tc.TierCache:
    data = tc.PassDataset.open(folder / "passes")
    return tc.TierCache(folder / name, data, device_budget="1MiB", host_budget="64MiB", progress=False)


def model_of(cache: tc.TierCache) -> nn.Module:
    torch.manual_seed(1)
    return Net(cache, CASE)


def optimizer_of(cache: tc.TierCache, model: nn.Module) -> Any:
    cache.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
    return cache.optimizer


def scheduler_of(cache: tc.TierCache) -> Any:
    scheduler = torch.optim.lr_scheduler.StepLR(cache.optimizer, step_size=5, gamma=0.8)
    cache.register(scheduler=scheduler)
    return scheduler


def batches_of(cache: tc.TierCache) -> Any:
    return cache.batches(CASE.batch, epochs=EPOCHS, shuffle=True)


def loss_of(model: Any, batch: tc.Batch) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label)


def plain(folder: Path, *, clips: bool = False) -> dict[str, torch.Tensor]:
    name = f"plain-{clips}.tc"
    with opened(folder, name) as cache:
        model = model_of(cache)
        optimizer, scheduler = optimizer_of(cache, model), scheduler_of(cache)
        for p in cache.passes(epochs=EPOCHS):
            for batch in p.batches(CASE.batch, shuffle=True):
                loss_of(model, batch).backward()
                if clips:
                    assert float(cache.clip_grad_norm_(MAX_NORM)) > MAX_NORM
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return ended(folder / name, model, cache)


def ended(path: Path, model: nn.Module, cache: tc.TierCache) -> dict[str, torch.Tensor]:
    """Close the cache, and return the weights of the model and all rows of the store."""
    found = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name] = whole.clone()
    cache.close()
    with tc.Store.open(path, mode="r") as store:
        assert store.commit is not None
        found["trained"] = torch.tensor([store.commit.cursor.pass_index, store.commit.cursor.sample])
        for one in store.tables:
            for keys, fields in store.scan(one.name):
                parts = (keys, *fields)
                found |= {f"{one.name} {i}": torch.from_numpy(part.copy()) for i, part in enumerate(parts)}
    return found


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours["trained"].tolist() == [EPOCHS * CASE.num_samples // CASE.pass_rows, 0]
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
