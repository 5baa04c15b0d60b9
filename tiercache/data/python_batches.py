"""Batches of a Python iterable: dicts of arrays, tuples, data frames, a DataLoader's, KeyedJaggedTensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tiercache.data.column_types import check_columns
from tiercache.data.columns import CONVERSION_ERRORS, arrow_array, list_array, numpy_values, offsets_of
from tiercache.data.raw_batch import lacks_last, num_samples
from tiercache.data.readers import FileReader, Piece, batch_rows
from tiercache.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tiercache.data.column_types import ColumnUse
    from tiercache.data.inputs import InputFile
    from tiercache.schema import Schema


class PythonBatches:
    """The batches of an iterable, whose first one was taken to see what it is.

    An iterator can be read once; the first batch may be read as often as one likes before.
    """

    def __init__(self, data: Iterable[Any], first: Any, rest: Iterator[Any]) -> None:
        self._data, self.first, self._rest = data, first, rest
        self._is_begun = False

    @property
    def digest(self) -> str:
        """Hexadecimal digest of the first batch: what tells the iterable from another one."""
        names = [str(i) for i in range(len(self.first))] if isinstance(self.first, tuple | list) else []
        digest = hashlib.sha256()
        for name, value in _named(self.first, names) or ():
            parts = [(n, (v.values(), v.offsets())) for n, v in value.to_dict().items()] if _is_keyed(value) else ()
            for part, one in parts or [(name, value)]:
                for array in one if _is_pair(one) else [one]:
                    with suppress(*CONVERSION_ERRORS):  # reading it raises a better error
                        digest.update(pa.record_batch([arrow_array(array)], names=[part]).serialize())
        return digest.hexdigest()[:16]

    def __iter__(self) -> Iterator[Any]:
        if self._is_begun:
            if iter(self._data) is self._data:
                raise SourceError(
                    "the data is an iterator, which can be read once, and it must be read again: give an iterable that "
                    "begins anew, such as a list or a DataLoader"
                )
            self._rest = iter(self._data)
            self.first = next(self._rest)
        yield self.first
        self._is_begun = True
        yield from self._rest


class PythonReader(FileReader):
    """Reads the batches of an iterable. It must give the same ones each time."""

    def __init__(self, file: InputFile, schema: Schema, uses: Sequence[ColumnUse]) -> None:
        assert file.batches is not None
        self._file, self._batches, self._schema, self._uses = file, file.batches, schema, uses
        self.schema = self._record_batch(0, self._batches.first, [use.column for use in uses]).schema

    def pieces(self, columns: Sequence[str], row: int, *, batch_bytes: int, use_threads: bool) -> Iterator[Piece]:
        """Go through the batches; those before ``row`` are skipped."""
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
        """Return those of the columns that a batch has."""
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
                if _is_pair(values[name]):
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
                whole = np.append(one, ends[name][2]) if lacks_last(samples, *ends[name]) else one
                arrays[name] = list_array(values[name][0], whole)
        lengths = {name: len(arrays[name]) for name in used}
        if len(set(lengths.values())) > 1:
            seen = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise SourceError(f"{where} has columns of different lengths ({seen})")
        return pa.record_batch([arrays[name] for name in used], names=used)

    def _values(self, where: str, item: Any) -> list[tuple[str, Any]]:
        """Return the columns of a batch by name."""
        named = _named(item, self._schema.source.columns)
        if named is None:
            raise SourceError(
                f"{where} is {type(item).__name__}: give dicts of arrays, named tuples, data frames, structured "
                "arrays, KeyedJaggedTensors, or tuples of as many arrays as [source] columns has names"
            )
        is_batch = hasattr(item, "sparse_features") and self._schema.label is not None
        dense = [spec.column for spec in self._schema.dense]
        found: list[tuple[str, Any]] = []
        for name, value in named:
            if _is_keyed(value):
                found += self._jagged(where, value)
            elif name == "dense" and "dense" not in dense and getattr(value, "ndim", 0) == 2:
                matrix = numpy_values(value)
                matrix = matrix if isinstance(matrix, np.ndarray) else np.asarray(matrix)
                if matrix.shape[1] != len(dense):
                    raise SourceError(f"{where} has {matrix.shape[1]} dense columns and the schema {len(dense)}")
                found += [(column, matrix[:, i]) for i, column in enumerate(dense)]
            else:
                found.append((str(self._schema.label) if is_batch and name == "label" else name, value))
        return found

    def _jagged(self, where: str, keyed: Any) -> Iterable[tuple[str, Any]]:
        """Return the features of a KeyedJaggedTensor, and their weights under the names that the schema has."""
        found = {}
        for name, one in keyed.to_dict().items():
            with _named_errors(f"{where}, feature {name!r}"):
                offsets, weights = offsets_of(one.offsets()), one.weights_or_none()
                found[name] = list_array(one.values(), offsets)
                for feature in self._schema.features:
                    if feature.columns == (name,) and feature.weights is not None and weights is not None:
                        found[feature.weights] = list_array(weights, offsets)
        return found.items()


def _named(item: Any, names: Sequence[str]) -> list[tuple[str, Any]] | None:
    """Return the parts of a batch and their names; None if nothing says their names."""
    if isinstance(item, Mapping):
        return [(str(name), value) for name, value in item.items()]
    if _is_keyed(item):
        return [("", item)]
    if hasattr(item, "_asdict"):
        return list(item._asdict().items())
    if hasattr(item, "sparse_features") and hasattr(item, "dense_features"):  # torchrec.datasets.utils.Batch
        return [("dense", item.dense_features), ("sparse", item.sparse_features), ("label", item.labels)]
    if isinstance(item, pa.RecordBatch | pa.Table):
        return list(zip(item.schema.names, item.columns, strict=True))
    if isinstance(item, np.ndarray) and item.dtype.names is not None:
        return [(name, item[name]) for name in item.dtype.names]
    if hasattr(item, "columns") and hasattr(item, "iloc"):  # a data frame of pandas
        return [(str(name), item.iloc[:, place]) for place, name in enumerate(item.columns)]
    if hasattr(item, "columns") and hasattr(item, "__getitem__"):  # of Polars
        return [(str(name), item[name]) for name in item.columns]
    if isinstance(item, tuple | list) and len(item) == len(names):
        return list(zip(names, item, strict=True))
    return None


def _is_keyed(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("to_dict", "keys", "offsets", "weights_or_none"))


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2


@contextmanager
def _named_errors(where: str) -> Iterator[None]:
    """Raise SourceError, naming the place, for what cannot be converted."""
    try:
        yield
    except CONVERSION_ERRORS as error:
        raise SourceError(
            f"{where}: {' '.join(str(error).split())}: give an array of numbers or strings, an (n, length) array, a "
            "list of lists or a pair (values, offsets)"
        ) from error
