"""Text files: CSV, TSV and Criteo's, with rows that have too few or too many fields."""

from __future__ import annotations

import io
import re
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from tiercache.data.column_types import csv_types
from tiercache.data.inputs import open_binary
from tiercache.data.readers import LARGEST_BATCH, FileReader, Piece
from tiercache.errors import SourceError
from tiercache.sizes import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.data.column_types import ColumnUse
    from tiercache.data.inputs import InputFile
    from tiercache.schema import Schema

CRITEO_COLUMNS = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))
"""The columns of Criteo's files, which have no header."""
_BLOCK_BYTES = 2 << 20
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|nan|[+-]?inf", re.IGNORECASE)


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
        self._bad, self._padding = list[_BadRow](), list[_BadRow]()
        self._lists = {use.column for use in uses if use.is_list} if self._csv.list_separator else set()
        try:
            with self._open() as stream:
                guessed = self._reader(stream).schema
        except pa.ArrowInvalid as error:
            raise self.explain(error) or error from error
        # Of columns that stand twice, the first: the check of columns refuses them with a better message.
        known = pa.schema({field.name: field for field in reversed(list(guessed))}.values())
        chosen = csv_types({use.column for use in uses}, known, uses, dict(self._csv.types))
        chosen |= {name: pa.list_(chosen[name]) for name in self._lists.intersection(chosen)}
        self.schema = pa.schema([pa.field(f.name, chosen.get(f.name, f.type)) for f in guessed])

    def pieces(self, columns: Sequence[str], row: int, *, batch_bytes: int, use_threads: bool) -> Iterator[Piece]:
        """Read from the beginning of the file, since nobody knows where a row begins.

        A column of integers with a number such as 5.0 is read as float64 from the row after the last one given.
        """
        types = {name: pa.string() if name in self._lists else self.schema.field(name).type for name in columns}
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
            for batch in chain(reader, [None]):
                is_end = batch is None
                batch = pa.RecordBatch.from_pylist([], schema=reader.schema) if is_end else batch  # noqa: PLW2901
                whole, rows = self._merged(batch, good, convert, is_end=is_end)
                good += batch.num_rows
                for name in self._lists.intersection(columns):
                    whole = self._split(whole, name, np.arange(good) if rows is None else rows)
                dropped = min(skip, whole.num_rows)
                skip -= dropped
                share = min(1.0, self._raw.tell() / self._file.size)
                for low in range(dropped, whole.num_rows, LARGEST_BATCH):
                    part = None if rows is None else rows[low : low + LARGEST_BATCH]
                    yield Piece(whole.slice(low, LARGEST_BATCH), share, part)

    def _merged(self, batch: Any, good: int, convert: Any, *, is_end: bool) -> tuple[Any, NDArray[np.int64] | None]:
        """Return a batch of good rows with the padded rows between them, and the row of each in the file.

        good: how many good rows came before. is_end: no good row comes after the batch.
        """
        gone = self.skipped + self.padded
        if not gone and not self._bad:
            return batch, None
        before = np.array([bad.row for bad in self._bad], np.int64) - np.arange(gone, gone + len(self._bad))
        places = np.arange(good, good + batch.num_rows)
        rows = places + gone + np.searchsorted(before, places, side="right")
        taken = before.size if is_end else int(np.searchsorted(before, good + batch.num_rows))
        short = [bad for bad in self._bad[:taken] if bad.fields < bad.expected and self._csv.bad_rows == "pad"]
        if short:
            filler = [bad.text + self._file.delimiter * (bad.expected - bad.fields) for bad in short]
            self._padding = short
            padded = self._reader(io.BytesIO("\n".join(filler).encode()), convert, self._all_names)
            batch, self._padding = pa.Table.from_batches([batch, *padded]), []
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
        text = " ".join(str(error).split()).rstrip(".")
        if bad := re.search(r"parse error: Row #(\d+): Expected (\d+) columns, got (\d+)", text):
            number, expected, fields = map(int, bad.groups())
            advice = 'let [csv] bad_rows = "skip" or "pad" decide'
            where = "Criteo's files have" if self._is_criteo else "the first line has"
            where = "[source] columns names" if self._names and not self._is_criteo else where
            return SourceError(
                f"{self._file.path}, row {number - self._first_row}: it has {counted(fields, 'field')}, but {where} "
                f"{expected}: correct it, or {advice if self._csv.bad_rows == 'error' else 'write it as UTF-8'}"
            )
        if "Empty CSV file" in text:
            return SourceError(f"{self._file.path} is empty: leave it out or write it again")
        column = self._failed_column(error)
        if column is None:
            return None
        where = f"{self._file.path}, column {column!r}"
        if row := re.search(r"Row #(\d+): ?", text):
            number = int(row[1])
            at = self._padding[number - 1].row if self._padding else number - self._first_row
            where = f"{self._file.path}, row {at}, column {column!r}"
        text = re.sub(r"In CSV column #\d+: ?|Row #\d+: ?", "", text)
        return SourceError(f"{where} cannot be read ({text}): correct it, or give the column another type")

    def _split(self, batch: Any, name: str, rows: NDArray[np.int64]) -> Any:
        """Return a batch with the text of a column split into lists; nothing is an empty list."""
        lists = pc.split_pattern(pc.utf8_trim_whitespace(batch.column(name)), self._csv.list_separator)
        values, kind = pc.utf8_trim_whitespace(lists.flatten()), self.schema.field(name).type.value_type
        try:
            try:
                values = values.cast(kind)
            except pa.ArrowInvalid:
                values = values.cast(pa.float64())  # whole numbers written as floats
        except pa.ArrowInvalid as error:
            owners = np.repeat(rows[-batch.num_rows :], np.diff(lists.offsets))
            at, value = next((i, v) for i, v in enumerate(values.to_pylist()) if not _NUMBER.fullmatch(v))
            raise SourceError(
                f"{self._file.path}, row {owners[at]}, column {name!r}: {value!r} in its list is no number: correct "
                'it, or say key = "string"'
            ) from error
        found = pa.ListArray.from_arrays(lists.offsets, values)
        return batch.set_column(batch.schema.get_field_index(name), name, found)

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
        return "skip"

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
                # A reader that ends later notes nothing here. Without a handler Arrow says the same of the first bad
                # row, of other encodings too, and its threads need no Python, which may be ending.
                invalid_row_handler=None if self._csv.bad_rows == "error" else partial(self._note, self._bad),
            ),
            convert_options=convert,
        )
