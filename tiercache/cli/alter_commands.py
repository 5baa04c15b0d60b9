"""Commands that change the tables and the rows of a store: ``tiercache alter`` and ``forget``."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiercache.cli.output import Json, Output, Quiet, StorePath, open_store
from tiercache.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiercache.store import Table


def alter(
    path: StorePath,
    schema: Annotated[Path, typer.Option(help="A schema file with all tables as they should be.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Add or drop tables, grow dims, change optimizers and their settings. The next rewrite moves the rows."""
    from tiercache.schema import Schema
    from tiercache.store.alteration import alter as run

    tables = Schema.load(schema).tables
    with open_store(path, mode="a") as store:
        before, rows = store.commit, {table.name: store.live_rows(table.name) for table in store.tables}
        commit = run(store, tables)
        waiting, is_altered = store.waiting_bytes, bool(commit.stored)
    changes = [] if before is None else _alterations(before.tables, commit.tables)
    dropped = {name: rows[name] for name in rows.keys() - {table.name for table in commit.tables}}
    lines = [*changes, *(f"table {name!r} had {count:,} rows" for name, count in sorted(dropped.items()))]
    if not changes:
        lines = [f"{path} already has these tables"]
    if is_altered:
        lines.append(f"commit {commit.id} has the tables; the next training run or compact moves the rows")
    elif changes:
        lines.append(f"commit {commit.id} has the tables; training continues where it was")
    if waiting:
        lines.append(f"the next rewrite frees {format_bytes(waiting)}")
    done = {"commit": commit.id, "changes": changes, "dropped_rows": dropped, "waiting_bytes": waiting}
    Output(as_json, quiet).result(done, "\n".join(lines))


def forget(
    path: StorePath,
    table: Annotated[str, typer.Argument(help="The name of the table.")],
    keys: Annotated[
        Path | None, typer.Option(help="A .npy file of keys, or a text file with one key per line.")
    ] = None,
    unused_since: Annotated[
        int | None, typer.Option(help="Instead of keys: rows that no commit after this one wrote.")
    ] = None,
    now: Annotated[
        bool, typer.Option("--now", help="Also rewrite the store, and drop commits that only the retention keeps.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Delete rows of a table. The next rewrite frees their bytes, or this command with --now."""
    from tiercache.io.key_file import read_keys
    from tiercache.store.alteration import forget as run

    output = Output(as_json, quiet)
    with open_store(path, mode="a") as store, output.working():
        done = run(store, table, None if keys is None else read_keys(keys), unused_since=unused_since, now=now)
    lines = [f"commit {done.commit.id} has {done.rows:,} fewer rows in table {table}"]
    if done.unknown:
        lines.append(f"{done.unknown:,} of the keys had no row")
    if done.waiting_bytes:
        lines.append(f"the next rewrite frees {format_bytes(done.waiting_bytes)}")
    if done.listed_by:
        lines.append(
            f"still listed by {', '.join(done.listed_by)}: unpin these commits, close readers, and run the command "
            "again"
        )
    elif now:
        lines.append("no commit lists the rows anymore, and their bytes are free")
    record = {
        "commit": done.commit.id, "rows": done.rows, "unknown": done.unknown, "waiting_bytes": done.waiting_bytes,
        "listed_by": list(done.listed_by),
    }  # fmt: skip
    output.result(record, "\n".join(lines))


def _alterations(before: Sequence[Table], after: Sequence[Table]) -> list[str]:
    """Return the changes, a line for each new or dropped table and for each changed value."""
    old, new = ({table.name: table for table in tables} for tables in (before, after))
    lines = [f"table {name!r} is dropped" for name in sorted(old.keys() - new.keys())]
    lines += [f"table {name!r} is new" for name in sorted(new.keys() - old.keys())]
    for name in sorted(old.keys() & new.keys()):
        one, other = old[name].to_record(), new[name].to_record()
        for part in one:
            if one[part] != other.get(part):
                lines.append(f"table {name!r}: {part} {_text(one[part])} becomes {_text(other.get(part))}")
    return lines


def _text(value: Any) -> str:
    """Return a value of a table's record as one writes it in a schema."""
    if not isinstance(value, dict):
        return str(value)
    return f"{value['kind']}({', '.join(f'{name}={one}' for name, one in value.items() if name != 'kind')})"
