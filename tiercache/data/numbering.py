"""The open pass: keys get numbers in the order in which they appear, and numbered samples stream to a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.data.encoded_batch import FeatureIds, Samples
from tiercache.data.samples_writer import SamplesWriter
from tiercache.kernels.cpu.key_to_index import KeyToIndex

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.data.raw_batch import RawBatch
    from tiercache.data.sample_layout import SampleLayout
    from tiercache.store.table import Table

__all__ = ["OpenPass"]

_FIRST_ROOM = 1 << 12
_ROOM_BYTES = 24
"""Bytes that KeyToIndex holds for each key it has room for, where that room is a power of 2."""
_GROWING_BYTES = 8
"""Bytes more, for each key of the old room, while it doubles."""


class OpenPass:
    """A pass that still takes samples.

    Numbers depend on how samples were cut into batches; the positions that replace them when the pass closes do not.
    """

    def __init__(self, layout: SampleLayout, path: Path) -> None:
        self.layout = layout
        self.path = path
        """The file of numbered samples; of no use to anyone else."""
        self.tables = layout.schema.ordered_tables
        self._numbers = {table.name: KeyToIndex(_FIRST_ROOM) for table in self.tables}
        self._writer = SamplesWriter(path, layout)

    @property
    def samples(self) -> int:
        """Samples taken so far."""
        return self._writer.num_samples

    def rows(self) -> list[int]:
        """Return the number of keys by table, in the order of table ids."""
        return [self._numbers[table.name].count for table in self.tables]

    def number(self, batch: RawBatch) -> Samples:
        """Give the keys of ``batch`` their numbers, new ones where they have none; writes nothing."""
        ids = {}
        for feature in self.layout.schema.features:
            entry = batch.features[feature.name]
            numbers = np.empty(entry.keys.size, np.int32)
            self._numbers[feature.table].insert(np.ascontiguousarray(entry.keys), numbers)
            ids[feature.name] = FeatureIds(numbers, entry.offsets, entry.weights)
        return Samples(batch.label, batch.dense, np.empty((0, batch.num_samples), np.int32), ids)

    def undo(self, rows: list[int], numbered: Iterable[Samples]) -> None:
        """Forget what ``number`` returned since ``rows()`` returned ``rows``."""
        for samples in numbered:
            for feature in self.layout.schema.features:
                self._numbers[feature.table].uncount(samples.ids[feature.name].ids)
        for table, count in zip(self.tables, rows, strict=True):
            self._numbers[table.name].truncate(count)

    def numbering_bytes(self, batch: RawBatch) -> int:
        """Return the most host bytes that keys take while ``batch`` is numbered, were all its keys new."""
        new = dict.fromkeys(self._numbers, 0)
        for feature in self.layout.schema.features:
            new[feature.table] += batch.features[feature.name].keys.size
        held = growing = 0
        for name, numbers in self._numbers.items():
            room = numbers.nbytes // _ROOM_BYTES
            while room < numbers.count + new[name]:
                room *= 2
                growing = max(growing, room // 2 * _GROWING_BYTES)
            held += room * _ROOM_BYTES
        return held + growing

    def closing_bytes(self) -> int:
        """Return the most host bytes that keys take while the pass closes."""
        sizes = [(numbers.nbytes, numbers.count) for numbers in self._numbers.values()]
        most = max(max(nbytes + 16 * count, 44 * count) - nbytes for nbytes, count in sizes)
        return sum(nbytes + 4 * count for nbytes, count in sizes) + most

    def append(self, samples: Samples) -> None:
        """Add numbered samples to the file."""
        self._writer.append(samples)

    def finish(self) -> None:
        """Write what is left of the file; no more samples after this."""
        self._writer.finish()

    def take_keys(self, table: Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return keys and counts of a table in the order of numbers, once: the table's memory is free after."""
        numbers = self._numbers.pop(table.name)
        return np.array(numbers.keys()), np.array(numbers.counts())

    def abandon(self) -> None:
        """Close the file: the pass will be started over."""
        self._writer.abandon()
