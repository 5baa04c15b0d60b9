"""``tiercache store``: what a store holds, whether it is whole, and its commits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiercache.cli.exchange import export_rows, import_rows
from tiercache.cli.progress import shown_rows
from tiercache.cli.sharded import open_any, print_info, print_verification, refuse_parts, roll_back_any
from tiercache.cli.tables import new_table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
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
    from tiercache.ranks.inspection import is_sharded
    from tiercache.store import info

    if is_sharded(path):
        print_info(path, as_json=as_json)
        return
    found = info(path)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.console import Console

    from tiercache.sizes import format_bytes

    console = Console()
    commit = found["commit"]
    at = "no commit yet" if commit is None else f"commit {commit['id']} at pass {commit['pass']}"
    if commit is not None and commit["sample"]:
        at += f", sample {commit['sample']:,}"
    console.print(
        f"[bold]{path}[/bold]: {at}; {found['rows']:,} live rows, {format_bytes(found['row_bytes'])}; "
        f"files take {format_bytes(found['file_bytes'])}"
        + (f", {found['space_amplification']:.2f} times as much" if found["rows"] else ""),
        highlight=False,
        soft_wrap=True,
    )
    tables = new_table("tables", "name", "dim", "optimizer", "group", "rows", "bytes")
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
    if len(found["commits"]) > 1:
        commits = new_table(f"commits (the newest {found['retention']} are kept)", "id", "pass", "sample", "segments")
        for kept in found["commits"]:
            commits.add_row(str(kept["id"]), *(f"{kept[name]:,}" for name in ("pass", "sample", "segments")))
        console.print(commits)
    if found["segments"]:
        console.print(_segments(found["segments"]))


@app.command("verify")
def check(path: _Path, as_json: _Json = False) -> None:
    """Read everything that the kept commits need and check it; exit code 1 where anything is wrong."""
    from tiercache.ranks.inspection import is_sharded

    if is_sharded(path):
        print_verification(path, as_json=as_json)
        return
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
        commits = len(report["commits"])
        typer.echo(
            f"{path} is whole: {commits} commit{'s' if commits != 1 else ''}, {report['segments']} segments, "
            f"{report['pieces']:,} pieces and {report['rows']:,} rows ({format_bytes(report['bytes'])}) "
            "are what was written"
        )


@app.command("lookup")
def show_rows(
    path: _Path,
    table: Annotated[str, typer.Argument(help="The name of the table.")],
    keys: Annotated[list[int] | None, typer.Argument(help="Keys; put -- before them where one is negative.")] = None,
    keys_file: Annotated[Path | None, typer.Option("--keys", help="A .npy file of keys (int64).")] = None,
    missing: Annotated[str, typer.Option(help="Rows of keys that are not there: error, initial or zeros.")] = "error",
    commit: Annotated[int | None, typer.Option(help="The commit to read; the newest where not given.")] = None,
    as_json: _Json = False,
) -> None:
    """Show the rows of keys: the vector and every optimizer state."""
    import numpy as np

    from tiercache.store import Store
    from tiercache.store.serving import lookup

    for key in keys or []:
        if not -(1 << 63) <= key < 1 << 63:
            raise ValueError(f"key {key} is beyond int64, which keys are: give keys of -2**63 to 2**63 - 1")
    wanted = np.array(keys or [], dtype=np.int64)
    if keys_file is not None:
        wanted = np.concatenate([wanted, _read_keys(keys_file)])
    with open_any(path, commit) as store, shown_rows(as_json=as_json) as tell:
        if isinstance(store, Store):
            fields = lookup(store, table, wanted, missing, progress=tell)
        else:
            fields = store.lookup(table, wanted, missing=missing, progress=tell)
    if as_json:
        rows = [{name: values[i].tolist() for name, values in fields.items()} for i in range(wanted.size)]
        typer.echo(json.dumps([{"key": key, **row} for key, row in zip(wanted.tolist(), rows, strict=True)]))
        return
    from rich.console import Console

    shown = new_table(f"table {table}", "key", *fields)
    for i, key in enumerate(wanted.tolist()):
        shown.add_row(str(key), *(_numbers(values[i]) for values in fields.values()))
    Console().print(shown)


@app.command("changes")
def show_changes(
    path: _Path,
    since: Annotated[int, typer.Option(help="A commit; -1 for all rows.")],
    out: Annotated[Path | None, typer.Option(help="A folder for the keys: TABLE.npy (int64) for each table.")] = None,
    as_json: _Json = False,
) -> None:
    """Count the rows that changed after a commit, and write their keys where asked to."""
    from tiercache.io.changed_keys import write_changed_keys
    from tiercache.store import Store
    from tiercache.store.serving import changed_rows

    with open_any(path) as store, shown_rows(as_json=as_json) as tell:
        newest = -1 if store.commit is None else store.commit.id
        if isinstance(store, Store):
            counts = {table.name: changed_rows(store, table.name, since) for table in store.tables}
        else:
            counts = {table.name: store.changed_rows(table.name, since) for table in store.tables}
        if out is not None:
            write_changed_keys(store, since, counts, out, lambda done, total: tell("changes", done, total))
    if as_json:
        typer.echo(json.dumps({"since": since, "commit": newest, "rows": counts}))
        return
    for name, rows in counts.items():
        typer.echo(f"{name}: {rows:,} rows changed between commit {since} and commit {newest}")


@app.command("diff")
def compare(
    path: _Path,
    other: Annotated[Path | None, typer.Argument(help="Another store; not given: the same one.")] = None,
    commit: Annotated[int | None, typer.Option("--from", help="A commit of the first store.")] = None,
    other_commit: Annotated[int | None, typer.Option("--to", help="A commit of the second store.")] = None,
    as_json: _Json = False,
) -> None:
    """Compare two stores, or two commits of one, row by row and bit by bit; exit code 1 where they differ."""
    from contextlib import ExitStack
    from dataclasses import asdict

    from tiercache.store import differences

    with ExitStack() as stack:
        tell = stack.enter_context(shown_rows(as_json=as_json))
        first = open_any(path)
        stack.callback(first.close)
        second = first if other is None else open_any(other)
        stack.callback(second.close)
        first = first if commit is None else first.at(commit)
        second = second if other_commit is None else second.at(other_commit)
        found = differences(first, second, progress=lambda done, total: tell("diff", done, total))
    same = not any(one.only_first or one.only_second or one.different for one in found)
    if as_json:
        typer.echo(json.dumps({"same": same, "tables": [asdict(one) for one in found]}))
    else:
        from rich.console import Console

        names = "only first", "only second", "different", "same"
        shown = new_table("differences", "table", *names, "for example keys")
        for one in found:
            counts = (one.only_first, one.only_second, one.different, one.same)
            shown.add_row(one.table, *(f"{count:,}" for count in counts), ", ".join(map(str, one.examples)))
        Console().print(shown)
    if not same:
        raise typer.Exit(1)


@app.command("compact")
def compact(path: _Path, as_json: _Json = False) -> None:
    """Leave one range for each table, in hash order, for serving; training goes on after a reorganization."""
    from tiercache.store import Store
    from tiercache.store.scan import live_rows
    from tiercache.training.progress import RewriteProgress

    refuse_parts(path, "compact")
    with Store.open(path) as store:
        rows = 0 if store.commit is None else sum(live_rows(store, table.name) for table in store.tables)
        with RewriteProgress(rows, shown=not as_json and sys.stderr.isatty()) as bar:
            commit = store.compact(progress=bar.advance)
    done = {"commit": commit.id, "rows": rows}
    typer.echo(json.dumps(done) if as_json else f"commit {commit.id} has {rows:,} rows in hash order")


@app.command("rollback")
def roll_back(
    path: _Path, to: Annotated[int, typer.Option(help="A commit that is kept.")], as_json: _Json = False
) -> None:
    """Go back to the rows, the dense state and the cursor of an older commit, as a new commit."""
    commit = roll_back_any(path, to)
    done = {"commit": commit.id, "pass": commit.cursor.pass_index, "sample": commit.cursor.sample}
    typer.echo(json.dumps(done) if as_json else f"commit {commit.id} stands where commit {to} stood")


def _read_keys(path: Path) -> NDArray[np.int64]:
    import numpy as np

    keys = np.load(path, mmap_mode="r", allow_pickle=False)
    if keys.dtype != np.int64 or keys.ndim != 1:
        raise ValueError(f"{path} has {keys.shape} of {keys.dtype}: it must have (n,) of int64")
    return np.asarray(keys)


def _numbers(values: NDArray[np.float32]) -> str:
    shown = " ".join(f"{value:.6g}" for value in values[:6].tolist())
    return f"{shown} ... ({values.size})" if values.size > 6 else shown


def _segments(segments: list[dict[str, Any]]) -> Table:
    table = new_table("segments", "id", "pass", "rows", "live rows", "stale rows", "live ranges", "dead ranges")
    for segment in segments:
        numbers = (segment[name] for name in ("rows", "live_rows", "stale_rows", "live_ranges", "dead_ranges"))
        pass_index = f"{segment['pass']}{' (within)' if segment['within'] else ''}"
        pass_index = "settled" if segment["settled"] else pass_index
        table.add_row(str(segment["id"]), pass_index, *(f"{number:,}" for number in numbers))
    return table
