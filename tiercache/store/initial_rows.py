"""Initial rows in NumPy: what a key's row is before it was ever trained (docs/format/bits.md, "Initial rows").

Kernels make the same bits for a training, an order of magnitude faster; test vectors hold the two together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.bits import mix, nearest
from tiercache.store.initializer import Constant, Normal, Uniform, Zeros

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tiercache.store.table import Table

    Words = NDArray[np.uint64]
    Floats = NDArray[np.float32]

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_F = np.float32
_INITIAL_NUMBERS = 1 << 20


def initial_rows(table: Table, keys: NDArray[np.int64]) -> tuple[Floats, ...]:
    """Return the first row of each key (n,) of a table: (n, width) of float32 for each field.

    Vectors are rounded to the nearest of the table's dtype; state begins at its constant. Those of a column slice are
    its columns of the whole ones.
    """
    keys = np.ascontiguousarray(keys, dtype=np.int64)
    vectors = np.empty((keys.size, table.dim), dtype=np.float32)
    step = max(1, _INITIAL_NUMBERS // (table.first_column + table.dim))
    for first in range(0, keys.size, step):
        vectors[first : first + step] = nearest(_vectors(table, keys[first : first + step]), table.dtype)
    states = (np.full((keys.size, field.width), field.initial, dtype=np.float32) for field in table.fields[1:])
    return vectors, *states


def _vectors(table: Table, keys: NDArray[np.int64]) -> Floats:
    dim, columns = table.dim, slice(table.first_column, table.first_column + table.dim)
    match table.initializer:
        case Zeros():
            return np.zeros((keys.size, dim), dtype=np.float32)
        case Constant(value=value):
            return np.full((keys.size, dim), value, dtype=np.float32)
        case Uniform(low=low, high=high):
            return _F(low) + _unit(_words(table, keys)[:, columns]) * _F(_F(high) - _F(low))
        case Normal(mean=mean, std=std):
            return _normal(_words(table, keys), _F(mean), _F(std))[:, columns]


def _words(table: Table, keys: NDArray[np.int64]) -> Words:
    """Return the words of each element up to the table's last column: (n, these rounded up to whole blocks)."""
    blocks = -(-(table.first_column + table.dim) // 4)
    stream = int(mix(np.array([table.seed ^ table.table_id], np.uint64))[0])
    counters = keys.view(np.uint64)[:, None], np.arange(blocks, dtype=np.uint64)[None, :]
    key, block = np.broadcast_arrays(*counters)
    words = _philox(key & _LOW, key >> _HALF, block & _LOW, block >> _HALF, stream & 0xFFFFFFFF, stream >> 32)
    return np.stack(words, axis=-1).reshape(keys.size, 4 * blocks)


def _philox(c0: Words, c1: Words, c2: Words, c3: Words, k0: int, k1: int) -> tuple[Words, Words, Words, Words]:
    """Return the four words of Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011) of each counter."""
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (p1 >> _HALF) ^ c1 ^ np.uint64(k0), p1 & _LOW
        c2, c3 = (p0 >> _HALF) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _unit(words: Words) -> Floats:
    return (words >> np.uint64(8)).astype(np.float32) * _F(2.0**-24)


def _normal(words: Words, mean: np.float32, deviation: np.float32) -> Floats:
    """Return pairs of numbers by Box and Muller, from pairs of neighboring words."""
    first, second = words[:, 0::2], words[:, 1::2]
    # the first uniform is in (0, 1], so that its logarithm is finite
    unit = ((first >> np.uint64(8)).astype(np.int64) + 1).astype(np.float32) * _F(2.0**-24)
    radius = deviation * np.sqrt(_F(-2) * _log(unit))
    sine, cosine = _sine_cosine(_unit(second))
    out = np.empty(words.shape, dtype=np.float32)
    out[:, 0::2], out[:, 1::2] = mean + radius * cosine, mean + radius * sine
    return out


def _log(x: Floats) -> Floats:
    """Return the natural logarithm of numbers in (0, 1], by the series of the format."""
    pattern = x.view(np.int32) - np.int32(0x3F3504F3)  # mantissa from sqrt(1/2) to sqrt(2)
    exponent = (pattern >> np.int32(23)).astype(np.float32)
    mantissa = ((pattern & np.int32(0x7FFFFF)) + np.int32(0x3F3504F3)).view(np.float32)
    s = (mantissa - _F(1)) / (mantissa + _F(1))
    z = s * s
    series = z * (_F(1 / 3) + z * (_F(1 / 5) + z * (_F(1 / 7) + z * _F(1 / 9))))
    logarithm: Floats = exponent * _F(0.6931471805599453) + _F(2) * (s + s * series)
    return logarithm


def _sine_cosine(turn: Floats) -> tuple[Floats, Floats]:
    """Return sine and cosine of numbers in [0, 1) that count turns, by the series of the format."""
    quarters = turn * _F(4)
    quarter = (quarters + _F(0.5)).astype(np.int32)
    x = (quarters - quarter.astype(np.float32)) * _F(1.5707963267948966)
    z = x * x
    sine = _F(-1 / 6) + z * (_F(1 / 120) + z * (_F(-1 / 5040) + z * _F(1 / 362880)))
    sine = x + x * (z * sine)
    cosine = _F(1 / 24) + z * (_F(-1 / 720) + z * (_F(1 / 40320) - z * _F(1 / 3628800)))
    cosine = _F(1) - _F(0.5) * z + (z * z) * cosine
    swap = (quarter & 1) != 0
    first, second = np.where(swap, cosine, sine), np.where(swap, sine, cosine)
    first = np.where((quarter & 2) != 0, -first, first)
    return first, np.where(((quarter + 1) & 2) != 0, -second, second)
