"""A dataset: the sub-datasets and key sets that an extraction made, ready for training."""

from __future__ import annotations

import contextlib
import hashlib
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tiercache.data.keyset import KeySet
from tiercache.data.manifest import MANIFEST, RARE_KEYS, Manifest, SubDatasetRecord, keys_name, samples_name
from tiercache.data.sample_layout import SampleLayout
from tiercache.data.samples_file import SamplesFile
from tiercache.errors import DatasetError
from tiercache.kernels.cpu.gathering import check_ids

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from numpy.typing import NDArray

    from tiercache.data.encoded_batch import SampleBuffers, Samples
    from tiercache.schema import Schema
    from tiercache.store.table import Table

__all__ = ["NO_SAMPLES", "PassDataset", "SubDataset", "record_sub_dataset"]

NO_SAMPLES = ""
"""What stands for the digest of the samples of a sub-dataset that has a key set alone."""


class SubDataset:
    """A sub-dataset: its samples and its key set, mapped, each opened at first use and held until ``close``.

    A sub-dataset of ``write_key_sets`` has a key set alone. Damaged files raise DatasetError: a key set by its digest,
    when it is first opened; samples by their number, when they are opened, and by the offsets and ids of each read.
    """

    def __init__(self, directory: Path, index: int, record: SubDatasetRecord, layout: SampleLayout) -> None:
        self.index = index
        """Its place in the dataset."""
        self.samples = record.samples
        """How many samples it has."""
        self.digest = record.digest
        """Over all its content."""
        self._record = record
        self._directory = directory
        self._layout = layout
        self._samples_file: SamplesFile | None = None
        self._key_set: KeySet | None = None
        self._is_checked = False

    @property
    def key_set(self) -> KeySet:
        """Its unique keys, mapped."""
        if self._key_set is None:
            with self._named():
                key_set = KeySet(self._directory / keys_name(self.index), self._layout.schema.ordered_tables)
            if not self._is_checked:
                self._check(key_set)
                self._is_checked = True
            self._key_set = key_set
        return self._key_set

    @property
    def samples_file(self) -> SamplesFile:
        """Its samples, mapped. Raises DatasetError where there is none."""
        if not self.has_samples:
            raise DatasetError(
                f"sub-dataset {self.index} of {self._directory} has a key set and no samples: give the keys of each "
                "batch to Pass.batch"
            )
        if self._samples_file is None:
            with self._named():
                file = SamplesFile(self._directory / samples_name(self.index), self._layout)
            if file.num_samples != self.samples:
                raise DatasetError(
                    f"sub-dataset {self.index}: {file.path} has {file.num_samples:,} samples, and {MANIFEST} says "
                    f"{self.samples:,}: extract the dataset again"
                )
            self._samples_file = file
        return self._samples_file

    @property
    def whole(self) -> SubDataset:
        """Itself: it has all keys."""
        return self

    def span(self, table: str) -> slice:
        """Return the local ids of a table: all of them are trained."""
        return slice(0, self.rows(table))

    @property
    def has_samples(self) -> bool:
        """Whether it has samples; opens nothing."""
        return samples_name(self.index) in self._record.sizes

    def check_samples(self) -> None:
        """Raise DatasetError where it has a key set alone, or samples that cannot be read."""
        _ = self.samples_file

    def rows(self, table: str) -> int:
        """Return the number of unique keys of a table; opens nothing."""
        return self._record.rows[table]

    def keys(self, table: str) -> NDArray[np.int64]:
        """Return the unique keys of a table in hash order: mapped, read-only."""
        return self.key_set.keys(table)

    def counts(self, table: str) -> NDArray[np.int64]:
        """Return how often each of ``keys(table)`` occurs in the sub-dataset: mapped, read-only."""
        return self.key_set.counts(table)

    def read(
        self,
        indices: NDArray[np.int64],
        into: SampleBuffers | None = None,
        *,
        features: Collection[str] | None = None,
    ) -> Samples:
        """Read the samples at ``indices``, in their order (``SamplesFile.read``).

        Raises DatasetError for an id that is no place in the key set of its table.
        """
        file = self.samples_file
        with self._named():
            samples = file.read(indices, into, features=features)
        self._check_ids(samples, file.path)
        return samples

    def prefetch(self) -> None:
        """Ask the kernel to read the samples ahead; returns at once."""
        self.samples_file.prefetch()

    def close(self) -> None:
        """Let go of the mapped files; they go when no array looks into them, and come back at the next use."""
        self._samples_file = self._key_set = None

    def num_bytes(self) -> int:
        """Return the bytes of its files."""
        return sum(self._record.sizes.values())

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Have errors of its files begin with its name."""
        try:
            yield
        except DatasetError as error:
            raise DatasetError(f"sub-dataset {self.index}: {error}") from error

    def _check(self, key_set: KeySet) -> None:
        """Raise DatasetError for a key set that is not what was extracted."""
        for table, rows in self._record.rows.items():
            if key_set.rows(table) != rows:
                raise DatasetError(
                    f"sub-dataset {self.index}: the key set {key_set.path} has {key_set.rows(table):,} keys of table "
                    f"{table!r}, and {MANIFEST} says {rows:,}: extract the dataset again"
                )
        samples = self._record.samples_digest if self.has_samples else NO_SAMPLES
        seen = _sub_dataset_digest(self.samples_file.digest() if samples is None else samples, key_set)
        if seen != self.digest:
            either = "" if samples is not None else " or its samples"
            raise DatasetError(
                f"sub-dataset {self.index}: the key set {key_set.path}{either} is not what was extracted (the digest "
                f"of the sub-dataset is {seen[:8]}, and {self.digest[:8]} was written): extract the dataset again"
            )

    def _check_ids(self, samples: Samples, path: Path) -> None:
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
                    f"sub-dataset {self.index}: feature {feature.name!r} has the id {ids[bad]} in {path}, and table "
                    f"{feature.table!r} has ids 0 to {limit - 1}: extract the dataset again"
                )


class PassDataset:
    """A finished dataset. It is never changed; equal digests mean equal content."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.path = directory
        self.manifest = manifest
        self.schema = manifest.schema
        self.layout = SampleLayout(manifest.schema)
        """The order of columns; ``layout.singles`` is that of ``Samples.singles``."""
        self.passes = tuple(SubDataset(directory, i, record, self.layout) for i, record in enumerate(manifest.passes))

    @classmethod
    def open(cls, path: str | Path) -> PassDataset:
        """Open the dataset in a directory.

        Checks that every file is there with its size, and reads no content. Raises DatasetError.
        """
        directory = Path(path)
        manifest = Manifest.read(directory)
        sizes = {name: size for record in manifest.passes for name, size in record.sizes.items()}
        if manifest.rare_bytes is not None:
            sizes[RARE_KEYS] = manifest.rare_bytes
        for name, size in sizes.items():
            file = directory / name
            if not file.exists():
                raise DatasetError(f"the dataset {directory} lacks {name}: extract it again")
            if file.stat().st_size != size:
                raise DatasetError(f"{file} has {file.stat().st_size} bytes, not {size}: extract the dataset again")
        return cls(directory, manifest)

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digest of the content: columns and keys, table names, sub-datasets and key sets."""
        return self.manifest.digest

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables, in the order of table ids."""
        return self.schema.ordered_tables

    @property
    def samples(self) -> int:
        """Samples of all sub-datasets."""
        return sum(p.samples for p in self.passes)

    def rare_keys(self) -> KeySet | None:
        """Return the keys that were too rare for a row of their own, with counts; None where none was asked for."""
        return None if self.manifest.rare_bytes is None else KeySet(self.path / RARE_KEYS, self.tables)

    def check_schema(self, schema: Schema) -> None:
        """Raise DatasetError unless the set was extracted with a schema of the same meaning.

        Dims, optimizers, initializers and seeds of tables may differ.
        """
        if schema.digest != self.schema.digest:
            raise DatasetError(
                f"the dataset {self.path} was extracted with another schema{_difference(self.schema, schema)}: "
                "extract again with this schema, or use the one it was extracted with"
            )

    def verify(self) -> None:
        """Read everything and raise DatasetError for the first sub-dataset whose content is not what was extracted."""
        for item in self.passes:
            samples = item.samples_file.digest() if item.has_samples else NO_SAMPLES
            if _sub_dataset_digest(samples, item.key_set) != item.digest:
                raise DatasetError(f"sub-dataset {item.index} of {self.path} was changed: extract the dataset again")

    def __iter__(self) -> Iterator[SubDataset]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def __repr__(self) -> str:
        return f"PassDataset({str(self.path)!r}, {len(self)} sub-datasets, {self.samples:,} samples)"


def record_sub_dataset(samples: int, samples_digest: str, key_set: KeySet, *paths: Path) -> SubDatasetRecord:
    """Return what a manifest says of a sub-dataset whose samples have this digest and whose files are ``paths``."""
    return SubDatasetRecord(
        samples=samples,
        rows={table.name: key_set.rows(table.name) for table in key_set.tables},
        digest=_sub_dataset_digest(samples_digest, key_set),
        sizes={path.name: path.stat().st_size for path in paths},
        samples_digest=samples_digest,
    )


def _sub_dataset_digest(samples_digest: str, key_set: KeySet) -> str:
    return hashlib.sha256(f"{samples_digest}\0{key_set.digest()}".encode()).hexdigest()


def _difference(old: Schema, new: Schema) -> str:
    for what, mine, yours in (
        ("label", old.label, new.label),
        ("dense columns", old.dense, new.dense),
        ("features", [f.name for f in old.features], [f.name for f in new.features]),
        ("tables", {t.name for t in old.tables}, {t.name for t in new.tables}),
    ):
        if mine != yours:
            return f" (other {what})"
    for before, after in zip(old.features, new.features, strict=True):
        if before != after:
            return f" (feature {before.name!r} is described otherwise)"
    return ""
