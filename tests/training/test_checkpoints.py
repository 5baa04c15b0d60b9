"""A cache beside torch.distributed.checkpoint: a checkpoint names a commit, and never has rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tiercache as tc
from tests.training.cases import Case, Net, Spec, table
from tiercache.errors import StateError

if TYPE_CHECKING:
    from pathlib import Path

CASE = Case(tables=(table("item", 4),), specs=(Spec(name="a", table="item"),), num_samples=96, pass_rows=24, batch=8)


def trained(folder: Path, passes: int, save: Path | None = None, load: Path | None = None) -> Any:
    """Train so many passes, from a checkpoint where said, and make one; returns the dense weights at its moment."""
    data = tc.PassDataset.open(folder / "passes")
    with tc.TierCache(
        folder / "m.tc", data, device_budget="1MiB", host_budget="64MiB", retention=9, progress=False
    ) as cache:
        torch.manual_seed(1)
        model = Net(cache, CASE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cache.register(model=model, optimizer=optimizer)
        if load is not None:
            before = cache.store.commit.id
            dcp.load({"rows": cache, "model": model}, checkpoint_id=load, no_dist=True)
            assert cache.store.commit.id == before
        for p in cache.passes(epochs=9):
            if p.index == passes:
                break
            for batch in p.batches(CASE.batch):
                torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
                optimizer.step()
                optimizer.zero_grad()
        cache.drain()
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        if save is not None:
            dcp.save({"rows": cache, "model": model}, checkpoint_id=save, no_dist=True)
        return kept


def test_a_checkpoint_names_the_commit_of_its_rows(tmp_path: Path) -> None:
    """It is loaded where the store stands there, also when it was rolled back to it, and refused elsewhere."""
    CASE.cut(tmp_path / "passes")
    kept = trained(tmp_path, 2, save=tmp_path / "early")
    assert sum(path.stat().st_size for path in (tmp_path / "early").iterdir()) < 100_000
    with tc.Store.open(tmp_path / "m.tc", mode="r") as store:
        early = store.commit.id
    trained(tmp_path, 4)
    words = rf"made at commit {early} of m.tc and the cache stands at commit {early + 2} of m.tc: roll the store back"
    with pytest.raises((StateError, dcp.api.CheckpointException), match=words):
        trained(tmp_path, 5, load=tmp_path / "early")
    with tc.Store.open(tmp_path / "m.tc") as store:
        assert store.rollback(early).made_of == early
    again = trained(tmp_path, 2, load=tmp_path / "early")
    for name, value in kept.items():
        assert torch.equal(again[name], value)
