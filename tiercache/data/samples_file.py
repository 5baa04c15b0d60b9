"""Reading a sub-dataset: any samples in any order, straight from the mapped file."""

from __future__ import annotations

import hashlib
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tiercache.data.encoded_batch import FeatureIds, SampleBuffers, Samples
from tiercache.data.sample_layout import BATCH_SAMPLES, BATCH_SHIFT, SampleLayout
from tiercache.errors import DatasetError
from tiercache.kernels.cpu.samples import gather_columns, gather_lists, gather_offsets, gather_rows

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.data.sample_layout import SampleColumn

__all__ = ["Region", "SamplesFile"]


@dataclass(frozen=True, slots=True)
class Region:
    """Where the numbers of one column of one record batch lie in the file."""

    column: SampleColumn
    offset: int
    num_bytes: int
    is_offsets: bool
    """Whether these are the offsets of lists (int64) rather than values."""


@dataclass(frozen=True, slots=True)
class _Places:
    """Byte offsets of one column in the file, by record batch: (C,) each."""

    column: SampleColumn
    values: NDArray[np.int64]
    value_bytes: NDArray[np.int64]
    offsets: NDArray[np.int64]


class SamplesFile:
    """A mapped sub-dataset. Any number of threads may read at once, each into buffers of its own."""

    def __init__(self, path: Path, layout: SampleLayout) -> None:
        self._layout = layout
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            reader = pa.ipc.open_file(pa.py_buffer(self._map))
            is_ours = reader.schema.equals(layout.arrow_schema)
            self._words = np.frombuffer(self._map, np.int32, count=len(self._map) // 4)
            self._longs = np.frombuffer(self._map, np.int64, count=len(self._map) // 8)
            self.batch_sizes = np.zeros(reader.num_record_batches, np.int64)
            self._places = self._find(reader) if is_ours else {}
        except (OSError, ValueError, pa.ArrowException) as error:
            seen = str(error).replace("\n", " ")
            raise DatasetError(f"the samples in {path} cannot be read: {seen}: extract the dataset again") from error
        if not is_ours:
            raise DatasetError(f"the samples in {path} are of another schema: extract the dataset again")
        self.num_samples = int(self.batch_sizes.sum())

    def read(
        self,
        indices: NDArray[np.int64],
        into: SampleBuffers | None = None,
        *,
        features: Collection[str] | None = None,
    ) -> Samples:
        """Read the samples at ``indices`` (n,), in their order; each may stand any number of times.

        features: those whose ids are read, all where not given. The arrays are fresh, or lie in ``into`` and are valid
        until the next read into it. Raises IndexError for an index below 0 or past the last sample, DatasetError for
        lists that do not lie one behind the other within the values of their record batch.
        """
        indices = np.ascontiguousarray(indices, dtype=np.int64)
        if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= self.num_samples):
            raise IndexError(
                f"samples {indices.min()} .. {indices.max()} were asked for, but {self.path.name} has "
                f"{self.num_samples}: indices start at 0"
            )
        buffers = SampleBuffers() if into is None else into
        fixed: dict[str, NDArray[Any]] = {}
        for places in self._places.values():
            column = places.column
            wanted = features is None or column.feature is None or column.feature in features
            if column.width is not None and column.name != "ids" and wanted:
                out = buffers.array(column.name, (indices.size, column.width), np.int32)
                gather_rows(self._words, places.values >> 2, BATCH_SHIFT, indices, out)
                fixed[column.name] = out.view(column.dtype)
        ids, singles = self._singles(indices, fixed, buffers, features)
        for feature in self._layout.schema.lists:
            if features is None or feature.name in features:
                ids[feature.name] = self._list(feature.name, feature.length, indices, fixed, buffers)
        label = fixed["label"].reshape(-1) if "label" in fixed else None
        dense = fixed.get("dense", np.empty((indices.size, 0), np.float32))
        ordered = {f.name: ids[f.name] for f in self._layout.schema.features if f.name in ids}
        return Samples(label=label, dense=dense, singles=singles, ids=ordered)

    def regions(self) -> Iterator[Region]:
        """Go through the file's numbers: batch by batch, in each column by column, offsets before values."""
        for batch, rows in enumerate(self.batch_sizes):
            for places in self._places.values():
                if places.column.width is None:
                    yield Region(places.column, int(places.offsets[batch]), 8 * (int(rows) + 1), True)
                yield Region(places.column, int(places.values[batch]), int(places.value_bytes[batch]), False)

    def digest(self) -> str:
        """Return the hexadecimal SHA-256 of all numbers in the order of ``regions``; reads the whole file."""
        digest = hashlib.sha256(str(self.num_samples).encode())
        with self.path.open("rb") as file:
            for region in self.regions():
                digest.update(os.pread(file.fileno(), region.num_bytes, region.offset))
        return digest.hexdigest()

    def prefetch(self) -> None:
        """Ask the kernel to read the file ahead; returns at once."""
        self._map.madvise(mmap.MADV_WILLNEED)

    def _singles(
        self,
        indices: NDArray[np.int64],
        fixed: dict[str, NDArray[Any]],
        buffers: SampleBuffers,
        features: Collection[str] | None,
    ) -> tuple[dict[str, FeatureIds], NDArray[np.int32]]:
        wanted, columns = self._layout.singles, self._layout.single_columns
        if features is not None:
            chosen = [i for i, feature in enumerate(wanted) if feature.name in features]
            wanted, columns = tuple(wanted[i] for i in chosen), columns[chosen]
        singles = buffers.array("ids", (len(wanted), indices.size), np.int32)
        if wanted:
            starts = self._places["ids"].values >> 2
            gather_columns(self._words, starts, BATCH_SHIFT, indices, len(self._layout.singles), columns, singles)
        ids = {}
        for row, feature in zip(singles, wanted, strict=True):
            weights = fixed.get(f"weights:{feature.name}")
            ids[feature.name] = FeatureIds(row, None, None if weights is None else weights.reshape(-1))
        return ids, singles

    def _list(
        self,
        name: str,
        length: int | None,
        indices: NDArray[np.int64],
        fixed: dict[str, NDArray[Any]],
        buffers: SampleBuffers,
    ) -> FeatureIds:
        weights_name = f"weights:{name}"
        offsets = buffers.array(f"offsets:{name}", (indices.size + 1,), np.int64)
        if length is not None:
            offsets[:] = np.arange(0, (indices.size + 1) * length, length)
            weights = fixed[weights_name].reshape(-1) if weights_name in fixed else None
            return FeatureIds(fixed[f"ids:{name}"].reshape(-1), offsets, weights)
        begins = buffers.array("begins", (indices.size,), np.int64)
        lists = self._places[f"ids:{name}"]
        counts = lists.value_bytes >> 2
        bad = gather_offsets(self._longs, lists.offsets >> 3, counts, BATCH_SHIFT, indices, begins, offsets)
        if bad >= 0:
            batch, sample = divmod(int(indices[bad]), BATCH_SAMPLES)
            first, last = self._longs[(lists.offsets[batch] >> 3) + sample :][:2]
            raise DatasetError(
                f"feature {name!r} of sample {indices[bad]} in {self.path} has the values {first} to {last}, and its "
                f"record batch has {counts[batch]}: extract the dataset again"
            )
        parts = {}
        for column in (f"ids:{name}", weights_name):
            if column in self._places:
                places = self._places[column]
                parts[column] = buffers.array(column, (int(offsets[-1]),), np.int32)
                gather_lists(self._words, places.values >> 2, BATCH_SHIFT, indices, begins, offsets, parts[column])
        weights = parts[weights_name].view(np.float32) if weights_name in parts else None
        return FeatureIds(parts[f"ids:{name}"], offsets, weights)

    def _find(self, reader: Any) -> dict[str, _Places]:
        """Find all numbers. Raises ValueError where some would not lie in the file: nothing looks again."""
        num_batches = reader.num_record_batches
        places = {
            c.name: _Places(c, *(np.zeros(num_batches, np.int64) for _ in range(3))) for c in self._layout.columns
        }
        for index in range(num_batches):
            batch = reader.get_batch(index)
            rows = self.batch_sizes[index] = batch.num_rows
            if not 0 < rows <= BATCH_SAMPLES or (rows < BATCH_SAMPLES and index + 1 < num_batches):
                raise ValueError(f"record batch {index} of {num_batches} has {rows} samples")
            for array, place in zip(batch.columns, places.values(), strict=True):
                buffers = array.buffers()
                if place.column.width is None:
                    place.offsets[index] = self._place(buffers[1], 8 * (rows + 1))
                    size = 4 * int(self._longs[(place.offsets[index] >> 3) + rows])
                    ids = places[f"ids:{place.column.feature}"]  # their offsets are the weights' too
                    if ids is not place and size != ids.value_bytes[index]:
                        raise ValueError(f"{place.column.name} has other lists than {ids.column.name}")
                else:
                    size = 4 * rows * place.column.width
                if size:
                    place.values[index] = self._place(buffers[-1], size)
                place.value_bytes[index] = size
        return places

    def _place(self, buffer: Any, num_bytes: int) -> int:
        """Return where so many bytes of a buffer begin in the file; ValueError where they are not all there."""
        first = -1 if buffer is None else buffer.address - pa.py_buffer(self._map).address
        if not 0 <= first <= first + num_bytes <= len(self._map) or first % 8:
            raise ValueError(f"{num_bytes} bytes at {first} are not within its {len(self._map)} bytes")
        return first
