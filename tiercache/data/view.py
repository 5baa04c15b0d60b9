"""What training needs of a dataset: a `PassDataset` has it, and so does what one rank owns of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.data.dataset import SubDataset
    from tiercache.data.encoded_batch import EncodedBatch, SampleBuffers
    from tiercache.schema import Schema
    from tiercache.store.table import Table


class SubDatasetView(Protocol):
    """One sub-dataset with the keys that are trained here, and all its samples."""

    index: int
    samples: int

    @property
    def whole(self) -> SubDataset:
        """The sub-dataset with all its keys."""
        ...

    def check_samples(self) -> None:
        """Raise DatasetError where it has a key set alone."""
        ...

    def span(self, table: str) -> slice:
        """Return the local ids, in the whole sub-dataset, of the keys of a table that are trained here."""
        ...

    def rows(self, table: str) -> int:
        """Return how many keys of a table are trained here."""
        ...

    def keys(self, table: str) -> NDArray[np.int64]:
        """Return the keys of a table that are trained here, in hash order."""
        ...

    def read(
        self,
        indices: NDArray[np.int64],
        into: SampleBuffers | None = None,
        *,
        features: Collection[str] | None = None,
    ) -> EncodedBatch:
        """Read the samples at ``indices``, in their order, with local ids of the whole sub-dataset."""
        ...


class DatasetView(Protocol):
    """The sub-datasets of a training, with the keys that are trained here."""

    @property
    def path(self) -> Path:
        """The folder of the dataset."""
        ...

    @property
    def schema(self) -> Schema:
        """Its schema, with ``tables``."""
        ...

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that are trained here, in the order of table ids."""
        ...

    @property
    def passes(self) -> Sequence[SubDatasetView]:
        """The sub-datasets."""
        ...

    @property
    def digest(self) -> str:
        """Hexadecimal digest of the content."""
        ...
