"""Bits of the format: table ids (XXH64 of a name), key order (splitmix64's finalizer), and 16-bit vectors.

These lines are part of the format (docs/format/bits.md); kernels hold the same functions for numba, and test vectors
hold the two together. Slow for long bytes: names are short, and columns of strings go through kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Bits = NDArray[np.uint16]


HASHES = 1 << 64
"""The number of possible hashes."""
_MASK = HASHES - 1
_PRIME1, _PRIME2, _PRIME3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME4, _PRIME5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5


def xxh64(data: bytes, seed: int = 0) -> int:
    """Return XXH64 (Y. Collet, xxHash specification 0.1.1) of ``data``, an unsigned 64-bit number."""
    length, at = len(data), 0
    if length >= 32:
        lanes = [(seed + _PRIME1 + _PRIME2) & _MASK, (seed + _PRIME2) & _MASK, seed & _MASK, (seed - _PRIME1) & _MASK]
        while at + 32 <= length:
            for i in range(4):
                lanes[i] = _round(lanes[i], int.from_bytes(data[at + 8 * i : at + 8 * i + 8], "little"))
            at += 32
        value = sum(_rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & _MASK
        for lane in lanes:
            value = ((value ^ _round(0, lane)) * _PRIME1 + _PRIME4) & _MASK
    else:
        value = (seed + _PRIME5) & _MASK
    value = (value + length) & _MASK
    while at + 8 <= length:
        value ^= _round(0, int.from_bytes(data[at : at + 8], "little"))
        value = (_rotate(value, 27) * _PRIME1 + _PRIME4) & _MASK
        at += 8
    if at + 4 <= length:
        value ^= (int.from_bytes(data[at : at + 4], "little") * _PRIME1) & _MASK
        value = (_rotate(value, 23) * _PRIME2 + _PRIME3) & _MASK
        at += 4
    for byte in data[at:]:
        value ^= (byte * _PRIME5) & _MASK
        value = (_rotate(value, 11) * _PRIME1) & _MASK
    value = ((value ^ (value >> 33)) * _PRIME2) & _MASK
    value = ((value ^ (value >> 29)) * _PRIME3) & _MASK
    return value ^ (value >> 32)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return splitmix64's finalizer (Steele, Lea, Flood, 2014) of each value: a bijection of 64-bit numbers."""
    mixed = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def hash_keys(keys: NDArray[np.int64], table_id: int) -> NDArray[np.uint64]:
    """Return the hash of each key of a table. Unsigned, it defines the hash order."""
    return mix(np.ascontiguousarray(keys, dtype=np.int64).view(np.uint64) ^ np.uint64(table_id))


def hash_runs(keys: NDArray[np.int64], table_ids: NDArray[np.uint64], counts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the hash of each key (n,): the first ``counts[0]`` are of the table ``table_ids[0]``, and so on."""
    return mix(keys.view(np.uint64) ^ np.repeat(table_ids, counts))


def keys_of(hashes: NDArray[np.uint64], table_id: int) -> NDArray[np.int64]:
    """Return the key of each hash of a table: the inverse of ``hash_keys``."""
    mixed = hashes ^ (hashes >> np.uint64(31)) ^ (hashes >> np.uint64(62))
    mixed *= np.uint64(0x319642B2D24D8EC3)
    mixed ^= (mixed >> np.uint64(27)) ^ (mixed >> np.uint64(54))
    mixed *= np.uint64(0x96DE1B173F119089)
    mixed ^= (mixed >> np.uint64(30)) ^ (mixed >> np.uint64(60)) ^ np.uint64(table_id)
    keys: NDArray[np.int64] = mixed.view(np.int64)
    return keys


def _rotate(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (64 - bits))) & _MASK


def _round(lane: int, word: int) -> int:
    return (_rotate((lane + word * _PRIME2) & _MASK, 31) * _PRIME1) & _MASK


ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""By dtype of a vector: bytes of a number."""


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
        sign, payload = bits >> np.uint32(16) & np.uint32(0x8000), bits >> np.uint32(13) & np.uint32(0x3FF)
        nan = sign | payload | np.uint32(0x7E00)
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
