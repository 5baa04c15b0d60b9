"""Extraction: files to a dataset, in one scan, in bounded memory, through any stop."""

from __future__ import annotations

import errno
import warnings
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.data.dataset import PassDataset
from tiercache.data.encode import check_first_rows, encode_dense, encode_feature, encode_label
from tiercache.data.extraction_progress import ExtractionProgress, ProgressReporter
from tiercache.data.extraction_resources import MemoryShares, Workers
from tiercache.data.frequency import FrequencyFilter, KeyCounter, decide, run_name
from tiercache.data.inputs import find_inputs
from tiercache.data.keyset import open_key_set
from tiercache.data.manifest import RARE_KEYS, VERSION, Manifest, file_name, is_finished
from tiercache.data.open_pass import PassCloser
from tiercache.data.pass_builder import Cut, Cutter, PassBuilder, RowBudget
from tiercache.data.pass_builder import device_bytes as row_device_bytes
from tiercache.data.raw_batch import RawBatch
from tiercache.data.resume import ExtractionState, WorkFolder, check_rules, check_same
from tiercache.data.sample_layout import SampleLayout
from tiercache.data.source import Source
from tiercache.data.stages import Job
from tiercache.errors import ExtractionError, SourceError
from tiercache.kernels.cpu.compile import is_cached, prepare
from tiercache.schema import Schema
from tiercache.sizes import parse_bytes
from tiercache.store.opening import is_url, local_path
from tiercache.store.table import group_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tiercache.data.manifest import SubDatasetRecord
    from tiercache.data.source import SourceBatch


_FEW = 4
"""Sub-datasets of whose sizes nobody is warned."""


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
    """Turn files of samples into a dataset in the directory ``out``, and return it.

    data: files, folders, patterns and URLs of Parquet, Arrow IPC, CSV or TSV (plain, gz, zst), NumPy and split-binary
    files; or an iterable of batches, which must give the same ones each time (``docs/schema.md`` says which).
    schema: a Schema, or the path of a TOML file; None for Criteo's files.
    format: of every file, whatever its suffix: as [source] format in the schema, "criteo" for one.
    device_budget: what the rows of a pass, with their optimizer state and slot maps, may take; the same as in training.
    devices: how many devices of that budget hold a pass together, their tables sharded row-wise: passes are as large as
    fits with a margin for keys that do not divide evenly (``tiercache.data.pass_builder.most_rows``).
    split_by: ``budget`` closes a pass before the budget is exceeded, ``rows=N`` after N samples, ``file`` and
    ``column=NAME`` where the file or the value of a column changes.
    batch_multiple: passes end at multiples of so many samples, for budget and rows; the last one ends with the data.
    min_count: keys with fewer occurrences, in all of ``data`` and ``prior_counts``, share the out-of-vocabulary row.
    memory_limit: memory for samples on their way and tables of keys, beside what Python itself takes; it does not
    change the result.
    workers: threads; None: one for each core that the process may use. They do not change the result.
    samples: whether samples are written too; without them ``Pass.batch`` looks keys up that a loader of yours gives.
    append: add sub-datasets of those files that the dataset in ``out`` does not have yet; those it has stay.
    prior_counts: earlier datasets of the same model, whose counts go on.
    dask: the address of a Dask scheduler, or a ``distributed.Client``: its workers read the files and write the passes.
    ``out`` may then be a URL. memory_limit and workers (default 1) are those of each stage; min_count is not supported.
    progress: a bar, nothing, or a function that is called with an ExtractionProgress.

    Killed at any moment, the same call goes on from the last closed pass (counting: from the last run) to the same
    files, bit for bit. A finished set of equal inputs and options is returned as it is. Options that decide nothing
    about the content (memory_limit, progress; learning rates, initializers and seeds of tables) may change.

    Raises SchemaError, SourceError (names file, row and column), BudgetError, ExtractionError.
    """
    schema = Schema.of(schema, format)
    device_bytes, memory_bytes = parse_bytes(device_budget), parse_bytes(memory_limit)
    numbers = {"batch_multiple": batch_multiple, "min_count": min_count, "devices": devices}
    numbers |= {} if workers is None else {"workers": workers}
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number < 1 << 31:
            raise ExtractionError(f"{name} is {number!r}: a whole number from 1 to 2^31 - 1")
    cut = Cut.parse(split_by, batch_multiple)
    earlier = [item if isinstance(item, PassDataset) else PassDataset.open(item) for item in prior_counts]
    if earlier and min_count == 1:
        raise ExtractionError("prior_counts changes nothing with min_count = 1: raise min_count or leave it out")
    if dask is not None and min_count > 1:
        raise ExtractionError(
            f"min_count is {min_count}, but a cluster does not count keys: leave out min_count or dask"
        )
    inputs = find_inputs(data, schema.source.format)
    place = str(out)
    out = Path(out) if dask is not None and is_url(out) else _local(out)
    options: dict[str, Any] = {
        "schema": schema.digest,
        "groups": [[[t.name for t in g.tables], row_device_bytes(g)] for g in group_tables(schema.tables)],
        "device_budget": device_bytes,
        "split_by": split_by,
        "batch_multiple": batch_multiple,
        "min_count": min_count,
        "prior_counts": [dataset.digest for dataset in earlier],
        "samples": samples,
    }
    if devices > 1:  # sets of one device say nothing of it
        options["devices"] = devices
    records = tuple(file.record() for file in inputs)
    kept: tuple[SubDatasetRecord, ...] = ()
    if is_finished(out):
        manifest = Manifest.read(out)
        old = manifest.inputs
        if append and min_count > 1:
            raise ExtractionError(
                f"{out} cannot be appended to with min_count = {min_count}: which of its keys are rare is decided; "
                "extract the new files into another dataset, with prior_counts"
            )
        if not append or not any(record not in old for record in records):
            made = _finished(out, manifest, schema, options, old if append else records)
            with closing(ProgressReporter(progress, 0)) as reporter:
                reporter.passes = len(made)
                reporter.finish(made.samples, f"{place}: {made.summary}, extracted before", "")
            return made
        check_same(manifest.options, old, options, old, out)
        check_rules(manifest.version, out)
        inputs = tuple(file for file, record in zip(inputs, records, strict=True) if record not in old)
        records, kept = (*old, *(file.record() for file in inputs)), manifest.passes
    source = Source(inputs, schema, cut_column=cut.column)
    check_first_rows(schema, source)
    memory = MemoryShares.plan(memory_bytes, source.decoding_bytes)
    if dask is not None:
        from tiercache.data.stages import extract_on

        job = Job(
            schema=schema, cut=cut, unit=batch_multiple, device_bytes=device_bytes, devices=devices,
            memory_bytes=memory_bytes, workers=workers or 1, with_samples=samples,
        )  # fmt: skip
        begin = ExtractionState(options=options, inputs=records, passes=kept, version=VERSION)
        with _room_in(out):
            made = extract_on(dask, job, inputs, begin, place, progress)
        _warn_of_small(made.manifest.passes[:-1], cut, batch_multiple)
        return made
    with (
        _room_in(out),
        closing(WorkFolder(out)) as work,
        closing(ProgressReporter(progress, source.total_bytes)) as reporter,
        closing(Workers(workers)) as pool,
    ):
        begin = ExtractionState(options=options, inputs=records, passes=kept, version=VERSION)
        state = ExtractionState.read(work.path) or begin
        state.check_same(options, records, out)
        if not is_cached():
            reporter.begin("compile")
            prepare()
        run = _Extraction(source, SampleLayout(schema), work, memory, reporter, pool)
        wanted = None
        if min_count > 1:
            if not state.is_counted:
                state = run.count(state)
            wanted = run.decide(state, earlier, min_count)
        rows = RowBudget(schema.tables, device_bytes, devices)
        state = run.number(state, cut, batch_multiple, rows, wanted, with_samples=samples)
        if len(state.passes) == len(kept):
            others = f" and {len(inputs) - 1} more" if len(inputs) > 1 else ""
            raise SourceError(f"no row was found in {inputs[0].path}{others}: give some data")
        for file in inputs:
            file.check_unchanged()
        rare = None if wanted is None else wanted.write_rare(out / RARE_KEYS)
        Manifest(schema=schema, passes=state.passes, options=options, inputs=records, rare=rare).write(out)
        work.remove()
        _warn_of_small(state.passes[:-1], cut, batch_multiple)
        made = PassDataset.open(out)
        reporter.finish(made.samples, f"{place}: {made.summary}", str(source.bad_rows))
    return made


def _local(out: str | Path) -> Path:
    """Return where the dataset is to be, as an absolute path. Raises ExtractionError."""
    try:
        return local_path(out, "a dataset that one machine writes", "give a path, or dask= to write it on a cluster")
    except ValueError as error:
        raise ExtractionError(str(error)) from error


@contextmanager
def _room_in(out: Path) -> Iterator[None]:
    """Say what a disk that fills means for the extraction."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise
        raise ExtractionError(
            f"{out} cannot take more ({error.strerror}): free space there, or raise ulimit -f; what is closed stays, "
            "and the same command goes on"
        ) from error


def _finished(
    out: Path, manifest: Manifest, schema: Schema, options: dict[str, Any], records: tuple[dict[str, Any], ...]
) -> PassDataset:
    """Return the finished set in ``out`` where it is the one that was asked for."""
    check_same(manifest.options, manifest.inputs, options, records, out)
    WorkFolder(out).remove()  # left over where the end of the extraction was cut off
    if manifest.schema != schema:
        manifest.with_tables_of(schema).write(out)
    return PassDataset.open(out)


def _warn_of_small(passes: Sequence[SubDatasetRecord], cut: Cut, batch_multiple: int) -> None:
    """Warn where most sub-datasets are as small as can be: each switch moves every row of a pass."""
    small = sum(record.samples == batch_multiple for record in passes)
    if cut.kind == "budget" and len(passes) >= _FEW and small > len(passes) // 2:
        warnings.warn(
            f"{small} of {len(passes)} sub-datasets hold one batch multiple of {batch_multiple:,} samples: passes are "
            "larger with a larger device_budget, and more even with a smaller batch_multiple",
            stacklevel=3,
        )


@dataclass(frozen=True)
class _Extraction:
    """One extraction, from its source to its folder."""

    source: Source
    layout: SampleLayout
    work: WorkFolder
    memory: MemoryShares
    reporter: ProgressReporter
    workers: Workers

    def count(self, state: ExtractionState) -> ExtractionState:
        """Count all keys into runs on disk; the state on disk goes on with every run."""
        counter = KeyCounter(self.layout.schema, self.memory.keys, self.workers)

        def write_run() -> tuple[SubDatasetRecord, ...]:
            return (*state.runs, counter.write_run(self.work.path / run_name(len(state.runs))))

        self.reporter.begin("count")
        for batch in self._batches(state):
            is_full = counter.add(self._encoded(batch))
            self._tell(batch)
            if is_full:
                row = batch.first_row + batch.columns.num_rows
                state = replace(state, runs=write_run(), file_index=batch.file_index, row=row)
                state.write(self.work.path)
        state = replace(state, runs=write_run(), file_index=0, row=0, is_counted=True)
        state.write(self.work.path)
        return state

    def decide(self, state: ExtractionState, earlier: Sequence[PassDataset], min_count: int) -> FrequencyFilter:
        """Merge the runs; the same again after a stop, so that nothing but the runs needs to be durable."""
        schema, folder = self.layout.schema, self.work.path
        runs = [
            open_key_set(folder / run_name(index), schema.ordered_tables, run.rows, run.digest)
            for index, run in enumerate(state.runs)
        ]
        files = decide(schema, runs, earlier, min_count=min_count, folder=folder, num_bytes=self.memory.keys)
        return FrequencyFilter(schema, files)

    def number(
        self,
        state: ExtractionState,
        cut: Cut,
        unit: int,
        rows: RowBudget,
        wanted: FrequencyFilter | None,
        *,
        with_samples: bool,
    ) -> ExtractionState:
        """Go through the samples and close passes, from the state's cursor to the end of the data."""
        self.work.clear(keep={file_name(index) for index in range(len(state.passes))})

        def on_close(passes: int) -> None:
            self.reporter.passes = passes
            self.reporter.tell(self.source.done_bytes, "close")

        closer = PassCloser(self.work, state, self.workers)
        builder = PassBuilder(
            self.layout,
            self.work,
            closer,
            self.workers,
            cut=cut,
            unit=unit,
            rows=rows,
            memory=self.memory,
            with_samples=with_samples,
            on_close=on_close,
        )
        cutter = Cutter(cut)
        self.reporter.passes = len(state.passes)
        self.reporter.begin("number")
        try:
            for batch in self._batches(state):
                samples = self._encoded(batch)
                if wanted is not None:
                    samples = wanted.apply(samples)
                builder.note(batch)
                for begins_pass, piece in cutter.pieces(batch, samples):
                    if begins_pass:
                        builder.cut()
                    builder.add(piece)
                self._tell(batch)
            builder.finish()
        finally:
            builder.abandon()
        return closer.state

    def _batches(self, state: ExtractionState) -> Iterator[SourceBatch]:
        """Read from the state's cursor on, within the memory limit; the next batch while one is used."""
        memory = self.memory
        batches = self.source.batches(
            state.file_index, state.row, batch_bytes=memory.chunk // 2, use_threads=memory.use_threads
        )
        is_users = self.source.files[0].format == "python"  # which may be usable on the user's thread only
        return batches if is_users else self.workers.prefetch(batches)

    def _encoded(self, batch: SourceBatch) -> RawBatch:
        """Turn rows into samples. Raises SourceError naming file, row and column."""
        schema, found = self.layout.schema, dict[str, Any]()

        def encode(name: str, column: Callable[[], Any]) -> None:
            found[name] = column()

        work: dict[str, Callable[[], Any]] = {
            "": partial(encode_label, schema, batch),
            "dense": partial(encode_dense, schema, batch),
        }
        work |= {f"feature {f.name}": partial(encode_feature, f, batch) for f in schema.features}
        self.workers.run(partial(encode, *one) for one in work.items())
        return RawBatch(found[""], found["dense"], {f.name: found[f"feature {f.name}"] for f in schema.features})

    def _tell(self, batch: SourceBatch) -> None:
        self.reporter.samples += batch.columns.num_rows
        self.reporter.tell(self.source.done_bytes)
