"""``tiercache info`` and ``verify``: the content of a store or a dataset, and a check of all its bytes."""

from __future__ import annotations

from functools import partial
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiercache.cli import dataset_info
from tiercache.cli.output import AnyPath, Json, Output, Quiet, kind_of, new_table, open_store
from tiercache.sizes import format_bytes, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def show(console: Console, found: dict[str, Any], *, segments: bool) -> None:
    """Print a result of ``tiercache.store.info``: a summary, and with ``segments`` each segment of each rank."""
    is_sharded = "shards" in found
    console.print(found["path"], style="bold", soft_wrap=True)
    lines = [
        ("commit", _position(found)),
        ("rows", f"{found['rows']:,}, {format_bytes(found['row_bytes'])}"),
        ("files", _files(found)),
    ]
    if is_sharded:
        lines.insert(0, ("ranks", str(found["ranks"])))
    elif found["segments"]:
        lines.append(("segments", _segments_line(found)))
    if found["commits"]:
        ids = [str(commit["id"]) for commit in found["commits"]]
        shown = ", ".join(["...", *ids[-8:]] if len(ids) > 8 else ids)
        lines.append(("kept", f"commits {shown} (the newest {found['retention']} are kept)"))
    if found["pins"]:
        lines.append(("pinned", ", ".join(f"commit {commit} as {name!r}" for name, commit in found["pins"].items())))
    for name, text in lines:
        console.print(f"  {name:9}{text}", soft_wrap=True)
    console.print(_tables(found["tables"], is_sharded=is_sharded))
    if is_sharded and found["shards"]:
        console.print(_shards(found))
    if segments:
        for rank, shard in enumerate(found["shards"] if is_sharded else [found]):
            console.print(_segments(f"segments of rank {rank}" if is_sharded else "segments", shard["segments"]))


def verified(report: dict[str, Any]) -> str:
    """Return the message for a store without a problem."""
    commits = len(report["commits"])
    ranks = f"{report['ranks']} ranks at " if "ranks" in report else ""
    if not report.get("deep", True):
        return (
            f"the metadata of the {report['segments']} segments of {report['path']} is intact: --deep reads their rows"
        )
    return (
        f"{report['path']} is intact: {report['rows']:,} rows in {ranks}{commits} commit{'s' if commits != 1 else ''}; "
        f"the checksums of all {report['pages']:,} pages ({format_bytes(report['bytes'])}) in {report['segments']} "
        "segments match"
    )


def _position(found: dict[str, Any]) -> str:
    """Return the newest commit and the position of training in it."""
    if not found["commits"]:
        return "none yet"
    newest = found["commits"][-1]
    sample = f", sample {newest['sample']:,}" if newest["sample"] else ""
    return f"{newest['id']}, training resumes at pass {newest['pass']:,}{sample}"


def _files(found: dict[str, Any]) -> str:
    times = found["file_bytes"] / found["row_bytes"] if found["row_bytes"] else None
    waiting = found["waiting_bytes"]
    return (
        format_bytes(found["file_bytes"])
        + (f", {times:.2f} times the rows" if times else "")
        + (f"; the next rewrite frees {format_bytes(waiting)}" if waiting else "")
    )


def _segments_line(found: dict[str, Any]) -> str:
    return (
        f"{len(found['segments'])}, with {found['live_ranges']:,} live and {found['dead_ranges']:,} dead ranges "
        "(--segments shows each)"
    )


def _tables(tables: list[dict[str, Any]], *, is_sharded: bool) -> Table:
    shown = new_table("tables", "name", "dim", "optimizer", "sharding" if is_sharded else "group", "rows", "bytes")
    for table in tables:
        shown.add_row(
            table["name"],
            str(table["dim"]),
            table["optimizer"]["kind"],
            _sharding(table["sharding"]) if is_sharded else str(table["group"]),
            f"{table['rows']:,}",
            format_bytes(table["rows"] * table["row_bytes"]),
        )
    return shown


def _shards(found: dict[str, Any]) -> Table:
    shown = new_table("ranks", "rank", "commit", "rows", "bytes", "files", "folder")
    for rank, (shard, folder) in enumerate(zip(found["shards"], found["folders"], strict=False)):
        numbers = f"{shard['rows']:,}", format_bytes(shard["row_bytes"]), format_bytes(shard["file_bytes"])
        shown.add_row(str(rank), str(shard["commit"]["id"]), *numbers, folder)
    return shown


def _sharding(sharding: dict[str, Any]) -> str:
    slices = sharding.get("slices", [])
    if not slices:
        return str(sharding["kind"])
    if sharding["kind"] == "table_wise":
        return f"table_wise: rank {slices[0][0]}"
    return f"{sharding['kind']}: " + ", ".join(f"{last - first} on rank {rank}" for rank, first, last in slices)


def _segments(title: str, segments: list[dict[str, Any]]) -> Table:
    shown = new_table(title, "id", "pass", "rows", "live rows", "stale rows", "live ranges", "dead ranges")
    for segment in segments:
        numbers = (segment[name] for name in ("rows", "live_rows", "stale_rows", "live_ranges", "dead_ranges"))
        pass_index = f"{segment['pass']}{' (within)' if segment['within'] else ''}"
        shown.add_row(
            str(segment["id"]),
            "retained" if segment["retained"] else pass_index,
            *(f"{number:,}" for number in numbers),
        )
    return shown


def info(
    path: AnyPath,
    segments: Annotated[bool, typer.Option("--segments", help="Show each segment of a store.")] = False,
    curve: Annotated[
        bool, typer.Option("--curve", help="For a dataset: show the reads and writes of an epoch by host memory.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="For a dataset: plot the same to this file.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show the tables, rows and bytes of a store or a dataset, and its commits or passes.

    For a dataset also the overlap, reuse and skew of its keys. Reads no row of a store.
    """
    found: dict[str, Any]
    is_dataset = kind_of(path) == "dataset"
    if segments and is_dataset:
        raise ValueError(f"{path} is a dataset: --segments is for stores")
    if (curve or plot is not None) and not is_dataset:
        raise ValueError(f"{path} is a store: --curve and --plot are for datasets")
    if is_dataset:
        found, points = dataset_info.describe(path, plot=plot, curve=curve)
        Output(as_json, quiet).result(found, lambda console: dataset_info.show(console, found, points))
    else:
        from tiercache.store import info as describe

        found = describe(path)
        Output(as_json, quiet).result(found, lambda console: show(console, found, segments=segments))


def verify(
    path: AnyPath,
    deep: Annotated[
        bool, typer.Option(help="For a store, read all rows, keys and dense state; otherwise only their metadata.")
    ] = True,
    checkpoints: Annotated[
        bool,
        typer.Option("--checkpoints", help="Also read the tensors that rows start from, and record their checksums."),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Read and check all bytes of a store's kept commits, or of a dataset. Exit code 1 if damaged."""
    from tiercache.store import verify as check

    output = Output(as_json, quiet)
    is_dataset = kind_of(path) == "dataset"
    with output.working("bytes") as report_progress:
        progress = partial(report_progress, "verify")
        report = dataset_info.verify(path, progress) if is_dataset else check(path, deep=deep, progress=progress)
    if checkpoints and is_dataset:
        raise ValueError(f"{path} is a dataset, which has no checkpoints: omit --checkpoints")
    if checkpoints and not report["problems"]:
        report["checkpoints"] = _verify_checkpoints(path, report["problems"])
    if is_dataset:
        text = f"{path} is intact: {report['summary']}, as extracted"
    else:
        text = "" if report["problems"] else verified(report)
        if report.get("checkpoints"):
            read = format_bytes(sum(report["checkpoints"].values()))
            text += f"; so are {read} of the checkpoints that {', '.join(report['checkpoints'])} started from"
    for problem in report["problems"]:
        typer.echo(printable(f"error: {problem}"), err=True)
    if as_json or not report["problems"]:
        output.result(report, text)
    if report["problems"]:
        raise typer.Exit(1)


def _verify_checkpoints(path: Path, problems: list[str]) -> dict[str, int]:
    """Read all tensors that rows of a store begin from; returns bytes by table. Adds a message for each fault."""
    from tiercache.store import CheckpointError

    read: dict[str, int] = {}
    with open_store(path) as store:
        for record in (record for part in store.parts for record in part.checkpoints.values()):
            try:
                read[record.name] = record.check_all()
                record.save()
            except CheckpointError as error:
                problems.append(str(error))
    return read
