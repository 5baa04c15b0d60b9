"""``tiercache extract``: files to a dataset."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Annotated

import typer

from tiercache.cli.output import Json, Output, Quiet


def extract(
    data: Annotated[
        list[str], typer.Argument(help="Files, folders, patterns and URLs: Parquet, Arrow IPC, CSV, TSV, NumPy.")
    ],
    out: Annotated[str, typer.Option(help="The directory of the dataset; with --dask a URL, too.")],
    device_budget: Annotated[str, typer.Option(help="What the rows of a pass may take, such as 8GiB.")],
    schema: Annotated[
        Path | None, typer.Option(help="What the columns mean: a TOML file; not needed with --format criteo.")
    ] = None,
    format: Annotated[  # noqa: A002 - what users call it
        str | None, typer.Option(help="Of every file, whatever its suffix: as \\[source] format in the schema.")
    ] = None,
    devices: Annotated[int, typer.Option(help="How many devices of that budget hold a pass together.")] = 1,
    split_by: Annotated[str, typer.Option(help="Where passes end: budget, rows=N, file, column=NAME.")] = "budget",
    batch_multiple: Annotated[
        int, typer.Option(help="Passes by budget and rows end at multiples of so many samples.")
    ] = 8192,
    min_count: Annotated[int, typer.Option(help="Keys with fewer occurrences share one row.")] = 1,
    memory_limit: Annotated[str, typer.Option(help="Memory for samples on their way and key tables.")] = "1GiB",
    workers: Annotated[int | None, typer.Option(help="Threads; all cores where not given.")] = None,
    samples: Annotated[
        bool, typer.Option("--samples/--no-samples", help="With samples, or key sets alone for a loader of yours.")
    ] = True,
    append: Annotated[
        bool, typer.Option("--append", help="Add sub-datasets of the files that the dataset does not have yet.")
    ] = False,
    prior_counts: Annotated[
        list[Path] | None, typer.Option(help="An earlier dataset whose counts go on; may be given several times.")
    ] = None,
    dask: Annotated[
        str | None, typer.Option(help="The address of a Dask scheduler whose workers do it, as tcp://host:8786.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Turn files of samples into passes that fit the device.

    Killed at any moment, the same command goes on from the last closed pass to the same files.
    """
    from tiercache.data.extract import extract as run
    from tiercache.errors import ExtractionError

    output = Output(as_json, quiet)
    try:
        made = run(
            data,
            schema,
            out,
            device_budget=device_budget,
            format=format,
            devices=devices,
            split_by=split_by,
            batch_multiple=batch_multiple,
            min_count=min_count,
            memory_limit=memory_limit,
            workers=workers,
            samples=samples,
            append=append,
            prior_counts=prior_counts or [],
            dask=dask,
            progress=output.is_text,
        )
    except KeyboardInterrupt:
        raise ExtractionError(f"stopped; the same command goes on from the last closed pass in {out}") from None
    if as_json:
        output.result({"path": str(out), "passes": len(made), "samples": made.samples}, "")


def warmup(
    device: Annotated[str, typer.Option(help="Also compile the kernels of this device: cuda, or cuda:1.")] = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compile all kernels ahead of the first extraction or training.

    The compiled code is kept on disk, beside the package or in your cache folder, for this version and CPU.
    """
    from tiercache.kernels.cpu.jit import cache_folder
    from tiercache.reporting.progress import prepare_kernels
    from tiercache.rows.backends.open_backend import open_backend

    output = Output(as_json, quiet)
    with contextlib.nullcontext() if output.is_text else contextlib.redirect_stderr(io.StringIO()):
        prepare_kernels(narrow=True)
        open_backend(device, ())
    folder = cache_folder()
    if folder is None and not quiet:
        typer.echo("warning: no cache folder can be written, so each process compiles: set NUMBA_CACHE_DIR", err=True)
    text = f"kernels are compiled: {folder}" if folder else "kernels are compiled for this process"
    output.result({"cache_folder": None if folder is None else str(folder)}, text)


def report(
    run: Annotated[Path, typer.Argument(help="What cache.write_report() wrote: a JSON object a line.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page: an HTML file.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Its title; the name of the run where not given.")] = None,
    png: Annotated[bool, typer.Option("--png", help="Write the pictures beside it too, as PNGs.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write one HTML page about a run: a timeline, bytes planned and measured, and every pass."""
    from tiercache.reporting.figures import read_reports, write_html, write_pngs

    reports = read_reports(run)
    try:
        write_html(reports, out, title=title or run.stem)
        pictures = write_pngs(reports, out) if png else []
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from error
    done = {"out": str(out), "passes": len(reports), "pictures": [str(one) for one in pictures]}
    Output(as_json, quiet).result(done, f"{out} shows {len(reports):,} passes: open it in a browser")
