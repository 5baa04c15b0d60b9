"""Train day by day and send changed rows to a server: python -m examples.continual [--quick] [--folder DIR].

Users and items come and go, and tastes drift. Each day's clicks are scored by the previous day's model, then trained.
Then the rows that changed since the last commit are sent to a server, here a dictionary, which must have the store's
rows bit for bit. The figure shows the scores and how little is sent.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from torch import nn

import tiercache as tc

if TYPE_CHECKING:
    from numpy.typing import NDArray

DIM, BATCH = 8, 128
console = Console(highlight=False)


def schema() -> tc.Schema:
    """Return a schema of users and items."""
    rule, begin = tc.optim.Adagrad(learning_rate=0.1), tc.init.Uniform(low=-0.05, high=0.05)
    tables = tuple(tc.Table(name=name, dim=DIM, optimizer=rule, initializer=begin) for name in ("user", "item"))
    features = tuple(tc.Feature(name=one.name) for one in tables)
    return tc.Schema(features=features, tables=tables, label="clicked", dense=())


def clicks(day: int, samples: int) -> dict[str, NDArray[Any]]:
    """Return the clicks of a day: a window of users and items that moves, and tastes that drift."""
    chance = np.random.default_rng((1, day))
    users, items = (
        day * step + (chance.random(samples) ** 2 * size).astype(np.int64) for step, size in ((40, 4000), (25, 1500))
    )
    tastes = np.random.default_rng(2).normal(size=(4, 50_000))
    turn = day * 0.15
    drifting = np.cos(turn) * tastes[1, items] + np.sin(turn) * tastes[2, items]
    taste = drifting + 0.5 * tastes[3, users] + tastes[0, users] * drifting
    label = (taste + chance.normal(size=samples) * 0.5 > 0).astype(np.float32)
    return {"user": users, "item": items, "clicked": label}


class Model(nn.Module):
    """A product of two vectors, followed by a layer that reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = tc.EmbeddingBagCollection(schema())
        self.top = nn.Sequential(nn.Linear(3 * DIM, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        """Return logits (N,)."""
        user, item = self.embeddings.split(self.embeddings(batch))
        return self.top(torch.cat([user, item, user * item], dim=1)).squeeze(1)


def area_under_curve(cache: tc.TierCache, model: Model, data: tc.PassDataset) -> float:
    """Return the chance that a sample with label 1 scores above one with label 0."""
    model.eval()
    with torch.no_grad():
        found = [(model(batch), batch.label) for piece in cache.evaluate(data) for batch in piece.batches(4096)]
    model.train()
    scores, labels = (torch.cat(one).double() for one in zip(*found, strict=True))
    ranks, ones = scores.argsort().argsort() + 1.0, labels.sum()
    return float((ranks[labels > 0].sum() - ones * (ones + 1) / 2) / (ones * (len(labels) - ones)))


class Server:
    """A stand-in for a serving process: holds vectors and applies changes."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], bytes] = {}

    def take(self, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Replace rows."""
        self.rows |= {(table, key): row.tobytes() for key, row in zip(keys.tolist(), vectors, strict=True)}

    def differs(self, store: tc.Store) -> int:
        """Return how many of its rows are missing or differ from the store."""
        wanted = {
            (one.name, key): row.tobytes()
            for one in store.tables
            for keys, fields in store.scan(one.name)
            for key, row in zip(keys.tolist(), fields[0], strict=True)
        }
        return len(wanted.items() ^ self.rows.items())


def run(folder: Path, days: int, samples: int) -> int:
    """Train all days; return the number of rows the server has wrong at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    server, sent, scores, shares = Server(), -1, list[float](), list[float]()
    torch.manual_seed(0)
    with tc.Store.open(folder / "model.tc", tables=schema().tables, retention=2) as store:
        for day in range(days):
            data = tc.extract(
                [clicks(day, samples)], schema(), folder / f"day-{day}", device_budget="8MiB", progress=False
            )
            model = Model()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            with tc.TierCache(
                store, data, model=model, optimizer=optimizer, device_budget="8MiB", host_budget="64MiB", progress=False
            ) as cache:
                optimizer = cache.optimizer
                if day:
                    cache.restore()
                    scores.append(area_under_curve(cache, model, data))
                for p in cache.passes(epochs=1):
                    for batch in p.batches(BATCH, shuffle=True):
                        nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
                        optimizer.step()
                        optimizer.zero_grad()
            rows = sum(store.live_rows(one.name) for one in store.tables)
            changed = 0
            for one in store.tables:
                for keys, fields in store.changes(one.name, since=sent):
                    server.take(one.name, keys, fields["vector"])
                    changed += keys.size
            assert store.commit is not None
            sent = store.commit.id
            shares.append(changed / rows)
            auc = f", scored {scores[-1]:.3f} before it was trained" if scores else ""
            console.print(f"day {day}: {changed:,} of {rows:,} rows changed and were sent{auc}")
        wrong = server.differs(store)
    console.print(f"the server has {len(server.rows):,} rows, of which {wrong} are not the store's")
    draw(folder / "continual.png", scores, shares)
    return wrong


def draw(path: Path, scores: list[float], shares: list[float]) -> None:
    """Draw scores and shares, where matplotlib is installed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(1, len(scores) + 1), scores, marker="o", color="#3b6fb6")
    left.set_title("area under the curve on the next day", fontsize=10)
    right.bar(range(len(shares)), [100 * share for share in shares], color="#e8963a")
    right.set_title("% of rows that were sent", fontsize=10)
    for axes in (left, right):
        axes.set_xlabel("day")
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=130)
    console.print(f"figure: {path}")


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("continual"), help="where all is written; must be new")
    parser.add_argument("--quick", action="store_true", help="few days of few clicks")
    arguments = parser.parse_args()
    days, samples = (4, 4000) if arguments.quick else (14, 60_000)
    return int(run(arguments.folder, days, samples) > 0)


if __name__ == "__main__":
    sys.exit(main())
