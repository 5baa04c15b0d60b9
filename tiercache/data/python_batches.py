"""Batches of a Python iterable: dicts of arrays, tuples, data frames, a DataLoader's, KeyedJaggedTensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tiercache.data.column_types import check_columns
from tiercache.data.readers import FileReader, Piece, batch_rows
from tiercache.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        for name, value in (_named(self.first, names) or {}).items():
            parts = (
                {n: (v.values(), v.offsets()) for n, v in value.to_dict().items()}
                if _is_keyed(value)
                else {name: value}
            )
            for part, array in parts.items():
                with suppress(
                    pa.ArrowException, TypeError, ValueError, OverflowError
                ):  # reading it raises a better error
                    digest.update(pa.record_batch([_arrow(array)], names=[part]).serialize())
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
        values = self._values(number, item)
        arrays: dict[str, Any] = {}
        for name in dict.fromkeys(columns):
            if name in values:
                try:
                    arrays[name] = _arrow(values[name])
                except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                    raise SourceError(
                        f"{self._file.path}, batch {number}, column {name!r}: {error}: give an array of numbers or "
                        "strings, an (n, length) array, a list of lists or a pair (values, offsets)"
                    ) from error
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            seen = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise SourceError(f"{self._file.path}, batch {number} has columns of different lengths ({seen})")
        return pa.record_batch(list(arrays.values()), names=list(arrays))

    def _values(self, number: int, item: Any) -> dict[str, Any]:
        """Return the columns of a batch by name."""
        values = _named(item, self._schema.source.columns)
        if values is None:
            raise SourceError(
                f"{self._file.path}, batch {number} is {type(item).__name__}: give dicts of arrays, named tuples, data "
                "frames, KeyedJaggedTensors, or tuples of as many arrays as [source] columns has names"
            )
        if hasattr(item, "sparse_features") and self._schema.label is not None:
            values[self._schema.label] = values.pop("label")
        for name in [name for name, value in values.items() if _is_keyed(value)]:
            values |= self._jagged(values.pop(name))
        dense = [spec.column for spec in self._schema.dense]
        if "dense" in values and "dense" not in dense and getattr(values["dense"], "ndim", 0) == 2:
            matrix = np.asarray(_numpy(values.pop("dense")))
            if matrix.shape[1] != len(dense):
                raise SourceError(
                    f"{self._file.path}, batch {number} has {matrix.shape[1]} dense columns and the schema {len(dense)}"
                )
            values |= {name: matrix[:, i] for i, name in enumerate(dense)}
        return values

    def _jagged(self, keyed: Any) -> dict[str, Any]:
        """Return the features of a KeyedJaggedTensor, and their weights under the names that the schema has."""
        found = {}
        for name, one in keyed.to_dict().items():
            offsets, weights = one.offsets(), one.weights_or_none()
            found[name] = one.values(), offsets
            for feature in self._schema.features:
                if feature.columns == (name,) and feature.weights is not None and weights is not None:
                    found[feature.weights] = weights, offsets
        return found


def _named(item: Any, names: Sequence[str]) -> dict[str, Any] | None:
    """Return the parts of a batch by name; None where nothing says their names."""
    if isinstance(item, Mapping):
        return {str(name): value for name, value in item.items()}
    if _is_keyed(item):
        return {"": item}
    if hasattr(item, "_asdict"):
        return dict(item._asdict())
    if hasattr(item, "sparse_features") and hasattr(item, "dense_features"):  # torchrec.datasets.utils.Batch
        return {"dense": item.dense_features, "sparse": item.sparse_features, "label": item.labels}
    if isinstance(item, pa.RecordBatch | pa.Table):
        return dict(zip(item.schema.names, item.columns, strict=True))
    if hasattr(item, "columns") and hasattr(item, "__getitem__"):  # a data frame of pandas or Polars
        return {str(name): item[name] for name in item.columns}
    if isinstance(item, tuple | list) and len(item) == len(names):
        return dict(zip(names, item, strict=True))
    return None


def _is_keyed(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("to_dict", "keys", "offsets", "weights_or_none"))


def _numpy(value: Any) -> Any:
    """Return a tensor as an array, and anything else as it is."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def _arrow(value: Any) -> Any:
    if isinstance(value, pa.ChunkedArray):
        return value.combine_chunks() if value.num_chunks != 1 else value.chunk(0)
    if hasattr(value, "to_arrow"):  # Polars
        return _arrow(value.to_arrow())
    if isinstance(value, tuple) and len(value) == 2:
        values, offsets = (np.ascontiguousarray(_numpy(part)) for part in value)
        if (
            offsets.ndim != 1
            or not offsets.size
            or offsets[0] != 0
            or offsets[-1] != values.size
            or (np.diff(offsets) < 0).any()
        ):
            raise ValueError(f"offsets {offsets[:5]}... do not go from 0 to the number of values, {values.size}")
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values))
    value = _numpy(value)
    if isinstance(value, np.ndarray) and value.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(value).reshape(-1)), value.shape[1])
    if isinstance(value, list) and value and hasattr(value[0], "detach"):
        value = [_numpy(row) for row in value]
    return pa.array(value, from_pandas=True) if hasattr(value, "iloc") else pa.array(value)
