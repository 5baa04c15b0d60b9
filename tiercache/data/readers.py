"""Readers of one input: a class for each format, all with the same methods."""

from __future__ import annotations

import zipfile
from abc import ABC, abstractmethod
from bisect import bisect_right
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from tiercache.data.array_rows import ArrayRows, read_split_spec
from tiercache.data.column_types import ColumnUse, check_columns
from tiercache.data.columns import CONVERSION_ERRORS, arrow_array, is_list, list_array, numpy_values, offsets_of
from tiercache.data.inputs import InputFile, open_binary
from tiercache.data.python_batches import by_sample, is_collated, is_keyed, is_pair, named_parts, refuse_listed_pair
from tiercache.data.raw_batch import lacks_last, num_samples
from tiercache.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.schema import Schema


LARGEST_BATCH = 1 << 15
_MOST_DECODING_BYTES = 4 << 20
"""Bytes for one Parquet column: 1 MiB each for a page, compressed and decompressed, its dictionary and a buffer."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of a file."""

    columns: Any
    """A RecordBatch of the requested columns."""
    fraction: float
    """The fraction of the file read so far, 0 to 1."""
    rows: NDArray[np.int64] | None = None
    """Their rows in the file, 0-based; None: the rows after the previous piece."""


class FileReader(ABC):
    """Reads one file. Created once to check its columns, and again for each reading."""

    schema: Any
    """The Arrow schema of the file."""
    decoding_bytes: int = 0
    """The approximate memory for decoding, besides the batches it yields; twice that with threads."""
    skipped: int = 0
    """Rows skipped so far because their number of fields is wrong."""
    padded: int = 0
    """Rows filled with null so far because fields are missing."""

    @abstractmethod
    def __init__(self, file: InputFile, schema: Schema, uses: Sequence[ColumnUse]) -> None:
        """uses: the uses of all columns that will be read, and possibly of others."""

    @abstractmethod
    def pieces(self, columns: Sequence[str], row: int, *, batch_bytes: int, use_threads: bool) -> Iterator[Piece]:
        """Read columns from ``row`` to the end, not counting skipped rows. One iteration at a time."""

    def explain(self, error: Exception) -> SourceError | None:
        """Return a better message for an error of Arrow; None if there is none."""
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
            begins = [0, *accumulate(meta.row_group(i).num_rows for i in range(meta.num_row_groups))]
            first = bisect_right(begins, row) - 1
            done, skip = begins[first], row - begins[first]
            # Encoded bytes may be far fewer than the decoded ones; a key takes 8 bytes per value.
            in_groups = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
            width = max(8 * len(columns), in_groups // max(1, meta.num_rows))
            self._reading = done, columns
            groups = list(range(first, meta.num_row_groups))
            # Arrow cannot join lists of dictionaries of several row groups in one batch.
            kinds = [self.schema.field(name).type for name in columns]
            is_coded = any(is_list(kind) and types.is_dictionary(kind.value_type) for kind in kinds)
            for batch in chain.from_iterable(
                parquet.iter_batches(
                    batch_rows(batch_bytes, width), row_groups=part, columns=list(columns), use_threads=use_threads
                )
                for part in ([[group] for group in groups] if is_coded else [groups])
            ):
                done += batch.num_rows
                self._reading = done, columns
                dropped = min(skip, batch.num_rows)
                skip -= dropped
                yield Piece(batch.slice(dropped), done / max(1, meta.num_rows))
            if done < meta.num_rows:  # Arrow loses a row group of one row if its list of dictionaries spans pages
                raise SourceError(
                    f"{self._file.path} has {meta.num_rows:,} rows, but Arrow reads {done:,}: write the file again, "
                    "with plain lists instead of lists of dictionaries (categories), or with larger pages"
                )

    def _open(self) -> Any:
        source = self._file.path if isinstance(self._file.path, Path) else open_binary(self._file.path)
        options: dict[str, Any] = {"buffer_size": 1 << 20, "pre_buffer": False, "page_checksum_verification": True}
        return pq.ParquetFile(source, read_dictionary=self._dictionaries, **options)

    def explain(self, error: Exception) -> SourceError | None:
        """Name the column, and the row group, of a page that cannot be read: each column is read alone."""
        row, columns = self._reading
        with suppress(OSError, pa.ArrowException), self._open() as parquet:
            end = 0
            for group in range(parquet.metadata.num_row_groups):
                first, end = end, end + parquet.metadata.row_group(group).num_rows
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
                fraction = (index + 1) / reader.num_record_batches if is_file else source.tell() / self._file.size
                dropped = min(row, part.num_rows)
                row -= dropped
                step = batch_rows(batch_bytes, part.nbytes // max(1, part.num_rows))
                for low in range(dropped, part.num_rows, step):
                    yield Piece(part.slice(low, step).select(list(columns)), fraction)

    def _open(self) -> Any:
        path = self._file.path
        return pa.memory_map(str(path)) if isinstance(path, Path) else open_binary(path)


def batch_rows(batch_bytes: int, row_bytes: int) -> int:
    """Return the number of rows of a batch."""
    return max(256, min(LARGEST_BATCH, batch_bytes // max(1, row_bytes)))


def _dictionary_columns(meta: Any) -> list[str]:
    """Return the columns to read as dictionaries, so that a value is hashed once, not once per row.

    These are the columns whose values take few bytes in the first row group. If a dictionary grew too large, the rest
    of its column is plain, and making a dictionary of that would cost more than hashing it.
    """
    return [
        c.path_in_schema
        for c in _first_columns(meta)
        if c.physical_type == "BYTE_ARRAY"
        and "." not in c.path_in_schema
        and c.has_dictionary_page
        and c.total_uncompressed_size < 4 * c.num_values
    ]


def _decoding_bytes(meta: Any, names: set[str]) -> int:
    """Estimate the memory for decoding from the first row group: pages, dictionaries and buffers of each column."""
    read = [c for c in _first_columns(meta) if c.path_in_schema.split(".")[0] in names]
    return sum(min(_MOST_DECODING_BYTES, 3 * int(c.total_uncompressed_size)) for c in read)


def _first_columns(meta: Any) -> list[Any]:
    """Return the columns of the first row group, if there is one."""
    group = meta.row_group(0) if meta.num_row_groups else None
    return [] if group is None else [group.column(i) for i in range(group.num_columns)]


def _open_ipc(source: Any, options: Any = None) -> Any:
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return pa.ipc.open_file(source, options=options) if is_file else pa.ipc.open_stream(source, options=options)


class _ArrayReader(FileReader):
    """Reads the columns of several arrays, row by row."""

    def __init__(self, file: InputFile, schema: Schema, uses: Sequence[ColumnUse]) -> None:
        self._file = file
        used = {use.column for use in uses}
        with self._damaged(), ExitStack() as stack:
            parts = self._parts(stack, None)
            counts = {name: rows.count for name, rows in parts.items()}
            if len(set(counts.values())) > 1:
                seen = ", ".join(f"{name}: {count:,}" for name, count in counts.items())
                raise SourceError(f"{file.path} has columns of different lengths ({seen}): make them the same length")
            arrays = {k: v for name, rows in parts.items() for k, v in self._split(name, rows.read(0)).items()}
            kinds = {
                name: self._arrow(name, array).type if name in used else pa.null() for name, array in arrays.items()
            }
        self.schema = pa.schema(list(kinds.items()))

    def pieces(self, columns: Sequence[str], row: int, *, batch_bytes: int, use_threads: bool) -> Iterator[Piece]:
        """Read the same rows of every array in turn."""
        with self._damaged(), ExitStack() as stack:
            parts = self._parts(stack, set(columns))
            total = min(rows.count for rows in parts.values())
            step = batch_rows(batch_bytes, sum(rows.row_bytes for rows in parts.values()))
            for rows in parts.values():
                rows.skip(row)
            for first in range(row, total, step):
                arrays: dict[str, NDArray[Any]] = {}
                for name, rows in parts.items():
                    arrays |= self._split(name, rows.read(step))
                batch = [self._arrow(name, arrays[name]) for name in columns]
                yield Piece(pa.record_batch(batch, names=list(columns)), min(total, first + step) / total)

    def _arrow(self, name: str, array: NDArray[Any]) -> Any:
        try:
            return arrow_array(array)
        except CONVERSION_ERRORS as error:
            raise SourceError(f"{self._file.path}, column {name!r}: {error}: save it as numbers or strings") from error

    @contextmanager
    def _damaged(self) -> Iterator[None]:
        """Convert errors of zipfile, NumPy and its header parser for damaged files to a SourceError."""
        try:
            yield
        except (SourceError, OSError, MemoryError):
            raise
        except Exception as error:
            raise SourceError(
                f"{self._file.path} cannot be read ({str(error) or type(error).__name__}): write it again"
            ) from error

    @abstractmethod
    def _parts(self, stack: ExitStack, columns: set[str] | None) -> Mapping[str, ArrayRows]:
        """Open the arrays with these columns, None: all, at their first rows."""

    @abstractmethod
    def _split(self, name: str, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Return the columns of one array."""


class NumpyReader(_ArrayReader):
    """Reads a .npz file or a folder of .npy files, a column each, or a .npy file of a structured dtype."""

    def _parts(self, stack: ExitStack, columns: set[str] | None) -> Mapping[str, ArrayRows]:
        path = self._file.path
        if isinstance(path, Path) and path.is_dir():
            names = {one.stem: one for one in sorted(path.glob("*.npy"))}
            return {
                name: ArrayRows.of_npy(stack.enter_context(open_binary(one)), str(one))
                for name, one in names.items()
                if columns is None or name in columns
            }
        source = stack.enter_context(open_binary(path))
        if not str(path).endswith(".npz"):
            rows = ArrayRows.of_npy(source, str(path))
            if rows.dtype.names is None:
                raise SourceError(f"{path} holds one array without names: pass a folder of such files, or a .npz file")
            return {"": rows}
        archive = stack.enter_context(zipfile.ZipFile(source))
        names_in = dict[str, str]()
        for member in archive.namelist():
            name = member.removesuffix(".npy")
            if name in names_in:
                raise SourceError(f"{path} has two arrays {name!r} ({names_in[name]} and {member}): name each once")
            names_in[name] = member
        return {
            name: ArrayRows.of_npy(stack.enter_context(archive.open(member)), f"{path}, array {name!r}")
            for name, member in names_in.items()
            if columns is None or name in columns
        }

    def _split(self, name: str, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        return {name: rows} if rows.dtype.names is None else {one: rows[one] for one in rows.dtype.names}


class SplitBinaryReader(_ArrayReader):
    """Reads one part of a data set that a ``feature_spec.yaml`` describes, as NVIDIA's DLRM example writes it."""

    def _parts(self, stack: ExitStack, columns: set[str] | None) -> Mapping[str, ArrayRows]:
        path = Path(self._file.path)
        parts = {}
        spec, chunks = read_split_spec(path, self._file.split)
        for chunk in chunks:
            names = [str(name) for name in chunk["features"]]
            if columns is not None and not columns & set(names):
                continue
            try:
                (dtype,) = {np.dtype(spec["feature_spec"][name]["dtype"]) for name in names}
            except (KeyError, TypeError, ValueError) as error:
                raise SourceError(f"{path} gives the features {', '.join(names)} no common dtype ({error})") from error
            where = path.parent / chunk["files"][0]
            size, width = where.stat().st_size, dtype.itemsize * len(names)
            if size % width:
                raise SourceError(
                    f"{where} has {size:,} bytes, not a multiple of {width} bytes per row: it is truncated"
                )
            source = stack.enter_context(open_binary(where))
            parts["\0".join(names)] = ArrayRows(source, str(where), dtype, (size // width, len(names)))
        return parts

    def _split(self, name: str, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        return {one: rows[:, i] for i, one in enumerate(name.split("\0"))}


class PythonReader(FileReader):
    """Reads the batches of an iterable. It must give the same ones each time."""

    def __init__(self, file: InputFile, schema: Schema, uses: Sequence[ColumnUse]) -> None:
        assert file.batches is not None
        self._file, self._batches, self._schema, self._uses = file, file.batches, schema, uses
        self.schema = self._record_batch(0, self._batches.first, [use.column for use in uses]).schema

    def pieces(self, columns: Sequence[str], row: int, *, batch_bytes: int, use_threads: bool) -> Iterator[Piece]:
        """Read the batches from ``row`` on."""
        for number, item in enumerate(self._batches):
            batch = self._record_batch(number, item, columns)
            if batch.schema != self.schema:
                check_columns(f"{self._file.path}, batch {number}", batch.schema, self._uses)
            dropped = min(row, batch.num_rows)
            row -= dropped
            step = batch_rows(batch_bytes, batch.nbytes // max(1, batch.num_rows))
            for low in range(dropped, batch.num_rows, step):
                yield Piece(batch.slice(low, step), 0.0)

    def _record_batch(self, number: int, item: Any, columns: Sequence[str]) -> Any:
        """Return the columns that a batch has."""
        where = f"{self._file.path}, batch {number}"
        values: dict[str, Any] = {}
        for name, value in self._values(where, item):
            if name in values and name in columns:
                raise SourceError(f"{where} has several columns {name!r}: name each column once")
            values[name] = value
        arrays: dict[str, Any] = {}
        offsets: dict[str, NDArray[np.int64]] = {}
        used = [name for name in dict.fromkeys(columns) if name in values]
        for name in used:
            with _named_errors(f"{where}, column {name!r}"):
                if self._batches.lists_tuples:
                    refuse_listed_pair(values[name])
                if is_pair(values[name]):
                    offsets[name] = offsets_of(values[name][1])
                else:
                    arrays[name] = arrow_array(values[name])
        with _named_errors(where):
            ends = {
                name: (one.size, int(one[-1]) if one.size else 0, len(values[name][0])) for name, one in offsets.items()
            }
            samples = num_samples(map(len, arrays.values()), ends)
        for name, one in offsets.items():
            with _named_errors(f"{where}, column {name!r}"):
                full = np.append(one, ends[name][2]) if lacks_last(samples, *ends[name]) else one
                arrays[name] = list_array(values[name][0], full)
        lengths = {name: len(arrays[name]) for name in used}
        if len(set(lengths.values())) > 1:
            seen = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise SourceError(f"{where} has columns of different lengths ({seen})")
        return pa.record_batch([arrays[name] for name in used], names=used)

    def _values(self, where: str, item: Any) -> list[tuple[str, Any]]:
        named = named_parts(item, self._schema.source.columns)
        if named is None:
            raise SourceError(
                f"{where} is {type(item).__name__}: expected dicts of arrays, named tuples, data frames in memory, "
                "structured arrays, KeyedJaggedTensors, or tuples of as many arrays as [source] columns has names"
            )
        if is_collated(self._batches.data):
            named = [(name, by_sample(value)) for name, value in named]
        is_batch = hasattr(item, "sparse_features") and self._schema.label is not None
        dense = [spec.column for spec in self._schema.dense]
        parts: list[tuple[str, Any]] = []
        for name, value in named:
            if is_keyed(value):
                parts += self._jagged(where, value)
            elif name == "dense" and "dense" not in dense and getattr(value, "ndim", 0) == 2:
                matrix = numpy_values(value)
                matrix = matrix if isinstance(matrix, np.ndarray) else np.asarray(matrix)
                if matrix.shape[1] != len(dense):
                    raise SourceError(f"{where} has {matrix.shape[1]} dense columns, but the schema {len(dense)}")
                parts += [(column, matrix[:, i]) for i, column in enumerate(dense)]
            else:
                parts.append((str(self._schema.label) if is_batch and name == "label" else name, value))
        return parts

    def _jagged(self, where: str, keyed: Any) -> Iterable[tuple[str, Any]]:
        """Return the features of a KeyedJaggedTensor, and their weights under the names that the schema has."""
        lists = {}
        for name, one in keyed.to_dict().items():
            with _named_errors(f"{where}, feature {name!r}"):
                offsets, weights = offsets_of(one.offsets()), one.weights_or_none()
                lists[name] = list_array(one.values(), offsets)
                for feature in self._schema.features:
                    if feature.columns == (name,) and feature.weights is not None and weights is not None:
                        lists[feature.weights] = list_array(weights, offsets)
        return lists.items()


@contextmanager
def _named_errors(where: str) -> Iterator[None]:
    """Raise SourceError, naming the place, for values that cannot be converted."""
    try:
        yield
    except CONVERSION_ERRORS as error:
        raise SourceError(
            f"{where}: {' '.join(str(error).split())}: expected an array of numbers or strings, an (n, length) "
            "array, a list of lists or a pair (values, offsets)"
        ) from error
