"""Imports: rows from files of another format to an empty store."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from tiercache.errors import ImportExportError, ImportExportWarning, TierCacheError
from tiercache.io.export_manifest import LISTING, MOST, ExportManifest, Listed, file_name
from tiercache.io.formats import find_format
from tiercache.store import Store, fill
from tiercache.store.filling import FILL_BYTES
from tiercache.store.scan import chunk_rows_of
from tiercache.store.table import Adam

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator

    from tiercache.io.formats import Format, TableReader
    from tiercache.store.scan import Chunk
    from tiercache.store.table import Table

__all__ = ["import_store"]


def import_store(
    source: str | os.PathLike[str],
    store: Store | str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - what users call it
    tables: Iterable[Table] | None = None,
    initial_state: bool = False,
    reserved_keys: bool = False,
    steps: int | None = None,
    memory_bytes: int = FILL_BYTES,
    progress: Callable[[str, int, int], None] | None = None,
) -> ExportManifest:
    """Make commit 0 of an empty store from the files in folder ``source``, and return what was imported.

    ``store`` is open for writing, or a path where a store is made of ``tables``. ``format`` and ``tables`` are those
    of the source's ``tables.json`` where not said; without one, all tables must be in the source. ``initial_state``:
    optimizer state that the source lacks starts at its initial value. ``reserved_keys``: INT64_MIN and INT64_MIN + 1
    are the out-of-vocabulary row and the null row of their table; what ``tables.json`` says holds without it.
    ``steps``: how many were trained so far, with whose count Adam's state and the rounding of vectors of 16 bits go on;
    as ``tables.json`` says where not given. Where nobody says, training counts from 0, with an ImportExportWarning.
    ``progress(stage, done, total)`` is called with rows: stages "sort" and "write". Takes about ``memory_bytes`` and
    64 MiB for any number of rows.

    All sizes, types and shapes are checked before the store is touched; after an error or a kill it has no commit.

    Raises ImportExportError, StoreFullError, and what ``Store.open`` raises.
    """
    source = Path(source)
    listing = ExportManifest.find(source)
    if listing is None and (format is None or (tables is None and not isinstance(store, Store))):
        raise ImportExportError(
            f"there is no {source / LISTING}: give the format of the files and the tables they hold"
        )
    if listing is not None and format is None:
        format = listing.format  # noqa: A001 - as above
    if listing is not None and tables is None:
        tables = [listed.table for listed in listing.tables]
    chosen = find_format(str(format))
    into = tuple(store.tables) if isinstance(store, Store) else tuple(tables or ())
    if not into:
        raise ImportExportError(f"there are no tables to import from {source}: name at least one")
    readers = _open(source, chosen, into, listing, initial_state=initial_state)
    listed = tuple(
        Listed(
            table=table,
            rows=reader.rows,
            has_state=reader.has_state and len(table.fields) > 1,
            reserved_keys=reserved_keys or _says_reserved(listing, table.name),
        )
        for table, reader in readers
    )
    imported = ExportManifest(format=chosen.name, tables=listed, steps=_steps(source, listed, steps, listing))
    done = {"sort": 0, "write": 0}
    total = sum(reader.rows for _, reader in readers)

    def tell(stage: str, rows: int) -> None:
        done[stage] += rows
        if progress is not None:
            progress(stage, done[stage], total)

    opened: Store | None = None
    try:
        opened = store if isinstance(store, Store) else Store.open(store, tables=into)
        fill(
            opened,
            _chunks(readers),
            initial_state=initial_state,
            reserved_keys={listed.table.name for listed in imported.tables if listed.reserved_keys},
            settings={} if imported.steps is None else {"steps": imported.steps},
            memory_bytes=memory_bytes,
            progress=tell,
        )
    except ValueError as error:
        if isinstance(error, TierCacheError):
            raise
        raise ImportExportError(str(error)) from error
    finally:
        if opened is not None and opened is not store:
            opened.close()
    return imported


def _open(
    source: Path, chosen: Format, tables: tuple[Table, ...], listing: ExportManifest | None, *, initial_state: bool
) -> list[tuple[Table, TableReader]]:
    """Open the files of all tables; nothing of them is read yet."""
    if not source.is_dir():
        raise ImportExportError(f"there is no folder {source}: give the folder that holds the files of the tables")
    rows = {} if listing is None else {listed.table.name: listed.rows for listed in listing.tables}
    names = {table.name for table in tables}
    for name in rows:
        if name not in names:
            raise ImportExportError(
                f"{source} has a table {name!r} that the store does not: add it, or export without it"
            )
    readers = []
    for table in tables:
        if listing is not None and table.name not in rows:
            continue
        alone = chosen.name == "hugectr" and len(tables) == 1 and (source / "key").is_file()
        reader = chosen.reader(source, "." if alone else file_name(table), table)
        if reader.rows != rows.get(table.name, reader.rows):
            raise ImportExportError(
                f"{source / LISTING} counts {rows[table.name]:,} rows of table {table.name!r}, and its files hold "
                f"{reader.rows:,}: export it again"
            )
        if not reader.has_state and not initial_state:
            states = ", ".join(f"{field.name} at {field.initial}" for field in table.fields[1:])
            raise ImportExportError(
                f"{source} has no optimizer state of table {table.name!r}: ask for initial_state (--initial-state) to "
                f"begin with {states}"
            )
        readers.append((table, reader))
    return readers


def _steps(source: Path, tables: tuple[Listed, ...], given: int | None, listing: ExportManifest | None) -> int | None:
    """Return with how many steps tables go on; None where none counts them, or nobody says."""
    if given is not None and not 0 <= given <= MOST:
        raise ImportExportError(f"steps is {given}: it must be 0 .. {MOST:,}")
    counting = [listed.table for listed in tables if listed.counts_steps]
    if not counting:
        return None
    steps = given if given is not None or listing is None else listing.steps
    if steps is None:
        table = next((table for table in counting if isinstance(table.optimizer, Adam)), counting[0])
        what = "Adam's state" if isinstance(table.optimizer, Adam) else f"the rounding to {table.dtype}"
        warnings.warn(
            f"{source} does not say how many steps table {table.name!r} was trained, and {what} goes on with their "
            "count: training counts from 0, unless you give steps (--steps)",
            ImportExportWarning,
            stacklevel=3,
        )
    return steps


def _chunks(readers: list[tuple[Table, TableReader]]) -> Iterator[tuple[str, Chunk]]:
    for table, reader in readers:
        for chunk in reader.chunks(chunk_rows_of(table)):
            yield table.name, chunk


def _says_reserved(listing: ExportManifest | None, name: str) -> bool:
    return listing is not None and any(one.reserved_keys for one in listing.tables if one.table.name == name)
