"""Values of NumPy, torch, pandas, Polars and Python as Arrow arrays: one conversion for all readers."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

CONVERSION_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError)
"""The exceptions that ``arrow_array`` and ``list_array`` raise for values they cannot convert."""

_ARROW = pa.Array, pa.ChunkedArray


def arrow_array(value: Any) -> Any:
    """Return a column as an Arrow array: a matrix and a nested tensor as lists; masked, None and NaT as null.

    NaN stays NaN, except in pandas, where it means null. Big-endian numbers are swapped. Raises an error of
    ``CONVERSION_ERRORS`` that names the dtype.
    """
    if isinstance(value, pa.Array):
        return value
    if isinstance(value, pa.ChunkedArray):
        return value.combine_chunks() if value.num_chunks != 1 else value.chunk(0)
    if hasattr(value, "to_arrow"):  # Polars
        return arrow_array(value.to_arrow())
    if hasattr(value, "iloc"):
        return _of_pandas(value)
    if getattr(value, "is_nested", False):
        return _of_parts([*value.detach().unbind()])
    value = numpy_values(value)
    if isinstance(value, list | tuple):
        return _of_list(value)
    if isinstance(value, np.ndarray):
        return _of_numpy(value)
    if isinstance(value, str | bytes | bytearray | Mapping | AbstractSet) or not hasattr(value, "__len__"):
        raise TypeError(f"one {type(value).__name__} instead of the values of all samples of a batch")
    return pa.array(value)


def list_array(values: Any, offsets: NDArray[np.int64]) -> Any:
    """Return values as lists that begin at the offsets, including the last. Raises ``CONVERSION_ERRORS``."""
    values = numpy_values(values)
    if isinstance(values, np.ndarray) and values.ndim != 1:
        raise ValueError(f"the values of the lists have shape {values.shape}: expected one dimension")
    array = arrow_array(values)
    if not offsets.size or offsets[0] != 0 or offsets[-1] != len(array) or (np.diff(offsets) < 0).any():
        seen = f"{offsets[:5].tolist()}{'...' if offsets.size > 5 else ''}"
        raise ValueError(f"offsets {seen} do not go from 0 to the number of values, {len(array)}, without decreasing")
    return pa.LargeListArray.from_arrays(pa.array(offsets), array)


def offsets_of(value: Any) -> NDArray[np.int64]:
    """Return offsets as an array (n,) of int64. Raises ``CONVERSION_ERRORS`` for anything but integers."""
    array = numpy_values(value)
    if np.ma.is_masked(array):
        raise ValueError("offsets have masked values: expected integers")
    array = np.asarray(array)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"offsets are {array.dtype} of shape {array.shape}: expected integers in one dimension")
    return array.astype(np.int64)


def numpy_values(value: Any) -> Any:
    """Return a tensor as an array, a masked one as a masked array, and anything else unchanged. Raises TypeError."""
    if not hasattr(value, "detach"):
        return value
    if hasattr(value, "get_mask"):  # torch.masked
        return np.ma.array(numpy_values(value.get_data()), mask=~numpy_values(value.get_mask()))
    if str(value.layout) != "torch.strided":
        raise TypeError(f"a tensor of layout {value.layout}: pass values and offsets, or a dense tensor")
    try:
        return value.detach().cpu().resolve_conj().resolve_neg().numpy()
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            f"a {type(value).__name__} of {value.dtype} on {value.device} cannot become an array ({error}): cast keys "
            "to int64 and other numbers to float32"
        ) from error


def _of_pandas(series: Any) -> Any:
    if series.ndim != 1:
        raise TypeError(f"a data frame of {series.shape[1]} columns instead of one: name each column once")
    if str(series.dtype).startswith("Sparse"):
        series = series.sparse.to_dense()
    if isinstance(series.dtype, np.dtype):
        return _of_numpy(series.to_numpy(), is_nan_null=True)
    return arrow_array(pa.array(series, from_pandas=True))


def _of_numpy(array: NDArray[Any], *, is_nan_null: bool = False) -> Any:
    if array.ndim not in (1, 2):
        raise ValueError(f"an array of {array.dtype} of shape {array.shape}: expected one or two dimensions")
    if array.dtype.names is not None:
        raise TypeError(f"an array of {array.dtype}: make each of its fields a column")
    mask = np.ma.getmaskarray(array).reshape(-1) if isinstance(array, np.ma.MaskedArray) else None
    flat = np.ma.getdata(array).reshape(-1)
    if not flat.dtype.isnative:
        flat = flat.astype(flat.dtype.newbyteorder("="))
    try:
        if flat.dtype.kind == "O" and _has_arrays(flat):
            if is_nan_null:  # pandas has NaN, NA or None among lists
                mask = np.array([not hasattr(one, "__len__") for one in flat], bool)
            values = _of_list([None if mask is not None and mask[i] else one for i, one in enumerate(flat)])
        else:
            values = _of_values(flat, mask=mask, from_pandas=is_nan_null)
    except CONVERSION_ERRORS as error:
        raise TypeError(f"an array of {array.dtype} cannot become an Arrow array ({error})") from error
    if array.ndim == 1:
        return values
    if array.shape[1] == 0:
        return pa.LargeListArray.from_arrays(pa.array(np.zeros(len(array) + 1, np.int64)), values)
    return pa.FixedSizeListArray.from_arrays(values, array.shape[1])


def _of_list(values: Sequence[Any]) -> Any:
    if _has_arrays(values):
        values = [_scalar(one) for one in values]
        if _has_arrays(values):
            return _of_parts(values)
    rows = [row for row in values if isinstance(row, list | tuple)]
    if _has_arrays(chain.from_iterable(rows)):
        values = [[_scalar(one) for one in row] if isinstance(row, list | tuple) else row for row in values]
    return _of_values(values)


def _of_values(values: Any, **options: Any) -> Any:
    """Return plain values, or lists of them, in the type that Arrow infers, or as uint64 for integers from 2^63 on."""
    try:
        return pa.array(values, **options)
    except OverflowError:
        kind = pa.list_(pa.uint64()) if any(isinstance(one, list | tuple) for one in values) else pa.uint64()
    try:
        return pa.array(values, kind, **options)
    except OverflowError:
        raise OverflowError("integers go beyond 64 bits, or there are some from 2^63 on and negative ones") from None


def _has_arrays(values: Iterable[Any]) -> bool:
    """Return True if a value is an array or tensor of any library, zero-dimensional ones included."""
    kinds = set(map(type, values))
    return any(
        (hasattr(kind, "ndim") or issubclass(kind, _ARROW)) and not issubclass(kind, np.generic) for kind in kinds
    )


def _scalar(value: Any) -> Any:
    """Return a zero-dimensional array or tensor as its number, and anything else unchanged."""
    if value is np.ma.masked:
        return None
    return value.item() if getattr(value, "ndim", None) == 0 and not isinstance(value, np.generic) else value


def _of_parts(parts: Sequence[Any]) -> Any:
    """Return arrays as lists, None as a null list."""
    arrays = [None if part is None else arrow_array(part) for part in parts]
    present = [array for array in arrays if array is not None]
    full = [array for array in present if len(array)] or present[:1]  # an empty array may have any type
    if full:
        merged = pa.unify_schemas([pa.schema([("", a.type)]) for a in full], promote_options="permissive").field(0).type
        values = pa.concat_arrays([array.cast(merged) for array in full])
    else:
        values = pa.nulls(0)
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([0 if array is None else len(array) for array in arrays], out=offsets[1:])
    is_null = pa.array([array is None for array in arrays], pa.bool_())
    return pa.LargeListArray.from_arrays(pa.array(offsets), values, mask=is_null)


_LARGEST = 1 << 64


class BadValueError(ValueError):
    """A value of an array cannot be converted."""

    def __init__(self, at: int, what: str) -> None:
        super().__init__(what)
        self.at = at


def plain_type(kind: Any, uses: AbstractSet[str]) -> Any:
    """Return the type that ``plain_array`` gives a column with these uses: decimals as keys int64, or uint64 beyond."""
    if isinstance(kind, pa.BaseExtensionType):
        return _EXTENSIONS.get(kind.extension_name, kind)
    if types.is_run_end_encoded(kind):
        return plain_type(kind.value_type, uses)
    if types.is_dictionary(kind):
        value = plain_type(kind.value_type, uses)
        stays = value == kind.value_type and _is_key(value) and not uses & {"number", "own"}
        return kind if stays else value
    if is_list(kind):
        value = plain_type(kind.value_type, uses)
        is_view = types.is_list_view(kind) or types.is_large_list_view(kind)
        return pa.large_list(value) if is_view or value != kind.value_type else kind
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary_view(kind) or types.is_fixed_size_binary(kind):
        return pa.large_binary()
    if types.is_decimal(kind) and uses & {"integer", "part"}:
        return pa.int64()
    return kind


def plain_array(array: Any, uses: AbstractSet[str]) -> Any:
    """Return an array in its plain type. Raises BadValueError for a decimal that is not a 64-bit integer."""
    kind, target = array.type, plain_type(array.type, uses)
    if target == kind:
        return array
    if isinstance(kind, pa.BaseExtensionType):
        return _uuid_texts(array.storage) if kind.extension_name == "arrow.uuid" else array.storage.cast(target)
    if types.is_run_end_encoded(kind):
        return plain_array(pc.run_end_decode(array), uses)
    if types.is_dictionary(kind):
        values = plain_array(array.dictionary, uses)
        return pa.DictionaryArray.from_arrays(array.indices, values).dictionary_decode()
    if is_list(kind):
        offsets = np.zeros(len(array) + 1, np.int64)
        np.cumsum(pc.fill_null(pc.list_value_length(array), 0), out=offsets[1:])
        try:
            values = plain_array(array.flatten(), uses)
        except BadValueError as error:
            raise BadValueError(int(np.searchsorted(offsets, error.at, side="right")) - 1, str(error)) from error
        return pa.LargeListArray.from_arrays(pa.array(offsets), values, mask=array.is_null())
    return _integers(array) if types.is_decimal(kind) else array.cast(target)


def is_list(kind: Any) -> bool:
    """Return True for every type of lists."""
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


_EXTENSIONS = {"arrow.uuid": pa.large_string(), "arrow.json": pa.large_string(), "arrow.bool8": pa.bool_()}


def _is_key(kind: Any) -> bool:
    is_text = types.is_string(kind) or types.is_large_string(kind)
    return bool(is_text or types.is_integer(kind) or types.is_binary(kind) or types.is_large_binary(kind))


def as_64_bits(array: Any) -> Any:
    """Return an array as int64, or as uint64 if it does not fit; None if it fits neither."""
    for kind in (pa.int64(), pa.uint64()):
        with suppress(pa.ArrowInvalid):
            return array.cast(kind)
    return None


def _integers(decimals: Any) -> Any:
    """Return decimals as int64, or as uint64 if some exceed it: all 64 bits are exact."""
    wide = decimals.cast(pa.decimal256(76, decimals.type.scale))
    if (found := as_64_bits(wide)) is not None:
        return found
    values = wide.to_pylist()
    for at, value in enumerate(values):
        if value is not None and not (value == value.to_integral_value() and -_LARGEST // 2 <= value < _LARGEST):
            raise BadValueError(at, f"it is {value}, but keys are integers from -2^63 to 2^64 - 1: correct it")
    words = np.array([0 if value is None else int(value) % _LARGEST for value in values], np.uint64)
    return pa.array(words.view(np.int64), mask=wide.is_null().to_numpy(zero_copy_only=False))


def _uuid_texts(storage: Any) -> Any:
    """Return UUIDs (16 bytes each) as their canonical strings: lower case, with hyphens."""
    is_null = storage.is_null().to_numpy(zero_copy_only=False)
    data = b"".join(bytes(16) if one is None else one for one in storage.to_pylist())
    bytes_NB = np.frombuffer(data, np.uint8).reshape(-1, 16)
    texts_NL = np.full((len(bytes_NB), 36), ord("-"), np.uint8)
    texts_NL[:, _HIGH] = _DIGITS[bytes_NB >> 4]
    texts_NL[:, _HIGH + 1] = _DIGITS[bytes_NB & 15]
    offsets: NDArray[np.int64] = np.arange(len(bytes_NB) + 1, dtype=np.int64) * 36
    valid = None if not is_null.any() else pa.array(~is_null).buffers()[1]
    buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(texts_NL))]
    return pa.Array.from_buffers(pa.large_string(), len(bytes_NB), buffers)


_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)
_HIGH = np.array([0, 2, 4, 6, 9, 11, 14, 16, 19, 21, 24, 26, 28, 30, 32, 34])
"""Offsets of the two digits of each byte."""
