"""``tiercache export`` and ``import``: rows to and from the formats of other programs."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from tiercache.cli.output import Json, Output, Quiet, StorePath, kind_of, open_store

if TYPE_CHECKING:
    from tiercache.io.exporting import ExportManifest


def export(
    path: StorePath,
    out: Annotated[Path, typer.Argument(help="The folder for the files; it must not exist yet.")],
    format: Annotated[  # noqa: A002 - what users call it
        str | None, typer.Option(help="numpy, parquet, safetensors, hugectr or torch.")
    ] = None,
    overlay: Annotated[
        Path | None,
        typer.Option(help="A checkpoint (safetensors): write the rows that changed it to one file, keys and rows."),
    ] = None,
    tensor: Annotated[
        str | None, typer.Option(help="With --overlay: the tensor; default: the one that the table started from.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="With --overlay: write a copy of the checkpoint's file with these rows.")
    ] = False,
    table: Annotated[list[str] | None, typer.Option(help="A table; may be repeated. All if not given.")] = None,
    since: Annotated[int | None, typer.Option(help="Export only rows that changed after this commit.")] = None,
    state: Annotated[bool, typer.Option("--state/--no-state", help="Also export the optimizer state.")] = True,
    commit: Annotated[int | None, typer.Option(help="The commit to export; the newest if not given.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write rows of a store to files, all or those changed after a commit; or the key sets of a dataset."""
    from tiercache.io.exporting import export_store

    output, began = Output(as_json, quiet), time.perf_counter()
    if overlay is not None:
        if format is not None or since is not None or not state or len(table or []) > 1:
            raise ValueError("--overlay writes the vectors of one table as safetensors: omit --format and --since")
        _export_overlay(path, out, overlay, tensor, table, commit, output, merge=merge)
        return
    if format is None or tensor is not None or merge:
        raise ValueError("pass --format, or --overlay with --tensor and --merge")
    if kind_of(path) == "dataset":
        if table or since is not None or commit is not None or not state:
            raise ValueError(f"{path} is a dataset: its key sets are exported whole, so pass only --format")
        _export_keys(path, out, format, output)
        return
    with open_store(path, commit) as store, output.working() as progress:
        manifest = export_store(
            store, out, format=format, tables=table, since=since, with_state=state,
            progress=partial(progress, "export"),
        )  # fmt: skip
    _report(manifest, out, time.perf_counter() - began, output)


def _export_overlay(
    path: Path, out: Path, base: Path, tensor: str | None, table: list[str] | None, commit: int | None, output: Output,
    *, merge: bool,
) -> None:  # fmt: skip
    """Write the rows of a table as an overlay of a checkpoint, or merged into a copy of its file."""
    from tiercache.io.overlay import export_overlay

    with open_store(path, commit) as store, output.working() as progress:
        done = export_overlay(
            store, out, base=base, table=table[0] if table else None, tensor=tensor, merge=merge,
            progress=partial(progress, "export"),
        )  # fmt: skip
    what = "a copy of the checkpoint with" if merge else "an overlay of"
    output.result(
        {**done._asdict(), "merged": merge},
        f"{out} is {what} {done.rows:,} rows of {done.tensor}, as of commit {done.commit}",
    )


def _export_keys(path: Path, out: Path, format: str, output: Output) -> None:  # noqa: A002 - what users call it
    """Write the key sets of a dataset as HugeCTR's key-set files of int64."""
    from tiercache.data.dataset import PassDataset
    from tiercache.errors import ImportExportError
    from tiercache.io.key_set_file import export_key_sets

    if format != "hugectr":
        raise ImportExportError(f"{path} is a dataset, whose key sets are exported: pass --format hugectr")
    dataset = PassDataset.open(path)
    export_key_sets(dataset, out)
    names = [table.name for table in dataset.tables]
    keys = sum(one.rows(name) for one in dataset for name in names)
    output.result(
        {"format": format, "sub_datasets": len(dataset), "keys": keys, "tables": names},
        f"{out} holds the key sets of {len(dataset)} sub-datasets: {keys:,} keys of {', '.join(names)}",
    )


def import_(
    source: Annotated[Path, typer.Argument(help="The folder with the files of the tables, or a state dict (.pt).")],
    path: Annotated[
        Path,
        typer.Argument(
            help="The directory of the store: a new one, or an existing one, in which rows with the same keys are "
            "replaced."
        ),
    ],
    format: Annotated[  # noqa: A002 - what users call it
        str | None, typer.Option(help="numpy, parquet, safetensors, hugectr or torch; default: as in tables.json.")
    ] = None,
    schema: Annotated[Path | None, typer.Option(help="A TOML file with the tables; default: tables.json.")] = None,
    table: Annotated[
        list[str] | None, typer.Option(help="A table of the schema or the store; may be repeated.")
    ] = None,
    map_: Annotated[
        list[str] | None, typer.Option("--map", help="TABLE=TENSOR of a state dict; may be repeated.")
    ] = None,
    initial_state: Annotated[
        bool, typer.Option("--initial-state", help="Begin with initial optimizer state if the source has none.")
    ] = False,
    reserved_keys: Annotated[
        bool, typer.Option("--reserved-keys", help="Import INT64_MIN and INT64_MIN + 1 as the shared rows of a table.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(help="Steps trained so far, for Adam and 16-bit dtypes; default: as in tables.json.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a commit of rows from files, or from the state dict of a model."""
    from tiercache.io.importing import import_store
    from tiercache.schema import Schema
    from tiercache.store import Store

    output, began = Output(as_json, quiet), time.perf_counter()
    names = _names(map_ or [])
    tables = None if schema is None else Schema.load(schema).tables
    if table:
        if tables is None:
            if not path.exists():
                raise ValueError(f"nothing at {path}: a new store with --table needs the settings of --schema")
            with Store.open(path, mode="r") as store:
                tables = store.tables
        known = {one.name: one for one in tables}
        if unknown := set(table) - known.keys():
            raise ValueError(
                f"the {'store' if schema is None else 'schema'} has no table {min(unknown)!r}: it has "
                f"{', '.join(map(repr, known))}"
            )
        tables = tuple(known[name] for name in table)
    with output.working() as progress:
        manifest = import_store(
            source, path, format=format, tables=tables, names=names, initial_state=initial_state,
            reserved_keys=reserved_keys, steps=steps, progress=progress,
        )  # fmt: skip
    _report(manifest, path, time.perf_counter() - began, output)


def _names(texts: list[str]) -> dict[str, str]:
    """Return the tensors by table of --map. Raises ValueError for other texts, and for a table that is given twice."""
    names = dict[str, str]()
    for text in texts:
        table, equals, name = text.partition("=")
        if not (table and equals and name):
            raise ValueError(f"--map is {text!r}: expected TABLE=TENSOR, such as user=emb.weight")
        if table in names:
            raise ValueError(f"--map has table {table!r} twice, as {names[table]!r} and {name!r}: pass one of them")
        names[table] = name
    return names


def _report(manifest: ExportManifest, place: Path, seconds: float, output: Output) -> None:
    tables = [
        {"name": one.table.name, "rows": one.rows, "dim": one.table.dim, "has_state": one.has_state}
        for one in manifest.tables
    ]
    rows = sum(one.rows for one in manifest.tables)
    names = ", ".join(f"{one.table.name} ({one.rows:,} rows)" for one in manifest.tables)
    output.result(
        {"format": manifest.format, "since": manifest.since, "rows": rows, "seconds": seconds, "tables": tables},
        f"{place} holds {names}: {rows:,} rows in {seconds:.1f} s, {rows / max(seconds, 1e-9):,.0f} rows/s",
    )
