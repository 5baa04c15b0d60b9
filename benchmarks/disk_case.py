"""The training of the out-of-core benchmark: sizes, data, model, and the width of its dense part."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tiercache as tc
from benchmarks.drawn_passes import draw_ids, schema_of, write_drawn
from benchmarks.machine import middle
from tiercache.values.batch import Batch

TABLE = "items"
DENSE_RATE = 0.01
RULES: dict[str, tc.optim.Adagrad | tc.optim.Adam] = {
    "adagrad": tc.optim.Adagrad(learning_rate=0.05),
    "adam": tc.optim.Adam(learning_rate=0.001),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The amount of data, and limits on the time of the benchmark."""

    name: str
    passes: int
    samples: int
    """Samples of each pass."""
    vocabulary: int
    """Number of ids to draw from; the table has the drawn ones."""
    batch: int
    epoch_seconds: float
    """Limit on the seconds of an epoch, or a window, in memory; it bounds the dense part."""
    turns: int = 0
    """Turns of training in memory and over the tiers."""
    turn_passes: int = 1
    """Passes of a turn; all turns together train whole epochs."""
    features: int = 8
    dim: int = 64
    repeats: int = 1
    """Turns are divided into this number of groups, and medians over groups are reported."""

    def __post_init__(self) -> None:
        if self.turns % self.repeats or self.turns * self.turn_passes % self.passes:
            raise ValueError(
                f"{self.turns} turns of {self.turn_passes} passes are not whole repeats, {self.repeats} of them, and "
                f"whole epochs of {self.passes}"
            )

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch."""
        return self.passes * self.samples

    @property
    def epochs(self) -> int:
        """Epochs of a training: one that fills the store, and the epochs of the turns."""
        return 1 + self.turns * self.turn_passes // self.passes


FULL = Size(
    name="full", passes=24, samples=196_608, vocabulary=32_000_000, batch=4096, turns=24, turn_passes=2,
    epoch_seconds=120, repeats=4,
)  # fmt: skip
QUICK = Size(
    name="quick", passes=16, samples=51_200, vocabulary=40_000_000, batch=2048, turns=16, epoch_seconds=8, features=2
)
TINY = replace(
    QUICK, name="tiny", passes=20, samples=5120, vocabulary=2_000_000, features=8, turns=4, turn_passes=5,
    epoch_seconds=1,
)  # fmt: skip
GPU = Size(name="gpu", passes=10, samples=2 * 65_536, vocabulary=40_000_000, batch=65_536, dim=128, epoch_seconds=120)
GPU_DRY = Size(name="dry", passes=6, samples=48, vocabulary=3000, batch=24, dim=8, epoch_seconds=120)


def dataset(folder: Path, size: Size, optimizer: str) -> tc.PassDataset:
    """Open the dataset of a size in ``folder``, or write it: all features share one table."""
    facts = (size.name, optimizer, size.passes, size.samples, size.vocabulary, size.features, size.dim)
    schema = schema_of({TABLE: size.dim}, RULES[optimizer], {f"feature{f}": TABLE for f in range(size.features)})
    draw = partial(draw_ids, schema, size.vocabulary, size.samples)
    return write_drawn(folder / "-".join(map(str, ("passes", *facts))), schema, size.passes, draw)


def dense_part(inputs: int, width: int) -> nn.Sequential:
    """Return two hidden layers of ``width``."""
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1), nn.Flatten(0)
    )


class Net(nn.Module):
    """Pooled embeddings, followed by the dense part if ``width`` is not 0 and ``light`` is not set."""

    def __init__(self, schema: tc.Schema, width: int, *, light: bool) -> None:
        super().__init__()
        self.bag, self.light = tc.EmbeddingBagCollection(schema), light
        self.bias = nn.Parameter(torch.zeros(1))
        self.dense = dense_part(self.bag.out_features, width) if width else None

    def forward(self, batch: Batch) -> torch.Tensor:
        out: torch.Tensor = self.bag(batch)
        if self.light or self.dense is None:
            return out.sum(dim=1) + self.bias
        logits: torch.Tensor = self.dense(out)
        return logits + self.bias


class Step:
    """A step of the model; without its dense part if ``light`` is set."""

    def __init__(self, cache: Any, width: int, *, light: bool, track: bool = False) -> None:
        torch.manual_seed(1)
        self._cache, self._track = cache, track
        self.net, self._loss_of = Net(cache.schema, width, light=light).to(cache.device), nn.BCEWithLogitsLoss()
        self._optimizer = torch.optim.SGD(self.net.parameters(), lr=DENSE_RATE)
        # Dense weights are not tracked, because their width differs between runs over one store.
        cache.register(**({"model": self.net, "optimizer": self._optimizer} if track else {"model": self.net.bag}))

    def __call__(self, batch: Batch) -> None:
        self._loss_of(self.net(batch), batch.label).backward()
        if not self._track:
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._cache.optimizer.step()
        self._cache.optimizer.zero_grad()


class DenseTimer:
    """Finds the width of the dense part that takes a given time."""

    def __init__(self, size: Size) -> None:
        self._batch, self._inputs = size.batch, size.features * size.dim

    def seconds(self, width: int) -> float:
        """Return the seconds per sample in the dense part: forward, backward and step."""
        part, loss_of = dense_part(self._inputs, width), nn.BCEWithLogitsLoss()
        optimizer = torch.optim.SGD(part.parameters(), lr=DENSE_RATE)
        inputs = torch.rand(self._batch, self._inputs, requires_grad=True)
        labels = torch.zeros(self._batch)
        taken: list[float] = []
        until = time.perf_counter() + 0.12
        while len(taken) < 4 or time.perf_counter() < until:
            begun = time.perf_counter()
            loss_of(part(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            taken.append(time.perf_counter() - begun)
        return middle(taken[1:]) / self._batch

    def width(self, sample_seconds: float) -> int:
        """Return the least width, a multiple of 4, that takes ``sample_seconds`` within a tenth."""
        width = 4
        while width < 1 << 14 and self.seconds(width) < sample_seconds:
            width = max(width + 4, width * 9 // 8 // 4 * 4)
        return width
