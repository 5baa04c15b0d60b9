"""Datasets from arrays: the slow and obvious definition of the result of an extraction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.data.array_file import ArrayFileWriter
from tiercache.data.dataset import PassDataset
from tiercache.data.manifest import MANIFEST, Manifest, SubDatasetRecord, file_name, new_folder
from tiercache.data.raw_batch import FeatureKeys, RawBatch
from tiercache.data.sample_layout import SampleLayout, column_array
from tiercache.errors import DatasetError
from tiercache.kernels.cpu.hashing import hash_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.schema import Schema


def raw_batch(
    schema: Schema,
    keys: Mapping[str, Any],
    *,
    label: Any = None,
    dense: Any = None,
    weights: Mapping[str, Any] | None = None,
    columns: Mapping[str, Any] | None = None,
) -> RawBatch:
    """Build a batch from plain arrays.

    keys: by feature, (n,) for one key, (n, L) for fixed lists, a sequence of n sequences for ragged ones; weights in
    the same forms. label: (n,). dense: (n, D). columns: by name, (n,) for each kept column.
    """
    features = {}
    for feature in schema.features:
        values, value_weights = keys[feature.name], (weights or {}).get(feature.name)
        offsets = None
        if feature.hotness != "one_hot":
            offsets = np.zeros(len(values) + 1, np.int64)
            np.cumsum([len(row) for row in values], out=offsets[1:])
        features[feature.name] = FeatureKeys(
            _flat(values, offsets, np.int64),
            offsets,
            None if value_weights is None else _flat(value_weights, offsets, np.float32),
        )
    num_samples = len(keys[schema.features[0].name])
    return RawBatch(
        label=None if label is None else np.ascontiguousarray(label, np.float32),
        dense=np.asarray([] if dense is None else dense, np.float32).reshape(num_samples, len(schema.dense)),
        features=features,
        columns={one.name: np.asarray((columns or {})[one.name], one.dtype) for one in schema.kept},
    )


def _flat(values: Any, offsets: NDArray[np.int64] | None, dtype: Any) -> NDArray[Any]:
    if offsets is None or isinstance(values, np.ndarray):
        return np.ascontiguousarray(values, dtype).reshape(-1)
    rows = [np.asarray(row, dtype) for row in values]
    return np.concatenate(rows) if rows else np.empty(0, dtype)


def write_dataset(
    out: str | Path, schema: Schema, passes: Iterable[RawBatch], options: dict[str, Any] | None = None
) -> PassDataset:
    """Write one pass per batch, without closing passes early, dropping rare keys or checking a budget.

    The slow and obvious definition of an extraction's result. Creates ``out`` if it does not exist.
    """
    directory = new_folder(out)
    if (directory / MANIFEST).exists():
        raise DatasetError(f"{directory} holds a dataset already: choose another directory")
    records = [write_sub_dataset(directory, index, schema, batch) for index, batch in enumerate(passes)]
    manifest = Manifest(schema=schema, passes=tuple(records), options=options or {}, inputs=())
    manifest.write(directory)
    return PassDataset.open(directory)


def write_sub_dataset(directory: Path, index: int, schema: Schema, batch: RawBatch) -> SubDatasetRecord:
    """Write the file of one sub-dataset and return its record; the caller writes the manifest."""
    layout = SampleLayout(schema)
    columns: dict[str, NDArray[Any]] = {}
    local: dict[str, NDArray[np.int32]] = {}
    for table in schema.ordered_tables:
        names = [f.name for f in schema.features if f.table == table.name]
        parts = [batch.features[name].keys for name in names]
        all_keys = np.concatenate(parts) if parts else np.empty(0, np.int64)
        keys, inverse, counts = np.unique(all_keys, return_inverse=True, return_counts=True)
        order = np.argsort(hash_keys(keys, table.table_id))
        columns[f"keys.{table.name}"], columns[f"counts.{table.name}"] = keys[order], counts[order]
        positions = np.argsort(order).astype(np.int32)[inverse]
        ends = np.cumsum([part.size for part in parts], dtype=np.int64)[:-1]
        local.update(zip(names, np.split(positions, ends), strict=False))
    if batch.label is not None:
        columns["label"] = batch.label
    columns |= {column_array(name): column for name, column in batch.columns.items()}
    columns |= {"dense": batch.dense, "ids": np.array([local[f.name] for f in schema.singles], np.int32).T}
    for name, feature in batch.features.items():
        columns[f"ids.{name}"] = local[name]
        if feature.offsets is not None:
            columns[f"offsets.{name}"] = feature.offsets
        if feature.weights is not None:
            columns[f"weights.{name}"] = feature.weights
    rows = {table.name: columns[f"keys.{table.name}"].size for table in schema.tables}
    values = {feature.name: local[feature.name].size for feature in layout.ragged}
    file = layout.file(batch.num_samples, rows, values)
    writer = ArrayFileWriter(directory / file_name(index), file)
    for name in file.specs:
        writer.write(name, 0, columns[name])
    return SubDatasetRecord(samples=batch.num_samples, rows=rows, values=values, digest=writer.finish())
