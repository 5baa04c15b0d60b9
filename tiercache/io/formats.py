"""Formats of exported tables: `Format` by name, and the writers and readers that formats build on.

Each format has a module, ``tiercache.io.NAME_format``, that is loaded when the format is used.
"""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.errors import ImportExportError
from tiercache.store.bits import ITEM_BYTES, to_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.optimizer import Field
    from tiercache.store.scan import Chunk
    from tiercache.store.table import Table


FORMATS = ("numpy", "parquet", "safetensors", "hugectr", "torch")


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """Writes and reads the files of one table."""

    write: Callable[[Path, str, Table, tuple[Field, ...], int], TableWriter]
    """Returns a writer: (folder, name of the table's files, table, fields, number of rows)."""
    read: Callable[[Path, str, Table], TableReader]
    """Opens the files of a table: (folder, name, table). Raises ImportExportError."""
    dtypes: tuple[str, ...] = ()
    """The 16-bit dtypes that the format stores; others are written as float32."""
    vector_copies: int = 1
    """The number of copies of the vectors on the disk while they are written."""
    keeps_state: Callable[[Table], bool] = lambda _: True
    """Returns True if the format stores the optimizer state of a table."""

    def fields(self, table: Table, *, with_state: bool) -> tuple[Field, ...]:
        """Return the fields to write: all, or the vector alone."""
        return table.fields if with_state and self.keeps_state(table) else table.fields[:1]

    def row_bytes(self, fields: tuple[Field, ...]) -> int:
        """Return the bytes of a row on the disk while it is written, without headers."""
        vector, *states = fields
        item_bytes = ITEM_BYTES[vector.dtype if vector.dtype in self.dtypes else "float32"]
        return 8 + self.vector_copies * item_bytes * vector.width + sum(4 * state.width for state in states)


def find_format(name: str) -> Format:
    """Return a format by its name. Raises ImportExportError."""
    if name not in FORMATS:
        raise ImportExportError(f"unknown format {name!r}: expected one of {', '.join(FORMATS)}")
    return import_module(f"tiercache.io.{name}_format").FORMAT  # type: ignore[no-any-return]


class TableWriter(ABC):
    """Writes the rows of one table."""

    @abstractmethod
    def write(self, chunk: Chunk) -> None:
        """Append keys (n,) and fields (n, width)."""

    @abstractmethod
    def close(self) -> None:
        """Finish the files and sync them to disk."""


class ColumnFile:
    """Writes a column into a file, from byte ``offset`` on; several columns may share a file."""

    def __init__(self, path: Path, *, header: bytes = b"", offset: int | None = None, dtype: str = "float32") -> None:
        """``header`` is written first. With ``offset`` the file exists and keeps the bytes before it.

        ``dtype``: "bfloat16" or "float16" to convert float32 numbers to it.
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
        """Sync the bytes to disk; a second call does nothing."""
        if not self._file.closed:
            with self._file:  # closed also if the disk is full
                self._file.flush()
                os.fsync(self._file.fileno())


class ColumnWriter(TableWriter):
    """Writes a table whose columns are plain bytes: keys, then each field."""

    def __init__(
        self, keys: ColumnFile, fields: Sequence[ColumnFile], finish: Callable[[], None] = lambda: None
    ) -> None:
        """``finish`` is called after all columns are on disk."""
        self._keys, self._fields, self._finish = keys, fields, finish

    def write(self, chunk: Chunk) -> None:
        """Append a chunk of rows."""
        keys, fields = chunk
        self._keys.write(keys)
        for column, values in zip(self._fields, fields, strict=True):
            column.write(values)

    def close(self) -> None:
        """Sync everything to disk."""
        for column in (self._keys, *self._fields):
            column.close()
        self._finish()


@dataclass(frozen=True, slots=True)
class Column:
    """One column: keys (n,) or a field (n, width)."""

    shape: tuple[int, ...]
    dtype: str
    """The name in NumPy or torch, such as "int64" or "bfloat16"."""
    read: Callable[[slice], NDArray[Any]]
    """Returns a slice of rows. Slices come in order, without gaps; bfloat16 is returned as float32."""

    @classmethod
    def of(cls, array: NDArray[Any]) -> Column:
        """Return the column of an array."""
        return cls(array.shape, str(array.dtype), array.__getitem__)

    @classmethod
    def of_tensor(cls, tensor: Any, what: str) -> Column:
        """Return the column of a torch tensor. Raises ImportExportError unless it is dense and has values."""
        kind = str(tensor.layout).removeprefix("torch.")
        if tensor.is_meta or tensor.is_nested or kind != "strided":
            kind = "on the meta device" if tensor.is_meta else "nested" if tensor.is_nested else kind
            raise ImportExportError(f"{what} is {kind}: expected a dense tensor with values")
        dtype, rows = str(tensor.dtype).removeprefix("torch."), tensor.detach()
        return cls(tuple(tensor.shape), dtype, lambda part: tensor_values(rows[part]))


def tensor_values(tensor: Any) -> NDArray[Any]:
    """Return a torch tensor as an array, bfloat16 as float32, exactly."""
    tensor = tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor
    return tensor.cpu().numpy()  # type: ignore[no-any-return]


class TableReader:
    """Reads the rows of one table, at the first ``chunks``.

    Raises ImportExportError for columns that do not match the table: a missing one, a different dtype, width or number
    of rows, or part of the optimizer state.
    """

    def __init__(
        self, place: object, table: Table, columns: Mapping[str, Column], *, ignored: tuple[str, ...] = ()
    ) -> None:
        """``columns``: "keys" and the fields of the table by name; others are skipped. ``place`` is for messages.

        ``ignored``: files that the table has no field for.
        """
        self.ignored = ignored
        vector, *states = (field.name for field in table.fields)
        for name in ("keys", vector):
            if name not in columns:
                found = ", ".join(columns) or "nothing"
                raise ImportExportError(f"{place} has no {name} of table {table.name!r}, only {found}: add it")
        missing = [name for name in states if name not in columns]
        if missing and len(missing) < len(states):
            raise ImportExportError(
                f"{place} has only part of the optimizer state of table {table.name!r} and lacks {', '.join(missing)}: "
                "include all of it or none"
            )
        self.has_state = not missing
        """True if the optimizer state is included, and for tables without one."""
        keys = columns["keys"]
        if keys.dtype != "int64" or len(keys.shape) != 1:
            raise ImportExportError(
                f"the keys in {place} are {keys.shape} of {keys.dtype}: expected int64 of shape (n,)"
            )
        self.rows = keys.shape[0]
        """Rows of every column."""
        fields = table.fields if self.has_state else table.fields[:1]
        for field in fields:
            column, allowed = columns[field.name], dict.fromkeys([field.dtype, "float32"])
            if column.dtype not in allowed or column.shape != (self.rows, field.width):
                raise ImportExportError(
                    f"{field.name} in {place} is {column.shape} of {column.dtype}: table {table.name!r} with "
                    f"{self.rows:,} keys needs ({self.rows}, {field.width}) of {' or '.join(allowed)}"
                )
        self._keys, self._fields = keys, [columns[field.name] for field in fields]

    def chunks(self, chunk_rows: int) -> Iterator[Chunk]:
        """Yield copies of keys (n,) and fields (n, width), at most ``chunk_rows`` rows at a time, in file order."""
        for low in range(0, self.rows, chunk_rows):
            part = slice(low, min(self.rows, low + chunk_rows))
            fields = tuple(np.array(field.read(part), dtype="<f4", order="C") for field in self._fields)
            yield np.array(self._keys.read(part), dtype="<i8"), fields


def regular_file(path: Path) -> Path:
    """Return ``path``. Raises ImportExportError if it is missing or not a regular file: opening a FIFO would wait."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise ImportExportError(f"{path} does not exist: check the path and the format") from None
    if not stat.S_ISREG(mode):
        raise ImportExportError(f"{path} is not a regular file: pass a file that is not a folder, a FIFO or a device")
    return path


@contextmanager
def parsing(path: Path, what: str) -> Iterator[Path]:
    """Yield a regular file for a library to read, and turn its errors for damage into an ImportExportError."""
    try:
        regular_file(path).open("rb").close()  # libraries differ in their errors for a missing permission
        yield path
    except (ImportExportError, PermissionError, MemoryError):
        raise
    except Exception as error:  # a damaged .npy header is a SyntaxError; a damaged pickle can raise anything
        why = str(error).split("\n", maxsplit=1)[0] or type(error).__name__
        raise ImportExportError(f"{path} is not a complete {what} ({why}): export it again") from error
