"""A converted model with nn.EmbeddingBags compared with the original: python -m benchmarks.adoption [--quick] [--json
FILE].

A typical model of 26 `nn.EmbeddingBag`s of dim 64 and a small top is trained with Adagrad in memory, with `sparse=True`
and torch's optimizers. The same model is converted by `tc.convert`, with its weights, and trained end to end: its data
are extracted, its rows imported into a new store, reorganized, trained over the tiers with passes of a quarter of them,
and committed. Both train the same samples for the same number of epochs, on all cores.

speedup = seconds of the original model / seconds of the converted one, including extraction and store
speedup_of_epochs = the same for the epochs only; extract_seconds, open_seconds = the time before them
top_seconds = seconds of all steps without lookups, equal in both; speedup_at_most = the speedup if lookups took no time
converted_vs_native = seconds of an epoch of the converted model in memory / those with a single
EmbeddingBagCollection; losses_close = all losses agree to 1e-3
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import tiercache as tc
from benchmarks.drawn_passes import permuted_power_law
from benchmarks.machine import Goal, benchmark, middle, seconds_of
from tiercache.reporting.progress import prepare_kernels

TABLES, DIM, DENSE, BATCH, RATE = 26, 64, 13, 8192, 0.02
NAMES = [f"c{t}" for t in range(TABLES)]
GOALS = (
    Goal(key="speedup", goal=3.5, least=2),
    Goal(key="converted_vs_native", goal=1.15, below=True),
    Goal(key="losses_close", goal=1),
)


@dataclass(frozen=True)
class Size:
    """The amount of training."""

    rows: int
    """Rows of each table."""
    batches: int
    """Batches of an epoch."""
    epochs: int


FULL, QUICK, TINY = Size(200_000, 200, 3), Size(30_000, 24, 2), Size(200, 2, 1)


class Model(nn.Module):
    """Vectors of 26 categories, from one module each or one for all, and a top."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables, self.top = tables, nn.Sequential(nn.Linear(TABLES * DIM + DENSE, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: torch.Tensor, ids: Any) -> torch.Tensor:
        if isinstance(self.tables, nn.ModuleList):
            vectors = [table(some) for table, some in zip(self.tables, ids, strict=True)]
        else:
            vectors = [self.tables(ids)]
        return self.top(torch.cat([*vectors, dense], dim=1)).squeeze(1)  # type: ignore[no-any-return]


def bags(rows: int, **options: bool) -> nn.ModuleList:
    """Return a module for each table."""
    return nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum", **options) for _ in NAMES)  # type: ignore[arg-type]


def schema() -> tc.Schema:
    """Return 26 tables, trained with Adagrad as torch does."""
    rule, begin = tc.optim.Adagrad(learning_rate=RATE), tc.init.Uniform(low=-0.05, high=0.05)
    return tc.Schema(
        features=tuple(tc.Feature(name=name) for name in NAMES),
        tables=tuple(tc.Table(name=name, dim=DIM, optimizer=rule, initializer=begin) for name in NAMES),
        label="label",
        dense=tuple(tc.DenseFeature(column=f"d{i}") for i in range(DENSE)),
    )


def samples(size: Size) -> list[dict[str, Any]]:
    """Return the batches of an epoch, as columns."""
    chance = np.random.default_rng(3)
    found = []
    for _ in range(size.batches):
        batch: dict[str, Any] = {name: permuted_power_law(chance, size.rows, BATCH) for name in NAMES}
        batch |= {f"d{i}": chance.random(BATCH, dtype=np.float32) for i in range(DENSE)}
        batch["label"] = (batch["d0"] + (batch["c0"] % 2) > 1).astype(np.float32)
        found.append(batch)
    return found


def step(logits: torch.Tensor, label: torch.Tensor, optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """Train a batch; return its loss."""
    loss = nn.functional.binary_cross_entropy_with_logits(logits, label)
    loss.backward()  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def as_it_was(model: Model, data: list[dict[str, Any]], epochs: int) -> tuple[float, list[float]]:
    """Train in memory; return seconds and losses. The time includes converting columns to tensors."""
    begun, losses = time.perf_counter(), list[float]()
    optimizers = [torch.optim.Adagrad(part.parameters(), lr=RATE) for part in (model.tables, model.top)]
    for _ in range(epochs):
        for batch in data:
            dense = torch.from_numpy(np.stack([batch[f"d{i}"] for i in range(DENSE)], axis=1))
            ids = [torch.from_numpy(batch[name])[:, None] for name in NAMES]
            losses.append(step(model(dense, ids), torch.from_numpy(batch["label"]), optimizers))
    return time.perf_counter() - begun, losses


def trained(cache: tc.TierCache | tc.InMemoryCache, model: Model, epochs: int) -> list[float]:
    """Train the next epochs; return losses."""
    by_module, losses = isinstance(model.tables, nn.ModuleList), list[float]()
    for p in cache.passes(epochs=epochs):
        for batch in p.batches(BATCH):
            ids = [*batch.features.values()] if by_module else batch
            losses.append(step(model(batch.dense, ids), batch.label, [cache.optimizer]))
    return losses


def converted(
    model: Model, data: list[dict[str, Any]], size: Size, folder: Path
) -> tuple[dict[str, float], list[float]]:
    """Extract, import, train and commit; return seconds and losses."""
    begun = time.perf_counter()
    budget = TABLES * size.rows * DIM * 8 // 4
    passes = tc.extract(data, schema(), folder / "passes", device_budget=budget + (4 << 20), progress=False)
    extracted = time.perf_counter()
    tc.convert(model, passes, {"tables": NAMES})
    dense = torch.optim.Adagrad(model.top.parameters(), lr=RATE)
    with tc.TierCache(
        folder / "model.tc", passes, model=model, optimizer=dense, device_budget=2 * budget + (16 << 20),
        host_budget="1.5GiB", progress=False,
    ) as cache:  # fmt: skip
        opened = time.perf_counter()
        losses = trained(cache, model, size.epochs)
    ended = time.perf_counter()
    seconds = {
        "extract_seconds": extracted - begun,
        "open_seconds": opened - extracted,
        "epochs_seconds": ended - opened,
    }
    return seconds, losses


def top_seconds(model: Model, steps: int) -> float:
    """Return the seconds of a number of steps without lookups: concatenation of vectors, the top, their backward."""
    vectors = [torch.rand(BATCH, DIM, requires_grad=True) for _ in NAMES]
    optimizer = torch.optim.Adagrad(model.top.parameters(), lr=RATE)
    dense, label = torch.rand(BATCH, DENSE), torch.ones(BATCH)
    taken = seconds_of(
        lambda _: step(model.top(torch.cat([*vectors, dense], dim=1)).squeeze(1), label, [optimizer]), 12
    )
    return steps * middle(taken)


def epoch_seconds(model: Model, passes: tc.PassDataset) -> float:
    """Return the seconds of the second epoch in memory."""
    dense = torch.optim.Adagrad(model.top.parameters(), lr=RATE)
    cache = tc.InMemoryCache(passes, model=model, optimizer=dense)
    trained(cache, model, 1)
    begun = time.perf_counter()
    trained(cache, model, 2)
    return time.perf_counter() - begun


def measure(size: Size, folder: Path) -> dict[str, Any]:
    """Run the benchmark and return the figures."""
    prepare_kernels(schema().tables)
    data = samples(size)
    torch.manual_seed(1)
    model = Model(bags(size.rows, sparse=True))
    for weight in model.tables.parameters():
        nn.init.uniform_(weight, -0.05, 0.05)
    mine = copy.deepcopy(model)
    seconds, losses = as_it_was(model, data, size.epochs)
    ours, found = converted(mine, data, size, folder)
    top = top_seconds(model, len(losses))
    passes = tc.PassDataset.open(folder / "passes")
    torch.manual_seed(1)
    with torch.device("meta"):
        bare = bags(size.rows)
    apart, together = Model(bare), Model(tc.EmbeddingBagCollection(schema()))
    tc.convert(apart, passes, {"tables": NAMES})
    by_module, by_collection = epoch_seconds(apart, passes), epoch_seconds(together, passes)
    return {
        "tables": TABLES, "dim": DIM, "rows": TABLES * size.rows, "batch": BATCH, "steps": len(losses),
        "passes": len(passes), "torch_seconds": seconds, **ours, "converted_seconds": sum(ours.values()),
        "speedup": seconds / sum(ours.values()), "speedup_of_epochs": seconds / ours["epochs_seconds"],
        "top_seconds": top, "speedup_at_most": seconds / top,
        "converted_epoch_seconds": by_module, "native_epoch_seconds": by_collection,
        "converted_vs_native": by_module / by_collection,
        "loss_first": losses[0], "loss_last": losses[-1], "converted_loss_last": found[-1],
        "losses_close": bool(np.allclose(losses, found, atol=1e-3)),
    }  # fmt: skip


if __name__ == "__main__":
    with benchmark("adoption", __doc__, "tables of 200 MB in all", GOALS) as run:
        run.record |= measure(run.size(FULL, QUICK, TINY), run.folder)
