"""Columns to keys: integers as they are, strings and crosses by XXH64 (docs/format/bits.md)."""

from __future__ import annotations

import math
import operator
import struct
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from tiercache.data.column_types import kind_of
from tiercache.data.columns import as_64_bits
from tiercache.data.raw_batch import NULL_KEY, RESERVED, FeatureKeys, RawBatch
from tiercache.kernels.cpu.hashing import xxh64_strings, xxh64_words
from tiercache.kernels.cpu.unique_keys import Run, in_turn
from tiercache.store.bits import xxh64

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tiercache.data.source import Source, SourceBatch
    from tiercache.schema import Feature, Schema


_FIRST_ROWS = 512
_EXACT_BELOW = {pa.float16(): 1 << 11, pa.float32(): 1 << 24, pa.float64(): 1 << 53}
"""Floats of a type represent all whole numbers below it exactly; a larger one may be rounded."""


class _Nulls(NamedTuple):
    """The treatment of null and NaN in a column of numbers."""

    advice: str
    """The end of the error message for them, and for infinite numbers."""
    fill: float | None = None
    """The number for null and NaN; None: they are errors."""


_LABEL = _Nulls('a label must be a finite number: correct it, drop the row, or set null = "drop" in [label]')
_WEIGHT = _Nulls("a weight must be a finite number: correct it")


def encode(schema: Schema, batch: SourceBatch, *, hashed: bool = True, run: Run = in_turn) -> RawBatch:
    """Encode the rows of a source batch as samples. Raises SourceError naming file, row and column.

    hashed: False checks everything, but puts zeros in place of hashes and compiles nothing. run: encodes features and
    columns, on several threads or not.
    """
    makers: list[Callable[[], Any]] = [
        partial(_single if f.hotness == "one_hot" else _list, f, batch, hashed) for f in schema.features
    ]
    makers += [partial(make, schema, batch) for make in (_label, _dense, _kept)]
    made: list[Any] = [None] * len(makers)

    def make(index: int) -> None:
        made[index] = makers[index]()

    run(partial(make, index) for index in range(len(makers)))
    *features, label, dense, kept = made
    return RawBatch(label, dense, dict(zip((f.name for f in schema.features), features, strict=True)), kept)


def _label(schema: Schema, batch: SourceBatch) -> NDArray[np.float32] | None:
    return None if schema.label is None else _reals(batch, schema.label, _LABEL)


def _dense(schema: Schema, batch: SourceBatch) -> NDArray[np.float32]:
    dense = np.empty((batch.columns.num_rows, len(schema.dense)), np.float32)
    for place, spec in enumerate(schema.dense):
        rule = _Nulls(
            "a dense feature must be a finite number: set a number for null in the schema, or drop the row", spec.null
        )
        values = _reals(batch, spec.column, rule)
        dense[:, place] = np.log1p(np.maximum(values, 0)) if spec.transform == "log" else values
    return dense


def _kept(schema: Schema, batch: SourceBatch) -> dict[str, NDArray[Any]]:
    """Return several labels and kept columns by name, (n,) each, in their own dtypes.

    A null in a kept column of floats is NaN. Raises SourceError for other nulls, for labels that are not finite, and
    for values that do not fit the dtype.
    """
    found = {one.name: _in_dtype(batch, one.column, np.dtype(one.dtype), is_label=True) for one in schema.labels}
    return found | {one.name: _in_dtype(batch, one.column, np.dtype(one.dtype)) for one in schema.keep}


def _in_dtype(batch: SourceBatch, column: str, dtype: np.dtype[Any], *, is_label: bool = False) -> NDArray[Any]:
    array = batch.columns.column(column)
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    is_float = dtype.kind == "f"
    if array.null_count and (is_label or not is_float):
        advice = _LABEL.advice if is_label else f"{dtype} has no null: replace it with a value, or set a float dtype"
        raise batch.error(int(_null_mask(array).argmax()), column, f"it is null, but {advice}")
    if types.is_decimal(array.type) and not is_float:
        array = _integers_of_decimals(batch, column, array, dtype)
    values = _number_array(array)
    with np.errstate(invalid="ignore", over="ignore"):
        out = values.astype(dtype)
        same = out == values if not is_float else np.isfinite(out) | ~np.isfinite(values)
        if is_float and values.dtype.kind in "iu":
            same = (out.astype(values.dtype) == values) & (out < float(np.iinfo(values.dtype).max) + 1)
    if not is_float and values.dtype.kind == "f":
        same &= np.isfinite(values)
    if not same.all():
        at = int(same.argmin())
        raise batch.error(at, column, _unfit(array[at], dtype))
    if array.null_count:
        out[_null_mask(array)] = np.nan
    if is_label and is_float and not np.isfinite(out).all():
        at = int(np.isfinite(out).argmin())
        raise batch.error(at, column, f"it is {array[at].as_py()}, but {_LABEL.advice}")
    return out


def _integers_of_decimals(batch: SourceBatch, column: str, array: Any, dtype: np.dtype[Any]) -> Any:
    """Return decimals without nulls as integers, exactly. Raises SourceError for one that does not fit the dtype."""
    wide = array.cast(pa.decimal256(76, array.type.scale))
    if (found := as_64_bits(wide)) is not None:
        return found
    least, most = (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    at = next(n for n, one in enumerate(wide.to_pylist()) if one != one.to_integral_value() or not least <= one <= most)
    raise batch.error(at, column, _unfit(array[at], dtype))


def _unfit(value: Any, dtype: np.dtype[Any]) -> str:
    return f"it is {value.as_py()}, which {dtype} cannot represent: set a different dtype"


def check_first_rows(schema: Schema, source: Source) -> None:
    """Raise SourceError if one of the first rows cannot be encoded. Compiles nothing."""
    first = next(source.batches(batch_bytes=_FIRST_ROWS), None)
    if first is not None:
        encode(schema, replace(first, columns=first.columns.slice(0, _FIRST_ROWS)), hashed=False)


def _reals(
    batch: SourceBatch, column: str, rule: _Nulls, *, values: Any = None, lengths: NDArray[np.int64] | None = None
) -> NDArray[np.float32]:
    """Return a column of numbers or bools as float32, all finite. Raises SourceError naming file, row and column.

    values, lengths: the values of a column of lists, and the number of values in each row.
    """
    array = batch.columns.column(column) if values is None else values
    with np.errstate(over="ignore"):  # overflow becomes infinite, which is refused below
        out = _number_array(array).astype(np.float32)
    if rule.fill is not None:
        missing = np.isnan(out)
        if array.null_count:
            missing |= _null_mask(array)
        out[missing] = rule.fill
    elif array.null_count:
        at = int(_null_mask(array).argmax())
        raise batch.error(_row(at, lengths), column, f"it is null, but {rule.advice}")
    is_finite = np.isfinite(out)
    if not is_finite.all():
        at = int(is_finite.argmin())
        raise batch.error(_row(at, lengths), column, f"it is {array[at].as_py()}, but {rule.advice}")
    return out


def _number_array(array: Any) -> NDArray[Any]:
    if types.is_null(array.type):
        return np.full(len(array), np.nan)
    if types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    elif types.is_decimal(array.type):
        array = array.cast(pa.float64())
    if array.null_count and types.is_integer(array.type):
        array = array.fill_null(0)
    return array.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _single(feature: Feature, batch: SourceBatch, hashed: bool) -> FeatureKeys:
    rows = batch.columns.num_rows
    if feature.key == "cross":
        words_NC = np.empty((rows, len(feature.columns)), np.uint64)
        is_null = np.zeros(rows, bool)
        for place, column in enumerate(feature.columns):
            array = _with_plain_nulls(batch.columns.column(column))
            if types.is_floating(array.type):
                array = _integers_of_floats(feature, batch, column, array, None)
            words_NC[:, place] = _words(array, hashed)
            if array.null_count:
                nulls = _null_mask(array)
                _check_nulls(feature, batch, nulls, column, None)
                is_null |= nulls
        keys = _bounded(feature, xxh64_words(words_NC)) if hashed else np.zeros(rows, np.int64)
        keys[is_null] = NULL_KEY
    else:
        array = _with_plain_nulls(batch.columns.column(feature.columns[0]))
        keys = _keys(feature, batch, array, None, hashed)
    return FeatureKeys(keys, None, None if feature.weights is None else _reals(batch, feature.weights, _WEIGHT))


def _list(feature: Feature, batch: SourceBatch, hashed: bool) -> FeatureKeys:
    column = feature.columns[0]
    array = batch.columns.column(column)
    is_null, lengths, values = _unpack(array)
    if is_null.any():
        _check_nulls(feature, batch, is_null, column, None)
    if feature.length is not None:
        wrong = ~is_null & (lengths != feature.length)
        if wrong.any():
            row = int(wrong.argmax())
            what = f"it has {lengths[row]} keys, but feature {feature.name!r} has length = {feature.length}"
            advice = 'make all lists that long, or set hotness = "ragged" and omit length'
            raise batch.error(row, column, f"{what}: {advice}")
    keys = _keys(feature, batch, values, lengths, hashed)
    weights = None
    if feature.weights is not None:
        null_weights, weight_lengths, weight_values = _unpack(batch.columns.column(feature.weights))
        wrong = ~is_null & ((weight_lengths != lengths) | (null_weights & (lengths > 0)))
        if wrong.any():
            row = int(wrong.argmax())
            what = f"it has {weight_lengths[row]} weights for the {lengths[row]} keys of feature {feature.name!r}"
            raise batch.error(row, feature.weights, f"{what}: expected one weight per key")
        weights = _reals(batch, feature.weights, _WEIGHT, values=weight_values, lengths=weight_lengths)
        weights = weights[np.repeat(~is_null, weight_lengths)]
    if is_null.any():
        # A null list is a list of null rows: of one, or of the feature's length.
        filled = np.where(is_null, feature.length or 1, lengths)
        is_value = np.repeat(~is_null, filled)
        keys = _spread(keys, is_value, NULL_KEY)
        weights = None if weights is None else _spread(weights, is_value, 1.0)
        lengths = filled
    if feature.max_length is not None and lengths.max(initial=0) > feature.max_length:
        # Keep the last keys of a longer list.
        from_end = np.repeat(np.cumsum(lengths), lengths) - np.arange(keys.size)
        is_kept = from_end <= feature.max_length
        keys, weights = keys[is_kept], None if weights is None else weights[is_kept]
        lengths = np.minimum(lengths, feature.max_length)
    offsets = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return FeatureKeys(keys, offsets, weights)


def _keys(
    feature: Feature, batch: SourceBatch, values: Any, lengths: NDArray[np.int64] | None, hashed: bool
) -> NDArray[np.int64]:
    """Return the keys of values; lengths: of the lists of these values, None if each row has one value."""
    column = feature.columns[0]
    if feature.key == "bucket":
        values, keys = _bucketed(feature, values)
    elif feature.key == "string":
        keys = _bounded(feature, _words(values, hashed))
    else:
        if feature.key == "hex":
            values = _of_hex(feature, batch, values, lengths)
        elif types.is_floating(values.type):
            values = _integers_of_floats(feature, batch, column, values, lengths)
        words = _words(values, hashed)
        keys = words.view(np.int64)
        if keys.size and int(keys.min()) <= RESERVED[1]:
            is_reserved = (keys <= RESERVED[1]) & ~_null_mask(values)
            if is_reserved.any():
                at = int(is_reserved.argmax())
                what = f"key {keys[at]} is reserved: keys start at {RESERVED[1] + 1}"
                raise batch.error(_row(at, lengths), column, what)
        if feature.num_buckets is not None and hashed:
            keys = _bounded(feature, xxh64_words(words.reshape(-1, 1)))
    if values.null_count:
        nulls = _null_mask(values)
        _check_nulls(feature, batch, nulls, column, lengths)
        keys[nulls] = NULL_KEY
    return keys


def _bucketed(feature: Feature, values: Any) -> tuple[Any, NDArray[np.int64]]:
    """Return numbers with NaN as null, and the bucket of each. Integers are compared exactly."""
    if types.is_integer(values.type):
        integers = (values.fill_null(0) if values.null_count else values).to_numpy(zero_copy_only=False)
        limits = np.iinfo(integers.dtype)
        bounds = np.array([math.ceil(bound) for bound in feature.buckets], object)
        below, inner = (bounds <= limits.min).sum(), bounds[(bounds > limits.min) & (bounds <= limits.max)]
        return values, below + np.searchsorted(inner.astype(integers.dtype), integers, side="right").astype(np.int64)
    numbers = np.array(pc.fill_null(values.cast(pa.float64()), np.nan), np.float64)
    buckets = np.searchsorted(np.array(feature.buckets), numbers, side="right").astype(np.int64)
    return pa.array(numbers, from_pandas=True), buckets


def _integers_of_floats(feature: Feature, batch: SourceBatch, column: str, values: Any, lengths: Any) -> Any:
    """Return floats as integers, NaN as null. Raises SourceError for anything but whole numbers."""
    numbers = values.cast(pa.float64()).to_numpy(zero_copy_only=False)  # null becomes NaN
    is_null, limit = np.isnan(numbers), _EXACT_BELOW[values.type]
    numbers = np.where(is_null, 0.0, numbers)
    is_wrong = (np.floor(numbers) != numbers) | (np.abs(numbers) >= limit)
    if is_wrong.any():
        at = int(is_wrong.argmax())
        kind = "floats" if values.type == pa.float64() else "float32" if values.type == pa.float32() else "float16"
        bound = f"{kind} only below 2^{limit.bit_length() - 1}"
        what = f"it is {numbers[at]}, but feature {feature.name!r} needs integers ({bound})"
        raise batch.error(
            _row(at, lengths), column, f"{what}: put integers in the column, or set buckets for the feature"
        )
    return pa.array(numbers.astype(np.int64), mask=is_null)


def _of_hex(feature: Feature, batch: SourceBatch, values: Any, lengths: Any) -> Any:
    """Return hexadecimal text as integers of up to 64 bits. Raises SourceError for other text."""
    if kind_of(values.type) == "null":
        return values
    if types.is_dictionary(values.type):
        values = values.dictionary_decode()
    bytes_, offsets = _spans(values)
    sizes = np.diff(offsets)
    is_null, words = _null_mask(values), np.zeros(len(values), np.uint64)
    is_wrong = ~is_null & ((sizes < 1) | (sizes > 16))
    for place in range(min(16, int(sizes.max(initial=0)))):
        has = np.flatnonzero(sizes > place)
        digits = _HEX_DIGITS[bytes_[offsets[has] + place]]
        is_wrong[has] |= digits > 15
        words[has] = (words[has] << np.uint64(4)) | digits
    is_wrong &= ~is_null  # a null may have bytes
    if is_wrong.any():
        at = int(is_wrong.argmax())
        text = bytes_[offsets[at] : offsets[at + 1]].tobytes().decode("utf-8", "backslashreplace")
        what = f"it is {text!r}, but feature {feature.name!r} needs 1 to 16 hexadecimal digits"
        raise batch.error(_row(at, lengths), feature.columns[0], f'{what}: correct it, or set key = "string"')
    return pa.array(words.view(np.int64), mask=is_null)


_HEX_DIGITS = np.full(256, 255, np.uint64)
for _digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
    _HEX_DIGITS[np.frombuffer(_digits, np.uint8)] = np.arange(16)


def _words(values: Any, hashed: bool) -> NDArray[np.uint64]:
    """Return 8 bytes per value: an integer itself, a string's XXH64; anything for null."""
    if kind_of(values.type) == "null":
        return np.zeros(len(values), np.uint64)
    if types.is_dictionary(values.type):
        if values.null_count == 0:
            words = _words(values.dictionary, hashed)
            indices: NDArray[np.int64] = values.indices.to_numpy(zero_copy_only=False)
            return words[indices]
        return _words(values.dictionary_decode(), hashed)
    if types.is_integer(values.type):
        filled = values.fill_null(0) if values.null_count else values
        integers = filled.to_numpy(zero_copy_only=False)
        signed = np.int64 if np.issubdtype(integers.dtype, np.signedinteger) else np.uint64
        return np.array(integers, signed).view(np.uint64)
    return xxh64_strings(*_spans(values)) if hashed else np.zeros(len(values), np.uint64)


def _spans(values: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the bytes of strings, and (n + 1,) where each begins; a null may have some."""
    is_text = types.is_string(values.type) or types.is_large_string(values.type)
    values = values.cast(pa.large_string() if is_text else pa.large_binary())
    _, offsets, data = values.buffers()
    offsets_N = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
    return np.frombuffer(data if data is not None and data.size else b"\0", np.uint8), offsets_N


def _with_plain_nulls(array: Any) -> Any:
    """Decode a dictionary with a null among its values, which Arrow does not count as null."""
    hides_nulls = types.is_dictionary(array.type) and array.dictionary.null_count > 0
    return array.dictionary_decode() if hides_nulls else array


def _bounded(feature: Feature, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return hashes as keys: modulo the feature's buckets, or all bits; reserved keys move by 2."""
    if feature.num_buckets is not None:
        hashes = hashes % np.uint64(feature.num_buckets)
    keys = hashes.view(np.int64)
    if keys.size and int(keys.min()) <= RESERVED[1]:
        keys[keys <= RESERVED[1]] += 2
    return keys


def _unpack(array: Any) -> tuple[NDArray[np.bool_], NDArray[np.int64], Any]:
    """Return a mask of null lists, the length of each (0 for null), and the values of all others."""
    if types.is_null(array.type):
        return np.ones(len(array), bool), np.zeros(len(array), np.int64), pa.array([], pa.int64())
    lengths = pc.list_value_length(array)
    if array.null_count:
        lengths = pc.if_else(pc.is_valid(array), lengths, 0)
    lengths_N = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    return _null_mask(array), lengths_N, _with_plain_nulls(array.flatten())


def _check_nulls(feature: Feature, batch: SourceBatch, nulls: NDArray[np.bool_], column: str, lengths: Any) -> None:
    if feature.null == "error":
        what = f'it is null, an error for feature {feature.name!r}: set null = "embed" in the schema, or drop the row'
        raise batch.error(_row(int(nulls.argmax()), lengths), column, what)


def _null_mask(values: Any) -> NDArray[np.bool_]:
    return values.is_null().to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _row(at: int, lengths: NDArray[np.int64] | None) -> int:
    """Return the row that value number ``at`` belongs to."""
    return at if lengths is None else int(np.searchsorted(np.cumsum(lengths), at, side="right"))


def _spread(values: NDArray[Any], is_value: NDArray[np.bool_], fill: float) -> NDArray[Any]:
    out = np.full(is_value.size, fill, values.dtype)
    out[is_value] = values
    return out


def key_of(*values: str | bytes | int | None, num_buckets: int | None = None) -> int:
    """Return the int64 key that extraction gives to a value, or to a cross of several values in the schema's order.

    One string or byte string: its hash, the key of a feature with ``key = "string"``. One integer: itself. None, alone
    or in a cross: the key of the null row. ``num_buckets``: as for the feature in the schema, if it has buckets.

    >>> store.lookup("user", np.array([tc.key_of("alice")]))

    Raises ValueError for no value, for fewer than one bucket, for an integer that exceeds 64 bits and for a reserved
    one, TypeError for other types.
    """
    if num_buckets is not None and num_buckets < 1:
        raise ValueError(f"num_buckets is {num_buckets}: it must be at least 1, as in the schema")
    if not values:
        raise ValueError("key_of takes at least one value: a string, an integer, or the values of a cross")
    words = [_word(value) for value in values if value is not None]
    if len(words) < len(values):
        return NULL_KEY
    if len(values) > 1 or (num_buckets and not isinstance(values[0], str | bytes)):
        words = [xxh64(struct.pack(f"<{len(words)}Q", *words))]
    if num_buckets:
        return words[0] % num_buckets
    key = words[0] - (1 << 64) if words[0] >> 63 else words[0]
    if len(values) > 1 or isinstance(values[0], str | bytes):
        return key if key > RESERVED[1] else key + 2  # a hash moves by 2
    if key <= RESERVED[1]:
        raise ValueError(f"key {values[0]} is reserved: keys start at {RESERVED[1] + 1}")
    return key


def _word(value: str | bytes | int) -> int:
    """Return the 64 bits of a value: an integer itself, the hash of a string."""
    if isinstance(value, str | bytes):
        return xxh64(value.encode() if isinstance(value, str) else value)
    number = operator.index(value)
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"{number} does not fit in 64 bits: a key is an integer from -2**63 to 2**63 - 1")
    return number & ((1 << 64) - 1)
