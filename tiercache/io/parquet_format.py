"""Parquet: for each table a file with the columns ``key``, ``vector`` and one for each optimizer state.

``key`` is int64, every field a list of as many floats as it is wide; float16 vectors are lists of halffloats, bfloat16
vectors, which Parquet does not have, lists of floats. Values are stored plain: a dictionary would make all NaN one.
DuckDB, Spark and pandas read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.errors import ImportExportError
from tiercache.io.formats import Column, Format, TableReader, TableWriter, parsing
from tiercache.store.bits import to_bits
from tiercache.store.files import sync

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.optimizer import Field
    from tiercache.store.scan import Chunk
    from tiercache.store.table import Table

_GROUP_BYTES = 32 << 20
"""Approximate bytes of a row group, and so the memory of a reader."""
_READ_BYTES = 1 << 20
"""Approximate bytes of a column that are decoded at a time."""
_DTYPES = {"float": "float32", "halffloat": "float16"}


def _write(folder: Path, name: str, table: Table, fields: tuple[Field, ...], rows: int) -> TableWriter:
    del table, rows
    return _ParquetWriter(folder / f"{name}.parquet", fields)


def _read(folder: Path, name: str, table: Table) -> TableReader:
    path = folder / f"{name}.parquet"
    widths = {"key": 1, **{field.name: field.width for field in table.fields}}
    with parsing(path, "Parquet file"):
        names = _open(path).schema_arrow.names
        columns = {name: _column(path, name, width) for name, width in widths.items() if name in names}
    if missing := [name for name in ("key", "vector") if name not in columns]:
        raise ImportExportError(
            f"{path} has no column {missing[0]!r}, only {', '.join(map(repr, names)) or 'none'}: name the column of "
            "keys key and that of vectors vector"
        )
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
        """Write the last row group and sync the file to disk."""
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


def _column(path: Path, name: str, width: int) -> Column:
    """Return a column to read in slices from the front: keys, or lists of numbers of any Arrow kind.

    It opens the file itself, because columns that share a reader share the number of rows in a batch. The width of
    lists is checked when they are read.
    """
    from pyarrow import types

    file = _open(path)
    rows, kind = int(file.metadata.num_rows), file.schema_arrow.field(name).type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    step = max(1, _READ_BYTES // (4 * width))
    batches = file.iter_batches(batch_size=step, columns=[name], use_threads=False)
    pending: list[NDArray[Any]] = []

    def read(part: slice) -> NDArray[Any]:
        size = part.stop - part.start
        with parsing(path, "Parquet file"):
            while sum(map(len, pending)) < size:
                pending.append(_numbers(path, name, next(batches).column(0), width if is_list else None))
        have = np.concatenate(pending)
        pending[:] = [have[size:]]
        return have[:size]

    if not is_list:
        return Column((rows,), str(kind), read)
    number = str(kind.value_type)
    return Column((rows, getattr(kind, "list_size", width)), _DTYPES.get(number, number), read)


def _numbers(path: Path, name: str, array: Any, width: int | None) -> NDArray[Any]:
    """Return numbers (n,), or lists of ``width`` of them as (n, width). Raises ImportExportError for null."""
    numbers = array if width is None else array.flatten()
    is_complete = not array.null_count and not numbers.null_count and len(numbers) == len(array) * (width or 1)
    if is_complete and width is not None and not hasattr(array.type, "list_size"):
        is_complete = bool((array.value_lengths().to_numpy(zero_copy_only=False) == width).all())
    if not is_complete:
        what = "number" if width is None else f"list of {width} numbers"
        raise ImportExportError(f"column {name!r} of {path} lacks a {what} in a row: every row needs one")
    values = np.asarray(numbers.to_numpy(zero_copy_only=False))
    return values if width is None else values.reshape(-1, width)
