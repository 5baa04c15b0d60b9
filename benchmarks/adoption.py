"""A model with nn.EmbeddingBags, converted, against itself: python -m benchmarks.adoption [--quick] [--json FILE].

A model of 26 `nn.EmbeddingBag`s of dim 64 and a small top, as people write it, is trained with Adagrad in memory:
`sparse=True` and torch's optimizers. The same model is converted by `tc.convert`, with its weights, and trained end to
end: its data extracted, its rows imported into a new store, put in order, trained over the tiers with passes of a
quarter of them, and committed. Both train the same samples for as many epochs, on all cores.

speedup = seconds of the model as it was / seconds of the converted one, extraction and store included
speedup_of_epochs = the same for the epochs alone; extract_seconds, open_seconds = what comes before these
top_seconds = seconds of all steps without lookups, the same in both; speedup_at_most = what lookups in no time gave
converted_vs_native = seconds of an epoch of the converted model in memory, over those of one with a single
EmbeddingBagCollection; losses_close = all losses agree to 1e-3
"""

from __future__ import annotations

import argparse
import copy
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import tiercache as tc
from benchmarks.drawn_passes import permuted_power_law
from benchmarks.machine import Goal, environment, file_system, report

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

TABLES, DIM, DENSE, BATCH = 26, 64, 13, 8192
NAMES = [f"c{t}" for t in range(TABLES)]
GOALS = (
    Goal(key="speedup", goal=3.5, least=2),
    Goal(key="converted_vs_native", goal=1.15, below=True),
    Goal(key="losses_close", goal=1),
)


@dataclass(frozen=True)
class Size:
    """How much is trained."""

    rows: int
    """Of each table."""
    batches: int
    """Of an epoch."""
    epochs: int


FULL, QUICK, TINY = Size(200_000, 200, 3), Size(30_000, 24, 2), Size(200, 2, 1)


class Model(nn.Module):
    """A vector for each of 26 categories, and a top."""

    def __init__(self, tables: Iterable[nn.Module]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)
        self.top = nn.Sequential(nn.Linear(TABLES * DIM + DENSE, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: torch.Tensor, ids: Sequence[Any]) -> torch.Tensor:
        """Return logits (N,)."""
        vectors = [table(some) for table, some in zip(self.tables, ids, strict=True)]
        return self.top(torch.cat([*vectors, dense], dim=1)).squeeze(1)  # type: ignore[no-any-return]


class Native(nn.Module):
    """The same, that looks all tables up at once."""

    def __init__(self, schema: tc.Schema) -> None:
        super().__init__()
        self.tables = tc.EmbeddingBagCollection(schema)
        self.top = nn.Sequential(nn.Linear(TABLES * DIM + DENSE, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        """Return logits (N,)."""
        return self.top(torch.cat([self.tables(batch), batch.dense], dim=1)).squeeze(1)  # type: ignore[no-any-return]


def schema() -> tc.Schema:
    """Return 26 tables that Adagrad trains as torch does."""
    rule, begin = tc.optim.Adagrad(learning_rate=0.02), tc.init.Uniform(low=-0.05, high=0.05)
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
    """Train a batch; returns its loss."""
    loss = nn.functional.binary_cross_entropy_with_logits(logits, label)
    loss.backward()  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def as_it_was(model: Model, data: list[dict[str, Any]], epochs: int) -> tuple[float, list[float]]:
    """Train in memory; returns seconds and losses. What torch takes to make tensors of the columns counts."""
    begun, losses = time.perf_counter(), list[float]()
    optimizers = [
        torch.optim.Adagrad(model.tables.parameters(), lr=0.02),
        torch.optim.Adagrad(model.top.parameters(), lr=0.02),
    ]
    for _ in range(epochs):
        for batch in data:
            dense = torch.from_numpy(np.stack([batch[f"d{i}"] for i in range(DENSE)], axis=1))
            ids = [torch.from_numpy(batch[name])[:, None] for name in NAMES]
            losses.append(step(model(dense, ids), torch.from_numpy(batch["label"]), optimizers))
    return time.perf_counter() - begun, losses


def batches_of(passes: Iterator[tc.Pass]) -> Iterator[tc.Batch]:
    """Yield all batches."""
    for p in passes:
        yield from p.batches(BATCH)


def converted(
    model: Model, data: list[dict[str, Any]], size: Size, folder: Path
) -> tuple[dict[str, float], list[float]]:
    """Extract, import, train and commit; returns seconds and losses."""
    begun = time.perf_counter()
    budget = TABLES * size.rows * DIM * 8 // 4
    passes = tc.extract(data, schema(), folder / "passes", device_budget=budget + (4 << 20), progress=False)
    extracted = time.perf_counter()
    tc.convert(model, passes, {"tables": NAMES})
    optimizer = torch.optim.Adagrad(model.top.parameters(), lr=0.02)
    losses = []
    with tc.TierCache(
        folder / "model.tc", passes, model=model, optimizer=optimizer, device_budget=2 * budget + (16 << 20),
        host_budget="1.5GiB", progress=False,
    ) as cache:  # fmt: skip
        opened = time.perf_counter()
        for batch in batches_of(cache.passes(epochs=size.epochs)):
            losses.append(step(model(batch.dense, [*batch.features.values()]), batch.label, [optimizer]))
            cache.optimizer.step()
    ended = time.perf_counter()
    seconds = {
        "extract_seconds": extracted - begun,
        "open_seconds": opened - extracted,
        "epochs_seconds": ended - opened,
    }
    return seconds, losses


def top_seconds(model: Model, steps: int) -> float:
    """Return the seconds of so many steps of what is not looked up: vectors put together, the top, their backward."""
    vectors = [torch.rand(BATCH, DIM, requires_grad=True) for _ in NAMES]
    optimizer, dense, label = (
        torch.optim.Adagrad(model.top.parameters(), lr=0.02),
        torch.rand(BATCH, DENSE),
        torch.ones(BATCH),
    )
    seconds = []
    for _ in range(12):
        begun = time.perf_counter()
        step(model.top(torch.cat([*vectors, dense], dim=1)).squeeze(1), label, [optimizer])
        seconds.append(time.perf_counter() - begun)
    return steps * statistics.median(seconds)


def step_seconds(made: nn.Module, passes: tc.PassDataset, native: bool) -> float:
    """Return the seconds of the second epoch in memory."""
    optimizer = torch.optim.Adagrad(made.top.parameters(), lr=0.02)  # type: ignore[union-attr]
    cache = tc.InMemoryCache(passes, model=made, optimizer=optimizer)
    begun = time.perf_counter()
    for epoch in (1, 2):
        begun = time.perf_counter()
        for batch in batches_of(cache.passes(epochs=epoch)):
            step(made(batch) if native else made(batch.dense, [*batch.features.values()]), batch.label, [optimizer])
            cache.optimizer.step()
    return time.perf_counter() - begun


def run(size: Size, folder: Path) -> dict[str, Any]:
    """Run it and return the figures."""
    from tiercache.training.progress import prepare_kernels

    prepare_kernels(schema().tables)
    data = samples(size)
    torch.manual_seed(1)
    model = Model([nn.EmbeddingBag(size.rows, DIM, mode="sum", sparse=True) for _ in range(TABLES)])
    with torch.no_grad():
        for table in model.tables:
            nn.init.uniform_(table.weight, -0.05, 0.05)  # type: ignore[arg-type]
    mine = copy.deepcopy(model)
    seconds, losses = as_it_was(model, data, size.epochs)
    ours, found = converted(mine, data, size, folder)
    top = top_seconds(model, len(losses))
    passes = tc.PassDataset.open(folder / "passes")
    torch.manual_seed(1)
    with torch.device("meta"):
        bare = [nn.EmbeddingBag(size.rows, DIM, mode="sum") for _ in range(TABLES)]
    apart, together = Model(bare), Native(schema())
    tc.convert(apart, passes, {"tables": NAMES})
    by_module, by_collection = step_seconds(apart, passes, native=False), step_seconds(together, passes, native=True)
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it from the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adoption", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tables of 200 MB in all, under 45 seconds")
    parser.add_argument("--tiny", action="store_true", help="so small that it shows only that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args(given)
    record = environment("benchmarks.adoption", given, ("torch", "numpy", "numba", "lmdb", "tiercache"))
    folder, begun = Path(tempfile.mkdtemp(prefix="store-", dir=Path.cwd())), time.perf_counter()
    name = "tiny" if options.tiny else "quick" if options.quick else "full"
    try:
        size = TINY if options.tiny else QUICK if options.quick else FULL
        record |= {"size": name, "file_system": file_system(folder)} | run(size, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    record["benchmark_seconds"] = time.perf_counter() - begun
    report(record, GOALS, title=f"{name}: what was promised", path=options.json)


if __name__ == "__main__":
    main()
