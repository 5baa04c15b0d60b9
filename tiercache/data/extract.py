"""Extraction: files to a dataset, in one scan, in bounded memory, through any stop."""

from __future__ import annotations

import warnings
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.data.dataset import PassDataset
from tiercache.data.encode import check_first_rows, encode
from tiercache.data.extraction_progress import ExtractionProgress, ProgressReporter
from tiercache.data.extraction_resources import MemoryShares, Workers
from tiercache.data.frequency import FrequencyFilter, KeyCounter, count_keys
from tiercache.data.inputs import InputFile, check_read, find_inputs, formats_of
from tiercache.data.manifest import RARE_KEYS, VERSION, Manifest, SubDatasetRecord, file_name, is_finished
from tiercache.data.open_pass import PassCloser
from tiercache.data.pass_builder import Cut, Cutter, PassBuilder, group_bytes
from tiercache.data.resume import (
    ExtractionState,
    WorkFolder,
    check_formats,
    check_names,
    check_rules,
    check_same,
    reopened,
)
from tiercache.data.source import Source, SourceBatch
from tiercache.data.stages import Job, extract_on
from tiercache.errors import ExtractionError
from tiercache.schema import Schema
from tiercache.sizes import parse_bytes
from tiercache.store.files import FULL, is_url, local_path
from tiercache.store.records import as_integer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from tiercache.data.raw_batch import RawBatch


_FEW = 4
"""Fewer sub-datasets than this cause no warning about their sizes."""


def extract(
    data: str | Path | Iterable[Any],
    schema: Schema | str | Path | None,
    out: str | Path,
    *,
    device_budget: int | str,
    format: str | None = None,  # noqa: A002 - what users call it
    devices: int = 1,
    split_by: str = "budget",
    batch_multiple: int = 8192,
    min_count: int = 1,
    memory_limit: int | str = "1GiB",
    workers: int | None = None,
    samples: bool = True,
    append: bool = False,
    prior_counts: Sequence[PassDataset | str | Path] = (),
    dask: Any = None,
    progress: bool | Callable[[ExtractionProgress], None] = True,
) -> PassDataset:
    """Convert files of samples to a dataset in the directory ``out``, and return it.

    data: files, folders, patterns and URLs of Parquet, Arrow IPC, CSV or TSV (plain, gz, zst), NumPy and split-binary
    files; or an iterable of batches, which must give the same ones each time (see ``docs/schema.md``). schema: a
    Schema, or the path of a TOML file; None for Criteo's files.
    format: the format of every file, overriding its suffix, as [source] format in the schema: for example "criteo".
    device_budget: the device memory for the rows of a pass, their optimizer state and slot maps, as in training.
    devices: the number of devices with that budget that train a pass together, tables sharded row-wise. Passes leave a
    margin for keys that do not divide evenly (``tiercache.data.pass_builder.max_device_rows``).
    split_by: ``budget`` closes a pass before the budget is exceeded, ``rows=N`` after N samples, ``file`` and
    ``column=NAME`` when the file or the value of a column changes.
    batch_multiple: for budget and rows, every pass but the last ends at a multiple of this many samples. min_count:
    keys with fewer occurrences, in all of ``data`` and ``prior_counts``, share the out-of-vocabulary row. memory_limit:
    memory for samples in progress and tables of keys, besides Python itself. Does not change the result. workers:
    threads; None: one for each core that the process may use. Does not change the result.
    samples: False writes only key sets: ``Pass.batch`` then looks up keys from your own loader.
    append: add sub-datasets for the files that the dataset in ``out`` does not have yet, and keep the others.
    prior_counts: earlier datasets of the same model, whose counts are added.
    dask: the address of a Dask scheduler, or a ``distributed.Client``: its workers read the files and write the passes.
    ``out`` may then be a URL. memory_limit and workers (default 1) are per stage; min_count is not supported. progress:
    True shows a bar, False nothing; a function is called with each ExtractionProgress.

    After a kill, the same call resumes from the last closed pass (while counting: from the last run) and writes the
    same bits. A finished dataset with equal inputs and options is returned unchanged. Options that do not change the
    content may differ: memory_limit, progress, and learning rates, initializers and seeds of tables.

    Raises SchemaError, SourceError (names file, row and column), BudgetError, ExtractionError.
    """
    schema = Schema.of(schema, format)
    device_bytes, memory_bytes = parse_bytes(device_budget), parse_bytes(memory_limit)
    numbers = {"batch_multiple": batch_multiple, "min_count": min_count, "devices": devices}
    numbers |= {} if workers is None else {"workers": workers}
    for name, number in numbers.items():
        if not 1 <= (as_integer(number) or 0) < 1 << 31:
            raise ExtractionError(f"{name} is {number!r}: expected a whole number from 1 to 2^31 - 1")
    batch_multiple, min_count, devices = int(batch_multiple), int(min_count), int(devices)
    cut = Cut.parse(split_by, batch_multiple)
    earlier = [item if isinstance(item, PassDataset) else PassDataset.open(item) for item in prior_counts]
    if earlier and min_count == 1:
        raise ExtractionError("prior_counts has no effect with min_count = 1: raise min_count or omit prior_counts")
    if dask is not None and min_count > 1:
        raise ExtractionError(f"min_count is {min_count}, but a cluster does not count keys: omit min_count or dask")
    inputs = find_inputs(data, schema.source.format)
    label = str(out)
    out = Path(out) if dask is not None and is_url(out) else _local(out)
    schema = _with_dtypes(schema, inputs, out)
    options: dict[str, Any] = {
        "schema": schema.digest,
        "groups": group_bytes(schema.tables),
        "device_budget": device_bytes,
        "split_by": split_by,
        "batch_multiple": batch_multiple,
        "min_count": min_count,
        "prior_counts": [dataset.digest for dataset in earlier],
        "samples": samples,
    }
    if devices > 1:  # key sets made for one device do not record devices
        options["devices"] = devices
    records = tuple(file.record() for file in inputs)
    has_names = all(one.format != "python" and (one.format != "csv" or schema.csv.header) for one in inputs)
    names = None if has_names else schema.source.columns
    kept: tuple[SubDatasetRecord, ...] = ()
    if is_finished(out):
        manifest = Manifest.read(out)
        old = manifest.inputs
        if append and min_count > 1:
            raise ExtractionError(
                f"{out} cannot be appended to with min_count = {min_count}: its rare keys are already determined; "
                "extract the new files into another dataset, with prior_counts"
            )
        if not append or not any(record not in old for record in records):
            check_names(manifest.schema.source.columns, names, out)
            before, now = (formats_of(inputs, one.source.format) for one in (manifest.schema, schema))
            check_formats(before, now, out)
            dataset = reopened(out, manifest, schema, options, old if append else records)
            with closing(ProgressReporter(progress, 0)) as reporter:
                reporter.passes = len(dataset)
                reporter.finish(dataset.samples, f"{label}: {dataset.summary}, already extracted", "")
            return dataset
        check_same(manifest.options, old, options, old, out)
        check_rules(manifest.version, out)
        if any(feature.key == "cross" for feature in schema.features):
            Source(inputs, schema, cut_column=cut.column)  # compares the types of new files with those of earlier ones
        inputs = tuple(file for file, record in zip(inputs, records, strict=True) if record not in old)
        records, kept = (*old, *(file.record() for file in inputs)), manifest.passes
    source = Source(inputs, schema, cut_column=cut.column)
    check_first_rows(schema, source)
    memory = MemoryShares.plan(memory_bytes, source.decoding_bytes)
    formats = formats_of(inputs, schema.source.format)
    begin = ExtractionState(options=options, inputs=records, passes=kept, version=VERSION, names=names, formats=formats)
    job = Job(
        schema=schema, cut=cut, unit=batch_multiple, device_bytes=device_bytes, devices=devices,
        memory_bytes=memory_bytes, workers=workers or 1, with_samples=samples,
    )  # fmt: skip
    if dask is not None:
        with _disk_errors(out):
            dataset = extract_on(dask, job, inputs, begin, label, progress)
        _warn_of_small(dataset.manifest.passes[:-1], cut, batch_multiple)
        return dataset
    with (
        _disk_errors(out),
        closing(WorkFolder(out)) as work,
        closing(ProgressReporter(progress, source.total_bytes)) as reporter,
        closing(Workers(workers)) as pool,
    ):
        state = ExtractionState.read(work.path) or begin
        state.check_same(begin, out)
        run = _Extraction(job, source, work, memory, reporter, pool)
        rare_keys = None
        if min_count > 1:
            state = state if state.is_counted else run.count(state)
            rare_keys = FrequencyFilter(
                schema, state, earlier, min_count=min_count, folder=work.path, num_bytes=memory.keys
            )
        state = run.number(state, rare_keys)
        check_read(inputs, has_rows=len(state.passes) > len(kept))
        rare = None if rare_keys is None else rare_keys.write_rare(out / RARE_KEYS)
        Manifest(schema=schema, passes=state.passes, options=options, inputs=records, rare=rare).write(out)
        work.remove()
        _warn_of_small(state.passes[:-1], cut, batch_multiple)
        dataset = PassDataset.open(out)
        reporter.finish(dataset.samples, f"{label}: {dataset.summary}", str(source.bad_rows))
    return dataset


def _with_dtypes(schema: Schema, inputs: Sequence[InputFile], out: Path) -> Schema:
    """Return the schema with the dtypes of kept columns, from the finished dataset in ``out`` or from the data."""
    if all(one.dtype is not None for one in schema.kept):
        return schema
    before = Manifest.read(out).schema.kept if is_finished(out) else ()
    dtypes = {one.column: str(one.dtype) for one in before}
    if any(one.dtype is None and one.column not in dtypes for one in schema.kept):
        dtypes |= Source(inputs, schema).dtypes
    return schema.with_dtypes(dtypes)


def _local(out: str | Path) -> Path:
    try:
        return local_path(out, "a dataset that one machine writes", "pass a path, or dask= to write it on a cluster")
    except ValueError as error:
        raise ExtractionError(str(error)) from error


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise ExtractionError(
            f"{out} has no space left ({error.strerror}): free some space there, or raise ulimit -f; closed passes "
            "stay, and the same command resumes"
        ) from error


def _warn_of_small(passes: Sequence[SubDatasetRecord], cut: Cut, batch_multiple: int) -> None:
    """Warn if most sub-datasets have the smallest size: each switch moves every row of a pass."""
    small = sum(record.samples == batch_multiple for record in passes)
    if cut.kind == "budget" and len(passes) >= _FEW and small > len(passes) // 2:
        warnings.warn(
            f"{small} of {len(passes)} sub-datasets hold one batch multiple of {batch_multiple:,} samples: passes are "
            "larger with a larger device_budget, and more even with a smaller batch_multiple",
            stacklevel=3,
        )


@dataclass(frozen=True)
class _Extraction:
    job: Job
    source: Source
    work: WorkFolder
    memory: MemoryShares
    reporter: ProgressReporter
    workers: Workers

    def count(self, state: ExtractionState) -> ExtractionState:
        """Count all keys into runs on disk."""
        counter = KeyCounter(self.job.schema, self.memory.keys, self.workers)

        def encoded() -> Generator[tuple[RawBatch, int, int], None, None]:
            for batch in self._batches(state):
                yield self._encoded(batch), batch.file_index, batch.first_row + batch.columns.num_rows
                self._report(batch)

        self.reporter.begin("count")
        return count_keys(counter, encoded(), state, self.work.path)

    def number(self, state: ExtractionState, rare: FrequencyFilter | None) -> ExtractionState:
        """Number the samples from the state's cursor to the end of the data, and close passes."""
        self.work.clear(keep={file_name(index) for index in range(len(state.passes))})

        def on_close(passes: int) -> None:
            self.reporter.passes = passes
            self.reporter.update(self.source.done_bytes, "close")

        closer = PassCloser(self.work, state, self.workers)
        builder = PassBuilder(
            self.job.schema, closer, cut=self.job.cut, unit=self.job.unit, rows=self.job.row_budget(state.passes),
            memory=self.memory, with_samples=self.job.with_samples, on_close=on_close,
        )  # fmt: skip
        cutter = Cutter(self.job.cut)
        self.reporter.passes = len(state.passes)
        self.reporter.begin("number")
        try:
            for batch in self._batches(state):
                samples = self._encoded(batch)
                if rare is not None:
                    samples = rare.apply(samples)
                builder.note(batch)
                for begins_pass, piece in cutter.pieces(batch, samples):
                    if begins_pass:
                        builder.cut()
                    builder.add(piece)
                self._report(batch)
            builder.finish()
        finally:
            builder.abandon()
        return closer.state

    def _batches(self, state: ExtractionState) -> Iterator[SourceBatch]:
        """Read from the state's cursor, within the memory limit; the next batch is read while one is in use."""
        memory = self.memory
        batches = self.source.batches(
            state.file_index, state.row, batch_bytes=memory.chunk // 2, use_threads=memory.use_threads
        )
        is_python = self.source.files[0].format == "python"  # an iterable may work on the user's thread only
        return batches if is_python else self.workers.prefetch(batches)

    def _encoded(self, batch: SourceBatch) -> RawBatch:
        return encode(self.job.schema, batch, run=self.workers.run)

    def _report(self, batch: SourceBatch) -> None:
        self.reporter.samples += batch.columns.num_rows
        self.reporter.update(self.source.done_bytes)
