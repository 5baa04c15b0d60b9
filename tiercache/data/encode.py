"""Columns to keys: integers as they are, strings and crosses by XXH64 (docs/format.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from tiercache.data.column_types import kind_of
from tiercache.data.raw_batch import NULL_KEY, RESERVED, FeatureKeys, RawBatch
from tiercache.data.reals import Nulls, reals
from tiercache.kernels.cpu.hashing import xxh64_strings, xxh64_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tiercache.data.source import SourceBatch
    from tiercache.schema import Feature, Schema

__all__ = ["encode"]


def encode(schema: Schema, batch: SourceBatch) -> RawBatch:
    """Turn the rows of a source batch into samples. Raises SourceError naming file, row and column."""
    label = None
    if schema.label is not None:
        label = reals(batch, schema.label, Nulls("a label must be a finite number: drop the row or give it one"))
    dense = np.empty((batch.columns.num_rows, len(schema.dense)), np.float32)
    for place, spec in enumerate(schema.dense):
        rule = Nulls(
            "a dense feature must be a finite number: give the schema a number for null, or drop the row", spec.null
        )
        dense[:, place] = reals(batch, spec.column, rule)
    features = {f.name: _list(f, batch) if f.hotness != "one_hot" else _single(f, batch) for f in schema.features}
    return RawBatch(label, dense, features)


def _single(feature: Feature, batch: SourceBatch) -> FeatureKeys:
    rows = batch.columns.num_rows
    if feature.key == "cross":
        words_NC = np.empty((rows, len(feature.columns)), np.uint64)
        is_null = np.zeros(rows, bool)
        for place, column in enumerate(feature.columns):
            array = _with_plain_nulls(batch.columns.column(column))
            words_NC[:, place] = _words(array)
            if array.null_count:
                nulls = _null_mask(array)
                _apply_null_rule(feature, batch, nulls, column)
                is_null |= nulls
        keys = _off_reserved(xxh64_words(words_NC))
        keys[is_null] = NULL_KEY
    else:
        array = _with_plain_nulls(batch.columns.column(feature.columns[0]))
        keys = _keys(feature, batch, array, None)
    weights = None
    if feature.weights is not None:
        weights = reals(batch, feature.weights, _WEIGHT)
    return FeatureKeys(keys, None, weights)


def _list(feature: Feature, batch: SourceBatch) -> FeatureKeys:
    column = feature.columns[0]
    array = batch.columns.column(column)
    is_null, lengths, values = _unpack(array)
    if is_null.any():
        _apply_null_rule(feature, batch, is_null, column)
    if feature.length is not None:
        wrong = ~is_null & (lengths != feature.length)
        if wrong.any():
            row = int(wrong.argmax())
            what = f"it has {lengths[row]} keys, but feature {feature.name!r} has hotness = {feature.length}"
            raise batch.error(row, column, f'{what}: make all lists so long, or say hotness = "ragged"')
    keys = _keys(feature, batch, values, lengths)
    weights = None
    if feature.weights is not None:
        null_weights, weight_lengths, weight_values = _unpack(batch.columns.column(feature.weights))
        wrong = ~is_null & ((weight_lengths != lengths) | (null_weights & (lengths > 0)))
        if wrong.any():
            row = int(wrong.argmax())
            what = f"it has {weight_lengths[row]} weights for the {lengths[row]} keys of feature {feature.name!r}"
            raise batch.error(row, feature.weights, f"{what}: give one weight per key")
        weights = reals(batch, feature.weights, _WEIGHT, values=weight_values, lengths=weight_lengths)
        weights = weights[np.repeat(~is_null, weight_lengths)]
    if is_null.any():
        # A null list is a list of null rows: of one, or of as many as the feature has.
        filled = np.where(is_null, feature.length or 1, lengths)
        is_value = np.repeat(~is_null, filled)
        keys = _spread(keys, is_value, NULL_KEY)
        weights = None if weights is None else _spread(weights, is_value, 1.0)
        lengths = filled
    offsets = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return FeatureKeys(keys, offsets, weights)


_WEIGHT = Nulls("a weight must be a finite number: give it one")


def _keys(feature: Feature, batch: SourceBatch, values: Any, lengths: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Return keys of values; lengths: of the lists that the values lie in, None where each row has one."""
    column = feature.columns[0]
    words = _words(values)
    if feature.key == "integer":
        keys = words.view(np.int64)
        if keys.size and int(keys.min()) <= RESERVED[1]:
            taken = (keys <= RESERVED[1]) & ~_null_mask(values)
            if taken.any():
                at = int(taken.argmax())
                raise batch.error(
                    _row(at, lengths), column, f"key {keys[at]} is reserved: keys start at {RESERVED[1] + 1}"
                )
    else:
        keys = _off_reserved(words)
    if values.null_count:
        nulls = _null_mask(values)
        if not feature.null_is_key:
            at = int(nulls.argmax())
            raise batch.error(_row(at, lengths), column, _null_message(feature))
        keys[nulls] = NULL_KEY
    return keys


def _words(values: Any) -> NDArray[np.uint64]:
    """Return 8 bytes per value: an integer itself, a string's XXH64; anything for null."""
    if kind_of(values.type) == "null":
        return np.zeros(len(values), np.uint64)
    if types.is_dictionary(values.type):
        if values.null_count == 0:
            words = _words(values.dictionary)
            places: NDArray[np.int64] = values.indices.to_numpy(zero_copy_only=False)
            return words[places]
        return _words(values.dictionary_decode())
    if types.is_integer(values.type):
        filled = values.fill_null(0) if values.null_count else values
        integers = filled.to_numpy(zero_copy_only=False)
        signed = np.int64 if np.issubdtype(integers.dtype, np.signedinteger) else np.uint64
        return np.array(integers, signed).view(np.uint64)
    # Null strings are empty spans.
    kind = (
        pa.large_string() if types.is_string(values.type) or types.is_large_string(values.type) else pa.large_binary()
    )
    values = values.cast(kind)
    _, offsets, data = values.buffers()
    offsets_N = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
    bytes_ = np.frombuffer(data if data is not None and data.size else b"\0", np.uint8)
    return xxh64_strings(bytes_, offsets_N)


def _with_plain_nulls(array: Any) -> Any:
    """Return the array without nulls that hide among the values of a dictionary: Arrow does not count those."""
    hides_nulls = types.is_dictionary(array.type) and array.dictionary.null_count > 0
    return array.dictionary_decode() if hides_nulls else array


def _off_reserved(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return hashes as keys; one that hits a reserved key is moved by 2."""
    keys = hashes.view(np.int64)
    if keys.size and int(keys.min()) <= RESERVED[1]:
        keys[keys <= RESERVED[1]] += 2
    return keys


def _unpack(array: Any) -> tuple[NDArray[np.bool_], NDArray[np.int64], Any]:
    """Return which lists are null, the length of each (0 for null), and the values of all others."""
    if types.is_null(array.type):
        return np.ones(len(array), bool), np.zeros(len(array), np.int64), pa.array([], pa.int64())
    lengths = pc.list_value_length(array)
    if array.null_count:
        lengths = pc.if_else(pc.is_valid(array), lengths, 0)
    return (
        _null_mask(array),
        lengths.to_numpy(zero_copy_only=False).astype(np.int64),
        _with_plain_nulls(array.flatten()),
    )


def _apply_null_rule(feature: Feature, batch: SourceBatch, nulls: NDArray[np.bool_], column: str) -> None:
    if not feature.null_is_key:
        raise batch.error(int(nulls.argmax()), column, _null_message(feature))


def _null_message(feature: Feature) -> str:
    return f'it is null, an error for feature {feature.name!r}: say null = "embed" in the schema, or drop the row'


def _null_mask(values: Any) -> NDArray[np.bool_]:
    return values.is_null().to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _row(at: int, lengths: NDArray[np.int64] | None) -> int:
    """Return the row that value number ``at`` belongs to."""
    return at if lengths is None else int(np.searchsorted(np.cumsum(lengths), at, side="right"))


def _spread(values: NDArray[Any], is_value: NDArray[np.bool_], fill: float) -> NDArray[Any]:
    out = np.full(is_value.size, fill, values.dtype)
    out[is_value] = values
    return out
