"""``tiercache store export`` and ``import``: rows to and from the formats of others."""

from __future__ import annotations

import json
import time
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from tiercache.cli.progress import shown_rows
from tiercache.cli.sharded import open_any

if TYPE_CHECKING:
    from tiercache.io.export_manifest import ExportManifest

__all__ = ["export_rows", "import_rows"]

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and no progress.")]


def export_rows(
    path: Annotated[Path, typer.Argument(help="The directory of the store.")],
    out: Annotated[Path, typer.Argument(help="The folder for the files; it must not exist yet.")],
    format: Annotated[  # noqa: A002 - what users call it
        str, typer.Option(help="numpy, parquet, safetensors, hugectr or torch.")
    ],
    table: Annotated[list[str] | None, typer.Option(help="A table; may be given several times.")] = None,
    state: Annotated[bool, typer.Option("--state/--no-state", help="With the optimizer state.")] = True,
    commit: Annotated[int | None, typer.Option(help="The commit to export; the newest where not given.")] = None,
    as_json: _Json = False,
) -> None:
    """Write all rows of a commit, key by key in hash order; of a sharded store those of all parts."""
    from tiercache.io.exporting import export_store

    began = time.perf_counter()
    with open_any(path, commit) as store, shown_rows(as_json=as_json) as tell:
        listing = export_store(
            store, out, format=format, tables=table, with_state=state,
            progress=lambda done, total: tell("export", done, total),
        )  # fmt: skip
    _report(listing, f"{out} holds", time.perf_counter() - began, as_json=as_json)


def import_rows(
    source: Annotated[Path, typer.Argument(help="The folder that holds the files of the tables.")],
    path: Annotated[Path, typer.Argument(help="The directory of the store; it must be new, or without a commit.")],
    format: Annotated[  # noqa: A002 - what users call it
        str | None, typer.Option(help="numpy, parquet, safetensors, hugectr or torch; as tables.json says.")
    ] = None,
    schema: Annotated[Path | None, typer.Option(help="The tables: a TOML file; as tables.json says.")] = None,
    initial_state: Annotated[
        bool, typer.Option("--initial-state", help="Begin with initial optimizer state where the files have none.")
    ] = False,
    reserved_keys: Annotated[
        bool, typer.Option("--reserved-keys", help="INT64_MIN and the key above it are the shared rows of a table.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(help="Steps trained so far, for Adam and 16-bit dtypes; as tables.json says.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Make an empty store's first commit of rows from files."""
    from tiercache.io.importing import import_store
    from tiercache.schema import Schema

    began = time.perf_counter()
    with shown_rows(as_json=as_json) as tell:
        listing = import_store(
            source, path, format=format, tables=None if schema is None else Schema.load(schema).tables,
            initial_state=initial_state, reserved_keys=reserved_keys, steps=steps, progress=tell,
        )  # fmt: skip
    _report(listing, f"{path} holds", time.perf_counter() - began, as_json=as_json)


def _report(listing: ExportManifest, what: str, seconds: float, *, as_json: bool) -> None:
    tables = [
        {"name": one.table.name, "rows": one.rows, "dim": one.table.dim, "has_state": one.has_state}
        for one in listing.tables
    ]
    rows = sum(one.rows for one in listing.tables)
    if as_json:
        typer.echo(json.dumps({"format": listing.format, "rows": rows, "seconds": seconds, "tables": tables}, indent=2))
        return
    names = ", ".join(f"{one.table.name} ({one.rows:,} rows)" for one in listing.tables)
    typer.echo(f"{what} {names}: {rows:,} rows in {seconds:.1f} s, {rows / max(seconds, 1e-9):,.0f} rows/s")
