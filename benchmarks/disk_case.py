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
from benchmarks.training import Trainer, mlp
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


class Net(nn.Module):
    """Pooled embeddings, followed by two hidden layers of ``width`` if it is not 0 and ``light`` is not set."""

    def __init__(self, schema: tc.Schema, width: int, *, light: bool) -> None:
        super().__init__()
        self.bag, self.light = tc.EmbeddingBagCollection(schema), light
        self.bias = nn.Parameter(torch.zeros(1))
        self.dense = mlp(self.bag.out_features, width, width) if width else None

    def forward(self, batch: Batch) -> torch.Tensor:
        out: torch.Tensor = self.bag(batch)
        if self.light or self.dense is None:
            return out.sum(dim=1) + self.bias
        logits: torch.Tensor = self.dense(out)
        return logits + self.bias


def trainer_of(cache: Any, width: int, *, light: bool = False) -> Trainer:
    """Return a step of the model; without its dense part as long as ``light`` is set."""
    torch.manual_seed(1)
    return Trainer(cache, Net(cache.schema, width, light=light), partial(torch.optim.SGD, lr=DENSE_RATE))


def dense_seconds(size: Size, width: int) -> float:
    """Return the seconds per sample in the dense part: forward, backward and step."""
    inputs = torch.rand(size.batch, size.features * size.dim, requires_grad=True)
    part, loss_of, labels = mlp(inputs.shape[1], width, width), nn.BCEWithLogitsLoss(), torch.zeros(size.batch)
    optimizer = torch.optim.SGD(part.parameters(), lr=DENSE_RATE)
    taken: list[float] = []
    until = time.perf_counter() + 0.12
    while len(taken) < 4 or time.perf_counter() < until:
        begun = time.perf_counter()
        loss_of(part(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter() - begun)
    return middle(taken[1:]) / size.batch


def dense_width(size: Size, sample_seconds: float) -> int:
    """Return the least width, a multiple of 4, whose dense part takes ``sample_seconds`` within a tenth."""
    width = 4
    while width < 1 << 14 and dense_seconds(size, width) < sample_seconds:
        width = max(width + 4, width * 9 // 8 // 4 * 4)
    return width
