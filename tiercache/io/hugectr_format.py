"""HugeCTR's sparse model: for each table a folder of files without headers, ``key`` and ``emb_vector``.

``key`` is int64, ``emb_vector`` float32 (rows, dim), and the optimizer's files have the layout of ``emb_vector``. The
layout has no number of rows, no dim and no checksum: sizes are checked against the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.errors import ImportExportError
from tiercache.io.formats import Column, ColumnFile, ColumnWriter, Format, TableReader, regular_file
from tiercache.store.optimizer import Adagrad, Adam

if TYPE_CHECKING:
    from pathlib import Path

    from tiercache.store.optimizer import Field
    from tiercache.store.table import Table

_STATE_FILES: dict[type, dict[str, str]] = {
    Adagrad: {"sum": "AdaGrad.accm"},
    Adam: {"exp_avg": "Adam.m", "exp_avg_sq": "Adam.v"},
}
_OTHER_FILES = ("slot_id", "AdaGrad.accm", "Adam.m", "Adam.v", "MomentumSGD.momtentum", "Nesterov.accm")
"""Files that may be in the folder of a table without a field for them; HugeCTR itself spells "momtentum"."""


def _keeps_state(table: Table) -> bool:
    """Return True if HugeCTR has the optimizer of a table."""
    return len(table.fields) == 1 or type(table.optimizer) in _STATE_FILES


def _file_names(table: Table) -> dict[str, str]:
    return {"vector": "emb_vector", **_STATE_FILES.get(type(table.optimizer), {})}


def _write(folder: Path, name: str, table: Table, fields: tuple[Field, ...], rows: int) -> ColumnWriter:
    del rows
    place, names = folder / name, _file_names(table)
    place.mkdir()
    return ColumnWriter(ColumnFile(place / "key"), [ColumnFile(place / names[field.name]) for field in fields])


def _read(folder: Path, name: str, table: Table) -> TableReader:
    place, names = folder / name, _file_names(table)
    keys = _map(place / "key", "<i8", ())
    columns = {"keys": Column.of(keys)}
    for field in table.fields:
        if field.name in names and (field.name == "vector" or (place / names[field.name]).exists()):
            columns[field.name] = Column.of(_map(place / names[field.name], "<f4", (field.width,), keys.size))
    others = (place / other for other in _OTHER_FILES if other not in names.values())
    return TableReader(place, table, columns, ignored=tuple(str(path) for path in others if path.exists()))


FORMAT = Format(write=_write, read=_read, keeps_state=_keeps_state)


def _map(path: Path, dtype: str, shape: tuple[int, ...], rows: int | None = None) -> np.ndarray:
    """Return a file of rows as a memory map. Raises ImportExportError if its size is not that of ``rows`` rows."""
    size = regular_file(path).stat().st_size
    row_bytes = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
    if rows is None and size % row_bytes:
        raise ImportExportError(f"{path} has {size:,} bytes, not whole rows of {row_bytes}: export it again")
    if rows is not None and size != rows * row_bytes:
        raise ImportExportError(
            f"{path} has {size:,} bytes, but {rows:,} keys of {row_bytes} bytes each make {rows * row_bytes:,}: "
            "check the dim and the optimizer of the table, or export it again"
        )
    full_shape = (size // row_bytes, *shape)
    return np.memmap(path, dtype=dtype, mode="r", shape=full_shape) if size else np.empty(full_shape, dtype=dtype)
