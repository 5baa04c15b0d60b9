"""``tiercache info`` and ``verify``: what a store or a dataset holds, and whether it is whole."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated, Any

import typer

from tiercache.cli import dataset_info, store_info
from tiercache.cli.output import AnyPath, Json, Output, Quiet
from tiercache.cli.target import kind_of


def info(
    path: AnyPath,
    segments: Annotated[bool, typer.Option("--segments", help="Show each segment of a store.")] = False,
    curve: Annotated[
        bool, typer.Option("--curve", help="Show what an epoch of a dataset reads and writes by host memory.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw what a dataset holds into this file.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what a store or a dataset holds: tables, rows, bytes, and commits or passes.

    Of a dataset also overlap, reuse and skew of its keys; of a store no row is read.
    """
    found: dict[str, Any]
    is_dataset = kind_of(path) == "dataset"
    if segments and is_dataset:
        raise ValueError(f"{path} is a dataset: --segments is of stores")
    if (curve or plot is not None) and not is_dataset:
        raise ValueError(f"{path} is a store: --curve and --plot are of datasets")
    if is_dataset:
        found, points = dataset_info.describe(path, plot=plot, curve=curve)
        Output(as_json, quiet).result(found, lambda console: dataset_info.show(console, found, points))
    else:
        from tiercache.store import info as describe

        found = describe(path)
        Output(as_json, quiet).result(found, lambda console: store_info.show(console, found, segments=segments))


def verify(path: AnyPath, as_json: Json = False, quiet: Quiet = False) -> None:
    """Read everything that a store's kept commits, or a dataset, hold and check it; exit code 1 where it is damaged."""
    from tiercache.store import verify as check

    output = Output(as_json, quiet)
    is_dataset = kind_of(path) == "dataset"
    with output.working("bytes") as tell:

        def done_of(done: int, total: int) -> None:
            tell("verify", done, total)

        report = dataset_info.verify(path, done_of) if is_dataset else check(path, progress=done_of)
    if is_dataset:
        whole = f"{path} is whole: {report['summary']}, as extracted"
    else:
        whole = "" if report["problems"] else store_info.verified(report)
    for problem in report["problems"]:
        typer.echo(f"error: {problem}", err=True)
    if as_json or not report["problems"]:
        output.result(report, whole)
    if report["problems"]:
        raise typer.Exit(1)
