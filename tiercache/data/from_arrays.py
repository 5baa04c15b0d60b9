"""Datasets from arrays in memory: for tests, notebooks and small data. Not for data larger than memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.data.dataset import PassDataset, record_sub_dataset
from tiercache.data.encoded_batch import FeatureIds, Samples
from tiercache.data.keyset import KeySet, in_hash_order, write_key_set
from tiercache.data.manifest import MANIFEST, Manifest, keys_name, samples_name
from tiercache.data.sample_layout import SampleLayout
from tiercache.data.samples_file import SamplesFile
from tiercache.data.samples_writer import SamplesWriter
from tiercache.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from tiercache.data.manifest import SubDatasetRecord
    from tiercache.data.raw_batch import RawBatch
    from tiercache.schema import Schema

__all__ = ["write_dataset", "write_sub_dataset"]


def write_dataset(
    out: str | Path, schema: Schema, passes: Iterable[RawBatch], options: dict[str, Any] | None = None
) -> PassDataset:
    """Write one pass per batch, as given: nothing is closed early, no key is too rare, no budget is checked.

    The slow and obvious definition of an extraction's result. ``out`` is made where it does not exist.
    """
    directory = Path(out)
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / MANIFEST).exists():
        raise DatasetError(f"{directory} holds a dataset already: choose another directory")
    records = [write_sub_dataset(directory, index, schema, batch) for index, batch in enumerate(passes)]
    manifest = Manifest(schema=schema, passes=tuple(records), options=options or {}, inputs=())
    manifest.write(directory)
    return PassDataset.open(directory)


def write_sub_dataset(directory: Path, index: int, schema: Schema, batch: RawBatch) -> SubDatasetRecord:
    """Write the two files of one pass and return its record; the manifest is the caller's."""
    layout = SampleLayout(schema)
    columns: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    local: dict[str, NDArray[np.int32]] = {}
    for table in schema.ordered_tables:
        names = [f.name for f in schema.features if f.table == table.name]
        parts = [batch.features[name].keys for name in names]
        all_keys = np.concatenate(parts) if parts else np.empty(0, np.int64)
        keys, inverse, counts = np.unique(all_keys, return_inverse=True, return_counts=True)
        order = in_hash_order(keys, table)
        columns.append((keys[order], counts[order].astype(np.int64)))
        positions = np.argsort(order).astype(np.int32)[inverse]
        ends = np.cumsum([part.size for part in parts], dtype=np.int64)[:-1]
        local.update(zip(names, np.split(positions, ends), strict=False))
    ids = {name: FeatureIds(local[name], feature.offsets, feature.weights) for name, feature in batch.features.items()}
    samples_path, keys_path = directory / samples_name(index), directory / keys_name(index)
    writer = SamplesWriter(samples_path, layout)
    writer.append(Samples(batch.label, batch.dense, np.empty((0, batch.num_samples), np.int32), ids))
    writer.finish()
    write_key_set(keys_path, schema.ordered_tables, columns)
    key_set = KeySet(keys_path, schema.ordered_tables)
    return record_sub_dataset(
        batch.num_samples, SamplesFile(samples_path, layout).digest(), key_set, samples_path, keys_path
    )
