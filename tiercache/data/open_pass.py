"""The open pass: keys get numbers in the order in which they appear, and numbered samples go to a scratch file."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tiercache.data.array_file import ArrayFileWriter, bytes_of
from tiercache.data.manifest import SubDatasetRecord, file_name
from tiercache.errors import ExtractionError
from tiercache.kernels.cpu.samples import permute_columns
from tiercache.kernels.cpu.slots import take
from tiercache.kernels.cpu.unique_keys import UniqueKeys
from tiercache.store.files import read_cached, sync, write_cached

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.data.extraction_resources import Workers
    from tiercache.data.raw_batch import RawBatch
    from tiercache.data.resume import ExtractionState, WorkFolder
    from tiercache.data.sample_layout import SampleLayout
    from tiercache.schema import Feature


class ScratchArray(NamedTuple):
    """A part of one array of samples in the scratch file."""

    name: str
    """The name of the array. ``ids`` are (S, n) in the scratch file, feature by feature."""
    offset: int
    dtype: Any
    size: int
    row: int
    """The first row of the part in the array of the sub-dataset."""


class OpenPass:
    """A pass that takes more samples. The positions that replace numbers in the end do not depend on batches."""

    def __init__(
        self, layout: SampleLayout, path: Path, workers: Workers, *, expected: Sequence[int], with_samples: bool
    ) -> None:
        """``expected``: the estimated number of keys of each table, in the order of table ids."""
        self.layout, self.path = layout, path
        self.samples = 0
        self.batches: list[list[ScratchArray]] = []
        self.values = dict.fromkeys((f.name for f in layout.ragged), 0) if with_samples else None
        """Ids of all lists so far, by feature with any number of them; None: the pass gets only a key set."""
        self._workers = workers
        tables = layout.schema.ordered_tables
        parts = 1 << max(0, (2 * workers.count // len(tables)).bit_length() - 1)  # enough work for all workers
        self.unique = {
            table.name: UniqueKeys(table.table_id, parts, count) for table, count in zip(tables, expected, strict=True)
        }
        self._features: dict[str, list[Feature]] = {table.name: [] for table in tables}
        for feature in layout.schema.features:
            self._features[feature.table].append(feature)
        self._file = path.open("w+b", buffering=0)
        self._end = 0

    def rows(self) -> list[int]:
        """Return the number of keys by table, in the order of table ids."""
        return [unique.count for unique in self.unique.values()]

    def number(self, batches: Sequence[RawBatch]) -> list[dict[str, NDArray[np.int32]]]:
        """Return the numbers of the keys of every feature; new keys get new ones. Writes nothing."""
        numbers = [{name: np.empty(f.keys.size, np.int32) for name, f in batch.features.items()} for batch in batches]

        def add(name: str, part: int) -> None:
            for batch, out in zip(batches, numbers, strict=True):  # table by table: its slots stay in the caches
                for feature in self._features[name]:
                    self.unique[name].add(batch.features[feature.name].keys, out[feature.name], part)

        names = sorted(self.unique, key=lambda name: -len(self._features[name]))  # the longest work first
        self._workers.run(partial(add, name, part) for name in names for part in range(self.unique[name].parts))
        return numbers

    def counts(self) -> dict[str, list[int]]:
        """Return the counts of keys that ``undo`` restores."""
        return {name: list(unique.counts) for name, unique in self.unique.items()}

    def undo(self, batches: Sequence[RawBatch], counts: dict[str, list[int]]) -> None:
        """Forget the batches numbered last; ``counts``: what ``counts()`` returned before them."""

        def forget(name: str) -> None:
            for batch in batches:
                for feature in self._features[name]:
                    self.unique[name].remove(batch.features[feature.name].keys, counts[name])

        self._workers.run(partial(forget, name) for name in self.unique)

    def append(self, batch: RawBatch, numbers: dict[str, NDArray[np.int32]]) -> None:
        """Add numbered samples to the scratch file."""
        first = self.samples
        self.samples += batch.num_samples
        if self.values is None:
            return
        singles = [numbers[feature.name] for feature in self.layout.schema.singles]
        arrays = [self._write("ids", first, *singles)] if singles else []
        parts = self.layout.parts(batch, batch.features, numbers, first, self.values)
        arrays += [self._write(name, row, array) for name, row, array in parts]
        self.batches.append(arrays)

    def read(self, array: ScratchArray) -> NDArray[Any]:
        """Return a part of an array from the scratch file, flat. Any thread may call it. Raises ExtractionError."""
        out = np.empty(array.size, array.dtype)
        if read_cached(self._file.fileno(), bytes_of(out), array.offset) < out.nbytes:
            raise ExtractionError(f"{self.path} was truncated while it was in use: run the same again")
        return out

    def numbering_bytes(self, batches: Sequence[RawBatch]) -> int:
        """Return the peak host bytes of keys while ``batches`` are numbered, if all their keys are new."""
        new = {
            name: sum(batch.features[f.name].keys.size for f in features for batch in batches)
            for name, features in self._features.items()
        }
        return sum(unique.grown_bytes(new[name]) for name, unique in self.unique.items())

    def closing_bytes(self) -> int:
        """Return the peak host bytes of keys while the pass closes."""
        counts = sorted((unique.count for unique in self.unique.values()), reverse=True)
        table_bytes = sum(unique.nbytes for unique in self.unique.values())
        return table_bytes + 4 * sum(counts) + 40 * sum(counts[: self._workers.count])

    def discard(self) -> None:
        """Delete the scratch file."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _write(self, name: str, row: int, *arrays: NDArray[Any]) -> ScratchArray:
        begin = self._end
        for array in arrays:
            write_cached(self._file.fileno(), bytes_of(np.ascontiguousarray(array)), self._end)
            self._end += array.nbytes
        return ScratchArray(name, begin, arrays[0].dtype, sum(array.size for array in arrays), row)


_SYNC_SECONDS = 1.0


def close_pass(open_pass: OpenPass, path: Path, workers: Workers) -> SubDatasetRecord:
    """Write a sub-dataset, not synced. Memory: all positions, and for each worker a table's keys and some samples."""
    layout, values = open_pass.layout, open_pass.values
    rows = {name: unique.count for name, unique in open_pass.unique.items()}
    samples = 0 if values is None else open_pass.samples
    writer = ArrayFileWriter(path, layout.file(samples, rows, values))
    positions: dict[str, NDArray[np.int32]] = {}

    def sort(name: str) -> None:
        keys, counts, positions[name] = open_pass.unique[name].sorted(with_positions=values is not None)
        writer.write(f"keys.{name}", 0, keys)
        writer.write(f"counts.{name}", 0, counts)

    workers.run(partial(sort, name) for name in rows)
    singles = layout.schema.singles
    names = list(dict.fromkeys(f.table for f in singles))  # one kernel takes the positions of all
    firsts = dict(zip(names, np.cumsum([0, *(positions[name].size for name in names)]).tolist(), strict=False))
    all_positions = np.concatenate([*(positions[name] for name in names), np.empty(0, np.int32)])
    bases = np.array([firsts[f.table] for f in singles], np.int64)

    def rewrite(batch: list[ScratchArray]) -> None:
        for array in batch:
            values = open_pass.read(array)
            kind, _, feature = array.name.partition(".")
            if array.name == "ids":
                ids = np.empty((values.size // bases.size, bases.size), np.int32)
                permute_columns(values, all_positions, bases, ids)
                values = ids
            elif kind == "ids":
                take(positions[layout.schema.feature(feature).table], values, values)
            writer.write(array.name, array.row, values)

    workers.run(partial(rewrite, batch) for batch in open_pass.batches)
    for name in values or ():
        writer.write(f"offsets.{name}", 0, np.zeros(1, np.int64))
    open_pass.discard()
    return SubDatasetRecord(samples=samples, rows=rows, values=values, digest=writer.finish())


class PassCloser:
    """Closes passes on a separate thread, one after the other, and then writes the state.

    Passes closed within one second are synced together: a sync for each of many small passes would take longer than the
    passes. The next call raises an error of the thread.
    """

    def __init__(self, work: WorkFolder, state: ExtractionState, workers: Workers) -> None:
        self.state = state
        """With every closed pass; the state on disk may be a second older."""
        self.work, self.workers = work, workers
        self._thread = ThreadPoolExecutor(1, "closing")
        self._running: Future[None] | None = None
        self._closing_bytes = 0
        self._unsynced: list[Path] = []
        self._synced_at = time.monotonic()

    @property
    def closing_bytes(self) -> int:
        """The peak host bytes of the pass that is being closed; 0 if none is."""
        return 0 if self._running is None or self._running.done() else self._closing_bytes

    def close(self, open_pass: OpenPass, file_index: int, row: int) -> None:
        """Start to close a pass that ends at the cursor (file_index, row), after the last one is closed."""
        self.wait()
        self._closing_bytes = open_pass.closing_bytes()
        self._running = self._thread.submit(partial(self._close, open_pass, file_index, row))

    def wait(self) -> None:
        """Wait until no pass is being closed."""
        if self._running is not None:
            self._running.result()
            self._running = None

    def finish(self) -> None:
        """Wait until every pass is closed and on disk."""
        self.wait()
        self._sync()
        self._thread.shutdown()

    def abandon(self) -> None:
        """End the thread after a failure elsewhere. Closed passes stay, if they can be synced."""
        with contextlib.suppress(Exception):
            self.finish()
        self._thread.shutdown()

    def _close(self, open_pass: OpenPass, file_index: int, row: int) -> None:
        path = self.work.out / file_name(len(self.state.passes))
        record = close_pass(open_pass, path, self.workers)
        self._unsynced.append(path)
        self.state = self.state.closed(record, file_index, row)
        if time.monotonic() - self._synced_at >= _SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        if self._unsynced:
            self.workers.run(partial(sync, path) for path in self._unsynced)
            sync(self.work.out)
            self.state.write(self.work.path)
        self._unsynced, self._synced_at = [], time.monotonic()
