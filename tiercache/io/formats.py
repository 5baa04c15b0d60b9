"""How tables are written and read: `Format` by name, and the writer that every format builds on.

Each format has a module, ``tiercache.io.NAME_format``, that is loaded when the format is used.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.errors import ImportExportError
from tiercache.store.vectors import ITEM_BYTES, to_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.io.table_reader import TableReader
    from tiercache.store.scan import Chunk
    from tiercache.store.table import Field, Table

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


class TableWriter(ABC):
    """Takes the rows of one table."""

    @abstractmethod
    def write(self, chunk: Chunk) -> None:
        """Append keys (n,) and fields (n, width)."""

    @abstractmethod
    def close(self) -> None:
        """Finish the files; on return they are on disk."""


class ColumnFile:
    """A column of a known size on its way into a file, from byte ``offset`` on; several may share a file."""

    def __init__(self, path: Path, *, header: bytes = b"", offset: int | None = None, dtype: str = "float32") -> None:
        """``header`` is written first; with ``offset`` the file exists already and keeps the bytes before it.

        ``dtype``: "bfloat16" or "float16" where float32 numbers are written as such.
        """
        self._dtype = dtype
        self._file = path.open("wb" if offset is None else "r+b")
        if offset is None:
            self._file.write(header)
        else:
            self._file.seek(offset)

    def write(self, values: NDArray[Any]) -> None:
        """Append the bytes of an array, little-endian."""
        if self._dtype != "float32":
            values = to_bits(values, self._dtype)
        little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        self._file.write(little.view(np.uint8).data if little.size else b"")

    def close(self) -> None:
        """Return when the bytes are on disk; a second time does nothing."""
        if not self._file.closed:
            with self._file:  # closed also where the disk is full
                self._file.flush()
                os.fsync(self._file.fileno())


class ColumnWriter(TableWriter):
    """A table whose columns are plain bytes: keys, then each field."""

    def __init__(
        self, keys: ColumnFile, fields: Sequence[ColumnFile], finish: Callable[[], None] = lambda: None
    ) -> None:
        """``finish`` is called when all columns are on disk."""
        self._keys, self._fields, self._finish = keys, fields, finish

    def write(self, chunk: Chunk) -> None:
        """Append a chunk of rows."""
        keys, fields = chunk
        self._keys.write(keys)
        for column, values in zip(self._fields, fields, strict=True):
            column.write(values)

    def close(self) -> None:
        """Return when everything is on disk."""
        for column in (self._keys, *self._fields):
            column.close()
        self._finish()
