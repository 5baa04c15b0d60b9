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
from tiercache.io.columns import fields_of
from tiercache.store.vectors import to_bits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.scan import Chunk
    from tiercache.store.table import Field, Table

__all__ = ["read", "write"]

_GROUP_BYTES = 32 << 20
"""About the bytes of a row group: what a reader of one group holds."""
_READ_BYTES = 1 << 20


def write(folder: Path, name: str, table: Table, rows: int, *, with_state: bool) -> _ParquetWriter:
    """Begin to write rows."""
    del rows
    return _ParquetWriter(folder / f"{name}.parquet", table, with_state=with_state)


def read(folder: Path, name: str, table: Table) -> _ParquetReader:
    """Open a file, and check its columns. Raises ImportExportError."""
    return _ParquetReader(folder / f"{name}.parquet", table)


def _number_type(field: Field) -> Any:
    """Return the type that a field's numbers are written in."""
    import pyarrow as pa

    return pa.float16() if field.dtype == "float16" else pa.float32()


def _numbers(field: Field, values: NDArray[np.float32]) -> NDArray[Any]:
    return to_bits(values, field.dtype).view(np.float16) if field.dtype == "float16" else values


class _ParquetWriter:
    """Collects chunks to row groups and writes them."""

    def __init__(self, path: Path, table: Table, *, with_state: bool) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._path, self._fields = path, fields_of(table, with_state=with_state)
        columns = [pa.field("key", pa.int64(), nullable=False)]
        for field in self._fields:
            item = pa.field("element", _number_type(field), nullable=False)
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

        keys = pa.array(np.concatenate([keys for keys, _ in self._waiting]))
        arrays = [keys]
        for i, field in enumerate(self._fields):
            numbers = pa.array(_numbers(field, np.concatenate([fields[i].reshape(-1) for _, fields in self._waiting])))
            arrays.append(pa.FixedSizeListArray.from_arrays(numbers, type=self._schema.field(field.name).type))
        self._waiting, self._waiting_bytes = [], 0
        table = pa.Table.from_arrays(arrays, schema=self._schema)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))


class _ParquetReader:
    """A table's file: its rows in chunks."""

    def __init__(self, path: Path, table: Table) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            self._file = pq.ParquetFile(
                path, pre_buffer=False, buffer_size=_READ_BYTES, page_checksum_verification=True
            )
        except FileNotFoundError:
            raise ImportExportError(f"there is no {path}: check the path and the format") from None
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ImportExportError(f"{path} is no whole Parquet file ({error}): export it again") from error
        self._path, self._table = path, table
        self.rows = int(self._file.metadata.num_rows)
        """Rows of the file."""
        names = self._file.schema_arrow.names
        states = [field.name for field in table.fields[1:]]
        found = [name for name in states if name in names]
        self.has_state = found == states
        """Whether the optimizer state is there, too; True for tables without one."""
        for name in ["key", "vector", *(states if found else [])]:
            if name not in names:
                raise ImportExportError(f"{path} has no column {name!r} but {', '.join(map(repr, names))}: add it")
        if self._file.schema_arrow.field("key").type != pa.int64():
            raise self._wrong("key", "int64")
        for field in fields_of(table, with_state=self.has_state):
            kind = self._file.schema_arrow.field(field.name).type
            lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
            known = lists and kind.value_type in {pa.float32(), _number_type(field)}
            if not known or getattr(kind, "list_size", field.width) != field.width:
                allowed = "float32" if field.dtype == "float32" else f"float32 or {_number_type(field)}"
                raise self._wrong(field.name, f"lists of {field.width} {allowed}")

    def chunks(self, chunk_rows: int) -> Iterator[Chunk]:
        """Yield keys and fields, at most ``chunk_rows`` rows at a time, in the order of the file."""
        import pyarrow as pa

        fields = fields_of(self._table, with_state=self.has_state)
        names = ["key", *(field.name for field in fields)]
        seen = 0
        try:
            for batch in self._file.iter_batches(batch_size=chunk_rows, columns=names, use_threads=False):
                key = batch.column("key")
                if key.null_count:
                    raise ImportExportError(f"{self._path} has no key in a row near {seen:,}: every row needs one")
                yield key.to_numpy().astype(np.int64), tuple(self._matrix(batch, field, seen) for field in fields)
                seen += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise ImportExportError(
                f"{self._path} cannot be read after row {seen:,} ({error}): export it again"
            ) from error

    def _matrix(self, batch: Any, field: Field, first: int) -> NDArray[np.float32]:
        """Return a column of lists as (n, width)."""
        lists = batch.column(field.name)
        numbers = lists.flatten()
        lengths = lists.value_lengths() if not hasattr(lists.type, "list_size") else None
        same = lengths is None or len(lengths) == 0 or (lengths.to_numpy(zero_copy_only=False) == field.width).all()
        if lists.null_count or numbers.null_count or not same or len(numbers) != len(lists) * field.width:
            raise ImportExportError(
                f"column {field.name!r} of {self._path} has a row from {first:,} on without {field.width} numbers: "
                f"table {self._table.name!r} needs them in every row"
            )
        return np.array(numbers.to_numpy(), dtype=np.float32).reshape(-1, field.width)

    def _wrong(self, name: str, needed: str) -> ImportExportError:
        kind = self._file.schema_arrow.field(name).type
        return ImportExportError(
            f"column {name!r} of {self._path} is {kind}: table {self._table.name!r} needs {needed} there"
        )
