"""The arrays of a sub-dataset, and their order in its file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.data.array_file import ArrayLayout, ArraySpec
from tiercache.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from tiercache.data.manifest import Recording
    from tiercache.data.raw_batch import FeatureKeys, RawBatch
    from tiercache.data.sub_dataset import EncodedBatch
    from tiercache.schema import Feature, Schema
    from tiercache.store.table import Table
    from tiercache.values.ids import FeatureIds


@dataclass(frozen=True, slots=True)
class SampleColumn:
    """One array of samples."""

    name: str
    dtype: type[np.int32] | type[np.float32]
    width: int | None
    """Numbers per sample; None: any number, with offsets."""
    feature: str | None = None
    """The feature of its ids or weights; None for label, dense and the single ids."""

    def shape(self, samples: int, values: int) -> tuple[int, ...]:
        """Return its shape for a number of samples, or of values of lists."""
        if self.width is None:
            return (values,)
        return (samples,) if self.name == "label" else (samples, self.width)


@dataclass(frozen=True)
class SampleLayout:
    """The arrays of samples.

    ``label`` (N,), ``dense`` (N, D), ``ids`` (N, S): the features with one id in the schema's order, adjacent so that a
    shuffled sample costs one memory access and not S. Then for each feature with lists ``ids.NAME``, and for each
    feature with weights ``weights.NAME``: (N, L) for lists of L, (E,) for others, with ``offsets.NAME`` (N + 1,). And
    ``column.NAME`` (N,) for each of several labels and each kept column, in its own dtype.
    """

    schema: Schema

    @cached_property
    def columns(self) -> tuple[SampleColumn, ...]:
        """All arrays except keys, counts and offsets, in the order of the file."""
        columns = []
        if self.schema.label is not None:
            columns.append(SampleColumn("label", np.float32, 1))
        if self.schema.dense:
            columns.append(SampleColumn("dense", np.float32, len(self.schema.dense)))
        if self.schema.singles:
            columns.append(SampleColumn("ids", np.int32, len(self.schema.singles)))
        columns += [SampleColumn(f"ids.{f.name}", np.int32, f.length, f.name) for f in self.schema.lists]
        for f in self.schema.features:
            if f.weights is not None:
                columns.append(
                    SampleColumn(f"weights.{f.name}", np.float32, 1 if f in self.schema.singles else f.length, f.name)
                )
        return tuple(columns)

    @cached_property
    def kept(self) -> tuple[ArraySpec, ...]:
        """The names and dtypes of kept columns, with a shape for one sample. Raises DatasetError without a dtype."""
        for one in self.schema.kept:
            if one.dtype is None:  # only an extraction fills it in
                raise DatasetError(f"the schema has no dtype for the kept column {one.name!r}: set one")
        return tuple(ArraySpec(column_array(one.name), np.dtype(one.dtype), (1,)) for one in self.schema.kept)

    @cached_property
    def ragged(self) -> tuple[Feature, ...]:
        """The features with lists of any length, in the schema's order."""
        return tuple(f for f in self.schema.lists if f.length is None)

    @cached_property
    def blocks(self) -> dict[Any, Any]:
        """The newest `BlockLayout` objects of all sub-datasets."""
        return {}

    def file(
        self,
        samples: int,
        rows: Mapping[str, int],
        values: Mapping[str, int] | None,
        recorded: Recording | None = None,
    ) -> ArrayLayout:
        """Return the file of a sub-dataset.

        rows: unique keys by table. values: ids of all lists, by feature with lists of any length; None: the sub-dataset
        has a key set but no samples. recorded: the batches whose keys it has.
        """
        tables = self.schema.ordered_tables
        if recorded is not None:
            return ArrayLayout([*key_set_arrays(tables, rows), *recorded_arrays(samples, recorded)], _METADATA)
        if values is None:
            return key_set_layout(tables, rows)
        arrays = key_set_arrays(tables, rows)
        arrays += [ArraySpec(f"offsets.{f.name}", np.int64, (samples + 1,)) for f in self.ragged]
        kept = [ArraySpec(one.name, one.dtype, (samples,)) for one in self.kept]
        arrays += [one for one in kept if one.dtype.itemsize == 8]
        arrays += [ArraySpec(c.name, c.dtype, c.shape(samples, values.get(c.feature or "", 0))) for c in self.columns]
        for size in (4, 2, 1):  # wider ones first: all are aligned
            arrays += [one for one in kept if one.dtype.itemsize == size]
        names = {"ids": [f.name for f in self.schema.singles], "dense": [d.column for d in self.schema.dense]}
        return ArrayLayout(arrays, _METADATA | {name: json.dumps(columns) for name, columns in names.items()})

    def parts(
        self, samples: RawBatch | EncodedBatch, lists: Mapping[str, FeatureKeys | FeatureIds],
        ids: Mapping[str, NDArray[np.int32]], row: int, values: dict[str, int],
    ) -> Iterator[tuple[str, int, NDArray[Any]]]:  # fmt: skip
        """Yield the parts of arrays, but for single ids, that some samples are: array, first row, and rows.

        lists: by feature. ids: by feature, flat. row: the samples before. values: as for `file`, the ids of lists
        before these; those of the samples are added. The first offset, 0, is nobody's.
        """
        if samples.label is not None:
            yield "label", row, samples.label
        if self.schema.dense:
            yield "dense", row, samples.dense
        for name, column in samples.columns.items():
            yield column_array(name), row, column
        for feature in self.schema.features:
            name, entry, at = feature.name, lists[feature.name], values.get(feature.name, row)
            if name in values:
                assert entry.offsets is not None
                yield f"offsets.{name}", row + 1, entry.offsets[1:] + at
                values[name] += ids[name].size
            if feature.hotness != "one_hot":
                yield f"ids.{name}", at, ids[name]
            if entry.weights is not None:
                yield f"weights.{name}", at, entry.weights


def column_array(name: str) -> str:
    """Return the name of the array of a kept column."""
    return f"column.{name}"


_METADATA: dict[str, Any] = {"format": "tiercache sub-dataset 2"}


def key_set_arrays(tables: Iterable[Table], rows: Mapping[str, int]) -> list[ArraySpec]:
    """Return the arrays of a key set: for each table ``keys.NAME`` in hash order and ``counts.NAME``."""
    return [ArraySpec(f"{what}.{t.name}", np.int64, (rows[t.name],)) for t in tables for what in ("keys", "counts")]


def recorded_arrays(samples: int, recorded: Recording) -> list[ArraySpec]:
    """Return the arrays of recorded batches.

    ``ends`` (B,): the end of each batch, in samples. ``lookups`` (B + 1,): the start of each batch's digests in
    ``digests`` (E,). ``indices`` (N,): the samples in the loader's dataset, if it has indices.
    """
    arrays = [
        ArraySpec("ends", np.int64, (recorded.batches,)),
        ArraySpec("lookups", np.int64, (recorded.batches + 1,)),
        ArraySpec("digests", np.uint64, (recorded.lookups,)),
    ]
    if recorded.dataset_length is not None:
        arrays.append(ArraySpec("indices", np.int64, (samples,)))
    return arrays


def key_set_layout(tables: Iterable[Table], rows: Mapping[str, int]) -> ArrayLayout:
    """Return the file of a key set alone; tables in the order of table ids."""
    return ArrayLayout(key_set_arrays(tables, rows), _METADATA)
