"""Exports: the rows of a store to files of another format."""

from __future__ import annotations

import os
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError

from tiercache.data.raw_batch import RESERVED
from tiercache.errors import ImportExportError, ImportExportWarning
from tiercache.io.formats import find_format, regular_file
from tiercache.io.staging import check_space, file_errors, staging_directory, to_path
from tiercache.store import Store
from tiercache.store.files import publish, replace_file, sync
from tiercache.store.scan import SCAN_BYTES
from tiercache.store.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from tiercache.store.scan import Chunk


MANIFEST = "tables.json"
MAX_COUNT = (1 << 63) - 1
"""The limit of rows, and of steps of training."""
_LONGEST_NAME = 200


def _table(value: Any) -> Table:
    """Return a table, or the table of a record. Raises ValueError."""
    return value if isinstance(value, Table) else Table.from_record(value)


_Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
_Record = Annotated[Table, PlainValidator(_table), PlainSerializer(Table.to_record)]


class ExportedTable(BaseModel):
    """One table of an export."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    table: _Record
    rows: _Count
    has_state: bool
    """True if the optimizer state was exported with the vectors."""
    reserved_keys: bool
    """True if INT64_MIN or INT64_MIN + 1 is among the keys: the out-of-vocabulary row, the null row."""
    steps: _Count | None = None
    """Steps of the table so far, if it needs them and they differ from the steps of the training."""

    @property
    def needs_steps(self) -> bool:
        """True if training continues from these rows with the number of steps trained so far.

        Adam's state depends on it, and so does the rounding of 16-bit vectors; without its state a row starts over.
        """
        is_complete = self.has_state or len(self.table.fields) == 1
        return is_complete and (self.table.optimizer.counts_steps or self.table.dtype != "float32")


def _distinct(tables: tuple[ExportedTable, ...]) -> tuple[ExportedTable, ...]:
    names = [one.table.name for one in tables]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two tables are named {min(twice)!r}")
    return tables


class ExportManifest(BaseModel):
    """The tables of an export, and its format."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    version: Literal[1] = 1
    format: str
    tables: Annotated[tuple[ExportedTable, ...], AfterValidator(_distinct)]
    steps: _Count | None = None
    """Steps of training so far, if a table needs them; None: not known."""
    since: int | None = None
    """The commit after which the rows changed; None: all rows were exported."""

    def to_bytes(self) -> bytes:
        """Return the content of ``tables.json``."""
        return self.model_dump_json(indent=2).encode() + b"\n"

    @classmethod
    def find(cls, folder: Path) -> ExportManifest | None:
        """Read the manifest in a folder; None if there is none. Raises ImportExportError."""
        path = folder / MANIFEST
        if not path.exists():
            return None
        try:
            return cls.model_validate_json(regular_file(path).read_bytes())
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise ImportExportError(
                f"{path} cannot be read ({place and place + ': '}{first['msg']}): export again, or remove it and pass "
                "tables"
            ) from error


def file_name(table: Table) -> str:
    """Return the file name of a table: its name, percent-encoded if paths need it.

    A name that is too long becomes the table id in hexadecimal.
    """
    name = quote(table.name, safe=" ")
    if name.startswith(".") or name == MANIFEST:
        name = name.replace(".", "%2E")
    return name if len(name) <= _LONGEST_NAME else f"%{table.table_id:016x}"


def export_store(
    store: Store | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: str,  # noqa: A002 - what users call it
    tables: Iterable[str] | None = None,
    since: int | None = None,
    with_state: bool = True,
    memory_bytes: int = SCAN_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> ExportManifest:
    """Write the rows at the store's newest commit to a folder ``out``, which must not exist yet.

    ``store``: an open store, at any of its commits, or the path of one.
    ``format``: "numpy", "parquet", "safetensors", "hugectr" or "torch" (docs/io.md). ``tables``: names; None: all.
    ``since``: a commit; only rows that changed after it are written, in any order. None: all rows, in hash order.
    ``with_state``: also export the optimizer state; if the format cannot store it, one ImportExportWarning names the
    tables. ``progress(done, total)`` is called with rows. Memory: about ``memory_bytes`` and 128 MiB for any number of
    rows.

    The folder gets its name in one step, when all files are on disk: after an error or a kill there is nothing at
    ``out``, and a second export to it at the same time is refused. Do not commit to an open ``store`` during the
    export.

    Raises ImportExportError, ValueError for one rank's shard, and the errors of ``Store.open``, ``Store.scan`` and
    ``Store.changes``.
    """
    out, chosen = to_path(out, "an export"), find_format(format)
    with file_errors(f"the export to {out}"), ExitStack() as stack:
        if isinstance(store, (str, os.PathLike)):
            store = stack.enter_context(Store.open(to_path(store, "a store"), mode="r"))
        store.check_whole()
        selected = _tables(store, tables)
        if store.commit is None:
            raise ImportExportError(f"{store.label} has no commit, so no rows to export: train it or import into it")
        if out.exists():
            raise ImportExportError(f"{out} exists: choose another path for the export")
        counts = {
            name: store.live_rows(name) if since is None else store.changed_rows(name, since=since)
            for name in (table.name for table in selected)
        }
        fields = {table.name: chosen.fields(table, with_state=with_state) for table in selected}
        _warn_of_state(format, [one for one in selected if with_state and len(fields[one.name]) < len(one.fields)])
        out.parent.mkdir(parents=True, exist_ok=True)
        needed = sum(counts[table.name] * chosen.row_bytes(fields[table.name]) for table in selected)
        check_space(out.parent, needed, "the export")
        draft = stack.enter_context(staging_directory(out))
        done, total, exported = 0, sum(counts.values()), []
        for table in selected:
            written, reserved, width = 0, False, len(fields[table.name])
            writer = chosen.write(draft, file_name(table), table, fields[table.name], counts[table.name])
            for keys, values in _rows(store, table, since, memory_bytes, draft):
                writer.write((keys, values[:width]))
                reserved = reserved or bool(np.any(keys <= RESERVED[1]))
                written += keys.size
                if progress is not None:
                    progress(done + written, total)
            writer.close()
            assert written == counts[table.name]
            done += written
            one = ExportedTable(table=table, rows=written, has_state=width > 1, reserved_keys=reserved)
            own = store.commit.settings.get("tables", {}).get(table.name, {}).get("step")
            exported.append(one.model_copy(update={"steps": own}) if one.needs_steps else one)
        steps = store.commit.settings.get("steps") if any(one.needs_steps for one in exported) else None
        manifest = ExportManifest(format=format, tables=tuple(exported), steps=steps, since=since)
        replace_file(draft / MANIFEST, manifest.to_bytes())
        for folder in (*(entry for entry in draft.iterdir() if entry.is_dir()), draft):
            sync(folder)
        publish(draft, out)
    return manifest


def _tables(store: Store, names: Iterable[str] | None) -> tuple[Table, ...]:
    """Return the tables with these names; None: all."""
    known = {table.name: table for table in store.tables}
    selected = tuple(known) if names is None else tuple(dict.fromkeys(names))
    if not selected:
        raise ImportExportError("tables is empty: pass the names of the tables to export, or None for all")
    for name in selected:
        if name not in known:
            raise ImportExportError(f"{store.label} has no table {name!r}: it has {', '.join(map(repr, known))}")
    return tuple(known[name] for name in selected)


def _rows(store: Store, table: Table, since: int | None, memory_bytes: int, scratch: Path) -> Iterator[Chunk]:
    if since is None:
        yield from store.scan(table.name, memory_bytes=memory_bytes, scratch=scratch)
        return
    for keys, fields in store.changes(table.name, since=since):
        yield keys, tuple(fields.values())


def _warn_of_state(name: str, tables: list[Table]) -> None:
    if not tables:
        return
    names = ", ".join(f"{table.name!r} ({', '.join(field.name for field in table.fields[1:])})" for table in tables)
    warnings.warn(
        f"format {name!r} cannot hold the optimizer state of {names}: only the vectors are exported",
        ImportExportWarning,
        stacklevel=3,
    )
