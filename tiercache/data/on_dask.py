"""The stages of an extraction on a Dask cluster, which schedules them and runs those of dead workers again."""

from __future__ import annotations

import json
from collections import deque
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tiercache.data.dataset import PassDataset
from tiercache.data.inputs import file_system
from tiercache.data.manifest import MANIFEST, Manifest, file_name
from tiercache.data.progress import ProgressReporter
from tiercache.data.resume import ExtractionState, WorkFolder
from tiercache.data.source import BadRows
from tiercache.data.stages import place_passes, scan_file, write_pass
from tiercache.data.workers import Workers
from tiercache.errors import BudgetError, ExtractionError, SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiercache.data.inputs import InputFile
    from tiercache.data.progress import ExtractionProgress
    from tiercache.data.stages import Job

_AGAIN: dict[str, Any] = {"retries": 2, "pure": False}
"""How stages are submitted: Dask repeats those that raise, and keeps no result for equal ones."""


def extract_on(
    dask: Any,
    job: Job,
    inputs: Sequence[InputFile],
    begin: ExtractionState,
    out: str,
    progress: bool | Callable[[ExtractionProgress], None],
) -> PassDataset:
    """Run an extraction on a cluster, write its dataset to ``out`` and return it; that of a URL cannot be read here.

    dask: the address of a scheduler, or a client. inputs: the last files of ``begin``. out: a directory that all
    machines share, or a URL. Stopped at any moment, the same call goes on behind the last pass that was gathered; with
    a URL it starts over.
    """
    if any(file.batches is not None for file in inputs):
        raise ExtractionError("a Python iterable cannot be read on a cluster: give files, or leave dask out")
    fs, folder = file_system(out)
    is_local = "file" in fs.protocol
    where = folder if is_local else out  # workers have other current directories
    if not begin.passes and fs.exists(f"{folder}/{MANIFEST}"):
        raise ExtractionError(f"there is a dataset in {out}: choose another place, or delete it to start over")
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
        state.check_same(begin.options, begin.inputs, root)
        work.clear(keep={file_name(index) for index in range(len(state.passes))})
        reporter.begin("number")
        bad_rows, done_bytes = BadRows(), 0
        left = inputs[state.file_index :]
        rows = [state.row if index == 0 else 0 for index in range(len(left))]
        scans = deque(zip(left, client.map(scan_file, [job] * len(left), left, rows, **_AGAIN), strict=True))

        def tables() -> Iterator[Any]:
            nonlocal bad_rows, done_bytes
            while scans:
                file, future = scans.popleft()
                table = future.result()
                bad_rows += BadRows(**json.loads(table.schema.metadata[b"bad_rows"]))
                done_bytes += file.size
                reporter.tell(done_bytes)
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
            reporter.tell(scanned + scanned * reporter.samples // samples)
        if len(state.passes) == len(begin.passes):
            others = f" and {len(inputs) - 1} more" if len(inputs) > 1 else ""
            raise SourceError(f"no row was found in {inputs[0].path}{others}: give some data")
        for file in inputs:
            file.check_unchanged()
        manifest = Manifest(schema=job.schema, passes=state.passes, options=begin.options, inputs=begin.inputs)
        manifest.write(root)
        if not is_local:
            fs.put_file(str(root / MANIFEST), f"{folder}/{MANIFEST}")
        work.remove()
        made = PassDataset.open(root) if is_local else PassDataset(Path(out), manifest)
        reporter.finish(made.samples, f"{out}: {made.summary}", str(bad_rows))
    return made


@contextmanager
def _connected(dask: Any) -> Iterator[Any]:
    """Give a client of the cluster. Raises ExtractionError where there is none, or where stages end their workers."""
    try:
        import distributed
    except ImportError:
        raise ExtractionError("Dask is not installed: pip install '.[dask]' in the project's folder") from None
    try:
        connect: Any = distributed.Client
        client = connect(dask, set_as_default=False) if isinstance(dask, str) else nullcontext(dask)
    except (OSError, ValueError) as error:
        raise ExtractionError(f"no Dask scheduler answers at {dask}: {error}: give the address of one") from error
    with client as connected:
        try:
            yield connected
        except distributed.KilledWorker as error:
            raise ExtractionError(
                f"a stage ended every worker that ran it ({error}): lower memory_limit, or give workers more memory"
            ) from error
