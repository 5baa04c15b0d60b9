"""``tiercache store``: what a store holds, and whether it is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiercache.cli.exchange import export_rows, import_rows

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["app"]

app = typer.Typer(help="Look at a parameter store.", no_args_is_help=True)
app.command("export")(export_rows)
app.command("import")(import_rows)

_Path = Annotated[Path, typer.Argument(help="The directory of the store.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@app.command("info")
def show_info(path: _Path, as_json: _Json = False) -> None:
    """Show tables, segments and the newest commit; reads no row."""
    from tiercache.store import info

    found = info(path)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.console import Console

    from tiercache.sizes import format_bytes

    console = Console()
    commit = found["commit"]
    at = "no commit yet" if commit is None else f"commit {commit['id']} at visit {commit['visit']}"
    if commit is not None and commit["sample"]:
        at += f", sample {commit['sample']:,}"
    console.print(
        f"[bold]{path}[/bold]: {at}; {found['rows']:,} live rows, {format_bytes(found['row_bytes'])}; "
        f"files take {format_bytes(found['file_bytes'])}",
        highlight=False,
        soft_wrap=True,
    )
    tables = _table("tables", "name", "dim", "optimizer", "group", "rows", "bytes")
    for table in found["tables"]:
        tables.add_row(
            table["name"],
            str(table["dim"]),
            table["optimizer"]["kind"],
            str(table["group"]),
            f"{table['rows']:,}",
            format_bytes(table["rows"] * table["row_bytes"]),
        )
    console.print(tables)
    if found["segments"]:
        console.print(_segments(found["segments"]))


@app.command("verify")
def check(path: _Path, as_json: _Json = False) -> None:
    """Read everything that the newest commit needs and check it; exit code 1 where anything is wrong."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from tiercache.sizes import format_bytes
    from tiercache.store import verify

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=as_json) as bar:
        task = bar.add_task("verify", total=None)
        report = verify(path, progress=lambda done, total: bar.update(task, completed=done, total=total))
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    for problem in report["problems"]:
        typer.echo(f"error: {problem}", err=True)
    if report["problems"]:
        raise typer.Exit(1)
    if not as_json:
        typer.echo(
            f"{path} is whole: {report['segments']} segments, {report['pieces']:,} pieces and {report['rows']:,} rows "
            f"({format_bytes(report['bytes'])}) are what was written"
        )


def _segments(segments: list[dict[str, Any]]) -> Table:
    table = _table("segments", "id", "visit", "rows", "live rows", "live ranges", "dead ranges")
    for segment in segments:
        numbers = (segment[name] for name in ("rows", "live_rows", "live_ranges", "dead_ranges"))
        visit = f"{segment['visit']}{' (within)' if segment['within'] else ''}"
        table.add_row(str(segment["id"]), visit, *(f"{number:,}" for number in numbers))
    return table


def _table(title: str, first: str, *others: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
