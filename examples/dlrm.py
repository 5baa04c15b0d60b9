"""Train DLRM: python -m examples.dlrm [--quick] [--data FILE --test FILE] [--folder DIR].

The published model (Naumov et al. 2019): a bottom MLP for 13 dense features, a vector for each of 26 categories, dot
products of all pairs, and a top MLP. The files are those of Criteo, tab-separated, with a label; without ``--data``
they are made: categories follow power laws as in Merlin's synthetic models, and labels depend on hidden effects of
both kinds of features. The rows are out of core: the device holds one pass. It prints samples per second and, for a
day that was not trained, the area under the ROC curve. ``benchmarks.synthetic_models`` trains Merlin's models.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import torch
from rich.console import Console
from torch import nn

import tiercache as tc

if TYPE_CHECKING:
    from collections.abc import Sequence

DENSE, CATEGORIES = 13, 26
SCHEMA = """
[source]
format = "criteo"

[defaults]
dim = {dim}
optimizer = {{ name = "rowwise_adagrad", learning_rate = 0.05 }}
initializer = {{ name = "uniform", low = -0.05, high = 0.05 }}
"""
console = Console(highlight=False)


class DLRM(nn.Module):
    """The published model; everything except the embeddings is plain torch."""

    def __init__(self, schema: tc.Schema, bottom: Sequence[int], top: Sequence[int]) -> None:
        super().__init__()
        self.embeddings = tc.EmbeddingBagCollection(schema)
        (dim,) = {*self.embeddings.dims}
        vectors = len(self.embeddings.dims) + 1
        self.bottom = mlp([DENSE, *bottom, dim])
        self.top = nn.Sequential(mlp([dim + vectors * (vectors - 1) // 2, *top]), nn.Linear(top[-1], 1))
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, 1), persistent=False)

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        """Return logits (N,)."""
        dense = self.bottom(batch.dense)
        vectors = torch.cat([dense, self.embeddings(batch)], dim=1).view(len(dense), -1, dense.shape[1])
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, products], dim=1)).squeeze(1)  # type: ignore[no-any-return]


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Return linear layers with ReLUs."""
    return nn.Sequential(*(part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())))


def write_day(path: Path, day: int, samples: int, most_rows: int) -> None:
    """Write samples in Criteo's format."""
    chance, hidden = np.random.default_rng((1, day)), np.random.default_rng(2)
    integers = chance.integers(0, 100, (DENSE, samples))
    logit = 0.3 * hidden.normal(size=DENSE) @ np.log1p(integers) + chance.logistic(size=samples)
    columns: dict[str, Any] = {f"I{i + 1}": integers[i] for i in range(DENSE)}
    words = pa.array([f"{word:08x}" for word in range(most_rows)])
    for c in range(CATEGORIES):
        rows = max(3, int(most_rows ** ((c + 1) / CATEGORIES)))
        drawn = (chance.random(samples) * (rows**-0.15 - 1) + 1) ** (1 / -0.15)  # power law with exponent 1.15
        ids = np.minimum(drawn.astype(np.int64), rows) - 1
        logit += hidden.normal(size=rows)[ids] * 0.4
        columns[f"C{c + 1}"] = words.take(pa.array(ids))
    label = (logit > np.quantile(logit, 0.75)).astype(np.int8)
    options = pyarrow.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    pyarrow.csv.write_csv(pa.table({"label": label, **columns}), path, options)


def extract(options: argparse.Namespace) -> tuple[nn.Module, tc.PassDataset, tc.PassDataset]:
    """Return a model, and passes for training and scoring."""
    folder: Path = options.folder
    if options.data is None:
        samples, tested, most_rows = (8000, 2000, 4000) if options.quick else (400_000, 40_000, 300_000)
        options.data, options.test = folder / "day_0", folder / "day_1"
        write_day(options.data, 0, samples, most_rows)
        write_day(options.test, 1, tested, most_rows)
    (folder / "criteo.toml").write_text(SCHEMA.format(dim=8 if options.quick else 64))
    budgets: dict[str, Any] = {"device_budget": options.device_budget, "progress": False}
    train = tc.extract(options.data, folder / "criteo.toml", folder / "passes", batch_multiple=options.batch, **budgets)
    test = tc.extract(options.test, folder / "criteo.toml", folder / "test", **budgets)
    widths = ([16], [16]) if options.quick else ([512, 256], [512, 256])
    return DLRM(train.schema, *widths), train, test


def area_under_curve(cache: tc.TierCache, model: nn.Module, test: tc.PassDataset, batch: int) -> float:
    """Return the chance that a sample with label 1 scores above one with label 0."""
    model.eval()
    with torch.no_grad():
        found = [(model(one), one.label) for piece in cache.evaluate(test) for one in piece.batches(batch)]
    model.train()
    scores, labels = (torch.cat(one).double() for one in zip(*found, strict=True))
    ranks, ones = scores.argsort().argsort() + 1.0, labels.sum()
    return float((ranks[labels > 0].sum() - ones * (ones + 1) / 2) / (ones * (len(labels) - ones)))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Extract, train and score; return the figures."""
    folder, begun = options.folder, time.perf_counter()
    torch.manual_seed(0)
    model, train, test = extract(options)
    rows = sum(np.unique(np.concatenate([p.keys(t.name) for p in train.passes])).size for t in train.tables)
    seconds = time.perf_counter() - begun
    console.print(f"{train.samples:,} samples in {len(train)} passes, {rows:,} rows, extracted in {seconds:.1f} s")
    optimizer, criterion = torch.optim.Adagrad(model.parameters(), lr=0.01), nn.BCEWithLogitsLoss()
    with tc.TierCache(
        folder / "model.tc", train, model=model, optimizer=optimizer, device_budget=options.device_budget,
        host_budget=options.host_budget,
    ) as cache:  # fmt: skip
        optimizer = cache.optimizer
        begun, done = time.perf_counter(), 0
        for p in cache.passes(epochs=options.epochs):
            for batch in p.batches(options.batch, shuffle=True):
                loss = criterion(model(batch), batch.label)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                p.log_loss(loss.item())
                done += len(batch)
        seconds = time.perf_counter() - begun
        area = area_under_curve(cache, model, test, options.batch)
        cache.write_report(folder / "run.jsonl")
        if cache.reports:
            page = folder / "dlrm.html"
            report = [sys.executable, "-m", "tiercache.cli", "report", str(folder / "run.jsonl"), "--out", str(page)]
            subprocess.run([*report, "--title", "DLRM over three tiers", "--quiet"], check=True)
            console.print(f"page with figures: {page}")
        figures = {
            "model": "dlrm", "samples": train.samples, "rows": rows, "passes": len(train),
            "epochs": options.epochs, "samples_per_s": done / seconds if done else 0.0, "auc": area,
            "rows_on_device_share": max(sum(p.rows(t.name) for t in train.tables) for p in train.passes) / rows,
        }  # fmt: skip
    console.print(f"{figures['samples_per_s']:,.0f} samples/s; area under the curve {area:.4f}")
    return figures


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("dlrm"), help="where everything is written")
    parser.add_argument("--quick", action="store_true", help="few samples, narrow layers")
    parser.add_argument("--data", type=Path, help="a file of Criteo's to train")
    parser.add_argument("--test", type=Path, help="another one to score")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--device-budget", default=None)
    parser.add_argument("--host-budget", default="512MiB")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    options.batch = 128 if options.quick else 2048
    options.device_budget = options.device_budget or ("448KiB" if options.quick else "24MiB")
    if options.data and not options.test:
        parser.error("--data needs --test, the file that is scored")
    figures = run(options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
