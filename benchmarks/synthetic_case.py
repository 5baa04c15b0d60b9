"""The Merlin synthetic models: their tables, their data, drawn separately for every batch, and their dense part.

https://github.com/NVIDIA-Merlin/distributed-embeddings, its synthetic models "tiny" and "small": inputs of one id or
of a fixed number of ids with sum pooling, 10 numerical features, concatenation, an MLP.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import tiercache as tc
from benchmarks.drawn_passes import permuted_power_law, write_drawn
from benchmarks.training import Trainer, mlp
from tiercache.data.raw_batch import FeatureKeys, RawBatch
from tiercache.values.batch import Batch

NUM_NUMERICAL = 10
LEARNING_RATE = 0.01


class Tables(NamedTuple):
    """Tables of one kind."""

    num: int
    lengths: tuple[int, ...]
    """Ids per sample of each input that uses the table."""
    rows: int
    width: int


class Model(NamedTuple):
    """One of the models."""

    tables: tuple[Tables, ...]
    layers: tuple[int, ...]
    """Widths of the hidden layers."""
    goal_ms: float
    """Milliseconds of a step on one H200."""

    @property
    def num_tables(self) -> int:
        return sum(kind.num for kind in self.tables)

    @property
    def num_inputs(self) -> int:
        return sum(kind.num * len(kind.lengths) for kind in self.tables)

    @property
    def lookups(self) -> int:
        """Ids of a sample."""
        return sum(kind.num * sum(kind.lengths) for kind in self.tables)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all vectors in float32."""
        return sum(4 * kind.num * kind.rows * kind.width for kind in self.tables)


MODELS = {
    "tiny": Model(
        (
            Tables(1, (1, 10), 10_000, 8), Tables(1, (1, 10), 1_000_000, 16), Tables(1, (1, 10), 25_000_000, 16),
            Tables(1, (1,), 25_000_000, 16), Tables(16, (1,), 10, 8), Tables(10, (1,), 1_000, 8),
            Tables(4, (1,), 10_000, 8), Tables(2, (1,), 100_000, 16), Tables(19, (1,), 1_000_000, 16),
        ),
        (256, 128),
        5.0,
    ),
    "small": Model(
        (
            Tables(5, (1, 30), 10_000, 16), Tables(3, (1, 30), 4_000_000, 32), Tables(1, (1, 30), 50_000_000, 32),
            Tables(1, (1,), 50_000_000, 32), Tables(30, (1,), 10, 16), Tables(30, (1,), 1_000, 16),
            Tables(5, (1,), 10_000, 16), Tables(5, (1,), 100_000, 32), Tables(27, (1,), 4_000_000, 32),
        ),
        (512, 256, 128),
        15.0,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The size of a model and its data."""

    name: str
    batch: int
    batches: int
    """Batches of each pass."""
    passes: int
    divisor: int
    """Divisor of the rows of each table."""
    window_passes: int
    """Passes of a window."""


FULL = Size(name="full", batch=65_536, batches=8, passes=12, divisor=1, window_passes=3)
QUICK = Size(name="quick", batch=1024, batches=4, passes=10, divisor=96, window_passes=2)
TINY = Size(name="tiny", batch=64, batches=1, passes=5, divisor=1024, window_passes=2)
DRY = Size(name="dry", batch=8, batches=1, passes=4, divisor=8192, window_passes=1)


@dataclass(frozen=True, slots=True)
class Data:
    """Fresh batches of a model, whose ids are permuted."""

    model: str
    size: Size

    def kinds(self) -> list[tuple[str, Tables, int]]:
        """Return name, kind and rows of every table."""
        return [
            (f"table{number}_{i}", kind, max(2, -(-kind.rows // self.size.divisor)))
            for number, kind in enumerate(MODELS[self.model].tables)
            for i in range(kind.num)
        ]

    def schema(self) -> tc.Schema:
        tables = tuple(
            tc.Table(
                name=name, dim=kind.width, optimizer=tc.optim.Adagrad(learning_rate=LEARNING_RATE),
                initializer=tc.init.Uniform(low=-0.05, high=0.05),
            )
            for name, kind, _ in self.kinds()
        )  # fmt: skip
        features = tuple(
            tc.Feature(name=f"{name}_{length}", table=name)
            if length == 1
            else tc.Feature(name=f"{name}_{length}", table=name, hotness="multi_hot", length=length)
            for name, kind, _ in self.kinds()
            for length in kind.lengths
        )
        dense = tuple(tc.DenseFeature(column=f"x{i}") for i in range(NUM_NUMERICAL))
        return tc.Schema(label="label", dense=dense, features=features, tables=tables)

    def draw(self, index: int) -> RawBatch:
        rng, count = np.random.default_rng((11, index)), self.size.batch * self.size.batches
        features = {
            f"{name}_{length}": FeatureKeys(
                permuted_power_law(rng, rows, count * length),
                None if length == 1 else np.arange(count + 1, dtype=np.int64) * length,
                None,
            )
            for name, kind, rows in self.kinds()
            for length in kind.lengths
        }
        label = rng.integers(0, 2, count).astype(np.float32)
        return RawBatch(label, rng.standard_normal((count, NUM_NUMERICAL), np.float32), features)


def dataset(folder: Path, data: Data) -> tc.PassDataset:
    """Open the dataset of a model in ``folder``, or write it."""
    numbers = "-".join(str(value) for value in asdict(data.size).values())
    return write_drawn(folder / f"passes-{data.model}-{numbers}", data.schema(), data.size.passes, data.draw)


class Net(nn.Module):
    """Pooled vectors of all inputs concatenated with the numerical features, followed by the MLP."""

    def __init__(self, schema: tc.Schema, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.bag = tc.EmbeddingBagCollection(schema)
        self.mlp = mlp(self.bag.out_features + len(schema.dense), *layers)

    def forward(self, batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = self.mlp(torch.cat([self.bag(batch), batch.dense], dim=1))
        return logits


def trainer_of(cache: Any, model: str) -> Trainer:
    """Return a step of a model, with Adagrad for both dense weights and rows."""
    torch.manual_seed(1)
    return Trainer(cache, Net(cache.schema, MODELS[model].layers), partial(torch.optim.Adagrad, lr=LEARNING_RATE))
