"""Imports: rows from files of another format, or from arrays, to a store."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.errors import ImportExportError, ImportExportWarning
from tiercache.io.exporting import MANIFEST, MAX_COUNT, ExportedTable, ExportManifest, file_name
from tiercache.io.formats import Column, TableReader, find_format
from tiercache.io.staging import file_errors, to_path
from tiercache.io.torch_format import load_tensors
from tiercache.store import Store, load_rows
from tiercache.store.bulk_load import LOAD_BYTES
from tiercache.store.locks import MARKER
from tiercache.store.opening import StoreDirectory
from tiercache.store.scan import chunk_rows_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from tiercache.store.table import Table


def read_array(place: str, table: Table, arrays: Mapping[str, Any], names: Mapping[str, str]) -> TableReader:
    """Return the reader of a table's array: a vector for each key (n, dim), or a pair of keys (n,) and vectors.

    The array is the one that ``names`` has for the table, else the one named after the table or ``NAME.weight``, else
    the only one that ends with ``.NAME`` or ``.NAME.weight``. Raises ImportExportError if there is none, and for
    anything but arrays and dense tensors of the table's shape and dtype.
    """
    chosen = names.get(table.name)
    exact = [name for name in ([chosen] if chosen else [table.name, f"{table.name}.weight"]) if name in arrays]
    suffixes = () if chosen else (f".{table.name}", f".{table.name}.weight")
    matches = exact[:1] or [name for name in arrays if name.endswith(suffixes)]
    if len(matches) != 1:
        seen = f"no {chosen!r}" if chosen else "several arrays" if matches else "no array"
        shown = ", ".join(list(arrays)[:12]) + (", ..." if len(arrays) > 12 else "")
        raise ImportExportError(
            f"{place} has {seen} for table {table.name!r}: choose one of {shown} for it "
            f"with names={{{table.name!r}: ...}} or --map {table.name}=..."
        )
    what, value = f"{matches[0]!r} in {place}", arrays[matches[0]]
    keys, vectors = value if isinstance(value, tuple) and len(value) == 2 else (None, value)
    vector = _column(what, vectors)
    if keys is not None:
        key = _column(f"the keys of {what}", keys)
    else:
        key = Column((vector.shape or (0,))[:1], "int64", lambda rows: np.arange(rows.start, rows.stop))
    return TableReader(what, table, {"keys": key, "vector": vector})


def _column(what: str, values: Any) -> Column:
    if np.ma.is_masked(values):
        raise ImportExportError(f"{what} has masked values: leave these rows out, or fill the values")
    if isinstance(values, np.ndarray):
        return Column.of(values)
    if hasattr(values, "is_meta") and hasattr(values, "layout"):  # a tensor, without importing torch
        return Column.of_tensor(values, what)
    raise ImportExportError(
        f"{what} is of type {type(values).__name__}: pass an array or a tensor, or a pair (keys, vectors)"
    )


def import_store(
    source: str | os.PathLike[str] | Mapping[str, Any],
    store: Store | str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - what users call it
    tables: Iterable[Table] | None = None,
    names: Mapping[str, str] | None = None,
    initial_state: bool = False,
    reserved_keys: bool = False,
    steps: int | None = None,
    memory_bytes: int = LOAD_BYTES,
    progress: Callable[[str, int, int], None] | None = None,
) -> ExportManifest:
    """Make a commit of the rows of ``source``, and return the manifest of the import.

    In a store with rows, each imported row replaces the row of its key. Other rows and tables, the dense state and the
    position of training stay. That takes one sweep of the store's keys; the next training run reorganizes the store for
    its dataset and continues at the same pass. ``Store.changes`` reports the rows.

    ``source`` is one of:

    * a folder of files, as ``export_store`` writes it. ``format`` and ``tables`` default to those in its
      ``tables.json``; without one, all tables must be in the folder;
    * a file of ``torch.save``: the state dict of a model. The vectors (n, dim) of a table are the tensor that ``names``
      maps the table to, else the one named after the table, such as ``emb.user.weight`` for table "user". Key i is row
      i. Only tensors are loaded from the file;
    * a dict in memory, searched in the same way: arrays or dense tensors (n, dim), where key i is row i, or pairs
      (keys (n,) int64, vectors (n, dim)).

    Vectors are float32, or of the table's 16-bit dtype. ``store`` is open for writing, or the path of a store, which is
    created with ``tables`` if needed. For an existing store, ``tables`` selects its tables to import; None: the ones in
    ``tables.json``, else all. ``initial_state``: optimizer state that the source lacks starts at its initial value.
    ``reserved_keys``: INT64_MIN and INT64_MIN + 1 are the out-of-vocabulary row and the null row of their table.
    ``steps``: the number of steps trained so far, for Adam's state and the rounding of 16-bit vectors; None: as in
    ``tables.json``, else training counts from 0, with an ImportExportWarning. A trained store keeps its own count.
    ``progress(stage, done, total)`` is called with rows, in the stages "sort" and "write". Memory: about
    ``memory_bytes`` and 64 MiB for any number of rows.

    All sizes, types and shapes are checked first; an error or a kill leaves the store unchanged.

    Raises ImportExportError, StoreFullError, and the errors of ``Store.open``.
    """
    if hasattr(source, "state_dict"):
        raise ImportExportError(f"the source is {type(source).__name__}, not its tensors: pass its state_dict()")
    place = "the dict of arrays" if isinstance(source, Mapping) else to_path(source, "what is imported")
    store = store if isinstance(store, Store) else to_path(store, "a store")
    selected = None if tables is None else tuple(tables)
    if selected == ():
        raise ImportExportError("tables is empty: pass the tables that the source holds")
    with file_errors(f"the import of {place}"), ExitStack() as stack:
        if not isinstance(store, Store) and StoreDirectory(store).find():
            store = stack.enter_context(Store.open(store))
        if isinstance(store, Store):
            selected = _of_store(store, selected)
        manifest = None
        if isinstance(place, str) or place.is_file():
            if selected is None:
                raise ImportExportError(f"{place} does not describe its tables: pass the tables to import (--schema)")
            _check_names(names or {}, selected)
            _check_format(place, format)
            arrays = source if isinstance(source, Mapping) else load_tensors(Path(place))
            readers = {table: read_array(str(place), table, arrays, names or {}) for table in selected}
        else:
            if not place.exists():
                raise ImportExportError(f"nothing at {place}: pass a folder of files, or a state dict")
            if names:
                raise ImportExportError(
                    f"{place} is a folder, whose files are named after their tables: omit names (--map), which choose "
                    "tensors of a state dict"
                )
            if (place / MARKER).is_file():
                raise ImportExportError(f"{place} is a store: export it and import the files, or copy its directory")
            manifest = _find_manifest(place)
            if manifest is None and (format is None or selected is None):
                missing = ["the format of its files (--format)"] * (format is None)
                missing += ["the tables that they hold (--schema)"] * (selected is None)
                raise ImportExportError(f"{place / MANIFEST} does not exist: pass {' and '.join(missing)}")
            rows = {one.table: one.rows for one in manifest.tables} if manifest else dict.fromkeys(selected or ())
            selected = selected or tuple(rows)
            readers = _open_files(place, format or str(manifest and manifest.format), selected, rows)
        _check(place, readers, initial_state=initial_state)
        reserved = {one.table.name for one in manifest.tables if one.reserved_keys} if manifest else set()
        trained = store.commit.settings.get("steps") if isinstance(store, Store) and store.commit else None
        table_steps = {}
        if manifest is not None and steps is None and trained is None:
            table_steps = {one.table.name: one.steps for one in manifest.tables if one.steps is not None}
            steps = manifest.steps
        exported = tuple(
            ExportedTable(
                table=table,
                rows=reader.rows,
                has_state=reader.has_state and len(table.fields) > 1,
                reserved_keys=reserved_keys or table.name in reserved,
                steps=table_steps.get(table.name),
            )
            for table, reader in readers.items()
        )
        if trained is not None and steps not in {None, trained}:
            raise ImportExportError(f"the store was trained for {trained:,} steps, not {steps:,}: omit steps")
        steps = _steps(place, exported, trained if steps is None else steps)
        if not isinstance(store, Store):
            store = stack.enter_context(Store.open(store, tables=selected))
        done, total = {"sort": 0, "write": 0}, sum(reader.rows for reader in readers.values())

        def advance(stage: str, rows: int) -> None:
            done[stage] += rows
            if progress is not None:
                progress(stage, done[stage], total)

        load_rows(
            store,
            ((table.name, chunk) for table, one in readers.items() for chunk in one.chunks(chunk_rows_of(table))),
            initial_state=initial_state,
            reserved_keys={one.table.name for one in exported if one.reserved_keys},
            settings=({} if steps is None else {"steps": steps})
            | ({"tables": {name: {"step": number} for name, number in table_steps.items()}} if table_steps else {}),
            memory_bytes=memory_bytes,
            progress=advance,
        )
    return ExportManifest(format=format or (manifest.format if manifest else "arrays"), tables=exported, steps=steps)


def _check_names(names: Mapping[str, str], tables: tuple[Table, ...]) -> None:
    """Raise ImportExportError if ``names`` has a table that is not imported."""
    if unknown := names.keys() - {table.name for table in tables}:
        raise ImportExportError(
            f"names (--map) has a table {min(unknown)!r}, which is not imported: the tables are "
            f"{', '.join(repr(table.name) for table in tables)}"
        )


def _check_format(place: str | Path, format_: str | None) -> None:
    """Raise ImportExportError if a file or a dict, which is a state dict, was said to be of another format."""
    if format_ is not None:
        find_format(format_)
        if format_ != "torch" or isinstance(place, str):
            what = "in memory" if isinstance(place, str) else "one file, which is imported as a state dict"
            raise ImportExportError(
                f"{place} is {what}, but format is {format_!r}: pass the folder that holds the files of the tables, or "
                "omit format (--format) for a state dict"
            )


def _of_store(store: Store, tables: tuple[Table, ...] | None) -> tuple[Table, ...]:
    """Return the tables to import to an existing store. Raises ImportExportError for one that it does not have, and
    ValueError for one rank's shard.
    """
    store.check_whole()
    for table in tables or ():
        if table not in store.tables:
            names = ", ".join(repr(one.name) for one in store.tables)
            raise ImportExportError(
                f"table {table.name!r} is not in {store.label}, or is different there: it has {names}"
            )
    return tables or store.tables


def _find_manifest(folder: Path) -> ExportManifest | None:
    manifest = ExportManifest.find(folder)
    if manifest is not None and manifest.since is not None:
        raise ImportExportError(
            f"{folder} holds only the rows that changed since commit {manifest.since}: import an export of all rows"
        )
    return manifest


def _open_files(
    folder: Path, format_: str, tables: tuple[Table, ...], rows: Mapping[Table, int | None]
) -> dict[Table, TableReader]:
    """Open the files of the tables in ``rows``, a count or None for each, without reading them."""
    chosen = find_format(format_)
    if not folder.is_dir():
        raise ImportExportError(f"folder {folder} does not exist: pass the folder that holds the files of the tables")
    counts = {table.name: count for table, count in rows.items()}
    if unknown := counts.keys() - {table.name for table in tables}:
        raise ImportExportError(
            f"{folder} has a table {min(unknown)!r} that the store does not: add it, or export without it"
        )
    readers = {}
    for table in tables:
        if table.name not in counts:
            continue
        alone = format_ == "hugectr" and len(tables) == 1 and (folder / "key").is_file()
        reader = readers[table] = chosen.read(folder, "." if alone else file_name(table), table)
        count = counts[table.name]
        if count not in {None, reader.rows}:
            raise ImportExportError(
                f"{folder / MANIFEST} lists {count:,} rows of table {table.name!r}, but its files hold "
                f"{reader.rows:,}: export it again"
            )
    return readers


def _check(place: object, readers: Mapping[Table, TableReader], *, initial_state: bool) -> None:
    """Raise ImportExportError for missing state unless ``initial_state``; warn once of ignored files."""
    for table, reader in readers.items():
        if not reader.has_state and not initial_state:
            states = ", ".join(f"{field.name} at {field.initial}" for field in table.fields[1:])
            raise ImportExportError(
                f"{place} has no optimizer state of table {table.name!r}: pass initial_state (--initial-state) to "
                f"start with {states}"
            )
    if ignored := [path for reader in readers.values() for path in reader.ignored]:
        warnings.warn(
            f"{', '.join(ignored)}: ignored, because the tables have no field for them",
            ImportExportWarning,
            stacklevel=3,
        )


def _steps(place: object, tables: tuple[ExportedTable, ...], steps: int | None) -> int | None:
    """Return the number of steps of the tables; None if no table needs it, or it is not known."""
    if steps is not None and not 0 <= steps <= MAX_COUNT:
        raise ImportExportError(f"steps is {steps}: it must be 0 .. {MAX_COUNT:,}")
    counting = [one.table for one in tables if one.needs_steps]
    if not counting:
        return None
    if steps is None:
        table = next((table for table in counting if table.optimizer.counts_steps), counting[0])
        what = "Adam's state" if table.optimizer.counts_steps else f"the rounding to {table.dtype}"
        warnings.warn(
            f"{place} does not say how many steps table {table.name!r} was trained, but {what} depends on it: training "
            "counts from 0, unless you pass steps (--steps)",
            ImportExportWarning,
            stacklevel=3,
        )
    return steps
