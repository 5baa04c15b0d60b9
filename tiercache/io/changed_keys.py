"""The keys of the rows that changed since a commit, as files of NumPy."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from tiercache.atomic_io import publish
from tiercache.io.column_file import ColumnFile
from tiercache.io.export_manifest import file_name
from tiercache.io.free_space import free_space_in
from tiercache.io.numpy_folder import array_header
from tiercache.io.staging import staging_directory
from tiercache.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.ranks.sharded_store import ShardedStore
    from tiercache.store.table import Table

__all__ = ["write_changed_keys"]

_PAGE_BYTES = 4096
"""The most that a file takes beside its keys: its header, and the end of its last page."""


def write_changed_keys(
    store: Store | ShardedStore, since: int, counts: Mapping[str, int], out: Path, tell: Callable[[int, int], None]
) -> None:
    """Write the keys of all tables that changed after commit ``since``: ``TABLE.npy`` (int64) each, in folder ``out``.

    ``counts``: how many by table, as ``changed_rows`` says. A chunk at a time is in memory; ``tell(done, total)`` is
    called with keys. The files get their names when all are written, in place of those of an earlier call: after an
    error nothing is left of them. Raises ImportExportError, and what ``Store.changes`` raises.
    """
    names = {table.name: f"{file_name(table)}.npy" for table in store.tables}
    needed = sum(8 * counts[name] + _PAGE_BYTES for name in names)
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    done, total = 0, sum(counts.values())

    def told(rows: int) -> None:
        nonlocal done
        done += rows
        tell(done, total)

    try:
        place, advice = made[-1].parent if made else out, "free some, or write them elsewhere"
        with (
            free_space_in(place, needed, "the file of the keys that changed", advice),
            staging_directory(out / "keys", replaces=True) as draft,
        ):
            for table in store.tables:
                _write(store, table, since, counts[table.name], draft / names[table.name], told)
            for name in names.values():
                publish(draft / name, out / name)
    except BaseException:
        for folder in made:
            with suppress(OSError):  # it has something in it
                folder.rmdir()
        raise


def _write(
    store: Store | ShardedStore, table: Table, since: int, rows: int, path: Path, tell: Callable[[int], None]
) -> None:
    written = 0
    chunks: Iterator[NDArray[np.int64]]
    if isinstance(store, Store):
        chunks = (keys for keys, _ in store.changes(table.name, since=since))
    else:
        chunks = store.changed_keys(table.name, since=since)
    file = ColumnFile(path, header=array_header("<i8", (rows,)))
    try:
        for keys in chunks:
            file.write(keys)
            written += keys.size
            tell(keys.size)
    finally:
        file.close()
    assert written == rows
