"""A dataset: the sub-datasets and key sets that an extraction made, ready for training."""

from __future__ import annotations

import os
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from tiercache.data.keyset import KeySet, open_key_set
from tiercache.data.manifest import RARE_KEYS, Manifest, dataset_path
from tiercache.data.sample_layout import SampleLayout, key_set_layout
from tiercache.data.sub_dataset import EncodedBatch, SampleMemory, SubDataset
from tiercache.errors import DatasetError
from tiercache.sizes import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.data.block_layout import IdOrder
    from tiercache.schema import Schema
    from tiercache.store.table import Table


class SubDatasetView(Protocol):
    """One sub-dataset: the keys that this rank trains, and all samples."""

    index: int
    samples: int

    @property
    def whole(self) -> SubDataset:
        """The sub-dataset with all its keys."""

    def check_samples(self) -> None:
        """Raise DatasetError if it has a key set but no samples."""

    def span(self, table: str) -> slice:
        """Return the range of local ids, in the whole sub-dataset, of the keys of a table that this rank trains."""

    def rows(self, table: str) -> int:
        """Return the number of keys of a table that this rank trains."""

    def keys(self, table: str) -> NDArray[np.int64]:
        """Return the keys of a table that this rank trains, in hash order."""

    def read(
        self,
        indices: NDArray[np.int64],
        into: SampleMemory | None = None,
        *,
        features: Collection[str] | None = None,
        orders: Sequence[IdOrder] = (),
    ) -> EncodedBatch:
        """Read the samples at ``indices``, in that order, with local ids of the whole sub-dataset."""


class DatasetView(Protocol):
    """The sub-datasets of a training run, with the keys that this rank trains."""

    @property
    def path(self) -> Path:
        """The folder of the dataset."""

    @property
    def schema(self) -> Schema:
        """Its schema, with ``tables``."""

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that this rank trains, in the order of table ids."""

    @property
    def passes(self) -> Sequence[SubDatasetView]:
        """The sub-datasets."""

    @property
    def digest(self) -> str:
        """Hexadecimal digest of the content."""


class PassDataset:
    """A finished dataset. It never changes; equal digests mean equal content."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.path = directory
        self.manifest = manifest
        self.schema = manifest.schema
        self.layout = SampleLayout(manifest.schema)
        self.passes = tuple(SubDataset(directory, i, record, self.layout) for i, record in enumerate(manifest.passes))
        self.tables = manifest.schema.ordered_tables
        """The tables, in the order of table ids."""
        self.samples = sum(one.samples for one in self.passes)
        """Samples of all sub-datasets."""
        self.num_bytes = sum(one.num_bytes() for one in self.passes)
        """Bytes of the files of all sub-datasets."""

    @classmethod
    def of(cls, data: PassDataset | str | os.PathLike[str]) -> PassDataset:
        """Return a dataset unchanged, or open the one at a path. Raises DatasetError for anything else."""
        if isinstance(data, str | os.PathLike):
            return cls.open(data)
        if not hasattr(data, "passes"):
            raise DatasetError(f"data must be a PassDataset or the path of one, not {type(data).__name__}")
        return data

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> PassDataset:
        """Open the dataset in a directory. Raises DatasetError, also if a file is missing or has another size."""
        directory = dataset_path(path)
        manifest = Manifest.read(directory)
        dataset = cls(directory, manifest)
        sizes = {one.path: one.num_bytes() for one in dataset.passes}
        if manifest.rare is not None:
            sizes[directory / RARE_KEYS] = key_set_layout(dataset.tables, manifest.rare.rows).num_bytes
        for file, size in sizes.items():
            if not file.exists():
                raise DatasetError(
                    f"the dataset {directory} lacks {file.name}: delete the dataset and extract it again"
                )
            if file.stat().st_size != size:
                raise DatasetError(
                    f"{file} has {file.stat().st_size} bytes, not {size}: delete the dataset and extract it again"
                )
        return dataset

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digest of the content: columns and keys, table names, sub-datasets and key sets."""
        return self.manifest.digest

    @property
    def blocks(self) -> tuple[range, ...]:
        """For each sub-dataset, the numbers of the blocks of ``write_key_sets`` in it: one if it had no budget."""
        sizes = self.manifest.options.get("blocks", [1] * len(self))
        ends = list(accumulate(sizes))
        return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))

    @property
    def made_by(self) -> str:
        """The function that made it, if that is not an extraction of samples, as errors name it."""
        if any(one.is_recorded for one in self.passes):
            return "tc.record_key_sets"
        has_samples = all(one.has_samples for one in self.passes)
        return "" if has_samples else "tc.extract" if "samples" in self.manifest.options else "tc.write_key_sets"

    @property
    def summary(self) -> str:
        """The number of passes and samples, as text."""
        passes = counted(len(self), "pass", "passes")
        if not all(p.has_samples or p.samples for p in self.passes):
            return f"{passes} of key sets without samples"
        return f"{passes}, {counted(self.samples, 'sample')}"

    def rare_keys(self) -> KeySet | None:
        """Return the keys that were too rare for their own row, with counts; None without ``min_count``."""
        rare = self.manifest.rare
        return None if rare is None else open_key_set(self.path / RARE_KEYS, self.tables, rare)

    def check_schema(self, schema: Schema) -> None:
        """Raise DatasetError unless the dataset was extracted with an equivalent schema.

        Dims, optimizers, initializers and seeds of tables may differ.
        """
        if schema.digest != self.schema.digest:
            raise DatasetError(
                f"the dataset {self.path} was extracted with a different schema{_difference(self.schema, schema)}: "
                "extract again with this schema, or use the schema it was extracted with"
            )

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Read everything and raise DatasetError at the first damaged byte. ``progress(done, total)`` gets bytes."""
        done, total = 0, self.num_bytes

        def add(num_bytes: int) -> None:
            nonlocal done
            done = min(total, done + num_bytes)
            if progress is not None:
                progress(done, total)

        for item in self.passes:
            item.verify(add)
            item.close()
        if (rare := self.rare_keys()) is not None:
            for table in self.tables:
                rare.keys(table.name), rare.counts(table.name)

    def __iter__(self) -> Iterator[SubDataset]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path and the manifest: another process, such as a loader's worker, maps the files itself."""
        return PassDataset, (self.path, self.manifest)

    def __repr__(self) -> str:
        return f"PassDataset({str(self.path)!r}, {len(self)} sub-datasets, {self.samples:,} samples)"


def _difference(old: Schema, new: Schema) -> str:
    for what, before, after in (
        ("label", (old.label, old.labels), (new.label, new.labels)),
        ("dense columns", old.dense, new.dense),
        ("kept columns", old.keep, new.keep),
        ("features", [f.name for f in old.features], [f.name for f in new.features]),
        ("tables", {t.name for t in old.tables}, {t.name for t in new.tables}),
    ):
        if before != after:
            return f" (other {what})"
    for feature, changed in zip(old.features, new.features, strict=True):
        if feature != changed:
            return f" (feature {feature.name!r} is described differently)"
    return ""
