"""Batches of a Python iterable: dicts of arrays, tuples, data frames, a DataLoader's, KeyedJaggedTensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa

from tiercache.data.columns import CONVERSION_ERRORS, arrow_array, numpy_values
from tiercache.errors import SourceError


class PythonBatches:
    """The batches of an iterable. The first may be read any number of times, an iterator's others once."""

    def __init__(self, data: Iterable[Any], first: Any, rest: Iterator[Any]) -> None:
        self.data, self.first, self._rest = data, first, rest
        self._is_begun = False

    @property
    def digest(self) -> str:
        """Hexadecimal digest of the first batch, which identifies the iterable."""
        names = [str(i) for i in range(len(self.first))] if isinstance(self.first, tuple | list) else []
        digest = hashlib.sha256()
        for name, value in named_parts(self.first, names) or ():
            parts = [(n, (v.values(), v.offsets())) for n, v in value.to_dict().items()] if is_keyed(value) else ()
            digest.update(name.encode(errors="surrogatepass"))
            for part, one in parts or [(name, value)]:
                for array in one if is_pair(one) else [one]:
                    with suppress(*CONVERSION_ERRORS):  # reading it raises a better error
                        digest.update(pa.record_batch([arrow_array(array)], names=[part]).serialize())
        return digest.hexdigest()[:16]

    @property
    def lists_tuples(self) -> bool:
        """True for a DataLoader that turns tuples into lists."""
        collate = getattr(self.data, "collate_fn", None)
        return getattr(collate, "__name__", "") == "default_convert" or getattr(self.data, "pin_memory", False) is True

    def __iter__(self) -> Iterator[Any]:
        if self._is_begun:
            if iter(self.data) is self.data:
                raise SourceError(
                    "the data is an iterator, which can be read only once, but it must be read again: pass an "
                    "iterable that can restart, such as a list or a DataLoader"
                )
            self._rest = iter(self.data)
            self.first = next(self._rest)
        yield self.first
        self._is_begun = True
        yield from self._rest


def named_parts(item: Any, names: Sequence[str]) -> list[tuple[str, Any]] | None:
    """Return the parts of a batch and their names; None if they have no names."""
    if isinstance(item, Mapping):
        return [(str(name), value) for name, value in item.items()]
    if is_keyed(item):
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
    if hasattr(item, "columns") and hasattr(item, "to_arrow"):  # of Polars; lazy frames and relations have no rows yet
        return [(str(name), item[name]) for name in item.columns]
    if isinstance(item, tuple | list) and len(item) == len(names):
        return list(zip(names, item, strict=True))
    return None


def is_collated(loader: Any) -> bool:
    """Return True for a DataLoader with torch's own collation, which transposes lists."""
    collate: Any = getattr(loader, "collate_fn", None)
    return getattr(collate, "__name__", "") == "default_collate" and collate.__module__.startswith("torch.")


def by_sample(value: Any) -> Any:
    """Return lists that torch's collation has transposed, (length, N), by sample; anything else unchanged."""
    if not isinstance(value, list | tuple) or not value:
        return value
    if all(getattr(one, "ndim", 0) == 1 for one in value):
        return np.stack([numpy_values(one) for one in value], axis=1)
    return [*zip(*value, strict=True)] if all(isinstance(one, list | tuple) for one in value) else value


def is_keyed(value: Any) -> bool:
    """Return True for a KeyedJaggedTensor."""
    return all(hasattr(value, name) for name in ("to_dict", "keys", "offsets", "weights_or_none"))


def is_pair(value: Any) -> bool:
    """Return True for a pair (values, offsets), but not for a tuple of the numbers or strings of two samples."""
    return isinstance(value, tuple) and len(value) == 2 and all(map(_has_length, value))


def refuse_listed_pair(value: Any) -> None:
    """Raise ValueError for a list of two tensors that may be a pair: torch's loaders turn tuples into lists."""
    if not isinstance(value, list) or len(value) != 2 or any(getattr(one, "ndim", 0) != 1 for one in value):
        return
    values, offsets = map(numpy_values, value)
    is_offsets = len(offsets) and offsets.dtype.kind in "iu" and offsets[0] == 0 and offsets[-1] <= len(values)
    if hasattr(value[1], "detach") and is_offsets and (np.diff(offsets) >= 0).all():
        raise ValueError(
            "a list of two tensors, which is a pair (values, offsets) or two lists: torch's default_convert and "
            "pin_memory turn tuples into lists, so use collate_fn=lambda batch: batch without pin_memory, or a nested "
            "tensor"
        )


def _has_length(value: Any) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, str | bytes) and getattr(value, "ndim", 1) != 0
