"""``tiercache report``: a run as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tiercache.cli.output import Json, Output, Quiet


def report(
    run: Annotated[Path, typer.Argument(help="What cache.write_report() wrote: a JSON object a line.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page: an HTML file.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Its title; the name of the run where not given.")] = None,
    png: Annotated[bool, typer.Option("--png", help="Write the pictures beside it too, as PNGs.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write one HTML page about a run: a timeline, bytes planned and measured, and every pass."""
    from tiercache.training.html_report import read_reports, write_html, write_pngs

    reports = read_reports(run)
    try:
        write_html(reports, out, title=title or run.stem)
        pictures = write_pngs(reports, out) if png else []
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from error
    done = {"out": str(out), "passes": len(reports), "pictures": [str(one) for one in pictures]}
    Output(as_json, quiet).result(done, f"{out} shows {len(reports):,} passes: open it in a browser")
