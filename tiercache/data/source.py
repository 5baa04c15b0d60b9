"""Files as a stream of record batches that know where they come from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from tiercache.data.column_types import check_columns, column_uses, csv_types, kind_of
from tiercache.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tiercache.data.inputs import InputFile
    from tiercache.schema import Schema

__all__ = ["Source", "SourceBatch"]

_CSV_BLOCK_BYTES = 2 << 20
_LARGEST_BATCH = 1 << 15
_MOST_DECODING_BYTES = 4 << 20
"""Of one Parquet column: pages are 1 MiB, compressed and not, and so are dictionary and buffer."""


@dataclass(frozen=True, slots=True)
class SourceBatch:
    """Some rows of one file."""

    file: InputFile
    file_index: int
    first_row: int
    """Where it begins in the file, 0-based, the header not counted."""
    columns: Any
    """A RecordBatch with at least the columns that the schema reads."""

    def error(self, row: int, column: str, what: str) -> SourceError:
        """Return an error about a row of this batch: names file, row in the file, and column."""
        return SourceError(f"{self.file.path}, row {self.first_row + row}, column {column!r}: {what}")


class Source:
    """The rows of all files, one file after another. Opening checks the columns of every file before any is read."""

    def __init__(self, files: Sequence[InputFile], schema: Schema, *, cut_column: str | None = None) -> None:
        self.files = tuple(files)
        self._uses = column_uses(schema, cut_column)
        self._csv = schema.csv
        self._columns = tuple(dict.fromkeys(use.column for use in self._uses))
        self._batch_bytes, self._use_threads = 1 << 20, False
        self._decoding_bytes = _CSV_BLOCK_BYTES if any(file.format == "csv" for file in self.files) else 0
        self._done_before = 0
        self._done_in_file = 0.0
        kinds: dict[str, tuple[InputFile, str]] = {}
        for file in self.files:
            found = self._schema_of(file)
            check_columns(file.path, found, self._uses)
            for use in self._uses:
                kind = kind_of(found.field(use.column).type)
                if use.use == "part" and kind in ("integer", "string"):
                    first, before = kinds.setdefault(use.column, (file, str(kind)))
                    if before != kind:
                        raise SourceError(
                            f"{file.path}, column {use.column!r}: it holds {kind}s here and {before}s in {first.path}, "
                            "whose hashes differ: give all files one type (for text files in [csv] types)"
                        )

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def done_bytes(self) -> int:
        """About how many of ``total_bytes`` lie behind the batch given out last."""
        return self._done_before + int(self._done_in_file)

    @property
    def decoding_bytes(self) -> int:
        """About how much memory decoding takes beside the batches given out; twice that with threads."""
        return self._decoding_bytes

    def batches(
        self, file_index: int = 0, row: int = 0, *, batch_bytes: int = 1 << 20, use_threads: bool = False
    ) -> Iterator[SourceBatch]:
        """Read from a row of a file to the end of the last, in batches of about ``batch_bytes``.

        Only one reading goes on at a time. Raises SourceError naming what cannot be read.
        """
        self._batch_bytes, self._use_threads = batch_bytes, use_threads
        self._done_before = sum(file.size for file in self.files[:file_index])
        for index in range(file_index, len(self.files)):
            file, self._done_in_file = self.files[index], 0.0
            read = {"parquet": self._parquet, "ipc": self._ipc, "csv": self._csv_rows}[file.format]
            at = row if index == file_index else 0
            try:
                for batch in read(file, at):
                    if batch.num_rows:
                        yield SourceBatch(file, index, at, batch)
                    at += batch.num_rows
            except (OSError, pa.ArrowException) as error:
                raise self._unreadable(file, error) from error
            self._done_before, self._done_in_file = self._done_before + file.size, 0.0

    def _schema_of(self, file: InputFile) -> Any:
        try:
            if file.format == "parquet":
                with pq.ParquetFile(file.path) as parquet:
                    self._decoding_bytes = max(self._decoding_bytes, self._decoding(parquet.metadata))
                    return parquet.schema_arrow
            if file.format == "ipc":
                with pa.memory_map(str(file.path)) as mapped:
                    return _open_ipc(mapped).schema
            with self._open_text(file) as stream:
                guessed = pacsv.open_csv(stream, **self._csv_options(file)).schema
                chosen = csv_types(self._columns, _known(guessed), self._uses, dict(self._csv.types))
                return pa.schema([pa.field(f.name, chosen.get(f.name, f.type)) for f in guessed])
        except (OSError, pa.ArrowException) as error:
            raise self._unreadable(file, error) from error

    def _parquet(self, file: InputFile, row: int) -> Iterator[Any]:
        with pq.ParquetFile(file.path, buffer_size=1 << 20, pre_buffer=False) as parquet:
            meta = parquet.metadata
            sizes = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
            first, skip = 0, row
            while first < len(sizes) and skip >= sizes[first]:
                skip -= sizes[first]
                first += 1
            done = row - skip
            # Encoded bytes may be a small part of the decoded ones; 8 bytes a value is what keys take.
            in_groups = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
            width = max(8 * len(self._columns), in_groups // max(1, meta.num_rows))
            groups = list(range(first, len(sizes)))
            for batch in parquet.iter_batches(
                self._batch_rows(width),
                row_groups=groups,
                columns=list(self._columns),
                use_threads=self._use_threads,
            ):
                done += batch.num_rows
                self._done_in_file = file.size * done / max(1, meta.num_rows)
                dropped = min(skip, batch.num_rows)
                skip -= dropped
                yield batch.slice(dropped)

    def _ipc(self, file: InputFile, row: int) -> Iterator[Any]:
        with pa.memory_map(str(file.path)) as mapped:
            names = _open_ipc(mapped).schema.names
            mapped.seek(0)
            options = pa.ipc.IpcReadOptions(included_fields=[names.index(c) for c in self._columns])
            reader = _open_ipc(mapped, options)
            is_file = isinstance(reader, pa.ipc.RecordBatchFileReader)
            parts = map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)
            for index, part in enumerate(parts):
                self._done_in_file = file.size * (index + 1) / reader.num_record_batches if is_file else mapped.tell()
                dropped = min(row, part.num_rows)
                row -= dropped
                step = self._batch_rows(max(1, part.nbytes // max(1, part.num_rows)))
                for low in range(dropped, part.num_rows, step):
                    yield part.slice(low, step)

    def _csv_rows(self, file: InputFile, row: int) -> Iterator[Any]:
        found = self._schema_of(file)
        convert = pacsv.ConvertOptions(
            include_columns=list(self._columns),
            column_types={c: found.field(c).type for c in self._columns},
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )
        with self._open_text(file) as stream:
            for batch in pacsv.open_csv(stream, convert_options=convert, **self._csv_options(file)):
                self._done_in_file = self._raw.tell()
                dropped = min(row, batch.num_rows)
                row -= dropped
                rest = batch.slice(dropped)
                for low in range(0, rest.num_rows, _LARGEST_BATCH):
                    yield rest.slice(low, _LARGEST_BATCH)

    def _decoding(self, meta: Any) -> int:
        """Estimate what decoding holds from the first row group: pages, dictionaries and buffers of each column."""
        if not meta.num_row_groups:
            return 0
        group = meta.row_group(0)
        columns = [group.column(i) for i in range(group.num_columns)]
        read = [c for c in columns if c.path_in_schema.split(".")[0] in self._columns]
        return sum(min(_MOST_DECODING_BYTES, 3 * int(c.total_uncompressed_size)) for c in read)

    def _batch_rows(self, row_bytes: int) -> int:
        return max(256, min(_LARGEST_BATCH, self._batch_bytes // max(1, row_bytes)))

    def _open_text(self, file: InputFile) -> Any:
        self._raw = pa.OSFile(str(file.path))
        return self._raw if file.compression is None else pa.CompressedInputStream(self._raw, file.compression)

    def _csv_options(self, file: InputFile) -> dict[str, Any]:
        return {
            # Blocks are parsed one after another, so that errors know their row.
            "read_options": pacsv.ReadOptions(
                block_size=_CSV_BLOCK_BYTES, use_threads=False, autogenerate_column_names=not self._csv.header
            ),
            "parse_options": pacsv.ParseOptions(delimiter=file.delimiter, newlines_in_values=True),
        }

    def _unreadable(self, file: InputFile, error: Exception) -> SourceError:
        text = re.sub(r"\s+", " ", str(error)).strip().rstrip(".")
        if "Empty CSV file" in text:
            return SourceError(f"{file.path} is empty: leave it out or write it again")
        where = str(file.path)
        if row := re.search(r"Row #(\d+): ?", text):
            where += f", row {int(row[1]) - (2 if self._csv.header else 1)}"
            text = text.replace(row[0], "")
        if column := re.search(r"In CSV column #(\d+): ?", text):
            name = self._schema_of(file).names[int(column[1])]
            where += f", column {name!r}"
            text = text.replace(column[0], "")
        return SourceError(f"{where} cannot be read ({text}): the file is damaged, cut short or of another type")


def _open_ipc(mapped: Any, options: Any = None) -> Any:
    is_file = mapped.read(6) == b"ARROW1"
    mapped.seek(0)
    return pa.ipc.open_file(mapped, options=options) if is_file else pa.ipc.open_stream(mapped, options=options)


def _known(guessed: Any) -> Any:
    # Of columns that stand twice, the first: check_columns refuses them with a better message.
    return pa.schema({field.name: field for field in reversed(list(guessed))}.values())
