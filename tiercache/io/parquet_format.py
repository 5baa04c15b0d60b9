"""Parquet: for each table a file with the columns ``key``, ``vector`` and one for each optimizer state.

``key`` is int64, every field a list of as many floats as it is wide; vectors of float16 are lists of halffloats,
those of bfloat16, which Parquet does not have, of floats. Values are stored plain: a dictionary would make all NaN one.
DuckDB, Spark and pandas read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.atomic_io import sync
from tiercache.errors import ImportExportError
from tiercache.io.formats import Format
from tiercache.io.table_reader import Column, TableReader, parsing
from tiercache.io.table_writer import TableWriter
from tiercache.store.vectors import to_bits

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.scan import Chunk
    from tiercache.store.table import Field, Table

__all__ = ["FORMAT"]

_GROUP_BYTES = 32 << 20
"""About the bytes of a row group: what a reader of one group holds."""
_READ_BYTES = 1 << 20
"""About the bytes of a column that are decoded at a time."""
_DTYPES = {"float": "float32", "halffloat": "float16"}


def _write(folder: Path, name: str, table: Table, fields: tuple[Field, ...], rows: int) -> TableWriter:
    del table, rows
    return _ParquetWriter(folder / f"{name}.parquet", fields)


def _read(folder: Path, name: str, table: Table) -> TableReader:
    path = folder / f"{name}.parquet"
    widths = {"key": 1, **{field.name: field.width for field in table.fields}}
    with parsing(path, "Parquet file"):
        names = set(_open(path).schema_arrow.names)
        columns = {name: _ListColumn(path, name, width).column() for name, width in widths.items() if name in names}
    if "key" in columns:
        columns["keys"] = columns.pop("key")
    return TableReader(path, table, columns)


FORMAT = Format(write=_write, read=_read, dtypes=("float16",))


def _open(path: Path) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES, page_checksum_verification=True)


class _ParquetWriter(TableWriter):
    """Collects chunks to row groups and writes them."""

    def __init__(self, path: Path, fields: tuple[Field, ...]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._path, self._fields = path, fields
        columns = [pa.field("key", pa.int64(), nullable=False)]
        for field in fields:
            kind = pa.float16() if field.dtype == "float16" else pa.float32()
            item = pa.field("element", kind, nullable=False)
            columns.append(pa.field(field.name, pa.list_(item, field.width), nullable=False))
        self._schema = pa.schema(columns)
        self._writer = pq.ParquetWriter(
            path,
            self._schema,
            compression="none",
            use_dictionary=False,
            write_statistics=["key"],
            write_page_checksum=True,
        )
        self._waiting: list[Chunk] = []
        self._waiting_bytes = 0

    def write(self, chunk: Chunk) -> None:
        """Append a chunk of rows."""
        self._waiting.append(chunk)
        self._waiting_bytes += chunk[0].nbytes + sum(values.nbytes for values in chunk[1])
        if self._waiting_bytes >= _GROUP_BYTES:
            self._write_group()

    def close(self) -> None:
        """Write the rest; on return the file is on disk."""
        if self._waiting:
            self._write_group()
        self._writer.close()
        sync(self._path)

    def _write_group(self) -> None:
        import pyarrow as pa

        arrays = [pa.array(np.concatenate([keys for keys, _ in self._waiting]))]
        for i, field in enumerate(self._fields):
            values = np.concatenate([fields[i] for _, fields in self._waiting]).reshape(-1)
            if field.dtype == "float16":
                values = to_bits(values, field.dtype).view(np.float16)
            arrays.append(pa.FixedSizeListArray.from_arrays(pa.array(values), type=self._schema.field(field.name).type))
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        self._waiting, self._waiting_bytes = [], 0


class _ListColumn:
    """One column of a file, read from the front in slices: keys, or lists of numbers of any Arrow kind.

    It opens the file for itself: columns that share a reader share the rows of its batches, whatever they take.
    """

    def __init__(self, path: Path, name: str, width: int) -> None:
        from pyarrow import types

        self._path, self._name, self._width = path, name, width
        file = _open(path)
        self._rows = int(file.metadata.num_rows)
        kind = file.schema_arrow.field(name).type
        self._is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        self._kind = kind
        step = max(1, _READ_BYTES // (4 * width))
        self._batches = file.iter_batches(batch_size=step, columns=[name], use_threads=False)
        self._waiting: list[Any] = []
        """Arrays that were decoded and not yet asked for."""

    def column(self) -> Column:
        """Return the column: lists count as having the right width, which is checked when they are read."""
        if not self._is_list:
            return Column((self._rows,), str(self._kind), self._read)
        kind = str(self._kind.value_type)
        return Column((self._rows, getattr(self._kind, "list_size", self._width)), _DTYPES.get(kind, kind), self._read)

    def _read(self, part: slice) -> NDArray[Any]:
        import pyarrow as pa

        wanted = part.stop - part.start
        with parsing(self._path, "Parquet file"):
            while sum(map(len, self._waiting)) < wanted:
                self._waiting.append(next(self._batches).column(0))
        have = pa.chunked_array(self._waiting)
        self._waiting = have.slice(wanted).chunks
        array = have.slice(0, wanted).combine_chunks()
        array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
        numbers = array.flatten() if self._is_list else array
        same = not self._is_list or hasattr(array.type, "list_size") or self._have_width(array)
        if array.null_count or numbers.null_count or not same or len(numbers) != wanted * self._width:
            what = f"lists of {self._width} numbers" if self._is_list else "a number"
            raise ImportExportError(
                f"column {self._name!r} of {self._path} has a row from {part.start:,} on without {what}: add them"
            )
        values = numbers.to_numpy(zero_copy_only=False)
        return np.asarray(values).reshape(wanted, self._width) if self._is_list else np.asarray(values)

    def _have_width(self, array: Any) -> bool:
        return bool((array.value_lengths().to_numpy(zero_copy_only=False) == self._width).all())
