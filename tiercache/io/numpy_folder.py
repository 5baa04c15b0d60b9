"""NumPy: for each table a folder with ``keys.npy``, ``vector.npy`` and a file for each optimizer state.

NumPy has float16 and no bfloat16: such vectors are written as float32.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.errors import ImportExportError
from tiercache.io.column_file import ColumnFile, ColumnFiles
from tiercache.io.columns import Columns, fields_of

if TYPE_CHECKING:
    from pathlib import Path

    from tiercache.store.table import Table

__all__ = ["array_header", "map_array", "read", "write"]


def write(folder: Path, name: str, table: Table, rows: int, *, with_state: bool) -> ColumnFiles:
    """Begin to write ``rows`` rows."""
    place = folder / name
    place.mkdir()
    fields = []
    for field in fields_of(table, with_state=with_state):
        dtype, descr = ("float16", "<f2") if field.dtype == "float16" else ("float32", "<f4")
        header = array_header(descr, (rows, field.width))
        fields.append(ColumnFile(place / f"{field.name}.npy", header=header, dtype=dtype))
    return ColumnFiles(ColumnFile(place / "keys.npy", header=array_header("<i8", (rows,))), fields)


def read(folder: Path, name: str, table: Table) -> Columns:
    """Open what ``write`` wrote, by memory maps. Raises ImportExportError."""
    place = folder / name
    found = {field.name: place / f"{field.name}.npy" for field in table.fields}
    fields = {key: map_array(path) for key, path in found.items() if path.exists()}
    return Columns(place, table, map_array(place / "keys.npy"), fields)


def array_header(descr: str, shape: tuple[int, ...]) -> bytes:
    """Return the header of an ``.npy`` file (version 1.0)."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": shape})
    return header.getvalue()


def map_array(path: Path) -> Any:
    """Return the array of an ``.npy`` file as a memory map; pickles are refused. Raises ImportExportError."""
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError:
        raise ImportExportError(f"there is no {path}: check the path and the format") from None
    except (ValueError, OSError, EOFError, OverflowError) as error:
        raise ImportExportError(f"{path} is no whole array of numbers ({error}): export it again") from error
    size = path.stat().st_size
    if size != array.offset + array.nbytes:
        raise ImportExportError(f"{path} has {size:,} bytes, and its header says {array.offset + array.nbytes:,}")
    return array
