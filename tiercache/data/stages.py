"""Extraction in stages that may run on different machines: scan each file, place the passes, write each pass.

A scan returns an Arrow table with the information of a file about the ends of passes. Placing goes through these tables
in file order and applies the rules of ``Cutter`` and ``PassBuilder``. Writing reads the samples of one pass again,
numbers them and closes it. The files are the same as from one machine.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import deque
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from tiercache.data.dataset import PassDataset
from tiercache.data.encode import encode
from tiercache.data.extraction_progress import ExtractionProgress, ProgressReporter
from tiercache.data.extraction_resources import MemoryShares, Workers
from tiercache.data.inputs import InputFile, check_read, file_system
from tiercache.data.manifest import MANIFEST, UNFINISHED, Manifest, SubDatasetRecord, file_name
from tiercache.data.open_pass import PassCloser
from tiercache.data.pass_builder import Cut, Cutter, PassBuilder, RowBudget, cut_values
from tiercache.data.raw_batch import RawBatch, join
from tiercache.data.resume import ExtractionState, WorkFolder
from tiercache.data.source import BadRows, Source, SourceBatch
from tiercache.distribution import install_command
from tiercache.errors import BudgetError, ExtractionError, SourceError
from tiercache.kernels.cpu.unique_keys import UniqueKeys
from tiercache.store.files import publish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.schema import Schema


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The options that all stages of an extraction share."""

    schema: Schema
    cut: Cut
    unit: int
    """Samples that stay in one pass together if the row budget cuts."""
    device_bytes: int
    devices: int
    memory_bytes: int
    """Memory limit of each stage."""
    workers: int
    """Threads of each stage."""
    with_samples: bool

    def row_budget(self, passes: Iterable[SubDatasetRecord]) -> RowBudget:
        """Return the row budget after some closed passes."""
        return RowBudget(self.schema.tables, self.device_bytes, self.devices, passes)


class PassRange(NamedTuple):
    """The samples of one pass: their start and end in the files."""

    samples: int
    first_file: int
    first_row: int
    """Kept rows of the first file before the pass."""
    last_file: int
    last_row: int
    """Kept rows of the last file before the end of the pass."""


def scan_file(job: Job, file: InputFile, row: int = 0) -> pa.Table:
    """Scan the rows of a file, from its ``row``-th kept row on, and return the data that decides where passes end.

    The table has one row for each chunk of samples: ``samples`` (int64) counts them. If the row budget cuts, a chunk is
    ``job.unit`` samples, and ``keys.TABLE``, ``first.TABLE`` and ``last.TABLE`` are lists of its unique keys and of the
    first and last sample of the chunk with each: a unit of all the data may begin inside a chunk. If a column cuts, a
    chunk ends where the column changes, and ``value`` is its value. Otherwise a chunk is the file. The metadata has
    ``bad_rows`` as JSON. Raises SourceError naming file, row and column.
    """
    sizes, values, found = list[int](), list[Any](), list[dict[str, Any]]()
    with _reading(job, [file], row) as (source, _, _, batches):
        for value, samples in _chunks(job, batches):
            sizes.append(samples.num_samples)
            values.append(value)
            found.append(_appearances(job.schema, samples) if job.cut.kind == "budget" else {})
        bad_rows = json.dumps(asdict(source.bad_rows))
    columns: dict[str, Any] = {"samples": pa.array(sizes, pa.int64()), "value": pa.array(values)}
    for name in found[0] if found else ():
        parts = [one[name] for one in found]
        ends = np.cumsum([0, *(part.size for part in parts)])
        columns[name] = pa.LargeListArray.from_arrays(ends, np.concatenate(parts))
    return pa.table(columns).replace_schema_metadata({"bad_rows": bad_rows})


def place_passes(
    job: Job,
    tables: Iterable[pa.Table],
    workers: Workers,
    passes: Sequence[SubDatasetRecord] = (),
    file_index: int = 0,
    row: int = 0,
) -> Iterator[PassRange]:
    """Yield the range of each pass, as soon as the tables of ``scan_file`` decide it.

    tables: of all files from ``file_index`` on, the first one from its ``row``-th kept row on. passes: the earlier
    ones. workers: threads that number keys.
    Memory: one table, and the keys of one pass. Raises BudgetError if one unit exceeds the row budget.
    """
    begins = [0]  # samples before each file, and after the last one

    def counted() -> Iterator[pa.Table]:
        for table in tables:
            begins.append(begins[-1] + sum(table["samples"].to_pylist()))
            yield table

    def ends() -> Iterator[int]:
        if job.cut.kind == "budget":
            yield from _budget_ends(job, job.row_budget(passes), counted(), workers)
        else:
            yield from _ends(job.cut, counted())
        yield begins[-1]

    begin = 0
    for end in ends():
        if end > begin:
            first, last = bisect_right(begins, begin) - 1, bisect_left(begins, end) - 1
            rows = [at - begins[file] + (0 if file else row) for at, file in ((begin, first), (end, last))]
            yield PassRange(end - begin, file_index + first, rows[0], file_index + last, rows[1])
        begin = end


def write_pass(job: Job, files: Sequence[InputFile], row: int, samples: int, index: int, out: str) -> SubDatasetRecord:
    """Write sub-dataset ``index`` into ``out``, the path of a directory or a URL, and return its record.

    It has ``samples`` samples from the ``row``-th kept row of the first of its ``files`` on. Its file appears in one
    step if the file system does that. Raises BudgetError if its keys exceed the memory limit.
    """
    fs, folder = file_system(out)
    is_local, name, remaining = "file" in fs.protocol, file_name(index), samples
    scratch = f"{folder}/{UNFINISHED}" if is_local else None
    if scratch is not None and not fs.isdir(scratch):
        raise ExtractionError(f"a worker cannot find {scratch}: use a directory that all machines share, or a URL")
    with (
        TemporaryDirectory(prefix="stage-", dir=scratch) as place,
        closing(WorkFolder(Path(place))) as work,
        _reading(job, files, row) as (_, memory, workers, batches),
    ):
        closer = PassCloser(work, ExtractionState(options={}, inputs=()), workers)
        rows = RowBudget(job.schema.tables, 1 << 62)  # placing has already counted earlier passes
        builder = PassBuilder(
            job.schema, closer, cut=Cut("file"), unit=job.unit, rows=rows, memory=memory,
            with_samples=job.with_samples, on_close=lambda _: None, first_pass=index,
        )  # fmt: skip
        try:
            for batch in batches:
                part = encode(job.schema, batch).slice(0, min(remaining, batch.columns.num_rows))
                builder.note(batch)
                builder.add(part)
                remaining -= part.num_samples
                if not remaining:
                    break
            builder.finish()
        finally:
            builder.abandon()
        if remaining:
            raise SourceError(f"{files[-1].path} was changed while it was read: delete the dataset and start over")
        written = work.out / file_name(0)
        if is_local:
            publish(written, Path(folder) / name)
        else:
            fs.put_file(str(written), f"{folder}/{name}")
        return closer.state.passes[0]


@contextmanager
def _reading(
    job: Job, files: Sequence[InputFile], row: int
) -> Iterator[tuple[Source, MemoryShares, Workers, Iterator[SourceBatch]]]:
    """Read files, the first one from its ``row``-th kept row on."""
    source = Source(files, job.schema, cut_column=job.cut.column)
    memory = MemoryShares.plan(job.memory_bytes, source.decoding_bytes)
    batches = source.batches(0, row, batch_bytes=memory.chunk // 2, use_threads=memory.use_threads and job.workers > 1)
    with closing(Workers(job.workers)) as workers, closing(workers.prefetch(batches)) as prefetched:
        yield source, memory, workers, prefetched


def _chunks(job: Job, batches: Iterable[SourceBatch]) -> Iterator[tuple[Any, RawBatch]]:
    """Yield the chunks of one file, each with the value of the column that cuts."""
    by_kind = {"budget": Cut("rows", rows=job.unit), "rows": Cut("file")}  # rows are counted over files
    cutter, pending, value = Cutter(by_kind.get(job.cut.kind, job.cut)), list[RawBatch](), None
    for batch in batches:
        at, count = 0, batch.columns.num_rows
        is_encoded = job.cut.kind == "budget"
        samples = encode(job.schema, batch) if is_encoded else RawBatch(None, np.empty((count, 0), np.float32), {})
        for begins, piece in cutter.pieces(batch, samples):
            if begins and pending:
                yield value, join(pending)
                pending.clear()
            if not pending and job.cut.column is not None:
                value = cut_values(batch, job.cut.column)[at].as_py()
            pending.append(piece)
            at += piece.num_samples
    if pending:
        yield value, join(pending)


def _appearances(schema: Schema, samples: RawBatch) -> dict[str, NDArray[Any]]:
    """Return the unique keys of each table, and the first and the last sample with each."""
    found: dict[str, NDArray[Any]] = {}
    every = np.arange(samples.num_samples, dtype=np.int32)
    for table in schema.ordered_tables:
        entries = [samples.features[f.name] for f in schema.features if f.table == table.name]
        keys = np.concatenate([np.empty(0, np.int64), *(one.keys for one in entries)])
        at = [every if one.offsets is None else np.repeat(every, np.diff(one.offsets)) for one in entries]
        places = np.concatenate([every[:0], *at])
        unique, numbers = UniqueKeys(table.table_id), np.empty(keys.size, np.int32)
        unique.add(keys, numbers)
        distinct, first = np.empty(unique.count, np.int64), np.full(unique.count, every.size, np.int32)
        last = np.zeros(unique.count, np.int32)
        distinct[numbers] = keys
        np.minimum.at(first, numbers, places)
        np.maximum.at(last, numbers, places)
        found |= {f"keys.{table.name}": distinct, f"first.{table.name}": first, f"last.{table.name}": last}
    return found


def _ends(cut: Cut, tables: Iterable[pa.Table]) -> Iterator[int]:
    """Yield the end, in samples, of each pass but the last, if counts or the data decide it."""
    end, done, last = 0, 0, None
    for table in tables:
        for samples, value in zip(table["samples"].to_pylist(), table["value"].to_pylist(), strict=True):
            if cut.kind == "column" and value != last:
                yield done
            last, done = value, done + samples
        if cut.kind == "file":
            yield done
        while cut.kind == "rows" and end + cut.rows <= done:
            end += cut.rows
            yield end


def _budget_ends(job: Job, budget: RowBudget, tables: Iterable[pa.Table], workers: Workers) -> Iterator[int]:
    """Yield the end, in samples, of each pass but the last, if the row budget cuts."""
    rows = [0] * len(job.schema.tables)
    unique = _no_keys(job.schema, rows)
    unit: dict[str, list[NDArray[np.int64]]] = {name: [] for name in unique}
    begin = unit_begin = done = 0

    def add(name: str) -> None:
        for keys in unit[name]:
            unique[name].add(keys, np.empty(keys.size, np.int32))

    def added() -> list[int]:
        workers.run(partial(add, name) for name in unique)
        return [one.count for one in unique.values()]

    def end_unit() -> Iterator[int]:
        nonlocal unique, rows, begin, unit_begin
        found = added()
        if not budget.fits(found) and unit_begin > begin:
            yield unit_begin
            budget.close(rows)
            unique, begin = _no_keys(job.schema, rows), unit_begin
            found = added()
        if not budget.fits(found):
            raise BudgetError(
                f"one batch multiple of {done - unit_begin:,} samples {budget.excess(found)}: raise device_budget or "
                f"lower batch_multiple (now {job.unit:,})"
            )
        rows, unit_begin = found, done
        for parts in unit.values():
            parts.clear()

    for table in tables:
        if not table.num_rows:
            continue
        lists = {name: [_list(table, f"{kind}.{name}") for kind in ("keys", "first", "last")] for name in unique}
        for chunk, samples in enumerate(table["samples"].to_pylist()):
            head = min(samples, job.unit - done % job.unit)
            for low, high in ((0, head), (head, samples)):
                for name, columns in lists.items():
                    keys, first, last = (values[ends[chunk] : ends[chunk + 1]] for ends, values in columns)
                    unit[name].append(keys[(first < high) & (last >= low)])
                done += high - low
                if low == 0 and done % job.unit == 0:
                    yield from end_unit()
    if done > unit_begin:
        yield from end_unit()


def _no_keys(schema: Schema, expected: Sequence[int]) -> dict[str, UniqueKeys]:
    return {
        table.name: UniqueKeys(table.table_id, expected=count)
        for table, count in zip(schema.ordered_tables, expected, strict=True)
    }


def _list(table: pa.Table, name: str) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return the ends and the values of a column of lists."""
    lists = table[name].combine_chunks()
    return lists.offsets.to_numpy(), lists.values.to_numpy()


_AGAIN: dict[str, Any] = {"retries": 2, "pure": False}
"""Submit options: Dask retries stages that raise, and caches no results."""


def extract_on(
    dask: Any,
    job: Job,
    inputs: Sequence[InputFile],
    begin: ExtractionState,
    out: str,
    progress: bool | Callable[[ExtractionProgress], None],
) -> PassDataset:
    """Run an extraction on a cluster, write its dataset to ``out`` and return it; at a URL it cannot be read here.

    dask: the address of a scheduler, or a client. inputs: the last files of ``begin``. out: a directory that all
    machines share, or a URL. After a stop, the same call resumes after the last pass that was gathered; with a URL it
    starts over.
    """
    if any(file.batches is not None for file in inputs):
        raise ExtractionError("a Python iterable cannot be read on a cluster: pass files, or omit dask")
    fs, folder = file_system(out)
    is_local = "file" in fs.protocol
    where = folder if is_local else out  # workers have other current directories
    if not begin.passes and fs.exists(f"{folder}/{MANIFEST}"):
        raise ExtractionError(f"{out} already has a dataset: choose another path, or delete it to start over")
    with ExitStack() as stack:
        client = stack.enter_context(_connected(dask))
        root = Path(folder)
        if not is_local:
            root = Path(stack.enter_context(TemporaryDirectory()))
            fs.makedirs(folder, exist_ok=True)
        workers = stack.enter_context(closing(Workers()))
        work = stack.enter_context(closing(WorkFolder(root)))
        reporter = stack.enter_context(closing(ProgressReporter(progress, 2 * sum(file.size for file in inputs))))
        state = ExtractionState.read(work.path) or begin
        state.check_same(begin, root)
        work.clear(keep={file_name(index) for index in range(len(state.passes))})
        reporter.begin("number")
        bad_rows, done_bytes = BadRows(), 0
        unread = inputs[state.file_index :]
        rows = [state.row if index == 0 else 0 for index in range(len(unread))]
        scans = deque(zip(unread, client.map(scan_file, [job] * len(unread), unread, rows, **_AGAIN), strict=True))

        def tables() -> Iterator[Any]:
            nonlocal bad_rows, done_bytes
            while scans:
                file, future = scans.popleft()
                table = future.result()
                bad_rows += BadRows(**json.loads(table.schema.metadata[b"bad_rows"]))
                done_bytes += file.size
                reporter.update(done_bytes)
                yield table

        first, writes = len(state.passes), []
        ranges = place_passes(job, tables(), workers, state.passes, state.file_index, state.row)
        for index, at in enumerate(ranges, first):
            files = inputs[at.first_file : at.last_file + 1]
            writes.append((at, client.submit(write_pass, job, files, at.first_row, at.samples, index, where, **_AGAIN)))
        budget, scanned, samples = job.row_budget(state.passes), done_bytes, sum(at.samples for at, _ in writes)
        for at, future in writes:
            record = future.result()
            counts = [record.rows[table.name] for table in job.schema.ordered_tables]
            if not budget.fits(counts):
                raise BudgetError(
                    f"sub-dataset {len(state.passes)}, of {at.samples:,} samples, {budget.excess(counts)}: raise "
                    "device_budget or cut smaller passes"
                )
            budget.close(counts)
            state = state.closed(record, at.last_file, at.last_row)
            state.write(work.path)
            reporter.samples, reporter.passes = reporter.samples + at.samples, len(state.passes)
            reporter.update(scanned + scanned * reporter.samples // samples)
        check_read(inputs, has_rows=len(state.passes) > len(begin.passes))
        manifest = Manifest(schema=job.schema, passes=state.passes, options=begin.options, inputs=begin.inputs)
        manifest.write(root)
        if not is_local:
            fs.put_file(str(root / MANIFEST), f"{folder}/{MANIFEST}")
        work.remove()
        dataset = PassDataset.open(root) if is_local else PassDataset(Path(out), manifest)
        reporter.finish(dataset.samples, f"{out}: {dataset.summary}", str(bad_rows))
    return dataset


@contextmanager
def _connected(dask: Any) -> Iterator[Any]:
    """Yield a client of the cluster. Raises ExtractionError if there is none, or if stages kill their workers."""
    try:
        import distributed
    except ImportError:
        raise ExtractionError(f"Dask is not installed: {install_command('dask')}") from None
    try:
        connect: Any = distributed.Client
        client = connect(dask, set_as_default=False) if isinstance(dask, str) else nullcontext(dask)
    except (OSError, ValueError) as error:
        raise ExtractionError(f"no Dask scheduler answers at {dask}: {error}: pass the address of one") from error
    with client as connected:
        try:
            yield connected
        except distributed.KilledWorker as error:
            raise ExtractionError(
                f"a stage ended every worker that ran it ({error}): lower memory_limit, or give workers more memory"
            ) from error
