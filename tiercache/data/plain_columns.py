"""Columns of any Arrow type in the types that keys and numbers are made of.

Views, run ends, UUIDs, decimals and fixed-size bytes end here: what encodes knows integers, floats, bools, strings,
bytes, dictionaries of keys, and lists of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from numpy.typing import NDArray

_LARGEST = 1 << 64


class BadValueError(ValueError):
    """A value of an array cannot be converted."""

    def __init__(self, at: int, what: str) -> None:
        super().__init__(what)
        self.at = at
        """Its place in the array."""


def plain_type(kind: Any, uses: AbstractSet[str]) -> Any:
    """Return the type that ``plain_array`` gives a column that is used so; the type itself if it stays.

    Decimals that are integer keys become int64, or uint64 beyond it.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return _EXTENSIONS.get(kind.extension_name, kind)
    if types.is_run_end_encoded(kind):
        return plain_type(kind.value_type, uses)
    if types.is_dictionary(kind):
        value = plain_type(kind.value_type, uses)
        stays = value == kind.value_type and _is_key(value) and "number" not in uses
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
    """Return an array in its plain type. Raises BadValueError for a decimal that is no integer of 64 bits."""
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


def _integers(decimals: Any) -> Any:
    """Return decimals as int64, or as uint64 if some lie beyond it: they keep their 64 bits."""
    wide = decimals.cast(pa.decimal256(76, decimals.type.scale))
    for kind in (pa.int64(), pa.uint64()):
        try:
            return wide.cast(kind)
        except pa.ArrowInvalid:
            continue
    values = wide.to_pylist()
    for at, value in enumerate(values):
        if value is not None and not (value == value.to_integral_value() and -_LARGEST // 2 <= value < _LARGEST):
            raise BadValueError(at, f"it is {value}, but keys are integers from -2^63 to 2^64 - 1: correct it")
    words = np.array([0 if value is None else int(value) % _LARGEST for value in values], np.uint64)
    return pa.array(words.view(np.int64), mask=wide.is_null().to_numpy(zero_copy_only=False))


def _uuid_texts(storage: Any) -> Any:
    """Return UUIDs (16 bytes each) as their canonical texts: lower case, with hyphens."""
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
"""Where the two digits of each byte begin."""
