"""Vectors of 16-bit dtypes: their bits, and the 4-byte words in which every row is kept (docs/format, "Row dtypes").

A row is a number of whole words: the vector in its dtype, padded with zero bytes to a word, then the optimizer state in
float32. What moves rows moves words; what gives them to a caller, or takes them, converts here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tiercache.store.optimizer import Field

    Floats = NDArray[np.float32]
    Bits = NDArray[np.uint16]

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""By dtype of a vector: bytes of a number."""
_BATCH_NUMBERS = 1 << 16


def vector_words(dim: int, dtype: str) -> int:
    """Return the words of a vector."""
    return -(-dim * ITEM_BYTES[dtype] // 4)


def to_bits(values: Floats, dtype: str) -> Bits:
    """Round float32 numbers to the nearest of a 16-bit dtype, ties to even; NaN becomes quiet, with its upper bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    is_nan = np.isnan(values)
    if dtype == "float16":
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            out = np.ascontiguousarray(values, np.float32).astype(np.float16).view(np.uint16)
        nan = (
            (bits >> np.uint32(16) & np.uint32(0x8000)) | (bits >> np.uint32(13) & np.uint32(0x3FF)) | np.uint32(0x7E00)
        )
    else:
        out = (bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
        nan = bits >> np.uint32(16) | np.uint32(0x0040)
    out[is_nan] = nan[is_nan]
    return out


def from_bits(bits: Bits, dtype: str) -> Floats:
    """Return the numbers of a 16-bit dtype as float32, exactly."""
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def nearest(values: Floats, dtype: str) -> Floats:
    """Round float32 numbers to the nearest of a dtype, as float32."""
    return values if dtype == "float32" else from_bits(to_bits(values, dtype), dtype)


def row_beyond(values: Floats, dtype: str) -> int | None:
    """Return the first row of (n, width) with a finite number that rounds to infinity in a dtype, or None."""
    if dtype == "float32":
        return None
    largest = np.max(np.abs(values), where=np.isfinite(values), initial=0)
    if np.isfinite(nearest(np.array([largest], np.float32), dtype)[0]):
        return None
    is_beyond = np.isinf(nearest(values, dtype)) & np.isfinite(values)
    return int(np.argmax(is_beyond.any(axis=1)))


def to_words(field: Field, values: Floats, out: Floats) -> None:
    """Write one field's numbers (n, width) of float32 to its words (n, words), rounded to the nearest of its dtype."""
    if field.dtype == "float32":
        out[:] = values
        return
    step = max(1, _BATCH_NUMBERS // field.width)
    for low in range(0, values.shape[0], step):
        bits = np.zeros((values[low : low + step].shape[0], 2 * field.words), np.uint16)
        bits[:, : field.width] = to_bits(values[low : low + step], field.dtype)
        out[low : low + step].view(np.uint32)[:] = bits.view(np.uint32)


def row_words(fields: Sequence[Field], values: Sequence[Floats], changed: int | None = None) -> Floats:
    """Return whole rows (n, words of all fields) from the numbers (n, width) of each field.

    changed: the commit that changed them last, for a word more at the end of each.
    """
    words, at = sum(field.words for field in fields), 0
    out = np.empty((values[0].shape[0], words + (changed is not None)), np.float32)
    out[:, words:].view(np.uint32)[:] = changed or 0
    for field, numbers in zip(fields, values, strict=True):
        to_words(field, numbers, out[:, at : at + field.words])
        at += field.words
    return out


def from_words(fields: Sequence[Field], words: Sequence[Floats]) -> tuple[Floats, ...]:
    """Return the numbers (n, width) of each field from its words (n, words): float32 fields are passed on."""
    return tuple(
        values
        if field.dtype == "float32"
        else from_bits(np.ascontiguousarray(values).view(np.uint16)[:, : field.width], field.dtype)
        for field, values in zip(fields, words, strict=True)
    )
