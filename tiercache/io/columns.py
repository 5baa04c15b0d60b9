"""The columns of one table in a foreign format: keys, vector and optimizer state, checked and read in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tiercache.errors import ImportExportError
from tiercache.store.vectors import from_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from tiercache.store.scan import Chunk
    from tiercache.store.table import Table

__all__ = ["BrainColumn", "Column", "Columns", "fields_of"]


class Column(Protocol):
    """An array on disk: what it is, and slices of its rows in memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows first."""

    @property
    def dtype(self) -> Any:
        """Its NumPy dtype."""

    def __getitem__(self, rows: slice, /) -> Any:
        """Return rows as an array."""


class BrainColumn:
    """A column of bfloat16, which NumPy does not have: slices are float32."""

    dtype = "bfloat16"

    def __init__(self, shape: tuple[int, ...], bits: Callable[[slice], NDArray[np.uint16]]) -> None:
        """``bits`` returns the bits of some rows."""
        self.shape, self._bits = shape, bits

    def __getitem__(self, rows: slice) -> NDArray[np.float32]:
        """Return rows, exactly as they are."""
        return from_bits(self._bits(rows), self.dtype)


class Columns:
    """The rows of a table, column by column; nothing is read before ``chunks``.

    Raises ImportExportError, which calls the file or folder ``place``, for columns that are not those of ``table``:
    another type, width or number of rows, or a part of the optimizer state without the rest.
    """

    def __init__(self, place: object, table: Table, keys: Column, fields: Mapping[str, Column]) -> None:
        """``fields`` are found by the names of the table's fields; others are left out."""
        self.rows = keys.shape[0] if len(keys.shape) == 1 else -1
        """Rows of every column."""
        if keys.dtype != np.dtype("<i8") or self.rows < 0:
            raise ImportExportError(
                f"the keys in {place} are {keys.shape} of {keys.dtype}: they must be one int64 for each row"
            )
        self.has_state = _has_state(place, table, fields)
        """Whether the optimizer state is there, too; True for tables without one."""
        for field in fields_of(table, with_state=self.has_state):
            column = fields[field.name]
            if not _has_dtype(column, field.dtype) or tuple(column.shape) != (self.rows, field.width):
                allowed = "float32" if field.dtype == "float32" else f"{field.dtype} or float32"
                raise ImportExportError(
                    f"{field.name} in {place} is {tuple(column.shape)} of {column.dtype}: table {table.name!r} with "
                    f"{self.rows:,} keys needs ({self.rows}, {field.width}) of {allowed}"
                )
        self._keys = keys
        self._fields = [fields[field.name] for field in fields_of(table, with_state=self.has_state)]

    def chunks(self, chunk_rows: int) -> Iterator[Chunk]:
        """Yield copies of keys and fields, at most ``chunk_rows`` rows at a time, in the order of the file."""
        for low in range(0, self.rows, chunk_rows):
            part = slice(low, min(self.rows, low + chunk_rows))
            yield _copy(self._keys[part], "<i8"), tuple(_copy(field[part], "<f4") for field in self._fields)


def fields_of(table: Table, *, with_state: bool) -> tuple[Any, ...]:
    """Return the fields of a row, or the vector alone."""
    return table.fields if with_state else table.fields[:1]


def _has_state(place: object, table: Table, fields: Mapping[str, Column]) -> bool:
    vector, *states = (field.name for field in table.fields)
    if vector not in fields:
        raise ImportExportError(f"{place} has no {vector} of table {table.name!r}: export it again")
    found = [name for name in states if name in fields]
    if found and found != states:
        raise ImportExportError(
            f"{place} has {', '.join(found)} of the optimizer state of table {table.name!r} and not "
            f"{', '.join(name for name in states if name not in fields)}: give all of it or nothing"
        )
    return found == states


def _has_dtype(column: Column, dtype: str) -> bool:
    """Whether a column is float32, or of a field's own dtype."""
    if isinstance(column, BrainColumn):
        return dtype == column.dtype
    return column.dtype == np.dtype("<f4") or (dtype == "float16" and column.dtype == np.dtype("<f2"))


def _copy(values: Any, dtype: str) -> NDArray[Any]:
    return np.array(values, dtype=dtype, order="C")
