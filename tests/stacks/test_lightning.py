"""Lightning trains what a plain loop trains, to the same bits; it is stopped, and goes on from the last commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import tiercache as tc
from tests.train.cases import Case, Net, Spec, table

pl = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed: make test-stacks")

if TYPE_CHECKING:
    from pathlib import Path

CASE = Case(
    tables=(table("item", 4), table("user", 6)),
    specs=(Spec(name="a", table="item"), Spec(name="b", table="user", hotness="ragged")),
    num_samples=96, pass_rows=24, batch=8,
)  # fmt: skip
EPOCHS = 2


class Module(pl.LightningModule):  # type: ignore[name-defined, misc]
    """A model as people write it for Lightning."""

    def __init__(self, cache: tc.TierCache) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self._cache = Net(cache, CASE), cache

    def training_step(self, batch: tc.Batch, _: int) -> torch.Tensor:
        """Return the loss."""
        return nn.functional.binary_cross_entropy_with_logits(self.net(batch), batch.label)

    def configure_optimizers(self) -> Any:
        """Return optimizer and scheduler."""
        self._cache.register(optimizer=torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5))
        optimizer = self._cache.optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def opened(folder: Path, name: str) -> tc.TierCache:
    """Open the cache."""
    data = tc.PassDataset.open(folder / "passes")
    return tc.TierCache(folder / name, data, device_budget="1MiB", host_budget="64MiB", progress=False)


def by_lightning(folder: Path, name: str, max_steps: int = -1) -> dict[str, Any]:
    """Train with a Trainer."""
    from tiercache.train.lightning import PassesCallback, PassesDataModule

    with opened(folder, name) as cache:
        module = Module(cache)
        trainer = pl.Trainer(
            max_epochs=1, max_steps=max_steps, callbacks=[PassesCallback(cache)], accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        batches = PassesDataModule(cache, lambda p: p.batches(CASE.batch, shuffle=True), epochs=EPOCHS)
        trainer.fit(module, datamodule=batches)
        dense = {key: value.clone() for key, value in module.net.state_dict().items()}
    return dense | rows_of(folder / name)


def by_hand(folder: Path, name: str) -> dict[str, Any]:
    """Train with a loop."""
    with opened(folder, name) as cache:
        module = Module(cache)
        made = module.configure_optimizers()
        optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
        cache.register(model=module, scheduler0=scheduler)
        for p in cache.passes(epochs=EPOCHS):
            for batch in p.batches(CASE.batch, shuffle=True):
                optimizer.zero_grad()
                module.training_step(batch, 0).backward()
                optimizer.step()
                scheduler.step()
        dense = {key: value.clone() for key, value in module.net.state_dict().items()}
    return dense | rows_of(folder / name)


def rows_of(path: Path) -> dict[str, Any]:
    """Return all rows of a store."""
    with tc.Store.open(path, mode="r") as store:
        return {
            f"{one.name} {i}": torch.from_numpy(values)
            for one in store.tables
            for keys, fields in store.scan(one.name)
            for i, values in enumerate((keys, *fields))
        }


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Compare bits."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_lightning_ends_with_the_bits_of_a_plain_loop(tmp_path: Path) -> None:
    """Though it fetches a batch ahead, and knows no passes; stopped inside a pass and behind one, it goes on."""
    CASE.cut(tmp_path / "passes")
    expected = by_hand(tmp_path, "hand.tc")
    assert_same(by_lightning(tmp_path, "lightning.tc"), expected)
    for steps in (7, 3, -1):
        found = by_lightning(tmp_path, "stopped.tc", max_steps=steps)
    assert_same(found, expected)
