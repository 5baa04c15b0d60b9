"""NumPy: for each table a folder with ``keys.npy``, ``vector.npy`` and a file for each optimizer state.

NumPy has float16 and no bfloat16: such vectors are written as float32.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.errors import ImportExportError
from tiercache.io.formats import Column, ColumnFile, ColumnWriter, Format, TableReader, parsing

if TYPE_CHECKING:
    from pathlib import Path

    from tiercache.store.optimizer import Field
    from tiercache.store.table import Table


def _write(folder: Path, name: str, table: Table, fields: tuple[Field, ...], rows: int) -> ColumnWriter:
    del table
    place = folder / name
    place.mkdir()
    columns = []
    for field in fields:
        dtype, descr = ("float16", "<f2") if field.dtype == "float16" else ("float32", "<f4")
        header = _header(descr, (rows, field.width))
        columns.append(ColumnFile(place / f"{field.name}.npy", header=header, dtype=dtype))
    return ColumnWriter(keys_file(place / "keys.npy", rows), columns)


def _read(folder: Path, name: str, table: Table) -> TableReader:
    place = folder / name
    paths = {field.name: place / f"{field.name}.npy" for field in table.fields}
    columns = {name: Column.of(map_array(path)) for name, path in paths.items() if path.exists()}
    return TableReader(place, table, {"keys": Column.of(map_array(place / "keys.npy")), **columns})


FORMAT = Format(write=_write, read=_read, dtypes=("float16",))


def keys_file(path: Path, rows: int) -> ColumnFile:
    """Begin to write an ``.npy`` file of ``rows`` int64 keys."""
    return ColumnFile(path, header=_header("<i8", (rows,)))


def map_array(path: Path) -> Any:
    """Return the array of an ``.npy`` file as a memory map; pickles are refused. Raises ImportExportError."""
    with parsing(path, "array of numbers"):
        array = np.lib.format.open_memmap(path, mode="r")
    size = path.stat().st_size
    if size != array.offset + array.nbytes:
        raise ImportExportError(
            f"{path} has {size:,} bytes, but its header says {array.offset + array.nbytes:,}: export it again"
        )
    return array


def _header(descr: str, shape: tuple[int, ...]) -> bytes:
    """Return the header of an ``.npy`` file (version 1.0)."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": shape})
    return header.getvalue()
