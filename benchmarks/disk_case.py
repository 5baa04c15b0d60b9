"""The training that the out-of-core benchmark runs: sizes, data, model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

import tiercache as tc
from benchmarks.zipf import Zipf
from tiercache.passes.handmade import write_pass_set
from tiercache.passes.keybatch import KeyBatch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tiercache.training.batch import Batch

TABLE = "items"
DENSE_RATE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much data there is, and how long the benchmark may take."""

    name: str
    passes: int
    samples: int
    """Of each pass."""
    vocabulary: int
    """Ids that may be drawn; the table is those that are."""
    batch: int
    turns: int
    """Of training in memory and over the tiers."""
    turn_visits: int
    """Trained in a turn; all turns together train whole epochs."""
    epoch_seconds: float
    """The most that the dense part may make an epoch in memory last."""
    features: int = 8
    dim: int = 64
    repeats: int = 1
    """Turns are divided among so many, and medians over them are reported."""

    def __post_init__(self) -> None:
        if self.turns % self.repeats or self.turns * self.turn_visits % self.passes:
            raise ValueError(
                f"{self.turns} turns of {self.turn_visits} visits are not whole repeats, {self.repeats} of them, and "
                f"whole epochs of {self.passes}"
            )

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch."""
        return self.passes * self.samples

    @property
    def epochs(self) -> int:
        """Epochs of a training: one that fills the store, and those of the turns."""
        return 1 + self.turns * self.turn_visits // self.passes


FULL = Size(
    name="full",
    passes=24,
    samples=196_608,
    vocabulary=32_000_000,
    batch=4096,
    turns=24,
    turn_visits=2,
    epoch_seconds=120,
    repeats=4,
)
QUICK = Size(
    name="quick",
    passes=16,
    samples=51_200,
    vocabulary=40_000_000,
    batch=2048,
    turns=16,
    turn_visits=1,
    epoch_seconds=8,
    features=2,
)
TINY = replace(
    QUICK,
    name="tiny",
    passes=20,
    samples=5120,
    vocabulary=2_000_000,
    features=8,
    turns=4,
    turn_visits=5,
    epoch_seconds=1,
)


def schema_of(size: Size, optimizer: str) -> tc.Schema:
    """Return the schema: all features look into one table."""
    rules: dict[str, tc.Adagrad | tc.Adam] = {
        "adagrad": tc.Adagrad(learning_rate=0.05),
        "adam": tc.Adam(learning_rate=0.001),
    }
    table = tc.Table(name=TABLE, dim=size.dim, optimizer=rules[optimizer], initializer=tc.Uniform(low=-0.05, high=0.05))
    features = tuple(tc.Feature(name=f"feature{f}", table=TABLE) for f in range(size.features))
    return tc.Schema(label="label", dense=(), features=features, tables=(table,))


def pass_set(folder: Path, size: Size, optimizer: str) -> tc.PassSet:
    """Open the pass set of a size in ``folder``, or write it there."""
    facts = (size.passes, size.samples, size.vocabulary, size.features, size.dim, "ranks")
    name = hashlib.sha256(repr((facts, optimizer)).encode()).hexdigest()[:12]
    path = folder / f"passes-{size.name}-{optimizer}-{name}"
    if not path.exists():
        unfinished = path.with_suffix(".part")
        write_pass_set(unfinished, schema_of(size, optimizer), _data(size, optimizer))
        unfinished.rename(path)
    return tc.PassSet.open(path)


def _data(size: Size, optimizer: str) -> Iterator[KeyBatch]:
    schema, rng = schema_of(size, optimizer), np.random.default_rng(5)
    zipf = Zipf(size.vocabulary, seed=3)  # ranks are keys: rows stand in the order of their hashes
    for _ in range(size.passes):
        keys = {feature.name: zipf.ranks(size.samples) for feature in schema.features}
        yield KeyBatch.of(schema, keys, label=rng.integers(0, 2, size.samples).astype(np.float32))


def dense_part(inputs: int, width: int) -> nn.Sequential:
    """Return two hidden layers of ``width``."""
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1), nn.Flatten(0)
    )


class Net(nn.Module):
    """Pooled embeddings, and above them the dense part where ``width`` is not 0."""

    def __init__(self, cache: tc.TierCache | tc.ResidentCache, width: int) -> None:
        super().__init__()
        self.bag = tc.EmbeddingBagCollection(cache.schema)
        self.bias = nn.Parameter(torch.zeros(1))
        self.dense = dense_part(self.bag.out_features, width) if width else None

    def forward(self, batch: Batch, *, light: bool) -> torch.Tensor:
        """Return one logit a sample; ``light`` leaves the dense part out."""
        out: torch.Tensor = self.bag(batch)
        if light or self.dense is None:
            return out.sum(dim=1) + self.bias
        logits: torch.Tensor = self.dense(out)
        return logits + self.bias
