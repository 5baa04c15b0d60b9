"""Text files: CSV, TSV and Criteo's, with rows that have too few or too many fields."""

from __future__ import annotations

import io
import re
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from tiercache.data.column_types import csv_types
from tiercache.data.inputs import open_binary
from tiercache.data.readers import LARGEST_BATCH, FileReader, Piece
from tiercache.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.data.column_types import ColumnUse
    from tiercache.data.inputs import InputFile
    from tiercache.schema import Schema

__all__ = ["CRITEO_COLUMNS", "TextReader"]

CRITEO_COLUMNS = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))
"""The columns of Criteo's files, which have no header."""
_BLOCK_BYTES = 2 << 20


class _BadRow(NamedTuple):
    """A row with another number of fields than the first line."""

    row: int
    """In the file, 0-based, the header not counted."""
    fields: int
    expected: int
    text: str


class TextReader(FileReader):
    """Reads a text file."""

    decoding_bytes = _BLOCK_BYTES

    def __init__(self, file: InputFile, schema: Schema, uses: Sequence[ColumnUse]) -> None:
        self._file, self._csv = file, schema.csv
        self._is_criteo = file.format == "criteo"
        self._has_header = self._csv.header and not self._is_criteo
        names = CRITEO_COLUMNS if self._is_criteo else schema.source.columns
        self._names = None if self._has_header else list(names) or None
        self._bad: list[_BadRow] = []
        try:
            with self._open() as stream:
                guessed = self._reader(stream).schema
        except pa.ArrowInvalid as error:
            raise self.explain(error) or error from error
        # Of columns that stand twice, the first: the check of columns refuses them with a better message.
        known = pa.schema({field.name: field for field in reversed(list(guessed))}.values())
        chosen = csv_types({use.column for use in uses}, known, uses, dict(self._csv.types))
        self.schema = pa.schema([pa.field(f.name, chosen.get(f.name, f.type)) for f in guessed])

    def pieces(self, columns: Sequence[str], row: int, *, batch_bytes: int, use_threads: bool) -> Iterator[Piece]:
        """Read from the beginning of the file, since nobody knows where a row begins.

        A column of integers with a number such as 5.0 is read as float64 from the row after the last one given.
        """
        types = {name: self.schema.field(name).type for name in columns}
        while True:
            try:
                for piece in self._read(columns, types, row):
                    row += piece.columns.num_rows
                    yield piece
            except pa.ArrowInvalid as error:
                column = self._failed_column(error)
                if types.get(column or "") != pa.int64():
                    raise
                types[str(column)] = pa.float64()
            else:
                return

    def _read(self, columns: Sequence[str], types: dict[str, Any], skip: int) -> Iterator[Piece]:
        convert = pacsv.ConvertOptions(
            include_columns=list(columns),
            column_types=types,
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            **({"null_values": [""]} if self._is_criteo else {}),
        )
        self._bad, self.skipped, self.padded = [], 0, 0
        good = 0
        with self._open() as stream:
            reader = self._reader(stream, convert)
            for batch in chain(reader, [pa.RecordBatch.from_pylist([], schema=reader.schema)]):
                whole, rows = self._merged(batch, good, None if batch.num_rows else len(self._bad), convert)
                good += batch.num_rows
                dropped = min(skip, whole.num_rows)
                skip -= dropped
                share = min(1.0, self._raw.tell() / self._file.size)
                for low in range(dropped, whole.num_rows, LARGEST_BATCH):
                    part = None if rows is None else rows[low : low + LARGEST_BATCH]
                    yield Piece(whole.slice(low, LARGEST_BATCH), share, part)

    def _merged(self, batch: Any, good: int, count: int | None, convert: Any) -> tuple[Any, NDArray[np.int64] | None]:
        """Return a batch of good rows with the padded rows between them, and the row of each in the file.

        good: how many good rows came before. count: of the bad rows that wait, how many to take; None: those that
        stand before the last row of the batch.
        """
        gone = self.skipped + self.padded
        if not gone and not self._bad:
            return batch, None
        before = np.array([bad.row for bad in self._bad], np.int64) - np.arange(gone, gone + len(self._bad))
        places = np.arange(good, good + batch.num_rows)
        rows = places + gone + np.searchsorted(before, places, side="right")
        taken = int(np.searchsorted(before, good + batch.num_rows)) if count is None else count
        short = [bad for bad in self._bad[:taken] if bad.fields < bad.expected and self._csv.bad_rows == "pad"]
        if short:
            filler = [bad.text + self._file.delimiter * (bad.expected - bad.fields) for bad in short]
            padded = self._reader(io.BytesIO("\n".join(filler).encode()), convert, self._all_names)
            batch = pa.Table.from_batches([batch, *padded])
            if batch.num_rows != rows.size + len(short):
                raise SourceError(f"{self._file.path}, row {short[0].row}: a quote is not closed: correct it")
            rows = np.concatenate([rows, [bad.row for bad in short]])
            order = np.argsort(rows)
            batch, rows = batch.take(order).combine_chunks().to_batches()[0], rows[order]
        self.padded += len(short)
        self.skipped += taken - len(short)
        del self._bad[:taken]
        return batch, rows

    def explain(self, error: Exception) -> SourceError | None:
        """Name row and column, as far as Arrow or the handler of bad rows knows them."""
        if self._bad and self._csv.bad_rows == "error":
            bad = self._bad[0]
            return SourceError(
                f"{self._file.path}, row {bad.row}: it has {bad.fields} fields, but the first line has {bad.expected}: "
                'correct it, or let [csv] bad_rows = "skip" or "pad" decide'
            )
        text = " ".join(str(error).split()).rstrip(".")
        if "Empty CSV file" in text:
            return SourceError(f"{self._file.path} is empty: leave it out or write it again")
        column = self._failed_column(error)
        if column is None:
            return None
        where = f"{self._file.path}, column {column!r}"
        if (row := re.search(r"Row #(\d+): ?", text)) and not self.skipped + self.padded:
            where = f"{self._file.path}, row {int(row[1]) - self._first_row}, column {column!r}"
        text = re.sub(r"In CSV column #\d+: ?|Row #\d+: ?", "", text)
        return SourceError(f"{where} cannot be read ({text}): correct it, or give the column another type")

    def _failed_column(self, error: Exception) -> str | None:
        found = re.search(r"In CSV column #(\d+): ?", str(error))
        return self._all_names[int(found[1])] if found else None

    @property
    def _all_names(self) -> list[str]:
        return list(self.schema.names)

    @property
    def _first_row(self) -> int:
        """Arrow's number of row 0."""
        return 2 if self._has_header else 1

    def _note(self, found: list[_BadRow], bad: Any) -> str:
        """Take a row with another number of fields than the first line."""
        found.append(_BadRow(bad.number - self._first_row, bad.actual_columns, bad.expected_columns, bad.text))
        return "error" if self._csv.bad_rows == "error" else "skip"

    def _open(self) -> Any:
        self._raw, codec = open_binary(self._file.path), self._file.compression
        return self._raw if codec is None else pa.CompressedInputStream(self._raw, codec)

    def _reader(self, stream: Any, convert: Any = None, names: list[str] | None = None) -> Any:
        names = names or self._names
        return pacsv.open_csv(
            stream,
            # Blocks are parsed one after another, so that bad rows know their number.
            read_options=pacsv.ReadOptions(
                block_size=_BLOCK_BYTES,
                use_threads=False,
                column_names=names,
                autogenerate_column_names=not self._has_header and names is None,
            ),
            parse_options=pacsv.ParseOptions(
                delimiter=self._file.delimiter,
                quote_char=False if self._is_criteo else '"',
                newlines_in_values=not self._is_criteo,
                invalid_row_handler=partial(self._note, self._bad),  # a reader that ends later notes nothing here
            ),
            convert_options=convert,
        )
