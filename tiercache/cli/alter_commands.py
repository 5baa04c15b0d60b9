"""Commands that change the tables and the rows of a store: ``tiercache alter`` and ``forget``."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer

from tiercache.cli.output import Json, Output, Quiet, StorePath, open_store
from tiercache.sizes import format_bytes


def alter(
    path: StorePath,
    schema: Annotated[Path, typer.Option(help="A schema file with all tables as they are to be.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Add or drop tables, grow dims, change optimizers and their settings. The next rewrite moves the rows."""
    from tiercache.schema import Schema
    from tiercache.store.alter import alter as run
    from tiercache.store.alter import alterations

    tables = Schema.load(schema).tables
    with open_store(path, mode="a") as store:
        before, rows = store.commit, {table.name: store.live_rows(table.name) for table in store.tables}
        commit = run(store, tables)
        waiting, is_altered = store.snapshot.waiting_bytes, bool(commit.stored)
    changes = [] if before is None else alterations(before.tables, commit.tables)
    dropped = {name: rows[name] for name in rows.keys() - {table.name for table in commit.tables}}
    lines = [*changes, *(f"table {name!r} had {count:,} rows" for name, count in sorted(dropped.items()))]
    if not changes:
        lines = [f"{path} has these tables already"]
    if is_altered:
        lines.append(f"commit {commit.id} has the tables; the next training or compact moves the rows")
    elif changes:
        lines.append(f"commit {commit.id} has the tables; training continues where it was")
    if waiting:
        lines.append(f"the next rewrite frees {format_bytes(waiting)}")
    done = {"commit": commit.id, "changes": changes, "dropped_rows": dropped, "waiting_bytes": waiting}
    Output(as_json, quiet).result(done, "\n".join(lines))
