"""Writing a table to files, chunk by chunk: every format writes through a `TableWriter`."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.vectors import to_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.scan import Chunk

__all__ = ["ColumnFile", "ColumnWriter", "TableWriter"]


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
