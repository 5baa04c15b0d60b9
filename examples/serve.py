"""Look up rows while they are trained: python -m examples.serve [--quick] [--folder DIR].

One process trains. Another one, which shares only the store's folder with it, opens the newest commit once a
second, looks up some keys and prints the latency. A reader holds its commit as long as it is open; training never waits
for it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from torch import nn

import tiercache as tc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

DIM, DAYS, BATCH = 8, 8, 128
console = Console(highlight=False)


def schema() -> tc.Schema:
    """Users and items."""
    rule, begin = tc.optim.Adagrad(learning_rate=0.1), tc.init.Uniform(low=-0.05, high=0.05)
    tables = tuple(tc.Table(name=name, dim=DIM, optimizer=rule, initializer=begin) for name in ("user", "item"))
    return tc.Schema(features=tuple(tc.Feature(name=one.name) for one in tables), tables=tables, label="clicked")


class Clicks:
    """Days of clicks, drawn afresh whenever they are read; users and items come and go."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        for day in range(DAYS):
            chance = np.random.default_rng((1, day))
            user, item = (40 * day + chance.integers(0, size, self.samples) for size in (4000, 1500))
            yield {"user": user, "item": item, "clicked": ((user + item) % 3 == 0).astype(np.float32)}


class Model(nn.Module):
    """A product of two vectors, and a layer that reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = tc.EmbeddingBagCollection(schema())
        self.top = nn.Sequential(nn.Linear(3 * DIM, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        """Return logits (N,)."""
        user, item = self.embeddings.split(self.embeddings(batch))
        return self.top(torch.cat([user, item, user * item], dim=1)).squeeze(1)  # type: ignore[no-any-return]


def train(folder: Path, epochs: int, samples: int) -> None:
    """Train eight days as passes, for some epochs; each pass is a commit."""
    data = tc.extract(
        Clicks(samples), schema(), folder / "days", device_budget="8MiB", split_by=f"rows={samples}",
        batch_multiple=samples, progress=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    with tc.TierCache(
        folder / "model.tc", data, model=model, optimizer=optimizer, device_budget="8MiB", host_budget="64MiB",
        progress=False,
    ) as cache:  # fmt: skip
        optimizer = cache.optimizer
        for p in cache.passes(epochs=epochs):
            for batch in p.batches(BATCH, shuffle=True):
                nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
                optimizer.step()
                optimizer.zero_grad()


def serve(path: Path, every: float) -> None:
    """Look up keys in the newest commit repeatedly, until standard input ends with the training."""
    import select

    while not select.select([sys.stdin], [], [], every)[0]:
        try:
            begun = time.perf_counter()
            with tc.Store.open(path, mode="r") as store:
                if store.commit is None:
                    continue
                vectors = store.lookup("user", np.arange(64), missing="zeros")["vector"]
                told = {"commit": store.commit.id, "seconds": time.perf_counter() - begun, "sum": float(vectors.sum())}
            print(json.dumps(told), flush=True)
        except tc.StoreError:
            continue  # not created yet


def run(folder: Path, epochs: int, samples: int, every: float) -> int:
    """Train next to a server process; return 1 if it served nothing."""
    command = [sys.executable, "-m", "examples.serve", "--folder", str(folder), "--serve", str(every)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        train(folder, epochs, samples)
        answers = [json.loads(line) for line in server.communicate("ended\n")[0].splitlines()]
    commits, milliseconds = [one["commit"] for one in answers], sorted(1e3 * one["seconds"] for one in answers)
    if not answers:
        console.print("nothing was answered")
        return 1
    median = f"the median took {milliseconds[len(answers) // 2]:.1f} ms"
    console.print(f"{len(answers)} answers of commits {commits[0]} to {commits[-1]}, of 64 keys each; {median}")
    return int(commits != sorted(commits))


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("serve"), help="where everything is written; must be new")
    parser.add_argument("--quick", action="store_true", help="a short training")
    parser.add_argument("--serve", type=float, metavar="SECONDS", help="be the process that looks up, so often")
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.folder / "model.tc", arguments.serve)
        return 0
    epochs, samples, every = (3, 6000, 0.1) if arguments.quick else (4, 60_000, 1.0)
    return run(arguments.folder, epochs, samples, every)


if __name__ == "__main__":
    sys.exit(main())
