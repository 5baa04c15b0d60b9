"""The model of the demo and its training loop: on one device, on several, and in a process that kills itself.

``torchrun --nproc-per-node 2 -m examples.flights.training [--quick]`` trains on two devices: every rank its part of
each batch, and stores its share of the rows in a folder of its rank. It prints the area under the curve, and a
digest of all rows, which two runs on as many ranks share.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tiercache as tc
from examples.flights import data
from examples.flights.scores import score

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SCHEMA = Path(__file__).with_name("flights.toml")
PASSES, TEST = "passes", "test-passes"
SEED, EPOCHS = 2013, 2
LEARNING_RATE = 1e-3
"""The learning rate of the dense layers in the first epoch; flights.toml has the rates of the tables."""
DROP = 0.1
"""The factor of every learning rate after an epoch; without it rare keys are overfitted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The size of a training."""

    first: int | None
    """The number of earliest flights to keep; None: all."""
    budgets: dict[str, Any]
    batch: int
    batch_multiple: int
    """Passes end at multiples of this number of samples."""


FULL = Size(
    first=None, batch=2048, batch_multiple=1024,
    budgets={"device_budget": "4.25MiB", "host_budget": "16MiB", "eval_budget": "2MiB"},
)  # fmt: skip
QUICK = Size(
    first=60_000, batch=512, batch_multiple=512,
    budgets={"device_budget": "1MiB", "host_budget": "6.5MiB", "eval_budget": "256KiB"},
)  # fmt: skip


class FlightsModel(nn.Module):
    """A model in the style of DLRM (Naumov et al., 2019): dot products of all pairs of vectors.

    Bottom layers turn the dense features into one more vector. The first number of every vector is also added to the
    logit directly, so that a key has an effect from its first step.
    """

    pairs: torch.Tensor

    def __init__(self, schema: tc.Schema) -> None:
        super().__init__()
        self.embeddings = tc.EmbeddingBagCollection(schema)
        (dim,) = set(self.embeddings.dims)
        num_vectors = len(self.embeddings.dims) + 1
        self.bottom = _layers([len(schema.dense), 32, dim])
        self.top = _layers([num_vectors * dim + num_vectors * (num_vectors - 1) // 2, 64, 32])
        self.out = nn.Linear(32, 1)
        self.register_buffer("pairs", torch.triu_indices(num_vectors, num_vectors, 1), persistent=False)

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        """Return one logit per sample: (N,)."""
        looked_up, described = self.embeddings(batch), self.bottom(batch.dense)
        flat = torch.cat([looked_up, described], dim=1)
        vectors_NVD = flat.view(len(batch), -1, described.shape[1])
        dots = torch.bmm(vectors_NVD, vectors_NVD.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        interacting: torch.Tensor = self.out(self.top(torch.cat([flat, dots], dim=1))).squeeze(1)
        return interacting + vectors_NVD[:, :-1, 0].sum(dim=1)


def _layers(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers)


def extract(folder: Path, size: Size, flights: data.Flights, *, progress: bool | None = None) -> None:
    """Cut training passes, and one pass of the test flights."""
    options: dict[str, Any] = {"batch_multiple": size.batch_multiple, "memory_limit": "128MiB", "progress": progress}
    tc.extract(flights.train, SCHEMA, folder / PASSES, device_budget=size.budgets["device_budget"], **options)
    tc.extract(flights.test, SCHEMA, folder / TEST, device_budget="1GiB", split_by="file", **options)


def open_tiers(store: Path, passes: tc.PassDataset, size: Size, **options: Any) -> tc.TierCache:
    """Return a cache within the budgets; under torchrun every rank opens its part."""
    return tc.TierCache(store, passes, seed=SEED, **size.budgets, **options)


class Training:
    """A cache with its model and its dense optimizer; the seed determines the initial weights."""

    def __init__(self, cache: Any, size: Size) -> None:
        self.cache, self.size = cache, size
        torch.manual_seed(SEED)
        self.model: nn.Module = FlightsModel(cache.schema).to(cache.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.model = DistributedDataParallel(self.model)
        cache.register(model=self.model, optimizer=torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE))
        self.optimizer = cache.optimizer
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda epoch: DROP**epoch)
        cache.register(scheduler=self.scheduler)

    def run(self, after_batch: Callable[[Any], bool | None] = lambda p: None) -> None:
        """Train from the last commit to the last epoch, or until ``after_batch(p)`` is true; then commit."""
        criterion = nn.BCEWithLogitsLoss()
        for p in self.cache.passes(epochs=EPOCHS):
            if self.scheduler.last_epoch < p.epoch:
                self.scheduler.step()
            for batch in p.batches(self.size.batch, shuffle=True):
                loss = criterion(self.model(batch), batch.label) * batch.weight
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                p.log_loss(loss.item())
                if after_batch(p):
                    self.cache.commit()
                    return


def digest(path: Path) -> str:
    """Return a digest of all rows with their optimizer state, independent of their shards."""
    found = hashlib.sha256()
    with tc.Store.open(path, mode="r") as store:
        for table in store.tables:
            for keys, fields in store.scan(table.name):
                for values in (keys, *fields):
                    found.update(np.ascontiguousarray(values).tobytes())
    return found.hexdigest()


def main() -> None:
    """Train to the end, or until the process kills itself; under torchrun, also score the test flights."""
    parser = argparse.ArgumentParser(description="Train the flights of the demo from the last commit to the end.")
    parser.add_argument("--folder", type=Path, default=Path("flights-ranks"), help="where everything goes")
    parser.add_argument("--quick", action="store_true", help="the first weeks of the year")
    parser.add_argument("--first", type=int, help="the number of earliest flights to keep")
    parser.add_argument("--store", default="model.tc", help="the store's name in the folder, begun where there is none")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: each rank on the GPU of its LOCAL_RANK")
    parser.add_argument("--die-in-pass", type=int, help="kill this process in the middle of this pass")
    options = parser.parse_args()
    size, folder, store = QUICK if options.quick else FULL, options.folder, options.folder / options.store
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if dist.is_torchelastic_launched():
        dist.init_process_group()
    if rank == 0 and not (folder / TEST / "dataset.json").exists():
        extract(folder, size, data.prepare(folder, first=options.first or size.first), progress=False)
    if dist.is_initialized():
        dist.barrier()
    passes, test = (tc.PassDataset.open(folder / name) for name in (PASSES, TEST))

    def after_batch(p: Any) -> None:
        if p.index == options.die_in_pass and p.samples_done >= p.num_samples // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    with open_tiers(store, passes, size, device=options.device) as cache:
        training = Training(cache, size)
        training.run(after_batch)
        area = score(cache, training.model, test, size.batch) if dist.is_initialized() else None
    if rank == 0 and area is not None:
        print(f"{ranks} ranks: area under the curve {area:.4f}, rows {digest(store)[:16]}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
