"""Exports: the rows of a store to files of another format."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tiercache.atomic_io import publish, sync, write_whole
from tiercache.data.raw_batch import RESERVED
from tiercache.errors import ImportExportError, ImportExportWarning
from tiercache.io.export_manifest import LISTING, ExportManifest, Listed, file_name
from tiercache.io.formats import find_format
from tiercache.io.free_space import free_space_in
from tiercache.io.staging import staging_directory
from tiercache.store import Store
from tiercache.store.scan import SCAN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tiercache.io.formats import Format
    from tiercache.ranks.sharded_store import ShardedStore
    from tiercache.store.table import Table

__all__ = ["export_store"]


def export_store(
    store: Store | ShardedStore | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: str,  # noqa: A002 - what users call it
    tables: Iterable[str] | None = None,
    with_state: bool = True,
    memory_bytes: int = SCAN_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> ExportManifest:
    """Write all rows at the store's newest commit to a folder ``out``, which must not exist yet, in hash order.

    ``store``: one that is open, a sharded one too, at any of its commits; or the path of one that is not sharded.
    ``format``: "numpy", "parquet", "safetensors", "hugectr" or "torch" (docs/exchange.md). ``tables``: names, all
    where not said. ``with_state``: the optimizer state beside the vectors; where the format has no place for it, an
    ImportExportWarning says so; how many steps were trained is in ``tables.json`` where Adam
    or a 16-bit dtype goes on with their count. ``progress(done, total)`` is called with
    rows. Takes about ``memory_bytes`` and 128 MiB for any number of rows.

    The files get their name in one step, when all are on disk: after an error or a kill nothing is at ``out``, and of
    two exports to it at a time one is refused. No commit may be made meanwhile on a store that is given open.

    Raises ImportExportError, what ``Store.open`` raises for reading, and what ``Store.scan`` raises.
    """
    if isinstance(store, (str, os.PathLike)):
        with Store.open(store, mode="r") as opened:
            return export_store(
                opened, out, format=format, tables=tables, with_state=with_state, memory_bytes=memory_bytes,
                progress=progress,
            )  # fmt: skip
    chosen, wanted, out = find_format(format), _tables(store, tables), Path(out)
    if store.commit is None:
        raise ImportExportError(f"{store.label} has no commit, so no rows to export: train it or import into it first")
    if out.exists():
        raise ImportExportError(f"{out} exists: give the export a path that is free")
    counts = {table.name: store.live_rows(table.name) for table in wanted}
    out.parent.mkdir(parents=True, exist_ok=True)
    needed = sum(
        counts[table.name] * chosen.row_bytes(table, with_state=with_state and chosen.keeps_state(table))
        for table in wanted
    )
    done, total = 0, sum(counts.values())

    def tell(rows: int) -> None:
        nonlocal done
        done += rows
        if progress is not None:
            progress(done, total)

    advice = "free some, export fewer tables, or export elsewhere"
    with free_space_in(out.parent, needed, "the export", advice), staging_directory(out) as draft:
        listed = tuple(
            _export(store, table, counts[table.name], draft, chosen, with_state, memory_bytes, tell) for table in wanted
        )
        settings = store.commit.settings if isinstance(store, Store) else store.settings
        steps = settings.get("steps") if any(one.counts_steps for one in listed) else None
        listing = ExportManifest(format=format, tables=listed, steps=steps)
        write_whole(draft / LISTING, listing.to_bytes())
        for folder in (*(entry for entry in draft.iterdir() if entry.is_dir()), draft):
            sync(folder)
        publish(draft, out)
    return listing


def _export(
    store: Store | ShardedStore,
    table: Table,
    rows: int,
    draft: Path,
    chosen: Format,
    with_state: bool,
    memory_bytes: int,
    tell: Callable[[int], None],
) -> Listed:
    """Write one table, and say what was written."""
    has_state = with_state and chosen.keeps_state(table)
    if with_state and not has_state:
        names = ", ".join(field.name for field in table.fields[1:])
        warnings.warn(
            f"format {chosen.name!r} has no place for the optimizer state ({names}) of table {table.name!r}: "
            "only its vectors are exported",
            ImportExportWarning,
            stacklevel=3,
        )
    reserved, written = False, 0
    writer = chosen.writer(draft, file_name(table), table, rows, with_state=has_state)
    for keys, fields in store.scan(table.name, memory_bytes=memory_bytes, scratch=draft):
        writer.write((keys, fields if has_state else fields[:1]))
        reserved = reserved or bool(np.any(keys <= RESERVED[1]))
        written += keys.size
        tell(keys.size)
    assert written == rows
    writer.close()
    return Listed(table=table, rows=rows, has_state=has_state and len(table.fields) > 1, reserved_keys=reserved)


def _tables(store: Store | ShardedStore, names: Iterable[str] | None) -> tuple[Table, ...]:
    """Return the tables that are wanted."""
    known = {table.name: table for table in store.tables}
    wanted = tuple(known) if names is None else tuple(dict.fromkeys(names))
    for name in wanted:
        if name not in known:
            raise ImportExportError(f"{store.label} has no table {name!r}: it has {', '.join(map(repr, known))}")
    return tuple(known[name] for name in wanted)
