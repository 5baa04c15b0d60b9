"""Several models read the same tables: a teacher that is frozen, and an average of what is trained."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import tiercache as tc
from tests.training.test_convert import SCHEMA, Small

if TYPE_CHECKING:
    from pathlib import Path


class Student(nn.Module):
    """Two embeddings and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors, self.top = Small(mode="sum"), nn.Linear(8, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        """Return numbers (N,)."""
        user, item = self.vectors.user_emb(batch.features["user"]), self.vectors.items(batch.features["item"])
        return self.top(torch.cat([user, item], dim=1)).squeeze(1)


def trained(folder: Path, data: tc.PassDataset, *, others: bool) -> dict[str, Any]:
    """Train with a teacher and an average beside, or alone; what these return must not matter."""
    torch.manual_seed(0)
    model = tc.convert(Student(), data, {"vectors.items": "item", "vectors.user_emb": "user"})
    teacher = copy.deepcopy(model).requires_grad_(False)
    average: Any = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tc.TierCache(
        folder, data, model=[model, teacher] if others else model, optimizer=optimizer, device_budget="1MiB",
        host_budget="64MiB", progress=False,
    ) as cache:  # fmt: skip
        for p in cache.passes(epochs=2):
            for _ in range(2):
                batch = p.batch({"user": np.array([1, 2, 2]), "item": np.array([3, 4, 3]), "seen": ([5], [0, 1, 1, 1])})
                found = model(batch)
                loss = found.square().sum()
                if others:
                    rows = [one.vectors.user_emb(batch) for one in (model, teacher, average.module)]
                    assert torch.equal(rows[0], rows[1])
                    assert torch.equal(rows[0], rows[2])
                    assert not teacher(batch).requires_grad
                    loss = loss + 0 * (average(batch).detach() + teacher(batch)).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(model)
        cache.drain()
        rows = {name: cache.store.lookup(name, np.arange(6), missing="initial")["vector"] for name in ("user", "item")}
    return rows | {name: value.numpy() for name, value in model.state_dict().items()}


def test_a_teacher_and_an_average_read_the_rows_that_a_model_trains(tmp_path: Path) -> None:
    """As they are at the moment; and training is what it is without them."""
    tc.write_key_sets(tmp_path / "p", SCHEMA, [{"user": np.arange(1, 3), "item": np.arange(3, 6)}] * 2)
    data = tc.PassDataset.open(tmp_path / "p")
    alone, beside = (trained(tmp_path / f"{others}.tc", data, others=others) for others in (False, True))
    assert alone.keys() == beside.keys()
    for name, values in alone.items():
        np.testing.assert_array_equal(values, beside[name])
    assert np.any(alone["user"][1])


def test_keys_that_were_wrapped_and_weights_that_are_rows_now_get_a_sentence(tmp_path: Path) -> None:
    """Ids of 32 bits, and the state of the model that was converted."""
    tc.write_key_sets(tmp_path / "p", SCHEMA, [{"user": np.arange(1, 3), "item": np.arange(3, 6)}])
    data, model = tc.PassDataset.open(tmp_path / "p"), tc.convert(Small(mode="sum"), SCHEMA, {"items": "item"})
    with pytest.raises(
        RuntimeError, match=r"user_emb.weight is a whole table, whose rows are in the store now: load it"
    ):
        model.load_state_dict(Small().state_dict())
    with tc.TierCache(
        tmp_path / "m.tc", data, model=model, device_budget="1MiB", host_budget="64MiB", progress=False
    ) as cache:
        for p in cache.passes(epochs=1):
            wrapped = np.array([3_000_000_000], np.int64).astype(np.int32)
            with pytest.raises(
                tc.errors.KeyNotInPassError, match=r"; ids from 2\*\*31 on are negative where they were"
            ):
                p.batch({"user": wrapped, "item": np.array([3]), "seen": ([], [0, 0])})
