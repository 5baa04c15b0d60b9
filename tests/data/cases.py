"""Schemas and data shared by the tests of extraction."""

from __future__ import annotations

from decimal import Decimal
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import tiercache as tc
from tests.datasets import raw_batch, write_dataset
from tiercache.data.extract import extract
from tiercache.schema import Schema

if TYPE_CHECKING:
    from pathlib import Path

    from tiercache.data.dataset import PassDataset
    from tiercache.data.raw_batch import RawBatch

ROW_BYTES = 4 * 4 + 24
"""Device bytes of a row of ``table``."""


def table(name: str, dim: int = 4) -> tc.Table:
    """Return a table with rows of ``ROW_BYTES`` on the device."""
    return tc.Table(name=name, dim=dim, optimizer=tc.optim.SGD(learning_rate=1.0), initializer=tc.init.Zeros())


def plain_schema(**changes: Any) -> Schema:
    """Return a schema of one integer feature ``a`` with a label ``y``."""
    values: dict[str, Any] = {"label": "y", "features": (tc.Feature(name="a"),), "tables": (table("a"),)}
    return Schema(**{**values, **changes})


def rich_schema() -> Schema:
    """Return a schema with every kind of feature, two groups, a shared table, weights and kept columns."""
    return Schema(
        label="y",
        dense=(tc.DenseFeature(column="d0"), tc.DenseFeature(column="d1")),
        features=(
            tc.Feature(name="a"),
            tc.Feature(name="pair", hotness="multi_hot", length=2, table="b", weights="pair_w"),
            tc.Feature(name="tags", hotness="ragged", table="a", weights="tags_w"),
            tc.Feature(name="b", weights="b_w"),
        ),
        tables=(table("a"), table("b", dim=8), table("unused")),
        keep=(tc.KeptColumn(column="group", dtype="int16"), tc.KeptColumn(column="y", name="raw_y", dtype="int64")),
    )


def rich_columns(num_samples: int, seed: int = 0) -> dict[str, Any]:
    """Return random columns for ``rich_schema``: arrays, and lists of lists for lists."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 4, num_samples)
    return {
        "y": random.integers(0, 2, num_samples),
        "d0": random.random(num_samples, dtype=np.float32),
        "d1": random.random(num_samples, dtype=np.float32),
        "a": random.zipf(1.3, num_samples).clip(max=1 << 40),
        "pair": random.integers(-500, 500, (num_samples, 2)),
        "pair_w": random.random((num_samples, 2), dtype=np.float32),
        "tags": [random.integers(0, 300, n).tolist() for n in lengths],
        "tags_w": [random.random(n, dtype=np.float32).tolist() for n in lengths],
        "b": random.integers(0, 2000, num_samples),
        "b_w": random.random(num_samples, dtype=np.float32),
        "group": random.integers(-(1 << 15), 1 << 15, num_samples).astype(np.int16),
    }


def arrow(columns: dict[str, Any]) -> pa.Table:
    """Return the columns as an Arrow table."""
    arrays = {name: pa.array(v.tolist() if getattr(v, "ndim", 1) == 2 else v) for name, v in columns.items()}
    return pa.table(arrays)


def write_parquet(folder: Path, columns: dict[str, Any], bounds: list[int]) -> list[Path]:
    """Write rows [bounds[i], bounds[i + 1]) of the columns to one file each, with small row groups."""
    whole, paths = arrow(columns), []
    for i, (low, high) in enumerate(pairwise(bounds)):
        paths.append(folder / f"part-{i}.parquet")
        pq.write_table(whole.slice(low, high - low), paths[-1], row_group_size=700)
    return paths


def key_batch(schema: Schema, columns: dict[str, Any], low: int, high: int) -> RawBatch:
    """Return rows [low, high) of integer columns as a batch of keys."""
    part = {name: values[low:high] for name, values in columns.items()}
    return raw_batch(
        schema,
        {f.name: part[f.columns[0]] for f in schema.features},
        label=part[schema.label] if schema.label else None,
        dense=np.stack([part[d.column] for d in schema.dense], axis=1) if schema.dense else None,
        weights={f.name: part[f.weights] for f in schema.features if f.weights},
        columns={one.name: part[one.column] for one in schema.kept},
    )


def reference(out: Path, schema: Schema, columns: dict[str, Any], bounds: list[int]) -> PassDataset:
    """Write the obvious dataset whose passes are rows [bounds[i], bounds[i + 1])."""
    batches = [key_batch(schema, columns, a, b) for a, b in pairwise(bounds)]
    return write_dataset(out, schema, batches)


def extracted(data: Any, schema: Schema | None, out: Path, **options: Any) -> PassDataset:
    """Extract quietly, by default with a budget that holds everything."""
    return extract(data, schema, out, **{"device_budget": "1GiB", "progress": False, **options})


def bounds_of(dataset: PassDataset) -> list[int]:
    """Return the start of each pass of a set in its data, and the end."""
    return [0, *np.cumsum([p.samples for p in dataset]).tolist()]


class Jagged:
    """The interface of torchrec's JaggedTensor."""

    def __init__(self, values: list[int], offsets: list[int], weights: list[float] | None = None) -> None:
        self.parts = torch.tensor(values), torch.tensor(offsets), None if weights is None else torch.tensor(weights)

    def values(self) -> torch.Tensor:
        return self.parts[0]

    def offsets(self) -> torch.Tensor:
        """Starts of samples, and the end."""
        return self.parts[1]

    def weights(self) -> torch.Tensor:
        """A weight for each value, if there are any."""
        assert self.parts[2] is not None
        return self.parts[2]

    def weights_or_none(self) -> torch.Tensor | None:
        """A weight for each value, or None."""
        return self.parts[2]


class KeyedJagged(Jagged):
    """The interface of torchrec's KeyedJaggedTensor."""

    def __init__(self, **features: Jagged) -> None:
        self.features = features

    def keys(self) -> list[str]:
        return list(self.features)

    def values(self) -> torch.Tensor:
        return torch.cat([one.values() for one in self.features.values()])

    def to_dict(self) -> dict[str, Jagged]:
        return self.features


def decimals(*values: Any, precision: int = 38, scale: int = 0, make: Any = pa.decimal128) -> Any:
    """Return decimals as an Arrow array."""
    return pa.array([None if value is None else Decimal(value) for value in values], make(precision, scale))
