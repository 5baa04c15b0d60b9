"""Writing a sub-dataset: samples in, record batches of a fixed number of samples out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tiercache.data.sample_layout import BATCH_SAMPLES, SampleLayout

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.data.encoded_batch import Samples
    from tiercache.data.sample_layout import SampleColumn

__all__ = ["SamplesWriter"]


class SamplesWriter:
    """An Arrow IPC file of samples; the same samples give the same bytes however they are cut into calls.

    Memory: one record batch. Without ``finish`` the file is no Arrow file.
    """

    def __init__(self, path: Path, layout: SampleLayout) -> None:
        self._layout = layout
        self._fixed = {
            c.name: np.zeros((BATCH_SAMPLES, c.width), c.dtype) for c in layout.columns if c.width is not None
        }
        self._ragged: dict[str, list[NDArray[Any]]] = {c.name: [] for c in layout.columns if c.width is None}
        self._lengths: dict[str, list[NDArray[np.int64]]] = {name: [] for name in self._ragged}
        self._filled = 0
        self.num_samples = 0
        self._file = path.open("wb")
        options = pa.ipc.IpcWriteOptions(compression=None, use_threads=False)
        self._writer = pa.ipc.new_file(pa.PythonFile(self._file, "w"), layout.arrow_schema, options=options)

    def append(self, samples: Samples) -> None:
        """Add samples after those added before; their arrays may be reused at once."""
        low = 0
        while low < samples.num_samples:
            high = min(samples.num_samples, low + BATCH_SAMPLES - self._filled)
            for column in self._layout.columns:
                self._fill(column, samples, low, high)
            self._filled += high - low
            self.num_samples += high - low
            low = high
            if self._filled == BATCH_SAMPLES:
                self._flush()

    def finish(self) -> None:
        """Write the last record batch and the footer; the file is complete then, but perhaps not on disk yet."""
        if self._filled:
            self._flush()
        self._writer.close()
        self._file.close()

    def abandon(self) -> None:
        """Close the file as it is: what was written is of no use."""
        self._file.close()

    def _fill(self, column: SampleColumn, samples: Samples, low: int, high: int) -> None:
        rows = slice(self._filled, self._filled + high - low)
        if column.name == "label":
            assert samples.label is not None
            self._fixed["label"][rows, 0] = samples.label[low:high]
        elif column.name == "dense":
            self._fixed["dense"][rows] = samples.dense[low:high]
        elif column.feature is None:
            for place, feature in enumerate(self._layout.schema.singles):
                self._fixed["ids"][rows, place] = samples.ids[feature.name].ids[low:high]
        else:
            entry = samples.ids[column.feature]
            values = entry.ids if column.dtype is np.int32 else entry.weights
            assert values is not None
            if column.width is not None:
                self._fixed[column.name][rows] = values.reshape(-1, column.width)[low:high]
            else:
                assert entry.offsets is not None
                offsets = entry.offsets[low : high + 1]
                self._ragged[column.name].append(values[offsets[0] : offsets[-1]].copy())
                self._lengths[column.name].append(np.diff(offsets))

    def _flush(self) -> None:
        arrays = []
        for column, field in zip(self._layout.columns, self._layout.arrow_schema, strict=True):
            if column.width is not None:
                arrays.append(_fixed_array(self._fixed[column.name][: self._filled], field.type))
            else:
                offsets = np.zeros(self._filled + 1, np.int64)
                np.cumsum(np.concatenate(self._lengths[column.name]), out=offsets[1:])
                values = np.concatenate(self._ragged[column.name])
                arrays.append(pa.LargeListArray.from_arrays(offsets, _items(values), type=field.type))
                self._ragged[column.name], self._lengths[column.name] = [], []
        self._writer.write_batch(pa.record_batch(arrays, schema=self._layout.arrow_schema))
        self._filled = 0


def _fixed_array(values_NW: NDArray[Any], kind: Any) -> Any:
    values = _items(values_NW.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(values, type=kind) if pa.types.is_fixed_size_list(kind) else values


def _items(values: NDArray[Any]) -> Any:
    # From the buffer itself: pa.array would look for NaN and could choose to mark it as null.
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), values.size, [None, pa.py_buffer(values)])
