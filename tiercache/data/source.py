"""Files as a stream of record batches with their file and row."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tiercache.data.column_types import check_columns, column_uses, dtype_of, kind_of, uses_by_column
from tiercache.data.columns import BadValueError, plain_array, plain_type
from tiercache.data.inputs import InputFile, check_repeated, partition_texts, partition_values
from tiercache.data.readers import (
    FileReader,
    IpcReader,
    NumpyReader,
    ParquetReader,
    Piece,
    PythonReader,
    SplitBinaryReader,
)
from tiercache.data.text_reader import TextReader
from tiercache.errors import SourceError
from tiercache.sizes import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.schema import Schema

READERS: dict[str, type[FileReader]] = {
    "parquet": ParquetReader, "ipc": IpcReader, "csv": TextReader, "criteo": TextReader, "numpy": NumpyReader,
    "split_binary": SplitBinaryReader, "python": PythonReader,
}  # fmt: skip
"""By ``InputFile.format``."""


@dataclass(frozen=True, slots=True)
class SourceBatch:
    """Rows of one file."""

    file: InputFile
    file_index: int
    first_row: int
    """The kept rows of the file before it: with ``file_index``, the cursor where it begins."""
    columns: Any
    """A RecordBatch with at least the columns of the schema."""
    rows: NDArray[np.int64] | None = None
    """Their rows in the file, 0-based, the header not counted; None: they follow ``first_row``."""

    def error(self, row: int, column: str, what: str) -> SourceError:
        """Return an error about a row of this batch: names file, row in the file, and column."""
        at = self.first_row + row if self.rows is None else int(self.rows[row])
        return SourceError(f"{self.file.path}, row {at}, column {column!r}: {what}")


@dataclass(frozen=True, slots=True)
class BadRows:
    """The number of rows that were skipped or changed."""

    skipped: int = 0
    """Skipped: their number of fields is wrong."""
    padded: int = 0
    """Filled with null: fields are missing."""
    unlabeled: int = 0
    """Skipped: their label is null."""

    def __add__(self, other: BadRows) -> BadRows:
        return BadRows(self.skipped + other.skipped, self.padded + other.padded, self.unlabeled + other.unlabeled)

    def __str__(self) -> str:
        counts = {"skipped": self.skipped, "padded": self.padded, "dropped without a label": self.unlabeled}
        return ", ".join(f"{counted(count, 'row')} {what}" for what, count in counts.items() if count)


class Source:
    """The rows of all files, one file after another. Opening checks the columns of every file before any is read."""

    def __init__(self, files: Sequence[InputFile], schema: Schema, *, cut_column: str | None = None) -> None:
        self.files, self._schema = tuple(files), schema
        self._uses = column_uses(schema, cut_column)
        self._used_as = uses_by_column(self._uses)
        self._columns = tuple(dict.fromkeys(use.column for use in self._uses))
        self.total_bytes = sum(file.size for file in self.files)
        self.done_bytes = self._done_before = 0
        """Approximate bytes of ``total_bytes`` that were read up to the last batch."""
        self.decoding_bytes = 0
        """The approximate memory for decoding, besides the batches; twice that with threads."""
        self._counts: dict[int, BadRows] = {}
        self._kinds: dict[str, tuple[InputFile, str]] = {}
        """The kind of keys of each column in a cross, and the first file with it."""
        self.dtypes: dict[str, str] = {}
        """The dtypes of kept columns for which the schema has none, by column."""
        for file in self.files:
            reader = self._open(file)
            self.decoding_bytes = max(self.decoding_bytes, reader.decoding_bytes)
            arrow_schema = reader.schema
            for name, value in self._constants(file, reader).items():
                arrow_schema = arrow_schema.append(pa.field(name, value.type))
            try:
                check_columns(file.path, arrow_schema, self._uses)
            except UnicodeError as error:  # in a column name
                raise _unreadable(file, reader, error) from error
            self._check_kinds(file, arrow_schema)
            for use in self._uses:
                if use.use == "own" and use.dtype is None:
                    dtype = dtype_of(plain_type(arrow_schema.field(use.column).type, self._used_as[use.column]))
                    if (before := self.dtypes.setdefault(use.column, dtype)) != dtype:
                        raise SourceError(
                            f"{file.path}, column {use.column!r}: it holds {dtype} here and {before} in other files: "
                            f'set it in the schema (keep = [{{ column = "{use.column}", dtype = "{before}" }}])'
                        )

    @property
    def bad_rows(self) -> BadRows:
        """The bad rows of the files of the last iteration, each counted from its first row."""
        return sum(self._counts.values(), BadRows())

    def batches(
        self, file_index: int = 0, row: int = 0, *, batch_bytes: int = 1 << 20, use_threads: bool = False
    ) -> Iterator[SourceBatch]:
        """Read from a cursor to the end of the last file, in batches of about ``batch_bytes``.

        The cursor (file_index, row) counts the kept rows of a file: an iteration from (batch.file_index,
        batch.first_row + its rows) continues exactly where that batch ended. One iteration at a time. Raises
        SourceError naming what cannot be read.
        """
        self._counts, done = {}, sum(file.size for file in self.files[:file_index])
        for index in range(file_index, len(self.files)):
            self.done_bytes = self._done_before = done
            file = self.files[index]
            reader = self._open(file)
            try:
                yield from self._kept(
                    index, reader, row if index == file_index else 0, batch_bytes=batch_bytes, use_threads=use_threads
                )
            except (OSError, pa.ArrowException, UnicodeError) as error:
                raise _unreadable(file, reader, error) from error
            done += file.size
        self.done_bytes = done

    def _kept(self, index: int, reader: FileReader, row: int, **how: Any) -> Iterator[SourceBatch]:
        """Read one file from its ``row``-th kept row on."""
        file, unlabeled = self.files[index], 0
        constants = self._constants(file, reader)
        drops = self._schema.label_null == "drop" and bool(self._schema.label_columns)
        read = 0 if drops else row  # rows that the reader has yielded or skipped
        skip, kept = row - read, read
        own = [name for name in self._columns if name not in constants]
        repeated = partition_texts(file, own)
        for piece in reader.pieces(own, read, **how):
            batch, rows, count = self._plain(file, piece, read), piece.rows, piece.columns.num_rows
            for name, text in repeated.items():
                check_repeated(file, name, text, batch.column(name), read)
            for name, value in constants.items():
                batch = batch.append_column(name, pa.repeat(value, count))
            if drops:
                batch, rows = self._labeled(batch, read, piece.rows, is_first=not unlabeled)
                unlabeled += count - batch.num_rows
            read += count
            self.done_bytes = self._done_before + int(file.size * piece.fraction)
            self._counts[index] = BadRows(reader.skipped, reader.padded, unlabeled)
            dropped = min(skip, batch.num_rows)
            skip, kept = skip - dropped, kept + dropped
            if batch.num_rows > dropped:
                yield SourceBatch(file, index, kept, batch.slice(dropped), None if rows is None else rows[dropped:])
                kept += batch.num_rows - dropped
        self._counts[index] = BadRows(reader.skipped, reader.padded, unlabeled)

    def _check_kinds(self, file: InputFile, arrow_schema: Any, row: int | None = None) -> None:
        """Raise SourceError if a column of a cross held the other kind before; row: of an iterable, the rows before."""
        for column in (use.column for use in self._uses if use.use == "part"):
            kind = kind_of(plain_type(arrow_schema.field(column).type, self._used_as[column]))
            if kind in ("integer", "string"):
                first, before = self._kinds.setdefault(column, (file, str(kind)))
                if before != kind:
                    seen, remedy = f"here and {before}s in {first.path}", "files (for text files, set [csv] types)"
                    if row is not None:
                        seen, remedy = f"from row {row} on and {before}s before", "batches"
                    raise SourceError(
                        f"{file.path}, column {column!r}: it holds {kind}s {seen}, whose hashes differ: use one type "
                        f"in all {remedy}"
                    )

    def _plain(self, file: InputFile, piece: Piece, read: int) -> Any:
        """Return the columns of a piece in plain types; read: the number of the file's rows before it."""
        batch = piece.columns
        if {*batch.schema.names} - {*self._used_as}:  # Parquet's reader also takes "u.id" for the field of a struct u
            batch = batch.select([name for name in batch.schema.names if name in self._used_as])
        if file.batches is not None:
            self._check_kinds(file, batch.schema, read)
        columns, arrays = batch.columns, []
        for name, array in zip(batch.schema.names, columns, strict=True):
            try:
                arrays.append(plain_array(array, self._used_as[name]))
            except BadValueError as error:
                row = read + error.at if piece.rows is None else int(piece.rows[error.at])
                raise SourceError(f"{file.path}, row {row}, column {name!r}: {error}") from error
        is_same = all(new is old for new, old in zip(arrays, columns, strict=True))
        return batch if is_same else pa.record_batch(arrays, names=batch.schema.names)

    def _labeled(
        self, batch: Any, read: int, rows: NDArray[np.int64] | None, *, is_first: bool
    ) -> tuple[Any, NDArray[np.int64] | None]:
        """Drop rows with a null or NaN label; is_first: none was dropped before."""
        labels = [batch.column(name) for name in self._schema.label_columns]
        keep = reduce(pc.and_, [pc.invert(pc.is_null(label, nan_is_null=True)) for label in labels])
        if is_first and keep.false_count == 0:
            return batch, rows
        if rows is None:
            rows = np.arange(read, read + batch.num_rows)
        return batch.filter(keep), rows[keep.to_numpy(zero_copy_only=False)]

    def _open(self, file: InputFile) -> FileReader:
        try:
            return READERS[file.format](file, self._schema, self._uses)
        except (OSError, pa.ArrowException, UnicodeError) as error:
            raise _unreadable(file, None, error) from error

    def _constants(self, file: InputFile, reader: FileReader) -> dict[str, Any]:
        """Return the columns in the folder names that the file lacks, as scalars."""
        return partition_values(file, [use for use in self._uses if use.column not in reader.schema.names])


def _unreadable(file: InputFile, reader: FileReader | None, error: Exception) -> SourceError:
    explained = None if reader is None else reader.explain(error)
    text = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, OSError) and error.errno:  # errors of the system have a number; Arrow's do not
        return SourceError(f"{file.path} cannot be read ({os.strerror(error.errno)}): check its permissions and disk")
    return explained or SourceError(
        f"{file.path} cannot be read ({text}): the file is damaged, truncated or of another type"
    )
