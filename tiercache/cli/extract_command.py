"""``tiercache extract``, and ``warmup`` and ``report``."""

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
    out: Annotated[str, typer.Option(help="The directory of the dataset; with --dask also a URL.")],
    device_budget: Annotated[str, typer.Option(help="Device memory for the rows of a pass, such as 8GiB.")],
    schema: Annotated[
        Path | None, typer.Option(help="A TOML file that describes the columns; not needed with --format criteo.")
    ] = None,
    format: Annotated[  # noqa: A002 - what users call it
        str | None, typer.Option(help="The format of every file, whatever its suffix: [source] format in the schema.")
    ] = None,
    devices: Annotated[int, typer.Option(help="Devices with that budget that train a pass together.")] = 1,
    split_by: Annotated[str, typer.Option(help="Where passes end: budget, rows=N, file, column=NAME.")] = "budget",
    batch_multiple: Annotated[
        int, typer.Option(help="With budget and rows, passes end at multiples of this many samples.")
    ] = 8192,
    min_count: Annotated[int, typer.Option(help="Keys with fewer occurrences share one row.")] = 1,
    memory_limit: Annotated[str, typer.Option(help="Memory for samples in progress and key tables.")] = "1GiB",
    workers: Annotated[int | None, typer.Option(help="Threads; all cores if not given.")] = None,
    samples: Annotated[
        bool, typer.Option("--samples/--no-samples", help="Write samples, or key sets alone for your own loader.")
    ] = True,
    append: Annotated[
        bool, typer.Option("--append", help="Add sub-datasets for files that the dataset does not have yet.")
    ] = False,
    prior_counts: Annotated[
        list[Path] | None, typer.Option(help="An earlier dataset whose counts are added; may be repeated.")
    ] = None,
    dask: Annotated[
        str | None, typer.Option(help="Run on a Dask cluster: the address of its scheduler, such as tcp://host:8786.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Turn files of samples into passes that fit the device.

    After a kill, the same command resumes from the last closed pass and writes the same files.
    """
    from tiercache.data.extract import extract as run
    from tiercache.errors import ExtractionError

    output = Output(as_json, quiet)
    try:
        dataset = run(
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
        raise ExtractionError(f"stopped; the same command resumes from the last closed pass in {out}") from None
    if as_json:
        output.result({"path": str(out), "passes": len(dataset), "samples": dataset.samples}, "")


def warmup(
    device: Annotated[str, typer.Option(help="The device whose kernels are compiled too: cuda, or cuda:1.")] = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compile all kernels before the first extraction or training run.

    The compiled code stays on disk for this version and CPU, next to the package or in your cache folder.
    """
    from tiercache.kernels.cpu.compile import cache_folder
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
    run: Annotated[Path, typer.Argument(help="The file of cache.write_report(): one JSON object per line.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page: an HTML file.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="The title of the page; the name of the run if not given.")] = None,
    png: Annotated[bool, typer.Option("--png", help="Also write the pictures as PNG files.")] = False,
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
