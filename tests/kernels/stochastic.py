"""Random words, rounding and orders in slow obvious Python: the definitions of docs/format/bits.md."""

import numpy as np
from numpy.typing import NDArray

MASK, ALL = 0xFFFFFFFF, (1 << 64) - 1
AWKWARD = (
    0x00000000, 0x80000000, 0x00000001, 0x0003A5C1, 0x33000000, 0x33000001, 0xB3800000, 0x33C00000, 0x34200000,
    0x387FC000, 0x387FE000, 0x387FFFFF, 0x38800000, 0x38801000, 0x38803000, 0x3F800000, 0x3F801000, 0x3F808000,
    0x3F818000, 0x3F803000, 0x477FE000, 0x477FEFFF, 0xC77FF000, 0x47800000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF,
    0x7F800000, 0xFF800000,
)  # fmt: skip
"""float32 bits: zeros, subnormals of both, ties, the ends of float16 and bfloat16, infinities."""


def mix(x: int) -> int:
    x &= ALL
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & ALL
    x = (x ^ x >> 27) * 0x94D049BB133111EB & ALL
    return x ^ x >> 31


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the words of Philox4x32-10, written out from the paper."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ k, q & MASK, (p >> 32) ^ d ^ m, p & MASK
        k, m = (k + 0x9E3779B9) & MASK, (m + 0xBB67AE85) & MASK
    return a, b, c, d


def random_bits(table_id: int, seed: int, key: int, step: int, dim: int) -> NDArray[np.uint32]:
    """Return 16 random bits for each number of a row."""
    stream = (key & ALL) ^ mix(seed ^ table_id)
    words = mix(step)
    out: list[int] = []
    for block in range(-(-dim // 8)):
        for word in philox((stream & MASK, stream >> 32, block, 1 << 31), (words & MASK, words >> 32)):
            out += [word & 0xFFFF, word >> 16]
    return np.array(out[:dim], np.uint32)


def rounded(value: np.float32, noise: int, dtype: str) -> int:
    """Return the bits of a number rounded to a 16-bit dtype by 16 random bits."""
    bits = int(np.float32(value).view(np.uint32))
    sign, size = bits >> 16 & 0x8000, bits & 0x7FFFFFFF
    if dtype == "bfloat16":
        if size > 0x7F800000:
            return sign | size >> 16 | 0x40
        return sign | (size if size == 0x7F800000 else size + noise) >> 16
    if size > 0x7F800000:
        return sign | 0x7E00 | (size >> 13 & 0x3FF)
    if size < 0x38800000:  # below 2^-14: in steps of 2^-24
        steps = int(float(np.uint32(size).view(np.float32)) * 2.0**40)
        return sign | (steps + noise) >> 16
    return sign | min(((size + (noise >> 3)) >> 13) - (112 << 10), 0x7C00)


def row_words(key: int, table_id: int, seed: int, dim: int) -> list[int]:
    stream = mix(seed ^ table_id)
    key &= ALL
    words: list[int] = []
    for block in range(-(-dim // 4)):
        words += philox((key & MASK, key >> 32, block & MASK, block >> 32), (stream & MASK, stream >> 32))
    return words[:dim]


def sample_at(place: int, count: int, state: int) -> int:
    """Return the sample at a position of the order of ``count`` samples given by a state."""
    bits = next(b for b in range(8, 65) if 2**b >= count)
    high_size, low_size = 2 ** (bits // 2), 2 ** ((bits + 1) // 2)
    keys = [mix(state + j * 0x9E3779B97F4A7C15) for j in range(1, 7)]
    while True:
        high, low = divmod(place, low_size)
        for j in (0, 2, 4):
            high = (high ^ mix(low ^ keys[j])) % high_size
            low = (low ^ mix(high ^ keys[j + 1])) % low_size
        place = high * low_size + low
        if place < count:
            return place
