"""HugeCTR's sparse model: for each table a folder of files without headers, ``key`` and ``emb_vector``.

``key`` is int64, ``emb_vector`` float32 (rows, dim), and the optimizer's files have the layout of ``emb_vector``. The
layout has no number of rows, no dim and no checksum: sizes are checked against the table.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.errors import ImportExportError, ImportExportWarning
from tiercache.io.column_file import ColumnFile, ColumnFiles
from tiercache.io.columns import Columns, fields_of
from tiercache.store.optimizer import Adagrad, Adam

if TYPE_CHECKING:
    from pathlib import Path

    from tiercache.store.table import Table

__all__ = ["read", "state_files", "write"]

_STATE_FILES: dict[type, dict[str, str]] = {
    Adagrad: {"sum": "AdaGrad.accm"},
    Adam: {"exp_avg": "Adam.m", "exp_avg_sq": "Adam.v"},
}
_KNOWN_FILES = ("AdaGrad.accm", "Adam.m", "Adam.v", "MomentumSGD.momtentum", "Nesterov.accm")


def state_files(table: Table) -> dict[str, str]:
    """Return the file of each optimizer state; none where HugeCTR has no such optimizer."""
    return _STATE_FILES.get(type(table.optimizer), {})


def write(folder: Path, name: str, table: Table, rows: int, *, with_state: bool) -> ColumnFiles:
    """Begin to write rows; ``with_state`` needs an optimizer that HugeCTR has."""
    place = folder / name
    place.mkdir()
    names = {"vector": "emb_vector", **state_files(table)}
    fields = [ColumnFile(place / names[field.name]) for field in fields_of(table, with_state=with_state)]
    return ColumnFiles(ColumnFile(place / "key"), fields)


def read(folder: Path, name: str, table: Table) -> Columns:
    """Open a sparse model, by memory maps; warns of files that have no place in the table. Raises ImportExportError."""
    place = folder / name
    keys = _map(place / "key", "<i8", ())
    names = {"vector": "emb_vector", **state_files(table)}
    fields = {}
    for field in table.fields:
        path = place / names[field.name] if field.name in names else None
        if path is not None and path.exists():
            fields[field.name] = _map(path, "<f4", (field.width,), rows=keys.shape[0])
    if (place / "slot_id").exists():
        _map(place / "slot_id", "<u8", (), rows=keys.shape[0])
        warnings.warn(f"{place / 'slot_id'} is ignored: a table here has no slots", ImportExportWarning, stacklevel=2)
    for other in _KNOWN_FILES:
        if other not in names.values() and (place / other).exists():
            warnings.warn(
                f"{place / other} is ignored: it is no state of the {type(table.optimizer).__name__} of table "
                f"{table.name!r}",
                ImportExportWarning,
                stacklevel=2,
            )
    return Columns(place, table, keys, fields)


def _map(path: Path, dtype: str, shape: tuple[int, ...], *, rows: int | None = None) -> Any:
    """Return a file of rows as a memory map. Raises ImportExportError where its size is not that of ``rows`` rows."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ImportExportError(f"there is no {path}: check the path and the format") from None
    row_bytes = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
    if rows is None and size % row_bytes:
        raise ImportExportError(f"{path} has {size:,} bytes, which are no whole rows of {row_bytes}: export it again")
    if rows is not None and size != rows * row_bytes:
        raise ImportExportError(
            f"{path} has {size:,} bytes, but {rows:,} keys with {row_bytes} bytes each make {rows * row_bytes:,}: "
            "check the dim and the optimizer of the table, or export it again"
        )
    whole = (size // row_bytes, *shape)
    return np.memmap(path, dtype=dtype, mode="r", shape=whole) if size else np.empty(whole, dtype=dtype)
