"""Recordings: writes the keys of a loader's batches to a dataset of key sets, and resumes after any stop."""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tiercache.data.array_file import ArrayFileWriter
from tiercache.data.dataset import PassDataset
from tiercache.data.extraction_progress import ExtractionProgress, ProgressReporter
from tiercache.data.extraction_resources import Workers
from tiercache.data.frequency import FrequencyFilter, KeyCounter, count_keys
from tiercache.data.keyset import KeyPacker, key_schema
from tiercache.data.manifest import (
    RARE_KEYS,
    VERSION,
    Manifest,
    Recording,
    SubDatasetRecord,
    file_errors,
    file_name,
    is_finished,
)
from tiercache.data.pass_builder import RowBudget, group_bytes
from tiercache.data.raw_batch import FeatureKeys, RawBatch
from tiercache.data.resume import ExtractionState, WorkFolder, reopened
from tiercache.data.sample_layout import SampleLayout
from tiercache.data.sub_dataset import SubDataset
from tiercache.errors import DatasetError
from tiercache.store.files import sync

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.schema import Schema
    from tiercache.store.table import Table


@dataclass(frozen=True, slots=True, eq=False)
class RecordedBatch:
    """The keys of one batch of a loader."""

    keys: Mapping[str, NDArray[np.int64]]
    """By table: all keys, or unique ones with ``times``."""
    digests: Sequence[int]
    """Digests of its distinct lookups, ascending."""
    num_samples: int
    indices: NDArray[np.int64] | None
    """The indices of its samples in the loader's dataset, if it has indices."""
    times: Mapping[str, NDArray[np.int64]] | None = None
    """By table, the occurrences of each key; None: one each."""

    @property
    def occurrences(self) -> dict[str, NDArray[np.int64]]:
        """All keys, by table."""
        times = self.times
        return {name: keys if times is None else np.repeat(keys, times[name]) for name, keys in self.keys.items()}


BatchSource: TypeAlias = "Callable[[int, Callable[[NDArray[np.int64]], None]], Generator[RecordedBatch, None, None]]"
"""``source(first, skipped)`` yields the batches of a loader from number ``first`` on, the same ones each time; none if
there are fewer. ``skipped`` gets the indices of each earlier one, if they have any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingPlan:
    """The content of a recording, besides its source."""

    schema: Schema
    device_bytes: int
    devices: int
    min_count: int
    memory_bytes: int
    """For the tables of keys while keys are counted."""
    facts: Mapping[str, Any]
    """More options and facts of the loader that determine the content."""
    recording: Recording
    """The record of a sub-dataset, without its batches."""
    has_large_batches: bool = False
    """True to share the work of one batch among threads."""
    batch_name: str = "of the loader"
    smaller: str = "make the loader's batches smaller"
    """For the error of a batch that alone exceeds the budget: the batch's name, and how to make it smaller."""

    @property
    def options(self) -> dict[str, Any]:
        """The options that determine the content."""
        return {
            "schema": self.schema.digest, "groups": group_bytes(self.schema.tables),
            "device_budget": self.device_bytes, "min_count": self.min_count, "devices": self.devices, **self.facts,
        }  # fmt: skip


def write_recording(
    out: Path, plan: RecordingPlan, source: BatchSource, progress: bool | Callable[[ExtractionProgress], None]
) -> PassDataset:
    """Write the key sets of a loader, cut before a batch that would exceed the device budget; return the dataset.

    Resumes after the last closed sub-dataset. A finished dataset of the same plan is returned unchanged. Raises
    BudgetError, DatasetError, ExtractionError, and the errors of the source.
    """
    if is_finished(out):
        return reopened(out, Manifest.read(out), plan.schema, plan.options, ())
    with (
        file_errors(out),
        closing(WorkFolder(out)) as work,
        closing(ProgressReporter(progress, 0)) as reporter,
        closing(Workers(None)) as workers,
    ):
        begin = ExtractionState(options=plan.options, inputs=(), version=VERSION)
        state = ExtractionState.read(work.path) or begin
        state.check_same(begin, out)
        rare = None
        if plan.min_count > 1:
            schema = key_schema(plan.schema.tables)
            if not state.is_counted:
                reporter.begin("count")
                counter = KeyCounter(schema, plan.memory_bytes, workers)
                state = count_keys(counter, _counted(source, schema.tables, state.row, reporter), state, work.path)
            rare = FrequencyFilter(
                schema, state, [], min_count=plan.min_count, folder=work.path, num_bytes=plan.memory_bytes
            )
        shared = workers if plan.has_large_batches else None
        state = _Writer(plan, out, work, state, shared).write(source, rare, reporter)
        record = None if rare is None else rare.write_rare(out / RARE_KEYS)
        Manifest(schema=plan.schema, passes=state.passes, options=plan.options, inputs=(), rare=record).write(out)
        work.remove()
        dataset = PassDataset.open(out)
        reporter.finish(dataset.samples, f"{out}: {dataset.summary}", "")
    return dataset


class _Writer:
    def __init__(
        self, plan: RecordingPlan, out: Path, work: WorkFolder, state: ExtractionState, workers: Workers | None
    ) -> None:
        self._plan, self._out, self._work, self._state, self._workers = plan, out, work, state, workers
        self._layout = SampleLayout(plan.schema)
        self._tables = plan.schema.ordered_tables
        budget = RowBudget(plan.schema.tables, plan.device_bytes, plan.devices, state.passes)
        self._packer = KeyPacker(self._tables, budget, workers)
        self._open: list[RecordedBatch] = []
        """The batches of the open sub-dataset, without keys."""

    def write(self, source: BatchSource, rare: FrequencyFilter | None, reporter: ProgressReporter) -> ExtractionState:
        """Write the batches from the state's cursor on."""
        self._work.clear(keep={file_name(index) for index in range(len(self._state.passes))})
        reporter.passes = len(self._state.passes)
        reporter.begin("number")
        skipped = hashlib.sha256()
        number = self._state.row
        batches = source(number, lambda indices: skipped.update(indices.tobytes()))
        with closing(batches if self._workers is None else self._workers.prefetch(batches)) as made:
            for batch in made:
                if number == self._state.row and self._state.passes:
                    self._check_skipped(skipped.hexdigest())
                keys = batch.keys
                if rare is not None:
                    replaced = rare.apply(_one_sample(self._tables, keys)).features
                    keys = {name: one.keys for name, one in replaced.items()}
                name, smaller = f"batch {number} {self._plan.batch_name}", self._plan.smaller
                if not self._packer.add(keys, name, smaller, batch.times):
                    self._close()
                    self._packer.add(keys, name, smaller, batch.times)
                    reporter.passes += 1
                self._open.append(replace(batch, keys={}, times=None, indices=_compact(batch.indices)))
                number += 1
                reporter.samples += batch.num_samples
                reporter.update(0)
        if self._open:
            self._close()
        elif not self._state.passes:
            raise DatasetError("the loader yielded no batches and no keys: use a loader with at least one batch")
        return self._state

    def _close(self) -> None:
        """Write the open sub-dataset; it and the state are on disk on return."""
        batches, self._open = self._open, []
        counts = [len(batch.digests) for batch in batches]
        samples = sum(batch.num_samples for batch in batches)
        recording = self._plan.recording.model_copy(
            update={"batches": len(batches), "lookups": sum(counts), "first_batch": self._state.row}
        )
        path, rows = self._out / file_name(len(self._state.passes)), self._packer.rows
        writer = ArrayFileWriter(path, self._layout.file(samples, rows, None, recording))
        for table, (keys, occurrences) in zip(self._tables, self._packer.close(), strict=True):
            writer.write(f"keys.{table.name}", 0, keys)
            writer.write(f"counts.{table.name}", 0, occurrences)
        writer.write("ends", 0, np.cumsum([batch.num_samples for batch in batches]))
        writer.write("lookups", 0, np.cumsum([0, *counts]))
        writer.write("digests", 0, np.array([one for batch in batches for one in batch.digests], np.uint64))
        if recording.dataset_length is not None:
            row = 0
            for batch in batches:
                writer.write("indices", row, np.asarray(batch.indices))
                row += batch.num_samples
        record = SubDatasetRecord(samples=samples, rows=rows, values=None, digest=writer.finish(), recorded=recording)
        sync(path)
        sync(self._out)
        self._state = self._state.closed(record, 0, self._state.row + len(batches))
        self._state.write(self._work.path)

    def _check_skipped(self, digest: str) -> None:
        """Raise DatasetError unless the skipped batches are the recorded ones."""
        if self._plan.recording.dataset_length is None:
            return
        recorded = hashlib.sha256()
        for index, record in enumerate(self._state.passes):
            closed = SubDataset(self._out, index, record, self._layout)
            for first in range(0, record.samples, 1 << 20):
                places = np.arange(first, min(record.samples, first + (1 << 20)))
                recorded.update(closed.recorded.indices(places).tobytes())
        if recorded.hexdigest() != digest:
            raise DatasetError(
                f"the loader yields different samples than before the stop, of which {self._state.row:,} batches are "
                f"recorded in {self._out}: seed its sampler, so that it yields the same order each time, or "
                "delete that folder and record again"
            )


def _counted(
    source: BatchSource, tables: Iterable[Table], first: int, reporter: ProgressReporter
) -> Generator[tuple[RawBatch, int, int], None, None]:
    """Yield all keys of each batch, and the cursor after it."""
    for number, batch in enumerate(source(first, lambda _: None), first + 1):
        yield _one_sample(tables, batch.occurrences), 0, number
        reporter.samples += batch.num_samples
        reporter.update(0)


def _one_sample(tables: Iterable[Table], keys: Mapping[str, NDArray[np.int64]]) -> RawBatch:
    """Return keys by table as one sample, for `key_schema`."""
    none = np.empty(0, np.int64)
    features = {t.name: FeatureKeys(of := keys.get(t.name, none), np.array([0, of.size])) for t in tables}
    return RawBatch(None, np.empty((1, 0), np.float32), features)


def _compact(indices: NDArray[np.int64] | None) -> Any:
    """Return consecutive indices as a range, which takes no memory for each of them."""
    if indices is None or indices.size < 2 or (np.diff(indices) != 1).any():
        return indices
    return range(int(indices[0]), int(indices[-1]) + 1)
