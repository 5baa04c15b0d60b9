"""The formats by name. Each has a module, ``tiercache.io.NAME_format``, that is loaded when the format is used."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from tiercache.errors import ImportExportError
from tiercache.store.vectors import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tiercache.io.table_reader import TableReader
    from tiercache.io.table_writer import TableWriter
    from tiercache.store.table import Field, Table

__all__ = ["FORMATS", "Format", "find_format"]

FORMATS = ("numpy", "parquet", "safetensors", "hugectr", "torch")


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """How the files of one table are written and read."""

    write: Callable[[Path, str, Table, tuple[Field, ...], int], TableWriter]
    """Begins to write rows: (folder, name of the table's files, table, fields, number of rows)."""
    read: Callable[[Path, str, Table], TableReader]
    """Opens the files of a table: (folder, name, table). Raises ImportExportError."""
    dtypes: tuple[str, ...] = ()
    """The 16-bit dtypes that vectors keep; others are written as float32."""
    vector_copies: int = 1
    """How often the vectors are on the disk while they are written."""
    keeps_state: Callable[[Table], bool] = lambda _: True
    """Whether the optimizer state of a table has a place."""

    def fields(self, table: Table, *, with_state: bool) -> tuple[Field, ...]:
        """Return the fields of a row that are written: all, or the vector alone."""
        return table.fields if with_state and self.keeps_state(table) else table.fields[:1]

    def row_bytes(self, fields: tuple[Field, ...]) -> int:
        """Return the bytes that a row takes while it is written, headers apart."""
        vector, *states = fields
        item_bytes = ITEM_BYTES[vector.dtype if vector.dtype in self.dtypes else "float32"]
        return 8 + self.vector_copies * item_bytes * vector.width + sum(4 * state.width for state in states)


def find_format(name: str) -> Format:
    """Return a format by its name. Raises ImportExportError."""
    if name not in FORMATS:
        raise ImportExportError(f"format {name!r} is unknown: it must be one of {', '.join(FORMATS)}")
    found = import_module(f"tiercache.io.{name}_format").FORMAT
    assert isinstance(found, Format)
    return found
