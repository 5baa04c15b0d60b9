"""Text files: CSV, TSV and Criteo's, with rows that have too few or too many fields."""

from __future__ import annotations

import io
import re
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from tiercache.data.column_types import ColumnUse, csv_types, kind_of
from tiercache.data.inputs import InputFile, open_binary
from tiercache.data.readers import LARGEST_BATCH, FileReader, Piece
from tiercache.data.text_fields import (
    HEX_EXPECTED,
    UNIT_SEPARATOR,
    InvalidTextError,
    LentFile,
    TextStream,
    integers,
    reals,
    split,
    without_nulls,
)
from tiercache.errors import SourceError
from tiercache.sizes import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.schema import Schema

CRITEO_COLUMNS = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))
"""The columns of Criteo's files, which have no header."""
_BLOCK_BYTES = 2 << 20
_MOST_BLOCK_BYTES = _BLOCK_BYTES << 9
"""1 GiB, for files with very long rows."""
_NUMBERS = (pa.int64(), pa.float64(), pa.bool_())
_DELIMITERS = (",", ";", "\t", "|", "::", ":", " ")
"""The delimiters to suggest if the schema's does not match a file."""
_LIST_SEPARATORS = ("|", ";", ",", " ", ":", "\t")
"""The separators to suggest for the values of lists."""
_SNIFFED = 64 << 10


class _BadRow(NamedTuple):
    """A row with a different number of fields than the first line."""

    row: int
    """In the file, 0-based, the header not counted."""
    fields: int
    expected: int
    text: str


class _HexError(Exception):
    """Text with hexadecimal numbers was about to be parsed as integers."""


class TextReader(FileReader):
    """Reads a text file."""

    def __init__(self, file: InputFile, schema: Schema, uses: Sequence[ColumnUse]) -> None:
        self._file, self._csv, self._uses = file, schema.csv, uses
        self._is_criteo = file.format == "criteo"
        if self._is_criteo:
            self._csv = replace(self._csv, header=False, delimiter=file.delimiter, quote="", null_words=("",))
        self._first_row = 2 if self._csv.header else 1  # Arrow's number of row 0
        self._columns = schema.source.columns
        names = CRITEO_COLUMNS if self._is_criteo else self._columns
        self._names = None if self._csv.header else list(names) or None
        self._delimiter = self._csv.delimiter or file.delimiter
        self._parsed_delimiter = self._delimiter if len(self._delimiter) == 1 else UNIT_SEPARATOR.decode()
        default = "" if self._delimiter == "\t" else '"'
        self._quote = default if self._csv.quote is None else self._csv.quote
        self._check_format()
        self._hex = {f.columns[0] for f in schema.features if f.key == "hex"}
        self._bad, self._padding = list[_BadRow](), list[_BadRow]()
        self._kinds = dict[str, Any]()  # the types of columns, and of the elements of lists
        self._raw: Any = None
        self._lists = {use.column for use in uses if use.is_list} if self._csv.list_separator else set()
        self._block_bytes = self.decoding_bytes = _BLOCK_BYTES
        while True:
            try:
                with self._open() as stream:
                    guessed = self._reader(stream).schema
                break
            except pa.ArrowInvalid as error:
                if not self._grows(error):
                    raise self.explain(error) or error from error
        # Keep the first of repeated columns: the check of columns has a better message for them.
        known = pa.schema({field.name: field for field in reversed(list(guessed))}.values())
        self._check_names(guessed.names)
        self._check_lists(known)
        chosen = csv_types({use.column for use in uses}, known, uses, dict(self._csv.types))
        self._kinds |= chosen
        chosen |= {name: pa.list_(chosen[name]) for name in self._lists.intersection(chosen)}
        self.schema = pa.schema([pa.field(f.name, chosen.get(f.name, f.type)) for f in guessed])

    def _check_format(self) -> None:
        if len(self._delimiter) > 1 and self._quote:
            raise SourceError(
                f'{self._file.path}: fields with the delimiter {self._delimiter!r} cannot be quoted: set quote = "" in '
                "[csv]"
            )
        if not self._delimiter.isascii() or not self._quote.isascii():
            raise SourceError(
                f"{self._file.path}: invalid [csv] delimiter {self._delimiter!r} or quote {self._quote!r}: expected "
                "ASCII characters"
            )

    def _check_names(self, names: Sequence[str]) -> None:
        """Raise SourceError if columns are missing because the first line has a different delimiter."""
        missing = [use.column for use in self._uses if use.column not in names]
        if not missing or self._is_criteo:
            return
        with self._open() as stream:
            line = stream.read(_SNIFFED).decode("utf-8", "replace").lstrip("\ufeff").splitlines()[:1]
        if self._csv.header and set(missing) <= set(self._columns):
            raise SourceError(
                f"{self._file.path} has no column {missing[0]!r} in its first line, and [source] columns is for text "
                "without a header: set header = false in [csv], or correct the line"
            )
        if padded := [name for name in names if name.strip().strip(self._quote or None) == missing[0]]:
            raise SourceError(
                f"{self._file.path} has no column {missing[0]!r}: its first line has {padded[0]!r}: remove the spaces "
                "there, or write this name in the schema"
            )
        for delimiter in _DELIMITERS:
            names = [name.strip().strip("'\"") for name in "".join(line).split(delimiter)]
            if delimiter != self._delimiter and set(missing) <= set(names):
                raise SourceError(
                    f"{self._file.path} has no column {missing[0]!r}: its first line is separated by {delimiter!r}, "
                    f"not by {self._delimiter!r}: set {_say(delimiter)} in [csv]"
                )

    def _check_lists(self, known: Any) -> None:
        """Raise SourceError if a feature needs lists but the schema names no separator for their values."""
        use = next((use for use in self._uses if use.is_list and use.column in known.names), None)
        if use is None or self._csv.list_separator is not None:
            return
        values = list[str]()
        if kind_of(known.field(use.column).type) == "string":
            with suppress(pa.ArrowInvalid, UnicodeError), self._open() as stream:
                batch = self._reader(stream, quiet=True).read_next_batch()
                values = [str(one) for one in batch.column(batch.schema.names.index(use.column))[:1000].to_pylist()]
        found = next((one for one in _LIST_SEPARATORS if any(one in value for value in values)), "|")
        raise SourceError(
            f"{self._file.path}, column {use.column!r}: {use.who} needs lists, and text has lists only if the schema "
            f"names the separator of their values: set list_separator = {_quoted(found)} in [csv], or set hotness = "
            '"one_hot" for the feature'
        )

    def _grows(self, error: Exception) -> bool:
        """Enlarge blocks if a row was longer than one; return True if so."""
        if "straddling object" not in str(error) or self._block_bytes >= _MOST_BLOCK_BYTES:
            return False
        self._block_bytes = self.decoding_bytes = 8 * self._block_bytes
        return True

    def pieces(self, columns: Sequence[str], row: int, *, batch_bytes: int, use_threads: bool) -> Iterator[Piece]:
        """Read from the beginning of the file, because the offset of a row is unknown.

        If the parser rejects a field of a column of numbers, the column is read as text from the row after the last one
        yielded, and its fields are converted as in `text_fields`. So are columns of integers if the text has
        hexadecimal numbers, which the parser accepts.
        """
        kinds = {name: self._kinds.get(name, self.schema.field(name).type) for name in columns}
        types = {name: pa.string() if name in self._lists else kind for name, kind in kinds.items()}
        while True:
            try:
                for piece in self._read(columns, types, kinds, row):
                    row += piece.columns.num_rows
                    yield piece
            except _HexError:
                types = {name: pa.string() if kind == pa.int64() else kind for name, kind in types.items()}
            except pa.ArrowInvalid as error:
                column = self._failed_column(error)
                if not self._grows(error):
                    if types.get(column or "") not in _NUMBERS:
                        raise
                    types[str(column)] = pa.string()
            else:
                return

    def _read(self, columns: Sequence[str], types: dict[str, Any], kinds: dict[str, Any], skip: int) -> Iterator[Piece]:
        convert = pacsv.ConvertOptions(
            include_columns=list(columns), column_types=types, strings_can_be_null=True,
            quoted_strings_can_be_null=False, null_values=list(self._csv.null_words),
        )  # fmt: skip
        self._bad, self.skipped, self.padded = [], 0, 0
        good = 0
        for batch in chain(self._batches(self._open, convert), [None]):
            is_end = batch is None
            if is_end:
                fields = [pa.field(name, types[name]) for name in columns]
                batch = pa.RecordBatch.from_pylist([], schema=pa.schema(fields))  # noqa: PLW2901
            merged, rows = self._merged(batch, good, convert, is_end=is_end)
            good += batch.num_rows
            where = np.arange(good - batch.num_rows, good) if rows is None else rows
            for name in columns:
                merged = self._converted(merged, name, types[name], kinds[name], where)
            dropped = min(skip, merged.num_rows)
            skip -= dropped
            fraction = 1.0 if is_end else min(1.0, self._raw.tell() / self._file.size)
            for low in range(dropped, merged.num_rows, LARGEST_BATCH):
                part = None if rows is None else rows[low : low + LARGEST_BATCH]
                yield Piece(merged.slice(low, LARGEST_BATCH), fraction, part)

    def _batches(self, opened: Callable[[], Any], convert: Any, names: list[str] | None = None) -> Iterator[Any]:
        """Yield batches whose lists are null for a null word and empty for an empty field. The parser calls both null;
        if it does, the fields are read again with no null word but the empty one.
        """
        lists = [name for name in convert.include_columns if name in self._lists]
        again = pacsv.ConvertOptions(
            include_columns=lists, column_types=dict.fromkeys(lists, pa.string()), strings_can_be_null=True,
            quoted_strings_can_be_null=True, null_values=[""],
        )  # fmt: skip
        try:
            with ExitStack() as stack:
                stream = stack.enter_context(opened())
                reader, other, num_read = self._reader(stream, convert, names), None, 0
                parses_integers = pa.int64() in convert.column_types.values()
                for number, batch in enumerate(reader):
                    if parses_integers and getattr(stream, "has_hex", False):
                        raise _HexError
                    marked = batch
                    if any(batch.column(name).null_count for name in lists):
                        if other is None:
                            raw: Any = self._raw
                            other = self._reader(stack.enter_context(opened()), again, names, quiet=True)
                            self._raw = raw
                        for _ in range(number - num_read):
                            other.read_next_batch()
                        texts, num_read = other.read_next_batch(), number + 1
                        for name in lists:
                            is_empty = pc.and_(batch.column(name).is_null(), texts.column(name).is_null())
                            place = marked.schema.get_field_index(name)
                            marked = marked.set_column(place, name, pc.if_else(is_empty, "", batch.column(name)))
                    yield marked
                if parses_integers and getattr(stream, "has_hex", False):  # in rows with too few or too many fields
                    raise _HexError
        finally:
            reader = other = None  # a traceback that a program keeps does not keep them

    def _merged(self, batch: Any, good: int, convert: Any, *, is_end: bool) -> tuple[Any, NDArray[np.int64] | None]:
        """Return a batch of good rows with the padded rows between them, and the row of each in the file.

        good: the number of earlier good rows. is_end: True if no good row comes after the batch.
        """
        num_bad = self.skipped + self.padded
        if not num_bad and not self._bad:
            return batch, None
        before = np.array([bad.row for bad in self._bad], np.int64) - np.arange(num_bad, num_bad + len(self._bad))
        positions = np.arange(good, good + batch.num_rows)
        rows = positions + num_bad + np.searchsorted(before, positions, side="right")
        taken = before.size if is_end else int(np.searchsorted(before, good + batch.num_rows))
        filled = [(bad, text) for bad in self._bad[:taken] if (text := self._filled(bad)) is not None]
        if filled:
            self._padding = [bad for bad, _ in filled]
            lines = "\n".join(text for _, text in filled).encode()
            padded = self._batches(lambda: io.BytesIO(lines), convert, list(self.schema.names))
            batch, self._padding = pa.Table.from_batches([batch, *padded]), []
            if batch.num_rows != rows.size + len(filled):
                raise SourceError(f"{self._file.path}, row {filled[0][0].row}: a quote is not closed: correct it")
            rows = np.concatenate([rows, [bad.row for bad, _ in filled]])
            order = np.argsort(rows)
            batch, rows = batch.take(order).combine_chunks().to_batches()[0], rows[order]
        self.padded += len(filled)
        self.skipped += taken - len(filled)
        del self._bad[:taken]
        return batch, rows

    def _filled(self, bad: _BadRow) -> str | None:
        """Return a row with as many fields as the first line, by adding empty ones or removing them at the end."""
        if self._csv.bad_rows != "pad":
            return None
        delimiter = self._parsed_delimiter
        if bad.fields < bad.expected:
            return bad.text + delimiter * (bad.expected - bad.fields)
        surplus = delimiter * (bad.fields - bad.expected)
        return bad.text.removesuffix(surplus) if bad.text.endswith(surplus) else None

    def explain(self, error: Exception) -> SourceError | None:
        """Name row and column, if Arrow or the handler of bad rows knows them."""
        text = " ".join(str(error).split()).rstrip(".")
        if bad := re.search(r"parse error: Row #(\d+): Expected (\d+) columns, got (\d+)", text):
            number, expected, fields = map(int, bad.groups())
            advice = 'let [csv] bad_rows = "skip" or "pad" decide'
            where = "Criteo's files have" if self._is_criteo else "the first line has"
            where = "[source] columns names" if self._names and not self._is_criteo else where
            return SourceError(
                f"{self._file.path}, row {number - self._first_row}: it has {counted(fields, 'field')}, but {where} "
                f"{expected}: correct it, or {advice if self._csv.bad_rows == 'error' else 'write it as UTF-8'}"
                f"{self._other_delimiter(expected)}"
            )
        if "Empty CSV file" in text:
            return SourceError(f"{self._file.path} is empty: omit it or write it again")
        if "straddling object" in text:
            return SourceError(
                f"{self._file.path} has a row longer than {_MOST_BLOCK_BYTES >> 20} MiB, or a quote that is not "
                'closed: correct it, or set quote = "" in [csv] if quotes are plain characters'
            )
        column = self._failed_column(error)
        if column is None:
            return None
        where = f"{self._file.path}, column {column!r}"
        if row := re.search(r"Row #(\d+): ?", text):
            number = int(row[1])
            at = self._padding[number - 1].row if self._padding else number - self._first_row
            where = f"{self._file.path}, row {at}, column {column!r}"
        text = re.sub(r"In CSV column #\d+: ?|Row #\d+: ?", "", text)
        advice = ", or write the file as UTF-8" if "UTF8" in text else self._advice(column)
        return SourceError(f"{where} cannot be read ({text}): correct it{advice}")

    def _other_delimiter(self, expected: int) -> str:
        """Return advice if the first line has as many fields with another delimiter, or if quotes do not fit."""
        if self._is_criteo:
            return ""
        with self._open() as stream:
            text = stream.read(_SNIFFED).decode("utf-8", "replace")
        if not self._quote and '"' in text:
            return "; if its fields are quoted, set quote = '\"' in [csv]"
        if self._quote and text.count(self._quote) % 2:
            return '; if quotes are plain characters, set quote = "" in [csv]'
        line = "".join(text.splitlines()[:1])
        fits = [d for d in _DELIMITERS if d != self._delimiter and line.count(d) == expected - 1 > 0]
        return f"; if its delimiter is {fits[0]!r}, set {_say(fits[0])} in [csv]" if fits else ""

    def _advice(self, column: str, *, is_hex: bool = False) -> str:
        """Return the advice for a field that is not a number."""
        uses = {use.use for use in self._uses if use.column == column}
        if "integer" in uses and is_hex:
            return ', or set key = "hex" for the feature and write the digits without 0x'
        if "integer" in uses:
            return ', or set key = "string" for the feature'
        if "part" in uses:
            return f', or set types = {{ {column} = "string" }} in [csv]'
        return ", or drop the row"

    def _converted(self, batch: Any, name: str, read_as: Any, kind: Any, rows: NDArray[np.int64]) -> Any:
        """Return a batch with a column of text converted to numbers or lists, as in `text_fields`."""
        column = batch.column(name)
        owners = rows
        try:
            if name in self._lists:
                lengths, values = split(
                    column, str(self._csv.list_separator), self._csv.null_words, numbers=kind in _NUMBERS
                )
                owners = rows.repeat(lengths)
                values = self._numbers(values, kind)
                offsets = np.zeros(lengths.size + 1, np.int32)
                np.cumsum(lengths, out=offsets[1:])
                nulls = column.is_null() if column.null_count else None
                converted = pa.ListArray.from_arrays(pa.array(offsets), values, mask=nulls)
            elif name in self._hex:
                converted = without_nulls(column, self._csv.null_words)
            elif read_as == pa.string() and kind in _NUMBERS:
                converted = self._numbers(column, kind)
            else:
                return batch
        except InvalidTextError as error:
            at = owners[error.at] if len(owners) > error.at else rows[error.at]
            in_list = " in its list" if owners is not rows else ""
            raise SourceError(
                f"{self._file.path}, row {at}, column {name!r} cannot be read ({error}{in_list}): correct it"
                f"{self._advice(name, is_hex=error.expected == HEX_EXPECTED)}"
            ) from error
        return batch.set_column(batch.schema.get_field_index(name), name, converted)

    def _numbers(self, texts: Any, kind: Any) -> Any:
        if kind == pa.int64():
            return integers(texts, self._csv.null_words)
        return reals(texts, self._csv.null_words) if kind in _NUMBERS else texts

    def _failed_column(self, error: Exception) -> str | None:
        match = re.search(r"In CSV column #(\d+): ?", str(error))
        return str(self.schema.names[int(match[1])]) if match else None

    def _note(self, noted: list[_BadRow], bad: Any) -> str:
        noted.append(_BadRow(bad.number - self._first_row, bad.actual_columns, bad.expected_columns, bad.text))
        return "skip"

    def _open(self) -> Any:
        self._raw, codec = open_binary(self._file.path), self._file.compression
        source = self._raw if codec is None else pa.CompressedInputStream(self._raw, codec)
        if self._is_criteo and pa.int64() not in self._kinds.values():
            return source
        return TextStream(self._file.path, source, self._delimiter.encode(), self._quote.encode())

    def _reader(self, stream: Any, convert: Any = None, names: list[str] | None = None, *, quiet: bool = False) -> Any:
        """quiet: rows with a different number of fields are skipped without a note."""
        names = names or self._names
        is_native = isinstance(stream, pa.NativeFile) and not isinstance(self._raw, pa.PythonFile)
        return pacsv.open_csv(
            stream if is_native else LentFile(stream),
            # Blocks are parsed one after another, so that bad rows know their number.
            read_options=pacsv.ReadOptions(
                block_size=self._block_bytes,
                use_threads=False,
                column_names=names,
                autogenerate_column_names=not self._csv.header and names is None,
            ),
            parse_options=pacsv.ParseOptions(
                delimiter=self._parsed_delimiter,
                quote_char=self._quote or False,
                newlines_in_values=bool(self._quote),
                # A reader that ends later records nothing here. Without a handler Arrow reports the first bad row
                # too, also in other encodings, and its threads need no Python, which may be shutting down.
                invalid_row_handler=None
                if self._csv.bad_rows == "error"
                else partial(self._note, [] if quiet else self._bad),
            ),
            convert_options=convert,
        )


def _say(delimiter: str) -> str:
    """Return the line of the schema that names a delimiter."""
    return f"delimiter = {_quoted(delimiter)}" + (' and quote = ""' if len(delimiter) > 1 else "")


def _quoted(text: str) -> str:
    """Return TOML's spelling of a separator."""
    return '"\\t"' if text == "\t" else f'"{text}"'
