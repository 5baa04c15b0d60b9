"""Initial rows from a counter-based generator: the same bits in any order (docs/format/bits.md, "Bits").

Serial and without the GIL: the reader thread makes rows that are used for the first time.
"""

import numpy as np

from tiercache.kernels.arrays import F4, I8, Matrix, Single, Word, Written, same_length
from tiercache.kernels.cpu.compile import inlined, serial
from tiercache.kernels.cpu.hashing import mix

__all__ = ["CONSTANT", "NORMAL", "UNIFORM", "ZEROS", "initial_rows"]

ZEROS, CONSTANT, UNIFORM, NORMAL = range(4)

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@inlined
def _philox(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    for _ in range(10):
        p0, p1 = (c0 & _LOW) * np.uint64(0xD2511F53), (c2 & _LOW) * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _LOW, (k1 + np.uint64(0xBB67AE85)) & _LOW
    return c0, c1, c2, c3


@inlined
def _unit(word):  # type: ignore[no-untyped-def]
    # np.int64 because CPUs turn signed integers into floats in one instruction
    return np.float32(np.int64(word >> np.uint64(8))) * np.float32(2.0**-24)


@inlined
def _uniform_words(key, block, k0, k1):  # type: ignore[no-untyped-def]
    return _philox(key & _LOW, key >> _HALF, block & _LOW, block >> _HALF, k0, k1)


@inlined
def _log(x):  # type: ignore[no-untyped-def]
    """Return the natural logarithm of a float32 in (0, 1]: own arithmetic, so that it vectorizes and has fixed bits."""
    pattern = np.int32(np.float32(x).view(np.int32) - np.int32(0x3F3504F3))  # mantissa from sqrt(1/2) to sqrt(2)
    exponent = np.float32(pattern >> np.int32(23))
    mantissa = np.int32((pattern & np.int32(0x7FFFFF)) + np.int32(0x3F3504F3)).view(np.float32)
    one = np.float32(1)
    s = (mantissa - one) / (mantissa + one)
    z = s * s
    series = z * (np.float32(1 / 3) + z * (np.float32(1 / 5) + z * (np.float32(1 / 7) + z * np.float32(1 / 9))))
    return exponent * np.float32(0.6931471805599453) + np.float32(2) * (s + s * series)


@inlined
def _sine_cosine(turn):  # type: ignore[no-untyped-def]
    """Return sine and cosine of a float32 in [0, 1) that counts turns."""
    quarters = turn * np.float32(4)
    quarter = np.int32(quarters + np.float32(0.5))
    x = (quarters - np.float32(quarter)) * np.float32(1.5707963267948966)
    z = x * x
    sine = np.float32(-1 / 6) + z * (np.float32(1 / 120) + z * (np.float32(-1 / 5040) + z * np.float32(1 / 362880)))
    sine = x + x * (z * sine)
    cosine = np.float32(1 / 24) + z * (np.float32(-1 / 720) + z * (np.float32(1 / 40320) - z * np.float32(1 / 3628800)))
    cosine = np.float32(1) - np.float32(0.5) * z + (z * z) * cosine
    swap = (quarter & np.int32(1)) != 0
    first, second = (cosine if swap else sine), (sine if swap else cosine)
    first = -first if (quarter & np.int32(2)) != 0 else first
    return first, (-second if ((quarter + np.int32(1)) & np.int32(2)) != 0 else second)


@inlined
def _pair(first, second, mean, deviation):  # type: ignore[no-untyped-def]
    # Box-Muller; the first uniform is in (0, 1], so that its logarithm is finite
    unit = np.float32(np.int64(first >> np.uint64(8)) + 1) * np.float32(2.0**-24)
    radius = deviation * np.sqrt(np.float32(-2) * _log(unit))
    sine, cosine = _sine_cosine(_unit(second))
    return mean + radius * cosine, mean + radius * sine


@serial
def _uniform_rows(keys: I8, stream: Word, low: Single, span: Single, out: Written[Matrix[F4]]) -> None:
    k0, k1, dim = stream & _LOW, stream >> _HALF, out.shape[1]
    for i in range(keys.size):
        key, row = np.uint64(keys[i]), out[i]
        for block in range(dim // 4):
            words = _uniform_words(key, np.uint64(block), k0, k1)
            at = 4 * block
            row[at] = low + _unit(words[0]) * span
            row[at + 1] = low + _unit(words[1]) * span
            row[at + 2] = low + _unit(words[2]) * span
            row[at + 3] = low + _unit(words[3]) * span
        if dim % 4:
            words = _uniform_words(key, np.uint64(dim // 4), k0, k1)
            for j in range(dim % 4):
                row[dim - dim % 4 + j] = low + _unit(words[j]) * span


@serial
def _normal_rows(keys: I8, stream: Word, mean: Single, deviation: Single, out: Written[Matrix[F4]]) -> None:
    k0, k1, dim = stream & _LOW, stream >> _HALF, out.shape[1]
    for i in range(keys.size):
        key, row = np.uint64(keys[i]), out[i]
        for block in range(dim // 4):
            words = _uniform_words(key, np.uint64(block), k0, k1)
            at = 4 * block
            row[at], row[at + 1] = _pair(words[0], words[1], mean, deviation)
            row[at + 2], row[at + 3] = _pair(words[2], words[3], mean, deviation)
        if dim % 4:
            words = _uniform_words(key, np.uint64(dim // 4), k0, k1)
            first, second = _pair(words[0], words[1], mean, deviation), _pair(words[2], words[3], mean, deviation)
            rest = (first[0], first[1], second[0])
            for j in range(dim % 4):
                row[dim - dim % 4 + j] = rest[j]


def initial_rows(keys: I8, table_id: int, seed: int, kind: int, a: float, b: float, out: Matrix[F4]) -> None:
    """Write the initial vector of each key to `out` (n, dim).

    `kind` is ZEROS, CONSTANT (a), UNIFORM (low a, high b) or NORMAL (mean a, standard deviation b). A row depends only
    on table, seed and key. NORMAL is made only here; the others have the same bits on every device.
    """
    same_length(keys=keys, out=out)
    stream = mix((seed ^ table_id) & ((1 << 64) - 1))
    if kind in (ZEROS, CONSTANT):
        out[:] = a if kind == CONSTANT else 0.0
    elif kind == UNIFORM:
        low = np.float32(a)
        _uniform_rows(keys, stream, a, float(np.float32(b) - low), out)
    elif kind == NORMAL:
        _normal_rows(keys, stream, a, b, out)
    else:
        raise ValueError(f"unknown initializer kind {kind}: expected 0 zeros, 1 constant, 2 uniform, 3 normal.")
