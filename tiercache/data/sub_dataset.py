"""A sub-dataset: the samples of one pass and their key set, in one mapped file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.data.array_file import ArrayFile
from tiercache.data.keyset import KeySet
from tiercache.data.manifest import file_name
from tiercache.data.recorded_batches import RecordedBatches
from tiercache.errors import DatasetError
from tiercache.kernels.cpu.gathering import check_ids
from tiercache.kernels.cpu.samples import gather_columns, gather_lists, gather_offsets, gather_rows
from tiercache.values.ids import FeatureIds

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from numpy.typing import DTypeLike, NDArray

    from tiercache.data.array_file import ArraySpec
    from tiercache.data.manifest import SubDatasetRecord
    from tiercache.data.sample_layout import SampleColumn, SampleLayout


@dataclass(frozen=True, slots=True, eq=False)
class EncodedBatch:
    """n samples. Arrays may be views of one another and of the buffers that they were read into."""

    label: NDArray[np.float32] | None
    """(n,); None where the schema has no label."""
    dense: NDArray[np.float32]
    """(n, D), D may be 0."""
    singles: NDArray[np.int32]
    """(S, n), contiguous: the features with one id that were read, in the order of ``SampleLayout.singles``, so that
    those of one group of tables are neighbors. ``ids`` has its rows."""
    ids: dict[str, FeatureIds]
    """The ids of every feature that was read, by its name."""
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    """(n,) each: several labels and kept columns in their own dtype, by name."""

    @property
    def num_samples(self) -> int:
        """N."""
        return int(self.dense.shape[0])


class SampleBuffers:
    """Memory that reads reuse, so that a batch touches no new pages.

    A batch read into it is valid until the next read into it. Not for use by two threads at once.
    """

    def __init__(self, allocate: Callable[[int, Any], NDArray[Any]] = np.empty) -> None:
        """``allocate(size, dtype)`` returns uninitialized memory, flat."""
        self._allocate, self._flat = allocate, dict[str, Any]()

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(int(flat.nbytes) for flat in self._flat.values())

    def array(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialized C-contiguous array, which replaces the last one of this name."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.size < size or flat.dtype != dtype:
            flat = self._flat[name] = self._allocate(size + (size >> 3), dtype)
        return flat[:size].reshape(shape)


class SubDataset:
    """The samples and the key set of a pass, mapped at first use until ``close``.

    A sub-dataset of ``write_key_sets`` has a key set and no samples. Each MiB of the file is checked when it is first
    read; a damaged one raises DatasetError. Any number of threads may read at once, each into its own buffers.
    """

    def __init__(self, directory: Path, index: int, record: SubDatasetRecord, layout: SampleLayout) -> None:
        self.index = index
        """Its position in the dataset."""
        self.samples = record.samples
        """The number of samples."""
        self.digest = record.digest
        """Hexadecimal digest of all its content."""
        self.path = directory / file_name(index)
        self._record, self._layout = record, layout
        self.schema = layout.schema
        """The schema of its dataset."""
        self._arrays = layout.file(record.samples, record.rows, record.values, record.recorded)
        self._opened: ArrayFile | None = None

    @property
    def whole(self) -> SubDataset:
        """Itself: it has all keys."""
        return self

    def span(self, table: str) -> slice:
        """Return the range of local ids of a table: all of them."""
        return slice(0, self.rows(table))

    @property
    def has_samples(self) -> bool:
        """True unless it has a key set alone; opens nothing."""
        return self._record.values is not None

    def num_bytes(self) -> int:
        """Return the bytes of its file."""
        return self._arrays.num_bytes

    def check_samples(self) -> None:
        """Raise DatasetError if it has no samples, or its file cannot be opened."""
        if self._record.recorded is not None:
            raise DatasetError(
                f"sub-dataset {self.index} of {self.path.parent} has the key set of a loader, whose samples are in "
                "your own dataset: take its batches from p.loader(dataset)"
            )
        if not self.has_samples:
            raise DatasetError(
                f"sub-dataset {self.index} of {self.path.parent} has a key set and no samples: give the keys of each "
                "batch to Pass.batch"
            )
        _ = self._file

    def rows(self, table: str) -> int:
        """Return the number of unique keys of a table; opens nothing."""
        return self._record.rows[table]

    def keys(self, table: str) -> NDArray[np.int64]:
        """Return the unique keys of a table in hash order: mapped, read-only."""
        return self.key_set.keys(table)

    def counts(self, table: str) -> NDArray[np.int64]:
        """Return how often each of ``keys(table)`` occurs in the sub-dataset: mapped, read-only."""
        return self.key_set.counts(table)

    @property
    def is_recorded(self) -> bool:
        """True if its key set is of the batches of a loader; opens nothing."""
        return self._record.recorded is not None

    @cached_property
    def recorded(self) -> RecordedBatches:
        """The batches of a loader that its key set is of. Raises DatasetError if its keys were not recorded."""
        if self._record.recorded is None:
            raise DatasetError(
                f"sub-dataset {self.index} of {self.path.parent} does not know the samples of your dataset that it is "
                "of: make the dataset with tc.record_key_sets, or train p.batches() where samples were extracted"
            )
        return RecordedBatches(lambda: self._file, self._record.recorded)

    @property
    def key_set(self) -> KeySet:
        """Its unique keys, mapped."""
        return KeySet(self._file)

    def read(
        self, indices: NDArray[np.int64], into: SampleBuffers | None = None, *, features: Collection[str] | None = None
    ) -> EncodedBatch:
        """Read the samples at ``indices`` (n,), in that order; an index may repeat.

        features: the features whose ids are read; None: all. The arrays are new, or lie in ``into`` and are valid until
        the next read into it. Raises IndexError for an index below 0 or past the last sample, and DatasetError for
        damage and for an id outside the key set of its table.
        """
        self.check_samples()
        indices = np.ascontiguousarray(indices, dtype=np.int64)
        if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= self.samples):
            raise IndexError(
                f"samples {indices.min()} .. {indices.max()} were asked for, but sub-dataset {self.index} has "
                f"{self.samples}: indices start at 0"
            )
        reading = _Reading(self._file, self._layout, indices, SampleBuffers() if into is None else into, features)
        samples = reading.samples()
        self._check_ids(samples)
        return samples

    def num_values(self, feature: str, low: int, high: int) -> int:
        """Return the number of ids of samples [low, high) for a feature with lists of any length."""
        name = f"offsets.{feature}"
        self._file.check(name, np.array([low, high]), np.array([low + 1, high + 1]))
        first, last = self._file.array(name)[[low, high]].tolist()
        return int(last - first)

    def prefetch(self) -> None:
        """Ask the kernel to read the file ahead; returns at once."""
        self._file.prefetch()

    def verify(self, progress: Callable[[int], None] | None = None) -> None:
        """Read every byte and raise DatasetError at the first damaged one. ``progress`` is called with bytes."""
        self._file.check_all(progress)

    def close(self) -> None:
        """Release the mapped file; the next use maps it again. Arrays that look into it keep it alive."""
        self._opened = None

    @property
    def _file(self) -> ArrayFile:
        if self._opened is None:
            self._opened = ArrayFile(self.path, self._arrays, self.digest, f"sub-dataset {self.index}: ")
        return self._opened

    def _check_ids(self, samples: EncodedBatch) -> None:
        singles = [feature for feature in self._layout.singles if feature.name in samples.ids]
        parts = [(singles, samples.singles.reshape(-1))]  # in one call: there may be many
        lists = (feature for feature in self._layout.schema.lists if feature.name in samples.ids)
        parts += [([feature], samples.ids[feature.name].ids) for feature in lists]
        for features, ids in parts:
            each = ids.size // max(1, len(features))
            limits = np.array([self.rows(feature.table) for feature in features], np.int64)
            bad = check_ids(ids, np.arange(limits.size + 1) * each, limits)
            if bad >= 0:
                feature, limit = features[bad // each], int(limits[bad // each])
                raise DatasetError(
                    f"sub-dataset {self.index}: feature {feature.name!r} has the id {ids[bad]} in {self.path}, and "
                    f"table {feature.table!r} has ids 0 to {limit - 1}: delete the dataset and extract it again"
                )


class _Reading:
    """One read of samples."""

    def __init__(
        self,
        file: ArrayFile,
        layout: SampleLayout,
        indices: NDArray[np.int64],
        buffers: SampleBuffers,
        features: Collection[str] | None,
    ) -> None:
        self._file, self._layout, self._indices, self._buffers, self._features = (
            file, layout, indices, buffers, features,
        )  # fmt: skip
        self._fixed: dict[str, NDArray[Any]] = {}

    def samples(self) -> EncodedBatch:
        """Read them."""
        for column in self._layout.columns:
            if column.width is not None and column.name != "ids" and self._is_selected(column):
                out = self._buffers.array(column.name, (self._indices.size, column.width), np.int32)
                gather_rows(self._words(column.name), self._indices, out)
                self._fixed[column.name] = out.view(column.dtype)
        ids, singles = self._singles()
        for feature in self._layout.schema.lists:
            if self._features is None or feature.name in self._features:
                ids[feature.name] = self._list(feature.name, feature.length)
        label = self._fixed["label"].reshape(-1) if "label" in self._fixed else None
        dense = self._fixed.get("dense", np.empty((self._indices.size, 0), np.float32))
        ordered = {f.name: ids[f.name] for f in self._layout.schema.features if f.name in ids}
        columns = {
            one.name: self._column(spec) for one, spec in zip(self._layout.schema.kept, self._layout.kept, strict=True)
        }
        return EncodedBatch(label=label, dense=dense, singles=singles, ids=ordered, columns=columns)

    def _column(self, spec: ArraySpec) -> NDArray[Any]:
        """Return a kept column, after checking its rows at the indices."""
        self._file.check(spec.name, self._indices, self._indices + 1)
        out = self._buffers.array(spec.name, (self._indices.size,), spec.dtype)
        np.take(self._file.array(spec.name), self._indices, out=out, mode="clip")  # "raise" would copy once more
        return out

    def _is_selected(self, column: SampleColumn) -> bool:
        return self._features is None or column.feature is None or column.feature in self._features

    def _words(self, name: str) -> NDArray[np.int32]:
        """Return an array as words, after checking its rows at the indices."""
        self._file.check(name, self._indices, self._indices + 1)
        return self._file.array(name).reshape(-1).view(np.int32)

    def _singles(self) -> tuple[dict[str, FeatureIds], NDArray[np.int32]]:
        selected, columns = self._layout.singles, self._layout.single_columns
        if self._features is not None:
            chosen = [i for i, feature in enumerate(selected) if feature.name in self._features]
            selected, columns = tuple(selected[i] for i in chosen), columns[chosen]
        singles = self._buffers.array("ids", (len(selected), self._indices.size), np.int32)
        if selected:
            gather_columns(self._words("ids"), self._indices, len(self._layout.singles), columns, singles)
        ids = {}
        for row, feature in zip(singles, selected, strict=True):
            weights = self._fixed.get(f"weights.{feature.name}")
            ids[feature.name] = FeatureIds(row, None, None if weights is None else weights.reshape(-1))
        return ids, singles

    def _list(self, name: str, length: int | None) -> FeatureIds:
        size, weights_name = self._indices.size, f"weights.{name}"
        offsets = self._buffers.array(f"offsets.{name}", (size + 1,), np.int64)
        if length is not None:
            offsets[:] = np.arange(0, (size + 1) * length, length)
            fixed = self._fixed.get(weights_name)
            return FeatureIds(
                self._fixed[f"ids.{name}"].reshape(-1), offsets, None if fixed is None else fixed.reshape(-1)
            )
        begins = self._buffers.array("begins", (size,), np.int64)
        values = self._file.array(f"ids.{name}")
        self._file.check(f"offsets.{name}", self._indices, self._indices + 2)
        bad = gather_offsets(self._file.array(f"offsets.{name}"), values.size, self._indices, begins, offsets)
        if bad >= 0:
            sample = int(self._indices[bad])
            first, last = self._file.array(f"offsets.{name}")[sample : sample + 2]
            raise DatasetError(
                f"{self._file.label}feature {name!r} of sample {sample} in {self._file.path} has the values {first} to "
                f"{last}, and there are {values.size}: delete the dataset and extract it again"
            )
        gathered = {}
        for array in (f"ids.{name}", weights_name):
            if array in self._file.layout.specs:
                self._file.check(array, begins, begins + np.diff(offsets))
                gathered[array] = self._buffers.array(array, (int(offsets[-1]),), np.int32)
                gather_lists(self._file.array(array).view(np.int32), begins, offsets, gathered[array])
        weights = gathered[weights_name].view(np.float32) if weights_name in gathered else None
        return FeatureIds(gathered[f"ids.{name}"], offsets, weights)
