"""Columns written one chunk after another, each to its place in a file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.vectors import to_bits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.scan import Chunk

__all__ = ["ColumnFile", "ColumnFiles"]


class ColumnFile:
    """A column of a known size on its way into a file, from byte ``offset`` on; several may share a file."""

    def __init__(self, path: Path, *, header: bytes = b"", offset: int | None = None, dtype: str = "float32") -> None:
        """``header`` is written before it; ``offset`` instead leaves what is in the file already.

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
            with self._file:  # it is closed, too, where the disk is full
                self._file.flush()
                os.fsync(self._file.fileno())


class ColumnFiles:
    """The columns of one table: keys, then each field. A format's writer where every column is plain bytes."""

    def __init__(self, keys: ColumnFile, fields: Sequence[ColumnFile]) -> None:
        self._columns = (keys, *fields)

    def write(self, chunk: Chunk) -> None:
        """Append a chunk of rows."""
        keys, fields = chunk
        first, *others = self._columns
        first.write(keys)
        for column, values in zip(others, fields, strict=True):
            column.write(values)

    def close(self) -> None:
        """Return when everything is on disk."""
        for column in self._columns:
            column.close()
