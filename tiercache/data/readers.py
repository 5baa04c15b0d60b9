"""How the rows of one file are read: a class for each format, all with the same calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from tiercache.data.inputs import open_binary
from tiercache.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.data.column_types import ColumnUse
    from tiercache.data.inputs import InputFile
    from tiercache.schema import Schema

LARGEST_BATCH = 1 << 15
_MOST_DECODING_BYTES = 4 << 20
"""Of one Parquet column: pages are 1 MiB, compressed and not, and so are dictionary and buffer."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some neighboring rows of a file."""

    columns: Any
    """A RecordBatch of the columns that were asked for."""
    share: float
    """How much of the file lies behind it, 0 to 1."""
    rows: NDArray[np.int64] | None = None
    """Their rows in the file, 0-based; None: they are those that follow the rows given before."""


class FileReader(ABC):
    """Reads one file. Made once to check its columns, and again for each reading."""

    schema: Any
    """The Arrow schema of the file."""
    decoding_bytes: int = 0
    """About how much memory decoding takes beside the batches given out; twice that with threads."""
    skipped: int = 0
    """Rows that were left out so far because their number of fields is wrong."""
    padded: int = 0
    """Rows that were filled with null so far because fields are missing."""

    @abstractmethod
    def __init__(self, file: InputFile, schema: Schema, uses: Sequence[ColumnUse]) -> None:
        """uses: of all columns that will be read, and others."""

    @abstractmethod
    def pieces(self, columns: Sequence[str], row: int, *, batch_bytes: int, use_threads: bool) -> Iterator[Piece]:
        """Read columns from ``row`` to the end; rows that are left out do not count. One reading at a time."""

    def explain(self, error: Exception) -> SourceError | None:
        """Return a better sentence about an error of Arrow; None: there is none."""
        return None


class ParquetReader(FileReader):
    """Reads a Parquet file."""

    def __init__(self, file: InputFile, schema: Schema, uses: Sequence[ColumnUse]) -> None:
        self._file = file
        self._dictionaries: list[str] | None = None
        self._reading: tuple[int, Sequence[str]] = 0, [use.column for use in uses]  # row and columns
        with self._open() as parquet:
            self.schema = parquet.schema_arrow
            self._dictionaries = _dictionary_columns(parquet.metadata)
            self.decoding_bytes = _decoding_bytes(parquet.metadata, {use.column for use in uses})

    def pieces(self, columns: Sequence[str], row: int, *, batch_bytes: int, use_threads: bool) -> Iterator[Piece]:
        """Read row groups in turn."""
        with self._open() as parquet:
            meta = parquet.metadata
            sizes = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
            first, skip = 0, row
            while first < len(sizes) and skip >= sizes[first]:
                skip -= sizes[first]
                first += 1
            done = row - skip
            # Encoded bytes may be a small part of the decoded ones; 8 bytes a value is what keys take.
            in_groups = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
            width = max(8 * len(columns), in_groups // max(1, meta.num_rows))
            self._reading = done, columns
            for batch in parquet.iter_batches(
                batch_rows(batch_bytes, width),
                row_groups=list(range(first, len(sizes))),
                columns=list(columns),
                use_threads=use_threads,
            ):
                done += batch.num_rows
                self._reading = done, columns
                dropped = min(skip, batch.num_rows)
                skip -= dropped
                yield Piece(batch.slice(dropped), done / max(1, meta.num_rows))

    def _open(self) -> Any:
        source = self._file.path if isinstance(self._file.path, Path) else open_binary(self._file.path)
        return pq.ParquetFile(
            source,
            buffer_size=1 << 20,
            pre_buffer=False,
            read_dictionary=self._dictionaries,
            page_checksum_verification=True,
        )

    def explain(self, error: Exception) -> SourceError | None:
        """Name the column, and the row group, of a page that cannot be read: each column is read alone."""
        row, columns = self._reading
        with suppress(OSError, pa.ArrowException), self._open() as parquet:
            first = 0
            for group in range(parquet.metadata.num_row_groups):
                end = first + parquet.metadata.row_group(group).num_rows
                for column in columns if end > row else ():
                    try:
                        parquet.read_row_group(group, columns=[column], use_threads=False)
                    except (OSError, pa.ArrowException) as found:
                        rows = f"row group {group} (rows {first} to {end - 1})"
                        text = " ".join(str(found).split()).rstrip(".")
                        return SourceError(
                            f"{self._file.path}, column {column!r}, {rows} cannot be read ({text}): the file is "
                            "damaged: copy it or write it again"
                        )
                first = end
        return None


class IpcReader(FileReader):
    """Reads an Arrow IPC file or stream; a local one is mapped."""

    def __init__(self, file: InputFile, schema: Schema, uses: Sequence[ColumnUse]) -> None:
        self._file = file
        with self._open() as source:
            self.schema = _open_ipc(source).schema

    def pieces(self, columns: Sequence[str], row: int, *, batch_bytes: int, use_threads: bool) -> Iterator[Piece]:
        """Read record batches in turn."""
        with self._open() as source:
            options = pa.ipc.IpcReadOptions(included_fields=[self.schema.names.index(c) for c in columns])
            reader = _open_ipc(source, options)
            is_file = isinstance(reader, pa.ipc.RecordBatchFileReader)
            parts = map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)
            for index, part in enumerate(parts):
                share = (index + 1) / reader.num_record_batches if is_file else source.tell() / self._file.size
                dropped = min(row, part.num_rows)
                row -= dropped
                step = batch_rows(batch_bytes, part.nbytes // max(1, part.num_rows))
                for low in range(dropped, part.num_rows, step):
                    yield Piece(part.slice(low, step).select(list(columns)), share)

    def _open(self) -> Any:
        path = self._file.path
        return pa.memory_map(str(path)) if isinstance(path, Path) else open_binary(path)


def batch_rows(batch_bytes: int, row_bytes: int) -> int:
    """Return how many rows a batch has."""
    return max(256, min(LARGEST_BATCH, batch_bytes // max(1, row_bytes)))


def _dictionary_columns(meta: Any) -> list[str]:
    """Return the columns that stay dictionaries when they are read: a value is hashed once, not once a row.

    Those whose values take few bytes in the first row group. Where a dictionary grew too large, the rest of a column
    is plain, and making a dictionary of that would cost more than hashing it.
    """
    group = meta.row_group(0) if meta.num_row_groups else None
    columns = [] if group is None else [group.column(i) for i in range(group.num_columns)]
    return [
        c.path_in_schema
        for c in columns
        if c.physical_type == "BYTE_ARRAY"
        and "." not in c.path_in_schema
        and c.has_dictionary_page
        and c.total_uncompressed_size < 4 * c.num_values
    ]


def _decoding_bytes(meta: Any, names: set[str]) -> int:
    """Estimate what decoding holds from the first row group: pages, dictionaries and buffers of each column."""
    if not meta.num_row_groups:
        return 0
    group = meta.row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    read = [c for c in columns if c.path_in_schema.split(".")[0] in names]
    return sum(min(_MOST_DECODING_BYTES, 3 * int(c.total_uncompressed_size)) for c in read)


def _open_ipc(source: Any, options: Any = None) -> Any:
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return pa.ipc.open_file(source, options=options) if is_file else pa.ipc.open_stream(source, options=options)
