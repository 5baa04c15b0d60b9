"""What ``tiercache store`` says of a sharded store, whose parts several ranks train."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from tiercache.cli.tables import new_table

if TYPE_CHECKING:
    from pathlib import Path

    from tiercache.ranks.common_commit import CommonCommit
    from tiercache.ranks.sharded_store import ShardedStore
    from tiercache.store import Commit, Store

__all__ = ["open_any", "print_info", "print_verification", "refuse_parts", "roll_back_any"]


def open_any(path: Path, commit: int | None = None) -> Store | ShardedStore:
    """Open a store for reading, at ``commit`` where one is given; a sharded one over all its parts."""
    from tiercache.ranks.inspection import is_sharded
    from tiercache.ranks.sharded_store import ShardedStore
    from tiercache.store import Store

    return ShardedStore.open(path, commit=commit) if is_sharded(path) else Store.open(path, mode="r", commit=commit)


def roll_back_any(path: Path, to: int) -> Commit | CommonCommit:
    """Roll a store, or all parts of a sharded one, back to a commit. Raises ValueError for one part alone."""
    from tiercache.ranks.inspection import is_sharded
    from tiercache.ranks.rollback import rollback_sharded
    from tiercache.store import Store
    from tiercache.store.part import is_part

    if is_sharded(path):
        return rollback_sharded(path, to)
    if is_part(path):
        raise ValueError(
            f"{path} is a part of a sharded store, whose parts make commits together: give the path of the sharded "
            "store, and one of its commits"
        )
    with Store.open(path) as store:
        return store.rollback(to)


def refuse_parts(path: Path, what: str) -> None:
    """Raise ValueError where ``path`` is a sharded store or a part of one, whose commits belong together."""
    from tiercache.ranks.inspection import is_sharded
    from tiercache.store.part import is_part

    if is_sharded(path) or is_part(path):
        raise ValueError(
            f"{path} is {'' if is_sharded(path) else 'a part of '}a sharded store, whose parts make commits together, "
            f"and {what} makes one of its own: use it on a store of one process"
        )


def print_info(path: Path, *, as_json: bool) -> None:
    """Show tables, parts and the commits of the record."""
    from rich.console import Console

    from tiercache.ranks.inspection import sharded_info
    from tiercache.sizes import format_bytes

    found = sharded_info(path)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    console, cursor = Console(), found["cursor"]
    at = "no commit yet" if cursor is None else f"pass {cursor['pass']}"
    if cursor is not None and cursor["sample"]:
        at += f", sample {cursor['sample']:,}"
    if found["commits"]:
        at = f"commit {found['commits'][-1]['id']}, {at}"
    console.print(
        f"[bold]{path}[/bold]: {found['ranks']} parts at {at}; {found['rows']:,} live rows, "
        f"{format_bytes(found['row_bytes'])}; files take {format_bytes(found['file_bytes'])}",
        highlight=False,
        soft_wrap=True,
    )
    tables = new_table("tables", "name", "dim", "optimizer", "sharding", "rows", "bytes")
    for table in found["tables"]:
        tables.add_row(
            table["name"],
            str(table["dim"]),
            table["optimizer"]["kind"],
            _table_sharding(table["sharding"]),
            f"{table['rows']:,}",
            format_bytes(table["rows"] * table["row_bytes"]),
        )
    console.print(tables)
    if len(found["commits"]) > 1:
        commits = new_table(f"commits (the newest {found['retention']} are kept)", "id", "pass", "sample", "of parts")
        for kept in found["commits"]:
            of_parts = ", ".join(map(str, kept["parts"]))
            commits.add_row(str(kept["id"]), f"{kept['pass']:,}", f"{kept['sample']:,}", of_parts)
        console.print(commits)
    parts = new_table("parts", "rank", "commit", "rows", "bytes", "files", "folder")
    for rank, (part, folder) in enumerate(zip(found["parts"], found["folders"], strict=False)):
        numbers = f"{part['rows']:,}", format_bytes(part["row_bytes"]), format_bytes(part["file_bytes"])
        parts.add_row(str(rank), str(part["commit"]["id"]), *numbers, folder)
    console.print(parts)


def print_verification(path: Path, *, as_json: bool) -> None:
    """Read every part and check it; exit code 1 where anything is wrong."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    from tiercache.ranks.inspection import verify_sharded
    from tiercache.sizes import format_bytes

    columns = BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=as_json) as bar:
        task = bar.add_task("verify", total=None)
        report = verify_sharded(path, progress=lambda done, total: bar.update(task, completed=done, total=total))
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    for problem in report["problems"]:
        typer.echo(f"error: {problem}", err=True)
    if report["problems"]:
        raise typer.Exit(1)
    if not as_json:
        commits = len(report["commits"])
        typer.echo(
            f"{path} is whole: {report['ranks']} parts that belong together at {commits} "
            f"commit{'s' if commits != 1 else ''}, {report['segments']} segments, "
            f"{report['pieces']:,} pieces and {report['rows']:,} rows ({format_bytes(report['bytes'])}) are what was "
            "written"
        )


def _table_sharding(sharding: dict[str, Any]) -> str:
    slices = sharding.get("slices", [])
    if not slices:
        return str(sharding["kind"])
    if sharding["kind"] == "table":
        return f"table: rank {slices[0][0]}"
    return f"{sharding['kind']}: " + ", ".join(f"{last - first} on rank {rank}" for rank, first, last in slices)
