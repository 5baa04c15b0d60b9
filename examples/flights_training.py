"""The training loop of the demo: the same for a TierCache, a InMemoryCache, and a child process that is killed.

As a program (``python -m examples.flights_training FOLDER STORE``) it opens or begins a store, trains from its last
commit to the end and, if told so, kills itself on the way.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import tiercache as tc
from examples.flights_model import FlightsModel

if TYPE_CHECKING:
    from collections.abc import Callable

SETTINGS = "settings.json"
PASSES = "passes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What decides the result (all but the budgets), in one place for every process."""

    device_budget: int
    """Bytes."""
    host_budget: int
    """Bytes."""
    eval_budget: int
    """Bytes of the host budget."""
    batch: int
    epochs: int = 2
    learning_rate: float = 1e-3
    """Of the dense layers in the first epoch; those of the tables stand in flights.toml."""
    drop: float = 0.1
    """What every learning rate is multiplied by after an epoch: rare keys are learned by heart otherwise."""
    seed: int = 2013

    def write(self, folder: Path) -> None:
        """Leave the settings where child processes read them."""
        (folder / SETTINGS).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Settings:
        """Read what ``write`` left."""
        return cls(**json.loads((folder / SETTINGS).read_text()))


@dataclass(frozen=True, slots=True)
class Training:
    """A cache with its model and its dense optimizer."""

    cache: Any
    model: FlightsModel
    optimizer: torch.optim.Optimizer
    schedulers: list[torch.optim.lr_scheduler.LambdaLR]
    settings: Settings

    @classmethod
    def begin(cls, cache: Any, settings: Settings) -> Training:
        """Make a model whose first weights the seed decides, and track it."""
        torch.manual_seed(settings.seed)
        model = FlightsModel(cache.schema)
        optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
        schedulers = [
            torch.optim.lr_scheduler.LambdaLR(one, lambda epoch: settings.drop**epoch)
            for one in (optimizer, cache.optimizer)
        ]
        cache.register(model=model, optimizer=optimizer, dense_rate=schedulers[0], row_rate=schedulers[1])
        return cls(cache, model, optimizer, schedulers, settings)

    def run(self, after_batch: Callable[[Any, int, float], None] = lambda p, samples, loss: None) -> None:
        """Train from the last commit to the last epoch; ``after_batch(p, samples, loss)`` follows every batch."""
        criterion = nn.BCEWithLogitsLoss()
        for p in self.cache.passes(epochs=self.settings.epochs):
            for scheduler in self.schedulers:
                if scheduler.last_epoch < p.epoch:
                    scheduler.step()
            for batch in p.batches(self.settings.batch, shuffle=True):
                loss = criterion(self.model(batch), batch.label)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                p.log_loss(loss.item())
                after_batch(p, len(batch), loss.item())


def open_tiers(store: tc.Store, passes: tc.PassDataset, settings: Settings) -> tc.TierCache:
    """Return a cache within the budgets of the settings."""
    return tc.TierCache(
        store,
        passes,
        device_budget=settings.device_budget,
        host_budget=settings.host_budget,
        eval_budget=settings.eval_budget,
        seed=settings.seed,
    )


def main() -> None:
    """Train one store to its end, or to a sudden one."""
    parser = argparse.ArgumentParser(description="Train a store of the flights demo from its last commit to the end.")
    parser.add_argument("folder", type=Path, help="the folder of the demo")
    parser.add_argument("store", type=Path, help="the store, begun where there is none")
    parser.add_argument("--die-in-pass", type=int, help="kill this process in the middle of this pass")
    arguments = parser.parse_args()
    passes, settings = tc.PassDataset.open(arguments.folder / PASSES), Settings.read(arguments.folder)

    def after_batch(p: Any, _samples: int, _loss: float) -> None:
        if p.index == arguments.die_in_pass and p.samples_done >= p.num_samples // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    with (
        tc.Store.open(arguments.store, tables=passes.schema.tables) as store,
        open_tiers(store, passes, settings) as cache,
    ):
        Training.begin(cache, settings).run(after_batch)


if __name__ == "__main__":
    main()
